"""Run workers on this machine."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from typing import Any

from ronde.launch.console import Output
from ronde.launch.engine import Host
from ronde.launch.fleet import Fleet
from ronde.launch.job import Job, Nodes, Outcome
from ronde.launch.node import devices
from ronde.launch.restarts import Restarts
from ronde.world import ArgumentError

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
    total, logs = (nodes or Nodes()).total_of(job), job.directory and job.directory / "logs"
    output = Output(total, logs, show, message, names)
    try:
        with Fleet([Host("", job.workers)], None, nodes=nodes) as fleet:
            return fleet.run(job, [job.workers], output, restarts)
    finally:
        output.close()
