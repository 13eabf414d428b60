"""One optimizer step: forward, backward, exchange, clip, update, schedule."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ronde.parallel import Part
from ronde.parallel.strategy import NOTHING, GradientHooks
from ronde.plan import Share
from ronde.run import checks
from ronde.run.callback import Callbacks, StepView
from ronde.run.group import RunGroup
from ronde.run.losses import Lengths, Rows, collates, lengths
from ronde.run.parts import Gathering, MicroBatches, Parts
from ronde.run.script_state import Averages
from ronde.run.step_draws import StepDraws
from ronde.world import ArgumentError, LossError, RondeError
from ronde.world.rendezvous import counted

if TYPE_CHECKING:
    from ronde.parallel.own_calls import OwnCalls

__all__ = ["OptimizerStep", "follow_run", "note_place"]

Loss = tuple[torch.Tensor, torch.Tensor | None]
_NO_SHARE = Share(0, 0, 0, ((0, 0),), 0)


class OptimizerStep:
    """The steps of one run.

    Args:
        source: the steps of the run whose batches this one takes, or None.

    Attributes:
        parts: what the run is made of.
        view: the step under way, as callbacks see it.
        callbacks: called at its events.
        owns_loop: whether the script calls :meth:`backward` and :meth:`update` itself.
        needs_rows: whether more than ``run.step`` needs the rows of the batches handed out.
    """

    def __init__(
        self,
        parts: Parts,
        callbacks: Callbacks,
        group: RunGroup,
        draws: StepDraws,
        gathering: Gathering,
        gradient_hooks: GradientHooks,
        own_calls: OwnCalls | None,
        source: OptimizerStep | None,
        averages: Averages,
    ) -> None:
        plan = parts.plan
        self.parts, self.callbacks = parts, callbacks
        self.view = StepView(parts, callbacks, _NO_SHARE, torch.zeros(()))
        self.owns_loop = self.needs_rows = False
        self.draws = draws
        self._rendezvous = parts.rendezvous
        self._group, self._source = group, source
        self._averages = averages
        self._gathering, self._own_calls = gathering, own_calls
        self._gradient_hooks = gradient_hooks
        alone = plan.replicas == 1 and plan.accumulation == 1
        self._rows = Rows(not alone, collates(parts.data.settings))
        self._delivered: list[Lengths] = []  # of the micro-batches that were handed out
        self._needs_batch = True  # whether before_batch is due for its next step
        # The parameters that a plan which divides the model exchanges; None under other plans.
        self._divided: dict[int, torch.Tensor] | None = None
        if plan.pipeline > 1 or (plan.shard in ("gradients", "parameters") and plan.replicas > 1):
            optimized = [p for g in parts.optimizer.param_groups for p in g["params"]]
            self._divided = {id(p): p for p in (*parts.model.parameters(), *optimized)}
        scale: Any = parts.scaler.scale if parts.scaler else None
        self._scale: Callable[[torch.Tensor], torch.Tensor] | None = scale

    # -- the batch ---------------------------------------------------------------------

    def take(self, share: Share, number: int | None = None) -> None:
        """The batch of a share is about to be handed out. ``number`` is the step's, for its random
        numbers, if it is not the training's next one.
        """
        self._begin(share)
        if self._own_calls is not None and number is None:
            self._own_calls.due = self.owns_loop
        self.draws.hand_out(share, self.parts.state.step if number is None else number)
        low, high = share.micro[0]
        self.parts.strategy.before_batch(high > low)

    def deliver(self, micros: Sequence[Any]) -> None:
        """These are its micro-batches."""
        rows, self.view.micros = self._rows, micros
        counts = rows.is_open or rows.weighs or self.owns_loop or self.needs_rows
        self._delivered = [lengths(micro) for micro in micros] if counts else []

    def announce(self) -> None:
        """The script gets it now."""
        if not self._group.alone:
            self._group.announce()
        for call in self.callbacks.batch_taken:
            call(self.view)

    def follow(self, share: Share) -> None:
        """Take over the batch that the run this one shares them with has handed out."""
        place, strategy = self.parts.place, self.parts.strategy
        if place.share is not None and place.backwards:
            raise RondeError(
                f"run.backward() of {self.parts.part!r} was called without run.update(), and the "
                "next batch is taken: call update() in the same pass of the loop."
            )
        self._begin(share)
        if self._source is not None:
            self._delivered = self._source._delivered
        self.draws.follow(self.parts.state.step)
        low, high = share.micro[0]
        if not self._needs_batch:
            strategy.refresh()
            return
        self._needs_batch = False
        strategy.before_batch(high > low)
        for call in self.callbacks.batch_taken:
            call(self.view)

    def _begin(self, share: Share) -> None:
        place = self.parts.place
        place.share, place.backwards = share, 0
        self.view.share, self.view.samples, self.view.action = share, share.global_samples, ""

    # -- the script's calls ------------------------------------------------------------

    @counted("run.step(batch)")
    def step(self, batch: Any) -> torch.Tensor:
        """See :meth:`Run.step`."""
        share = self._current_share("run.step(batch)")
        run, view, draws = self.parts, self.view, self.draws
        micros = list(batch) if isinstance(batch, MicroBatches) else [batch]
        if len(micros) != len(share.micro):
            raise ArgumentError(
                f"run.step() got {len(micros)} micro-batches, this step has {len(share.micro)}: "
                "pass on what run.batches() yielded."
            )
        run.strategy.refresh()
        last, summed = len(micros) - 1, run.loss.reduction == "sum"
        self._delivered = [lengths(micro) for micro in micros] if self._rows.asks else []
        rows = self._rows_of(share)
        view.micros = micros
        view.split = [
            Part(high - low, view.samples, i == last, summed, n)
            for i, ((low, high), n) in enumerate(zip(share.micro, rows, strict=True))
        ]
        gathering = self._gathering
        if gathering.used is None and view.samples < run.plan.replicas:
            run.strategy.run_empty_shares()  # the loss may call gather, which needs everyone
        for call in self.callbacks.before_passes:
            call(view)
        gathering.stepping = True
        draws.begin_step(share, micros)
        try:
            with self._own_gradients(len(micros)):
                run.strategy.step(micros, view.split, self.loss_of, self._scale)
        except Exception as error:
            note_place(error)
            raise
        finally:
            gathering.stepping = False
            draws.end_step()
        gathering.used = bool(gathering.used)
        if self._rows.unclear:
            self._report_rows()
        self._exchange()
        return self._update(share)

    @counted("run.backward(loss)")
    def backward(self, loss: torch.Tensor | tuple[torch.Tensor, Any]) -> None:
        """See :meth:`Run.backward`."""
        for call in self.callbacks.before_backward:
            call(self.view)
        share = self._current_share("run.backward(loss)")
        self._refuse_own_loop("run.backward(loss)")
        run, place = self.parts, self.parts.place
        strategy, count = run.strategy, len(share.micro)
        if place.backwards >= count:
            raise RondeError(
                f"run.backward() was called {place.backwards + 1} times, this step has {count} "
                f"micro-batch{'es' if count > 1 else ''}. Add the losses of one pass, and call it "
                "once. A second pass at other weights (SAM) is a second run over the model: "
                "'Several passes over a batch' in docs/my-script-is.md."
            )
        if place.backwards == 0 and strategy.refresh():
            raise RondeError(
                "requires_grad of a parameter was changed after its batch was taken: freeze and "
                "thaw at the end of the loop's body, before the next batch."
            )
        value = run.loss.check(loss)
        low, high = share.micro[place.backwards]
        rows = self._rows_of(share)[place.backwards]
        if self._rows.unclear:
            self._report_rows()
        place.backwards += 1
        summed = run.loss.reduction == "sum"
        part = Part(high - low, self.view.samples, place.backwards == count, summed, rows)
        with self._own_gradients(count):
            strategy.micro(lambda: value, part, self._scale)
        self.draws.end_own_pass(share, place.backwards)
        if part.last:
            self._exchange()  # not in update(): in between, the script may clip or scale
            if not self._group.alone:
                self._group.announce()
        else:
            low, high = share.micro[place.backwards]
            strategy.expect(high > low)
        self.owns_loop = True
        if self._own_calls is not None:
            self._own_calls.due = not part.last

    @counted("run.update()")
    def update(self) -> torch.Tensor:
        """See :meth:`Run.update`."""
        share = self._current_share("run.update()")
        self._refuse_own_loop("run.update()")
        if (done := self.parts.place.backwards) != len(share.micro):
            raise RondeError(
                f"run.update() was called after {done} of {len(share.micro)} backward "
                "passes: call run.backward(loss) for every micro-batch."
            )
        self.draws.end_own_step()
        return self._update(share)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """See :meth:`Run.gather`."""
        run, share, gathering = self.parts, self.parts.place.share, self._gathering
        if gathering.evaluated is not None:
            samples, count = gathering.evaluated
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
        if run.loss.reduction == "sum":
            raise RondeError(
                "run.gather() does not go with loss_reduction='sum': every worker would add the "
                "whole batch's sum. Return the mean over the gathered samples."
            )
        short = share is not None and share.global_samples < run.plan.replicas
        if share is not None and gathering.stepping and short and gathering.used is False:
            raise RondeError(
                f"run.gather() was first called in a step with {share.global_samples} samples for "
                f"{run.plan.replicas} workers, some of which have none and are not waiting. Set "
                "drop_last=True, or call it from the first step on."
            )
        gathering.in_pass = gathering.used = True
        run.strategy.run_empty_shares()
        from ronde.run.gather import gather_batch  # few losses do

        return gather_batch(tensor, samples, count, run.plan, run.world)

    def loss_of(self, micro: Any) -> Loss:
        """Forward pass and loss of one micro-batch."""
        self.draws.begin_pass(micro)
        try:
            with self.parts.autocast():
                return self.parts.loss(self.parts.model, micro)
        finally:
            self.draws.end_pass()

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Inside, a tool steps: most of the run's callbacks are left alone."""
        before, self.callbacks = self.callbacks, self.callbacks.while_measuring()
        try:
            yield
        finally:
            self.callbacks = before

    # -- before the passes -------------------------------------------------------------

    def _current_share(self, call: str) -> Share:
        if self._averages.applied is not None:
            self._averages.check(call)
        run = self.parts
        if self._divided is not None:
            checks.check_same_parameters(run.optimizer, self._divided, run.plan)
        if run.place.share is None:
            raise RondeError(
                f"{call} was called without a batch: this run shares the batches of another, "
                "so take one from that run's batches() first."
                if run.follows
                else f"{call} was called without a batch: take one from run.batches(), and use "
                "each once."
            )
        return run.place.share

    def _rows_of(self, share: Share) -> list[float | None]:
        """The weights of a step's means, see :class:`Rows`. A collective in the first step."""
        delivered = self._delivered
        samples = [high - low for low, high in share.micro]
        if len(delivered) != len(samples):  # a study hands micro-batches out one by one
            return [None] * len(samples)
        if self._rows.is_open:
            self._rows.settle(self.parts.world, delivered, samples)
        return [
            self._rows.of(*each, self.parts.loss) for each in zip(delivered, samples, strict=True)
        ]

    def _report_rows(self) -> None:
        unclear, self._rows.unclear = self._rows.unclear, ""
        loss = self.parts.loss
        if not loss.pairs and loss.reduction == "mean":
            self.parts.warn(unclear)

    def _refuse_own_loop(self, call: str) -> None:
        if self.parts.strategy.whole_step:
            raise RondeError(
                f"{call} cannot drive the plan {self.parts.plan.spec!r}: a pipeline interleaves "
                "forward and backward passes. Use run.step(batch), or another plan."
            )

    def _own_gradients(self, micro_batches: int) -> AbstractContextManager[None]:
        """Inside, passes leave gradients in this run's parameters, and the script's hooks wait for
        those of the whole batch.
        """
        run, whole = self.parts, self.parts.world.size == 1 and micro_batches == 1
        held = NOTHING if whole else self._gradient_hooks.held(run.strategy.parameters)
        return held if self._group.alone else self._beside_others(held)

    @contextmanager
    def _beside_others(self, held: AbstractContextManager[None]) -> Iterator[None]:
        with self._group.gradients_of(self.parts), held:
            yield

    # -- after the passes --------------------------------------------------------------

    def _exchange(self) -> None:
        """From here on, gradients are those of the global batch."""
        run, view, scaler = self.parts, self.view, self.parts.scaler
        for call in self.callbacks.after_passes:
            call(view)
        view.loss = run.strategy.finish()
        self._gradient_hooks.run()
        for call in self.callbacks.after_exchange:
            call(view)
        if scaler is not None and view.action != "skip":
            scaler.unscale_(run.optimizer)
            if run.plan.workers > 1 and run.plan.family != "replicate":
                run.strategy.agree_on_overflow(scaler, run.optimizer)

    def _update(self, share: Share) -> torch.Tensor:
        """Clip, update, schedule, and count the step."""
        run, view, callbacks = self.parts, self.view, self.callbacks
        # not a tensor's own memory, which schedulers write to
        view.learning_rate = float(run.optimizer.param_groups[0]["lr"])
        if view.action == "skip":
            run.strategy.updated()
        else:
            self._apply_gradients()
        if run.scheduler is not None:
            run.scheduler.step()
        self._count(share)
        for call in callbacks.step_ended:
            call(view)
        view.micros = view.split = ()  # the next batch needs the room
        return view.loss

    def _apply_gradients(self) -> None:
        """Clip and update."""
        run, view = self.parts, self.view
        plan, optimizer = run.plan, run.optimizer
        for call in self.callbacks.before_clip:
            call(view)
        if plan.clip_norm is not None:
            run.strategy.clip(plan.clip_norm)
        if run.state.step >= plan.warmup_steps:
            self._optimizer_step()
            return
        from ronde.run import lr_rules  # few runs warm up

        warm = lr_rules.warmup_factor(run.state.step, plan.warmup_steps, plan.lr_factor)
        view.learning_rate *= warm
        with lr_rules.warmed(optimizer, warm):
            self._optimizer_step()

    def _optimizer_step(self) -> None:
        run, view, scaler = self.parts, self.view, self.parts.scaler
        for call in self.callbacks.before_update:
            call(view)
        if scaler is not None:
            scaler.step(run.optimizer)
            scaler.update()
        else:
            run.optimizer.step()
        run.strategy.updated()
        for call in self.callbacks.after_update:
            call(view)

    def _count(self, share: Share) -> None:
        run, state, exchange = self.parts, self.parts.state, self.parts.strategy.exchange
        state.step += 1
        state.samples += self.view.samples
        state.epoch_samples = share.stop
        if exchange is not None and run.strategy.drifts and run.epoch_is_over:
            exchange.stepped(settle=True)
        if run.follows:
            state.epoch = share.epoch
            self._needs_batch, run.place.backwards = True, 0
            self.follow(share)  # it may step on the same batch again
        else:
            run.place.share = None
        if not self._group.alone:
            self._group.announce()


# -- where an exception was ------------------------------------------------------------

_runs: list[weakref.ref[Any]] = []  # the newest first
_before = sys.excepthook


def follow_run(run: Parts) -> None:
    """From now on, note the place of exceptions that end the script within a step of this run."""
    _runs[:] = [weakref.ref(run), *(ref for ref in _runs if ref() is not None)]
    if sys.excepthook is not _hook:
        global _before
        _before, sys.excepthook = sys.excepthook, _hook


def note_place(error: BaseException) -> None:
    """Add a note to an exception, once; its type, text and traceback stay the script's."""
    known = any(each.startswith("(rank ") for each in getattr(error, "__notes__", ()))
    if known or not isinstance(error, Exception):
        return
    for run in filter(None, [ref() for ref in _runs]):
        share = run.place.share
        if share is None:
            continue
        place = f"(rank {run.world.rank}, step {run.state.step + 1}"
        low, high = share.micro[0][0], share.micro[-1][1]
        place += f", epoch {share.epoch}, {share.samples} samples"
        if share.samples and not isinstance(error, LossError):
            ids = run.data.order.ids(share.epoch, low, high).tolist()
            shown = ", ".join(map(str, ids[:8])) + (", …" if len(ids) > 8 else "")
            place += f": indices {shown}"
        error.add_note(f"{place})")
        from ronde.plan.torch_errors import meaning  # of errors only

        if (meant := meaning(str(error), run.plan)) is not None:
            error.add_note(f"That is: {meant}")
        return


def _hook(kind: Any, error: BaseException, trace: Any) -> None:
    note_place(error)
    _before(kind, error, trace)
