"""``ronde features``: join, publish, get, and check features."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ronde.cli.options import Group, option
from ronde.watch import plain_console
from ronde.world import ArgumentError
from ronde.world.units import count_of
from ronde.world.whole_file import check_target

if TYPE_CHECKING:
    from ronde.tables.point_in_time import Joined

__all__ = ["register"]

_EXAMPLES = """
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

Spec = Annotated[Path, typer.Argument(metavar="FEATURES.yaml", show_default=False)]
Engine = Annotated[str, option("--engine", "What joins.", "duckdb|spark")]
Master = Annotated[
    str,
    option("--master", "Of Spark, as spark://HOST:7077 or local[4]."),
]
Memory = Annotated[
    str,
    option(
        "--memory",
        "What DuckDB holds before it spills to disk, as 1.5GB. Default: 80 % of the machine.",
        "SIZE",
    ),
]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    group = typer.Typer(
        cls=Group, help="Features that cannot see the future.\n" + _EXAMPLES, no_args_is_help=True
    )
    group.command("join")(_join)
    group.command("publish")(_publish)
    group.command(
        "get", context_settings={"ignore_unknown_options": True, "allow_extra_args": True}
    )(_get)
    group.command("check")(_check)
    app.add_typer(group, name="features")


def _join(
    features: Spec,
    labels: Annotated[Path, typer.Argument(metavar="LABELS", show_default=False)],
    at: Annotated[str, option("--at", "The labels' time.", "COLUMN")],
    out: Annotated[Path, option("--out", "Parquet; with Spark, a new folder.", "FILE")],
    engine: Engine = "duckdb",
    master: Master = "",
    memory: Memory = "",
) -> None:
    """Join labels with what was known at their time, row for row, in their order."""
    from ronde.tables.feature_store import FeatureStore

    store = FeatureStore(features)
    if engine == "spark" and out.exists():
        raise ArgumentError(f"--out {out} is there already; Spark writes a new folder.")
    if engine != "spark":
        check_target(out)
    _show(store.join(str(labels), at, out, engine, master, memory), out)


def _show(done: Joined, out: Path) -> None:
    console = plain_console()
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
    console.print("\n".join([*said, f"         → {out}"]), soft_wrap=True)


def _share(count: int, total: int) -> str:
    return f"{100 * count / max(total, 1):.1f} %"


def _publish(
    features: Spec,
    to: Annotated[Path, option("--to", "The SQLite file.", "FILE")],
    at: Annotated[str | None, option("--at", "As of this ISO time. Default: now.", "TIME")] = None,
    engine: Engine = "duckdb",
    master: Master = "",
    memory: Memory = "",
) -> None:
    """Write the newest features of each entity; readers see the old file or the new one."""
    from ronde.tables.feature_store import FeatureStore

    counts = FeatureStore(features).publish(to, at, engine, master, memory)
    published = ", ".join(f"{name} {count:,} entities" for name, count in counts.items())
    plain_console().print(f"publish  {to}: {published}", soft_wrap=True)


def _get(
    context: typer.Context,
    online: Annotated[Path, typer.Argument(metavar="ONLINE.db", show_default=False)],
    table: Annotated[str, typer.Argument(metavar="TABLE", show_default=False)],
) -> None:
    """Print the features of one entity as JSON: --COLUMN VALUE for each column of the entity."""
    from ronde.tables.online import Online

    store = Online(online)
    words, entity = list(context.args), {}
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


def _check(
    features: Spec,
    online: Annotated[Path, typer.Argument(metavar="ONLINE.db", show_default=False)],
    engine: Engine = "duckdb",
    master: Master = "",
    memory: Memory = "",
) -> None:
    """Compare what a reader gets with the offline join as of the publication."""
    from ronde.tables.feature_store import FeatureStore

    done = FeatureStore(features).check(online, engine, master, memory)
    console = plain_console()
    for table, entity, feature, got, expected in done.differences:
        which = " ".join(f"{name}={value}" for name, value in entity.items())
        console.print(
            f"differs  {table} {which} {feature}: online {got!r}, offline {expected!r}",
            soft_wrap=True,
        )
    if done.different:
        console.print(
            f"check    {done.different:,} of {done.entities:,} entities differ: events have "
            "changed since the publication. Publish again.",
            soft_wrap=True,
        )
        raise typer.Exit(1)
    console.print(f"check    online = offline on {done.entities:,} entities", soft_wrap=True)
