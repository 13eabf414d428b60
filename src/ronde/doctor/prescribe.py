"""Prescriptions: remedies for the diagnosed cause, with the gap each would leave, here and at
scale.

A remedy is proposed if its mechanism fits the cause, tried briefly on the script's own data if
possible, and listed only if it promises a gain. Safe ones come first: *same bits* changes nothing
about the training, *same distribution* gives different but equivalent numbers, *changes the
training* does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ronde.data import DECODERS
from ronde.doctor.verdict import HEALTHY_POINTS
from ronde.loader import FeedSettings
from ronde.predict import Capacities, Measured, StageCapacity, from_runs, nodes_of, plateau, walls
from ronde.predict.input_capacity import predict

__all__ = [
    "NAMES",
    "Facts",
    "Remedy",
    "capacities_of",
    "is_crowded",
    "outlook",
    "prescriptions",
    "remedies",
]

NAMES = (
    "loaders",
    "threads",
    "prefetch",
    "fewer-loaders",
    "thread-limit",
    "pin-memory",
    *(f"decoder-{name}" for name in DECODERS),
    "feed-images",
    "cache-read",
    "pack",
    "cache-decode",
    "device-augment",
    "echo",
)
"""Every remedy that may be prescribed."""

LABELS = ("same bits", "same distribution", "changes the training")
_WORTH = 1.0  # points that a remedy must gain, here or at the largest size
_MOST_LOADERS = 64
_IDLE = (
    0.7  # share of the cores at work, below which loaders that give no more wait for something else
)
# of the best rate that fewer loaders gave, below which the last ones are in each other's way
_CROWDED = 0.85
_MAKING = 3.0  # points lost in making samples, from which on more loaders may help


@dataclass(frozen=True)
class Facts:
    """Facts about the machine and the dataset, besides the measurements.

    Attributes:
        workers, loaders: training processes, and loaders of each.
        executor: ``none``, ``threads`` or ``processes``.
        cores: that the workers of this node may use.
        devices_per_node: of a full node.
        cuda: whether a GPU trains.
        pinned: whether batches are page-locked.
        prefetch: batches that each loader may be ahead.
        jpeg: whether the data set decodes JPEG images with Pillow.
        decoders: decoder -> milliseconds for one of the data set's own images.
        same_pixels: decoders that give Pillow's very pixels.
        array_milliseconds: for one of them, decoded as ``feed.images`` does; 0 if not known.
        images: each sample is one image file, as ``feed.images`` reads them; ``imread``: OpenCV
            reads it.
        draws: samples are random, so finished ones cannot be kept.
        shrink: 2, 4 or 8 where ``feed.images`` could decode them at that fraction of their size.
        files: how many files are read, one for each sample, or 0.
        folder: that they lie in, or empty.
        sample_bytes: read for one sample; ``decoded_bytes`` after decoding; 0 where not known.
        samples: in the data set.
        memory_bytes: free on this node.
        pipeline: it is a pipeline of ronde.feed whose steps could move to the device.
        step_cpu_seconds: of one sample, in the training process.
        queued: seconds that the threads which read were ready and had no core, for each second that
            they had one.
        stream: the data set can only be iterated: at most one loader can read it.
        held: what the data set holds open, whose place in it loaders would share; "" for nothing.
        opens: what it opens when it reads its first sample, which threads would share and processes
            do not; "" for nothing.
        loading_sweep: ``(loaders at once, samples per second)`` without training.
        storage_sweep: ``(readers at once, samples per second)`` of files that are not in memory;
            empty where it was not asked.
    """

    workers: int
    loaders: int
    executor: str
    cores: int
    devices_per_node: int = 1
    cuda: bool = False
    pinned: bool = False
    prefetch: int = 2
    jpeg: bool = False
    decoders: Mapping[str, float] = field(default_factory=dict)
    same_pixels: tuple[str, ...] = ()
    array_milliseconds: float = 0.0
    images: bool = False
    imread: bool = False
    draws: bool = False
    shrink: int = 1
    files: int = 0
    folder: str = ""
    sample_bytes: float = 0.0
    decoded_bytes: float = 0.0
    samples: int = 0
    memory_bytes: float = 0.0
    stream: bool = False
    pipeline: bool = False
    step_cpu_seconds: float = 0.0
    queued: float = 0.0
    opens: str = ""
    held: str = ""
    loading_sweep: tuple[tuple[int, float], ...] = ()
    storage_sweep: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Remedy:
    """A possible remedy.

    Attributes:
        id: a short name.
        text: what it is, for a person.
        settings: what ``ronde run`` is told; None where it takes more than settings.
        label: one of :data:`LABELS`.
        rate: samples per second that are predicted here; None until it is tried.
        faster: stage -> what its time is multiplied by.
        loaders: how many times as many loaders.
        echo: how many times each batch is used.
        tried: whether ``rate`` was measured.
        can_try: whether it shows within seconds (a cache does not: it fills in the first epoch).
    """

    id: str
    text: str
    settings: FeedSettings | None
    label: str
    rate: float | None = None
    faster: Mapping[str, float] = field(default_factory=dict)
    loaders: float = 1.0
    echo: int = 1
    tried: bool = False
    can_try: bool = True


def _rows(values: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {r["name"]: r for r in values["stages"]}


def _points(rows: Mapping[str, Mapping[str, Any]], *names: str) -> float:
    return sum(float(rows[n]["lost_points"]) for n in names if n in rows)


def remedies(values: Mapping[str, Any], facts: Facts) -> list[Remedy]:
    """Remedies that fit the cause, before any prediction.

    Args:
        values: the verdict.
    """
    if values["healthy"] or values["refused"]:
        return []
    rows = _rows(values)
    rates = values["samples_per_second"]
    lost = {name: float(row["lost_points"]) for name, row in rows.items()}
    cause = values["cause"] or {}
    beside = cause.get("stage") == "neighbour"
    if beside and cause.get("within") in lost:
        # its work is what slows the step down
        lost[cause["within"]] = max(lost[cause["within"]], float(cause["points"]))
    in_loading = sum(
        p
        for name, p in lost.items()
        if rows[name].get("where") == "loading" and name not in ("oversubscription", "transport")
    )
    cpu = (
        sum(
            float(r["cpu_ms_per_sample"] or 0.0)
            for r in rows.values()
            if r.get("where") == "loading"
        )
        / 1e3
    )
    found: list[Remedy] = []
    each = max(1, facts.cores // facts.workers)
    # Loaders that wait (for storage, say) can be more than there are cores; those that compute
    # cannot.
    wall = (
        sum(
            float(r["wall_ms_per_sample"] or 0.0)
            for r in rows.values()
            if r.get("where") == "loading"
        )
        / 1e3
    )
    # waiting for a core is no idleness
    idle = max(0.0, 1.0 - cpu * (1.0 + facts.queued) / wall) if wall else 0.0
    wanted = 1.3 * float(rates["synthetic"]) / max(float(rates["real"]), 1e-9)
    if in_loading >= _MAKING or lost.get("transport", 0.0) >= 5:
        if facts.executor == "none" and facts.stream:
            reads_ahead = FeedSettings(executor="processes", workers=1)
            found.append(
                Remedy(
                    "loaders",
                    "a loading process for each worker, which reads ahead",
                    reads_ahead,
                    "same bits",
                )
            )
        elif (
            facts.executor == "none" and not facts.held
        ):  # else loaders would be given each other's bytes
            n = min(
                max(2, math.ceil(wall * float(rates["synthetic"]) / facts.workers * 1.2)),
                max(each, math.ceil(each / max(1 - idle, 0.1)), 2),
                16,
            )
            found.append(
                Remedy(
                    "loaders",
                    f"{n} loaders for each worker, which read ahead",
                    FeedSettings(executor="processes" if facts.opens else "auto", workers=n),
                    "same bits",
                    loaders=n,
                )
            )
        elif facts.executor != "none" and not facts.stream:
            most = min(_MOST_LOADERS, max(each, math.ceil(each / max(1.0 - idle, 0.05))))
            n = min(math.ceil(facts.loaders * wanted), most, 4 * facts.loaders)
            if n > facts.loaders and in_loading >= _MAKING and not beside:
                what = "loading threads" if facts.executor == "threads" else "loading processes"
                found.append(
                    Remedy(
                        "loaders",
                        f"{n} {what} for each worker instead of {facts.loaders}",
                        FeedSettings(workers=n),
                        "same bits",
                        loaders=n / facts.loaders,
                    )
                )
        if (
            facts.executor == "processes"
            and not facts.held
            and not facts.opens
            and not facts.stream
            and (lost.get("transport", 0.0) >= _WORTH or idle < 0.5)
        ):
            found.append(
                Remedy(
                    "threads",
                    f"{max(facts.loaders, 1)} loading threads instead of processes: "
                    "nothing is sent between them",
                    FeedSettings(executor="threads", workers=max(facts.loaders, 1)),
                    "same bits",
                    faster={"transport": 0.0},
                )
            )
        if facts.executor != "none" and facts.prefetch < 8:
            found.append(
                Remedy(
                    "prefetch",
                    f"each loader up to {4 * facts.prefetch} batches ahead instead of "
                    f"{facts.prefetch}",
                    FeedSettings(prefetch=4 * facts.prefetch),
                    "same bits",
                )
            )
    loading = values.get("loading_samples_per_second")
    if beside and loading and facts.executor != "none" and not facts.stream:
        enough = max(1, math.ceil(1.1 * facts.loaders * float(rates["synthetic"]) / float(loading)))
        if enough < facts.loaders:
            what = "loading threads" if facts.executor == "threads" else "loading processes"
            text = (
                f"{enough} {what} for each worker instead of {facts.loaders}: as many as are "
                "needed, and fewer to take the step's cores"
            )
            found.append(Remedy("fewer-loaders", text, FeedSettings(workers=enough), "same bits"))
    if lost.get("oversubscription", 0.0) >= _WORTH or "threads" in str(
        (values.get("neighbour") or {}).get("cause", "")
    ):
        found.insert(
            0,
            Remedy(
                "thread-limit",
                "one compute thread in each loader",
                FeedSettings(threads=1),
                "same distribution",
                rate=_gained(values, lost.get("oversubscription", 0.0)),
            ),
        )
    if facts.cuda and not facts.pinned and lost.get("copy", 0.0) >= _WORTH:
        found.append(
            Remedy(
                "pin-memory",
                "page-locked batches: the copy runs beside the step",
                FeedSettings(pin_memory=True),
                "same bits",
            )
        )
    if facts.jpeg and lost.get("decode", 0.0) >= _WORTH:
        now = facts.decoders.get("pillow")
        faster = min(
            ((ms, name) for name, ms in facts.decoders.items() if name != "pillow"), default=None
        )
        if now and faster and faster[0] < 0.9 * now:
            ms, name = faster
            found.append(
                Remedy(
                    f"decoder-{name}",
                    f"decode JPEG with {name}: {ms:.2f} instead of {now:.2f} ms an image",
                    FeedSettings(decoder=name),
                    "same bits" if name in facts.same_pixels else "same distribution",
                    faster={"decode": ms / now},
                )
            )
        scale = 0.3 + 0.7 / facts.shrink**2 if facts.shrink > 1 else 1.0
        quicker = scale * (
            facts.array_milliseconds / now if now and facts.array_milliseconds else 1.0
        )
        if facts.images and quicker < 0.9:
            found.append(
                Remedy(
                    "feed-images",
                    f"read the images with {_images(facts, facts.shrink > 1)} instead of "
                    "the Dataset",
                    None,
                    "same distribution",
                    faster={"decode": quicker},
                    can_try=False,
                )
            )
    room = 0.5 * facts.memory_bytes
    if lost.get("read", 0.0) >= _WORTH:
        whole = facts.sample_bytes * facts.samples
        if whole == 0 or whole < room:
            size = f" ({whole / 2**30:.1f} GiB)" if whole > 2**29 else ""
            by_hand = (
                f": {_images(facts)}.cache('read') instead of the Dataset"
                if facts.images and facts.imread
                else ""
            )
            found.append(
                Remedy(
                    "cache-read",
                    f"keep the files in memory{size}, from the second epoch on{by_hand}",
                    None if by_hand else FeedSettings(cache="read", cache_in="memory"),
                    "same distribution" if by_hand else "same bits",
                    faster={"read": 0.02},
                    can_try=False,
                )
            )
        if facts.files > 1000 and 0 < facts.sample_bytes < 2**18 and facts.folder:
            then = (
                "pack: OUT"
                if facts.pipeline
                else f"feed.{'images' if facts.images else 'tar'}(OUT)"
            )
            found.append(
                Remedy(
                    "pack",
                    f"pack the {facts.files:,} small files: ronde pack {facts.folder} OUT, "
                    f"then {then}",
                    None,
                    "same distribution" if facts.images else "same bits",
                    faster={"read": 0.3},
                    can_try=False,
                )
            )
    if lost.get("decode", 0.0) >= _WORTH:
        whole = facts.decoded_bytes * facts.samples
        if 0 < whole < room:
            by_hand = (
                f": {_images(facts)}.cache('decode') instead of the Dataset"
                if facts.images and facts.draws
                else ""
            )
            found.append(
                Remedy(
                    "cache-decode",
                    f"keep decoded samples in memory ({whole / 2**30:.1f} GiB), from the "
                    f"second epoch on{by_hand}",
                    None if by_hand else FeedSettings(cache="decode", cache_in="memory"),
                    "same distribution" if by_hand else "same bits",
                    faster={"read": 0.02, "decode": 0.02},
                    can_try=False,
                )
            )
    if facts.pipeline and lost.get("augment", 0.0) >= _WORTH and facts.cuda:
        found.append(
            Remedy(
                "device-augment",
                "normalise and augment on the device",
                FeedSettings(device_augment=True),
                "same distribution",
                faster={"augment": 0.1},
            )
        )
    if in_loading >= 10:
        found.append(
            Remedy(
                "echo",
                "train on each batch twice (data echoing)",
                FeedSettings(echo=2),
                "changes the training",
                echo=2,
                can_try=False,
            )
        )
    return found


def _images(facts: Facts, to_size: bool = False) -> str:
    """What to write instead of a Dataset of image files."""
    folder = repr(facts.folder) if facts.folder else "FOLDER"
    return f"feed.images({folder}{', decode_to_size=True' if to_size else ''})"


def _gained(values: Mapping[str, Any], points: float) -> float:
    rates = values["samples_per_second"]
    return min(
        float(rates["synthetic"]), float(rates["real"]) + points / 100 * float(rates["synthetic"])
    )


def is_crowded(sweep: Sequence[tuple[int, float]]) -> bool:
    """Whether the last of ``(concurrent loaders, samples per second)`` fell clearly below fewer
    loaders.

    Too many loaders get in each other's way; a supply that is merely exhausted stays level.
    """
    return len(sweep) > 1 and max(sweep)[1] < _CROWDED * max(rate for _, rate in sweep)


def capacities_of(values: Mapping[str, Any], facts: Facts) -> Capacities:
    """The measurements as capacities, from which any number of devices is predicted."""
    rates = values["samples_per_second"]
    rows = [
        r
        for r in values["stages"]
        if r.get("where") == "loading" and r["name"] != "oversubscription"
    ]
    cpu = sum(float(r["cpu_ms_per_sample"] or 0.0) for r in rows) / 1e3
    stages = tuple(
        StageCapacity(
            r["name"],
            float(r["cpu_ms_per_sample"] or 0.0) / 1e3,
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
    sweep: Sequence[tuple[int, float]] = facts.storage_sweep
    if not sweep and len(facts.loading_sweep) > 1:
        best, ended = plateau(facts.loading_sweep)
        ended = ended and not is_crowded(facts.loading_sweep)
        # Threads of one process may wait for its interpreter, which other devices' processes do not
        # share.
        cores = facts.workers if facts.executor == "threads" else facts.cores
        if ended and cpu * best < _IDLE * min(cores, facts.cores):
            sweep = facts.loading_sweep
    busy = min(1.0, float(rates["real"]) * (cpu + facts.step_cpu_seconds) / facts.cores)
    loading = values.get("loading_samples_per_second")
    run = Measured(
        facts.workers,
        float(rates["synthetic"]),
        min(float(rates["real"]), float(rates["synthetic"])),
        None if loading is None else float(loading),
        cpu,
        0.0 if facts.cuda else facts.step_cpu_seconds,
        busy,
        nodes_of(Capacities(1.0, devices_per_node=facts.devices_per_node), facts.workers),
    )
    found = from_runs(
        [run],
        stages=stages,
        sweep=sweep,
        cores_per_node=float(facts.cores),
        devices_per_node=facts.devices_per_node,
        like=Capacities(
            float(rates["synthetic"]) / facts.workers,
            devices_per_node=facts.devices_per_node,
            buffer_batches=float(max(1, facts.loaders * facts.prefetch)),
            uncertainty=max(0.02, float(values.get("noise", 0.05))),
            storage_stage=slowest if facts.stream else "read" if facts.storage_sweep else waiting,
            serial=facts.executor == "none",
        ),
    )
    if facts.stream:
        # Every worker goes through all of it and keeps its part: together they make no more samples
        # than one of them.
        wall = sum(float(r["wall_ms_per_sample"] or 0.0) for r in rows) / 1e3
        found = replace(
            found,
            storage_samples_per_second=min(
                found.storage_samples_per_second, 1.0 / wall if wall > 0 else math.inf
            ),
        )
    return found


def _on_nodes(c: Capacities, to: int, nodes: int | None) -> Capacities:
    return c if nodes is None else replace(c, devices_per_node=max(1, -(-to // nodes)))


def _from_trial(values: Mapping[str, Any], facts: Facts, rate: float) -> dict[str, Any]:
    """The measurements expected with a remedy that speeds up no single stage (threads, executor,
    prefetch).

    Only its rate is known: the loaders alone gain as much, and CPU time per sample is capped by
    that rate.
    """
    rates = values["samples_per_second"]
    rows = [r for r in values["stages"] if r.get("where") == "loading"]
    cpu = sum(float(r["cpu_ms_per_sample"] or 0.0) for r in rows) / 1e3
    least = (
        min(1.0, max(0.0, facts.cores / rate - facts.step_cpu_seconds) / cpu) if cpu > 0 else 1.0
    )
    loading = values.get("loading_samples_per_second")
    return {
        **values,
        "samples_per_second": {**rates, "real": rate},
        "loading_samples_per_second": None
        if loading is None
        else max(rate, float(loading) * rate / float(rates["real"])),
        "stages": [
            {**r, "cpu_ms_per_sample": float(r["cpu_ms_per_sample"] or 0.0) * least}
            if r in rows
            else r
            for r in values["stages"]
        ],
    }


def _sizes(here: int, to: int) -> list[int]:
    found = [here]
    while found[-1] * 2 <= to:
        found.append(found[-1] * 2)
    return found if found[-1] == to or to < here else [*found, to]


def outlook(
    values: Mapping[str, Any], facts: Facts, to: int, nodes: int | None = None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The gap at more devices, and the limits on the way.

    Args:
        to: the most devices.
        nodes: that the largest size fills; None as many as it takes.

    Returns:
        tuple: rows ``{devices, nodes, gap, low, high, wall}``, and ``{stage, devices, limit}``.
    """
    c = _on_nodes(capacities_of(values, facts), to, nodes)
    rows = []
    for n in _sizes(facts.workers, to):
        p = predict(c, n)
        rows.append(
            {
                "devices": n,
                "nodes": p.nodes,
                "gap": p.gap,
                "low": p.low,
                "high": p.high,
                "wall": p.wall,
            }
        )
    if rows:
        # Here it was measured.
        rows[0].update(gap=values["gap"], low=values["gap_low"], high=values["gap_high"])
    return rows, [
        {"stage": w.stage, "devices": w.devices, "limit": w.limit}
        for w in walls(c, max(to, facts.workers))
    ]


def _altered(c: Capacities, values: Mapping[str, Any], remedy: Remedy) -> Capacities:
    """The capacities with a remedy applied."""
    rows = [
        r
        for r in values["stages"]
        if r.get("where") == "loading" and r["name"] != "oversubscription"
    ]
    before = sum(float(r["wall_ms_per_sample"] or 0.0) for r in rows)
    after = sum(
        float(r["wall_ms_per_sample"] or 0.0) * remedy.faster.get(r["name"], 1.0) for r in rows
    )
    quicker = before / after if after > 0 and before > 0 else 1.0
    stages = tuple(
        replace(
            s,
            cpu_seconds=s.cpu_seconds * remedy.faster.get(s.name, 1.0),
            samples_per_second=s.samples_per_second * quicker * remedy.loaders
            if math.isfinite(s.samples_per_second)
            else math.inf,
        )
        for s in c.stages
    )
    read = remedy.faster.get("read", 1.0)
    storage = (
        c.storage_samples_per_second / max(read, 1e-6)
        if math.isfinite(c.storage_samples_per_second)
        else math.inf
    )
    closes = 1.0 - _not_loading(values) if quicker * remedy.loaders > 1.01 else 0.0
    # step and samples take turns: as much less is lost as samples take less
    if not values["loaders"] and remedy.loaders == 1:
        closes *= 1.0 - 1.0 / quicker
    serial = c.serial and remedy.id != "loaders"
    return replace(
        c,
        stages=stages,
        storage_samples_per_second=storage,
        overhead=c.overhead * (1.0 - closes),
        serial=serial,
    )


def _not_loading(values: Mapping[str, Any]) -> float:
    """Share of the gap that no loader can close."""
    gap = 100 * float(values["gap"])
    inside = sum(
        float(r["lost_points"])
        for r in values["stages"]
        if r.get("where") == "loading" and r["name"] != "transport"
    )
    return min(1.0, max(0.0, 1.0 - inside / gap)) if gap > 0 else 1.0


def _modelled(values: Mapping[str, Any], facts: Facts, remedy: Remedy) -> float:
    """Predicted samples per second of a remedy that was not tried."""
    rates = values["samples_per_second"]
    synthetic, real = float(rates["synthetic"]), float(rates["real"])
    if remedy.echo > 1:
        return min(synthetic, real * remedy.echo)
    rows = [
        r
        for r in values["stages"]
        if r.get("where") == "loading" and r["name"] != "oversubscription"
    ]
    before = sum(float(r["wall_ms_per_sample"] or 0.0) for r in rows) / 1e3
    after = (
        sum(float(r["wall_ms_per_sample"] or 0.0) * remedy.faster.get(r["name"], 1.0) for r in rows)
        / 1e3
    )
    cpu = (
        sum(float(r["cpu_ms_per_sample"] or 0.0) * remedy.faster.get(r["name"], 1.0) for r in rows)
        / 1e3
    )
    if facts.loaders == 0:
        ahead = remedy.loaders > 1
        per_sample = 1.0 / real - (before - after) / facts.workers
        rate = min(1.0 / max(per_sample, 1e-9), synthetic)
        if ahead:
            rate = min(synthetic, facts.workers * remedy.loaders / max(after, 1e-12))
    else:
        rate = real * (before / after if after > 0 else math.inf) * remedy.loaders
        rate = real if before == after and remedy.loaders == 1 else min(rate, synthetic)
    if "transport" in remedy.faster:
        rate = max(rate, _gained(values, _points(_rows(values), "transport")))
    lifted = sum(float(r["alone_points"]) for r in rows if remedy.faster.get(r["name"], 1.0) < 0.1)
    rate = max(rate, _gained(values, lifted)) if lifted else rate
    full = (
        facts.cores / (cpu + facts.step_cpu_seconds)
        if cpu + facts.step_cpu_seconds > 0
        else math.inf
    )
    given = capacities_of(values, facts).storage_samples_per_second / max(
        remedy.faster.get("read", 1.0), 1e-6
    )
    return max(real, min(rate, synthetic, max(full, real), given))


def prescriptions(
    values: Mapping[str, Any],
    facts: Facts,
    found: Sequence[Remedy],
    to: int,
    nodes: int | None = None,
) -> list[dict[str, Any]]:
    """Remedies with predicted gains, best first; those without gain are dropped.

    Args:
        found: as :func:`remedies` gave them; tried ones with their ``rate``.
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
    for remedy in found:
        rate = remedy.rate if remedy.rate is not None else _modelled(values, facts, remedy)
        gap_here = max(0.0, 1.0 - rate / synthetic)
        if remedy.tried and not remedy.faster and remedy.loaders == 1 and remedy.echo == 1:
            altered = _on_nodes(
                capacities_of(_from_trial(values, facts, min(rate, synthetic)), facts),
                largest,
                nodes,
            )
        else:
            altered = _altered(c, values, remedy)
        p = predict(altered, largest)
        gap_largest = max(0.0, 1.0 - (1.0 - p.gap) * remedy.echo) if remedy.echo > 1 else p.gap
        gap_largest = min(gap_largest, before) if largest > facts.workers else gap_here
        gain = 100 * (here - gap_here)
        gain_largest = 100 * (before - gap_largest)
        if remedy.tried and here > HEALTHY_POINTS / 100 and gain < _WORTH:
            continue  # it would have shown here
        if gain < max(_WORTH, noise if remedy.tried else 0.0) and gain_largest < max(5.0, noise):
            continue
        order = LABELS.index(remedy.label)
        listed.append(
            (
                2 if remedy.echo > 1 else 0 if order == 0 else 1,
                -max(gain, 0.5 * gain_largest),
                {
                    "id": remedy.id,
                    "text": remedy.text,
                    "settings": remedy.settings.to_dict() if remedy.settings is not None else None,
                    "label": remedy.label,
                    "gap_here": gap_here,
                    "gap_largest": gap_largest,
                    "gain_here_points": gain,
                    "tried": remedy.tried,
                },
            )
        )
    # By gain, in classes of ten points, so that of two that help alike the safer comes first;
    # echoing is the last resort.
    listed.sort(key=lambda x: (x[0] == 2, round(x[1] / 10), x[0], x[1]))
    return [{"number": i, **row} for i, (_, _, row) in enumerate(listed, 1)]
