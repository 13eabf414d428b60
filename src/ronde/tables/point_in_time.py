"""Point-in-time joins: what was known about an entity at the time of a label, and nothing later.

An event is known at ``max(event time, arrival time)``. In the order in which the events of an
entity become known, only those that are newer than all before can ever be the newest. What remains
is a step function of time, which one ASOF join reads. A window is a running sum: an event adds
where it becomes known and subtracts where it leaves.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from ronde.tables.exact import shift_of, sql_limbs
from ronde.tables.features import FeatureTable, Window
from ronde.tables.online import micros_since_epoch
from ronde.tables.sql_engines import NAIVE, ZONED, SqlEngine
from ronde.tables.steps import near
from ronde.world import ArgumentError

_MICROS = 1_000_000
_TIMES = (NAIVE, ZONED, "date")
_LABELS = "ronde_labels"


@dataclass
class TableFacts:
    """What a join says about one table.

    Attributes:
        events: rows of its files.
        unusable: of these, rows without an entity or a time.
        without_value: labels that no known event is there for.
        windows: whether its features are aggregates; those have a value for every label.
        future: labels that would have seen the future by event time alone; None: no arrival time.
    """

    name: str
    events: int
    unusable: int
    without_value: int = 0
    windows: bool = False
    future: int | None = None


@dataclass
class Joined:
    """What a join did.

    Attributes:
        table: the Arrow table, or None where a file was written.
    """

    labels: int = 0
    seconds: float = 0.0
    facts: list[TableFacts] = field(default_factory=list)
    table: Any = None


@dataclass
class EventSource:
    """A scanned table: its view, its types, and what one look at its rows says."""

    spec: FeatureTable
    view: str
    given: dict[str, str]
    kinds: dict[str, str]
    facts: TableFacts
    shifts: dict[str, int]


class PointInTime:
    """Joins of feature tables with labels on one engine.

    Raises:
        ArgumentError: a file, column, or type is not as the tables say.
    """

    def __init__(self, tables: Sequence[FeatureTable], engine: SqlEngine) -> None:
        self.engine = engine
        self.sources = [self._source(n, table) for n, table in enumerate(tables)]
        zones = {s.spec.name: self._zone(s) for s in self.sources}
        if len(set(zones.values())) > 1:
            naive = next(name for name, zone in zones.items() if zone == NAIVE)
            zoned = next(name for name, zone in zones.items() if zone == ZONED)
            raise ArgumentError(
                f"Times of '{zoned}' have a time zone, those of '{naive}' have none. Give all a "
                "time zone, or none."
            )
        self.zone = next(iter(zones.values()))

    # what is there

    def _source(self, number: int, spec: FeatureTable) -> EventSource:
        owner, view = f"table '{spec.name}'", f"ronde_events_{number}"
        given = self.engine.scan(view, spec.path, owner)
        for name in spec.used:
            if name not in given:
                raise ArgumentError(
                    f"{owner}: {spec.path} has no column '{name}'{near(name, given)}"
                )
        kinds = {name: self.engine.kind(word) for name, word in given.items()}
        for name in filter(None, (spec.event_time, spec.arrival_time)):
            if kinds[name] not in _TIMES:
                raise ArgumentError(
                    f"{owner}: '{name}' is {given[name]}; expected a timestamp or a date."
                )
        for window in spec.windows:
            if window.column and kinds[window.column] not in ("int", "float"):
                raise ArgumentError(
                    f"{owner}: {window.name} adds up '{window.column}', which is "
                    f"{given[window.column]}; expected numbers."
                )
        q = self.engine.quote
        needed = " AND ".join(
            f"{q(name)} IS NOT NULL"
            for name in filter(None, (*spec.entity, spec.event_time, spec.arrival_time))
        )
        floats = sorted({w.column for w in spec.windows if kinds.get(w.column) == "float"})
        sizes = [f"abs({self._finite(q(name))})" for name in floats]
        extremes = [x for s in sizes for x in (f"max({s})", f"min(nullif({s}, 0))")]
        counts = ["count(*)", f"count(CASE WHEN {needed} THEN 1 END)", *extremes]
        sql = f"SELECT {', '.join(counts)} FROM {view}"
        [(rows, usable, *seen)] = self.engine.rows(sql, owner)
        shifts = {
            name: _shift(owner, name, largest or 0.0, smallest or 0.0)
            for name, largest, smallest in zip(floats, seen[::2], seen[1::2], strict=True)
        }
        facts = TableFacts(spec.name, rows, rows - usable, windows=bool(spec.windows))
        return EventSource(spec, view, given, kinds, facts, shifts)

    def _zone(self, source: EventSource) -> str:
        spec = source.spec
        zones = {
            name: ZONED if source.kinds[name] == ZONED else NAIVE
            for name in filter(None, (spec.event_time, spec.arrival_time))
        }
        if len(set(zones.values())) > 1:
            raise ArgumentError(
                f"table '{spec.name}': of '{spec.event_time}' and '{spec.arrival_time}' only one "
                "has a time zone. Give both a time zone, or none."
            )
        return zones[spec.event_time]

    def _finite(self, column: str) -> str:
        number = f"CAST({column} AS DOUBLE)"
        return f"CASE WHEN {self.engine.is_finite(number)} THEN {number} END"

    # labels

    def read_labels(self, labels: Any, at: str) -> list[str]:
        """Take labels in: a path or a frame; returns its columns.

        Raises:
            ArgumentError: it lacks a column, or a type differs from the events'.
        """
        owner = f"labels {labels}" if isinstance(labels, str | Path) else "labels"
        given = self.engine.scan("ronde_given", labels, owner)
        kinds = {name: self.engine.kind(word) for name, word in given.items()}
        for name in dict.fromkeys([at, *(e for s in self.sources for e in s.spec.entity)]):
            if name not in given:
                what = "time of the labels" if name == at else "entity"
                raise ArgumentError(
                    f"{owner}: there is no column '{name}' ({what}){near(name, given)}"
                )
        if kinds[at] not in _TIMES:
            raise ArgumentError(f"{owner}: '{at}' is {given[at]}; expected a timestamp or a date.")
        if (kinds[at] == ZONED) != (self.zone == ZONED):
            has, other = ("a", "no") if kinds[at] == ZONED else ("no", "a")
            raise ArgumentError(
                f"{owner}: '{at}' has {has} time zone, '{self.sources[0].spec.name}' has {other} "
                "time zone. Give all a time zone, or none."
            )
        if own := {"ronde_id", "ronde_t"} & {name.lower() for name in given}:
            raise ArgumentError(f"{owner}: '{min(own)}' is a name of Ronde's own. Rename it.")
        for source in self.sources:
            for name in source.spec.entity:
                if kinds[name] != source.kinds[name]:
                    raise ArgumentError(
                        f"{owner}: '{name}' is {given[name]}; in '{source.spec.name}' it is "
                        f"{source.given[name]}."
                    )
            for name in source.spec.features:
                if name.lower() in (column.lower() for column in given):
                    raise ArgumentError(
                        f"{owner}: there is a column '{name}' already, which is a feature of "
                        f"'{source.spec.name}'. Rename one, as columns: {{new_name: column}}."
                    )
        micros = self.engine.micros(self.engine.quote(at), given[at], up=False)
        self.engine.keep(
            _LABELS,
            f"SELECT {self.engine.numbered} AS ronde_id, {micros} AS ronde_t, * FROM ronde_given",
            owner,
        )
        return list(given)

    def entities_as_labels(self, source: EventSource, now: int) -> None:
        """Take each entity of a table as a label at the microsecond ``now``."""
        names = ", ".join(map(self.engine.quote, source.spec.entity))
        needed = " AND ".join(f"{self.engine.quote(e)} IS NOT NULL" for e in source.spec.entity)
        self.engine.keep(
            _LABELS,
            f"SELECT {self.engine.numbered} AS ronde_id, CAST({now} AS BIGINT) AS ronde_t, {names} "
            f"FROM (SELECT DISTINCT {names} FROM {source.view} WHERE {needed}) AS e",
            f"table '{source.spec.name}'",
        )

    # joins

    def join(self, labels: Any, at: str, out: Path | None = None) -> Joined:
        """Join all tables with labels, into a file or an Arrow table, in the labels' order."""
        began = time.monotonic()
        columns = self.read_labels(labels, at)
        done = Joined(facts=[source.facts for source in self.sources])
        q, names, joins = self.engine.quote, [f"l.{self.engine.quote(c)}" for c in columns], []
        for n, source in enumerate(self.sources):
            owner = f"table '{source.spec.name}'"
            self.engine.keep(f"ronde_joined_{n}", self.features(source), owner)
            self._judge(source, f"ronde_joined_{n}")
            joins.append(f"LEFT JOIN ronde_joined_{n} f{n} ON f{n}.ronde_id = l.ronde_id")
            names += [f"f{n}.f_{k} AS {q(f)}" for k, f in enumerate(source.spec.features)]
        sql = f"SELECT {', '.join(names)} FROM {_LABELS} l {' '.join(joins)} ORDER BY l.ronde_id"
        if out is None:
            done.table = self.engine.table(sql, "join")
        else:
            self.engine.write(sql, out, f"{out}")
        [(done.labels,)] = self.engine.rows(f"SELECT count(*) FROM {_LABELS}", "labels")
        done.seconds = time.monotonic() - began
        return done

    def _judge(self, source: EventSource, joined: str) -> None:
        """Count labels without a value and labels that would see the future; refuse ties."""
        owner, facts = f"table '{source.spec.name}'", source.facts
        early = f"SELECT count(CASE WHEN early > 0 THEN 1 END) FROM {joined}"
        if not source.spec.windows:
            self.refuse_ties(source, joined)
            sql = f"SELECT count(CASE WHEN known IS NULL OR stale THEN 1 END) FROM {joined}"
            [(facts.without_value,)] = self.engine.rows(sql, owner)
            early = self._future(source)
        if source.spec.arrival_time is not None:
            [(facts.future,)] = self.engine.rows(early, owner)

    def refuse_ties(self, source: EventSource, joined: str) -> None:
        """Refuse what :meth:`features` found where nothing says which of two rows is newer.

        Raises:
            ArgumentError: rows of one entity have equal times and different values.
        """
        owner = f"table '{source.spec.name}'"
        [(ties,)] = self.engine.rows(
            f"SELECT count(CASE WHEN clash THEN 1 END) FROM {joined}", owner
        )
        if ties:
            raise ArgumentError(
                f"{owner}: {ties:,} times the newest rows of an entity have equal times and "
                "different values: which one wins is undefined. Add order_by: with a column that "
                "decides."
            )

    def features(self, source: EventSource, aged: bool = True) -> str:
        """A query: ronde_id and the features f_0, f_1 … of each label.

        Args:
            aged: whether a value older than max_age is left out.
        """
        return self._window_sums(source) if source.spec.windows else self._newest(source, aged)

    def _keys(self, source: EventSource) -> list[str]:
        return [f"e{n}" for n in range(len(source.spec.entity))]

    def _events(self, source: EventSource, columns: Sequence[str]) -> str:
        """The usable rows: entity e0 …, times in microseconds, and what else is asked for."""
        spec, q = source.spec, self.engine.quote
        event = self.engine.micros(q(spec.event_time), source.given[spec.event_time], up=True)
        late = spec.arrival_time
        arrival = self.engine.micros(q(late), source.given[late], up=True) if late else event
        if late and source.kinds[late] == "date":  # it may have arrived at any hour of that day
            arrival = f"({arrival} + {86_400 * _MICROS})"
        entity = [f"{q(name)} AS e{n}" for n, name in enumerate(spec.entity)]
        needed = [f"e{n} IS NOT NULL" for n in range(len(entity))]
        times = [f"{event} AS ts", f"{arrival} AS arr", f"greatest({event}, {arrival}) AS known"]
        return (
            f"SELECT * FROM (SELECT {', '.join([*entity, *times, *columns])} FROM {source.view}) x "
            f"WHERE {' AND '.join([*needed, 'ts IS NOT NULL', 'arr IS NOT NULL'])}"
        )

    def _labels(self, source: EventSource) -> str:
        entity = [f"{self.engine.quote(name)} AS e{n}" for n, name in enumerate(source.spec.entity)]
        return f"SELECT ronde_id, ronde_t, {', '.join(entity)} FROM {_LABELS}"

    def _asof(self, source: EventSource, right: str, when: str, columns: Sequence[str]) -> str:
        """For each label the last row of ``right`` whose ``when`` is not later: ronde_id, ronde_t,
        and ``columns``. At most one row of an entity may have the same time.
        """
        keys = self._keys(source)
        # Spark has no ASOF join: events and labels are one sorted list, and a label takes the last
        # event before it.
        if self.engine.asof:
            named = ", ".join(f"r.{column}" for column in columns)
            on = " AND ".join(f"l.{key} = r.{key}" for key in keys)
            return (
                f"SELECT l.ronde_id, l.ronde_t, {named} FROM ({self._labels(source)}) l "
                f"ASOF LEFT JOIN {right} r ON {on} AND l.ronde_t >= r.{when}"
            )
        entity, pairs = ", ".join(keys), [f"'{column}', {column}" for column in columns]
        packed = f"named_struct({', '.join(pairs)})"
        return (
            f"SELECT ronde_id, ronde_t, s.* FROM (SELECT ronde_id, tick AS ronde_t, "
            f"last_value(s, true) OVER (PARTITION BY {entity} ORDER BY tick, kind "
            f"ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS s FROM ("
            f"SELECT {entity}, {when} AS tick, 0 AS kind, CAST(NULL AS BIGINT) AS ronde_id, "
            f"{packed} AS s FROM {right} UNION ALL SELECT {entity}, ronde_t, 1, ronde_id, NULL "
            f"FROM ({self._labels(source)}) l) u) v WHERE ronde_id IS NOT NULL"
        )

    def _newest(self, source: EventSource, aged: bool) -> str:
        spec, q = source.spec, self.engine.quote
        values = [f"{q(column)} AS v{n}" for n, column in enumerate(spec.columns.values())]
        ties = [f"{q(column)} AS o{n}" for n, column in enumerate(spec.order_by)]
        # compared instead of the values, which may be many and wide
        hashed = self.engine.hash([q(column) for column in spec.columns.values()])
        names = [f"v{n}" for n in range(len(values))]
        order = ", ".join(["known", "ts", "arr", *(f"o{n} NULLS FIRST" for n in range(len(ties)))])
        entity = ", ".join(self._keys(source))
        # Among equal known, the last in the order has the greatest times: nothing else is seen.
        steps = (
            f"SELECT * FROM (SELECT *, max(ts) OVER w AS top, lead(known) OVER one AS following, "
            f"min(h) OVER p <> max(h) OVER p AS clash "
            f"FROM ({self._events(source, [*values, *ties, f'{hashed} AS h'])}) y WINDOW "
            f"one AS (PARTITION BY {entity} ORDER BY {order}), "
            f"w AS (PARTITION BY {entity} ORDER BY {order} "
            "ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW), "
            f"p AS (PARTITION BY {entity} ORDER BY {order} "
            "RANGE BETWEEN CURRENT ROW AND CURRENT ROW)) z "
            "WHERE ts = top AND (following IS NULL OR following <> known)"
        )
        asof = self._asof(source, f"({steps})", "known", ["ts", "known", "clash", *names])
        stale = f"ronde_t - ts > {spec.max_age * _MICROS}" if spec.max_age and aged else "FALSE"
        out = [f"CASE WHEN NOT ({stale}) THEN {v} END AS f_{n}" for n, v in enumerate(names)]
        return (
            f"SELECT ronde_id, ts, known, clash, {stale} AS stale, {', '.join(out)} FROM ({asof}) a"
        )

    def _future(self, source: EventSource) -> str:
        """A query: how many labels have an event, newest by event time, that arrives later."""
        entity = ", ".join(self._keys(source))
        right = (
            f"(SELECT {entity}, ts, max(arr) AS arr FROM ({self._events(source, [])}) y "
            f"GROUP BY {entity}, ts)"
        )
        asof = self._asof(source, right, "ts", ["ts", "arr"])
        age = source.spec.max_age
        fresh = f" AND ronde_t - ts <= {age * _MICROS}" if age else ""
        return f"SELECT count(*) FROM ({asof}) a WHERE arr > ronde_t{fresh}"

    def _window_sums(self, source: EventSource) -> str:
        spec, q = source.spec, self.engine.quote
        lengths = sorted({window.seconds for window in spec.windows})
        floats = [f"{self._finite(q(name))} AS x{n}" for n, name in enumerate(source.shifts)]
        whole = [w.column for w in spec.windows if source.kinds.get(w.column) == "int"]
        aliases = {name: f"k{n}" for n, name in enumerate(dict.fromkeys(whole))}
        aliases |= {name: f"x{n}" for n, name in enumerate(source.shifts)}
        deltas, stages, outputs = _deltas(spec.windows, source, aliases)
        values = [f"{sql} AS d{n}" for n, (sql, _) in enumerate(deltas)]
        numbers = [f"{q(name)} AS {aliases[name]}" for name in dict.fromkeys(whole)]
        ids = [f"{q(column)} AS i{n}" for n, column in enumerate(spec.event_id)]
        entity = ", ".join(self._keys(source))
        events = self._events(source, [*floats, *numbers, *ids])
        events = f"SELECT *, {', '.join(values)} FROM ({events}) d"
        until = ""
        if ids:  # a version holds until the next one is known
            names = ", ".join([entity, *(f"i{n}" for n in range(len(ids)))])
            order = ", ".join(["known", "arr", "ts", *(f"d{n}" for n in range(len(deltas)))])
            one = " AND ".join(f"i{n} IS NOT NULL" for n in range(len(ids)))
            following = f"lead(known) OVER (PARTITION BY {names} ORDER BY {order})"
            events = f"SELECT *, CASE WHEN {one} THEN {following} END AS until FROM ({events}) z"
            until = ", until"
        ends = [
            f"least(ts + {seconds * _MICROS}{until}) AS end{n}"
            if until
            else f"ts + {seconds * _MICROS} AS end{n}"
            for n, seconds in enumerate(lengths)
        ]
        events = f"SELECT *, {', '.join(ends)} FROM ({events}) y"
        place = [lengths.index(seconds) for _, seconds in deltas]
        last = f"end{len(lengths) - 1}"

        def ticks(when: str, part: int | None, early: str, keep: str) -> str:
            sign = "" if part is None else "-"
            given = [
                f"CASE WHEN end{p} > known THEN {sign}d{n} ELSE 0 END AS d{n}"
                if part in (None, p)
                else f"0 AS d{n}"
                for n, p in enumerate(place)
            ]
            return (
                f"SELECT {entity}, {when} AS tick, {no_label}, {early} AS early, "
                f"{', '.join(given)} FROM events WHERE {keep}"
            )

        none = ", ".join(f"0 AS d{n}" for n in range(len(deltas)))
        no_label = "0 AS kind, CAST(NULL AS BIGINT) AS ronde_id"
        # early: how many events of the longest window have happened, and are not known yet
        late = "CASE WHEN known > ts THEN 1 ELSE 0 END"
        parts = [
            ticks("known", None, f"CASE WHEN {last} > known THEN -({late}) ELSE 0 END", "TRUE")
        ]
        parts += [ticks(f"end{n}", n, "0", f"end{n} > known") for n in range(len(lengths))]
        if spec.arrival_time:
            for when, step, keep in (("ts", 1, "known > ts"), (last, -1, f"known >= {last}")):
                parts.append(
                    f"SELECT {entity}, {when} AS tick, {no_label}, {step} AS early, {none} "
                    f"FROM events WHERE {keep}"
                )
        parts.append(
            f"SELECT {entity}, ronde_t, 1, ronde_id, 0, {none} FROM ({self._labels(source)}) l "
            "WHERE ronde_t IS NOT NULL"
        )
        running = [f"CAST(sum(d{n}) OVER w AS BIGINT) AS s{n}" for n in range(len(deltas))]
        sums = (
            f"WITH events AS ({events}) SELECT * FROM (SELECT ronde_id, "
            f"sum(early) OVER w AS early, {', '.join(running)} "
            f"FROM ({' UNION ALL '.join(parts)}) t WINDOW w AS (PARTITION BY {entity} "
            "ORDER BY tick, kind ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW)) v "
            "WHERE ronde_id IS NOT NULL"
        )
        for stage in stages:  # a select each: nested in one, the text would grow beyond reason
            sums = f"SELECT *, {', '.join(stage)} FROM ({sums}) g"
        return f"SELECT ronde_id, early, {', '.join(outputs)} FROM ({sums}) o"


def _shift(owner: str, name: str, largest: float, smallest: float) -> int:
    shift = shift_of(largest)
    # bits that the smallest value keeps beside the largest
    if smallest and math.frexp(smallest)[1] + shift < 30:
        raise ArgumentError(
            f"{owner}: '{name}' has values from {smallest:.3g} to {largest:.3g}. Sums hold a ratio "
            "of 2**64; round or leave out values beyond it."
        )
    return shift


def _deltas(
    windows: Sequence[Window], source: EventSource, aliases: Mapping[str, str]
) -> tuple[list[tuple[str, int]], list[list[str]], list[str]]:
    """What an event adds to running sums s0 …, each with its window; columns to compute from the
    sums, stage by stage; and the features f_0 … made of them.
    """
    deltas: list[tuple[str, int]] = []
    stages: list[list[str]] = []
    outputs = []

    def place(sql: str, seconds: int) -> str:
        if (sql, seconds) not in deltas:
            deltas.append((sql, seconds))
        return f"s{deltas.index((sql, seconds))}"

    for n, window in enumerate(windows):
        seconds, value = window.seconds, aliases.get(window.column, "")
        if window.kind == "count":
            total = place("1", seconds)
        elif source.kinds[window.column] == "int":
            total = place(f"CAST(coalesce({value}, 0) AS BIGINT)", seconds)
        else:
            shift = source.shifts[window.column]
            limbs = [f"coalesce({limb}, 0)" for limb in sql_limbs(value, shift)]
            total = f"r{n}"
            for k, stage in enumerate(_rounded([place(x, seconds) for x in limbs], shift, n)):
                stages[k:] = [[*(stages[k] if k < len(stages) else []), *stage], *stages[k + 1 :]]
        if window.kind == "mean":
            count = place(f"CASE WHEN {value} IS NULL THEN 0 ELSE 1 END", seconds)
            total = f"CAST({total} AS DOUBLE) / nullif({count}, 0)"
        outputs.append(f"{total} AS f_{n}")
    return deltas, stages, outputs


def _rounded(limbs: Sequence[str], shift: int, n: int) -> list[list[str]]:
    """Columns, in three stages, of which ``r{n}`` is the double nearest to the sum of three limbs.

    With ``b`` and ``c`` carried into 0 … 2**32, a small sum is ``(a * 2**32 + b) * 2**32 + c``. For
    a large one the eleven lowest bits of ``c`` become one, set where any was set, so that
    ``b * 2**32 + c`` has 53 bits and lies on the same side of every tie. So one addition rounds,
    once. Exact while |a| < 2**53.
    """
    a, b, c = limbs
    m = 1 << 32

    def carried(x: str, low: str, y: str, high: str) -> list[str]:
        rest = f"(({x} % {m} + {m}) % {m})"
        return [f"{rest} AS {low}{n}", f"{y} + CAST(({x} - {rest}) / {m} AS BIGINT) AS {high}{n}"]

    big = f"CAST('{2.0**32!r}' AS DOUBLE)"
    whole = (
        f"CAST(a{n} * {m} + b{n} AS DOUBLE) * {big} + CAST(c{n} AS DOUBLE)",
        f"CAST(a{n} AS DOUBLE) * {big} * {big} + (CAST(b{n} AS DOUBLE) * {big} + CAST("
        f"CASE WHEN c{n} % 2048 = 0 THEN c{n} ELSE c{n} - c{n} % 4096 + 2048 END AS DOUBLE))",
    )
    result = (
        f"(CASE WHEN a{n} BETWEEN -4 AND 3 THEN {whole[0]} ELSE {whole[1]} END) "
        f"* CAST('{2.0**-shift!r}' AS DOUBLE) AS r{n}"
    )
    return [carried(c, "c", b, "carry"), carried(f"carry{n}", "b", a, "a"), [result]]


def micros_of(text: str | None, zone: str) -> int:
    """The microsecond of an ISO time, or now; a time without a zone is taken as it stands, or UTC.

    Raises:
        ArgumentError: it is no time, or has a time zone where the tables have none.
    """
    if text is None:
        return time.time_ns() // 1000
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise ArgumentError(f"--at {text}: expected a time, as 2026-11-28T12:00:00.") from None
    if when.tzinfo is not None and zone != ZONED:
        raise ArgumentError(f"--at {text}: the tables' times have no time zone; leave it out.")
    return micros_since_epoch(when)
