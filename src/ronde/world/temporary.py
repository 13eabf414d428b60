"""Names of temporary folders that tell whose they are."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["pid_space", "temporary_prefix"]


def pid_space() -> str:
    """What tells the process numbers of containers apart that share a temporary folder."""
    try:
        return Path("/proc/self/ns/pid").readlink().name.strip("pid:[]")
    except OSError:
        return "0"


def temporary_prefix() -> str:
    """Prefix of this process's folders: a later launcher removes them once it is gone."""
    return f"ronde-{os.getpid()}-{pid_space()}-"
