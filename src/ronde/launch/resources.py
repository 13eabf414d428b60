"""What the workers of one host use: processors, memory, disk, GPUs; sampled each second, told every
ten seconds as a line of ``resources.jsonl``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from ronde.watch.process_facts import process_facts
from ronde.world.cores import usable_cores
from ronde.world.heartbeat import read_beat

__all__ = ["ResourceWatch"]

_LOOK_SECONDS, _LINE_SECONDS = 1.0, 10.0


class ResourceWatch:
    """Looks at the workers of this host while they run.

    Args:
        folder: where they keep their heartbeats.
        ranks: theirs.
        directory: of the run; None: there is none.
        send: takes each line: ``time``, ``cpu`` (5th, 50th, and 95th percentile, in % of the cores
            that the workers may use), ``memory`` and ``memory_limit`` in bytes, ``disk_free``,
            ``gpu`` (percentiles of each device), ``gpu_memory``, ``gpu_memory_limit``, and
            ``throttled`` (by a control group).
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
        look: float = _LOOK_SECONDS,
        line: float = _LINE_SECONDS,
    ) -> None:
        self._folder, self._ranks, self._directory = folder, ranks, directory
        self._send, self._say, self._seconds, self._line_seconds = send, say, look, line
        self._workers: list[int] = []
        self._processes: list[psutil.Process] = []
        self._used: dict[int, float] = {}
        self._looked = self._told = 0.0
        self._throttled = 0
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
                if not self._workers:
                    self._find()
                else:
                    self._look()
        except Exception as error:  # watching never breaks the training
            told = f"resources are not watched any more ({type(error).__name__}: {error})"
            self._say(f"ronde: {told}")
        finally:
            self._gpus.close()

    def _find(self) -> None:
        """The workers, and the processes that they have started."""
        beats = [read_beat(self._folder / f"heartbeat-{rank}") for rank in self._ranks]
        self._workers = [beat.pid for beat in beats if beat is not None]
        self._processes = []
        for pid in self._workers:
            with contextlib.suppress(psutil.Error):
                worker = psutil.Process(pid)
                self._processes += [worker, *worker.children(recursive=True)]
        self._looked = self._told = time.monotonic()
        self._used, self._cpu = self._cpu_seconds(), []
        self._throttled = self._throttles()
        self._gpus.forget()

    def _cpu_seconds(self) -> dict[int, float]:
        found = {}
        for process in self._processes:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                found[process.pid] = times.user + times.system
        return found

    def _throttles(self) -> int:
        return sum(process_facts(pid, children=False).throttled for pid in self._workers)

    def _look(self) -> None:
        now, used = time.monotonic(), self._cpu_seconds()
        seconds = sum(max(0.0, s - self._used.get(pid, s)) for pid, s in used.items())
        self._cpu.append(100.0 * seconds / (now - self._looked) / usable_cores())
        self._used, self._looked = used, now
        self._gpus.look()
        if now < self._told + self._line_seconds:
            return
        folder = self._directory if self._directory and self._directory.exists() else None
        memory = 0
        for process in self._processes:
            with contextlib.suppress(psutil.Error):
                info = process.memory_info()
                memory += info.rss - getattr(info, "shared", 0)
        self._send(
            {
                "time": time.time(),
                "cpu": _percentiles(self._cpu),
                "memory": memory,
                "memory_limit": _memory_limit(),
                "disk_free": shutil.disk_usage(folder).free if folder else None,
                **self._gpus.values(),
                "throttled": self._throttles() > self._throttled,
            }
        )
        self._find()


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


def _memory_limit() -> int:
    """Bytes that processes here may use: the machine's, or those of the control group."""
    limit = int(psutil.virtual_memory().total)
    with contextlib.suppress(OSError, IndexError):
        groups = Path("/proc/self/cgroup").read_text().splitlines()
        for line in groups:
            _, controllers, path = line.split(":", 2)
            name = "memory.limit_in_bytes" if controllers else "memory.max"
            root = Path("/sys/fs/cgroup") / ("memory" if controllers else "")
            if controllers and "memory" not in controllers.split(","):
                continue
            for folder in (root / path.lstrip("/"), root):
                with contextlib.suppress(OSError, ValueError):
                    limit = min(limit, int((folder / name).read_text()))
    return limit
