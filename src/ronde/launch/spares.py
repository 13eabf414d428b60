"""A process that has imported torch and Ronde, and becomes workers by forking.

Started by path as ``python spares.py``; its standard input is a socket on which the launcher asks
for workers. A worker that it starts is the launcher's own child, in a session of its own, with the
variables, streams and folder that it was asked for.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Spares", "main"]

_LARGEST = 1 << 20
_START_SECONDS = 60.0
_FORK_SECONDS = 10.0
_IMPORTS = (
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel.distributed",
    "ronde.run",
    "ronde.run.distribute",
    "ronde.launch.worker",
)


class _Forked:
    """A worker: this process's child, though not one that ``subprocess`` started."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        """Its exit status, negative after a signal; None while it runs."""
        if self._status is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                self._status = 1
            else:
                self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status


class Spares:
    """Starts workers as forks of one warm process: importing torch takes longer than a restart.

    Linux only: elsewhere, and where the process has ended, :meth:`start` returns None.

    Args:
        environment: variables of all workers, which torch reads when it is imported.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._socket: socket.socket | None = None
        self._ready = False
        self.pid = 0
        if sys.platform != "linux":
            return
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, "-u", __file__],
            env={**os.environ, **environment, "RONDE_LAUNCHER_PID": str(os.getpid())},
            stdin=there.fileno(),
            start_new_session=True,
        )
        there.close()
        self._socket, self.pid = here, self._process.pid

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], output: str
    ) -> _Forked | None:
        """Start a worker; None if there is no warm process (any more)."""
        if self._socket is None:
            return None
        request = {
            "command": list(command),
            "environment": dict(environment),
            "output": output,
            "folder": str(Path.cwd()),
        }
        self.wait()
        try:
            self._socket.send(json.dumps(request).encode())
        except OSError:
            self._ready = False
        pid = self._answer(_FORK_SECONDS) if self._ready else ""
        if not pid:
            self.close()
            return None
        return _Forked(int(pid))

    def wait(self) -> None:
        """Wait until the warm process has imported everything."""
        if self._socket is not None and not self._ready:
            self._ready = self._answer(_START_SECONDS) == "ready"

    def _answer(self, seconds: float) -> str:
        assert self._socket is not None
        if not select.select([self._socket], [], [], seconds)[0]:
            return ""
        with contextlib.suppress(OSError):
            return self._socket.recv(64).decode()
        return ""

    def close(self) -> None:
        """End the warm process; workers stay."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            self._process.kill()
            self._process.wait()


def _serve(connection: socket.socket) -> None:
    connection.send(b"ready")
    while request := connection.recv(_LARGEST):
        source, sink = os.pipe()
        child = os.fork()
        if not child:  # it ends at once, so that its child becomes the launcher's
            between = os.getpid()
            grandchild = os.fork()
            if grandchild:
                os.write(sink, str(grandchild).encode())
                os._exit(0)
            while os.getppid() == between:
                os.sched_yield()
            for own in (source, sink, connection.detach()):
                os.close(own)
            _become(json.loads(request))
        os.waitpid(child, 0)  # only then is the worker the launcher's child
        connection.send(os.read(source, 64))
        os.close(source)
        os.close(sink)


def _become(request: dict[str, Any]) -> None:
    """Be a worker, as if this interpreter had been started for it."""
    import io
    import random

    import numpy
    import torch

    from ronde.launch import worker

    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(request["output"], os.O_WRONLY)
    for stream, descriptor in enumerate((nothing, output, output)):
        os.dup2(descriptor, stream)
    os.close(nothing)
    os.close(output)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    for name in ("stdin", "__stdin__"):
        setattr(sys, name, open(0, closefd=False))  # noqa: SIM115
    for descriptor, name, errors in ((1, "stdout", "strict"), (2, "stderr", "backslashreplace")):
        raw = open(descriptor, "wb", 0, closefd=False)  # noqa: SIM115
        text = io.TextIOWrapper(raw, "utf-8", errors, write_through=True)
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)
    random.seed()
    numpy.random.seed()
    threads = os.environ.get("OMP_NUM_THREADS", "")
    # Always: after a fork, torch makes its pool of threads anew; two threads at once would race.
    torch.set_num_threads(int(threads.split(",")[0]) if threads else torch.get_num_threads())
    script = str(Path(__file__).with_name("worker.py"))
    sys.argv = [script, *request["command"]]
    sys.orig_argv = [sys.executable, "-u", *sys.argv]
    worker.main()


def main() -> None:
    """Import, and wait for requests of the launcher that started this."""
    import ctypes
    import gc
    import importlib
    import signal

    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != int(os.environ["RONDE_LAUNCHER_PID"]):
        os._exit(1)
    sys.path.pop(0)  # this folder, whose files are no modules of their own
    connection = socket.socket(fileno=os.dup(0))
    torch = importlib.import_module("torch")
    for name in _IMPORTS:
        importlib.import_module(name)
    torch.optim.SGD([torch.zeros(1)])  # the first optimizer imports several hundred modules
    sys.path.insert(0, "")
    gc.collect()
    gc.freeze()  # or every fork would copy what it looks through
    _serve(connection)
    os._exit(0)


if __name__ == "__main__":
    main()
