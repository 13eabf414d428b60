"""Summarize the starts of ``ronde scale``: rows, fits, extrapolation, and where to stop.

:mod:`ronde.scale.laws` fits and extrapolates the rates; :mod:`ronde.predict.input_capacity`
predicts where the cores or the loaders limit them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from ronde.predict import Capacities, Measured, StageCapacity, from_runs, gap, nodes_of, walls
from ronde.predict.input_capacity import further_sizes, predict
from ronde.predict.intervals import Band
from ronde.scale.advice import NO_GAP_SHARE, describe_limits, recommend
from ronde.scale.laws import Extrapolation, LawFit, fits, stop_at
from ronde.scale.meter import Start
from ronde.scale.rows import (
    FurtherRow,
    ScaleRow,
    Scaling,
    epoch_seconds,
    measured_rows,
)
from ronde.world import ArgumentError


def _capacities(
    starts: Mapping[int, Sequence[Start]], rows: Sequence[ScaleRow], cores: float, per_node: int
) -> Capacities:
    """Capacities of the machine's parts, from the sizes that fit on it."""
    fitting = [r for r in rows if r.workers <= per_node] or list(rows[:1])
    runs = []
    for row in fitting:
        some = starts[row.workers]
        step, whole = (
            statistics.median(s.cpu[rate] for s in some) for rate in ("synthetic", "real")
        )
        loading = [s.loading for s in some if s.loading is not None]
        runs.append(
            Measured(
                row.workers,
                row.synthetic,
                row.real,
                statistics.median(loading) if loading else None,
                max(0.0, whole - step),
                step,
            )
        )
    return from_runs(
        runs,
        stages=(StageCapacity("input", max(runs[-1].cpu_seconds, 0.0)),),
        cores_per_node=cores,
        devices_per_node=per_node,
        like=Capacities(fitting[0].synthetic / fitting[0].workers),
    )


def _choose_law(by_law: Mapping[str, LawFit]) -> LawFit | None:
    """The universal law if its decline is more than noise, or was measured; else Amdahl's."""
    usl = by_law.get("usl")
    if usl is not None and (usl.parameter("coherency").low > 0 or usl.peak < usl.points[-1]):
        return usl
    return by_law.get("amdahl")


class _Rates:
    """Rates at any size: the fitted laws, limited by the machine's parts."""

    def __init__(
        self,
        rows: Sequence[ScaleRow],
        laws: Mapping[str, LawFit],
        further: Mapping[str, Extrapolation],
        capacities: Capacities,
        crowded: bool,
    ) -> None:
        self.laws, self.further, self.capacities = laws, further, capacities
        self.crowded = crowded
        # A loss that is the same at all sizes, and within noise, does not grow.
        self.even = all(r.gap <= NO_GAP_SHARE for r in rows)
        self.share = statistics.median(min(1.0, r.real / r.synthetic) for r in rows)

    def limit(self, n: int) -> Band:
        """Rate that the parts of the machine let through."""
        p = predict(self.capacities, n, 1 if self.crowded else nodes_of(self.capacities, n))
        if p.limit is None:
            return Band(math.inf, math.inf, math.inf)
        return Band(p.rate, p.ceiling * (1 - p.high), p.ceiling * (1 - p.low))

    def real_at(self, n: float) -> float:
        law = self.laws["synthetic"].at(n)
        law = self.share * law if self.even else min(law, self.laws["real"].at(n))
        return min(law, self.limit(round(n)).value)

    def real_band(self, n: int) -> Band:
        """The real rate, with its interval."""
        synthetic = self.further["synthetic"].band(n)
        real, limit = self.further["real"].band(n), self.limit(n)
        if self.even:
            s = self.share
            real = Band(s * synthetic.value, s * synthetic.low, s * synthetic.high)
        value = min(real.value, limit.value, synthetic.value)
        low = min(value, real.low, limit.low, synthetic.low)
        return Band(value, low, max(value, min(real.high, limit.high, synthetic.high)))


def summarize_scale(
    script: str,
    starts: Mapping[int, Sequence[Start]],
    *,
    to: int,
    cores: float,
    per_node: int,
    threads: int | None = None,
    price: float | None = None,
    threshold: float = 0.5,
) -> Scaling:
    """Derive the answer from the measurements.

    Args:
        script: its name.
        starts: workers -> starts of the script.
        to: size to extrapolate to.
        cores: usable cores of this machine.
        per_node: devices of this machine; more workers are assumed to run on more such machines.
        threads: compute threads of each worker, or None.
        price: of one device for an hour, in any currency.
        threshold: a further worker pays if it adds at least this share of what the first gives.

    Raises:
        ArgumentError: nothing was measured.
    """
    if not starts:
        raise ArgumentError("nothing was measured.")
    rows = measured_rows(starts, price)
    largest = rows[-1].workers
    upto = max(to, largest)
    first = starts[rows[0].workers][0]
    points = {
        name: {n: [x for s in starts[n] for x in getattr(s, name)] for n in sorted(starts)}
        for name in ("synthetic", "real")
    }
    by_rate = {name: fits(each) for name, each in points.items()}
    laws = {name: law for name in by_rate if (law := _choose_law(by_rate[name])) is not None}
    further = {name: Extrapolation(points[name], law) for name, law in laws.items()}
    crowded = largest > per_node
    capacities = _capacities(starts, rows, cores, per_node)
    rates = _Rates(rows, laws, further, capacities, crowded)
    extrapolated = []
    for n in further_sizes(largest, to) if len(laws) == 2 else []:
        synthetic, real = further["synthetic"].band(n), rates.real_band(n)
        batch = first.batch_size if first.batch == "keep" else rows[0].batch_per_worker * n
        epoch = epoch_seconds(first.epoch_samples, batch, real.value)
        cost = epoch * n / 3600 * price if price is not None else None
        efficiency = real.value / n / (rows[0].real / rows[0].workers)
        loss = gap(real.value, synthetic.value)
        extrapolated.append(FurtherRow(n, synthetic, real, loss, efficiency, epoch, cost))
    limits = walls(capacities, upto, 1 if crowded else None)
    wall = limits[0] if limits else None
    nodes = 1 if crowded else nodes_of(capacities, largest)
    step_cpu = statistics.median(s.cpu["synthetic"] for s in starts[largest])
    answer = Scaling(
        script=script,
        starts=starts,
        rows=rows,
        extrapolated=extrapolated,
        fits=by_rate,
        laws=laws,
        wall=wall,
        stop_at=stop_at(rates.real_at, upto, threshold) if "real" in laws else largest,
        upto=upto,
        threshold=threshold,
        per_node=per_node,
        threads=threads,
        cost_per_hour=price,
        crowded=crowded,
        # with so many of the cores at work, no more are to be had
        full_cores=step_cpu * rows[-1].synthetic > 0.8 * cores * nodes,
    )
    answer.sentence, answer.notes = recommend(answer), describe_limits(answer)
    return answer
