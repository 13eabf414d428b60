"""Processes that end with their parent, and names of temporary folders that tell whose they are."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

__all__ = ["adopt_orphans", "end_with_parent", "memory_root", "pid_space", "temporary_prefix"]

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # of Linux's prctl


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel send this signal to this process once its parent is gone. Only Linux can.

    Example:
        >>> subprocess.Popen(["sleep", "60"], preexec_fn=end_with_parent)
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants, so that they can be found. Only Linux can."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def pid_space() -> str:
    """What tells the process numbers of containers apart that share a temporary folder."""
    try:
        return Path("/proc/self/ns/pid").readlink().name.strip("pid:[]")
    except OSError:
        return "0"


def temporary_prefix() -> str:
    """Prefix of this process's folders: a later launcher removes them once it is gone."""
    return f"ronde-{os.getpid()}-{pid_space()}-"


def memory_root() -> Path:
    """The in-memory folder. /dev/shm may be small in a container: RONDE_SHM names another tmpfs."""
    return Path(os.environ.get("RONDE_SHM") or "/dev/shm")
