"""Ends before the last epoch: a run that is asked to leave, that stops, or that pauses at a number
of samples (``ronde run --until``). All ranks end after the same step.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from types import FrameType
from typing import Any

import torch.distributed as dist

from ronde.plan.until import Until
from ronde.run.callback import Callback, EvaluationResult, StepView
from ronde.run.group import RunGroup
from ronde.run.parts import Parts
from ronde.watch import MARK
from ronde.world import World

__all__ = [
    "Agreement",
    "LeavesWhenAsked",
    "PausesAt",
    "leaving",
    "pause_if_there",
]


class Agreement:
    """The ranks agree on a step, once each of them wants to.

    Each rank counts itself in the store after a step, and looks there after each further one. Rank
    0, which sees that all have, names the step after next: no rank can be beyond it, because steps
    exchange gradients.

    Args:
        about: what they agree on, for the store.
    """

    def __init__(self, me: World, about: str) -> None:
        self._me, self._about = me, f"ronde/{about}"
        self._at: int | None = None
        self._counted = False

    def is_time(self, step: int, every: int = 1) -> bool:
        """Whether it is that step, or later; to be asked after each.

        Args:
            step: optimizer steps so far.
            every: steps after which the ranks have the same weights.
        """
        if self._at is None:
            self._at = self._agreed(step, every)
        return self._at is not None and step >= self._at

    def _agreed(self, step: int, every: int) -> int | None:
        if self._me.size == 1:
            return -(-step // every) * every
        asked, named = f"{self._about}/asked", f"{self._about}/at"
        store = dist.distributed_c10d._get_default_store()
        if not self._counted:
            self._counted = True
            store.add(asked, 1)
        if self._me.rank:
            return int(store.get(named)) if store.check([named]) else None
        if store.add(asked, 0) < self._me.size:
            return None
        at = (step // every + 2) * every
        store.set(named, str(at))
        return at


class Leaving:
    """What this process was asked. Nothing is exchanged before a signal comes.

    Attributes:
        asked: whether a signal asked this process to leave.
        agreement: on the step after which all ranks do.
    """

    def __init__(self, me: World) -> None:
        self._me = me
        self.agreement = Agreement(me, "leave")
        self._before: dict[int, Any] = {}
        self.asked = False
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGUSR1):
                self._before[number] = signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        first, self.asked = not self.asked, True
        if first and os.environ.get("RONDE_LAUNCHER_PID"):
            # Others may not have been asked; the launcher asks them.
            os.write(1, (MARK + json.dumps({"leave": self._me.rank}) + "\n").encode())
        if callable(handler := self._before.get(number)):
            handler(number, frame)  # the script's own


_leaving: Leaving | None = None


def leaving(me: World) -> Leaving:
    """This process's, from the first call on. ``RONDE_LEAVE`` asks for it."""
    global _leaving
    if _leaving is None:
        _leaving = Leaving(me)
    return _leaving


class LeavesWhenAsked(Callback):
    """A checkpoint is due after that step, and the end. See :class:`Leaving`."""

    def __init__(self, me: World, group: RunGroup) -> None:
        self._leaving, self._group = leaving(me), group

    def step_ended(self, step: StepView) -> None:
        """See :class:`Callback`."""
        leaving = self._leaving
        if leaving.asked and leaving.agreement.is_time(step.number, step.parts.strategy.every):
            self._group.due = self._group.leaves = True


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
