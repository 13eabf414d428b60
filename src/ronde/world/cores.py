"""How many cores this process may really use (affinity and container quota, not what the machine
has), and how it shares them.
"""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

__all__ = ["openmp_waits", "schedule_as_batch", "threads_per_worker", "usable_cores"]

_SPINS = 10_000  # of GOMP_SPINCOUNT: some tens of microseconds

_CGROUP = Path("/sys/fs/cgroup")


def _own_groups(proc: Path) -> dict[str, str]:
    """Controller name ('' for cgroup v2) -> path of this process inside that hierarchy."""
    groups: dict[str, str] = {}
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return groups
    for line in lines:
        parts = line.split(":", 2)
        if len(parts) == 3:
            for controller in parts[1].split(","):
                groups[controller] = parts[2]
    return groups


def _ancestors(root: Path, inside: str) -> list[Path]:
    """The folders from a process's own cgroup up to the root: a limit on any of them holds."""
    folder = root / inside.lstrip("/")
    found = [folder]
    while folder != root and root in folder.parents:
        folder = folder.parent
        found.append(folder)
    # Inside a container the path in /proc may be the host's: then only the root itself exists here.
    return [f for f in found if f.is_dir()] or [root]


def _quota_v2(folder: Path) -> float:
    try:
        quota, period = (folder / "cpu.max").read_text().split()[:2]
        return math.inf if quota == "max" else float(quota) / float(period)
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf


def _quota_v1(folder: Path) -> float:
    try:
        quota = float((folder / "cpu.cfs_quota_us").read_text())
        period = float((folder / "cpu.cfs_period_us").read_text())
        return quota / period if quota > 0 and period > 0 else math.inf
    except (OSError, ValueError):
        return math.inf


def _cgroup_cores(root: Path = _CGROUP, proc: Path = Path("/proc/self/cgroup")) -> float:
    """Cores that the cgroup quota allows (v1 or v2), infinite where there is none."""
    groups = _own_groups(proc)
    limit = math.inf
    for folder in _ancestors(root, groups.get("", "/")):
        limit = min(limit, _quota_v2(folder))
    for mount in ("cpu", "cpu,cpuacct", "cpuacct,cpu"):
        if (root / mount).is_dir():
            for folder in _ancestors(root / mount, groups.get("cpu", "/")):
                limit = min(limit, _quota_v1(folder))
    return limit


def usable_cores() -> int:
    """Cores that this process may use, at least 1: the affinity mask, cut by the cgroup quota.

    ``os.cpu_count()`` says what the machine has; in a container or under ``taskset`` that is more
    than a process may use, and threads beyond it were measured to slow a step 10 to 24 times.

    Example:
        >>> usable_cores() >= 1
        True
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:  # macOS
        cores = os.cpu_count() or 1
    return max(1, min(cores, math.floor(min(_cgroup_cores(), 1e9))))


def threads_per_worker(local_size: int, cores: int | None = None) -> int:
    """Compute threads for each of ``local_size`` workers on this node: cores divided by workers, at
    least 1.
    """
    return max(1, (usable_cores() if cores is None else cores) // max(1, local_size))


def openmp_waits(workers: int, threads: int, cores: int | None = None) -> dict[str, str]:
    """Variables for ``workers`` on this node that say how their compute threads wait for each
    other, before torch is imported.

    GNU OpenMP's threads spin for milliseconds before they sleep. That is best between computations
    that follow each other at once. After a wait (for a batch, for gloo) it is not: the thread that
    goes on first spins on the core on which Linux has put those that it woke. Where threads have a
    core each they spin shortly; where they share cores, not at all. ``benchmarks/waiting.py`` tells
    what it costs.

    Example:
        >>> openmp_waits(1, 2, cores=2), openmp_waits(2, 1, cores=2)
        ({'GOMP_SPINCOUNT': '10000'}, {'OMP_WAIT_POLICY': 'PASSIVE'})
        >>> openmp_waits(2, 2, cores=2), openmp_waits(1, 1, cores=2)
        ({'OMP_WAIT_POLICY': 'PASSIVE'}, {})
    """
    if os.environ.get("OMP_WAIT_POLICY") or os.environ.get("GOMP_SPINCOUNT"):
        return {}
    if threads > 1 and workers * threads <= (usable_cores() if cores is None else cores):
        return {"GOMP_SPINCOUNT": str(_SPINS)}
    return {"OMP_WAIT_POLICY": "PASSIVE"} if workers > 1 else {}


def schedule_as_batch() -> bool:
    """Schedule all threads of this process, and those that they start, as ``SCHED_BATCH`` (Linux;
    no privilege is needed).

    gloo moves bytes in threads of its own, which Linux lets interrupt each other, and the
    computation, for every piece that arrives (``benchmarks/scheduling.py`` tells what it costs). A
    batch thread that wakes up takes a free core at once, but takes none away.

    Returns:
        Whether it does so now. False where ``RONDE_SCHEDULING=other``, where the policy was chosen
        by somebody else, and off Linux.
    """
    if not hasattr(os, "SCHED_BATCH") or os.environ.get("RONDE_SCHEDULING") == "other":
        return False
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            for thread in Path("/proc/self/task").iterdir():
                with contextlib.suppress(ProcessLookupError):  # it has ended
                    os.sched_setscheduler(int(thread.name), os.SCHED_BATCH, os.sched_param(0))
        return os.sched_getscheduler(0) == os.SCHED_BATCH
    return False
