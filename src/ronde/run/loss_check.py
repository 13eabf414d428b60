"""Checks at the first steps what kind of loss a script has, and says what follows from it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ronde.parallel import Part, Replicate, Single
from ronde.parallel.zero1 import Zero1
from ronde.run import hooks
from ronde.run.loss_kind import Kind, LossFunction, ask_loss, ask_model, memory_of
from ronde.watch import LossChecked
from ronde.world import LossError
from ronde.world.consensus import gather_json
from ronde.world.tensors import leaves

if TYPE_CHECKING:
    from ronde.run.step_port import RunParts

_STEPS = (1, 2, 4, 8, 16)  # losses may be equal for all samples at first, or no sample be padded
_SECONDS = 0.3  # after which it stops asking
_LOCAL = (Single, Replicate, Zero1)  # strategies whose forward passes exchange nothing
# What one rank finds counts for all: the worst of it.
_ORDER = ("sum", "relation", "bad pair", "weighted", "unknown", "mean", "pair", "gathered", "flat")

_WARNINGS = {
    "weighted": "samples weigh differently in the loss (padding, class weights), so the mean of "
    "parts is not that of the batch: on several workers, or with micro-batches, this is not the "
    "same training as on one device. Return (sum, weight) from the loss: "
    "docs/batch-contract.md#weighted-losses",
    "relation": "the loss relates the samples of a batch to each other (contrastive, statistics of "
    "the batch), or is neither a mean nor a sum: on several workers, or with micro-batches, this "
    "is not the same training as on one device. Gather what it relates with run.gather(tensor): "
    "docs/whole-batch-losses.md",
    "bad pair": "the loss returns (sum, weight), but those of a batch are not the sums of those of "
    "its parts: on several workers, or with micro-batches, this is not the same training as on one "
    "device. Return the sum over the given samples (reduction='sum') and the sum of their weights",
}


def _worst(kinds: Iterable[Kind]) -> Kind:
    return min(kinds, key=_ORDER.index)


class LossCheck:
    """Asks the loss of one run at its first steps, and at the first batches of its evaluations.

    Attributes:
        gathered: the step's loss used the global batch (``run.gather``), so it is no relation that
            is left alone.
    """

    def __init__(self, over: bool = False) -> None:
        self.gathered = False
        self._steps = 0
        self._seconds = 0.0
        self._asked: tuple[Any, int] | None = None  # the micro-batch and its number of samples
        self._kind: Kind | None = None
        self._over = over  # nothing is asked
        self._warned = False

    def begin(self, run: RunParts, micros: Sequence[Any], parts: Sequence[Part]) -> None:
        """Before the forward passes of a step. The same on every rank."""
        self._asked = None
        if self._over or hooks.observed():
            return
        self._steps += 1
        if self._steps in _STEPS:
            samples, i = max((int(p.rows or p.samples), -i) for i, p in enumerate(parts))
            self._asked = micros[-i], samples
            self.gathered = False
            run._loss.keep(micros[-i])

    def end(self, run: RunParts) -> None:
        """After the backward passes, before anything is updated. A collective at some steps.

        Raises:
            LossError: the loss is a sum, or is not the sum that it was said to be.
        """
        if self._asked is None:
            return
        batch, samples = self._asked
        self._asked = None
        kept = run._loss.kept()
        mine: Kind = "flat"
        start = time.perf_counter()
        if self.gathered or (run._strategy.holds_result and kept is not None):
            mine = self.kind_of(run, batch, kept or (), samples)
        self._seconds += time.perf_counter() - start
        everyone = gather_json(run._me, [mine, self._seconds])
        kind = _worst(each for each, _ in everyone)
        self._over = self._steps >= _STEPS[-1] or max(s for _, s in everyone) > _SECONDS
        self.conclude(run, kind, f"step {run.state.step + 1}")
        # A kind that was clear once stays; one that could not be told stays unclear.
        if kind != "flat" and self._kind != "unknown":
            changed, self._kind = kind != self._kind, kind
            if changed:
                run._watcher.event(LossChecked(step=run.state.step + 1, kind=kind))

    def kind_of(self, run: RunParts, batch: Any, arguments: tuple[Any, ...], samples: int) -> Kind:
        """The kind of loss by one micro-batch of this worker. No collective."""
        if self.gathered:
            return "gathered"
        if hooks.observed():
            return "flat"
        calls, model = run._loss, run.model
        ask = LossFunction(calls.loss, calls.check, run._autocast, run.device, memory_of(model))
        kind = ask_loss(ask, arguments, samples)
        inside = any(isinstance(v, torch.Tensor) and v.dim() == 0 for v in leaves(arguments))
        local = type(run._strategy) in _LOCAL and run.plan.offload == "none"
        if kind in ("unknown", "flat") and inside and local:

            def compute(used: Any, part: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
                return calls.check(calls.loss(*calls.arguments(used, part)))

            kind = ask_model(ask, model, compute, batch, samples)
        return kind

    def of_evaluation(self, run: RunParts, mine: Kind) -> Kind:
        """Raise or warn by the loss of an evaluation's first batch. A collective."""
        if hooks.observed():
            return "mean"
        kind = _worst(gather_json(run._me, mine))
        self.conclude(run, kind, "evaluate")
        return kind

    def conclude(self, run: RunParts, kind: Kind, where: str) -> None:
        """Raise or warn. The same on every rank."""
        is_sum = run._loss.reduction == "sum"
        if kind == "sum" and not is_sum:
            raise LossError(
                f"the loss is a sum over the samples it is given, not their mean ({where}: the "
                "losses of parts of a batch add up to that of all). N workers would train on "
                "another loss than one. Use reduction='mean', divide by the number of samples, or "
                "give ronde.distribute(…, loss_reduction='sum')."
            )
        if kind == "mean" and is_sum:
            raise LossError(
                f"loss_reduction='sum', but the loss is a mean over the samples it is given "
                f"({where}). Use reduction='sum' in the loss, or leave loss_reduction out."
            )
        if kind in _WARNINGS and not self._warned:
            self._warned = self._over = True
            run._warn(_WARNINGS[kind], differs=True)
