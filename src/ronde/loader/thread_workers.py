"""Loading threads: bounded, in order, with back-pressure and a limit on compute threads.

A *job* is one micro-batch, normally one task for one thread. If a consumer would wait while threads
are idle, the job is split, so that all threads make the first batch together. Jobs are handed out
in request order: a slow one delays those behind it.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import queue
import re
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")

_PATIENCE_SECONDS = 60.0
_FEWEST = 4  # samples of a part: a smaller one is not worth a task of its own

_Task = tuple["_Job[Any, Any]", int] | None
_Queue = queue.SimpleQueue[_Task]


def _openmp_runtimes() -> list[str]:
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []  # not Linux: nothing is limited
    return sorted(
        {line.split()[-1] for line in lines if re.search(r"/lib(gomp|iomp5|omp)[-.\w]*\.so", line)}
    )


def limit_compute_threads(n: int) -> None:
    """Limit the OpenMP threads of *this* thread's computations to ``n``.

    ``torch.set_num_threads`` also limits threads that start later, such as autograd's.
    """
    import torch

    # torch sets this thread's number when it first looks, and would overwrite ours
    torch.get_num_threads()
    for path in _openmp_runtimes():
        try:
            ctypes.CDLL(path).omp_set_num_threads(n)
        except (OSError, AttributeError):
            continue


def limit_process_threads(n: int) -> None:
    """Limit every library's compute threads to ``n`` in a new loading process."""
    import torch

    for name in (
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "OPENCV_FOR_THREADS_NUM",
    ):
        os.environ[name] = str(n)  # for libraries that are imported from here on
    torch.set_num_threads(n)
    limit_compute_threads(n)
    if "cv2" in sys.modules:
        sys.modules["cv2"].setNumThreads(n)


class _Job(Generic[T, R]):
    """A micro-batch in progress."""

    __slots__ = (
        "asked",
        "cancelled",
        "done",
        "error",
        "join",
        "left",
        "lock",
        "parts",
        "read",
        "result",
        "results",
    )

    def __init__(
        self,
        asked: T,
        parts: Sequence[Any],
        read: Callable[[Any], Any],
        join: Callable[[T, list[Any]], R],
    ) -> None:
        self.asked = asked
        self.parts = parts
        self.read = read
        self.join = join
        self.results: list[Any] = [None] * len(parts)
        self.left = len(parts)
        self.lock = threading.Lock()
        self.error: tuple[int, BaseException] | None = None
        self.result: R | None = None
        self.cancelled = False
        self.done = threading.Lock()
        self.done.acquire()

    def do(self, k: int) -> None:
        """Read part ``k``; the last part to finish makes the batch."""
        error: BaseException | None = None
        if not self.cancelled and self.error is None:
            try:
                self.results[k] = self.read(self.parts[k])
            except BaseException as caught:
                error = caught
        with self.lock:
            # Of several bad parts the first in order is told: the same one each time.
            if error is not None and (self.error is None or k < self.error[0]):
                self.error = (k, error)
            self.left -= 1
            last = self.left == 0
        if last:
            if self.error is None and not self.cancelled:
                try:
                    self.result = self.join(self.asked, self.results)
                except BaseException as caught:
                    self.error = (0, caught)
            self.results = []
            self.done.release()


def _work(tasks: _Queue, compute_threads: int | None) -> None:
    if compute_threads is not None:
        limit_compute_threads(compute_threads)
    while True:
        task = tasks.get()
        if task is None:
            return
        task[0].do(task[1])
        del task  # a thread that waits holds no batch


def _stop(tasks: _Queue, threads: list[threading.Thread]) -> None:
    """End threads after their current task."""
    mine, threads[:] = list(threads), []
    for _ in mine:
        tasks.put(None)
    for thread in mine:
        if thread is not threading.current_thread() and thread.is_alive():
            thread.join(_PATIENCE_SECONDS)  # one that hangs must not keep the process from ending


class Threads:
    """A fixed number of loading threads, started on demand and kept across epochs.

    Args:
        workers: how many.
        ahead: jobs that may be asked for and not yet handed out.
        compute_threads: OpenMP threads for each of them, None for as many as the process has.
    """

    def __init__(self, workers: int, ahead: int, compute_threads: int | None = 1) -> None:
        self.workers = workers
        self.ahead = max(1, ahead)
        self.compute_threads = compute_threads
        self._runs = 0
        self._renew()

    @property
    def running(self) -> int:
        """Number of live threads."""
        return sum(thread.is_alive() for thread in self._threads)

    def _renew(self) -> None:
        """Start with a new queue and no threads: a stuck thread must not take others' tasks."""
        self._tasks: _Queue = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._process = os.getpid()
        # They do not keep the process from ending, but are joined before the interpreter is taken
        # down.
        self._finalizer = weakref.finalize(self, _stop, self._tasks, self._threads)

    def _start(self) -> None:
        if self._process != os.getpid():  # a forked child has the list, not the threads
            self._finalizer.detach()
            self._renew()
        for k in range(len(self._threads), self.workers):
            thread = threading.Thread(
                target=_work,
                args=(self._tasks, self.compute_threads),
                name=f"ronde-load-{k}",
                daemon=True,
            )
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """End the threads after their current task; they restart on demand."""
        if self._process == os.getpid():
            self._finalizer()
        else:
            self._finalizer.detach()
        self._renew()

    def run(
        self,
        asked: Iterator[T],
        cut: Callable[[T, int], Sequence[Any]],
        read: Callable[[Any], Any],
        join: Callable[[T, list[Any]], R],
    ) -> Iterator[tuple[T, R]]:
        """Run jobs and yield results in order. Leaving the loop ends the threads, unless another
        loop has started.

        Args:
            asked: the jobs. It is gone through in the calling thread, never further ahead than
                :attr:`ahead`.
            cut: ``cut(job, n)`` -> at most ``n`` parts of it.
            read: makes what a part stands for, in a loading thread.
            join: makes the job's result of its parts' results, in the thread that was last to read.

        Raises:
            Exception: what ``read`` or ``join`` raised, when the turn comes to the job in which
                they did.
        """
        flight: deque[_Job[T, R]] = deque()
        whole = False
        self._runs += 1
        mine = self._runs
        try:
            self._start()
            more = True
            while True:
                while more and len(flight) < self.ahead:
                    try:
                        job_of = next(asked)
                    except StopIteration:
                        more = False
                        break
                    # Jobs that are not finished, and whether one is: somebody waits only if none
                    # is.
                    busy = sum(job.done.locked() for job in flight)
                    idle = self.workers - busy if busy == len(flight) else 1
                    job = _Job(job_of, cut(job_of, max(1, idle)), read, join)
                    flight.append(job)
                    for k in range(len(job.parts)):
                        self._tasks.put((job, k))
                if not flight:
                    break
                job = flight.popleft()
                job.done.acquire()
                if job.error is not None:
                    raise job.error[1]
                result, job_of = job.result, job.asked
                del job
                yield job_of, result  # type: ignore[misc]
                del result
            whole = True
        finally:
            if not whole:
                for job in flight:
                    job.cancelled = True
                # one that was left half way, and is collected now, must not end what others wait
                # for
                if mine == self._runs:
                    self.stop()


def parts_of(n: int, most: int) -> list[tuple[int, int]]:
    """Split ``n`` samples into at most ``most`` runs, none tiny.

    Example:
        >>> parts_of(10, 2), parts_of(10, 8), parts_of(3, 8)
        ([(0, 5), (5, 10)], [(0, 5), (5, 10)], [(0, 3)])
    """
    count = max(1, min(most, n // _FEWEST))
    bounds = [n * k // count for k in range(count + 1)]
    return list(itertools.pairwise(bounds))
