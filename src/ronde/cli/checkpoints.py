"""``ronde checkpoints``: list, verify, prune, and export the checkpoints of a run."""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from ronde import checkpoint
from ronde.checkpoint.manifest import folder_name, step_of
from ronde.cli.answer_screen import answer_table
from ronde.cli.options import JsonFlag, RunArgument, RunsOption, app, setting, verb
from ronde.cli.show import find_run
from ronde.plan import Plan
from ronde.watch import RunDir, plain_console
from ronde.world import ArgumentError, CheckpointError, RondeError
from ronde.world.units import format_bytes


def _row(path: Path, verified: bool) -> dict[str, Any]:
    """The facts about one checkpoint."""
    files = [f for f in path.iterdir() if f.is_file()]
    row: dict[str, Any] = {
        "step": step_of(path),
        "path": str(path),
        "bytes": sum(f.stat().st_size for f in files),
        "written": max((f.stat().st_mtime for f in files), default=path.stat().st_mtime),
        "plan": None,
        "workers": None,
        "whole": None,
        "damage": None,
    }
    try:
        loaded = (
            checkpoint.verify(path)
            if verified
            else checkpoint.trust(path) or checkpoint.verify(path)
        )
    except CheckpointError as error:
        return {**row, "whole": False, "damage": str(error).partition(": ")[2]}
    state = loaded.state
    if isinstance(state.get("plan"), dict):
        row["workers"] = state.get("workers")
        with suppress(RondeError):  # a plan of a later version
            row["plan"] = Plan.from_dict(state["plan"]).spec
    return {**row, "whole": True if verified else None}


def _best_step(newest: checkpoint.Checkpoint | None) -> int | None:
    best = newest.state.get("best") if newest is not None else None
    return best["step"] if isinstance(best, dict) else None


def _newest_whole(run: RunDir, step: int | None) -> checkpoint.Checkpoint:
    if step is not None:
        return checkpoint.verify(run.checkpoints / folder_name(step))
    newest, refused = checkpoint.find_valid(run.checkpoints)
    if newest is None:
        raise CheckpointError(
            f"no checkpoint in {run.checkpoints} is whole. {refused[0]}"
            if refused
            else f"no checkpoints in {run.checkpoints}."
        )
    return newest


def _prune(run: RunDir, text: str, sure: bool) -> list[Path]:
    """The checkpoints that go, or would go."""
    policy = checkpoint.KeepPolicy.parse(text, "--prune")
    if policy.best is not None:
        raise ArgumentError(
            f"--prune {text}: the best checkpoint by the run's own keep_best stays in any case. "
            "Leave best= out."
        )
    newest = _newest_whole(run, None)
    steps = [step_of(path) for path in checkpoint.list_checkpoints(run.checkpoints)]
    stay = [newest.step] + ([best] if (best := _best_step(newest)) is not None else [])
    # Newer ones are damaged, or being written now: neither is pruned.
    doomed = policy.doomed([s for s in steps if s <= newest.step], stay)
    paths = [run.checkpoints / folder_name(step) for step in doomed]
    return [path for path in paths if not sure or checkpoint.remove(path)]


def _print(rows: list[dict[str, Any]], best: int | None) -> None:
    from rich.text import Text

    table = answer_table(">step", ">size", "written", "plan", "workers", "state")
    for row in rows:
        notes = ["best"] if row["step"] == best else []
        notes += {True: ["whole"], False: [f"damaged: {row['damage'] or ''}"]}.get(row["whole"], [])
        state = Text(", ".join(notes))
        state.highlight_words(["damaged:"], "red")
        table.add_row(
            f"{row['step']:,}",
            format_bytes(row["bytes"]),
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["written"])),
            row["plan"] or "",
            str(row["workers"] or ""),
            state,
        )
    plain_console().print(table)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of ``ronde checkpoints``, as the user gave them."""

    name: RunArgument = None
    verified: bool = setting(
        False, "--verify", "Read every file, and say which checkpoints are whole."
    )
    prune: str | None = setting(
        None,
        "--prune",
        "Show which checkpoints a policy such as last=3,every=1000 removes.",
        "POLICY",
    )
    sure: bool = setting(False, "--yes", "With --prune: remove them.")
    to: Path | None = setting(
        None, "--export", "Write the weights as one plain safetensors file.", "FILE"
    )
    step: int | None = setting(
        None, "--step", "With --export: of this checkpoint; else the newest whole one.", "N"
    )
    runs: RunsOption = Path("runs")
    as_json: JsonFlag = False


@verb(app, "checkpoints")
def _checkpoints(options: Options) -> None:
    """List the checkpoints of a run, newest first; verify, prune, or export them. Without a name,
    those of the last run.

    Examples:

    ```sh
    ronde checkpoints gpt-1 --verify
    ronde checkpoints gpt-1 --prune last=2,every=1000 --yes
    ronde checkpoints gpt-1 --export gpt.safetensors
    ```
    """
    prune, to = options.prune, options.to
    for given, needs, missing in (
        (options.sure, "--yes", "--prune" if prune is None else ""),
        (options.step is not None, "--step", "--export" if to is None else ""),
    ):
        if given and missing:
            raise ArgumentError(f"{needs} goes with {missing} only.")
    if to is not None and prune is not None:
        raise ArgumentError("--export and --prune: give one of them.")
    run = find_run(options.runs, options.name)
    if to is not None:
        chosen = _newest_whole(run, options.step)
        checkpoint.export(chosen.weights(), to)
        answer = {"checkpoint": str(chosen.path), "step": chosen.step, "file": str(to)}
        print(json.dumps(answer) if options.as_json else f"{to}: weights of step {chosen.step:,}")
        newer = [
            p.name for p in checkpoint.list_checkpoints(run.checkpoints) if step_of(p) > chosen.step
        ]
        if options.step is None and newer:
            print(f"warning: {newer[0]} is not a whole checkpoint", file=sys.stderr)
        return
    if prune is not None:
        gone = _prune(run, prune, options.sure)
        if options.as_json:
            print(
                json.dumps({"removed" if options.sure else "would_remove": [str(p) for p in gone]})
            )
            return
        for path in gone:
            print(f"{'removed' if options.sure else 'would remove'} {path}")
        if not gone:
            print("nothing to remove")
        elif not options.sure:
            print("nothing is removed yet: add --yes")
        return
    rows = [_row(path, options.verified) for path in checkpoint.list_checkpoints(run.checkpoints)]
    newest = next(
        (checkpoint.trust(Path(r["path"])) for r in rows if r["whole"] is not False), None
    )
    best = _best_step(newest)
    if options.as_json:
        print(json.dumps([{**row, "best": row["step"] == best} for row in rows], indent=1))
    elif rows:
        _print(rows, best)
    else:
        print(f"no checkpoints in {run.checkpoints}")
    if options.verified and any(row["whole"] is False for row in rows):
        raise typer.Exit(1)
