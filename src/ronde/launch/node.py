"""Run the workers of one node, and tell how they ended."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import math
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from ronde.launch.console import Router
from ronde.launch.hang_watch import HangWatch, LocalWorkers
from ronde.launch.memory_folder import MemoryFolder
from ronde.launch.supervise import Starter, WorkerFailure, Workers
from ronde.watch.hang_judge import Limits
from ronde.world import openmp_waits, threads_per_worker, usable_cores
from ronde.world.fence import AGAIN
from ronde.world.network import listen_on
from ronde.world.temporary import memory_root

__all__ = [
    "Job",
    "Nodes",
    "Outcome",
    "adopt_orphans",
    "devices",
    "reap",
    "run_workers",
    "warn_workers",
    "worker_environment",
]

_SHUTDOWN_SECONDS = 10
_PEERS_SECONDS = 1.0
_FAILED = "ronde/failed"
_GPU_FILES = ("nvidia", "nvhost", "nvmap", "kfd", "dxg")


@dataclass(frozen=True)
class Job:
    """What to launch.

    Attributes:
        command: script path and arguments, or ``-m``, module and arguments.
        workers: how many.
        directory: the run directory; None leaves nothing behind.
        environment: further variables for the workers.
        restarts: whether others follow when one fails: then all are ended at once.
        hang_timeout: after how many seconds without progress a worker hangs; None does not watch.
        spares: whether workers may be forks of one process that has imported torch.
    """

    command: list[str]
    workers: int
    directory: Path | None = None
    environment: dict[str, str] = field(default_factory=dict)
    restarts: bool = False
    hang_timeout: float | None = None
    spares: bool = True

    @property
    def forks(self) -> bool:
        """Whether importing torch once is faster than each worker doing it, or a restart is."""
        return self.spares and (self.workers > 1 or self.restarts)

    @property
    def leaves(self) -> bool:
        """Whether workers save and leave when they are asked to."""
        return self.environment.get("RONDE_LEAVE") == "1"


@dataclass(frozen=True)
class Nodes:
    """Where the workers of this node stand among those of all nodes, and where they meet.

    Attributes:
        rank: place of this node among the nodes.
        count: how many nodes.
        address: address of node 0 on which its store listens.
        port: port of that store; on node 0 the one that ``listener`` is bound to.
        listener: node 0's bound socket.
        interface: the interface of this node that leads to the others.
        patience: how long to wait for node 0, in seconds.
        tells: whether nodes tell each other when one fails; else their launcher does.
        first: global rank of this node's first worker; None where all nodes have as many.
        total: workers of all nodes; None likewise.
    """

    rank: int = 0
    count: int = 1
    address: str = "127.0.0.1"
    port: int = 0
    listener: socket.socket | None = None
    interface: str = "lo"
    patience: float = 60.0
    tells: bool = False
    first: int | None = None
    total: int | None = None


@dataclass(frozen=True)
class Outcome:
    """How the launch ended.

    Attributes:
        status: exit status for the shell: 0 only if every worker ended well.
        rank: the rank that failed first.
        error: its error, one line.
        before: where the error is only that another rank was gone: what is known of that one, which
            ended early with status 0; else empty.
        traceback: its traceback, empty where it was killed or ended by itself.
        exited: whether it ended by itself, with ``sys.exit`` and a number, as argparse does.
        consequence: whether it is only that another rank was gone, as far as its words tell.
        again: whether the workers were asked to leave, so that the run can be resumed.
        left: ranks that called ``os._exit(0)``, where no rank failed: ``rank 0``; else empty.
        interrupted: whether a signal to the launcher ended it.
        hang: what was found where the run hung; None where it did not.
        slow: what was found about slow ranks, and no record has yet.
    """

    status: int
    rank: int | None = None
    error: str | None = None
    traceback: str = ""
    exited: bool = False
    interrupted: bool = False
    before: str = ""
    consequence: bool = False
    left: str = ""
    again: bool = False
    seconds: float = 0.0
    hang: dict[str, Any] | None = None
    slow: list[dict[str, Any]] = field(default_factory=list)


def _may_have_gpu() -> bool:
    """Whether torch is worth asking, which takes a second to import. On Linux every driver of CUDA
    or ROCm, in a container and under WSL too, has its device files.
    """
    if sys.platform != "linux":
        return True
    return any(file.name.startswith(_GPU_FILES) for file in Path("/dev").iterdir())


def devices() -> tuple[int, str]:
    """Count this machine's devices and name their kind; without a GPU, its usable cores."""
    if os.environ.get("RONDE_DEVICE") != "cpu" and _may_have_gpu():
        import torch

        if torch.cuda.is_available():
            return torch.cuda.device_count(), "cuda"
    return usable_cores(), "cpu"


def worker_environment(job: Job, nodes: Nodes) -> dict[str, str]:
    """Environment variables for the workers; what the user set is kept."""
    _, kind = devices()
    wanted = {"OMP_NUM_THREADS": str(threads_per_worker(job.workers))}
    if kind == "cpu":
        threads = (
            job.environment.get("OMP_NUM_THREADS")
            or os.environ.get("OMP_NUM_THREADS")
            or wanted["OMP_NUM_THREADS"]
        )
        wanted.update(openmp_waits(job.workers, int(threads) if threads.isdecimal() else 1))
    if (job.workers > 1 or nodes.count > 1) and nodes.interface in dict(psutil.net_if_addrs()):
        wanted["GLOO_SOCKET_IFNAME"] = nodes.interface
        if nodes.count > 1:
            wanted["NCCL_SOCKET_IFNAME"] = nodes.interface
    found = {k: v for k, v in wanted.items() if not os.environ.get(k)}
    found.update(
        PYTHONUNBUFFERED="1",
        RONDE_LAUNCHER="ronde run",
        RONDE_LAUNCHER_PID=str(os.getpid()),
        **job.environment,
    )
    if job.directory is not None:
        found["RONDE_RUN_DIR"] = str(job.directory.absolute())
    return found


_stores: list[Any] = []
"""The newest run's store: other nodes may need node 0's after its own agent has ended."""


def _open_store(nodes: Nodes, listener: socket.socket) -> None:
    """Open the store at which workers meet on node 0's listener, which has taken calls already."""
    from torch._C._distributed_c10d import TCPStore

    # torch's own listens on every address. The store takes the descriptor over and closes it.
    port = int(listener.getsockname()[1])
    limit = datetime.timedelta(seconds=nodes.patience)
    descriptor = listener.detach()
    _stores[:] = [
        TCPStore(
            nodes.address,
            port,
            None,
            True,
            limit,
            wait_for_workers=False,
            master_listen_fd=descriptor,
        )
    ]


def _environments(job: Job, nodes: Nodes, port: int, run_id: str) -> list[dict[str, str]]:
    """What each worker of this node is told, under the names that torchrun gives."""
    first = job.workers * nodes.rank if nodes.first is None else nodes.first
    size = nodes.total or job.workers * nodes.count
    common = {
        "MASTER_ADDR": nodes.address,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(size),
        "ROLE_WORLD_SIZE": str(size),
        "ROLE_NAME": "default",
        "LOCAL_WORLD_SIZE": str(job.workers),
        "GROUP_RANK": str(nodes.rank),
        "GROUP_WORLD_SIZE": str(nodes.count),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    return [
        {
            **common,
            "RANK": str(first + local),
            "ROLE_RANK": str(first + local),
            "LOCAL_RANK": str(local),
        }
        for local in range(job.workers)
    ]


def _noted(folder: Path, kind: str, when: float = math.inf) -> str:
    """The ranks that noted an end of a kind before a time: ``rank 1``, ``ranks 1, 2``; or empty."""
    ranks = []
    for file in folder.glob(f"error-*.{kind}"):
        with contextlib.suppress(OSError, ValueError):
            if int(file.read_text()) < when:
                ranks.append(int(file.stem.removeprefix("error-")))
    if not ranks:
        return ""
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, sorted(ranks)))


def _ended_before(folder: Path, when: float) -> str:
    """Name the ranks that ended with status 0 before a time."""
    if named := _noted(folder, "left", when):
        return f"{named} left with status 0 in the middle of the training (os._exit)"
    named = _noted(folder, "ended", when)
    return named and f"{named} had ended, with status 0, before the others"


@dataclass(frozen=True, order=True)
class _Failure:
    """How a rank failed; of several, the least one is the first that no other one caused.

    Attributes:
        consequence: whether it is only that another rank was gone.
        when: in nanoseconds since 1970.
        code: the exit status, negative after a signal.
        exited: whether it called ``sys.exit``.
    """

    consequence: bool
    when: float
    rank: int
    error: str
    traceback: str = ""
    code: int = 1
    exited: bool = False


def _told(rank: int, failure: WorkerFailure) -> _Failure:
    """What a rank has said about its end, or what its exit status says."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        message = json.loads(failure.error_file.read_text())["message"]
        said = message["extraInfo"]
        return _Failure(
            bool(said["consequence"]) or failure.code == -signal.SIGTERM,
            float(said["time_ns"]),
            rank,
            message["message"],
            said["py_callstack"],
            failure.code,
            bool(said["exited"]),
        )
    if failure.stopped:
        text = "it does not run: a signal (SIGSTOP) has stopped it"
    elif failure.code < 0:
        name = signal.Signals(-failure.code).name
        text = f"killed by signal {-failure.code} ({name})"
        if name == "SIGKILL":
            text += ": by hand, by the system when memory ran out, or by a scheduler"
    else:
        text = f"ended with exit status {failure.code}"
    ended = failure.code == -signal.SIGTERM
    return _Failure(ended, failure.timestamp * 1e9, rank, text, code=failure.code)


def reap(kept: int = 0) -> None:
    """Kill this process's remaining descendants: workers' children that outlived them.

    Args:
        kept: a process that stays.
    """
    left = [
        p
        for p in psutil.Process().children(recursive=True)
        if p.pid != kept and p.status() != psutil.STATUS_ZOMBIE
    ]
    for process in left:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(left, timeout=3)


def warn_workers() -> None:
    """Send SIGUSR1, a scheduler's warning, to the workers that handle it; others it would end."""
    for process in psutil.Process().children():
        with contextlib.suppress(OSError, StopIteration, ValueError):
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            caught = int(next(x for x in lines if x.startswith("SigCgt")).split()[1], 16)
            if caught >> (signal.SIGUSR1 - 1) & 1:
                process.send_signal(signal.SIGUSR1)


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants, so that they can be found."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def _free_caches() -> None:
    """Free the in-memory sample caches of killed workers."""
    memory, name = memory_root(), f"ronde-cache-{os.geteuid()}-*"
    limit = time.monotonic() + 2.0
    with contextlib.suppress(Exception):
        while any(memory.glob(name)):
            from ronde.cache import clear_cache

            clear_cache()
            # A killed process stays a zombie, and holds its cache files open, until its last thread
            # has ended.
            if time.monotonic() > limit or not psutil.Process().children(recursive=True):
                return
            time.sleep(0.05)


class _Peers:
    """Nodes that no launcher leads: one that fails says so in node 0's store, and the others end.

    Without it they would wait for a lost rank until their collectives time out.
    """

    def __init__(self, nodes: Nodes, port: int) -> None:
        self._nodes, self._port = nodes, port
        self._store: Any = None
        self._over = threading.Event()
        self.failed = False
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        from torch._C._distributed_c10d import TCPStore

        limit = datetime.timedelta(seconds=self._nodes.patience)
        try:
            self._store = TCPStore(
                self._nodes.address, self._port, None, False, limit, wait_for_workers=False
            )
            while not self._over.wait(_PEERS_SECONDS):
                if self._store.check([_FAILED]):
                    break
        except RuntimeError:
            self._over.wait(2 * _PEERS_SECONDS)  # node 0 may have ended because all is done
        if not self._over.is_set():
            self.failed = True
            os.kill(os.getpid(), signal.SIGINT)

    def finish(self) -> None:
        """Say that this node's workers have ended well. Node 0, which holds the store, waits for
        the others, where a signal reaches it.
        """
        while self._store is None:
            time.sleep(0.05)
        self._store.set(f"ronde/done/{self._nodes.rank}", "")
        others = [f"ronde/done/{rank}" for rank in range(self._nodes.count)]
        while self._nodes.rank == 0 and not self._store.check(others):
            time.sleep(0.1)

    def close(self, failed: bool) -> None:
        """Stop watching; tell the others if this node failed."""
        self._over.set()
        if failed and not self.failed and self._store is not None:
            with contextlib.suppress(RuntimeError):
                self._store.set(_FAILED, str(self._nodes.rank))
            if self._nodes.rank == 0:
                time.sleep(2 * _PEERS_SECONDS)  # the store ends with this process
        self._thread.join(2 * _PEERS_SECONDS)


class _Stopped(BaseException):
    def __init__(self, number: int) -> None:
        self.number = number


def _hang_watch(job: Job, router: Router, nodes: Nodes, port: int) -> HangWatch | None:
    if job.hang_timeout is None:
        return None
    limits = Limits(job.hang_timeout)
    first = job.workers * nodes.rank if nodes.first is None else nodes.first
    ranks = range(first, first + job.workers)
    folders = (Path(tempfile.gettempdir()), *([job.directory] if job.directory else []))
    local = LocalWorkers(router.error_folder, ranks, limits, folders, router.printed, port)
    total = nodes.total or job.workers * nodes.count
    watch = HangWatch(local, limits, total, router.say, router.log, router.report, job.directory)
    router.hang = watch.end
    return watch


def _found(watch: HangWatch | None) -> dict[str, Any]:
    """What an outcome says about hangs and slow ranks."""
    if watch is None:
        return {}
    found: dict[str, Any] = {"slow": [dataclasses.asdict(each) for each in watch.unwritten]}
    if (hang := watch.verdict) is not None:
        found.update(rank=hang.rank, error=hang.sentence, traceback="", before="", exited=False)
        found.update(consequence=False, hang=dataclasses.asdict(hang))
    return found


def _stop(number: int, _: object) -> None:
    raise _Stopped(number)


def run_workers(
    job: Job,
    router: Router,
    nodes: Nodes,
    run_id: str,
    starter: Starter | None = None,
    opened: Callable[[], None] = lambda: None,
    asked_before: Sequence[int] = (),
) -> Outcome:
    """Start this node's workers, watch them, and return when all have ended; closes the router.

    Where the workers know how to save and leave, the first SIGTERM or SIGUSR1 asks them to.

    Args:
        router: reads what the workers print.
        nodes: this node among all.
        run_id: the same on every node.
        starter: starts workers faster than a new interpreter.
        opened: called when the workers can meet.
        asked_before: signals that asked the run to leave before this looks.
    """
    start = time.monotonic()
    adopt_orphans()
    environment = worker_environment(job, nodes)
    environment["RONDE_WATCH_DIR"] = str(router.error_folder)
    memory = MemoryFolder(
        job.directory if job.restarts else None, job.environment.get("RONDE_GENERATION", "")
    )
    environment |= memory.variables
    before = {k: os.environ.get(k) for k in environment}
    os.environ.update(environment)
    handlers: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            handlers[number] = signal.signal(number, _stop)
    peers: _Peers | None = None
    workers: Workers | None = None
    asked = list(asked_before)

    def ask(number: int, _: object) -> None:
        told = not asked and workers is not None and workers.ask_to_leave()
        if not asked and (told or number == signal.SIGUSR1):
            asked.append(number)  # workers that cannot leave yet are asked again
        elif number != signal.SIGUSR1:
            raise _Stopped(number)

    if handlers and job.leaves:
        signal.signal(signal.SIGTERM, ask)
        handlers[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, ask)
    failed = done = False
    try:
        listener = None
        if nodes.rank == 0:
            listener = nodes.listener or listen_on(nodes.address)
        port = listener.getsockname()[1] if listener else nodes.port
        watch = _hang_watch(job, router, nodes, port)
        environments = _environments(job, nodes, port, run_id)
        if listener is not None and (starter is not None or "torch" in sys.modules):
            _open_store(nodes, listener)
            listener = None
        workers = Workers(job.command, environments, router, job.restarts, starter)
        if starter is not None and not job.restarts:
            starter.close()
        router.leave = workers.ask_to_leave
        if asked:
            workers.ask_to_leave()
        if listener is not None:
            _open_store(nodes, listener)  # imports torch, while the worker does
        peers = _Peers(nodes, port) if nodes.tells else None
        opened()
        with watch or contextlib.nullcontext():
            failures = workers.wait()
        if failures:
            failed = True
            # Others may be about to say why they fail. Where a restart follows, they need not.
            workers.kill() if job.restarts else workers.end(signal.SIGTERM, _SHUTDOWN_SECONDS)
            outcome = _failure(failures, router.error_folder, time.monotonic() - start)
            outcome = dataclasses.replace(outcome, **_found(watch))
            gone = _noted(router.error_folder, "left") if outcome.hang else ""
            if gone:  # the others wait for one that is not there any more
                gone = f"{gone} left with status 0 in the middle of the training (os._exit)"
                outcome = dataclasses.replace(outcome, error=f"{gone}. {outcome.error}")
            return outcome
        if workers.left or workers.running:
            name = f" by {signal.Signals(asked[0]).name}" if asked else ""
            late = ", but the step took longer than a minute" if workers.running else ""
            return Outcome(
                AGAIN,
                error=f"asked to leave{name}{late}",
                again=True,
                interrupted=bool(asked),
                seconds=time.monotonic() - start,
            )
        if peers is not None:
            peers.finish()
        done = True
        left = _noted(router.error_folder, "left")
        return Outcome(0, left=left, seconds=time.monotonic() - start, **_found(watch))
    except (_Stopped, KeyboardInterrupt) as stopped:
        by = stopped.number if isinstance(stopped, _Stopped) else int(signal.SIGINT)
        with contextlib.suppress(_Stopped):  # a second signal does not wait
            if workers is not None:
                workers.end(by, _SHUTDOWN_SECONDS)
        if peers is not None and peers.failed:
            told = "a worker of another host failed first; that host's output says why"
            return Outcome(1, error=told, seconds=time.monotonic() - start)
        failed = True
        return Outcome(
            128 + by,
            error=f"stopped by {signal.Signals(by).name}",
            interrupted=True,
            seconds=time.monotonic() - start,
        )
    finally:
        for s in handlers:
            signal.signal(s, signal.SIG_IGN)  # cleaning up is short: it is not interrupted half-way
        if workers is not None:
            workers.kill()
            if not done:
                memory.hand_on()
        memory.close()
        reap(0 if starter is None else starter.pid)
        _free_caches()
        router.close()
        if peers is not None:
            peers.close(failed)
        for s, handler in handlers.items():
            signal.signal(s, handler)
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


def _failure(failures: Mapping[int, WorkerFailure], folder: Path, seconds: float) -> Outcome:
    first = min(_told(rank, failure) for rank, failure in failures.items())
    gone = _ended_before(folder, first.when) if first.consequence else ""
    return Outcome(
        first.code if first.code > 0 else 1,
        first.rank,
        f"{gone}: {first.error}" if gone else first.error,
        first.traceback,
        first.exited,
        before=gone,
        consequence=first.consequence,
        seconds=seconds,
    )
