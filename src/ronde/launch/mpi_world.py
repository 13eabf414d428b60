"""Workers that are the processes of one MPI world, so that ``mpi4py`` has the size of the run."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ronde.launch.child import Child
from ronde.launch.mpi import Mpi
from ronde.world import ArgumentError, WorldError

__all__ = ["VARIABLE", "MpiStarter", "MpiWorld", "be_worker", "shared_name"]

_START_SECONDS = 60.0
_LOOK_SECONDS = 0.05
_MAIN = "from ronde.launch.mpi_world import be_worker; be_worker()"

VARIABLE = "RONDE_MPI_WORLD"
"""Names the world, for agents, for these processes, and for their workers."""
_RANKS = "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"
_OWN = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HYDRA_", "MPIR_", "I_MPI_", "MPI_", "MPIEXEC_")


class MpiWorld:
    """Starts the processes of an MPI world over ``mpirun``; the agents make workers of them.

    Args:
        hosts: name and number of workers of each; empty name: this machine.
        python: the interpreter on hosts; None: as here.
        config: a configuration file of ssh, over which ``mpirun`` reaches hosts.
        name: of the world, where agents of other launchers know it; None: a new one.

    Raises:
        ArgumentError: there is no ``mpirun``, or no Linux.
    """

    variable = VARIABLE

    def __init__(
        self,
        hosts: Sequence[tuple[str, int]],
        python: str | None = None,
        config: Path | None = None,
        name: str | None = None,
    ) -> None:
        if sys.platform != "linux":
            raise ArgumentError("--mpi-world needs Linux.")
        self._mpi, self._hosts, self._name = Mpi(config), list(hosts), name
        self._argv = [python or sys.executable, "-P", "-u", "-c", _MAIN]
        self._child: Child | None = None

    def __enter__(self) -> MpiWorld:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._mpi.close()

    def variables(self) -> dict[str, str]:
        """Start the processes, and return the variable by which agents find them.

        Raises:
            WorldError: not all came up, and what ``mpirun`` said.
        """
        self._end()
        world = {VARIABLE: self._name or secrets.token_hex(16)}
        self._child = child = Child(self._mpi.world(self._hosts, self._argv, VARIABLE), world)
        left = sum(count for _, count in self._hosts)
        for line in child.lines(_START_SECONDS):
            if line != b"ready\n":
                child.note(line)
            elif not (left := left - 1):
                break
        threading.Thread(target=child.stdout.read, daemon=True).start()  # or mpirun would block
        if left:
            self._end(0.0)
            child.wait()
            why = "\n".join(child.printed[-8:]) or f"nothing was said in {_START_SECONDS:.0f} s"
            raise WorldError(f"--mpi-world: mpirun did not start all processes: {why}")
        return world

    def _end(self, seconds: float = 3.0) -> None:
        """End it: its processes end by themselves when their agents have ended."""
        if self._child is not None:
            self._child.close(seconds)


def shared_name(hosts: Sequence[str]) -> str:
    """The name of a world that launchers of several hosts know without a word: hosts have one."""
    return hashlib.sha256("\n".join(hosts).encode()).hexdigest()[:32]


class _Rank:
    """A worker in a process of an MPI world, which tells how it ended."""

    def __init__(self, link: socket.socket, pid: int) -> None:
        self.pid, self._link = pid, link
        self._status: int | None = None

    def poll(self) -> int | None:
        """Its exit status, negative after a signal; None while it runs."""
        if self._status is None and select.select([self._link], [], [], 0)[0]:
            status = b""
            with contextlib.suppress(OSError):
                status = self._link.recv(64)
            # without a word, MPI has ended it because of another one
            self._status = int(status) if status else -signal.SIGTERM
            self._link.close()
        return self._status


class MpiStarter:
    """Makes workers of the processes that report on this host.

    Args:
        world: the name of theirs.
        command: what the workers run.

    Attributes:
        pid: 0: its processes are none of this one's children.
    """

    pid = 0

    def __init__(self, world: str, command: Sequence[str]) -> None:
        self._command = list(command)
        self._links: dict[str, socket.socket] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(_socket_name(world))
        self._listener.listen(512)
        self._listener.settimeout(_LOOK_SECONDS)

    def start(
        self, environment: Mapping[str, str], output: str, over: Callable[[], object]
    ) -> _Rank | None:
        """The worker of the rank that the environment names; None if it is ``over`` before.

        Raises:
            WorldError: its process does not come.
        """
        rank, limit = environment["RANK"], time.monotonic() + _START_SECONDS
        while rank not in self._links:
            if over():
                return None
            if time.monotonic() > limit:
                raise WorldError(f"--mpi-world: rank {rank} of MPI did not come to this host.")
            with contextlib.suppress(TimeoutError):
                link, _ = self._listener.accept()
                link.settimeout(_START_SECONDS)
                if _peer_is_own(link):
                    self._links[link.recv(64).decode()] = link
        link = self._links.pop(rank)
        request = {
            "environment": dict(environment),
            "output": output,
            "folder": str(Path.cwd()),
            "command": self._command,
        }
        link.send(json.dumps(request).encode())
        return _Rank(link, int(link.recv(64)))

    def close(self) -> None:
        """Start no more of them; those that are left end."""
        self._listener.close()
        for link in self._links.values():
            link.close()


def _is_mpi(name: str) -> bool:
    """Whether a variable tells a process its place in an MPI world."""
    return name.startswith(_OWN)


def _socket_name(world: str) -> str:
    """Where the agent of a host listens: an abstract socket leaves no file behind."""
    return f"\0ronde-mpi-{world}"


def _peer_is_own(link: socket.socket) -> bool:
    """Whether the process at the other end has the same user."""
    credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", credentials)[1] == os.geteuid())


def _agent(world: str) -> socket.socket:
    """A connection to the agent of this host, which may come later."""
    limit = time.monotonic() + 120.0
    while True:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            link.connect(_socket_name(world))
        except OSError:
            link.close()
            if time.monotonic() > limit:
                sys.exit("no agent of Ronde's came to this host")
            time.sleep(_LOOK_SECONDS)
            continue
        if not _peer_is_own(link):
            sys.exit("another user's process listens in place of Ronde's agent")
        return link


def _worker(request: dict[str, object]) -> subprocess.Popen[bytes]:
    environment = {k: v for k, v in dict(request["environment"]).items() if not _is_mpi(k)}  # type: ignore[call-overload]
    # mpirun's own folder is not for its processes: Open MPI refuses it beside theirs
    environment |= {
        k: v for k, v in os.environ.items() if _is_mpi(k) and "local_tmpdir_base" not in k
    }
    environment["RONDE_LAUNCHER_PID"] = str(os.getpid())
    with open(str(request["output"]), "wb") as output:
        return subprocess.Popen(
            [sys.executable, "-u", str(Path(__file__).with_name("worker.py"))]
            + list(request["command"]),  # type: ignore[call-overload]
            env=environment,
            cwd=str(request["folder"]),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            close_fds=False,  # MPICH talks to its processes over one of them
        )


def be_worker() -> None:
    """In a process of the MPI world: report to the agent of this host, and start the worker that it
    asks for, which inherits what MPI needs to know. Ends when either of them has.
    """
    rank = next(os.environ[name] for name in _RANKS if name in os.environ)
    os.write(1, b"ready\n")  # at once, or those of others may come between
    link = _agent(os.environ[VARIABLE])
    link.send(rank.encode())
    if not (asked := link.recv(1 << 20)):
        return
    worker = _worker(json.loads(asked))
    link.send(str(worker.pid).encode())
    while (status := worker.poll()) is None:
        if select.select([link], [], [], _LOOK_SECONDS)[0]:  # the agent is gone
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()
            return
    with contextlib.suppress(OSError):
        link.send(str(status).encode())
        link.recv(1)  # MPI would end the others when one of its processes does
