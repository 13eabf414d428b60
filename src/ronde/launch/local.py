"""Run workers on this machine."""

from __future__ import annotations

import shutil
import sys
import uuid
from collections.abc import Callable
from typing import Any

from ronde.launch.agent import Job, Nodes, Outcome, devices, run_workers
from ronde.launch.console import Output, Router
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
) -> Outcome:
    """Start workers on this machine, watch them, and return when all have ended.

    Args:
        show: called with bytes that rank 0 printed.
        message: called with progress messages of rank 0.
        names: a prefix for each rank's lines; then those of all ranks are shown.
        nodes: this machine among others on which the same is started; each has as many workers.
    """
    if shutil.which(sys.executable) is None:
        raise ArgumentError(f"this Python ({sys.executable}) cannot be started again")
    nodes, alone = nodes or Nodes(), nodes is None
    total, first = job.workers * nodes.count, job.workers * nodes.rank
    output = Output(total, job.directory and job.directory / "logs", show, message, names)
    run_id = uuid.uuid4().hex if alone else "ronde"
    try:
        return run_workers(job, Router(job.workers, output, first), nodes, run_id)
    finally:
        output.close()
