"""Starts the servers that sum gradients, on this machine or through an engine on other hosts."""

from __future__ import annotations

import contextlib
import json
import queue
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from types import TracebackType

from ronde.launch.engine import Engine, Host, parse_hosts
from ronde.world import ArgumentError, WorldError

__all__ = ["ReductionServers"]

_SECONDS = 60.0
_MODULE = "ronde.exchange.reduction_server"


class _Started:
    """One server: its process, and what it says about itself."""

    def __init__(self, name: str, argv: list[str], token: str) -> None:
        self.name = name
        self.printed: list[str] = []
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        try:
            self.process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,  # Ctrl-C comes to the launcher alone
            )
        except OSError as error:
            raise ArgumentError(f"{argv[0]} cannot be started: {error}") from None
        self._errors = threading.Thread(target=self._read_errors, daemon=True)
        self._errors.start()
        threading.Thread(target=self._read, daemon=True).start()
        with contextlib.suppress(OSError):
            assert self.process.stdin is not None
            self.process.stdin.write(token + "\n")
            self.process.stdin.flush()

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.printed = [*self.printed[-20:], line.rstrip()]

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self._errors.join(2.0)
        self.lines.put("")

    def places(self, seconds: float) -> list[str]:
        """Where it listens; empty if it has ended or says nothing."""
        limit = time.monotonic() + seconds
        while (left := limit - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                line = self.lines.get(timeout=left)
                if not line:
                    return []
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    return list(json.loads(line)["places"])
                self.printed.append(line.rstrip())
        return []

    def end(self) -> None:
        """End it: its input ends, and what does not end by itself is killed."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(2.5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


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
        self._started: list[_Started | None] = [None] * len(self._commands)
        self._places: list[str] = [""] * len(self._commands)

    def __enter__(self) -> ReductionServers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for server in self._started:
            if server is not None:
                server.end()

    def variables(self) -> dict[str, str]:
        """Start those that do not run, and return the variables by which workers find them.

        Raises:
            WorldError: a server did not come up.
        """
        fresh = []
        for i, (name, argv) in enumerate(self._commands):
            server = self._started[i]
            if server is None or server.process.poll() is not None:
                self._started[i] = one = _Started(name, argv, self._token)
                fresh.append((i, one))
        limit = time.monotonic() + _SECONDS
        for i, server in fresh:
            found = server.places(limit - time.monotonic())
            if not found:
                last = server.printed[-1] if server.printed else "it said nothing"
                raise WorldError(
                    f"--servers: no reduction server came up on {server.name}: {last}. No worker "
                    "was started."
                )
            if self._away:
                found = [place for place in found if not place.startswith("127.")]
            self._places[i] = f"{server.name}={'|'.join(found)}"
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
        from ronde.launch.ssh import Ssh

        engine = Ssh()
    return [
        (host.name, engine.command(host, [python or sys.executable, *module])) for host in hosts
    ]
