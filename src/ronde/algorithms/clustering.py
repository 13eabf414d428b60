"""K-means that has the same bits on any number of workers and for any order of the rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ronde.algorithms.exact_sums import exponents_of, matrix_of, sum_counts, total_of
from ronde.data.order import key_of
from ronde.tables.exact import array_limbs, array_sums
from ronde.world import ArgumentError, World
from ronde.world.connect import connect
from ronde.world.consensus import gather_json

__all__ = ["Clusters", "kmeans"]

F64 = npt.NDArray[np.float64]
# 72 bits of each value; sums of 2^29 limbs of 24 bits are exact in float64
_BITS, _LIMBS, _BLOCK = 24, 3, 16_384


@dataclass(frozen=True)
class Clusters:
    """Centers of clusters.

    Attributes:
        centers: (k, columns).
        inertia: sum of the squared distances of all rows to their centers.
        rounds: passes over the rows.
    """

    centers: F64
    inertia: float
    rounds: int

    def predict(self, x: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """The nearest center of each row; the first of several."""
        return _nearest(np.asarray(x, dtype=np.float64), self.centers)[0]


def kmeans(
    data: Any,
    k: int,
    *,
    seed: int = 0,
    rounds: int = 300,
    start: npt.ArrayLike | None = None,
    own_rows: bool = False,
) -> Clusters:
    """Lloyd's algorithm from a k-means++ start.

    The start draws each distinct row with a weight of its squared distance, however often it
    occurs. A center that loses all its rows stays where it is.

    Args:
        data: (n, columns) array, a table of numbers, or the path of Parquet files. Each worker
            takes its share of the rows.
        k: number of centers.
        seed: key of the start.
        rounds: most passes over the rows; it ends when no center moves.
        start: (k, columns) centers to begin with.
        own_rows: each worker gives its own rows as ``data``.

    Returns:
        Clusters: the same on every rank.

    Raises:
        ArgumentError: ``data`` is no table of finite numbers, or has fewer than k distinct rows.

    Example:
        >>> x = np.array([[0.0], [1.0], [10.0], [11.0]])
        >>> sorted(kmeans(x, 2).centers.ravel().tolist())
        [0.5, 10.5]
    """
    me = connect()
    x = matrix_of(data, me, own_rows)
    centers = _start(x, k, seed, me) if start is None else np.asarray(start, dtype=np.float64)
    if centers.shape != (k, x.shape[1]):
        raise ArgumentError(f"start has the shape {centers.shape}: it must be {(k, x.shape[1])}.")
    exponents = exponents_of(x, me)
    parts = array_limbs(x, exponents, _BITS, _LIMBS)
    done, moves = 0, True
    while moves and done < rounds:
        labels, _ = _nearest(x, centers)
        # whole numbers: bincount adds them without rounding
        sums = [
            [np.bincount(labels, weights=column, minlength=k) for column in part.T]
            for part in parts
        ]
        total = sum_counts(np.array(sums, dtype=np.int64), me)
        counts = sum_counts(np.bincount(labels, minlength=k), me)
        moved = array_sums(total, exponents[:, None] - _BITS * _LIMBS, _BITS).T
        updated = np.where(counts[:, None] > 0, moved / np.maximum(counts, 1)[:, None], centers)
        moves = not np.array_equal(updated, centers)
        centers, done = updated, done + 1
    return Clusters(centers, total_of(_nearest(x, centers)[1], me), done)


def _nearest(x: F64, centers: F64) -> tuple[npt.NDArray[np.int64], F64]:
    """The nearest center of each row, and the squared distance.

    Column by column: a matrix product rounds by the shape of the block that a row is in.
    """
    labels, squares = np.empty(len(x), np.int64), np.empty(len(x))
    for low in range(0, len(x), _BLOCK):
        block = x[low : low + _BLOCK]
        distance = np.zeros((len(block), len(centers)))
        for column, values in zip(block.T, centers.T, strict=True):
            distance += (column[:, None] - values) ** 2
        labels[low : low + _BLOCK] = nearest = distance.argmin(axis=1)
        squares[low : low + _BLOCK] = distance[np.arange(len(block)), nearest]
    return labels, squares


def _uniform(x: F64, key: int) -> F64:
    """A number in (0, 1] for each row, of its values and the key (splitmix64's mixing)."""
    state = np.full(len(x), key, np.uint64)
    for column in np.ascontiguousarray(x.T).view(np.uint64):
        state = (state ^ column) + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return ((state >> np.uint64(11)).astype(np.float64) + 1) * 2.0**-53


def _start(x: F64, k: int, seed: int, me: World) -> F64:
    """k-means++: the first of exponential clocks that run at the rate of each squared distance."""
    centers: list[list[float]] = []
    squares = np.ones(len(x))
    for number in range(k):
        with np.errstate(divide="ignore"):
            clocks = -np.log(_uniform(x, key_of(seed, 0xC1, number))) / squares
        clocks[squares == 0] = math.inf
        first = int(clocks.argmin()) if len(x) else -1
        own = [float(clocks[first]), x[first].tolist()] if len(x) else [math.inf, []]
        # equal clocks are equal rows but for chance, and then the smaller row decides
        clock, row = min(gather_json(me, own))
        if clock == math.inf:
            raise ArgumentError(f"k={k}: there are {number} distinct rows.")
        centers.append(row)
        apart = _nearest(x, np.array([row]))[1]
        squares = apart if number == 0 else np.minimum(squares, apart)
    return np.array(centers)
