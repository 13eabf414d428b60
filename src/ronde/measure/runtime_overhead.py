"""Measure what the runtime adds to its collectives: hooks, and copies to and from flat buffers.

FSDP2, DDP, ZeRO-1's exchange and pipeline stages run as in Ronde, on small models whose layers
sleep. On the CPU this overhead delays the step: a sharded model of small layers takes twice the
time of its collectives. On an accelerator it overlaps with kernels and is not measured.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ronde.measure.pipeline_overhead import action_seconds
from ronde.parallel import Part, Work
from ronde.parallel.fsdp import fully_shard_model
from ronde.parallel.zero1 import OptimizerParts
from ronde.plan import Plan
from ronde.predict import Added, LinkFit, Times, run_step
from ronde.world import World
from ronde.world.meshes import mesh_of

__all__ = ["added_by", "fit_added", "warm"]

_CASES = ((16 << 10, 2), (64 << 10, 16), (1 << 20, 2), (1 << 20, 16), (6 << 20, 2), (6 << 20, 16))
"""Bytes and tensors of what is exchanged at once."""
_PAUSE = 0.001  # as in training, nobody has exchanged anything just before
_TRIES = 12
_WARM = 4  # tries before them that are not counted
_PASSES = 3  # hosts have fast and slow seconds: each thing is tried in several of them

Row = tuple[int, int, list[float]]
"""Bytes, tensors, seconds of each try."""


def fit_added(rows: Sequence[tuple[float, float, float, float]]) -> Added:
    """The cost a call, a tensor and a byte, none below 0, with the least squared error relative to
    the whole.

    Args:
        rows: bytes, tensors, seconds beyond the collective's, seconds with it.

    Example:
        >>> rows = [(size, n, 1e-3 + 1e-5 * n + 1e-9 * size, 1.0) for size in (1e4, 1e6,
        ...     1e7) for n in (2, 16)]
        >>> fit = fit_added(rows)
        >>> round(fit.call, 6), round(fit.tensor, 8), round(fit.byte, 12)
        (0.001, 1e-05, 1e-09)
    """
    weights = np.array([1.0 / max(whole, 1e-9) for *_, whole in rows])
    terms = np.array([[1.0, tensors, size] for size, tensors, *_ in rows]) * weights[:, None]
    target = np.array([seconds for _, _, seconds, _ in rows]) * weights
    scale = np.abs(terms).max(axis=0)
    best, found = float((target**2).sum()), np.zeros(3)
    for count in (1, 2, 3):
        for chosen in itertools.combinations(range(3), count):
            some = list(chosen)
            values = (
                np.linalg.lstsq(terms[:, some] / scale[some], target, rcond=None)[0] / scale[some]
            )
            error = float(((terms[:, some] @ values - target) ** 2).sum())
            if (values >= 0).all() and error < best * (1 - 1e-9):
                best, found = error, np.zeros(3)
                found[some] = values
    return Added(*(float(v) for v in found))


class _Marks:
    """Moments of one step."""

    def __init__(self) -> None:
        self.at: dict[tuple[str, int], float] = {}

    def __call__(self, what: str, index: int) -> None:
        self.at[what, index] = time.perf_counter()


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, marks: _Marks, index: int, *parameters: torch.Tensor
    ) -> torch.Tensor:
        ctx.marks, ctx.index = marks, index
        ctx.save_for_backward(*parameters)
        time.sleep(_PAUSE)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.marks("back", ctx.index)
        time.sleep(_PAUSE)
        made = [torch.ones_like(p) for p in ctx.saved_tensors]
        ctx.marks("backed", ctx.index)
        return (grads[0].clone(), None, None, *made)


class _Layer(nn.Module):
    """So many tensors of so many bytes together, and no work."""

    def __init__(self, size: int, tensors: int, marks: _Marks, index: int) -> None:
        super().__init__()
        # divides evenly over up to 64 workers
        rows = max(64, size // (4 * 16 * tensors) // 64 * 64)
        self.weights = nn.ParameterList(torch.zeros(rows, 16) for _ in range(tensors))
        self.size = rows * 64 * tensors
        self.marks, self.index = marks, index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.marks("in", self.index)
        y: torch.Tensor = _Sleep.apply(x, self.marks, self.index, *self.weights)  # type: ignore[no-untyped-call]
        self.marks("out", self.index)
        return y


class _Layers(nn.Module):
    def __init__(self, marks: _Marks) -> None:
        super().__init__()
        made = [_Layer(size, tensors, marks, i) for i, (size, tensors) in enumerate(_CASES)]
        self.sizes = [layer.size for layer in made]
        self.layers = nn.ModuleList(made)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _sharded(me: World, tries: int) -> tuple[list[Row], list[Row]]:
    """Seconds of gathering a layer's parameters, and of reducing its gradients, by FSDP2."""
    marks = _Marks()
    model = _Layers(marks)
    blocks = {f"layers.{i}": layer for i, layer in enumerate(model.layers)}
    fully_shard_model(model, mesh_of("cpu", {"shard": me.size}), "gradients", None, blocks)
    for i, layer in enumerate(model.layers):
        layer.register_forward_pre_hook(lambda _m, _x, i=i: marks("called", i), prepend=True)  # type: ignore[misc]
    gathers: list[list[float]] = [[] for _ in _CASES]
    reduces: list[list[float]] = [[] for _ in _CASES]
    x = torch.zeros(1)
    for _ in range(_WARM + tries):
        dist.barrier()
        loss = model(x).sum()
        middle = time.perf_counter()
        loss.backward()
        end = time.perf_counter()
        at = marks.at
        for i in range(len(_CASES)):
            # What follows on a layer's pass (letting go of what was gathered) is part of having
            # gathered it.
            following = at["called", i + 1] if i + 1 < len(_CASES) else middle
            gathers[i].append(at["in", i] - at["called", i] + following - at["out", i])
            after = at["back", i - 1] if i else end
            reduces[i].append(after - at["backed", i])
        for p in model.parameters():
            p.grad = None
    sizes = [(size, tensors) for size, (_, tensors) in zip(model.sizes, _CASES, strict=True)]
    return (
        [(size, n, values[_WARM:]) for (size, n), values in zip(sizes, gathers, strict=True)],
        [(size, n, values[_WARM:]) for (size, n), values in zip(sizes, reduces, strict=True)],
    )


def warm(me: World) -> None:
    """Train a little on the CPU, divided over the workers: what that loads stays. All ranks call
    it.
    """
    random = torch.get_rng_state()
    try:
        _sharded(me, 1)
    finally:
        torch.set_rng_state(random)


def _buckets(tries: int) -> list[Row]:
    """Seconds of averaging a layer's gradients, by DDP."""
    found = []
    for size, tensors in _CASES[1:]:
        marks = _Marks()
        layer = _Layer(size, tensors, marks, 0)
        model = DistributedDataParallel(layer, gradient_as_bucket_view=True)
        values = []
        for _ in range(_WARM + tries):
            for p in layer.parameters():
                p.grad = None
            dist.barrier()
            model(torch.zeros(1)).sum().backward()
            values.append(time.perf_counter() - marks.at["backed", 0])
        found.append((layer.size, tensors, values[_WARM:]))
    return found


def _sent(tries: int) -> list[Row]:
    """Seconds until all workers have the parameters that each of them updated, by ZeRO-1."""
    found = []
    for size, tensors in _CASES[1:]:
        layer = _Layer(size, tensors, _Marks(), 0)
        for p in layer.parameters():
            p.grad = p.detach()
        parts = OptimizerParts(torch.optim.SGD(layer.parameters(), lr=0.0), None)
        values = []
        for _ in range(_WARM + tries):
            dist.barrier()
            time.sleep(_PAUSE)
            start = time.perf_counter()
            parts.exchange()
            values.append(time.perf_counter() - start)
        found.append((layer.size, tensors, values[_WARM:]))
    return found


class _Nap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(_PAUSE)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        time.sleep(_PAUSE)
        return grads[0].clone()


class _Napping(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _Nap.apply(super().forward(x))  # type: ignore[no-untyped-call]
        return y


def _acted(me: World, send: LinkFit, tries: int) -> tuple[float, float]:
    """Seconds that a pipeline adds to a pass of a micro-batch beside following the model (its sends
    and receives, and waking up for them), and to a step whatever its micro-batches.

    It is what makes the simulations of a pipeline whose layers sleep, with few micro-batches and
    with many, as long as those took.
    """
    from ronde.parallel.pipeline_parallel import PipelineParallel

    counts = (me.size, 5 * me.size)
    data = torch.zeros(counts[1], 16), torch.zeros(counts[1], 16)

    def new() -> Work:  # a pipeline keeps its worker's part of a model only
        model = nn.Sequential(*(_Napping(16, 16) for _ in range(me.size)))
        return Work(
            model,
            torch.optim.SGD(model.parameters(), lr=0.0),
            lambda batch: ((model(batch[0]) - batch[1]).square().mean(), None),
            lambda n: (data[0][:n], data[1][:n]),
        )

    followed: float = action_seconds(new())
    layer, x = _Napping(16, 16), torch.zeros(1, 16)
    passes: list[tuple[float, float]] = []
    for _ in range(tries):
        start = time.perf_counter()
        y = layer(x).sum()
        middle = time.perf_counter()
        y.backward()
        passes.append((middle - start, time.perf_counter() - middle))
    slept = torch.tensor(
        [statistics.median(each) for each in zip(*passes, strict=True)], dtype=torch.float64
    )
    taken: list[float] = []
    plans = [
        Plan(
            workers=me.size,
            batch_size=count,
            pipeline=me.size,
            micro_batch=1,
            accumulation=count,
            split_at=tuple(str(i) for i in range(1, me.size)),
        )
        for count in counts
    ]
    for count, plan in zip(counts, plans, strict=True):
        work = new()
        strategy = PipelineParallel(plan, work, me)
        micros = [tuple(t[i : i + 1] for t in data) for i in range(count)]
        parts = [Part(1, count, i == count - 1) for i in range(count)]
        steps = []
        for _ in range(tries):
            dist.barrier()
            start = time.perf_counter()
            strategy.step(micros, parts, work.compute, None)
            strategy.finish()
            steps.append(time.perf_counter() - start)
        taken.append(statistics.median(steps[2:]))
    told = torch.tensor([*slept.tolist(), *taken, followed], dtype=torch.float64)
    dist.all_reduce(told)
    forward, backward, few, many, followed = (told / me.size).tolist()
    each = send.alpha + 64 / send.beta
    times = Times((forward,) * me.size, (backward,) * me.size, (each,) * me.size, (each,) * me.size)

    def simulated(count: int, overhead: float) -> float:
        return run_step(
            plans[0].schedule, me.size, 1, count, times, overhead_seconds=overhead
        ).seconds

    low, high = 0.0, many
    for _ in range(30):
        middle = (low + high) / 2
        more = simulated(counts[1], middle) - simulated(counts[0], middle)
        low, high = (middle, high) if more < many - few else (low, middle)
    return max(0.0, low - followed), max(0.0, few - simulated(counts[0], low))


def _divided(me: World, all_reduce: LinkFit, tries: int) -> float:
    """Seconds that tensor parallelism adds to an all-reduce of a small block: divided parameters,
    the random state, and waiting for each other.

    The slope between models of few blocks and of many, against the same models whole.
    """
    from ronde.parallel.tensor_parallel import tensor

    width, counts = 16 * me.size, (2, 8)
    data = torch.zeros(4, 16)
    more: list[float] = []
    for blocks in counts:
        model = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 16))
                for _ in range(blocks)
            )
        )
        compute: Any = lambda batch, model=model: (model(batch).square().mean(), None)  # noqa: E731
        work = Work(model, torch.optim.SGD(model.parameters(), lr=0.0), compute, lambda n: data[:n])
        plain, divided = [], []
        for _ in range(tries):
            start = time.perf_counter()
            work.compute(data)[0].backward()  # type: ignore[no-untyped-call]
            plain.append(time.perf_counter() - start)
        plan = Plan(workers=me.size, batch_size=4, tensor=me.size)
        strategy = tensor(plan, work, me)
        for _ in range(_WARM + tries):
            dist.barrier()
            start = time.perf_counter()
            strategy.step([data], [Part(4, 4, True)], work.compute, None)
            divided.append(time.perf_counter() - start)
            strategy.finish()
        more.append(statistics.median(divided[_WARM:]) - statistics.median(plain))
    told = torch.tensor(more, dtype=torch.float64)
    dist.all_reduce(told)
    few, many = (float(t) for t in told / me.size)
    size = data.numel() * data.element_size()
    # two in a block
    return max(
        0.0,
        (many - few) / (counts[1] - counts[0]) / 2.0 - all_reduce.alpha - size / all_reduce.beta,
    )


def added_by(
    me: World, fits: dict[str, LinkFit], quick: bool, tell: Callable[[str], None]
) -> dict[str, Added]:
    """What FSDP2 (``"gather"``, ``"reduce"``), DDP (``"bucket"``) and ZeRO-1 (``"update"``) add to
    a collective, tensor parallelism (``"tensor"``) to an all-reduce, and a pipeline to an action
    (``"action"``) and to its step (``"pipeline"``). All ranks call it.

    Args:
        fits: the collectives themselves, over all workers.
    """
    tries = _TRIES // 2 if quick else _TRIES
    tell("what the runtime adds to them")
    random = torch.get_rng_state()
    try:
        acted, divided = [], []
        passes: list[dict[str, list[Row]]] = []
        for _ in range(1 if quick else _PASSES):
            gathers, reduces = _sharded(me, tries)
            acted.append(_acted(me, fits["send"], tries))
            divided.append(_divided(me, fits["all_reduce"], tries))
            passes.append(
                {
                    "gather": gathers,
                    "reduce": reduces,
                    "bucket": _buckets(tries),
                    "update": _sent(tries),
                }
            )
    finally:
        torch.set_rng_state(random)
    of = {
        "gather": ("all_gather", 1),
        "reduce": ("reduce_scatter", 1),
        "bucket": ("all_reduce", 1),
        "update": ("broadcast", me.size),  # one from every worker
    }
    action, pipeline = (statistics.median(each) for each in zip(*acted, strict=True))
    found = {
        "action": Added(call=action),
        "pipeline": Added(call=pipeline),
        "tensor": Added(call=statistics.median(divided)),
    }
    for name, taken in passes[0].items():
        fit, calls = fits[of[name][0]], of[name][1]
        tried = [[s for each in passes for s in each[name][k][2]] for k in range(len(taken))]
        middles = [statistics.median(values) for values in tried]
        if name in ("gather", "reduce"):
            # Of layers in one step. Some of them are slow in every step, and seldom the same: a
            # usual step is longer than usual layers.
            longer = statistics.median(map(sum, zip(*tried, strict=True))) / sum(middles)
            middles = [each * longer for each in middles]
        seconds = torch.tensor(middles, dtype=torch.float64)
        dist.all_reduce(seconds)
        mean = (seconds / me.size).tolist()
        found[name] = fit_added(
            [
                (size, n, s - calls * fit.alpha - size / fit.beta, s)
                for (size, n, _), s in zip(taken, mean, strict=True)
            ]
        )
    return found
