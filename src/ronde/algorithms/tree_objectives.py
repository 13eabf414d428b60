"""Objectives of boosted trees: gradients, and metrics over all rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ronde.tables.scores import auc

__all__ = ["OBJECTIVES", "Objective", "on_grid"]

F64 = npt.NDArray[np.float64]
GRID_BITS = 20  # float32 holds 24: a rounded gradient is exact in it


def on_grid(values: F64, largest: float) -> npt.NDArray[np.float32]:
    """Round values to multiples of 2^-20 of a power of two above ``largest``.

    Sums of up to 2^32 such values are exact in float64, so neither the number of workers nor the
    order of rows changes a histogram.

    Example:
        >>> on_grid(np.array([0.3, -1.0]), 1.0).tolist()
        [0.2999992370605469, -1.0]
    """
    unit = 2.0 ** (math.frexp(largest)[1] - GRID_BITS)
    return (np.rint(values / unit) * unit).astype(np.float32)


def _sigmoid(margin: F64) -> F64:
    return np.asarray(1 / (1 + np.exp(-margin)))


def _softmax(margin: F64) -> F64:
    powers = np.exp(margin - margin.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))


def _mean(loss: F64, weight: F64) -> float:
    return float((loss * weight).sum() / weight.sum())


def _binary(margin: F64, y: F64) -> tuple[F64, F64]:
    p = _sigmoid(margin)
    return p - y, p * (1 - p)


def _regression(margin: F64, y: F64) -> tuple[F64, F64]:
    return margin - y, np.ones_like(margin)


def _multiclass(margin: F64, y: F64) -> tuple[F64, F64]:
    p = _softmax(margin)
    gradient = p.copy()
    gradient[np.arange(len(y)), y.astype(np.int64)] -= 1
    return gradient, 2 * p * (1 - p)  # twice the diagonal, as XGBoost's own softmax has it


def _cross_entropy(margin: F64, y: F64) -> F64:
    shifted = margin - margin.max(axis=1, keepdims=True)
    at_label = shifted[np.arange(len(y)), y.astype(np.int64)]
    return np.asarray(np.log(np.exp(shifted).sum(axis=1)) - at_label)


@dataclass(frozen=True)
class Objective:
    """What boosted trees minimize.

    Attributes:
        gradients: (margin, labels) -> first and second derivatives of each row's loss.
        loss: (margin, labels) -> each row's loss.
        metrics: name -> (margin, labels, weights) -> a number; the first stops early.
        names: library -> its name of the objective.
    """

    gradients: Callable[[F64, F64], tuple[F64, F64]]
    loss: Callable[[F64, F64], F64]
    metrics: dict[str, Callable[[F64, F64, F64], float]]
    names: dict[str, str]


def _log_loss(margin: F64, y: F64) -> F64:
    return np.asarray(np.logaddexp(0, margin) - y * margin)


def _squared(margin: F64, y: F64) -> F64:
    return np.asarray((margin - y) ** 2)


def _error(margin: F64, y: F64, weight: F64) -> float:
    return _mean((margin.argmax(axis=1) != y).astype(np.float64), weight)


def _of_loss(loss: Callable[[F64, F64], F64]) -> Callable[[F64, F64, F64], float]:
    return lambda margin, y, weight: _mean(loss(margin, y), weight)


OBJECTIVES: dict[str, Objective] = {
    "binary": Objective(
        _binary,
        _log_loss,
        {"logloss": _of_loss(_log_loss), "auc": auc},
        {"xgboost": "binary:logistic", "lightgbm": "binary sigmoid:1"},
    ),
    "regression": Objective(
        _regression,
        _squared,
        {"rmse": lambda margin, y, weight: math.sqrt(_mean(_squared(margin, y), weight))},
        {"xgboost": "reg:squarederror", "lightgbm": "regression"},
    ),
    "multiclass": Objective(
        _multiclass,
        _cross_entropy,
        {"logloss": _of_loss(_cross_entropy), "error": _error},
        {"xgboost": "multi:softprob", "lightgbm": "multiclass num_class:{}"},
    ),
}
