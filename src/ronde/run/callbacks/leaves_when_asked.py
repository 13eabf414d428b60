"""Ends a training that is asked to end, at a step that all ranks agree on."""

from __future__ import annotations

import time

import torch.distributed as dist

from ronde.run.callback import Callback, StepView
from ronde.run.group import RunGroup
from ronde.run.leave import Agreement, leaving
from ronde.world import World

__all__ = ["LeavesWhenAsked", "StopsWhenAsked", "ask_to_stop"]

_LOOK_SECONDS = 1.0


class LeavesWhenAsked(Callback):
    """A checkpoint is due after that step, and the end. See :class:`~ronde.run.leave.Leaving`."""

    def __init__(self, me: World, group: RunGroup) -> None:
        self._leaving, self._group = leaving(me), group

    def step_ended(self, step: StepView) -> None:
        """See :class:`Callback`."""
        leaving = self._leaving
        if leaving.asked and leaving.agreement.is_time(step.number, step.parts.strategy.every):
            self._group.due = self._group.leaves = True


def _key(group: RunGroup) -> str:
    return f"stop-{group.number}"


def ask_to_stop(group: RunGroup, reason: str) -> None:
    """Ask all ranks, from this one: :meth:`ronde.run.run.Run.stop`."""
    dist.distributed_c10d._get_default_store().set(f"ronde/{_key(group)}", reason)


class StopsWhenAsked(Callback):
    """The training is over at a step soon after a rank has asked for it."""

    def __init__(self, me: World, group: RunGroup) -> None:
        self._group, self._agreement = group, Agreement(me, _key(group))
        self._reason, self._look_at = "", 0.0

    def step_ended(self, step: StepView) -> None:
        """See :class:`Callback`."""
        if not self._reason and (now := time.monotonic()) >= self._look_at:
            self._look_at = now + _LOOK_SECONDS
            store, key = dist.distributed_c10d._get_default_store(), f"ronde/{_key(self._group)}"
            self._reason = store.get(key).decode() if store.check([key]) else ""
        if self._reason and self._agreement.is_time(step.number, step.parts.strategy.every):
            self._group.stop(self._reason)
