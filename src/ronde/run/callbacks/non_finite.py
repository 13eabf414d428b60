"""A NaN or infinite loss or gradient: refused or skipped, on all ranks alike."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from ronde.plan import Share
from ronde.run.callback import Callback, StepView
from ronde.run.parts import Parts
from ronde.watch import NonFiniteStep
from ronde.world import LossError, PlanError
from ronde.world.consensus import gather_json
from ronde.world.identity import ranks_text
from ronde.world.tensors import local_part

__all__ = ["NAN_EVERY", "ON_NAN", "NonFiniteGuard", "NonFiniteLoss", "check_on_nan"]

ON_NAN = ("error", "ignore", "skip")
NAN_EVERY = 50  # steps between checks on an accelerator, where reading a loss waits for the device
_MOST_IN_A_ROW = 10


class NonFiniteLoss(Callback):
    """Ends the training at such a loss, before the weights change (``on_nan="error"``)."""

    def after_exchange(self, step: StepView) -> None:
        """Looks at each loss on a CPU, where reading it is free."""
        run = step.parts
        look = run.world.device.type == "cpu" or run.state.step % NAN_EVERY == 0
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
        effect = f"One step in {NAN_EVERY} is checked here: an earlier one may have caused it."
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
        """Decide about this step, the same on all ranks. A collective of all workers."""
        step.is_skipped = self._look(step.parts, step.loss, step.share)

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
        if self._in_a_row > _MOST_IN_A_ROW:
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
