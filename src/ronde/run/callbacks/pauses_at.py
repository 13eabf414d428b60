"""Saves and ends at a number of samples: ``ronde run --until``. Ranks need not agree on the step:
all count the same samples.
"""

from __future__ import annotations

from ronde.plan.until import Until
from ronde.run.callback import Callback, EvaluationResult, StepView
from ronde.run.group import RunGroup
from ronde.run.parts import Parts

__all__ = ["PausesAt", "pause_if_there"]


class PausesAt(Callback):
    """The run pauses after the first step, or the first evaluation, at or after so many samples.

    Args:
        text: as ``RONDE_UNTIL`` has it.
    """

    def __init__(self, text: str, group: RunGroup) -> None:
        self._until, self._group = Until.parse(text), group

    def step_ended(self, step: StepView) -> None:
        """See :class:`Callback`."""
        if not self._until.at_evaluation and step.number % step.parts.strategy.every == 0:
            _look(self._until, step.parts, self._group)

    def evaluated(self, parts: Parts, outcome: EvaluationResult) -> None:
        """See :class:`Callback`."""
        if self._until.at_evaluation and not parts.place.ended:
            _look(self._until, parts, self._group)


def _look(until: Until, parts: Parts, group: RunGroup) -> None:
    if parts.state.samples >= until.samples:
        group.leaves = group.pauses = True


def pause_if_there(text: str, parts: Parts, group: RunGroup) -> None:
    """Pause before the first batch if the checkpoint that the run goes on from is there already: a
    pause has written it, or no evaluation is waited for.
    """
    until, choice = Until.parse(text), group.choice
    paused = choice and choice.answer["path"] and choice.answer["state"].get("ending", {})
    if (paused and paused.get("paused")) or not until.at_evaluation:
        _look(until, parts, group)
