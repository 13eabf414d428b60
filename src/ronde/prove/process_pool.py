"""The processes of ``ronde prove``: N of them, started once; each run of the script is a fork of
one or of all.
"""

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

__all__ = ["CONSEQUENCES", "Failure", "Launch", "Pool"]

_START_SECONDS = 300.0
_GRACE_SECONDS = 1.5  # others' time to end by themselves once a worker has failed
_LAUNCHERS = ("RONDE_", "OMPI_", "PMI_", "SLURM_", "SM_", "TORCHELASTIC_")
_NAMES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TRAINING_JOB_NAME",
)
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
"""What a rank says when another one has gone."""


@dataclass(frozen=True)
class Failure:
    """Why a run did not end well: of the worker that failed first.

    Attributes:
        kind: the exception's name; ``"killed"`` or ``"timeout"`` where there was none.
        phase: what the worker was doing.
    """

    rank: int
    kind: str
    text: str
    trace: str = ""
    phase: str = ""


@dataclass
class Launch:
    """One run of the script that has been asked for.

    Attributes:
        folder: where its trace lies.
        failed_first: the rank that did; others are ended because of it.
        failure: None while it runs and where it ended well.
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
    """N processes, waiting for runs.

    Args:
        workers: how many.
        environment: further variables for them.
    """

    def __init__(self, workers: int, environment: dict[str, str] | None = None) -> None:
        self.workers = workers
        self._temporary = tempfile.TemporaryDirectory(prefix=f"ronde-{os.getpid()}-")
        self.folder = Path(self._temporary.name)
        kept = {
            k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHERS) and k not in _NAMES
        }
        threads = str(threads_per_worker(workers))
        self._environment = {
            **kept,
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
            **(environment or {}),
        }
        self._processes: list[subprocess.Popen[bytes]] = []
        self._rest: dict[int, bytes] = {}
        self._selector = selectors.DefaultSelector()
        self._busy: dict[int, Launch] = {}
        self._pids: dict[int, int] = {}
        self._ready: set[int] = set()
        self._ready_at = 0.0
        self._count = 0

    def __enter__(self) -> Self:
        with (self.folder / "pool.log").open("ab") as log:
            for place in range(self.workers):
                process = subprocess.Popen(
                    [sys.executable, "-m", "ronde.prove.pool_worker"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    # Sets are in another order in every process, as they are in a training, but the
                    # same in every study.
                    env={"PYTHONHASHSEED": str(1 + place), **self._environment},
                    bufsize=0,
                    start_new_session=True,  # a Ctrl-C is this process's own affair
                )
                self._processes.append(process)
                assert process.stdout is not None
                self._selector.register(process.stdout, selectors.EVENT_READ, place)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        main = threading.current_thread() is threading.main_thread()
        before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
        if main:  # cleaning up is short: it is not interrupted half-way
            for s in before:
                signal.signal(s, signal.SIG_IGN)
        try:
            for process in self._processes:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                for stream in (process.stdin, process.stdout):
                    if stream is not None:
                        with contextlib.suppress(OSError):
                            stream.close()
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
        """Run the script on the processes at ``places``: alone on one, as a world on several."""
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
            world["GLOO_SOCKET_IFNAME"] = "lo" if Path("/sys/class/net/lo").exists() else ""
            world = {k: v for k, v in world.items() if v}
        launch = Launch(folder, places, limit_seconds, time.monotonic(), set(places))
        for rank, place in enumerate(places):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if size > 1 else {}
            job = {
                "run": self._count,
                "rank": rank,
                "size": size,
                "command": command,
                "settings": {**settings, "folder": str(folder)},
                "env": {**environment, **world, **own},
                "log": str(folder / f"output-{rank}.log"),
            }
            self._busy[place] = launch
            stdin = self._processes[place].stdin
            assert stdin is not None
            try:
                stdin.write(json.dumps(job).encode() + b"\n")
            except BrokenPipeError:
                self._refuse(place)
        return launch

    def _refuse(self, place: int) -> None:
        log = (self.folder / "pool.log").read_text(errors="replace").strip().splitlines()
        raise RondeError(
            f"the process for worker {place} could not be started: "
            f"{log[-1] if log else 'it ended without a word'}"
        )

    def wait(self, *launches: Launch) -> None:
        """Until all of them have ended; one whose worker failed, or that takes too long, is
        ended.
        """
        while any(launch.left for launch in launches):
            for key, _ in self._selector.select(timeout=0.1):
                data = os.read(key.fd, 1 << 16)
                if not data:
                    self._refuse(key.data)
                *lines, self._rest[key.data] = (self._rest.get(key.data, b"") + data).split(b"\n")
                for line in lines:
                    self._heard(key.data, json.loads(line))
            now = time.monotonic()
            for launch in launches:
                if launch.left and self._ready.issuperset(launch.places):
                    if launch.started < self._ready_at:
                        launch.started = self._ready_at
                    late = now - launch.started > launch.limit_seconds
                    if late or (
                        launch.failed_at is not None and now - launch.failed_at > _GRACE_SECONDS
                    ):
                        launch.timed_out = launch.timed_out or (late and launch.failed_at is None)
                        self._end(launch)
                elif launch.left and now - launch.started > _START_SECONDS:
                    self._refuse(launch.places[0])
        for launch in launches:
            launch.failure = self._failure(launch)

    def _heard(self, place: int, said: dict[str, Any]) -> None:
        if "ready" in said:
            self._ready.add(place)
            self._ready_at = time.monotonic()
        elif "pid" in said:
            self._pids[place] = said["pid"]
        else:
            launch = self._busy.pop(place)
            self._pids.pop(place, None)
            launch.left.discard(place)
            launch.statuses[launch.places.index(place)] = said["status"]
            launch.seconds = time.monotonic() - launch.started
            if said["status"] and launch.failed_at is None:
                launch.failed_at = time.monotonic()
                launch.failed_first = launch.places.index(place)

    def _end(self, launch: Launch) -> None:
        for place in launch.left:
            if place in self._pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pids[place], signal.SIGKILL)

    def _failure(self, launch: Launch) -> Failure | None:
        if launch.timed_out:
            told = "; ".join(
                f"rank {r} {_doing(launch.folder / f'rank-{r}')}" for r in range(len(launch.places))
            )
            return Failure(
                0, "timeout", f"it had not ended after {launch.limit_seconds:.0f} s: {told}"
            )
        if not any(launch.statuses.values()):
            return None
        found = []
        for rank, status in launch.statuses.items():
            try:
                told = json.loads((launch.folder / f"error-{rank}.json").read_text())
                failure = Failure(
                    rank, told["type"], told["text"], told["trace"], told.get("phase", "")
                )
                found.append(
                    (any(c in told["text"] for c in CONSEQUENCES), told["time"], rank, failure)
                )
            except (OSError, ValueError, KeyError):
                if status:
                    log = launch.folder / f"output-{rank}.log"
                    tail = (
                        log.read_text(errors="replace").strip().splitlines()[-1:]
                        if log.exists()
                        else []
                    )
                    how = (
                        f"killed by signal {-status}"
                        if status < 0
                        else f"ended with status {status}"
                    )
                    text = f"{how}: it {_doing(launch.folder / f'rank-{rank}')}" + (
                        f": {tail[0]}" if tail else ""
                    )
                    found.append(
                        (status == -signal.SIGKILL, 0, rank, Failure(rank, "killed", text))
                    )
        return (
            min(found, key=lambda f: (f[0], f[1], f[2] != launch.failed_first, f[2]))[3]
            if found
            else None
        )


def _doing(folder: Path) -> str:
    """What a worker did last, from its trace."""
    try:
        events = [
            json.loads(line)
            for line in (folder / "events.jsonl").read_text().splitlines()
            if line.endswith("}")
        ]
    except (OSError, ValueError):
        events = []
    told = {
        "begin": "was before ronde.distribute",
        "opening": "was in ronde.distribute",
        "ready": "was before its first step",
        "step": "had finished step {after}",
        "evaluating": "was in run.evaluate() after step {step}",
        "evaluated": "had evaluated after step {step}",
        "end": "had ended",
    }
    last = next((e for e in reversed(events) if e["kind"] in told), None)
    if last is None:
        return "had not begun"
    step = last.get("step", 0)
    return told[last["kind"]].format(step=step, after=step + 1)
