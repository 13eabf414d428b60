"""Run the workers of one node, one generation of them, and tell how they ended."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from ronde.launch.console import Router
from ronde.launch.hang_watch import HangWatch
from ronde.launch.job import Job, Nodes, Outcome
from ronde.launch.supervise import Starter, Stopped, WorkerFailure, Workers
from ronde.launch.tensorflow import TensorFlowCluster
from ronde.watch.hang_judge import HangVerdict, Limits, RankView
from ronde.watch.process_facts import catches
from ronde.world import openmp_waits, threads_per_worker, usable_cores
from ronde.world.identity import ranks_text
from ronde.world.network import listen_on
from ronde.world.processes import adopt_orphans, memory_root, temporary_prefix
from ronde.world.whole_file import AGAIN, is_generation

__all__ = [
    "MemoryFolder",
    "Node",
    "devices",
    "reap",
    "spare",
    "warn_workers",
    "worker_environment",
]

_SHUTDOWN_SECONDS = 10.0
_PEERS_SECONDS = 1.0
_FAILED = "ronde/failed"
_GPU_FILES = ("nvidia", "nvhost", "nvmap", "kfd", "dxg")


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
    variables = {k: v for k, v in wanted.items() if not os.environ.get(k)}
    variables.update(
        PYTHONUNBUFFERED="1",
        RONDE_LAUNCHER="ronde run",
        RONDE_LAUNCHER_PID=str(os.getpid()),
        **job.environment,
    )
    if job.directory is not None:
        variables["RONDE_RUN_DIR"] = str(job.directory.absolute())
    return variables


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


def _reach_store(nodes: Nodes, port: int) -> Any:
    """Node 0's store, from another node."""
    from torch._C._distributed_c10d import TCPStore

    limit = datetime.timedelta(seconds=nodes.patience)
    return TCPStore(nodes.address, port, None, False, limit, wait_for_workers=False)


def _environments(job: Job, nodes: Nodes, port: int, run_id: str) -> list[dict[str, str]]:
    """What each worker of this node is told, under the names that torchrun gives."""
    first, size = nodes.first_of(job), nodes.total_of(job)
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


def _ending(rank: int, failure: WorkerFailure) -> tuple[float, Outcome]:
    """When a rank failed, in nanoseconds since 1970, and how: what it has said about its end, or
    what its exit status says.
    """
    status = failure.code if failure.code > 0 else 1
    ended = failure.code == -signal.SIGTERM
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        message = json.loads(failure.error_file.read_text())["message"]
        said = message["extraInfo"]
        return float(said["time_ns"]), Outcome(
            status,
            rank,
            message["message"],
            said["py_callstack"],
            exited=bool(said["exited"]),
            consequence=bool(said["consequence"]) or ended,
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
    return failure.timestamp * 1e9, Outcome(status, rank, text, consequence=ended)


def _failure(failures: Mapping[int, WorkerFailure], before: str) -> Outcome:
    """How the workers failed; ``before`` names those that had ended well."""
    ends = [_ending(rank, failure) for rank, failure in failures.items()]
    # the first that no other one caused
    _, first = min(ends, key=lambda end: (end[1].consequence, end[0], end[1].rank))
    if not before or not first.consequence:
        return first
    return replace(first, error=f"{before}: {first.error}", before=before)


_spared: set[int] = set()  # children of the launcher that are none of a worker's


def spare(*pids: int) -> None:
    """Let `reap` keep children of this process, with all that they start."""
    _spared.update(pids)


def reap(kept: int = 0) -> None:
    """Kill this process's remaining descendants: workers' children that outlived them.

    Args:
        kept: a process that stays.
    """
    roots = [p for p in psutil.Process().children() if p.pid not in _spared]
    left = []
    for root in roots:
        with contextlib.suppress(psutil.NoSuchProcess):
            left += [p for p in (root, *root.children(recursive=True)) if p.pid != kept]
    # a zombie cannot be killed: its parent has not asked for its status yet
    left = [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    for process in left:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(left, timeout=3)


def warn_workers() -> None:
    """Send SIGUSR1, a scheduler's warning, to the workers that handle it; others it would end."""
    for process in psutil.Process().children():
        if catches(process.pid, signal.SIGUSR1):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGUSR1)


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

    Args:
        end: called when another node has failed.
    """

    def __init__(self, nodes: Nodes, port: int, end: Callable[[], object]) -> None:
        self._nodes, self._port, self._end = nodes, port, end
        self._store: Any = None
        self._over = threading.Event()
        self.failed = False
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        try:
            self._store = _reach_store(self._nodes, self._port)
            while not self._over.wait(_PEERS_SECONDS):
                if self._store.check([_FAILED]):
                    break
        except RuntimeError:
            self._over.wait(2 * _PEERS_SECONDS)  # node 0 may have ended because all is done
        if not self._over.is_set():
            self.failed = True
            self._end()

    def finish(self, check: Callable[[], None]) -> None:
        """Say that this node's workers have ended well. Node 0, which holds the store, waits for
        the others; ``check`` raises what ends that.
        """
        while self._store is None:
            check()
            time.sleep(0.05)
        self._store.set(f"ronde/done/{self._nodes.rank}", "")
        others = [f"ronde/done/{rank}" for rank in range(self._nodes.count)]
        while self._nodes.rank == 0 and not self._store.check(others):
            check()
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


class MemoryFolder:
    """Where workers keep copies in this node's memory, if any generation could go on from them.

    Args:
        directory: the run directory; None: no copies are kept.
        generation: of the workers.

    Attributes:
        variables: what tells workers of it; empty text if there is none: a run that a worker
            starts must not write into the outer one's.
    """

    def __init__(self, directory: Path | None, generation: str) -> None:
        self._directory, self._generation = directory, generation
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.variables = {"RONDE_MEMORY_DIR": ""}
        if directory is None or os.environ.get("RONDE_MEMORY_COPIES") == "0":
            return
        with contextlib.suppress(OSError):  # no such folder: no copies
            self._folder = tempfile.TemporaryDirectory(
                prefix=temporary_prefix(), dir=memory_root(), ignore_cleanup_errors=True
            )
            self.variables = {"RONDE_MEMORY_DIR": self._folder.name}

    def hand_on(self) -> None:
        """The workers have ended: move the newest copy into the run directory, if no checkpoint is
        newer there and the run has not gone on without this node.
        """
        if self._folder is None or self._directory is None:
            return
        copy = max(Path(self._folder.name).glob("step-*"), default=None)
        checkpoints = self._directory / "checkpoints"
        newest = max((path.name for path in checkpoints.glob("step-*")), default="")
        if copy is None or copy.name <= newest:
            return
        part = checkpoints / f".writing-{copy.name}-{secrets.token_hex(4)}"
        try:
            shutil.copytree(copy, part)
            # asked after the copy, which takes its time
            if is_generation(self._directory, self._generation):
                part.rename(checkpoints / copy.name)
        except OSError:  # the checkpoint before it is there
            pass
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def close(self) -> None:
        """Remove the folder."""
        if self._folder is not None:
            self._folder.cleanup()


class Node:
    """One generation of this node's workers.

    A thread runs it; others may ask it to stop, to let the workers leave, or to end a hang.

    Args:
        job: what to run.
        nodes: this node among all.
        run_id: the same on every node.
        router: reads what the workers print; closed at the end.
        report: called with what is known of the ranks.
        every: seconds between two reports.
        starter: starts workers faster than a new interpreter.
        opened: called when the workers can meet.
    """

    def __init__(
        self,
        job: Job,
        nodes: Nodes,
        run_id: str,
        router: Router,
        report: Callable[[list[RankView]], object],
        every: float,
        starter: Starter | None = None,
        opened: Callable[[], None] = lambda: None,
    ) -> None:
        self._job, self._nodes, self._run_id, self._router = job, nodes, run_id, router
        self._report, self._every = report, every
        self._starter, self._opened = starter, opened
        self._workers: Workers | None = None
        self._peers: _Peers | None = None
        self._watch: HangWatch | None = None
        self._cluster: TensorFlowCluster | None = None
        self._number, self._seconds, self._sent = 0, _SHUTDOWN_SECONDS, False  # of :meth:`stop`
        self._asked: int | None = None  # of :meth:`leave`

    @property
    def leaves(self) -> bool:
        """Whether the workers save and leave when they are asked to."""
        return self._job.leaves

    def stop(self, number: int, seconds: float = _SHUTDOWN_SECONDS) -> None:
        """End the workers with a signal, by force after some seconds; a second time at once."""
        self._seconds = 0.0 if self._number else seconds
        self._number = self._number or number
        if self._workers is not None and not self._sent:
            self._sent = True
            self._workers.send(self._number)  # the thread that runs them may import torch

    def leave(self, number: int) -> None:
        """Ask the workers to save and leave, now or as soon as they know how.

        Args:
            number: the signal to the launcher for whose sake. SIGTERM ends workers that do not know
                how.
        """
        leaves = self._workers is not None and self._workers.ask_to_leave()
        if number == signal.SIGTERM and not leaves:
            self.stop(number)
        self._asked = self._asked or number

    def hang(self, verdict: HangVerdict) -> None:
        """End the workers of a run that hangs."""
        if self._watch is not None:
            self._watch.end(verdict)

    def _check(self) -> None:
        if self._number:
            raise Stopped

    def run(self) -> Outcome:
        """Start the workers, watch them, and return when all have ended."""
        adopt_orphans()
        memory = MemoryFolder(
            self._job.directory if self._job.restarts else None,
            self._job.environment.get("RONDE_GENERATION", ""),
        )
        outcome = Outcome(1)
        try:
            try:
                self._start(memory.variables)
                outcome = self._attend()
            except Stopped:
                outcome = self._stopped()
            return outcome
        finally:
            if self._workers is not None:
                self._workers.kill()
                if outcome.status:
                    memory.hand_on()
            memory.close()
            reap(0 if self._starter is None else self._starter.pid)
            _free_caches()
            self._router.close()
            if self._peers is not None:
                self._peers.close(bool(outcome.status) and not outcome.again)
            if self._cluster is not None:
                self._cluster.close()

    def _start(self, variables: Mapping[str, str]) -> None:
        """Start the workers, and open the store at which they meet."""
        job, nodes, starter = self._job, self._nodes, self._starter
        listener = None
        if nodes.rank == 0:
            listener = nodes.listener or listen_on(nodes.address)
        port = listener.getsockname()[1] if listener else nodes.port
        self._watch = self._hang_watch(port)
        # while workers import torch, this process may; where it has, the store is there before them
        early = starter is not None or "torch" in sys.modules or job.tensorflow is not None
        if listener is not None and early:
            _open_store(nodes, listener)
            listener = None
        common = {
            **worker_environment(job, nodes),
            "RONDE_WATCH_DIR": str(self._router.error_folder),
            **variables,
        }
        own = [{**common, **e} for e in _environments(job, nodes, port, self._run_id)]
        if job.tensorflow is not None:
            own = [{**e, **task} for e, task in zip(own, self._tasks(port), strict=True)]
        over = self._is_over
        self._workers = Workers(job.command, own, self._router, job.restarts, starter, over)
        if starter is not None and not job.restarts:
            starter.close()
        if self._asked is not None:
            self._workers.ask_to_leave()
        if listener is not None:
            _open_store(nodes, listener)  # imports torch, while the worker does
        if nodes.tells:
            self._peers = _Peers(nodes, port, lambda: self.stop(signal.SIGINT))
        self._opened()

    def _tasks(self, port: int) -> list[dict[str, str]]:
        """Variables of this node's tasks of a TensorFlow cluster."""
        count, kind = devices()
        store = _stores[0] if self._nodes.rank == 0 else _reach_store(self._nodes, port)
        self._cluster = TensorFlowCluster(self._job, self._nodes, store, self._check)
        return self._cluster.environments(self._job.workers, count if kind == "cuda" else 0)

    def _is_over(self) -> bool:
        return bool(self._number)

    def _hang_watch(self, port: int) -> HangWatch | None:
        job, first = self._job, self._nodes.first_of(self._job)
        if job.hang_timeout is None:
            return None
        return HangWatch(
            self._router,
            range(first, first + job.workers),
            Limits(job.hang_timeout),
            (Path(tempfile.gettempdir()), *([job.directory] if job.directory else [])),
            port,
            job.tensorflow is not None,
            self._every,
            self._report,
        )

    def _attend(self) -> Outcome:
        """Wait until all workers have ended, or one has failed; how."""
        workers, cluster = self._workers, self._cluster
        assert workers is not None
        with self._watch or contextlib.nullcontext():
            failures = workers.wait(cluster.is_over) if cluster else workers.wait()
        stopped, before = bool(self._number), ""
        if ended := workers.ended:
            before = f"{ranks_text(ended)} had ended, with status 0, before the others"
        if cluster is not None and cluster.ended:
            workers.kill()
        elif failures:
            # Others may be about to say why they fail. Where a restart follows, they need not.
            if self._job.restarts:
                workers.kill()
            else:
                workers.send(signal.SIGTERM)
                workers.end(lambda: 0.0 if self._number else _SHUTDOWN_SECONDS)
            if stopped:  # not by another host, whose workers fail because of these failures
                self._check()
            return self._hung(before) or _failure(failures, before)
        if workers.leaves or workers.running:
            name = f" by {signal.Signals(self._asked).name}" if self._asked else ""
            late = ", but the step took longer than a minute" if workers.running else ""
            error, paused = f"asked to leave{name}{late}", workers.paused
            asked = bool(self._asked)
            return Outcome(AGAIN, error=error, again=True, interrupted=asked, paused=paused)
        if self._peers is not None:
            self._peers.finish(self._check)
        return Outcome(0, left=workers.left)

    def _hung(self, before: str) -> Outcome | None:
        """The outcome if the workers were ended because the run hung."""
        hang = None if self._watch is None else self._watch.verdict
        if hang is None:
            return None
        error = f"{before}. {hang.sentence}" if before else hang.sentence
        return Outcome(1, hang.rank, error, hang=hang)

    def _stopped(self) -> Outcome:
        """End the workers because it was asked for."""
        if self._workers is not None:
            if not self._sent:
                self._workers.send(self._number)
            self._workers.end(lambda: self._seconds)
        if self._peers is not None and self._peers.failed:
            error = "a worker of another host failed first; that host's output says why"
            return Outcome(1, error=error)
        error = f"stopped by {signal.Signals(self._number).name}"
        return Outcome(128 + self._number, error=error, interrupted=True)
