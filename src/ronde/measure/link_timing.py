"""Time every collective of a group of workers, and how much of it hides behind computation."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ronde.measure.quiet_gate import OTHERS, TOLERANCE, Reference, busy
from ronde.world import World
from ronde.world.consensus import gather_json

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send")
_SMALL = 512 << 10  # below this, several are timed together


class LinkGroup:
    """A group of ranks and the tensors that its collectives use."""

    def __init__(self, me: World, ranks: list[int], group: Any, largest: int) -> None:
        self.me, self.ranks, self.group = me, ranks, group
        self.place = ranks.index(me.rank)
        self.whole = torch.zeros(self._count(largest), device=me.device)
        self.part = torch.zeros(self.whole.numel() // len(ranks), device=me.device)

    def _count(self, size: int) -> int:
        n = len(self.ranks)
        return -(-size // (4 * n)) * n

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.me.device.type == "cuda":
            torch.cuda.synchronize(self.me.device)

    def run(self, kind: str, size: int) -> None:
        """One collective, of a tensor of ``size`` bytes."""
        count = self._count(size)
        whole, part = self.whole[:count], self.part[: count // len(self.ranks)]
        if kind == "all_reduce":
            dist.all_reduce(whole, group=self.group)
        elif kind == "all_gather":
            dist.all_gather_into_tensor(whole, part, group=self.group)
        elif kind == "reduce_scatter":
            dist.reduce_scatter_tensor(part, whole, group=self.group)
        elif kind == "broadcast":
            dist.broadcast(whole, self.ranks[0], group=self.group)
        else:
            other = self.place ^ 1  # there and back, all pairs at once
            if other < len(self.ranks):
                peer = self.ranks[other]
                for sends in (self.place < other, self.place > other):
                    (dist.send if sends else dist.recv)(whole, peer, group=self.group)

    def seconds(self, kind: str, size: int) -> float:
        """This rank's time of one collective."""
        times = 8 if size < _SMALL else 1
        dist.barrier(group=self.group)
        self.synchronize()
        start = time.perf_counter()
        for _ in range(times):
            self.run(kind, size)
        self.synchronize()
        return (time.perf_counter() - start) / times / (2 if kind == "send" else 1)

    def slowest(self, values: Sequence[float]) -> list[float]:
        """The largest of each value over the ranks."""
        tensor = torch.tensor(list(values), dtype=torch.float64, device=self.me.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return [float(v) for v in tensor]


@dataclass
class LinkTimes:
    """Collective -> (bytes, seconds); the overlap; and how disturbed they are."""

    points: dict[str, list[tuple[float, float]]]
    overlap: float
    interference: float
    noise: float
    disturbance: str


def _time_overlap(
    group: LinkGroup, reference: Reference, size: int, rounds: int
) -> tuple[float, float]:
    """Share of an all-reduce that hides behind computation, and how much it slows that down."""
    alone = group.slowest([min(group.seconds("all_reduce", size) for _ in range(rounds))])[0]
    times = max(1, round(alone / reference()))
    readings: list[tuple[float, float, float]] = []
    for _ in range(rounds):
        dist.barrier(group=group.group)
        start = time.perf_counter()
        for _ in range(times):
            reference()
        computing = time.perf_counter() - start
        dist.barrier(group=group.group)
        start = time.perf_counter()
        work = dist.all_reduce(group.whole, group=group.group, async_op=True)
        for _ in range(times):
            reference()
        disturbed = time.perf_counter() - start
        work.wait()
        group.synchronize()
        readings.append((computing, disturbed, time.perf_counter() - start))
    computing, disturbed, both = (
        group.slowest([min(values)])[0] for values in zip(*readings, strict=True)
    )
    slower = max(1.0, min(disturbed / computing, 2.0))
    gain = computing + alone - both
    hidden = gain / (min(computing, alone) * (2.0 - slower)) if slower < 2.0 else 0.0
    return max(0.0, min(1.0, hidden)), slower


def time_links(
    group: LinkGroup, sizes: Sequence[int], rounds: int, tell: Callable[[str], None], what: str
) -> LinkTimes:
    """Time all collectives at all sizes in turn, round after round, without disturbed rounds."""
    reference = Reference(group.me.device)
    began = busy()
    cases = [(kind, size) for size in sizes for kind in COLLECTIVES]
    for kind, size in cases:
        group.run(kind, size)
    before = [reference() for _ in range(8)]
    readings: list[float] = []
    seconds: list[list[float]] = []
    for r in range(rounds):
        tell(f"{what}: round {r + 1} of {rounds}")
        seconds.append([group.seconds(kind, size) for kind, size in cases])
        readings.append(min(reference() for _ in range(3)))
    overlap, interference = _time_overlap(group, reference, max(sizes), rounds)
    after = [reference() for _ in range(8)]
    # One exchange for all: each case is as slow as its slowest rank.
    flat = group.slowest([v for each in seconds for v in each])
    slowest = [flat[i * len(cases) : (i + 1) * len(cases)] for i in range(rounds)]
    readings = group.slowest(readings)
    first, last = group.slowest([min(before), min(after)])
    best = min(first, last, *readings)
    drift = abs(last / first - 1)
    quiet = [i for i, reading in enumerate(readings) if reading <= best * (1 + TOLERANCE)]
    chosen = quiet if len(quiet) >= 2 else list(range(rounds))
    points: dict[str, list[tuple[float, float]]] = {kind: [] for kind in COLLECTIVES}
    for c, (kind, size) in enumerate(cases):
        points[kind].append((float(size), statistics.median(slowest[i][c] for i in chosen)))
    repeats = 0.0
    if len(chosen) >= 4:
        one, other = (
            [min(slowest[i][c] for i in half) for c in range(len(cases))]
            for half in (chosen[::2], chosen[1::2])
        )
        ratios = (max(a, b) / min(a, b) - 1 for a, b in zip(one, other, strict=True))
        repeats = statistics.median(ratios)
    # gloo's sockets work in the kernel, which counts as another process.
    others = max(0.0, _share_of_others(group.me, began) - 0.10)
    too_few = len(quiet) < 2
    noise = max(
        repeats,
        others if others > OTHERS else 0.0,
        max(drift, 1 - len(quiet) / rounds) if too_few else 0.0,
    )
    disturbance = (
        f"{rounds - len(quiet)} of {rounds} rounds were disturbed, fixed work of "
        f"{best * 1e3:.1f} ms moved by {drift:.0%} from before to after, two halves of the "
        f"measurements differ by {repeats:.0%}, other processes took {others:.0%} of the cores' "
        "time"
    )
    return LinkTimes(points, overlap, interference, noise, disturbance)


def _share_of_others(me: World, began: tuple[float, float, float]) -> float:
    """Share of CPU time that other processes took since ``began``, on the busiest host."""
    spent = [now - then for now, then in zip(busy(), began, strict=True)]
    hosts: dict[str, list[list[float]]] = {}
    for host, *times in gather_json(me, [me.host, *spent]):
        hosts.setdefault(host, []).append(times)
    shares = [0.0]
    for ranks in hosts.values():
        worked, own, total = zip(*ranks, strict=True)
        others = statistics.mean(worked) - sum(own)
        shares.append(others / max(statistics.mean(total), 1e-9))
    return max(shares)
