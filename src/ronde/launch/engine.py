"""The one contract of an engine: how to start an agent on a host, and what its failure means."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ronde.world import ArgumentError

__all__ = ["Engine", "Host", "parse_hostfile", "parse_hosts"]

_NAME = re.compile(r"(?:[A-Za-z0-9._-]+@)?[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Host:
    """A host and its slots, one a worker; None: one per GPU, or per usable core."""

    name: str
    slots: int | None = None


class Engine(Protocol):
    """Starts processes on hosts.

    Attributes:
        name: what messages call it.
    """

    name: str

    def command(self, host: Host, agent: Sequence[str]) -> list[str]:
        """A command that runs ``agent`` on a host, with its standard input and output piped."""

    def meaning(self, host: Host, status: int, printed: str) -> str:
        """One or two sentences: why no agent came up, from the command's exit status and output."""

    def close(self) -> None:
        """Give back what the engine holds, once all agents have ended."""
        return


def _slots(text: str, where: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentError(f"{where}: {text!r} is not a number of workers above 0.")
    return int(text)


def _checked(hosts: list[Host], where: str) -> list[Host]:
    seen: set[str] = set()
    for host in hosts:
        if not _NAME.fullmatch(host.name):
            raise ArgumentError(
                f"{where}: {host.name!r} is not a host: letters, digits, '.', '_' and '-', as in "
                "gpu1 or me@gpu1. Give other addresses a name in your ssh configuration."
            )
        if host.name in seen:
            raise ArgumentError(f"{where}: {host.name} is there twice. Name it once: {host.name}:8")
        seen.add(host.name)
    if not hosts:
        raise ArgumentError(f"{where}: there is no host in it.")
    return hosts


def parse_hosts(text: str, option: str = "--hosts") -> list[Host]:
    """Read ``a:8,b:8`` of a command line's option; a host without slots has one per device.

    Raises:
        ArgumentError: what is wrong with which host.
    """
    hosts = []
    for part in text.split(","):
        name, colon, slots = part.strip().partition(":")
        hosts.append(Host(name, _slots(slots, f"{option} {part.strip()}") if colon else None))
    return _checked(hosts, f"{option} {text}")


def parse_hostfile(path: Path) -> list[Host]:
    """Read a host file of Open MPI, Horovod or DeepSpeed (``host slots=8``), or of MPICH
    (``host:8``); ``#`` begins a comment.

    Raises:
        ArgumentError: it cannot be read, or which line is wrong.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, ValueError) as error:
        raise ArgumentError(f"--hostfile {path} cannot be read: {error}") from None
    hosts = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"--hostfile {path}, line {number}"
        name, colon, slots = words[0].partition(":")
        count = _slots(slots, where) if colon else None
        for word in words[1:]:
            key, equals, value = word.partition("=")
            if key == "slots" and equals:
                count = _slots(value, where)
            elif key not in ("max_slots", "max-slots"):
                raise ArgumentError(f"{where}: {word!r} is not known: write 'host slots=8'.")
        hosts.append(Host(name, count))
    return _checked(hosts, f"--hostfile {path}")
