"""The agent on one host: ``python -m ronde.launch.agent``, led over standard input and output.

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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ronde.launch.console import Router
from ronde.launch.facts import collect
from ronde.launch.frames import MARKER, Pipe, Sender, Silence
from ronde.launch.mirror import Mirror, forget_others, unpack
from ronde.launch.node import (
    Job,
    Nodes,
    Outcome,
    adopt_orphans,
    reap,
    run_workers,
    warn_workers,
    worker_environment,
)
from ronde.launch.spares import Spares
from ronde.watch.hang_judge import HangVerdict
from ronde.watch.tcp_facts import heard_seconds, tcp_connections
from ronde.world.fence import name_generation
from ronde.world.network import addresses, listen_on

__all__ = ["main"]

_PROBE_SECONDS = 3.0
_STOP_SECONDS = 1.5
_ALIVE_SECONDS = 0.25


class _Frames:
    """A sink that sends what workers write to the launcher."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender

    def out(self, rank: int, data: bytes) -> None:
        self._sender.send("out", data, rank=rank)

    def log(self, rank: int, data: bytes) -> None:
        self._sender.send("log", data, rank=rank)

    def message(self, rank: int, message: dict[str, Any]) -> None:
        if rank == 0 or "leave" in message:
            self._sender.send("message", rank=rank, message=message)


def _ignore(_: object) -> None:
    return None


class _Over(Exception):
    pass


class _Orders:
    """What the launcher says, read by a thread: orders to wait for, and those to end."""

    def __init__(self, descriptor: int) -> None:
        self._pipe = Pipe(descriptor)
        self._orders: queue.Queue[dict[str, Any]] = queue.Queue()
        self.silence = 60.0
        self.hang: Callable[[HangVerdict], object] = _ignore
        self.heard: Callable[[str], object] = _ignore
        self.kept = 0  # a process that outlives workers
        self._lock = threading.Lock()
        self._runs = False
        self._run, self._stopped = "", ""  # the newest run, and the one that was to stop
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._watch, daemon=True).start()

    def _read(self) -> None:
        for line in io.BufferedReader(self._pipe):
            order = json.loads(line)
            if order["order"] == "stop":
                threading.Thread(target=self._stop, args=(order,), daemon=True).start()
            elif order["order"] == "leave":
                self._signal(signal.SIGUSR1)
            elif order["order"] == "warn":
                warn_workers()
            elif order["order"] == "hang":
                self.hang(HangVerdict.from_dict(order["verdict"]))
            elif order["order"] == "heard":
                self.heard(order["address"])
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

    def _stop(self, order: dict[str, Any]) -> None:
        """End the workers as Ctrl-C does; by force after a moment, or at once for a restart."""
        run = order.get("id") or self._run
        if self._signal(signal.SIGINT, order.get("id")):
            time.sleep(0.0 if order.get("at_once") else _STOP_SECONDS)
            with self._lock:  # the next run's workers may be there already: they stay
                if self._runs and self._run == run:
                    reap(self.kept)
        elif not order.get("at_once"):
            self._orders.put(order)

    def _end(self) -> None:
        """End everything at once: the launcher, or the way to it, is gone."""
        threading.Timer(_STOP_SECONDS, os._exit, [1]).start()
        reap()
        self._orders.put({"order": "end"})
        self._signal(signal.SIGINT)

    def _signal(self, number: int, run_id: str | None = None) -> bool:
        """Signal this process where it runs workers; whether it does. A run that has not begun
        yet, or has ended, does not begin any more.
        """
        with self._lock:
            self._stopped = run_id or self._stopped
            runs = self._runs and run_id in (None, self._run)
            if runs:
                os.kill(os.getpid(), number)
            return runs

    @contextlib.contextmanager
    def running(self, run_id: str) -> Iterator[bool]:
        """Within it, orders to stop or to leave come as signals; whether one to stop has come."""
        with self._lock:
            self._runs, self._run = self._stopped != run_id, run_id
        try:
            yield not self._runs
        finally:
            with self._lock:
                self._runs = False

    def take(self, *kinds: str) -> dict[str, Any]:
        """Wait for an order of one of these kinds.

        Raises:
            _Over: the launcher has ended it.
        """
        order = self._orders.get()
        if order["order"] not in kinds:
            raise _Over
        return order


def _listen() -> dict[str, socket.socket]:
    """A listener on each address of this host; one becomes the meeting point."""
    found: dict[str, socket.socket] = {}
    for _, address in addresses():
        with contextlib.suppress(OSError):
            found[address] = listen_on(address)
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


_shown = threading.Event()


def _show_life(sender: Sender, restarts: bool) -> None:
    """Let the launcher know that this node is there, several times a second.

    Only from when torch is imported, where the store needs it, or may after a restart: the loading
    of a library can hold the interpreter's lock for long, which would be silence.
    """
    if _shown.is_set():
        return
    _shown.set()

    def show() -> None:
        if restarts:
            _import_torch()
        while sender.send("alive"):
            time.sleep(_ALIVE_SECONDS)

    threading.Thread(target=show, daemon=True).start()


def _serve(orders: _Orders, sender: Sender) -> None:
    orders.heard = lambda address: sender.send(
        "heard", address=address, seconds=heard_seconds(address, tcp_connections().values())
    )
    hello = orders.take("hello")
    orders.silence = float(hello["silence"])
    try:
        os.chdir(hello["folder"])
    except OSError as error:
        sender.send("refused", why=f"{hello['folder']}: {error.strerror}")
        return
    os.environ.update(hello["environment"])
    spares: Spares | None = None
    if workers := hello.get("warm"):  # a host that comes back: the others train meanwhile
        environment = worker_environment(Job([], workers), Nodes(interface=""))
        spares = Spares(hello["command"], environment)
        orders.kept = spares.pid
        spares.wait()
        _import_torch()
    try:
        facts = collect(hello["command"], hello["token"])
    except ImportError as error:
        sender.send("refused", why=f"{error}")
        return
    sender.send("facts", facts=facts)
    listeners: dict[str, socket.socket] = {}
    while True:
        order = orders.take("listen", "reach", "known", "files", "run", "end")
        kind = order["order"]
        if kind == "end":
            return
        if kind == "listen":
            for listener in listeners.values():
                listener.close()
            listeners = _listen()
            sender.send("listening", ports=[[a, s.getsockname()[1]] for a, s in listeners.items()])
        elif kind == "reach":
            sender.send("reached", by=_reach(order["candidates"]))
        elif kind == "known":  # files of the run directory, where this host does not share it
            forget_others(Path(order["directory"]), order["names"])
        elif kind == "files":
            unpack(Path(order["directory"]), order["name"], order["data"], order["first"])
        else:
            own = order["address"] if order["rank"] == 0 else order["own"]
            nodes = Nodes(
                order["rank"],
                order["count"],
                order["address"],
                order["port"],
                listeners.pop(order["address"], None) if order["rank"] == 0 else None,
                _interface(own),
                first=order["first"],
                total=order["total"],
            )
            for listener in listeners.values():
                listener.close()
            listeners = {}
            folder = Path(order["directory"]) if order.get("directory") else None
            given = (order["command"], order["workers"], folder, order["environment"])
            job = Job(*given, order["restarts"], order["hang_timeout"], order["spares"])
            if job.forks and spares is None:
                spares = Spares(job.command, worker_environment(job, nodes))
                orders.kept = spares.pid
            outcome = _generation(order, job, nodes, orders, sender, spares)
            sender.send("outcome", outcome=_outcome(outcome))


def _import_torch() -> None:
    """Import what the store needs, before this becomes the first host: workers would wait."""
    with contextlib.suppress(ImportError):
        importlib.import_module("torch._C._distributed_c10d")


def _generation(
    run: dict[str, Any],
    job: Job,
    nodes: Nodes,
    orders: _Orders,
    sender: Sender,
    spares: Spares | None,
) -> Outcome:
    """Run one generation of workers; how it ended."""
    mirror = None
    if job.directory is not None:
        job.directory.mkdir(parents=True, exist_ok=True)
        mirror = Mirror(job.directory, sender) if run["mirror"] else None
        if not run["sees"] and (name := job.environment.get("RONDE_GENERATION")):
            name_generation(job.directory, name)
    router = Router(job.workers, _Frames(sender), run["first"])
    for variable, (name, text) in run["files"].items():  # of the launcher's machine
        file = router.error_folder / f"{variable}-{Path(name).name}"
        file.write_text(text)
        job.environment[variable] = str(file)
    router.report = lambda views: sender.send("ranks", views=views)
    orders.hang = lambda verdict: router.hang(verdict) if router.hang else None
    try:
        with orders.running(run["id"]) as stopped:
            if stopped:
                router.close()
                return Outcome(130, interrupted=True)
            return run_workers(
                job, router, nodes, run["id"], spares, lambda: _show_life(sender, job.restarts)
            )
    finally:
        if mirror is not None:
            mirror.close()


def main() -> None:
    """Serve one launcher, over what were standard input and output."""
    orders_from, answers_to = os.dup(0), os.dup(1)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)  # workers must not read the launcher's orders
    os.dup2(2, 1)
    adopt_orphans()
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)  # they mean something while workers run
    os.write(answers_to, MARKER)
    sender = Sender(answers_to, text=sys.argv[1:] == ["text"])
    try:
        _serve(_Orders(orders_from), sender)
    except _Over:
        sender.send("outcome", outcome=_outcome(Outcome(130, interrupted=True)))
    except Exception as error:
        import traceback

        traceback.print_exc()
        sender.send("refused", why=f"{type(error).__name__}: {error}")
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
