"""Predict how fast an input pipeline feeds N devices, from capacities measured on a few.

Throughput is set by the scarcest resource: the devices, each device's loaders, a node's cores,
shared storage, or the transfer to the device. Each has a capacity; the smallest decides. A storage
limit that one device hardly reaches is found by a sweep over concurrent readers, the core limit
from CPU seconds per sample.

Where two resources are about equally scarce, the smaller mean is too optimistic, because both
fluctuate. There the rate is that of a buffer between them (Brownian motion between two reflecting
walls). A shared supply fluctuates less with more devices, since their buffers average it;
per-device supplies fluctuate more, since all wait for the slowest.

Pure arithmetic: no processes, files or tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from ronde.world import ArgumentError

Limit = Literal["loaders", "cores", "storage", "copy", "shared", "unknown"]

# how much N buffers of their own waver more than one, in cv² · E[max of N] / K: fitted to simulated
# queues, ± 10 %
_SLOWEST = 1.35
_DEARER = 1.1  # a sample costs more on a fuller machine; less of a difference is noise
_STARVED = 0.03  # a gap above this was no noise
# the slowest device's loaders give less than this of the fastest's: they wait for something of
# their own
_UNEVEN = 0.7
# a gap above this, the same at any size, is of loaders that are too slow; a smaller one may be time
# that nothing hides
_SLOW = 0.10
# a starved device more brings at least this of the first: each has a limit of its own
_GROWS = 0.5
_OWN = 0.85  # and so much of each one's loaders without training, to be sure of it
_UNKNOWN = 1.0  # relative half width where that is not known


@dataclass(frozen=True)
class StageCapacity:
    """Cost per sample of one input stage.

    Attributes:
        name: ``read``, ``decode``, ``augment``, …
        cpu_seconds: of a node's cores, for each sample.
        samples_per_second: the most that one device's own loaders let through, whatever else is
            idle: workers / seconds a sample.
        wall_seconds: that a loader spends on a sample, with what it waits for; 0 where it is not
            known. It says which stage holds the loaders up.
    """

    name: str
    cpu_seconds: float = 0.0
    samples_per_second: float = math.inf
    wall_seconds: float = 0.0


@dataclass(frozen=True)
class Capacities:
    """Measured capacities, in samples per second.

    Attributes:
        step_rate: of one device that is fed for nothing: the synthetic rate of one worker.
        stages: of the input pipeline.
        cores_per_node: that the workers of a node may use.
        devices_per_node: of a full node.
        storage_samples_per_second: the most that the storage gives, to however many ask.
        storage_shared: whether all nodes read from the same storage. Otherwise each has its own.
        copy_samples_per_second: the most that goes into one device.
        step_cpu_seconds: that the training step itself takes of the cores, for each sample. On the
            CPU that is most of it.
        exchange: how much longer a step is among many devices than alone, as a share: a ring's time
            grows by (N - 1) / N.
        dataset_bytes: that an epoch reads; 0 where it is not known.
        cache_bytes_per_node: of memory or disk that keeps what was read. An epoch is shuffled over
            all nodes, so any of it may be asked for.
        overhead: share of a step lost to input on every device at any N: the part of making a batch
            that nothing hides.
        overruns: by how much single steps of a device came late for want of a batch, as shares of a
            step, where other devices were not the cause. Every device waits for the one that is
            latest.
        buffer_batches: batches that may be ready ahead of a device.
        variation: coefficient of variation of the time that a batch takes to be made.
        uncertainty: relative half width of what was measured, for the interval.
        shared_samples_per_second: the most of something that all devices share, where it was met
            and is neither cores nor storage.
        storage_stage: the stage that waits for the storage.
        serial: samples are made in the training process: they and the steps take turns.
    """

    step_rate: float
    stages: tuple[StageCapacity, ...] = ()
    cores_per_node: float = math.inf
    devices_per_node: int = 1
    storage_samples_per_second: float = math.inf
    storage_shared: bool = True
    copy_samples_per_second: float = math.inf
    step_cpu_seconds: float = 0.0
    exchange: float = 0.0
    dataset_bytes: float = 0.0
    cache_bytes_per_node: float = 0.0
    overhead: float = 0.0
    overruns: tuple[float, ...] = ()
    buffer_batches: float = 4.0
    variation: float = 0.3
    uncertainty: float = 0.05
    shared_samples_per_second: float = math.inf
    storage_stage: str = "read"
    serial: bool = False

    def __post_init__(self) -> None:
        for name in (
            "step_rate",
            "cores_per_node",
            "storage_samples_per_second",
            "copy_samples_per_second",
            "shared_samples_per_second",
        ):
            _positive(name, getattr(self, name))
        for name in (
            "step_cpu_seconds",
            "exchange",
            "dataset_bytes",
            "cache_bytes_per_node",
            "variation",
            "uncertainty",
        ):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ArgumentError(f"{name}={value!r} must be a number, 0 or more.")
        if not 0 <= self.overhead < 1:
            raise ArgumentError(f"overhead={self.overhead!r} must be at least 0 and below 1.")
        if self.buffer_batches < 1:
            raise ArgumentError(f"buffer_batches={self.buffer_batches!r} must be 1 or more.")
        if self.devices_per_node < 1:
            raise ArgumentError(f"devices_per_node={self.devices_per_node!r} must be 1 or more.")
        if any(not (math.isfinite(o) and o >= 0) for o in self.overruns):
            raise ArgumentError("overruns must be numbers, 0 or more.")
        for stage in self.stages:
            if not (math.isfinite(stage.cpu_seconds) and stage.cpu_seconds >= 0):
                raise ArgumentError(
                    f"stage {stage.name!r}: cpu_seconds={stage.cpu_seconds!r} must be a "
                    "number, 0 or more."
                )
            _positive(f"stage {stage.name!r}: samples_per_second", stage.samples_per_second)

    @property
    def cached(self) -> float:
        """Share of reads that a node's cache serves."""
        return (
            min(1.0, self.cache_bytes_per_node / self.dataset_bytes) if self.dataset_bytes else 0.0
        )

    @property
    def input_cpu_seconds(self) -> float:
        """CPU seconds of one sample's input."""
        return sum(s.cpu_seconds for s in self.stages)

    @property
    def on_the_cores(self) -> str:
        """The stage with the most CPU time."""
        return (
            max(self.stages, key=lambda s: s.cpu_seconds).name
            if self.input_cpu_seconds
            else "cores"
        )


def _positive(name: str, value: float) -> None:
    if not value > 0:  # NaN too
        raise ArgumentError(f"{name}={value!r} must be above 0.")


class Wall(NamedTuple):
    """A limit, and the smallest number of devices that exceeds it."""

    stage: str
    devices: int
    limit: Limit


@dataclass(frozen=True)
class Predicted:
    """Throughput at a number of devices.

    Attributes:
        devices, nodes: where.
        ceiling: synthetic samples per second of all devices.
        rate: real samples per second of all devices.
        gap: ``1 - rate / ceiling``; ``low`` and ``high`` its interval.
        wall: the stage that limits, None where the devices do.
        limit: what of it is scarce: ``loaders``, ``cores``, ``storage``, ``copy`` or ``shared``;
            ``unknown`` where it may be the loaders' or shared.
    """

    devices: int
    nodes: int
    ceiling: float
    rate: float
    gap: float
    low: float
    high: float
    wall: str | None
    limit: Limit | None


def gap(real: float, synthetic: float) -> float:
    """Share of the synthetic rate that is lost; at least 0.

    Example:
        >>> round(gap(580.0, 1000.0), 2)
        0.42
    """
    return max(0.0, 1.0 - real / synthetic) if synthetic > 0 else 0.0


def expected_max(values: Sequence[float], n: int) -> float:
    """Expected largest of ``n`` equally likely draws from ``values``.

    Example:
        >>> expected_max([0.0, 1.0], 1), expected_max([0.0, 1.0], 2)
        (0.5, 0.75)
    """
    if not len(values):
        return 0.0
    ordered = np.sort(np.asarray(values, dtype=float))
    below = np.arange(len(ordered) + 1) / len(ordered)
    return float(np.sum(ordered * np.diff(below**n)))


def _normal_max(n: int) -> float:
    """Expected largest of ``n`` standard normal variables."""
    if n <= 1:
        return 0.0
    x = np.linspace(-8.0, 8.0, 4001)
    below = np.array([0.5 * math.erfc(-v / math.sqrt(2)) for v in x]) ** n
    step = x[1] - x[0]
    return float(np.sum((x > 0) - below) * step)


_NORMAL_MAX: dict[int, float] = {}


def _slowest(n: int) -> float:
    if n not in _NORMAL_MAX:
        _NORMAL_MAX[n] = _normal_max(n)
    return _NORMAL_MAX[n]


def _through(supply: float, demand: float, variance: float, buffered: float) -> float:
    """Rate through a buffer of ``buffered`` batches between fluctuating supply and demand.

    Brownian motion with drift between two reflecting walls; the loss is the time at the empty one.
    """
    if not math.isfinite(supply):
        return demand
    ratio = supply / demand
    spread = variance * min(ratio, 1.0)
    if spread <= 0:
        return min(supply, demand)
    drift = ratio - 1.0
    lean = 2.0 * buffered * drift / spread
    if lean > 500:
        return demand
    lost = spread / (2.0 * buffered) if abs(lean) < 1e-9 else drift / math.expm1(lean)
    return demand * min(max(1.0 - lost, 0.0), ratio, 1.0)


def _limits(
    c: Capacities, devices: int, nodes: int, real: bool = True
) -> list[tuple[float, str, Limit]]:
    """Samples per second of each resource; ``real`` includes input work on the cores."""
    found: list[tuple[float, str, Limit]] = []
    cpu = c.step_cpu_seconds + (c.input_cpu_seconds if real else 0.0)
    if cpu > 0 and math.isfinite(c.cores_per_node):
        found.append((c.cores_per_node * nodes / cpu, c.on_the_cores if real else "step", "cores"))
    if not real:
        return found
    for stage in c.stages:
        if math.isfinite(stage.samples_per_second):
            found.append((stage.samples_per_second * devices, stage.name, "loaders"))
    missed = 1.0 - c.cached
    if math.isfinite(c.storage_samples_per_second) and missed > 0:
        found.append(
            (
                c.storage_samples_per_second * (1 if c.storage_shared else nodes) / missed,
                c.storage_stage,
                "storage",
            )
        )
    if math.isfinite(c.copy_samples_per_second):
        found.append((c.copy_samples_per_second * devices, "copy", "copy"))
    if math.isfinite(c.shared_samples_per_second):
        found.append((c.shared_samples_per_second, "input", "shared"))
    return found


def _unlimited_rate(c: Capacities, devices: int) -> float:
    """Samples per second limited only by the devices and their exchange."""
    return devices * c.step_rate / (1.0 + c.exchange * (devices - 1) / devices)


def _ceiling(c: Capacities, devices: int, nodes: int) -> float:
    return min(
        [
            _unlimited_rate(c, devices),
            *(limit for limit, _, _ in _limits(c, devices, nodes, real=False)),
        ]
    )


def _rate(
    c: Capacities, devices: int, nodes: int, scale: float = 1.0, variation: float | None = None
) -> tuple[float, str | None, Limit | None]:
    """Real samples per second and the limiting resource; ``scale`` multiplies the input's rate."""
    ceiling = _ceiling(c, devices, nodes)
    demand = ceiling * (1.0 - c.overhead) / (1.0 + expected_max(c.overruns, devices))
    limits = _limits(c, devices, nodes)
    if not limits:
        return demand, None, None
    variance = (c.variation if variation is None else variation) ** 2
    rate, which, kind = demand, None, None
    for limit, stage, what in limits:
        supply = limit * scale
        if what in ("loaders", "copy"):
            # Each device's own: all wait for the slowest of them.
            supply /= 1.0 + _SLOWEST * variance * _slowest(devices) / c.buffer_batches
            if what == "loaders" and c.serial:
                # one after the other: their times add up
                through = supply * demand / (supply + demand)
            else:
                through = _through(supply, demand, variance, c.buffer_batches + 1)
        else:
            through = _through(supply, demand, variance, (c.buffer_batches + 1) * devices)
        if through < rate:
            rate = through
            if supply < demand:
                which, kind = stage, what
    return rate, which, kind


def nodes_of(capacities: Capacities, devices: int) -> int:
    """Nodes needed for so many devices.

    Example:
        >>> nodes_of(Capacities(100.0, devices_per_node=8), 9)
        2
    """
    return -(-devices // capacities.devices_per_node)


def predict(capacities: Capacities, devices: int, nodes: int | None = None) -> Predicted:
    """Predict throughput and gap at a number of devices.

    Args:
        capacities: what was measured.
        devices: how many train together.
        nodes: on how many nodes; None fills each before the next. ``nodes=1`` asks for the same
            node, however many there are.

    Raises:
        ArgumentError: fewer devices than nodes, or less than 1.

    Example:
        >>> blog = Capacities(250.0, storage_samples_per_second=4640.0, devices_per_node=8,
        ...     overhead=0.05)
        >>> [round(predict(blog, n).gap, 2) for n in (1, 16, 32)]
        [0.05, 0.05, 0.42]
    """
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise ArgumentError(f"devices={devices!r} must be a whole number, 1 or more.")
    where = nodes_of(capacities, devices) if nodes is None else nodes
    if isinstance(where, bool) or not isinstance(where, int) or not 1 <= where <= devices:
        raise ArgumentError(
            f"nodes={nodes!r} must be a whole number from 1 to the {devices} devices."
        )
    c = capacities
    ceiling = _ceiling(c, devices, where)
    rate, wall, limit = _rate(c, devices, where)
    best, _, _ = _rate(c, devices, where, 1.0 + c.uncertainty, c.variation / 2)
    worst, _, _ = _rate(c, devices, where, 1.0 / (1.0 + c.uncertainty), c.variation * 1.5)
    found = gap(rate, ceiling)
    low, high = min(found, gap(best, ceiling)), max(found, gap(worst, ceiling))
    return Predicted(devices, where, ceiling, rate, found, low, high, wall, limit)


def walls(capacities: Capacities, upto: int = 64, nodes: int | None = None) -> list[Wall]:
    """The limits reached as devices are added: each with the smallest number of devices that
    exceeds it.

    Args:
        capacities: what was measured.
        upto: devices to look at.
        nodes: always so many (the same node); None adds nodes as they fill.

    Example:
        >>> capacities = Capacities(250.0, (StageCapacity("decode", 0.001),), 4.0, 8, 3000.0)
        >>> walls(capacities, upto=64, nodes=1)  # doctest: +NORMALIZE_WHITESPACE
        [Wall(stage='read', devices=13, limit='storage'), Wall(stage='decode', devices=17,
        limit='cores')]
    """
    met: dict[tuple[str, Limit], tuple[int, float]] = {}
    for n in range(1, upto + 1):
        where = nodes_of(capacities, n) if nodes is None else min(nodes, n)
        wanted = _ceiling(capacities, n, where) * (1.0 - capacities.overhead)
        for limit, stage, what in _limits(capacities, n, where):
            if limit < wanted * (1 - 1e-9):
                met.setdefault((stage, what), (n, limit))
    # Of those met by the same device, the scarcest comes first: it is the one that is felt.
    ordered = sorted(met.items(), key=lambda item: item[1])
    return [Wall(stage, n, what) for (stage, what), (n, _) in ordered]


# -- from what was run to what it says of capacities -----------------------------------


@dataclass(frozen=True)
class Measured:
    """Measurements at one number of devices.

    Attributes:
        devices, nodes: how many.
        synthetic, real: samples per second of all.
        loading: samples per second that all loaders make when no device has to be waited for; None
            where it was not measured.
        cpu_seconds: of the cores, for each sample, by the input.
        step_cpu_seconds: the same, by the training step.
        slowest_loading: of the loaders of the device whose loaders are slowest, as ``loading``;
            None where it is not known.
        fastest_loading: the same of the fastest.
        busy: share of the cores that were at work while ``cpu_seconds`` was measured, 0 to 1. A
            core that shares its units with another is
            slower when both work: what a sample costs on a full machine is extrapolated from two
                measurements.
    """

    devices: int
    synthetic: float
    real: float
    loading: float | None = None
    cpu_seconds: float = 0.0
    step_cpu_seconds: float = 0.0
    busy: float | None = None
    nodes: int = 1
    slowest_loading: float | None = None
    fastest_loading: float | None = None

    @property
    def uneven(self) -> bool:
        """Whether one device's loaders are slower than another's."""
        slow, fast = self.slowest_loading, self.fastest_loading
        return slow is not None and fast is not None and slow < _UNEVEN * fast


def plateau(sweep: Iterable[tuple[int, float]]) -> tuple[float, bool]:
    """A storage's capacity from ``(concurrent readers, samples per second)``, and whether the sweep
    reached it.

    If more readers still help, the last rate is only a lower bound.

    Returns:
        tuple: samples per second, and True where the last doubling of readers brought less than 10
            %.

    Raises:
        ArgumentError: no reading at all.

    Example:
        >>> plateau([(1, 154.0), (4, 449.0), (16, 459.0)])
        (459.0, True)
    """
    ordered = sorted(sweep)
    if not ordered:
        raise ArgumentError("the sweep over the storage has no reading.")
    best = max(rate for _, rate in ordered)
    if len(ordered) == 1:
        return best, False
    (few, before), (many, _) = ordered[-2], ordered[-1]
    doublings = max(math.log2(many / few), 1e-9) if few > 0 else 1.0
    return best, best <= before * 1.1**doublings


def _full_cost(runs: Sequence[Measured]) -> float:
    """CPU seconds of a sample's input on a fully loaded machine."""
    seen = [r for r in runs if r.cpu_seconds > 0]
    if not seen:
        return 0.0
    mean = sum(r.devices * r.cpu_seconds for r in seen) / sum(r.devices for r in seen)
    dearest = max(r.cpu_seconds for r in seen)
    known = sorted((r.busy, r.cpu_seconds) for r in seen if r.busy is not None)
    if (
        len(known) >= 2
        and known[-1][0] - known[0][0] > 0.1
        and known[-1][1] > _DEARER * known[0][1]
    ):
        (b0, c0), (b1, c1) = known[0], known[-1]
        full = c1 + (c1 - c0) / (b1 - b0) * max(0.0, 1.0 - b1)
        return min(max(full, dearest), 2.0 * dearest)  # two threads of one core: at most twice
    # The dearest of several equal ones is only the unluckiest.
    return dearest if dearest > _DEARER * mean else mean


def from_runs(
    runs: Sequence[Measured],
    *,
    stages: Sequence[StageCapacity] = (),
    sweep: Sequence[tuple[int, float]] = (),
    cores_per_node: float = math.inf,
    devices_per_node: int = 1,
    storage_shared: bool = True,
    like: Capacities | None = None,
) -> Capacities:
    """Derive capacities from runs at a few numbers of devices, and from storage and core
    measurements.

    A starved run used all it could get, so its rate is a capacity. If one device starves as much as
    two, each device's own loaders limit; if two starve more, something shared does. Limits that
    neither run reached come from the storage sweep and the CPU seconds per sample.

    Args:
        runs: one or more; the largest says most.
        stages: CPU seconds of each stage, where they are known: they name the wall.
            ``Measured.cpu_seconds`` is spread over them.
        sweep: ``(readers at once, samples per second)`` of the storage.
        cores_per_node, devices_per_node, storage_shared: as in :class:`Capacities`.
        like: everything else.

    Raises:
        ArgumentError: no run, or rates that are not above 0.

    Example:
        >>> found = from_runs([Measured(1, 250.0, 249.0), Measured(2, 500.0, 498.0)], sweep=[(1,
        ...     400.0), (8, 1500.0), (16, 1510.0)])
        >>> round(predict(found, 8, 1).gap, 2)
        0.24
    """
    if not runs:
        raise ArgumentError("no run was measured: give at least the one with a single device.")
    for r in runs:
        if r.devices < 1 or not (r.synthetic > 0 and r.real > 0):
            raise ArgumentError(
                f"a run of {r.devices} devices measured {r.synthetic} synthetic and "
                f"{r.real} real samples/s: both must be above 0."
            )
    ordered = sorted(runs, key=lambda r: r.devices)
    first, last = ordered[0], ordered[-1]
    alone = first.synthetic / first.devices
    exchange = 0.0
    if last.devices > first.devices:
        slower = first.synthetic / first.devices * last.devices / last.synthetic - 1.0
        shape = (last.devices - 1) / last.devices - (first.devices - 1) / first.devices
        exchange = slower / shape if slower > 0.02 else 0.0  # less is noise
        if not exchange:
            alone = (first.synthetic + last.synthetic) / (first.devices + last.devices)
    cost = _full_cost(ordered)
    named = sum(s.cpu_seconds for s in stages)
    found_stages = (
        tuple(replace(s, cpu_seconds=s.cpu_seconds * cost / named) for s in stages)
        if cost and named
        else (*stages, StageCapacity("input", cost))
        if cost
        else tuple(stages)
    )
    storage = plateau(sweep)[0] if sweep else math.inf
    step_cpu = max((r.step_cpu_seconds for r in ordered), default=0.0)
    base = like or Capacities(alone)
    c = replace(
        base,
        step_rate=alone,
        exchange=exchange,
        stages=found_stages,
        storage_samples_per_second=min(storage, base.storage_samples_per_second),
        storage_shared=storage_shared,
        cores_per_node=cores_per_node,
        devices_per_node=devices_per_node,
        step_cpu_seconds=step_cpu,
    )
    return at_least(_explained(at_least(c, ordered), ordered), ordered)


def _fed(run: Measured) -> float:
    """A rate that no limit is below: one that lost next to nothing met none."""
    return run.real if gap(run.real, run.synthetic) > _STARVED else run.synthetic


def at_least(c: Capacities, runs: Sequence[Measured]) -> Capacities:
    """The capacities, none below a rate that was measured."""
    # One device's loaders may be slower than another's, and all wait for it.
    each = min(_fed(r) / r.devices for r in runs)
    for r in runs:
        nodes, cores = r.nodes, c.cores_per_node * r.nodes
        step, cost = min(c.step_cpu_seconds, cores / r.synthetic), c.input_cpu_seconds
        rate = _fed(r)
        room = max(0.0, cores / rate - step)
        cheaper = min(1.0, room / cost) if cost > 0 else 1.0
        stages = tuple(
            replace(
                s,
                cpu_seconds=s.cpu_seconds * cheaper,
                samples_per_second=max(s.samples_per_second, each),
            )
            for s in c.stages
        )
        reads = rate * (1.0 - c.cached) / (1 if c.storage_shared else nodes)
        c = replace(
            c,
            stages=stages,
            step_cpu_seconds=step,
            storage_samples_per_second=max(c.storage_samples_per_second, reads),
            copy_samples_per_second=max(c.copy_samples_per_second, each),
            shared_samples_per_second=max(c.shared_samples_per_second, rate),
        )
    return c


def _explained(c: Capacities, runs: Sequence[Measured]) -> Capacities:
    """Add the walls the runs hit, and the loss at any number of devices."""
    first, last = runs[0], runs[-1]
    lost = [gap(r.real, r.synthetic) for r in runs]
    own = min((r.loading / r.devices for r in runs if r.loading is not None), default=None)
    if first.loading is not None and c.serial:
        # it counts however fast they are: nothing hides it
        c = own_limit(c, first.loading / first.devices)
    elif first.loading is not None and first.loading < first.devices * c.step_rate * 1.5:
        # Seen not far above what the device wants: the loaders' own limit, if nothing that is known
        # explains it.
        known = min([math.inf, *(limit for limit, _, _ in _limits(c, first.devices, first.nodes))])
        if first.loading < known * 0.9:
            c = own_limit(c, first.loading / first.devices)
    left = lost[0] - predict(c, first.devices, first.nodes).gap
    if (
        left > _SLOW
        and own is None
        and last.devices > first.devices
        and lost[-1] < lost[0] + _STARVED
    ):
        # one is starved as much as two: its own loaders are too slow
        c = own_limit(c, first.real / first.devices)
        c = replace(c, variation=min(c.variation, _seen_variation(c, first, last)))
    elif left > 0.005:
        c = replace(c, overhead=min(left, 0.9))
    slow = last.slowest_loading
    if last.uneven and slow is not None and slow < 1.5 * c.step_rate:
        # That is no thing that all share, and all wait for it at any size.
        return own_limit(c, slow)
    if last.devices > first.devices:
        expected = predict(c, last.devices, last.nodes)
        if lost[0] > _SLOW and _multiplies(first, last):
            # Starved alone, and more give more: each has a limit of its own. What is missing to
            # twice as much is noise, or a wall further on: the interval has both.
            apart = expected.rate / last.real - 1.0
            known = (
                first.loading is not None
                and last.loading is not None
                and last.loading / last.devices >= _OWN * first.loading / first.devices
            )
            unsure = _UNKNOWN if apart > _DEARER - 1.0 and not known else 0.0
            if first.loading is None:
                c = replace(own_limit(c, first.real / first.devices), overhead=0.0)
            return replace(c, uncertainty=max(c.uncertainty, apart, unsure))
        if lost[-1] > expected.high + _STARVED:
            # More is lost than all that is known can say: they share something else, and it gave
            # what it had.
            c = replace(c, shared_samples_per_second=last.real)
        if (
            first.loading is not None
            and last.loading is not None
            and last.loading / last.devices < 0.85 * first.loading / first.devices
        ):
            # Asked for all that they can give, two make less than twice of one. Either that is all
            # there is, or they only hinder each other.
            known = min(
                [
                    math.inf,
                    *(
                        limit
                        for limit, _, what in _limits(c, last.devices, last.nodes)
                        if what in ("cores", "storage")
                    ),
                ]
            )
            # Alone they give at least what they gave beside the training: a reading below that was
            # disturbed.
            if last.real < last.loading < 0.9 * known:
                c = replace(
                    c, shared_samples_per_second=min(c.shared_samples_per_second, last.loading)
                )
    return c


def _multiplies(first: Measured, last: Measured) -> bool:
    """Whether more devices give nearly as many times more, as a limit of each process does. What
    all share gives the same to any number.
    """
    alone = first.real / first.devices
    return last.real >= (first.devices + _GROWS * (last.devices - first.devices)) * alone


def _seen_variation(c: Capacities, first: Measured, last: Measured) -> float:
    """Largest variation of a device's loaders that the observed waiting allows."""
    slower = max(0.0, first.real / first.devices * last.devices / last.real - 1.0)
    apart = _slowest(last.devices) - _slowest(first.devices)
    return math.sqrt(slower * c.buffer_batches / (_SLOWEST * apart))


def own_limit(c: Capacities, rate: float) -> Capacities:
    """Add a limit of each device's own loaders, in samples per second."""
    if not c.stages:
        return replace(c, stages=(StageCapacity("input", 0.0, rate),))
    heaviest = max(
        range(len(c.stages)), key=lambda i: max(c.stages[i].wall_seconds, c.stages[i].cpu_seconds)
    )
    stages = tuple(
        replace(s, samples_per_second=min(s.samples_per_second, rate)) if i == heaviest else s
        for i, s in enumerate(c.stages)
    )
    return replace(c, stages=stages)
