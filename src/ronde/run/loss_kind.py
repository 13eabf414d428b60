"""What kind of function a loss is: asked of the loss itself, by calls that leave no trace."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ronde.introspect import NO_TENSORS, SavedState
from ronde.world.tensors import map_leaves, tensors_in

__all__ = ["FLOAT32", "HALF", "kind_of_loss", "undisturbed"]

_MOST_NUMBERS, _MOST_SAMPLES = 2**22, 24  # of a micro-batch that are asked about
FLOAT32, HALF = 1e-5, 1e-2
"""Relative errors that are rounding in these types."""

Value = tuple[torch.Tensor, torch.Tensor | None]
"""A loss and its weight, None for a plain loss."""


class _Guard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses, before they happen, writes to tensors from outside, draws from the script's own
    generators, and what other workers would have to take part in.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._own: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        arguments, kwargs = func._schema.arguments, kwargs or {}
        given = dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
        written = [given.get(a.name) for a in arguments if a.alias_info and a.alias_info.is_write]
        shared = "c10d" in func.namespace or any(t.__name__ == "DTensor" for t in types)
        if shared or given.get("generator") is not None or not _memory(written) <= self._own:
            raise RuntimeError(f"{func} in a trial call")
        result = func(*args, **kwargs)
        self._own |= _memory(result) - _memory(given)
        return result


def _memory(value: Any) -> set[int]:
    return {int(t.untyped_storage()._cdata) for t in tensors_in(value)}


@contextmanager
def undisturbed(*owners: Any) -> Iterator[None]:
    """Inside, calls compute no gradients and leave no trace: generators, and the attributes and
    modes of ``owners``, are put back. Modules evaluate.

    Raises:
        RuntimeError: a call would write to the script's tensors, or needs other workers.
    """
    before = SavedState(*owners, largest=NO_TENSORS)
    modules = [m for owner in owners if isinstance(owner, nn.Module) for m in owner.modules()]
    # set_stance imports torch's compiler, which takes seconds
    compiled = "torch._dynamo" in sys.modules
    eager = torch.compiler.set_stance("force_eager") if compiled else nullcontext()
    with before, torch.no_grad(), eager, _Guard():
        for module in modules:
            module.training = False
        yield


def kind_of_loss(
    call: Callable[[Any], Value], value: Any, samples: int, rounding: float = FLOAT32
) -> str:
    """What a loss is by its values for parts of a batch: ``mean``, ``sum``, ``pair`` for a ``(sum,
    weight)`` that adds up, ``other``, ``flat`` if the values say nothing yet, or ``unknown``.

    Args:
        call: the loss of what a micro-batch has, or of a part of it.
        value: that of the micro-batch.
        samples: how many samples the micro-batch has.
        rounding: the largest relative error of equal numbers.
    """
    free = [t for t in tensors_in(value) if t.dim() and not isinstance(t, nn.Parameter)]
    if samples < 2 or not free:
        return "flat" if free else "unknown"
    few = _MOST_NUMBERS * samples // max(sum(t.numel() for t in free), 1)
    asked = min(samples, _MOST_SAMPLES, max(few, 3))
    rows, rest = divmod(len(free[0]), samples)
    direct = any(samples in t.shape[:2] for t in free)
    if not direct and (rest or not rows):
        return "unknown"
    kinds = []
    for n in (0,) if direct else (rows, -rows):  # those of a sample may stand in blocks
        try:
            part = lambda *of, n=n: call(_part(value, samples, n, rounding < HALF, *of))  # noqa: E731
            kinds.append(_judge(part, asked, rounding))
        except Exception:  # it takes no part of a batch, or must not be asked
            return "unknown"
    return "unknown" if kinds[0] == "other" and kinds[-1] in ("mean", "pair") else kinds[0]


def _judge(call: Callable[[int, int], Value], samples: int, rounding: float) -> str:
    first = max(samples // 3, 1)  # unequal parts: a mean of means is no mean
    values = [call(*part) for part in ((0, first), (first, samples), (0, samples), (0, samples))]
    one, two, whole, again = (float(loss) for loss, _ in values)
    largest = max(map(abs, (one, two, whole)))

    def near(a: float, b: float, times: float = 1.0) -> bool:
        return abs(a - b) <= times * rounding * largest

    if not math.isfinite(whole) or largest == 0:
        return "flat"
    if not math.isfinite(one + two):
        return "other"  # a part without a loss, such as one of padding only
    if not near(whole, again):
        return "unknown"  # it keeps state, or draws
    if len(weights := [float(weight) for _, weight in values if weight is not None]) == 4:
        adds_up = near(whole, one + two) and math.isclose(
            weights[2], weights[0] + weights[1], rel_tol=1e-5
        )
        return "pair" if adds_up else "other"
    mean = (one * first + two * (samples - first)) / samples
    if near(whole, mean):
        return "flat" if near(one, two, 100) else "mean"
    if near(whole, one + two):
        return "sum"
    return "flat" if near(whole, mean, 10) else "other"


def _part(value: Any, samples: int, rows: int, wide: bool, low: int, high: int) -> Any:
    """What belongs to some samples: ``rows`` of tensors that have several for each; ``wide``: in
    float32 at least.
    """

    def take(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        n, leaf = abs(rows), leaf.detach()
        if leaf.dim() and len(leaf) == n * samples and rows < 0:
            leaf = leaf.unflatten(0, (n, -1)).narrow(1, low, high - low).flatten(0, 1)
        elif leaf.dim() and len(leaf) == n * samples:
            leaf = leaf.narrow(0, low * n, (high - low) * n)
        elif samples in leaf.shape[:2] and not isinstance(leaf, nn.Parameter):
            leaf = leaf.narrow(leaf.shape.index(samples), low, high - low)
        return (
            leaf.float()
            if wide and leaf.is_floating_point() and leaf.itemsize < 4
            else leaf.clone()
        )

    def refuse(held: Any) -> bool:
        if held is not value and isinstance(held, list | tuple) and len(held) == samples:
            raise TypeError  # an item for each sample
        return False

    return map_leaves(take, value, refuse)
