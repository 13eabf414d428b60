"""How well a score ranks rows, and how far two samples of rows differ."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def auc(score: Floats, y: npt.NDArray[Any], weight: npt.NDArray[Any]) -> float:
    """Area under the ROC curve; ties count half. NaN where all rows are of one class.

    Example:
        >>> auc(np.array([0.1, 0.4, 0.4, 0.8]), np.array([0.0, 0, 1, 1]), np.ones(4))
        0.875
    """
    _, group = np.unique(score, return_inverse=True)
    positive, negative = (np.bincount(group, weights=weight * part) for part in (y, 1 - y))
    below = np.cumsum(negative) - negative / 2
    pairs = positive.sum() * negative.sum()
    return float((positive * below).sum() / pairs) if pairs else math.nan


def stability(expected: npt.NDArray[Any], seen: npt.NDArray[Any]) -> float:
    """Population stability index between the counts of two samples in the same bins.

    Example:
        >>> stability(np.array([5, 5]), np.array([50, 50]))
        0.0
    """
    # half a count more in each: an empty bin is finite
    p, q = ((n + 0.5) / (n.sum() + 0.5 * len(n)) for n in (expected, seen))
    return float(np.sum((q - p) * np.log(q / p)))
