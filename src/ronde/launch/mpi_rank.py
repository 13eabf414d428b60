"""A process of one MPI world, which becomes a worker: ``mpirun`` starts :func:`main`.

It reports to the agent of its host and starts the worker that the agent asks for, which inherits
what MPI needs to know. It ends when the agent, or the worker, has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

__all__ = ["VARIABLE", "is_mpi", "main", "peer_is_own", "socket_name"]

VARIABLE = "RONDE_MPI_WORLD"
"""Names the world, for agents, for these processes, and for their workers."""
_RANKS = "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"
_OWN = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HYDRA_", "MPIR_", "I_MPI_", "MPI_", "MPIEXEC_")
_AGENT_SECONDS = 120.0
_LOOK_SECONDS = 0.1


def is_mpi(name: str) -> bool:
    """Whether a variable tells a process its place in an MPI world."""
    return name.startswith(_OWN)


def socket_name(world: str) -> str:
    """Where the agent of a host listens: an abstract socket leaves no file behind."""
    return f"\0ronde-mpi-{world}"


def peer_is_own(link: socket.socket) -> bool:
    """Whether the process at the other end has the same user."""
    told = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", told)[1] == os.geteuid())


def _agent(world: str) -> socket.socket:
    """A connection to the agent of this host, which may come later."""
    limit = time.monotonic() + _AGENT_SECONDS
    while True:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            link.connect(socket_name(world))
        except OSError:
            link.close()
            if time.monotonic() > limit:
                sys.exit("no agent of Ronde's came to this host")
            time.sleep(_LOOK_SECONDS)
            continue
        if not peer_is_own(link):
            sys.exit("another user's process listens in place of Ronde's agent")
        return link


def _worker(request: dict[str, object]) -> subprocess.Popen[bytes]:
    environment = {k: v for k, v in dict(request["environment"]).items() if not is_mpi(k)}  # type: ignore[call-overload]
    # mpirun's own folder is not for its processes: Open MPI refuses it beside theirs
    environment |= {
        k: v for k, v in os.environ.items() if is_mpi(k) and "local_tmpdir_base" not in k
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


def main() -> None:
    """Report, start the worker, and pass its end on."""
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
