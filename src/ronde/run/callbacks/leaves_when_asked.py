"""Saves and ends when the process is asked to, at a step that all ranks agree on."""

from __future__ import annotations

from ronde.run.callback import Callback, StepView
from ronde.run.group import RunGroup
from ronde.run.leave import leaving
from ronde.world import World

__all__ = ["LeavesWhenAsked"]


class LeavesWhenAsked(Callback):
    """A checkpoint is due after that step, and the end. See :class:`~ronde.run.leave.Leaving`."""

    def __init__(self, me: World, group: RunGroup) -> None:
        self._leaving, self._group = leaving(me), group

    def step_ended(self, step: StepView) -> None:
        """See :class:`Callback`."""
        if self._leaving.asked:
            exchange = step.parts.strategy.exchange
            every = exchange.reducer.every if exchange is not None else 1
            if self._leaving.is_time(step.number, every):
                self._group.due = self._group.leaves = True
