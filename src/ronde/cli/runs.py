"""``ronde runs``: list the runs, or compare some."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

from ronde.cli.answer_screen import answer_table, tell
from ronde.cli.compare import compare
from ronde.cli.options import JsonFlag, RunsOption, app, argument, setting, verb
from ronde.cli.show import recorded_runs
from ronde.watch import figure, plain_console, summarise
from ronde.world import ArgumentError
from ronde.world.units import clock


def _ago(written: float) -> str:
    seconds = max(0.0, time.time() - written)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return "just now"


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of ``ronde runs``, as the user gave them."""

    names: list[str] | None = argument("[RUN]...", "With --compare: names or paths.", default=None)
    compared: bool = setting(
        False, "--compare", "Show what differs between RUNs, and their curves."
    )
    as_csv: bool = setting(False, "--csv", "With --compare: print a line of CSV for each run.")
    runs: RunsOption = Path("runs")
    as_json: JsonFlag = False


@verb(app, "runs")
def _runs(options: Options) -> None:
    """List the runs, newest first, or compare some: what differs, and their curves.

    Examples:

    ```sh
    ronde runs
    ronde runs --runs /data/runs --json
    ronde runs --compare gpt-1 gpt-2
    ```
    """
    if options.compared:
        form = "json" if options.as_json else "csv" if options.as_csv else "text"
        compare(options.runs, options.names or [], form)
        return
    if options.names or options.as_csv:
        raise ArgumentError("RUN and --csv are for --compare: ronde runs --compare RUN RUN ….")
    from rich.text import Text

    summaries = sorted(map(summarise, recorded_runs(options.runs)), key=lambda s: -s.written)
    if options.as_json:
        print(json.dumps([s.to_dict() for s in summaries], indent=1))
        return
    console = plain_console()
    if not summaries:
        tell(
            f"no runs in {options.runs}. 'ronde run SCRIPT' makes one; --runs DIR looks elsewhere."
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
