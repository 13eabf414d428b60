"""Counts of a table: one pass of DuckDB over Parquet or CSV files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ronde.clarify.counts import BiasTable, as_text
from ronde.clarify.metrics import flip_test
from ronde.tables.sql_engines import DuckDBSql, quoted
from ronde.tables.steps import near
from ronde.world import ArgumentError, RondeError

__all__ = ["count_table", "facet_of"]

_FLOATS = ("FLOAT", "DOUBLE")


def facet_of(text: str, columns: Sequence[str]) -> tuple[str, str, str | None]:
    """Name, SQL expression and sensitive value of a facet: a column, ``column=value``, or a
    condition.
    """
    if text in columns:
        return text, quoted(text), None
    name, equals, value = (part.strip() for part in text.partition("="))
    if equals and name in columns and not value.startswith("="):
        return name, quoted(name), value
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
    with contextlib.closing(_Table(os.fspath(path))) as table:
        for argument, name in (("label", label), ("prediction", prediction), ("group", group)):
            table.check(name, argument)
        for name in features:
            table.check(name, "features")
        chosen = table.positive(label, positive)
        labels, yes = {as_text(v) for v in table.values(label)}, {*map(as_text, chosen)}
        mine = "false"
        if prediction is not None:
            mine = table.prediction(prediction, threshold, labels, yes)
        counts = BiasTable(chosen, predicted=prediction is not None, grouped=group is not None)
        where = " AND ".join(table.present(c) for c in (label, prediction) if c)
        [(gone,)] = table.rows(f"SELECT count(*) FROM data WHERE NOT ({where})")
        sensitive: dict[str, list[str]] = {}
        by = quoted(group) if group else "NULL"
        for facet in facets:
            name, expression, value = facet_of(facet, table.columns)
            if value is not None:
                sensitive.setdefault(name, []).append(value)
            if name in counts.facets:
                continue  # a second value of the same column
            rows = table.rows(
                f"SELECT {expression}, {by}, {quoted(label)}, {mine}, count(*) FROM data "
                f"WHERE {where} GROUP BY ALL ORDER BY ALL"
            )
            if rows:
                counts.add(name, *zip(*rows, strict=True))
        if features and prediction:
            for facet in facets:
                name, expression, _ = facet_of(facet, table.columns)
                rows = table.flip_rows(expression, mine, features, where)
                _flip(counts, name, rows, sensitive)
    if not counts.cells:
        raise ArgumentError(f"{os.fspath(path)} has no row with a label.")
    return counts, sensitive, int(gone)


class _Table:
    """Parquet or CSV files as the view ``data``."""

    def __init__(self, path: str) -> None:
        self._path, self._engine = path, DuckDBSql()
        try:
            self.columns = list(self._engine.scan("data", path, path))
        except RondeError as error:
            raise ArgumentError(str(error)) from None
        self.close = self._engine.close

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """All rows of a query. What the engine refuses is a user's column or condition."""
        try:
            return self._engine.rows(sql, self._path)
        except RondeError as error:
            raise ArgumentError(str(error)) from None

    def check(self, name: str | None, argument: str) -> None:
        """Refuse a column that is not there."""
        if name is None or name in self.columns:
            return
        hint = near(name, self.columns)
        raise ArgumentError(f"--{argument} {name}: {self._path} has no such column{hint}")

    def present(self, column: str) -> str:
        """SQL of whether a column has a value. NaN and infinity are none."""
        kind = self.rows(f"SELECT typeof({quoted(column)}) FROM data LIMIT 1")
        is_float = bool(kind) and kind[0][0] in _FLOATS
        finite = f" AND {self._engine.is_finite(quoted(column))}" if is_float else ""
        return f"({quoted(column)} IS NOT NULL{finite})"

    def values(self, column: str) -> list[Any]:
        """A column's values, the commonest first."""
        rows = self.rows(
            # many more than labels can be; a column of numbers may have one for each row
            f"SELECT {quoted(column)}, count(*) FROM data GROUP BY 1 ORDER BY 2 DESC LIMIT 100000"
        )
        return [v for v, _ in rows if v is not None and v == v]

    def positive(self, label: str, asked: Sequence[Any]) -> list[Any]:
        """The labels that count as positive."""
        values = [as_text(v) for v in self.values(label)]
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

    def prediction(
        self, prediction: str, threshold: float | None, labels: set[str], asked: set[str]
    ) -> str:
        """SQL of whether a prediction is positive.

        Args:
            labels: all values of the label.
            asked: the positive ones.
        """
        if threshold is not None:
            return f"({quoted(prediction)} > {float(threshold)!r})"
        values = self.values(prediction)
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
        return f"(CAST({quoted(prediction)} AS VARCHAR) IN ({', '.join(literals)}))"

    def flip_rows(
        self, facet: str, mine: str, features: Sequence[str], where: str
    ) -> list[tuple[Any, ...]]:
        """Facet, prediction, and features of some rows, for the flip test."""
        columns = [f"CAST({quoted(c)} AS DOUBLE)" for c in features]
        wanted = ", ".join(columns)
        finite = " AND ".join(map(self._engine.is_finite, columns))
        return self.rows(
            f"SELECT {facet}, {mine}, {wanted} FROM data WHERE {where} AND {finite} "
            f"ORDER BY hash({wanted}) LIMIT 20000"  # the same rows again, on any number of threads
        )


def _few(values: Sequence[str]) -> str:
    return ", ".join(sorted(values)[:8]) + (" …" if len(values) > 8 else "")


def _flip(
    counts: BiasTable,
    facet: str,
    rows: Sequence[tuple[Any, ...]],
    sensitive: Mapping[str, Sequence[str]],
) -> None:
    """The flip test of each comparison of a facet."""
    values = np.array([as_text(row[0]) for row in rows])
    numbers = np.array([row[2:] for row in rows], dtype=np.float64)
    spread = numbers.std(axis=0)
    numbers = (numbers - numbers.mean(axis=0)) / np.where(spread > 0, spread, 1.0)
    predicted = np.array([bool(row[1]) for row in rows])
    for comparison in counts.compare(sensitive):
        if comparison.facet == facet:
            value = comparison.value
            counts.flips[facet, value] = flip_test(numbers, values == value, predicted)
