"""Predict how fast an input pipeline feeds N devices, from capacities measured on a few.

The scarcest resource decides: the devices, their own loaders, a node's cores, or what all share,
such as storage. A storage limit that one device hardly reaches is found by a sweep over concurrent
readers, the core limit from CPU seconds per sample.

Pure arithmetic: no processes, files or tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from ronde.world import ArgumentError

Limit = Literal["loaders", "cores", "storage", "shared", "unknown"]

_NOISE_SHARE = 0.03  # of the synthetic rate: a smaller gap, or difference of gaps, is noise


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
        step_cpu_seconds: that the training step itself takes of the cores, for each sample. On the
            CPU that is most of it.
        exchange: how much longer a step is among many devices than alone, as a share: a ring's time
            grows by (N - 1) / N.
        overhead: share of a step lost to input on every device at any N: the part of making a batch
            that nothing hides.
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
    step_cpu_seconds: float = 0.0
    exchange: float = 0.0
    overhead: float = 0.0
    uncertainty: float = 0.05
    shared_samples_per_second: float = math.inf
    storage_stage: str = "read"
    serial: bool = False

    @property
    def input_cpu_seconds(self) -> float:
        """CPU seconds of one sample's input."""
        return sum(s.cpu_seconds for s in self.stages)

    @property
    def on_the_cores(self) -> str:
        """The stage with the most CPU time."""
        if not self.input_cpu_seconds:
            return "cores"
        return max(self.stages, key=lambda s: s.cpu_seconds).name


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
        limit: what of it is scarce: ``loaders``, ``cores``, ``storage`` or ``shared``; ``unknown``
            where it may be the loaders' or shared.
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


def _limits(c: Capacities, devices: int, nodes: int) -> list[tuple[float, str, Limit]]:
    """Samples per second of each resource that the input needs."""
    limits: list[tuple[float, str, Limit]] = [
        (s.samples_per_second * devices, s.name, "loaders") for s in c.stages
    ]
    cpu = c.step_cpu_seconds + c.input_cpu_seconds
    if cpu > 0:
        limits.append((c.cores_per_node * nodes / cpu, c.on_the_cores, "cores"))
    limits.append((c.storage_samples_per_second, c.storage_stage, "storage"))
    limits.append((c.shared_samples_per_second, "input", "shared"))
    return [limit for limit in limits if math.isfinite(limit[0])]


def _ceiling(c: Capacities, devices: int, nodes: int) -> float:
    """Samples per second of the devices, their exchange, and the cores that steps need."""
    rate = devices * c.step_rate / (1.0 + c.exchange * (devices - 1) / devices)
    return min(rate, c.cores_per_node * nodes / c.step_cpu_seconds) if c.step_cpu_seconds else rate


def _rate(
    c: Capacities, devices: int, nodes: int, scale: float = 1.0
) -> tuple[float, str | None, Limit | None]:
    """Real samples per second and the limiting resource; ``scale`` multiplies the input's rate."""
    demand = _ceiling(c, devices, nodes) * (1.0 - c.overhead)
    rate: float = demand
    wall: str | None = None
    scarce: Limit | None = None
    for limit, stage, what in _limits(c, devices, nodes):
        supply = through = scale * limit
        if what == "loaders" and c.serial:  # one after the other: their times add up
            through = supply * demand / (supply + demand)
        if through < rate:
            rate = through
            wall, scarce = (stage, what) if supply < demand else (None, None)
    return rate, wall, scarce


def nodes_of(capacities: Capacities, devices: int) -> int:
    """Nodes needed for so many devices.

    Example:
        >>> nodes_of(Capacities(100.0, devices_per_node=8), 9)
        2
    """
    return -(-devices // capacities.devices_per_node)


def further_sizes(largest: int, to: int) -> list[int]:
    """Sizes beyond the largest that was measured: doubled from it, and the last.

    Example:
        >>> further_sizes(4, 48)
        [8, 16, 32, 48]
    """
    sizes = []
    # Rates are compared on a doubling grid: between two of its sizes no prediction is more certain.
    n = largest * 2
    while n < to:
        sizes.append(n)
        n *= 2
    return [*sizes, to] if to > largest else []


def predict(capacities: Capacities, devices: int, nodes: int | None = None) -> Predicted:
    """Predict throughput and gap at a number of devices.

    Args:
        capacities: what was measured.
        devices: how many train together.
        nodes: on how many nodes; None fills each before the next. ``nodes=1`` asks for the same
            node, however many there are.

    Example:
        >>> blog = Capacities(250.0, storage_samples_per_second=4640.0, devices_per_node=8,
        ...     overhead=0.05)
        >>> [round(predict(blog, n).gap, 2) for n in (1, 16, 32)]
        [0.05, 0.05, 0.42]
    """
    c, where = capacities, nodes_of(capacities, devices) if nodes is None else nodes
    ceiling = _ceiling(c, devices, where)
    rate, wall, limit = _rate(c, devices, where)
    best, worst = (_rate(c, devices, where, (1.0 + c.uncertainty) ** way)[0] for way in (1, -1))
    loss = gap(rate, ceiling)
    low, high = min(loss, gap(best, ceiling)), max(loss, gap(worst, ceiling))
    return Predicted(devices, where, ceiling, rate, loss, low, high, wall, limit)


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
    """

    devices: int
    synthetic: float
    real: float
    loading: float | None = None
    cpu_seconds: float = 0.0
    step_cpu_seconds: float = 0.0
    nodes: int = 1


def plateau(sweep: Iterable[tuple[int, float]]) -> tuple[float, bool]:
    """A storage's capacity from ``(concurrent readers, samples per second)``, and whether the sweep
    reached it.

    If more readers still help, the last rate is only a lower bound.

    Returns:
        tuple: samples per second, and True where the last doubling of readers brought less than 10
            %.

    Example:
        >>> plateau([(1, 154.0), (4, 449.0), (16, 459.0)])
        (459.0, True)
    """
    ordered = sorted(sweep)
    best = max(rate for _, rate in ordered)
    if len(ordered) == 1:
        return best, False
    (few, before), (many, _) = ordered[-2:]
    return best, best <= before * 1.1 ** math.log2(many / few)


def from_runs(
    runs: Sequence[Measured],
    *,
    stages: Sequence[StageCapacity] = (),
    sweep: Sequence[tuple[int, float]] = (),
    cores_per_node: float = math.inf,
    devices_per_node: int = 1,
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
        cores_per_node, devices_per_node: as in :class:`Capacities`.
        like: everything else.

    Raises:
        ArgumentError: no run, or rates that are not above 0.

    Example:
        >>> measured = from_runs([Measured(1, 250.0, 249.0), Measured(2, 500.0, 498.0)], sweep=[(1,
        ...     400.0), (8, 1500.0), (16, 1510.0)])
        >>> round(predict(measured, 8, 1).gap, 2)
        0.24
    """
    if not runs or any(not (r.synthetic > 0 and r.real > 0) for r in runs):
        raise ArgumentError("capacities need a run, and synthetic and real rates above 0 of each.")
    ordered = sorted(runs, key=lambda r: r.devices)
    first, last = ordered[0], ordered[-1]
    alone, exchange = first.synthetic / first.devices, 0.0
    if last.devices > first.devices:
        slower = alone * last.devices / last.synthetic - 1.0
        shape = (last.devices - 1) / last.devices - (first.devices - 1) / first.devices
        exchange = slower / shape if slower > _NOISE_SHARE else 0.0
    cost = max(r.cpu_seconds for r in ordered)
    named = sum(s.cpu_seconds for s in stages)
    parts = tuple(stages)
    if cost and named:
        parts = tuple(replace(s, cpu_seconds=s.cpu_seconds * cost / named) for s in stages)
    elif cost:
        parts = (*stages, StageCapacity("input", cost))
    c = replace(
        like or Capacities(alone),
        step_rate=alone,
        exchange=exchange,
        stages=parts,
        storage_samples_per_second=plateau(sweep)[0] if sweep else math.inf,
        cores_per_node=cores_per_node,
        devices_per_node=devices_per_node,
        step_cpu_seconds=max(r.step_cpu_seconds for r in ordered),
    )
    for run in ordered:
        c = _at_least(c, run)
    return _with_shared(_with_own(c, first), first, last)


def _at_least(c: Capacities, run: Measured) -> Capacities:
    """The capacities, none below a rate that was measured."""
    cores = c.cores_per_node * run.nodes
    # A clock that counts too much would put the wall of the cores below what was reached.
    step, cost = min(c.step_cpu_seconds, cores / run.synthetic), c.input_cpu_seconds
    room = max(0.0, cores / run.real - step)
    cheaper = min(1.0, room / cost) if cost > 0 else 1.0
    return replace(
        c,
        stages=tuple(replace(s, cpu_seconds=s.cpu_seconds * cheaper) for s in c.stages),
        step_cpu_seconds=step,
        storage_samples_per_second=max(c.storage_samples_per_second, run.real),
    )


def _with_own(c: Capacities, first: Measured) -> Capacities:
    """Add what each device's own loaders give, and the loss that is the same at any size."""
    lost = gap(first.real, first.synthetic)
    if first.loading is not None:
        c = own_limit(c, max(first.loading, first.real) / first.devices)
    here = predict(c, first.devices, first.nodes)
    left = lost - here.gap
    if left > 0 and here.limit == "loaders" and not c.serial:
        return own_limit(c, first.real / first.devices)  # beside the steps they give less
    return replace(c, overhead=min(left, 0.9)) if left > 0 else c


def _with_shared(c: Capacities, first: Measured, last: Measured) -> Capacities:
    """Add a limit that all share, if more devices lost more than all that is known can say."""
    if last.devices == first.devices:
        return c
    shared = math.inf
    loads = [r.loading / r.devices for r in (first, last) if r.loading is not None]
    # Loaders of two that give so little less than twice one's share a limit.
    hindered = len(loads) == 2 and loads[1] < 0.85 * loads[0]
    missed = gap(last.real, last.synthetic) - predict(c, last.devices, last.nodes).high
    if missed > _NOISE_SHARE and (hindered or len(loads) < 2):
        shared = last.real
    known = min((limit for limit, _, _ in _limits(c, last.devices, last.nodes)), default=math.inf)
    if hindered and last.loading is not None and last.real < last.loading < 0.9 * known:
        shared = min(shared, last.loading)
    return replace(c, shared_samples_per_second=min(shared, c.shared_samples_per_second))


def own_limit(c: Capacities, rate: float) -> Capacities:
    """Add a limit of each device's own loaders, in samples per second."""
    if not c.stages:
        return replace(c, stages=(StageCapacity("input", 0.0, rate),))
    slowest = max(c.stages, key=lambda s: max(s.wall_seconds, s.cpu_seconds))
    limited = replace(slowest, samples_per_second=min(slowest.samples_per_second, rate))
    return replace(c, stages=tuple(limited if s is slowest else s for s in c.stages))
