"""What ``ronde prove`` changes in a process before the script runs: everything is double, dropout
drops nothing, and it is noted where the script draws random numbers, asks for its rank, clips, or
steps a scheduler.
"""

from __future__ import annotations

import dataclasses
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ronde.introspect import is_user_file
from ronde.plan import Plan
from ronde.prove.recorder import Settings, Watch
from ronde.prove.values import HALVES
from ronde.run import evaluation, hooks
from ronde.run.run import Run

__all__ = ["install_recorder"]

_RANDOM = frozenset(
    [
        "rand",
        "rand_like",
        "randn",
        "randn_like",
        "randint",
        "randint_like",
        "randperm",
        "bernoulli",
        "bernoulli_",
        "multinomial",
        "normal",
        "normal_",
        "uniform_",
        "random_",
        "exponential_",
        "geometric_",
        "log_normal_",
        "cauchy_",
        "poisson",
        "rrelu",
        "gumbel_softmax",
    ]
)
_COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "broadcast",
    "reduce",
    "reduce_scatter",
)
_RANKS = frozenset(
    [
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "SLURM_PROCID",
        "SLURM_NTASKS",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
    ]
)


def _place(direct: bool) -> str | None:
    """File and line of the user's code that is being executed; with ``direct``, only if it made
    this very call.
    """
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_user_file(file):
            return f"{Path(file).name}:{frame.f_lineno}"
        if (
            direct
            and not file.startswith("<frozen")
            and Path(file).name not in ("os.py", "_collections_abc.py", Path(__file__).name)
        ):
            return None
        frame = frame.f_back  # type: ignore[assignment]
    return None


_CLAMPS = frozenset(["clamp_", "clip_", "clamp_min_", "clamp_max_", "nan_to_num_"])


def _in_place(name: str) -> bool:
    return (
        name.startswith("__i")
        or name == "__setitem__"
        or (name.endswith("_") and not name.endswith("__"))
    )


def _from_module() -> bool:
    """Whether a call comes from one of torch's modules, and not from the script's own forward
    function.
    """
    frame = sys._getframe(2)
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        if frame.f_code.co_filename.endswith("/nn/modules/batchnorm.py"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


class _Wide(TorchFunctionMode):
    """Half and single precision become double wherever the script asks for them; what draws random
    numbers is noted.
    """

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self._watch.phase in ("step", "evaluate", "update"):
            if name in _RANDOM:
                own = kwargs.get("generator") is not None
                self._watch.note("own generator" if own else "random", f"{name}@{_place(False)}")
            elif name == "batch_norm" and not _from_module():
                self._watch.note("batch_norm", _place(False))
            elif (
                name in _CLAMPS
                and self._watch.phase == "step"
                and args
                and self._watch.is_gradient(args[0])
            ):
                self._watch.note("clamps", f"{name}@{_place(False)}")
            elif (
                _in_place(name)
                and args
                and self._watch.is_between_parts()
                and self._watch.is_gradient(args[0])
            ):
                self._watch.note("regraded", f"{name}@{_place(False)}")
        if any(isinstance(a, torch.dtype) and a in HALVES for a in args):
            args = tuple(
                torch.float64 if isinstance(a, torch.dtype) and a in HALVES else a for a in args
            )
        dtype = kwargs.get("dtype")
        if dtype is not None and dtype in HALVES:
            kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)


def _patch_casts() -> None:
    """``x.float()`` and ``x.to(torch.float32)`` in whatever way they are reached: a pipeline
    repeats what it has followed.
    """

    def double(self: torch.Tensor, *_: Any, **kwargs: Any) -> torch.Tensor:
        return self.double(**kwargs)

    for name in ("float", "half", "bfloat16"):
        setattr(torch.Tensor, name, double)
    to = torch.Tensor.to

    def wide(value: Any) -> Any:
        return torch.float64 if isinstance(value, torch.dtype) and value in HALVES else value

    def to_wide(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return to(self, *map(wide, args), **{k: wide(v) for k, v in kwargs.items()})  # type: ignore[no-any-return]

    torch.Tensor.to = to_wide  # type: ignore[assignment,method-assign]


def _patch_dropout(watch: Watch) -> None:
    functional = torch.nn.functional

    def keeps(trains: bool) -> Callable[..., torch.Tensor]:
        def dropout(
            input: torch.Tensor, p: float = 0.5, training: bool = trains, inplace: bool = False
        ) -> torch.Tensor:
            watch.dropped(float(p) if training else 0.0, _place(False))
            return input if inplace else input.clone()

        return dropout

    for name in (
        "dropout",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "alpha_dropout",
        "feature_alpha_dropout",
    ):
        # these two are off unless told otherwise
        setattr(functional, name, keeps("alpha" not in name))
    attention = functional.scaled_dot_product_attention

    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Any:
        if len(args) > 4:
            watch.dropped(float(args[4]), _place(False))
            args = (*args[:4], 0.0, *args[5:])
        if "dropout_p" in kwargs:
            watch.dropped(float(kwargs["dropout_p"]), _place(False))
            kwargs = {**kwargs, "dropout_p": 0.0}
        return attention(*args, **kwargs)

    functional.scaled_dot_product_attention = scaled_dot_product_attention


def _patch_ranks(watch: Watch) -> None:
    """Note where the user's code asks who it is."""
    import torch.distributed as dist

    blind = watch.settings.blind

    def noted(
        what: str, original: Callable[..., Any], alone: Callable[[Any], Any]
    ) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            where = _place(True)
            if not where:
                return original(*args, **kwargs)
            watch.note("rank", f"{what}@{where}")
            found = original(*args, **kwargs)
            return alone(found) if blind else found

        return call

    one = {"rank": 0, "size": 1, "local_rank": 0, "local_size": 1, "node": 0}
    for name, answer in (("get_rank", 0), ("get_world_size", 1), ("is_initialized", False)):
        setattr(
            dist,
            name,
            noted(
                f"torch.distributed.{name}()",
                getattr(dist, name),
                lambda _, answer=answer: answer,  # type: ignore[misc]
            ),
        )
    public = sys.modules["ronde"]  # what the script imported; this room lies below it
    public.world = noted(  # type: ignore[attr-defined]
        "ronde.world()", public.world, lambda found: dataclasses.replace(found, **one)
    )
    for name, answer in (("rank", 0), ("world_size", 1), ("is_main", True)):
        setattr(
            Run,
            name,
            property(
                noted(
                    f"run.{name}",
                    getattr(Run, name).fget,
                    lambda _, answer=answer: answer,  # type: ignore[misc]
                )
            ),
        )
    alone_plan = Plan.from_dict(watch.settings.alone) if watch.settings.alone else None
    found_plan = noted(
        "run.plan", lambda run: run.__dict__["plan"], lambda found: alone_plan or found
    )
    Run.plan = property(found_plan, lambda run, plan: run.__dict__.__setitem__("plan", plan))  # type: ignore[assignment,misc]
    environ = type(os.environ)
    read = environ.__getitem__

    def __getitem__(self: Any, key: str) -> str:
        if key in _RANKS:
            where = _place(True)
            if where:
                watch.note("rank", f"os.environ[{key!r}]@{where}")
                if blind:
                    raise KeyError(key)
        return read(self, key)

    environ.__getitem__ = __getitem__  # type: ignore[method-assign]

    def exchanging(what: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            differentiated = sys._getframe(1).f_code.co_filename.endswith(
                "/distributed/nn/functional.py"
            )
            where = _place(not differentiated)
            if where:
                watch.note("exchange", f"{what}@{where}")
            return original(*args, **kwargs)

        return call

    for name in _COLLECTIVES:
        setattr(dist, name, exchanging(f"torch.distributed.{name}()", getattr(dist, name)))
    clip = torch.nn.utils.clip_grad_norm_
    clip_value = torch.nn.utils.clip_grad_value_

    def clipping(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if _place(True):
                watch.clips_itself = True
            return original(*args, **kwargs)

        return call

    def clearing(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            where = _place(True)
            if where and watch.is_between_parts():
                watch.note("cleared", where)
            return original(*args, **kwargs)

        return call

    schedule = torch.optim.lr_scheduler.LRScheduler.step

    def stepping(self: Any, *args: Any, **kwargs: Any) -> Any:
        where = _place(True)
        if where:
            watch.note("scheduler", where)
        watch.scheduler_stepped()
        return schedule(self, *args, **kwargs)

    for owner in (torch.optim.Optimizer, nn.Module):
        owner.zero_grad = clearing(owner.zero_grad)  # type: ignore[method-assign]
    torch.optim.lr_scheduler.LRScheduler.step = stepping  # type: ignore[method-assign]
    torch.nn.utils.clip_grad_norm_ = clipping(clip)
    torch.nn.utils.clip_grad_value_ = clipping(clip_value)


def _patch_clock(ahead: float) -> None:
    """Two runs of a script that begin in the same second are not to agree on what they take from
    the clocks.
    """
    if not ahead:
        return
    now, now_ns, count, count_ns = time.time, time.time_ns, time.perf_counter, time.perf_counter_ns
    time.time = lambda: now() + ahead
    time.time_ns = lambda: now_ns() + int(ahead * 1e9)
    time.perf_counter = lambda: count() + ahead
    time.perf_counter_ns = lambda: count_ns() + int(ahead * 1e9)


def _patch_own_generators(watch: Watch) -> None:
    """Note where a step draws from a numpy generator of the script's own."""
    methods = (
        "random",
        "integers",
        "normal",
        "standard_normal",
        "uniform",
        "permutation",
        "permuted",
        "shuffle",
        "choice",
        "beta",
        "gamma",
    )

    class Noted(np.random.Generator):
        pass

    def drawing(name: str) -> Callable[..., Any]:
        draw = getattr(np.random.Generator, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if watch.phase in ("step", "evaluate", "update"):
                where = _place(True)
                if where:
                    watch.note("own generator", f"{name}@{where}")
            return draw(self, *args, **kwargs)

        return call

    for name in methods:
        setattr(Noted, name, drawing(name))
    make = np.random.default_rng

    def default_rng(seed: Any = None) -> np.random.Generator:
        made = make(seed)
        return (
            made
            if isinstance(seed, np.random.Generator) or not _place(True)
            else Noted(made.bit_generator)
        )

    np.random.default_rng = default_rng


def _patch_metrics(watch: Watch) -> None:
    """Note whether a metric gives one value for each sample."""
    original = evaluation._sum_and_weight

    def sum_and_weight(name: str, value: Any, samples: int) -> tuple[float, float]:
        watch.metric(name, value, samples)
        return original(name, value, samples)

    evaluation._sum_and_weight = sum_and_weight


def _watch_files(watch: Watch) -> None:
    """Note which files are read that another run of the study has written: what it left is what
    this one begins with.
    """
    settings, own = watch.settings, str(watch.folder.parents[1])

    def audit(event: str, given: tuple[Any, ...]) -> None:
        if (
            event != "open"
            or not isinstance(given[0], str)
            or given[0].endswith((".py", ".pyc", ".so"))
        ):
            return
        flags = given[2] if isinstance(given[2], int) else 0
        if flags & (os.O_WRONLY | os.O_RDWR) or given[0].startswith(
            (own, "/proc/", "/dev/", "/sys/")
        ):
            return
        try:
            changed = Path(given[0]).stat().st_mtime
        except OSError:
            return
        if settings.since <= changed < settings.launched:
            watch.note("reread", f"{Path(given[0]).name}@{_place(False)}")

    sys.addaudithook(audit)


def install_recorder(settings: Settings, rank: int) -> Watch:
    """Watch the script that this process is going to run."""
    watch = Watch(settings, rank)
    hooks.observer = watch
    # A script that seeds nothing has other numbers on every worker, but in every study the same.
    seed = 0 if settings.alike else rank
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    torch.set_default_dtype(torch.float64)
    _patch_casts()
    _patch_dropout(watch)
    _patch_ranks(watch)
    _patch_clock(settings.clock)
    _patch_own_generators(watch)
    _watch_files(watch)

    def off(self: Any, *_: Any) -> Any:
        if getattr(self, "_enabled", False):  # torch's own functions enter it too, switched off
            watch.note("autocast", None)
        return self

    def out(self: Any, *_: Any) -> bool:
        return False

    _patch_metrics(watch)
    torch.autocast.__enter__ = off  # type: ignore[method-assign]
    torch.autocast.__exit__ = out  # type: ignore[assignment,method-assign]

    def called(module: nn.Module, given: Any, output: Any) -> None:
        with torch._C.DisableTorchFunction():
            watch.module_called(module, given, output)

    torch.nn.modules.module.register_module_forward_hook(called)
    _Wide(watch).__enter__()  # type: ignore[no-untyped-call]
    watch.event("begin", time=time.time())
    return watch
