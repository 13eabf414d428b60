"""Patches of a process before ``ronde prove`` runs the script in it: everything is double, and
dropout drops nothing. Notes where the script draws random numbers, asks for its rank, clips, or
steps a scheduler.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ronde.capture import draws_globally
from ronde.plan import Plan
from ronde.prove.experiment import Experiment, Settings
from ronde.prove.recorded_data import loading_process
from ronde.prove.recorder import RecordedLoop, RecordedRun, Recorder
from ronde.prove.trace_writer import Phase, place_of
from ronde.prove.values import NARROW
from ronde.run import hooks

__all__ = ["install_recorder"]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_RANDOM = _words(
    "rand rand_like randn randn_like randint randint_like randperm bernoulli bernoulli_ poisson "
    "multinomial normal normal_ uniform_ random_ exponential_ geometric_ log_normal_ cauchy_ "
    "rrelu gumbel_softmax"
)
_COLLECTIVES = _words(
    "all_reduce all_gather all_gather_into_tensor all_gather_object broadcast reduce reduce_scatter"
)
_RANKS = _words(
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK SLURM_PROCID SLURM_NTASKS "
    "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE"
)
_DROPOUTS = _words("dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout")
_COMPUTING = (Phase.STEP, Phase.EVALUATE, Phase.UPDATE)


def _wide(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in NARROW else value


class _Widening(TorchFunctionMode):
    """Turns half and single precision into double, and notes random draws."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        recorder = self._recorder
        if recorder.trace.phase in _COMPUTING and name in _RANDOM:
            own = kwargs.get("generator") is not None
            recorder.trace.note("own generator" if own else "random", f"{name}@{place_of()}")
            recorder.draws.note()
        if any(isinstance(a, torch.dtype) for a in args):
            args = tuple(map(_wide, args))
        if "dtype" in kwargs:
            kwargs = {**kwargs, "dtype": _wide(kwargs["dtype"])}
        return func(*args, **kwargs)


def _patch_casts() -> None:
    """Patch methods too: a pipeline repeats calls it has followed, outside the mode."""

    def double(self: torch.Tensor, *_: Any, **kwargs: Any) -> torch.Tensor:
        return self.double(**kwargs)

    for name in ("float", "half", "bfloat16"):
        setattr(torch.Tensor, name, double)
    to = torch.Tensor.to

    def to_wide(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return to(self, *map(_wide, args), **{k: _wide(v) for k, v in kwargs.items()})  # type: ignore[no-any-return]

    torch.Tensor.to = to_wide  # type: ignore[assignment,method-assign]


def _patch_dropout(recorder: Recorder) -> None:
    functional = torch.nn.functional

    def identity(trains: bool, plain: Callable[..., Any]) -> Callable[..., torch.Tensor]:
        def dropout(
            input: torch.Tensor, p: float = 0.5, training: bool = trains, inplace: bool = False
        ) -> torch.Tensor:
            # the same on any number of workers
            if draws_globally() and not recorder.trace.settings.same_draws:
                recorder.values.record_dropout(
                    float(p) if training else 0.0, place_of(), drops=True
                )
                return plain(input, p, training, inplace)  # type: ignore[no-any-return]
            recorder.values.record_dropout(float(p) if training else 0.0, place_of())
            return input if inplace else input.clone()

        return dropout

    for name in _DROPOUTS:
        # torch's default of ``training`` is False for the alpha kinds only
        setattr(functional, name, identity("alpha" not in name, getattr(functional, name)))
    attention = functional.scaled_dot_product_attention

    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Any:
        if len(args) > 4:
            recorder.values.record_dropout(float(args[4]), place_of())
            args = (*args[:4], 0.0, *args[5:])
        if "dropout_p" in kwargs:
            recorder.values.record_dropout(float(kwargs["dropout_p"]), place_of())
            kwargs = {**kwargs, "dropout_p": 0.0}
        return attention(*args, **kwargs)

    functional.scaled_dot_product_attention = scaled_dot_product_attention


def _before(owner: Any, name: str, note: Callable[[], None]) -> None:
    """Make ``owner.name`` call ``note`` first."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        note()
        return original(*args, **kwargs)

    setattr(owner, name, call)


def _patch_ranks(recorder: Recorder) -> None:
    """Note where the script asks for its rank; under ``alone``, tell it that it is alone."""
    import torch.distributed as dist

    is_alone = recorder.trace.experiment is Experiment.ALONE

    def asking(what: str, original: Any, alone: Callable[[Any], Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            where = place_of(True)
            if where:
                recorder.trace.note("rank", f"{what}@{where}")
            answer = original(*args, **kwargs)
            return alone(answer) if where and is_alone else answer

        return call

    def constant(value: Any) -> Callable[[Any], Any]:
        return lambda _: value

    for name, value in (("get_rank", 0), ("get_world_size", 1), ("is_initialized", False)):
        what = f"torch.distributed.{name}()"
        setattr(dist, name, asking(what, getattr(dist, name), constant(value)))
    public = sys.modules["ronde"]  # the script's import; this room lies below it
    one = {"rank": 0, "size": 1, "local_rank": 0, "local_size": 1, "node": 0}
    public.world = asking(  # type: ignore[attr-defined]
        "ronde.world()", public.world, lambda world: dataclasses.replace(world, **one)
    )
    values = recorder.trace.settings.plan_alone
    plan_alone = Plan.from_dict(values) if values else None

    def attribute(name: str, alone: Callable[[Any], Any]) -> None:
        getter = asking(f"run.{name}", lambda run: run.__dict__[name], alone)
        setter = lambda run, value: run.__dict__.__setitem__(name, value)  # noqa: E731
        setattr(RecordedRun, name, property(getter, setter))

    for name, value in (("rank", 0), ("world_size", 1), ("is_main", True)):
        attribute(name, constant(value))
    attribute("plan", lambda plan: plan_alone or plan)
    environ = type(os.environ)
    read = environ.__getitem__

    def __getitem__(self: Any, key: str) -> str:
        where = place_of(True) if key in _RANKS else None
        if where:
            recorder.trace.note("rank", f"os.environ[{key!r}]@{where}")
            if is_alone:
                raise KeyError(key)
        return read(self, key)

    environ.__getitem__ = __getitem__  # type: ignore[method-assign]


def _patch_exchanges(recorder: Recorder) -> None:
    """Note where the script calls a collective."""
    import torch.distributed as dist

    def patch(name: str) -> None:
        original = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1).f_code.co_filename
            where = place_of(not caller.endswith("/distributed/nn/functional.py"))
            if where:
                recorder.trace.note("exchange", f"torch.distributed.{name}()@{where}")
            return original(*args, **kwargs)

        setattr(dist, name, call)

    for name in _COLLECTIVES:
        patch(name)


def _patch_training_calls(recorder: Recorder) -> None:
    """Note where the script clips or clears gradients, or steps a scheduler."""

    def note_clip() -> None:
        if where := place_of(True):
            recorder.trace.note("clips", where)

    def note_clear() -> None:
        where = place_of(True)
        if where and recorder.trace.is_between_parts():
            recorder.trace.note("cleared", where)

    def note_schedule() -> None:
        if where := place_of(True):
            recorder.trace.note("scheduler", where)

    for owner in (torch.optim.Optimizer, nn.Module):
        _before(owner, "zero_grad", note_clear)
    clear = torch.optim.Optimizer.zero_grad

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        if not recorder.keeps_gradients(self):
            clear(self, set_to_none)

    torch.optim.Optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
    _before(torch.optim.lr_scheduler.LRScheduler, "step", note_schedule)
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        _before(torch.nn.utils, name, note_clip)


def _patch_clock(recorder: Recorder, ahead_seconds: float) -> None:
    """Note where the script reads the clock, and put it ahead."""
    for name in ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic"):
        original = getattr(time, name)
        ahead = int(ahead_seconds * 1e9) if name.endswith("_ns") else ahead_seconds

        def call(
            name: str = name,
            original: Callable[[], Any] = original,
            ahead: float = 0 if name == "monotonic" else ahead,  # prove's own limits go by it
        ) -> Any:
            if where := place_of(True):
                recorder.trace.note("clock", f"time.{name}()@{where}")
            return original() + ahead

        setattr(time, name, call)


def _patch_autocast(recorder: Recorder) -> None:
    def enter(self: Any, *_: Any) -> Any:
        if getattr(self, "_enabled", False):  # torch's own functions enter it disabled
            recorder.trace.note("autocast", None)
        return self

    torch.autocast.__enter__ = enter  # type: ignore[method-assign]
    torch.autocast.__exit__ = lambda *_: False  # type: ignore[assignment,method-assign,misc]


def install_recorder(settings: Settings, rank: int) -> Recorder:
    """Patch this process, and record the script that it is about to run."""
    recorder = Recorder(settings, rank)
    recorder.run_type = functools.partial(RecordedRun, recorder)
    recorder.loop_type = functools.partial(RecordedLoop, recorder)
    hooks.observer = recorder
    # An unseeded script gets other numbers on every worker, but the same in every study.
    seed = 0 if settings.experiment is Experiment.ONE_SEED else rank
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    torch.set_default_dtype(torch.float64)
    _patch_casts()
    _patch_dropout(recorder)
    _patch_ranks(recorder)
    _patch_exchanges(recorder)
    _patch_training_calls(recorder)
    # a day ahead: what the script seeds by the time differs between the two runs
    _patch_clock(recorder, 86_413.37 if settings.experiment is Experiment.ROUNDED else 0.0)
    _patch_autocast(recorder)
    torch.utils.data.get_worker_info = loading_process

    def record(module: nn.Module, inputs: Any, output: Any) -> None:
        with torch._C.DisableTorchFunction():
            recorder.values.record_module(module, inputs, output)

    torch.nn.modules.module.register_module_forward_hook(record)
    _Widening(recorder).__enter__()  # type: ignore[no-untyped-call]
    return recorder
