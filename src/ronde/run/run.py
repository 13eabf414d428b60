"""The Run: what a script holds after ``distribute``. One step of it is one optimizer step, on any
number of workers.
"""

from __future__ import annotations

import atexit
import dataclasses
import inspect
import json
import math
import os
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import IterableDataset

from ronde.data import key_of
from ronde.loader import (
    Feed,
    LoaderSettings,
    Taken,
    first_few,
    other_classes,
    pipeline_in,
    take_over,
)
from ronde.parallel import Part, Strategy, Work
from ronde.plan import Plan, Share, epoch_steps, shares
from ronde.run import hooks, lr_rules, persist
from ronde.run.check_prediction import PredictionCheck
from ronde.run.evaluation import Evaluation, gather_skipped, on_device
from ronde.run.losses import LossCall
from ronde.run.per_pass_buffers import Passes
from ronde.run.run_state import DTYPES, MicroBatches, State
from ronde.watch import Checkpointed, Ended, Epoch, Evaluated, Logged, RunDir, Warned, Watcher
from ronde.world import ArgumentError, CheckpointError, LossError, PlanError, RondeError, World
from ronde.world.consensus import gather_json

if TYPE_CHECKING:
    from ronde.run.step_port import StepPort

__all__ = ["Run"]

_SAVE_AT_LEAST_SECONDS = 60.0
_NAN_EVERY = 50  # steps; to look at a loss on an accelerator is to wait for it


class Run:
    """A training in progress; made by :func:`ronde.distribute`.

    Attributes:
        model: the script's own module.
        optimizer: the script's own optimizer.
        scheduler: the script's own scheduler, or None. It is stepped once per optimizer step.
        plan: what is being done.
        state: epoch, step and samples so far.
        dir: the run directory, None where nothing is written (``RONDE_RUNS=none``).
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: Any,
        taken: Taken,
        strategy: Strategy,
        work: Work,
        loss: LossCall,
        plan: Plan,
        me: World,
        watcher: Watcher,
        directory: RunDir | None,
        save_every: int | None,
        keep: int,
        on_nan: str,
        writer: Any,
        in_lists: bool,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.plan = plan
        self.state = State()
        self.dir = directory
        self._me = me
        self._taken = taken
        self._strategy = strategy
        self._work = work
        self._loss = loss
        self._passes = Passes(model, plan, me)
        # Whose gradients a plan that divides the model takes care of; None under the others, which
        # look at what is there.
        self._divided: dict[int, torch.Tensor] | None = None
        if plan.pipeline > 1 or (plan.shard in ("gradients", "parameters") and plan.replicas > 1):
            held = [p for group in optimizer.param_groups for p in group["params"]]
            self._divided = {id(p): p for p in (*model.parameters(), *held)}
        self._watcher = watcher
        self._writer = writer
        self._save_every = save_every
        self._keep = keep
        self._on_nan = on_nan
        self._feed = Feed(
            taken.dataset,
            taken.order,
            taken.settings,
            plan.seed,
            on_cpu=me.device.type == "cpu",
            say=self._feed_says_weakly(),
        )
        self._scaler = (
            torch.amp.GradScaler(me.device.type, enabled=True) if plan.precision == "fp16" else None
        )
        self._scale: Callable[[torch.Tensor], torch.Tensor] | None = (
            self._scaler.scale if self._scaler else None
        )  # type: ignore[assignment]
        self._autocast: Callable[[], AbstractContextManager[Any]] = (
            partial(torch.autocast, me.device.type, DTYPES[plan.precision])
            if plan.precision in DTYPES
            else nullcontext
        )
        self._reads_are_free = me.device.type == "cpu"
        self._in_lists = in_lists
        self._share: Share | None = None  # the batch handed out and not yet stepped on
        self._backwards = 0
        self._in_epochs = False
        self._loops = 0  # how many run.epochs() have begun
        # a loop is going on, or one of the script's own may be: loading threads and processes stay
        self._looping = False
        self._reading: weakref.ref[Generator[Any, None, None]] | None = (
            None  # what run.batches() gave last
        )
        self._evaluations: dict[int, Evaluation] = {}
        self._last_saved_step = -1
        self._last_saved_time = time.monotonic()
        self._started = time.monotonic()
        self._deadline: float | None = None
        self._comparison: PredictionCheck | None = None
        self._ended = False
        atexit.register(self._at_exit)

    # -- who and where -----------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This worker's place among all, from 0."""
        return self._me.rank

    @property
    def world_size(self) -> int:
        """How many workers train together."""
        return self._me.size

    @property
    def is_main(self) -> bool:
        """True on rank 0 only."""
        return self._me.is_main

    @property
    def device(self) -> torch.device:
        """What this worker trains on."""
        return self._me.device

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in a whole epoch."""
        return epoch_steps(
            self._taken.order.epoch_samples, self.plan.batch_size, self.plan.drop_last
        )

    @property
    def port(self) -> StepPort:
        """For tools that measure this run: steps on given batches, its parts, a snapshot."""
        # Made anew: a port that the run held would hold the run, and loading processes end in
        # order only where there is no such cycle.
        from ronde.run.step_port import StepPort

        return StepPort(self)

    # -- the loop ----------------------------------------------------------------------

    def epochs(self, n: int) -> Iterator[int]:
        """Go through epochs up to ``n`` in all; a resumed run goes on in the epoch where it
        stopped.

        Args:
            n: epochs of the whole training, those before a resume included.

        Yields:
            int: the epoch, from 0. A run that stopped after an epoch's last batch goes on with that
            epoch, without batches: it may not have been evaluated.

        Example:
            >>> for epoch in run.epochs(10):  # doctest: +SKIP
            ...     for batch in run.batches():
            ...         loss = run.step(batch)
        """
        if isinstance(n, bool) or not isinstance(n, int) or n < 0:
            raise ArgumentError(
                f"run.epochs({n!r}): expected how many epochs to train in all, a whole number."
            )
        if hooks.observer is not None:
            n = hooks.observer.epochs(self, n)
        self._watcher.epochs = n
        self._watcher.total_steps = n * self.steps_per_epoch
        if self.state.epoch >= n and self.state.step:
            self._watcher.say(f"nothing left to train: {self.state.epoch} of {n} epochs are done")
        self._loops += 1
        mine = self._loops
        self._looping = True
        try:
            while self.state.epoch < n and not (
                hooks.observer is not None and hooks.observer.over()
            ):
                epoch = self.state.epoch
                self._in_epochs = True
                try:
                    yield epoch
                finally:
                    self._in_epochs = False
                if self.state.epoch == epoch:
                    self._end_epoch()
                if (
                    self._save_every is None
                    and time.monotonic() - self._last_saved_time >= _SAVE_AT_LEAST_SECONDS
                ):
                    self._save_quietly()
        finally:
            # one that was left, and is collected now, must not end what another loop waits for
            if mine == self._loops:
                self._end_loading()
        if self.state.step != self._last_saved_step:
            self._save_quietly()
        self._finish("completed")

    def _end_loading(self) -> None:
        """End the threads and processes that load: nobody asks them for more. They start again if
        somebody does.
        """
        reading = self._reading() if self._reading is not None else None
        if reading is not None:
            if inspect.getgeneratorstate(reading) == inspect.GEN_RUNNING:
                return
            reading.close()
        self._looping = False
        self._feed.close()
        for evaluation in self._evaluations.values():
            evaluation.feed.close()

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
        state.epoch += 1
        state.epoch_samples = 0

    def _epoch_is_over(self) -> bool:
        left = self._taken.order.epoch_samples - self.state.epoch_samples
        return left <= 0 or (self.plan.drop_last and left < self.plan.batch_size)

    def batches(self) -> Iterator[Any]:
        """This worker's share of each global batch of the current epoch, on its device; after a
        resume, of the rest of it.

        Every worker gets the same number of batches. Where the last one is smaller than the world,
        a worker whose share is empty gets a stand-in of one sample, which counts for nothing.

        Yields:
            What the data set's collate function makes of the worker's samples: usually ``(inputs,
            target)``, first dimension = samples. With several micro-batches, a
            :class:`MicroBatches`; always, if the script gave ``micro_batch``.
        """
        found = self._batches()
        self._reading = weakref.ref(found)
        return found

    def _batches(self) -> Generator[Any, None, None]:
        self._looping = True
        state, plan, order = self.state, self.plan, self._taken.order
        if self._epoch_is_over() and not self._in_epochs:
            self._end_epoch()  # a script that has a loop of its own over epochs
        self._share = None  # of a loop that was left before it used its last batch
        epoch, offset = state.epoch, state.epoch_samples
        self._strategy.start_epoch()
        if hooks.observer is not None:
            hooks.observer.starting(self)

        place, parts = (
            plan.layout.place(self.rank),
            plan.accumulation if plan.pipeline > 1 else None,
        )
        mine = (
            order.epoch_samples,
            plan.batch_size,
            place.replica,
            plan.replicas,
            plan.micro_batch,
            plan.drop_last,
            parts,
        )
        follows = (
            self._in_epochs and epoch + 1 < (self._watcher.epochs or 0) and hooks.observer is None
        )
        after = partial(shares, epoch + 1, 0, *mine) if follows else None
        self._watcher.rate.resume()
        # what a loop of the script's own finds must not depend on the workers
        several = plan.accumulation > 1 or self._in_lists
        if hooks.observer is not None:
            several = hooks.observer.several(several)
        reseed = self.world_size > 1
        with self._reseeding():
            for share, micros in self._feed.read(partial(shares, epoch, offset, *mine), after):
                if self._share is not None:
                    raise RondeError(
                        "run.batches() went on to the next batch before run.step(batch) or "
                        "run.update() was called for the last one: every "
                        "batch takes one optimizer step."
                    )
                if hooks.observer is not None and hooks.observer.over():
                    return
                self._share = share
                self._backwards = 0
                if reseed:
                    # Dropout on many workers: a function of (seed, step, rank), so that a resumed
                    # run draws what it would have.
                    self._seed(key_of(plan.seed, 5, state.step, self.rank // plan.tensor))
                low, high = share.micro[0]
                self._strategy.before_batch(high > low)
                ready = on_device(self._feed, share, micros, self.device)
                if hooks.observer is not None:
                    ready = hooks.observer.batch(self, share, ready)
                    if hooks.observer.apart(self):
                        yield from ready
                        continue
                yield MicroBatches(ready) if several else ready[0]
        self._tell_skipped(
            gather_skipped(self._feed, plan.layout, self._me),
            order.epoch_samples,
            f"epoch {epoch + 1}",
            "replaced by others",
        )
        if plan.drop_last and self._share is None:
            state.epoch_samples = order.epoch_samples  # what is left of the epoch is left out

    def _feed_says_weakly(self) -> Callable[[str, bool], None]:
        """For a feed, which must not hold the run that holds it: processes are ended in order only
        where there is no such cycle.
        """
        call = weakref.WeakMethod(self._feed_says)

        def say(text: str, warning: bool) -> None:
            found = call()
            if found is not None:
                found(text, warning)

        return say

    def _feed_says(self, text: str, warning: bool) -> None:
        self._warn(text) if warning else self._watcher.say(text)

    def _tell_skipped(self, skipped: list[tuple[int, str]], of: int, where: str, what: str) -> None:
        if skipped:
            count = f"{len(skipped)} sample{'s' if len(skipped) > 1 else ''} of {of}"
            self._warn(
                f"{where}: {count} ({len(skipped) / of:.2%}) could not be used and "
                f"{'were' if len(skipped) > 1 else 'was'} {what}: {first_few(skipped)}"
            )

    @contextmanager
    def _reseeding(self) -> Iterator[None]:
        """Within, each step's random numbers are its own; what the script draws afterwards does not
        depend on how many workers trained.
        """
        if self.world_size == 1:
            yield
            return
        before = torch.default_generator.get_state()
        on_device = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        try:
            yield
        finally:
            torch.default_generator.set_state(before)
            if on_device is not None:
                torch.cuda.set_rng_state(on_device, self.device)

    def _seed(self, key: int) -> None:
        # torch.manual_seed formats a stack trace for devices that are not there: 300 µs a step.
        torch.default_generator.manual_seed(key)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(key)

    def _refuse_new_parameters(self, known: Mapping[int, torch.Tensor]) -> None:
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                if id(p) not in known:
                    raise PlanError(
                        f"plan={self.plan.spec!r}: the optimizer holds a parameter of shape "
                        f"{tuple(p.shape)} that was not there when ronde.distribute divided the "
                        "model over the workers: nothing exchanges its gradients. Build the model "
                        "and load it before ronde.distribute, copy values into its parameters "
                        "(p.copy_(…), load_state_dict without assign=True), or use "
                        "plan='replicate'."
                    )

    def _taken_share(self, call: str) -> Share:
        if self._divided is not None:
            self._refuse_new_parameters(self._divided)
        if self._share is None:
            raise RondeError(
                f"{call} was called without a batch: take one from run.batches(), and use "
                "each once."
            )
        return self._share

    def step(self, batch: Any) -> torch.Tensor:
        """Train on one batch from :meth:`batches`: forward, backward, exchange, clip, update and
        schedule.

        Args:
            batch: what :meth:`batches` yielded, or what the script made of it.

        Returns:
            Tensor: 0-d, the loss of the whole global batch, the same on every rank. It waits for
                nothing until it is read.

        Raises:
            LossError: the loss is not a scalar, or is NaN or infinite.
        """
        share = self._taken_share("run.step(batch)")
        micros = batch if isinstance(batch, MicroBatches) else (batch,)
        if len(micros) != len(share.micro):
            raise ArgumentError(
                f"run.step() got {len(micros)} micro-batches, this step has "
                f"{len(share.micro)}: pass on what run.batches() yielded."
            )
        self._strategy.refresh()
        last = len(micros) - 1
        parts = [
            Part(high - low, share.global_samples, i == last)
            for i, (low, high) in enumerate(share.micro)
        ]
        if self._comparison is not None:
            self._comparison.begin()
        self._passes.begin()
        self._strategy.step(micros, parts, self._loss_of, self._scale)
        self._tell_passes()
        return self._update(share)

    def _tell_passes(self) -> None:
        said = self._passes.end()
        if said:
            self._warn(said)

    def _loss_of(self, micro: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        with self._autocast():
            return self._loss(self.model, micro)

    def backward(self, loss: torch.Tensor | tuple[torch.Tensor, Any]) -> None:
        """Backward pass of a script that owns its loop; once per micro-batch, in order, then
        :meth:`update`.

        Args:
            loss: the mean over this worker's samples of the (micro-)batch, or ``(sum, weight)``.
        """
        share = self._taken_share("run.backward(loss)")
        if self._strategy.whole_step:
            raise RondeError(
                f"run.backward(loss) cannot drive the plan {self.plan.spec!r}: the model "
                "is spread over a pipeline, whose forward and "
                "backward passes are interleaved. Use run.step(batch), or another plan."
            )
        if self._backwards >= len(share.micro):
            raise RondeError(
                f"run.backward() was called {self._backwards + 1} times, this step has "
                f"{len(share.micro)} micro-batches."
            )
        if self._backwards == 0 and self._strategy.refresh():
            raise RondeError(
                "requires_grad of a parameter was changed after its batch was taken: "
                "freeze and thaw before, at the end of the loop's body."
            )
        value, weight = self._loss.check(loss)

        def given() -> tuple[torch.Tensor, torch.Tensor | None]:
            return value, weight

        low, high = share.micro[self._backwards]
        self._backwards += 1
        part = Part(high - low, share.global_samples, self._backwards == len(share.micro))
        self._strategy.micro(given, part, self._scale)
        if self._backwards == 1:
            self._passes.begin()
        if part.last:
            self._tell_passes()
        else:
            low, high = share.micro[self._backwards]
            self._strategy.expect(high > low)

    def update(self) -> torch.Tensor:
        """Exchange, clip, update and schedule, after :meth:`backward`. Returns the global loss, as
        :meth:`step` does.
        """
        share = self._taken_share("run.update()")
        if (
            hooks.observer is not None
            and hooks.observer.apart(self)
            and 0 < self._backwards < len(share.micro)
        ):
            return torch.zeros(())  # the next batch belongs to this step
        if self._backwards != len(share.micro):
            raise RondeError(
                f"run.update() was called after {self._backwards} of {len(share.micro)} "
                "backward passes: call run.backward(loss) for every micro-batch."
            )
        return self._update(share)

    def _update(self, share: Share) -> torch.Tensor:
        loss = self._strategy.finish()
        if self._comparison is not None:
            self._comparison.passed()
        plan, state, optimizer, scaler = self.plan, self.state, self.optimizer, self._scaler
        if (
            self._on_nan == "error"
            and (self._reads_are_free or state.step % _NAN_EVERY == 0)
            and not math.isfinite(loss)
        ):
            self._refuse_loss(float(loss), share)
        if scaler is not None:
            scaler.unscale_(optimizer)
            if plan.workers > 1 and plan.family != "replicate":
                self._strategy.agree_on_overflow(scaler, optimizer)
        if hooks.observer is not None:
            hooks.observer.gradients(self, loss)
        if plan.clip_norm is not None:
            self._strategy.clip(plan.clip_norm)
        if hooks.observer is not None:
            hooks.observer.clipped(self)
        lr = optimizer.param_groups[0]["lr"]
        warm = 1.0
        if state.step < plan.warmup_steps:
            warm = lr_rules.warmup_factor(state.step, plan.warmup_steps, plan.lr_factor)
            with lr_rules.warmed(optimizer, warm):
                self._optimizer_step()
        else:
            self._optimizer_step()
        if self._comparison is not None and self._comparison.stepped():
            self._compare(self._comparison)
        if self.scheduler is not None:
            self.scheduler.step()
        if hooks.observer is not None:
            hooks.observer.updated(self, share)
        samples = share.global_samples
        state.step += 1
        state.samples += samples
        state.epoch_samples = share.stop
        self._share = None
        self._watcher.step(state.step, state.epoch, loss, lr * warm, state.samples, samples)
        if self._save_every is not None and state.step % self._save_every == 0:
            self.save()
        if self._deadline is not None:
            self._measure()
        return loss

    def _compare(self, comparison: PredictionCheck) -> None:
        """Predicted against measured, once."""
        self._comparison = None
        text, seconds = comparison.sentence()
        if self.is_main:
            try:
                keep = comparison.forecast.keep
                factor = (
                    keep(comparison.forecast.raw_seconds, seconds) if keep is not None else None
                )
            except (OSError, RondeError) as error:
                self._warn(f"the comparison could not be kept: {error}")
            else:
                text += (
                    f"; the next prediction of {comparison.forecast.family} here is × {factor:.3g}"
                    if factor is not None
                    else ""
                )
        self._watcher.say(text)

    def _optimizer_step(self) -> None:
        if self._scaler is not None:
            self._scaler.step(self.optimizer)
            self._scaler.update()
        else:
            self.optimizer.step()
        self._strategy.updated()

    def _refuse_loss(self, value: float, share: Share) -> None:
        # The loss is the same on every rank, so all of them are here: they can say whose samples it
        # came from.
        local = self._whose_loss()
        order = self._taken.order
        ids = order.ids(share.epoch, share.start, share.stop)
        found = "The weights were not updated."
        if not self._reads_are_free:
            found = (
                f"On this device that is looked at every {_NAN_EVERY} steps: it may have begun in "
                "an earlier one."
            )
        shown = ", ".join(map(str, ids[:8].tolist())) + (", …" if len(ids) > 8 else "")
        raise LossError(
            f"the loss is {value} in step {self.state.step + 1} (epoch {share.epoch}, samples "
            f"{share.start}–{share.stop - 1} of its order: indices {shown}){local}. {found} Look "
            "at these samples, lower the learning rate, or clip (clip_norm=1.0); on_nan='ignore' "
            "trains on."
        )

    def _whose_loss(self) -> str:
        if self.world_size == 1:
            return ""
        mine = self._strategy.local_loss
        finite = gather_json(self._me, mine is None or math.isfinite(mine))
        bad = [str(rank) for rank, good in enumerate(finite) if not good]
        return f", from the samples of rank {', '.join(bad)}" if bad else ""

    # -- evaluation --------------------------------------------------------------------

    def evaluate(self, data: Any, metrics: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Loss and metrics over a data set, each sample counted once, the same result on every rank
        and for any number of them.

        Call it on every worker: each evaluates its share.

        Args:
            data: a Dataset or DataLoader, read in its own order.
            metrics: name -> a torchmetrics object, or a callable of what the loss takes, usually
                ``(output, target)``, that returns a mean over the samples given, ``(sum, weight)``,
                or one value per sample.

        Returns:
            dict: ``"loss"`` and each metric, as numbers (or what a torchmetrics object computes).

        Example:
            >>> run.evaluate(test_set, metrics={"accuracy": lambda out,  # doctest: +SKIP
            ...     y: (out.argmax(1) == y).float()})
            {'loss': 0.31, 'accuracy': 0.92}
        """
        self._watcher.rate.pause()
        evaluation = self._evaluations.get(id(data))
        if evaluation is None or evaluation.data is not data:
            taken = take_over(
                data,
                seed=self.plan.seed,
                batch_size=None,
                shuffle=None,
                shuffle_dataset=False,
                drop_last=False,
                argument="evaluate's data",
                evaluate=True,
            )
            if (other := other_classes(self._taken.dataset, data)) is not None:
                self._warn(
                    f"evaluate: {other}. Have both count the same classes: feed.folder(…, "
                    "like=train), feed.table(…, like=train)."
                )
            if hooks.observer is not None:
                taken = hooks.observer.evaluating(self, taken)
            evaluation = Evaluation(
                data,
                taken,
                self._settings_for(data, taken),
                self.plan,
                self._me,
                self._feed_says_weakly(),
            )
            self._evaluations[id(data)] = evaluation
            if len(self._evaluations) > 4:  # a script may make a new DataLoader for each
                self._evaluations.pop(next(iter(self._evaluations))).feed.close()
        self._strategy.sync_buffers()
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        if hooks.observer is not None:
            hooks.observer.evaluation(self)
        try:
            result, samples = evaluation.run(
                self.model, self._loss, dict(metrics or {}), self._autocast, self._strategy
            )
        finally:
            for module, training in modes:
                module.training = training  # each its own: a frozen part stays as the script set it
            if not self._looping:
                evaluation.feed.close()
        if hooks.observer is not None:
            hooks.observer.evaluated(self, result, samples)
        self._tell_skipped(
            evaluation.skipped, evaluation.taken.order.epoch_samples, "evaluation", "left out"
        )
        self._watcher.event(
            Evaluated(step=self.state.step, epoch=self.state.epoch, samples=samples, metrics=result)
        )
        if self.is_main and self._writer is not None:
            self._write_scalars("evaluate", result)
        shown = "  ".join(
            f"{k} {v:.4f}" if isinstance(v, float) else f"{k} {v}" for k, v in result.items()
        )
        self._watcher.say(
            f"epoch {self.state.epoch + 1}  step {self.state.step}  evaluate  {shown}"
        )
        self._watcher.rate.resume()
        return result

    def _settings_for(self, data: Any, taken: Taken) -> LoaderSettings:
        """How a data set is read that is evaluated: as its DataLoader says; without one, with as
        many loaders as the training's.
        """
        if taken.dataset is not data:
            return taken.settings
        mine = self._taken.settings
        own = taken.settings
        if (isinstance(data, IterableDataset) or pipeline_in(data) is None) and pipeline_in(
            self._taken.dataset
        ) is None:
            return mine  # the training's collate function is for such data too
        return dataclasses.replace(
            mine,
            collate=own.collate,
            finish=own.finish,
            on_error=own.on_error,
            max_skipped=own.max_skipped,
            init=None,
        )

    def fit(
        self, epochs: int, validate: Any = None, metrics: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The loop, for those who want none: train, and evaluate after every epoch.

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
        """Why are the devices idle? Measure this very training with and without parts of its input,
        then go on as if nothing had been.

        Call it on every worker, between two steps. Weights, optimizer, scheduler, randomness and
        the place in the data are afterwards bit for bit what they were; a copy of weights and
        moments is held meanwhile. ``ronde doctor`` does the same from outside.

        Args:
            seconds: how long measuring may take, about.
            options: ``rounds``, how often each rate is measured at least; ``to``, how many devices
                to predict for.

        Returns:
            dict: what ``ronde doctor --json`` writes, the same on every worker.

        Example:
            >>> found = run.doctor(seconds=30)  # doctest: +SKIP
            >>> found["healthy"], found["gap"], found["cause"]  # doctest: +SKIP
            (False, 0.24, {'stage': 'decode', 'points': 14.1})
        """
        if hooks.examiner is None:
            raise RondeError("run.doctor() needs a run that ronde.distribute made.")
        return hooks.examiner(self, seconds, **options)

    # -- what it leaves behind ---------------------------------------------------------

    def log(self, values: Mapping[str, Any]) -> None:
        """Record values of the script's own, under their names; rank 0 writes, on others nothing
        happens.

        Args:
            values: name -> number, text, 0-d tensor or list of such.
        """
        if hooks.observer is not None:
            hooks.observer.logged(self, values)
        if not self.is_main:
            return
        plain = {k: (v.tolist() if isinstance(v, torch.Tensor) else v) for k, v in values.items()}
        self._watcher.event(Logged(step=self.state.step, epoch=self.state.epoch, values=plain))
        if self._writer is not None:
            self._write_scalars("", plain)

    def _write_scalars(self, group: str, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(
                    f"{group}/{name}" if group else name, value, self.state.step
                )
        self._writer.flush()

    def save(self) -> Path | None:
        """Write a checkpoint now: weights, optimizer, scheduler, place in the data. Call it on
        every worker.

        Returns:
            Path: of the checkpoint on rank 0, None on others.

        Raises:
            CheckpointError: it could not be written; earlier ones are untouched.
        """
        if self._share is not None and self._backwards:
            raise RondeError(
                "run.save() was called between run.backward() and run.update(): the "
                "gradients would be lost. Call it after update()."
            )
        self._last_saved_step = self.state.step
        self._last_saved_time = time.monotonic()
        if self.dir is None:
            return None
        self._watcher.rate.pause()
        start = time.perf_counter()
        path = persist.save(self, self.dir.checkpoints, self._keep)
        if path is not None:
            size = sum(f.stat().st_size for f in path.iterdir())
            self._watcher.event(
                Checkpointed(
                    step=self.state.step,
                    path=f"checkpoints/{path.name}",
                    bytes=size,
                    seconds=time.perf_counter() - start,
                )
            )
        self._watcher.rate.resume()
        return path

    def _save_quietly(self) -> None:
        """A checkpoint that nobody asked for must not end the training: a full disk is reported
        instead.
        """
        try:
            self.save()
        except CheckpointError as error:
            self._warn(f"{error}")

    def _warn(self, text: str) -> None:
        self._watcher.event(Warned(text=text))
        self._watcher.say(f"warning: {text}")

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write the model's weights as plain safetensors, under the names the script gave. Call it
        on every worker; rank 0 writes.

        Tensors that share memory are written under each of their names. Under a plan that splits
        the model, the others send rank 0
        what they hold, tensor after tensor: it never holds more than one of them.

        Raises:
            CheckpointError: it could not be written.
        """
        persist.export_weights(self, Path(path))

    # -- the end -----------------------------------------------------------------------

    def _finish(self, status: str, error: str | None = None) -> None:
        if self._ended:
            return
        self._ended = True
        atexit.unregister(self._at_exit)  # it would hold the model and the data
        if self._deadline is not None:
            self._write_measure()  # the training was shorter than the time asked for
        state = self.state
        self._watcher.event(
            Ended(
                status=status,
                step=state.step,
                epoch=state.epoch,
                samples=state.samples,
                samples_per_second=self._watcher.rate.samples_per_second,
                seconds=time.monotonic() - self._started,
                error=error,
            )
        )
        if self._writer is not None:
            self._writer.close()
        self._watcher.close()
        if (
            self.dir is not None
            and os.environ.get("RONDE_PROGRESS", "") == ""
            and self.is_main
            and status == "completed"
        ):
            self._watcher.display.say(
                f"run directory {self.dir.path}; 'ronde show {self.dir.name}' draws its curve"
            )

    def _at_exit(self) -> None:
        # A script that ends by itself, without run.epochs(), has completed; one that failed is
        # noted by the launcher.
        import sys

        if not self._ended:
            self._watcher.flush()
            if not hasattr(sys, "last_value") and self.state.step:
                if self._epoch_is_over():
                    self._end_epoch()
                if self.state.step != self._last_saved_step and self._deadline is None:
                    self._save_quietly()
                self._finish("completed")
            else:
                self._watcher.close()

    def measure(self, seconds: float) -> None:
        """From now on: train for about ``seconds``, write samples per second where
        ``RONDE_MEASURE_FILE`` says, and end the process.
        """
        self._deadline = seconds

    def _measure(self) -> None:
        rate = self._watcher.rate
        assert self._deadline is not None
        if rate.seconds >= self._deadline:
            self._write_measure()
            self._ended = True
            raise SystemExit(0)

    def _write_measure(self) -> None:
        if self.is_main:
            rate = self._watcher.rate
            measured = {
                "workers": self.world_size,
                "samples_per_second": rate.samples_per_second,
                "steps": self.state.step,
            }
            Path(os.environ["RONDE_MEASURE_FILE"]).write_text(json.dumps(measured))
