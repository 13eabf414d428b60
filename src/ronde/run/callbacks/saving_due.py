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

_SEPARATE = (
    "this run goes on after a later one has trained, in one loop with it: each has its own run "
    "directory, and a resume may bring them back at different points. Call ronde.distribute for "
    "both before the first step of either"
)


class SavesEvery(Callback):
    """A checkpoint is due every so many steps. Tells how the last one has ended, and warns if a
    separate training has taken a step in between.
    """

    newest = 0  # number of the newest group that took a step, in this process

    def __init__(self, every: int | None, group: RunGroup) -> None:
        self._every, self._group = every, group
        self._warned = group.directory is None

    def step_ended(self, step: StepView) -> None:
        """See :class:`Callback`."""
        group = self._group
        if group.saving.is_open:
            group.saving.poll(step.parts)
        if group.number != SavesEvery.newest:
            if group.number < SavesEvery.newest and not self._warned:
                self._warned = True
                step.parts.warn(_SEPARATE)
            SavesEvery.newest = max(SavesEvery.newest, group.number)
        if self._every is not None and step.number % self._every == 0:
            group.due = True


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
        if exhausted := self._best.exhausted():
            self._group.stop(exhausted)
        if warning:
            parts.warn(warning)

    def epoch_ended(self, parts: Parts) -> None:
        """See :class:`Callback`."""
        if report := self._best.missing():
            parts.warn(report)
