"""Updates the averages of the weights (``run.average``)."""

from __future__ import annotations

from ronde.run.callback import Callback, StepView
from ronde.run.content import CheckpointContent

__all__ = ["AveragesWeights"]


class AveragesWeights(Callback):
    """Takes the weights in after each step, and tells what of the checkpoint is not asked for.

    Rests after the first step until ``run.average`` wakes it.
    """

    def __init__(self, content: CheckpointContent) -> None:
        self._content = content

    def step_ended(self, step: StepView) -> None:
        """See :class:`Callback`."""
        run, content = step.parts, self._content
        if step.action != "skip":
            content.averages.after_step(step.number)
        if step.number == run.watcher.steps_at_start + 1:
            content.registry.report_unused(run)
            content.averages.report_unused(run)
        if not content.averages.items:
            step.callbacks.rest(self)
