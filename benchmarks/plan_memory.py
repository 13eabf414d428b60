"""Is the memory that is predicted the memory that is taken? Predicted before it is measured, in
bytes of a process.

One device, ten models, two batch sizes each. *Chain* is what plans are predicted from: the sum over
the units, each weighed under fake tensors; *tracker* is torch's own MemTracker on the whole step.
What is measured is the peak of resident memory of a child process that builds the model and takes
two steps, above what it held before the model was built, with an allocator that gives back what is
freed.

    python benchmarks/plan_memory.py                     # all, prints a table and writes
    benchmarks/results/plan_memory.json python benchmarks/plan_memory.py --only gpt,lstm

Several workers, seven models, every family of plans (``PLANS``), written to
benchmarks/results/plan_memory_plans.json:

    python benchmarks/plan_memory.py --plans                           # all
    python benchmarks/plan_memory.py --plans --only gpt --family shard  # plans with that in their
    name

What is predicted is the sum of ``ronde.predict.predict``'s memory without its base. What is
measured is the peak of each worker's resident memory over real steps through ``ronde.distribute``,
from after the model has been divided; what the worker held when it was connected, had trained a
small model under the same plan and had made its data set is taken off. The worker that needs most
counts. A capacity just below what was measured must not be called *fits*; one a third above it
must.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import runpy
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ronde.predict.costs import Costs

HERE = Path(__file__).resolve()


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = (
            part.view(b, t, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(
        self,
        vocabulary: int = 8000,
        width: int = 384,
        layers: int = 6,
        heads: int = 6,
        length: int = 128,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = (
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.conv2, self.norm2 = (
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class CNN(nn.Module):
    def __init__(self, channels: int = 64, blocks: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.Sequential(*(Residual(channels) for _ in range(blocks)))
        self.head = nn.Linear(channels, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class UNet(nn.Module):
    def __init__(self, channels: int = 32) -> None:
        super().__init__()

        def double(a: int, b: int) -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), nn.Conv2d(b, b, 3, padding=1), nn.ReLU()
            )

        c = channels
        self.down = nn.ModuleList([double(3, c), double(c, 2 * c), double(2 * c, 4 * c)])
        self.middle = double(4 * c, 8 * c)
        self.up = nn.ModuleList(
            [nn.ConvTranspose2d(k * c, k * c // 2, 2, stride=2) for k in (8, 4, 2)]
        )
        self.after = nn.ModuleList([double(k * c, k * c // 2) for k in (8, 4, 2)])
        self.head = nn.Conv2d(c, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for up, block in zip(self.up, self.after, strict=True):
            x = block(torch.cat([up(x), skips.pop()], 1))
        return self.head(x)


class Translator(nn.Module):
    def __init__(self, vocabulary: int = 4000, width: int = 256, layers: int = 3) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.net = nn.Transformer(
            width, 4, layers, layers, 4 * width, dropout=0.1, batch_first=True
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, pair: torch.Tensor) -> torch.Tensor:
        source, target = pair.unbind(1)
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.head(self.net(self.tokens(source), self.tokens(target), tgt_mask=mask))


class LSTM(nn.Module):
    def __init__(self, vocabulary: int = 4000, width: int = 512) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.tokens(ids))[0])


class Checkpointed(nn.Module):
    """Blocks that the model itself computes again."""

    def __init__(self, width: int = 384, reentrant: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(64, width)
        self.blocks = nn.ModuleList(Block(width, 6) for _ in range(6))
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x.mean(1))


class Segments(nn.Module):
    """Pairs of layers that are computed again, within halves that are: checkpoints in checkpoints,
    of several units each.
    """

    def __init__(self, width: int = 512, layers: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(64, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 10)

    def _run(self, begin: int, end: int, x: torch.Tensor) -> torch.Tensor:
        if end - begin > 2:
            for i in range(begin, end, 2):
                x = checkpoint(self._run, i, i + 2, x, use_reentrant=False)
            return x
        for layer in self.layers[begin:end]:
            x = x + layer(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, half = self.first(x), len(self.layers) // 2
        for begin in (0, half):
            x = checkpoint(self._run, begin, begin + half, x, use_reentrant=False)
        return self.head(x)


class Repeated(nn.Module):
    """One block, or several in turns, called several times."""

    def __init__(self, width: int = 1024, times: int = 4, blocks: int = 1) -> None:
        super().__init__()
        self.times = times
        self.first = nn.Linear(256, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(self.times):
            for block in self.blocks:
                x = x + block(x)
        return self.head(x)


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 2048),
        nn.ReLU(),
        *(m for _ in range(4) for m in (nn.Linear(2048, 2048), nn.ReLU())),
        nn.Linear(2048, 10),
    )


def _tokens_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def _text(b: int, vocabulary: int, length: int) -> Any:
    return torch.randint(vocabulary, (b, length)), torch.randint(vocabulary, (b, length))


def _vectors(b: int, *shape: int) -> Any:
    return torch.randn(b, *shape), torch.randint(10, (b,))


MODELS: dict[
    str,
    tuple[
        Callable[[], nn.Module],
        Callable[[int], Any],
        Callable[..., Any],
        Callable[..., Any],
        tuple[int, int],
    ],
] = {
    # model, batch of b samples, loss, optimizer, batch sizes
    "mlp": (
        _mlp,
        lambda b: (torch.randn(b, 784), torch.randint(10, (b,))),
        F.cross_entropy,
        torch.optim.AdamW,
        (64, 1024),
    ),
    "cnn": (
        CNN,
        lambda b: (torch.randn(b, 3, 32, 32), torch.randint(10, (b,))),
        F.cross_entropy,
        lambda p: torch.optim.SGD(p, 0.01, momentum=0.9),
        (32, 96),
    ),
    "gpt": (GPT, lambda b: _text(b, 8000, 128), _tokens_loss, torch.optim.AdamW, (8, 16)),
    "translator": (
        Translator,
        lambda b: (torch.randint(4000, (b, 2, 64)), torch.randint(4000, (b, 64))),
        _tokens_loss,
        torch.optim.Adam,
        (16, 48),
    ),
    "unet": (
        UNet,
        lambda b: (torch.randn(b, 3, 64, 64), torch.randint(2, (b, 64, 64))),
        F.cross_entropy,
        torch.optim.AdamW,
        (16, 32),
    ),
    "lstm": (LSTM, lambda b: _text(b, 4000, 64), _tokens_loss, torch.optim.Adagrad, (16, 64)),
    "checkpointed": (
        Checkpointed,
        lambda b: _vectors(b, 128, 64),
        F.cross_entropy,
        torch.optim.AdamW,
        (8, 32),
    ),
    "reentrant": (
        lambda: Checkpointed(reentrant=True),
        lambda b: _vectors(b, 128, 64),
        F.cross_entropy,
        torch.optim.AdamW,
        (8, 32),
    ),
    "segments": (
        Segments,
        lambda b: _vectors(b, 64),
        F.cross_entropy,
        torch.optim.AdamW,
        (512, 4096),
    ),
    "repeated": (
        Repeated,
        lambda b: _vectors(b, 256),
        F.cross_entropy,
        lambda p: torch.optim.SGD(p, 0.01, momentum=0.9),
        (64, 2048),
    ),
}


def one_device(name: str, samples: int, steps: int = 2) -> Callable[[], None]:
    """The child's part: kernels warmed on a small one, then the real one."""
    build, batches, loss, optimizer_class, _ = MODELS[name]

    def train(model: nn.Module, batch: Any, n: int) -> None:
        optimizer = optimizer_class(model.parameters())
        for _ in range(n):
            inputs, target = batch
            loss(model(inputs), target).backward()
            optimizer.step()
            optimizer.zero_grad()

    torch.manual_seed(0)
    train(build(), batches(2), 1)
    return lambda: train(build(), batches(samples), steps)


def predict_one_device(name: str, samples: int) -> dict[str, float]:
    """The chain's sum, and torch's MemTracker."""
    from ronde.measure.memory_account import weigh
    from ronde.run.losses import LossCall

    build, batches, loss, optimizer_class, sizes = MODELS[name]
    torch.manual_seed(0)
    model = build()
    optimizer = optimizer_class(model.parameters())
    compute = LossCall(loss, None)
    costs = weigh(model, optimizer, compute, batches, max(sizes))
    return {
        "chain": chain_peak(costs, samples),
        "tracker": float(tracked_peak(model, optimizer, compute, batches(samples))),
    }


def tracked_peak(
    model: nn.Module, optimizer: torch.optim.Optimizer, compute: Any, batch: Any
) -> int:
    """Peak bytes of whole steps on one device, by torch's own MemTracker on fake tensors."""
    from torch.distributed._tools.mem_tracker import MemTracker

    from ronde.measure.memory_account import copied_optimizer
    from ronde.measure.stand_in import refers_to, standing_in, tensor_maker, untouched
    from ronde.world.tensors import tensors_in

    make = tensor_maker(True)
    with untouched(model), standing_in(model, make, refers_to(compute, model)) as (copy, copies):
        stand_in = copied_optimizer(optimizer, copies, make)
        tracker = MemTracker()
        tracker.track_external(copy, stand_in, *tensors_in(batch, attributes=True))
        with tracker:
            for _ in range(2):  # the optimizer's state exists in the second
                loss, weight = compute(copy, batch)
                loss.backward()
                stand_in.step()
                stand_in.zero_grad()
                del loss, weight
                tracker.reset_mod_stats()
        devices = tracker.get_tracker_snapshot("peak").values()
    return sum(int(kinds["Total"]) for kinds in devices)


def chain_peak(costs: Costs, samples: int) -> float:
    """Most bytes at once of steps on one device, micro-batches of ``samples``: the sum over the
    chain, pass by pass.

    Gradients are there from their unit's backward pass to the end of the step, as after
    ``zero_grad()``.
    """
    always = samples * costs.input_bytes + sum(
        u.parameter_bytes + u.optimizer_bytes + u.buffer_bytes for u in costs.units
    )
    saved, most = 0.0, 0.0
    left = sum(u.trainable_bytes + u.tied_grad_bytes for u in costs.units)
    gradients = float(sum(u.trainable_bytes for u in costs.units))
    for unit in costs.units:
        saved += unit.saved_bytes.at(samples)
        most = max(
            most,
            saved + unit.forward_transient_bytes.at(samples),
            saved + left + unit.backward_transient_bytes.at(samples),
        )
        left -= unit.trainable_bytes + unit.tied_grad_bytes
    return always + max(most, gradients + costs.optimizer_transient_bytes)


def status(name: str) -> int:
    """A field of ``/proc/self/status`` in bytes: ``VmRSS`` now, ``VmHWM`` at most."""
    text = next(
        t for t in Path("/proc/self/status").read_text().splitlines() if t.startswith(f"{name}:")
    )
    return int(text.split()[1]) * 1024


def measured_peak(target: str, *arguments: Any, timeout: float = 120.0) -> int:
    """Most resident memory that a function takes in a child process, in bytes above what the
    process held before. Linux only.

    Args:
        target: ``"path/file.py:function"``. It is called with ``arguments`` (JSON) and returns a
            callable: imports and warm kernels belong to the baseline, what the callable does is
                measured.
    """
    environment = {
        **os.environ,
        # Freed memory goes back to the system at once, instead of being kept for later.
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
        "MALLOC_ARENA_MAX": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(HERE), "--child", target, json.dumps(arguments)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{target} failed in a child process:\n{done.stderr.strip()[-2000:]}")
    return int(done.stdout.splitlines()[-1])


def child(target: str, arguments: str) -> None:
    """The child's part of :func:`measured_peak`."""
    file, _, name = target.rpartition(":")
    sys.path.insert(0, str(Path(file).parent))  # as python FILE would
    go = runpy.run_path(file)[name](*json.loads(arguments))
    gc.collect()
    baseline = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    go()
    print(max(0, status("VmHWM") - baseline))


# --- one device
# --------------------------------------------------------------------------------


def one_device_rows(names: list[str], output: Path) -> None:
    rows: list[dict[str, Any]] = []
    print(
        f"{'family':<12} {'model':<11} {'batch':>5} {'measured':>10} {'chain':>10} "
        f"{'error':>7} {'tracker':>10} {'error':>7}   (MiB)"
    )
    for name in names:
        for samples in MODELS[name][4]:
            predicted = predict_one_device(name, samples)
            measured = measured_peak(f"{HERE}:one_device", name, samples, timeout=900)
            row: dict[str, Any] = {
                "family": "one device",
                "model": name,
                "batch": samples,
                "measured_bytes": measured,
                **predicted,
            }
            row["chain_error"] = predicted["chain"] / measured - 1
            row["tracker_error"] = predicted["tracker"] / measured - 1
            rows.append(row)
            print(
                f"{'one device':<12} {name:<11} {samples:>5} {measured / 2**20:>10.1f} "
                f"{predicted['chain'] / 2**20:>10.1f} {row['chain_error']:>+7.1%}"
                f" {predicted['tracker'] / 2**20:>10.1f} {row['tracker_error']:>+7.1%}",
                flush=True,
            )
            write(rows, output, ("family", "model", "batch"), ("chain", "tracker"))
    for kind in ("chain", "tracker"):
        errors = [abs(r[f"{kind}_error"]) for r in rows]
        print(
            f"{kind}: mean error {statistics.mean(errors):.1%}, largest {max(errors):.1%}, "
            f"{len(errors)} runs"
        )


# --- several workers
# --------------------------------------------------------------------------------


def block_mlp(blocks: int, width: int) -> nn.Module:
    layers = (
        nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        for _ in range(blocks)
    )
    return nn.Sequential(nn.Linear(256, width), *layers, nn.Linear(width, 10))


Size = tuple[nn.Module, torch.utils.data.TensorDataset]


def sized(name: str, samples: int, small: bool) -> Size:
    """A model, and a data set of so many samples; a small one to warm a worker up with."""
    torch.manual_seed(0)
    if name == "mlp":
        model = block_mlp(6, 64 if small else 1024)
        return model, torch.utils.data.TensorDataset(
            torch.randn(samples, 256), torch.randint(10, (samples,))
        )
    if name == "gpt":
        vocabulary, length = (100, 16) if small else (8000, 128)
        model = GPT(vocabulary, 48 if small else 384, 6, 6, length)
        return model, torch.utils.data.TensorDataset(*_text(samples, vocabulary, length))
    if name == "cnn":
        side = 8 if small else 32
        model = CNN(8 if small else 64, 6)
        return model, torch.utils.data.TensorDataset(
            torch.randn(samples, 3, side, side), torch.randint(10, (samples,))
        )
    if name == "unet":
        side = 16 if small else 64
        model = UNet(8 if small else 32)
        return model, torch.utils.data.TensorDataset(
            torch.randn(samples, 3, side, side), torch.randint(2, (samples, side, side))
        )
    if name == "checkpointed":
        model = Checkpointed(48 if small else 384)
        return model, torch.utils.data.TensorDataset(*_vectors(samples, 16 if small else 128, 64))
    if name == "repeated":
        return Repeated(64 if small else 1024), torch.utils.data.TensorDataset(
            *_vectors(samples, 256)
        )
    if name == "in turns":
        return Repeated(64 if small else 768, 3, 2), torch.utils.data.TensorDataset(
            *_vectors(samples, 256)
        )
    raise SystemExit(f"no model {name!r}")


SIZED: dict[str, tuple[int, Callable[..., Any], Callable[..., Any]]] = {
    # global batch, loss, optimizer
    "mlp": (512, F.cross_entropy, torch.optim.AdamW),
    "gpt": (16, _tokens_loss, torch.optim.AdamW),
    "cnn": (32, F.cross_entropy, lambda p: torch.optim.SGD(p, 0.01, momentum=0.9)),
    "unet": (16, F.cross_entropy, torch.optim.AdamW),
    "checkpointed": (32, F.cross_entropy, torch.optim.AdamW),
    "repeated": (512, F.cross_entropy, lambda p: torch.optim.SGD(p, 0.01, momentum=0.9)),
    "in turns": (512, F.cross_entropy, lambda p: torch.optim.SGD(p, 0.01, momentum=0.9)),
}
PLANS = {
    # family: workers, plan; a micro-batch is written as a share of the global batch
    "replicate": (2, "replicate"),
    "accumulation": (2, "micro_batch=1/8"),
    "shard optimizer": (2, "shard=optimizer"),
    "shard gradients": (2, "shard=gradients"),
    "shard parameters": (2, "shard=parameters"),
    "gpipe": (2, "pipeline=2,schedule=gpipe,micro_batch=1/8"),
    "1f1b": (2, "pipeline=2,micro_batch=1/8"),
    "interleaved": (2, "pipeline=2,virtual=2,schedule=interleaved,micro_batch=1/8"),
    "recompute": (2, "recompute=full"),
    "selective": (2, "recompute=selective"),
    "recompute pipeline": (2, "pipeline=2,recompute=full,micro_batch=1/8"),
    "recompute shard": (2, "shard=parameters,recompute=full"),
    "tensor": (2, "tensor=2"),
    "pipeline shard": (4, "pipeline=2,shard=parameters,micro_batch=1/8"),
}
# they have no block that tensor parallelism divides
NO_TENSOR = (
    "cnn",
    "unet",
    "checkpointed",
    "repeated",
    "in turns",
)
STEPS = 3


def spec_of(name: str, family: str) -> tuple[int, str]:
    workers, spec = PLANS[family]
    parts = spec.split("1/")
    return workers, spec if len(parts) == 1 else f"{parts[0]}{SIZED[name][0] // int(parts[1])}"


def weighed(name: str) -> Any:
    """The costs of a model. Its units' seconds, which decide where a pipeline is cut, are taken
    from their operations.
    """
    import dataclasses

    from ronde.measure.memory_account import weigh
    from ronde.measure.tensor_units import divisible
    from ronde.parallel import Work
    from ronde.predict.costs import LinearCost
    from ronde.run.losses import LossCall

    batch, loss, optimizer_class = SIZED[name]
    model, data = sized(name, batch, False)
    optimizer = optimizer_class(model.parameters())
    compute = LossCall(loss, None)
    costs = weigh(model, optimizer, compute, lambda n: data[:n], batch)
    rate = 1e-10  # seconds an operation
    units = tuple(
        dataclasses.replace(
            u,
            forward_seconds=LinearCost(0.0, u.flops * rate),
            backward_seconds=LinearCost(0.0, 2 * u.flops * rate),
        )
        for u in costs.units
    )
    work = Work(model, optimizer, lambda b: compute(model, b), lambda n: data[:n])
    return divisible(dataclasses.replace(costs, units=units), work, compute)


def begins(model: nn.Module, name: str) -> str:
    """The outermost module that begins with a unit, which is what a pipeline calls a place to
    cut.
    """
    modules = dict(model.named_modules())
    while "." in name:
        parent = name.rpartition(".")[0]
        if (
            isinstance(modules[parent], nn.ModuleList | nn.ModuleDict)
            or next(modules[parent].children()) is not modules[name]
        ):
            break
        name = parent
    return name


def predicted_plan(
    costs: Any, workers: int, spec: str, batch: int, memory_bytes: float = 0.0
) -> Any:
    """The prediction of a plan on workers that have so much memory."""
    from ronde.predict.cluster import Cluster
    from ronde.predict.predict import predict

    return predict(
        plan_of(workers, spec, batch),
        costs,
        Cluster(devices_per_node=workers, memory_bytes=memory_bytes),
    )


def plan_of(workers: int, spec: str, batch: int) -> Any:
    import dataclasses
    import math

    from ronde.plan import Plan

    plan = dataclasses.replace(Plan.parse(spec), workers=workers, batch_size=batch)
    if plan.micro_batch:
        plan = dataclasses.replace(
            plan, accumulation=math.ceil(batch / plan.replicas / plan.micro_batch)
        )
    return plan


def worker(name: str, spec: str, batch: int, steps: int, out: Path) -> None:
    """One worker: warmed on a small model under the same plan, then measured on the real one."""
    import gc
    import os

    import ronde
    from ronde.plan import Plan

    _, loss, optimizer_class = SIZED[name]

    def prepared(model: nn.Module, data: Any) -> Any:
        return ronde.distribute(
            model, optimizer_class(model.parameters()), data, loss=loss, batch_size=batch, plan=spec
        )

    def train(run: Any, count: int) -> None:
        for _ in range(count):
            for b in run.batches():
                run.step(b)

    data = sized(name, batch, False)[1]
    train(prepared(*sized(name, batch, True)), 2)
    # Libraries keep what their kernels pack matrices into (MKL: as large as a layer's weight), and
    # the kernels that they make for each shape (oneDNN). That is no plan's: it belongs to the base.
    model = sized(name, 1, False)[0]
    share = batch // int(os.environ["WORLD_SIZE"])
    for samples in (share, Plan.parse(spec).micro_batch or share):
        inputs, target = data[:samples]
        loss(model(inputs), target).backward()
    del model, inputs, target
    gc.collect()
    baseline = status("VmRSS")
    run = prepared(sized(name, 1, False)[0], data)
    gc.collect()
    held = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    train(run, steps)
    peak = status("VmHWM")
    Path(f"{out}.{os.environ['RANK']}").write_text(
        json.dumps(
            {
                "baseline_bytes": baseline,
                "held_bytes": held - baseline,
                "peak_bytes": peak - baseline,
            }
        )
    )


def measure_plan(
    name: str, workers: int, spec: str, batch: int, steps: int = STEPS, timeout: float = 900.0
) -> list[dict[str, int]]:
    """Peak of each worker of a plan, in a process group of its own."""
    import os
    import subprocess
    import sys
    import tempfile

    environment = {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
        "MALLOC_ARENA_MAX": "1",
        "OMP_NUM_THREADS": "1",
        "RONDE_DEVICE": "cpu",
    }
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "peak"
        command = [
            sys.executable,
            "-m",
            "ronde",
            "run",
            "-q",
            "--runs",
            "none",
            "--workers",
            str(workers),
            str(HERE),
        ]
        command += [
            "--worker",
            name,
            "--spec",
            spec,
            "--batch",
            str(batch),
            "--steps",
            str(steps),
            "--output",
            str(out),
        ]
        done = subprocess.run(
            command,
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if done.returncode:
            raise SystemExit(
                f"{name} under {spec!r} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
            )
        return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(workers)]


def row_of(costs: Any, name: str, family: str, steps: int = STEPS) -> dict[str, Any]:
    """One plan predicted, measured, and judged."""
    workers, spec = spec_of(name, family)
    batch = SIZED[name][0]
    prediction = predicted_plan(costs, workers, spec, batch)
    memory = {kind: size for kind, size in prediction.memory.items() if kind != "base"}
    predicted = sum(memory.values())
    if prediction.split_at:
        model = sized(name, 1, True)[0]
        spec = f"split_at={'+'.join(begins(model, n) for n in prediction.split_at)},{spec}"
    peaks = measure_plan(name, workers, spec, batch, steps)
    measured = max(p["peak_bytes"] for p in peaks)
    verdicts = [
        predicted_plan(costs, workers, spec, batch, measured * share).verdict
        for share in (0.999, 1.36)
    ]
    return {
        "family": family,
        "model": name,
        "workers": workers,
        "plan": spec,
        "batch": batch,
        "predicted_bytes": predicted,
        "measured_bytes": measured,
        "error": predicted / measured - 1,
        "by_kind": memory,
        "by_worker": peaks,
        "verdict_just_too_small": verdicts[0],
        "verdict_a_third_larger": verdicts[1],
    }


def plan_rows(names: list[str], families: list[str], output: Path) -> None:
    from ronde.predict.candidates import supported
    from ronde.predict.cluster import Cluster

    rows: list[dict[str, Any]] = []
    print(
        f"{'family':<17} {'model':<5} {'workers':>7} {'measured':>9} {'predicted':>9} "
        f"{'error':>7}   (MiB)   too small / a third larger"
    )
    for name in names:
        costs = weighed(name)
        for family in families:
            if family == "tensor" and name in NO_TENSOR:
                continue
            workers, spec = spec_of(name, family)
            plan = plan_of(workers, spec, SIZED[name][0])
            if not supported(plan, costs, Cluster(devices_per_node=workers)):
                print(f"{family:<17} {name:<5} {workers:>7}   not planned", flush=True)
                continue
            row = row_of(costs, name, family)
            rows.append(row)
            kinds = " ".join(f"{k[:5]} {v / 2**20:.0f}" for k, v in row["by_kind"].items() if v)
            each = "/".join(
                f"{p['held_bytes'] / 2**20:.0f}-{p['peak_bytes'] / 2**20:.0f}"
                for p in row["by_worker"]
            )
            print(
                f"{family:<17} {name:<5} {row['workers']:>7} "
                f"{row['measured_bytes'] / 2**20:>9.1f} "
                f"{row['predicted_bytes'] / 2**20:>9.1f}"
                f" {row['error']:>+7.1%}   {row['verdict_just_too_small']} / "
                f"{row['verdict_a_third_larger']}   [{each}] {kinds}",
                flush=True,
            )
            write(rows, output, ("family", "model"), ("",))
    if not rows:
        raise SystemExit("nothing was measured: none of these plans is one that is planned.")
    errors = [abs(r["error"]) for r in rows]
    wrong = [r for r in rows if r["verdict_just_too_small"] == "fits"]
    print(
        f"mean error {statistics.mean(errors):.1%}, largest {max(errors):.1%}, "
        f"{len(errors)} plans; called 'fits' and would fail: {len(wrong)}"
    )


def write(
    rows: list[dict[str, Any]], file: Path, keys: tuple[str, ...], kinds: tuple[str, ...]
) -> None:
    """After each row; rows of models and families that were not asked for stay."""
    held = {
        tuple(r[k] for k in keys): r
        for r in (json.loads(file.read_text())["rows"] if file.exists() else [])
    }
    held |= {tuple(r[k] for k in keys): r for r in rows}
    result: dict[str, Any] = {
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
    }
    for kind in kinds:
        start = f"{kind}_" if kind else ""
        errors = [abs(r[f"{start}error"]) for r in held.values()]
        result[f"{start}mean_error"], result[f"{start}largest_error"] = (
            statistics.mean(errors),
            max(errors),
        )
    if not kinds[0]:
        result["n"] = len(held)
        result["called_fits_and_fails"] = sum(
            r["verdict_just_too_small"] == "fits" for r in held.values()
        )
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps({**result, "rows": list(held.values())}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--plans", action="store_true", help="several workers, instead of one device"
    )
    parser.add_argument("--only", help="models, separated by commas")
    parser.add_argument("--family", help="parts of families' names, separated by commas")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--spec", help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        worker(given.worker, given.spec, given.batch, given.steps, given.output)
        return
    output = given.output or HERE.parent / "results" / (
        "plan_memory_plans.json" if given.plans else "plan_memory.json"
    )
    if given.plans:
        parts = given.family.split(",") if given.family else [""]
        families = [f for f in PLANS if any(p == f or (p not in PLANS and p in f) for p in parts)]
        plan_rows(given.only.split(",") if given.only else list(SIZED), families, output)
    else:
        one_device_rows(given.only.split(",") if given.only else list(MODELS), output)
    print(f"written to {output}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        main()
