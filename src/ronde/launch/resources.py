"""What the workers of one host use and do: processors, memory, disk, GPUs, steps; sampled each
second, told every ten seconds as a line of ``resources.jsonl``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import psutil

from ronde.watch.process_facts import ProcessFacts, process_facts, reasons
from ronde.world.cores import memory_limit, usable_cores
from ronde.world.heartbeat import Beat, read_beat

__all__ = ["ResourceWatch"]

_SEARCH_SHARE = 2e-4  # of a core, to look for the workers' processes


class ResourceWatch:
    """Looks at the workers of this host while they run.

    Args:
        folder: where they keep their heartbeats.
        ranks: theirs.
        directory: of the run; None: there is none.
        send: takes each line; ``docs/watch.md`` has its fields.
        say: called with a sentence if looking fails.
        look, line: seconds between two looks, and two lines.

    Example::

        with ResourceWatch(folder, [0, 1], run_directory, send, print):
            ...
    """

    def __init__(
        self,
        folder: Path,
        ranks: Sequence[int],
        directory: Path | None,
        send: Callable[[dict[str, Any]], object],
        say: Callable[[str], object],
        look: float = 1.0,
        line: float = 10.0,
    ) -> None:
        self._folder, self._ranks, self._directory = folder, ranks, directory
        self._send, self._say, self._seconds, self._line_seconds = send, say, look, line
        self._beats: dict[int, Beat] = {}
        self._facts: dict[int, ProcessFacts] = {}
        self._processes: list[psutil.Process] = []
        self._used: dict[int, float] = {}
        self._begun = time.monotonic()
        self._search_at = 0.0
        self._looked = self._written = 0.0
        self._idle = (0.0, 0.0)
        self._cpu: list[float] = []
        self._gpus = _Gpus(len(ranks))
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ronde-resources", daemon=True)

    def __enter__(self) -> ResourceWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        try:
            while not self._over.wait(self._seconds):
                if not self._beats:
                    self._find()
                else:
                    self._look()
        except Exception as error:  # watching never breaks the training
            why = f"resources are not watched any more ({type(error).__name__}: {error})"
            self._say(f"ronde: {why}")
        finally:
            self._gpus.close()

    def _read_beats(self) -> dict[int, Beat]:
        beats = {rank: read_beat(self._folder / f"heartbeat-{rank}") for rank in self._ranks}
        return {rank: beat for rank, beat in beats.items() if beat is not None}

    def _find(self) -> None:
        """The workers; what they have used and done until now."""
        pids = {beat.pid for beat in self._beats.values()}
        self._beats = self._read_beats()
        workers = {beat.pid for beat in self._beats.values()}
        self._written = self._looked = time.monotonic()
        if workers and (workers != pids or self._written >= self._search_at):
            begun = time.thread_time()
            self._processes = _with_children(workers)
            self._search_at = self._written + (time.thread_time() - begun) / _SEARCH_SHARE
        self._used, self._cpu = self._cpu_seconds(), []
        self._facts = {pid: self._facts.get(pid) or _facts(pid) for pid in workers}
        self._idle = _idle_seconds()
        self._gpus.forget()

    def _cpu_seconds(self) -> dict[int, float]:
        seconds = {}
        for process in self._processes:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                seconds[process.pid] = times.user + times.system
        return seconds

    def _look(self) -> None:
        now, used = time.monotonic(), self._cpu_seconds()
        seconds = sum(max(0.0, s - self._used.get(pid, s)) for pid, s in used.items())
        self._cpu.append(100.0 * seconds / (now - self._looked))
        self._used, self._looked = used, now
        self._gpus.look()
        if now < self._written + self._line_seconds:
            return
        self._send(self._line(now))
        self._find()

    def _line(self, now: float) -> dict[str, Any]:
        folder = self._directory if self._directory and self._directory.exists() else None
        disk = shutil.disk_usage(folder) if folder else None
        cores = usable_cores()
        idle, whole = (b - a for a, b in zip(self._idle, _idle_seconds(), strict=True))
        return {
            "time": time.time(),
            "seconds": round(now - self._written, 2),
            "since_start": round(now - self._begun, 1),
            "cpu": _percentiles([used / cores for used in self._cpu]),
            "cores": cores,
            "idle": round(100.0 * idle / whole, 1) if whole > 0 else None,
            "memory": self._memory(),
            "memory_limit": int(min(psutil.virtual_memory().total, memory_limit())),
            "disk_free": disk.free if disk else None,
            "disk_total": disk.total if disk else None,
            **self._gpus.values(),
            **self._progress(),
        }

    def _memory(self) -> int:
        memory = 0
        for process in self._processes:
            with contextlib.suppress(psutil.Error):
                info = process.memory_info()
                # pages that all workers share would count once for each
                memory += info.rss - getattr(info, "shared", 0)
        return memory

    def _progress(self) -> dict[str, Any]:
        """What the workers have done since the last line, and what held them up."""
        now, ranks = self._read_beats(), list[dict[str, Any]]()
        throttled = 0
        for rank, before in self._beats.items():
            beat = now.get(rank, before)
            if beat.pid != before.pid:
                continue  # it has just been started
            last = self._facts[beat.pid]
            self._facts[beat.pid] = facts = _facts(beat.pid)
            throttled = max(throttled, facts.throttled - last.throttled)
            known = beat.waited_seconds >= 0 and not beat.cuda  # its clock runs ahead of a device
            waited = beat.waited_seconds - max(before.waited_seconds, 0.0) if known else None
            ranks.append(
                {
                    "rank": rank,
                    "steps": beat.steps - before.steps,
                    "waited": None if waited is None else round(waited, 3),
                    "loading": round(beat.loading_seconds - before.loading_seconds, 3),
                    "why": list(reasons(last, facts)),
                }
            )
        beats = now.values()
        return {
            "throttled": throttled,
            "step": max((beat.step for beat in beats), default=0),
            "last_step": max((beat.last_step for beat in beats), default=0),
            "training": bool(beats) and all(beat.phase != "start-up" for beat in beats),
            "ranks": ranks,
        }


def _facts(pid: int) -> ProcessFacts:
    return process_facts(pid, children=False)


def _with_children(pids: Collection[int]) -> list[psutil.Process]:
    """Processes and those that they have started, by one look at all that this one has started."""
    processes = {}
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            processes[pid] = psutil.Process(pid)
    for process in psutil.Process().children(recursive=True):  # parents come first
        with contextlib.suppress(psutil.Error):
            if process.ppid() in processes:
                processes[process.pid] = process
    return list(processes.values())


def _idle_seconds() -> tuple[float, float]:
    """Seconds for which cores that the workers may use had nothing to do, and all seconds."""
    every = psutil.cpu_times(percpu=True)
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(every))
    cores = [every[i] for i in usable if i < len(every)]
    return sum(c.idle for c in cores), sum(map(sum, cores))


class _Gpus:
    """The devices of this host, by NVML where the package nvidia-ml-py is there.

    Args:
        count: how many workers there are: so many devices are theirs.
    """

    def __init__(self, count: int) -> None:
        self._nvml: Any = None
        self._handles: list[Any] = []
        self._busy: list[list[float]] = []
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception:  # no package, no driver, or no device: there is nothing to measure
            return
        self._nvml = pynvml
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        every = range(pynvml.nvmlDeviceGetCount())
        chosen = [int(x) for x in visible.split(",")] if _is_numbers(visible) else list(every)
        self._handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in chosen[:count]]
        self.forget()

    def forget(self) -> None:
        self._busy = [[] for _ in self._handles]

    def look(self) -> None:
        for busy, handle in zip(self._busy, self._handles, strict=True):
            with contextlib.suppress(self._nvml.NVMLError):
                busy.append(float(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu))

    def values(self) -> dict[str, Any]:
        memory = [self._nvml.nvmlDeviceGetMemoryInfo(handle) for handle in self._handles]
        return {
            "gpu": [_percentiles(busy) for busy in self._busy],
            "gpu_memory": [m.used for m in memory],
            "gpu_memory_limit": [m.total for m in memory],
        }

    def close(self) -> None:
        if self._nvml is not None:
            self._nvml.nvmlShutdown()


def _is_numbers(text: str) -> bool:
    return bool(text) and all(part.strip().isdecimal() for part in text.split(","))


def _percentiles(values: Sequence[float]) -> list[float]:
    """The 5th, 50th, and 95th percentile: values that were measured."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return [round(ordered[round(q * last)], 1) for q in (0.05, 0.5, 0.95)] if ordered else []
