"""What a recipe learns of a table: one generator a column asks queries, a round of them at a time.

Every sum is one of integers. Quantiles are values of the table, found by counting.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Generator, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from ronde.tables.engines import Query, QueryEngine, Row, Values
from ronde.tables.exact import LIMBS, exact_sum, limbs, shift_of
from ronde.tables.logarithm import log1p, log1p_stages
from ronde.tables.steps import Steps, gives_number, level_order, read_as
from ronde.world import ArgumentError

if TYPE_CHECKING:
    import narwhals as nw

Asking = Generator[list[Query], list[list[Row]], Any]


def fit_steps(
    engine: QueryEngine, steps: Steps, target: str | None, key: str | None, where: str
) -> Row:
    """The state of each column, and the number of rows.

    Args:
        engine: over a table of the columns that the recipe reads.
        where: what errors begin with.

    Raises:
        ArgumentError: a step cannot be fitted on this table.
    """
    import narwhals as nw

    live: dict[str, Asking] = {"": _rows()}
    for name, do in steps.items():
        kind, place = read_as(do), f"{where}, column {name!r}"
        if kind == "number":
            live[name] = _number(name, do, place)
        elif kind == "level":
            live[name] = _level(name, do, target, key, place)
        else:
            live[name] = _presence(nw.col(name))
    state: Row = {}
    asked = {name: next(each) for name, each in live.items()}
    while asked:
        answers = iter(engine.answer([q for queries in asked.values() for q in queries]))
        later = {}
        for name, queries in asked.items():
            try:
                later[name] = live[name].send([next(answers) for _ in queries])
            except StopIteration as done:
                state[name] = done.value
            if not name and not state[name]["rows"]:
                raise ArgumentError(f"{where}: the table has no rows. A fit needs some.")
        asked = later
    rows = state.pop("")["rows"]
    for each in state.values():
        each["missing"] = rows - each.pop("present")
    return {"rows": rows, "columns": {name: state[name] for name in steps}}


def _rows() -> Asking:
    [rows] = yield [Query({"n": ("len", None)})]
    return {"rows": int(rows[0]["n"] or 0) if rows else 0}


def _present(value: nw.Expr) -> nw.Expr:
    import narwhals as nw

    return (~value.is_null()).cast(nw.Int64)


def _presence(value: nw.Expr) -> Asking:
    [[row]] = yield [Query({"n": ("sum", _present(value))})]
    return {"present": int(row["n"] or 0)}


def _sum_query(
    value: nw.Expr, shift: int, stages: Any = (), signed: bool = True, **more: Any
) -> Query:
    parts = {f"l{i}": ("sum", limb) for i, limb in enumerate(limbs(value, shift, signed))}
    return Query({**parts, **more.pop("values", {})}, stages=stages, **more)


def _sum_of(row: Row, shift: int) -> Fraction:
    return exact_sum([row[f"l{i}"] for i in range(LIMBS)], shift)


# -- numbers -------------------------------------------------------------------------------


def _number(name: str, do: Mapping[str, Any], place: str) -> Asking:
    import narwhals as nw

    x = nw.col(name)
    [[row]] = yield [Query({"n": ("sum", _present(x)), "lo": ("min", x), "hi": ("max", x)})]
    n = int(row["n"] or 0)
    low, high = (float(row[k] or 0.0) + 0.0 for k in ("lo", "hi"))
    state: Row = {"present": n, "min": low, "max": high}
    shares = [float(q) for q in do["clip"]] if isinstance(do.get("clip"), list) else []
    count = do.get("bins")
    cuts = [i / count for i in range(1, count)] if isinstance(count, int) else []
    median = [0.5] if do.get("impute") == "median" else []
    quantiles = yield from _quantiles(x, n, low, high, [*shares, *cuts, *median])
    if cuts:
        state["edges"] = sorted({quantiles[q] for q in cuts}) if n else []
    elif count is not None:
        state["edges"] = [float(edge) for edge in count]
    if "clip" in do:
        fixed = do["clip"] if isinstance(do["clip"], dict) else {}
        bounds = [quantiles[q] for q in shares] or [_or_none(fixed.get(k)) for k in ("min", "max")]
        low, high = (_clipped(v, *bounds) for v in (low, high))
        state["clip"] = bounds
    if not gives_number(do):
        return state
    if "log" in do and n and low <= -1.0:
        raise ArgumentError(
            f"{place}: log needs values above -1, and the smallest is {low:g}. Clip the column "
            "first: clip: {min: 0}."
        )
    fill = do.get("impute", "mean")
    if fill == "mean":
        shift = shift_of(max(abs(state["min"]), abs(state["max"])))
        [[row]] = yield [_sum_query(x, shift)]
        fill = float(_sum_of(row, shift) / n) if n else 0.0
    elif fill == "median":
        fill = quantiles[0.5]
    state["fill"] = None if fill is False else float(fill)
    if "scale" in do:
        yield from _scale(name, do, state, low, high, n)
    return state


def _or_none(bound: float | None) -> float | None:
    return None if bound is None else float(bound)


def _clipped(value: float, least: float | None, most: float | None) -> float:
    value = value if least is None else max(value, least)
    return value if most is None else min(value, most)


def _scale(name: str, do: Mapping[str, Any], state: Row, low: float, high: float, n: int) -> Asking:
    """Add ``center`` and ``width`` of the clipped, logged, present values."""
    import narwhals as nw

    value: nw.Expr = nw.col(name)
    stages: tuple[dict[str, nw.Expr], ...] = ()
    if "clip" in do:
        below, above = state["clip"]
        if below is not None:
            value = nw.when(value < below).then(nw.lit(below)).otherwise(value)
        if above is not None:
            value = nw.when(value > above).then(nw.lit(above)).otherwise(value)
    if "log" in do:
        stages = log1p_stages(value, f"{name}/log")
        value = nw.col(f"{name}/log")
        low, high = (float(v) for v in log1p(np.array([low, high])))
    if not n:
        state.update(center=0.0, width=1.0)
        return
    if do["scale"] == "minmax":
        # a span beyond the largest float would be infinite
        state.update(center=low, width=min(high - low, sys.float_info.max) or 1.0)
        return
    if do.get("impute", "mean") == "mean" and not {"clip", "log"} & {*do}:
        center = state["fill"]
    else:
        shift = shift_of(max(abs(low), abs(high)))
        [[row]] = yield [_sum_query(value, shift, stages)]
        center = float(_sum_of(row, shift) / n)
    # Quarters, so that no difference overflows; a power of two, so that no bit is lost.
    quarter = max(high * 0.25 - center * 0.25, center * 0.25 - low * 0.25)
    exponent = max(math.frexp(quarter)[1], -1000)
    apart = (value * 0.25 - center * 0.25) * 2.0**-exponent
    shift = shift_of(1.0)
    [[row]] = yield [_sum_query(apart * apart, shift, stages, signed=False)]
    spread = math.sqrt(float(_sum_of(row, shift) / n))
    width = math.ldexp(spread, exponent) * 4.0
    state.update(center=center, width=width if 0.0 < width < math.inf else 1.0)


# -- quantiles -----------------------------------------------------------------------------


def _quantiles(x: nw.Expr, n: int, low: float, high: float, shares: list[float]) -> Asking:
    """Each share's quantile, linear between two values of the table, as NumPy's."""
    if not n or not shares:
        return dict.fromkeys(shares, 0.0)
    places = {q: (n - 1) * q for q in shares}
    ranks = sorted({r for p in places.values() for r in (math.floor(p), math.ceil(p))})
    values = yield from _ranked(x, low, high, ranks)
    quantiles = {}
    for q, place in places.items():
        below, above = values[math.floor(place)], values[math.ceil(place)]
        part = place - math.floor(place)
        quantiles[q] = below * (1.0 - part) + above * part if below != above else below
    return quantiles


def _ranked(x: nw.Expr, low: float, high: float, ranks: Sequence[int], before: int = 0) -> Asking:
    """The values at these ranks, counted from 0, of which ``before`` lie below ``low``."""
    import narwhals as nw

    if low == high:
        return dict.fromkeys(ranks, low)
    # Each step is monotone under rounding, so that a bucket holds a run of the sorted values.
    span = high * 0.25 - low * 0.25
    # 4,096 buckets: two rounds tell sixteen million places apart
    factor = min(4096 / span, 1.7e308) if span else 1.7e308
    inside = (x >= low) & (x <= high)
    bucket = ((x * 0.25 - low * 0.25) * factor).floor().cast(nw.Int64)
    asked: Values = {"n": ("sum", _present(x)), "lo": ("min", x), "hi": ("max", x)}
    [rows] = yield [Query(asked, {"bucket": bucket}, inside)]
    values: dict[int, float] = {}
    fetched: list[tuple[list[int], int, Row]] = []
    for row in sorted(rows, key=lambda row: row["bucket"]):
        here = [r for r in ranks if before <= r < before + row["n"]]
        if here and row["lo"] == row["hi"]:
            values.update(dict.fromkeys(here, row["lo"] + 0.0))
        elif here and row["n"] > 100_000 and row["n"] < sum(r["n"] for r in rows):
            values.update((yield from _ranked(x, row["lo"], row["hi"], here, before)))
        elif here:
            fetched.append((here, before, row))
        before += row["n"]
    if fetched:
        one: Values = {"n": ("sum", _present(x))}
        parts = yield [
            Query(one, {"x": x}, (x >= row["lo"]) & (x <= row["hi"])) for _, _, row in fetched
        ]
        for (here, first, _), part in zip(fetched, parts, strict=True):
            last = first
            for each in sorted(part, key=lambda each: each["x"]):
                last += each["n"]
                for r in here:
                    if r < last and r not in values:
                        values[r] = each["x"] + 0.0
    return values


# -- levels --------------------------------------------------------------------------------


def _level(
    name: str, do: Mapping[str, Any], target: str | None, key: str | None, place: str
) -> Asking:
    import narwhals as nw

    from ronde.tables.arrow import MISSING_KEY, as_level

    mean = do.get("target_mean")
    mean = {"smooth": 20, "folds": 5, **(mean if isinstance(mean, dict) else {})} if mean else None
    query = Query({"n": ("len", None)}, {"level": nw.col(name)})
    shift = 0
    if mean:
        y = nw.col(str(target))
        asked = {"n": ("len", None), "y": ("sum", _present(y))}
        [[row]] = yield [Query({**asked, "lo": ("min", y), "hi": ("max", y)})]
        if row["n"] != row["y"]:
            raise ArgumentError(
                f"{place}: the target {target!r} is missing in {row['n'] - row['y']:,} of "
                f"{row['n']:,} rows. target_mean needs it in all."
            )
        shift = shift_of(max(abs(row["lo"]), abs(row["hi"])))
        folds = int(mean["folds"])
        fold = ((nw.col(str(key)) % folds) + folds) % folds
        query = _sum_query(
            y, shift, keys={"level": nw.col(name), "fold": fold}, values=dict(query.values)
        )
    [rows] = yield [query]
    if mean and any(row["fold"] is None for row in rows):
        raise ArgumentError(f"{place}: the key {key!r} {MISSING_KEY}")
    rows = _as_text(rows, as_level)
    levels = {row["level"] for row in rows} - {None}
    lower = {level.lower() for level in levels} <= {"true", "false"} and bool(levels)
    counts: dict[str, int] = {}
    missing = 0
    for row in rows:
        if row["level"] is None:
            missing += int(row["n"])
            continue
        row["level"] = row["level"].lower() if lower else row["level"]
        counts[row["level"]] = counts.get(row["level"], 0) + int(row["n"])
    total = sum(counts.values()) + missing
    kept = sorted((v for v, c in counts.items() if c >= do.get("rare", 1)), key=level_order)
    if "one_hot" in do and len(kept) > 1000:  # a column of names or numbers, by mistake
        raise ArgumentError(
            f"{place}: {len(counts):,} of {total - missing:,} values are distinct: one_hot would "
            f"make {len(kept):,} columns. Use codes: true, or rare: N to keep frequent values only."
        )
    state: Row = {
        "present": total - missing,
        "levels": [[v, counts[v]] for v in kept],
        "distinct": len(counts),
        "lower": lower,
    }
    if mean:
        state.update(_target_means(rows, kept, mean, shift))
    return state


def _as_text(rows: list[Row], as_level: Any) -> list[Row]:
    """Groups by number as groups by text: the formatting of floats is not the engine's."""
    import pyarrow as pa

    texts = as_level(pa.array([row["level"] for row in rows]), "").to_pylist() if rows else []
    return [{**row, "level": text} for row, text in zip(rows, texts, strict=True)]


def _target_means(rows: list[Row], kept: list[str], mean: Mapping[str, Any], shift: int) -> Row:
    """The target's mean by level: over all rows, and over the rows outside each fold."""
    folds, smooth = int(mean["folds"]), Fraction(mean["smooth"])
    count: dict[Any, int] = {}
    total: dict[Any, Fraction] = {}
    for row in rows:
        # ... stands for all levels, and for all folds
        for at in {(v, f) for v in (row["level"], ...) for f in (int(row["fold"]), ...)}:
            count[at] = count.get(at, 0) + int(row["n"])
            total[at] = total.get(at, Fraction(0)) + _sum_of(row, shift)

    def outside(level: Any, fold: Any) -> tuple[int, Fraction]:
        n, y = count.get((level, ...), 0), total.get((level, ...), Fraction(0))
        if fold is ...:
            return n, y
        return n - count.get((level, fold), 0), y - total.get((level, fold), Fraction(0))

    priors = {}
    for fold in (*range(folds), ...):
        n, y = outside(..., fold)
        priors[fold] = y / n if n else Fraction(0)

    def encoded(level: str, fold: Any) -> float:
        n, y = outside(level, fold)
        if not n + smooth:
            return float(priors[fold])
        return float((y + smooth * priors[fold]) / (n + smooth))

    return {
        "folds": folds,
        "prior": float(priors[...]),
        "means": [encoded(v, ...) for v in kept],
        "fold_priors": [float(priors[f]) for f in range(folds)],
        "fold_means": [[encoded(v, f) for f in range(folds)] for v in kept],
    }
