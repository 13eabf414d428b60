"""The agent on one host: ``python -m ronde.launch.agent``, led over standard input and output.

Orders and answers are lines of JSON. Its workers end with it, and it ends when its input does: a
launcher or a connection that is gone leaves nothing behind. For workers of its own
machine, the launcher has an agent in a thread.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ronde.launch import messages as m
from ronde.launch.console import Router
from ronde.launch.facts import collect
from ronde.launch.job import Job, Nodes, Outcome
from ronde.launch.messages import MARKER, Pipe, Sender, Silence, from_line
from ronde.launch.mirror import Mirror, forget_others, unpack
from ronde.launch.mpi_world import VARIABLE, MpiStarter
from ronde.launch.node import Node, reap, warn_workers, worker_environment
from ronde.launch.spares import Spares
from ronde.watch.tcp_facts import heard_seconds, tcp_connections
from ronde.world.network import addresses, listen_on
from ronde.world.processes import adopt_orphans
from ronde.world.whole_file import name_generation

__all__ = ["Agent", "main"]


class Agent:
    """Carries out a launcher's orders on this host: one thread serves, others take orders.

    Args:
        send: sends an answer.
        report_seconds: seconds between two reports about the ranks.
    """

    def __init__(
        self,
        send: Callable[[m.Message], object],
        report_seconds: float = 0.0,
    ) -> None:
        self._send, self._report_seconds = send, report_seconds
        self._orders: queue.Queue[m.Message] = queue.Queue()
        self._listeners: dict[str, socket.socket] = {}
        self._spares: Spares | None = None
        self._lock = threading.Lock()
        self._node: Node | None = None
        self._id, self._stopped = "", ""  # the newest run, and the one that was to stop
        self._leave = m.Leave()
        self._directory = Path()  # whose files the launcher sends
        self.silence = 60.0
        """After how many seconds without a sign of the launcher the agent ends."""

    def take(self, order: m.Message) -> None:
        """Take an order: what concerns running workers at once, the rest when they have ended."""
        node = self._node
        if isinstance(order, m.Stop):
            self._stop(order)
        elif isinstance(order, m.Leave):
            with self._lock:
                self._leave, node = order, self._node
            if node is not None:
                node.leave(order.number)
        elif isinstance(order, m.Warn):
            warn_workers()
        elif isinstance(order, m.EndHang):
            if node is not None:
                node.hang(order.verdict)
        elif isinstance(order, m.IsHeard):
            seconds = heard_seconds(order.address, tcp_connections().values())
            self._send(m.Heard(order.address, seconds))
        elif not isinstance(order, m.Ping):
            self._orders.put(order)

    def _stop(self, order: m.Stop) -> None:
        """End the workers of a run. One that has not begun does not begin any more."""
        with self._lock:
            self._stopped = order.id or self._id
            node = self._node if order.id in ("", self._id) else None
        if node is not None:
            node.stop(order.number, order.seconds)
            force = threading.Timer(order.seconds + 0.5, self._force, [node])
            force.daemon = True
            force.start()
        elif order.seconds:
            self._orders.put(order)

    def _force(self, node: Node) -> None:
        """Kill workers whose thread does not: it imports torch, say."""
        with self._lock:  # the next run's workers may be there already: they stay
            if self._node is node:
                reap(self._spares.pid if self._spares else 0)

    def end(self) -> None:
        """End everything at once: the launcher, or the way to it, is gone."""
        reap()
        self._orders.put(m.End())
        if (node := self._node) is not None:
            node.stop(signal.SIGINT, 0.0)

    def serve(self) -> None:
        """Carry out orders until the last one."""
        try:
            while not isinstance(order := self._orders.get(), m.End):
                if isinstance(order, m.Stop):  # there is nothing to stop
                    stopped = f"stopped by {signal.Signals(order.number).name}"
                    ended = Outcome(128 + order.number, error=stopped, interrupted=True)
                    self._send(m.WorkersEnded(ended))
                    return
                if (answer := self._answer(order)) is not None:
                    self._send(answer)
        finally:
            if self._spares is not None:
                self._spares.close()

    def _answer(self, order: m.Message) -> m.Message | None:
        if isinstance(order, m.Hello):
            return self._hello(order)
        if isinstance(order, m.Listen):
            self._close_listeners()
            self._listeners = _listen()
            return m.Listening([(a, s.getsockname()[1]) for a, s in self._listeners.items()])
        if isinstance(order, m.Reach):
            return m.Reached(_reach(order.candidates))
        if isinstance(order, m.Known):
            self._directory = Path(order.directory)
            forget_others(self._directory, order.names)
        elif isinstance(order, m.File):
            unpack(self._directory, order.name, order.data, order.first)
        elif isinstance(order, m.StartWorkers):
            return m.WorkersEnded(self._generation(order))
        return None

    def _close_listeners(self) -> None:
        for listener in self._listeners.values():
            listener.close()
        self._listeners = {}

    def _hello(self, hello: m.Hello) -> m.Message:
        self.silence = hello.silence
        try:
            os.chdir(hello.folder)
        except OSError as error:
            return m.Refused(f"{hello.folder}: {error.strerror}")
        os.environ.update(hello.environment)
        if hello.warm:  # a host that comes back: the others train meanwhile
            job = Job(hello.command, hello.warm)
            self._spares = Spares(job.command, worker_environment(job, Nodes(interface="")))
            self._spares.wait()
            _import_torch()
        try:
            return m.Told(collect(hello.command, hello.token))
        except ImportError as error:
            return m.Refused(f"{error}")

    def _nodes_of(self, run: m.StartWorkers) -> Nodes:
        """This host among the hosts, with what it alone knows of itself."""
        if not run.own:
            return run.nodes
        address = run.nodes.address if run.nodes.rank == 0 else ""
        listener = self._listeners.pop(address, None)
        self._close_listeners()
        return replace(run.nodes, listener=listener, interface=_interface(run.own))

    def _generation(self, run: m.StartWorkers) -> Outcome:
        """Run one generation of workers; how it ended."""
        job, nodes = run.job, self._nodes_of(run)
        ranks = MpiStarter(job.environment[VARIABLE], job.command) if job.in_mpi else None
        if job.forks and not (self._spares and self._spares.pid):
            self._spares = Spares(job.command, worker_environment(job, nodes))
        mirror = None
        if job.directory is not None:
            job.directory.mkdir(parents=True, exist_ok=True)
            mirror = Mirror(job.directory, self._send) if run.mirror else None
            if not run.sees and (name := job.environment.get("RONDE_GENERATION")):
                name_generation(job.directory, name)
        router = Router(job.workers, self._send, nodes.first_of(job))
        for variable, (name, text) in run.files.items():  # of the launcher's machine
            file = router.error_folder / f"{variable}-{Path(name).name}"
            file.write_text(text)
            job.environment[variable] = str(file)
        node = Node(
            job,
            nodes,
            run.id,
            router,
            lambda views: self._send(m.Views([replace(v, host=run.host) for v in views])),
            self._report_seconds,
            ranks or (self._spares if job.forks else None),
            lambda: self._show_life(job.restarts),
        )
        with self._lock:
            self._id = run.id
            stopped = self._stopped == run.id
            self._node = None if stopped else node
            leave = self._leave
        if leave.id == run.id:  # it came before the workers
            node.leave(leave.number)
        try:
            if stopped:
                router.close()
                return Outcome(130, interrupted=True)
            with self._resources(job, nodes.first_of(job), router):
                return node.run()
        finally:
            with self._lock:
                self._node = None
            if ranks is not None:
                ranks.close()
            if mirror is not None:
                mirror.close()

    def _resources(
        self, job: Job, first: int, router: Router
    ) -> contextlib.AbstractContextManager[object]:
        """Tells what the workers use, if the run is recorded."""
        if job.directory is None:
            return contextlib.nullcontext()
        from ronde.launch.resources import ResourceWatch

        ranks = range(first, first + job.workers)

        def send(used: dict[str, Any]) -> None:
            self._send(m.Resources(used))

        return ResourceWatch(router.error_folder, ranks, job.directory, send, router.say)

    def _show_life(self, restarts: bool) -> None:
        """Let the launcher know that this agent is there; see :func:`main`."""


class _Remote(Agent):
    """The agent of a process of its own, which shows that it lives."""

    def __init__(self, sender: Sender) -> None:
        super().__init__(sender.send, report_seconds=2.0)
        self._sender, self._shown, self._signalled = sender, False, False

    def _show_life(self, restarts: bool) -> None:
        """Only from when torch is imported, where the store needs it, or may after a restart: the
        loading of a library can hold the interpreter's lock for long, which would be silence.
        """
        if self._shown:
            return
        self._shown = True

        seconds = 0.25 if restarts else 2.5  # a silent agent is given up after 1 s, or 10

        def show() -> None:
            if restarts:
                _import_torch()
            while self._sender.send(m.Alive()):
                while (left := self._sender.sent + seconds - time.monotonic()) > 0:
                    time.sleep(left)

        threading.Thread(target=show, daemon=True).start()

    def read(self, pipe: Pipe) -> None:
        """Take orders from a pipe until it ends."""
        threading.Thread(target=self._watch, args=(Silence(pipe),), daemon=True).start()
        for line in io.BufferedReader(pipe):
            self.take(from_line(line))
        self._give_up()

    def signalled(self, number: int, _: object) -> None:
        """Take a signal: an engine that ends a run may tell its agents before the launcher."""
        node = self._node  # no lock: this thread may hold it
        if node is None:
            if number not in (signal.SIGINT, signal.SIGUSR1):  # they mean workers
                os._exit(128 + number)
        elif node.leaves and number in (signal.SIGTERM, signal.SIGUSR1) and not self._signalled:
            self._signalled = True
            node.leave(number)
        elif number != signal.SIGUSR1:
            node.stop(number)

    def _watch(self, silence: Silence) -> None:
        while silence.seconds() < self.silence:
            time.sleep(0.5)
        text = f"nothing came from the launcher for {self.silence:.0f} s: this node ends its part"
        print(f"ronde: {text}", file=sys.stderr, flush=True)
        self._give_up()

    def _give_up(self) -> None:
        threading.Timer(1.5, os._exit, [1]).start()
        self.end()


def _listen() -> dict[str, socket.socket]:
    """A listener on each address of this host; one becomes the meeting point."""
    listeners: dict[str, socket.socket] = {}
    for _, address in addresses():
        with contextlib.suppress(OSError):
            listeners[address] = listen_on(address)
    return listeners


def _reach(candidates: list[tuple[str, int]]) -> dict[str, str]:
    """Which candidates this host reaches, and by which of its own addresses."""
    own = {}
    for address, port in candidates:
        with (
            contextlib.suppress(OSError),
            socket.create_connection((address, port), 3.0) as link,
        ):
            own[address] = str(link.getsockname()[0])
    return own


def _interface(address: str) -> str:
    return next((name for name, own in addresses() if own == address), "")


def _import_torch() -> None:
    """Import what the store needs, before this becomes the first host: workers would wait."""
    with contextlib.suppress(ImportError):
        importlib.import_module("torch._C._distributed_c10d")


def _pass_on(printed: int, sender: Sender) -> None:
    """Send what this process and others print to a pipe, line by line."""
    with open(printed, "rb") as lines:
        for line in lines:
            sender.write(line)


def main() -> None:
    """Serve one launcher, over what were standard input and output."""
    orders_from, answers_to = os.dup(0), os.dup(1)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)  # workers must not read the launcher's orders
    sender = Sender(answers_to)
    if os.path.sameopenfile(1, 2):  # a line of it must not come between the parts of an answer
        printed, into = os.pipe()
        os.dup2(into, 2)
        threading.Thread(target=_pass_on, args=(printed, sender), daemon=True).start()
    os.dup2(2, 1)
    adopt_orphans()
    agent = _Remote(sender)
    for name in ("INT", "USR1", "TERM", "HUP", "QUIT"):
        signal.signal(signal.Signals[f"SIG{name}"], agent.signalled)
    sender.write(MARKER)
    threading.Thread(target=agent.read, args=(Pipe(orders_from),), daemon=True).start()
    try:
        agent.serve()
    except Exception as error:
        import traceback

        traceback.print_exc()
        sender.send(m.Refused(f"{type(error).__name__}: {error}"))
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
