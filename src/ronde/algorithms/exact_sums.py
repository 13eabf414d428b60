"""Sums over the rows of all workers that have the same bits however the rows are divided."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import numpy.typing as npt

from ronde.world import World
from ronde.world.consensus import gather_json

__all__ = ["exact_total"]

F64 = npt.NDArray[np.float64]


def exact_total(values: F64, me: World) -> Fraction:
    """The exact sum of float64 values over all workers. A collective."""
    fractions, exponents = np.frexp(values)
    whole = np.ldexp(fractions, 53).astype(np.int64)
    total = 0
    for exponent in np.unique(exponents):
        part = whole[exponents == exponent]
        added = (int((part >> 26).sum()) << 26) + int((part & ((1 << 26) - 1)).sum())
        total += added << (int(exponent) + 1100)
    return Fraction(sum(gather_json(me, total)), 1 << 1153)
