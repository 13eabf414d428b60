"""What a user holds of features: join them with labels, publish them, and check the publication."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from ronde.tables.features import FeatureTable, read_feature_tables
from ronde.tables.online import Online, OnlineTable, publish_tables
from ronde.tables.point_in_time import EventSource, Joined, PointInTime, micros_of
from ronde.tables.sql_engines import ZONED, open_engine
from ronde.world import ArgumentError, RondeError


@dataclass
class Checked:
    """How an online store compares with the offline join.

    Attributes:
        entities: how many were compared.
        differences: table, entity, feature, online, and offline value; at most twenty.
        different: how many entities differ.
    """

    entities: int = 0
    different: int = 0
    differences: list[tuple[str, dict[str, Any], str, Any, Any]] = field(default_factory=list)


class FeatureStore:
    """The tables of a ``features.yaml``.

    Args:
        path: the file.

    Raises:
        ArgumentError: the file says what cannot be.

    Example:
        >>> store = FeatureStore("features.yaml")  # doctest: +SKIP
        >>> store.join("labels.parquet", at="label_time").table  # doctest: +SKIP
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.tables: tuple[FeatureTable, ...] = read_feature_tables(path)

    def join(
        self,
        labels: Any,
        at: str,
        out: str | Path | None = None,
        engine: str = "duckdb",
        master: str = "",
        memory: str = "",
    ) -> Joined:
        """Join the features with labels, each as it was known at the label's time.

        Args:
            labels: a path, a pattern, or an Arrow, pandas, Polars, or Spark table.
            at: the column of labels that holds their times.
            out: a Parquet file to write (a folder, with Spark); None: the result has the table.
            engine: ``duckdb`` or ``spark``.
            master: of Spark.
            memory: of DuckDB, as ``1.5GB``, before it spills to disk.

        Raises:
            ArgumentError: labels and tables do not fit together; says how.
        """
        with self._opened(engine, master, memory) as joins:
            return joins.join(labels, at, Path(out) if out else None)

    @contextlib.contextmanager
    def _opened(self, engine: str, master: str, memory: str) -> Iterator[PointInTime]:
        opened = open_engine(engine, master, memory)
        try:
            yield PointInTime(self.tables, opened)
        finally:
            opened.close()

    def publish(
        self,
        to: str | Path,
        at: str | None = None,
        engine: str = "duckdb",
        master: str = "",
        memory: str = "",
    ) -> dict[str, int]:
        """Write the newest features of every entity to a SQLite file, whole or not at all.

        Args:
            to: the file, which :class:`Online` reads.
            at: an ISO time as of which they are taken; None: now.

        Returns:
            How many entities each table has.
        """
        with self._opened(engine, master, memory) as joins:
            now = micros_of(at, joins.zone)
            about = [_about(joins, source, now) for source in joins.sources]
            return publish_tables(
                to, ((a, _rows(joins, s, now)) for a, s in zip(about, joins.sources, strict=True))
            )

    def check(
        self, online: str | Path, engine: str = "duckdb", master: str = "", memory: str = ""
    ) -> Checked:
        """Compare what a reader gets of every entity with the offline join as of the publication:
        the features are published once more, and the two publications compared.

        Raises:
            ArgumentError: it was published from another file.
            RondeError: it is published again during the comparison.
        """
        store, done = Online(online), Checked()
        published = store.tables()
        with self._opened(engine, master, memory) as joins:
            tables = []
            for source in joins.sources:
                about = published.get(source.spec.name)
                if about is None or about != _about(joins, source, about.as_of):
                    raise ArgumentError(
                        f"{online}: table '{source.spec.name}' was published from another "
                        f"{self.path.name}. Publish again."
                    )
                tables.append((about, _rows(joins, source, about.as_of)))
            with tempfile.TemporaryDirectory(prefix="ronde-check-") as folder:
                again = Path(folder, "again.db")
                done.entities = sum(publish_tables(again, tables).values())
                for about, _ in tables:
                    _compare(store, Online(again), about, done)
        if store.tables() != published:  # the two are of other times
            raise RondeError(f"{online} was published again during the comparison. Check again.")
        return done


def _about(joins: PointInTime, source: EventSource, now: int) -> OnlineTable:
    """How a table is kept online.

    Raises:
        ArgumentError: a column is of a type that is not kept.
    """
    spec, kinds = source.spec, source.kinds
    for name in spec.entity:
        if kinds[name] not in ("int", "text"):
            raise ArgumentError(
                f"table '{spec.name}': entity '{name}' is {source.given[name]}; online it is a "
                "whole number or text."
            )
    features = {name: kinds[column] for name, column in spec.columns.items()}
    for name, kind in features.items():
        if kind == "other":
            given = source.given[spec.columns[name]]
            raise ArgumentError(
                f"table '{spec.name}': '{name}' is {given}; online there are numbers, texts, "
                "booleans, dates, and times."
            )
    defaults: dict[str, Any] = {}
    for window in spec.windows:
        whole = window.kind == "count" or kinds.get(window.column) == "int"
        features[window.name] = "int" if whole and window.kind != "mean" else "float"
        defaults[window.name] = None if window.kind == "mean" else 0 if whole else 0.0
    return OnlineTable(
        name=spec.name,
        entity={name: kinds[name] for name in spec.entity},
        features=features,
        defaults=defaults,
        windows=bool(spec.windows),
        max_age=spec.max_age,
        as_of=now,
        zoned=joins.zone == ZONED,
    )


def _rows(joins: PointInTime, source: EventSource, now: int) -> Iterator[tuple[Any, ...]]:
    """One row an entity, in the order of OnlineTable.columns."""
    joins.entities_as_labels(source, now)
    engine, spec = joins.engine, source.spec
    engine.keep("ronde_published", joins.features(source, aged=False), f"table '{spec.name}'")
    if not spec.windows:
        joins.refuse_ties(source, "ronde_published")
    columns = [f"l.{engine.quote(name)}" for name in spec.entity]
    columns += [] if spec.windows else ["f.ts", "f.known"]
    for n, name in enumerate(spec.features):
        kind = "" if spec.windows else source.kinds[spec.columns[name]]
        given = "" if spec.windows else source.given[spec.columns[name]]
        value = f"f.f_{n}"
        if kind in ("naive", "zoned"):
            value = engine.micros(value, given, up=False)
        elif kind == "date":
            value = engine.days(value)
        elif kind == "float":
            value = f"CAST({value} AS DOUBLE)"
        elif kind == "text":
            value = f"CAST({value} AS {engine.text})"
        columns.append(value)
    sql = (
        f"SELECT {', '.join(columns)} FROM ronde_labels l JOIN ronde_published f "
        "ON f.ronde_id = l.ronde_id"
    )
    yield from engine.stream(sql, f"table '{spec.name}'")


def _compare(store: Online, offline: Online, about: OnlineTable, done: Checked) -> None:
    for entity in store.differing(offline, about.name):
        got, expected = (s.read(about.name, entity, about.as_of) for s in (store, offline))
        wrong = [name for name in expected if got[name] != expected[name]]
        done.different += bool(wrong)
        for name in islice(wrong, max(20 - len(done.differences), 0)):
            done.differences.append((about.name, entity, name, got[name], expected[name]))
