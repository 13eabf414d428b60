"""Learning rates for a grown batch.

Linear: Goyal et al. 2017, "Accurate, Large Minibatch SGD", which also warms up over five epochs.
Square root: Krizhevsky 2014, and for Adam Malladi et al. 2022, "On the SDEs and Scaling Rules for
Adaptive Gradient Algorithms".
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

__all__ = ["choose_rule", "lr_factor", "scale_rates", "warmup_factor", "warmed"]

_ADAPTIVE = ("adam", "adagrad", "adadelta", "rmsprop", "adafactor", "lamb", "lion", "muon", "rprop")


def choose_rule(optimizer: Optimizer, asked: str | None) -> str:
    """The rule asked for, or the optimizer's usual one: ``sqrt`` if adaptive, else ``linear``."""
    if asked is not None:
        return asked
    kind = type(optimizer).__name__.lower()
    return "sqrt" if any(word in kind for word in _ADAPTIVE) else "linear"


def lr_factor(rule: str, workers: int) -> float:
    """Factor on the learning rate for a batch that is ``workers`` times as large."""
    return {"linear": float(workers), "sqrt": math.sqrt(workers), "none": 1.0}[rule]


def _schedulers(scheduler: Any) -> Iterator[Any]:
    yield scheduler
    for inner in getattr(scheduler, "_schedulers", None) or ():
        yield from _schedulers(inner)


def scale_rates(optimizer: Optimizer, scheduler: Any, factor: float) -> None:
    """Multiply the learning rates in place, a scheduler's copies included."""
    if factor == 1.0:
        return
    for group in optimizer.param_groups:
        for name in ("lr", "initial_lr", "max_lr", "min_lr"):
            value = group.get(name)
            if isinstance(value, int | float | torch.Tensor):
                group[name] = value * factor  # a new tensor: groups may share one
    if scheduler is not None:
        for each in _schedulers(scheduler):
            for name in ("base_lrs", "max_lrs", "min_lrs", "_last_lr", "eta_min"):
                value = getattr(each, name, None)
                if isinstance(value, list):
                    setattr(each, name, [v * factor for v in value])
                elif isinstance(value, int | float):
                    setattr(each, name, value * factor)


def warmup_factor(step: int, steps: int, factor: float) -> float:
    """Warm-up factor in ``step`` (from 0): rises from 1/factor to 1 over ``steps`` steps.

    Example:
        >>> warmup_factor(0, 10, 4.0), warmup_factor(10, 10, 4.0)
        (0.25, 1.0)
    """
    if step >= steps or factor <= 1.0:
        return 1.0
    start = 1.0 / factor
    return start + (1.0 - start) * step / steps


@contextmanager
def warmed(optimizer: Optimizer, factor: float) -> Iterator[None]:
    """Multiply all learning rates by ``factor`` inside."""
    if factor == 1.0:
        yield
        return
    before = [group["lr"] for group in optimizer.param_groups]
    for group, lr in zip(optimizer.param_groups, before, strict=True):
        group["lr"] = lr * factor
    try:
        yield
    finally:
        for group, lr in zip(optimizer.param_groups, before, strict=True):
            group["lr"] = lr
