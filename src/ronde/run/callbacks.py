"""The callbacks of a run, in their order: what it does beside training. Larger ones have files of
their own.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from ronde.plan import Share
from ronde.run import hooks
from ronde.run.callback import NAN_EVERY_STEPS, Callback, Callbacks, EvaluationResult, StepView
from ronde.run.content import CheckpointContent, Ending
from ronde.run.first_steps_check import FirstStepsCheck
from ronde.run.group import RunGroup
from ronde.run.options import RunOptions
from ronde.run.parts import Gathering, Parts
from ronde.watch import Ended, Epoch, Evaluated, Logged, NonFiniteStep, figure
from ronde.world import LossError, PlanError, World
from ronde.world.consensus import gather_json
from ronde.world.identity import ranks_text
from ronde.world.tensors import local_part

__all__ = [
    "ON_NAN",
    "AveragesWeights",
    "Recording",
    "SavesEvery",
    "ask_to_stop",
    "callbacks_of",
    "check_on_nan",
]


def callbacks_of(
    content: CheckpointContent,
    group: RunGroup,
    options: RunOptions,
    gathering: Gathering,
    recording: Recording,
) -> Callbacks:
    """All callbacks of a run. For each event, they are called in this order. What few runs need is
    imported here.
    """
    run, studied = content.parts, hooks.observed()
    leads, several = not run.part, run.world.size > 1 and not studied
    # A launcher waits for the beat: it comes before whatever may wait.
    callbacks: list[Any] = [Heartbeats()]
    # A wrong loss or batch is refused before anything is updated by it.
    if not studied:
        callbacks.append(FirstStepsCheck(run, gathering))
    # Before a loss that is not finite ends the run; before the record has the step.
    if options.watch is not None and run.directory and leads and not studied:
        from ronde.run.health import Health

        callbacks.append(Health(run, options.watch, options.on_nan == "error"))
    # After the checks, which say why a loss is not finite; before anything uses it.
    if options.on_nan != "ignore":
        callbacks.append(NonFiniteLoss() if options.on_nan == "error" else NonFiniteGuard())
    # Weights are compared as the optimizer has left them.
    if several:
        from ronde.run.rank_facts import Replicas

        callbacks.append(Replicas(run, options.check_replicas, group))
    # What the checkpoint needs of an evaluation is recorded before it is due.
    callbacks += [recording, BestIsSaved(content, group), SavesEvery(content.save_every, group)]
    if os.environ.get("RONDE_LEAVE") == "1" and leads:
        from ronde.run.leave import LeavesWhenAsked

        callbacks.append(LeavesWhenAsked(run.world, group))
    if several and leads:
        callbacks.append(StopsWhenAsked(run.world, group))
    if (until := os.environ.get("RONDE_UNTIL")) and leads and not studied:
        from ronde.run.leave import PausesAt

        callbacks.append(PausesAt(until, group))
    # The weights after the step are final. The script's own callbacks see a finished step, and a
    # study sees what they did.
    return Callbacks([*callbacks, AveragesWeights(content), *options.callbacks, hooks.observer])


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
        if step.action != "skip":
            content.averages.after_step(step.number)
        if step.number == run.watcher.steps_at_start + 1:
            content.registry.report_unused(run)
            content.averages.report_unused(run)
        if not content.averages.items:
            step.callbacks.rest(self)


_LOOK_SECONDS = 1.0


def _key(group: RunGroup) -> str:
    return f"stop-{group.number}"


def ask_to_stop(group: RunGroup, reason: str) -> None:
    """Ask all ranks, from this one: :meth:`ronde.run.run.Run.stop`."""
    dist.distributed_c10d._get_default_store().set(f"ronde/{_key(group)}", reason)


class StopsWhenAsked(Callback):
    """The training is over at a step soon after a rank has asked for it."""

    def __init__(self, me: World, group: RunGroup) -> None:
        from ronde.run.leave import Agreement  # one process meets nobody

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
        state, watcher, rate = step.parts.state, step.parts.watcher, step.learning_rate
        watcher.step(state.step, state.epoch, step.loss, rate, state.samples, step.samples)

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


# -- a loss or gradient that is not finite -------------------------------------------------

ON_NAN = ("error", "ignore", "skip")


class NonFiniteLoss(Callback):
    """Ends the training at such a loss, before the weights change (``on_nan="error"``)."""

    def after_exchange(self, step: StepView) -> None:
        """Looks at each loss on a CPU, where reading it is free."""
        run = step.parts
        look = run.world.device.type == "cpu" or run.state.step % NAN_EVERY_STEPS == 0
        if look and not math.isfinite(step.loss):
            _refuse_loss(run, float(step.loss), step.share)


def _refuse_loss(run: Parts, value: float, share: Share) -> None:
    """Raise LossError. A collective: the global loss is the same on all ranks, so all are here.

    Except under tensor parallelism, where each rank computes it from the same samples: one may be
    here alone.
    """
    ranks = [] if run.plan.tensor > 1 else _bad_ranks(run, None)
    effect = "The weights were not updated."
    if run.world.device.type != "cpu":
        effect = (
            f"One step in {NAN_EVERY_STEPS} is checked here: an earlier one may have caused it."
        )
    raise LossError(
        f"the loss is {value} in step {run.state.step + 1} ({_place(run, share)})"
        f"{_from(ranks)}. {effect} Look at these samples, lower the learning rate, "
        "or clip (clip_norm=1.0); on_nan='skip' leaves such batches out, and on_nan='ignore' "
        "trains on."
    )


def _place(run: Parts, share: Share) -> str:
    ids = run.data.order.ids(share.epoch, share.start, share.stop)
    shown = ", ".join(map(str, ids[:8].tolist())) + (", …" if len(ids) > 8 else "")
    return (
        f"epoch {share.epoch}, samples {share.start}–{share.stop - 1} of its order: indices {shown}"
    )


def _bad_ranks(run: Parts, bad: bool | None) -> list[int]:
    """The ranks whose own loss is not finite, or, if none, those with such gradients."""
    if run.world.size == 1:
        return []
    local = run.strategy.local_loss
    lost = local is not None and not math.isfinite(local)
    everyone = gather_json(run.world, [lost, bool(bad)])
    losses = [rank for rank, (lost, _) in enumerate(everyone) if lost]
    gradients = [rank for rank, (_, bad) in enumerate(everyone) if bad]
    if losses or len(gradients) == run.world.size:
        return losses
    return gradients


def _from(ranks: list[int]) -> str:
    return f", from the samples of {ranks_text(ranks)}" if ranks else ""


class NonFiniteGuard(Callback):
    """Leaves out the update of a step that is not finite (``on_nan="skip"``)."""

    def __init__(self) -> None:
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._in_a_row = 0

    def batch_taken(self, step: StepView) -> None:
        """Keep the buffers: the forward pass of a bad batch spoils batch normalization's."""
        live = [local_part(b) for b in step.parts.model.buffers() if b.is_floating_point()]
        if [id(b) for b, _ in self._buffers] != [id(b) for b in live]:
            self._buffers = [(b, torch.empty_like(b)) for b in live]
        with torch.no_grad():
            for buffer, kept in self._buffers:
                kept.copy_(buffer)

    def after_exchange(self, step: StepView) -> None:
        """Decide about this step, the same on all ranks. A collective."""
        if self._look(step.parts, step.loss, step.share):
            step.action = "skip"

    def _look(self, run: Parts, loss: torch.Tensor, share: Share) -> bool:
        lost, bad = not math.isfinite(loss), False
        if not lost and run.scaler is None:  # a scaler looks at half-precision gradients itself
            bad = not _finite(run)
        flag = torch.tensor([float(lost or bad)], device=run.world.device)
        if run.world.size > 1:
            dist.all_reduce(flag, dist.ReduceOp.MAX)
        if not float(flag):
            self._in_a_row = 0
            return False
        self._in_a_row += 1
        step, what = run.state.step + 1, "loss" if lost else "gradient"
        ranks = _bad_ranks(run, bad)
        if self._in_a_row > 10:
            raise LossError(
                f"the {what} is not finite in {self._in_a_row} steps in a row, up to step {step} "
                f"({_place(run, share)}): it is not a matter of single batches. Lower the learning "
                "rate, or clip (clip_norm=1.0), and go on from a checkpoint before it."
            )
        ids = run.data.order.ids(share.epoch, share.start, share.stop).tolist()
        run.watcher.flush()
        run.watcher.event(
            NonFiniteStep(
                step=step, epoch=share.epoch, what=what, action="skip", ranks=ranks, samples=ids
            )
        )
        run.warn(
            f"the {what} is not finite in step {step} ({_place(run, share)}){_from(ranks)}. "
            "The weights are not updated, and the training goes on with the next batch"
        )
        with torch.no_grad():
            for buffer, kept in self._buffers:
                buffer.copy_(kept)
        return True


def _finite(run: Parts) -> bool:
    """Whether this worker's gradients are finite."""
    grads = [g for p in run.strategy.parameters if (g := p.grad) is not None]
    parts = [local_part(g) for g in grads]
    parts = [g.coalesce().values() if g.is_sparse else g for g in parts]
    parts = [g for g in parts if g.numel()]
    if not parts:
        return True
    largest = torch.stack([norm.float() for norm in torch._foreach_norm(parts, math.inf)])
    return bool(torch.isfinite(largest).all())


def check_on_nan(run: Parts, on_nan: str) -> None:
    """Refuse what cannot leave out a step."""
    if on_nan != "skip":
        return
    from ronde.plan import parse_reducer

    reducer = parse_reducer(run.plan.reducer)
    if run.world.size > 1 and (reducer.feedback or reducer.kind.local):
        raise PlanError(
            f"on_nan='skip' does not go with plan={run.plan.spec!r}: what the reducer keeps "
            "for later steps would not be finite. Use another reducer, or on_nan='error'."
        )
