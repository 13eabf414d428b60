"""Loading threads: bounded, in order, with a limit on compute threads."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

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
        self._pool: ThreadPoolExecutor | None = None

    def stop(self) -> None:
        """End the threads after their current job; they restart on demand."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(cancel_futures=True)

    def run(self, asked: Iterator[T], work: Callable[[T], R]) -> Generator[R, None, None]:
        """Yield the results in the order of the jobs. Leaving the loop ends the threads.

        Args:
            asked: the jobs. It is gone through in the calling thread, never further ahead than
                ``ahead``.
            work: done to each in a loading thread.

        Raises:
            Exception: what ``work`` raised, when its job's turn comes.
        """
        if self._pool is None:
            self._pool = ThreadPoolExecutor(
                self.workers, "ronde-load", limit_compute_threads, (self.compute_threads,)
            )
        pool, flight = self._pool, deque[Future[R]]()
        whole = False
        try:
            for job in asked:
                flight.append(pool.submit(work, job))
                if len(flight) >= self.ahead:
                    yield flight.popleft().result()
            while flight:
                yield flight.popleft().result()
            whole = True
        finally:
            if not whole:
                self.stop()
