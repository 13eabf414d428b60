"""The logarithm of 1 + x from additions, products, and quotients alone.

Engines call different libraries for ``log``, which differ in the last bit; these four operations
are the same everywhere. So the statistics of a column with ``log: true`` have the same bits too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import narwhals as nw
    import numpy.typing as npt

_LN2_HIGH, _LN2_LOW = 0.6931471803691238, 1.9082149292705877e-10
_ROOT_2 = 1.4142135623730951
_TERMS = [2.0 / (2 * i + 1) for i in range(13)]  # of log((1 + z) / (1 - z)) = 2z + 2z^3/3 + …


def _series(y: Any, exponent: Any) -> Any:
    z = (y - 1.0) / (y + 1.0)
    square = z * z
    total = square * _TERMS[-1] + _TERMS[-2]
    for term in reversed(_TERMS[:-2]):
        total = total * square + term
    return exponent * _LN2_HIGH + (exponent * _LN2_LOW + z * total)


def log1p(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """log(1 + x) of an array of values above -1, to about 2 units in the last place of 1 + x."""
    y, exponent = np.frexp(1.0 + x)
    y, exponent = y * 2.0, exponent - 1.0
    high = y > _ROOT_2
    return np.asarray(
        _series(np.where(high, y * 0.5, y), np.where(high, exponent + 1.0, exponent)),
        dtype=np.float64,
    )


def log1p_stages(value: nw.Expr, name: str) -> tuple[dict[str, nw.Expr], ...]:
    """:func:`log1p` as stages of a query; the last one makes the column ``name``."""
    import narwhals as nw

    y, exponent = nw.col(f"{name}/y"), nw.col(f"{name}/e")

    def where(test: nw.Expr, factor: float, step: float) -> dict[str, nw.Expr]:
        return {
            f"{name}/y": nw.when(test).then(y * factor).otherwise(y),
            f"{name}/e": nw.when(test).then(exponent + step).otherwise(exponent),
        }

    stages = [{f"{name}/y": value + 1.0, f"{name}/e": value * 0.0}]
    stages.append(where(y < 1.0, 2.0**64, -64.0))  # 1 + x is at least 2^-53
    stages += [where(y >= 2.0**p, 2.0**-p, float(p)) for p in (512, 256, 128, 64, 32, 16, 8, 4, 2)]
    stages += [where(y >= 2.0, 0.5, 1.0), where(y > _ROOT_2, 0.5, 1.0)]
    stages.append({name: _series(y, exponent)})
    return tuple(stages)
