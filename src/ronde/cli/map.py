"""``ronde map``: the same code on many items, on many workers."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ronde.cli.answer_screen import tell
from ronde.cli.fork import find_origin
from ronde.cli.hosts import HostOptions
from ronde.cli.leaving import on_signals
from ronde.cli.map_container import folder_of_host, items_of_host
from ronde.cli.options import TIME, JsonFlag, app, argument, parsed, setting, verb
from ronde.cli.script import IN_MAP, WorkersOption, command_of, short
from ronde.watch import plain_console
from ronde.world import ArgumentError, RondeError
from ronde.world.processes import end_with_parent
from ronde.world.units import clock, format_bytes, parse_duration

if TYPE_CHECKING:
    from ronde.launch import Container


@dataclass(frozen=True, kw_only=True)
class Options(HostOptions):
    """The options of ``ronde map``, as the user gave them."""

    arguments: list[str] | None = argument(
        "SCRIPT [ARGS]... | -- COMMAND...",
        "A script that loops over ronde.items(…), or a command for each item.",
        default=None,
    )
    items: str | None = setting(
        None,
        "--items",
        "'data/*.tar', lines:FILE, rows:FILE.parquet, or @FILE with a name a line.",
        "ITEMS",
    )
    out: Path | None = setting(
        None, "--out", "Folder for the outputs; all hosts must see it.", "DIR"
    )
    resume: Path | None = setting(None, "--resume", "Go on with the map in this folder.", "DIR")
    model: str | None = setting(
        None,
        "--model",
        "Give the script a run's trained weights, as ronde.weights(…); a command, their "
        "file for {model}.",
        "RUN[@STEP]",
    )
    chunk: str = setting(
        "auto",
        "--chunk",
        "Items done together: so many, or so many bytes, as 64MB. auto cuts them by "
        "bytes, and again where one takes longer than a minute.",
        "auto|N|SIZE",
    )
    retries: int = setting(2, "--retries", "Try a failed item K times again.", "K", min=0)
    limit: str | None = setting(
        None, "--limit", "Kill the process of an item that takes longer, as 90s or 10m.", "TIME"
    )
    tolerate: str | None = setting(
        None, "--tolerate", "End the map when more items fail. Default: do all others.", "N|P%"
    )
    joined: bool = setting(
        True, "--join/--no-join", "Join the outputs at the end, or leave the chunks'."
    )
    as_json: JsonFlag = False
    quiet: bool = setting(False, "--quiet -q", "No progress, no summary.")
    workers: WorkersOption = "auto"


@verb(app, "map")
def _map(options: Options) -> None:
    """Run a script or a command on many items, on many workers.

    SCRIPT loops over ronde.items(…) and writes into chunk.output(…). After --, a command is started
    once an item instead: {} is the item, and what it prints is its output.

    Every chunk is done at least once, and its output is there exactly once, whatever is killed in
    between. --resume goes on, also from other machines at the same time.

    Examples:

    ```sh
    ronde map --items 'data/*.tar' --out scores score.py          one chunk after the other
    ronde map --items lines:reviews.txt --workers 8 --out labels label.py
    ronde map --items rows:table.parquet --limit 10m --tolerate 1% --out out score.py
    ronde map --items 'images/*.jpg' --model digits --out labels label.py
    ronde map --items 'configs/*.yaml' --out out -- python simulate.py {}
    ronde map --resume scores                                     after anything
    ```
    """
    from ronde.jobs.ledger import JobLedger
    from ronde.jobs.map_plan import (
        FAILED,
        join_outputs,
        load_map,
        result_of,
        without_output,
        write_failed,
    )
    from ronde.jobs.map_worker import STOPPED
    from ronde.launch import container
    from ronde.launch.container import tell_service

    box = None if options.named else container()
    out = (options.resume or options.out or Path()).absolute()
    if box is not None:
        os.environ.update(box.environment)
        out = folder_of_host(box, out)
    if options.resume is None:
        if not _plan(options, out, box):
            tell(f"no items for {box and box.current}")
            return
    elif options.items or options.out or options.arguments or options.model:
        raise ArgumentError("--resume goes on with a map as it was planned: give it alone.")
    root = out / ".map"
    plan, items = load_map(root)
    ledger, began = JobLedger(root), time.monotonic()
    if options.resume is not None and ledger.left and not items.are_there():
        raise ArgumentError(
            f"none of the items exists, seen from {Path.cwd()}. Resume in the folder where the map "
            "was planned."
        )
    (root / STOPPED).unlink(missing_ok=True)
    if not options.quiet and not options.as_json:
        shown = [short(Path(plan.command[0])), *plan.command[1:]]
        tell(f"ronde map {' '.join(shown)}  ·  {len(items):,} items  ·  {out.name}")
    again = f"go on with: ronde map --resume {options.resume or options.out}"
    # A resume after all chunks were done makes those anew whose output was removed.
    if not ledger.left:
        ledger.add(without_output(ledger, len(items)))
    status = _work(options, out, ledger, began)
    write_failed(ledger, items, out)
    if (root / STOPPED).exists():
        reason, failed = (root / STOPPED).read_text().rstrip("."), out / FAILED
        where = f"They are in {short(failed)}; {again}" if failed.exists() else again.capitalize()
        tell_service(f"{reason}. {where}.")
        typer.echo(f"error: {reason}. {where}.", err=True)
        raise typer.Exit(1)
    if ledger.left:
        tell_service(f"stopped; {again}")
        typer.echo(f"stopped; {again}", err=True)
        raise typer.Exit(max(status, 0) or 1)
    ledger.tidy()
    if lost := without_output(ledger, len(items)):
        raise RondeError(f"items {', '.join(lost)} have no output; {again}.")
    if options.joined:
        join_outputs(ledger, out)
    result = result_of(ledger, items)
    if options.as_json:
        print(json.dumps(result.to_dict() | {"wall_seconds": time.monotonic() - began}, indent=1))
    elif not options.quiet:
        bad = f", {result.failed:,} set aside ({short(out / FAILED)})" if result.failed else ""
        took = f"{time.monotonic() - began:.1f} s"
        tell(f"{result.done:,} items in {result.chunks:,} chunks{bad}, in {took}: {short(out)}")
    if result.failed:
        tell_service(f"{result.failed:,} items set aside: {out / FAILED}")
    raise typer.Exit(1 if result.failed else 0)


def _plan(options: Options, out: Path, box: Container | None) -> bool:
    """Plan the map. False if this host of a container has no items."""
    from ronde.jobs.items import find_items
    from ronde.jobs.map_plan import MapPlan, chunk_cuts, plan_map
    from ronde.launch import resolve_workers

    command = options.arguments or []
    if options.items is None or options.out is None or not command:
        raise ArgumentError(
            "name the items, the output, and the script: ronde map --items 'data/*.tar' --out "
            "scores score.py."
        )
    # click takes the first -- away; a command is what is no script.
    each = not command[0].endswith(".py")
    if not each:
        command = command_of(None, command) + list(box.arguments if box is not None else ())
        command = [str(Path(command[0]).absolute()), *command[1:]]
    elif box is not None and box.arguments:
        raise ArgumentError(
            f"the job's hyperparameters ({' '.join(box.arguments)}) are arguments of a script: a "
            "command for each item takes none."
        )
    elif shutil.which(command[0]) is None:
        raise ArgumentError(
            f"command not found: {command[0]}. A script for all items has a name with .py."
        )
    items = find_items(options.items) if box is None else items_of_host(box, options.items)
    if items is None:
        return False
    count = resolve_workers(options.workers) if options.workers != "auto" else os.cpu_count() or 1
    limit = (
        None if options.limit is None else parsed("--limit", options.limit, parse_duration, TIME)
    )
    tolerate = _tolerated(options.tolerate, len(items))
    plan = MapPlan(command, each, options.retries, limit, tolerate)
    cuts = chunk_cuts(items, options.chunk, count)
    model = None if options.model is None else _model(options.model)
    out.mkdir(parents=True, exist_ok=True)
    plan_map(out / ".map", items, plan, cuts, model or (lambda folder: None))
    return True


def _model(text: str) -> Callable[[Path], None]:
    """What writes the weights of a run into a folder.

    Raises:
        ArgumentError: there is no such run, or no such checkpoint.
        CheckpointError: it is damaged, or of several models.
    """
    from ronde import checkpoint
    from ronde.jobs.map_plan import MODEL

    runs = Path(os.environ.get("RONDE_RUNS", "runs"))
    weights = checkpoint.verify(find_origin(text, runs, "--model").checkpoint).weights()
    return lambda folder: checkpoint.export(weights, folder / MODEL)


def _tolerated(text: str | None, count: int) -> int | None:
    if text is None:
        return None
    number = text.removesuffix("%")
    try:
        share = float(number)
    except ValueError:
        share = -1.0
    if share < 0:
        raise ArgumentError(f"--tolerate {text}: expected a number of items, or a share as 1%.")
    return int(share * count / 100 if text.endswith("%") else share)


def _work(options: Options, out: Path, ledger: Any, began: float) -> int:
    """Have workers do all that is left. Returns the status of ``ronde run``."""
    if not ledger.left:
        return 0
    command = [sys.executable, "-m", "ronde", "run", "--quiet", "--workers", options.workers]
    # A worker that dies loses one chunk's time, so restarts are nearly unlimited.
    command += ["--runs", str(out / ".map" / "runs"), "--restarts", "1000"]
    command += ["--hang-timeout", "0", "--no-spares"]  # workers import no torch
    command += options.words()
    command += ["-m", "ronde.jobs.map_worker", str(ledger.root)]
    process = subprocess.Popen(
        command,
        env=os.environ | {IN_MAP: "1"},
        # Ctrl-C reaches this process alone, which asks the launcher to end the workers in order.
        start_new_session=True,
        preexec_fn=functools.partial(end_with_parent, signal.SIGTERM),
    )
    # the workers' launcher ends them all
    with on_signals(process.send_signal), _bar(options, ledger, began) as show:
        while process.poll() is None:
            show()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.0)  # seconds between looks at the ledger
    return process.returncode


@contextlib.contextmanager
def _bar(options: Options, ledger: Any, began: float) -> Iterator[Any]:
    """A line of progress, on a terminal only."""
    from ronde.jobs.map_plan import load_map, result_of

    console = plain_console()
    if options.as_json or options.quiet or not console.is_terminal:
        yield lambda: None
        return
    _, items = load_map(ledger.root)
    first = result_of(ledger, items).done_bytes
    with console.status("starting workers") as status:

        def show() -> None:
            now = result_of(ledger, items)
            new, passed = now.done_bytes - first, time.monotonic() - began
            if new:
                left = (now.bytes - now.done_bytes) / (new / passed)
                bad = f"   {now.failed:,} set aside" if now.failed else ""
                count = now.done + now.failed
                status.update(
                    f"{count:,}/{now.items:,} items   {now.done_bytes / now.bytes:.0%}   "
                    f"{format_bytes(new / passed)}/s   {clock(left)} left{bad}"
                )

        yield show
