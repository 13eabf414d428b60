"""``ronde scale``: how many devices are worth it? One script, started at several sizes, its
synthetic and its real rate side by side.

Each size is started several times, in turns (1, 2, 4, 1, 2, 4, …), since a machine drifts; within
each start the two rates take turns too. What was measured is fitted and extrapolated by
:mod:`ronde.scale.laws`; where the cores or the loaders end is predicted by
:mod:`ronde.predict.input_capacity`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch.distributed as dist

from ronde.predict import Capacities, Measured, StageCapacity, Wall, from_runs, gap, nodes_of, walls
from ronde.predict.input_capacity import predict
from ronde.run import hooks
from ronde.scale.laws import Band, LawFit, fits, stop_at
from ronde.watch import MARK
from ronde.world import ArgumentError, RondeError
from ronde.world.consensus import gather_json

if TYPE_CHECKING:
    from ronde.plan import Plan
    from ronde.run.step_port import RunView

__all__ = [
    "Meter",
    "ScaleRow",
    "Scaling",
    "Start",
    "install_meter",
    "load_scale",
    "summarise_scale",
]

_THRESHOLD = 0.5
_NO_GAP = 0.03  # of the synthetic rate: less is noise
_WIDE = 2.0  # an interval whose ends are farther apart, as a ratio, says little
_SLOW = 0.85  # of the others' speed: below, a worker is told from noise
_FULL = 0.8  # of the cores at work: no more to be had of them


def install_meter() -> None:
    """Look on in this process, where ``RONDE_STUDY=scale`` asks for it."""
    hooks.observer = Meter(
        json.loads(os.environ.get("RONDE_STUDY_OPTIONS", "{}")),
        Path(os.environ["RONDE_STUDY_FILE"]),
    )


def _tell(text: str) -> None:
    if os.environ.get("RONDE_LAUNCHER_PID"):
        os.write(1, (MARK + json.dumps({"study": text}) + "\n").encode())


# -- in the workers --------------------------------------------------------------------


class _Cores:
    """CPU seconds that this process and those it started have taken, read a few times a second.

    A window that is measured comes at the end of a longer one, in which loaders start: what they
    took by then is left out.
    """

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._seen: list[tuple[float, float, int]] = []
        self._thread = threading.Thread(target=self._go, daemon=True)

    def __enter__(self) -> _Cores:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _go(self) -> None:
        me = psutil.Process()
        while not self._stop.is_set():
            try:
                processes = [me, *me.children(recursive=True)]
                taken = 0.0
                for process in processes:
                    times = process.cpu_times()
                    taken += times.user + times.system
                self._seen.append((time.monotonic(), taken, len(processes)))
            except psutil.Error:
                pass  # one ended while it was looked at
            self._stop.wait(0.1)

    def rate(self, seconds: float) -> float | None:
        """Cores at work in the last ``seconds`` with all processes there."""
        if not self._seen:
            return None
        most = max(n for _, _, n in self._seen)
        whole = [(at, taken) for at, taken, n in self._seen if n == most]
        end, taken = whole[-1]
        inside = [(at, before) for at, before in whole if end - seconds <= at < end]
        if not inside or end - inside[0][0] < 0.2:
            return None
        return (taken - inside[0][1]) / (end - inside[0][0])


class Meter(hooks.Observer):
    """Measures before the first step, writes what it found, and ends the process.

    Args:
        options: ``rounds`` and ``seconds`` of the windows, ``batch`` (``keep``, ``grow`` or None as
            the script has it), ``loading``.
        file: where rank 0 writes what it found, as JSON.
    """

    def __init__(self, options: dict[str, Any], file: Path) -> None:
        self.options = options
        self.file = file
        self._own_batch = "keep"

    def on_open(self, opening: hooks.Opening) -> None:
        """See :class:`Observer`."""
        self._own_batch = opening.batch
        asked, size = self.options.get("batch"), opening.taken.batch_size
        if (
            asked == "grow"
            and opening.batch == "keep"
            and size is not None
            and dist.is_initialized()
        ):
            opening.taken = dataclasses.replace(
                opening.taken, batch_size=size * dist.get_world_size()
            )

    def count_workers(self, workers: int) -> int:
        """See :class:`Observer`."""
        return 1 if self.options.get("batch") == "keep" else workers

    def on_ready(self, run: RunView, plan: Plan) -> None:
        """See :class:`Observer`."""
        from ronde.measure import Arm, Bench

        rounds, seconds = int(self.options["rounds"]), float(self.options["seconds"])
        arms = {"synthetic": Arm("synthetic"), "real": Arm("real")}
        found: dict[str, list[float]] = {name: [] for name in arms}
        cores: dict[str, list[float]] = {name: [] for name in arms}
        workers = f"{run.world_size} worker{'s' if run.world_size > 1 else ''}"
        order = ["synthetic", "real"]
        first_batch = 0.0
        with Bench(run) as bench:
            for i in range(rounds):
                for name in order if i % 2 == 0 else order[::-1]:
                    _tell(f"{workers}: {name}, {i + 1} of {rounds}")
                    with _Cores() as watch:
                        result = bench.window(arms[name], seconds)
                        first_batch = max(
                            first_batch, result.first_batch_seconds if name == "real" else 0.0
                        )
                        taken = watch.rate(result.seconds)
                    everyone = gather_json(run.port.world, taken)
                    found[name].append(result.samples_per_second)
                    if all(one is not None for one in everyone):
                        cores[name].append(sum(everyone) / result.samples_per_second)
            computing: list[float] = []
            if bench.can_be_alone:
                _tell(f"{workers}: each by itself")
                computing = list(bench.window(Arm("alone"), seconds).per_rank)
            loading, each = None, []
            if self.options.get("loading"):
                _tell(f"{workers}: the loaders alone")
                alone = bench.window(Arm("loading"), seconds)
                loading, each = alone.samples_per_second, list(alone.per_rank)
        if run.is_main:
            values = {
                "workers": run.world_size,
                "synthetic": found["synthetic"],
                "real": found["real"],
                "loading": loading,
                "loading_each": each,
                "computing_each": computing,
                "first_batch_seconds": first_batch,
                "cpu": {
                    name: statistics.median(per) if per else None for name, per in cores.items()
                },
                "batch": self.options.get("batch") or self._own_batch,
                "batch_size": plan.batch_size,
                "plan": plan.spec,
                "epoch_samples": run.port.data.order.epoch_samples,
                "device": run.device.type,
                "loaders": run.port.data.settings.num_workers,
            }
            temporary = self.file.with_suffix(".writing")
            temporary.write_text(json.dumps(values))
            temporary.rename(self.file)
        gather_json(run.port.world, 0)  # nobody leaves while another still measures
        raise SystemExit(0)


# -- what came of it -------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """One start of the script at one size.

    Attributes:
        workers: how many.
        synthetic, real: samples per second of all, one value per round.
        loading: of all loaders with nothing to wait for, or None; ``loading_each``: of each
            worker's.
        computing_each: samples per second of each worker by itself, nothing read or exchanged;
            empty with one, or where it cannot be measured.
        first_batch_seconds: from the loaders' start to the first batch.
        cpu: CPU seconds a sample, ``synthetic`` and ``real``; None where it could not be told.
        batch: ``keep`` or ``grow``; ``batch_size``: of all workers together.
        epoch_samples: in an epoch.
        device: ``cpu`` or ``cuda``.
        loaders: loading processes or threads of each worker.
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
    loaders: int
    loading_each: tuple[float, ...] = ()
    computing_each: tuple[float, ...] = ()
    first_batch_seconds: float = 0.0


def load_scale(file: Path) -> Start:
    """What a :class:`Meter` wrote.

    Raises:
        RondeError: the script ended without calling ``distribute``.
    """
    try:
        found = json.loads(file.read_text())
    except OSError:
        raise RondeError(
            "the script ended without calling ronde.distribute: there is nothing to measure."
        ) from None
    lists = {
        name: tuple(found[name]) for name in ("synthetic", "real", "loading_each", "computing_each")
    }
    return Start(**{**found, **lists})


@dataclass(frozen=True)
class ScaleRow:
    """One size that was measured. Rates are samples per second of all workers."""

    workers: int
    batch_per_worker: float
    synthetic: float
    real: float
    synthetic_range: tuple[float, float]
    real_range: tuple[float, float]
    gap: float
    speedup_synthetic: float
    speedup_real: float
    efficiency_synthetic: float
    efficiency_real: float
    epoch_seconds: float
    cost_per_epoch_device_seconds: float
    cost_per_epoch: float | None


@dataclass(frozen=True)
class Further:
    """One size that was not measured."""

    workers: int
    synthetic: Band
    real: Band
    gap: float
    efficiency_real: float
    epoch_seconds: float
    cost_per_epoch: float | None


@dataclass
class Scaling:
    """The answer of ``ronde scale``.

    Attributes:
        rows: what was measured.
        fits: ``synthetic`` and ``real`` -> law -> its fit.
        laws: which law was taken for each.
        extrapolated: what was not measured.
        wall: what is met first, of what was measured by itself; None where nothing is up to the
            last size.
        stop_at: beyond so many, a further worker adds less than ``threshold`` of what the first
            gives.
        sentence: the answer.
        slow_worker: at the largest size, the rank that computes slowest and its share of the
            others' speed; None where all are alike.
    """

    script: str
    rows: list[ScaleRow]
    fits: dict[str, dict[str, LawFit]]
    laws: dict[str, str]
    extrapolated: list[Further]
    wall: Wall | None
    stop_at: int
    threshold: float
    sentence: str
    batch: str
    batch_size: int
    device: str
    threads: int | None
    cost_per_hour: float | None
    notes: list[str] = field(default_factory=list)
    slow_worker: tuple[int, float] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as they are written as JSON."""
        rows = []
        for row in self.rows:
            values = dataclasses.asdict(row)
            for name in ("synthetic", "real"):
                values[f"{name}_low"], values[f"{name}_high"] = values.pop(f"{name}_range")
            rows.append(values)
        return {
            "version": 1,
            "script": self.script,
            "device": self.device,
            "batch": self.batch,
            "batch_size": self.batch_size,
            "threads_per_worker": self.threads,
            "cost_per_device_hour": self.cost_per_hour,
            "rows": rows,
            "fits": {
                name: {law: fit.to_dict() for law, fit in found.items()}
                for name, found in self.fits.items()
            },
            "laws": self.laws,
            "extrapolated": [
                {
                    "workers": f.workers,
                    "synthetic": f.synthetic.value,
                    "synthetic_low": f.synthetic.low,
                    "synthetic_high": f.synthetic.high,
                    "real": f.real.value,
                    "low": f.real.low,
                    "high": f.real.high,
                    "gap": f.gap,
                    "efficiency_real": f.efficiency_real,
                    "epoch_seconds": f.epoch_seconds,
                    "cost_per_epoch": f.cost_per_epoch,
                }
                for f in self.extrapolated
            ],
            "wall": {
                "stage": self.wall.stage,
                "devices": self.wall.devices,
                "limit": self.wall.limit,
            }
            if self.wall
            else None,
            "slow_worker": {"rank": self.slow_worker[0], "speed": self.slow_worker[1]}
            if self.slow_worker
            else None,
            "stop_at": self.stop_at,
            "threshold": self.threshold,
            "sentence": self.sentence,
            "notes": self.notes,
        }


def _rows(starts: Mapping[int, Sequence[Start]], price: float | None) -> list[ScaleRow]:
    rows: list[ScaleRow] = []
    for n in sorted(starts):
        some = starts[n]
        synthetic = [x for s in some for x in s.synthetic]
        real = [x for s in some for x in s.real]
        middle, true = statistics.median(synthetic), statistics.median(real)
        base = rows[0] if rows else None
        # Of the smallest size that was measured, each of whose workers counts as 1.
        per = (
            (base.synthetic / base.workers, base.real / base.workers)
            if base
            else (middle / n, true / n)
        )
        up = (middle / per[0], true / per[1])
        epoch = _epoch_seconds(some[0].epoch_samples, some[0].batch_size, true)
        rows.append(
            ScaleRow(
                workers=n,
                batch_per_worker=some[0].batch_size / n,
                synthetic=middle,
                real=true,
                synthetic_range=(min(synthetic), max(synthetic)),
                real_range=(min(real), max(real)),
                gap=gap(true, middle),
                speedup_synthetic=up[0],
                speedup_real=up[1],
                efficiency_synthetic=up[0] / n,
                efficiency_real=up[1] / n,
                epoch_seconds=epoch,
                cost_per_epoch_device_seconds=epoch * n,
                cost_per_epoch=epoch * n / 3600 * price if price is not None else None,
            )
        )
    return rows


def _epoch_seconds(samples: int, batch: float, rate: float) -> float:
    """Of whole steps: the last one of an epoch takes as long with fewer samples."""
    return math.ceil(samples / batch - 1e-9) * batch / rate


def _capacities(
    starts: Mapping[int, Sequence[Start]], rows: Sequence[ScaleRow], cores: float, per_node: int
) -> tuple[Capacities, bool]:
    """What the machine's parts can do, from the sizes that fit on it; and whether one worker's
    loaders are slower than the others'.
    """
    fitting = [r for r in rows if r.workers <= per_node] or list(rows[:1])
    runs = []
    for row in fitting:
        some = starts[row.workers]
        step = _median(s.cpu.get("synthetic") for s in some)
        whole = _median(s.cpu.get("real") for s in some)
        takes = max(0.0, whole - step) if whole is not None and step is not None else 0.0
        busy = (
            min(1.0, row.real * whole / cores)
            if whole is not None and math.isfinite(cores)
            else None
        )
        each = next((s.loading_each for s in some if s.loading_each), ())
        runs.append(
            Measured(
                row.workers,
                row.synthetic,
                row.real,
                _median(s.loading for s in some),
                takes,
                step or 0.0,
                busy,
                slowest_loading=min(each, default=None),
                fastest_loading=max(each, default=None),
            )
        )
    first = starts[fitting[0].workers][0]
    overlap = 4.0 if first.loaders else 1.0
    found = from_runs(
        runs,
        stages=(StageCapacity("input", max(runs[-1].cpu_seconds, 0.0)),),
        cores_per_node=cores,
        devices_per_node=per_node,
        like=Capacities(fitting[0].synthetic / fitting[0].workers, buffer_batches=overlap),
    )
    return found, runs[-1].uneven


def slow_worker(some: Sequence[Start]) -> tuple[int, float] | None:
    """The rank that computes slowest and its share of the others' speed, where all wait for it for
    more than noise.

    Example:
        >>> start = Start(3, (30.0,), (30.0,), None, {}, "keep", 8, "replicate", 100, "cpu", 0,
        ...     computing_each=(10.0, 6.0, 11.0))
        >>> slow_worker([start])
        (1, 0.5714285714285714)
    """
    read = [s.computing_each for s in some if len(s.computing_each) > 1]
    if not read:
        return None
    each = [statistics.median(rates) for rates in zip(*read, strict=True)]
    rank = min(range(len(each)), key=each.__getitem__)
    share = each[rank] / statistics.median(rate for k, rate in enumerate(each) if k != rank)
    return (rank, share) if share < _SLOW else None


def _median(values: Any) -> float | None:
    found = [v for v in values if v is not None]
    return statistics.median(found) if found else None


def _chosen(found: Mapping[str, LawFit]) -> LawFit | None:
    """The universal law where its turning down is more than noise, or was seen, else Amdahl's."""
    usl = found.get("usl")
    if usl is not None and (usl.parameter("coherency").low > 0 or usl.peak < usl.points[-1]):
        return usl
    return found.get("amdahl")


def further_sizes(largest: int, to: int) -> list[int]:
    """Sizes to extrapolate to: doubled from the largest that was measured, and the last.

    Example:
        >>> further_sizes(4, 48)
        [8, 16, 32, 48]
    """
    found = []
    n = largest * 2
    while n < to:
        found.append(n)
        n *= 2
    return [*found, to] if to > largest else []


def summarise_scale(
    script: str,
    starts: Mapping[int, Sequence[Start]],
    *,
    to: int,
    cores: float,
    per_node: int,
    threads: int | None = None,
    price: float | None = None,
    threshold: float = _THRESHOLD,
) -> Scaling:
    """The answer, from what was measured.

    Args:
        script: as it is called.
        starts: workers -> starts of the script.
        to: size to extrapolate to.
        cores: of this machine, that may be used.
        per_node: devices of this machine; more workers are supposed to run on more of its like.
        threads: compute threads of each worker, or None.
        price: of one device for an hour, in whatever currency.
        threshold: a further worker pays where it adds at least this share of what the first gives.

    Raises:
        ArgumentError: nothing was measured.
    """
    if not starts:
        raise ArgumentError("nothing was measured.")
    rows = _rows(starts, price)
    largest = rows[-1].workers
    some = starts[rows[0].workers][0]
    found = {
        name: fits({n: [x for s in starts[n] for x in getattr(s, name)] for n in sorted(starts)})
        for name in ("synthetic", "real")
    }
    taken = {name: law for name in found if (law := _chosen(found[name])) is not None}
    crowded = largest > per_node
    capacities, uneven = _capacities(starts, rows, cores, per_node)
    notes = _notes(starts, rows, found, taken, per_node, threads, some, crowded, to)

    def fed(n: int) -> tuple[float, float, float]:
        """What the parts of the machine let through at most, and its interval; without the gap that
        all sizes have.
        """
        where = 1 if crowded else nodes_of(capacities, n)
        p = predict(capacities, n, where)
        if p.limit is None:
            return math.inf, math.inf, math.inf
        return p.rate, p.ceiling * (1 - p.high), p.ceiling * (1 - p.low)

    # What is lost to the input at all sizes alike, and is no more than noise, does not grow with
    # them.
    even = all(r.gap <= _NO_GAP for r in rows)
    share = statistics.median(min(1.0, r.real / r.synthetic) for r in rows)

    def real_band(n: float) -> Band:
        band = taken["synthetic"].band(n)
        if uneven:  # no law of all workers tells what one of them does
            return band
        if not even:
            return taken["real"].band(n)
        return Band(share * band.value, share * band.low, share * band.high)

    def real_at(n: float) -> float:
        law = taken["synthetic"].at(n)
        law = law if uneven else share * law if even else min(law, taken["real"].at(n))
        return min(law, fed(round(n))[0])

    extrapolated = []
    for n in further_sizes(largest, to) if len(taken) == 2 else []:
        synthetic, real = taken["synthetic"].band(n), real_band(n)
        rate, low, high = fed(n)
        value = min(real.value, rate, synthetic.value)
        real = Band(
            value,
            min(value, real.low, low, synthetic.low),
            max(value, min(real.high, high, synthetic.high)),
        )
        batch = some.batch_size if some.batch == "keep" else rows[0].batch_per_worker * n
        epoch = _epoch_seconds(some.epoch_samples, batch, value)
        cost = epoch * n / 3600 * price if price is not None else None
        efficiency = value / n / (rows[0].real / rows[0].workers)
        extrapolated.append(
            Further(n, synthetic, real, gap(value, synthetic.value), efficiency, epoch, cost)
        )
    met = walls(capacities, max(to, largest), 1 if crowded else None)
    if uneven:  # one worker alone has no other to wait for
        met = [w._replace(devices=max(2, w.devices)) for w in met]
    stop = stop_at(real_at, max(to, largest), threshold) if "real" in taken else rows[-1].workers
    step_cpu = _median(s.cpu.get("synthetic") for s in starts[largest])
    full = step_cpu is not None and step_cpu * rows[-1].synthetic > _FULL * cores * (
        1 if crowded else nodes_of(capacities, largest)
    )
    slow = slow_worker(starts[largest])
    if slow is not None:
        notes.append(
            f"worker {slow[0]} of {largest} computes at {slow[1]:.0%} of the others' "
            "speed, and every step waits for it: what is said of more workers "
            "supposes one as slow among them."
        )
    answer = _sentence(
        script,
        rows,
        taken,
        extrapolated,
        met,
        stop,
        max(to, largest),
        threshold,
        some,
        full,
        uneven,
        slow,
    )
    return Scaling(
        script=script,
        rows=rows,
        fits=found,
        laws={name: fit.law for name, fit in taken.items()},
        extrapolated=extrapolated,
        wall=met[0] if met else None,
        stop_at=stop,
        threshold=threshold,
        sentence=answer,
        slow_worker=slow,
        batch=some.batch,
        batch_size=some.batch_size,
        device=some.device,
        threads=threads,
        cost_per_hour=price,
        notes=notes,
    )


def _notes(
    starts: Mapping[int, Sequence[Start]],
    rows: Sequence[ScaleRow],
    found: Mapping[str, Mapping[str, LawFit]],
    taken: Mapping[str, LawFit],
    per_node: int,
    threads: int | None,
    some: Start,
    crowded: bool,
    to: int,
) -> list[str]:
    notes = []
    if some.batch == "keep":
        notes.append(
            f"batch='keep' (strong scaling): every step has {some.batch_size} samples at "
            f"any size, so each of {rows[-1].workers} worker{'s' * (rows[-1].workers > 1)} "
            "has "
            f"{rows[-1].batch_per_worker:g} of them. --batch grow asks what a constant "
            "batch per worker would give."
        )
        if rows[-1].batch_per_worker < 1:
            notes.append(
                f"a batch of {some.batch_size} has fewer samples than there are workers: "
                "some of them only wait."
            )
    else:
        notes.append(
            f"batch='grow' (weak scaling): each worker has {rows[0].batch_per_worker:g} "
            "samples a step at any size; a step of "
            f"{rows[-1].workers} workers has "
            f"{rows[-1].batch_per_worker * rows[-1].workers:g}. That is another training "
            "than on one."
        )
    if threads is not None:
        notes.append(
            f"{threads} compute thread{'s' if threads > 1 else ''} per worker at every "
            "size, so that speed-up is that of workers, not of "
            "threads; ronde run gives a single worker all cores."
        )
    if crowded:
        notes.append(
            f"up to {rows[-1].workers} workers shared {per_node} "
            f"{'core' if some.device == 'cpu' else 'device'}{'s' if per_node > 1 else ''}: "
            "beyond that the figures are of this machine overfilled, not of more machines."
        )
    elif to > per_node and taken:
        notes.append(
            f"beyond {per_node} workers: more machines like this one, as fast a connection "
            "between them; neither was measured."
        )
    if len(rows) == 1:
        notes.append(
            "one size was measured: no law can be fitted and nothing is extrapolated. Give "
            "several, as --workers 1,2,4."
        )
    elif taken and "usl" not in found["real"]:
        notes.append(
            "the universal law needs three sizes; two are measured, and Amdahl's law "
            "through two points is not tested by them."
        )
    spread = (
        max(
            (
                max(r.synthetic_range[1] / r.synthetic_range[0], r.real_range[1] / r.real_range[0])
                for r in rows
            ),
            default=1.0,
        )
        - 1
    )
    if spread > 0.2:
        notes.append(
            f"readings of the same thing differ by up to {spread:.0%}: the machine is "
            "busy, or too short a time was measured."
        )
    for name, fit in taken.items():
        notes += [f"{name}: {text}." for text in fit.notes if "parameters through" not in text]
    batch = (
        some.batch_size
        if some.batch == "keep"
        else rows[0].batch_per_worker * max(to, rows[-1].workers)
    )
    if batch > some.epoch_samples:
        notes.append(
            f"an epoch of {some.epoch_samples} samples does not fill one step of "
            f"{max(to, rows[-1].workers)} workers, which has {batch:g}: part of them only "
            "wait."
        )
    begins = max((s.first_batch_seconds for group in starts.values() for s in group), default=0.0)
    lasts = _epoch_seconds(
        some.epoch_samples, rows[-1].batch_per_worker * rows[-1].workers, rows[-1].real
    )
    if begins > 0.1 * lasts:
        notes.append(
            f"from the loaders' start to their first batch it takes {begins:.1f} s, which "
            "is in none of these figures. ronde run keeps loaders from one "
            f"epoch to the next; where they are started anew, an epoch of {lasts:.1f} s "
            "takes so much longer."
        )
    plans = sorted({s.plan for group in starts.values() for s in group})
    if plans != ["replicate"]:
        notes.append(f"plan: {', '.join(plans)}.")
    if rows[-1].gap > _NO_GAP or to > rows[-1].workers:
        notes.append(
            "a storage that was not met yet is not seen here: ronde doctor asks it for "
            "more than this machine does."
        )
    return notes


def _sentence(
    script: str,
    rows: Sequence[ScaleRow],
    taken: Mapping[str, LawFit],
    extrapolated: Sequence[Further],
    met: Sequence[Wall],
    stop: int,
    upto: int,
    threshold: float,
    some: Start,
    full_cores: bool,
    uneven: bool,
    slow: tuple[int, float] | None,
) -> str:
    """Where to stop, and what to mend to go further."""
    if "real" not in taken:
        row = rows[0]
        return (
            f"{row.workers} worker{'s' if row.workers > 1 else ''}: {row.real:,.0f} samples/s, "
            f"{row.gap:.0%} below the synthetic rate; measure more sizes."
        )
    largest = rows[-1].workers
    sizes = {r.workers for r in rows}
    told = (
        "extrapolated"
        if min(stop + 1, upto) > largest
        else "measured"
        if {stop, min(stop + 1, upto)} <= sizes
        else "interpolated"
    )
    share = "half" if threshold == 0.5 else f"{threshold:.0%}"
    if stop >= upto:
        start = (
            f"All {upto} pay ({told}): each further worker adds at least {share} of what the "
            "first gives"
        )
    else:
        start = (
            f"Stop at {stop} ({told}): worker {stop + 1} adds less than {share} of what the "
            "first gives"
        )
    # What costs most at the size after, or the last one that is known.
    known: list[ScaleRow | Further] = sorted([*rows, *extrapolated], key=lambda r: r.workers)
    last = next((r for r in known if r.workers > stop), known[-1])
    synthetic = last.synthetic.value if isinstance(last.synthetic, Band) else last.synthetic
    ideal = last.workers * rows[0].synthetic / rows[0].workers
    # Shares of what so many workers would do, were nothing lost: they add up.
    lost_scale = max(0.0, 1.0 - synthetic / ideal)
    lost_input = last.gap * min(1.0, synthetic / ideal)
    if last.gap <= _NO_GAP and lost_scale <= 0.05:
        return f"{start}; nothing stands in the way up to there."
    wall = met[0] if met and met[0].devices <= last.workers else None
    if slow is not None:
        scale = (
            f"worker {slow[0]}, which computes at {slow[1]:.0%} of the others' speed, and "
            f"the exchange cost {lost_scale:.0%}",
            f"see to worker {slow[0]}, which all wait for: its device, what else runs "
            "there, what the script does on that rank alone",
        )
    elif full_cores and some.device == "cpu":
        scale = (f"full cores cost {lost_scale:.0%}", "more machines, or a GPU")
    else:
        cure = (
            "a larger batch (or batch='grow'), accumulation"
            if some.batch == "keep"
            else "accumulation"
        )
        what = "the exchange, smaller batches" if some.batch == "keep" else "the exchange"
        scale = (
            f"{what} and waiting for the slowest worker cost {lost_scale:.0%}",
            f"{cure} or a faster connection",
        )
    full = ""
    if wall is not None:
        full = {
            "cores": "the cores are",
            "loaders": "each worker's loaders are",
            "shared": "what all share is",
        }.get(wall.limit, f"{wall.stage} is")
        full = (
            " (one worker's loaders are slower than the others')"
            if uneven
            else f" ({full} full from {wall.devices} on)"
        )
    fed = (
        f"the input costs {lost_input:.0%}{full}",
        f"ronde doctor {script}, which says what of the input it is, and cures it",
    )
    both = sorted(((lost_input, fed), (lost_scale, scale)), reverse=True)
    said = [text for lost, text in both if lost > 0.02] or [both[0][1]]
    why, cures = zip(*said, strict=True)
    answer = f"{start}; at {last.workers}, {' and '.join(why)}. To go further: {'; '.join(cures)}."
    if isinstance(last, Further) and last.real.high > _WIDE * last.real.low:
        answer += (
            f" What was measured does not say it surely: at {last.workers} it may be "
            f"{last.real.low:,.0f} to {last.real.high:,.0f} samples/s. More sizes, or "
            "--rounds, narrow that down."
        )
    return answer


def start_options(rounds: int, seconds: float, batch: str | None, loading: bool) -> str:
    """``RONDE_STUDY_OPTIONS`` of one start."""
    return json.dumps({"rounds": rounds, "seconds": seconds, "batch": batch, "loading": loading})


def measure_sizes(
    sizes: Sequence[int],
    rounds: int,
    start: Callable[[int, bool], Start],
    tell: Callable[[str], None],
) -> dict[int, list[Start]]:
    """Every size in turns, ``rounds`` times.

    Args:
        sizes: numbers of workers.
        rounds: how often each is started; every other round goes through them backwards.
        start: starts the script at a size; the second argument asks for the loaders alone too.
        tell: what is being done.
    """
    found: dict[int, list[Start]] = {n: [] for n in sizes}
    for i in range(rounds):
        for n in sizes if i % 2 == 0 else list(reversed(sizes)):
            tell(f"round {i + 1} of {rounds}: starting {n} worker{'s' if n > 1 else ''}")
            found[n].append(start(n, i == 0))
    return found
