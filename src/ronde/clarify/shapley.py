"""Shapley values of any model: exact for up to eleven players, Kernel SHAP beyond.

A player is a column, a token, or a patch of an image. Absent players take their values from
background samples; the model's output is averaged over these.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Explained", "shapley_values"]


Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Explained:
    """Why a model gave its outputs.

    Attributes:
        values: of each player, ``[samples, players]``, in units of the output.
        base: output without any player, ``[samples]``.
        output: output with all of them, ``[samples]``.
    """

    values: Array
    base: Array
    output: Array

    @property
    def gaps(self) -> Array:
        """``|base + sum of values - output|``, ``[samples]``."""
        gaps: Array = np.abs(self.base + self.values.sum(axis=1) - self.output)
        return gaps


def _coalitions(players: int, budget: int, key: int) -> tuple[Array, Array]:
    """Which players are present, ``[coalitions, players]``, and the weights of a regression on
    them: all of them, or pairs of a coalition and its complement, drawn by the kernel's weights.
    """
    if 2**players - 2 <= budget or players <= 11:  # 2,048 coalitions
        every = np.array(list(itertools.product([0, 1], repeat=players))[1:-1], dtype=bool)
        sizes = every.sum(axis=1)
        weights = [(players - 1) / (math.comb(players, int(s)) * s * (players - s)) for s in sizes]
        return every, np.array(weights)
    g = np.random.Generator(np.random.Philox(key=key))
    sizes = np.arange(1, players)
    share = (players - 1) / (sizes * (players - sizes))
    drawn = g.choice(sizes, size=budget // 2, p=share / share.sum())
    present = np.zeros((2 * len(drawn), players), dtype=bool)
    for i, size in enumerate(drawn):
        present[2 * i, g.permutation(players)[:size]] = True
        present[2 * i + 1] = ~present[2 * i]  # pairs cancel the odd part of the sampling error
    # one drawn twice counts twice, and is computed once
    unique, counts = np.unique(present, axis=0, return_counts=True)
    return unique, counts.astype(np.float64)


def _solve(present: Array, weights: Array, gains: Array, total: float) -> Array:
    """Weighted least squares with a solution that sums to ``total``: one player is eliminated."""
    z = present.astype(np.float64)
    left = z[:, :-1] - z[:, -1:]
    right = gains - z[:, -1] * total
    scale = np.sqrt(weights)
    # least squares of the matrix itself: its normal equations would square the condition
    first, *_ = np.linalg.lstsq(left * scale[:, None], right * scale, rcond=None)
    return np.append(first, total - first.sum())


def shapley_values(
    predict: Callable[[Array], Array],
    samples: Array,
    background: Array,
    players: Array,
    *,
    budget: int = 2048,
    first: int = 0,
) -> Explained:
    """Shapley values of each sample's players (Lundberg and Lee 2017).

    Args:
        predict: ``[n, …]`` samples -> ``[n]`` outputs.
        samples: to explain, ``[samples, …]``.
        background: samples that stand for an absent player, ``[background, …]``.
        players: the player to which each element of a sample belongs, shaped as one sample.
        budget: coalitions of each sample, where not all can be tried.
        first: number of the first sample: a sample's draws depend on its number only, so any
            division of the samples gives the same values.

    Returns:
        In float64. The values add up to the output minus the base, exactly but for rounding.
    """
    count = int(players.max()) + 1
    base = float(np.mean(predict(background)))
    outputs = np.asarray(predict(samples), dtype=np.float64)
    values = np.zeros((len(samples), count))
    for i, sample in enumerate(samples):
        if count == 1:
            values[i] = outputs[i] - base
            continue
        present, weights = _coalitions(count, budget, first + i)
        gains = _gains(predict, sample, background, players, present) - base
        values[i] = _solve(present, weights, gains, float(outputs[i]) - base)
    return Explained(values, np.full(len(samples), base), outputs)


def _gains(
    predict: Callable[[Array], Array],
    sample: Array,
    background: Array,
    players: Array,
    present: Array,
) -> Array:
    """The mean output of each coalition."""
    each = max(1, 4096 // len(background))  # samples that the model is given at a time
    means = []
    for low in range(0, len(present), each):
        mask = present[low : low + each][:, players]
        mixed = np.where(mask[:, None], sample[None, None], background[None])
        flat = mixed.reshape(-1, *sample.shape)
        out = np.asarray(predict(flat), dtype=np.float64)
        means.append(out.reshape(len(mask), len(background)).mean(axis=1))
    return np.concatenate(means)
