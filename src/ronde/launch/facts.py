"""What a host is and has, asked before anything starts, and what differs between hosts."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from ronde.launch.engine import Host
from ronde.launch.node import devices
from ronde.world import VERSION, ArgumentError, usable_cores
from ronde.world.network import addresses
from ronde.world.paths import file_digest, find_module
from ronde.world.processes import memory_root

__all__ = ["Facts", "collect", "differences", "digest_of", "notes", "share"]

Facts = Mapping[str, Any]


# What must be alike on all hosts: fact -> how it is called.
_ALIKE = {
    "python": "Python",
    "torch": "torch",
    "ronde": "ronde",
    "kind": "device",
    "digest": "script (SHA-256)",
}


def digest_of(command: Sequence[str]) -> str:
    """The digest of a worker's script or module; a short sentence where there is none."""
    if command[0] == "-m":
        module = find_module(command[1])
        if module is None or not module.origin:
            return "no such module"
        path = Path(module.origin)
    else:
        path = Path(command[0])
    try:
        return file_digest(path)[:16]
    except OSError as error:
        return (error.strerror or "cannot be read").lower()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _free(path: str) -> int:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return 0


def collect(command: Sequence[str], token: str | None) -> dict[str, Any]:
    """The facts of this host, in its working directory.

    Args:
        command: the worker's command.
        token: a file that the launcher made in the run directory.
    """
    count, kind = devices()
    # of a container too: its network is its own
    boot, network = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    machine = f"{boot.read_text().strip()} {network.readlink()}"
    return {
        "host": socket.gethostname(),
        "machine": machine,
        "python": platform.python_version(),
        "torch": _version("torch"),
        "ronde": VERSION,
        "digest": digest_of(command),
        "devices": count,
        "kind": kind,
        "cores": usable_cores(),
        "memory": psutil.virtual_memory().available,
        "disk": _free("."),
        "shared_memory": _free(str(memory_root())),
        "addresses": addresses(),
        "sees": token is not None and Path(token).exists(),
        "time": time.time(),
    }


def differences(facts_of: Mapping[str, Facts], command: Sequence[str]) -> list[str]:
    """What must be alike and is not, as lines of one table; empty if nothing differs.

    Args:
        facts_of: host -> its facts.
        command: the worker's command, whose digest here counts as the right one.
    """
    here = digest_of(command)
    rows: list[list[str]] = []
    for fact, name in _ALIKE.items():
        values = [str(f[fact]) for f in facts_of.values()]
        # hosts that are alike with an old copy would train another script than the one here
        right = {here} if fact == "digest" else {values[0]}
        if set(values) != right:
            rows.append([name, *(v if v != here else "as here" for v in values)])
    machines: dict[str, list[str]] = {}
    for host, facts in facts_of.items():
        machines.setdefault(facts["machine"], []).append(host)
    lines = _aligned([["differs", *facts_of], *rows]) if rows else []
    for hosts in machines.values():
        if len(hosts) > 1:
            lines.append(f"{' and '.join(hosts)} are one machine: name it once, with all its slots")
    return lines


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a plain table."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = ([cell.ljust(w) for cell, w in zip(row, widths, strict=True)] for row in rows)
    return ["  ".join(cells).rstrip() for cells in padded]


def share(
    hosts: Sequence[Host], facts_of: Mapping[str, Facts], wanted: int | None = None
) -> list[int]:
    """How many workers each host gets: its slots, filled in order.

    Args:
        wanted: how many workers; None: one for each slot.

    Raises:
        ArgumentError: fewer slots than workers, or more slots than devices.
    """
    slots = []
    for host in hosts:
        facts = facts_of[host.name]
        gpus = facts["kind"] == "cuda"
        count = host.slots or (facts["devices"] if gpus else min(facts["devices"], 8))
        if gpus and count > facts["devices"]:
            raise ArgumentError(
                f"{host.name} has {facts['devices']} GPUs, not {count}: name "
                f"{host.name}:{facts['devices']}, or set RONDE_DEVICE=cpu to train on the CPU."
            )
        slots.append(count)
    if wanted is None:
        return slots
    if wanted > sum(slots):
        had = ", ".join(f"{h.name}:{n}" for h, n in zip(hosts, slots, strict=True))
        raise ArgumentError(
            f"fewer slots than workers: {wanted} asked, {sum(slots)} there ({had}). Add hosts, or "
            "give them more slots."
        )
    counts = []
    for count in slots:
        counts.append(min(count, wanted))
        wanted -= counts[-1]
    return counts


def notes(facts_of: Mapping[str, Facts], workers: Mapping[str, int]) -> list[str]:
    """What will not stop the start, but may hurt.

    Args:
        workers: host -> how many it will have.
    """
    said = []
    for host, facts in facts_of.items():
        count = workers.get(host, 0)
        apart = facts["time"] - facts["received"]
        if abs(apart) > 5.0:
            said.append(f"the clock of {host} is {apart:+.0f} s off: times in the record will be")
        if facts["shared_memory"] < (64 << 20) * count:
            said.append(
                f"{host} has {facts['shared_memory'] >> 20} MB of shared memory (/dev/shm) for "
                f"{count} workers: loading processes may fail"
            )
        if facts["memory"] < (300 << 20) * count:  # what a worker that has imported torch takes
            said.append(f"{host} has {facts['memory'] >> 20} MB of free memory for {count} workers")
    return said
