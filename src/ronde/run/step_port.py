"""The step port: the only way for rooms that measure a run to reach into it.

``prove``, ``doctor``, ``scale``, and ``measure`` step on batches of their own, look at the parts of
a run, and leave it as it was. Scripts never need this.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from ronde.checkpoint import KeepPolicy
from ronde.loader import TakenOver
from ronde.parallel import Replicate, Strategy, Work
from ronde.plan import Plan, Share
from ronde.run.losses import LossCall
from ronde.run.run_state import MicroBatches, State
from ronde.run.script_time import ScriptTime
from ronde.run.snapshot import Snapshot
from ronde.run.step_draws import StepDraws
from ronde.watch import RunDir, Silent, Watcher
from ronde.world import World
from ronde.world.rendezvous import Rendezvous

__all__ = ["RunParts", "RunView", "StepPort"]


class RunView(Protocol):
    """The public part of a :class:`~ronde.run.run.Run`, for the rooms around it."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: Any
    plan: Plan
    state: State
    dir: RunDir | None

    @property
    def port(self) -> StepPort:
        """For tools that measure this run."""

    @property
    def rank(self) -> int:
        """This worker's rank, from 0."""

    @property
    def world_size(self) -> int:
        """The number of workers that train together."""

    @property
    def is_main(self) -> bool:
        """True on rank 0 only."""

    @property
    def device(self) -> torch.device:
        """The device this worker trains on."""

    def step(self, batch: Any) -> torch.Tensor:
        """One optimizer step on one batch."""

    def save(self, *, wait: bool = True) -> Path | None:
        """Write a checkpoint now."""

    def backward(self, loss: Any) -> None:
        """Backward pass of one micro-batch, in a script that owns its loop."""


class RunParts(RunView, Protocol):
    """A Run, for the other files of its room."""

    _me: World
    _taken: TakenOver
    _strategy: Strategy
    _work: Work
    _rendezvous: Rendezvous
    _skeleton: Any
    _draws: StepDraws
    _loss: LossCall
    _first_steps: Any
    _gathers: bool | None
    _evaluated: tuple[int, int] | None
    _watcher: Watcher
    _scaler: torch.amp.GradScaler | None
    _share: Share | None
    _backwards: int
    _last_saved_step: int
    _last_saved_time: float
    _part: str
    _keep: KeepPolicy
    _async_save: bool
    _ended: bool
    _in_epochs: bool
    _readings: int
    _registry: Any
    _schedule: Any
    _saved_schedule: dict[str, Any] | None
    _averages: Any
    _averaging: bool
    _script_time: ScriptTime
    _best: Any
    _save_every: int | None
    _deadline: float | None
    _comparison: Any
    _on_nan: str
    _group: Any
    _evaluations: dict[int, Any]
    _autocast: Callable[[], AbstractContextManager[Any]]

    def _loss_of(self, micro: Any) -> tuple[torch.Tensor, torch.Tensor | None]: ...

    def _warn(self, text: str, differs: bool = False) -> None: ...

    def _save(self, wait: bool = False) -> Path | None: ...

    def _compare_replicas(self, step: int, save: bool = False, must: bool = False) -> None: ...

    def _copy_to_memory(self) -> None: ...

    def _leave(self) -> None: ...

    def _finish(self, status: str) -> None: ...

    def _look_for_unregistered(self) -> None: ...

    def _end_epoch(self) -> None: ...

    def _epoch_is_over(self) -> bool: ...

    def _at_exit(self) -> None: ...


class StepPort:
    """Look at a run's parts, step on given batches, put the run back.

    Call every method between two steps of the training, on every worker.

    Attributes:
        last_step_seconds: wall time of the last step, without waiting for a device.

    Example:
        >>> port = run.port  # doctest: +SKIP
        >>> with port.as_found(), port.unwatched():  # doctest: +SKIP
        ...     port.prepare()
        ...     port.step(share, micro_batches)
        ...     print(port.last_step_seconds)
    """

    def __init__(self, run: RunParts) -> None:
        self._run = run
        self._steps = 0
        self.last_step_seconds = 0.0

    # -- parts -------------------------------------------------------------------------

    @property
    def world(self) -> World:
        """This worker, and the process groups of its collectives."""
        return self._run._me

    @property
    def data(self) -> TakenOver:
        """The training data: data set, order, loader settings."""
        return self._run._taken

    @property
    def strategy(self) -> Strategy:
        """The strategy that carries the plan out."""
        return self._run._strategy

    @property
    def loss(self) -> LossCall:
        """The script's ``forward`` and ``loss``."""
        return self._run._loss

    @property
    def script_time(self) -> ScriptTime:
        """The clock of the script's own loop."""
        return self._run._script_time

    @property
    def backwards(self) -> int:
        """Backward passes of the current step so far, in a script that owns its loop."""
        return self._run._backwards

    # -- steps -------------------------------------------------------------------------

    def prepare(self) -> None:
        """Call before the first step on given batches: starts an epoch on every worker."""
        self._run._strategy.start_epoch()

    def step(self, share: Share, micros: Sequence[Any]) -> torch.Tensor:
        """One optimizer step as ``run.step(batch)`` takes it, on given micro-batches.

        Args:
            share: the positions of an epoch that the micro-batches stand for.
            micros: one batch for each of ``share.micro``, on the run's device.

        Returns:
            Tensor: 0-d, the loss of the global batch.
        """
        run = self._run
        start = time.perf_counter()
        run._share, run._backwards = share, 0
        low, high = share.micro[0]
        with run._draws.reading():
            self._seed(share)
            run._strategy.before_batch(high > low)
            loss = run.step(MicroBatches(micros) if run.plan.accumulation > 1 else micros[0])
        self.last_step_seconds = time.perf_counter() - start
        return loss

    @property
    def can_step_alone(self) -> bool:
        """Whether a rank holds the whole model and its layers exchange nothing."""
        run = self._run
        if run.world_size == 1 or type(run._strategy) is not Replicate:
            return False
        synced = any(isinstance(m, nn.SyncBatchNorm) for m in run.model.modules())
        return not run.plan.sync_batchnorm and not synced and run._scaler is None

    def step_alone(self, share: Share, micros: Sequence[Any]) -> None:
        """One step without any exchange: forward, backward, clip, and update."""
        run = self._run
        strategy = run._strategy
        start = time.perf_counter()
        for p in strategy.parameters:
            p.grad = None
        self._seed(share)
        silent = strategy.no_exchange() if isinstance(strategy, Replicate) else nullcontext()
        with silent:
            for micro, (low, high) in zip(micros, share.micro, strict=True):
                value, weight = run._loss_of(micro)
                loss = value / weight if weight is not None else value
                loss = loss * (max(high - low, 1) / max(share.samples, 1))
                loss.backward()  # type: ignore[no-untyped-call]
        if run.plan.clip_norm is not None:
            nn.utils.clip_grad_norm_(strategy.parameters, run.plan.clip_norm)
        run._draws.end_own_step()
        run.optimizer.step()
        self.last_step_seconds = time.perf_counter() - start

    def _seed(self, share: Share) -> None:
        run = self._run
        self._steps += 1
        run._draws.hand_out(share, self._steps)

    # -- before and after --------------------------------------------------------------

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Inside, a step writes no record, checkpoint, or measurement, and leaves the scheduler
        alone: one that knows its number of steps would refuse extra ones.
        """
        run = self._run
        off = dict.fromkeys(
            ("_save_every", "_deadline", "_comparison", "_averaging", "_facts", "scheduler")
        )
        off |= {"_watcher": Watcher(None, Silent(), False), "_on_nan": "ignore"}
        off["_script_time"] = ScriptTime()
        before = {name: getattr(run, name) for name in off}
        run._watcher.rate.pause()
        unchecked, run._first_steps.off = run._first_steps.off, True
        for name, value in off.items():
            setattr(run, name, value)
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(run, name, value)
            run._first_steps.off = unchecked
            run._watcher.rate.resume()

    def snapshot(self) -> Snapshot:
        """A copy of everything a step changes; ``restore()`` puts it back bit by bit."""
        run = self._run
        return Snapshot(run, run._strategy, run._taken.dataset, run._loss, run._scaler)

    @contextmanager
    def as_found(self) -> Iterator[None]:
        """Puts the run back at the end, whatever was trained inside; see :class:`Snapshot`."""
        run = self._run
        before = self.snapshot()
        share, backwards = run._share, run._backwards
        failed = True
        try:
            with before.without_optimizer_hooks():
                yield
            failed = False
        finally:
            before.restore(failed)
            run._share, run._backwards = share, backwards
