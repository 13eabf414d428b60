"""Starts the servers that sum gradients, on this machine or through an engine on other hosts."""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import sys
import time
from collections.abc import Sequence

from ronde.launch.child import Child
from ronde.launch.engine import Engine, Host, Ssh, parse_hosts
from ronde.world import ArgumentError, WorldError

__all__ = ["ReductionServers"]

_MODULE = "ronde.exchange.reduction_server"


def _places(server: Child, seconds: float) -> list[str]:
    """Where a server listens; empty if it has ended or says nothing."""
    for line in server.lines(seconds):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return list(json.loads(line)["places"])
        server.note(line)  # of a login shell, or of an engine
    server.wait()
    return []


class ReductionServers:
    """Reduction servers, which end with the block.

    Args:
        asked: a number of servers on this machine, or hosts: ``"cpu1,cpu2"``; None: none.
        engine: starts them on hosts; None: over ssh.
        python: the interpreter on hosts; None: as here.
        away: whether workers are on other hosts, so that loopback does not lead here.

    Raises:
        ArgumentError: ``asked`` cannot be read.
    """

    def __init__(
        self, asked: str | None, engine: Engine | None, python: str | None, away: bool
    ) -> None:
        self._away, self._token = away, secrets.token_hex(16)
        self._commands = [] if asked is None else _commands(asked, engine, python, away)
        self._started: list[Child | None] = [None] * len(self._commands)
        self._places: list[str] = [""] * len(self._commands)

    def __enter__(self) -> ReductionServers:
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._started:
            if server is not None:
                server.close(2.5)

    def variables(self) -> dict[str, str]:
        """Start those that do not run, and return the variables by which workers find them.

        Raises:
            WorldError: a server did not come up.
        """
        fresh = []
        for i, (name, argv) in enumerate(self._commands):
            server = self._started[i]
            if server is None or not server.is_running:
                self._started[i] = one = Child(argv)
                one.write(f"{self._token}\n".encode())
                fresh.append((i, name, one))
        limit = time.monotonic() + 60.0
        for i, name, server in fresh:
            places = _places(server, limit - time.monotonic())
            if not places:
                last = server.printed[-1] if server.printed else "it said nothing"
                raise WorldError(
                    f"--servers: no reduction server came up on {name}: {last}. No worker "
                    "was started."
                )
            # loopback leads nowhere from the hosts of workers
            if self._away:
                places = [place for place in places if not place.startswith("127.")]
            self._places[i] = f"{name}={'|'.join(places)}"
        if not self._commands:
            return {}
        return {"RONDE_SERVERS": " ".join(self._places), "RONDE_SERVERS_TOKEN": self._token}


def _commands(
    asked: str, engine: Engine | None, python: str | None, away: bool
) -> list[tuple[str, list[str]]]:
    module = ["-P", "-u", "-m", _MODULE]
    if asked.isdecimal():
        if not 0 < int(asked) <= 64:
            raise ArgumentError(f"--servers {asked}: expected 1 to 64 servers, or hosts.")
        here = [sys.executable, *module, *([] if away else ["--listen", "127.0.0.1"])]
        return [(socket.gethostname(), here)] * int(asked)
    hosts: Sequence[Host] = parse_hosts(asked, "--servers")
    if slots := [host.name for host in hosts if host.slots is not None]:
        raise ArgumentError(f"--servers {asked}: {slots[0]} has a number. A host is one server.")
    if engine is None:
        engine = Ssh()
    return [
        (host.name, engine.command(host, [python or sys.executable, *module])) for host in hosts
    ]
