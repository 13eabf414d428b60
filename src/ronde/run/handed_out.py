"""Compares what the model is called on with the batch that was handed out, at some of the first
steps: mixup, CutMix, and statistics of a batch reach only one worker's samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from ronde.world import World
from ronde.world.consensus import gather_json
from ronde.world.tensors import tensors_in

__all__ = ["MIXES", "HandedOut"]

_STEPS = (1, 2, 4, 8)  # mixing may be left to chance
_MOST_NUMBERS = 2**22  # of a batch that is copied
_MOST_CHANNELS = 16

MIXES = (
    "{}: mixup, CutMix, or statistics of the batch then mix only this worker's share, which is not "
    "the same training as on one device. Mix in the data set, or mix gathered rows: "
    "docs/whole-batch-losses.md#mixing-samples. Changes of each sample by itself are fine"
)

_CHANGES = "the script changes a batch, and not by a formula that is the same on all workers"

_Kept = tuple[torch.Tensor, int, torch.Tensor]  # a tensor, its version, and a copy
_Seen = tuple[list[bool], torch.Tensor]  # which of those it is, and a tensor
_Line = list[float]  # factors and offsets of a linear change


class HandedOut:
    """The batches of a run's first steps.

    Args:
        asks: a step has several shares, so that it matters.
        hooks: whether calls of the model can be watched.
    """

    def __init__(self, asks: bool, hooks: bool) -> None:
        self._asks, self._hooks = asks, hooks
        self._steps = 0
        self._kept: list[_Kept] | None = None
        self._micros = 1
        self._given: list[_Seen] = []  # to the step
        self._inputs: list[_Seen] = []  # of the model
        self._hook: Any = None

    def keep(self, micros: Sequence[Any], model: nn.Module) -> None:
        """Note what is handed out. The same on every rank."""
        self._drop()
        self._steps += 1
        if not self._asks or self._steps not in _STEPS:
            return
        tensors = [t for t in tensors_in(list(micros)) if type(t) is torch.Tensor]
        small = sum(t.numel() for t in tensors) <= _MOST_NUMBERS
        self._kept = [(t, t._version, t.clone()) for t in tensors if small]
        self._micros = len(micros)
        compiled = hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None)
        if self._hooks and self._kept and not compiled:
            call = lambda _, *given: self._note(given, self._inputs)  # noqa: E731
            self._hook = model.register_forward_pre_hook(call, with_kwargs=True)

    def give(self, micros: Sequence[Any]) -> None:
        """Note what the script gives to the step."""
        self._note(list(micros), self._given)

    def _note(self, value: Any, seen: list[_Seen]) -> None:
        kept = self._kept or ()
        with torch.no_grad(), suppress(Exception):  # watching must not break a training
            for t in tensors_in(value) if kept else ():
                t = t.detach()
                found = [_is_kept(t, *each) for each in kept]
                # the model may write to it
                seen.append((found, t if any(found) else t.clone()))

    def _drop(self) -> None:
        self._kept, self._given, self._inputs = None, [], []
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def look(self, me: World, gathers: bool) -> str:
        """After a step's passes: a warning, the same on every worker, or nothing. A collective.

        Args:
            gathers: the script gathers rows, so it knows of the whole batch.
        """
        kept, both = self._kept, ((self._given, True), (self._inputs, False))
        self._drop()
        if kept is None:
            return ""
        mine: list[tuple[int, _Line | None]] = []
        with torch.no_grad(), suppress(Exception):
            for seen, whole in both:
                new = [t for found, t in seen if not any(found)]
                for i, (_, _, copy) in enumerate(kept):
                    if new and not any(found[i] for found, _ in seen):
                        field = i % (len(kept) // self._micros)
                        mine += [(field, change) for change in _changes(copy, new, whole)]
        first: dict[int, _Line] = {}
        for field, line in (change for rank in gather_json(me, mine) for change in rank):
            # Of batch statistics, each worker has its own.
            if line is None or not _near(line, first.setdefault(field, line)):
                self._asks = False
                return "" if gathers else MIXES.format(_CHANGES)
        return ""


def _is_kept(t: torch.Tensor, handed: torch.Tensor, version: int, copy: torch.Tensor) -> bool:
    """Whether a tensor holds what was handed out, in any type, shape, and place."""
    same = t.untyped_storage().data_ptr() == handed.untyped_storage().data_ptr()
    return (same and handed._version == version) or _equal(t, copy)


def _equal(one: torch.Tensor, two: torch.Tensor) -> bool:
    if one.numel() != two.numel():
        return False
    return torch.equal(one.reshape(-1), two.reshape(-1).to(one.device, one.dtype))


def _changes(lost: torch.Tensor, new: Sequence[torch.Tensor], whole: bool) -> list[_Line | None]:
    """How a lost tensor became one of its shape, None if not by a line; empty if it was masked, or
    is not needed. ``whole``: it may have become any tensor with as many rows.
    """
    if lost.numel() < 2:
        return []
    alike = [t for t in new if t.shape == lost.shape]
    for t in alike:
        copy = lost.to(t.device)
        apart = t[copy.to(t.dtype) != t]
        if bool((apart == apart[:1]).all()):
            return []
        if (line := _line(copy, t)) is not None:
            return [line]
    rows = [t for t in new if whole and t.dim() and lost.dim() and len(t) == len(lost)]
    return [None] if alike or rows else []


def _line(source: torch.Tensor, t: torch.Tensor) -> _Line | None:
    """Factor and offset of each channel, if lines lead from ``source`` to ``t``."""
    channels = t.size(1) if t.dim() > 2 and t.size(1) <= _MOST_CHANNELS else 1
    x, y = (
        v.double().reshape(len(v), channels, -1).transpose(0, 1).flatten(1) for v in (source, t)
    )
    low, high = x.argmin(1, keepdim=True), x.argmax(1, keepdim=True)
    factor = (y.gather(1, high) - y.gather(1, low)) / (x.gather(1, high) - x.gather(1, low))
    offset = y.gather(1, low) - factor * x.gather(1, low)
    apart = (factor * x + offset - y).nan_to_num(0.0)  # a channel of one number tells nothing
    eps = torch.finfo(t.dtype).eps if t.is_floating_point() else 0.0
    if float(apart.abs().max()) > max(1e-5, 4 * eps) * float(y.abs().max()):
        return None
    return [*factor.flatten().tolist(), *offset.flatten().tolist()]


def _near(one: _Line, two: _Line) -> bool:
    largest = max((abs(a) for a in (*one, *two) if math.isfinite(a)), default=0.0)
    return len(one) == len(two) and not any(
        abs(a - b) > 2e-3 * largest for a, b in zip(one, two, strict=True)
    )
