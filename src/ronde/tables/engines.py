"""Where a fit is computed: DuckDB, PyArrow batch by batch, or Spark, all through Narwhals.

An engine answers queries of integer sums, least and largest values, and counts of groups. Nothing
else may depend on the engine: no float is added in one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ronde.tables.arrow import as_kind
from ronde.tables.sql_engines import Dialect, DuckDBSql, SparkSql
from ronde.world import RondeError

if TYPE_CHECKING:
    import narwhals as nw

Row = dict[str, Any]
Kinds = Mapping[str, str]
Values = Mapping[str, "tuple[str, nw.Expr | None]"]


class Query(NamedTuple):
    """What is asked of a table.

    Attributes:
        values: by the result's name: ``sum``, ``min``, or ``max`` and of which expression; or
            ``len`` and None.
        keys: what rows are grouped by; nothing gives one row.
        where: which rows count; all by default.
        stages: columns added first, in this order.
    """

    values: Values
    keys: dict[str, nw.Expr] = {}  # noqa: RUF012
    where: nw.Expr | None = None
    stages: tuple[dict[str, nw.Expr], ...] = ()


class QueryEngine(Protocol):
    """Answers queries about one table."""

    name: str

    def answer(self, queries: Sequence[Query]) -> list[list[Row]]:
        """The rows of each query, in any order."""


def _frame(native: Any, query: Query) -> Any:
    """The query as a Narwhals frame, not computed yet where the engine is lazy."""
    import narwhals as nw

    frame: Any = nw.from_native(native)
    for stage in query.stages:
        frame = frame.with_columns(**stage)
    if query.where is not None:
        frame = frame.filter(query.where)
    if not query.keys:
        return frame.select(**{n: _reduced(*value) for n, value in query.values.items()})
    parts = {n: e for n, (_, e) in query.values.items() if e is not None}
    return (
        frame.select(**query.keys, **parts)
        .group_by(list(query.keys))
        .agg(**{n: _reduced(how, nw.col(n)) for n, (how, _) in query.values.items()})
    )


def _reduced(how: str, value: Any) -> Any:
    import narwhals as nw

    return nw.len() if how == "len" else getattr(value, how)()


def _merged(queries: Sequence[Query]) -> Query:
    """Queries without keys as one."""
    stages: list[dict[str, nw.Expr]] = []
    for query in queries:
        for i, stage in enumerate(query.stages):
            stages += [{}] * (i == len(stages))
            stages[i] = {**stages[i], **stage}
    values = {f"{i}/{n}": v for i, q in enumerate(queries) for n, v in q.values.items()}
    return Query(values, stages=tuple(stages))


def answer_by(compute: Callable[[Query], list[Row]], queries: Sequence[Query]) -> list[list[Row]]:
    """Answer all queries without keys in one scan, and each of the others in one of its own."""
    plain = [q for q in queries if not q.keys]
    totals = compute(_merged(plain))[0] if plain else {}
    answers: list[list[Row]] = []
    for query in queries:
        if query.keys:
            answers.append(compute(query))
        else:
            i = next(i for i, q in enumerate(plain) if q is query)
            answers.append([{n: totals[f"{i}/{n}"] for n in query.values}])
    return answers


class Lazy:
    """DuckDB or Spark: a table of the columns that a recipe reads, as the engine's own frame."""

    def __init__(self, name: str, native: Any, close: Callable[[], None] | None = None) -> None:
        self.name = name
        self.close = close or (lambda: None)
        self._native = native

    def answer(self, queries: Sequence[Query]) -> list[list[Row]]:
        """The rows of each query."""

        def compute(query: Query) -> list[Row]:
            with _in_a_sentence(self.name):
                rows: list[Row] = _frame(self._native, query).collect("pyarrow").rows(named=True)
            return rows

        return answer_by(compute, queries)


class Arrow:
    """Record batches, read again for each round of queries; partial results are merged here."""

    def __init__(self, batches: Callable[[], Iterable[Any]]) -> None:
        self.name = "PyArrow"
        self.close = lambda: None
        self._batches = batches

    def answer(self, queries: Sequence[Query]) -> list[list[Row]]:
        """The rows of each query, in one pass over the batches."""
        import pyarrow as pa

        merged: list[dict[tuple[Any, ...], Row]] = [{} for _ in queries]
        for batch in self._batches():
            table = pa.Table.from_batches([batch])
            parts = answer_by(lambda q: _frame(table, q).rows(named=True), queries)  # noqa: B023
            for query, rows, into in zip(queries, parts, merged, strict=True):
                for row in rows:
                    key = tuple(row[k] for k in query.keys)
                    into[key] = _joined(into.get(key), row, query)
        return [list(each.values()) for each in merged]


_JOIN: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda a, b: a + b,
    "len": lambda a, b: a + b,
    "min": min,
    "max": max,
}


def _joined(known: Row | None, row: Row, query: Query) -> Row:
    if known is None:
        return row
    for name, (how, _) in query.values.items():
        a, b = known[name], row[name]
        known[name] = b if a is None else a if b is None else _JOIN[how](a, b)
    return known


def canonical(batch: Any, kinds: Kinds, place: str) -> Any:
    """A record batch as a fit reads it: numbers, levels, keys, and whether others are there."""
    import pyarrow as pa
    import pyarrow.compute as compute

    columns = []
    for name, kind in kinds.items():
        column = as_kind(batch.column(name), kind, f"{place}: the column {name!r}")
        if kind in ("time", "text"):
            column = compute.if_else(column.is_valid(), 1.0, pa.scalar(None, pa.float64()))
        columns.append(column)
    return pa.record_batch(columns, names=list(kinds))


def duckdb_engine(
    files: Sequence[Path],
    batches: Callable[[], Iterator[Any]] | None,
    kinds: Kinds,
    fractional: Iterable[str],
    threads: int | None,
) -> Lazy:
    """DuckDB over Parquet files, or over canonical batches, which are kept as Parquet meanwhile."""
    opened = DuckDBSql(threads=threads)
    name = f"DuckDB on {opened.threads} thread{'s' * (opened.threads > 1)}"
    opened.run("SET preserve_insertion_order = false", name)
    if batches is not None:
        files = [opened.folder / "canonical.parquet"]
        _write_parquet(files[0], batches(), kinds)
        columns = [opened.quote(name) for name in kinds]
    else:
        columns = _canonical_columns(DuckDBSql, kinds, fractional)
    try:
        opened.view("ronde_table", [str(file) for file in files], name)
        with _in_a_sentence(name):
            table = opened.connection.sql(f"SELECT {', '.join(columns)} FROM ronde_table")
    except RondeError:
        opened.close()
        raise
    return Lazy(name, table, opened.close)


@contextlib.contextmanager
def _in_a_sentence(engine: str) -> Iterator[None]:
    """An error of DuckDB as one of Ronde."""
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith(("duckdb", "_duckdb")):
            raise
        raise RondeError(f"{engine}: {str(error).splitlines()[0]}") from None


def _write_parquet(file: Path, batches: Iterator[Any], kinds: Kinds) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    known = {"key": pa.int64(), "level": pa.string()}
    schema = pa.schema([(name, known.get(kind, pa.float64())) for name, kind in kinds.items()])
    with pq.ParquetWriter(file, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


def _canonical_columns(dialect: Dialect, kinds: Kinds, fractional: Iterable[str]) -> list[str]:
    """:func:`canonical` as SQL."""
    fractional, columns = set(fractional), []
    for name, kind in kinds.items():
        column = dialect.quote(name)
        double = f"CAST({column} AS DOUBLE)"
        number = f"CASE WHEN {dialect.is_finite(double)} THEN {double} END"
        if kind == "number":
            made = number
        elif kind == "key":
            made = f"TRY_CAST({column} AS BIGINT)"
        elif kind == "level" and name in fractional:  # -0.0 is 0
            made = f"CASE WHEN {double} = 0 THEN CAST(0 AS DOUBLE) ELSE {number} END"
        elif kind == "level":
            made = f"CAST({column} AS {dialect.text})"
        else:
            made = f"CASE WHEN {column} IS NOT NULL THEN CAST(1 AS DOUBLE) END"
        columns.append(f"{made} AS {column}")
    return columns


def spark_engine(frame: Any, kinds: Kinds, fractional: Iterable[str]) -> Lazy:
    """Spark over a frame of its own."""
    table = frame.selectExpr(*_canonical_columns(SparkSql, kinds, fractional))
    return Lazy(f"Spark on {frame.sparkSession.sparkContext.master}", table)
