"""What the machine says about a process: whether it is stopped, works, or is held up."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from ronde.watch.tcp_facts import TcpConnection, connections_of
from ronde.world.cores import control_groups

__all__ = ["ProcessFacts", "catches", "is_stopped", "process_facts", "reasons"]

_LOADER = "pt_data_worker"  # what torch calls a DataLoader's process


@dataclass(frozen=True)
class ProcessFacts:
    """Counters of a process and its children at one moment; two of them give a rate.

    Attributes:
        time: when, of ``time.monotonic()``.
        cpu_seconds: CPU time so far, children included.
        io_bytes: bytes read and written so far.
        major_faults: pages that had to come from disk so far.
        throttled: times that its cgroup was throttled so far.
        stolen: seconds of CPU that this machine's host gave to others so far, per core.
        delayed: seconds for which its main thread could run and got no CPU so far.
        runs: whether its main thread runs, or could.
        waits_for_disk: whether it waits for a device, and cannot be interrupted.
        sent: bytes that its TCP peers have acknowledged so far, on connections that are open.
        received: bytes that came over them.
        in_flight: whether a peer has not acknowledged what was sent.
        lost_loader: whether a loading process of it is dead or stopped.
        exchanged: bytes sent to and received from other ranks, by who knows these.
        arrived: those received.
    """

    time: float
    cpu_seconds: float
    io_bytes: int
    major_faults: int
    throttled: int
    stolen: float
    delayed: float
    runs: bool
    waits_for_disk: bool
    sent: int = 0
    received: int = 0
    in_flight: bool = False
    lost_loader: bool = False
    exchanged: int = 0
    arrived: int = 0


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped the process (SIGSTOP, Ctrl-Z). One that a debugger holds is
    not.
    """
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False


def process_facts(
    pid: int, children: bool = True, tcp: Mapping[int, TcpConnection] | None = None
) -> ProcessFacts:
    """Read the counters; what cannot be read is 0. To find ``children`` takes some milliseconds.

    Args:
        pid: the process.
        children: whether its children count.
        tcp: connections by inode, of which its own are found.
    """
    cpu, io, faults, delayed, status = 0.0, 0, 0, 0.0, ""
    sockets: set[int] = set()
    lost = False
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        status = process.status()
        with contextlib.suppress(OSError, ValueError, IndexError):
            delayed = int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
        for each in (process, *(process.children(recursive=True) if children else ())):
            if tcp:
                sockets |= connections_of(each.pid)
            with contextlib.suppress(psutil.Error):
                if each.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED):
                    lost = lost or each.name().startswith(_LOADER)
            with contextlib.suppress(psutil.Error, OSError):
                times = each.cpu_times()
                cpu += times.user + times.system
            with contextlib.suppress(psutil.Error, OSError, AttributeError):
                counters = each.io_counters()
                io += counters.read_chars + counters.write_chars
            with contextlib.suppress(OSError, ValueError, IndexError):
                stat = Path(f"/proc/{each.pid}/stat").read_text().rpartition(")")[2].split()
                faults += int(stat[9])
    own = [tcp[inode] for inode in sockets if inode in tcp] if tcp else []
    stolen = getattr(psutil.cpu_times(), "steal", 0.0) / (psutil.cpu_count() or 1)
    return ProcessFacts(
        time.monotonic(),
        cpu,
        io,
        faults,
        _throttled(pid),
        stolen,
        delayed,
        status == psutil.STATUS_RUNNING,
        status == psutil.STATUS_DISK_SLEEP,
        sum(c.sent for c in own),
        sum(c.received for c in own),
        any(c.in_flight for c in own),
        lost,
    )


def _throttled(pid: int) -> int:
    """How often the process's control group used up its share of CPU."""
    for folder in control_groups("cpu", process=Path(f"/proc/{pid}/cgroup")):
        with contextlib.suppress(OSError, ValueError, IndexError):
            text = (folder / "cpu.stat").read_text()
            return int(text.partition("nr_throttled ")[2].split()[0])
    return 0


def catches(pid: int, number: int) -> bool:
    """Whether a process handles a signal; others it would end."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        caught = int(next(x for x in lines if x.startswith("SigCgt")).split()[1], 16)
    except (OSError, StopIteration, ValueError):
        return False
    # Bit 0 is signal 1.
    return bool(caught >> (number - 1) & 1)


def reasons(
    before: ProcessFacts, after: ProcessFacts, folders: tuple[Path, ...] = ()
) -> tuple[str, ...]:
    """Why a process may be slow between two moments, as far as the machine says so.

    Example:
        >>> moment = ProcessFacts(0.0, 0.0, 0, 0, 0, 0.0, 0.0, False, False)
        >>> later = ProcessFacts(10.0, 0.1, 0, 9000, 0, 4.0, 0.0, False, False)
        >>> reasons(moment, later)
        ('40 % of the CPU is taken by other virtual machines', 'it is swapping: 900 pages/s')
    """
    seconds = max(after.time - before.time, 1e-3)
    texts = []
    if (stolen := (after.stolen - before.stolen) / seconds) > 0.1:
        texts.append(f"{stolen:.0%} of the CPU is taken by other virtual machines")
    if (delayed := (after.delayed - before.delayed) / seconds) > 0.3:
        texts.append(f"for {delayed:.0%} of the time other processes have its CPU")
    if after.throttled > before.throttled:
        texts.append("its control group's CPU limit throttles it")
    if (faults := (after.major_faults - before.major_faults) / seconds) > 100:
        texts.append(f"it is swapping: {faults:.0f} pages/s")
    if after.waits_for_disk:
        texts.append("it waits for a disk or a network file system")
    for folder in folders:
        with contextlib.suppress(OSError):
            if shutil.disk_usage(folder).free < 1 << 20:
                texts.append(f"the disk of {folder} is full")
    return tuple(f.replace("%", " %") for f in texts)
