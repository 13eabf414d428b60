"""Starts the servers that sum gradients, on this machine or through an engine on other hosts."""

from __future__ import annotations

import contextlib
import json
import queue
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from ronde.launch.engine import Engine, Host, parse_hosts
from ronde.world import ArgumentError, WorldError

__all__ = ["reduction_servers"]

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


@contextlib.contextmanager
def reduction_servers(
    asked: str | None, engine: Engine | None, python: str | None, away: bool
) -> Iterator[dict[str, str]]:
    """Run reduction servers inside; yields the variables by which workers find them.

    Args:
        asked: a number of servers on this machine, or hosts: ``"cpu1,cpu2"``; None: none.
        engine: starts them on hosts; None: over ssh.
        python: the interpreter on hosts; None: as here.
        away: whether workers are on other hosts, so that loopback does not lead here.

    Raises:
        ArgumentError: ``asked`` cannot be read.
        WorldError: a server did not come up.
    """
    if asked is None:
        yield {}
        return
    token = secrets.token_hex(16)
    started: list[_Started] = []
    try:
        for name, argv in _commands(asked, engine, python, away):
            started.append(_Started(name, argv, token))
        places: list[str] = []
        limit = time.monotonic() + _SECONDS
        for server in started:
            found = server.places(limit - time.monotonic())
            if not found:
                last = server.printed[-1] if server.printed else "it said nothing"
                raise WorldError(
                    f"--servers: no reduction server came up on {server.name}: {last}. Nothing "
                    "was started."
                )
            if away:
                found = [place for place in found if not place.startswith("127.")]
            places.append("|".join(found))
        yield {"RONDE_SERVERS": " ".join(places), "RONDE_SERVERS_TOKEN": token}
    finally:
        for server in started:
            server.end()


def _commands(
    asked: str, engine: Engine | None, python: str | None, away: bool
) -> list[tuple[str, list[str]]]:
    module = ["-P", "-u", "-m", _MODULE]
    if asked.isdecimal():
        if not 0 < int(asked) <= 64:
            raise ArgumentError(f"--servers {asked}: expected 1 to 64 servers, or hosts.")
        here = [sys.executable, *module, "--listen", "0.0.0.0" if away else "127.0.0.1"]
        return [("this machine", here)] * int(asked)
    hosts: Sequence[Host] = parse_hosts(asked, "--servers")
    if slots := [host.name for host in hosts if host.slots is not None]:
        raise ArgumentError(f"--servers {asked}: {slots[0]} has a number. A host is one server.")
    if engine is None:
        from ronde.launch.ssh import Ssh

        engine = Ssh()
    return [
        (host.name, engine.command(host, [python or sys.executable, *module])) for host in hosts
    ]
