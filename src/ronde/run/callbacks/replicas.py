"""Compares replicas, and facts that ranks never exchange, at the first steps and now and then."""

from __future__ import annotations

from functools import partial

from ronde.parallel.first_steps import CHECKED_STEPS, check_step
from ronde.parallel.replica_check import ReplicaCheck
from ronde.run.callback import Callback, StepView
from ronde.run.callbacks.rank_facts import FactCheck
from ronde.run.group import RunGroup
from ronde.run.parts import Parts

__all__ = ["Replicas"]


class Replicas(Callback):
    """Checks each of the first steps, then compares as often as was asked.

    Args:
        every: optimizer steps from one comparison to the next; None for none.
    """

    def __init__(self, parts: Parts, every: int | None, group: RunGroup) -> None:
        self._group = group
        self._unchecked_steps = CHECKED_STEPS
        self._check = ReplicaCheck(every or 1)
        self._check.possible = every is not None
        self._facts = FactCheck(parts, parts.world)

    def before_update(self, step: StepView) -> None:
        """See :class:`Callback`."""
        self._facts.begin(step.parts)

    def after_update(self, step: StepView) -> None:
        """See :class:`Callback`."""
        run, number = step.parts, step.number + 1
        why = self._facts.end(run)
        if self._unchecked_steps and not run.strategy.drifts:
            self._unchecked_steps -= 1
            same = check_step(run.strategy, run.work.tied, run.plan, run.world)
            self._check.possible &= same
        else:
            self._compare(run, number, must=bool(why))
        if why and run.plan.shard != "none":  # parts that are held once, or sent to all again
            run.warn(f"step {number}: {why}", differs=True)
        if why:
            self._facts.changed.clear()

    def before_save(self, parts: Parts) -> None:
        """See :class:`Callback`."""
        if not self._group.saving.ends:  # a script may have ended on this rank only
            self._compare(parts, parts.state.step, must=True)

    def before_copy(self, parts: Parts) -> None:
        """See :class:`Callback`."""
        self._compare(parts, parts.state.step, must=True)

    def _compare(self, run: Parts, step: int, must: bool) -> None:
        if self._check.is_due(step, must) and not run.strategy.drifts:
            explain = partial(self._facts.explain, run)
            self._check.check(run.strategy, run.work.tied, run.world, step, explain)
            self._facts.changed.clear()
