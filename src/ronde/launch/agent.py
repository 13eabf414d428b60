"""Run the workers of one node under TorchElastic's agent, and tell how they ended."""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from ronde.launch.console import Router
from ronde.world import openmp_waits, threads_per_worker, usable_cores

__all__ = [
    "Job",
    "Nodes",
    "Outcome",
    "adopt_orphans",
    "devices",
    "reap",
    "run_workers",
    "warn_workers",
]

_SHUTDOWN_SECONDS = 10
_PEERS_SECONDS = 1.0
_FAILED = "ronde/failed"

# Errors a rank raises because another one is gone: consequences, not causes.
_CONSEQUENCES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection refused",
    "connectFullMesh",
    "NCCL communicator was aborted",
    "ncclRemoteError",
    "Socket closed",
    "Timed out waiting",
    "DistNetworkError",
    "The client socket has failed",
)


@dataclass(frozen=True)
class Job:
    """What to launch.

    Attributes:
        command: script path and arguments, or ``-m``, module and arguments.
        workers: how many.
        directory: the run directory; None leaves nothing behind.
        environment: further variables for the workers.
    """

    command: list[str]
    workers: int
    directory: Path | None = None
    environment: dict[str, str] = field(default_factory=dict)


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
    """

    rank: int = 0
    count: int = 1
    address: str = "127.0.0.1"
    port: int = 0
    listener: socket.socket | None = None
    interface: str = "lo"
    patience: float = 60.0
    tells: bool = False


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
        left: ranks that called ``os._exit(0)``, where no rank failed: ``rank 0``; else empty.
        interrupted: whether a signal to the launcher ended it.
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
    seconds: float = 0.0


def devices() -> tuple[int, str]:
    """Count this machine's devices and name their kind; without a GPU, its usable cores."""
    if os.environ.get("RONDE_DEVICE") != "cpu":
        import torch

        if torch.cuda.is_available():
            return torch.cuda.device_count(), "cuda"
    return usable_cores(), "cpu"


def _worker_environment(job: Job, nodes: Nodes) -> dict[str, str]:
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


def _register_rendezvous(nodes: Nodes) -> str:
    """Register a rendezvous of known nodes on the listener; torch's own listens on every address,
    and counts nodes by their coming.
    """
    from torch._C._distributed_c10d import PrefixStore, TCPStore
    from torch.distributed.elastic.rendezvous import (
        RendezvousHandler,
        RendezvousInfo,
        RendezvousParameters,
        RendezvousStoreInfo,
    )
    from torch.distributed.elastic.rendezvous.registry import handler_registry  # type: ignore[attr-defined]

    name = f"ronde-{uuid.uuid4().hex}"

    class Known(RendezvousHandler):
        def __init__(self, parameters: RendezvousParameters) -> None:
            self._run_id = parameters.run_id
            limit = datetime.timedelta(seconds=nodes.patience)
            if nodes.rank == 0:
                listener = nodes.listener or socket.create_server((nodes.address, 0))
                self._port = int(listener.getsockname()[1])
                # The store takes the descriptor over and closes it.
                self._store = TCPStore(
                    nodes.address,
                    self._port,
                    None,
                    True,
                    limit,
                    wait_for_workers=False,
                    master_listen_fd=listener.detach(),
                )
            else:
                self._port = nodes.port
                self._store = TCPStore(
                    nodes.address, nodes.port, None, False, limit, wait_for_workers=False
                )
            _stores[:] = [self._store]
            self._round = 0

        def get_backend(self) -> str:
            return name

        @property
        def use_agent_store(self) -> bool:
            return True

        def next_rendezvous(self) -> RendezvousInfo:
            self._round += 1  # keys of an earlier attempt must not be read again
            store = PrefixStore(f"{self._run_id}/{self._round}", self._store)
            meeting = RendezvousStoreInfo(nodes.address, self._port)
            return RendezvousInfo(store, nodes.rank, nodes.count, meeting)

        def is_closed(self) -> bool:
            return False

        def set_closed(self) -> None:
            pass

        def num_nodes_waiting(self) -> int:
            return 0

        def get_run_id(self) -> str:
            return self._run_id

        def shutdown(self) -> bool:
            return True

    handler_registry.register(name, Known)
    return name


def _logs_specs(router: Router, workers: int) -> Any:
    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

    class ToRouter(LogsSpecs):
        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            errors = {
                local: str(router.error_folder / f"error-{env['RANK']}.json")
                for local, env in envs.items()
            }
            for local, env in envs.items():
                env["TORCHELASTIC_ERROR_FILE"] = errors[local]
            return LogsDest(
                stdouts=dict(router.paths),
                stderrs=dict(router.paths),
                tee_stdouts={},
                tee_stderrs={},
                error_files=errors,
            )

        @property
        def root_log_dir(self) -> str:
            return str(router.error_folder)

    return ToRouter(None, local_ranks_filter=set(range(workers)))


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


def _first_failure(
    failures: dict[int, Any], folder: Path
) -> tuple[int, str, str, int, bool, bool, str]:
    """Return the first failure that is not a consequence of another.

    The tuple holds rank, error, traceback, exit code, whether it called ``sys.exit``, whether all
    failures are consequences, and, if so, which ranks had ended earlier.
    """
    told = []
    for rank, failure in failures.items():
        text, trace, exited, when = "", "", False, float(failure.timestamp) * 1e9
        try:
            body = json.loads(Path(failure.error_file).read_text())["message"]
            text, trace = body["message"], body["extraInfo"]["py_callstack"]
            when, exited = (
                float(body["extraInfo"]["time_ns"]),
                bool(body["extraInfo"].get("exited")),
            )
        except (OSError, ValueError, KeyError, TypeError):
            if failure.exitcode < 0:
                name = signal.Signals(-failure.exitcode).name
                text = f"killed by signal {-failure.exitcode} ({name})"
                if name == "SIGKILL":
                    text += ": by hand, by the system when memory ran out, or by a scheduler"
            else:
                text = f"ended with exit status {failure.exitcode}"
        consequence = (
            any(word in text for word in _CONSEQUENCES) or failure.exitcode == -signal.SIGTERM
        )
        told.append((consequence, when, rank, text, trace, failure.exitcode, exited))
    consequence, when, rank, text, trace, code, exited = min(told)
    gone = _ended_before(folder, when) if consequence else ""
    return rank, text, trace, code, exited, consequence, gone


def reap() -> None:
    """Kill this process's remaining descendants: workers' children that outlived them."""
    left = [
        p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE
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
    memory, name = Path(os.environ.get("RONDE_SHM") or "/dev/shm"), f"ronde-cache-{os.geteuid()}-*"
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

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._port = nodes.listener.getsockname()[1] if nodes.listener else nodes.port
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


@contextlib.contextmanager
def _no_exit_barrier() -> Iterator[None]:
    """Leave out torch's wait for the agents of other nodes: it takes up to five minutes after one
    of them has failed, and no signal ends it.
    """
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    LocalElasticAgent._exit_barrier = lambda _: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        del LocalElasticAgent._exit_barrier


def run_workers(job: Job, router: Router, nodes: Nodes, run_id: str) -> Outcome:
    """Start this node's workers, watch them, and return when all have ended; closes the router.

    Args:
        router: reads what the workers print.
        nodes: this node among all.
        run_id: the same on every node.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for logger in list(logging.root.manager.loggerDict):
        # each has its own level; the failure is reported once, below
        if logger.startswith("torch.distributed"):
            logging.getLogger(logger).setLevel(logging.CRITICAL)
    start = time.monotonic()
    adopt_orphans()
    environment = _worker_environment(job, nodes)
    before = {k: os.environ.get(k) for k in environment}
    os.environ.update(environment)
    handlers = {
        s: signal.getsignal(s)
        for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    }
    peers, failed = None, False
    try:
        config = LaunchConfig(
            min_nodes=nodes.count,
            max_nodes=nodes.count,
            nproc_per_node=job.workers,
            logs_specs=_logs_specs(router, job.workers),
            run_id=run_id,
            rdzv_backend=_register_rendezvous(nodes),
            rdzv_endpoint=f"{nodes.address}:{nodes.port}",
            max_restarts=0,
            monitor_interval=0.05,
            shutdown_timeout=_SHUTDOWN_SECONDS,
            local_addr=nodes.address if nodes.rank == 0 else "127.0.0.1",
        )
        peers = _Peers(nodes) if nodes.tells else None
        with _no_exit_barrier():
            elastic_launch(config, sys.executable)(
                "-u", str(Path(__file__).with_name("worker.py")), *job.command
            )
        if peers is not None:
            peers.finish()
        left = _noted(router.error_folder, "left")
        return Outcome(0, left=left, seconds=time.monotonic() - start)
    except ChildFailedError as error:
        failed = True
        rank, text, trace, code, exited, consequence, gone = _first_failure(
            error.failures, router.error_folder
        )
        text = f"{gone}: {text}" if gone else text
        return Outcome(
            code if code > 0 else 1,
            rank,
            text,
            trace,
            exited,
            before=gone,
            consequence=consequence,
            seconds=time.monotonic() - start,
        )
    except (SignalException, KeyboardInterrupt) as error:
        if peers is not None and peers.failed:
            told = "a worker of another host failed first; that host's output says why"
            return Outcome(1, error=told, seconds=time.monotonic() - start)
        failed = True
        number = error.sigval if isinstance(error, SignalException) else signal.SIGINT
        return Outcome(
            128 + int(number),
            error=f"stopped by {signal.Signals(number).name}",
            interrupted=True,
            seconds=time.monotonic() - start,
        )
    finally:
        for s in handlers:
            signal.signal(s, signal.SIG_IGN)  # cleaning up is short: it is not interrupted half-way
        reap()
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
