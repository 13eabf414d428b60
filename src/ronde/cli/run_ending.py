"""How a run ended, for people: a failure, a hang, a pause; and one worker to compare with."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ronde.cli.answer_screen import tell
from ronde.cli.leaving import Limit, requeue
from ronde.cli.script import discard, short, study_environment
from ronde.watch import Alert, Ended, RunDir, append_events, summarise
from ronde.world import ArgumentError

if TYPE_CHECKING:
    from ronde.cli.launch_plan import LaunchPlan
    from ronde.launch import Outcome

MEASURE_SECONDS = 10.0
"""How long one worker is measured, to compare with."""
_LONGER = "if it was only slow: --hang-timeout SECONDS waits longer, 0 for ever"


def check_outcome(outcome: Outcome, launch: LaunchPlan, directory: RunDir) -> None:
    """Say it if the workers failed, or left before the training had ended.

    Raises:
        typer.Exit: with the status of the failure.
    """
    box = launch.box
    if outcome.status:
        if box is not None and not outcome.interrupted:
            box.tell(outcome.traceback or outcome.error or "", outcome.rank)
        _note_failure(directory, outcome.error or "", outcome.rank, outcome.seconds)
        why = "the first host keeps the run" if launch.second else "--runs none"
        _tell_failure(outcome, directory, "" if launch.kept else why)
        raise typer.Exit(outcome.status)
    started = summarise(directory)
    trains = started.start is not None and not started.start.framework
    if outcome.left and trains and started.status in ("running", "stopped"):
        error = "the workers left with status 0 before the training had ended (os._exit)"
        if box is not None:
            box.tell(error)
        _note_failure(directory, error, 0, outcome.seconds)
        typer.echo(
            f"{error}. What it trained after its last checkpoint is lost: let the script end "
            "by itself, or call run.save() before.",
            err=True,
        )
        raise typer.Exit(1)


def _note_failure(directory: RunDir, error: str, rank: int | None, seconds: float) -> None:
    summary = summarise(directory)
    if summary.start is None:
        return
    status = "interrupted" if rank is None else "failed"
    append_events(
        directory.record,
        Ended(
            status=status,
            step=summary.step,
            epoch=summary.epoch,
            samples=summary.samples,
            samples_per_second=None,
            seconds=seconds,
            error=error[:2000],
            rank=rank,
        ),
    )


def tell_left(outcome: Outcome, directory: RunDir, limit: Limit, kept: bool) -> None:
    """Tell that the run was asked to leave, and let a scheduler start it again."""
    why = "the time limit is reached" if limit.reached else outcome.error
    summary = summarise(directory)
    step = summary.step
    again = f". Go on with: ronde run --resume --name {directory.name} …" if kept else ""
    if outcome.paused:
        typer.echo(f"paused at {summary.samples:,} samples (step {step:,}){again}", err=True)
        return
    if limit.reached or "SIGUSR1" in (outcome.error or ""):
        again = requeue() or again
    typer.echo(f"{why}: it has left after step {step}{again}", err=True)


def tell_stopped(alert: Alert, directory: RunDir) -> None:
    """Tell which rule has ended the run."""
    typer.echo(
        f"ended by a rule: {alert.rule}, saved at step {summarise(directory).step:,}; go on with: "
        f"ronde run --resume --name {directory.name} …",
        err=True,
    )


def _tell_failure(outcome: Outcome, directory: RunDir, lost: str) -> None:
    """Say what failed, and what to do. ``lost`` says why the run directory goes now, if it does."""

    def headline(text: str) -> None:
        tell((text, "bold red"), err=True)

    # By name only: the end of a failed run must not wait for checksums.
    names = [p.name[5:] for p in directory.checkpoints.glob("step-*")] if not lost else []
    saved = max((int(n) for n in names if n.isdecimal()), default=None)
    again = f"ronde run --resume --name {directory.name} …" if saved is not None else ""
    if outcome.interrupted:
        trained, progress = summarise(directory).step, ""
        if saved is not None:
            progress = f", after step {trained:,}. Saved: step {saved:,}. Go on with: {again}"
        elif trained:
            progress = f", after step {trained:,}. Nothing is saved" + (
                ": no checkpoint was due. See save_every of ronde.distribute" if not lost else ""
            )
        tell(f"{outcome.error}; every worker has ended{progress}", err=True)
        return
    if outcome.hang or outcome.rank is None:
        headline(outcome.error or "")
    elif outcome.traceback:
        first = f"{outcome.before}; rank {outcome.rank} failed then:"
        headline(first if outcome.before else f"rank {outcome.rank} failed first:")
        print(outcome.traceback.rstrip(), file=sys.stderr, flush=True)
    else:
        headline(f"rank {outcome.rank} failed first: {outcome.error}")
    if outcome.hang:
        tell(_LONGER, err=True)
    if meant := _meaning(outcome, directory):
        tell(f"that is: {meant}", err=True)
    log = directory.logs if outcome.rank is None else directory.logs / f"rank-{outcome.rank}.log"
    if lost:
        if log.is_file() and not outcome.traceback:
            last = log.read_text(errors="replace").splitlines()[-20:]
            print(*last, sep="\n", file=sys.stderr, flush=True)
        tell(f"the rest of its output was not kept: {lost}", err=True)
        return
    go_on = f"   go on with: {again}" if again else ""
    tell(f"its output: {short(log)}{go_on}", err=True)


def _meaning(outcome: Outcome, directory: RunDir) -> str | None:
    """What an error of torch means under the run's plan, unless its traceback says it."""
    from ronde.plan import Plan
    from ronde.plan.torch_errors import meaning

    meant = None
    if outcome.rank is not None and directory.plan.is_file():
        with contextlib.suppress(ArgumentError):  # the plan of another version
            meant = meaning(outcome.error or "", Plan.load(directory.plan))
    return None if meant is None or meant in (outcome.traceback or "") else meant


def one_worker(command: list[str], feed: str) -> float | None:
    """Measure one worker with all cores on the same script, in samples per second.

    Measured twice, with threads that spin while they wait and with ``ronde run``'s setting. Which
    is faster depends on the machine's load; the comparison uses the better one.
    """
    from ronde.launch import Job, run_here

    rates: list[float] = []
    ways: tuple[dict[str, str], ...] = ({"OMP_WAIT_POLICY": "ACTIVE"}, {})
    for waits in ways:
        with tempfile.TemporaryDirectory(prefix="ronde-baseline-") as folder:
            file = Path(folder) / "rate.json"
            environment = study_environment("baseline", file, {"seconds": MEASURE_SECONDS / 2})
            environment |= {"RONDE_FEED": feed, **waits}
            if run_here(Job(command, 1, None, environment), discard, lambda _: None).interrupted:
                return None
            try:
                rates.append(float(json.loads(file.read_text())["samples_per_second"]))
            except (OSError, ValueError, KeyError, TypeError):
                continue
    return max(rates, default=None)
