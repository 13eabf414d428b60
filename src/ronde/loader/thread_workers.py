"""Loading threads: bounded, in order, with a limit on compute threads."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import queue
import re
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

PATIENCE_SECONDS = 10.0  # for a job under way when the loading ends

T = TypeVar("T")
R = TypeVar("R")


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


def _leave_alone(nthreads: int) -> None:
    pass


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
    torch.set_num_threads = _leave_alone  # a call in a sample's code would undo the user's setting
    limit_compute_threads(n)
    with contextlib.suppress(ImportError):  # OpenBLAS that a parent loaded reads no variable again
        from threadpoolctl import threadpool_limits  # type: ignore[import-untyped, unused-ignore]

        threadpool_limits(n)
    if "cv2" in sys.modules:
        sys.modules["cv2"].setNumThreads(n)


_Task = tuple[Future[Any], Callable[[], Any]]
_Tasks = queue.SimpleQueue[_Task | None]


def _work(tasks: _Tasks, compute_threads: int) -> None:
    limit_compute_threads(compute_threads)
    while (task := tasks.get()) is not None:
        future, call = task
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
        del task, future, call  # a thread that waits holds no batch


def _stop(tasks: _Tasks, threads: list[threading.Thread]) -> None:
    """End threads after their current job. One that hangs, on storage say, is left behind: an error
    must be told, and the process must end.
    """
    for _ in threads:
        tasks.put(None)
    until = time.monotonic() + PATIENCE_SECONDS
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, until - time.monotonic()))


class Threads:
    """A fixed number of loading threads, started on demand and kept until :meth:`stop`.

    Args:
        workers: how many.
        ahead: jobs that may be asked for and not yet handed out.
        compute_threads: OpenMP threads for each of them.
    """

    def __init__(self, workers: int, ahead: int, compute_threads: int = 1) -> None:
        self.workers = workers
        self.ahead = max(1, ahead)
        self.compute_threads = compute_threads
        self._threads: list[threading.Thread] = []

    def _started(self) -> _Tasks:
        """What the threads take their jobs from."""
        if not any(thread.is_alive() for thread in self._threads):  # nor are they after a fork
            self._tasks: _Tasks = queue.SimpleQueue()
            self._threads = [
                threading.Thread(
                    target=_work,
                    args=(self._tasks, self.compute_threads),
                    name=f"ronde-load-{k}",
                    daemon=True,
                )
                for k in range(self.workers)
            ]
            for thread in self._threads:
                thread.start()
            # at the latest before the interpreter is taken down
            self._end = weakref.finalize(self, _stop, self._tasks, self._threads)
        return self._tasks

    def stop(self) -> None:
        """End the threads after their current job; they restart on demand."""
        if self._threads:
            self._end()
            self._threads = []

    def run(self, asked: Iterator[T], work: Callable[[T], R]) -> Generator[R, None, None]:
        """Yield the results in the order of the jobs. Leaving the loop ends the threads.

        Args:
            asked: the jobs. It is gone through in the calling thread, never further ahead than
                ``ahead``.
            work: done to each in a loading thread.

        Raises:
            Exception: what ``work`` raised, when its job's turn comes.
        """
        tasks, flight = self._started(), deque[Future[R]]()
        whole = False
        try:
            for job in asked:
                flight.append(Future())
                tasks.put((flight[-1], functools.partial(work, job)))
                if len(flight) >= self.ahead:
                    yield flight.popleft().result()
            while flight:
                yield flight.popleft().result()
            whole = True
        finally:
            if not whole:
                for future in flight:
                    future.cancel()
                self.stop()
