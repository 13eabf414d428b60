"""The online store: the newest features of each entity in one SQLite file, replaced as a whole."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

from ronde.tables.sql_engines import quoted
from ronde.world import ArgumentError, RondeError

_VERSION = 1
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class OnlineTable:
    """What the store says about a table of features.

    Attributes:
        entity: column -> int or text.
        features: feature -> int, float, text, bool, date, naive, or zoned.
        windows: whether the features are aggregates, as of the time of publication.
        max_age: seconds after which a value no longer counts; None: never.
        as_of: the microsecond of the publication.
        zoned: whether times have a time zone.
    """

    name: str
    entity: dict[str, str]
    features: dict[str, str]
    defaults: dict[str, Any]
    windows: bool
    max_age: int | None
    as_of: int
    zoned: bool

    @property
    def columns(self) -> list[str]:
        """The columns in the file, in their order."""
        times = [] if self.windows else ["ronde_ts", "ronde_known"]
        return [*self.entity, *times, *self.features]


@contextlib.contextmanager
def _sole_writer(path: Path) -> Iterator[Path]:
    """The path to write to; a publication that was killed left one, and a second is refused."""
    part = path.with_name(f"{path.name}.writing")
    try:
        lock = os.open(part, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ArgumentError(f"{path}: nothing can be written there: {error.strerror}.") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RondeError(f"{path}: another publication is under way.") from None
        try:
            same = os.path.samestat(os.fstat(lock), part.stat())
        except FileNotFoundError:
            same = False
        if not same:  # it was finished meanwhile
            raise RondeError(f"{path}: another publication is under way.")
        os.ftruncate(lock, 0)
        yield part
    finally:
        os.close(lock)


def publish_tables(
    path: str | Path, tables: Iterable[tuple[OnlineTable, Iterable[tuple[Any, ...]]]]
) -> dict[str, int]:
    """Write all tables to a new file and put it in the place of the old one; returns their rows.

    Raises:
        RondeError: it cannot be written; the previous publication stays.
    """
    path = Path(path).resolve()
    counts: dict[str, int] = {}
    with _sole_writer(path) as part:
        try:
            with contextlib.closing(sqlite3.connect(part, isolation_level=None)) as db:
                # killed half-way, the file is never looked at: it needs no journal
                db.execute("PRAGMA journal_mode=OFF")
                db.execute("PRAGMA synchronous=OFF")
                db.execute("BEGIN")
                db.execute("CREATE TABLE ronde_tables (name TEXT PRIMARY KEY, about TEXT)")
                for about, rows in tables:
                    counts[about.name] = _fill(db, about, rows)
                db.execute(f"PRAGMA user_version={_VERSION}")
                db.execute("COMMIT")
            with open(part, "rb+") as written:
                os.fsync(written.fileno())
            part.replace(path)
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except BaseException as error:
            part.unlink(missing_ok=True)
            if isinstance(error, OSError | sqlite3.Error):
                kept = "The previous publication is kept." if path.exists() else "Nothing is kept."
                raise RondeError(f"{path} cannot be written: {error}. {kept}") from None
            raise
    return counts


def _fill(db: sqlite3.Connection, about: OnlineTable, rows: Iterable[tuple[Any, ...]]) -> int:
    name, keys = quoted(about.name), ", ".join(map(quoted, about.entity))
    columns = about.columns
    db.execute("INSERT INTO ronde_tables VALUES (?, ?)", (about.name, json.dumps(asdict(about))))
    db.execute(
        f"CREATE TABLE {name} ({', '.join(map(quoted, columns))}, PRIMARY KEY ({keys})) "
        "WITHOUT ROWID"
    )
    try:
        db.executemany(f"INSERT INTO {name} VALUES ({', '.join('?' * len(columns))})", rows)
    except OverflowError:
        raise ArgumentError(
            f"table '{about.name}': a whole number is 2**63 or more; online they are 64 bits with "
            "a sign."
        ) from None
    return int(db.execute(f"SELECT count(*) FROM {name}").fetchone()[0])


class _Opened:
    """One publication, open for reading."""

    def __init__(self, path: Path, identity: tuple[int, int]) -> None:
        self.identity = identity
        try:
            # The file never changes once it is there: SQLite needs no lock, no look at a journal.
            self.db = sqlite3.connect(
                f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True, isolation_level=None
            )
            rows = self.db.execute("SELECT about FROM ronde_tables").fetchall()
            version = self.db.execute("PRAGMA user_version").fetchone()[0]
        except sqlite3.Error as error:
            raise ArgumentError(f"{path} is no store of features: {error}.") from None
        if version != _VERSION:
            raise ArgumentError(f"{path} has version {version}; this Ronde reads {_VERSION}.")
        self.tables = {t.name: t for t in (OnlineTable(**json.loads(row[0])) for row in rows)}
        self.queries = {
            name: f"SELECT {', '.join(map(quoted, table.columns[len(table.entity) :]))} "
            f"FROM {quoted(name)} WHERE {' AND '.join(f'{quoted(e)}=?' for e in table.entity)}"
            for name, table in self.tables.items()
        }


class Online:
    """Read published features; needs the standard library only. Threads may share one.

    A new publication is noticed at the next call. Each call reads one publication as a whole.

    Args:
        path: the file that ``ronde features publish`` wrote.

    Raises:
        ArgumentError: there is no such file, or it is something else.

    Example:
        >>> online = Online("online.db")  # doctest: +SKIP
        >>> online.get("clicks", user=17)  # doctest: +SKIP
        {'country': 'NO', 'event_time': datetime.datetime(…), 'known_at': datetime.datetime(…)}
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._local = threading.local()
        self._now()

    def _now(self) -> _Opened:
        try:
            status = self.path.stat()
        except OSError as error:
            raise ArgumentError(f"{self.path} cannot be read: {error.strerror}.") from None
        # a publication is a new file: its number tells it apart, its time a number used again
        identity = (status.st_ino, status.st_mtime_ns)
        opened: _Opened | None = getattr(self._local, "opened", None)
        if opened is None or opened.identity != identity:
            if opened is not None:
                opened.db.close()
            # The file may be replaced between the two calls: the next call opens it once more.
            opened = self._local.opened = _Opened(self.path, identity)
        return opened

    def tables(self) -> dict[str, OnlineTable]:
        """The published tables."""
        return dict(self._now().tables)

    def differing(self, other: Online, table: str) -> Iterator[dict[str, Any]]:
        """The entities whose rows in a table are others in another publication."""
        opened = self._now()
        entity = opened.tables[table].entity
        keys, name = ", ".join(map(quoted, entity)), quoted(table)
        opened.db.execute("ATTACH ? AS other", (f"{other.path.absolute().as_uri()}?mode=ro",))
        try:
            rows = opened.db.execute(
                " UNION ".join(
                    f"SELECT {keys} FROM (SELECT * FROM {a}.{name} EXCEPT SELECT * FROM {b}.{name})"
                    for a, b in (("main", "other"), ("other", "main"))
                )
            ).fetchall()
        finally:
            opened.db.execute("DETACH other")
        return (dict(zip(entity, row, strict=True)) for row in rows)

    def get(self, table: str, /, **entity: Any) -> dict[str, Any]:
        """The features of one entity.

        Args:
            table: its name in ``features.yaml``.
            entity: each column of the entity and its value.

        Returns:
            The features; with ``event_time`` and ``known_at`` of the event they come from, or, of
            windows, ``as_of``, the time of publication. A value older than ``max_age`` is None. An
            entity that was never seen has no values and counts of zero, as in a join.

        Raises:
            ArgumentError: there is no such table, or the entity is not named as there.
        """
        return self.read(table, entity, time.time_ns() // 1000)

    def read(self, table: str, entity: dict[str, Any], now: int) -> dict[str, Any]:
        """:meth:`get` as of the microsecond ``now``, by which ``max_age`` judges."""
        opened = self._now()
        about = opened.tables.get(table)
        if about is None:
            known = ", ".join(opened.tables)
            raise ArgumentError(f"{self.path} has no table '{table}'; there are {known}.")
        row = opened.db.execute(opened.queries[table], _key(about, entity)).fetchone()
        return _shaped(about, row, now)


def _shaped(about: OnlineTable, row: tuple[Any, ...] | None, now: int) -> dict[str, Any]:
    """What a reader gets of a stored row, or of none, at the microsecond ``now``."""
    if about.windows:
        values = (
            dict(about.defaults) if row is None else dict(zip(about.features, row, strict=True))
        )
        return {**_typed(about, values), "as_of": _time(about.as_of, about.zoned)}
    ts, known, *given = row or (None, None, *(None for _ in about.features))
    if ts is not None and about.max_age is not None and now - ts > about.max_age * 1_000_000:
        given = [None for _ in given]
    values = _typed(about, dict(zip(about.features, given, strict=True)))
    times = {"event_time": _time(ts, about.zoned), "known_at": _time(known, about.zoned)}
    return {**values, **times}


def micros_since_epoch(when: datetime) -> int:
    """The microsecond of a time; without a time zone it is taken as UTC."""
    zoned = when if when.tzinfo is not None else when.replace(tzinfo=UTC)
    return (zoned - _EPOCH) // timedelta(microseconds=1)


def _key(about: OnlineTable, entity: dict[str, Any]) -> list[Any]:
    if entity.keys() != about.entity.keys():
        expected = ", ".join(f"{name}=…" for name in about.entity)
        given = ", ".join(entity) or "nothing"
        raise ArgumentError(f"'{about.name}' is by {expected}; given: {given}.")
    for name, value in entity.items():
        expected, type_ = ("whole number", int) if about.entity[name] == "int" else ("text", str)
        if not isinstance(value, type_) or isinstance(value, bool):
            raise ArgumentError(f"'{about.name}': {name}={value!r} is not a {expected}.")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ArgumentError(f"'{about.name}': {name}={value} does not fit 64 bits.")
    return [entity[name] for name in about.entity]


def _typed(about: OnlineTable, values: dict[str, Any]) -> dict[str, Any]:
    for name, kind in about.features.items():
        value = values[name]
        if value is None or value != value:  # SQLite keeps NaN as NULL
            values[name] = None
        elif kind == "bool":
            values[name] = bool(value)
        elif kind == "date":
            values[name] = date(1970, 1, 1) + timedelta(days=value)
        elif kind in ("naive", "zoned"):
            values[name] = _time(value, kind == "zoned")
    return values


def _time(micros: int | None, zoned: bool) -> datetime | None:
    if micros is None:
        return None
    when = _EPOCH + timedelta(microseconds=micros)
    return when if zoned else when.replace(tzinfo=None)
