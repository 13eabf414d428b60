"""Turn the doctor's measurements into a verdict: pure arithmetic over rates.

A stage costs what removing it gains, in points: hundredths of the synthetic rate. If stages
overlap, single gains need not add up to the gap: the largest keeps its own, and the others share
the rest of the gap by their gains; a stage's own gain is shown if the two differ. If stages follow
each other, each alone gains little but all together a lot: then the rest is shared by the stages'
times.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ronde.predict.intervals import Band, student_t95

HEALTHY_POINTS = 7.0
"""A gap up to this is called healthy, in points."""

_EXCHANGE_POINTS = 15.0  # points that the exchange must cost to be called the cause
_STRAGGLER_POINTS = 5.0
# halves of one arm that differ by more say nothing; nor does a wider interval
_UNCLEAR_SHARE = 0.10


@dataclass(frozen=True)
class TimedStage:
    """One timed stage.

    Attributes:
        name: of the stage.
        where: ``loading``, or ``step`` if the training process runs it between two batches.
        cpu_seconds, wall_seconds: per sample, in the thread that ran it.
        wall_by_rank: wall seconds per sample on each rank; 0 if a rank had none.
        bytes: read per sample.
    """

    name: str
    where: str = "loading"
    cpu_seconds: float = 0.0
    wall_seconds: float = 0.0
    wall_by_rank: tuple[float, ...] = ()
    bytes: float = 0.0


@dataclass(frozen=True)
class Measurements:
    """All measurements.

    Attributes:
        workers, loaders: training processes, and loaders per process (0: the training process
            reads its samples).
        executor: ``none``, ``threads``, or ``processes``.
        cores: usable cores of this node.
        rounds: one dictionary per round, arm -> samples per second of all ranks. Arms:
            ``synthetic``, ``real``, ``beside``, ``limited``, and ``replayed``.
        alone: per round, samples per second of each rank by itself; empty if not measured.
        waits: per real round, seconds per step that each rank waits for its batch.
        arm_waits: arm -> the longest usual wait of a rank, in the round with the shortest.
        step_seconds, real_step_seconds: of a synthetic step, and of a real one without its wait.
        stages: with their times.
        collate_seconds: CPU time per sample in the training process, to tell collation from
            transfer; None if not measured.
        loading: samples per second of all loaders without training; None if not measured.
        startup_seconds: to the first batch.
        block_seconds: per step, by ``with stage(…)`` block in the training process; blocks cannot
            be removed.
        order: ``seconds`` to draw an epoch's order, and their ``share`` of it; None if small.
        queued: seconds that loaders waited for a core, per second on one.
    """

    workers: int
    loaders: int
    executor: str
    cores: int
    batch: int
    rounds: tuple[Mapping[str, float], ...]
    stages: tuple[TimedStage, ...] = ()
    alone: tuple[tuple[float, ...], ...] = ()
    waits: tuple[tuple[float, ...], ...] = ()
    arm_waits: Mapping[str, float] = field(default_factory=dict)
    step_seconds: float = 0.0
    real_step_seconds: float | None = None
    collate_seconds: float | None = None
    loading: float | None = None
    startup_seconds: float = 0.0
    block_seconds: Mapping[str, float] = field(default_factory=dict)
    order: Mapping[str, Any] | None = None
    queued: float = 0.0


def _column(seen: Measurements, arm: str) -> list[float]:
    return [r[arm] for r in seen.rounds if arm in r]


def _noise(seen: Measurements, ceiling: float) -> tuple[float, int]:
    """Relative standard deviation of a window over all arms, and its degrees of freedom.

    Arms are compared within a round, so a slow round is not noise. Rates are modeled as arm ×
    round; the residuals count (least squares of logarithms).
    """
    arms = sorted({a for r in seen.rounds for a in r})
    rounds = enumerate(seen.rounds)
    cells = [(arms.index(a), k, v) for k, r in rounds for a, v in r.items() if v > 0]
    columns = np.zeros((len(cells), len(arms) + len(seen.rounds)))
    for row, (arm, k, _) in enumerate(cells):
        columns[row, arm] = columns[row, len(arms) + k] = 1.0
    logs = np.log([v for _, _, v in cells])
    solution, _, rank, _ = np.linalg.lstsq(columns, logs, rcond=None)
    freedom = len(cells) - int(rank)
    if freedom < 1:
        return 0.05, 1
    rates = np.exp([solution[arm] + solution[len(arms) :].mean() for arm, _, _ in cells]) / ceiling
    residuals = (logs - columns @ solution) * rates
    return math.sqrt(float((residuals**2).sum()) / freedom), freedom


def ceiling_shares(seen: Measurements, arm: str) -> list[float]:
    """An arm's rate over the same round's ceiling, per round."""
    return [r[arm] / r["synthetic"] for r in seen.rounds if arm in r and r.get("synthetic")]


def _middle(seen: Measurements, arm: str) -> float | None:
    values = _column(seen, arm)
    return statistics.median(values) if values else None


def _same_arm(seen: Measurements, arm: str) -> float:
    """How much an arm differs from itself: odd against even rounds."""
    values = _column(seen, arm)
    if len(values) < 2:
        return 0.0
    # as the gap is: of five or more, one may be far off
    one, other = (statistics.median(values[::2]), statistics.median(values[1::2]))
    return abs(one - other) / max(one, other)


class _Judge:
    def __init__(self, seen: Measurements) -> None:
        self.seen = seen
        synthetic, real = _middle(seen, "synthetic"), _middle(seen, "real")
        assert synthetic is not None and real is not None
        # What the training process does within a step under a stage's name is input too, and blocks
        # cannot be taken out of the ceiling.
        blocked = sum(seen.block_seconds.values())
        self.factor = 1.0
        if blocked:
            step = seen.batch / synthetic
            self.factor = step / max(step - blocked, 0.05 * step)
        self.ceiling = synthetic * self.factor
        self.real = real
        self.noise, self.freedom = _noise(seen, self.ceiling)
        paired = [
            1.0 - r["real"] / (r["synthetic"] * self.factor)
            for r in seen.rounds
            if "real" in r and "synthetic" in r
        ]
        self.gap = statistics.median(paired) if paired else 1.0 - real / self.ceiling
        # Loaders that nobody waits for can gain nothing but what they disturb.
        waits = [max(r) for r in seen.waits]
        waited = statistics.median(waits) if waits else 0.0
        step = seen.batch / real
        self.unwaited = seen.batch / max(step - waited, 0.01 * step)
        self.half = self._half(paired)
        self.shown = self.ceiling * (1.0 - max(0.0, self.gap))  # the real rate of the report

    def _half(self, differences: Sequence[float]) -> float:
        """Half of the 95 % interval of the mean difference within rounds.

        Few rounds estimate their own spread poorly, and arms differ in noise: both sources count.
        """
        n = len(differences)
        # degrees of freedom of the noise of all arms, beside that of the two compared
        prior = min(self.freedom, 2)
        own = statistics.variance(differences) * (n - 1) if n > 1 else 0.0
        freedom = prior + max(0, n - 1)
        return student_t95(freedom) * math.sqrt(
            (prior * 2 * self.noise**2 + own) / freedom / max(1, n)
        )

    def lift(self, arm: str) -> Band | None:
        """Points gained by an arm over the real one in the same rounds."""
        rounds = [r for r in self.seen.rounds if arm in r and "real" in r]
        gains = [(r[arm] - r["real"]) / self.ceiling for r in rounds]
        if not gains:
            return None
        value = statistics.median(gains)
        without, real = ceiling_shares(self.seen, arm), ceiling_shares(self.seen, "real")
        if without and len(real) >= 3:  # one that is far off does not decide
            # The real rate was measured in more rounds than the arm: with all of them, one that is
            # far off counts less.
            value = (statistics.median(without) - statistics.median(real)) / self.factor
        half = self._half(gains)
        return Band(100 * value, 100 * (value - half), 100 * (value + half))

    # -- the input ---------------------------------------------------------------------

    def modelled(self, stage: TimedStage) -> float:
        """Points a stage would gain, from its share of sample time, if it was not removed."""
        seen = self.seen
        if stage.wall_seconds <= 0:
            return 0.0
        if stage.where == "step" or seen.loaders == 0:
            per_sample = 1.0 / self.real
            shorter = per_sample - stage.wall_seconds / seen.workers
            rate = min(1.0 / shorter if shorter > 0 else self.ceiling, self.ceiling)
        else:
            # A loader has so long for a sample; what of it no stage accounts for stays.
            each = seen.workers * seen.loaders / self.real
            left = max(each - stage.wall_seconds, 0.02 * each)
            rate = min(self.real * each / left, self.unwaited, self.ceiling)
        return max(0.0, 100 * (rate - self.real) / self.ceiling)

    def stages(self) -> list[dict[str, Any]]:
        """One row per stage, with its own gain."""
        seen = self.seen
        rows = []
        gap = 100 * max(0.0, self.gap)
        spread = 100 * self.noise
        for stage in seen.stages:
            value = self.modelled(stage)
            if stage.name == "python":
                value = self._python(stage, value)
            half = spread + 0.3 * value
            in_loaders = stage.where == "loading" and seen.loaders
            each = seen.workers * (seen.loaders if in_loaders else 1)
            alone = min(value, gap)
            row = _row(stage.name, alone, max(min(value - half, gap), 0.0), min(value + half, gap))
            if stage.wall_seconds > 0:
                # Timing costs something too: a stage lets through what was measured with it.
                row["capacity_samples_per_second"] = max(each / stage.wall_seconds, self.shown)
                worked = stage.cpu_seconds * (1.0 + seen.queued)
                row["waits"] = max(0.0, 1.0 - worked / stage.wall_seconds)
            row["cpu_ms_per_sample"] = 1e3 * stage.cpu_seconds
            row["wall_ms_per_sample"] = 1e3 * stage.wall_seconds
            row["bytes_per_sample"] = stage.bytes
            row["where"] = stage.where
            # waits of less than 0.3 ms are not worth a word
            if alone >= 1 and row["waits"] > 0.5 and stage.wall_seconds > 0.0003:
                _add_note(row, f"waits {100 * row['waits']:.0f} % of its time")
            rows.append(row)
        return rows

    def _python(self, stage: TimedStage, by_time: float) -> float:
        """Sample making itself cannot be removed: it gets what other stages do not explain."""
        whole = self.lift("replayed")
        if whole is None:
            return by_time
        others = ("collate", "transport")
        loading = [s for s in self.seen.stages if s.where == "loading" and s.name not in others]
        total = sum(s.wall_seconds for s in loading)
        share = stage.wall_seconds / total if total else 0.0
        return max(0.0, whole.value) if share > 0.8 else min(by_time, max(0.0, whole.value))

    def transport(self, rows: list[dict[str, Any]]) -> None:
        """Loss while samples are only replayed through the real loaders: transfer and collation."""
        seen = self.seen
        if seen.executor != "processes":
            return
        wait = seen.arm_waits.get("replayed")
        if wait is None or _middle(seen, "replayed") is None:
            return
        step = seen.batch / self.ceiling
        points = min(100 * wait / (step + wait), 100 * max(0.0, self.gap))
        collate = next((r for r in rows if r["name"] == "collate"), None)
        if collate is not None:
            # Collation in a loading process also copies into shared memory: that part is transfer.
            in_loader, taken = collate["cpu_ms_per_sample"], collate["alone_points"]
            copying = 0.0
            if seen.collate_seconds is not None and in_loader > 0.3 * collate["wall_ms_per_sample"]:
                copying = max(0.0, 1.0 - 1e3 * seen.collate_seconds / in_loader)
            if copying > 0.3:
                points += taken * copying
                collate["alone_points"] = collate["lost_points"] = taken * (1.0 - copying)
            else:
                points = max(0.0, points - taken)  # it was still collated there
        points = min(points, 100 * max(0.0, self.gap))
        half = 100 * self.noise
        rows.append(_row("transport", points, max(0.0, points - half), points + half))

    def neighbour(self) -> dict[str, Any] | None:
        """Slowdown of the step itself while loaders run."""
        seen = self.seen
        beside, synthetic = _middle(seen, "beside"), _middle(seen, "synthetic")
        if beside is None or synthetic is None:
            return None
        # What the step loses to the loaders in the real training too; the rest it spends waiting.
        step = seen.batch / self.real
        slower = seen.batch / beside - seen.batch / synthetic
        if seen.workers == 1 and seen.real_step_seconds is not None and seen.step_seconds:
            slower = min(slower, seen.real_step_seconds - seen.step_seconds)
        rate = min(seen.batch / max(step - max(slower, 0.0), 0.01 * step), self.ceiling)
        if seen.loading is not None:  # the loaders would feed a faster step no faster than this
            rate = min(rate, max(self.real, seen.loading))
        points = max(0.0, 100 * (rate - self.real) / self.ceiling)
        return {"slowdown": synthetic / beside, "points": points, "cause": ""}

    # -- the workers -------------------------------------------------------------------

    def workers(self) -> tuple[float, float | None, dict[str, Any] | None]:
        """Points lost to the exchange, the ideal rate, and a rank with slower steps."""
        seen = self.seen
        if seen.workers == 1 or not seen.alone:
            return 0.0, None, None
        each = [statistics.median(r[k] for r in seen.alone) for k in range(seen.workers)]
        usual = statistics.median_high(each)  # of two, the faster: the other may be the straggler
        ideal = usual * seen.workers
        slowest = min(each)
        # In time: the usual step, the step of the slowest rank, and the step of all together.
        usual_step, slowest_step = seen.workers / ideal, 1.0 / slowest
        together = seen.workers / self.ceiling
        exchange_step = max(0.0, together - slowest_step)
        slower = usual / slowest
        lost = 100 * (1.0 - (usual_step + exchange_step) / max(together, slowest_step))
        # a straggler is slower than steps vary by chance
        if slower < 1.08 or lost < max(_STRAGGLER_POINTS, 200 * self.noise):
            # Ranks that differ by chance: what is lost between them is lost to keeping step.
            mean_step = 1.0 / statistics.fmean(each)
            return max(0.0, 100 * (1.0 - mean_step / together)), ideal, None
        exchange = 100 * exchange_step / (usual_step + exchange_step)
        straggler = {"rank": each.index(slowest), "slower": slower, "points": lost, "stage": "step"}
        return exchange, ideal, straggler

    def slow_loader(self) -> dict[str, Any] | None:
        """A rank with slower samples, which all ranks wait for."""
        seen = self.seen
        if seen.workers == 1:
            return None
        stages = [
            s for s in seen.stages if s.where == "loading" and len(s.wall_by_rank) == seen.workers
        ]
        walls = np.array([[s.wall_by_rank[k] for s in stages] for k in range(seen.workers)])
        if walls.size == 0:
            return None
        totals = walls.sum(axis=1)
        usual = statistics.median_low(totals.tolist())
        worst = int(totals.argmax())
        if usual <= 0 or totals[worst] < 1.3 * usual:
            return None
        step = seen.batch / self.real
        excess_seconds = (totals[worst] - usual) * seen.batch / seen.workers / max(1, seen.loaders)
        if excess_seconds < 0.05 * step:
            return None
        if seen.waits:
            waits = [statistics.median(r[k] for r in seen.waits) for k in range(seen.workers)]
            if waits[worst] < max(waits) or waits[worst] < 0.3 * self.gap * step:
                return None  # the others wait for something else
        # If it were as fast as the others: each rank feeds itself, and the slowest decides.
        if seen.loaders:
            better = min(self.ceiling, seen.workers * seen.loaders / usual)
        else:
            better = 1.0 / (1.0 / self.real - (totals[worst] - usual) / seen.workers)
        gained = min(100 * self.gap, 100 * (better - self.real) / self.ceiling)
        if gained < max(_STRAGGLER_POINTS, 0.5 * 100 * self.gap):
            return None
        excess = walls[worst] - np.median(np.delete(walls, worst, axis=0), axis=0)
        return {
            "rank": worst,
            "slower": float(totals[worst] / usual),
            "points": gained,
            "stage": stages[int(excess.argmax())].name,
        }


def _row(name: str, points: float, low: float, high: float, note: str = "") -> dict[str, Any]:
    """A stage's row, with no times yet."""
    return {
        "name": name,
        "capacity_samples_per_second": None,
        "cpu_ms_per_sample": None,
        "wall_ms_per_sample": None,
        "bytes_per_sample": 0.0,
        "where": "loading",
        "alone_points": points,
        "lost_points": points,
        "low": low,
        "high": high,
        "note": note,
        "waits": 0.0,
    }


def _add_note(row: dict[str, Any], note: str) -> None:
    row["note"] = f"{row['note']}; {note}" if row["note"] else note


def _settle_overlaps(rows: list[dict[str, Any]], gap: float) -> None:
    """Settle overlapping gains: the largest keeps its own, the others share the rest of the gap."""
    ordered = sorted(rows, key=lambda r: -r["alone_points"])
    if not ordered:
        return
    left = gap - ordered[0]["alone_points"]
    others = sum(r["alone_points"] for r in ordered[1:])
    for row in ordered[1:]:
        if others > left:
            row["lost_points"] = max(0.0, row["alone_points"] * max(0.0, left) / others)
        if row["alone_points"] - row["lost_points"] > 3:
            _add_note(row, f"{row['alone_points']:.0f} if it alone were free")
            row["high"] = max(row["high"], row["alone_points"])
        row["low"] = min(row["low"], row["lost_points"])


def _share_rest(
    rows: list[dict[str, Any]], seen: Measurements, j: _Judge, cause: dict[str, Any] | None
) -> None:
    """Share the rest of the gap among sequential stages, if their times account for it."""
    timed = [r for r in rows if r["where"] == "loading" and r["wall_ms_per_sample"]]
    left = 100 * j.gap - sum(r["lost_points"] for r in rows)
    if cause is None or left < max(10.0, 25 * j.gap):
        return
    if cause["stage"] not in {r["name"] for r in timed}:
        return
    total = sum(r["wall_ms_per_sample"] for r in timed) / 1e3
    per_sample = seen.loaders / j.real if seen.loaders else 1 / j.real - 1 / j.ceiling
    available = seen.workers * per_sample
    # stage times that explain less of the lost time do not divide it
    if total < 0.7 * available:
        return
    for row in timed:
        alone = row["alone_points"]
        row["lost_points"] += left * row["wall_ms_per_sample"] / 1e3 / total
        row["high"] = max(row["high"], row["lost_points"])
        if row["lost_points"] - alone > 3:
            row["note"] = f"{alone:.0f} if it alone were free"
    first = max(timed, key=lambda r: r["lost_points"])
    cause.update(stage=first["name"], points=first["lost_points"])


def _hand_over(rows: list[dict[str, Any]], points: float) -> None:
    """Do not count points twice that another cause accounts for."""
    for row in sorted(rows, key=lambda r: -r["lost_points"]):
        taken = min(points, row["lost_points"])
        row["lost_points"] -= taken
        row["low"] = min(row["low"], row["lost_points"])
        points -= taken
        if points <= 0:
            return


def judge(seen: Measurements) -> dict[str, Any]:
    """Judge the measurements.

    Args:
        seen: at least two rounds with ``synthetic`` and ``real``.

    Returns:
        dict: the JSON of ``ronde doctor``, without scale, walls and prescriptions.

    Example:
        >>> rounds = tuple({"synthetic": 1000.0 + i, "real": 600.0 - i} for i in range(4))
        >>> stages = (TimedStage("decode", wall_seconds=0.003), TimedStage("read",
        ...     wall_seconds=0.0001))
        >>> answer = judge(Measurements(1, 2, "processes", 2, 16, rounds, stages))
        >>> answer["healthy"], answer["cause"]["stage"], round(answer["gap"], 2)
        (False, 'decode', 0.4)
    """
    j = _Judge(seen)
    gap = max(0.0, j.gap)
    exchange, ideal, straggler = j.workers()
    rows = j.stages()
    j.transport(rows)
    for name, seconds in seen.block_seconds.items():
        for row in rows:
            if row["name"] == name:
                row["alone_points"] = row["lost_points"] = max(
                    row["alone_points"], min(100 * gap, 100 * seconds * j.real / seen.batch)
                )
    _settle_overlaps(rows, 100 * gap)
    neighbour = j.neighbour()
    limited = j.lift("limited")
    slow_loader = j.slow_loader() if straggler is None else None

    healthy_input = 100 * gap <= HEALTHY_POINTS
    cause: dict[str, Any] | None = None
    if not healthy_input:
        cause = _cause(seen, j, rows, neighbour, limited, slow_loader)
    if slow_loader is not None and cause is not None and cause["stage"] == "straggler":
        straggler = slow_loader
    if cause is not None and cause["stage"] != "straggler":
        _share_rest(rows, seen, j, cause)
    cause = _exchange_or_straggler(cause, gap, exchange, straggler)
    cause = _unexplained_if_small(cause, rows, 100 * gap, neighbour)
    claimed = max(gap if not healthy_input else 0.0, (cause["points"] / 100 if cause else 0.0))
    refused = _refused(seen, j, claimed) or _undecided(j, gap, healthy_input)
    cause = _with_whole(_sampler_if_larger(seen, cause), gap)
    healthy = healthy_input and cause is None and refused is None
    rows.sort(key=lambda r: _ORDER.index(r["name"]) if r["name"] in _ORDER else 2.5)
    # The gap is the median over rounds, each with both rates. The real rate follows from it: on a
    # noisy machine the median of the real rates would not agree with it.
    rates = {"synthetic": j.ceiling, "real": j.ceiling * (1.0 - gap), "alone": ideal}
    return {
        "workers": seen.workers,
        "loaders": seen.loaders,
        "executor": seen.executor,
        "cores": seen.cores,
        "batch": seen.batch,
        "samples_per_second": rates,
        "gap": gap,
        "gap_low": max(0.0, j.gap - j.half),
        "gap_high": max(gap, min(1.0, j.gap + j.half)),
        "rounds": len(_column(seen, "real")),
        "noise": j.noise,
        "healthy": healthy,
        "refused": refused,
        "cause": None if refused else cause,
        "stages": rows,
        "exchange_points": exchange,
        "straggler": straggler,
        "neighbour": neighbour,
        "startup_seconds": seen.startup_seconds,
        "order": dict(seen.order) if seen.order else None,
        "notes": [],
    }


# fmt: off
_ORDER = [
    "read", "decode", "augment", "python", "collate", "transport", "copy", "finish",
    "oversubscription",
]
# fmt: on


def _exchange_or_straggler(
    cause: dict[str, Any] | None, gap: float, exchange: float, straggler: dict[str, Any] | None
) -> dict[str, Any] | None:
    """The cause, unless the exchange or a straggler costs more.

    They cost a share of the steps. A training that waits for its input loses that much less.
    """
    late = straggler["points"] if straggler else 0.0
    points = max(exchange if exchange >= _EXCHANGE_POINTS else 0.0, late)
    if cause is not None and cause["stage"] == "straggler":
        return cause
    if cause is not None and cause["points"] >= points * (1.0 - gap):
        return cause
    if straggler is not None and late >= exchange:
        return {"stage": "straggler", "points": late, "rank": straggler["rank"]}
    if exchange >= _EXCHANGE_POINTS:
        return {"stage": "exchange", "points": exchange}
    return cause


def _with_whole(cause: dict[str, Any] | None, gap: float) -> dict[str, Any] | None:
    """The cause with what its points are a part of: ``gap`` (never more than it), ``epoch``, or the
    ``ideal`` rate of workers that need not wait for each other.
    """
    if cause is None:
        return None
    if cause["stage"] == "sampler":
        return {**cause, "of": "epoch"}
    if is_between_workers(cause):
        return {**cause, "of": "ideal"}
    return {**cause, "points": min(cause["points"], 100 * gap), "of": "gap"}


def is_between_workers(cause: Mapping[str, Any] | None) -> bool:
    """Whether the loss is in the steps, between workers, so that no input cures it."""
    return (
        cause is not None
        and cause["stage"] in ("exchange", "straggler")
        and cause.get("within") in (None, "step")
    )


def _sampler_if_larger(seen: Measurements, cause: dict[str, Any] | None) -> dict[str, Any] | None:
    """The cause, unless drawing the order takes more of an epoch. No window has that."""
    points = 100 * seen.order["share"] if seen.order else 0.0
    if points <= HEALTHY_POINTS or (cause is not None and cause["points"] >= points):
        return cause
    return {"stage": "sampler", "points": points}


def _unexplained_if_small(
    cause: dict[str, Any] | None,
    rows: list[dict[str, Any]],
    gap: float,
    neighbour: dict[str, Any] | None,
) -> dict[str, Any] | None:
    """The cause, unless it is only the largest of many small ones."""
    if cause is None or cause["stage"] not in {r["name"] for r in rows}:
        return cause
    shared = neighbour["points"] if neighbour is not None else 0.0
    left = gap - sum(r["lost_points"] for r in rows) - shared
    # a stage with so small a share is not the cause while most is unexplained
    if cause["points"] < 0.2 * gap and left > 0.5 * gap:
        return {"stage": "unexplained", "points": left}
    return cause


def _cause(
    seen: Measurements,
    j: _Judge,
    rows: list[dict[str, Any]],
    neighbour: dict[str, Any] | None,
    limited: Band | None,
    slow_loader: dict[str, Any] | None,
) -> dict[str, Any]:
    """The gap's main cause; its points are removed from other rows that show them."""
    gap = 100 * j.gap
    top = max(rows, key=lambda r: r["lost_points"], default=None)
    best = top["lost_points"] if top is not None else 0.0
    # slower steps beyond what the loaders' compute threads cost: they burn something else
    slows = neighbour["points"] if neighbour is not None else 0.0
    least = max(HEALTHY_POINTS, 0.5 * max(best, gap / 2, slows))
    if limited is not None and limited.value >= least and _is_surely_faster(seen, limited):
        points = min(gap, limited.value)
        note = "compute threads of the loaders"
        if top is not None and best > 0:
            note += f", in {top['name']}"
        _hand_over(rows, points)
        if neighbour is not None:
            _leave_to(neighbour, gap - points)
            neighbour["cause"] = "threads of the loaders"
        low, high = max(0.0, limited.low), min(gap, limited.high)
        rows.append(_row("oversubscription", points, low, high, note))
        within = top["name"] if top is not None else None
        return {"stage": "oversubscription", "points": points, "within": within}
    if slow_loader is not None:
        _hand_over(rows, slow_loader["points"])
        if neighbour is not None:
            _leave_to(neighbour, gap - slow_loader["points"])
        return {
            "stage": "straggler",
            "points": slow_loader["points"],
            "rank": slow_loader["rank"],
            "within": slow_loader["stage"],
        }
    if (
        neighbour is not None
        and seen.executor == "processes"
        and neighbour["points"] >= max(HEALTHY_POINTS / 2, 0.5 * gap)
    ):
        mainly = top is not None and best >= 0.5 * neighbour["points"]
        within = {"within": top["name"]} if top is not None and mainly else {}
        _hand_over(rows, neighbour["points"])
        neighbour["cause"] = _busiest(seen)
        return {"stage": "neighbour", "points": neighbour["points"], **within}
    if neighbour is not None:
        # The stage that is the cause also makes the step slower: it is counted there.
        _leave_to(neighbour, gap - best)
    if top is None or best < 1:
        return {"stage": "unexplained", "points": gap}
    return {"stage": top["name"], "points": best}


def _leave_to(neighbour: dict[str, Any], rest: float) -> None:
    """What another cause leaves of the gap is the most that the neighbor may claim."""
    neighbour["points"] = max(0.0, min(neighbour["points"], rest))


def _is_surely_faster(seen: Measurements, limited: Band) -> bool:
    """Whether fewer threads are faster.

    Contending threads vary a lot, so few rounds give a wide interval. It suffices that each of at
    least two windows without them beats every window with them, or one by far.
    """
    few, many = _column(seen, "limited"), _column(seen, "real")
    # a single window must be faster by more than noise
    return limited.low > 0 or min(few) > max(many) * (1.0 if len(few) > 1 else 1.25)


def _busiest(seen: Measurements) -> str:
    loading = [s for s in seen.stages if s.where == "loading"]
    if not loading:
        return ""
    busiest = max(loading, key=lambda s: s.cpu_seconds).name
    return f"{busiest} in {seen.workers * seen.loaders} loading processes on {seen.cores} cores"


def _undecided(j: _Judge, gap: float, healthy: bool) -> str | None:
    """Whether the gap may be zero, and may be large."""
    if healthy and gap + j.half <= HEALTHY_POINTS / 100 + _UNCLEAR_SHARE:
        return None
    # points, at the low end of its interval
    if not healthy and 100 * (gap - j.half) > 5.0:
        return None
    return (
        f"the gap is {100 * gap:.0f} points, give or take {100 * j.half:.0f}: too uncertain to "
        f"call it {'healthy' if healthy else 'a gap'}. Stop other programs; more "
        "rounds may settle it (--rounds, --seconds)"
    )


def _refused(seen: Measurements, j: _Judge, claimed: float) -> str | None:
    """Why the measurement contradicts itself too much for the claim."""
    # in shares of the ceiling, as the gap is
    differs = {
        "synthetic": _same_arm(seen, "synthetic") * (1.0 - j.gap),
        "real": _same_arm(seen, "real") * j.real / j.ceiling,
    }
    arm = max(differs, key=differs.__getitem__)
    if differs[arm] <= max(claimed / 2, 0.0 if claimed else _UNCLEAR_SHARE):
        return None
    what = "too much to call it healthy"
    if claimed:
        what = f"more than half of the {100 * claimed:.0f} that it would claim"
    return (
        f"the {arm} arm differs from itself by {100 * differs[arm]:.0f} points, {what}. "
        "Stop other programs; more rounds may settle it (--rounds, --seconds)"
    )
