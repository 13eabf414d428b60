"""What ``ronde prove`` writes down of one run: plan independent, name -> whole tensor in float64, a
file per step and rank.

It lives in a process of its own. The training that it sees is the script's, but in float64, on
epochs that are cut short, and it ends after some steps. See also :mod:`ronde.prove.float64`.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from ronde.capture import following
from ronde.loader import LoaderSettings, Taken
from ronde.parallel import batchnorms, spectral_norms
from ronde.plan import Plan, Share
from ronde.profile import copied
from ronde.prove.values import (
    cast,
    digest_value,
    generators,
    half_of,
    moved,
    per_sample,
    probe,
    written,
)
from ronde.run import hooks
from ronde.run.losses import LossCall
from ronde.run.step_port import RunView
from ronde.watch.run_dir import RunDir
from ronde.world.tensors import map_tensors, named_tensors

__all__ = ["Settings", "Watch"]

_EVALUATE_SAMPLES = 4096
_EMPTY_ROUNDS = (
    3  # times that a script may ask for batches when none are left, before its process ends
)


@dataclasses.dataclass
class Settings:
    """How one run is to be watched.

    Attributes:
        folder: where its trace goes.
        steps: optimizer steps to watch.
        workers: the world size that is proved; the reference has one worker but counts as this many
            for ``batch="grow"``.
        reference: whether this is the one-process run: its global batch is one batch.
        split: the one-process run in this many micro-batches after all, each as large as a worker's
            share.
        twice: compute each forward pass once before, for what it changes in the model's layers.
        parts: compute each forward pass for a part of its samples as well, with a copy of the
            model: does a sample's output depend on the others?
        perturb: move every weight by one unit in its last place before each step.
        whole: leave out the script's micro-batches.
        sync_batchnorm: what to set it to; None leaves it.
        probe: ask the loss what kind of function it is, at the end.
        apart: the script owns its loop and was written for one batch a step: with ``split`` it is
            handed the parts one after the other.
        blind: answer the script that it is rank 0 of 1, whenever it asks.
        alone: what ``run.plan`` is then, as :meth:`Plan.to_dict` gives it.
        alike: every rank starts with the seed of rank 0.
        since: when the study began, in seconds since 1970.
        launched: when this run was asked for.
        training: which of the script's calls of ``ronde.distribute`` is watched, from 0.
        clock: seconds by which the script's clock is ahead.
    """

    folder: str
    steps: int
    workers: int
    reference: bool = False
    split: bool = False
    twice: bool = False
    parts: bool = False
    perturb: bool = False
    whole: bool = False
    sync_batchnorm: bool | None = None
    probe: bool = False
    apart: bool = False
    blind: bool = False
    alone: dict[str, Any] | None = None
    alike: bool = False
    since: float = 0.0
    launched: float = 0.0
    training: int = 0
    clock: float = 0.0


class _Noted(Dataset[Any]):
    """The user's data set; what it gives for each index is noted."""

    def __init__(self, inner: Any, note: Callable[[int, Any], None]) -> None:
        self._inner = inner
        self._note = note
        if hasattr(inner, "__getitems__"):
            self.__getitems__ = self._many

    def __getitem__(self, i: int) -> Any:
        value = self._inner[i]
        self._note(i, value)
        return value

    def _many(self, ids: list[int]) -> Any:
        values = self._inner.__getitems__(ids)
        for i, value in zip(ids, values, strict=True):
            self._note(i, value)
        return values

    def __len__(self) -> int:
        return len(self._inner)


class _NotedStream(IterableDataset[Any]):
    def __init__(self, inner: Any, note: Callable[[int, Any], None]) -> None:
        self._inner = inner
        self._note = note

    def __iter__(self) -> Iterator[Any]:
        for i, value in enumerate(self._inner):
            self._note(i, value)
            yield value

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._inner, memo)  # to take samples of beforehand


def _dropout_of(model: nn.Module) -> dict[str, float]:
    """The rate of every layer that drops something, by its name."""
    found = {}
    for name, module in model.named_modules():
        rate = (
            module.p
            if isinstance(module, nn.modules.dropout._DropoutNd)
            else getattr(module, "dropout", None)
        )
        if isinstance(rate, int | float):
            found[f"the dropout of {name!r} ({type(module).__name__})"] = float(rate)
    return found


def _states(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    """What tells whether a gradient was written to: also through ``.data``, which leaves its
    version as it is.
    """
    with torch.no_grad(), torch._C.DisableTorchFunction():
        held = {
            n: p.grad
            for n, p in model.named_parameters()
            if p.grad is not None and not hasattr(p.grad, "full_tensor")
        }
        return {n: (g._version, float(g.norm()), float(g.sum())) for n, g in held.items()}


def _last_batch(samples: int, size: int, workers: int) -> int:
    """How many samples the last batch of an epoch that is cut short has: as many as the real one,
    which is what the training meets, be it even or too small for every worker to have one. Where
    that is a whole batch, as nearly half of one as workers cannot share evenly.

    Example:
        >>> _last_batch(63, 10, 2), _last_batch(49, 8, 2), _last_batch(64, 8, 2), _last_batch(60,
        ...     6, 4)
        (3, 1, 5, 3)
    """
    uneven = [n for n in range(1, size) if n % workers]
    return samples % size or min(uneven, key=lambda n: (abs(n - size // 2 - 0.5), -n), default=size)


def _asks_for_its_process(dataset: Any) -> bool:
    """Whether a data set's own code looks at ``get_worker_info``: in the training process there is
    none.
    """
    kinds = [k for k in type(dataset).__mro__ if k.__module__.partition(".")[0] != "torch"]
    codes = [
        v.__code__
        for kind in kinds
        for v in vars(kind).values()
        if isinstance(v, types.FunctionType)
    ]
    return any("get_worker_info" in code.co_names for code in codes)


def _wide_loader(
    settings: LoaderSettings, dataset: Any, drawn: Callable[[list[str]], None]
) -> LoaderSettings:
    """Batches in float64, read in this process unless the script's data set looks at its loading
    processes.

    Args:
        drawn: told of which generators the script's collate function drew.
    """
    collate = settings.collate

    def wide(samples: list[Any]) -> Any:
        before = generators()
        batch = collate(samples)
        if found := moved(before):
            drawn(found)
        return cast(batch)

    workers = (
        settings.num_workers if settings.init is not None or _asks_for_its_process(dataset) else 0
    )
    return dataclasses.replace(settings, collate=wide, num_workers=workers)


class _Loss(LossCall):
    """The script's forward and loss; what goes in is cast, what comes out is noted."""

    def __init__(self, inner: LossCall, watch: Watch) -> None:
        super().__init__(inner.loss, inner.forward)
        self._watch = watch

    def arguments(self, model: nn.Module, batch: Any) -> tuple[Any, ...]:
        """See :meth:`LossCall.arguments`."""
        # a plan may follow the forward pass: it is not to see this
        with torch._C.DisableTorchFunction():
            batch = cast(batch)
        if self._watch.computes_twice():
            with torch.no_grad(), self._watch.unseen():
                super().arguments(model, copied([batch])[0])  # a forward function may work in place
        part = self._of_part(model, batch) if self._watch.asks_parts() else None
        values = super().arguments(model, batch)
        if part is not None:
            self._watch.mixes(values, part)
        with torch._C.DisableTorchFunction():
            self._watch.given_to_loss(values)
        return values

    def _of_part(self, model: nn.Module, batch: Any) -> tuple[Any, ...] | None:
        """What the loss would be given of the first half of the samples, by a copy of the model
        that is as it was.
        """
        before = torch.get_rng_state()
        try:
            with torch.no_grad(), self._watch.unseen():
                return super().arguments(copy.deepcopy(model), half_of(copied([batch])[0]))
        except Exception:  # a batch of a kind that cannot be parted, a model that cannot be copied
            return None
        finally:
            torch.set_rng_state(before)

    def check(self, value: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See :meth:`LossCall.check`."""
        found = super().check(value)
        with torch._C.DisableTorchFunction():
            self._watch.local_loss(*found)
        return found


class Watch(hooks.Observer):
    """Notes one run."""

    def __init__(self, settings: Settings, rank: int) -> None:
        self.settings = settings
        self.rank = rank
        self.folder = Path(settings.folder) / f"rank-{rank}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._events = (self.folder / "events.jsonl").open("a", buffering=1)
        self.phase = "setup"
        self.run: RunView | None = None
        self._trainings = 0
        self._ticks = 0  # beginnings and updates of all trainings: which comes before which
        self._mine = False
        self._limit = settings.steps
        self._names: list[str] = []
        self._modules: dict[int, str] = {}
        self._read: dict[int, list[str]] = {}
        self._versions: dict[str, int] = {}
        self._scheduled = 0
        self._empty = 0
        self._tensors: dict[str, np.ndarray[Any, Any]] = {}
        self._last: dict[str, np.ndarray[Any, Any]] = {}
        self._step: dict[str, Any] = {}
        self._micro = 0
        self._sizes: list[int] = []
        self._calls: dict[tuple[int, str], int] = {}
        self._marks: tuple[Any, ...] | None = None
        self._generator = np.random.Generator(np.random.PCG64(1))
        self._probed: tuple[Callable[..., Any], tuple[Any, ...], int] | None = None
        self.notes: dict[str, list[str]] = {}
        self.clips_itself = False
        self._evaluated: dict[int, str] = {}
        self._metrics: dict[str, str] = {}

    # -- notes -------------------------------------------------------------------------

    def event(self, kind: str, **values: Any) -> None:
        """Write one line."""
        self._events.write(json.dumps({"kind": kind, **values}) + "\n")

    def note(self, what: str, where: str | None) -> None:
        """Something that may explain a difference: what happened, in which phase, and where in the
        user's code.
        """
        shown = f"{self.phase}|{where or ''}"
        held = self.notes.setdefault(what, [])
        if shown not in held and len(held) < 20:
            held.append(shown)
            self.event("note", what=what, place=shown)

    def ended_with(self, error: str) -> bool:
        """Whether an error at the script's end is no failure of what was compared: the training was
        over, sooner than the script expects.
        """
        if self.phase != "between" or not self.is_over():
            return False
        self.event("ended with", error=error)
        return True

    def finish(self) -> None:
        """The script has ended."""
        if self._probed is not None and self.settings.probe:
            self.event("probe", loss=probe(*self._probed))
        self.event("notes", clips_itself=self.clips_itself)
        self.event("end")
        self._events.close()

    # -- distribute --------------------------------------------------------------------

    def on_open(self, given: hooks.Opening) -> None:
        """See :meth:`hooks.Observer.on_open`."""
        model, optimizer, settings = given.model, given.optimizer, self.settings
        with torch.no_grad():
            model.double()
            # which double() leaves as they are
            for held in (*model.parameters(), *model.buffers()):
                if held.dtype == torch.complex64:
                    held.data = held.data.to(torch.complex128)
        for state in optimizer.state.values():
            state.update({k: cast(v) for k, v in state.items()})
        dropout = _dropout_of(model)
        for module in model.modules():
            if isinstance(module, nn.RNNBase) and module.dropout:
                self.note("dropout", None)
                module.dropout = 0.0
        given.calls = _Loss(given.calls, self)
        if given.precision != "fp32":
            self.note("precision", None)
            given.precision = "fp32"
        taken = given.taken
        self._mine = self._trainings == settings.training
        self._trainings += 1
        self._ticks += 1
        order = taken.order
        size = (taken.batch_size or 1) * (settings.workers if given.batch == "grow" else 1)
        self._steps_per_epoch = -(-order.epoch_samples // size)
        short = order.epoch_samples
        if settings.steps >= 4 and self._steps_per_epoch >= settings.steps:
            # The last batch of an epoch, its end and an evaluation are to be among the steps.
            short = min(
                short, (settings.steps // 2 - 1) * size + _last_batch(short, size, settings.workers)
            )
        if taken.drop_last:
            short = min(order.epoch_samples, max(short, size))
        loader = _wide_loader(
            taken.settings, taken.dataset, lambda found: self.note("collate", ", ".join(found))
        )
        if self._mine:
            self._open(given, short, size, dropout)
            noted = _NotedStream if isinstance(taken.dataset, IterableDataset) else _Noted
            taken = dataclasses.replace(taken, dataset=noted(taken.dataset, self._note_sample))
        if self._trainings > 1:
            self.event("training", number=self._trainings, tick=self._ticks)
        draw = order.draw
        if draw is not None and short < order.epoch_samples:

            def cut(epoch: int) -> Any:
                return list(draw(epoch))[:short]

            order = dataclasses.replace(order, draw=cut, length=short)
        elif short < order.epoch_samples:
            order = dataclasses.replace(order, length=short)
        given.taken = dataclasses.replace(taken, order=order, settings=loader)
        asked = given.micro_batch
        self._asked_micro = asked is not None
        if settings.whole or (settings.reference and not (settings.split and self._mine)):
            given.micro_batch = None
        if settings.split and self._mine:
            given.micro_batch = max(1, -(-size // settings.workers))
            if asked is not None:
                given.micro_batch = min(given.micro_batch, asked)
        if settings.sync_batchnorm is not None:
            given.sync_batchnorm = settings.sync_batchnorm

    def _open(
        self, given: hooks.Opening, short: int, size: int, given_dropout: dict[str, float]
    ) -> None:
        model, optimizer, taken = given.model, given.optimizer, given.taken
        named = dict(model.named_parameters())
        self._names = list(named)
        self._modules = {id(m): n for n, m in model.named_modules()}
        ids = {id(p): n for n, p in named.items()}
        self._held = {
            ids[id(p)] for g in optimizer.param_groups for p in g["params"] if id(p) in ids
        }
        contract: dict[str, Any] = {
            "batch_size": taken.batch_size,
            "batch": given.batch,
            "clip_norm": given.clip_norm,
            "micro_batch": given.micro_batch,
            "seed": given.seed,
            "drop_last": taken.drop_last,
            "sync_batchnorm": given.sync_batchnorm,
            "shuffle": taken.order.shuffle,
            "the optimizer": type(optimizer).__name__,
            "the scheduler": type(given.scheduler).__name__,
        }
        for i, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if isinstance(value, bool | int | float):
                    contract[f"the optimizer's {key} (group {i})"] = value
        contract.update(given_dropout)
        hooked = [
            n
            for n, p in named.items()
            if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None)
        ]
        hooked += [
            n for n, m in model.named_modules() if m._backward_hooks or m._backward_pre_hooks
        ]
        storages: dict[int, list[str]] = {}
        lazy = torch.nn.parameter.is_lazy
        for n, p in model.named_parameters():
            if not lazy(p) and p.device.type != "meta":
                storages.setdefault(p.untyped_storage().data_ptr(), []).append(n)
        mean = {n: type(m).__name__ for n, m in model.named_modules()}
        self.event(
            "opening",
            tick=self._ticks,
            contract=contract,
            samples=taken.order.n,
            epoch_samples=taken.order.epoch_samples,
            short=short,
            last=0 if taken.drop_last else short % size,
            names=self._names,
            held=sorted(self._held),
            modules=mean,
            batchnorms=batchnorms(model),
            iterating=spectral_norms(model),
            hooked=hooked,
            shared=[names for names in storages.values() if len(names) > 1],
            micro_batch=given.micro_batch,
        )
        start = {
            f"init|{n}": written(p)
            for n, p in named.items()
            if not lazy(p) and p.device.type != "meta"
        }
        start.update(
            {
                f"initbuffer|{n}": written(b)
                for n, b in model.named_buffers()
                if not lazy(b) and b.device.type != "meta"
            }
        )
        save_file(start, self.folder / "init.safetensors")

    def count_workers(self, found: int) -> int:
        """See :meth:`hooks.Observer.count_workers`."""
        return self.settings.workers

    def on_ready(self, run: RunView, plan: Plan) -> None:
        """See :meth:`hooks.Observer.on_ready`."""
        if self._mine and self.run is None:
            self.run = run
            # the script may write into it: into one that goes with the study. Nothing is saved
            # there.
            if run.dir is None:
                run.dir = RunDir(Path(self.settings.folder) / "run")
                run.dir.path.mkdir(exist_ok=True)
                run.save = lambda: None  # type: ignore[method-assign]
            self._watch_gradients(run)
            if self.settings.apart:
                self._keep_gradients(run)
            self.event("ready", plan=plan.to_dict())
            self.phase = "between"

    # -- the loop ----------------------------------------------------------------------

    def on_epochs(self, run: RunView, n: int) -> int:
        """See :meth:`hooks.Observer.on_epochs`."""
        if run is not self.run:
            return min(n, self.settings.steps)
        self.event("epochs", n=n)
        # Epochs are shorter here: more of them, but never more steps than the script has.
        self._limit = min(self.settings.steps, n * self._steps_per_epoch)
        return max(n, self._limit)

    def on_epoch_start(self, run: RunView) -> None:
        """See :meth:`hooks.Observer.on_epoch_start`."""
        if self.is_over():
            self._empty += 1
            if self._empty >= _EMPTY_ROUNDS:
                raise SystemExit(0)

    def is_over(self) -> bool:
        """See :meth:`hooks.Observer.is_over`."""
        return self.run is not None and self.run.state.step >= self._limit

    def yields_lists(self, found: bool) -> bool:
        """See :meth:`hooks.Observer.yields_lists`."""
        return found or self._asked_micro

    def splits_steps(self, run: RunView) -> bool:
        """See :meth:`hooks.Observer.splits_steps`."""
        return self.settings.apart and run is self.run

    def _keep_gradients(self, run: RunView) -> None:
        """The script clears them for each batch: not between the parts of one."""
        clear = run.optimizer.zero_grad

        def zero_grad(set_to_none: bool = True) -> None:
            if not 0 < run.port.backwards < len(self._sizes):
                clear(set_to_none)

        run.optimizer.zero_grad = zero_grad  # type: ignore[method-assign]

    def _watch_gradients(self, run: RunView) -> None:
        """Note which ones a script that owns its loop changes between the micro-batches of a
        step.
        """
        backward = run.backward
        left: dict[str, tuple[Any, ...]] = {}

        def watched(loss: Any) -> None:
            if 0 < run.port.backwards < len(self._sizes):
                changed = [
                    n for n, found in _states(run.model).items() if n in left and left[n] != found
                ]
                self._step.setdefault("regraded", []).extend(changed)
            backward(loss)
            left.clear()
            if run.port.backwards < len(self._sizes):
                left.update(_states(run.model))

        run.backward = watched  # type: ignore[method-assign]

    def _note_sample(self, i: int, value: Any) -> None:
        self._read.setdefault(int(i), []).append(digest_value(value))

    def is_gradient(self, value: Any) -> bool:
        """Whether this is the gradient of one of the model's parameters."""
        return self.run is not None and any(p.grad is value for p in self.run.model.parameters())

    def is_between_parts(self) -> bool:
        """Whether some micro-batches of a step have gone backward, and others have not."""
        return (
            self.phase == "step"
            and self.run is not None
            and 0 < self.run.port.backwards < len(self._sizes)
        )

    def dropped(self, rate: float, where: str | None) -> None:
        """Dropout was called for, at this rate."""
        if rate:
            self.note("dropout", where)
        if self.phase == "step":
            held = self._step["dropout"].setdefault(where or "", [])
            if rate not in held and len(held) < 64:
                held.append(rate)

    def scheduler_stepped(self) -> None:
        """The script, or Ronde for it, has stepped a scheduler."""
        self._scheduled += 1

    def on_batch(self, run: RunView, share: Share, micros: list[Any]) -> list[Any]:
        """See :meth:`hooks.Observer.on_batch`."""
        micros = cast(list(micros))
        if run is not self.run:
            return micros
        order = run.port.data.order
        place = run.plan.layout.place(run.rank)
        start = (
            len(order.ids(share.epoch, 0, share.start)) if order.draw is not None else share.start
        )
        mine = [[low, high] for low, high in share.micro]
        ids = {
            int(i): self._read.get(int(i), [])
            for low, high in mine
            for i in order.ids(share.epoch, low, high)
        }
        self._step = {
            "step": run.state.step,
            "epoch": share.epoch,
            "start": int(start),
            "ids": order.ids(share.epoch, share.start, share.stop).tolist(),
            "micro": mine,
            "place": [place.pipeline, place.replica, place.tensor],
            "digests": [[i, d] for i, found in ids.items() for d in found]
            if not isinstance(run.port.data.dataset, _NotedStream)
            else [],
            "local": [],
            "dropout": {},
            "shapes": {},
            # to the loss by run.step: a script that owns its loop calls its loss itself
            "given": False,
            "drawn": [],
        }
        if isinstance(run.port.data.dataset, _NotedStream):
            self._step["digests"] = [
                [p, d]
                for low, high in mine
                for p in range(low, high)
                for d in self._read.get(p, [])
            ]
        self._read.clear()
        self._sizes = [high - low for low, high in mine]
        self._micro = 0
        self._calls.clear()
        self._tensors = {}
        self._compare_start(run)
        if self.settings.perturb:
            self._perturb(run.model)
        self._versions = {n: p._version for n, p in run.model.named_parameters()}
        self.phase = "step"
        for i, micro in enumerate(micros):
            self._note_values("out", "(batch)", micro, i)
        self._marks = generators()
        return micros

    def _compare_start(self, run: RunView) -> None:
        """What the script did to the weights since the last update."""
        now = {n: written(p) for n, p in self._owned(run)}
        if self._last:
            for name, value in now.items():
                if name in self._last and not np.array_equal(
                    self._last[name], value, equal_nan=True
                ):
                    self._tensors[f"start|{name}"] = value
        else:
            self._tensors.update({f"start|{n}": v for n, v in now.items()})

    def _owned(self, run: RunView) -> list[tuple[str, torch.Tensor]]:
        found: list[tuple[str, torch.Tensor]] = []
        for name, p in run.model.named_parameters():
            if p.device.type != "meta" and run.port.strategy.owns(name):
                found.append((name, p))
        return found

    def _perturb(self, model: nn.Module) -> None:
        with torch.no_grad():
            for p in model.parameters():
                steps = torch.from_numpy(
                    self._generator.integers(-1, 2, p.numel()).astype(np.float64)
                ).view(p.shape)
                p.mul_(1.0 + steps * 2.0**-52)

    def _looks(self) -> bool:
        """Whether a forward pass of a step is under way: not an evaluation, one that is only
        followed, nor activations that are computed again. Within torch.func.vmap, grad and the like
        tensors have no values that could be noted."""
        transformed = torch._C._functorch.peek_interpreter_stack() is not None
        return (
            self.phase == "step"
            and torch._C._current_graph_task_id() == -1
            and not following()
            and not transformed
        )

    def computes_twice(self) -> bool:
        """Whether the forward pass of this step is to be computed once before."""
        return self.settings.twice and self._looks()

    def asks_parts(self) -> bool:
        """Whether the forward pass is to be computed for a part of its samples as well."""
        return self.settings.parts and (
            self._looks() or (self.phase == "evaluate" and not following())
        )

    def mixes(self, values: tuple[Any, ...], part: tuple[Any, ...]) -> None:
        """Note whether what was computed of a part of the samples is what was computed of all."""
        alike = []
        for (_, whole), (_, some) in zip(
            named_tensors(list(values)), named_tensors(list(part)), strict=False
        ):
            if (
                whole.dim()
                and whole.is_floating_point()
                and 0 < some.shape[0] < whole.shape[0]
                and whole.shape[1:] == some.shape[1:]
            ):
                floor = 1e-9 * float(whole.detach().abs().max())
                alike.append(
                    torch.allclose(whole.detach()[: len(some)], some, rtol=0.0, atol=floor)
                )
        if alike:
            self.event(
                "mixes",
                during=self.phase,
                step=self.run.state.step if self.run is not None else 0,
                mixes=not all(alike),
            )

    def metric(self, name: str, value: Any, samples: int) -> None:
        """What a metric returned for some samples of an evaluation."""
        if samples > 1 and isinstance(value, torch.Tensor) and value.dim():
            self._metrics[name] = "one value per sample"

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """What is computed within is not noted."""
        phase, self.phase = self.phase, "before"
        try:
            yield
        finally:
            self.phase = phase

    def given_to_loss(self, values: tuple[Any, ...]) -> None:
        """What the loss is called with."""
        if not self._looks() or (self.run is not None and not self.run.port.strategy.holds_result):
            return
        self._step["given"] = True
        for i, value in enumerate(values):
            self._note_output(f"(argument {i + 1} of the loss)", value)
        if (
            self.settings.probe
            and self._probed is None
            and self.run is not None
            and self._micro < len(self._sizes)
        ):
            held = map_tensors(lambda t: t.detach().clone(), values)
            self._probed = (self.run.port.loss.loss, held, self._sizes[self._micro])

    def local_loss(self, value: torch.Tensor, weight: torch.Tensor | None) -> None:
        """What the loss returned for one micro-batch of this worker."""
        if (
            not self._looks()
            or self._micro >= len(self._sizes)
            or (self.run is not None and not self.run.port.strategy.holds_result)
        ):
            return
        self._step["local"].append(
            [
                float(value.detach()),
                None if weight is None else float(weight),
                self._sizes[self._micro],
            ]
        )
        if value.dtype != torch.float64:
            self.note("float32", str(value.dtype))
        self._micro += 1

    def module_called(self, module: nn.Module, given: Any, output: Any) -> None:
        """A module of the model has computed something."""
        if self.run is None:
            return
        name = self._modules.get(id(module))
        if name is None:
            return
        if self.phase == "between" and not name and not module.training:
            self.note("evaluates", None)
        if not self._looks() or self.run.port.strategy.whole_step or self.run.plan.tensor != 1:
            return
        self._note_output(name or "(model)", output, given)
        if not name and self.settings.reference:
            self._follow_back(output)

    def _follow_back(self, output: Any) -> None:
        """Note what the loss's gradient at the model's output is, once it is known."""
        i, step = self._micro, self._step
        for path, tensor in named_tensors(output):
            if tensor.requires_grad:

                def known(gradient: torch.Tensor, path: str = path) -> None:
                    with torch._C.DisableTorchFunction():
                        if self._step is step:
                            self._note_values("back", f"(model){path}", gradient, i)

                tensor.register_hook(known)  # type: ignore[no-untyped-call]

    def _note_output(self, name: str, output: Any, given: Any = None) -> None:
        i = self._micro
        call = self._calls[i, name] = self._calls.get((i, name), 0) + 1
        if call > 4:
            return
        again = f" (call {call})" if call > 1 else ""
        if given is not None:
            self._note_values("in", name, given, i, again)
        self._note_values("out", name, output, i, again)

    def _note_values(self, kind: str, name: str, value: Any, i: int, again: str = "") -> None:
        """One number for each sample of micro-batch ``i``, of every tensor in a value that has
        samples.
        """
        if i >= len(self._sizes) or not self._sizes[i]:
            return
        samples = self._sizes[i]
        for path, tensor in named_tensors(value):
            if (
                tensor.dim()
                and tensor.shape[0] == samples
                and tensor.numel()
                and not hasattr(tensor, "full_tensor")
                and not tensor.is_sparse
            ):
                key = f"{kind}|{name}{path}{again}"
                shape = list(tensor.shape[1:])
                held = self._step["shapes"].setdefault(key, shape)
                if held != shape and held != "differ":
                    same = held == "samples" or (
                        len(held) == len(shape)
                        and all(a == b or b == samples for a, b in zip(held, shape, strict=True))
                    )
                    self._step["shapes"][key] = "samples" if same else "differ"
                self._tensors[f"{key}|{i}"] = per_sample(tensor, samples)

    def on_gradients(self, run: RunView, loss: torch.Tensor) -> None:
        """See :meth:`hooks.Observer.on_gradients`."""
        if run is not self.run:
            return
        assert self._marks is not None
        self._step["drawn"] = moved(self._marks)
        self._step["loss"] = float(loss)
        self._step["lr"] = [float(g["lr"]) for g in run.optimizer.param_groups if "lr" in g]
        self._step["rewritten"] = [
            n
            for n, p in run.model.named_parameters()
            if p._version != self._versions.get(n, p._version)
        ]
        self._note_gradients(run, "gradient")
        if run.world_size == 1:
            ids = {id(p) for g in run.optimizer.param_groups for p in g["params"]}
            now = dict(run.model.named_parameters())
            mine = {id(p) for p in now.values()}
            # alone it is no fault: a head that was replaced may stay in the optimizer
            others = not ids <= mine
            wanted = {
                n for n, p in now.items() if p.grad is not None or (others and p.requires_grad)
            }
            stale = [
                n
                for n, p in now.items()
                if n in wanted and id(p) not in ids and (n in self._held or n not in self._names)
            ]
            if stale:
                self._step["stale"] = stale

    def _note_gradients(self, run: RunView, phase: str) -> None:
        for name, p in self._owned(run):
            if p.grad is not None:
                self._tensors[f"{phase}|{name}"] = written(p.grad)

    def before_update(self, run: RunView) -> None:
        """See :meth:`hooks.Observer.before_update`."""
        if run is not self.run:
            return
        if run.plan.clip_norm is not None:
            self._note_gradients(run, "clipped")
        self._marks = generators()
        self.phase = "update"

    def after_update(self, run: RunView, share: Share) -> None:
        """See :meth:`hooks.Observer.after_update`."""
        self._ticks += 1
        if run is not self.run:
            return
        self._step["tick"] = self._ticks
        assert self._marks is not None
        self._step["drawn_by_optimizer"] = moved(self._marks)
        self._step["scheduled"] = self._scheduled
        self._step["lr_after"] = [float(g["lr"]) for g in run.optimizer.param_groups if "lr" in g]
        self._last = {}
        for name, p in self._owned(run):
            self._last[name] = self._tensors[f"weight|{name}"] = written(p)
        for name, b in run.model.named_buffers():
            if b.device.type != "meta" and run.port.strategy.owns(name):
                self._tensors[f"buffer|{name}"] = written(b)
        save_file(self._tensors, self.folder / f"step-{self._step['step']}.safetensors")
        self._tensors = {}
        self.event("step", **self._step)
        self.phase = "between"

    # -- evaluation --------------------------------------------------------------------

    def on_evaluation_data(self, run: RunView, taken: Taken) -> Taken:
        """See :meth:`hooks.Observer.on_evaluation_data`."""
        order = taken.order
        if run is self.run:
            self._evaluation_samples = order.epoch_samples
        if order.draw is None and order.epoch_samples > _EVALUATE_SAMPLES:
            # the last batch stays as large as it is
            left_over = (_EVALUATE_SAMPLES - order.epoch_samples) % (taken.batch_size or 1)
            order = dataclasses.replace(order, length=max(_EVALUATE_SAMPLES - left_over, 1))
        loader = _wide_loader(taken.settings, taken.dataset, lambda found: None)
        dataset = taken.dataset
        if run is self.run and not isinstance(dataset, IterableDataset):
            dataset = _Noted(dataset, self._note_evaluated)
        return dataclasses.replace(taken, dataset=dataset, order=order, settings=loader)

    def _note_evaluated(self, i: int, value: Any) -> None:
        self._evaluated[int(i)] = digest_value(value)

    def before_evaluation(self, run: RunView) -> None:
        """See :meth:`hooks.Observer.before_evaluation`."""
        self.phase = "evaluate"
        self._marks = generators()
        self._evaluated.clear()
        self.event("evaluating", step=run.state.step)

    def after_evaluation(self, run: RunView, result: dict[str, Any], samples: int) -> None:
        """See :meth:`hooks.Observer.after_evaluation`."""
        if run is self.run:
            assert self._marks is not None
            self.event(
                "evaluated",
                step=run.state.step,
                result=result,
                samples=samples,
                metrics=dict(self._metrics),
                drawn=moved(self._marks),
                digests=sorted(self._evaluated.items()),
            )
        self.phase = "between"

    def on_log(self, run: RunView, values: Mapping[str, Any]) -> None:
        """See :meth:`hooks.Observer.on_log`."""
        numbers = {
            name: v.item() if isinstance(v, torch.Tensor) and v.numel() == 1 else v
            for name, v in values.items()
        }
        fractions = {
            str(name): float(v) for name, v in numbers.items() if isinstance(v, float | np.floating)
        }
        if run is self.run and fractions:  # whole numbers count things: workers, steps
            self.event("logged", step=run.state.step, values=fractions)
