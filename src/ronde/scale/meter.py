"""Measure synthetic and real rates inside a script, at each number of workers."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
            # There and back, so that a drift of the machine favors neither.
            for name in names if i % 2 == 0 else names[::-1]:
                report_progress(f"{workers}: {name}, {i + 1} of {rounds}")
                result = bench.window(Arm(name), seconds)
                rates[name].append(result.samples_per_second)
                cpu[name].append(result.with_loaders_cpu_seconds)
        loading = None
        if self.options.get("loading"):
            report_progress(f"{workers}: the loaders alone")
            loading = bench.window(Arm("loading"), seconds).samples_per_second
        return {
            **rates,
            "loading": loading,
            "cpu": {name: statistics.median(per) for name, per in cpu.items()},
        }


@dataclass(frozen=True)
class Start:
    """One start of the script at one size.

    Attributes:
        workers: number of workers.
        synthetic, real: samples per second of all workers, one value per round.
        loading: samples per second of all loaders alone, or None.
        cpu: CPU seconds per sample, ``synthetic`` and ``real``.
        batch: ``keep`` or ``grow``; ``batch_size``: of all workers together.
        epoch_samples: samples of an epoch.
        device: ``cpu`` or ``cuda``.
    """

    workers: int
    synthetic: tuple[float, ...]
    real: tuple[float, ...]
    loading: float | None
    cpu: Mapping[str, float]
    batch: str
    batch_size: int
    plan: str
    epoch_samples: int
    device: str


def load_scale(file: Path) -> Start:
    """Read the result of a :class:`Meter`.

    Raises:
        RondeError: the script ended without calling ``distribute``.
    """
    values = load_study(file, "measure")
    rates = {name: tuple(values[name]) for name in ("synthetic", "real")}
    return Start(**{**values, **rates})


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
