"""A followed forward pass: its events, its values, and the places where a stage may begin."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from ronde.world import ArgumentError

ELSEWHERE = "is changed in place through another tensor"
"""Why a value cannot be sent: see :attr:`Value.why_not`."""


class Given(NamedTuple):
    """In an event's result: an input tensor (or object) that is returned as is."""

    place: int
    tensor: bool = True


@dataclass(eq=False)
class Value:
    """A tensor made by an event, at one point in time; an in-place change makes another value."""

    index: int
    maker: int  # number of the event; -1: it existed before the pass
    shared: bool  # depends on the batch and constants alone: every stage has it
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    like: tuple[Any, ...] = ()  # fake mode, strides, and device for :attr:`placeholder`
    readers: list[int] = field(default_factory=list)  # event numbers; len(events): it is returned
    kind: str = "tensor"  # or "number", "array": taken out of a tensor, sent as one
    data_shaped: bool = False  # its shape may depend on values
    storage: int = 0  # the memory that it shares with its views
    why_not: str = ""  # why it cannot be sent
    before: int = -1  # the value before an in-place change made this one
    reached: bool = False  # the loss's gradient reaches it
    _placeholder: torch.Tensor | None = None

    @property
    def placeholder(self) -> torch.Tensor:
        """A fake tensor that stands for it on other stages."""
        if self._placeholder is None:
            if not self.like:
                why = self.why_not or "every stage computes it"
                raise ArgumentError(f"a tensor of shape {self.shape} cannot be left out: {why}.")
            mode, strides, device = self.like
            with torch._C.DisableTorchFunction(), mode:
                placeholder = torch.empty_strided(
                    self.shape, strides, dtype=self.dtype, device=device
                )
                self._placeholder = placeholder.requires_grad_(self.requires_grad)
        return self._placeholder

    @property
    def bytes(self) -> int:
        """Size of the tensor."""
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize


@dataclass(eq=False)
class TraceEvent:
    """A module call treated as one, or a torch function between such calls."""

    kind: str  # "call" or "op"
    name: str  # the module's path, or the function's name
    inside: str  # path of the module whose forward calls it
    module: nn.Module | None
    reads: tuple[int, ...]  # values
    made: tuple[int, ...]  # values of the tensors in its result, in order
    shape: Any  # the result's structure; a leaf is a Value, a Given, or a constant
    leaves: tuple[Any, ...]
    changes: tuple[tuple[int, int], ...]  # in place: (index of the tensor argument, new value)
    parameters: tuple[nn.Parameter, ...]
    shared: bool  # every stage runs it
    opaque: bool = False  # its result cannot be taken apart
    replaces: tuple[int, ...] = ()  # for each of ``changes``, the value before
    loose: bool = False  # it reads a tensor whose making was not recorded
    buffer: tuple[nn.Module, str] | None = None  # changed in place without reading activations
    frames: tuple[int, ...] = ()  # the checkpointed functions around it
    changed_storages: tuple[int, ...] = ()
    erratic: bool = False  # its path, and so its parameters, may depend on values or randomness
    sized: bool = False  # it reads a size that depends on activations
    writes: tuple[nn.Parameter, ...] = ()  # parameters that it changes in place
    drawn: int = 0  # draws of the pass before it

    def __post_init__(self) -> None:
        # whether its result contains one of its tensor arguments
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
    """A place where a stage may begin: right before the ``nth`` call of the module at ``path``."""

    path: str  # of the outermost module whose call begins here
    nth: int
    at: int  # number of the next event
    crossing: tuple[int, ...]  # values that the later part needs and cannot compute itself
    why_not: str = ""  # why no stage may begin here
    unsteady: bool = False  # inside a module whose path may depend on values

    @property
    def name(self) -> str:
        """As written in ``split_at``."""
        return self.path if self.nth == 0 else f"{self.path}#{self.nth}"


@dataclass(eq=False)
class Trace:
    """One forward pass and its loss."""

    events: list[TraceEvent]
    values: list[Value]
    calls: list[Call]  # inner calls before the calls that contain them
    faked: bool  # activations were fake; otherwise the pass really ran
    result: Any = None  # of the pass, without its graph
    reached: set[int] = field(default_factory=set)  # parameters that the loss's gradient reaches
    # those of them that only an operation with a backward pass of its own reaches: maybe never
    doubtful: set[int] = field(default_factory=set)
    kept: tuple[tuple[nn.Module, str], ...] = ()  # (module, attribute) that outlives the pass
    # paths of modules that one stage must run together, the last of them at the end
    together: tuple[tuple[str, ...], ...] = ()

    def points(self) -> list[Point]:
        """All places where a stage may begin, in order, except the first event's."""
        starts: dict[int, Call] = {}
        for call in self.calls:  # outer calls come later: they win
            if call.path and call.start < call.stop:
                starts[call.start] = call
        first = next((i for i, e in enumerate(self.events) if not e.shared), len(self.events))
        forbidden = self._forbidden()
        unsteady = self._unsteady()
        points = []
        for at in sorted(starts):
            if at <= first:
                continue
            call = starts[at]
            crossing = self.crossing(at)
            why_not = self._why_not(at, crossing, forbidden)
            inside = any(low < at < high for low, high in unsteady)
            points.append(Point(call.path, call.nth, at, tuple(crossing), why_not, inside))
        return points

    def _unsteady(self) -> list[tuple[int, int]]:
        """``(from, to)`` of calls that read numbers from activations: their path may differ."""
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
        """Values made before event ``at`` and read at or after it, except shared ones."""
        return [
            v.index for v in self.values if not v.shared and v.maker < at and self._last(v) >= at
        ]

    def _last(self, value: Value) -> int:
        """The last event that reads it. Anything may read a number taken from a tensor."""
        return len(self.events) if value.kind != "tensor" else max(value.readers, default=-1)

    def _forbidden(self) -> list[tuple[int, int, str]]:
        """``(from, to, why)``: no stage may begin before these events."""
        ranges = []
        for i, event in enumerate(self.events):
            if event.opaque:
                why = f"the result of {event.where} cannot be taken apart, or sent"
                ranges.append((i + 1, len(self.events), why))
            if event.kind == "op" and event.name in ("grad", "backward") and not event.shared:
                why = f"{event.where} differentiates earlier events, which need the same stage"
                ranges.append((0, i, why))
        for value in self.values:
            if value.why_not == ELSEWHERE and value.before >= 0:
                before = self.values[value.before]
                if not before.shared:
                    where = self.events[value.maker].where
                    why = (
                        f"{where} changes a tensor in place that shares memory with an earlier one"
                    )
                    ranges.append((before.maker + 1, value.maker, why))
        return [*ranges, *self._inside_together()]

    def _inside_together(self) -> Iterator[tuple[int, int, str]]:
        calls = sorted(self.calls, key=lambda c: c.start)
        for paths in self.together:
            first: int | None = None
            for call in calls:
                if call.path not in paths or call.start == call.stop:
                    continue
                first = call.start if first is None else first
                if call.path == paths[-1]:
                    why = f"it lies between {paths[0]!r} and {paths[-1]!r}, which workers split"
                    why += " together"
                    yield first + 1, call.stop - 1, why
                    first = None

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
            readers = (self.events[r].where for r in value.readers if at <= r < len(self.events))
            reader = next(readers, "the result")
            if value.why_not:
                return f"a tensor that {reader} reads {value.why_not} ({maker})"
            if value.data_shaped:
                return f"{reader} reads a result of {maker} whose shape depends on values"
            if value.storage:
                memory[value.storage] = memory.get(value.storage, 0) + 1
        if any(n > 1 for n in memory.values()):
            for event in self.events[at:]:
                if any(memory.get(s, 0) > 1 for s in event.changed_storages):
                    where = event.where
                    return f"{where} changes a tensor in place that shares memory with one it sends"
        return ""

    def coarse(self, bounds: list[int]) -> list[tuple[int, TraceEvent]]:
        """The pass with as few events as the cuts ``bounds`` allow: ``(stage, event)`` in order."""
        stages = [bisect_right(bounds, i) for i in range(len(self.events))]
        begin: dict[int, Call] = {}
        for call in self.calls:  # the outermost that lies in one stage wins
            if call.event is None or call.start == call.stop or not call.path:
                continue
            if stages[call.start] == stages[call.stop - 1]:
                begin[call.start] = call
        out: list[tuple[int, TraceEvent]] = []
        at = 0
        while at < len(self.events):
            whole = begin.get(at)
            if whole is not None and whole.event is not None:
                out.append((stages[at], whole.event))
                at = whole.stop
            else:
                out.append((stages[at], self.events[at]))
                at += 1
        return out


def bounds_of(
    trace: Trace, points: list[Point], may: Callable[[int, TraceEvent], bool] | None = None
) -> list[int]:
    """Find the points of a cut in another pass.

    With ``may(stage, event)``, a stage may begin at a module that this pass does not call (an
    auxiliary head of training). It then begins as late as the stage before may run, and may be
    empty.

    Raises:
        ArgumentError: a module is not called, or no stage may begin there in this pass.
    """
    places = {(c.path, c.nth): c.start for c in trace.calls}
    forbidden = trace._forbidden()
    starts: list[int | None] = []
    before = 0
    for point in points:
        at = places.get((point.path, point.nth))
        if at is None and may is None:
            raise _not_called(point)
        if at is not None:
            if at < before:
                raise ArgumentError(
                    f"a stage begins at {point.name}, which this forward pass calls before the "
                    "preceding stage begins."
                )
            within = 0 < at < len(trace.events)
            why = trace._why_not(at, trace.crossing(at), forbidden) if within else ""
            if why:
                raise ArgumentError(f"no stage can begin at {point.name} in this pass: {why}.")
            before = at
        starts.append(at)
    bounds = [at for at in starts if at is not None]
    if may is None or len(bounds) == len(points):
        return bounds
    bounds = []
    for stage, at in enumerate(starts, 1):
        if at is None:
            low = bounds[-1] if bounds else 0
            end = max(low, len(trace.events) - 1)
            high = next((start for start in starts[stage:] if start is not None), end)
            own = ((i, e) for i, e in enumerate(trace.events[low:high], low) if not e.shared)
            at = next((i for i, e in own if not may(stage - 1, e)), high)
            while at > low and trace._why_not(at, trace.crossing(at), forbidden):
                at -= 1
        bounds.append(at)
    for i, event in enumerate(trace.events):
        if not event.shared and not may(sum(b <= i for b in bounds), event):
            raise _not_called(next(p for p, at in zip(points, starts, strict=True) if at is None))
    return bounds


def _not_called(point: Point) -> ArgumentError:
    return ArgumentError(f"a stage begins at {point.name}, which this forward pass does not call.")
