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

# Bytes and tensors of an exchange.
_CASES = ((16 << 10, 2), (64 << 10, 16), (1 << 20, 2), (1 << 20, 16), (6 << 20, 2), (6 << 20, 16))
_PAUSE = 0.001  # as in training, no exchange comes directly before
_TRIES = 12
_WARM = 4  # tries before them that do not count
_PASSES = 3  # cloud hosts have fast and slow seconds: measure in several of them

Row = tuple[int, int, list[float]]
"""Bytes, tensors, seconds of each try."""


def fit_added(rows: Sequence[tuple[float, float, float, float]]) -> Added:
    """Fit costs per call, tensor and byte, none negative, with the least squared relative error.

    Args:
        rows: bytes, tensors, seconds beyond the collective's, seconds with it.
    """
    weights = np.array([1.0 / max(whole, 1e-9) for *_, whole in rows])
    terms = np.array([[1.0, tensors, size] for size, tensors, *_ in rows]) * weights[:, None]
    target = np.array([seconds for _, _, seconds, _ in rows]) * weights
    scale = np.abs(terms).max(axis=0)
    least, best = float((target**2).sum()), np.zeros(3)
    for count in (1, 2, 3):
        for chosen in map(list, itertools.combinations(range(3), count)):
            columns = terms[:, chosen]
            values = np.linalg.lstsq(columns / scale[chosen], target, rcond=None)[0] / scale[chosen]
            error = float(((columns @ values - target) ** 2).sum())
            if (values >= 0).all() and error < least * (1 - 1e-9):
                least, best = error, np.zeros(3)
                best[chosen] = values
    return Added(*(float(v) for v in best))


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
        gradients = [torch.ones_like(p) for p in ctx.saved_tensors]
        ctx.marks("backed", ctx.index)
        return (grads[0].clone(), None, None, *gradients)


class _Layer(nn.Module):
    """Tensors of ``size`` bytes together, and no work."""

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
        layers = [_Layer(size, tensors, marks, i) for i, (size, tensors) in enumerate(_CASES)]
        self.cases = [(layer.size, len(layer.weights)) for layer in layers]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _time_fsdp(me: World, tries: int) -> tuple[list[Row], list[Row]]:
    """Gather each layer's parameters and reduce its gradients, by FSDP2."""
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
            # Freeing the parameters after a layer's pass belongs to gathering them.
            following = at["called", i + 1] if i + 1 < len(_CASES) else middle
            gathers[i].append(at["in", i] - at["called", i] + following - at["out", i])
            after = at["back", i - 1] if i else end
            reduces[i].append(after - at["backed", i])
        for p in model.parameters():
            p.grad = None
    gather_rows, reduce_rows = (
        [(*case, values[_WARM:]) for case, values in zip(model.cases, seconds, strict=True)]
        for seconds in (gathers, reduces)
    )
    return gather_rows, reduce_rows


def warm(me: World) -> None:
    """Train a little on the CPU, sharded, to load the libraries that this needs. A collective."""
    with torch.random.fork_rng(devices=[]):
        _time_fsdp(me, 1)


def _time_ddp(tries: int) -> list[Row]:
    """Average a layer's gradients, by DDP."""
    rows = []
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
        rows.append((layer.size, tensors, values[_WARM:]))
    return rows


def _time_zero1(tries: int) -> list[Row]:
    """Send each worker's updated parameters to all others, by ZeRO-1."""
    rows = []
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
        rows.append((layer.size, tensors, values[_WARM:]))
    return rows


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


def _time_pipeline(me: World, send: LinkFit, tries: int) -> tuple[float, float]:
    """Seconds that a pipeline adds to a pass of a micro-batch, without following the model (sends,
    receives, and waking up for them), and to a step.

    With these, simulations of a pipeline whose layers sleep match the measured times, for few and
    for many micro-batches.
    """
    from ronde.parallel.pipeline_parallel import PipelineParallel

    counts = (me.size, 5 * me.size)
    data = torch.zeros(counts[1], 16), torch.zeros(counts[1], 16)

    def new_work() -> Work:  # a pipeline keeps only its worker's part of a model
        model = nn.Sequential(*(_Napping(16, 16) for _ in range(me.size)))
        return Work(
            model,
            torch.optim.SGD(model.parameters(), lr=0.0),
            lambda batch: ((model(batch[0]) - batch[1]).square().mean(), None),
            lambda n: (data[0][:n], data[1][:n]),
        )

    followed: float = action_seconds(new_work())
    naps = _time_nap(tries)
    cuts = tuple(str(i) for i in range(1, me.size))
    steps: list[float] = []
    for count in counts:
        plan = Plan(
            workers=me.size,
            batch_size=count,
            pipeline=me.size,
            micro_batch=1,
            accumulation=count,
            split_at=cuts,
        )
        work = new_work()
        strategy = PipelineParallel(plan, work, me)
        micros = [tuple(t[i : i + 1] for t in data) for i in range(count)]
        parts = [Part(1, count, i == count - 1) for i in range(count)]
        seconds = []
        for _ in range(tries):
            dist.barrier()
            start = time.perf_counter()
            strategy.step(micros, parts, work.compute, None)
            strategy.finish()
            seconds.append(time.perf_counter() - start)
        steps.append(statistics.median(seconds[2:]))
    means = _mean_over_workers(me, [*naps, *steps, followed])
    forward, backward, few, many, followed = means
    each = send.alpha + 64 / send.beta
    times = Times((forward,) * me.size, (backward,) * me.size, (each,) * me.size, (each,) * me.size)

    def simulate(count: int, overhead: float) -> float:
        step = run_step(plan.schedule, me.size, 1, count, times, overhead_seconds=overhead)
        return step.seconds

    low, high = 0.0, many
    for _ in range(30):
        middle = (low + high) / 2
        more = simulate(counts[1], middle) - simulate(counts[0], middle)
        low, high = (middle, high) if more < many - few else (low, middle)
    return max(0.0, low - followed), max(0.0, few - simulate(counts[0], low))


def _time_nap(tries: int) -> list[float]:
    """Seconds of a sleeping layer's forward and backward pass."""
    layer, x = _Napping(16, 16), torch.zeros(1, 16)
    passes: list[tuple[float, float]] = []
    for _ in range(tries):
        start = time.perf_counter()
        y = layer(x).sum()
        middle = time.perf_counter()
        y.backward()
        passes.append((middle - start, time.perf_counter() - middle))
    return [statistics.median(seconds) for seconds in zip(*passes, strict=True)]


def _mean_over_workers(me: World, values: Sequence[float]) -> list[float]:
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor)
    means: list[float] = (tensor / me.size).tolist()
    return means


def _time_tensor_parallel(me: World, all_reduce: LinkFit, tries: int) -> float:
    """Seconds that tensor parallelism adds to an all-reduce of a small block: divided parameters,
    the random state, and waiting for each other.

    The slope from few blocks to many, against the same models whole.
    """
    from ronde.parallel.tensor_parallel import tensor

    width, counts = 16 * me.size, (2, 8)
    data = torch.zeros(4, 16)
    extra: list[float] = []
    for count in counts:
        blocks = (
            nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 16))
            for _ in range(count)
        )
        model = nn.Sequential(*blocks)
        compute: Any = lambda batch, model=model: (model(batch).square().mean(), None)  # noqa: E731
        work = Work(model, torch.optim.SGD(model.parameters(), lr=0.0), compute, lambda n: data[:n])
        plain, divided = [], []
        for _ in range(tries):
            start = time.perf_counter()
            work.compute(data)[0].backward()  # type: ignore[no-untyped-call]
            plain.append(time.perf_counter() - start)
        strategy = tensor(Plan(workers=me.size, batch_size=4, tensor=me.size), work, me)
        for _ in range(_WARM + tries):
            dist.barrier()
            start = time.perf_counter()
            strategy.step([data], [Part(4, 4, True)], work.compute, None)
            divided.append(time.perf_counter() - start)
            strategy.finish()
        extra.append(statistics.median(divided[_WARM:]) - statistics.median(plain))
    few, many = _mean_over_workers(me, extra)
    size = data.numel() * data.element_size()
    per_all_reduce = (many - few) / (counts[1] - counts[0]) / 2.0  # two in a block
    return max(0.0, per_all_reduce - all_reduce.alpha - size / all_reduce.beta)


def measure_runtime(
    me: World, fits: dict[str, LinkFit], quick: bool, tell: Callable[[str], None]
) -> dict[str, Added]:
    """What the runtime adds to collectives: FSDP2 (``"gather"``, ``"reduce"``), DDP (``"bucket"``)
    and ZeRO-1 (``"update"``); tensor parallelism to an all-reduce (``"tensor"``); and a pipeline to
    an action (``"action"``) and a step (``"pipeline"``). A collective.

    Args:
        fits: of the collectives themselves, over all workers.
    """
    tries = _TRIES // 2 if quick else _TRIES
    tell("measuring the runtime's overhead")
    actions, pipelines, divided = [], [], []
    rows: dict[str, list[list[Row]]] = {k: [] for k in ("gather", "reduce", "bucket", "update")}
    with torch.random.fork_rng(devices=[]):
        for _ in range(1 if quick else _PASSES):
            gathers, reduces = _time_fsdp(me, tries)
            action, pipeline = _time_pipeline(me, fits["send"], tries)
            actions.append(action)
            pipelines.append(pipeline)
            divided.append(_time_tensor_parallel(me, fits["all_reduce"], tries))
            rows["gather"].append(gathers)
            rows["reduce"].append(reduces)
            rows["bucket"].append(_time_ddp(tries))
            rows["update"].append(_time_zero1(tries))
    collectives = {
        "gather": ("all_gather", 1),
        "reduce": ("reduce_scatter", 1),
        "bucket": ("all_reduce", 1),
        "update": ("broadcast", me.size),  # one from every worker
    }
    added = {
        "action": Added(call=statistics.median(actions)),
        "pipeline": Added(call=statistics.median(pipelines)),
        "tensor": Added(call=statistics.median(divided)),
    }
    for name, passes in rows.items():
        collective, calls = collectives[name]
        fit = fits[collective]
        tried = [[s for *_, times in rows_ for s in times] for rows_ in zip(*passes, strict=True)]
        middles = [statistics.median(values) for values in tried]
        if name in ("gather", "reduce"):
            # Some layers of a step are slow, and seldom the same ones. So a usual step takes longer
            # than usual layers.
            longer = statistics.median(map(sum, zip(*tried, strict=True))) / sum(middles)
            middles = [middle * longer for middle in middles]
        means = _mean_over_workers(me, middles)
        added[name] = fit_added(
            [
                (size, n, seconds - calls * fit.alpha - size / fit.beta, seconds)
                for (size, n, _), seconds in zip(passes[0], means, strict=True)
            ]
        )
    return added
