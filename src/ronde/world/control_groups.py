"""Limits of a process's control groups, of versions 1 and 2."""

from __future__ import annotations

import math
from pathlib import Path

__all__ = ["control_groups", "memory_limit", "number_in"]

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def control_groups(controller: str, root: Path = _ROOT, process: Path = _OWN) -> list[Path]:
    """Folders of a process's control group and of those above it: a limit on any of them applies.

    Args:
        controller: ``cpu`` or ``memory``.
        root: where they are mounted.
        process: ``/proc/PID/cgroup``.
    """
    try:
        lines = [line.split(":", 2) for line in process.read_text().splitlines()]
    except OSError:
        lines = []
    named = {names: path for _, names, path in filter(lambda parts: len(parts) == 3, lines)}
    path = next((p for names, p in named.items() if controller in names.split(",")), "/")
    mounts = [(root / d, path) for d in (controller, "cpu,cpuacct", "cpuacct,cpu")]
    found: list[Path] = []
    for mount, inside in ((root, named.get("", "/")), *mounts):
        if mount.is_dir() and (mount == root or controller in mount.name.split(",")):
            own = mount / inside.lstrip("/")
            folders = [f for f in (own, *own.parents) if f.is_relative_to(mount) and f.is_dir()]
            # in a container the path may be the host's: then only the mount itself is here
            found += folders or [mount]
    return found


def number_in(path: Path) -> float:
    """The number in a file; infinite for ``max``, or where there is no such file."""
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        return math.inf


def memory_limit() -> float:
    """Bytes that this process's control groups allow; infinite without a limit."""
    names = "memory.max", "memory.limit_in_bytes"
    limits = [number_in(f / name) for f in control_groups("memory") for name in names]
    return min((limit for limit in limits if limit < 2**60), default=math.inf)  # version 1's "none"
