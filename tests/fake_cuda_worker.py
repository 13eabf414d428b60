"""Trains under many plans on the device of ``fake_cuda``, and compares with plain steps on the
processor.

``fake_cuda_worker.py LIBRARY OUT CASE…``, a case being ``WORKERS/PLAN/PRECISION``. The ranks of a
case are forks of one process; OUT gets a line for each rank and case.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import fake_cuda

fake_cuda.load(Path(sys.argv[1]))  # before torch is imported


import torch
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import ronde
from processes import free_port, rank_variables

WIDTH, BATCH, STEPS = 16, 8, 7
FREE = range(5, 7)
"""Steps that must not wait for the device: earlier ones check the loss, the plan and the workers."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = (
            nn.LayerNorm(WIDTH),
            nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)),
        )
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x):
        q, k, v = (p(self.norm(x)).unflatten(-1, (4, 4)).transpose(1, 2) for p in self.qkv)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(h.transpose(1, 2).flatten(-2))
        seen.append((self.up.weight.device, x.dtype, h.dtype))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(11, WIDTH), nn.Parameter(torch.zeros(6, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 11)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x):
        h = (self.embed(x) + self.place) * self.scale
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


seen: list[tuple] = []


def loss(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def weighed(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum"), target.numel()


def allow(plan: str) -> None:
    """Waits that are meant: torch's scaler reads whether a gradient overflowed, and what is
    offloaded must have arrived in the host's memory.
    """
    step = torch.amp.GradScaler._maybe_opt_step

    def may_read(*args: Any, **kwargs: Any) -> Any:
        with fake_cuda.strict(False):
            return step(*args, **kwargs)

    torch.amp.GradScaler._maybe_opt_step = may_read
    if "offload" in plan:
        for kind in (fake_cuda.Stream, fake_cuda.Event):
            kind.synchronize = lambda self: None


def built(dtype: torch.dtype) -> tuple:
    torch.manual_seed(0)
    model = Model().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    x = torch.randint(11, (BATCH * STEPS, 6))
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2), x


def plain(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    model, optimizer, scheduler, x = built(dtype)
    for batch in x.split(BATCH):
        optimizer.zero_grad()
        loss(model(batch), batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    return model.state_dict()


def train(plan: str, precision: str) -> dict:
    """What the last rank of a case ended with."""
    dtype = torch.float64 if precision == "fp32" else torch.float32
    expected = plain(dtype)
    model, optimizer, scheduler, x = built(dtype)
    seen.clear()
    allow(plan)
    run = ronde.distribute(
        model,
        optimizer,
        TensorDataset(x, x),
        loss=weighed if "offload" in plan else loss,
        batch_size=BATCH,
        shuffle=False,
        plan=plan,
        precision=precision,
        clip_norm=1.0,
        scheduler=scheduler,
    )
    batches = iter(run.batches())
    for step in range(STEPS):
        with fake_cuda.strict(step in FREE):
            batch = next(batches)
        # an update on the host waits for its gradients
        with fake_cuda.strict(step in FREE and "offload=parameters" not in plan):
            run.step(batch)
    batches.close()
    run.port.parts.place.ended = True
    worst, devices = 0.0, set()
    for name, value in model.state_dict(keep_vars=True).items():
        if run.port.strategy.owns(name):
            devices.add(value.device.type)
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            apart = (whole.detach().cpu().double() - expected[name].double()).abs().max()
            worst = max(worst, float(apart))
    return {
        "apart": worst,
        "weights": sorted(devices),
        "activations": sorted({str(where.type) for where, *_ in seen}),
        "types": sorted({str(h) for *_, h in seen}),
    }


def fork_ranks(out: Path, case: str) -> None:
    workers, plan, precision = case.split("/")
    port, ranks = free_port(), []
    for rank in range(int(workers)):
        if pid := os.fork():
            ranks.append(pid)
            continue
        if int(workers) > 1:
            os.environ.update(rank_variables(rank, int(workers), port), LOCAL_RANK="0")
            os.environ.update(GLOO_SOCKET_IFNAME="lo")
            torch.distributed.init_process_group("gloo")
        try:
            facts = train(plan, precision)
        except BaseException as error:
            facts = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        with out.open("a") as file:
            file.write(json.dumps({"case": case, "rank": rank, **facts}) + "\n")
        os._exit(0)
    limit = time.monotonic() + 60
    while ranks:
        ranks = [pid for pid in ranks if not os.waitpid(pid, os.WNOHANG)[0]]
        if time.monotonic() > limit:
            for pid in ranks:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            break
        time.sleep(0.01)


def main() -> None:
    _, _, out, *cases = sys.argv
    os.environ.update(RONDE_RUNS="none", RONDE_PROGRESS="quiet", OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1)])  # the first optimizer imports several hundred modules
    for case in cases:
        fork_ranks(Path(out), case)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
