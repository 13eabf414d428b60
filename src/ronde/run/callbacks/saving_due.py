"""Decides when a checkpoint is due: by steps, or by the best evaluation.

It is written where the body of the script's loop has ended: what the script does after a step (its
averages, its scheduler) would be one step behind in it otherwise.
"""

from __future__ import annotations

from ronde.run.callback import Callback, EvaluationResult, StepView
from ronde.run.content import CheckpointContent
from ronde.run.group import RunGroup
from ronde.run.parts import Parts

__all__ = ["BestIsSaved", "SavesEvery"]


class SavesEvery(Callback):
    """A checkpoint is due every so many steps, and tells how the last one has ended."""

    def __init__(self, every: int | None, group: RunGroup) -> None:
        self._every, self._group = every, group

    def step_ended(self, step: StepView) -> None:
        """See :class:`Callback`."""
        self._group.stepped(step.parts)
        if self._every is not None and step.number % self._every == 0:
            self._group.due = True


class BestIsSaved(Callback):
    """A checkpoint is due after the best evaluation so far (``keep_best``)."""

    def __init__(self, content: CheckpointContent, group: RunGroup) -> None:
        self._best, self._group = content.best, group

    def evaluated(self, parts: Parts, outcome: EvaluationResult) -> None:
        """See :class:`Callback`."""
        if parts.place.ended:
            return
        is_best, warning = self._best.compare(outcome.result, outcome.name, parts.state)
        self._group.due |= is_best
        if warning:
            parts.warn(warning)

    def epoch_ended(self, parts: Parts) -> None:
        """See :class:`Callback`."""
        if report := self._best.missing():
            parts.warn(report)
