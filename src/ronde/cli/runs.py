"""``ronde runs``: list the runs, or compare some."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from ronde.cli.answer_screen import answer_table
from ronde.cli.compare import compare
from ronde.cli.options import JsonFlag, RunsOption, option
from ronde.watch import RunDir, figure, plain_console, summarise
from ronde.world import ArgumentError
from ronde.world.units import clock


def _ago(written: float) -> str:
    seconds = max(0.0, time.time() - written)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return "just now"


def register(app: typer.Typer) -> None:
    """Add the verb."""

    @app.command(
        "runs",
        help="List the runs, newest first, or compare some: what differs, and their "
        "curves.\n\nExamples:\n\n  ronde runs\n\n  ronde runs --runs /data/runs --json\n\n  "
        "ronde runs --compare gpt-1 gpt-2",
    )
    def runs(
        folder: RunsOption = Path("runs"),
        names: Annotated[
            list[str] | None,
            typer.Argument(
                metavar="[RUN]...", help="With --compare: names or paths.", show_default=False
            ),
        ] = None,
        compared: Annotated[
            bool, option("--compare", "Show what differs between RUNs, and their curves.")
        ] = False,
        as_csv: Annotated[
            bool, option("--csv", "With --compare: print a line of CSV for each run.")
        ] = False,
        as_json: JsonFlag = False,
    ) -> None:
        if compared:
            compare(folder, names or [], "json" if as_json else "csv" if as_csv else "text")
            return
        if names or as_csv:
            raise ArgumentError("RUN and --csv are for --compare: ronde runs --compare RUN RUN ….")
        from rich.text import Text

        # A folder without a record is a search, a flow, or somebody's own.
        directories = (
            [RunDir(p) for p in folder.iterdir() if p.is_dir() and (p / "record.jsonl").exists()]
            if folder.is_dir()
            else []
        )
        summaries = sorted(
            (summarise(r) for r in directories), key=lambda s: s.written, reverse=True
        )
        if as_json:
            print(json.dumps([s.to_dict() for s in summaries], indent=1))
            return
        console = plain_console()
        if not summaries:
            console.print(
                f"no runs in {folder}. 'ronde run SCRIPT' makes one; --runs DIR looks elsewhere.",
                soft_wrap=True,
            )
            return
        heads = "run status >workers >epoch >step >loss >samples/s >took written"
        table = answer_table(*heads.split())
        colour = {
            "completed": "green",
            "failed": "red",
            "interrupted": "yellow",
            "paused": "yellow",
            "stopped": "yellow",
            "running": "cyan",
        }
        for s in summaries:
            table.add_row(
                s.run,
                Text(s.status, style=colour.get(s.status, "white")),
                str(s.start.workers) if s.start else "",
                str(s.epoch),
                f"{s.step:,}",
                figure(s.loss) if s.loss is not None else "",
                f"{s.samples_per_second:,.0f}" if s.samples_per_second else "",
                clock(s.seconds) if s.seconds is not None else "",
                _ago(s.written),
            )
        console.print(table)
