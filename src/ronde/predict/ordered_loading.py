"""How fast loaders feed one device in order, from how long single samples take.

Batches are given in the order of the epoch. While one loader makes a batch with a slow sample, the
others can only be as far ahead as their queues allow, and then the device waits although the mean
time of a sample would do.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_BATCHES = 3000
_SLOW = 8.0  # times the median from which on a sample is slow
_NEAR = 0.1  # of the time of those that take most: less is not one of them
_HALF = 0.5  # share of all loading time that slow samples must take
_RARE = 0.2  # of all samples


@dataclass(frozen=True)
class Tail:
    """Few slow samples that take most of the loading time.

    Attributes:
        share: of all samples.
        seconds: mean of a slow sample.
        usual_seconds: mean of all others.
    """

    share: float
    seconds: float
    usual_seconds: float


def find_tail(durations: Sequence[tuple[int, float]]) -> Tail | None:
    """The slow samples, if few of them take most of the time.

    Args:
        durations: per octave of time, the number of samples and their seconds.

    Example:
        >>> find_tail([(98, 0.5), (2, 8.0)]).seconds
        4.0
    """
    seen = sorted((s / n, n, s) for n, s in durations if n)
    count = sum(n for _, n, _ in seen)
    if not seen:
        return None
    below = list(itertools.accumulate(n for _, n, _ in seen))
    median = next(mean for (mean, _, _), b in zip(seen, below, strict=True) if 2 * b >= count)
    heaviest = max(seen, key=lambda one: one[2])[0]
    least = max(_SLOW * median, _NEAR * heaviest)
    slow = [(n, s) for mean, n, s in seen if mean > least]
    many, seconds = sum(n for n, _ in slow), sum(s for _, s in slow)
    total = sum(s for _, _, s in seen)
    if many < 2 or many > _RARE * count or seconds < _HALF * total:
        return None
    return Tail(many / count, seconds / many, (total - seconds) / (count - many))


def ordered_rate(
    durations: Sequence[tuple[int, float]],
    batch: int,
    loaders: int,
    ahead: int,
    step_seconds: float,
) -> float:
    """Samples per second of one device whose loaders hand over whole batches in order.

    Args:
        durations: per octave of time, the number of samples and their seconds.
        batch: samples of a batch.
        loaders: that make batches in turn.
        ahead: batches that each may be ahead.
        step_seconds: of the device, for a batch.

    Example:
        >>> round(ordered_rate([(10, 0.05)], 4, 2, 2, 0.0)), round(
        ...     ordered_rate([(10, 0.05)], 4, 2, 2, 0.1))
        (400, 40)
    """
    counts = np.array([n for n, _ in durations], dtype=float)
    means = np.array([s / n if n else 0.0 for n, s in durations])
    drawn = np.random.default_rng(0).choice(means, (_BATCHES, batch), p=counts / counts.sum())
    ready, used = [0.0] * _BATCHES, [0.0] * _BATCHES
    for i, seconds in enumerate(drawn.sum(axis=1).tolist()):
        start = ready[i - loaders] if i >= loaders else 0.0
        if i >= loaders * ahead:
            start = max(start, used[i - loaders * ahead])
        ready[i] = start + seconds
        used[i] = max(used[i - 1] + step_seconds if i else 0.0, ready[i])
    return batch * (_BATCHES - 1) / (used[-1] - used[0]) if used[-1] > used[0] else float("inf")
