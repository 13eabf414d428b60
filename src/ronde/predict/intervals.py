"""A measured value with its interval, and Student's t."""

from __future__ import annotations

from dataclasses import dataclass

NORMAL_95 = 1.960
# Two-sided 95 % of Student's t, by degrees of freedom.
_T_TABLE = (
    "12.706 4.303 3.182 2.776 2.571 2.447 2.365 2.306 2.262 2.228 2.201 2.179 2.160 2.145 2.131"
)
_T = tuple(map(float, _T_TABLE.split()))


@dataclass(frozen=True)
class Band:
    """A value and its interval (95 %)."""

    value: float
    low: float
    high: float


def student_t95(freedom: int) -> float:
    """Half of the interval that holds 95 % of Student's t.

    Example:
        >>> student_t95(1), round(student_t95(20), 2)
        (12.706, 2.08)
    """
    return _T[max(freedom, 1) - 1] if freedom <= len(_T) else NORMAL_95 + 2.4 / freedom
