"""How much memory and disk a cache may use, given container limits and other users."""

from __future__ import annotations

import math
import os
from pathlib import Path

from ronde.world import ArgumentError
from ronde.world.cores import control_groups, number_in
from ronde.world.units import parse_bytes


def read_size(value: int | float | str, argument: str) -> int:
    """Parse bytes from a number or text.

    Raises:
        ArgumentError: neither, or less than 1 byte.

    Example:
        >>> read_size("1.5 GiB", "limit"), read_size(4096, "limit")
        (1610612736, 4096)
    """
    amount = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        amount = float(value)
    elif isinstance(value, str):
        size = parse_bytes(value)
        amount = math.nan if size is None else size
    if not math.isfinite(amount) or amount < 1:
        raise ArgumentError(
            f"{argument}={value!r}: expected a number of bytes, or a size as '2GiB' or '500MB'."
        )
    return int(amount)


def _reclaimable(folder: Path, name: str) -> float:
    """Page cache that the kernel frees before it kills a process."""
    try:
        for line in (folder / "memory.stat").read_text().splitlines():
            if line.startswith(f"{name} "):
                return float(line.split()[1])
    except (OSError, ValueError, IndexError):
        pass
    return 0.0


def _cgroup_room() -> float:
    """Bytes this process's control groups still allow (v1 or v2); infinite without a limit."""
    room = math.inf
    for folder in control_groups("memory"):
        for limit, used, stat in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            most, taken = number_in(folder / limit), number_in(folder / used)
            if most < 2**60:  # version 1 writes a huge number where there is no limit
                taken = taken if math.isfinite(taken) else 0.0
                room = min(room, most - taken + _reclaimable(folder, stat))
    return max(0.0, room)


def free_memory() -> int:
    """Bytes available without swapping or being killed, within the container's limit."""
    import psutil

    return int(min(float(psutil.virtual_memory().available), _cgroup_room()))


def free_disk(folder: str | Path | int) -> tuple[int, int]:
    """Bytes an ordinary user can still write, and total bytes."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize


def disk_reserve(total: int, memory: bool) -> int:
    """Bytes that a cache leaves free.

    A twentieth of a disk, at most 10 GB; a quarter of /dev/shm, because loading processes pass
    batches through it and die when it is full.
    """
    return total // 4 if memory else min(total // 20, 10 * 10**9)
