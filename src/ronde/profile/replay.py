"""Replay earlier results: how a stage is removed from an input pipeline.

A process makes its first samples normally and keeps each stage's result at each *place* (the same
function at its n-th call within a sample). After that a call returns a kept result at once. All
places of a sample are answered from the same earlier sample, so an image and its mask, or its size
and its pixels, still match.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable
from typing import Any

import numpy as np
import torch

from ronde.world.tensors import map_leaves, parts

KEPT = 16
"""Earlier results at a place, at most."""

_LEAST = 4
_MEMORY = 128 << 20

MISSING: Any = object()
"""There is nothing to give: do the work."""


def size_of(value: Any) -> int:
    """Approximate bytes of a result."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    if isinstance(value, bytes | bytearray | memoryview | str):
        return len(value)
    if (held := parts(value)) is not None:
        return sum(size_of(v) for v in held.values()) + 64
    if isinstance(taken := getattr(value, "nbytes", None), int):
        return taken
    size = getattr(value, "size", None)
    if _is_image(value) and isinstance(size, tuple):
        return int(size[0] * size[1] * (1 if value.mode in ("1", "L", "P") else 4))
    return 64


def _is_image(value: Any) -> bool:
    return (
        hasattr(value, "_mode") and hasattr(value, "getbands") and hasattr(value, "_ensure_mutable")
    )


def deep_copy(value: Any) -> Any:
    """A copy that later changes cannot reach."""
    return map_leaves(_copied, value)


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return (
        copy.copy(value)
        if isinstance(value, np.ndarray | bytearray | set) or _is_image(value)
        else value
    )


def same_bits(a: Any, b: Any) -> bool:
    """Whether two values are equal bit for bit; incomparable ones are compared by identity."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        if a.shape != b.shape or a.dtype != b.dtype or a.layout != torch.strided:
            return False
        return bool(
            torch.equal(a, b)
            or (a.is_floating_point() and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))
        )
    if isinstance(a, np.ndarray):
        return (
            a.shape == b.shape
            and a.dtype == b.dtype
            and (a.tobytes() == b.tobytes() if a.dtype != object else a is b)
        )
    if (held := parts(a)) is not None and (other := parts(b)) is not None:
        return held.keys() == other.keys() and all(same_bits(v, other[k]) for k, v in held.items())
    if _is_image(a):
        return bool(a.mode == b.mode and a.size == b.size and a.tobytes() == b.tobytes())
    if a is b:
        return True
    try:
        return bool(a == b)
    except Exception:  # what a class of the user's does with == is its own affair
        return False


class _Kept:
    """A kept result. ``fresh``: callers modify it, so each gets a copy."""

    __slots__ = ("backup", "fresh", "value")

    def __init__(self, value: Any, final: bool) -> None:
        self.value = value
        self.backup = None if final else deep_copy(value)
        self.fresh = False

    def settle(self) -> None:
        """Check, after the sample, whether the result was modified."""
        try:
            changed = self.backup is not self.value and not same_bits(self.value, self.backup)
        except Exception:  # an image that was closed since has nothing to compare
            changed = True
        if changed:
            self.value, self.fresh = self.backup, True
        self.backup = None


class Rings:
    """The results one process has kept."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, dict[int, _Kept]] = {}
        self._memory = 0
        self.full = False  # the memory that results may take is used up

    def give(self, place: Hashable, turn: int, least: int = KEPT) -> Any:
        """An earlier result for this place, or MISSING.

        Args:
            turn: how many samples were made before this one.
            least: how many of them are there to learn from.
        """
        ring = self._kept.get(place)
        if not ring or turn < least or (len(ring) < _LEAST and not self.full):
            return MISSING  # still learning
        kept = ring.get(turn % KEPT)
        if kept is None:  # that sample had none here, or there was no room
            kept = ring[list(ring)[turn % len(ring)]]
        if kept.backup is not None:
            return MISSING  # its own sample is still being made
        return deep_copy(kept.value) if kept.fresh else kept.value

    def keep(self, place: Hashable, turn: int, value: Any, final: bool = False) -> _Kept | None:
        """Keep a result; None without room.

        Args:
            final: nobody else holds it, so it need not be looked at again.
        """
        ring = self._kept.setdefault(place, {})
        turn %= KEPT
        if turn in ring:
            turn = next((t for t in range(KEPT) if t not in ring), -1)
            if turn < 0:
                return None
        size = size_of(value)
        if self._memory + size > _MEMORY:
            self.full = True
            return None
        self._memory += size
        kept = ring[turn] = _Kept(value, final)
        return kept
