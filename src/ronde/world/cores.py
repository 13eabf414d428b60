"""What this process may use: cores (affinity and container quota), and memory; and how its threads
share cores. Limits are those of control groups, of versions 1 and 2.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from pathlib import Path

__all__ = [
    "control_groups",
    "memory_limit",
    "number_in",
    "openmp_waits",
    "schedule_as_batch",
    "threads_per_worker",
    "usable_cores",
]


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
    groups: list[Path] = []
    for mount, inside in ((root, named.get("", "/")), *mounts):
        if mount.is_dir() and (mount == root or controller in mount.name.split(",")):
            own = mount / inside.lstrip("/")
            folders = [f for f in (own, *own.parents) if f.is_relative_to(mount) and f.is_dir()]
            # in a container the path may be the host's: then only the mount itself is here
            groups += folders or [mount]
    return groups


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


def _quota(folder: Path) -> float:
    """Cores that a control group's quota allows, of version 2 or 1; infinite if there is none."""
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = (folder / "cpu.max").read_text().split()[:2]
        return math.inf if quota == "max" else float(quota) / float(period)
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        allowed = float((folder / "cpu.cfs_quota_us").read_text())
        each = float((folder / "cpu.cfs_period_us").read_text())
        return allowed / each if allowed > 0 else math.inf  # -1: no limit
    return math.inf


def _cgroup_cores(groups: Sequence[Path]) -> float:
    """Cores the quotas of control groups allow; infinite if there is none."""
    return min(map(_quota, groups), default=math.inf)


def usable_cores() -> int:
    """Count the cores this process may use: the affinity mask, cut by the cgroup quota; at least 1.

    ``os.cpu_count()`` counts the machine's cores. In a container or under ``taskset`` a process may
    use fewer, and surplus threads slow a step 10 to 24 times (measured).

    Example:
        >>> usable_cores() >= 1
        True
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:  # macOS
        cores = os.cpu_count() or 1
    return max(1, min(cores, math.floor(min(_cgroup_cores(control_groups("cpu")), 1e9))))


def threads_per_worker(local_size: int, cores: int | None = None) -> int:
    """Compute threads for each of ``local_size`` workers on this node, at least 1."""
    return max(1, (usable_cores() if cores is None else cores) // max(1, local_size))


def openmp_waits(workers: int, threads: int, cores: int | None = None) -> dict[str, str]:
    """Variables that set how compute threads wait for each other; set them before importing torch.

    GNU OpenMP's threads spin for milliseconds before they sleep. That is best between back-to-back
    computations. After a wait for a batch or for gloo, though, the first thread spins on a core
    that Linux has given to the threads it woke. Threads with a core each therefore spin briefly;
    threads that share cores do not spin. ``benchmarks/waiting.py`` measures the cost.

    Example:
        >>> openmp_waits(1, 2, cores=2), openmp_waits(2, 1, cores=2)
        ({'GOMP_SPINCOUNT': '10000'}, {'OMP_WAIT_POLICY': 'PASSIVE'})
        >>> openmp_waits(2, 2, cores=2), openmp_waits(1, 1, cores=2)
        ({'OMP_WAIT_POLICY': 'PASSIVE'}, {})
    """
    if os.environ.get("OMP_WAIT_POLICY") or os.environ.get("GOMP_SPINCOUNT"):
        return {}
    if threads > 1 and workers * threads <= (usable_cores() if cores is None else cores):
        return {"GOMP_SPINCOUNT": "10000"}  # some tens of microseconds
    return {"OMP_WAIT_POLICY": "PASSIVE"} if workers > 1 else {}


def schedule_as_batch() -> bool:
    """Schedule all threads of this process, and those they start, as ``SCHED_BATCH`` (Linux; needs
    no privilege).

    gloo moves bytes in its own threads. Under the default policy they interrupt each other and the
    computation for every piece that arrives (``benchmarks/scheduling.py`` measures the cost). A
    batch thread takes a free core at once, but never preempts another thread.

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
