"""The Run: the object a script holds after ``distribute``. One step is one optimizer step, on any
number of workers.
"""

from __future__ import annotations

import atexit
import inspect
import json
import math
import os
import sys
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from ronde.capture import GlobalDraws
from ronde.checkpoint import KeepPolicy
from ronde.data import Order
from ronde.loader import DrawAhead, Feed, TakenOver
from ronde.parallel import Part, Strategy, Work, own_calls
from ronde.parallel.first_steps import CHECKED_STEPS, check_step
from ronde.parallel.gradient_hooks import GradientHooks
from ronde.parallel.replica_check import ReplicaCheck
from ronde.plan import Plan, Share, epoch_steps, shares
from ronde.run import (
    checks,
    exchange_state,
    failure_note,
    hooks,
    lr_rules,
    persist,
    script_collectives,
    whole_model,
)
from ronde.run.average import Averages, Decay, WeightAverage
from ronde.run.batch_schedule import BatchSchedule, schedule_of
from ronde.run.best import BestCheckpoint, KeepBest
from ronde.run.check_prediction import PredictionCheck
from ronde.run.delivered_rows import Lengths, Rows, collates, lengths
from ronde.run.evaluation import Evaluation, evaluation_of, gather_skipped, on_device, skip_report
from ronde.run.first_steps_check import FirstStepsCheck
from ronde.run.gather import gather_batch
from ronde.run.group import RunGroup
from ronde.run.leave import leaving
from ronde.run.losses import LossCall
from ronde.run.memory_copies import memory_copies
from ronde.run.non_finite import NAN_EVERY, NonFiniteGuard, refuse_loss
from ronde.run.rank_facts import FactCheck, trained
from ronde.run.registered import Registered, Registry
from ronde.run.resume import roll_back
from ronde.run.run_state import DTYPES, MicroBatches, State
from ronde.run.script_time import timing_event
from ronde.run.step_draws import StepDraws
from ronde.run.unregistered import claim, unregistered
from ronde.watch import (
    Ended,
    Epoch,
    Evaluated,
    Logged,
    LossChecked,
    NoiseMeasured,
    RunDir,
    ScriptLoop,
    Warned,
    Watcher,
)
from ronde.world import (
    ArgumentError,
    CheckpointError,
    LossError,
    RondeError,
    World,
)
from ronde.world.rendezvous import counted, rendezvous

if TYPE_CHECKING:
    from ronde.run.step_port import StepPort

__all__ = ["Run"]

_SAVE_AT_LEAST_SECONDS = 60.0


def _ignore(text: str, differs: bool) -> None:
    """A run that is gone has nothing to report."""


class Run:
    """A training in progress; :func:`ronde.distribute` makes it.

    Attributes:
        model: the script's own module.
        optimizer: the script's own optimizer.
        scheduler: the script's own scheduler, or None. It steps once per optimizer step.
        plan: how the work is split.
        state: epoch, step, and samples so far.
        dir: the run directory; None if nothing is written (``RONDE_RUNS=none``).
    """

    def __init__(
        self,
        opening: hooks.Opening,
        plan: Plan,
        work: Work,
        strategy: Strategy,
        me: World,
        *,
        watcher: Watcher,
        directory: RunDir | None,
        writer: Any,
        save_every: int | None,
        keep: KeepPolicy,
        keep_best: str | None,
        async_save: bool,
        check_replicas: int | None,
        on_nan: str,
        in_lists: bool,
        group: RunGroup,
        part: str,
        source: Run | None,
        probes: dict[int, Any],
    ) -> None:
        self.model: nn.Module = opening.model
        self.optimizer: Optimizer = opening.optimizer
        self.scheduler = opening.scheduler
        self.plan = plan
        self.state = State()
        self.dir = directory
        self._me = me
        self._taken: TakenOver = opening.taken
        self._strategy = strategy
        self._work = work
        self._loss: LossCall = opening.calls
        alone = plan.replicas == 1 and plan.accumulation == 1
        self._rows = Rows(not alone, collates(opening.taken.settings))
        self._delivered: list[Lengths] = []  # of the micro-batches that were handed out
        self._gradient_hooks = GradientHooks()
        self._gathers: bool | None = None  # whether the script calls gather, once that is known
        self._stepping = False  # inside step(), which decides who runs the loss
        self._evaluated: tuple[int, int] | None = None  # samples and micro-batches of its batch
        self._rendezvous = rendezvous(me)
        warn = weakref.WeakMethod(self._warn)
        self._draws = StepDraws(
            plan,
            me,
            part,
            probes,
            lambda text: (warn() or _ignore)(text, True),
            lambda: group.alone,
        )
        divided = getattr(strategy, "divided", None)
        if self._draws.draws is not None and divided is not None:
            self._draws.draws.fused = divided.fused_widths(self.model)
        self._own_calls = own_calls(self.model, plan, self._rendezvous)
        if self._own_calls is not None:
            strategy.watch(self._own_calls)
        self._owns_loop = False
        self._skeleton: whole_model.Skeleton | None = None
        # The parameters that a plan which divides the model exchanges; None under other plans.
        self._divided: dict[int, torch.Tensor] | None = None
        if plan.pipeline > 1 or (plan.shard in ("gradients", "parameters") and plan.replicas > 1):
            optimized = [p for group in self.optimizer.param_groups for p in group["params"]]
            self._divided = {id(p): p for p in (*self.model.parameters(), *optimized)}
        self._watcher = watcher
        self._writer = writer
        self._save_every = save_every
        self._keep = keep
        self._async_save = async_save
        self._on_nan = on_nan
        self._guard = NonFiniteGuard(on_nan)
        self._goes_back = False  # to the last checkpoint, when the next batch is taken
        device, precision = me.device.type, plan.precision
        self._reads_are_free = device == "cpu"
        self._feed = Feed(
            self._taken.dataset,
            self._taken.order,
            self._taken.settings,
            plan.seed,
            on_cpu=self._reads_are_free,
            say=self._weak_reporter(),
            compares=me.size > 1 and self._taken.fingerprint is None and not hooks.observed(),
        )
        self._scaler = torch.amp.GradScaler(device, enabled=True) if precision == "fp16" else None
        self._scale: Callable[[torch.Tensor], torch.Tensor] | None = (
            self._scaler.scale if self._scaler else None
        )  # type: ignore[assignment]
        self._autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
        if precision in DTYPES:
            self._autocast = partial(torch.autocast, device, DTYPES[precision])
        self._first_steps = FirstStepsCheck(
            plan, me, self.model, self._loss, strategy, self._autocast
        )
        self._in_lists = in_lists
        self._group = group  # the runs of this loop
        self._script_time = clock = group.script_time
        clock.event, clock.measurable = timing_event(me.device)
        self._part = part  # this one's name in checkpoints and record; empty for the first
        self._source = source  # the run whose batches it takes, None if it has its own
        self._followers: list[weakref.ref[Run]] = []  # the runs that take this one's
        self._needs_batch = True  # whether before_batch is due for its next step
        if source is not None:
            source._followers.append(weakref.ref(self))
        self._share: Share | None = None  # of the batch handed out and not yet stepped on
        self._backwards = 0
        self._in_epochs = False
        self._readings = 0  # of all runs of the loop, when this one's epoch began
        self._loops = 0  # calls of run.epochs() so far
        # While a loop reads, the script's own included, loading threads and processes stay.
        self._looping = False
        self._reading: weakref.ref[Generator[Any, None, None]] | None = None  # the last batches()
        self._evaluations: dict[int, Evaluation] = {}
        self._schedule: BatchSchedule | None = None
        self._saved_schedule: dict[str, Any] | None = None  # of the checkpoint, not yet taken over
        self._registry = Registry()
        self._averages = Averages()
        claim(self.optimizer, self.scheduler)
        self._best = KeepBest(keep_best, directory.checkpoints if directory else None)
        self._averaging = True  # off while a tool steps
        self._unchecked_steps = CHECKED_STEPS if me.size > 1 else 0
        self._replicas = ReplicaCheck(check_replicas or 1)
        self._replicas.possible = me.size > 1 and check_replicas is not None
        self._facts = FactCheck(self, me) if me.size > 1 and not hooks.observed() else None
        self._left = ""  # where the script left run.batches(), if in the middle of an epoch
        self._trains = trained(self.model)
        strategy.on_change = self._agree_on_change
        self._warned_of_save = False
        self._last_saved_step = -1
        self._last_saved_time = self._started = time.monotonic()
        self._deadline: float | None = None
        self._leaving = leaving(me)
        self._comparison: PredictionCheck | None = None
        self._ended = False
        group.add(self, part)
        failure_note.follow_run(self)
        if group.memory is None and directory is not None:
            group.memory = memory_copies(me, directory.path)

    # -- who and where -----------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This worker's rank, from 0."""
        return self._me.rank

    @property
    def world_size(self) -> int:
        """The number of workers that train together."""
        return self._me.size

    @property
    def is_main(self) -> bool:
        """True on rank 0 only."""
        return self._me.is_main

    @property
    def device(self) -> torch.device:
        """The device this worker trains on."""
        return self._me.device

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in a whole epoch; in the current one, if a ``batch_sampler`` decides."""
        order = self._taken.order
        if (ends := order.ends(self.state.epoch)) is not None:
            return len(ends)
        samples = order.epoch_samples
        return epoch_steps(samples, self.plan.batch_size, self.plan.drop_last)

    @property
    def best(self) -> BestCheckpoint | None:
        """The best evaluation so far, by ``keep_best``, and its checkpoint. None before the first
        one, or without ``keep_best``.
        """
        return self._best.best

    @property
    def port(self) -> StepPort:
        """For tools that measure this run: its parts, steps on given batches, a snapshot."""
        # A new one each time: a port kept here would close a reference cycle, and loading
        # processes end in order only without one.
        from ronde.run.step_port import StepPort

        return StepPort(self)

    # -- the loop ----------------------------------------------------------------------

    def epochs(self, n: int) -> Iterator[int]:
        """Iterate over epochs, up to ``n`` in all. A resumed run continues in its epoch.

        Args:
            n: epochs of the whole training, including those before a resume.

        Yields:
            int: the epoch, from 0. A run that stopped after an epoch's last batch yields that epoch
            again, without batches, because it may not have been evaluated.

        Example:
            >>> for epoch in run.epochs(10):  # doctest: +SKIP
            ...     for batch in run.batches():
            ...         loss = run.step(batch)
        """
        if not checks.is_whole(n) or n < 0:
            raise ArgumentError(f"run.epochs({n!r}): expected a number of epochs, 0 or more.")
        self._refuse_follower(f"run.epochs({n})")
        n = hooks.observer.on_epochs(self, n)
        self._watcher.epochs = n
        self._watcher.total_steps = n * self.steps_per_epoch
        if self.state.epoch >= n and self.state.step:
            self._say(f"nothing left to train: {self.state.epoch} of {n} epochs are done")
        self._loops += 1
        this_loop = self._loops
        group, complete = self._group, False
        self._looping = True
        try:
            while self.state.epoch < n and not hooks.observer.is_over():
                epoch = self.state.epoch
                self._in_epochs, self._readings = True, group.readings
                try:
                    yield epoch
                except GeneratorExit:
                    complete = group.ends_with(self._readings)
                    raise
                finally:
                    self._in_epochs = False
                    if complete and self.state.epoch == epoch:
                        self._end_epoch()
                if self.state.epoch == epoch:
                    self._end_epoch()
                unsaved = time.monotonic() - self._last_saved_time
                if not group.alone:
                    group.due = group.due or unsaved >= _SAVE_AT_LEAST_SECONDS
                elif group.due:
                    self._save()
                elif self._save_every is None and unsaved >= _SAVE_AT_LEAST_SECONDS:
                    self._save_or_warn()
            group.complete()
            complete = True
        finally:
            # An abandoned loop may be collected later: it must not end another loop's loading.
            if this_loop == self._loops:
                self._end_loading()
            if complete:
                self._complete()

    def _complete(self) -> None:
        """The loop over epochs has ended: by itself, or because the one beside it in zip() has."""
        group = self._group
        group.saving.settle(group.runs)
        if group.in_epochs():
            group.due = group.due or group.is_unsaved
        elif group.is_unsaved:
            self._save_or_warn(wait=True)
        self._finish("completed")

    def batches(self) -> Iterator[Any]:
        """This worker's share of each global batch of the current epoch, on its device. After a
        resume, the rest of the epoch.

        Every worker gets the same number of batches. If the last global batch is smaller than the
        world, a worker with an empty share gets one sample as a stand-in, which does not count.

        Yields:
            The output of the data set's collate function: usually ``(inputs, target)``, samples
            first. A :class:`MicroBatches` if a step has several micro-batches or the script set
            ``micro_batch``.
        """
        self._refuse_follower("run.batches()")
        reading = self._tracked_batches()
        self._reading = weakref.ref(reading)
        return reading

    @counted("run.step(batch)")
    def step(self, batch: Any) -> torch.Tensor:
        """Train on one batch from :meth:`batches`: forward, backward, exchange, clip, update, and
        schedule.

        Args:
            batch: an item of :meth:`batches`, or what the script made of it.

        Returns:
            Tensor: 0-d, the loss of the whole global batch, the same on every rank. Nothing waits
            for it until you read it.

        Raises:
            LossError: the loss is not a scalar, or is NaN or infinite.
        """
        self._script_time.enter()
        share = self._current_share("run.step(batch)")
        micros = list(batch) if isinstance(batch, MicroBatches) else [batch]
        if len(micros) != len(share.micro):
            raise ArgumentError(
                f"run.step() got {len(micros)} micro-batches, this step has {len(share.micro)}: "
                "pass on what run.batches() yielded."
            )
        self._strategy.refresh()
        last, summed = len(micros) - 1, self._loss.reduction == "sum"
        self._delivered = [lengths(micro) for micro in micros] if self._rows.asks else []
        rows = self._rows_of(share)
        parts = [
            Part(high - low, share.global_samples, i == last, summed, n)
            for i, ((low, high), n) in enumerate(zip(share.micro, rows, strict=True))
        ]
        if self._gathers is None and share.global_samples < self.plan.replicas:
            self._strategy.run_empty_shares()  # the loss may call gather, which needs everyone
        if self._comparison is not None:
            self._comparison.begin()
        self._first_steps.begin(micros, parts)
        self._stepping = True
        self._draws.begin_step(share, micros)
        try:
            with self._group.gradients_of(self), self._holding_hooks(len(micros)):
                self._strategy.step(micros, parts, self._loss_of, self._scale)
        except Exception as error:
            failure_note.note_place(error)
            raise
        finally:
            self._stepping = False
            self._draws.end_step()
        self._gathers = bool(self._gathers)
        self._report_rows()
        loss = self._update(share)
        self._script_time.leave()
        return loss

    @counted("run.backward(loss)")
    def backward(self, loss: torch.Tensor | tuple[torch.Tensor, Any]) -> None:
        """Backward pass of a script that owns its loop: once per micro-batch, in order, then call
        :meth:`update`.

        Args:
            loss: the mean over this worker's samples of the (micro-)batch, or ``(sum, weight)``.
        """
        self._script_time.enter(own=True)
        share = self._current_share("run.backward(loss)")
        self._refuse_own_loop("run.backward(loss)")
        strategy, count = self._strategy, len(share.micro)
        if self._backwards >= count:
            raise RondeError(
                f"run.backward() was called {self._backwards + 1} times, this step has {count} "
                f"micro-batch{'es' if count > 1 else ''}. Add the losses of one pass, and call it "
                "once. A second pass at other weights (SAM) is a second run over the model: "
                "'Several passes over a batch' in docs/my-script-is.md."
            )
        if self._backwards == 0 and strategy.refresh():
            raise RondeError(
                "requires_grad of a parameter was changed after its batch was taken: freeze and "
                "thaw at the end of the loop's body, before the next batch."
            )
        value = self._loss.check(loss)
        low, high = share.micro[self._backwards]
        rows = self._rows_of(share)[self._backwards]
        self._report_rows()
        self._backwards += 1
        summed = self._loss.reduction == "sum"
        part = Part(high - low, share.global_samples, self._backwards == count, summed, rows)
        with self._group.gradients_of(self), self._holding_hooks(count):
            strategy.micro(lambda: value, part, self._scale)
        self._draws.end_own_pass(share, self._backwards)
        if part.last:
            self._group.announce()
        else:
            low, high = share.micro[self._backwards]
            strategy.expect(high > low)
        self._owns_loop = True
        if self._own_calls is not None:
            self._own_calls.due = not part.last

    @counted("run.update()")
    def update(self) -> torch.Tensor:
        """Exchange, clip, update, and schedule, after :meth:`backward`. Returns the global loss, as
        :meth:`step` does.
        """
        self._script_time.enter()
        share = self._current_share("run.update()")
        self._refuse_own_loop("run.update()")
        if hooks.observer.splits_steps(self) and 0 < self._backwards < len(share.micro):
            return torch.zeros(())  # the next batch belongs to this step
        if self._backwards != len(share.micro):
            raise RondeError(
                f"run.update() was called after {self._backwards} of {len(share.micro)} backward "
                "passes: call run.backward(loss) for every micro-batch."
            )
        self._draws.end_own_step()
        loss = self._update(share)
        self._script_time.leave()
        return loss

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows of all workers for the current global batch, in the order of its samples: for
        losses that relate samples to each other (contrastive, statistics of the batch). Call it
        on every worker, in ``forward``, in the loss, or in a loop of your own.

        Gradients flow back to the worker that a row came from. If the loss is computed from
        gathered tensors alone, loss and gradients are those of one process with the whole batch.
        In :meth:`evaluate`, it returns the rows of the current global evaluation batch.

        Args:
            tensor: one row for each sample of this worker's share, in their order.

        Returns:
            Tensor: one row for each sample of the global batch, the same on every worker.

        Raises:
            RondeError: outside of a step, with several micro-batches, or under a pipeline or
                tensor plan.
            ArgumentError: the rows do not fit the samples, or differ between workers.

        Example:
            >>> def loss(a, b):  # two views of each image  # doctest: +SKIP
            ...     return nt_xent(run.gather(a), run.gather(b))
        """
        share = self._share
        if self._evaluated is not None:
            samples, count = self._evaluated
        elif share is not None:
            samples, count = share.samples, len(share.micro)
            if not self._rows.asks and self._rows.collates:
                samples = len(tensor)  # some may be left out, and there is nobody to agree with
            elif self._rows.weighs:
                samples = int(sum(n or 0 for n in self._rows_of(share)))
        else:
            raise RondeError(
                "run.gather() was called outside of a step: call it between run.batches() and the "
                "step's end, where there is a global batch."
            )
        if self._loss.reduction == "sum":
            raise RondeError(
                "run.gather() does not go with loss_reduction='sum': every worker would add the "
                "whole batch's sum. Return the mean over the gathered samples."
            )
        short = share is not None and share.global_samples < self.plan.replicas
        if share is not None and self._stepping and short and self._gathers is False:
            raise RondeError(
                f"run.gather() was first called in a step with {share.global_samples} samples for "
                f"{self.plan.replicas} workers, some of which have none and are not waiting. Set "
                "drop_last=True, or call it from the first step on."
            )
        self._first_steps.gathered = self._gathers = True
        self._strategy.run_empty_shares()
        return gather_batch(tensor, samples, count, self.plan, self._me)

    # -- evaluation --------------------------------------------------------------------

    @counted("run.evaluate(data)")
    def evaluate(
        self, data: Any, metrics: Mapping[str, Any] | None = None, *, name: str = "evaluate"
    ) -> dict[str, Any]:
        """Loss and metrics over a data set. Each sample counts once, and every rank gets the same
        result, for any number of workers. Call it on every worker: each evaluates its share.

        Args:
            data: a Dataset or DataLoader, read in its own order.
            metrics: name -> a torchmetrics object, or a callable that takes what the loss takes,
                usually ``(output, target)``, and returns a mean over these samples, ``(sum,
                weight)``, or one value per sample.
            name: of this evaluation, in the record, the printed line, and TensorBoard: ``"test"``.

        Returns:
            dict: ``"loss"`` and each metric, as numbers (or whatever a torchmetrics object
            computes).

        Example:
            >>> run.evaluate(test_set, metrics={"accuracy": lambda out,  # doctest: +SKIP
            ...     y: (out.argmax(1) == y).float()})
            {'loss': 0.31, 'accuracy': 0.92}
        """
        if not isinstance(name, str) or not name:
            raise ArgumentError(f"run.evaluate(…, name={name!r}): expected a text, as 'test'.")
        self._rendezvous.meet("run.evaluate(data)")
        exchange_state.check_settled(self, "run.evaluate(data)")
        self._watcher.rate.pause()
        paused = self._script_time.pause()
        evaluation = evaluation_of(self, data, self._weak_reporter())
        self._strategy.sync_buffers()
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        hooks.observer.before_evaluation(self)
        try:
            with GlobalDraws.paused():
                result, samples = evaluation.run(self, dict(metrics or {}))
        finally:
            self._evaluated = None
            for module, training in modes:
                module.training = training  # each its own: the script may have frozen a part
            if not self._looping:
                evaluation.feed.close()
        hooks.observer.after_evaluation(self, result, samples)
        of = evaluation.taken.order.epoch_samples
        if report := skip_report(evaluation.skipped, of, "left out"):
            self._warn(f"{'evaluation' if name == 'evaluate' else name}: {report}")
        state = self.state
        self._watcher.event(
            Evaluated(
                step=state.step, epoch=state.epoch, samples=samples, metrics=result, name=name
            )
        )
        self._write_scalars(f"{name}/", result)
        if not self._ended:
            # Saved before the next batch: what the script does with the result is in it then.
            is_best, warning = self._best.compare(result, name, state)
            self._group.due |= is_best
            if warning:
                self._warn(warning)
        numbers = {k: f"{v:.4f}" if isinstance(v, float) else v for k, v in result.items()}
        shown = "  ".join(f"{name} {number}" for name, number in numbers.items())
        self._say(f"epoch {state.epoch + 1}  step {state.step}  {name}  {shown}")
        self._watcher.rate.resume()
        self._script_time.resume(paused)
        return result

    def fit(
        self, epochs: int, validate: Any = None, metrics: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The whole loop: train, and evaluate after every epoch.

        Args:
            epochs: epochs of the whole training.
            validate: data to evaluate on, or None.
            metrics: see :meth:`evaluate`.

        Returns:
            dict: of the last evaluation, or ``{"loss": last training loss}``.
        """
        result: dict[str, Any] = {}
        for _ in self.epochs(epochs):
            loss = None
            for batch in self.batches():
                loss = self.step(batch)
            if validate is not None:
                result = self.evaluate(validate, metrics)
            elif loss is not None:
                result = {"loss": float(loss)}
        return result

    def doctor(self, seconds: float = 60.0, **options: Any) -> dict[str, Any]:
        """Why are the devices idle? Measures this training with and without parts of its input,
        then puts everything back bit by bit: weights, optimizer, scheduler, randomness, and the
        place in the data. A copy of weights and moments is held meanwhile.

        Call it on every worker, between two steps. ``ronde doctor`` does the same from outside.

        Args:
            seconds: how long it may measure, roughly.
            options: ``rounds``, the least number of times to measure each rate; ``to``, the number
                of devices to predict for.

        Returns:
            dict: the content of ``ronde doctor --json``, the same on every worker.

        Example:
            >>> answer = run.doctor(seconds=30)  # doctest: +SKIP
            >>> answer["healthy"], answer["gap"], answer["cause"]  # doctest: +SKIP
            (False, 0.24, {'stage': 'decode', 'points': 14.1})
        """
        if hooks.examiner is None:
            raise RondeError("run.doctor() needs a run that ronde.distribute made.")
        paused = self._script_time.pause()
        try:
            return hooks.examiner(self, seconds, **options)
        finally:
            self._script_time.resume(paused)

    # -- among the ranks -------------------------------------------------------------------

    def barrier(self) -> None:
        """Wait until every rank is here. Call it on every worker.

        Raises:
            WorldError: a rank called something else, or ended.

        Example:
            >>> if run.is_main:  # doctest: +SKIP
            ...     torch.save(vocabulary, "vocabulary.pt")
            >>> run.barrier()  # doctest: +SKIP
            >>> vocabulary = torch.load("vocabulary.pt")  # doctest: +SKIP
        """
        script_collectives.barrier(self._rendezvous)

    def reduce(self, value: Any, op: Literal["mean", "sum", "max"] = "mean") -> Any:
        """Combine a value of each rank. Call it on every worker: all get the same result.

        Numbers are exact: integers stay integers, and a sum of floats is rounded once. Tensors are
        computed in float64, rounded once to their own type, and carry no gradient. A sum of integer
        tensors is int64, their mean is float64. A NaN on any rank makes a maximum NaN.

        Args:
            value: a number, a tensor, or a dictionary of these, with the same names, types, and
                shapes on every rank.
            op: ``"mean"`` (each rank weighs the same), ``"sum"``, or ``"max"``.

        Returns:
            What ``value`` is: a number, a tensor on its device, or a dictionary.

        Raises:
            ArgumentError: a value that cannot be reduced, on every rank.
            WorldError: ranks give different operations, names, types, or shapes.

        Example:
            >>> run.reduce({"reward": 12.5, "episodes": 3}, "sum")  # doctest: +SKIP
            {'reward': 31.0, 'episodes': 7}
        """
        return script_collectives.reduce(self._rendezvous, value, op)

    def gather_objects(self, obj: Any) -> list[Any]:
        """Collect a JSON value of each rank. Call it on every worker.

        Args:
            obj: None, numbers, text, and lists or dictionaries of them. Tuples arrive as lists.

        Returns:
            list: the values by rank, the same on every rank.

        Raises:
            ArgumentError: JSON does not hold a value, on every rank.
            WorldError: a rank called something else, or ended.

        Example:
            >>> run.gather_objects({"rank": run.rank})  # doctest: +SKIP
            [{'rank': 0}, {'rank': 1}]
        """
        return script_collectives.gather_objects(self._rendezvous, obj)

    def main_first(self) -> AbstractContextManager[None]:
        """Run a block on rank 0, then on all other ranks. Enter it on every worker.

        Raises:
            WorldError: on the other ranks, if rank 0's block failed; or if ranks call other things.

        Example:
            >>> with run.main_first():  # rank 0 downloads, the others find it  # doctest: +SKIP
            ...     data = load_dataset("wikitext")
        """
        return script_collectives.main_first(self._rendezvous)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print`` on rank 0; nothing on other ranks."""
        if self.is_main:
            print(*args, **kwargs)

    def whole_model(
        self, ranks: Literal["all", "main"] = "all", device: torch.device | str | None = None
    ) -> AbstractContextManager[Any]:
        """The whole model, for sampling, evaluation, and ``save_pretrained``, under every plan.

        Enter it on every worker. Inside, nothing communicates: each rank may call the model as
        often as it likes, or not at all, with any of its methods.

        Under a plan that divides the model, it is a copy: the original classes, plain tensors,
        current weights and buffers, and the modes of the training. Changes to it are lost. Under
        other plans it is the script's own model with rank 0's buffers; buffers and modes are put
        back at the end, and changed weights are an error.

        Args:
            ranks: ``"all"`` gives the model to every rank, ``"main"`` to rank 0, and None to the
                others. A copy takes the memory of all weights on each rank that gets one.
            device: where a copy is; None for this worker's device.

        Raises:
            PlanError: the model cannot be copied, or weights were changed inside.
            WorldError: a rank called something else, or ended.

        Example:
            >>> with run.whole_model() as model:  # doctest: +SKIP
            ...     if run.is_main:
            ...         print(model.eval().generate(prompt))
        """
        return whole_model.whole_model(self, ranks, device)

    # -- what it writes ----------------------------------------------------------------

    def log(self, values: Mapping[str, Any]) -> None:
        """Record the script's own values. Rank 0 writes; other ranks ignore the call.

        Args:
            values: name -> number, text, 0-d tensor, or a list of these.
        """
        hooks.observer.on_log(self, values)
        if not self.is_main:
            return
        plain = {k: (v.tolist() if isinstance(v, torch.Tensor) else v) for k, v in values.items()}
        self._watcher.event(Logged(step=self.state.step, epoch=self.state.epoch, values=plain))
        self._write_scalars("", plain)

    def register(self, **things: Any) -> Registered:
        """Keep the script's own state in the checkpoints, and restore it here after a resume, under
        any plan and on any number of workers. Call it on every worker, before the first step.

        Args:
            things: name -> an object with ``state_dict()`` and ``load_state_dict()`` (a scheduler
                that the script steps, a further optimizer, a copy of the model), or a plain value:
                numbers, strings, None, tensors, NumPy arrays, and lists, tuples, dicts, and deques
                of these. They must be the same on all ranks.

        Returns:
            Registered: everything registered, as attributes. Objects, lists, dicts, deques, and
            tensors are restored in place; assign to the attribute to change a plain value.

        Raises:
            ArgumentError: a name is taken, or something cannot be in a checkpoint.
            CheckpointError: the checkpoint has something else under this name.

        Example:
            >>> kept = run.register(scheduler=scheduler, best=0.0)  # doctest: +SKIP
            >>> kept.best = max(kept.best, accuracy)  # doctest: +SKIP
        """
        return self._registry.add(self, things)

    def average(
        self, decay: Decay = 0.999, *, name: str = "average", start: int = 0, every: int = 1
    ) -> WeightAverage:
        """Keep an average of the weights, under every plan. It is updated after each optimizer
        step, is in the checkpoint, and continues after a resume under any plan and on any number of
        workers. Call it on every worker, before the first step.

        Args:
            decay: ``average = decay * average + (1 - decay) * weights``. The average begins as the
                weights of now. A function takes the number of updates so far, from 0, for a
                warm-up: ``lambda n: min(0.999, (1 + n) / (10 + n))``. None gives the plain mean of
                the weights after each update (stochastic weight averaging).
            name: in the checkpoint, for a second average.
            start: the optimizer step after which it begins.
            every: optimizer steps from one update to the next.

        Returns:
            WeightAverage: ``with average.applied():`` gives the model the averaged weights;
            ``run.export(path, average=average)`` writes them.

        Raises:
            ArgumentError: an argument cannot be used.
            CheckpointError: the checkpoint's average is of another model.

        Example:
            >>> average = run.average(decay=0.999)  # doctest: +SKIP
            >>> with average.applied():  # doctest: +SKIP
            ...     run.evaluate(test_set)
        """
        exchange_state.check_can_average(self)
        return self._averages.add(self, name, decay, start, every)

    def grow_batch(
        self,
        at: Mapping[int, int] | None = None,
        *,
        largest: int | None = None,
        lr_rule: Literal["linear", "sqrt", "none"] | None = None,
    ) -> None:
        """Grow the global batch in the middle of the run. Call it on every worker, before the first
        step, and with the same arguments before a resume. Checkpoints keep it.

        Args:
            at: optimizer steps done -> global samples per step from then on.
            largest: grow by the measured gradient noise scale instead: at the start of an epoch,
                the batch doubles as often as it stays below the noise scale and ``largest``.
            lr_rule: how the learning rate follows a batch that is k times as large: ``"linear"``
                (× k), ``"sqrt"`` (× √k), or ``"none"``; None chooses by the optimizer, as for
                ``batch="grow"``.

        Raises:
            ArgumentError: an argument cannot be used.
            PlanError: the run cannot change its batch.
            CheckpointError: the checkpoint's run had other arguments.

        Example:
            >>> run.grow_batch({1000: 512, 4000: 1024})  # doctest: +SKIP
        """
        alone = self._group.alone and self._source is None and not self._followers
        schedule = schedule_of(self, at, largest, lr_rule, alone)
        if self._saved_schedule is not None:
            schedule.load(self, self._saved_schedule)
        elif self.state.step:
            raise CheckpointError(
                "the checkpoint cannot be continued with run.grow_batch(), which its run did not "
                "call. Leave it out, or start a new run."
            )
        self._schedule, self._saved_schedule = schedule, None

    def save(self, *, wait: bool = True) -> Path | None:
        """Write a checkpoint now: weights, optimizer, scheduler, what is registered, and the place
        in the data, of all runs of the loop. Call it on every worker, last in the body of the loop
        over batches.

        Args:
            wait: False copies everything and writes it in the background, as ``save_every`` does.

        Returns:
            Path: the checkpoint on rank 0, None on other ranks and with ``wait=False``.

        Raises:
            CheckpointError: it could not be written; earlier ones are untouched. With
                ``wait=False``, a warning tells it.
        """
        if self._in_epochs and self._epoch_is_over() and self._registry.items:
            self._warn_of_save()
        return self._save(wait)

    def _save(self, wait: bool = False) -> Path | None:
        group = self._group
        if self._goes_back:
            self._roll_back()
        runs = group.parts()
        for run in runs.values():
            run._averages.check("run.save()")
        if any(run._share is not None and run._backwards for run in runs.values()):
            raise RondeError(
                "run.save() was called between run.backward() and run.update(): the gradients "
                "would be lost. Call it after update()."
            )
        for run in runs.values():
            exchange_state.check_settled(run, "run.save()")
            if not group.saving.ends:  # a script may have ended on this rank only
                if self.dir is not None:  # else the run may end here, and with it the store
                    run._rendezvous.meet("run.save()")
                run._compare_replicas(run.state.step, save=True)
        group.due = False
        for run in runs.values():
            run._last_saved_step = run.state.step
            run._last_saved_time = time.monotonic()
        if self.dir is None:
            return None
        for run in runs.values():
            run._watcher.rate.pause()
            run._watcher.flush()  # a resume from this checkpoint does not record these steps again
            run._look_for_unregistered()
        paused = self._script_time.pause()
        if group.memory is not None:
            group.memory.finish()
            group.memory.put_off(group.step)
        with self._rendezvous.call("run.save()"):
            path = group.saving.save(runs, self.dir.checkpoints, group.step, wait)
        for run in runs.values():
            run._watcher.rate.resume()
        self._script_time.resume(paused)
        return path

    def _copy_to_memory(self) -> None:
        """Keep a copy of all runs in this machine's memory, for a launcher that starts it again."""
        group, began = self._group, time.perf_counter()
        assert group.memory is not None
        runs = {run._part: run for run in group.runs}
        between = any(run._share is not None and run._backwards for run in runs.values())
        drifts = any(run._strategy.drifts for run in runs.values())
        if self._goes_back or hooks.observed() or between or drifts or not group.whole:
            return
        with self._rendezvous.call("run.save()"):
            for run in runs.values():
                run._compare_replicas(run.state.step, save=True)
            group.memory.take(runs, group.step, began, group.saving.saver.is_writing)

    def export(self, path: str | os.PathLike[str], average: WeightAverage | None = None) -> None:
        """Write the model's weights, or an average of them, as plain safetensors, under the
        script's names. Call it on every worker; rank 0 writes.

        Tensors that share memory are written under each of their names. Under a plan that divides
        the model, the other ranks send their parts one tensor at a time, so rank 0 never holds more
        than one of them.

        Raises:
            CheckpointError: it could not be written.
        """
        exchange_state.check_settled(self, f"run.export({str(path)!r})")
        with average.applied() if average is not None else nullcontext():
            persist.export_weights(self, Path(path))

    def measure(self, seconds: float) -> None:
        """Train for about ``seconds`` from now on, write samples per second to
        ``RONDE_MEASURE_FILE``, and end the process.
        """
        self._deadline = seconds

    # -- inside a step -----------------------------------------------------------------

    def _current_share(self, call: str) -> Share:
        self._averages.check(call)
        if self._divided is not None:
            checks.check_same_parameters(self.optimizer, self._divided, self.plan)
        if self._share is None:
            raise RondeError(
                f"{call} was called without a batch: take one from run.batches(), and use each "
                "once."
                if self._source is None
                else f"{call} was called without a batch: this run shares the batches of another, "
                "so take one from that run's batches() first."
            )
        return self._share

    def _rows_of(self, share: Share) -> list[float | None]:
        """The weights of a step's means, see :class:`Rows`. A collective in the first step."""
        found = self._delivered
        samples = [high - low for low, high in share.micro]
        if len(found) != len(samples):  # a study hands micro-batches out one by one
            return [None] * len(samples)
        if self._rows.is_open:
            self._rows.settle(self._me, found, samples)
        return [self._rows.of(*each, self._loss) for each in zip(found, samples, strict=True)]

    def _report_rows(self) -> None:
        unclear, self._rows.unclear = self._rows.unclear, ""
        if unclear and not self._loss.pairs and self._loss.reduction == "mean":
            self._warn(unclear)

    def _refuse_own_loop(self, call: str) -> None:
        if self._strategy.whole_step:
            raise RondeError(
                f"{call} cannot drive the plan {self.plan.spec!r}: a pipeline interleaves forward "
                "and backward passes. Use run.step(batch), or another plan."
            )

    def _refuse_follower(self, call: str) -> None:
        if self._source is not None:
            raise RondeError(
                f"{call}: this run shares the batches of another (data=run). Loop over that "
                "run's epochs and batches, and step this one on what they yield."
            )

    def _loss_of(self, micro: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        self._draws.begin_pass(micro)
        try:
            with self._autocast():
                return self._loss(self.model, micro)
        finally:
            self._draws.end_pass()

    def _holding_hooks(self, micro_batches: int) -> AbstractContextManager[None]:
        if self.world_size == 1 and micro_batches == 1:
            return nullcontext()  # the gradients are those of the whole batch
        return self._gradient_hooks.held(self._strategy.parameters)

    def _update(self, share: Share) -> torch.Tensor:
        self._check_first_steps()
        loss = self._strategy.finish()
        self._gradient_hooks.run()
        if self._comparison is not None:
            self._comparison.end_passes()
        state = self.state
        look = self._on_nan == "error" and (self._reads_are_free or state.step % NAN_EVERY == 0)
        if look and not math.isfinite(loss):
            refuse_loss(self, float(loss), share)
        action = ""
        if self._on_nan in ("skip", "rollback"):
            action = self._guard.look(self, loss, share)
            if action == "rollback":
                # Later: the script may still change what it has registered.
                self._share, self._goes_back = None, True
                return loss
        lr, warm = self.optimizer.param_groups[0]["lr"], 1.0
        if action == "skip":
            self._strategy.updated()
        else:
            warm = self._apply_gradients(loss)
        if self._comparison is not None and self._comparison.end_step():
            self._report_comparison(self._comparison)
        if self.scheduler is not None:
            self.scheduler.step()
        hooks.observer.after_update(self, share)
        samples = share.global_samples
        state.step += 1
        self._rendezvous.heartbeat.stepped(state.step, self._strategy.waited_seconds)
        if self._schedule is not None:
            self._schedule.after_step(self)
        state.samples += samples
        state.epoch_samples = share.stop
        if self._strategy.drifts and self._strategy.exchange and self._epoch_is_over():
            self._strategy.exchange.stepped(settle=True)
        if self._source is not None:
            state.epoch = share.epoch
            self._needs_batch, self._backwards = True, 0
            self._follow(share)  # it may step on the same batch again
        else:
            self._share = None
        self._group.announce()
        self._group.stepped(self)
        self._watcher.step(state.step, state.epoch, loss, lr * warm, state.samples, samples)
        if self._save_every is not None and state.step % self._save_every == 0:
            # Not here: what the script does after the step (its averages, its scheduler) would be
            # one step behind in the checkpoint.
            self._group.due = True
        if self._leaving is not None and self._leaving.asked and not self._part:
            exchange = self._strategy.exchange
            every = exchange.reducer.every if exchange is not None else 1
            if self._leaving.is_time(state.step, every):
                self._group.due = self._group.leaves = True
        if self._averaging and action != "skip":
            self._averages.after_step(state.step)
        if state.step == self._watcher.steps_at_start + 1:
            self._registry.report_unused(self)
            self._averages.report_unused(self)
        if self._deadline is not None and self._watcher.rate.seconds >= self._deadline:
            self._write_measure()
            self._ended = True
            raise SystemExit(0)
        return loss

    def _check_first_steps(self) -> None:
        check = self._first_steps
        before, step = check.kind, self.state.step + 1
        for text, differs in check.end(step, bool(self._gathers)):
            self._warn(text, differs=differs)
        if check.kind != before:
            self._watcher.event(LossChecked(step=step, kind=check.kind))

    def _apply_gradients(self, loss: torch.Tensor) -> float:
        """Clip and update. Returns the warm-up's factor on the learning rate."""
        plan, optimizer, scaler = self.plan, self.optimizer, self._scaler
        if scaler is not None:
            scaler.unscale_(optimizer)
            if plan.workers > 1 and plan.family != "replicate":
                self._strategy.agree_on_overflow(scaler, optimizer)
        hooks.observer.on_gradients(self, loss)
        if plan.clip_norm is not None:
            self._strategy.clip(plan.clip_norm)
        hooks.observer.before_update(self)
        if self.state.step >= plan.warmup_steps:
            self._optimizer_step()
            return 1.0
        warm = lr_rules.warmup_factor(self.state.step, plan.warmup_steps, plan.lr_factor)
        with lr_rules.warmed(optimizer, warm):
            self._optimizer_step()
        return warm

    def _roll_back(self) -> bool:
        """Go back to the last checkpoint. Returns whether it is of the same epoch, whose batches
        since then come again.
        """
        self._goes_back = False
        group, epoch = self._group, self.state.epoch
        if group.memory is not None:
            group.memory.forget()
        group.saving.settle(group.runs)
        group.due = False
        assert self.dir is not None
        if not roll_back(self, self._me, self.dir):
            raise LossError(
                "on_nan='rollback': there is no checkpoint to go back to yet. Set save_every, or "
                "on_nan='skip'."
            )
        if self.state.epoch != epoch and not self._in_epochs:
            raise LossError(
                f"on_nan='rollback': the last checkpoint is of epoch {self.state.epoch + 1}, and a "
                f"loop of your own cannot go back to it from epoch {epoch + 1}. Use run.epochs(n)."
            )
        return self.state.epoch == epoch

    def _optimizer_step(self) -> None:
        if self._facts is not None:
            self._facts.begin(self)
        if self._scaler is not None:
            self._scaler.step(self.optimizer)
            self._scaler.update()
        else:
            self.optimizer.step()
        self._strategy.updated()
        why = self._facts.end(self) if self._facts is not None else ""
        if self._unchecked_steps and not hooks.observed() and not self._strategy.drifts:
            self._unchecked_steps -= 1
            same = check_step(self._strategy, self._work.tied, self.plan, self._me)
            self._replicas.possible &= same
        else:
            self._compare_replicas(self.state.step + 1, must=bool(why))
        if why and self.plan.shard != "none":  # parts that are held once, or sent to all again
            self._warn(f"step {self.state.step + 1}: {why}", differs=True)
        if why and self._facts is not None:
            self._facts.changed.clear()

    def _compare_replicas(self, step: int, save: bool = False, must: bool = False) -> None:
        facts, due = self._facts, self._replicas.is_due(step, save or must)
        if facts is not None and due and not self._strategy.drifts:
            explain = partial(facts.explain, self)
            self._replicas.check(self._strategy, self._work.tied, self._me, step, explain)
            facts.changed.clear()

    def _agree_on_change(self) -> None:
        """All ranks froze, thawed, or replaced the same parameters. A meeting."""
        before, self._trains = self._trains, trained(self.model)
        changed = [n for n, flag in self._trains.items() if before.get(n) != flag]
        what = (
            f"after requires_grad_(…) of {changed[0]!r}" if changed else "after replacing a layer"
        )
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        inside = bool(self._rendezvous.doing)
        self._rendezvous.meet(f"run.step(batch) {what}{more}", within=inside)

    def _report_comparison(self, comparison: PredictionCheck) -> None:
        self._comparison = None
        text, error = comparison.report(self.is_main)
        if error:
            self._warn(error)
        self._watcher.say(text)

    # -- inside an epoch ---------------------------------------------------------------

    def _read_batches(self) -> Generator[Any, None, None]:
        self._looping = True
        state, plan, order = self.state, self.plan, self._taken.order
        if self._epoch_is_over() and not self._in_epochs:
            self._end_epoch()  # the script has its own loop over epochs
        self._share = None  # a loop that was left before its last step may have set it
        epoch = state.epoch
        checks.check_length(self._taken, epoch)
        if self._left and not hooks.observed():
            call = f"run.batches() after it had left the loop {self._left}"
            self._left = ""
            self._rendezvous.meet(call)
        with self._rendezvous.call("run.batches()"):
            self._strategy.start_epoch()
        hooks.observer.on_epoch_start(self)
        if self._saved_schedule is not None:
            raise CheckpointError(
                "the checkpoint's run has called run.grow_batch(): call it before run.batches(), "
                "with the same arguments."
            )
        ends: Sequence[int] | None = order.ends(epoch)
        if self._schedule is not None:
            if not state.epoch_samples:
                self._schedule.begin_epoch(self)
            ends = self._schedule.ends(order.epoch_samples)
        if order.draw is not None:
            checks.check_draw(self._me, order, epoch, "run.batches")
            self._draw_ahead(order, epoch + 1)
        share_args = (
            order.samples_in(epoch),
            plan.batch_size,
            plan.layout.place(self.rank).replica,
            plan.replicas,
            plan.micro_batch,
            plan.drop_last,
            plan.accumulation if plan.pipeline > 1 else None,
        )
        current = partial(shares, epoch, state.epoch_samples, *share_args, ends)
        more = ends is None and self._in_epochs and epoch + 1 < (self._watcher.epochs or 0)
        following = partial(shares, epoch + 1, 0, *share_args)
        if ends is not None and (epochs := self._watcher.epochs):
            done = sum(end <= state.epoch_samples for end in ends)
            self._watcher.total_steps = state.step - done + (epochs - epoch) * len(ends)
        self._watcher.rate.resume()
        # The type of a batch must not depend on the number of workers.
        lists = hooks.observer.yields_lists(plan.accumulation > 1 or self._in_lists)
        pipeline = plan.spec if plan.pipeline > 1 else ""
        clock = self._script_time
        with self._draws.reading():
            ahead = following if more and not hooks.observed() else None
            for share, micros in self._draws.aside(self._feed.read(current, ahead)):
                if self._goes_back:
                    return
                if self._share is not None:
                    raise RondeError(
                        "run.batches() went on to the next batch before run.step(batch) or "
                        "run.update() was called for the last one: every batch takes one optimizer "
                        "step."
                    )
                if hooks.observer.is_over():
                    return
                facts = self._feed.take_facts()
                if mixing := checks.check_same_samples(self._me, facts, "run.batches"):
                    self._warn(mixing, differs=True)
                self._group.save_if_due(self)
                ready = self._hand_out(share, micros)
                if hooks.observer.splits_steps(self):
                    yield from ready
                else:
                    given = MicroBatches(ready, pipeline) if lists else ready[0]
                    clock.handed()
                    yield given
                    del given
                    clock.enter()
        if self._goes_back:
            return
        self._group.save_if_due(self)
        skipped = gather_skipped(self._feed, plan.layout, self._me)
        if report := skip_report(skipped, order.epoch_samples, "replaced by others"):
            self._warn(f"epoch {epoch + 1}: {report}")
        if plan.drop_last and self._share is None:
            state.epoch_samples = order.epoch_samples  # the rest of the epoch is dropped

    def _draw_ahead(self, order: Order, epoch: int) -> None:
        more = self._in_epochs and epoch < (self._watcher.epochs or 0)
        if isinstance(order.draw, DrawAhead) and more and not hooks.observed():
            order.ids(epoch - 1, 0, 1)  # this epoch's draw comes first
            order.draw.begin(epoch)

    @counted("run.batches()")
    def _hand_out(self, share: Share, micros: list[Any]) -> list[Any]:
        self._share, self._backwards = share, 0
        if self._own_calls is not None:
            self._own_calls.due = self._owns_loop
        self._draws.hand_out(share, self.state.step)
        if self._on_nan in ("skip", "rollback"):
            self._guard.begin(self)
        low, high = share.micro[0]
        self._strategy.before_batch(high > low)
        ready = on_device(self._feed, share, micros, self.device)
        rows = self._rows
        counts = rows.is_open or rows.weighs or self._owns_loop or bool(self._followers)
        self._delivered = [lengths(micro) for micro in ready] if counts else []
        for ref in self._followers:
            if (follower := ref()) is not None:
                follower._follow(share)
        self._group.announce()
        ready = hooks.observer.on_batch(self, share, ready)
        self._first_steps.hand_out(ready)
        return ready

    def _tracked_batches(self) -> Generator[Any, None, None]:
        token = self._group.begin_reading(self)
        for ref in self._followers:
            if (follower := ref()) is not None:
                follower._strategy.start_epoch()
        try:
            if self._goes_back:
                self._roll_back()
            yield from self._read_batches()
            while self._goes_back and self._roll_back():
                yield from self._read_batches()
        finally:
            state = self.state
            if state.epoch_samples and not self._epoch_is_over():
                self._left = f"in epoch {state.epoch + 1}, after {state.epoch_samples} samples"
            self._script_time.end_reading()
            self._group.end_reading(token)

    def _follow(self, share: Share) -> None:
        """Take over the batch that the run this one shares them with has handed out."""
        if self._share is not None and self._backwards:
            raise RondeError(
                f"run.backward() of {self._part!r} was called without run.update(), and the next "
                "batch is taken: call update() in the same pass of the loop."
            )
        self._share, self._backwards = share, 0
        if self._source is not None:
            self._delivered = self._source._delivered
        self._draws.follow(self.state.step)
        low, high = share.micro[0]
        if self._needs_batch:
            self._needs_batch = False
            self._strategy.before_batch(high > low)
            self._first_steps.hand_out([])
        else:
            self._strategy.refresh()

    def _epoch_is_over(self) -> bool:
        if self._source is not None or not self.state.epoch_samples:
            return False
        left = self._taken.order.samples_in(self.state.epoch) - self.state.epoch_samples
        return left <= 0 or (self.plan.drop_last and left < self.plan.batch_size)

    def _end_epoch(self) -> None:
        state = self.state
        self._watcher.event(
            Epoch(
                epoch=state.epoch,
                step=state.step,
                samples=state.samples,
                samples_per_second=self._watcher.rate.end_epoch(),
            )
        )
        self._record_script_time()
        self._look_for_unregistered()
        if report := self._best.missing():
            self._warn(report)
        state.epoch += 1
        state.epoch_samples = 0

    def _record_script_time(self) -> None:
        cost = self._script_time.cost() if not self._part else None
        if cost is not None:
            self._watcher.event(ScriptLoop(step=self.state.step, **cost))
        noise = self._strategy.noise
        if noise is not None and noise.value and not self._gathers and self.is_main:
            square, trace = noise.read() or (1.0, 0.0)
            low, high = noise.interval() or (None, None)
            self._watcher.event(
                NoiseMeasured(
                    step=self.state.step,
                    noise_scale=trace / square,
                    gradient_square=square,
                    measurements=noise.count,
                    low=low,
                    high=high,
                )
            )

    def _end_loading(self) -> None:
        """End loading threads and processes. They start again at the next read."""
        reading = self._reading() if self._reading is not None else None
        if reading is not None:
            if inspect.getgeneratorstate(reading) == inspect.GEN_RUNNING:
                return
            reading.close()
        self._looping = False
        if isinstance(self._taken.order.draw, DrawAhead):
            self._taken.order.draw.close()
        self._feed.close()
        for evaluation in self._evaluations.values():
            evaluation.feed.close()

    # -- notes and files ---------------------------------------------------------------

    def _say(self, text: str) -> None:
        self._watcher.say(f"{self._part}: {text}" if self._part else text)

    def _warn(self, text: str, differs: bool = False) -> None:
        """Warn; ``differs`` if the training is another one for it than in one process."""
        self._watcher.event(Warned(text=text, differs=differs))
        self._watcher.warn(text)

    def _report_feed(self, text: str, warning: bool) -> None:
        self._warn(text) if warning else self._watcher.say(text)

    def _weak_reporter(self) -> Callable[[str, bool], None]:
        # A feed that held the run would close a reference cycle; see ``port``.
        report = weakref.WeakMethod(self._report_feed)

        def say(text: str, warning: bool) -> None:
            if (call := report()) is not None:
                call(text, warning)

        return say

    def _write_scalars(self, prefix: str, values: Mapping[str, Any]) -> None:
        if self._writer is None or not self.is_main:
            return
        for name, value in values.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(f"{prefix}{name}", value, self.state.step)
        self._writer.flush()

    def _warn_of_save(self) -> None:
        if not self._warned_of_save:
            self._warned_of_save = True
            self._warn(
                "run.save() was called after an epoch's last batch: a resume enters this epoch "
                "again, so what the script did before in its body, such as a scheduler's step, is "
                "done twice. Leave it out: save_every=… saves before the body ends, and run.epochs "
                "after it"
            )

    def _look_for_unregistered(self) -> None:
        if self.is_main and self.dir is not None and not hooks.observed():
            for warning in unregistered():
                self._warn(warning)

    def _save_or_warn(self, wait: bool = False) -> None:
        """Save without being asked: a full disk must not end the training."""
        try:
            self._save(wait)
        except CheckpointError as error:
            self._warn(f"{error}")

    def _leave(self) -> None:
        """Save, and end this process as one that was asked to."""
        assert self._leaving is not None
        self._save_or_warn(wait=True)
        self._say(f"asked to leave, after step {self.state.step}")
        for run in self._group.runs:
            run._finish("interrupted")
        self._leaving.end()

    def _write_measure(self) -> None:
        if self.is_main:
            values = {
                "workers": self.world_size,
                "samples_per_second": self._watcher.rate.samples_per_second,
                "steps": self.state.step,
            }
            Path(os.environ["RONDE_MEASURE_FILE"]).write_text(json.dumps(values))

    # -- the end -----------------------------------------------------------------------

    def _finish(self, status: str) -> None:
        if self._ended:
            return
        self._ended = True
        atexit.unregister(self._at_exit)  # it would hold the model and the data
        self._group.release()
        for ref in self._followers:
            if (follower := ref()) is not None:
                follower._finish(status)
        if self._deadline is not None:
            self._write_measure()  # the training was shorter than the time asked for
        state = self.state
        self._rendezvous.heartbeat.ended()
        self._record_script_time()
        self._watcher.event(
            Ended(
                status=status,
                step=state.step,
                epoch=state.epoch,
                samples=state.samples,
                samples_per_second=self._watcher.rate.samples_per_second,
                seconds=time.monotonic() - self._started,
            )
        )
        if self._writer is not None:
            self._writer.close()
        self._watcher.close()
        shows = self.is_main and not self._part and not os.environ.get("RONDE_PROGRESS")
        if self.dir is not None and shows:
            self._watcher.display.say(
                f"run directory {self.dir.path}; 'ronde show {self.dir.name}' draws its curve"
            )

    def _at_exit(self) -> None:
        # A script that ends by itself, without run.epochs(), has completed. The launcher records
        # one that failed.
        if self._ended:
            return
        try:
            self._end_unasked()
        finally:
            # An abandoned loop that is collected later finds no modules left.
            self._end_loading()
            self._loops += 1

    def _end_unasked(self) -> None:
        self._watcher.flush()
        if hasattr(sys, "last_value") or not self.state.step:
            self._group.saving.leave(self)
            self._watcher.close()
            return
        group = self._group
        for run in [run for run in group.runs if not run._ended]:
            beside = run._in_epochs and group.ends_with(run._readings)
            if beside or run._epoch_is_over():
                run._end_epoch()
        group.saving.end(group.runs)
        if group.is_unsaved and self._deadline is None:
            self._save_or_warn(wait=True)
        self._finish("completed")
