"""A followed forward pass (:mod:`ronde.capture.follow`): its events, its values, and where it can
be cut.

A :class:`TraceEvent` is a module call, or a torch function called between modules (the glue). A
:class:`Value` is a tensor that one event makes and others read. A :class:`Trace` says for each
place whether a stage may begin there, and what would cross.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from ronde.world import ArgumentError

__all__ = ["ELSEWHERE", "Call", "TraceEvent", "Given", "Point", "Trace", "Value", "bounds_of"]

ELSEWHERE = "is changed in place through another tensor"
"""Why a value cannot be sent: see :attr:`Value.why_not`."""


class Given(NamedTuple):
    """In an event's result: an input tensor (or object) that is returned as is."""

    place: int
    tensor: bool = True


@dataclass(eq=False)
class Value:
    """A tensor made by an event, at one point in time; changed in place, it is another value.

    Attributes:
        index: its number.
        maker: number of the event, -1 for what was there before.
        shared: computed from the batch and constants alone: every stage has it.
        shape, dtype, requires_grad: of the tensor.
        readers: numbers of the events that read it; the number after the last where the pass
            returns it.
        kind: ``"tensor"``; ``"number"`` or ``"array"`` for what a forward pass took out of one,
            sent as a tensor.
        changed_later: some event changes it in place.
        data_shaped: its shape may depend on what is in the batch or in an activation.
        storage: the memory that it shares with its views.
        why_not: why it cannot be sent; empty where it can.
        before: the value that it was before it was changed in place.
        reached: the loss's gradient arrives at it.
    """

    index: int
    maker: int
    shared: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    like: tuple[Any, ...] = ()
    readers: list[int] = field(default_factory=list)
    changed_later: bool = False
    kind: str = "tensor"
    data_shaped: bool = False
    storage: int = 0
    why_not: str = ""
    before: int = -1
    reached: bool = False
    _ghost: torch.Tensor | None = None

    @property
    def ghost(self) -> torch.Tensor:
        """A fake tensor that stands for it where it is missing."""
        if self._ghost is None:
            if not self.like:
                raise ArgumentError(
                    f"a tensor of shape {self.shape} cannot be left out: "
                    f"{self.why_not or 'every stage computes it'}."
                )
            mode, strides, device = self.like
            with torch._C.DisableTorchFunction(), mode:
                self._ghost = torch.empty_strided(
                    self.shape, strides, dtype=self.dtype, device=device
                )
                self._ghost.requires_grad_(self.requires_grad)
        return self._ghost

    @property
    def bytes(self) -> int:
        """Size of the tensor."""
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize


@dataclass(eq=False)
class TraceEvent:
    """A module call treated as one, or a torch function between such calls.

    Attributes:
        kind: ``"call"`` or ``"op"``.
        name: the module's path, or the function's name.
        inside: path of the module whose forward pass calls it.
        module: the module called.
        reads: values it takes.
        made: the tensors among its results, in order: numbers of values.
        shape, leaves: how its result is put together; a leaf that is a :class:`Value` stands for
            the tensor, a :class:`Given` for an argument.
        changes: ``(place among its tensor arguments, new value)`` of those that it changes in
            place.
        parameters: parameters that it uses, by identity.
        shared: every stage runs it.
        replaces: for each of ``changes``, the value before.
        opaque: its result cannot be taken apart.
        loose: it reads what was made out of sight.
        buffer: ``(module, name)`` of a buffer that it changes in place without reading an
            activation.
        frames: checkpointed functions that it is called in.
        erratic: what it uses may be other parameters another time: its path depends on what it
            computes, or on randomness.
        hands_on: its result holds a tensor that it was given.
        sized: it looks at a size that depends on what is in an activation.
        writes: the parameter that it changes in place.
        forward_seconds, backward_seconds: where it was timed.
    """

    kind: str
    name: str
    inside: str
    module: nn.Module | None
    reads: tuple[int, ...]
    made: tuple[int, ...]
    shape: Any
    leaves: tuple[Any, ...]
    changes: tuple[tuple[int, int], ...]
    parameters: tuple[nn.Parameter, ...]
    shared: bool
    opaque: bool = False
    replaces: tuple[int, ...] = ()
    loose: bool = False
    buffer: tuple[nn.Module, str] | None = None
    frames: tuple[int, ...] = ()
    changed_storages: tuple[int, ...] = ()
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    saved_bytes: int = 0
    erratic: bool = False
    sized: bool = False
    writes: tuple[nn.Parameter, ...] = ()

    def __post_init__(self) -> None:
        self.hands_on = any(isinstance(leaf, Given) and leaf.tensor for leaf in self.leaves)

    @property
    def where(self) -> str:
        """A description for errors."""
        return f"{self.name} (in {self.inside})" if self.inside else self.name


@dataclass(eq=False)
class Call:
    """A module call: events ``[start, stop)`` happened inside."""

    path: str
    nth: int
    module: nn.Module
    start: int
    stop: int
    event: TraceEvent | None  # the whole call as one event; None where it cannot be one


@dataclass(frozen=True)
class Point:
    """A place where a stage may begin: right before the ``nth`` call of the module at ``path``.

    Attributes:
        path: the outermost module whose call begins here.
        nth: which of its calls, from 0.
        at: number of the event that comes next.
        crossing: values alive across it that the later part does not compute by itself.
        why_not: why no stage may begin here; empty where one may.
        unsteady: it lies inside a module whose path may depend on what it computes.
    """

    path: str
    nth: int
    at: int
    crossing: tuple[int, ...]
    why_not: str = ""
    unsteady: bool = False

    @property
    def name(self) -> str:
        """As written in ``split_at``."""
        return self.path if self.nth == 0 else f"{self.path}#{self.nth}"


@dataclass(eq=False)
class Trace:
    """One forward pass and its loss.

    Attributes:
        events: in the order in which they happened, as fine as module calls and glue go.
        values: tensors.
        calls: module calls, inner ones before the outer ones that hold them.
        faked: whether activations were fake; otherwise the pass really ran.
        result: what the pass returned, without its graph.
        reached: identities of the parameters that the loss's gradient arrives at.
        kept: ``(module, attribute)`` where the forward pass keeps something from one pass to the
            next.
    """

    events: list[TraceEvent]
    values: list[Value]
    calls: list[Call]
    faked: bool
    result: Any = None
    reached: set[int] = field(default_factory=set)
    kept: tuple[tuple[nn.Module, str], ...] = ()

    def points(self) -> list[Point]:
        """All places where a stage may begin, in order, except the first event's."""
        starts: dict[int, Call] = {}
        for call in self.calls:  # outer calls come later: they win
            if call.path and call.start < call.stop:
                starts[call.start] = call
        first = next((i for i, e in enumerate(self.events) if not e.shared), len(self.events))
        forbidden = self._forbidden()
        unsteady = self._unsteady()
        found = []
        for at in sorted(starts):
            if at <= first:
                continue
            call = starts[at]
            crossing = self.crossing(at)
            inside = any(low < at < high for low, high in unsteady)
            found.append(
                Point(
                    call.path,
                    call.nth,
                    at,
                    tuple(crossing),
                    self._why_not(at, crossing, forbidden),
                    inside,
                )
            )
        return found

    def _unsteady(self) -> list[tuple[int, int]]:
        """``(from, to)`` of calls that read a number or size from an activation: another time they
        may take another path.
        """
        taken = [
            (i, e.inside)
            for i, e in enumerate(self.events)
            if not e.shared and any(self.values[v].kind != "tensor" for v in e.made)
        ]
        if not taken:
            return []
        return [
            (c.start, c.stop)
            for c in self.calls
            if c.path and any(c.path == p and c.start <= i < c.stop for i, p in taken)
        ]

    def crossing(self, at: int) -> list[int]:
        """Values made before event ``at`` and read at or after it, except those every stage
        computes itself.
        """
        return [
            v.index for v in self.values if not v.shared and v.maker < at and self._last(v) >= at
        ]

    def _last(self, value: Value) -> int:
        """The last event that reads it. Anything may read a number taken from a tensor."""
        return len(self.events) if value.kind != "tensor" else max(value.readers, default=-1)

    def _forbidden(self) -> list[tuple[int, int, str]]:
        """``(from, to, why)``: no stage may begin before these events."""
        found = []
        for i, event in enumerate(self.events):
            if event.opaque:
                found.append(
                    (
                        i + 1,
                        len(self.events),
                        f"what {event.where} returned cannot be taken apart, or sent",
                    )
                )
            if event.kind == "op" and event.name in ("grad", "backward") and not event.shared:
                found.append(
                    (
                        0,
                        i,
                        f"{event.where} differentiates what comes before it: the two stay "
                        "in one stage",
                    )
                )
        for value in self.values:
            if (
                value.why_not == ELSEWHERE
                and value.before >= 0
                and not self.values[value.before].shared
            ):
                why = (
                    f"{self.events[value.maker].where} changes a tensor in place that shares "
                    "its memory with one made before"
                )
                found.append((self.values[value.before].maker + 1, value.maker, why))
        return found

    def _why_not(self, at: int, crossing: list[int], forbidden: list[tuple[int, int, str]]) -> str:
        for low, high, why in forbidden:
            if low <= at <= high:
                return why
        before, here = self.events[at - 1], self.events[at]
        if before.frames and here.frames and before.frames[0] == here.frames[0]:
            return f"it lies inside a checkpointed function (in {here.inside or 'the model'})"
        memory: dict[int, int] = {}
        for index in crossing:
            value = self.values[index]
            maker = self.events[value.maker].where if value.maker >= 0 else "the model"
            reader = next(
                (self.events[r].where for r in value.readers if at <= r < len(self.events)),
                "the result",
            )
            if value.why_not:
                return f"a tensor that {reader} reads {value.why_not} ({maker})"
            if value.data_shaped:
                return (
                    f"the shape of what {maker} makes, and {reader} reads, depends on what is "
                    "in the batch"
                )
            if value.storage:
                memory[value.storage] = memory.get(value.storage, 0) + 1
        if any(n > 1 for n in memory.values()):
            for event in self.events[at:]:
                if any(memory.get(s, 0) > 1 for s in event.changed_storages):
                    return (
                        f"{event.where} changes a tensor in place that shares its memory with "
                        "another one that is sent"
                    )
        return ""

    def coarse(self, bounds: list[int]) -> list[tuple[int, TraceEvent]]:
        """The pass with as few events as the cuts ``bounds`` allow: ``(stage, event)`` in order."""
        edges = [*bounds, len(self.events)]
        stages: list[int] = []
        stage = 0
        for i in range(len(self.events)):
            while i >= edges[stage]:
                stage += 1
            stages.append(stage)
        begin: dict[int, Call] = {}
        for call in self.calls:  # the outermost that lies in one stage wins
            if call.event is None or call.start == call.stop or not call.path:
                continue
            if stages[call.start] == stages[call.stop - 1]:
                begin[call.start] = call
        out: list[tuple[int, TraceEvent]] = []
        at = 0
        while at < len(self.events):
            held = begin.get(at)
            if held is not None and held.event is not None:
                out.append((stages[at], held.event))
                at = held.stop
            else:
                out.append((stages[at], self.events[at]))
                at += 1
        return out


def bounds_of(
    trace: Trace, points: list[Point], may: Callable[[int, TraceEvent], bool] | None = None
) -> list[int]:
    """Find the same points in another pass.

    Args:
        trace: the other pass.
        points: where the stages after the first begin, in the pass that was cut.
        may: whether a stage may run an event. Where it is given, a stage that begins at a module
            which this pass does not call (an auxiliary head of training) begins as late as the
            stage before it may go on; there may be nothing left for it.

    Raises:
        ArgumentError: a module is not called there, or no stage may begin there in this pass.
    """
    places = {(c.path, c.nth): c.start for c in trace.calls}
    forbidden = trace._forbidden()
    found: list[int | None] = []
    before = 0
    for point in points:
        at = places.get((point.path, point.nth))
        if at is None and may is None:
            raise _lacks(point)
        if at is not None:
            if at < before:
                raise ArgumentError(
                    f"a stage begins at {point.name}, which this forward pass calls before "
                    "the stage before it begins."
                )
            why = (
                trace._why_not(at, trace.crossing(at), forbidden)
                if 0 < at < len(trace.events)
                else ""
            )
            if why:
                raise ArgumentError(
                    f"no stage can begin at {point.name} in this forward pass: {why}."
                )
            before = at
        found.append(at)
    bounds = [at for at in found if at is not None]
    if may is None or len(bounds) == len(points):
        return bounds
    bounds = []
    for stage, at in enumerate(found, 1):
        if at is None:
            low = bounds[-1] if bounds else 0
            high = next(
                (f for f in found[stage:] if f is not None), max(low, len(trace.events) - 1)
            )
            high = next(
                (
                    i
                    for i in range(low, high)
                    if not trace.events[i].shared and not may(stage - 1, trace.events[i])
                ),
                high,
            )
            at = high
            while at > low and trace._why_not(at, trace.crossing(at), forbidden):
                at -= 1
        bounds.append(at)
    for i, event in enumerate(trace.events):
        if not event.shared and not may(sum(b <= i for b in bounds), event):
            raise _lacks(next(p for p, at in zip(points, found, strict=True) if at is None))
    return bounds


def _lacks(point: Point) -> ArgumentError:
    return ArgumentError(f"a stage begins at {point.name}, which this forward pass does not call.")
