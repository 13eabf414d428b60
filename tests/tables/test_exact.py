"""Limb sums against fractions, in Narwhals and as SQL text."""

import math
import random
from fractions import Fraction

import numpy as np
import pytest

duckdb = pytest.importorskip("duckdb")
pa = pytest.importorskip("pyarrow")
nw = pytest.importorskip("narwhals")

from ronde.tables.exact import (  # noqa: E402
    array_limbs,
    array_sums,
    exact_sum,
    limbs,
    shift_of,
    sql_limbs,
)

_DRAW = random.Random(0)
COLUMNS = {
    "normal": [_DRAW.gauss(0, 1) for _ in range(1000)],
    "cauchy": [math.tan(_DRAW.random() * 3) for _ in range(999)],
    "huge": [1e300, -1e300, 1.0, -0.0, 1.7976931348623157e308],
    "subnormal": [5e-324, -1e-310, 3.0],
    "all subnormal": [-5e-324, 1e-310],
    "nothing": [None, None],
    "zero": [0.0, -0.0, None],
}


def oracle(values, shift):
    """Each value, cut off below 2**-shift, added without rounding."""
    cut = [
        (1 if x > 0 else -1) * math.floor(abs(Fraction(x)) * Fraction(2) ** shift)
        for x in values
        if x is not None
    ]
    return Fraction(sum(cut)) / Fraction(2) ** shift


@pytest.mark.parametrize("name", COLUMNS)
def test_sums_are_those_of_fractions(name):
    values = COLUMNS[name]
    shift = shift_of(max((abs(x) for x in values if x is not None), default=0.0))
    table = pa.table({"x": pa.array(values, pa.float64())})
    text = ", ".join(f"sum({each})" for each in sql_limbs("x", shift))
    with duckdb.connect() as here:
        here.register("t", table)
        by_sql = here.execute(f"select {text} from t").fetchall()[0]
    named = {f"l{i}": each.sum() for i, each in enumerate(limbs(nw.col("x"), shift))}
    by_arrow = nw.from_native(table).select(**named).rows()[0]
    wanted = oracle(values, shift)
    assert exact_sum(by_sql, shift) == exact_sum(by_arrow, shift) == wanted
    present = np.array([x for x in values if x is not None], np.float64)
    exponent = 94 - shift  # four limbs of 24 bits reach two bits below the three of 94
    sums = np.array([each.sum() for each in array_limbs(present, exponent, 24, 4)], np.int64)
    assert array_sums(sums, exponent - 96, 24) == float(oracle(values, shift + 2))


def test_a_sum_is_close_to_the_true_one():
    values = COLUMNS["cauchy"]
    largest = max(map(abs, values))
    shift = shift_of(largest)
    error = abs(oracle(values, shift) - sum(map(Fraction, values)))
    assert error < len(values) * Fraction(largest) / Fraction(2) ** 92
