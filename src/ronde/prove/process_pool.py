"""The worker processes of ``ronde prove``: started once; a run of the script forks one or all."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ronde.world import RondeError, threads_per_worker
from ronde.world.launchers import without_launcher
from ronde.world.processes import temporary_prefix
from ronde.world.units import count_of

__all__ = ["CONSEQUENCES", "Failure", "Launch", "Pool"]

_INTERPRETERS = 2  # that import torch
CONSEQUENCES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection refused",
    "connectFullMesh",
    "Socket closed",
    "Timed out waiting",
    "DistNetworkError",
    "The client socket has failed",
    "is taken by another program",
)
"""Parts of the errors that a rank raises because another one has gone."""


@dataclass(frozen=True)
class Failure:
    """The failure of the worker that failed first; ``kind`` is the exception's name, ``"killed"``,
    or ``"timeout"``.
    """

    rank: int
    kind: str
    text: str
    trace: str = ""


@dataclass
class Launch:
    """One run of the script; ``folder`` has its trace, ``failure`` is None until and unless it
    fails.
    """

    folder: Path
    places: list[int]
    limit_seconds: float
    started: float
    left: set[int] = field(default_factory=set)
    statuses: dict[int, int] = field(default_factory=dict)
    failed_at: float | None = None
    failed_first: int | None = None
    timed_out: bool = False
    seconds: float = 0.0
    failure: Failure | None = None


class Pool:
    """N processes that wait for runs of a script."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._temporary = tempfile.TemporaryDirectory(prefix=temporary_prefix())
        self.folder = Path(self._temporary.name)
        threads = str(threads_per_worker(workers))
        self._environment = {
            # nor SageMaker's folders: a proof writes no model there
            **{k: v for k, v in without_launcher(os.environ).items() if not k.startswith("SM_")},
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "OMP_WAIT_POLICY": "PASSIVE",
            "CUDA_VISIBLE_DEVICES": "",
            "RONDE_DEVICE": "cpu",
            "RONDE_RUNS": "none",
            "RONDE_PROGRESS": "quiet",
            "TORCH_COMPILE_DISABLE": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
        }
        self._processes: list[subprocess.Popen[bytes]] = []
        self._rest = [b""] * _INTERPRETERS  # of a line of theirs
        self._selector = selectors.DefaultSelector()
        self._busy: dict[int, Launch] = {}
        self._pids: dict[int, int] = {}
        self._ready = 0  # interpreters
        self._ready_at = 0.0
        self._count = 0

    def __enter__(self) -> Self:
        with (self.folder / "pool.log").open("ab") as log:
            for number in range(_INTERPRETERS):
                process = subprocess.Popen(
                    [sys.executable, "-m", "ronde.prove.pool_worker"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    # Sets have another order in each of the two, as in a training, but the same in
                    # every study.
                    env={"PYTHONHASHSEED": str(1 + number), **self._environment},
                    bufsize=0,
                    start_new_session=True,  # Ctrl-C must not reach the workers
                )
                self._processes.append(process)
                assert process.stdout is not None
                self._selector.register(process.stdout, selectors.EVENT_READ, number)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        main = threading.current_thread() is threading.main_thread()
        before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
        if main:  # a second Ctrl-C must not interrupt the cleaning up
            for s in before:
                signal.signal(s, signal.SIG_IGN)
        try:
            for process in self._processes:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                for stream in (process.stdin, process.stdout):
                    with contextlib.suppress(OSError):
                        stream.close()  # type: ignore[union-attr]
            self._selector.close()
            self._temporary.cleanup()
        finally:
            if main:
                for s, handler in before.items():
                    signal.signal(s, handler)

    def start(
        self,
        name: str,
        command: list[str],
        settings: dict[str, Any],
        environment: dict[str, str],
        places: list[int],
        limit_seconds: float,
    ) -> Launch:
        """Start the script on the processes at ``places``; several are one world."""
        self._count += 1
        folder = self.folder / f"{self._count}-{name}"
        folder.mkdir()
        size = len(places)
        world: dict[str, str] = {}
        if size > 1:
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            world = {
                "WORLD_SIZE": str(size),
                "LOCAL_WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            if Path("/sys/class/net/lo").exists():
                world["GLOO_SOCKET_IFNAME"] = "lo"
        launch = Launch(folder, places, limit_seconds, time.monotonic(), set(places))
        for rank, place in enumerate(places):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if size > 1 else {}
            job = {
                "place": place,
                "rank": rank,
                "size": size,
                "command": command,
                "settings": {**settings, "folder": str(folder)},
                "env": {**environment, **world, **own},
                "log": str(folder / f"output-{rank}.log"),
            }
            self._busy[place] = launch
            stream = self._processes[place % _INTERPRETERS].stdin
            assert stream is not None
            try:
                stream.write(json.dumps(job).encode() + b"\n")
            except BrokenPipeError:
                self._refuse()
        return launch

    def _refuse(self) -> None:
        log = (self.folder / "pool.log").read_text(errors="replace").strip().splitlines()
        raise RondeError(
            "a process for the script's runs could not be started: "
            f"{log[-1] if log else 'it printed nothing'}"
        )

    def wait(self, *launches: Launch) -> None:
        """Wait until all have ended. Ends one that takes too long or has a failed worker."""
        while any(launch.left for launch in launches):
            for key, _ in self._selector.select(timeout=0.1):
                data = os.read(key.fd, 1 << 16)
                if not data:
                    self._refuse()
                *lines, self._rest[key.data] = (self._rest[key.data] + data).split(b"\n")
                for line in lines:
                    self._receive(json.loads(line))
            for launch in launches:
                if launch.left:
                    self._end_late(launch)
        for launch in launches:
            launch.failure = _failure(launch)

    def _receive(self, answer: dict[str, int]) -> None:
        if "ready" in answer:
            self._ready += 1
            self._ready_at = time.monotonic()
        elif "pid" in answer:
            self._pids[answer["place"]] = answer["pid"]
        else:
            place = answer["place"]
            launch = self._busy.pop(place)
            self._pids.pop(place, None)
            launch.left.discard(place)
            rank = launch.places.index(place)
            launch.statuses[rank] = answer["status"]
            launch.seconds = time.monotonic() - launch.started
            if answer["status"] and launch.failed_at is None:
                launch.failed_at, launch.failed_first = time.monotonic(), rank

    def _end_late(self, launch: Launch) -> None:
        now = time.monotonic()
        if self._ready < _INTERPRETERS:
            if now - launch.started > 300.0:
                self._refuse()
            return
        launch.started = max(launch.started, self._ready_at)
        late = now - launch.started > launch.limit_seconds
        # others have this long to end by themselves once a worker has failed
        if late or (launch.failed_at is not None and now - launch.failed_at > 1.5):
            launch.timed_out = launch.timed_out or (late and launch.failed_at is None)
            self._end(launch)

    def _end(self, launch: Launch) -> None:
        for place in launch.left:
            if place in self._pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pids[place], signal.SIGKILL)


def _failure(launch: Launch) -> Failure | None:
    """The failure that caused the others."""
    if launch.timed_out:
        steps = ", ".join(
            f"rank {r} {_steps_of(launch.folder, r)}" for r in range(len(launch.places))
        )
        limit = f"{launch.limit_seconds:.0f} s"
        return Failure(0, "timeout", f"it had not ended after {limit}: {steps}")
    failures = []
    for rank, status in launch.statuses.items() if any(launch.statuses.values()) else ():
        try:
            error = json.loads((launch.folder / f"error-{rank}.json").read_text())
            failure = Failure(rank, error["type"], error["text"], error["trace"])
            is_consequence, moment = any(c in error["text"] for c in CONSEQUENCES), error["time"]
        except (OSError, ValueError, KeyError):
            if not status:
                continue
            failure = _without_error(launch.folder, rank, status)
            is_consequence, moment = status == -signal.SIGKILL, 0
        order = (is_consequence, moment, rank != launch.failed_first, rank)
        failures.append((order, failure))
    return min(failures, key=lambda pair: pair[0])[1] if failures else None


def _without_error(folder: Path, rank: int, status: int) -> Failure:
    log = folder / f"output-{rank}.log"
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    how = f"killed by signal {-status}" if status < 0 else f"ended with status {status}"
    last = f": {lines[-1]}" if lines else ""
    return Failure(rank, "killed", f"{how} {_steps_of(folder, rank)}{last}")


def _steps_of(folder: Path, rank: int) -> str:
    """How far a worker had come, from its trace."""
    trace = folder / f"rank-{rank}" / "events.jsonl"
    steps = trace.read_text().count('{"kind": "step"') if trace.exists() else 0
    return f"after {count_of(steps, 'step')}"
