"""Every rank of every world, forked from one process that has imported torch once: writes checkpoints under plans, reads them under others.

``python reshard_worker.py MATRIX FOLDER``; prints, as JSON, the largest difference from a run that was never stopped, by (from, to).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

import ronde
import ronde.run.entry as entry
from processes import free_port, rank_variables

torch.optim.SGD([torch.zeros(1)])  # the first optimizer imports several hundred modules

# plan -> (workers, what --plan says)
PLANS = {
    "single": (1, "replicate"),
    "replicate": (2, "replicate"),
    "zero1": (2, "shard=optimizer"),
    "zero2": (2, "shard=gradients"),
    "zero3": (2, "shard=parameters"),
    "zero3x3": (3, "shard=parameters"),
    "hybrid": (4, "shard=parameters,shard_within=2"),
    "pipeline": (2, "pipeline=2"),
    "pipeline-replicas": (4, "pipeline=2"),
    "pipeline-zero3": (4, "pipeline=2,shard=parameters"),
    "tensor": (2, "tensor=2"),
    "tensor-zero3": (4, "tensor=2,shard=parameters"),
}
MATRICES = {
    "data": ["single", "replicate", "zero1", "zero2", "zero3", "zero3x3", "hybrid"],
    "model": ["single", "zero3", "pipeline", "pipeline-replicas", "pipeline-zero3", "tensor", "tensor-zero3"],
}
STOP, END = 3, 6


def fork(size: int, work: Callable[[], None], seconds: float = 60.0) -> None:
    """Run ``work`` as every rank of a world of that size; raises where one of them did, or took too long."""
    port = free_port()
    children = {}
    for rank in range(size):
        pid = os.fork()
        if not pid:
            if size > 1:
                os.environ.update(rank_variables(rank, size, port))
            try:
                work()
                sys.stdout.flush()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
        children[pid] = rank
    limit = time.monotonic() + seconds
    failed: list[int] = []
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            rank = children.pop(pid)
            failed += [rank] if status else []
        late = time.monotonic() > limit
        if failed or late:
            for each in children:
                os.kill(each, signal.SIGKILL)
            for each in children:
                os.waitpid(each, 0)
            raise SystemExit(f"rank {failed} of {size} failed" if failed else f"{size} ranks took longer than {seconds} s")
        if not pid:
            time.sleep(0.005)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 14)  # in two: 7, in three: 5, 5, 4; in two and again in two: 4, 3
        self.down = nn.Linear(14, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Uneven shapes, tied and frozen weights, buffers."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.Sequential(*(Block(6) for _ in range(3)))
        self.norm = nn.BatchNorm1d(6) if norm else nn.LayerNorm(6)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(6, 11)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(0.5))
        self.register_buffer("count", torch.arange(3))

    def forward(self, x):
        x = self.norm(self.embed(x))  # nothing before it that it takes away again: AdamW blows such gradients, mere rounding, up
        return self.head((self.blocks(x) + self.frozen(x)) * self.scale)


def data() -> TensorDataset:
    g = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randint(11, (96,), generator=g), torch.randint(11, (96,), generator=g))


def start(plan: str, norm: bool, where: Path, resume: bool, **options):
    os.environ.update({"RONDE_RUN_DIR": str(where), "RONDE_RESUME": "1" if resume else "0", "RONDE_PROGRESS": "quiet"})
    where.mkdir(parents=True, exist_ok=True)
    entry._made = 0
    torch.manual_seed(7 if not resume else 8)  # what is resumed begins elsewhere
    model = options.pop("model", None) or Net(norm).double()
    named = dict(model.named_parameters())
    flat = [p for n, p in named.items() if p.dim() < 2]
    groups = [{"params": flat, "weight_decay": 0.0, "lr": 0.02}, {"params": [p for p in named.values() if p.dim() > 1]}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)
    options = {"batch_size": 12, "sync_batchnorm": norm, "scheduler": scheduler, "seed": 3, **options}
    return ronde.distribute(model, optimizer, data(), loss=F.cross_entropy, plan=plan, **options)


def train(run, until: int) -> None:
    for batch in run.batches():
        run.step(batch)
        if run.state.step == until:
            break
    run._ended = True  # nothing more is written at exit


def differ(a: Path, b: Path) -> float:
    one, two = load_file(a), load_file(b)
    assert one.keys() == two.keys(), one.keys() ^ two.keys()
    assert all(one[k].dtype == two[k].dtype and one[k].shape == two[k].shape for k in two)
    return max(float((one[k].double() - two[k].double()).abs().max() / max(1e-9, two[k].double().abs().max())) for k in two)


def matrix(name: str, folder: Path) -> None:
    plans, norm = MATRICES[name], name == "data"
    by_size: dict[int, list[str]] = {}
    for plan in plans:
        by_size.setdefault(PLANS[plan][0], []).append(plan)

    def write(size: int) -> None:
        for plan in by_size[size]:
            run = start(PLANS[plan][1], norm, folder / plan, False)
            train(run, STOP)
            path = run.save()
            assert (path is not None) == run.is_main
            run.export(folder / f"{plan}.at-stop")
            if plan == "single":
                os.environ["RONDE_RUN_DIR"] = "none"
                again = start("replicate", norm, folder / "whole", False)
                train(again, END)
                again.export(folder / "whole.safetensors")
                shutil.rmtree(folder / "whole")

    def read(size: int) -> None:
        for plan in by_size[size]:
            for source in plans:
                run = start(PLANS[plan][1], norm, folder / f"{source}-{plan}", True)
                assert run.state.step == STOP, run.state
                train(run, END)
                run.export(folder / f"{source}-{plan}.safetensors")

    for size in by_size:
        fork(size, lambda size=size: write(size))
    for source in plans:
        for plan in plans:
            shutil.copytree(folder / source / "checkpoints", folder / f"{source}-{plan}" / "checkpoints")
    for size in by_size:
        fork(size, lambda size=size: read(size))
    result = {
        f"{source} -> {plan}": differ(folder / f"{source}-{plan}.safetensors", folder / "whole.safetensors")
        for plan in plans
        for source in plans
    }
    result |= {f"{plan} at the stop": differ(folder / f"{plan}.at-stop", folder / "single.at-stop") for plan in plans}
    first = start("replicate", norm, folder / "begin", False)
    first._ended = True
    first.export(folder / "begin.safetensors")
    result["trained"] = differ(folder / "begin.safetensors", folder / "whole.safetensors")
    print(json.dumps(result))


if __name__ == "__main__":
    matrix(sys.argv[1], Path(sys.argv[2]))
