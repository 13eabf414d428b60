"""Sums over the rows of all workers that have the same bits however the rows are divided."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from ronde.algorithms.table_rows import as_frame, encode_numbers, share_of
from ronde.world import ArgumentError, World
from ronde.world.consensus import gather_json

__all__ = ["exact_total", "split_limbs", "matrix_of", "sum_counts", "to_floats"]

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]


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


def exponents_of(x: F64, me: World) -> I64:
    """For each column an e such that no value of any worker reaches 2**e. A collective."""
    own = np.abs(x).max(axis=0, initial=0.0)
    largest = torch.from_numpy(own)
    if me.size > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    return np.asarray(np.frexp(largest.numpy())[1], dtype=np.int64)


def split_limbs(x: F64, exponents: I64, bits: int, count: int) -> list[F64]:
    """Whole numbers of so many bits that make up ``x``, the most significant first.

    ``x`` is the sum of ``limb[k] * 2**(e - bits * (k + 1))``, up to half a unit of the last limb.
    Sums of whole numbers below 2^53 are exact in float64, in any order: a matrix product as well.
    """
    rest, parts = np.ldexp(x, bits - exponents), []
    for _ in range(count):
        whole = np.rint(rest)
        parts.append(whole)
        rest = (rest - whole) * 2.0**bits
    return parts


def sum_counts(counts: I64, me: World) -> I64:
    """Integers, summed over all workers. A collective."""
    total = torch.from_numpy(np.ascontiguousarray(counts, dtype=np.int64))
    if me.size > 1:
        dist.all_reduce(total)
    return np.asarray(total.numpy())


def to_floats(sums: I64, bits: int, exponents: Any) -> F64:
    """``sum(sums[k] << bits * (last - k)) * 2**(exponents - bits * last)``, rounded once."""
    last = len(sums) - 1
    whole = sum(part.astype(object) << bits * (last - k) for k, part in enumerate(sums))
    return np.asarray(np.ldexp(np.asarray(whole, np.float64), exponents - bits * last))


def matrix_of(data: Any, me: World, own_rows: bool) -> F64:
    """This worker's rows of an array or a table of numbers, as float64. A collective.

    Raises:
        ArgumentError: it is no matrix, or a value is missing or infinite; on every rank.
    """
    x = data if isinstance(data, np.ndarray) else encode_numbers(as_frame(data))
    problem = ""
    if x.ndim != 2:
        problem = f"data has the shape {x.shape}: it must be (n, columns)"
    elif not np.isfinite(x).all():
        problem = "data has values that are missing or infinite"
    every = gather_json(me, [problem, *x.shape])
    for rank, (problem, rows, *columns) in enumerate(every):
        if problem:
            raise ArgumentError(f"{problem} (rank {rank}).")
        if columns != every[0][2:] or (not own_rows and rows != every[0][1]):
            raise ArgumentError(f"rank {rank} holds another table than rank 0.")
    low, high = (0, len(x)) if own_rows else share_of(len(x), me)
    return np.asarray(x[low:high], dtype=np.float64) + 0.0  # no negative zero
