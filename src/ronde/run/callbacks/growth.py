"""Lets the learning rate follow a batch that grows (``run.grow_batch``)."""

from __future__ import annotations

from ronde.run.callback import Callback, StepView
from ronde.run.content import CheckpointContent

__all__ = ["Growth"]


class Growth(Callback):
    """Asks the schedule of the batch after each step. ``run.grow_batch`` wakes it."""

    rests = True

    def __init__(self, content: CheckpointContent) -> None:
        self._content = content

    def step_ended(self, step: StepView) -> None:
        """See :class:`Callback`."""
        if self._content.schedule is not None:
            self._content.schedule.after_step(step.parts)
