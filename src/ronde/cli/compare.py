"""``ronde runs --compare``: what differs between runs, and their curves in one plot."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ronde.cli.answer_screen import answer_table
from ronde.cli.show import find_run
from ronde.watch import (
    Evaluated,
    RunDir,
    Summary,
    curves,
    less_is_better,
    plain_console,
    read,
    summarise,
)
from ronde.world import ArgumentError
from ronde.world.units import clock

_FIELDS = (
    *("script", "origin", "workers", "device", "host", "launcher", "threads"),
    *("model", "parameters", "optimizer", "samples", "steps_per_epoch"),
)


def _arguments(words: Sequence[str]) -> dict[str, Any]:
    """A script's arguments: option -> its values; others by their place."""
    values: dict[str, Any] = {}
    option = ""
    for word in words:
        if word.startswith("-") and not word.lstrip("-.")[:1].isdigit():
            option, _, value = word.partition("=")
            values[option] = value
        elif option:
            values[option] = f"{values[option]} {word}".strip()
        else:
            values[f"argument {len(values) + 1}"] = word
    return {name: value or True for name, value in values.items()}


def _setup(summary: Summary) -> dict[str, Any]:
    """What a run was started with, by name."""
    start = summary.start
    if start is None:
        return {}
    values = _arguments(start.arguments)
    values |= {name: getattr(start, name) for name in _FIELDS}
    # The plan repeats the number of workers, which is a row of its own.
    plan = {name: value for name, value in start.plan.items() if name != "workers"}
    values |= {f"plan: {name}": value for name, value in plan.items()}
    if start.git:
        values["commit"] = start.git["commit"][:10]
        values["commit"] += " and changes" if start.git["dirty"] else ""
    return values | {f"version of {name}": value for name, value in start.versions.items()}


def _result(run: RunDir, summary: Summary) -> dict[str, Any]:
    """What came of a run, by name."""
    values: dict[str, Any] = {
        "status": summary.ending,
        "steps": summary.step,
        "samples": summary.samples,
        "loss": summary.loss,
        "seconds": summary.seconds,
        "samples/s": summary.samples_per_second,
    }
    for event in read(run.record):
        if not isinstance(event, Evaluated) or event.part:
            continue
        for metric, value in event.metrics.items():
            if isinstance(value, int | float):
                choose = min if less_is_better(metric) else max
                name = f"best {event.name}/{metric}"
                values[name] = choose(values.get(name, value), value)
    return values


def _differing(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for each in runs for name in each)
    rows = {name: [each.get(name) for each in runs] for name in names}
    return {name: row for name, row in rows.items() if any(value != row[0] for value in row)}


def compare(folder: Path, names: Sequence[str], form: str) -> None:
    """Print what differs between runs, what came of them, and their curves.

    Args:
        folder: of all runs.
        names: of the runs, or their paths.
        form: ``text``, ``csv`` (a line for each run), or ``json``.

    Raises:
        ArgumentError: there are fewer than two, or one is not there.
    """
    if len(names) < 2:
        raise ArgumentError("--compare needs two runs or more: ronde runs --compare RUN RUN ….")
    runs = [find_run(folder, name) for name in names]
    summaries = [summarise(run) for run in runs]
    differing = _differing([_setup(summary) for summary in summaries])
    results = [_result(run, summary) for run, summary in zip(runs, summaries, strict=True)]
    came = {name: [r.get(name) for r in results] for r in results for name in r}
    if form == "json":
        answer: dict[str, Any] = {"runs": [*names], "differs": differing, "results": came}
        answer["curves"] = [summary.curve for summary in summaries]
        print(json.dumps(answer, indent=1))
        return
    if form == "csv":
        output = io.StringIO()
        writer = csv.writer(output)
        writer.writerow(["run", *differing, *came])
        for i, name in enumerate(names):
            writer.writerow([name, *(row[i] for row in (*differing.values(), *came.values()))])
        print(output.getvalue(), end="")
        return
    _show(names, differing, came, summaries)


def _show(
    names: Sequence[str],
    differing: Mapping[str, Sequence[Any]],
    came: Mapping[str, Sequence[Any]],
    summaries: Sequence[Summary],
) -> None:
    from rich.text import Text

    console = plain_console()
    marks = [chr(ord("A") + i % 26) for i in range(len(names))]
    table = answer_table("", *(f"{m}  {name}" for m, name in zip(marks, names, strict=True)))
    for name, row in differing.items():
        table.add_row(Text(name), *(Text(_text("", value)) for value in row))
    table.add_section()
    for name, row in came.items():
        table.add_row(Text(name), *(Text(_text(name, value)) for value in row))
    console.print(table)
    if not differing:
        console.print("they were started alike")
    drawn = curves(
        {m: [(float(x), y) for x, y in s.curve] for m, s in zip(marks, summaries, strict=True)},
        width=max(20, min(console.width - 14, 100)),
        height=14,
    )
    if drawn and console.encoding.startswith("utf"):
        console.print(Text(f"\n{drawn}"))


def _text(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name == "seconds":
        return clock(value)
    if isinstance(value, float):
        return f"{value:.4g}" if name else f"{value:g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
