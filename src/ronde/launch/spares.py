"""A process that has imported torch and Ronde, and becomes workers by forking.

``worker.py`` becomes one where ``RONDE_SPARES`` is set. Its standard input is a socket on which the
launcher asks for workers. A worker that it starts is the launcher's own child, in a session of its
own, with the variables, streams and folder that it was asked for.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import pkgutil
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["Spares", "main"]

_IMPORTS = (
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel.distributed",
    "ronde.run.distribute",
    "ronde.introspect.open_handles",
    "ronde.loader.sample_facts",
    "ronde.parallel.ddp",
    "ronde.parallel.optimizer_coupling",
    "ronde.parallel.own_calls",
    "ronde.parallel.replica_check",
    "ronde.profile.monkeypatch",
    "psutil",
    "yaml",
)
_ROOMS = "checkpoint", "exchange", "run"  # whose modules a training imports when it needs them
_OF_EXTRAS = ("ronde.run.keras_fit",)  # Keras takes two seconds, and may not be installed
_READ_BY_LIBRARIES = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_")  # below Python


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
    """Starts workers as forks of one warm process: importing torch takes longer than all else.

    Linux only: elsewhere, and where the process has ended, :meth:`start` returns None.

    Attributes:
        pid: its process, which outlives workers; 0 if there is none.

    Args:
        command: what the workers run.
        environment: variables of all workers, which torch reads when it is imported.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._socket: socket.socket | None = None
        self._ready = False
        self.pid = 0
        if sys.platform != "linux":
            return
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, "-u", str(Path(__file__).with_name("worker.py")), *command],
            env={
                **os.environ,
                **environment,
                "RONDE_SPARES": "1",
                "RONDE_LAUNCHER_PID": str(os.getpid()),
            },
            stdin=there.fileno(),
            start_new_session=True,
        )
        there.close()
        self._socket, self.pid = here, self._process.pid

    def start(
        self, environment: Mapping[str, str], output: str, over: Callable[[], object] = bool
    ) -> _Forked | None:
        """Start a worker; None if there is no warm process (any more), or ``over`` says that none
        is needed.
        """
        if self._socket is None:
            return None
        request = {
            "environment": dict(environment),
            "output": output,
            "folder": str(Path.cwd()),
        }
        self.wait(over)
        if over():
            return None
        pid = ""
        with contextlib.suppress(OSError):
            if self._ready:
                self._socket.send(json.dumps(request).encode())
                pid = self._socket.recv(64).decode()
        if not pid:
            self.close()
            return None
        return _Forked(int(pid))

    def wait(self, over: Callable[[], object] = bool) -> None:
        """Wait until the warm process has imported torch, or has ended, or it is ``over``."""
        if self._socket is not None and not self._ready:
            while not select.select([self._socket], [], [], 0.05)[0]:
                if over():
                    return
            with contextlib.suppress(OSError):
                self._ready = self._socket.recv(64) == b"ready"

    def close(self) -> None:
        """End the warm process; workers stay."""
        if self._socket is not None:
            self._socket.close()
            self._socket, self.pid = None, 0
            self._process.kill()
            self._process.wait()


class _Torch(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives a forked worker's script torch when it imports it, as if it were imported then.

    Until then, the script finds no torch in ``sys.modules``, and may set ``OMP_NUM_THREADS``. Other
    variables that torch has read already, and that the script has changed, are named.

    Args:
        read: the variables that were read while torch was imported.
    """

    def __init__(self, read: set[str]) -> None:
        names = [name for name in sys.modules if name.partition(".")[0] == "torch"]
        self._modules = {name: sys.modules.pop(name) for name in names}
        self._spec = self._modules["torch"].__spec__
        self._before, self._read = dict(os.environ), read
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        """Answer for torch alone: parts of it are looked for when it is there."""
        return importlib.machinery.ModuleSpec(name, self) if name == "torch" else None

    def create_module(self, _: object) -> ModuleType:
        """Torch, as it was imported before the fork."""
        return self._modules["torch"]

    def exec_module(self, module: ModuleType) -> None:
        """Put torch and its parts back."""
        module.__spec__ = self._spec
        sys.meta_path.remove(self)
        sys.modules.update(self._modules)
        read = self._read | {name for name in os.environ if name.startswith(_READ_BY_LIBRARIES)}
        changed = {n for n in read if os.environ.get(n) != self._before.get(n)}
        if "OMP_NUM_THREADS" in changed and "OMP_NUM_THREADS" in os.environ:
            changed.remove("OMP_NUM_THREADS")
            threads = os.environ["OMP_NUM_THREADS"].split(",")[0]
            self._modules["torch"].set_num_threads(int(threads))
        if changed:
            print(
                f"ronde: the script sets {', '.join(sorted(changed))} before it imports torch, "
                "which its worker had imported already: set it before ronde run, or give "
                "--no-spares.",
                file=sys.stderr,
            )


def _serve(connection: socket.socket, read: set[str], work: Callable[[], None]) -> None:
    connection.send(b"ready")
    while request := connection.recv(1 << 20):
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
            _become(json.loads(request), read)
            work()
        os.waitpid(child, 0)  # only then is the worker the launcher's child
        connection.send(os.read(source, 64))
        os.close(source)
        os.close(sink)


def _become(request: dict[str, Any], read: set[str]) -> None:
    """Be a worker, as if this interpreter had been started for it."""
    import io
    import random

    import numpy
    import torch

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
    # Each worker its own, as interpreters have: data that nobody seeded would look alike otherwise.
    random.seed()
    numpy.random.seed()
    torch.default_generator.seed()
    # After a fork, torch makes its pool of threads anew; two threads at once would race.
    torch.set_num_threads(torch.get_num_threads())
    _Torch(read)


def _imported() -> set[str]:
    """Import what workers need; the variables that were read meanwhile."""
    read: set[str] = set()
    plain = type(os.environ)

    class Noted(plain):  # type: ignore[misc, valid-type]
        def __getitem__(self, key: str) -> str:
            read.add(key)
            return str(super().__getitem__(key))

    os.environ.__class__ = Noted
    torch = importlib.import_module("torch")
    for name in _IMPORTS:
        importlib.import_module(name)
    for room in _ROOMS:
        package = importlib.import_module(f"ronde.{room}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if module.name not in _OF_EXTRAS:
                importlib.import_module(module.name)
    torch.optim.SGD([torch.zeros(1)])  # the first optimizer imports several hundred modules
    os.environ.__class__ = plain
    return read


def main(work: Callable[[], None]) -> None:
    """Import, and wait for requests of the launcher that started this.

    Args:
        work: what a worker does.
    """
    import gc
    import importlib.metadata

    if importlib.metadata.entry_points(group="torch.backends"):
        os._exit(0)  # importing torch may open their devices, which forks cannot share
    connection = socket.socket(fileno=os.dup(0))
    # As for the script: a file beside it may have the name of a module that torch imports.
    script = sys.argv[1]
    sys.path[0] = str(Path.cwd() if script == "-m" else Path(script).resolve().parent)
    try:
        read = _imported()
    except ImportError:
        os._exit(0)  # workers say so, if they need it
    gc.collect()
    gc.freeze()  # or every fork would copy what it looks through
    _serve(connection, read, work)
    os._exit(0)
