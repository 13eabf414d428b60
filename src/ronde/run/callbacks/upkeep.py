"""What a run keeps up beside training: the record, beats, rates, averages, and when it saves or
leaves.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from ronde.run.callback import Callback, EvaluationResult, StepView
from ronde.run.content import CheckpointContent, Ending
from ronde.run.gather import Gathering
from ronde.run.group import RunGroup
from ronde.run.parts import Parts
from ronde.watch import Ended, Epoch, Evaluated, Logged, figure
from ronde.world import World

__all__ = [
    "AveragesWeights",
    "BestIsSaved",
    "Heartbeats",
    "LeavesWhenAsked",
    "Recording",
    "SavesEvery",
    "StopsWhenAsked",
    "ask_to_stop",
]

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


class Heartbeats(Callback):
    """Beats once a step, those of a tool included."""

    while_measuring = True

    def step_ended(self, step: StepView) -> None:
        """See :class:`Callback`."""
        run = step.parts
        run.rendezvous.heartbeat.stepped(run.state.step, run.strategy.waited_seconds)

    def ended(self, parts: Parts, status: str) -> None:
        """See :class:`Callback`."""
        parts.rendezvous.heartbeat.ended()


class AveragesWeights(Callback):
    """Takes the weights in after each step, and tells what of the checkpoint is not asked for.

    Rests after the first step until ``run.average`` wakes it.
    """

    def __init__(self, content: CheckpointContent) -> None:
        self._content = content

    def step_ended(self, step: StepView) -> None:
        """See :class:`Callback`."""
        run, content = step.parts, self._content
        if not step.is_skipped:
            content.averages.after_step(step.number)
        if step.number == run.watcher.steps_at_start + 1:
            content.registry.report_unused(run)
            content.averages.report_unused(run)
        if not content.averages.items:
            step.callbacks.rest(self)


_LOOK_SECONDS = 1.0


class LeavesWhenAsked(Callback):
    """A checkpoint is due after that step, and the end. See :class:`~ronde.run.leave.Leaving`."""

    def __init__(self, me: World, group: RunGroup) -> None:
        from ronde.run.leave import leaving  # few runs are asked to

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
        from ronde.run.leave import Agreement

        self._group, self._agreement = group, Agreement(me, _key(group))
        self._reason, self._look_at = "", time.monotonic() + _LOOK_SECONDS

    def step_ended(self, step: StepView) -> None:
        """See :class:`Callback`."""
        if not self._reason and (now := time.monotonic()) >= self._look_at:
            self._look_at = now + _LOOK_SECONDS
            store, key = dist.distributed_c10d._get_default_store(), f"ronde/{_key(self._group)}"
            try:
                self._reason = store.get(key).decode() if store.check([key]) else ""
            except dist.DistError:  # rank 0 has ended, and its store: so will this one
                self._look_at = math.inf
        if self._reason and self._agreement.is_time(step.number, step.parts.strategy.every):
            self._group.stop(self._reason)


class Recording(Callback):
    """Hands events to the watcher.

    Args:
        ending: how the runs of the loop end before their last epoch.
        sent: called when the record is whole.
    """

    def __init__(self, gathering: Gathering, ending: Ending, sent: Callable[[], None]) -> None:
        self._gathering, self._ending, self._sent = gathering, ending, sent
        self._started = time.monotonic()

    def step_ended(self, step: StepView) -> None:
        """See :class:`Callback`."""
        state, batch = step.parts.state, step.share.global_samples
        rate = step.learning_rate
        step.parts.watcher.step(state.step, state.epoch, step.loss, rate, state.samples, batch)

    def epoch_ended(self, parts: Parts) -> None:
        """See :class:`Callback`."""
        state, watcher = parts.state, parts.watcher
        watcher.event(
            Epoch(
                epoch=state.epoch,
                step=state.step,
                samples=state.samples,
                samples_per_second=watcher.rate.end_epoch(),
            )
        )

    def evaluated(self, parts: Parts, outcome: EvaluationResult) -> None:
        """See :class:`Callback`."""
        state, name, result = parts.state, outcome.name, dict(outcome.result)
        parts.watcher.event(
            Evaluated(
                step=state.step,
                epoch=state.epoch,
                samples=outcome.samples,
                metrics=result,
                name=name,
            )
        )
        numbers = {k: figure(v) if isinstance(v, float) else v for k, v in result.items()}
        for metric, value in result.items():
            if isinstance(value, dict) and any(isinstance(v, dict) for v in value.values()):
                numbers[metric] = f"of {', '.join(map(str, value))}"  # a table: in the record
        shown = "  ".join(f"{metric} {number}" for metric, number in numbers.items())
        parts.say(f"epoch {state.epoch + 1}  step {state.step}  {name}  {shown}")

    def log(self, parts: Parts, values: Mapping[str, Any]) -> None:
        """Record the script's own values, on rank 0."""
        if not parts.world.is_main:
            return
        plain = {k: (v.tolist() if isinstance(v, torch.Tensor) else v) for k, v in values.items()}
        state = parts.state
        parts.watcher.event(Logged(step=state.step, epoch=state.epoch, values=plain))

    def ended(self, parts: Parts, status: str) -> None:
        """See :class:`Callback`."""
        state, watcher = parts.state, parts.watcher
        watcher.event(
            Ended(
                status=status,
                step=state.step,
                epoch=state.epoch,
                samples=state.samples,
                samples_per_second=watcher.rate.samples_per_second,
                seconds=time.monotonic() - self._started,
                reason=self._ending.stopped if status == "completed" else "",
            )
        )
        watcher.close()
        self._sent()
        folder, main = parts.directory, parts.world.is_main and not parts.part
        if folder is not None and main and not os.environ.get("RONDE_PROGRESS"):
            watcher.display.say(
                f"run directory {folder.path}; 'ronde show {folder.name}' draws its curve"
            )
