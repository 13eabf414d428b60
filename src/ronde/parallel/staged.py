"""Run one stage of a forward pass: the script's own Python runs, and what belongs to other stages is left out.

Every stage runs the same lines. An event (a module's call, or a torch function between such calls) of an earlier stage is not
carried out: what it would have made is a *ghost* with the right shape, or the tensor itself where that was sent here. After the
last event of the stage the pass is left. No graph is captured: loops, branches on shapes or on the batch, tuples, dictionaries
and caches of the model's own work as they do on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ronde.plan.trace import Event, Interceptor, Trace, Value, build, not_an_event, tensors_in
from ronde.world import RondeError

__all__ = ["Program", "StageRun", "program"]


class _Left(BaseException):
    """The stage's last event has happened. Not an Exception: the model's own ``except`` shall not catch it."""


@dataclass(eq=False)
class Program:
    """A forward pass cut into stages, for micro-batches of one shape.

    Attributes:
        events: ``(stage, event)``, as coarse as the cut allows.
        values: tensors that the events make.
        bounds: number of the first event after each stage.
        sends: per stage, the values that it hands to the next one: what it made, or was handed itself.
        gradients: per stage, those of ``sends`` that take gradients.
        cloned: values that a later stage changes in place.
        reached: identities of the parameters that the loss's gradient arrives at.
    """

    events: list[tuple[int, Event]]
    values: list[Value]
    bounds: list[int]
    sends: list[tuple[int, ...]]
    gradients: list[tuple[int, ...]]
    cloned: frozenset[int]
    reached: frozenset[int] = frozenset()

    def parameters(self, stage: int) -> list[nn.Parameter]:
        """Those that a stage uses, each once."""
        return list({id(p): p for s, e in self.events if s == stage for p in e.parameters}.values())

    def modules(self, stage: int) -> list[nn.Module]:
        """Modules that run as a whole in a stage, each once."""
        return list({id(e.module): e.module for s, e in self.events if s == stage and e.module is not None}.values())


def program(trace: Trace, bounds: Sequence[int]) -> Program:
    """Cut a pass before the events ``bounds`` (numbers of the trace's events, ascending)."""
    edges = list(bounds)
    events = trace.coarse(edges)
    stages = len(edges) + 1
    stop = [0] * stages
    for i, (stage, _) in enumerate(events):
        stop[stage] = i + 1
    made_in: dict[int, int] = {}
    needed: dict[int, int] = {}  # value -> last stage that reads it
    changed_in: dict[int, set[int]] = {}
    for stage, event in events:
        if event.shared:
            continue
        for value in event.reads:
            needed[value] = max(needed.get(value, 0), stage)
        for place, new in event.changes:
            made_in[new] = stage
            if place < len(event.reads):
                changed_in.setdefault(event.reads[place], set()).add(stage)
        for value in event.made:
            made_in.setdefault(value, stage)
    sends: list[tuple[int, ...]] = []
    for stage in range(stages - 1):
        sends.append(tuple(sorted(v for v, s in made_in.items() if s <= stage < needed.get(v, 0) and not trace.values[v].shared)))
    sends.append(())
    takes_gradient = [tuple(v for v in row if trace.values[v].requires_grad) for row in sends]
    cloned = frozenset(v for v, where in changed_in.items() if v in made_in and any(s > made_in[v] for s in where))
    # A value's ghost must not keep the pass that made it alive.
    return Program(events, trace.values, stop, sends, takes_gradient, cloned, frozenset(trace.reached))


class StageRun(Interceptor):
    """One forward pass of one stage on one micro-batch.

    Args:
        program: the pass.
        stage: which one.
        received: values handed on by the stage before, by number.

    Attributes:
        sent: what the next stage needs, by number; complete after :meth:`run`.
        result: what the whole pass returns, on the last stage.
    """

    def __init__(self, program: Program, stage: int, received: dict[int, torch.Tensor]) -> None:
        super().__init__()
        self.program = program
        self.stage = stage
        self.received = received
        self.sent: dict[int, torch.Tensor] = {}
        self.result: Any = None
        self._wanted = set(program.sends[stage])
        self._at = 0
        self._stop = program.bounds[stage]
        self._last = stage == len(program.bounds) - 1
        self._ghosts: dict[int, int] = {}
        self._stands_for: dict[int, Any] = {}  # a tensor that was changed in place elsewhere -> what it is now
        self._kept: list[Any] = []

    def run(self, call: Callable[[], Any]) -> Any:
        """``call()``, as far as this stage goes."""
        for value in self._wanted:
            if value in self.received:
                self.sent[value] = self.received[value]  # made by an earlier stage, read by a later one
        try:
            with self:
                if self._at < self._stop or self._last:
                    self.result = call()
        except _Left:
            return None
        return self.result

    # -- events ----------------------------------------------------------------------------------------------------

    def on_call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """See :class:`Interceptor`."""
        stage, event = self._expected()
        if event.kind != "call" or event.module is not module:
            return self.plain_call(module, args, kwargs)
        with self.pause():
            return self._event(stage, event, module, args, kwargs)

    def on_function(self, function: Any, args: Any, kwargs: Any) -> Any:
        """See :class:`Interceptor`."""
        if not_an_event(function):
            with self.pause():
                return function(*args, **kwargs)
        stage, event = self._expected()
        name = getattr(function, "__name__", "")
        if event.kind != "op" or (name not in (event.name, "__get__")):
            raise RondeError(
                f"the forward pass took another path than when it was followed: {name} where {event.name} "
                f"(in {event.inside or 'the model'}) was expected. Does a branch depend on randomness, or on how often it ran? A pipeline "
                "needs a forward pass whose path depends on the batch alone; cut elsewhere with split_at, or use another plan."
            )
        with self.pause():
            return self._event(stage, event, function, args, kwargs)

    def _expected(self) -> tuple[int, Event]:
        if self._at >= len(self.program.events):
            raise RondeError(
                "the forward pass went on after where it ended when it was followed: a pipeline needs the same path each time."
            )
        return self.program.events[self._at]

    def _event(self, stage: int, event: Event, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._at += 1
        here = stage == self.stage or event.shared
        if not here:
            result = self._ghostly(event, args, kwargs)
        else:
            result = function(*self._resolve(args, event), **self._resolve(kwargs, event))
            if self._wanted:
                self._note(event, args, kwargs, result)
        if self._at >= self._stop and not self._last:
            raise _Left
        return result

    def _note(self, event: Event, args: Any, kwargs: Any, result: Any) -> None:
        """Keep what the next stage needs."""
        if not self._wanted.isdisjoint(event.made):
            for value, tensor in zip(event.made, _leaves(event, result), strict=True):
                if value in self._wanted and value not in self.sent:
                    self.sent[value] = tensor
        if event.changes:
            inputs = [t for t in tensors_in((args, kwargs)) if not isinstance(t, nn.Parameter)]
            for place, value in event.changes:
                if value in self._wanted:
                    self.sent[value] = self._stands_for.get(id(inputs[place]), inputs[place])

    def _ghostly(self, event: Event, args: Any, kwargs: Any) -> Any:
        """What an event of another stage would have returned."""
        if event.changes:
            inputs = [t for t in tensors_in((args, kwargs)) if not isinstance(t, nn.Parameter)]
            for place, value in event.changes:
                self._stands_for[id(inputs[place])] = self._stand_in(self.program.values[value])
                self._kept.append(inputs[place])
        return build(event.shape, iter([self._stand_in(leaf) if isinstance(leaf, Value) else leaf for leaf in event.leaves]))

    def _stand_in(self, value: Value) -> torch.Tensor:
        held = self.received.get(value.index)
        if held is not None:
            return held
        self._ghosts[id(value.ghost)] = value.index
        return value.ghost

    def _resolve(self, given: Any, event: Event) -> Any:
        """Arguments with tensors in place of ghosts."""
        if isinstance(given, torch.Tensor):
            if self._stands_for:
                given = self._stands_for.get(id(given), given)
            if isinstance(given, FakeTensor):
                value = self._ghosts.get(id(given))
                if value is None or value not in self.received:
                    raise RondeError(
                        f"{event.name} (in {event.inside or 'the model'}) needs a tensor that an earlier stage made and that was not "
                        "expected here: the model cannot be cut there. Choose where with split_at, or use another plan."
                    )
                return self.received[value]
            return given
        if given is None or isinstance(given, int | float | str):
            return given
        if type(given) is tuple:
            return tuple(self._resolve(v, event) for v in given)
        if type(given) is list:
            return [self._resolve(v, event) for v in given]
        if type(given) is dict:
            return {k: self._resolve(v, event) for k, v in given.items()}
        if any(isinstance(t, FakeTensor) or id(t) in self._stands_for for t in tensors_in(given)):
            from torch.utils._pytree import tree_map_only

            return tree_map_only(torch.Tensor, lambda t: self._resolve(t, event), given)
        return given


def _leaves(event: Event, result: Any) -> Iterable[torch.Tensor]:
    """The tensors among an event's results, in the order of ``event.made``."""
    from ronde.plan.trace import flatten

    leaves: list[Any] = []
    flatten(result, leaves)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not isinstance(leaf, nn.Parameter)]
