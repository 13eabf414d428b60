"""Sums of floats that have the same bits on any engine, in any order: sums of whole numbers.

Each value, times a power of two, is cut off to a whole number with its sign. The digits of that
number, its *limbs*, are added one place at a time, so that no sum rounds: three limbs of 32 bits as
int64 in an engine, limbs of fewer bits as float64 in NumPy, where a matrix product is exact too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import narwhals as nw

LIMBS = 3
_BITS = 32  # of a limb in an engine
_TOP_BITS = 30  # of the first limb; int64 holds the sum of 2^31 rows of any limb
_SMALLEST = -980  # exponent below which the scale would overflow; smaller values lose bits


def shift_of(largest: float) -> int:
    """The ``shift`` that fits a column of at most this magnitude into three limbs.

    A value counts as ``x * 2**shift``, rounded toward zero to an integer of 94 bits. So a sum of n
    values is off by less than ``n * largest * 2**-92``.

    Example:
        >>> shift_of(1000.0)
        84
    """
    return 2 * _BITS + _TOP_BITS - max(math.frexp(largest)[1], _SMALLEST)


def limbs(value: nw.Expr, shift: int, signed: bool = True) -> list[nw.Expr]:
    """Three int64 expressions whose sums :func:`exact_sum` makes one sum of; null stays null.

    Every operation on the way is exact in IEEE arithmetic, which is why engines agree.

    Args:
        value: of finite float64, or null.
        shift: from :func:`shift_of` of the column's largest magnitude.
        signed: whether a value may be negative.
    """
    import narwhals as nw

    rest, parts = (value.abs() if signed else value) * 2.0 ** (shift - 64), []
    for _ in range(LIMBS):
        whole = rest.floor()
        part = whole.cast(nw.Int64)
        negative = nw.when(value < 0).then(nw.lit(0, nw.Int64) - part).otherwise(part)
        parts.append(negative if signed else part)
        rest = (rest - whole) * 2.0**_BITS
    return parts


def sql_limbs(value: str, shift: int) -> list[str]:
    """:func:`limbs` as SQL text that DuckDB and Spark read alike.

    Args:
        value: an SQL expression of type DOUBLE, finite or null.
    """
    rest, parts = f"(abs({value}) * CAST('{2.0 ** (shift - 64)!r}' AS DOUBLE))", []
    for _ in range(LIMBS):
        parts.append(
            f"(CASE WHEN {value} < 0 THEN -CAST(floor({rest}) AS BIGINT) "
            f"ELSE CAST(floor({rest}) AS BIGINT) END)"
        )
        rest = f"(({rest} - floor({rest})) * CAST('4294967296' AS DOUBLE))"
    return parts


def array_limbs(
    x: npt.NDArray[np.float64], exponents: Any, bits: int, count: int
) -> list[npt.NDArray[np.float64]]:
    """So many limbs of an array, as float64.

    Sums of whole numbers below 2^53 are exact in float64, in any order: a matrix product as well.

    Args:
        exponents: of each column: no value reaches ``2**exponent``.
        bits: of a limb.
        count: ``x`` is cut off below ``2**(exponent - bits * count)``.
    """
    rest, parts = np.ldexp(x, bits - exponents), []
    for _ in range(count):
        parts.append(np.trunc(rest))
        rest = (rest - parts[-1]) * 2.0**bits
    return parts


def _joined(sums: Sequence[Any], bits: int) -> Any:
    """Sums of limbs as one whole number, in the integers of Python, which have any size."""
    whole = sums[0]
    for each in sums[1:]:
        whole = (whole << bits) + each
    return whole


def exact_sum(sums: Sequence[int | None], shift: int) -> Fraction:
    """The exact sum of a column, of the sums of its limbs; ``float()`` of it rounds once.

    Example:
        >>> float(exact_sum([3, 0, 0], shift_of(1.0))) == 3 * 2.0**-29
        True
    """
    return Fraction(_joined([int(each or 0) for each in sums], _BITS)) / Fraction(2) ** shift


def array_sums(sums: npt.NDArray[np.int64], exponents: Any, bits: int) -> npt.NDArray[np.float64]:
    """Sums of :func:`array_limbs`, the limbs first, as floats that are rounded once.

    Args:
        exponents: of the last limb's unit.
    """
    whole = _joined(list(sums.astype(object)), bits)
    return np.asarray(np.ldexp(np.asarray(whole, np.float64), exponents))
