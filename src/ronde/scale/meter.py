"""Measure synthetic and real rates inside a script, at each number of workers."""

from __future__ import annotations

import dataclasses
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch.distributed as dist

from ronde.measure.study import load_study, report_progress, study_target, write_study
from ronde.run import hooks
from ronde.world.consensus import gather_json

if TYPE_CHECKING:
    from ronde.measure import Bench
    from ronde.plan import Plan
    from ronde.run import Run


def install_meter() -> None:
    """Observe this process, because of ``RONDE_STUDY=scale``."""
    hooks.observer = Meter(*study_target())


class _CoreWatch:
    """CPU seconds of this process and its children, read a few times a second.

    The loaders start before the window that counts, so only its last seconds are used.
    """

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._readings: list[tuple[float, float, int]] = []
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> _CoreWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _read(self) -> None:
        me = psutil.Process()
        while not self._stop.is_set():
            try:
                processes = [me, *me.children(recursive=True)]
                times = [process.cpu_times() for process in processes]
                spent = sum(t.user + t.system for t in times)
                self._readings.append((time.monotonic(), spent, len(processes)))
            except psutil.Error:
                pass  # a process ended during the reading
            self._stop.wait(0.1)

    def rate(self, seconds: float) -> float | None:
        """Cores at work in the last ``seconds``, from readings with all processes present."""
        most = max((n for _, _, n in self._readings), default=0)
        whole = [(at, spent) for at, spent, n in self._readings if n == most]
        if not whole:
            return None
        end, spent = whole[-1]
        inside = [(at, before) for at, before in whole if end - seconds <= at < end]
        if not inside or end - inside[0][0] < 0.2:
            return None
        return (spent - inside[0][1]) / (end - inside[0][0])


class Meter(hooks.Observer):
    """Measures before the first step, writes the rates, and ends the process.

    Args:
        options: ``rounds`` and ``seconds`` of the windows; ``batch``: ``keep``, ``grow``, or None
            as the script has it; ``loading``: whether to measure the loaders alone.
        file: where rank 0 writes the result, as JSON.
    """

    def __init__(self, options: dict[str, Any], file: Path) -> None:
        self.options = options
        self.file = file
        self._own_batch = "keep"

    def on_open(self, opening: hooks.Opening) -> None:
        """See :class:`Observer`."""
        self._own_batch = opening.batch
        taken, size = opening.taken, opening.taken.batch_size
        grows = self.options.get("batch") == "grow" and opening.batch == "keep"
        if grows and size is not None and dist.is_initialized():
            opening.taken = dataclasses.replace(taken, batch_size=size * dist.get_world_size())

    def count_workers(self, workers: int) -> int:
        """See :class:`Observer`."""
        return 1 if self.options.get("batch") == "keep" else workers

    def on_ready(self, run: Run, plan: Plan) -> None:
        """See :class:`Observer`."""
        from ronde.measure import Bench

        with Bench(run) as bench:
            rates = self._measure(run, bench)
        if run.is_main:
            values = {
                "workers": run.world_size,
                **rates,
                "batch": self.options.get("batch") or self._own_batch,
                "batch_size": plan.batch_size,
                "plan": plan.spec,
                "epoch_samples": run.port.data.order.epoch_samples,
                "device": run.device.type,
            }
            write_study(self.file, values)
        gather_json(run.port.world, 0)  # no rank ends while another still measures
        raise SystemExit(0)

    def _measure(self, run: Run, bench: Bench) -> dict[str, Any]:
        from ronde.measure import Arm

        rounds, seconds = int(self.options["rounds"]), float(self.options["seconds"])
        names = ["synthetic", "real"]
        rates: dict[str, list[float]] = {name: [] for name in names}
        cpu: dict[str, list[float]] = {name: [] for name in names}
        workers = f"{run.world_size} worker{'s' if run.world_size > 1 else ''}"
        for i in range(rounds):
            for name in names if i % 2 == 0 else names[::-1]:
                report_progress(f"{workers}: {name}, {i + 1} of {rounds}")
                with _CoreWatch() as watch:
                    result = bench.window(Arm(name), seconds)
                    busy = watch.rate(result.seconds)
                everyone = gather_json(run.port.world, busy)
                rates[name].append(result.samples_per_second)
                if all(one is not None for one in everyone):
                    cpu[name].append(sum(everyone) / result.samples_per_second)
        computing: list[float] = []
        if bench.can_be_alone:
            report_progress(f"{workers}: each by itself")
            computing = list(bench.window(Arm("alone"), seconds).per_rank)
        loading = None
        if self.options.get("loading"):
            report_progress(f"{workers}: the loaders alone")
            loading = bench.window(Arm("loading"), seconds).samples_per_second
        return {
            **rates,
            "loading": loading,
            "computing_each": computing,
            "cpu": {name: statistics.median(per) if per else None for name, per in cpu.items()},
        }


@dataclass(frozen=True)
class Start:
    """One start of the script at one size.

    Attributes:
        workers: number of workers.
        synthetic, real: samples per second of all workers, one value per round.
        loading: samples per second of all loaders alone, or None.
        cpu: CPU seconds per sample, ``synthetic`` and ``real``; None if unknown.
        batch: ``keep`` or ``grow``; ``batch_size``: of all workers together.
        epoch_samples: samples of an epoch.
        device: ``cpu`` or ``cuda``.
        computing_each: samples per second of each worker by itself, without input and exchange;
            empty with one, or if it cannot be measured.
    """

    workers: int
    synthetic: tuple[float, ...]
    real: tuple[float, ...]
    loading: float | None
    cpu: Mapping[str, float | None]
    batch: str
    batch_size: int
    plan: str
    epoch_samples: int
    device: str
    computing_each: tuple[float, ...] = ()


def load_scale(file: Path) -> Start:
    """Read the result of a :class:`Meter`.

    Raises:
        RondeError: the script ended without calling ``distribute``.
    """
    values = load_study(file, "measure")
    lists = ("synthetic", "real", "computing_each")
    return Start(**{**values, **{name: tuple(values[name]) for name in lists}})


def measure_sizes(
    sizes: Sequence[int],
    rounds: int,
    start: Callable[[int, bool], Start],
    tell: Callable[[str], None],
) -> dict[int, list[Start]]:
    """Start every size ``rounds`` times, in turns; every other round goes backwards.

    Args:
        sizes: numbers of workers.
        start: starts the script at a size; the second argument asks for the loaders alone too.
        tell: shows progress.
    """
    starts: dict[int, list[Start]] = {n: [] for n in sizes}
    for i in range(rounds):
        for n in sizes if i % 2 == 0 else list(reversed(sizes)):
            tell(f"round {i + 1} of {rounds}: starting {n} worker{'s' if n > 1 else ''}")
            starts[n].append(start(n, i == 0))
    return starts
