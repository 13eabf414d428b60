"""The file that describes feature tables: where events are, when they happened, what to make."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ronde.tables.steps import near
from ronde.world import ArgumentError
from ronde.world.units import parse_duration

_KEYS = (
    *("path", "entity", "event_time", "arrival_time", "max_age", "columns", "windows"),
    *("order_by", "event_id"),
)
_AGGREGATES = ("count", "sum", "mean")


@dataclass(frozen=True)
class Window:
    """One aggregate over the events of the last ``seconds``.

    Attributes:
        kind: count, sum, or mean.
        column: what is added up; empty for count.
    """

    name: str
    kind: str
    column: str
    seconds: int


@dataclass(frozen=True)
class FeatureTable:
    """A table of events and the features made of it.

    Attributes:
        path: a file or a pattern of files.
        entity: the columns that name whose event it is.
        columns: feature name -> column, of the newest known event.
        max_age: seconds after which the newest event no longer counts; None: never.
        order_by: columns that decide between events of equal times.
        event_id: columns that say which rows are versions of one event, for windows.
    """

    name: str
    path: str
    entity: tuple[str, ...]
    event_time: str
    arrival_time: str | None = None
    max_age: int | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    windows: tuple[Window, ...] = ()
    order_by: tuple[str, ...] = ()
    event_id: tuple[str, ...] = ()

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the features, in the order of the file."""
        return tuple(self.columns) or tuple(window.name for window in self.windows)

    @property
    def used(self) -> tuple[str, ...]:
        """The columns that the file must have."""
        some = [*self.entity, self.event_time, self.arrival_time, *self.order_by, *self.event_id]
        some += [*self.columns.values(), *(window.column for window in self.windows)]
        return tuple(dict.fromkeys(name for name in some if name))


def read_feature_tables(path: str | Path) -> tuple[FeatureTable, ...]:
    """Read and check ``features.yaml``; paths in it are relative to its folder.

    Raises:
        ArgumentError: it cannot be read, or says what cannot be; names file, table, and key.
    """
    path = Path(path)
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentError(f"{path} cannot be read: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{path} is not YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(given, dict) or not given:
        raise ArgumentError(f"{path}: expected tables, as 'clicks: {{path: …, entity: …}}'.")
    tables = tuple(_Entry(path, str(name), value).table() for name, value in given.items())
    owner: dict[str, str] = {}
    for table in tables:
        for feature in table.features:
            if feature.lower() in owner:  # SQL does not tell names apart by case
                raise ArgumentError(
                    f"{path}, table '{table.name}': '{owner[feature.lower()]}' has a feature "
                    f"'{feature}' too. Give one another name, as columns: {{new_name: column}}."
                )
            if feature in (("as_of",) if table.windows else ("event_time", "known_at")):
                raise ArgumentError(
                    f"{path}, table '{table.name}': '{feature}' is the name of a time that readers "
                    "get with the features. Give the feature another name."
                )
            owner[feature.lower()] = table.name
    return tables


class _Entry:
    """One table of the file, checked key by key."""

    def __init__(self, path: Path, name: str, given: Any) -> None:
        self.path, self.name, self.given = path, name, given

    def wrong(self, text: str) -> ArgumentError:
        return ArgumentError(f"{self.path}, table '{self.name}': {text}")

    def table(self) -> FeatureTable:
        if not isinstance(self.given, dict):
            raise self.wrong("expected keys and values, as path: 'clicks/*.parquet'.")
        if not re.fullmatch(r"[A-Za-z_]\w*", self.name):
            raise self.wrong("a name has letters, digits, and underscores.")
        for key in self.given:
            if key not in _KEYS:
                raise self.wrong(f"unknown key '{key}'{near(key, _KEYS)}")
        if ("columns" in self.given) == ("windows" in self.given):
            raise self.wrong("expected either columns: or windows:.")
        for key, other in {
            "max_age": "windows",
            "order_by": "windows",
            "event_id": "columns",
        }.items():
            if key in self.given and other in self.given:
                raise self.wrong(f"{key} has no meaning for {other}.")
        path, age = self.text("path"), self.given.get("max_age")
        return FeatureTable(
            name=self.name,
            path=path if "://" in path else str(self.path.parent / Path(path).expanduser()),
            entity=self.texts("entity"),
            event_time=self.text("event_time"),
            arrival_time=self.text("arrival_time") if "arrival_time" in self.given else None,
            max_age=self.seconds("max_age", age) if "max_age" in self.given else None,
            columns=self.columns() if "columns" in self.given else {},
            windows=self.windows() if "windows" in self.given else (),
            order_by=self.texts("order_by") if "order_by" in self.given else (),
            event_id=self.texts("event_id") if "event_id" in self.given else (),
        )

    def text(self, key: str) -> str:
        if key not in self.given:
            raise self.wrong(f"{key} is missing.")
        if not isinstance(self.given[key], str) or not self.given[key]:
            raise self.wrong(f"{key}: {self.given[key]!r} is not a name.")
        return str(self.given[key])

    def texts(self, key: str) -> tuple[str, ...]:
        names = self.given[key] if isinstance(self.given.get(key), list) else [self.text(key)]
        if not names or not all(isinstance(name, str) and name for name in names):
            raise self.wrong(f"{key}: expected a column, or a list of columns.")
        return tuple(dict.fromkeys(names))

    def seconds(self, key: str, given: Any) -> int:
        total = parse_duration(str(given))
        if total is None or total != int(total):
            raise self.wrong(f"{key}: {given!r} is not a duration, as 30d, 12h, 90m, or 1d12h.")
        return int(total)

    def columns(self) -> dict[str, str]:
        given = self.given["columns"]
        named = {name: name for name in given} if isinstance(given, list) else given
        words = [*named, *named.values()] if isinstance(named, dict) else []
        if not words or not all(isinstance(word, str) and word for word in words):
            raise self.wrong("columns: expected a list of columns, or {feature: column}.")
        if isinstance(given, list) and len(named) < len(given):
            raise self.wrong("columns: a column is there twice.")
        return dict(named)

    def windows(self) -> tuple[Window, ...]:
        given = self.given["windows"]
        if not isinstance(given, dict) or not given:
            raise self.wrong("windows: expected {n_7d: {count: 7d}, sum_7d: {sum: x, over: 7d}}.")
        return tuple(self.window(str(name), value) for name, value in given.items())

    def window(self, name: str, given: Any) -> Window:
        kinds = [key for key in given if key in _AGGREGATES] if isinstance(given, dict) else []
        if len(kinds) != 1:
            raise self.wrong(f"windows, {name}: expected one of {', '.join(_AGGREGATES)}.")
        kind = kinds[0]
        for key in given:
            if key not in (kind, "over"):
                raise self.wrong(f"windows, {name}: unknown key '{key}'.")
        if kind == "count":
            if "over" in given:
                raise self.wrong(f"windows, {name}: count takes its duration itself, as count: 7d.")
            return Window(name, kind, "", self.seconds(f"windows, {name}", given[kind]))
        if not isinstance(given[kind], str) or "over" not in given:
            raise self.wrong(f"windows, {name}: expected {{{kind}: column, over: 7d}}.")
        return Window(name, kind, given[kind], self.seconds(f"windows, {name}", given["over"]))
