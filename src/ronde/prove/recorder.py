"""Records one run for ``ronde prove``: for each step and rank, whole tensors in float64 by name,
whatever the plan.

It runs in a process of its own. The training is the script's, but in float64, on shorter epochs,
and for some steps only. See also :mod:`ronde.prove.float64`.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from torch import nn
from torch.utils.data import IterableDataset

from ronde.capture import following
from ronde.introspect import restore_states, user_modules
from ronde.introspect import states as random_states
from ronde.loader import TakenOver
from ronde.parallel import Work, batchnorms, spectral_norms
from ronde.plan import Plan, Share
from ronde.profile import deep_copy
from ronde.prove.experiment import Experiment, Settings
from ronde.prove.keyed_draws import KeyedDraws, generator_digest
from ronde.prove.recorded_data import NotedStream, cut_epoch, cut_order, note_samples, wide_loader
from ronde.prove.recorded_run import RecordedLoop, RecordedRun
from ronde.prove.values import (
    Array,
    cast,
    count_rows,
    digest_value,
    draws_since,
    generators,
    half_of,
    per_sample,
    probe,
    to_array,
)
from ronde.run import hooks
from ronde.run.callback import EvaluationResult, StepView
from ronde.run.losses import LossCall
from ronde.run.parts import Parts
from ronde.run.step_port import RunView
from ronde.watch.proofs import digests_of, smallest_like
from ronde.watch.run_dir import RunDir
from ronde.world import World
from ronde.world.tensors import map_tensors, named_tensors

__all__ = ["Phase", "Recorder"]

_EVALUATE_SAMPLES = 4096
_EMPTY_ROUNDS = 3  # a script may ask this often for batches after the last, before its process ends
_MOST_NOTES = 20  # of a kind
_MOST_RATES = 64
_MOST_CALLS = 4  # of a module in one forward pass


class Phase(StrEnum):
    """What the recorded training is doing."""

    SETUP = "setup"
    BETWEEN = "between"  # two steps
    STEP = "step"
    UPDATE = "update"
    EVALUATE = "evaluate"
    HIDDEN = "before"  # a forward pass of the study's own


class _RecordedLoss(LossCall):
    """The script's forward and loss, with inputs cast and values recorded."""

    def __init__(self, inner: LossCall, recorder: Recorder) -> None:
        super().__init__(inner.loss, inner.forward, inner.reduction)
        self._recorder = recorder

    def arguments(self, model: nn.Module, batch: Any) -> tuple[Any, ...]:
        """See :meth:`LossCall.arguments`."""
        recorder, given = self._recorder, batch
        # A plan may follow the forward pass, and must not see this.
        with torch._C.DisableTorchFunction():
            batch = cast(batch)
        recorder.start_pass(given)
        recorder.mark_pass()
        if recorder.computes_twice():
            with torch.no_grad(), recorder.hidden():
                super().arguments(
                    model, deep_copy([batch])[0]
                )  # a forward function may work in place
            recorder.draw_again()
        half = self._of_half(model, batch) if recorder.computes_parts() else None
        values = super().arguments(model, batch)
        if half is not None:
            recorder.record_mixing(values, half)
        with torch._C.DisableTorchFunction():
            recorder.record_loss_arguments(values)
        return values

    def _of_half(self, model: nn.Module, batch: Any) -> tuple[Any, ...] | None:
        """The loss's arguments for the first half of the samples, by a copy of the model."""
        before = torch.get_rng_state()
        try:
            part, samples = half_of(deep_copy([batch])[0])
            self._recorder.draw_again(samples)
            with torch.no_grad(), self._recorder.hidden():
                return super().arguments(copy.deepcopy(model), part)
        except Exception:  # the batch cannot be cut, or the model cannot be copied
            return None
        finally:
            torch.set_rng_state(before)
            self._recorder.draw_again()

    def check(self, value: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See :meth:`LossCall.check`."""
        checked = super().check(value)
        self._recorder.count_draws()
        with torch._C.DisableTorchFunction():
            self._recorder.record_local_loss(*checked)
        return checked


class Recorder(hooks.Observer):
    """Records one run."""

    def __init__(self, settings: Settings, rank: int) -> None:
        self.settings = settings
        self.experiment = settings.experiment
        self.rank = rank
        self.folder = Path(settings.folder) / f"rank-{rank}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._events = (self.folder / "events.jsonl").open("a", buffering=1)
        self.phase = Phase.SETUP
        self.notes: dict[str, list[str]] = {}
        self.clips_itself = False
        # the trainings of the script, and the one to record
        self.run: Parts | None = None
        self._trainings = 0
        self._ticks = 0  # starts and updates of all trainings: which comes before which
        self._is_mine = False
        self._limit = settings.steps
        self._empty_rounds = 0
        self._names: list[str] = []
        self._modules: dict[int, str] = {}
        self._optimized: set[str] = set()
        # the current step
        self._step: dict[str, Any] = {}
        self._tensors: dict[str, Array] = {}
        self._last_weights: dict[str, Array] = {}
        self._digests: dict[int, list[str]] = {}  # of the samples read for it
        self._versions: dict[str, int] = {}
        self._sizes: list[int] = []  # of its micro-batches
        self._micro = 0
        self._calls: dict[tuple[int, str], int] = {}
        self._marks = generators()
        self._scheduled = 0
        self._generator = np.random.Generator(np.random.PCG64(1))
        self._probe: tuple[Callable[..., Any], tuple[Any, ...], int, int] | None = None
        self.draws: KeyedDraws | None = None  # the same for any number of workers
        self._inside: list[int] = []  # identities of the modules that run now
        self._handed: list[Any] = []  # the micro-batches of the step
        self._passes = 0  # forward passes of the step that run.step has started
        self._range = ("", 0, 0, 0)  # of the pass under way, see KeyedDraws.begin
        self._random_before = random_states()  # before the step or evaluation
        self._others: set[str] = set()  # generators drawn from in its passes so far
        self._in_pass = False  # whose draws are seen by the generators' states
        # the current evaluation
        self._evaluated: dict[int, str] = {}
        self._metrics: dict[str, str] = {}
        self._left: dict[str, tuple[Any, ...]] = {}  # marks of gradients between micro-batches
        self.asked_micro = False
        self.run_type = partial(RecordedRun, self)
        self.loop_type = partial(RecordedLoop, self)

    # -- the trace ---------------------------------------------------------------------

    def event(self, kind: str, **values: Any) -> None:
        """Write one line."""
        self._events.write(json.dumps({"kind": kind, **values}) + "\n")

    def note(self, what: str, where: str | None) -> None:
        """Record something that may explain a difference, its phase, and its place in the code."""
        place = f"{self.phase}|{where or ''}"
        places = self.notes.setdefault(what, [])
        if place not in places and len(places) < _MOST_NOTES:
            places.append(place)
            self.event("note", what=what, place=place)

    def excuses(self, error: str) -> bool:
        """Whether the script failed only because its training ended sooner than it expects."""
        if self.phase != Phase.BETWEEN or not self.is_over():
            return False
        self.event("ended with", error=error)
        return True

    def finish(self) -> None:
        """The script has ended."""
        if self._probe is not None:
            loss, values, samples, step = self._probe

            def draw(low: int, high: int) -> None:
                if self.draws is not None:
                    self.draws.begin(f"step {step}", low, high, samples)

            with self.hidden():
                self.event("probe", loss=probe(loss, values, samples, draw))
        if self.draws is not None:
            self.event("draws", shapes=self.draws.shapes)
        self.event("notes", clips_itself=self.clips_itself)
        files = [f for f in (getattr(m, "__file__", None) for m in user_modules()) if f]
        self.event("files", files=digests_of(files))
        self.event("end")
        self._events.close()

    # -- distribute --------------------------------------------------------------------

    def on_open(self, opening: hooks.Opening) -> None:
        """Widen everything to float64, cut epochs, and record the arguments."""
        self._is_mine = self._trainings == self.settings.training
        self._trainings += 1
        self._ticks += 1
        dropout = _dropout_rates(opening.model)
        self._widen(opening)
        taken, order = opening.taken, opening.taken.order
        size = (taken.batch_size or 1) * (self.settings.workers if opening.batch == "grow" else 1)
        ends = order.ends(0)
        self._steps_per_epoch = -(-order.epoch_samples // size) if ends is None else len(ends)
        short = cut_epoch(taken, size, self.settings.steps)
        dataset = taken.dataset
        loader = wide_loader(taken.settings, dataset, self._note_collate)
        if self._is_mine:
            self._record_opening(opening, short, size, dropout)
            dataset = note_samples(dataset, self._note_sample)
        if self._trainings > 1:
            self.event("training", number=self._trainings, tick=self._ticks)
        order = cut_order(order, short)
        opening.taken = dataclasses.replace(taken, dataset=dataset, order=order, settings=loader)
        self._change_arguments(opening, size)

    def _widen(self, opening: hooks.Opening) -> None:
        model = opening.model
        with torch.no_grad():
            model.double()
            for tensor in (*model.parameters(), *model.buffers()):
                if tensor.dtype == torch.complex64:  # double() leaves it
                    tensor.data = tensor.data.to(torch.complex128)
        for state in opening.optimizer.state.values():
            state.update({k: cast(v) for k, v in state.items()})
        for module in model.modules():
            if isinstance(module, nn.RNNBase) and module.dropout:
                self.note("dropout", None)
                module.dropout = 0.0
        opening.calls = _RecordedLoss(opening.calls, self)
        if opening.precision != "fp32":
            self.note("precision", None)
            opening.precision = "fp32"

    def _note_collate(self, generators: list[str]) -> None:
        self.note("collate", ", ".join(generators))

    def _change_arguments(self, opening: hooks.Opening, size: int) -> None:
        asked = opening.micro_batch
        self.asked_micro = asked is not None
        if self.experiment is Experiment.SPLIT and self._is_mine:
            share = max(1, -(-size // self.settings.workers))
            opening.micro_batch = share if asked is None else min(share, asked)
        elif self.experiment is Experiment.WHOLE or self.experiment.is_one_process:
            opening.micro_batch = None
        if self.experiment is Experiment.SYNC_BATCHNORM:
            opening.sync_batchnorm = True

    def _record_opening(
        self, opening: hooks.Opening, short: int, size: int, dropout: dict[str, float]
    ) -> None:
        model, optimizer, taken = opening.model, opening.optimizer, opening.taken
        named, modules = dict(model.named_parameters()), dict(model.named_modules())
        self._names = list(named)
        self._modules = {id(m): n for n, m in modules.items()}
        ids = {id(p): n for n, p in named.items()}
        optimized = (id(p) for g in optimizer.param_groups for p in g["params"])
        self._optimized = {ids[i] for i in optimized if i in ids}
        hooked = [
            n
            for n, p in named.items()
            if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None)
        ]
        hooked += [n for n, m in modules.items() if m._backward_hooks or m._backward_pre_hooks]
        storages: dict[int, list[str]] = {}
        for n, p in named.items():
            if _has_values(p):
                storages.setdefault(p.untyped_storage().data_ptr(), []).append(n)
        self.event(
            "opening",
            tick=self._ticks,
            contract={**_contract(opening), **dropout},
            samples=taken.order.n,
            epoch_samples=taken.order.epoch_samples,
            short=short,
            last=0 if taken.drop_last or taken.order.ends(0) is not None else short % size,
            names=self._names,
            optimized=sorted(self._optimized),
            modules={n: type(m).__name__ for n, m in modules.items()},
            batchnorms=batchnorms(model),
            iterating=spectral_norms(model),
            hooked=hooked,
            shared=[names for names in storages.values() if len(names) > 1],
            micro_batch=opening.micro_batch,
            script_plan=smallest_like(opening.script_plan).spec,
        )
        start = {f"init|{n}": to_array(p) for n, p in named.items() if _has_values(p)}
        for n, b in model.named_buffers():
            if _has_values(b):
                start[f"initbuffer|{n}"] = to_array(b)
        save_file(start, self.folder / "init.safetensors")

    def on_plan(self, plan: Plan, work: Work, calls: LossCall, me: World) -> Plan:
        """Where draws are made the same for the comparison, the run's own do not come first: theirs
        depend on the length to which a share is padded.
        """
        return plan if self.draws is None else dataclasses.replace(plan, randomness="worker")

    def count_workers(self, workers: int) -> int:
        """One process counts as the workers to prove."""
        return self.settings.workers

    def on_ready(self, run: RunView, plan: Plan) -> None:
        """Start to record the run."""
        if not self._is_mine or self.run is not None:
            return
        self.run = run.port.parts
        if run.dir is None:
            # The script may write into its run directory: this one ends with the study.
            run.dir = RunDir(Path(self.settings.folder) / "run")
            run.dir.path.mkdir(exist_ok=True)
        if self.splits_steps(self.run):
            self._keep_gradients(self.run)
        self.event("ready", plan=plan.to_dict())
        self.phase = Phase.BETWEEN

    def _keep_gradients(self, run: Parts) -> None:
        """The script clears gradients for each batch: not between the parts of one step."""
        clear = run.optimizer.zero_grad

        def zero_grad(set_to_none: bool = True) -> None:
            if not 0 < run.place.backwards < len(self._sizes):
                clear(set_to_none)

        run.optimizer.zero_grad = zero_grad  # type: ignore[method-assign]

    @contextmanager
    def around_backward(self, run: Parts) -> Iterator[None]:
        """Note gradients that a script with its own loop changes between micro-batches."""
        if run is not self.run:
            yield
            return
        left = self._left
        if 0 < run.place.backwards < len(self._sizes):
            states = _gradient_states(run.model)
            changed = [n for n, state in states.items() if n in left and left[n] != state]
            self._step.setdefault("regraded", []).extend(changed)
        self.count_draws()
        yield
        self.mark_pass()
        self._use_samples_of(run.place.backwards)
        left.clear()
        if run.place.backwards < len(self._sizes):
            left.update(_gradient_states(run.model))

    def record_given(self, run: Parts, batch: Any) -> None:
        """Record the batch that the loop passes to ``run.step``."""
        if run is not self.run:
            return
        self.count_draws()
        # a list, where the script asks for micro-batches
        parts = list(batch) if len(self._sizes) > 1 else [batch]
        if len(parts) == len(self._sizes) and self.phase == Phase.STEP:
            with torch._C.DisableTorchFunction():
                self._record_batch("given", parts)

    # -- the loop ----------------------------------------------------------------------

    def cut_epochs(self, run: Parts, n: int) -> int:
        """Cut epochs: more of them, but never more steps than the script takes."""
        if not isinstance(n, int) or n < 0:
            return n  # refused
        if run is not self.run:
            return min(n, self.settings.steps)
        self.event("epochs", n=n)
        self._limit = min(self.settings.steps, n * self._steps_per_epoch)
        return max(n, self._limit)

    def end_idle_loop(self) -> None:
        """End the process of a script that loops on after the last step."""
        if self.is_over():
            self._empty_rounds += 1
            if self._empty_rounds >= _EMPTY_ROUNDS:
                raise SystemExit(0)

    def is_over(self) -> bool:
        """Whether all steps are recorded."""
        return self.run is not None and self.run.state.step >= self._limit

    def splits_steps(self, run: Parts) -> bool:
        """Under ``split``, a script with its own loop gets the parts one by one."""
        split = self.experiment is Experiment.SPLIT and self.settings.owns_loop
        return split and run is self.run

    # -- a step ------------------------------------------------------------------------

    def begin_step(self, run: Parts, share: Share, micros: list[Any]) -> list[Any]:
        """Start to record a step."""
        micros = cast(list(micros))
        if run is not self.run:
            return micros
        order, place = run.data.order, run.plan.layout.place(run.world.rank)
        drawn = order.draw is not None
        self._step = {
            "step": run.state.step,
            "epoch": share.epoch,
            "start": len(order.ids(share.epoch, 0, share.start)) if drawn else int(share.start),
            "ids": order.ids(share.epoch, share.start, share.stop).tolist(),
            "micro": [[low, high] for low, high in share.micro],
            "place": [place.pipeline, place.replica, place.tensor],
            "digests": self._sample_digests(run, share),
            "local": [],
            "dropout": {},
            "shapes": {},
            # whether run.step called the loss: a script with its own loop calls it itself
            "calls_loss": False,
            "drawn": [],
        }
        self._digests.clear()
        self._sizes = [high - low for low, high in share.micro]
        self._micro = 0
        self._calls.clear()
        self._tensors = {}
        self._record_start(run)
        if self.experiment is Experiment.ROUNDED:
            self._perturb(run.model)
        self._versions = {n: p._version for n, p in run.model.named_parameters()}
        self.phase = Phase.STEP
        self._record_batch("out", micros)
        self._handed, self._passes = micros, 0
        self._mark()
        self._use_samples_of(0)
        return micros

    def _record_batch(self, kind: str, parts: list[Any]) -> None:
        """Record a batch's values, and how many rows it has."""
        self._step.setdefault("rows", {})[kind] = [
            count_rows(part, size) if size else 0
            for part, size in zip(parts, self._sizes, strict=True)
        ]
        for i, part in enumerate(parts):
            self._record_values(kind, "(batch)", part, i)

    # -- random draws that are the same for any number of workers ----------------------

    def _use_samples_of(self, i: int) -> None:
        """What is drawn from now on is for micro-batch ``i``."""
        if i < len(self._sizes):
            low, high = (at - self._step["start"] for at in self._step["micro"][i])
            self._range = (f"step {self._step['step']}", low, high, len(self._step["ids"]))
            self.draw_again()

    def start_pass(self, batch: Any) -> None:
        """The forward pass of a micro-batch starts."""
        if self.phase == Phase.STEP and self.draws is not None and not following():
            # a pipeline's stages take micro-batches in an order of their own
            same = (i for i, micro in enumerate(self._handed) if micro is batch)
            self._use_samples_of(next(same, self._passes))
            self._passes += 1
        elif self.phase == Phase.EVALUATE:
            self.draw_again()

    def draw_again(self, samples: int | None = None) -> None:
        """The pass under way starts once more, on its first ``samples``."""
        if self.draws is not None and not following():
            key, low, high, whole = self._range
            self._others.update(draws_since(self._marks))
            self._inside.clear()  # a pipeline's stage leaves a pass halfway
            self.draws.begin(key, low, high if samples is None else low + samples, whole)
            self._marks = generators()

    def evaluation_batch(self, parts: Parts, share: Share, low: int, high: int) -> None:
        """The samples of what is evaluated next."""
        key = f"evaluation {parts.state.step} {share.start}"
        self._range = (key, low - share.start, high - share.start, share.global_samples)
        self.draw_again()

    def module_now(self) -> str:
        """The innermost module of the model that runs now."""
        inside = (self._modules[i] for i in reversed(self._inside) if i in self._modules)
        return next(inside, "")

    def enter_module(self, module: nn.Module) -> None:
        """A module's forward pass starts."""
        self._inside.append(id(module))

    def leave_module(self, module: nn.Module) -> None:
        """A module's forward pass has ended."""
        if id(module) in self._inside:
            del self._inside[self._inside.index(id(module)) :]

    def _mark(self) -> None:
        self._random_before, self._others, self._in_pass = random_states(), set(), True
        self._marks = generators()

    def _drawn(self) -> list[str]:
        """Generators drawn from since :meth:`_mark`, except where draws are the same anyway."""
        if self.draws is None and self._seeds_passes():
            if not self._step["calls_loss"]:  # a script's own loop may draw after the last pass
                self.count_draws()
            return sorted(self._others)
        if self.draws is None:
            return draws_since(self._marks)
        return sorted({*self._others, *draws_since(self._marks)} - {"torch"})

    def _seeds_passes(self) -> bool:
        """Whether the run seeds each pass, which moves a generator that nobody draws from."""
        run = self.run
        return self.phase == Phase.STEP and run is not None and run.plan.randomness == "global"

    def mark_pass(self) -> None:
        """The run has seeded a pass."""
        self._in_pass = True
        if self.draws is None and self._seeds_passes():
            self._marks = generators()

    def count_draws(self) -> None:
        """Count what was drawn since the run has seeded."""
        self._in_pass = False
        if self.draws is None and self._seeds_passes():
            self._others.update(draws_since(self._marks))

    def note_draw(self) -> None:
        """The script draws from torch's generator: in a hook on gradients, say."""
        if self.phase == Phase.STEP and not self._in_pass:
            self._others.add("torch")

    def _leave_draws(self) -> None:
        """The script's own draws between steps go on where they were."""
        if self.draws is not None:
            self.draws.end()
            restore_states(self._random_before)

    def _note_sample(self, i: int, value: Any) -> None:
        self._digests.setdefault(int(i), []).append(digest_value(value))

    def _sample_digests(self, run: Parts, share: Share) -> list[list[Any]]:
        data = run.data
        is_stream = isinstance(data.dataset, NotedStream)
        ids: dict[int, None] = {}  # each once, in order
        for low, high in share.micro:
            read = range(low, high) if is_stream else data.order.ids(share.epoch, low, high)
            ids.update(dict.fromkeys(map(int, read)))
        return [[i, digest] for i in ids for digest in self._digests.get(i, [])]

    def _record_start(self, run: Parts) -> None:
        """Record weights that the script changed since the last update; in step 1, all."""
        last = self._last_weights
        for name, p in self._owned(run):
            value = to_array(p)
            same = name in last and np.array_equal(last[name], value, equal_nan=True)
            if not last or (name in last and not same):
                self._tensors[f"start|{name}"] = value

    def _owned(self, run: Parts) -> list[tuple[str, torch.Tensor]]:
        owns = run.strategy.owns
        named = run.model.named_parameters()
        return [(n, p) for n, p in named if p.device.type != "meta" and owns(n)]

    def _perturb(self, model: nn.Module) -> None:
        with torch.no_grad():
            for p in model.parameters():
                steps = self._generator.integers(-1, 2, p.numel()).astype(np.float64)
                p.mul_(1.0 + torch.from_numpy(steps).view(p.shape) * 2.0**-52)

    def before_clip(self, step: StepView) -> None:
        """Record the loss and the exchanged gradients."""
        run = step.parts
        if run is not self.run:
            return
        named = dict(run.model.named_parameters())
        self._step["drawn"] = self._drawn()
        if self.draws is not None:
            self._step["generators"] = generator_digest()
        self._step["loss"] = float(step.loss)
        self._step["lr"] = _learning_rates(run)
        self._step["rewritten"] = [
            n for n, p in named.items() if p._version != self._versions.get(n, p._version)
        ]
        self._record_gradients(run, "gradient")
        if run.world.size == 1 and (stale := self._stale(run, named)):
            self._step["stale"] = stale

    def _stale(self, run: Parts, named: dict[str, nn.Parameter]) -> list[str]:
        """Parameters that the optimizer misses because the script replaced them."""
        optimized = {id(p) for g in run.optimizer.param_groups for p in g["params"]}
        # Parameters outside the model are no fault alone: a replaced head may stay.
        has_others = not optimized <= {id(p) for p in named.values()}
        return [
            n
            for n, p in named.items()
            if (p.grad is not None or (has_others and p.requires_grad))
            and id(p) not in optimized
            and (n in self._optimized or n not in self._names)
        ]

    def _record_gradients(self, run: Parts, kind: str) -> None:
        for name, p in self._owned(run):
            if p.grad is not None:
                self._tensors[f"{kind}|{name}"] = to_array(p.grad)

    def before_update(self, step: StepView) -> None:
        """Record clipped gradients."""
        run = step.parts
        if run is not self.run:
            return
        if run.plan.clip_norm is not None:
            self._record_gradients(run, "clipped")
        self._step["groups"] = self._groups(run)
        self._marks = generators()
        self.phase = Phase.UPDATE

    def _groups(self, run: Parts) -> list[dict[str, Any]]:
        """The optimizer's settings, and the parameters of this worker's that it trains."""
        names = {id(p): name for name, p in self._owned(run) if p.requires_grad}
        return [
            {key: value for key, value in group.items() if _is_setting(value) and key != "lr"}
            | {"params": sorted(names[id(p)] for p in group["params"] if id(p) in names)}
            for group in run.optimizer.param_groups
        ]

    def step_ended(self, step: StepView) -> None:
        """Record weights and buffers, and write the step."""
        run = step.parts
        self._ticks += 1
        if run is not self.run:
            return
        self._step["tick"] = self._ticks
        self._step["drawn_by_optimizer"] = draws_since(self._marks)
        self._step["scheduled"] = self._scheduled
        self._step["lr_after"] = _learning_rates(run)
        self._last_weights = {name: to_array(p) for name, p in self._owned(run)}
        self._tensors |= {f"weight|{n}": value for n, value in self._last_weights.items()}
        for name, b in run.model.named_buffers():
            if b.device.type != "meta" and run.strategy.owns(name):
                self._tensors[f"buffer|{name}"] = to_array(b)
        for name, p in self._owned(run):
            for key, value in run.optimizer.state.get(p, {}).items():
                # a piece of a sharded tensor shows in the weights of the next step
                if isinstance(value, torch.Tensor) and not hasattr(value, "full_tensor"):
                    self._tensors[f"state|{name}|{key}"] = to_array(value)
        save_file(self._tensors, self.folder / f"step-{self._step['step']}.safetensors")
        self._tensors = {}
        self.event("step", **self._step)
        self._leave_draws()
        self.phase = Phase.BETWEEN

    # -- a forward pass ----------------------------------------------------------------

    def _in_forward(self) -> bool:
        """Whether a step's forward pass runs: not an evaluation, a pass that a plan follows, nor
        recomputed activations. Inside torch.func.vmap, grad, and the like, tensors have no values.
        """
        transformed = torch._C._functorch.peek_interpreter_stack() is not None
        recomputed = torch._C._current_graph_task_id() != -1
        return self.phase == Phase.STEP and not (recomputed or following() or transformed)

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Nothing inside is recorded."""
        phase, self.phase = self.phase, Phase.HIDDEN
        try:
            yield
        finally:
            self.phase = phase

    def computes_twice(self) -> bool:
        """Whether to compute this forward pass once more before."""
        return self.experiment is Experiment.TWICE and self._in_forward()

    def computes_parts(self) -> bool:
        """Whether to compute this forward pass on half of its samples too."""
        evaluating = self.phase == Phase.EVALUATE and not following()
        return self.experiment is Experiment.PARTS and (self._in_forward() or evaluating)

    def record_mixing(self, values: tuple[Any, ...], half: tuple[Any, ...]) -> None:
        """Record whether outputs of half of the samples differ from those among all."""
        alike = []
        pairs = zip(named_tensors(list(values)), named_tensors(list(half)), strict=False)
        for (_, whole), (_, part) in pairs:
            if not whole.dim() or not whole.is_floating_point():
                continue
            if 0 < part.shape[0] < whole.shape[0] and whole.shape[1:] == part.shape[1:]:
                whole = whole.detach()
                floor = 1e-9 * float(whole.abs().max())
                alike.append(torch.allclose(whole[: len(part)], part, rtol=0.0, atol=floor))
        if alike:
            step = self.run.state.step if self.run is not None else 0
            self.event("mixes", during=self.phase, step=step, mixes=not all(alike))

    def record_loss_arguments(self, values: tuple[Any, ...]) -> None:
        """Record the loss's arguments."""
        run = self.run
        if not self._in_forward() or (run is not None and not run.strategy.holds_result):
            return
        self._step["calls_loss"] = True
        for i, value in enumerate(values):
            self._record_output(f"(argument {i + 1} of the loss)", value)
        wants_probe = self.experiment is Experiment.ONE and self._probe is None
        if wants_probe and run is not None and self._micro < len(self._sizes):
            detached = map_tensors(lambda t: t.detach().clone(), values)
            size, step = self._sizes[self._micro], self._step["step"]
            self._probe = (run.loss.loss, detached, size, step)

    def record_local_loss(self, value: torch.Tensor, weight: torch.Tensor | None) -> None:
        """Record the loss of one micro-batch of this worker."""
        holds = self.run is None or self.run.strategy.holds_result
        if not self._in_forward() or self._micro >= len(self._sizes) or not holds:
            return
        weight_value = None if weight is None else float(weight)
        local = [float(value.detach()), weight_value, self._sizes[self._micro]]
        self._step["local"].append(local)
        if value.dtype != torch.float64:
            self.note("float32", str(value.dtype))
        self._micro += 1

    def record_module(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Record the inputs and outputs of a module of the model."""
        name, run = self._modules.get(id(module)), self.run
        if run is None or name is None:
            return
        if self.phase == Phase.BETWEEN and not name and not module.training:
            self.note("evaluates", None)
        if not self._in_forward() or run.strategy.whole_step or run.plan.tensor != 1:
            return
        self._record_output(name or "(model)", output, inputs)
        if not name and self.experiment.is_one_process:
            self._record_output_gradient(output)

    def _record_output_gradient(self, output: Any) -> None:
        """Record the loss's gradient at the model's output, once it is known."""
        i, step = self._micro, self._step
        for path, tensor in named_tensors(output):
            if tensor.requires_grad:

                def record(gradient: torch.Tensor, path: str = path) -> None:
                    with torch._C.DisableTorchFunction():
                        if self._step is step:
                            self._record_values("back", f"(model){path}", gradient, i)

                tensor.register_hook(record)  # type: ignore[no-untyped-call]

    def _record_output(self, name: str, output: Any, inputs: Any = None) -> None:
        i = self._micro
        call = self._calls[i, name] = self._calls.get((i, name), 0) + 1
        if call > _MOST_CALLS:
            return
        suffix = f" (call {call})" if call > 1 else ""
        if inputs is not None:
            self._record_values("in", name, inputs, i, suffix)
        self._record_values("out", name, output, i, suffix)

    def _record_values(self, kind: str, name: str, value: Any, i: int, suffix: str = "") -> None:
        """Record one number per sample of micro-batch ``i``, of every tensor with a batch axis."""
        if i >= len(self._sizes) or not self._sizes[i]:
            return
        samples = self._sizes[i]
        for path, tensor in named_tensors(value):
            if not tensor.dim() or tensor.shape[0] != samples or not tensor.numel():
                continue
            if hasattr(tensor, "full_tensor") or tensor.is_sparse:
                continue
            key = f"{kind}|{name}{path}{suffix}"
            self._record_shape(key, list(tensor.shape[1:]), samples)
            self._tensors[f"{key}|{i}"] = per_sample(tensor, samples)

    def _record_shape(self, key: str, shape: list[int], samples: int) -> None:
        known = self._step["shapes"].setdefault(key, shape)
        if known in (shape, "differ"):
            return
        same = known == "samples" or (
            len(known) == len(shape)
            and all(a == b or b == samples for a, b in zip(known, shape, strict=True))
        )
        self._step["shapes"][key] = "samples" if same else "differ"

    # -- what the patches of float64.py report -----------------------------------------

    def is_gradient(self, value: Any) -> bool:
        """Whether this is the gradient of one of the model's parameters."""
        return self.run is not None and any(p.grad is value for p in self.run.model.parameters())

    def is_regraded(self, value: Any) -> bool:
        """Whether a write to this value changes a gradient between micro-batches."""
        return self.is_between_parts() and self.is_gradient(value)

    def is_between_parts(self) -> bool:
        """Whether some micro-batches of the step have gone backward, and others have not."""
        run = self.run
        return (
            self.phase == Phase.STEP
            and run is not None
            and 0 < run.place.backwards < len(self._sizes)
        )

    def record_dropout(self, rate: float, where: str | None, drops: bool = False) -> None:
        """Record a call of dropout and its rate; ``drops``: it is not switched off."""
        if rate and not drops:
            self.note("dropout", where)
        if self.phase == Phase.STEP:
            rates = self._step["dropout"].setdefault(where or "", [])
            if rate not in rates and len(rates) < _MOST_RATES:
                rates.append(rate)

    def record_scheduler_step(self) -> None:
        """Count a scheduler step, of the script or of Ronde."""
        self._scheduled += 1

    def record_metric(self, name: str, value: Any, samples: int) -> None:
        """Note a metric that returns one value per sample."""
        if samples > 1 and isinstance(value, torch.Tensor) and value.dim():
            self._metrics[name] = "one value per sample"

    # -- evaluation --------------------------------------------------------------------

    def on_evaluation_data(self, parts: Parts, taken: TakenOver) -> TakenOver:
        """Cut a large evaluation, and note its samples."""
        order = taken.order
        if order.draw is None and order.epoch_samples > _EVALUATE_SAMPLES:
            # the last batch keeps its size
            left_over = (_EVALUATE_SAMPLES - order.epoch_samples) % (taken.batch_size or 1)
            order = dataclasses.replace(order, length=max(_EVALUATE_SAMPLES - left_over, 1))
        loader = wide_loader(taken.settings, taken.dataset, lambda names: None)
        dataset = taken.dataset
        if parts is self.run and not isinstance(dataset, IterableDataset):
            dataset = note_samples(dataset, self._note_evaluated)
        return dataclasses.replace(taken, dataset=dataset, order=order, settings=loader)

    def _note_evaluated(self, i: int, value: Any) -> None:
        self._evaluated[int(i)] = digest_value(value)

    def evaluation_started(self, parts: Parts) -> None:
        """Start to record an evaluation."""
        self.phase = Phase.EVALUATE
        self._mark()
        self._evaluated.clear()
        self.event("evaluating", step=parts.state.step)

    def evaluated(self, parts: Parts, outcome: EvaluationResult) -> None:
        """Write the evaluation."""
        if parts is self.run:
            self.event(
                "evaluated",
                step=parts.state.step,
                result=outcome.result,
                samples=outcome.samples,
                metrics=dict(self._metrics),
                drawn=self._drawn(),
                digests=sorted(self._evaluated.items()),
            )
        self._leave_draws()
        self.phase = Phase.BETWEEN

    def record_log(self, run: Parts, values: Mapping[str, Any]) -> None:
        """Record logged fractions; whole numbers count workers or steps."""
        numbers = {
            name: v.item() if isinstance(v, torch.Tensor) and v.numel() == 1 else v
            for name, v in values.items()
        }
        real = (float, np.floating)
        fractions = {str(name): float(v) for name, v in numbers.items() if isinstance(v, real)}
        if run is self.run and fractions:
            self.event("logged", step=run.state.step, values=fractions)


def _contract(opening: hooks.Opening) -> dict[str, Any]:
    """The arguments that N workers and one process must share."""
    taken = opening.taken
    contract: dict[str, Any] = {
        "batch_size": taken.batch_size,
        "batch": opening.batch,
        "clip_norm": opening.clip_norm,
        "micro_batch": opening.micro_batch,
        "seed": opening.seed,
        "drop_last": taken.drop_last,
        "sync_batchnorm": opening.sync_batchnorm,
        "shuffle": taken.order.shuffle,
        "the optimizer": type(opening.optimizer).__name__,
        "the scheduler": type(opening.scheduler).__name__,
    }
    for i, group in enumerate(opening.optimizer.param_groups):
        for key, value in group.items():
            if isinstance(value, bool | int | float):
                contract[f"the optimizer's {key} (group {i})"] = value
    return contract


def _dropout_rates(model: nn.Module) -> dict[str, float]:
    rates = {}
    for name, module in model.named_modules():
        is_dropout = isinstance(module, nn.modules.dropout._DropoutNd)
        rate = module.p if is_dropout else getattr(module, "dropout", None)
        if isinstance(rate, int | float):
            rates[f"the dropout of {name!r} ({type(module).__name__})"] = float(rate)
    return rates


def _has_values(tensor: torch.Tensor) -> bool:
    return not torch.nn.parameter.is_lazy(tensor) and tensor.device.type != "meta"


def _is_setting(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(isinstance(v, int | float) for v in value)
    return isinstance(value, bool | int | float | str)


def _learning_rates(run: Parts) -> list[float]:
    return [float(group["lr"]) for group in run.optimizer.param_groups if "lr" in group]


def _gradient_states(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Marks of all gradients. Norm and sum see a write through ``.data``; the version does not."""
    with torch.no_grad(), torch._C.DisableTorchFunction():
        return {
            n: (p.grad._version, float(p.grad.norm()), float(p.grad.sum()))
            for n, p in model.named_parameters()
            if p.grad is not None and not hasattr(p.grad, "full_tensor")
        }
