"""Records one run for ``ronde prove``: for each step and rank, whole tensors in float64 by name,
whatever the plan.

It runs in a process of its own. The training is the script's, but in float64, on shorter epochs,
and for some steps only. See also :mod:`ronde.prove.float64`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.numpy import save_file

from ronde.introspect import user_modules
from ronde.loader import TakenOver
from ronde.parallel import Work
from ronde.plan import Plan, Share
from ronde.prove import recorded_opening
from ronde.prove.experiment import Experiment, Settings
from ronde.prove.recorded_data import SampleRecorder, cut_epoch, cut_order, wide_loader
from ronde.prove.recorded_draws import DrawRecorder, generator_digest
from ronde.prove.recorded_state import StateRecorder
from ronde.prove.recorded_values import RecordedLoss, ValueRecorder
from ronde.prove.trace_writer import Phase, TraceWriter
from ronde.prove.values import cast
from ronde.run import Run, hooks
from ronde.run.callback import EvaluationResult, StepView
from ronde.run.loop import Loop
from ronde.run.losses import LossCall
from ronde.run.parts import Parts
from ronde.run.step_draws import probe_draws
from ronde.watch.proofs import digests_of
from ronde.watch.run_dir import RunDir
from ronde.world import PlanError, World

__all__ = ["RecordedLoop", "RecordedRun", "Recorder"]


class Recorder(hooks.Observer):
    """Records one run: it follows the training, and its parts record what they are named after.

    Attributes:
        trace: the trace, and what the parts share.
    """

    def __init__(self, settings: Settings, rank: int) -> None:
        self.trace = trace = TraceWriter(settings, rank)
        self.samples = SampleRecorder(trace)
        self.draws = DrawRecorder(trace)
        self.values = ValueRecorder(trace, self.draws)
        self.state = StateRecorder(trace)
        # the trainings of the script, and the one to record
        self._trainings = 0
        self._ticks = 0  # starts and updates of all trainings: which comes before which
        self._is_mine = self.asked_micro = False
        self._limit, self._steps_per_epoch = settings.steps, 0
        self._empty_rounds = 0

    def excuses(self, error: str) -> bool:
        """Whether the script failed only because its training ended sooner than it expects."""
        if self.trace.phase != Phase.BETWEEN or not self.is_over():
            return False
        self.trace.event("ended with", error=error)
        return True

    def finish(self) -> None:
        """The script has ended."""
        self.values.ask_loss()
        event = self.trace.event
        files = [f for f in (getattr(m, "__file__", None) for m in user_modules()) if f]
        event("files", files=digests_of(files))
        event("end")
        self.trace.close()

    # -- distribute --------------------------------------------------------------------

    def on_open(self, opening: hooks.Opening) -> None:
        """Widen everything to float64, cut epochs, and record the arguments."""
        trace = self.trace
        settings = trace.settings
        self._is_mine = self._trainings == settings.training
        self._trainings += 1
        self._ticks += 1
        dropout = recorded_opening.dropout_rates(opening.model)
        recorded_opening.widen(opening, trace)
        opening.calls = RecordedLoss(opening.calls, self.values)
        taken, order = opening.taken, opening.taken.order
        size = (taken.batch_size or 1) * (settings.workers if opening.batch == "grow" else 1)
        ends = order.ends(0)
        self._steps_per_epoch = -(-order.epoch_samples // size) if ends is None else len(ends)
        short = cut_epoch(taken, size, settings.steps)
        dataset = taken.dataset
        loader = wide_loader(taken.settings, dataset, self.samples.note_collate)
        if self._is_mine:
            names = recorded_opening.record_opening(
                opening, trace, short, size, dropout, self._ticks
            )
            self.state.begin(*names)
            dataset = self.samples.noted(dataset)
        if self._trainings > 1:
            trace.event("training", number=self._trainings, tick=self._ticks)
        order = cut_order(order, short)
        opening.taken = dataclasses.replace(taken, dataset=dataset, order=order, settings=loader)
        self.asked_micro = opening.micro_batch is not None
        recorded_opening.change_arguments(opening, trace, size, self._is_mine)

    def on_plan(self, plan: Plan, work: Work, calls: LossCall, me: World) -> Plan:
        """Where draws are made the same for the comparison, the run's own do not come first: those
        of dropout depend on the length to which a share is padded.
        """
        if not self.trace.settings.same_draws:
            return plan
        if self._is_mine:
            # prove's own attention draws nothing, see DrawRecorder.make_same
            own, probes = "scaled_dot_product_attention", probe_draws(work, calls)
            self.draws.probes = {
                n: [d for d in made if d.name != own] for n, made in probes.items()
            }
        return dataclasses.replace(plan, randomness="worker")

    def count_workers(self, workers: int) -> int:
        """One process counts as the workers to prove."""
        return self.trace.settings.workers

    def on_ready(self, run: Run, plan: Plan) -> None:
        """Start to record the run."""
        trace = self.trace
        if not self._is_mine or trace.run is not None:
            return
        trace.run = run.port.parts
        if run.dir is None:
            # The script may write into its run directory: this one ends with the study.
            run.dir = RunDir(Path(trace.settings.folder) / "run")
            run.dir.path.mkdir(exist_ok=True)
        if trace.settings.same_draws:
            self.draws.make_same(trace.run)
        trace.event("ready", plan=plan.to_dict(), follows=run.port.parts.follows)
        trace.phase = Phase.BETWEEN

    # -- the loop ----------------------------------------------------------------------

    def cut_epochs(self, run: Parts, n: int) -> int:
        """Cut epochs: more of them, but never more steps than the script takes."""
        if not isinstance(n, int) or n < 0:
            return n  # refused
        if run is not self.trace.run:
            return min(n, self.trace.settings.steps)
        self.trace.event("epochs", n=n)
        self._limit = min(self.trace.settings.steps, n * self._steps_per_epoch)
        return max(n, self._limit)

    def end_idle_loop(self) -> None:
        """End the process of a script that loops on after the last step."""
        if self.is_over():
            self._empty_rounds += 1
            # a script may ask for batches after the last, to see that there are none
            if self._empty_rounds >= 3:
                raise SystemExit(0)

    def is_over(self) -> bool:
        """Whether all steps are recorded."""
        run = self.trace.run
        return run is not None and run.state.step >= self._limit

    def splits_steps(self, run: Parts) -> bool:
        """Under ``split``, a script with its own loop gets the parts one by one."""
        split = self.trace.experiment is Experiment.SPLIT
        return split and self.trace.settings.owns_loop and run is self.trace.run

    def keeps_gradients(self, optimizer: Any) -> bool:
        """Whether the script, which clears gradients for each batch, is between parts of a step."""
        run = self.trace.run
        mine = run is not None and optimizer is run.optimizer and self.splits_steps(run)
        return mine and self.trace.is_between_parts()

    # -- a step ------------------------------------------------------------------------

    def begin_step(self, run: Parts, share: Share, micros: list[Any]) -> list[Any]:
        """Start to record a step."""
        micros, trace = cast(list(micros)), self.trace
        if run is not trace.run:
            return micros
        order, place = run.data.order, run.plan.layout.place(run.world.rank)
        drawn = order.draw is not None
        trace.step = {
            "step": run.state.step,
            "epoch": share.epoch,
            "start": len(order.ids(share.epoch, 0, share.start)) if drawn else int(share.start),
            "ids": order.ids(share.epoch, share.start, share.stop).tolist(),
            "micro": [[low, high] for low, high in share.micro],
            "place": [place.pipeline, place.replica, place.tensor],
            "digests": self.samples.take(run, share),
            "local": [],
            "dropout": {},
            "shapes": {},
            # whether run.step called the loss: a script with its own loop calls it itself
            "calls_loss": False,
            "drawn": [],
        }
        trace.sizes = [high - low for low, high in share.micro]
        trace.tensors = {}
        self.values.begin_step()
        self.state.begin_step(run)
        trace.phase = Phase.STEP
        self.values.record_batch("out", micros)
        self.draws.begin_step(micros)
        return micros

    def record_given(self, run: Parts, batch: Any) -> None:
        """Record the batch that the loop passes to ``run.step``."""
        trace = self.trace
        share = run.place.share
        if run is not trace.run or share is None:
            return
        # a list, where the script asks for micro-batches
        parts = list(batch) if len(share.micro) > 1 else [batch]
        if not trace.step:  # a run of several in a loop takes another step on the same batch
            self.begin_step(run, share, parts)
        self.draws.count()
        if len(parts) == len(trace.sizes) and trace.phase == Phase.STEP:
            with torch._C.DisableTorchFunction():
                self.values.record_batch("given", parts)

    @contextmanager
    def around_step(self, run: Parts) -> Iterator[None]:
        """``run.step`` of any run: what another does between this one's batch and its step is not
        of this step.
        """
        if run is self.trace.run or self.trace.phase != Phase.STEP:
            yield
            return
        with self.trace.hidden():
            yield
        self.draws.skip()

    @contextmanager
    def around_backward(self, run: Parts) -> Iterator[None]:
        """The backward pass of a script with its own loop."""
        # without a batch, the run refuses
        mine = run is self.trace.run and run.place.share is not None
        if mine and not self.trace.step:
            raise PlanError(
                f"prove records one step of {run.part!r} for each batch, and it takes several by "
                "run.backward(): use run.step(batch)."
            )
        if mine:
            self.draws.count()
        yield
        if mine:
            self.draws.mark_pass()
            self.draws.use_samples_of(run.place.backwards, in_loop=True)

    def before_clip(self, step: StepView) -> None:
        """Record the loss and the exchanged gradients."""
        facts = self.trace.step
        if step.parts is not self.trace.run:
            return
        facts["drawn"] = self.draws.drawn()
        if self.trace.settings.same_draws:
            facts["generators"] = generator_digest()
        facts["loss"] = float(step.loss)
        self.state.record_exchanged(step.parts)

    def before_update(self, step: StepView) -> None:
        """Record clipped gradients."""
        if step.parts is self.trace.run:
            self.state.before_update(step.parts)
            self.draws.mark_update()
            self.trace.phase = Phase.UPDATE

    def step_ended(self, step: StepView) -> None:
        """Record weights and buffers, and write the step."""
        self._ticks += 1
        trace = self.trace
        if step.parts is not trace.run:
            return
        trace.step["tick"] = self._ticks
        trace.step["drawn_by_optimizer"] = self.draws.since_mark()
        self.state.after_update(step.parts)
        save_file(trace.tensors, trace.folder / f"step-{trace.step['step']}.safetensors")
        trace.event("step", **trace.step)
        trace.tensors, trace.step = {}, {}
        self.draws.leave()
        trace.phase = Phase.BETWEEN

    # -- evaluation --------------------------------------------------------------------

    def on_evaluation_data(self, parts: Parts, taken: TakenOver) -> TakenOver:
        """Cut a large evaluation, and note its samples."""
        return self.samples.evaluation_data(taken, parts is self.trace.run)

    def evaluation_started(self, parts: Parts) -> None:
        """Start to record an evaluation."""
        self.trace.phase = Phase.EVALUATE
        self.draws.mark()
        self.samples.evaluated.clear()
        self.trace.event("evaluating", step=parts.state.step)

    def evaluation_batch(self, parts: Parts, share: Share, low: int, high: int) -> None:
        """The samples of what is evaluated next."""
        self.draws.start_evaluation(parts, share, low, high)

    def evaluated(self, parts: Parts, outcome: EvaluationResult) -> None:
        """Write the evaluation."""
        if parts is self.trace.run:
            self.trace.event(
                "evaluated",
                step=parts.state.step,
                result=outcome.result,
                samples=outcome.samples,
                drawn=self.draws.drawn(),
                digests=sorted(self.samples.evaluated.items()),
            )
        self.draws.leave()
        self.trace.phase = Phase.BETWEEN


class RecordedLoop(Loop):
    """Ends after the recorded steps."""

    def __init__(self, recorder: Recorder, *given: Any, in_lists: bool, **named: Any) -> None:
        self._recorder = recorder
        # As the script's own micro_batch asks for, even if the study removed it.
        super().__init__(*given, in_lists=in_lists or recorder.asked_micro, **named)

    def epochs(self, n: int) -> Iterator[int]:
        """See :class:`Loop`."""
        return super().epochs(self._recorder.cut_epochs(self.parts, n))

    def goes_on(self, n: int) -> bool:
        """See :class:`Loop`."""
        return super().goes_on(n) and not self._recorder.is_over()

    def batches(self) -> Iterator[Any]:
        """See :class:`Loop`."""
        self._recorder.end_idle_loop()
        return super().batches()

    def takes_more(self) -> bool:
        """See :class:`Loop`."""
        return not self._recorder.is_over()

    def hand_out(self, share: Share, micros: list[Any]) -> list[Any]:
        """See :class:`Loop`."""
        ready = super().hand_out(share, micros)
        for follower in self._following():
            self._recorder.begin_step(follower.parts, share, ready)
        return self._recorder.begin_step(self.parts, share, ready)

    def items(self, micros: list[Any]) -> Iterator[Any]:
        """See :class:`Loop`. Micro-batches go one by one to a loop written for one per step."""
        return iter(micros) if self._recorder.splits_steps(self.parts) else super().items(micros)


class RecordedRun(Run):
    """Tells the recorder what the script calls."""

    def __init__(self, recorder: Recorder, *given: Any, **named: Any) -> None:
        self._recorder = recorder
        super().__init__(*given, **named)

    def step(self, batch: Any) -> torch.Tensor:
        """See :class:`Run`."""
        self._recorder.record_given(self.port.parts, batch)
        with self._recorder.around_step(self.port.parts):
            return super().step(batch)

    def backward(self, loss: torch.Tensor | tuple[torch.Tensor, Any]) -> None:
        """See :class:`Run`."""
        with self._recorder.around_backward(self.port.parts):
            super().backward(loss)

    def update(self) -> torch.Tensor:
        """See :class:`Run`. The next batch belongs to the same step, if steps are split."""
        place = self.port.parts.place
        parts = len(place.share.micro) if place.share is not None else 0
        if self._recorder.splits_steps(self.port.parts) and 0 < place.backwards < parts:
            return torch.zeros(())
        return super().update()
