"""Choose a pipeline cut for a model: follow it once, time and weigh it on rank 0, cut with
:mod:`ronde.predict.partition`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from ronde.capture import Point, Trace
from ronde.plan import Plan
from ronde.predict import Costs, Cut, LinearCost, Unit, cut, cut_at
from ronde.world import ArgumentError

__all__ = ["choose_cut", "state_ratio", "usable"]

_REPEATS = 3
# A cut between blocks may make the slowest stage this much slower than the best cut.
_WHOLE_BLOCKS = 1.05


def state_ratio(optimizer: Optimizer) -> float:
    """Optimizer state bytes per parameter byte, measured on a small update.

    Example:
        >>> w = torch.nn.Parameter(torch.zeros(2))
        >>> state_ratio(torch.optim.SGD([w], lr=0.1)), state_ratio(torch.optim.AdamW([w]))
        (0.0, 2.0)
    """
    small = nn.Parameter(torch.zeros(32, 32))
    first = optimizer.param_groups[0].items()
    settings = {k: v for k, v in first if k in optimizer.defaults and k != "params"}
    try:
        made = type(optimizer)([small], **settings)
        small.grad = torch.ones_like(small)
        made.step(lambda: torch.zeros(()))  # type: ignore[arg-type,return-value]
    except Exception:
        return 2.0  # cannot be tried: assume Adam
    entries = [t for state in made.state.values() for t in state.values()]
    return sum(t.nbytes for t in entries if isinstance(t, torch.Tensor) and t.dim()) / small.nbytes


def usable(trace: Trace, wanted: int | None = None) -> list[Point]:
    """Places where a stage may begin, in order.

    Leaves out places inside modules whose path may depend on values, if ``wanted`` others remain:
    cut there, such a module must take the same path each time.
    """
    points = [p for p in trace.points() if not p.why_not]
    steady = [p for p in points if not p.unsteady]
    return steady if wanted is not None and len(steady) >= wanted else points


@contextmanager
def _marks(
    model: nn.Module,
    points: list[Point],
    forward: list[float],
    backward: list[float],
    saved: list[int],
) -> Iterator[None]:
    """Record when forward and backward pass each point, and the bytes saved between points."""
    modules = dict(model.named_modules())
    wanted: dict[tuple[str, int], int] = {(p.path, p.nth): i for i, p in enumerate(points)}
    counts: dict[str, int] = {}
    handles = []
    at = -1
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen: set[int] = set()

    def enter(path: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            nonlocal at
            nth = counts.get(path, 0)
            counts[path] = nth + 1
            i = wanted.get((path, nth))
            if i is None:
                return
            at = i
            forward[i] = time.perf_counter()
            for value in [*args, *kwargs.values()]:
                if isinstance(value, torch.Tensor) and value.requires_grad:

                    def reached(_: torch.Tensor, i: int = i) -> None:
                        backward[i] = time.perf_counter()

                    handles.append(value.register_hook(reached))  # type: ignore[no-untyped-call]
                    break

        return hook

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided:
            return tensor  # a graph's edges: they have no one storage, and are the batch's own
        place = tensor.untyped_storage().data_ptr()
        if place not in parameters and place not in seen:
            seen.add(place)
            saved[at + 1] += tensor.untyped_storage().nbytes()
        return tensor

    for path in {p.path for p in points}:
        handles.append(modules[path].register_forward_pre_hook(enter(path), with_kwargs=True))
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            yield
    finally:
        for handle in handles:
            handle.remove()


class _NoExchange(TorchDispatchMode):
    """Refuses collectives: only this worker runs the model, and would wait for ever."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise ArgumentError(
                f"the model or the loss calls a collective of torch.distributed ({func._opname}) "
                "in its forward or backward pass. A pipeline's stages run it at other times, so it "
                "cannot be carried out: use another plan, or call it outside of the step."
            )
        return func(*args, **(kwargs or {}))


def time_points(
    model: nn.Module, points: list[Point], call: Callable[[], torch.Tensor], repeats: int = _REPEATS
) -> tuple[list[float], list[float], list[int]]:
    """Forward and backward seconds and saved bytes of each part: the minimum of several runs, after
    one that warms up.

    Changes nothing.
    """
    parts = len(points) + 1
    forward, backward, kept = [float("inf")] * parts, [float("inf")] * parts, [0] * parts
    random = torch.get_rng_state()
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    gradients = [(p, p.grad) for p in model.parameters()]
    try:
        for repeat in range(repeats + 1):
            for p, _ in gradients:
                p.grad = None
            f, b, saved = [float("nan")] * len(points), [float("nan")] * len(points), [0] * parts
            alone = _NoExchange() if repeat == 0 else nullcontext()
            start = time.perf_counter()
            with alone, _marks(model, points, f, b, saved):
                loss = call()
            middle = time.perf_counter()
            with alone:
                loss.backward()  # type: ignore[no-untyped-call]
            end = time.perf_counter()
            if repeat == 0:
                continue  # the first one warms up
            kept = saved
            f = _filled([start, *f, middle])
            b = _filled([end, *b, middle])
            forward = [min(old, f[i + 1] - f[i]) for i, old in enumerate(forward)]
            backward = [min(old, max(0.0, b[i] - b[i + 1])) for i, old in enumerate(backward)]
    finally:
        torch.set_rng_state(random)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for p, g in gradients:
            p.grad = g
    return forward, backward, kept


def _filled(stamps: list[float]) -> list[float]:
    """Give a skipped point the next one's time: its code counts toward the part before."""
    for i in range(len(stamps) - 2, -1, -1):
        if stamps[i] != stamps[i]:
            stamps[i] = stamps[i + 1]
    return stamps


def chain_of_model(
    model: nn.Module,
    optimizer: Optimizer,
    trace: Trace,
    samples: int,
    points: list[Point],
    times: tuple[list[float], list[float], list[int]] | None,
) -> Costs:
    """The model as units between possible cuts; without times, bytes stand for seconds."""
    edges = [0, *(p.at for p in points), len(trace.events)]
    names = ["(start)", *(p.name for p in points)]
    ratio = state_ratio(optimizer)
    owner: dict[int, int] = {}
    held: list[dict[int, nn.Parameter]] = []
    for i in range(len(names)):
        held.append({id(p): p for e in trace.events[edges[i] : edges[i + 1]] for p in e.parameters})
        for p in held[i]:
            owner.setdefault(p, i)
    paths = {id(p): n for n, p in model.named_parameters()}
    units = []
    for i, name in enumerate(names):
        mine = [p for p in held[i].values() if owner[id(p)] == i]
        trainable = sum(p.numel() * p.element_size() for p in mine if p.requires_grad)
        tied = [paths[k] for k in held[i] if k in paths and sum(k in h for h in held) > 1]
        crossing = points[i].crossing if i < len(points) else ()
        size = sum(trace.values[v].bytes for v in crossing)
        back = sum(trace.values[v].bytes for v in crossing if trace.values[v].requires_grad)
        if times is None:
            events = trace.events[edges[i] : edges[i + 1]]
            saved = sum(trace.values[v].bytes for e in events for v in e.made)
            weights = sum(p.numel() * p.element_size() for p in held[i].values())
            seconds = (saved + weights * samples) * 1e-10
            backwards = (saved + weights * samples) * 2e-10
        else:
            seconds, backwards, saved = times[0][i], times[1][i], times[2][i]
        units.append(
            Unit(
                name=name,
                forward_seconds=LinearCost(seconds),
                backward_seconds=LinearCost(backwards),
                parameter_bytes=sum(p.numel() * p.element_size() for p in mine),
                trainable_bytes=trainable,
                optimizer_bytes=int(trainable * ratio),
                saved_bytes=LinearCost(saved),
                crossing_bytes=LinearCost(size),
                crossing_grad_bytes=LinearCost(back),
                tied=tuple(sorted(tied)),
            )
        )
    return Costs(tuple(units), samples)


def choose_cut(
    plan: Plan,
    model: nn.Module,
    optimizer: Optimizer,
    trace: Trace,
    samples: int,
    call: Callable[[], torch.Tensor] | None,
) -> list[str]:
    """Names of the modules that begin the later stages.

    Without ``call`` (a model on meta), bytes stand for seconds.

    Raises:
        ArgumentError: the model has fewer places to cut than stages, or no such module.
    """
    stages = plan.pipeline * plan.virtual
    points = usable(trace, None if plan.split_at else stages - 1)
    refused = [p for p in trace.points() if p.why_not]
    if len(points) < stages - 1:
        why = f" {refused[0].name}: {refused[0].why_not}." if refused else ""
        names = f" ({', '.join(p.name for p in points[:8])})" if points else ""
        raise ArgumentError(
            f"{type(model).__name__} cannot be cut into {stages} stages: it has {len(points)} "
            f"places where a stage may begin{names}.{why} Use fewer stages, or another plan."
        )
    if plan.split_at:
        split_at = [_resolve(name, trace) for name in plan.split_at]
        costs = chain_of_model(model, optimizer, trace, samples, points, None)
        for name in split_at:
            bad = next((p for p in refused if p.name == name), None)
            if bad is not None:
                raise ArgumentError(f"split_at: no stage can begin at {name}: {bad.why_not}.")
        cut_at(
            costs,
            split_at,
            plan.pipeline,
            virtual=plan.virtual,
            schedule=plan.schedule,
            micro_batches=plan.accumulation,
        )
        if call is not None:
            time_points(model, points, call, 0)  # for what it refuses
        return split_at
    times = time_points(model, points, call) if call is not None else None
    costs = chain_of_model(model, optimizer, trace, samples, points, times)

    def best(units: tuple[Unit, ...]) -> Cut:
        return cut(
            dataclasses.replace(costs, units=units),
            plan.pipeline,
            virtual=plan.virtual,
            schedule=plan.schedule,
            optimize=plan.optimize,
            micro_samples=1,
            micro_batches=plan.accumulation,
        )

    fine = best(costs.units)
    whole = _between_blocks(model, costs.units)
    if sum(u.cut_after for u in whole[:-1]) >= stages - 1:
        coarse = best(whole)
        if _slowest(coarse, plan.pipeline) <= _slowest(fine, plan.pipeline) * _WHOLE_BLOCKS:
            return coarse.names(costs)
    return fine.names(costs)


def _resolve(name: str, trace: Trace) -> str:
    """The outermost module that begins where ``name`` does: ``"4.0"`` is ``"4"``."""
    points = trace.points()
    if any(p.name == name for p in points):
        return name
    path, _, nth = name.partition("#")
    start = next((c.start for c in trace.calls if c.path == path and c.nth == int(nth or 0)), None)
    return next((p.name for p in points if p.at == start), name)


def _between_blocks(model: nn.Module, units: tuple[Unit, ...]) -> tuple[Unit, ...]:
    """The chain, cut only where a child of the model or a member of a module list begins."""
    modules = dict(model.named_modules())

    def begins_block(name: str) -> bool:
        parent, _, _ = name.partition("#")[0].rpartition(".")
        lists = nn.Sequential | nn.ModuleList | nn.ModuleDict
        return not parent or isinstance(modules.get(parent), lists)

    return tuple(
        dataclasses.replace(u, cut_after=u.cut_after and begins_block(after.name))
        for u, after in zip(units, [*units[1:], units[-1]], strict=True)
    )


def _slowest(made: Cut, workers: int) -> float:
    seconds = [0.0] * workers
    for stage in made.stages:
        seconds[stage.worker] += stage.seconds
    return max(seconds)
