"""Principal components that have the same bits on any number of workers, in any order of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ronde.algorithms.exact_sums import exponents_of, matrix_of, sum_counts
from ronde.tables.exact import array_limbs, array_sums
from ronde.world import ArgumentError, World
from ronde.world.connect import connect
from ronde.world.consensus import broadcast_json

__all__ = ["Components", "pca"]

F64 = npt.NDArray[np.float64]
# 65 bits of each value; sums of 2^20 products of 26 bits are exact in float64
_BITS, _LIMBS, _BLOCK = 13, 5, 1 << 20


@dataclass(frozen=True)
class Components:
    """Principal components.

    Attributes:
        mean: (columns,).
        components: (components, columns), unit vectors by falling variance; the largest entry of
            each is positive.
        variance: (components,) of the rows along each.
    """

    mean: F64
    components: F64
    variance: F64

    def transform(self, x: npt.ArrayLike) -> F64:
        """(n, components): the rows along each component."""
        return (np.asarray(x, dtype=np.float64) - self.mean) @ self.components.T


def pca(data: Any, components: int, *, own_rows: bool = False) -> Components:
    """Principal components of the covariance of all rows.

    Args:
        data: (n, columns) array, a table of numbers, or the path of Parquet files. Each worker
            takes its share of the rows.
        components: how many.
        own_rows: each worker gives its own rows as ``data``.

    Returns:
        Components: the same on every rank.

    Raises:
        ArgumentError: ``data`` is no table of finite numbers, or has too few columns or rows.

    Example:
        >>> found = pca(np.array([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]), 1)
        >>> found.components.round(3).tolist(), found.variance.round(3).tolist()
        ([[0.707, 0.707]], [2.0])
    """
    me = connect()
    x = matrix_of(data, me, own_rows)
    count = int(sum_counts(np.array([len(x)]), me)[0])
    if not 1 <= components <= x.shape[1] or count < 2:
        raise ArgumentError(
            f"components={components}: {count} rows of {x.shape[1]} columns have at most "
            f"{x.shape[1] if count > 1 else 0}."
        )
    exponents = exponents_of(x, me)
    parts = array_limbs(x, exponents, _BITS, _LIMBS)
    sums = sum_counts(np.array([part.sum(axis=0) for part in parts], np.int64), me)
    mean = array_sums(sums, exponents - _BITS * _LIMBS, _BITS) / count
    covariance = _products(x - mean, me) / (count - 1)
    answer = _eigenvectors(covariance, components) if me.is_main else None
    variance, vectors = broadcast_json(me, answer)
    return Components(mean, np.array(vectors), np.array(variance))


def _products(x: F64, me: World) -> F64:
    """``x.T @ x`` over all workers: exact products of limbs (Ozaki's scheme). A collective."""
    exponents = exponents_of(x, me)
    columns = x.shape[1]
    sums = np.zeros((2 * _LIMBS - 1, columns, columns), np.int64)
    for low in range(0, len(x), _BLOCK):  # 2^26 for each product of limbs: below 2^53
        parts = array_limbs(x[low : low + _BLOCK], exponents, _BITS, _LIMBS)
        for i, left in enumerate(parts):
            for j, right in enumerate(parts):
                sums[i + j] += (left.T @ right).astype(np.int64)
    total = sum_counts(sums, me)
    return array_sums(total, exponents[:, None] + exponents - 2 * _BITS * _LIMBS, _BITS)


def _eigenvectors(covariance: F64, count: int) -> list[Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # LAPACK rounds by the number of threads
    try:
        values, vectors = torch.linalg.eigh(torch.from_numpy(covariance))
    finally:
        torch.set_num_threads(threads)
    rows = vectors.numpy().T[::-1][:count]
    largest = np.abs(rows).argmax(axis=1)
    signs = np.sign(rows[np.arange(count), largest])
    return [values.numpy()[::-1][:count].tolist(), (rows * signs[:, None]).tolist()]
