"""Finds buffers that make a training another one: those that every forward pass changes (a counter,
a codebook, an average) where a step has several passes, and those that follow from the samples of
one worker.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ronde.parallel import spectral_norms
from ronde.plan import Plan
from ronde.world import World
from ronde.world.consensus import gather_json

__all__ = ["OwnSamples", "Passes"]

_Marks = dict[str, tuple[torch.Tensor, int]]


class Passes:
    """Checks the first three steps, and those whose number is a power of two: a collective there.

    Batch and spectral normalization are left out: the run warns of them before its first step.
    """

    def __init__(self, model: nn.Module, plan: Plan, me: World) -> None:
        self._model, self._plan, self._me = model, plan, me
        self._steps = 0
        self._before: _Marks | None = None
        self._changed: set[str] = set()  # in an earlier checked step
        self._done = plan.accumulation == 1

    def begin(self) -> None:
        """Before the first forward pass of a step; or after it, before the others."""
        if self._done:
            return
        self._steps += 1
        if self._steps <= 3 or self._steps & (self._steps - 1) == 0:
            self._before = _marks(self._model)
            self._done = not self._before

    def end(self) -> str:
        """After the last pass: a warning, once, the same on every worker; empty if none."""
        before, self._before = self._before, None
        if not before:
            return ""
        after = _marks(self._model)
        others = self._plan.accumulation - 1
        changed = _changed(before, after)
        # A buffer that the first pass fills once, such as a table of positions, does not count.
        often = {
            n
            for n in changed & before.keys()
            if before[n][0] is after[n][0] and after[n][1] - before[n][1] >= max(2, others)
        }
        mine = [n for n in after if n in often or n in changed & self._changed]
        self._changed |= changed
        names = list(dict.fromkeys(n for each in gather_json(self._me, mine) for n in each))
        if not names:
            return ""
        self._done = True
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        cure = "without micro_batch, or " if self._plan.pipeline == 1 else ""
        return (
            f"the forward pass changes the buffer {names[0]!r}{more}, and a step has "
            f"{self._plan.accumulation} forward passes, one for each micro-batch: it changes as "
            "often. This is not the same training as on one device; it would be "
            f"{cure}where the script changes it once a step"
        )


class OwnSamples:
    """Checks whether workers come to other values of a buffer: rank 0's are sent to all then.

    Looks at the first three steps, and at those whose number is a power of two: a collective there.
    """

    def __init__(self, model: nn.Module, plan: Plan, me: World) -> None:
        self._model, self._me = model, me
        self._steps = 0
        self._before: _Marks | None = None
        self._done = plan.replicas == 1

    def begin(self) -> None:
        """Before the first forward pass of a step."""
        if self._done:
            return
        self._steps += 1
        if self._steps <= 3 or self._steps & (self._steps - 1) == 0:
            self._before = _marks(self._model)

    def end(self) -> str:
        """After the last pass: a warning, once, the same on every worker; empty if none."""
        before, self._before = self._before, None
        if not before:  # on every worker
            return ""
        after = _marks(self._model)
        mine = {n: _content(after[n][0]) for n in _changed(before, after)}
        first: dict[str, tuple[int, _Content]] = {}
        names: dict[str, tuple[int, int]] = {}
        for rank, each in enumerate(gather_json(self._me, mine)):
            for name, content in each.items():
                before_it, other = first.setdefault(name, (rank, content))
                if _differ(other, content):
                    names.setdefault(name, (before_it, rank))
        if not names:
            return ""
        self._done = True
        name, (low, high) = next(iter(names.items()))
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return (
            f"the forward pass changes the buffer {name!r}{more} by the samples that it sees: "
            f"ranks {low} and {high} came to other values, and all go on with rank 0's. This is "
            "not the same training as on one device; it would be if the buffer followed from all "
            "workers' samples"
        )


def _marks(model: nn.Module) -> _Marks:
    spectral = set(spectral_norms(model))
    return {
        name: (b, b._version)
        for path, module in model.named_modules()
        if not isinstance(module, _BatchNorm)
        and path not in spectral
        and path.split(".parametrizations.")[0] not in spectral
        for name, b in module.named_buffers(path, recurse=False)
    }


def _changed(before: _Marks, after: _Marks) -> set[str]:
    return {
        n
        for n, (b, version) in after.items()
        if n not in before or before[n][0] is not b or before[n][1] != version
    }


_Content = list[Any]  # a buffer's shape and two sums over it


@torch.no_grad()
def _content(buffer: torch.Tensor) -> _Content:
    values = buffer.detach()
    values = torch.view_as_real(values) if values.is_complex() else values
    flat = values.flatten().double()
    places = torch.arange(1, flat.numel() + 1, device=flat.device).double().sqrt()
    return [list(buffer.shape), float((flat.abs() * places).sum()), float(flat.sum())]


def _differ(one: _Content, other: _Content) -> bool:
    """By more than rounding: processors of two kinds add in other orders."""
    near = 1e-6 * max(one[1], other[1])
    apart = any(not abs(a - b) <= near for a, b in zip(one[1:], other[1:], strict=True))
    return one[0] != other[0] or (apart and repr(one) != repr(other))
