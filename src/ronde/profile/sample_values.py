"""Samples as values: their size, and whether two are the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ronde.world.tensors import parts


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
