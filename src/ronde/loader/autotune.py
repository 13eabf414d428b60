"""Choose threads, processes or neither by reading some samples alone and in parallel.

Two measures decide: how often a thread that wakes up finds Python's lock taken, and how much longer
a sample takes when several threads read. Both exclude time without a free core (from
``/proc/thread-self/schedstat``), because the machine may be busy with something else.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing

from ronde.introspect import Marks, describe_open, preserve_state, reopen_files
from ronde.loader.reader import Ask, Reader
from ronde.loader.thread_workers import limit_compute_threads, limit_process_threads
from ronde.world.tensors import parts

_TRIAL_SECONDS = 0.25
_FEWEST = 4
_BUDGET_SECONDS = 0.5
_ROUND_SECONDS = 0.06  # of CPU time: 12 × the 5 ms for which a thread keeps Python's lock
_LONGEST_ROUND_SECONDS = 0.25
_FEWEST_IN_A_ROUND = 2
_ROUNDS = 3
_CHEAP_SECONDS = 10e-6  # per sample; a loading process costs twice that
_CHEAP_BATCH_SECONDS = 0.3e-3
_MOST_THREADS = 4
_TICK_SECONDS = 1e-3
_LOOK_SECONDS = 15e-3  # reading schedstat releases the lock: no more often than Python does
_WAITED_SECONDS = 0.1e-3
_MOST_HELD = 0.5
_LEAST_GAIN = 0.4  # of the ideal gain of one more thread

_FORKED_SECONDS = 0.15  # for which forked processes read at once
_PATIENCE_SECONDS = 10.0


@dataclass(frozen=True)
class Trial:
    """What reading some samples in the calling thread showed.

    Attributes:
        draws: it drew from torch's, Python's or NumPy's global generator.
        seconds: per sample, without collating; 0 if no sample could be read.
        collate_seconds: per sample.
    """

    draws: bool
    seconds: float = 0.0
    collate_seconds: float = 0.0


def try_samples(reader: Reader, ask: Ask) -> Trial:
    """Read some samples for at most a quarter of a second; the script's generators are restored.

    Errors are left to the real read.
    """
    with preserve_state(reader.dataset):  # its own generators too
        times: list[float] = []
        samples: list[Any] = []
        start = time.perf_counter()
        marks = Marks()
        for j in range(len(ask.ids)):
            began = time.perf_counter()
            try:
                samples += list(reader.read(ask.part(j, j + 1)))
            except Exception:
                continue
            now = time.perf_counter()
            times.append(now - began)
            if not marks.unmoved():
                return Trial(True)
            if len(times) >= _FEWEST and now - start > _TRIAL_SECONDS:
                break
        if not times:
            return Trial(False)
        collates: list[float] = []
        try:
            for _ in range(3):  # the first is slower
                began = time.perf_counter()
                reader.join(ask.part(0, len(samples)), samples)
                collates.append(time.perf_counter() - began)
                if collates[-1] > _TRIAL_SECONDS / 10:
                    break
        except Exception:
            collates.append(0.0)
        return Trial(not marks.unmoved(), float(np.median(times)), min(collates) / len(samples))


def _queued_seconds() -> float:
    """Time this thread was ready to run without a free core."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) * 1e-9
    except (OSError, ValueError, IndexError):
        return 0.0


class _Round:
    """Threads that read at once: their start, and whether to stop."""

    def __init__(self, n: int) -> None:
        self.start = 0.0
        self.over = False
        self.barrier = threading.Barrier(n, self._begin)

    def _begin(self) -> None:
        self.start = time.perf_counter()


class _Timed(threading.Thread):
    """Reads some samples repeatedly for some time."""

    def __init__(
        self, reader: Reader, ask: Ask, together: _Round, compute_threads: int | None
    ) -> None:
        super().__init__(daemon=True, name="ronde-trial")
        self.reader, self.ask, self.together = reader, ask, together
        self.compute_threads = compute_threads
        self.values: list[Any] = []
        self.seconds = 0.0
        self.failed = False

    def run(self) -> None:
        if self.compute_threads is not None:
            limit_compute_threads(self.compute_threads)
        together, n, count, look = self.together, len(self.ask.ids), 0, 0.0
        together.barrier.wait()
        queued = _queued_seconds()
        try:
            while count < _FEWEST_IN_A_ROUND or not together.over:
                samples = self.reader.read(self.ask.part(count % n, count % n + 1))
                if count < n:
                    self.values += list(samples)
                count += 1
                spent = time.perf_counter() - together.start
                if spent >= look:
                    look = spent + _LOOK_SECONDS
                    own = spent - (_queued_seconds() - queued)
                    if own >= _ROUND_SECONDS or spent >= _LONGEST_ROUND_SECONDS:
                        together.over = True
        except Exception:
            self.failed = together.over = True
        # From the common start, so that waiting for Python's lock at the beginning counts.
        own = time.perf_counter() - together.start - (_queued_seconds() - queued)
        self.seconds = max(1e-9, own) / max(1, count)


def _tick() -> float:
    """Time how long this thread needs to get Python's lock after a short sleep."""
    queued, start = _queued_seconds(), time.perf_counter()
    time.sleep(_TICK_SECONDS)
    return time.perf_counter() - start - (_queued_seconds() - queued)


def _together(
    reader: Reader,
    asks: Sequence[Ask],
    compute_threads: int | None,
    ticks: list[float] | None = None,
) -> list[_Timed]:
    together = _Round(len(asks))
    threads = [_Timed(reader, ask, together, compute_threads) for ask in asks]
    for thread in threads:
        thread.start()
    while ticks is not None and threads[0].is_alive():
        ticks.append(_tick())
    for thread in threads:
        thread.join()
    return threads


def _differs(a: Any, b: Any) -> bool:
    """Whether two samples hold different values; values that cannot be compared are equal."""
    if type(a) is not type(b):
        return True
    if isinstance(a, torch.Tensor):
        return (
            a.shape != b.shape
            or a.dtype != b.dtype
            or not torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
        )
    if isinstance(a, np.ndarray):
        return bool(
            a.shape != b.shape
            or a.dtype != b.dtype
            or (a.dtype != object and a.tobytes() != b.tobytes())
        )
    if (held := parts(a)) is not None and (other := parts(b)) is not None:
        return held.keys() != other.keys() or any(_differs(v, other[k]) for k, v in held.items())
    return isinstance(a, bytes | str | int | bool) and a != b


def _alike_in_processes(reader: Reader, ask: Ask, expected: Sequence[Any], n: int) -> bool:
    """Whether ``n`` forked processes reading at once agree with one thread. True without fork."""
    method = torch.multiprocessing.get_start_method(allow_none=True)
    if not hasattr(os, "fork") or method not in (None, "fork"):
        return True

    def look() -> bool:
        limit_process_threads(1)
        end, rounds = time.monotonic() + _FORKED_SECONDS, 0
        while rounds < 2 or time.monotonic() < end:
            for j, value in enumerate(expected):
                if _differs(next(iter(reader.read(ask.part(j, j + 1)))), value):
                    return False
            rounds += 1
        return True

    children = []
    for _ in range(n):
        with warnings.catch_warnings():
            # Python warns of forks beside threads; a DataLoader forks the same way
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            status = 1
            try:
                status = 0 if look() else 1
            finally:
                os._exit(status)
        children.append(child)
    alike, limit = True, time.monotonic() + _PATIENCE_SECONDS
    try:
        while children and time.monotonic() < limit:
            ended, status = os.waitpid(children[0], os.WNOHANG)
            if ended:
                children.pop(0)
                alike &= status == 0
            else:
                time.sleep(0.005)
        return alike and not children
    finally:
        # a child may wait for a lock that another thread held at the fork, or Ctrl-C came
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def choose_executor(
    reader: Reader, ask: Ask, trial: Trial, batch: int, workers: int, compute_threads: int | None
) -> tuple[str, str]:
    """Choose ``(executor, why)`` for ``workers`` loaders and micro-batches of ``batch`` samples."""
    if workers < 1:
        return "none", "no loading threads or processes were requested"
    if (held := describe_open(reader.dataset)) is not None:
        return "none", (
            f"the data set holds {held} open; threads and forked processes would share its "
            "position. Open it when the first sample is read, so that each process has its own"
        )
    if trial.draws:
        return (
            "processes",
            "samples draw from torch's, random's or numpy's global generator, which threads share",
        )
    each = trial.seconds + trial.collate_seconds
    if each and (each < _CHEAP_SECONDS or each * batch < _CHEAP_BATCH_SECONDS):
        return "none", f"a sample takes {each * 1e6:.1f} µs"
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return "threads", "this Python has no global lock"
    n = max(2, min(workers, _MOST_THREADS))
    with reopen_files(reader.dataset):
        executor, why, values = _try_threads(reader, ask, each, n, compute_threads)
    if values and not _alike_in_processes(reader, ask, values, n):
        return "none", f"{why}, and when several processes did"
    return executor, why


def _try_threads(
    reader: Reader, ask: Ask, each: float, n: int, compute_threads: int | None
) -> tuple[str, str, list[Any]]:
    """``(executor, why, samples)``: the samples are those that threads read differently."""
    undisturbed = float(np.median([_tick() for _ in range(15)]))
    ticks: list[float] = []
    alone: list[float] = []
    shared: list[float] = []
    start = time.perf_counter()
    for k in range(_ROUNDS):
        (one,) = _together(reader, [ask], compute_threads, ticks)
        many = _together(reader, [ask] * n, compute_threads)
        if one.failed or any(t.failed for t in many):
            return "processes", "a sample could not be read in a thread", []
        if k == 0 and any(
            _differs(a, b) for t in many for a, b in zip(t.values, one.values, strict=False)
        ):
            return (
                "processes",
                "samples were not the same when several threads read them at once",
                one.values,
            )
        alone.append(one.seconds)
        shared.append(float(np.mean([t.seconds for t in many])))
        if time.perf_counter() - start > _BUDGET_SECONDS:
            break
    held_share = (
        sum(t > undisturbed + _WAITED_SECONDS for t in ticks) / len(ticks) if ticks else 0.0
    )
    times = n * min(alone) / min(shared)  # other load only makes either longer
    if held_share >= _MOST_HELD:
        return (
            "processes",
            f"samples hold Python's lock {held_share:.0%} of the time; {each * 1e3:.2g} ms "
            "a sample",
            [],
        )
    why = f"{n} threads read {times:.1f} × what one reads; {each * 1e3:.2g} ms a sample"
    return ("threads" if times >= 1 + _LEAST_GAIN * (n - 1) else "processes"), why, []
