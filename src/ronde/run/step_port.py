"""The step port: the only way for rooms that measure a run to reach into it.

``prove``, ``doctor``, ``scale``, and ``measure`` step on batches of their own, look at the parts of
a run, and leave it as it was. Scripts never need this.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ronde.introspect import without_hooks
from ronde.parallel import Replicate
from ronde.plan import Share
from ronde.run.group import RunGroup
from ronde.run.parts import MicroBatches
from ronde.run.snapshot import Snapshot
from ronde.run.step import OptimizerStep
from ronde.watch import Silent, Watcher

__all__ = ["StepPort"]


class StepPort:
    """Look at a run's parts, step on given batches, put the run back.

    Call every method between two steps of the training, on every worker.

    Attributes:
        parts: what the run is made of.
        group: the runs of its loop.
        world: this worker, and the process groups of its collectives.
        data: the training data: data set, order, loader settings.
        strategy: carries the plan out.
        loss: the script's ``forward`` and ``loss``.
        last_step_seconds: wall time of the last step, without waiting for a device.

    Example:
        >>> port = run.port  # doctest: +SKIP
        >>> with port.restoring(), port.unwatched():  # doctest: +SKIP
        ...     port.prepare()
        ...     port.step(share, micro_batches)
        ...     print(port.last_step_seconds)
    """

    def __init__(self, step: OptimizerStep, group: RunGroup) -> None:
        self._step, self._draws = step, step.draws
        self._steps = 0
        self.group = group
        self.parts = step.parts
        self.world, self.data = step.parts.world, step.parts.data
        self.strategy, self.loss = step.parts.strategy, step.parts.loss
        self.last_step_seconds = 0.0

    # -- steps -------------------------------------------------------------------------

    def prepare(self) -> None:
        """Call before the first step on given batches: starts an epoch on every worker."""
        self.strategy.start_epoch()

    def step(self, share: Share, micros: Sequence[Any]) -> torch.Tensor:
        """One optimizer step as ``run.step(batch)`` takes it, on given micro-batches.

        Args:
            share: the positions of an epoch that the micro-batches stand for.
            micros: one batch for each of ``share.micro``, on the run's device.

        Returns:
            Tensor: 0-d, the loss of the global batch.
        """
        start = time.perf_counter()
        self._steps += 1
        with self._draws.reading():
            self._step.take(share, self._steps)
            several = self.parts.plan.accumulation > 1
            loss = self._step.step(MicroBatches(micros) if several else micros[0])
        self.last_step_seconds = time.perf_counter() - start
        return loss

    @property
    def can_step_alone(self) -> bool:
        """Whether a rank holds the whole model and its layers exchange nothing."""
        run = self.parts
        if run.world.size == 1 or type(run.strategy) is not Replicate:
            return False
        synced = any(isinstance(m, nn.SyncBatchNorm) for m in run.model.modules())
        return not run.plan.sync_batchnorm and not synced and run.scaler is None

    def step_alone(self, share: Share, micros: Sequence[Any]) -> None:
        """One step without any exchange: forward, backward, clip, and update."""
        run, strategy = self.parts, self.strategy
        start = time.perf_counter()
        for p in strategy.parameters:
            p.grad = None
        self._steps += 1
        self._draws.hand_out(share, self._steps)
        silent = strategy.no_exchange() if isinstance(strategy, Replicate) else nullcontext()
        with silent:
            for micro, (low, high) in zip(micros, share.micro, strict=True):
                value, weight = self._step.loss_of(micro)
                loss = value / weight if weight is not None else value
                loss = loss * (max(high - low, 1) / max(share.samples, 1))
                loss.backward()  # type: ignore[no-untyped-call]
        if run.plan.clip_norm is not None:
            nn.utils.clip_grad_norm_(strategy.parameters, run.plan.clip_norm)
        self._draws.end_own_step()
        run.optimizer.step()
        self.last_step_seconds = time.perf_counter() - start

    # -- before and after --------------------------------------------------------------

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Inside, a step writes no record, checkpoint, or measurement, and leaves the scheduler
        alone: one that knows its number of steps would refuse extra ones.
        """
        run = self.parts
        before = run.watcher, run.scheduler
        run.watcher.rate.pause()
        run.watcher, run.scheduler = Watcher(None, Silent(), False), None
        try:
            with self._step.measuring():
                yield
        finally:
            run.watcher, run.scheduler = before
            run.watcher.rate.resume()

    def snapshot(self) -> Snapshot:
        """A copy of everything a step changes; ``restore()`` puts it back bit by bit."""
        return Snapshot(self.parts)

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Puts the run back at the end, whatever was trained inside; see :class:`Snapshot`."""
        before, place = self.snapshot(), self.parts.place
        share, backwards = place.share, place.backwards
        failed = True
        try:
            with without_hooks(self.parts.optimizer):
                yield
            failed = False
        finally:
            before.restore(failed)
            place.share, place.backwards = share, backwards
