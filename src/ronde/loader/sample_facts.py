"""A few numbers of a sample, by which ranks tell whether they read the same data set."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch

from ronde.world.tensors import leaves

__all__ = ["facts_of", "is_other"]

_MOST_LEAVES, _MOST_NUMBERS = 16, 16
_NEAR_SHARE = 0.02  # of the largest number: decoders of two builds round differently

Facts = list[list[Any] | None]
"""For each leaf its kind, its shape, and some of its values; None if it changes from one read to
the next.
"""


def facts_of(sample: Any) -> Facts:
    """What to compare of a sample, as JSON holds it.

    Example:
        >>> facts_of((torch.tensor([1.0, 2.0]), 3, "a")) == facts_of((np.array([1.0, 2.0]), 3, "a"))
        True
    """
    return [_facts(leaf) for leaf, _ in zip(leaves(sample), range(_MOST_LEAVES), strict=False)]


def _facts(leaf: Any) -> list[Any]:
    if isinstance(leaf, str | bytes):
        data = leaf.encode("utf-8", "surrogatepass") if isinstance(leaf, str) else leaf
        return ["text", [len(data)], hashlib.sha256(data).hexdigest()[:8]]
    if isinstance(leaf, torch.Tensor):
        if leaf.layout is not torch.strided or leaf.is_meta:
            return ["other", [], type(leaf).__name__]
        leaf = leaf.detach().cpu()
        leaf = (leaf.float() if leaf.is_floating_point() else leaf).numpy()
    array = np.asarray(leaf)  # also of an image
    if array.dtype.kind not in "biuf":
        return ["other", [], type(leaf).__name__]
    some = array.reshape(-1)[:: max(1, array.size // _MOST_NUMBERS)][:_MOST_NUMBERS]
    kind = "near" if array.dtype.kind == "f" or array.dtype == np.uint8 else "exact"
    return [kind, list(array.shape), some.astype(np.float64).tolist()]


def is_other(one: Facts | None, two: Facts | None) -> bool:
    """Whether facts are those of different samples; texts count where there is no number.

    Example:
        >>> is_other(facts_of(torch.tensor([1.0, 2.0])), facts_of(torch.tensor([1.0, 2.0001])))
        False
    """
    if one is None or two is None:
        return False
    pairs = [(a, b) for a, b in zip(one, two, strict=False) if a and b]
    numbers = [(a, b) for a, b in pairs if {a[0], b[0]} <= {"near", "exact"}]
    return len(one) != len(two) or any(_is_other(a, b) for a, b in numbers or pairs)


def _is_other(one: list[Any], two: list[Any]) -> bool:
    if one[:2] != two[:2] or one[0] != "near":
        return repr(one) != repr(two)
    allowed = _NEAR_SHARE * max(map(abs, (*one[2], *two[2])), default=0.0)
    return any(abs(a - b) > allowed for a, b in zip(one[2], two[2], strict=True))
