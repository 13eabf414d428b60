"""How far predictions were from published and measured runs, by kind of prediction."""

from __future__ import annotations

from typing import Literal

ErrorKind = Literal["sheet time", "sheet memory", "measured time", "measured memory"]
"""``sheet``: for a device known from its data sheet only; ``measured``: costs and links measured on
the machine itself.
"""

_MEAN_ERROR: dict[ErrorKind, float] = {
    "sheet time": 0.09,
    "sheet memory": 0.10,
    "measured time": 0.052,
    "measured memory": 0.018,
}
SHARDED_TIME = 0.076
"""Mean relative error of measured step times of sharded plans, which is larger than of others."""


def error_range(kind: ErrorKind) -> float:
    """Mean relative error of predictions of this kind.

    ``sheet`` kinds come from published runs (``benchmarks/plan_offline.py``), ``measured`` kinds
    from real runs (``benchmarks/plan_truth.py`` and ``plan_memory.py``).

    Example:
        >>> f"≈ 31.5 s ± {error_range('measured time'):.0%}"
        '≈ 31.5 s ± 5%'
    """
    return _MEAN_ERROR[kind]
