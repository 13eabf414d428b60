"""The answer of ``ronde scale`` and the rows of its table: sizes that were measured, and sizes
that were extrapolated.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ronde.predict import Wall, gap
from ronde.predict.intervals import Band
from ronde.scale.laws import LawFit
from ronde.scale.meter import Start


@dataclass(frozen=True)
class ScaleRow:
    """A size that was measured. Rates are samples per second of all workers."""

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

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        values = dataclasses.asdict(self)
        for name in ("synthetic", "real"):
            values[f"{name}_low"], values[f"{name}_high"] = values.pop(f"{name}_range")
        return values


@dataclass(frozen=True)
class FurtherRow:
    """A size that was extrapolated."""

    workers: int
    synthetic: Band
    real: Band
    gap: float
    efficiency_real: float
    epoch_seconds: float
    cost_per_epoch: float | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "workers": self.workers,
            "synthetic": self.synthetic.value,
            "synthetic_low": self.synthetic.low,
            "synthetic_high": self.synthetic.high,
            "real": self.real.value,
            "low": self.real.low,
            "high": self.real.high,
            "gap": self.gap,
            "efficiency_real": self.efficiency_real,
            "epoch_seconds": self.epoch_seconds,
            "cost_per_epoch": self.cost_per_epoch,
        }


@dataclass
class Scaling:
    """The answer of ``ronde scale``.

    Attributes:
        starts: workers -> starts of the script.
        rows: the sizes that were measured.
        extrapolated: sizes that were not.
        fits: ``synthetic`` and ``real`` -> law -> its fit.
        laws: the law used for each rate.
        wall: the first limit reached up to the last size, or None.
        stop_at: the size beyond which a further worker adds less than ``threshold`` of what the
            first gives.
        upto: the largest size asked about.
        per_node: devices of this machine.
        crowded: more workers than devices.
        full_cores: the training itself fills the cores.
        sentence: the answer in words.
    """

    script: str
    starts: Mapping[int, Sequence[Start]]
    rows: list[ScaleRow]
    extrapolated: list[FurtherRow]
    fits: dict[str, dict[str, LawFit]]
    laws: dict[str, LawFit]
    wall: Wall | None
    stop_at: int
    upto: int
    threshold: float
    per_node: int
    threads: int | None
    cost_per_hour: float | None
    crowded: bool
    full_cores: bool
    sentence: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def first(self) -> Start:
        """A start of the smallest size."""
        return self.starts[self.rows[0].workers][0]

    @property
    def largest(self) -> int:
        """The largest size that was measured."""
        return self.rows[-1].workers

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as they are written as JSON."""
        wall = self.wall
        return {
            "version": 1,
            "script": self.script,
            "device": self.first.device,
            "batch": self.first.batch,
            "batch_size": self.first.batch_size,
            "threads_per_worker": self.threads,
            "cost_per_device_hour": self.cost_per_hour,
            "rows": [row.to_dict() for row in self.rows],
            "fits": {
                name: {law: fit.to_dict() for law, fit in by_law.items()}
                for name, by_law in self.fits.items()
            },
            "laws": {name: fit.law for name, fit in self.laws.items()},
            "extrapolated": [row.to_dict() for row in self.extrapolated],
            "wall": wall._asdict() if wall else None,
            "stop_at": self.stop_at,
            "threshold": self.threshold,
            "sentence": self.sentence,
            "notes": self.notes,
        }


def epoch_seconds(samples: int, batch: float, rate: float) -> float:
    """Time of whole steps: the last step of an epoch takes as long with fewer samples."""
    return math.ceil(samples / batch - 1e-9) * batch / rate


def measured_rows(starts: Mapping[int, Sequence[Start]], price: float | None) -> list[ScaleRow]:
    """A row for each size; ``price`` is per device-hour."""
    rows: list[ScaleRow] = []
    for n in sorted(starts):
        some = starts[n]
        synthetics = [x for s in some for x in s.synthetic]
        reals = [x for s in some for x in s.real]
        synthetic, real = statistics.median(synthetics), statistics.median(reals)
        # Speed-up is relative to a worker of the smallest size.
        base = rows[0] if rows else None
        base_synthetic = base.synthetic / base.workers if base else synthetic / n
        base_real = base.real / base.workers if base else real / n
        epoch = epoch_seconds(some[0].epoch_samples, some[0].batch_size, real)
        rows.append(
            ScaleRow(
                workers=n,
                batch_per_worker=some[0].batch_size / n,
                synthetic=synthetic,
                real=real,
                synthetic_range=(min(synthetics), max(synthetics)),
                real_range=(min(reals), max(reals)),
                gap=gap(real, synthetic),
                speedup_synthetic=synthetic / base_synthetic,
                speedup_real=real / base_real,
                efficiency_synthetic=synthetic / base_synthetic / n,
                efficiency_real=real / base_real / n,
                epoch_seconds=epoch,
                cost_per_epoch_device_seconds=epoch * n,
                cost_per_epoch=epoch * n / 3600 * price if price is not None else None,
            )
        )
    return rows
