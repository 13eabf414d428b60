"""Counts of a table: one pass of DuckDB over Parquet or CSV files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ronde.clarify.counts import BiasTable, as_text
from ronde.clarify.metrics import flip_test
from ronde.world import ArgumentError
from ronde.world.paths import need

__all__ = ["count_table", "facet_of"]

_MOST_FLIP_ROWS = 20_000
_FLOATS = ("FLOAT", "DOUBLE")
_MOST_LABELS = 100_000


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _source(path: str | os.PathLike[str]) -> str:
    text = "'" + os.fspath(path).replace("'", "''") + "'"
    return f"read_csv({text})" if ".csv" in text.lower() else f"read_parquet({text})"


def facet_of(text: str, columns: Sequence[str]) -> tuple[str, str, str | None]:
    """Name, SQL expression and sensitive value of a facet: a column, ``column=value``, or a
    condition.
    """
    if text in columns:
        return text, _quoted(text), None
    name, equals, value = (part.strip() for part in text.partition("="))
    if equals and name in columns and not value.startswith("="):
        return name, _quoted(name), value
    return text, f"({text})", None


def count_table(
    path: str | os.PathLike[str],
    *,
    label: str,
    facets: Sequence[str],
    positive: Sequence[Any] = (),
    prediction: str | None = None,
    threshold: float | None = None,
    group: str | None = None,
    features: Sequence[str] = (),
) -> tuple[BiasTable, dict[str, list[str]], int]:
    """Count a table by facet, group, label and prediction.

    Args:
        path: of Parquet or CSV files; ``*`` is allowed.
        label: column of the true outcome.
        facets: columns, ``column=value``, or conditions such as ``age >= 40``.
        positive: labels that count as positive; 1 or true if the label has no others than 0 and 1.
        prediction: column of predicted labels, or of scores, with ``threshold``.
        threshold: a score above it is positive.
        group: column for conditional metrics.
        features: columns of numbers, for the flip test.

    Returns:
        tuple: counts, facet -> values asked for, and how many rows had no label or prediction.

    Raises:
        ArgumentError: a column is missing, or what is positive is not clear.
    """
    need("duckdb", "tables", "ronde clarify")
    import duckdb

    source = _source(path)
    db = duckdb.connect()
    try:
        columns = [row[0] for row in db.execute(f"DESCRIBE SELECT * FROM {source}").fetchall()]
        for argument, name in (("label", label), ("prediction", prediction), ("group", group)):
            _check_column(name, argument, columns, path)
        for name in features:
            _check_column(name, "features", columns, path)
        chosen = _positive(db, source, label, positive)
        labels, yes = {as_text(v) for v in _values(db, source, label)}, {*map(as_text, chosen)}
        mine = "false"
        if prediction is not None:
            mine = _prediction(db, source, prediction, threshold, labels, yes)
        counts = BiasTable(chosen, predicted=prediction is not None, grouped=group is not None)
        whole = [_present(db, source, c) for c in (label, prediction) if c]
        where = " AND ".join(whole)
        gone = db.execute(f"SELECT count(*) FROM {source} WHERE NOT ({where})").fetchone()
        sensitive: dict[str, list[str]] = {}
        by = _quoted(group) if group else "NULL"
        for facet in facets:
            name, expression, value = facet_of(facet, columns)
            if value is not None:
                sensitive.setdefault(name, []).append(value)
            if name in counts.facets:
                continue  # a second value of the same column
            rows = db.execute(
                f"SELECT {expression}, {by}, {_quoted(label)}, {mine}, count(*) FROM {source} "
                f"WHERE {where} GROUP BY ALL ORDER BY ALL"
            ).fetchall()
            if rows:
                counts.add(name, *zip(*rows, strict=True))
        if features and prediction:
            _flip(db, source, where, mine, facets, columns, features, counts, sensitive)
    except duckdb.Error as error:
        text = str(error).splitlines()[0]
        raise ArgumentError(f"{os.fspath(path)}: {text}") from None
    finally:
        db.close()
    if not counts.cells:
        raise ArgumentError(f"{os.fspath(path)} has no row with a label.")
    return counts, sensitive, int(gone[0])


def _present(db: Any, source: str, column: str) -> str:
    """SQL of whether a column has a value. NaN and infinity are none; isnan() is wrong where a
    Parquet file's statistics are (DuckDB 2.0), isfinite() is not.
    """
    kind = db.execute(f"SELECT typeof({_quoted(column)}) FROM {source} LIMIT 1").fetchone()
    finite = f" AND isfinite({_quoted(column)})" if kind and kind[0] in _FLOATS else ""
    return f"({_quoted(column)} IS NOT NULL{finite})"


def _check_column(
    name: str | None, argument: str, columns: Sequence[str], path: str | os.PathLike[str]
) -> None:
    import difflib

    if name is None or name in columns:
        return
    close = difflib.get_close_matches(name, columns, 1)
    hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(columns[:8])}."
    raise ArgumentError(f"--{argument} {name}: {os.fspath(path)} has no such column; {hint}")


def _values(db: Any, source: str, column: str) -> list[Any]:
    """A column's values, the commonest first."""
    name = _quoted(column)
    rows = db.execute(
        f"SELECT {name}, count(*) FROM {source} GROUP BY 1 ORDER BY 2 DESC LIMIT {_MOST_LABELS}"
    ).fetchall()
    return [v for v, _ in rows if v is not None and v == v]


def _few(values: Sequence[str]) -> str:
    return ", ".join(sorted(values)[:8]) + (" …" if len(values) > 8 else "")


def _positive(db: Any, source: str, label: str, asked: Sequence[Any]) -> list[Any]:
    values = [as_text(v) for v in _values(db, source, label)]
    if asked:
        for value in asked:
            if as_text(value) not in values:
                raise ArgumentError(
                    f"--positive {value}: {label} has no such value, it has {_few(values)}."
                )
        return list(asked)
    if set(values) <= {"0", "1"} or set(values) <= {"true", "false"}:
        return ["1", "true"]
    raise ArgumentError(
        f"--positive is missing: {label} has the values {_few(values)}; say which are positive."
    )


def _prediction(
    db: Any,
    source: str,
    prediction: str,
    threshold: float | None,
    labels: set[str],
    asked: set[str],
) -> str:
    """SQL of whether a prediction is positive.

    Args:
        labels: all values of the label.
        asked: the positive ones.
    """
    if threshold is not None:
        return f"({_quoted(prediction)} > {float(threshold)!r})"
    values = _values(db, source, prediction)
    if any(isinstance(v, float) and not v.is_integer() for v in values):
        raise ArgumentError(
            f"--threshold is missing: {prediction} has scores such as "
            f"{next(v for v in values if not float(v).is_integer()):g}."
        )
    texts = {as_text(v) for v in values}
    alike = labels | ({"0", "1", "true", "false"} if asked <= {"1", "true"} else set())
    if texts - alike:
        raise ArgumentError(
            f"{prediction} has the values {_few([*texts])}, and the label {_few([*labels])}: "
            "predictions are labels, or scores with --threshold."
        )
    positive = [v for v in values if as_text(v) in asked]
    if not positive:
        return "false"
    literals = [
        "'" + str(as_text(v) if isinstance(v, bool) else v).replace("'", "''") + "'"
        for v in positive
    ]
    return f"(CAST({_quoted(prediction)} AS VARCHAR) IN ({', '.join(literals)}))"


def _flip(
    db: Any,
    source: str,
    where: str,
    mine: str,
    facets: Sequence[str],
    columns: Sequence[str],
    features: Sequence[str],
    counts: BiasTable,
    sensitive: Mapping[str, Sequence[str]],
) -> None:
    """The flip test of each comparison, on at most 20,000 rows."""
    columns_sql = [f"CAST({_quoted(c)} AS DOUBLE)" for c in features]
    wanted = ", ".join(columns_sql)
    finite = " AND ".join(f"isfinite({c})" for c in columns_sql)
    for facet in facets:
        name, expression, _ = facet_of(facet, columns)
        rows = db.execute(
            f"SELECT {expression}, {mine}, {wanted} FROM {source} WHERE {where} AND {finite} "
            f"ORDER BY hash({wanted}) LIMIT {_MOST_FLIP_ROWS}"
        ).fetchall()
        values = np.array([as_text(row[0]) for row in rows])
        numbers = np.array([row[2:] for row in rows], dtype=np.float64)
        spread = numbers.std(axis=0)
        numbers = (numbers - numbers.mean(axis=0)) / np.where(spread > 0, spread, 1.0)
        predicted = np.array([bool(row[1]) for row in rows])
        for comparison in counts.compare(sensitive):
            if comparison.facet == name:
                value = comparison.value
                counts.flips[name, value] = flip_test(numbers, values == value, predicted)
