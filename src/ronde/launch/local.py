"""Run workers on this machine."""

from __future__ import annotations

import dataclasses
import secrets
import shutil
import signal
import sys
import time
import uuid
from collections.abc import Callable
from typing import Any

from ronde.launch.console import Output, Router
from ronde.launch.hang_watch import record_hangs
from ronde.launch.node import Job, Nodes, Outcome, devices, run_workers, worker_environment
from ronde.launch.restarts import Restarts
from ronde.launch.spares import Spares
from ronde.world import ArgumentError
from ronde.world.fence import AGAIN

__all__ = ["check_workers", "run_here", "resolve_workers"]

_MOST_PER_CORE = 8


def resolve_workers(asked: str) -> int:
    """Turn ``auto`` or a number into a worker count.

    ``auto`` is one per GPU; without a GPU, one per usable core, at most 8.
    """
    if asked == "auto":
        count, kind = devices()
        return count if kind == "cuda" else min(count, 8)
    try:
        workers = int(asked)
    except ValueError:
        workers = 0
    if workers < 1:
        raise ArgumentError(f"--workers {asked!r}: expected a whole number above 0, or auto.")
    return workers


def check_workers(workers: int) -> None:
    """Refuse more workers than devices; on the CPU, more than could make progress."""
    count, kind = devices()
    if kind == "cuda" and workers > count:
        raise ArgumentError(
            f"more workers than devices: {workers} asked, {count} "
            f"GPU{'s' if count != 1 else ''} here. Use --workers {count}, or "
            "RONDE_DEVICE=cpu to train on the CPU."
        )
    if kind == "cpu" and workers > count * _MOST_PER_CORE:
        raise ArgumentError(
            f"more workers than devices: {workers} asked, but no GPU and {count} usable "
            "cores here, on which at most "
            f"{count * _MOST_PER_CORE} workers ({_MOST_PER_CORE} per core) make progress. "
            f"Use --workers {count}."
        )


def run_here(
    job: Job,
    show: Callable[[bytes], None],
    message: Callable[[dict[str, Any]], None],
    names: list[str] | None = None,
    nodes: Nodes | None = None,
    restarts: Restarts | None = None,
) -> Outcome:
    """Start workers on this machine, watch them, and return when all have ended.

    Args:
        show: called with bytes that rank 0 printed.
        message: called with progress messages of rank 0.
        names: a prefix for each rank's lines; then those of all ranks are shown.
        nodes: this machine among others on which the same is started; each has as many workers.
        restarts: how often the workers are started again; None: never.
    """
    if shutil.which(sys.executable) is None:
        raise ArgumentError(f"this Python ({sys.executable}) cannot be started again")
    nodes, alone = nodes or Nodes(), nodes is None
    total, first = job.workers * nodes.count, job.workers * nodes.rank
    output = Output(total, job.directory and job.directory / "logs", show, message, names)
    run_id = uuid.uuid4().hex if alone else "ronde"
    secret = secrets.token_hex(32)
    asked: list[int] = []
    handlers: dict[int, Any] = {}
    if job.leaves:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            handlers[number] = signal.signal(number, lambda n, _: asked.append(n))
    spares = Spares(job.command, worker_environment(job, nodes)) if job.forks else None
    start = time.monotonic()
    try:
        while True:
            if asked:  # between two generations
                name = signal.Signals(asked[0]).name
                told = f"asked to leave by {name}"
                return Outcome(AGAIN, error=told, interrupted=True, again=True)
            own = restarts.begin() if restarts else {}
            if alone:  # launchers of several hosts have no secret in common
                own["RONDE_SECRET"] = secret
            mine = dataclasses.replace(job, environment={**job.environment, **own})
            router = Router(job.workers, output, first)
            outcome = run_workers(mine, router, nodes, run_id, spares, asked_before=asked)
            record_hangs(job.directory, [*outcome.slow, outcome.hang])
            if restarts is None or not restarts.goes_on(outcome, lambda: bool(asked)):
                return dataclasses.replace(outcome, seconds=time.monotonic() - start)
    finally:
        for taken, handler in handlers.items():
            signal.signal(taken, handler)
        if spares is not None:
            spares.close()
        output.close()
