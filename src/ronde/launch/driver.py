"""Engines on systems that start Python functions, not commands: Ray and Spark.

A driver process asks the system for places and runs :func:`run_agent` on them, which connects back.
The command for a host is a relay, which the driver joins to the connection of that host.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import select
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

from ronde.launch import tunnel
from ronde.launch.child import Child
from ronde.launch.engine import Engine, Host
from ronde.world import ArgumentError, RondeError, WorldError
from ronde.world.paths import need

__all__ = ["SAY_SECONDS", "Driven", "System", "join_relay", "serve"]

_LOOK_SECONDS = 0.1
SAY_SECONDS = 10.0  # between two lines about a driver that is starting
_WHY = "ronde lost it: "  # what the driver says at the end of an agent's answers begins with it


class Driven(Engine):
    """An engine whose hosts are places that a driver process got from a system.

    Args:
        module: its ``main`` runs the driver: it calls :func:`serve`.
        extra: the extra of Ronde that brings the package of the system.
        request: what the driver should get, as JSON.
        python: the interpreter on the hosts; None: the one that runs the system there.

    Raises:
        ArgumentError: the package is not installed.
        WorldError: the system gives no places, and why.
    """

    def __init__(
        self, name: str, module: str, extra: str, package: str, request: Any, python: str | None
    ) -> None:
        self.name, self._python = name, python
        need(package, extra, f"--{extra}")
        self._folder = tempfile.mkdtemp(prefix="ronde-")
        main = f"from {module} import main; main()"
        self._child = Child([sys.executable, "-P", "-u", "-c", main])
        try:
            answer = self._ask({**request, "folder": self._folder})
        except BaseException:
            self.close()
            raise
        self.hosts = [Host(name, slots) for name, slots, _ in answer["hosts"]]
        self._orders = {name: place for name, _, place in answer["hosts"]}

    def _ask(self, request: Any) -> Any:
        self._child.write(json.dumps(request).encode() + b"\n")
        begin = time.monotonic()
        while not select.select([self._child.stdout], [], [], SAY_SECONDS)[0]:
            seconds = time.monotonic() - begin
            print(f"ronde: {self.name} is starting, for {seconds:.0f} s now", file=sys.stderr)
        line = self._child.stdout.readline()
        answer = json.loads(line) if line else {"error": self._last() or "it said nothing"}
        if "error" in answer:
            raise WorldError(f"{self.name}: {answer['error']}\nNothing was started.")
        return answer

    def _last(self) -> str:
        self._child.wait()
        return self._child.printed[-1] if self._child.printed else ""

    def command(self, host: Host, agent: Sequence[str]) -> list[str]:
        """A relay, which the driver joins to the agent's pipes."""
        if host.name not in self._orders:
            raise ArgumentError(f"{host.name} is no host that {self.name} gave to this run.")
        argv = [self._python or "", *agent[1:]]
        relay = [sys.executable, "-I", "-S", "-u", tunnel.__file__, str(self._path)]
        return [*relay, str(self._orders[host.name]), *argv]

    @property
    def _path(self) -> Path:
        return Path(self._folder) / "relays"

    def meaning(self, host: Host, status: int, printed: str) -> str:
        """What the system said about a place that it lost."""
        lines = reversed(printed.splitlines())
        return next((line.removeprefix(_WHY) for line in lines if line.startswith(_WHY)), "")

    def close(self) -> None:
        """Give the places back."""
        self._child.close(8.0)
        shutil.rmtree(self._folder, ignore_errors=True)


class System(Protocol):
    """What a driver process does with its system.

    Attributes:
        address: the address of this machine that leads here from the places.
        seconds: how long a place may take to come up.
    """

    address: str
    seconds: float

    def start(self, port: int, token: str) -> int:
        """Call ``run_agent`` in every place, and return how many there are."""

    def hosts(self, hellos: Sequence[dict[str, Any]]) -> list[tuple[str, int, int]]:
        """Name, slots, and the place whose agent leads it, of each host.

        Args:
            hellos: what each place said about itself.
        """

    def environment(self, place: int) -> dict[str, str]:
        """Variables for the agent of a place."""

    def lost(self, place: int) -> str:
        """Why a place has ended, as far as the system knows; empty if it has not."""

    def close(self) -> None:
        """Give everything back."""


class _Places:
    """The connections of all places, on one port."""

    def __init__(self, address: str) -> None:
        self.token = secrets.token_hex(32)
        self._listener = socket.create_server((address, 0), backlog=256)
        self.port = int(self._listener.getsockname()[1])
        self.links: dict[int, socket.socket] = {}
        self.streams: dict[int, IO[bytes]] = {}
        self.hellos: dict[int, dict[str, Any]] = {}
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            link, _ = self._listener.accept()
            # one that says nothing must not hold up the others
            threading.Thread(target=self._greet, args=(link,), daemon=True).start()

    def _greet(self, link: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            link.settimeout(10.0)
            stream = link.makefile("rb")
            hello = json.loads(stream.readline(1 << 16))
            if hmac.compare_digest(str(hello.pop("token")), self.token):
                link.settimeout(None)
                place = int(hello["place"])
                self.links[place], self.streams[place] = link, stream
                self.hellos[place] = hello
                return
        link.close()

    def wait(self, count: int, system: System) -> list[dict[str, Any]]:
        """Until every place is connected.

        Raises:
            WorldError: one has failed, or takes too long.
        """
        limit = time.monotonic() + system.seconds
        while len(self.hellos) < count:
            absent = [p for p in range(count) if p not in self.hellos]
            for place in absent:
                if why := system.lost(place):
                    raise WorldError(why)
            if time.monotonic() > limit:
                raise WorldError(
                    f"{len(absent)} of {count} places did not come up within "
                    f"{system.seconds:.0f} s."
                )
            time.sleep(_LOOK_SECONDS)
        return [self.hellos[place] for place in range(count)]


def join_relay(relay: socket.socket, places: _Places, system: System) -> None:
    """Carry bytes between a relay and its place until both have ended."""
    stream = relay.makefile("rb")
    order = json.loads(stream.readline())
    place = int(order["place"])
    link, answers = places.links[place], places.streams[place]
    order["environment"] = system.environment(place)
    over = threading.Event()

    def feed() -> None:
        with contextlib.suppress(OSError, ValueError):
            link.sendall(json.dumps(order).encode() + b"\n")
            while data := stream.read1(1 << 16):  # type: ignore[attr-defined]
                link.sendall(data)
            over.set()
        with contextlib.suppress(OSError):
            link.shutdown(socket.SHUT_WR)

    threading.Thread(target=feed, daemon=True).start()
    with contextlib.suppress(OSError):
        while data := answers.read1(1 << 16):  # type: ignore[attr-defined]
            relay.sendall(data)
    limit = time.monotonic() + 0.7  # the others are ended only then
    while not over.wait(_LOOK_SECONDS) and time.monotonic() < limit:
        if why := system.lost(place):
            with contextlib.suppress(OSError):
                relay.sendall(f"\n{_WHY}{why}\n".encode())
            break
    with contextlib.suppress(OSError):
        relay.shutdown(socket.SHUT_RDWR)  # the thread that feeds still has it open
    relay.close()


def serve(connect: Callable[[dict[str, Any]], System]) -> None:
    """Run a driver: read the request, tell the hosts, and join relays until the launcher is gone.

    Args:
        connect: gets the request and connects to the system.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the system may print
    request = json.loads(sys.stdin.readline())
    folder, system = Path(request["folder"]), None

    def until_gone() -> None:
        sys.stdin.read()
        if system is not None:
            with contextlib.suppress(Exception):
                for link in (*places.links.values(), relays):
                    link.close()
                system.close()
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)

    relays = socket.socket(socket.AF_UNIX)
    relays.bind(str(folder / "relays"))
    relays.listen(256)
    threading.Thread(target=until_gone, daemon=True).start()
    try:
        system = connect(request)
        places = _Places(system.address)
        count = system.start(places.port, places.token)
        hosts = system.hosts(places.wait(count, system))
        answers.write(json.dumps({"hosts": hosts}) + "\n")
        with contextlib.suppress(OSError):
            while True:
                relay, _ = relays.accept()
                threading.Thread(
                    target=join_relay, args=(relay, places, system), daemon=True
                ).start()
    except RondeError as error:
        answers.write(json.dumps({"error": str(error)}) + "\n")
    threading.Event().wait()  # until the launcher is gone
