"""Sums over the rows of all workers that have the same bits however the rows are divided."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from ronde.algorithms.table_rows import check_tables, encode_numbers, own_frame, own_slice
from ronde.tables.exact import array_limbs, array_sums
from ronde.world import World

__all__ = ["exponents_of", "matrix_of", "sum_counts", "total_of"]

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]


def exponents_of(x: F64, me: World) -> I64:
    """For each column an e such that no value of any worker reaches 2**e. A collective."""
    own = np.abs(x).max(axis=0, initial=0.0)
    largest = torch.from_numpy(own)
    if me.size > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    return np.asarray(np.frexp(largest.numpy())[1], dtype=np.int64)


def sum_counts(counts: I64, me: World) -> I64:
    """Integers, summed over all workers. A collective."""
    total = torch.from_numpy(np.ascontiguousarray(counts, dtype=np.int64))
    if me.size > 1:
        dist.all_reduce(total)
    return np.asarray(total.numpy())


def total_of(values: F64, me: World) -> float:
    """The sum of the values of all workers, each to 2^-71 of the largest. A collective."""
    exponents = exponents_of(values[:, None], me)
    sums = [part.sum(axis=0) for part in array_limbs(values[:, None], exponents, 24, 3)]
    return float(array_sums(sum_counts(np.array(sums, np.int64), me), exponents - 72, 24)[0])


def matrix_of(data: Any, me: World, own_rows: bool) -> F64:
    """This worker's rows of an array, a table of numbers, or Parquet files, as float64.

    Raises:
        ArgumentError: it is no matrix, or a value is missing or infinite; on every rank.
    """
    if isinstance(data, np.ndarray):
        data = np.atleast_1d(data)
        total = len(data)
        x = data if own_rows or data.ndim != 2 else data[own_slice(total, me)]
    else:
        frame, _, total = own_frame(data, me, own_rows)
        x = encode_numbers(frame)
    problem = ""
    if x.ndim != 2:
        problem = f"data has the shape {x.shape}: it must be (n, columns)"
    elif not np.isfinite(x).all():
        problem = "data has values that are missing or infinite"
    check_tables(problem, x.shape[1:], len(x), total, own_rows, me)
    return np.asarray(x, dtype=np.float64) + 0.0  # no negative zero
