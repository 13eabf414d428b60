"""Run one stage of a forward pass: the script's own Python runs, other stages' events are skipped.

An earlier stage's event (a module call, or a torch function between such calls) is not executed:
its result is a *placeholder* with the right shape, or the tensor that was sent here. The pass stops
where the next stage begins. No graph is captured, so loops, branches on shapes or the batch,
containers, and the model's own caches work as on one device. Every stage computes what depends only
on the batch and constants; such calls are not counted as events.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ronde.capture import (
    NUMBERS,
    Given,
    Interceptor,
    Trace,
    TraceEvent,
    Value,
    as_tuple,
    data_shaped,
    not_training,
    resume_draws,
    whole_size,
)
from ronde.world import PlanError
from ronde.world.tensors import Opaque, build, flatten, tensors_in

__all__ = ["Diverged", "Guards", "Program", "StageRun", "has_guards", "program"]

_tokens = itertools.count(1)


class Diverged(PlanError):
    """The forward pass took another path than the recorded one."""


class _Left(BaseException):
    """The next stage begins. Not an Exception: the model's own ``except`` must not catch it."""


@dataclass(eq=False)
class Program:
    """A forward pass cut into stages, for micro-batches of one shape."""

    events: list[tuple[int, TraceEvent]]  # (stage, event), as coarse as the cut allows
    values: list[Value]
    bounds: list[int]  # per stage, the number of the first event after it
    sends: list[tuple[int, ...]]  # per stage, the values it passes on: its own and received ones
    gradients: list[tuple[int, ...]]  # per stage, the values in ``sends`` that require gradients
    cloned: frozenset[int]  # values that a later stage changes in place
    reached: frozenset[int] = frozenset()  # identities of parameters the loss's gradient reaches
    # a value made by an in-place change -> the value before, and the stage
    replaced: dict[int, tuple[int, int]] = field(default_factory=dict)
    kept: tuple[tuple[nn.Module, str], ...] = ()  # (module, attribute) that outlives a pass
    erratic: bool = False  # the path may depend on activations: compare shapes with recorded ones
    sized: bool = False  # it reads sizes that depend on activations
    loose: bool = False  # some event reads a tensor whose making was not recorded
    writes: tuple[tuple[int, nn.Parameter], ...] = ()  # (stage, parameter) changed in place
    # identities of modules of which another pass may use other parameters, such as experts
    partial: frozenset[int] = frozenset()

    def parameters(self, stage: int) -> list[nn.Parameter]:
        """A stage's parameters, each once."""
        return list({id(p): p for s, e in self.events if s == stage for p in e.parameters}.values())

    def modules(self, stage: int) -> list[nn.Module]:
        """Modules that run whole in a stage, or whose buffers it changes, each once."""
        mine = [e for s, e in self.events if s == stage]
        modules = [e.module for e in mine if e.module is not None]
        modules += [e.buffer[0] for e in mine if e.buffer is not None]
        return list({id(m): m for m in modules}.values())


def program(trace: Trace, bounds: Sequence[int]) -> Program:
    """Cut a pass before the events ``bounds`` (ascending event numbers)."""
    # Of the events that every stage runs, only module calls count: functions may vary in number.
    events = [
        (stage, e) for stage, e in trace.coarse(list(bounds)) if not e.shared or e.kind == "call"
    ]
    stages = len(bounds) + 1
    stop = [0] * stages
    for i, (stage, _) in enumerate(events):
        stop[stage] = i + 1
    for stage in range(1, stages):
        stop[stage] = max(stop[stage], stop[stage - 1])
    made_in: dict[int, int] = {}
    needed: dict[int, int] = {}  # value -> last stage that reads it
    changed_in: dict[int, int] = {}  # memory -> last stage that changes it in place
    values = trace.values
    replaced = {
        v.index: (v.before, sum(b <= v.maker for b in bounds))
        for v in values
        if v.before >= 0 and not v.shared
    }
    for stage, event in events:
        if event.shared:
            continue
        needed.update(dict.fromkeys(event.reads, stage))
        made_in.update({new: stage for _, new in event.changes})
        changed_in.update(dict.fromkeys(event.changed_storages, stage))
        for value in event.made:
            made_in.setdefault(value, stage)
            if values[value].kind != "tensor":
                needed[value] = stages - 1
    for value in made_in:
        if values[value].readers and values[value].readers[-1] >= len(trace.events):
            needed[value] = stages - 1  # the pass returns it
    own = sorted((v, s) for v, s in made_in.items() if not values[v].shared)
    sends = [
        tuple(v for v, s in own if s <= stage < needed.get(v, 0)) for stage in range(stages - 1)
    ]
    sends.append(())
    takes_gradient = [tuple(v for v in row if values[v].requires_grad) for row in sends]
    cloned = frozenset(
        v
        for v, s in made_in.items()
        if values[v].storage and changed_in.get(values[v].storage, -1) > s
    )
    reached = set(trace.reached)
    erratic = False
    for _, event in events:
        reads_number = not event.shared and any(values[v].kind != "tensor" for v in event.made)
        erratic = erratic or event.erratic or reads_number
        # Next time it may use parameters that it did not use when it was recorded.
        results = (*event.made, *(new for _, new in event.changes))
        if event.erratic and any(values[v].reached for v in results):
            reached |= {id(p) for p in event.parameters if p.requires_grad}
    sized, loose = any(e.sized for _, e in events), any(e.loose for _, e in events)
    writes = tuple(
        (sum(b <= i for b in bounds), p) for i, e in enumerate(trace.events) for p in e.writes
    )
    return Program(
        events,
        values,
        stop,
        sends,
        takes_gradient,
        cloned,
        frozenset(reached),
        replaced,
        trace.kept,
        erratic,
        sized,
        loose,
        writes,
        _partial(trace, [e for _, e in events]),
    )


def _partial(trace: Trace, events: list[TraceEvent]) -> frozenset[int]:
    """Modules that run whole and used only some of their parameters, or may do so another time; or
    whose backward pass, which is their own, may leave some out.
    """
    used: dict[int, set[int]] = {}
    for call in trace.calls:
        inner = trace.events[call.start : call.stop]
        used.setdefault(id(call.module), set()).update(id(p) for e in inner for p in e.parameters)
    return frozenset(
        id(e.module)
        for e in events
        if e.module is not None
        and (
            e.erratic
            or not trace.doubtful.isdisjoint(map(id, e.parameters))
            or not {id(p) for p in e.parameters if p.requires_grad} <= used.get(id(e.module), set())
        )
    )


class StageRun(Interceptor):
    """One stage's forward pass on one micro-batch: takes ``received`` values, fills ``sent``."""

    def __init__(self, program: Program, stage: int, received: dict[int, torch.Tensor]) -> None:
        super().__init__()
        self.program = program
        self.sizes = program.sized
        self.stage = stage
        self.received = received
        self.sent: dict[int, torch.Tensor] = {}
        self.result: Any = None
        self._events = program.events
        self._values = program.values
        self._wanted = set(program.sends[stage])
        self._at = 0
        self._stop = program.bounds[stage]
        self._last = stage == len(program.bounds) - 1
        self._token = next(_tokens)  # marks tensors that this run made or received
        self._objects: dict[int, torch.Tensor] = {}  # value -> the tensor that stands for it here
        self._placeholders: dict[int, int] = {}  # identity of a placeholder -> its value
        self._memory: set[int] = set()  # storages of constants that were changed in place
        self._alive: list[Any] = []  # keeps those storages, so that no other tensor gets them
        for value, tensor in received.items():
            tensor._ronde_run = self._token  # type: ignore[attr-defined]
            tensor._ronde_received = True  # type: ignore[attr-defined]
            at: int | None = value
            # before and after an in-place change of an earlier stage it is the same object
            while at is not None:
                self._objects[at] = tensor
                old, where = program.replaced.get(at, (-1, stage))
                at = old if where < stage and not self._values[old].shared else None

    def run(self, call: Callable[[], Any]) -> Any:
        """Run ``call()`` up to the end of this stage; the last stage returns the pass's result.

        Raises:
            Diverged: the pass takes another path than the recorded one.
        """
        # made by an earlier stage, read by a later one
        self.sent.update({v: self.received[v] for v in self._wanted if v in self.received})
        begin = self.program.bounds[self.stage - 1] if self.stage else 0
        if not self._last and self._stop in (0, begin):
            return None  # an empty stage
        try:
            with _without_placeholders(self.program), self:
                self.result = call()
        except _Left:
            return None
        if self._at < (len(self._events) if self._last else self._stop):
            raise Diverged(
                f"the forward pass ended where {self._events[self._at][1].where} was "
                f"expected. {_ADVICE}"
            )
        return self.result

    # -- events ------------------------------------------------------------------------

    def on_call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """See :class:`Interceptor`."""
        if self._at >= len(self._events):
            return self.plain_call(module, args, kwargs)
        stage, event = self._events[self._at]
        if event.module is not module:
            return self.plain_call(module, args, kwargs)
        if self._at >= self._stop:
            raise _Left
        self._at += 1
        if stage == self.stage or event.shared:
            with self.pause():
                return self._execute(event, module, args, kwargs)
        if event.leaves or event.changes:
            return self._skip(event, args, kwargs)
        return build([], event.shape)

    def on_function(
        self, function: Any, args: Any, kwargs: Any, what: tuple[str, bool, bool]
    ) -> Any:
        """See :class:`Interceptor`."""
        name = what[0]
        counted = self._is_event(what, args, kwargs)
        if self._at >= len(self._events):
            if counted:
                raise Diverged(f"the forward pass calls {name} after its recorded end. {_ADVICE}")
            return function(*args, **kwargs)
        stage, event = self._events[self._at]
        if not counted and (event.name != name or not self._unmarked(event, args)):
            # from the batch and constants: every stage computes it
            result = function(*args, **kwargs)
            if self.program.loose:
                for tensor in tensors_in(result):
                    if getattr(tensor, "_ronde_run", 0) != self._token:
                        tensor._ronde_run = -self._token  # type: ignore[attr-defined]
            return result
        if self._at >= self._stop:
            raise _Left
        if event.name != name or event.kind != "op":
            raise Diverged(
                f"the forward pass calls {name} where {event.where} was expected. {_ADVICE}"
            )
        self._at += 1
        if stage == self.stage:
            return self._execute(event, function, args, kwargs)
        return self._skip(event, args, kwargs)

    def on_size(self, function: Any, args: Any, kwargs: Any, what: tuple[str, bool, bool]) -> Any:
        """See :class:`Interceptor`. A stage without the tensor gets its current size."""
        if not any(self._unknown_size(t) for t in args if isinstance(t, torch.Tensor)):
            return function(*args, **kwargs)
        name = what[0]
        if self._at >= len(self._events):
            raise Diverged(
                f"the forward pass reads the {name} of a tensor after its recorded end. {_ADVICE}"
            )
        stage, event = self._events[self._at]
        if self._at >= self._stop:
            raise _Left
        if event.name != name or not event.sized:
            raise Diverged(
                f"the forward pass reads the {name} of a tensor where {event.where} was "
                f"expected. {_ADVICE}"
            )
        self._at += 1
        if stage == self.stage:
            return whole_size(self._execute(event, as_tuple(function), args, kwargs), name)
        return whole_size(self._skip(event, args, kwargs), name)

    def _unknown_size(self, tensor: torch.Tensor) -> bool:
        """Whether its size depends on activation values."""
        if isinstance(tensor, FakeTensor):
            value = self._placeholders.get(id(tensor))
            return value is not None and self._values[value].data_shaped
        return getattr(tensor, "_ronde_sized", 0) == self._token

    def _is_event(self, what: tuple[str, bool, bool], args: Any, kwargs: Any) -> bool:
        """Whether a function draws random numbers, or takes activations or parameters."""
        return (
            what[2] or self._is_traced(args) or (bool(kwargs) and self._is_traced(kwargs.values()))
        )

    def _is_traced(self, arguments: Any) -> bool:
        """Whether an argument was made by an event, or is a parameter."""
        token = self._token  # exact types first: this runs for every torch function
        for value in arguments:
            kind = type(value)
            if kind is torch.Tensor:
                if getattr(value, "_ronde_run", 0) == token or (
                    self._memory and _memory(value) in self._memory
                ):
                    return True
            elif kind is int or kind is float or value is None or kind is bool or kind is str:
                continue
            elif isinstance(value, torch.Tensor):
                if (
                    isinstance(value, FakeTensor | nn.Parameter)
                    or getattr(value, "_ronde_run", 0) == token
                ):
                    return True
                if self._memory and _memory(value) in self._memory:
                    return True
            elif kind is tuple or kind is list:
                if self._is_traced(value):
                    return True
            elif any(self._is_traced((t,)) for t in tensors_in(value)):
                return True
        return False

    def _unmarked(self, event: TraceEvent, args: Any) -> bool:
        """Whether an event takes an unmarked tensor: a buffer it changes, or an unrecorded one."""
        if event.buffer is not None:
            module, name = event.buffer
            return any(t is module._buffers.get(name) for t in tensors_in(args))
        if not event.loose:
            return False
        unseen = [v for v in (self._values[r] for r in event.reads) if v.why_not]
        for t in tensors_in(args):
            if getattr(t, "_ronde_run", 0) == -self._token:
                continue  # a constant: this run made it
            if t.grad_fn is not None or any(
                (tuple(t.shape), t.dtype, t.requires_grad) == (v.shape, v.dtype, v.requires_grad)
                for v in unseen
            ):
                return True
        return False

    def _execute(
        self, event: TraceEvent, function: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Run an event of this stage, mark its results, and keep what the next stage needs."""
        resume_draws(event.drawn)
        if event.shared:
            return function(*args, **kwargs)
        self._refuse_placeholders(event, args, kwargs)
        result = function(*args, **kwargs)
        if event.changes:
            inputs = _inputs(args, kwargs)
            for place, value in event.changes:
                self._mark(inputs[place])
                if value in self._wanted:
                    self._send(event, value, inputs[place])
        token = self._token
        if (event.hands_on or self.program.erratic) and not event.opaque:
            self._compare(event, result)
        elif type(result) is torch.Tensor:
            result._ronde_run = token  # type: ignore[attr-defined]
        else:
            for tensor in tensors_in(result):
                if isinstance(tensor, FakeTensor):
                    raise _not_sent(event)
                if not isinstance(tensor, nn.Parameter):
                    tensor._ronde_run = token  # type: ignore[attr-defined]
        if not self._wanted.isdisjoint(event.made):
            if event.shape is None and len(event.made) == 1 and isinstance(result, torch.Tensor):
                self._send(event, event.made[0], result)
            else:
                made = iter(event.made)
                for leaf, mark in zip(flatten(result)[0], event.leaves, strict=True):
                    if _is_tensor(mark):
                        value = next(made)
                        if value in self._wanted:
                            self._send(event, value, leaf)
        return result

    def _compare(self, event: TraceEvent, result: Any) -> None:
        """Mark an event's results leaf by leaf; constants that it returns stay constants.

        If the path may depend on activations, results must match the placeholders of other stages.
        """
        strict = self.program.erratic
        try:
            leaves, shape = flatten(result)
            same = shape == event.shape and len(leaves) == len(event.leaves)
        except Opaque:
            leaves, same = [], False
        if not same and (strict or len(leaves) != len(event.leaves)):
            raise Diverged(
                f"{event.where} returns another structure than when it was recorded. {_ADVICE}"
            )
        made = iter(event.made)
        for leaf, mark in zip(leaves, event.leaves, strict=True):
            value = self._values[next(made)] if _is_tensor(mark) else None
            if not isinstance(leaf, torch.Tensor):
                if strict and isinstance(leaf, bool | int | float | str | None):
                    differs = leaf != mark and leaf == leaf  # NaN equals the recorded NaN
                    if differs if value is None else value.kind == "tensor":
                        raise _other_result(event, repr(leaf), mark)
                continue
            if isinstance(leaf, FakeTensor):
                raise _not_sent(event)
            if isinstance(leaf, nn.Parameter) or (value is not None and value.shared):
                continue
            leaf._ronde_run = self._token  # type: ignore[attr-defined]
            if value is None:
                if strict:
                    raise _other_result(event, "a tensor", mark)
            elif value.data_shaped:
                leaf._ronde_sized = self._token  # type: ignore[attr-defined]
            elif strict and leaf.shape != value.shape:
                raise _other_shape(event, leaf, value)

    def _send(self, event: TraceEvent, number: int, made: Any) -> None:
        value = self._values[number]
        if value.kind == "number":
            made = torch.tensor(made, dtype=value.dtype)
        elif value.kind == "array":
            made = torch.from_numpy(made.copy())
        if tuple(made.shape) != value.shape or made.dtype != value.dtype:
            raise _other_shape(event, made, value)
        self.sent[number] = made

    def _refuse_placeholders(self, event: TraceEvent, args: Any, kwargs: Any) -> None:
        """Refuse to compute with a tensor that is not here."""
        for value in (*args, *kwargs.values()):
            if type(value) is torch.Tensor or value is None or type(value) is nn.Parameter:
                continue
            for tensor in (value,) if isinstance(value, torch.Tensor) else tensors_in(value):
                if isinstance(tensor, FakeTensor) and (
                    event.kind == "op" or self._placeholders.get(id(tensor), -1) in event.reads
                ):
                    raise _not_sent(event)

    def _mark(self, tensor: torch.Tensor) -> None:
        """Mark a tensor changed in place, and those that share its memory, as made here."""
        if getattr(tensor, "_ronde_run", 0) != self._token and not isinstance(tensor, FakeTensor):
            tensor._ronde_run = self._token  # type: ignore[attr-defined]
            self._memory.add(_memory(tensor))
            self._alive.append(tensor)

    def _skip(self, event: TraceEvent, args: Any, kwargs: Any) -> Any:
        """Return what another stage's event would: placeholders, received tensors, constants."""
        if event.changes:
            inputs = _inputs(args, kwargs)
            for place, value in event.changes:
                tensor = inputs[place]
                if isinstance(tensor, FakeTensor) or tensor is self._objects.get(value):
                    continue
                self._mark(tensor)
                held = self.received.get(value)
                if held is not None:  # a constant that earlier stages filled in
                    with torch.set_grad_enabled(held.requires_grad):
                        tensor.copy_(held)
        if event.shape is None and len(event.leaves) == 1 and isinstance(event.leaves[0], Value):
            return self._stand_in(event.leaves[0])
        leaves = []
        for leaf in event.leaves:
            if isinstance(leaf, Value):
                leaves.append(self._stand_in(leaf))
            elif isinstance(leaf, Given):
                inputs = _inputs(args, kwargs) if leaf.tensor else [*args, *kwargs.values()]
                leaves.append(inputs[leaf.place])
            else:
                leaves.append(leaf)
        return build(leaves, event.shape)

    def _stand_in(self, value: Value) -> Any:
        held = self._objects.get(value.index)
        if value.kind != "tensor":
            held = value.placeholder if held is None else held
            return held.item() if value.kind == "number" else held.numpy()
        if held is not None:
            return held
        placeholder = value.placeholder
        self._placeholders[id(placeholder)] = value.index
        return placeholder


class Guards(StageRun):
    """Reads the first ``until`` numbers and data-dependent sizes that a pass takes from the batch.

    A path may depend on them, for example where the model skips an empty mask. They depend on the
    batch alone, so every worker reads the same.
    """

    def __init__(self, program: Program, until: int | None = None) -> None:
        super().__init__(program, -1, {})
        self._readings: list[Any] = []
        self._until = until

    def read(self, call: Callable[[], Any]) -> tuple[Any, ...]:
        """The readings of ``call()``, as far as it takes the recorded path."""
        # It ends at another path, or where the script needs values that are not computed here.
        with suppress(_Left, Exception), _without_placeholders(self.program), not_training(), self:
            call()
        return tuple(self._readings)

    def on_call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """See :class:`Interceptor`."""
        if self._at < len(self._events):
            event = self._events[self._at][1]
            if event.module is module and event.shared:
                self._at += 1
                return self.plain_call(module, args, kwargs)
        return super().on_call(module, args, kwargs)

    def on_function(
        self, function: Any, args: Any, kwargs: Any, what: tuple[str, bool, bool]
    ) -> Any:
        """See :class:`Interceptor`."""
        name = what[0]
        reads = name in NUMBERS or data_shaped(name, args)
        from_batch = reads and not self._is_event(what, args, kwargs)
        result = super().on_function(function, args, kwargs, what)
        if from_batch:
            shapes = [tuple(t.shape) for t in tensors_in(result)]
            self._readings.append((name, shapes or _plain(result)))
            if len(self._readings) == self._until:
                raise _Left
        return result


def _plain(value: Any) -> Any:
    return value.tolist() if type(value).__module__ == "numpy" else value


def has_guards(trace: Trace) -> bool:
    """Whether a pass reads anything from the batch that its path may depend on."""
    return any(
        e.shared and (e.name in NUMBERS or any(trace.values[v].data_shaped for v in e.made))
        for e in trace.events
    )


_ADVICE = (
    "A pipeline needs a forward pass whose path depends on the batch alone, not on randomness, "
    "activations, or earlier passes. Cut elsewhere with split_at, so that such a branch lies "
    "within one module of one stage, or use another plan."
)


def _not_sent(event: TraceEvent) -> Diverged:
    return Diverged(
        f"{event.where} reads a tensor that an earlier stage made and did not send. {_ADVICE}"
    )


def _other_result(event: TraceEvent, returned: str, mark: Any) -> Diverged:
    recorded = "a tensor" if isinstance(mark, Value | Given) else repr(mark)
    return Diverged(
        f"{event.where} returns {returned}; the recorded pass had {recorded}. {_ADVICE}"
    )


def _other_shape(event: TraceEvent, made: torch.Tensor, value: Value) -> Diverged:
    return Diverged(
        f"{event.where} makes a tensor of shape {tuple(made.shape)} and type {made.dtype}; in the "
        f"recorded pass it had shape {value.shape} and type {value.dtype}. {_ADVICE}"
    )


def _is_tensor(mark: Any) -> bool:
    return isinstance(mark, Value) or (isinstance(mark, Given) and mark.tensor)


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _inputs(args: Any, kwargs: Any) -> list[torch.Tensor]:
    return [t for t in tensors_in((args, kwargs)) if not isinstance(t, nn.Parameter)]


@contextmanager
def _without_placeholders(program: Program) -> Iterator[None]:
    """Undo what modules keep for the next pass where it is a placeholder."""

    def attributes(module: nn.Module, name: str) -> dict[str, Any]:
        return module._buffers if name in module._buffers else module.__dict__

    before = [(m, name, attributes(m, name).get(name)) for m, name in program.kept]
    try:
        yield
    finally:
        for module, name, old in before:
            if isinstance(attributes(module, name).get(name), FakeTensor):
                attributes(module, name)[name] = old
