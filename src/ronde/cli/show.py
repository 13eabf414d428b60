"""``ronde show``: one run, with its curve."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ronde.cli.answer_screen import tell
from ronde.cli.options import JsonFlag, RunArgument, RunsOption, app, setting, verb
from ronde.cli.summary import print_summary
from ronde.watch import (
    Evaluated,
    Logged,
    RunDir,
    StepRecorded,
    curve,
    latest,
    plain_console,
    read,
    summarise,
)
from ronde.world import ArgumentError
from ronde.world.errors import did_you_mean


def recorded_runs(folder: Path) -> list[RunDir]:
    """The runs in a folder. A folder without a record is a search, a flow, or somebody's own."""
    places = folder.iterdir() if folder.is_dir() else ()
    return [RunDir(p) for p in places if p.is_dir() and (p / "record.jsonl").exists()]


def find_run(folder: Path, name: str | None) -> RunDir:
    """The run of that name in ``folder``, or at that path; the last one without a name."""
    if name is None:
        newest = latest(folder)
        if newest is None:
            raise ArgumentError(
                f"no runs in {folder}: 'ronde run SCRIPT' makes one, --runs DIR looks elsewhere."
            )
        return newest
    run = RunDir(Path(name) if "/" in name else folder / name)
    if not run.record.exists():
        names = [known.name for known in recorded_runs(folder)]
        hint = did_you_mean(name, names, " 'ronde runs' lists them.")
        raise ArgumentError(f"no run {name!r} in {folder}.{hint}")
    return run


def _series(run: RunDir) -> dict[str, list[tuple[float, float]]]:
    """Evaluated and logged numbers over steps, by name."""
    series: dict[str, list[tuple[float, float]]] = {}
    for event in read(run.record) if run.record.is_file() else ():
        values: dict[str, Any]
        if isinstance(event, StepRecorded) and event.part:
            values = {"loss": event.loss}  # the first run's is the curve
        elif isinstance(event, Evaluated):
            values = {f"{event.name}/{name}": value for name, value in event.metrics.items()}
        elif isinstance(event, Logged):
            values = event.values
        else:
            continue
        for name, value in values.items():
            name = f"{event.part}/{name}" if event.part else name
            if isinstance(value, int | float) and not isinstance(value, bool):
                series.setdefault(name, []).append((float(event.step), float(value)))
    return series


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of ``ronde show``, as the user gave them."""

    name: RunArgument = None
    series: str | None = setting(
        None, "--curve", "Draw a logged or evaluated value instead of the loss.", "WHAT"
    )
    runs: RunsOption = Path("runs")
    as_json: JsonFlag = False


@verb(app, "show")
def _show(options: Options) -> None:
    """Show one run: what ran, its numbers, its curve. Without a name, the last one.

    Examples:

    ```sh
    ronde show
    ronde show gpt-1 --json
    ronde show gpt-1 --curve evaluate/accuracy
    ```
    """
    run = find_run(options.runs, options.name)
    summary = summarise(run)
    if options.as_json:
        print(
            json.dumps(
                {**summary.to_dict(), "curve": summary.curve, "series": _series(run)}, indent=1
            )
        )
        return
    console = plain_console()
    series = options.series
    if series is not None:
        known = _series(run)
        if series not in known:
            raise ArgumentError(
                f"{run.name} has no {series!r}; it has "
                f"{', '.join(known) or 'nothing logged or evaluated'}."
            )
        drawn = curve(
            known[series], width=max(20, min(console.width - 14, 100)), height=12, label=series
        )
        console.print(
            drawn
            or f"{series}: {known[series][-1][1]:g} at step {known[series][-1][0]:g} (one "
            "value, no curve)",
        )
        return
    if summary.status != "unreadable":
        print_summary(run, console, summary.seconds or 0.0)
    if summary.error:
        where = "" if summary.status != "failed" else f"; its output is in {run.logs}"
        tell((f"{summary.status}: {summary.error}{where}", "red"))
