"""Hosts over the system's ssh, with its configuration, keys and known hosts."""

from __future__ import annotations

import shlex
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path

from ronde.launch.engine import Engine, Host
from ronde.world import ArgumentError

__all__ = ["Ssh", "ssh_meaning"]

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
