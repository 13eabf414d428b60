"""``ronde features``: join, publish, get, and check features."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ronde.cli.answer_screen import tell
from ronde.cli.options import REQUIRED, Group, app, argument, setting, verb
from ronde.world import ArgumentError
from ronde.world.units import count_of
from ronde.world.whole_file import check_target

if TYPE_CHECKING:
    from ronde.tables.point_in_time import Joined

_HELP = """\
Features that cannot see the future.

Join events with labels as they were known at the time of each label: an event counts from the later
of its event time and its arrival time. Publish the newest values for serving, from the same file.

Examples:

```sh
ronde features join features.yaml labels.parquet --at label_time --out train.parquet
ronde features publish features.yaml --to online.db
ronde features get online.db clicks --user 17
ronde features check features.yaml online.db     online = offline, entity by entity
```
"""
features = typer.Typer(cls=Group, help=_HELP, no_args_is_help=True)
app.add_typer(features, name="features")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The options that say what joins."""

    engine: str = setting("duckdb", "--engine", "What joins.", "duckdb|spark")
    master: str = setting("", "--master", "Of Spark, as spark://HOST:7077 or local[4].")
    memory: str = setting(
        "",
        "--memory",
        "What DuckDB holds before it spills to disk, as 1.5GB. Default: 80 % of the machine.",
        "SIZE",
    )


@dataclass(frozen=True, kw_only=True)
class JoinOptions(EngineOptions):
    """The options of ``ronde features join``, as the user gave them."""

    features: Path = argument("FEATURES.yaml")
    labels: Path = argument("LABELS")
    at: str = setting(REQUIRED, "--at", "The labels' time.", "COLUMN")
    out: Path = setting(REQUIRED, "--out", "Parquet; with Spark, a new folder.", "FILE")


@dataclass(frozen=True, kw_only=True)
class PublishOptions(EngineOptions):
    """The options of ``ronde features publish``, as the user gave them."""

    features: Path = argument("FEATURES.yaml")
    to: Path = setting(REQUIRED, "--to", "The SQLite file.", "FILE")
    at: str | None = setting(None, "--at", "As of this ISO time. Default: now.", "TIME")


@dataclass(frozen=True, kw_only=True)
class CheckOptions(EngineOptions):
    """The options of ``ronde features check``, as the user gave them."""

    features: Path = argument("FEATURES.yaml")
    online: Path = argument("ONLINE.db")


@dataclass(frozen=True, kw_only=True)
class GetOptions:
    """The words of ``ronde features get``."""

    online: Path = argument("ONLINE.db")
    table: str = argument("TABLE")
    words: list[str] | None = argument("--COLUMN VALUE...", "Of the entity.", default=None)


@verb(features, "join")
def _join(options: JoinOptions) -> None:
    """Join labels with what was known at their time, row for row, in their order."""
    from ronde.tables.feature_store import FeatureStore

    store, out, engine = FeatureStore(options.features), options.out, options.engine
    if engine == "spark" and out.exists():
        raise ArgumentError(f"--out {out} is there already; Spark writes a new folder.")
    if engine != "spark":
        check_target(out)
    labels = str(options.labels)
    _show(store.join(labels, options.at, out, engine, options.master, options.memory), out)


def _show(done: Joined, out: Path) -> None:
    events = sum(facts.events for facts in done.facts)
    tables = count_of(len(done.facts), "table")
    said = [f"join     {done.labels:,} labels, {tables}, {events:,} events: {done.seconds:.1f} s"]
    for facts in done.facts:
        parts = []
        if not facts.windows:
            parts.append(f"{_share(facts.without_value, done.labels)} of labels without a value")
        if facts.future is not None:
            share = _share(facts.future, done.labels)
            parts.append(f"{share} would have seen the future by event time alone")
        if facts.unusable:
            parts.append(f"{facts.unusable:,} rows without entity or time ignored")
        said.append(f"         {facts.name}: {'; '.join(parts) or 'joined'}")
        if facts.future is None:
            said.append(
                f"         {facts.name} has no arrival_time: late corrections count as if known "
                "at once."
            )
    tell("\n".join([*said, f"         → {out}"]))


def _share(count: int, total: int) -> str:
    return f"{100 * count / max(total, 1):.1f} %"


@verb(features, "publish")
def _publish(options: PublishOptions) -> None:
    """Write the newest features of each entity; readers see the old file or the new one."""
    from ronde.tables.feature_store import FeatureStore

    counts = FeatureStore(options.features).publish(
        options.to, options.at, options.engine, options.master, options.memory
    )
    published = ", ".join(f"{name} {count:,} entities" for name, count in counts.items())
    tell(f"publish  {options.to}: {published}")


@verb(features, "get", ignore_unknown_options=True)
def _get(options: GetOptions) -> None:
    """Print the features of one entity as JSON: --COLUMN VALUE for each column of the entity."""
    from ronde.tables.online import Online

    store, table = Online(options.online), options.table
    words, entity = list(options.words or []), dict[str, Any]()
    # The table says what a key is: 17 and "17" are two entities.
    kinds = store.tables()[table].entity if table in store.tables() else {}
    while words:
        name, equals, value = words.pop(0).partition("=")
        if not name.startswith("--") or not (equals or words):
            raise ArgumentError(f"{name}: expected --COLUMN VALUE, as --user 17.")
        value = value if equals else words.pop(0)
        column: str = name[2:]
        entity[column] = _number(column, value) if kinds.get(column) == "int" else value
    print(json.dumps(store.get(table, **entity), default=_text, ensure_ascii=False))


def _number(column: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ArgumentError(f"--{column} {text}: expected a whole number.") from None


def _text(value: Any) -> str:
    assert isinstance(value, date)  # a datetime is one
    return value.isoformat()


@verb(features, "check")
def _check(options: CheckOptions) -> None:
    """Compare what a reader gets with the offline join as of the publication."""
    from ronde.tables.feature_store import FeatureStore

    done = FeatureStore(options.features).check(
        options.online, options.engine, options.master, options.memory
    )
    for table, entity, feature, got, expected in done.differences:
        which = " ".join(f"{name}={value}" for name, value in entity.items())
        tell(f"differs  {table} {which} {feature}: online {got!r}, offline {expected!r}")
    if done.different:
        tell(
            f"check    {done.different:,} of {done.entities:,} entities differ: events have "
            "changed since the publication. Publish again."
        )
        raise typer.Exit(1)
    tell(f"check    online = offline on {done.entities:,} entities")
