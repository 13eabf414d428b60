"""Choose a pipeline cut for a model: follow it once, count and weigh it on rank 0, cut with
:mod:`ronde.predict.partition`. No clock is read: one model has one cut.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ronde.capture import Point, Trace
from ronde.capture.intercept import calls_heard
from ronde.introspect import SavedState
from ronde.plan import Plan
from ronde.predict import Costs, Cut, LinearCost, Unit, cut, cut_at
from ronde.world import ArgumentError
from ronde.world.tensors import tensors_in

__all__ = ["choose_cut", "state_ratio", "usable"]

# What a device does, about, and what an operation costs besides. Only their ratios decide.
_OPERATIONS_AND_BYTES_PER_SECOND = {"cpu": (5e10, 1e10), "cuda": (5e13, 1e12)}
_OPERATION_SECONDS = 5e-6


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


@dataclasses.dataclass
class _Parts:
    """What each part of a model costs, from one point where a stage may begin to the next.

    Attributes:
        forward: seconds of its forward pass.
        backward: seconds of its backward pass.
        saved: bytes that it keeps for its backward pass.
    """

    forward: list[float]
    backward: list[float]
    saved: list[int]


class _Counter(TorchDispatchMode):
    """Counts what operations cost, where only this worker runs the model: a collective would wait
    for ever, and is refused.
    """

    def __init__(self, speed: tuple[float, float]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._speed = speed
        self.seconds, self.part = [0.0], 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise ArgumentError(
                f"the model or the loss calls a collective of torch.distributed ({func._opname}) "
                "in its forward or backward pass. A pipeline's stages run it at other times, so it "
                "cannot be carried out: use another plan, or call it outside of the step."
            )
        out = func(*args, **(kwargs or {}))
        if not getattr(func, "is_view", True):
            given = tensors_in((args, kwargs))
            moved = sum(t.nbytes for t in (*given, *tensors_in(out)) if _is_dense(t))
            per_second, bytes_per_second = self._speed
            cost = _operations(func, args, kwargs or {}, given, out) / per_second
            self.seconds[self.part] += cost + moved / bytes_per_second + _OPERATION_SECONDS
        return out


def _operations(func: Any, args: Any, kwargs: Any, given: list[torch.Tensor], out: Any) -> float:
    """Floating-point operations of one call, those of torch's counter and two that it lacks."""
    if (formula := flop_registry.get(func.overloadpacket)) is not None:
        return float(formula(*args, **kwargs, out_val=out))
    name, back = func._opname, "backward" in func._opname
    if "attention" in name and len(given) > 2:
        return (10.0 if back else 4.0) * given[0].numel() * given[1 + back].shape[-2]
    if "rnn" in name:
        rows = given[0].numel() / given[0].shape[-1]
        return (4.0 if back else 2.0) * rows * sum(t.numel() for t in given[1:] if t.dim() == 2)
    return 0.0


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided


def count_parts(model: nn.Module, points: list[Point], call: Callable[[], torch.Tensor]) -> _Parts:
    """Count what each part costs, by the operations and bytes of one pass: the same on every
    machine and under any load, so that a run is cut in the same place each time. Changes nothing.
    """
    modules = dict(model.named_modules())
    wanted = {(p.path, p.nth): i for i, p in enumerate(points)}
    counts: dict[str, int] = {}
    handles: list[Any] = []
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen: set[int] = set()
    speeds = _OPERATIONS_AND_BYTES_PER_SECOND
    counter = _Counter(speeds.get(next(model.parameters()).device.type, speeds["cuda"]))
    parts = len(points) + 1
    saved = [0] * parts

    def enter(path: str, args: Any, kwargs: Any) -> None:
        nth = counts.get(path, 0)
        counts[path] = nth + 1
        i = wanted.get((path, nth))
        if i is None:
            return
        counter.part = i + 1
        for value in [*args, *kwargs.values()]:
            if isinstance(value, torch.Tensor) and value.requires_grad:

                def reached(_: torch.Tensor, i: int = i) -> None:
                    counter.part = min(counter.part, i)

                handles.append(value.register_hook(reached))  # type: ignore[no-untyped-call]
                break

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not _is_dense(tensor):
            return tensor  # a graph's edges: they have no one storage, and are the batch's own
        place = tensor.untyped_storage().data_ptr()
        if place not in weights and place not in seen:
            seen.add(place)
            saved[counter.part] += tensor.untyped_storage().nbytes()
        return tensor

    begin = {p.path: modules[p.path] for p in points}
    saving = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
    with SavedState(model):
        for p in model.parameters():
            p.grad = None  # not by zero_grad(), which a script may have replaced
        counter.seconds = [0.0] * parts
        try:
            with calls_heard(begin, enter), counter, saving:
                loss = call()
            forward, counter.seconds = counter.seconds, [0.0] * parts
            with counter:
                loss.backward()  # type: ignore[no-untyped-call]
        finally:
            for handle in handles:
                handle.remove()
    return _Parts(forward, counter.seconds, saved)


def chain_of_model(
    model: nn.Module,
    optimizer: Optimizer,
    trace: Trace,
    samples: int,
    points: list[Point],
    counted: _Parts | None,
) -> Costs:
    """The model as units between possible cuts; not counted, bytes stand for seconds."""
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
        if counted is None:
            events = trace.events[edges[i] : edges[i + 1]]
            saved = sum(trace.values[v].bytes for e in events for v in e.made)
            weights = sum(p.numel() * p.element_size() for p in held[i].values())
            seconds = (saved + weights * samples) * 1e-10
            backwards = (saved + weights * samples) * 2e-10
        else:
            seconds, backwards = counted.forward[i], counted.backward[i]
            saved = counted.saved[i]
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
        cut_at(costs, split_at, stages)
        if call is not None:
            count_parts(model, points, call)  # for what it refuses
        return split_at
    counted = count_parts(model, points, call) if call is not None else None
    costs = chain_of_model(model, optimizer, trace, samples, points, counted)

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
    # A cut between blocks may make the slowest stage a twentieth and ten operations slower than the
    # best cut: in a small model, single operations must not move it into a block.
    limit = 1.05 * fine.seconds + 10 * _OPERATION_SECONDS
    tried = 0
    for depth in range(max(unit.name.count(".") for unit in costs.units) + 1):
        whole = _between_blocks(model, costs.units, depth)
        places = sum(u.cut_after for u in whole[:-1])
        if places >= stages - 1 and places > tried:
            tried, coarse = places, best(whole)
            if coarse.seconds <= limit:
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


def _between_blocks(model: nn.Module, units: tuple[Unit, ...], depth: int) -> tuple[Unit, ...]:
    """The chain, cut only where a child of the model or a member of a module list begins, inside of
    at most ``depth`` modules.
    """
    modules = dict(model.named_modules())

    def begins_block(name: str) -> bool:
        parent, _, _ = name.partition("#")[0].rpartition(".")
        lists = nn.Sequential | nn.ModuleList | nn.ModuleDict
        inside = name.count(".") <= depth
        return inside and (not parent or isinstance(modules.get(parent), lists))

    return tuple(
        dataclasses.replace(u, cut_after=u.cut_after and begins_block(after.name))
        for u, after in zip(units, [*units[1:], units[-1]], strict=True)
    )
