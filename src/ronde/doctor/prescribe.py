"""Prescriptions: remedies for the diagnosed cause, with the gap each would leave, here and at
scale.

A remedy is proposed if its mechanism fits the cause, tried briefly on the script's own data if
possible, and listed only if it promises a gain. Safe ones come first: *same bits* changes nothing
about the training, *same distribution* gives different but equivalent numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ronde.data import DECODERS
from ronde.doctor.verdict import HEALTHY_POINTS, is_between_workers
from ronde.loader import FeedSettings
from ronde.predict import Capacities, Measured, StageCapacity, from_runs, nodes_of, plateau, walls
from ronde.predict.input_capacity import further_sizes, own_limit, predict

NAMES = (
    "loaders",
    "threads",
    "thread-limit",
    *(f"decoder-{name}" for name in DECODERS),
    "cache-read",
    "cache-decode",
)
"""Every remedy that may be prescribed."""

LABELS = ("same bits", "same distribution")
_AS_IS: Mapping[str, float] = {}
_WORTH_POINTS = 1.0  # points that a remedy must gain, here or at the largest size
# of the cores at work: below it, loaders that give no more wait for something else
_BUSY_CORES_SHARE = 0.7
_MAKING_POINTS = 3.0  # points lost in making samples, from which on more loaders may help


@dataclass(frozen=True)
class Facts:
    """Facts about the machine and the dataset, besides the measurements.

    Attributes:
        workers, loaders: training processes, and loaders per process.
        executor: ``none``, ``threads``, or ``processes``.
        cores: usable cores of this node.
        devices_per_node: of a full node.
        cuda: a GPU trains.
        decoder: of the JPEG images of a pipeline of ronde.feed; "" of another dataset.
        decoders: decoder -> milliseconds per image of the dataset.
        same_pixels: decoders that give exactly Pillow's pixels.
        sample_bytes: read per sample; 0 if unknown.
        kept_bytes: of what a cache after decoding keeps of a sample; 0 if it cannot.
        samples: in the dataset.
        memory_bytes: free on this node.
        pipeline: a pipeline of ronde.feed, whose steps could move to the device.
        step_cpu_seconds: per sample, in the training process.
        queued: seconds that loaders waited for a core, per second on one.
        stream: the dataset is iterable only: at most one loader can read it.
        held: open files of the dataset, whose position loaders would share; "" if none.
        opens: files that the first sample opens, shared by threads but not by processes.
        loading_sweep: ``(concurrent loaders, samples per second)`` without training.
        scope: whose limit ``loading_sweep`` ended at: ``shared`` by all workers, each worker's
            ``own``, or ``unknown``, which one worker cannot tell.
    """

    workers: int
    loaders: int
    executor: str
    cores: int
    devices_per_node: int = 1
    cuda: bool = False
    decoder: str = ""
    decoders: Mapping[str, float] = field(default_factory=dict)
    same_pixels: tuple[str, ...] = ()
    sample_bytes: float = 0.0
    kept_bytes: float = 0.0
    samples: int = 0
    memory_bytes: float = 0.0
    stream: bool = False
    pipeline: bool = False
    step_cpu_seconds: float = 0.0
    queued: float = 0.0
    opens: str = ""
    held: str = ""
    loading_sweep: tuple[tuple[int, float], ...] = ()
    scope: str = "shared"


@dataclass(frozen=True)
class Remedy:
    """A possible remedy.

    Attributes:
        id: one of :data:`NAMES`.
        text: for the reader.
        settings: for ``ronde run``.
        label: one of :data:`LABELS`.
        rate: samples per second expected here; None until tried.
        faster: stage -> factor on its time.
        loaders: factor on the number of loaders.
        tried: ``rate`` was measured.
        can_try: it is not known, and shows within seconds (a cache fills in the first epoch).
    """

    id: str
    text: str
    settings: FeedSettings
    label: str
    rate: float | None = None
    faster: Mapping[str, float] = field(default_factory=dict)
    loaders: float = 1.0
    tried: bool = False
    can_try: bool = True


def _loading(values: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The rows of the stages that make samples."""
    rows = values["stages"]
    return [r for r in rows if r.get("where") == "loading" and r["name"] != "oversubscription"]


def _milliseconds(
    rows: Sequence[Mapping[str, Any]], clock: str, faster: Mapping[str, float] = _AS_IS
) -> float:
    """Milliseconds per sample over these rows by the ``cpu`` or ``wall`` clock."""
    return sum(float(r[f"{clock}_ms_per_sample"] or 0.0) * faster.get(r["name"], 1.0) for r in rows)


@dataclass(frozen=True)
class _Case:
    """A verdict and the facts, with the numbers that several remedies ask for."""

    values: Mapping[str, Any]
    facts: Facts
    lost: Mapping[str, float]  # stage -> points
    making: float  # points lost in making samples
    wall: float  # seconds per sample in the loaders
    idle: float  # share of that time spent waiting for anything but a core
    interferes: bool  # the loaders slow the step itself down

    @property
    def ratio(self) -> float:
        rates = self.values["samples_per_second"]
        return 1.3 * float(rates["synthetic"]) / max(float(rates["real"]), 1e-9)

    def loses(self, stage: str) -> bool:
        return self.lost.get(stage, 0.0) >= _WORTH_POINTS


def _case(values: Mapping[str, Any], facts: Facts) -> _Case:
    lost = {r["name"]: float(r["lost_points"]) for r in values["stages"]}
    cause = values["cause"] or {}
    interferes = cause.get("stage") == "neighbour"
    if interferes and cause.get("within") in lost:
        # the work of this stage is what slows the step down
        lost[cause["within"]] = max(lost[cause["within"]], float(cause["points"]))
    rows = _loading(values)
    making = sum(lost[r["name"]] for r in rows if r["name"] != "transport")
    cpu, wall = _milliseconds(rows, "cpu") / 1e3, _milliseconds(rows, "wall") / 1e3
    # a thread that waits for a core is not idle
    idle = max(0.0, 1.0 - cpu * (1.0 + facts.queued) / wall) if wall else 0.0
    return _Case(values, facts, lost, making, wall, idle, interferes)


def remedies(values: Mapping[str, Any], facts: Facts) -> list[Remedy]:
    """List the remedies that fit the cause, before any prediction."""
    cause = values["cause"]
    if values["healthy"] or values["refused"] or is_between_workers(cause):
        return []
    case = _case(values, facts)
    if cause is not None and cause["stage"] == "sampler" and 100 * values["gap"] <= HEALTHY_POINTS:
        return []
    kinds = (_of_threads, _of_loaders, _of_decoding, _of_caching)
    return [remedy for kind in kinds for remedy in kind(case)]


def _of_threads(case: _Case) -> Iterator[Remedy]:
    neighbour = case.values.get("neighbour") or {}
    if case.loses("oversubscription") or "threads" in str(neighbour.get("cause", "")):
        text = "one compute thread in each loader"
        rate = _gained(case.values, case.lost.get("oversubscription", 0.0))
        limit = FeedSettings(threads=1)  # an arm had it in every round: it is not tried again
        label = "same distribution"
        yield Remedy("thread-limit", text, limit, label, rate=rate, tried=True, can_try=False)


def _of_loaders(case: _Case) -> Iterator[Remedy]:
    facts, loaders = case.facts, case.facts.loaders
    what = "loading threads" if facts.executor == "threads" else "loading processes"
    way = case.lost.get("transport", 0.0)
    if case.making >= _MAKING_POINTS or way >= 5:
        if facts.executor == "none":
            yield from _first_loaders(case)
        elif not facts.stream:
            # Loaders that wait, for storage say, may outnumber the cores; loaders that compute
            # may not.
            each = max(1, facts.cores // facts.workers)
            most = min(64, max(each, math.ceil(each / max(1.0 - case.idle, 0.05))))
            n = min(math.ceil(loaders * case.ratio), most, 4 * loaders)
            if n > loaders and case.making >= _MAKING_POINTS and not case.interferes:
                text = f"{n} {what} for each worker instead of {loaders}"
                settings, times = FeedSettings(workers=n), n / loaders
                yield Remedy("loaders", text, settings, "same bits", loaders=times)
        shares_file = facts.held or facts.opens
        if facts.executor == "processes" and not shares_file and not facts.stream:
            n = max(loaders, 1)
            if way >= _WORTH_POINTS or case.idle < 0.5:
                text = f"{n} loading threads instead of processes: no samples to transfer"
                settings, free = FeedSettings(executor="threads", workers=n), {"transport": 0.0}
                yield Remedy("threads", text, settings, "same bits", faster=free)


def _first_loaders(case: _Case) -> Iterator[Remedy]:
    """Loaders for a training process that reads its samples itself."""
    facts = case.facts
    if facts.stream:
        text = "one loading process for each worker, which reads ahead"
        yield Remedy("loaders", text, FeedSettings(executor="processes", workers=1), "same bits")
    elif not facts.held:  # several loaders would move each other's position in the open file
        each = max(1, facts.cores // facts.workers)
        ceiling = float(case.values["samples_per_second"]["synthetic"])
        wanted = max(2, math.ceil(case.wall * ceiling / facts.workers * 1.2))
        n = min(wanted, max(each, math.ceil(each / max(1 - case.idle, 0.1)), 2), 16)
        text = f"{n} loaders for each worker, which read ahead"
        settings = FeedSettings(executor="processes" if facts.opens else "auto", workers=n)
        yield Remedy("loaders", text, settings, "same bits", loaders=n)


def _of_decoding(case: _Case) -> Iterator[Remedy]:
    facts = case.facts
    now = facts.decoders.get(facts.decoder)
    if now is None or not case.loses("decode"):
        return
    ms, name = min((ms, name) for name, ms in facts.decoders.items())
    if ms < 0.9 * now:
        text = f"decode JPEG with {name}: {ms:.2f} instead of {now:.2f} ms per image"
        label = "same bits" if name in facts.same_pixels else "same distribution"
        settings, faster = FeedSettings(decoder=name), {"decode": ms / now}
        yield Remedy(f"decoder-{name}", text, settings, label, faster=faster)


def _of_caching(case: _Case) -> Iterator[Remedy]:
    facts, room = case.facts, 0.5 * case.facts.memory_bytes
    whole = facts.sample_bytes * facts.samples
    if case.loses("read") and facts.pipeline and (whole < room or whole == 0):
        text = f"keep the files in memory{_size(whole)}, from the second epoch on"
        yield _cache("cache-read", "read", text, {"read": 0.02})
    whole = facts.kept_bytes * facts.samples
    slow = case.loses("decode") or (case.loses("read") and not facts.pipeline)
    if slow and 0 < whole < room:
        text = f"keep decoded samples in memory{_size(whole)}, from the second epoch on"
        yield _cache("cache-decode", "decode", text, {"read": 0.02, "decode": 0.02})


def _size(whole: float) -> str:
    return f" ({whole / 2**30:.1f} GiB)" if whole > 2**29 else ""


def _cache(
    id: str, after: Literal["read", "decode"], text: str, faster: Mapping[str, float]
) -> Remedy:
    settings = FeedSettings(cache=after)
    return Remedy(id, text, settings, "same bits", faster=faster, can_try=False)


def _gained(values: Mapping[str, Any], points: float) -> float:
    rates = values["samples_per_second"]
    ceiling = float(rates["synthetic"])
    return min(ceiling, float(rates["real"]) + points / 100 * ceiling)


def is_crowded(sweep: Sequence[tuple[int, float]]) -> bool:
    """Whether the last of ``(concurrent loaders, samples per second)`` fell clearly below fewer
    loaders.

    Too many loaders get in each other's way; a supply that is merely exhausted stays level.
    """
    # a supply that is exhausted varies by less
    return len(sweep) > 1 and max(sweep)[1] < 0.85 * max(rate for _, rate in sweep)


def capacities_of(values: Mapping[str, Any], facts: Facts, scope: str | None = None) -> Capacities:
    """The measurements as capacities, from which any number of devices is predicted.

    Args:
        scope: whose limit the loaders met, if not ``facts.scope``.
    """
    scope = scope or facts.scope
    rates = values["samples_per_second"]
    rows = _loading(values)
    cpu = _milliseconds(rows, "cpu") / 1e3
    stages = tuple(
        StageCapacity(
            r["name"],
            float(r["cpu_ms_per_sample"]) / 1e3,
            wall_seconds=float(r["wall_ms_per_sample"] or 0.0) / 1e3,
        )
        for r in rows
        if r["cpu_ms_per_sample"]
    )
    slowest, waiting = "read", "read"
    if stages:
        slowest = max(stages, key=lambda s: s.wall_seconds).name
        waiting = max(stages, key=lambda s: s.wall_seconds - s.cpu_seconds).name
    # Loaders that were asked for more at once and gave no more, with cores to spare: they wait for
    # something that all share.
    sweep: Sequence[tuple[int, float]] = ()
    own = math.inf
    if len(facts.loading_sweep) > 1:
        best, ended = plateau(facts.loading_sweep)
        ended = ended and not is_crowded(facts.loading_sweep)
        # Threads of one process may wait for its interpreter, which other devices' processes do not
        # share.
        cores = facts.workers if facts.executor == "threads" else facts.cores
        if ended and cpu * best < _BUSY_CORES_SHARE * min(cores, facts.cores):
            if scope == "shared":
                sweep = facts.loading_sweep
            else:
                own = best / facts.workers
    loading = values.get("loading_samples_per_second")
    if loading is not None:
        loading = max(float(loading), float(rates["real"]))
    run = Measured(
        facts.workers,
        float(rates["synthetic"]),
        min(float(rates["real"]), float(rates["synthetic"])),
        loading,
        cpu,
        0.0 if facts.cuda else facts.step_cpu_seconds,
        nodes_of(Capacities(1.0, devices_per_node=facts.devices_per_node), facts.workers),
    )
    c = from_runs(
        [run],
        stages=stages,
        sweep=sweep,
        cores_per_node=float(facts.cores),
        devices_per_node=facts.devices_per_node,
        like=Capacities(
            float(rates["synthetic"]) / facts.workers,
            devices_per_node=facts.devices_per_node,
            uncertainty=max(0.02, float(values.get("noise", 0.05))),
            storage_stage=slowest if facts.stream else waiting,
            serial=facts.executor == "none",
        ),
    )
    if math.isfinite(own):
        c = own_limit(c, max(own, run.real / facts.workers))
    if facts.stream:
        # Every worker reads the whole stream and keeps its part: together they make no more
        # samples than one of them.
        wall = _milliseconds(rows, "wall") / 1e3
        most = min(c.storage_samples_per_second, 1.0 / wall if wall > 0 else math.inf)
        c = replace(c, storage_samples_per_second=most)
    return c


def _on_nodes(c: Capacities, to: int, nodes: int | None) -> Capacities:
    return c if nodes is None else replace(c, devices_per_node=max(1, -(-to // nodes)))


def outlook(
    values: Mapping[str, Any],
    facts: Facts,
    to: int,
    nodes: int | None = None,
    tried: Sequence[Remedy] = (),
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The gap at more devices, and the limits on the way.

    Args:
        to: the most devices.
        nodes: that the largest size fills; None as many as it takes.
        tried: remedies, with their measured rates.

    Returns:
        tuple: rows ``{devices, nodes, gap, low, high, wall, shared_gap}``, and ``{stage, devices,
            limit}``. ``shared_gap`` and the limit ``unknown`` are of a limit that workers may
            share, or not, which one worker cannot tell. Loaders are a wall only where more of them
            were seen to bring no more.
    """
    c = _on_nodes(capacities_of(values, facts), to, nodes)
    worst = c
    if facts.scope == "unknown":  # then it may be each worker's own, or all may share it
        worst = _on_nodes(capacities_of(values, facts, "shared"), to, nodes)
    rows, unmoved = [], _are_unmoved(values, facts, tried)
    for n in (facts.workers, *further_sizes(facts.workers, to)):
        p, shared = predict(c, n), predict(worst, n)
        row: dict[str, Any] = {"devices": n, "nodes": p.nodes, "gap": p.gap, "low": p.low}
        is_wall = p.limit != "loaders" or unmoved
        row |= {"high": max(p.high, shared.high), "wall": p.wall if is_wall else None}
        rows.append({**row, "shared_gap": shared.gap if shared.gap > p.gap + 0.03 else None})
    # The first size is this one, which was measured.
    rows[0].update(gap=values["gap"], low=values["gap_low"], high=values["gap_high"])
    rows[0]["shared_gap"] = None
    met = [w for w in walls(c, max(to, facts.workers)) if w.limit != "loaders" or unmoved]
    more = [w._replace(limit="unknown") for w in walls(worst, max(to, facts.workers))]
    more = [w for w in more if worst is not c and w.devices > facts.workers and w not in met]
    limits = sorted([*met, *more], key=lambda w: w.devices)
    return rows, [{"stage": w.stage, "devices": w.devices, "limit": w.limit} for w in limits]


def _are_unmoved(values: Mapping[str, Any], facts: Facts, tried: Sequence[Remedy]) -> bool:
    """Whether more loaders were seen to bring no more samples, and too few for the devices here."""
    sweep, here = facts.loading_sweep, values["samples_per_second"]
    best, ended = plateau(sweep) if len(sweep) > 1 else (0.0, False)
    rates = [r.rate for r in tried if r.tried and r.loaders > 1 and r.rate is not None]
    return (ended and best < here["synthetic"]) or any(rate < 1.1 * here["real"] for rate in rates)


def _quicker(rows: Sequence[Mapping[str, Any]], faster: Mapping[str, float]) -> float:
    """How many times as fast the loaders are, by the times of their stages."""
    after = _milliseconds(rows, "wall", faster)
    return _milliseconds(rows, "wall") / after if after > 0 else 1.0


def _altered(c: Capacities, values: Mapping[str, Any], remedy: Remedy, rate: float) -> Capacities:
    """The capacities with a remedy that gives so many samples per second here."""
    rates = values["samples_per_second"]
    times = rate / float(rates["real"])
    if not remedy.tried or rate >= 0.97 * float(rates["synthetic"]):
        # the devices here are fed: how much more it would give follows from the loaders' times
        times = max(times, _quicker(_loading(values), remedy.faster) * remedy.loaders)
    stages = tuple(
        replace(
            s,
            cpu_seconds=s.cpu_seconds * remedy.faster.get(s.name, 1.0),
            samples_per_second=s.samples_per_second * times,
        )
        for s in c.stages
    )
    storage = c.storage_samples_per_second / max(remedy.faster.get("read", 1.0), 1e-6)
    return replace(
        c,
        stages=stages,
        storage_samples_per_second=storage,
        overhead=min(c.overhead, max(0.0, 1.0 - rate / float(rates["synthetic"]))),
        serial=c.serial and remedy.id != "loaders",
    )


def _modelled(values: Mapping[str, Any], facts: Facts, remedy: Remedy) -> float:
    """Predicted samples per second of a remedy that was not tried."""
    rates = values["samples_per_second"]
    synthetic, real = float(rates["synthetic"]), float(rates["real"])
    rows = _loading(values)
    quicker = _quicker(rows, remedy.faster)
    rate = real * quicker * remedy.loaders
    if facts.loaders == 0:  # samples and steps take turns: only the samples are faster
        spared = _milliseconds(rows, "wall") / 1e3 * (1.0 - 1.0 / quicker) / facts.workers
        rate = 1.0 / max(1.0 / real - spared, 1e-9)
    if "transport" in remedy.faster:
        way = sum(float(r["lost_points"]) for r in rows if r["name"] == "transport")
        rate = max(rate, _gained(values, way))
    lifted = sum(float(r["alone_points"]) for r in rows if remedy.faster.get(r["name"], 1.0) < 0.1)
    rate = max(rate, _gained(values, lifted)) if lifted else rate
    cpu = _milliseconds(rows, "cpu", remedy.faster) / 1e3 + facts.step_cpu_seconds
    busy = facts.cores / cpu if cpu > 0 else math.inf
    storage = capacities_of(values, facts).storage_samples_per_second
    storage /= max(remedy.faster.get("read", 1.0), 1e-6)
    return max(real, min(rate, synthetic, max(busy, real), storage))


def prescriptions(
    values: Mapping[str, Any],
    facts: Facts,
    proposed: Sequence[Remedy],
    to: int,
    nodes: int | None = None,
) -> list[dict[str, Any]]:
    """Remedies with predicted gains, best first; those without gain are dropped.

    Args:
        proposed: as :func:`remedies` gave them; tried ones with their ``rate``.
        to: the largest number of devices asked for.
        nodes: that those fill; None as many as it takes.
    """
    synthetic = float(values["samples_per_second"]["synthetic"])
    here = float(values["gap"])
    c = _on_nodes(capacities_of(values, facts), max(to, facts.workers), nodes)
    largest = max(to, facts.workers)
    before = predict(c, largest).gap
    listed: list[tuple[int, float, dict[str, Any]]] = []
    noise = 100 * float(values.get("noise", 0.0))
    for remedy in proposed:
        rate = remedy.rate if remedy.rate is not None else _modelled(values, facts, remedy)
        gap_here = max(0.0, 1.0 - rate / synthetic)
        p = predict(_altered(c, values, remedy, rate), largest)
        gap_largest = min(p.gap, before) if largest > facts.workers else gap_here
        if remedy.tried:
            gap_largest = max(gap_largest, gap_here)  # more devices are fed no better
        gain = 100 * (here - gap_here)
        gain_largest = 100 * (before - gap_largest)
        if remedy.tried and here > HEALTHY_POINTS / 100 and gain < _WORTH_POINTS:
            continue  # it would have shown here
        if gain < max(_WORTH_POINTS, noise if remedy.tried else 0.0) and gain_largest < max(
            5.0, noise
        ):
            continue
        rank = LABELS.index(remedy.label)
        row = {
            "id": remedy.id,
            "text": remedy.text,
            "settings": remedy.settings.to_dict(),
            "label": remedy.label,
            "gap_here": gap_here,
            "gap_largest": gap_largest,
            "gain_here_points": gain,
            "tried": remedy.tried,
        }
        listed.append((rank, -max(gain, 0.5 * gain_largest), row))
    # By gain, in classes of ten points: of two remedies that help about equally, the safer comes
    # first.
    listed.sort(key=lambda x: (round(x[1] / 10), x[0], x[1]))
    return [{"number": i, **row} for i, (_, _, row) in enumerate(listed, 1)]
