"""The processes that jobs start: each leads a session of its own, and ends with this process."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ronde.world.processes import end_with_parent

__all__ = ["end_child", "has_ended", "how_ended", "last_line", "start_child"]


def _begin(number: int, cores: Sequence[int]) -> None:
    """In the child: end with its parent, and stay on these cores."""
    end_with_parent(number)
    if cores:
        os.sched_setaffinity(0, cores)


def start_child(
    words: Sequence[str],
    environment: Mapping[str, str],
    *,
    at_end: int = signal.SIGKILL,
    cores: Sequence[int] = (),
    **streams: Any,
) -> subprocess.Popen[bytes]:
    """Start a command that reads no input.

    Args:
        words: the command.
        environment: its variables.
        at_end: the signal that it gets when this process is gone: SIGTERM lets a training save.
        cores: those that it may use; none: all.
        streams: what else ``Popen`` takes.
    """
    return subprocess.Popen(
        words,
        env=environment,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C reaches this process alone, which ends children in order
        preexec_fn=functools.partial(_begin, at_end, list(cores)),
        **streams,
    )


def has_ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether a process ends within so many seconds."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    return process.returncode is not None


def end_child(process: subprocess.Popen[bytes]) -> None:
    """Kill a child and all that it started."""
    with contextlib.suppress(ProcessLookupError):  # its group outlives it while it has members
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def how_ended(status: int) -> str:
    """A status in words.

    Example:
        >>> how_ended(-9), how_ended(1)
        ('killed by SIGKILL', 'status 1')
    """
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"status {status}"


def last_line(log: Path) -> str:
    """The last line of a log, which says most about a failure; empty if there is none."""
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1][:200] if lines else ""
