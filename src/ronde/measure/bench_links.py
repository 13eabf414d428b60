"""Benchmark the links between workers: every collective, up to the size of a gradient bucket.

All ranks work at once. Each collective gets its own fit, seconds = alpha + bytes / beta, because
ring formulas misjudge them: on gloo, a reduce-scatter takes more than twice its ring time. On the
CPU, the overhead of Ronde's runtime is measured too, see :mod:`ronde.measure.runtime_overhead`.
``ronde bench cluster`` starts workers that run ``python -m ronde.measure.bench_links``.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from ronde.measure.cost_lines import line
from ronde.measure.quiet_gate import OTHERS, TOLERANCE, NoisyMachine, Reference, busy
from ronde.measure.runtime_overhead import added_by, warm
from ronde.predict import Added, Cluster, LinkFit
from ronde.watch import MARK
from ronde.world import World, openmp_waits, threads_per_worker, usable_cores
from ronde.world.consensus import gather_json
from ronde.world.meshes import group_of

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
    "run_bench",
    "resident",
]

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send")

_SIZES = (16 << 10, 256 << 10, 1 << 20, 4 << 20, 12 << 20, 25 << 20)
_QUICK_SIZES = (64 << 10, 1 << 20, 25 << 20)  # 25 MiB: a bucket of DDP
_ROUNDS, _QUICK_ROUNDS = 8, 4
_SMALL = 512 << 10  # below this, several are timed together
_ATTEMPTS = 3
_METHOD = 2
"""Raised whenever what is measured changes: what an earlier version kept is measured again."""
_OTHERS = ("RONDE_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_")  # another launcher's variables


def fit_link(points: Sequence[tuple[float, float]], ranks: int) -> LinkFit:
    """The fit through ``(bytes, seconds)`` with the least squared relative error.

    Example:
        >>> fit_link([(1e6, 0.011), (1e7, 0.101)], ranks=2).beta
        100000000.0
    """
    found = line(points)
    residual = statistics.mean(abs(found.at(size) / seconds - 1) for size, seconds in points)
    return LinkFit(
        alpha=found.fixed,
        beta=round(1.0 / max(found.per_sample, 1e-13), 3),
        ranks=ranks,
        residual=residual,
    )


class _Group:
    """One group of ranks and the tensors that its collectives use."""

    def __init__(self, me: World, ranks: list[int], group: Any, largest: int) -> None:
        self.me, self.ranks, self.group = me, ranks, group
        self.place = ranks.index(me.rank)
        self.whole = torch.zeros(self._count(largest), device=me.device)
        self.part = torch.zeros(self.whole.numel() // len(ranks), device=me.device)

    def _count(self, size: int) -> int:
        n = len(self.ranks)
        return -(-size // (4 * n)) * n

    def wait(self) -> None:
        """Until what was started has ended."""
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
        """This rank's time of one."""
        times = 8 if size < _SMALL else 1
        dist.barrier(group=self.group)
        self.wait()
        start = time.perf_counter()
        for _ in range(times):
            self.run(kind, size)
        self.wait()
        return (time.perf_counter() - start) / times / (2 if kind == "send" else 1)

    def slowest(self, values: Sequence[float]) -> list[float]:
        """Each value's largest over the ranks."""
        tensor = torch.tensor(list(values), dtype=torch.float64, device=self.me.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return [float(v) for v in tensor]


@dataclass
class _Measured:
    """What one attempt found."""

    points: dict[str, list[tuple[float, float]]]
    overlap: float
    interference: float
    level: float
    told: str


def _overlap(group: _Group, reference: Reference, size: int, rounds: int) -> tuple[float, float]:
    """How much of an all-reduce hides behind computation, and how much slower that then is."""
    alone = group.slowest([min(group.seconds("all_reduce", size) for _ in range(rounds))])[0]
    times = max(1, round(alone / reference()))
    found: list[tuple[float, float, float]] = []
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
        beside = time.perf_counter() - start
        work.wait()
        group.wait()
        found.append((computing, beside, time.perf_counter() - start))
    computing, beside, both = (
        group.slowest([min(values)])[0] for values in zip(*found, strict=True)
    )
    slower = max(1.0, min(beside / computing, 2.0))
    gain = computing + alone - both
    hidden = gain / (min(computing, alone) * (2.0 - slower)) if slower < 2.0 else 0.0
    return max(0.0, min(1.0, hidden)), slower


def _attempt(
    group: _Group, sizes: Sequence[int], rounds: int, tell: Callable[[str], None], what: str
) -> _Measured:
    """All collectives at all sizes in turn, round after round; disturbed rounds are left out."""
    reference = Reference(group.me.device)
    began = busy()
    cases = [(kind, size) for size in sizes for kind in COLLECTIVES]
    for kind, size in cases:
        group.run(kind, size)
    before = [reference() for _ in range(8)]
    readings: list[float] = []
    taken: list[list[float]] = []
    for r in range(rounds):
        tell(f"{what}: round {r + 1} of {rounds}")
        taken.append([group.seconds(kind, size) for kind, size in cases])
        readings.append(min(reference() for _ in range(3)))
    overlap, interference = _overlap(group, reference, max(sizes), rounds)
    after = [reference() for _ in range(8)]
    # One exchange for all: each case as slow as its slowest rank.
    flat = group.slowest([v for each in taken for v in each])
    slow = [flat[i * len(cases) : (i + 1) * len(cases)] for i in range(rounds)]
    readings = group.slowest(readings)
    first, last = group.slowest([min(before), min(after)])
    best = min(first, last, *readings)
    kept = [i for i, reading in enumerate(readings) if reading <= best * (1 + TOLERANCE)]
    drift = abs(last / first - 1)
    chosen = kept if len(kept) >= 2 else list(range(rounds))
    points = {
        kind: [
            (float(size), statistics.median(slow[i][c] for i in chosen))
            for c, (k, size) in enumerate(cases)
            if k == kind
        ]
        for kind in COLLECTIVES
    }
    halves = [
        [min(slow[i][c] for i in half) for c in range(len(cases))]
        for half in (chosen[::2], chosen[1::2])
    ]
    repeats = (
        statistics.median(max(a, b) / min(a, b) - 1 for a, b in zip(*halves, strict=True))
        if len(chosen) >= 4
        else 0.0
    )
    busy_here = [now - then for now, then in zip(busy(), began, strict=True)]
    everyone = gather_json(group.me, [group.me.host, *busy_here])
    others = 0.0
    for host in {each[0] for each in everyone}:
        here = [each[1:] for each in everyone if each[0] == host]
        total = statistics.mean(each[2] for each in here)
        others = max(
            others,
            (statistics.mean(each[0] for each in here) - sum(each[1] for each in here))
            / max(total, 1e-9),
        )
    # gloo's sockets work in the kernel's name: as much as that is nobody else's.
    others = max(0.0, others - 0.10)
    level = max(
        repeats,
        0.0 if len(kept) >= 2 else drift,
        others if others > OTHERS else 0.0,
        0.0 if len(kept) >= 2 else 1 - len(kept) / rounds,
    )
    told = (
        f"{rounds - len(kept)} of {rounds} rounds were disturbed, fixed work of "
        f"{best * 1e3:.1f} ms moved by {drift:.0%} from before to "
        f"after, two halves of the same measurements differ by {repeats:.0%}, other "
        f"processes took {others:.0%} of the cores' time"
    )
    return _Measured(points, overlap, interference, level, told)


def _memory(me: World, local: int) -> float:
    """Bytes of one device."""
    if me.device.type == "cuda":
        return float(torch.cuda.get_device_properties(me.device).total_memory)
    total = float(psutil.virtual_memory().total)
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            total = min(total, float(Path(name).read_text()))
    return total / max(1, local)


def resident() -> int:
    """Bytes of this process's memory, with the libraries that any training loads, and without what
    was freed.
    """
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # glibc keeps what was freed
    return int(psutil.Process().memory_info().rss)


def _base(me: World) -> float:
    """What a worker that has trained a little holds of its device's memory, beside tensors."""
    if me.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(me.device)
        return float(max(0, total - free - torch.cuda.memory_reserved(me.device)))
    if me.size > 1:
        warm(me)
    return float(resident())


def _groups(me: World, hosts: list[str]) -> dict[str, tuple[list[int], Any]]:
    """This rank's group inside its node, and over all: scope -> ranks and process group."""
    everyone = list(range(me.size))
    nodes = {host: [r for r in everyone if hosts[r] == host] for host in dict.fromkeys(hosts)}
    if len(nodes) == 1:
        return {"node": (everyone, None)}
    found: dict[str, tuple[list[int], Any]] = {}
    for host, ranks in nodes.items():  # every rank makes every group
        group = group_of("links", ranks)
        if host == hosts[me.rank] and all(len(each) > 1 for each in nodes.values()):
            found["node"] = (ranks, group)
    return {**found, "cluster": (everyone, None)}


def calibrate(
    me: World,
    *,
    quick: bool = False,
    accept_noise: bool = False,
    tell: Callable[[str], None] | None = None,
    sizes: Sequence[int] | None = None,
    rounds: int | None = None,
) -> Cluster:
    """Measure the links of this world. A collective: every rank calls it, and every rank gets the
    same answer.

    Args:
        quick: fewer sizes and rounds, some seconds in all.
        accept_noise: whether a disturbed measurement is returned, with ``noise`` in it, instead of
            refused.
        tell: called with what is being done.

    Raises:
        NoisyMachine: on every rank: other work disturbed it, also when it was tried again.
    """
    sizes = tuple(sizes or (_QUICK_SIZES if quick else _SIZES))
    rounds = rounds or (_QUICK_ROUNDS if quick else _ROUNDS)
    say = tell if tell is not None and me.is_main else (lambda _: None)
    hosts = [str(host) for host in gather_json(me, me.host)]
    per_node = max(hosts.count(h) for h in hosts)
    base = max(gather_json(me, _base(me)))
    links: dict[str, dict[str, LinkFit]] = {kind: {} for kind in COLLECTIVES}
    added: dict[str, Added] = {}
    level, told, hidden, slower = 0.0, [], 0.0, 1.0
    if me.size > 1:
        for scope, (ranks, process_group) in _groups(me, hosts).items():
            group = _Group(me, ranks, process_group, max(sizes))
            where = "inside a node" if scope == "node" else "across nodes"
            for attempt in range(1 if accept_noise else _ATTEMPTS):
                again = (
                    f", again as it was disturbed ({attempt + 1} of {_ATTEMPTS})" if attempt else ""
                )
                measured = _attempt(
                    group, sizes, rounds, say, f"{len(ranks)} workers {where}{again}"
                )
                worst = max(each[0] for each in gather_json(me, [measured.level]))
                if worst <= TOLERANCE:
                    break
            if worst > TOLERANCE and not accept_noise:
                raise NoisyMachine(
                    "the machine is too busy for its links to be measured: "
                    f"{measured.told}. Stop what else runs on it, and try again.",
                    worst,
                )
            level = max(level, worst)
            if worst > TOLERANCE:
                told.append(measured.told)
            # Nodes are equal by assumption: rank 0's own node speaks for all.
            for kind, points in measured.points.items():
                links[kind][scope] = fit_link(points, len(ranks))
            hidden, slower = measured.overlap, measured.interference
            if me.device.type == "cpu" and len(ranks) == me.size:
                added = added_by(
                    me,
                    {kind: fit_link(points, me.size) for kind, points in measured.points.items()},
                    quick,
                    say,
                )
    backend = dist.get_backend() if dist.is_initialized() else "none"
    when = time.strftime("%Y-%m-%d %H:%M")
    source = (
        f"measured {when} with {me.size} workers on {me.host}, torch {torch.__version__}, {backend}"
    )
    if me.size == 1:
        source += ": no links, as there was one worker"
    if told:
        source += f"; disturbed: {told[0]}"
    device = torch.cuda.get_device_name(me.device) if me.device.type == "cuda" else "cpu"
    found = Cluster(
        name=me.host if len(set(hosts)) == 1 else f"{len(set(hosts))} nodes with {me.host}",
        nodes=len(set(hosts)),
        devices_per_node=per_node,
        device=device,
        memory_bytes=_memory(me, per_node),
        links={kind: by for kind, by in links.items() if by},
        overlap=0.0
        if me.device.type == "cpu"
        else hidden,  # gloo's exchanges of sharded parameters block
        bucket_overlap=hidden if me.size > 1 else 1.0,
        interference=slower,
        base_bytes=base,
        source=source,
        noise=level,
        added=added,
    )
    return Cluster.from_dict(_from_main(me, found.to_dict()))


def _from_main(me: World, value: Any) -> Any:
    from ronde.world.consensus import broadcast_json

    return broadcast_json(me, value)


# --- A cluster without a file
# --------------------------------------------------------------------------------------


def _state_folder() -> Path:
    given = os.environ.get("RONDE_STATE")
    return (
        Path(given)
        if given
        else Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "ronde"
    )


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)


def has_cuda() -> bool:
    """Whether workers of this machine train on GPUs."""
    return os.environ.get("RONDE_DEVICE") != "cpu" and torch.cuda.is_available()


def default_cluster(
    workers: int,
    *,
    fresh: bool = False,
    tell: Callable[[str], None] | None = None,
    timeout: float = 120.0,
) -> Cluster:
    """This machine as a cluster of so many workers: measured once in some seconds, then kept by
    host, torch version and workers.

    More workers than it could start are extrapolated from as many as it can. Kept in
    ``$RONDE_STATE``, or in ``~/.local/state/ronde``.

    Args:
        workers: world size to plan for.
        fresh: whether to measure again.
        tell: called with what is being done.

    Raises:
        RondeError: the workers could not be started.
    """
    from ronde.world import RondeError

    cuda = has_cuda()
    most = torch.cuda.device_count() if cuda else max(2, min(8, usable_cores()))
    started = min(workers, most)
    host = socket.gethostname()
    kind = "cuda" if cuda else "cpu"
    file = (
        _state_folder()
        / f"cluster-{host}-{kind}-torch{torch.__version__}-{started}-method{_METHOD}.yaml"
    )
    if file.exists() and not fresh:
        with contextlib.suppress(Exception):
            return _widened(Cluster.load(file), workers)
    if tell is not None:
        tell(f"measuring the links of {started} workers on this machine, once")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(f".{os.getpid()}.writing")
    processes: list[subprocess.Popen[str]] = []
    try:
        for rank in range(started):
            variables = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": started,
                "LOCAL_WORLD_SIZE": started,
                "MASTER_PORT": port,
            }
            inherited = {
                k: v
                for k, v in os.environ.items()
                if k == "RONDE_DEVICE" or not k.startswith(_OTHERS)
            }
            environment = {
                **inherited,
                **{k: str(v) for k, v in variables.items()},
                "MASTER_ADDR": "127.0.0.1",
                "OMP_NUM_THREADS": str(threads_per_worker(started)),
                **openmp_waits(started, threads_per_worker(started)),
            }
            command = [
                sys.executable,
                "-m",
                "ronde.measure.bench_links",
                "--quick",
                "--accept-noise",
                "--output",
                str(temporary),
            ]
            processes.append(
                subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                    preexec_fn=_die_with_parent,
                )
            )
        limit = time.monotonic() + timeout
        while any(p.poll() is None for p in processes):
            failed = [p for p in processes if p.poll()]
            if failed or time.monotonic() > limit:
                said = (
                    failed[0].stderr.read() if failed and failed[0].stderr else ""
                ) or f"it took longer than {timeout:.0f} s"
                last = said.strip().splitlines()[-1] if said.strip() else "no error was told"
                raise RondeError(
                    f"the links of this machine could not be measured: {last}. Give a "
                    "cluster file: ronde bench cluster writes one."
                )
            time.sleep(0.05)
        found = Cluster.load(temporary)
        if found.noise <= TOLERANCE:
            temporary.replace(file)
        return _widened(found, workers)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stderr is not None:
                process.stderr.close()
        temporary.unlink(missing_ok=True)


def _widened(found: Cluster, workers: int) -> Cluster:
    """As many devices as are asked for, where that is more than could be measured."""
    if workers == found.devices_per_node:
        return found
    memory = (
        found.memory_bytes
        if found.device != "cpu"
        else found.memory_bytes * found.devices_per_node / workers
    )
    more = f"; {workers} workers by the ring's formula" if workers > found.devices_per_node else ""
    return replace(found, devices_per_node=workers, memory_bytes=memory, source=found.source + more)


# --- A worker
# --------------------------------------------------------------------------------------


def run_bench(arguments: Sequence[str] | None = None) -> None:
    """What each worker of ``ronde bench cluster`` runs; under srun, mpirun or torchrun it can be
    started directly.
    """
    parser = argparse.ArgumentParser(
        prog="python -m ronde.measure.bench_links", description="Measure the links between workers."
    )
    parser.add_argument("--output", type=Path, default=Path("cluster.yaml"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--accept-noise", action="store_true")
    given = parser.parse_args(arguments)
    from ronde.world.connect import connect

    me = connect()

    def tell(text: str) -> None:
        if os.environ.get("RONDE_LAUNCHER_PID"):
            sys.stdout.write(f"{MARK}{json.dumps({'bench': text})}\n")
            sys.stdout.flush()
        elif sys.stderr.isatty():
            print(text, file=sys.stderr)

    try:
        found = calibrate(me, quick=given.quick, accept_noise=given.accept_noise, tell=tell)
    except NoisyMachine as error:
        sys.exit(str(error))
    if me.is_main:
        found.save(given.output)
    if dist.is_initialized():
        dist.barrier()


if __name__ == "__main__":
    run_bench()
