"""The agent on one host: ``python -m ronde.launch.node``, led over standard input and output.

The launcher sends JSON lines; the agent answers in frames. Its workers end with it, and it ends
when its input does: a launcher or a connection that is gone leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ronde.launch.agent import (
    Job,
    Nodes,
    Outcome,
    adopt_orphans,
    reap,
    run_workers,
    warn_workers,
)
from ronde.launch.console import Router
from ronde.launch.facts import addresses, collect
from ronde.launch.frames import MARKER, Pipe, Sender, Silence
from ronde.launch.mirror import Mirror, unpack
from ronde.watch.hang_judge import HangVerdict

__all__ = ["main"]

_PROBE_SECONDS = 3.0
_STOP_SECONDS = 1.5
_ALIVE_SECONDS = 1.0


class _Frames:
    """A sink that sends what workers write to the launcher."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender

    def out(self, rank: int, data: bytes) -> None:
        self._sender.send("out", data, rank=rank)

    def log(self, rank: int, data: bytes) -> None:
        self._sender.send("log", data, rank=rank)

    def message(self, rank: int, message: dict[str, Any]) -> None:
        if rank == 0:
            self._sender.send("message", rank=rank, message=message)


def _ignore(_: object) -> None:
    return None


class _Orders:
    """What the launcher says, read by a thread: orders to wait for, and those to end."""

    def __init__(self, descriptor: int) -> None:
        self._pipe = Pipe(descriptor)
        self._orders: queue.Queue[dict[str, Any]] = queue.Queue()
        self.silence = 60.0
        self.stopping = False
        self.hang: Callable[[HangVerdict], object] = _ignore
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._watch, daemon=True).start()

    def _read(self) -> None:
        for line in io.BufferedReader(self._pipe):
            order = json.loads(line)
            if order["order"] == "stop":
                threading.Thread(target=self._stop, daemon=True).start()
            elif order["order"] == "warn":
                warn_workers()
            elif order["order"] == "hang":
                self.hang(HangVerdict.from_dict(order["verdict"]))
            elif order["order"] != "ping":
                self._orders.put(order)
        self._end()

    def _watch(self) -> None:
        silence = Silence(self._pipe)
        while silence.seconds() < self.silence:
            time.sleep(0.5)
        told = f"nothing came from the launcher for {self.silence:.0f} s: this node ends its part"
        print(f"ronde: {told}", file=sys.stderr, flush=True)
        self._end()

    def _stop(self) -> None:
        """End the workers as Ctrl-C does; after a moment, by force."""
        self.stopping = True
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(_STOP_SECONDS)
        reap()

    def _end(self) -> None:
        """End everything at once: the launcher, or the way to it, is gone."""
        self.stopping = True
        threading.Timer(_STOP_SECONDS, os._exit, [1]).start()
        reap()
        self._orders.put({"order": "end"})
        os.kill(os.getpid(), signal.SIGINT)

    def take(self, *kinds: str) -> dict[str, Any]:
        """Wait for an order of one of these kinds.

        Raises:
            SystemExit: the launcher has ended it.
        """
        order = self._orders.get()
        if order["order"] not in kinds:
            raise SystemExit(0)
        return order


def _listen() -> dict[str, socket.socket]:
    """A listener on each address of this host; one becomes the meeting point."""
    found: dict[str, socket.socket] = {}
    for _, address in addresses():
        with contextlib.suppress(OSError):
            found[address] = socket.create_server((address, 0))
    return found


def _reach(candidates: list[tuple[str, int]]) -> dict[str, str]:
    """Which candidates this host reaches, and by which of its own addresses."""
    found = {}
    for address, port in candidates:
        with (
            contextlib.suppress(OSError),
            socket.create_connection((address, port), _PROBE_SECONDS) as link,
        ):
            found[address] = str(link.getsockname()[0])
    return found


def _interface(address: str) -> str:
    return next((name for name, own in addresses() if own == address), "")


def _outcome(outcome: Outcome) -> dict[str, Any]:
    return {k: getattr(outcome, k) for k in outcome.__dataclass_fields__}


def _show_life(sender: Sender) -> None:
    """Let the launcher know that this node is there, each second.

    Only from when everything is imported: the loading of a library can hold the interpreter's lock
    for long.
    """
    importlib.import_module("torch.distributed.launcher.api")

    def show() -> None:
        while sender.send("alive"):
            time.sleep(_ALIVE_SECONDS)

    threading.Thread(target=show, daemon=True).start()


def _serve(orders: _Orders, sender: Sender) -> None:
    hello = orders.take("hello")
    orders.silence = float(hello["silence"])
    try:
        os.chdir(hello["folder"])
    except OSError as error:
        sender.send("refused", why=f"{hello['folder']}: {error.strerror}")
        return
    os.environ.update(hello["environment"])
    try:
        facts = collect(hello["command"], hello["token"])
    except ImportError as error:
        sender.send("refused", why=f"{error}")
        return
    sender.send("facts", facts=facts)
    order = orders.take("listen", "reach")
    listeners: dict[str, socket.socket] = {}
    if order["order"] == "listen":
        listeners = _listen()
        sender.send("listening", ports=[[a, s.getsockname()[1]] for a, s in listeners.items()])
    else:
        sender.send("reached", by=_reach(order["candidates"]))
    run = orders.take("run", "files")
    folder = Path(run["directory"]) if run.get("directory") else None
    while run["order"] == "files":  # of the run directory, where this host does not share it
        unpack(Path(run["directory"]), run["name"], run["data"])
        run = orders.take("run", "files")
        folder = Path(run["directory"])
    own = run["address"] if listeners else run["own"]
    for address, listener in listeners.items():
        if address != run["address"]:
            listener.close()
    nodes = Nodes(
        run["rank"],
        run["count"],
        run["address"],
        run["port"],
        listeners.get(run["address"]),
        _interface(own),
        first=run["first"],
        total=run["total"],
    )
    mirror = None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        mirror = Mirror(folder, sender) if run["mirror"] else None
    job = Job(
        run["command"],
        run["workers"],
        folder,
        run["environment"],
        hang_timeout=run["hang_timeout"],
    )
    router = Router(job.workers, _Frames(sender), run["first"])
    for variable, (name, text) in run["files"].items():  # of the launcher's machine
        file = router.error_folder / f"{variable}-{Path(name).name}"
        file.write_text(text)
        job.environment[variable] = str(file)
    router.report = lambda views: sender.send("ranks", views=views)
    orders.hang = lambda verdict: router.hang(verdict) if router.hang else None
    _show_life(sender)
    try:
        outcome = run_workers(job, router, nodes, run["id"])
    finally:
        if mirror is not None:
            mirror.close()
    sender.send("outcome", outcome=_outcome(outcome))
    orders.take("end")


def main() -> None:
    """Serve one launcher, over what were standard input and output."""
    orders_from, answers_to = os.dup(0), os.dup(1)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)  # workers must not read the launcher's orders
    os.dup2(2, 1)
    adopt_orphans()
    os.write(answers_to, MARKER)
    sender = Sender(answers_to)
    try:
        _serve(_Orders(orders_from), sender)
    except KeyboardInterrupt:
        sender.send("outcome", outcome=_outcome(Outcome(130, interrupted=True)))
    except Exception as error:
        import traceback

        traceback.print_exc()
        sender.send("refused", why=f"{type(error).__name__}: {error}")
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
