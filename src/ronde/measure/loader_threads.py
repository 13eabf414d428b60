"""Watch and drain the loaders of a throughput measurement."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from ronde.loader.thread_workers import _openmp_runtimes


def stop_openmp_threads() -> None:
    """End the idle threads of OpenMP; they start again with this thread's next computation.

    A forked child believes that they exist, and waits forever in its first computation with several
    threads. A training forks once an epoch, a measurement all the time.
    """
    for path in _openmp_runtimes():
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(path).omp_pause_resource_all(2)  # omp_pause_hard, OpenMP 5.0


class ThreadTimes:
    """CPU and queueing time of the loading processes' threads, or of this process without them."""

    def __init__(self) -> None:
        self._start = self._read()

    def _read(self) -> tuple[float, float, float, float]:
        main = others = ran = queued = 0.0
        loaders = psutil.Process().children(recursive=True)
        for process in loaders:
            with contextlib.suppress(psutil.Error):
                for thread in process.threads():
                    spent = thread.user_time + thread.system_time
                    if thread.id == process.pid:
                        main += spent
                    else:
                        others += spent
        tasks = [Path(f"/proc/{p.pid}/task/{p.pid}") for p in loaders]
        for task in tasks or Path("/proc/self/task").glob("*"):
            # The thread has ended, or this kernel has no schedstat.
            with contextlib.suppress(OSError, ValueError):
                on_core, in_queue, _ = (task / "schedstat").read_text().split()
                ran, queued = ran + int(on_core) * 1e-9, queued + int(in_queue) * 1e-9
        return main, others, ran, queued

    def shares(self) -> tuple[float, float]:
        """Since the start: share of CPU time outside the main threads, and seconds that reading
        threads waited for a core per second on a core.
        """
        now = self._read()
        main, others, ran, queued = (b - a for a, b in zip(self._start, now, strict=True))
        outside = others / (main + others) if main + others > 0.05 else 0.0
        return outside, max(0.0, queued) / ran if ran > 0.05 else 0.0


class Drain:
    """Takes batches from a reader in a thread, as many as were allowed, and throws them away."""

    def __init__(self, reader: Iterator[Any]) -> None:
        self._reader = reader
        self._allowed = threading.Semaphore(0)
        self._stop = False
        self._thread = threading.Thread(target=self._drain, daemon=True)
        self._error: BaseException | None = None

    def _drain(self) -> None:
        while True:
            self._allowed.acquire()
            if self._stop:
                return
            try:
                next(self._reader)
            except BaseException as error:
                self._error = error
                return

    def allow(self) -> None:
        """Allow one more batch, or raise the reader's error."""
        if self._error is not None:
            raise self._error
        self._allowed.release()

    def __enter__(self) -> Drain:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._allowed.release()
        self._thread.join()
