"""Benchmark the links between workers: every collective, up to the size of a gradient bucket.

All ranks work at once. Each collective gets its own fit, seconds = alpha + bytes / beta, because
ring formulas misjudge them: on gloo, a reduce-scatter takes more than twice its ring time.
``ronde bench cluster`` starts workers that run ``python -m ronde.measure.bench_links``.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import socket
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from ronde.measure.cost_lines import line
from ronde.predict import Cluster, LinkFit
from ronde.predict.datasheets import INTERFERENCE_FACTOR, OVERLAP_SHARE
from ronde.watch import MARK
from ronde.world import World, usable_cores
from ronde.world.consensus import broadcast_json, gather_json
from ronde.world.cores import memory_limit
from ronde.world.meshes import group_of
from ronde.world.paths import state_folder

# torch 2.13 has new names for these; torch 2.11 knows only the old ones.
warnings.filterwarnings(
    "ignore",
    message=r"`torch\.distributed\.(all_gather_into|reduce_scatter)_tensor` is deprecated",
    category=FutureWarning,
)

__all__ = ["COLLECTIVES", "calibrate", "default_cluster", "fit_link", "has_cuda", "resident"]

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send")
DISTURBED_SHARE = 0.10
"""Share by which two halves of a measurement differ where other programs disturbed it."""

_SIZES_BYTES = (16 << 10, 256 << 10, 1 << 20, 4 << 20, 12 << 20, 25 << 20)
_QUICK_SIZES_BYTES = (64 << 10, 1 << 20, 25 << 20)  # 25 MiB: a bucket of DDP
_METHOD = 5  # raised when the measurement changes, so that older files are measured again


def fit_link(points: Sequence[tuple[float, float]], ranks: int) -> LinkFit:
    """The fit through ``(bytes, seconds)`` with the least squared relative error.

    Example:
        >>> fit_link([(1e6, 0.011), (1e7, 0.101)], ranks=2).beta
        100000000.0
    """
    fit = line(points)
    residual = statistics.mean(abs(fit.at(size) / seconds - 1) for size, seconds in points)
    beta = round(1.0 / max(fit.per_sample, 1e-13), 3)
    return LinkFit(alpha=fit.fixed, beta=beta, ranks=ranks, residual=residual)


class _LinkGroup:
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
        times = 8 if size < 512 << 10 else 1  # small ones are over before a clock can tell
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


def _time_links(
    group: _LinkGroup, sizes: Sequence[int], rounds: int, tell: Callable[[int], None]
) -> tuple[dict[str, LinkFit], float]:
    """Time all collectives at all sizes in turn, round after round: a fit of each, and how far two
    halves of the rounds differ.
    """
    cases = [(kind, size) for size in sizes for kind in COLLECTIVES]
    for kind, size in cases:
        group.run(kind, size)
    seconds: list[float] = []
    for turn in range(rounds):
        tell(turn + 1)
        seconds += [group.seconds(kind, size) for kind, size in cases]
    # One exchange for all: each case is as slow as its slowest rank.
    slowest = torch.tensor(group.slowest(seconds)).view(rounds, len(cases))
    points: dict[str, list[tuple[float, float]]] = {kind: [] for kind in COLLECTIVES}
    for (kind, size), middle in zip(cases, slowest.quantile(0.5, 0).tolist(), strict=True):
        points[kind].append((float(size), middle))
    # Every second round: a drift is in both halves, a disturbance in one.
    one, other = slowest[::2].amin(0), slowest[1::2].amin(0)
    noise = float((torch.maximum(one, other) / torch.minimum(one, other) - 1).median())
    return {kind: fit_link(each, len(group.ranks)) for kind, each in points.items()}, noise


def _device_memory(me: World, local: int) -> float:
    """Bytes of memory for one worker."""
    if me.device.type == "cuda":
        return float(torch.cuda.get_device_properties(me.device).total_memory)
    total = min(float(psutil.virtual_memory().total), memory_limit())
    return total / max(1, local)


def resident() -> int:
    """Bytes of this process, with the libraries of any training and without freed memory."""
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # glibc keeps freed memory
    return int(psutil.Process().memory_info().rss)


def _base_bytes(me: World) -> float:
    """Device memory of a worker that has trained a little, without tensors."""
    if me.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(me.device)
        return float(max(0, total - free - torch.cuda.memory_reserved(me.device)))
    if me.size > 1:  # load the libraries of a sharded training
        from ronde.parallel import fsdp  # noqa: F401
    return float(resident())


def _groups(me: World, hosts: list[str]) -> dict[str, tuple[list[int], Any]]:
    """Scope -> ranks and process group, of this rank's groups inside its node and over all."""
    everyone = list(range(me.size))
    nodes = {host: [r for r in everyone if hosts[r] == host] for host in dict.fromkeys(hosts)}
    if len(nodes) == 1:
        return {"node": (everyone, None)}
    groups: dict[str, tuple[list[int], Any]] = {}
    for host, ranks in nodes.items():  # every rank makes every group
        group = group_of("links", ranks)
        if host == hosts[me.rank] and all(len(each) > 1 for each in nodes.values()):
            groups["node"] = (ranks, group)
    return {**groups, "cluster": (everyone, None)}


def calibrate(
    me: World, *, quick: bool = False, tell: Callable[[str], None] | None = None
) -> Cluster:
    """Measure the links of this world. A collective: every rank gets the same answer, whose
    ``noise`` says how far other programs disturbed it.

    Args:
        quick: fewer sizes and rounds, some seconds in all.
        tell: shows progress.
    """
    hosts = [str(host) for host in gather_json(me, me.host)]
    nodes, per_node = len(set(hosts)), max(hosts.count(h) for h in hosts)
    cpu = me.device.type == "cpu"
    base_bytes = max(gather_json(me, _base_bytes(me)))
    links: dict[str, dict[str, LinkFit]] = {}
    noise = 0.0
    sizes, rounds = (_QUICK_SIZES_BYTES, 4) if quick else (_SIZES_BYTES, 8)
    for scope, (ranks, process_group) in _groups(me, hosts).items() if me.size > 1 else ():
        where = f"{len(ranks)} workers {'inside a node' if scope == 'node' else 'across nodes'}"

        def say(turn: int, where: str = where) -> None:
            if tell is not None and me.is_main:
                tell(f"{where}: round {turn} of {rounds}")

        group = _LinkGroup(me, ranks, process_group, max(sizes))
        fits, apart = _time_links(group, sizes, rounds, say)
        noise = max(noise, *gather_json(me, apart))
        for kind, fit in fits.items():  # nodes are assumed equal: rank 0's node stands for all
            links.setdefault(kind, {})[scope] = fit
    cluster = Cluster(
        name=me.host if nodes == 1 else f"{nodes} nodes with {me.host}",
        nodes=nodes,
        devices_per_node=per_node,
        device="cpu" if cpu else torch.cuda.get_device_name(me.device),
        memory_bytes=_device_memory(me, per_node),
        links=links,
        # On a CPU the exchange and the computation share the cores: nothing hides. Assumed so, the
        # stored runs of plan_truth.py are predicted to 6.3 %; with a measured overlap, to 6.4 %.
        overlap=0.0 if cpu else OVERLAP_SHARE,
        bucket_overlap=0.0 if cpu else OVERLAP_SHARE,
        interference=1.0 if cpu else INTERFERENCE_FACTOR,
        base_bytes=base_bytes,
        source=_source(me),
        noise=noise,
    )
    return Cluster.from_dict(broadcast_json(me, cluster.to_dict()))


def _source(me: World) -> str:
    backend = dist.get_backend() if dist.is_initialized() else "none"
    text = (
        f"measured {time.strftime('%Y-%m-%d %H:%M')} with {me.size} workers on {me.host}, "
        f"torch {torch.__version__}, {backend}"
    )
    if me.device.type == "cuda":
        text += f"; assumed: {100 * OVERLAP_SHARE:.0f} % of an exchange can hide"
    return text + (": no links, as there was one worker" if me.size == 1 else "")


# -- a cluster without a file ----------------------------------------------------------


def has_cuda() -> bool:
    """Whether workers of this machine train on GPUs."""
    return os.environ.get("RONDE_DEVICE") != "cpu" and torch.cuda.is_available()


def default_cluster(
    workers: int, measure: Callable[[int], Cluster], tell: Callable[[str], None] | None = None
) -> Cluster:
    """This machine as a cluster of ``workers``, measured once and then kept.

    It is kept by host, torch version and workers in ``$RONDE_STATE`` or ``~/.local/state/ronde``.
    More workers than this machine has cores are extrapolated.

    Args:
        workers: world size to plan for.
        measure: starts so many workers, which measure.
        tell: shows progress.

    Raises:
        RondeError: the links could not be measured.
    """
    cuda = has_cuda()
    most = torch.cuda.device_count() if cuda else max(2, min(8, usable_cores()))
    started = min(workers, most)
    kind = f"{socket.gethostname()}-{'cuda' if cuda else 'cpu'}-torch{torch.__version__}"
    file = state_folder() / f"cluster-{kind}-{started}-method{_METHOD}.yaml"
    if file.exists():
        with contextlib.suppress(Exception):
            return _resized(Cluster.load(file), workers)
    if tell is not None:
        tell(f"measuring the links of {started} workers on this machine, once")
    cluster = measure(started)
    # A disturbed measurement serves this answer, and is repeated for the next one.
    if cluster.noise <= DISTURBED_SHARE:
        file.parent.mkdir(parents=True, exist_ok=True)
        cluster.save(file)
    return _resized(cluster, workers)


def _resized(cluster: Cluster, workers: int) -> Cluster:
    """The cluster with another number of workers."""
    measured = cluster.devices_per_node
    if workers == measured:
        return cluster
    shared = measured / workers if cluster.device == "cpu" else 1.0
    more = f"; {workers} workers by the ring's formula" if workers > measured else ""
    return replace(
        cluster,
        devices_per_node=workers,
        memory_bytes=cluster.memory_bytes * shared,
        source=cluster.source + more,
    )


# -- a worker --------------------------------------------------------------------------


def run_bench(arguments: Sequence[str] | None = None) -> None:
    """Run one worker of ``ronde bench cluster``, or of srun, mpirun or torchrun."""
    parser = argparse.ArgumentParser(
        prog="python -m ronde.measure.bench_links", description="Measure the links between workers."
    )
    parser.add_argument("--output", type=Path, default=Path("cluster.yaml"))
    parser.add_argument("--tell", action="store_true", help="give the launcher the cluster instead")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(arguments)
    from ronde.world.connect import connect

    me = connect(120.0)  # a collective that hangs ends the measurement

    def tell(text: str) -> None:
        if os.environ.get("RONDE_LAUNCHER_PID"):
            print(MARK + json.dumps({"bench": text}), flush=True)
        elif sys.stderr.isatty():
            print(text, file=sys.stderr)

    cluster = calibrate(me, quick=options.quick, tell=tell)
    if me.is_main and options.tell:
        print(MARK + json.dumps({"cluster": cluster.to_dict()}), flush=True)
    elif me.is_main:
        cluster.save(options.output)
    if dist.is_initialized():
        dist.barrier()


if __name__ == "__main__":
    run_bench()
