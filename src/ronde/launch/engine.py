"""The one contract of an engine: how to start an agent, and what its failure means; and ssh."""

from __future__ import annotations

import re
import shlex
import shutil
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ronde.world import ArgumentError

__all__ = ["Engine", "Host", "Ssh", "parse_hostfile", "parse_hosts", "ssh_meaning"]

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
        # two agents on one host would each take its devices
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


_OPTIONS = (
    "BatchMode=yes",  # no question that nobody could answer
    "ConnectTimeout=8",
    "ServerAliveInterval=5",
    "ServerAliveCountMax=3",
)

# What ssh or the host's shell says -> what it means and what to do.
_MEANINGS = (
    (
        "could not resolve hostname",
        "no such host: its name is not known here. Check the spelling, "
        "or name it in your ssh configuration.",
    ),
    (
        "remote host identification has changed",
        "its host key is another one than before. If the "
        "host was set up anew, remove the old key with 'ssh-keygen -R {host}'; if not, do not "
        "connect.",
    ),
    (
        "host key verification failed",
        "its host key is not known here. Connect once with 'ssh {host}' and check the fingerprint.",
    ),
    (
        "permission denied",
        "it does not accept your key. 'ssh {host}' must work without a password: "
        "'ssh-copy-id {host}' installs one.",
    ),
    (
        "connection refused",
        "nothing listens for ssh there. Is sshd running, on the port of your ssh configuration?",
    ),
    ("timed out", "it does not answer. Is it switched on, and reachable from here?"),
    ("no route to host", "it does not answer. Is it switched on, and reachable from here?"),
)


class Ssh(Engine):
    """Starts agents through ``ssh``; on this host without it.

    Args:
        config: a configuration file in place of the user's.
    """

    name = "ssh"

    def __init__(self, config: Path | None = None) -> None:
        if shutil.which("ssh") is None:
            raise ArgumentError("ssh was not found: install it (Debian: openssh-client).")
        if config is not None and not config.is_file():
            raise ArgumentError(f"--ssh-config {config}: no such file.")
        self._config = config

    def command(self, host: Host, agent: Sequence[str]) -> list[str]:
        """``ssh`` with the agent's command, which holds nothing of the user's but Python's path."""
        if host.name in ("localhost", "127.0.0.1", socket.gethostname(), socket.getfqdn()):
            return list(agent)
        own = [] if self._config is None else ["-F", str(self._config.absolute())]
        options = [word for option in _OPTIONS for word in ("-o", option)]
        # the far shell gets one constant line
        return ["ssh", *own, "-T", *options, "--", host.name, "exec " + shlex.join(agent)]

    def meaning(self, host: Host, status: int, printed: str) -> str:
        """What ssh or the far shell meant."""
        return ssh_meaning(host, printed) if status == 255 else ""


def ssh_meaning(host: Host, printed: str) -> str:
    """What ssh's words mean, and what to do; empty where it did not say why."""
    said = printed.lower()
    return next((m.format(host=host.name) for words, m in _MEANINGS if words in said), "")
