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
from ronde.measure.link_timing import COLLECTIVES, LinkGroup, LinkTimes, time_links
from ronde.measure.quiet_gate import TOLERANCE, NoisyMachine
from ronde.predict import Cluster, LinkFit
from ronde.watch import MARK
from ronde.world import World, usable_cores
from ronde.world.consensus import broadcast_json, gather_json
from ronde.world.control_groups import memory_limit
from ronde.world.meshes import group_of
from ronde.world.paths import state_folder

# torch 2.13 has new names for these; torch 2.11 knows only the old ones.
warnings.filterwarnings(
    "ignore",
    message=r"`torch\.distributed\.(all_gather_into|reduce_scatter)_tensor` is deprecated",
    category=FutureWarning,
)

__all__ = [
    "COLLECTIVES",
    "calibrate",
    "default_cluster",
    "fit_link",
    "has_cuda",
    "resident",
    "run_bench",
]

_SIZES = (16 << 10, 256 << 10, 1 << 20, 4 << 20, 12 << 20, 25 << 20)
_QUICK_SIZES = (64 << 10, 1 << 20, 25 << 20)  # 25 MiB: a bucket of DDP
_ROUNDS, _QUICK_ROUNDS = 8, 4
_ATTEMPTS = 3
_METHOD = 3  # raised when the measurement changes, so that older files are measured again


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
    me: World,
    *,
    quick: bool = False,
    accept_noise: bool = False,
    tell: Callable[[str], None] | None = None,
) -> Cluster:
    """Measure the links of this world. A collective: every rank gets the same answer.

    Args:
        quick: fewer sizes and rounds, some seconds in all.
        accept_noise: return a disturbed measurement, with ``noise`` in it, instead of refusing it.
        tell: shows progress.

    Raises:
        NoisyMachine: on every rank: other work disturbed every attempt.
    """
    say = tell if tell is not None and me.is_main else (lambda _: None)
    hosts = [str(host) for host in gather_json(me, me.host)]
    nodes, per_node = len(set(hosts)), max(hosts.count(h) for h in hosts)
    cpu = me.device.type == "cpu"
    base_bytes = max(gather_json(me, _base_bytes(me)))
    links: dict[str, dict[str, LinkFit]] = {}
    noise, disturbances, hidden, slower = 0.0, [], 0.0, 1.0
    for scope, (ranks, process_group) in _groups(me, hosts).items() if me.size > 1 else ():
        times, worst = _attempts(me, scope, ranks, process_group, quick, accept_noise, say)
        noise = max(noise, worst)
        if worst > TOLERANCE:
            disturbances.append(times.disturbance)
        fits = {kind: fit_link(points, len(ranks)) for kind, points in times.points.items()}
        for kind, fit in fits.items():  # nodes are assumed equal: rank 0's node stands for all
            links.setdefault(kind, {})[scope] = fit
        hidden, slower = times.overlap, times.interference
    cluster = Cluster(
        name=me.host if nodes == 1 else f"{nodes} nodes with {me.host}",
        nodes=nodes,
        devices_per_node=per_node,
        device="cpu" if cpu else torch.cuda.get_device_name(me.device),
        memory_bytes=_device_memory(me, per_node),
        links=links,
        overlap=0.0 if cpu else hidden,  # gloo's exchanges of sharded parameters block
        bucket_overlap=hidden if me.size > 1 else 1.0,
        interference=slower,
        base_bytes=base_bytes,
        source=_source(me, disturbances),
        noise=noise,
    )
    return Cluster.from_dict(broadcast_json(me, cluster.to_dict()))


def _attempts(
    me: World,
    scope: str,
    ranks: list[int],
    process_group: Any,
    quick: bool,
    accept_noise: bool,
    say: Callable[[str], None],
) -> tuple[LinkTimes, float]:
    """Time the links of one scope until they are undisturbed; the times and their noise."""
    sizes, rounds = (_QUICK_SIZES, _QUICK_ROUNDS) if quick else (_SIZES, _ROUNDS)
    group = LinkGroup(me, ranks, process_group, max(sizes))
    what = f"{len(ranks)} workers {'inside a node' if scope == 'node' else 'across nodes'}"
    for attempt in range(1, 2 if accept_noise else _ATTEMPTS + 1):
        again = f", disturbed: attempt {attempt} of {_ATTEMPTS}" if attempt > 1 else ""
        times = time_links(group, sizes, rounds, say, what + again)
        worst = max(gather_json(me, times.noise))
        if worst <= TOLERANCE:
            break
    if worst > TOLERANCE and not accept_noise:
        raise NoisyMachine(
            f"the machine is too busy to measure its links: {times.disturbance}. Stop other "
            "programs and try again.",
            worst,
        )
    return times, worst


def _source(me: World, disturbances: list[str]) -> str:
    backend = dist.get_backend() if dist.is_initialized() else "none"
    text = (
        f"measured {time.strftime('%Y-%m-%d %H:%M')} with {me.size} workers on {me.host}, "
        f"torch {torch.__version__}, {backend}"
    )
    if me.size == 1:
        text += ": no links, as there was one worker"
    return text + (f"; disturbed: {disturbances[0]}" if disturbances else "")


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
    if cluster.noise <= TOLERANCE:
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
    parser.add_argument("--accept-noise", action="store_true")
    options = parser.parse_args(arguments)
    from ronde.world.connect import connect

    me = connect()

    def tell(text: str) -> None:
        if os.environ.get("RONDE_LAUNCHER_PID"):
            print(MARK + json.dumps({"bench": text}), flush=True)
        elif sys.stderr.isatty():
            print(text, file=sys.stderr)

    try:
        cluster = calibrate(me, quick=options.quick, accept_noise=options.accept_noise, tell=tell)
    except NoisyMachine as error:
        sys.exit(str(error))
    if me.is_main and options.tell:
        print(MARK + json.dumps({"cluster": cluster.to_dict()}), flush=True)
    elif me.is_main:
        cluster.save(options.output)
    if dist.is_initialized():
        dist.barrier()


if __name__ == "__main__":
    run_bench()
