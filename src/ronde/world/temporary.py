"""Names of temporary folders that tell whose they are."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["memory_root", "pid_space", "temporary_prefix"]


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
