"""Callbacks: what a run does beside training, by the events of its loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ronde.parallel import Part
from ronde.plan import Share
from ronde.run.parts import Parts
from ronde.world import ArgumentError

__all__ = [
    "NAN_EVERY_STEPS",
    "Callback",
    "Callbacks",
    "EvaluationResult",
    "StepView",
    "check_callbacks",
]

# on an accelerator, where reading a loss waits for the device
NAN_EVERY_STEPS = 50


@dataclass(eq=False)
class StepView:
    """The optimizer step under way.

    Attributes:
        parts: what the run is made of.
        callbacks: of the run.
        share: which samples of the epoch are this worker's.
        samples: of the global batch.
        micros: this worker's micro-batches, on its device.
        split: how each micro-batch counts, in ``run.step``.
        loss: of the global batch, from ``after_exchange`` on.
        action: ``"skip"`` leaves the update out. ``after_exchange`` may set it, the same on all
            ranks.
        learning_rate: of the first group, with its warm-up.
    """

    parts: Parts
    callbacks: Callbacks
    share: Share
    loss: torch.Tensor
    micros: Sequence[Any] = ()
    split: Sequence[Part] = ()
    action: str = ""
    samples: int = 0
    learning_rate: float = 0.0

    @property
    def number(self) -> int:
        """Optimizer steps done before this one; in ``step_ended``, with this one."""
        return self.parts.state.step


@dataclass(frozen=True)
class EvaluationResult:
    """The result of an evaluation."""

    name: str
    result: Mapping[str, Any]
    samples: int


class Callback:
    """The events of a run. A callback is any object that has some of these methods; one that it
    does not have costs nothing. A method must do the same on all ranks if it communicates.

    Attributes:
        while_measuring: whether it is called in the steps that a tool takes on batches of its own,
            such as ``ronde doctor``.
        rests: whether it is not called at the moment; see :meth:`Callbacks.rest`.
    """

    while_measuring = False
    rests = False

    def batch_taken(self, step: StepView) -> None:
        """A batch is about to be handed to the script."""

    def before_passes(self, step: StepView) -> None:
        """``run.step(batch)`` begins: forward and backward passes follow."""

    def before_backward(self, step: StepView) -> None:
        """``run.backward(loss)`` begins."""

    def after_passes(self, step: StepView) -> None:
        """All backward passes of the step have ended."""

    def after_exchange(self, step: StepView) -> None:
        """Loss and gradients are those of the global batch."""

    def before_clip(self, step: StepView) -> None:
        """The step is going to be taken: gradients are unscaled, and not yet clipped."""

    def before_update(self, step: StepView) -> None:
        """The optimizer is about to step."""

    def after_update(self, step: StepView) -> None:
        """The optimizer has stepped. Not called where the update was left out."""

    def step_ended(self, step: StepView) -> None:
        """The scheduler has stepped, and ``run.state`` counts the step."""

    def epoch_ended(self, parts: Parts) -> None:
        """An epoch has ended; ``run.state.epoch`` still counts it."""

    def evaluation_started(self, parts: Parts) -> None:
        """``run.evaluate`` is about to read its first batch."""

    def evaluation_batch(self, parts: Parts, share: Share, low: int, high: int) -> None:
        """Samples ``low`` to ``high`` of the evaluation are about to be evaluated."""

    def evaluated(self, parts: Parts, outcome: EvaluationResult) -> None:
        """``run.evaluate`` has a result."""

    def before_save(self, parts: Parts) -> None:
        """A checkpoint is about to be made."""

    def after_save(self, parts: Parts) -> None:
        """It is written, or being written in the background."""

    def before_copy(self, parts: Parts) -> None:
        """A copy of the training in memory is about to be made, to go on from after a failure."""

    def ended(self, parts: Parts, status: str) -> None:
        """The run has ended: ``"completed"``, ``"interrupted"``, or ``"paused"``."""


_EVENTS = [name for name in vars(Callback) if callable(getattr(Callback, name)) and name[0] != "_"]


class Callbacks:
    """The callbacks of one run, in their order: for each event, the methods that there are."""

    def __init__(self, callbacks: Iterable[Any]) -> None:
        self.all = tuple(callbacks)
        self._bind()

    def _bind(self) -> None:
        awake = [c for c in self.all if not getattr(c, "rests", False)]

        def methods(event: str) -> tuple[Callable[..., None], ...]:
            nothing = getattr(Callback, event)
            owned = ((c, getattr(type(c), event, None)) for c in awake)
            return tuple(getattr(c, event) for c, own in owned if own not in (None, nothing))

        self.batch_taken = methods("batch_taken")
        self.before_passes = methods("before_passes")
        self.before_backward = methods("before_backward")
        self.after_passes = methods("after_passes")
        self.after_exchange = methods("after_exchange")
        self.before_clip = methods("before_clip")
        self.before_update = methods("before_update")
        self.after_update = methods("after_update")
        self.step_ended = methods("step_ended")
        self.epoch_ended = methods("epoch_ended")
        self.evaluation_started = methods("evaluation_started")
        self.evaluation_batch = methods("evaluation_batch")
        self.evaluated = methods("evaluated")
        self.before_save = methods("before_save")
        self.after_save = methods("after_save")
        self.before_copy = methods("before_copy")
        self.ended = methods("ended")

    def rest(self, callback: Any) -> None:
        """Call it no more: it costs nothing until it is woken."""
        callback.rests = True
        self._bind()

    def wake(self, kind: type[Any]) -> None:
        """Call those of a kind again, in their place."""
        for callback in self.all:
            if isinstance(callback, kind):
                callback.rests = False
        self._bind()

    def while_measuring(self) -> Callbacks:
        """Those that are called in a tool's own steps."""
        return Callbacks(c for c in self.all if getattr(c, "while_measuring", False))


def check_callbacks(callbacks: Sequence[Any]) -> tuple[Any, ...]:
    """Refuse objects without any event, such as a class or a misspelled method."""
    for each in callbacks:
        if isinstance(each, type) or not any(hasattr(each, event) for event in _EVENTS):
            raise ArgumentError(
                f"callbacks: {each!r:.80} has none of the methods {', '.join(_EVENTS)}. Give "
                "objects that have some of them: docs/architecture.md#callbacks."
            )
    return tuple(callbacks)
