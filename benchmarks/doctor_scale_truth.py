"""Is the gap at 4, 8 and 16 devices what `ronde.predict.input_capacity` says from runs with 1 and
2?

Every device is a process of its own that sleeps for a step, as MLPerf Storage's accelerators do,
and waits for all others after it. Its loading threads fill a bounded queue from what the case says
is scarce: a store that all processes share (throttled in shared memory), the cores of a node (four
simulated ones), loaders that are slow by themselves, or several of these. Latency and service times
waver. Nothing
of ronde runs in the devices: only the prediction is ronde's. A host that wakes the devices late is
noticed, and they are run again.

What the prediction may see: the runs at 1 and 2 devices (synthetic, real, the loaders alone), a
sweep over concurrent readers of the store, seconds of core per sample, and the number of cores.
It is written down before 4, 8 and 16 are run.

    python benchmarks/doctor_scale_truth.py            # about 15 minutes, nearly all of it asleep
    python benchmarks/doctor_scale_truth.py --quick    # 3 cases
    python benchmarks/doctor_scale_truth.py --doctor   # `ronde doctor` itself, some 15 minutes

``--doctor`` asks the command: it sees one worker, and two, of a script whose loaders wait for a
lock of their own process, or compute in threads of a library. Plain torch loops with 4 and 8
workers are the truth.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import itertools
import json
import math
import multiprocessing as mp
import os
import queue
import random
import statistics
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from doctor_job import Spec
from doctor_truth import diagnose, plain
from ronde.predict.input_capacity import Capacities, Measured, StageCapacity, from_runs, predict

STEP = 0.1  # seconds a step of a device
BATCH = 20  # samples a step
LATE = 0.1  # of a step, in the middle: a host that wakes devices so late is not measured
TRIES = 4
CORES = 4  # of a node
RATE = BATCH / STEP  # samples a second of one device


@dataclass(frozen=True)
class Case:
    """Rates in multiples of what one device takes, so that a wall stands at that many devices.

    Attributes:
        store: of the storage that all share; inf is none.
        cores: devices that a node's cores can feed; inf is none.
        loaders: of each device's own loaders.
        waver: coefficient of variation of a batch's time in the scarce thing.
        latency: of one read, in steps.
        threads: loading threads of a device.
        ahead: batches in its queue.
        per_node: devices of a node: cores grow with nodes, the store does not. 0: all on one node.
        serial: share of a step that a device spends on a batch before it starts (never hidden).
    """

    name: str
    store: float = math.inf
    cores: float = math.inf
    loaders: float = math.inf
    waver: float = 0.3
    latency: float = 0.1
    threads: int = 2
    ahead: int = 4
    per_node: int = 0
    serial: float = 0.0


CASES = [
    Case("store, wall at 6", store=6),
    Case("store, wall at 8: on the knee", store=8),
    Case("store, wall at 12", store=12),
    Case("store, wall at 3", store=3, ahead=2),
    Case("store, wall at 40: never met", store=40),
    Case("store, wall at 5, wavering much", store=5, waver=1.0),
    Case("store, wall at 10, 10 % serial", store=10, serial=0.1),
    Case("store, wall at 6, slow to answer", store=6, latency=1.2, threads=4),
    Case("cores, wall at 4: on the knee", cores=4),
    Case("cores, wall at 6", cores=6),
    Case("cores, wall at 10", cores=10, waver=0.6),
    Case("cores, wall at 2.6", cores=2.6),
    Case("cores 5 a node of 4, store 11", cores=5, store=11, per_node=4),
    Case("cores 3 a node of 4", cores=3, per_node=4),
    Case("own loaders, 25 % too slow", loaders=0.75),
    Case("own loaders, as fast as the step: on the knee", loaders=1.0, waver=0.4),
    Case("own loaders 25 % too slow, store 6", loaders=0.75, store=6),
]


def until(end: float) -> None:
    """Sleep until then."""
    while (left := end - time.monotonic()) > 0:
        time.sleep(left)


class Servers:
    """What processes share: so many servers, each busy until a time that is written in shared
    memory. First come, first served.

    Times are reckoned, not read from a clock after a sleep: a busy host wakes sleepers late, and
    that is not what is asked about.
    """

    def __init__(self, context, count: int) -> None:
        self.free = context.Array("d", count)

    def serve(self, now: float, seconds: float) -> float:
        """When a request that comes ``now`` and takes ``seconds`` will be done."""
        with self.free.get_lock():
            i = min(range(len(self.free)), key=self.free.__getitem__)
            end = max(self.free[i], now) + seconds
            self.free[i] = end
        return end


def lognormal(rng: random.Random, cv: float) -> float:
    if cv <= 0:
        return 1.0
    s2 = math.log1p(cv * cv)
    return rng.lognormvariate(-s2 / 2, math.sqrt(s2))


class Device:
    """One device: threads that load, a bounded queue, a step that takes its time."""

    def __init__(
        self, rank: int, case: Case, store: Servers, cores: Servers | None, core_seconds: float
    ) -> None:
        self.case, self.store, self.cores, self.core_seconds = case, store, cores, core_seconds
        self.queue: queue.Queue[float] = queue.Queue(max(1, case.ahead - case.threads))
        self.on_cores = 0.0
        self.made = 0
        self.lock = threading.Lock()
        self.free = 0.0  # of the loaders' own limit
        self.threads = [
            threading.Thread(
                target=self._load, args=(time.time_ns() + rank * 100 + i,), daemon=True
            )
            for i in range(case.threads)
        ]

    def _load(self, seed: int) -> None:
        rng, case = random.Random(seed), self.case
        now = time.monotonic()
        while True:
            now += case.latency * STEP * lognormal(rng, 0.5)
            until(now)
            if math.isfinite(case.store):
                now = self.store.serve(
                    now, BATCH * lognormal(rng, case.waver) / (case.store * RATE)
                )
                until(now)
            if self.core_seconds:
                work = self.core_seconds * BATCH * lognormal(rng, case.waver)
                now = self.cores.serve(now, work)
                until(now)
                with self.lock:
                    self.on_cores += work
            if math.isfinite(case.loaders):
                with self.lock:
                    now = self.free = max(self.free, now) + STEP / case.loaders * lognormal(
                        rng, case.waver
                    )
                until(now)
            with self.lock:
                self.made += 1
            try:
                self.queue.put_nowait(now)
            except queue.Full:
                self.queue.put(now)
                now = time.monotonic()


def device(rank, case, mode, seconds, store, cores, core_seconds, barrier, ends, results) -> None:
    """A process. ``mode``: synthetic, real, or loading (nothing waits for anything)."""
    one = Device(rank, case, store, cores, core_seconds)
    clock = time.monotonic() + 0.1
    if mode != "synthetic":
        for thread in one.threads:
            thread.start()

    waver = 0.0
    lags: list[float] = []

    def step() -> None:
        # The device's clock: a step begins when its batch is there and all have ended the one
        # before, and takes its time.
        nonlocal clock
        start = clock
        if mode == "real":
            start = max(clock, one.queue.get()) + STEP * case.serial
        ends[rank] = start + STEP
        until(ends[rank])
        lags.append(time.monotonic() - ends[rank])
        barrier.wait()
        clock = max(ends)
        barrier.wait()

    if mode == "loading":
        for _ in range(2 * case.ahead):
            one.queue.get()
        barrier.wait()
    else:
        for _ in range(3 * case.ahead + 2):
            step()
    with one.lock:
        before, made = one.on_cores, one.made
    if mode == "loading":
        start = now = time.monotonic()
        done, ready = 0, []
        while now - start < seconds:
            ready.append(one.queue.get())
            done += 1
            now = time.monotonic()
        ready.sort()
        between = [b - a for a, b in itertools.pairwise(ready)]
        waver = statistics.stdev(between) / statistics.mean(between)
        rate = done * BATCH / (now - start)
    else:
        steps = max(20, round(seconds / STEP))
        start = clock
        for _ in range(steps):
            step()
        rate = steps * BATCH / (clock - start)
    with one.lock:
        each = (one.on_cores - before) / max(1, one.made - made) / BATCH
    results.put((rank, rate, each, waver, statistics.median(lags) / STEP if lags else 0.0))
    results.close()
    results.join_thread()
    os._exit(0)


def run(context, case: Case, devices: int, mode: str, seconds: float) -> tuple[float, float, float]:
    """As :func:`run_once`, again where the host woke the devices so late that they were not what
    they stand for.
    """
    for _ in range(TRIES):
        *found, lag = run_once(context, case, devices, mode, seconds)
        if lag < LATE:
            break
    else:
        print(
            f"   {case.name}: {devices} devices were woken {100 * lag:.0f} % of a step "
            f"late in {TRIES} tries: this host is too busy",
            flush=True,
        )
    return found[0], found[1], found[2]


def run_once(
    context, case: Case, devices: int, mode: str, seconds: float
) -> tuple[float, float, float, float]:
    """Samples a second of all devices, seconds of core for each sample, how much the time between
    two batches wavers, how late steps ended.
    """
    store, ends = Servers(context, 1), context.Array("d", devices, lock=False)
    nodes = 1 if not case.per_node else -(-devices // case.per_node)
    core_seconds = CORES / (case.cores * RATE) if math.isfinite(case.cores) else 0.0
    pools = [Servers(context, CORES) for _ in range(nodes)] if core_seconds else [None] * nodes
    barrier = context.Barrier(devices)
    results = context.Queue()
    processes = [
        context.Process(
            target=device,
            args=(
                r,
                case,
                mode,
                seconds,
                store,
                pools[r * nodes // devices],
                core_seconds,
                barrier,
                ends,
                results,
            ),
            daemon=True,
        )
        for r in range(devices)
    ]
    for p in processes:
        p.start()
    try:
        found = [results.get(timeout=60 + 5 * seconds) for _ in processes]
    finally:
        for p in processes:
            p.join(5)
            if p.is_alive():
                p.kill()
                p.join()
    rates = [rate for _, rate, *_ in found]
    each, waver = (statistics.mean(f[i] for f in found) for i in (2, 3))
    return (
        (sum(rates) if mode == "loading" else min(rates) * devices),
        each,
        waver,
        max(f[4] for f in found),
    )


def sweep(case: Case, context, seconds: float) -> list[tuple[int, float]]:
    """Samples a second that the store gives to ever more readers at once. The cache is passed
    by.
    """
    if math.isinf(case.store):
        return []
    found: list[tuple[int, float]] = []
    readers = 1
    while readers <= 256:
        store = Servers(context, 1)
        done = [0] * readers
        begin = time.monotonic() + 0.2

        def read(i: int, store=store, done=done, begin=begin) -> None:
            rng = random.Random(time.time_ns() + i)
            now = begin - 0.2
            while now < begin + seconds:
                now = store.serve(
                    now + case.latency * STEP * lognormal(rng, 0.5),
                    4 * lognormal(rng, case.waver) / (case.store * RATE),
                )
                until(now)
                done[i] += 4 * (begin <= now < begin + seconds)

        threads = [threading.Thread(target=read, args=(i,)) for i in range(readers)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        found.append((readers, sum(done) / seconds))
        if len(found) > 2 and found[-1][1] < 1.1 * found[-2][1]:
            break
        readers *= 2
    return found


def judge(case: Case, seconds: float) -> dict:
    """One case: measured at 1 and 2, predicted, then measured at 4, 8 and 16."""
    context = mp.get_context("fork")
    runs = []
    for n in (1, 2):
        synthetic, *_ = run(context, case, n, "synthetic", 2.0)
        real, each, _ = run(context, case, n, "real", seconds)
        loading, *_ = run(context, case, n, "loading", seconds)
        runs.append(
            Measured(
                n, synthetic, real, loading, cpu_seconds=each if math.isfinite(case.cores) else 0.0
            )
        )
    swept = sweep(case, context, seconds / 4)
    rows = []
    for n in (4, 8, 16):
        synthetic, *_ = run(context, case, n, "synthetic", 2.0)
        real, *_ = run(context, case, n, "real", seconds)
        rows.append({"devices": n, "measured": 1 - real / synthetic})
    kept = {"case": case.name, "runs": [asdict(r) for r in runs], "sweep": swept, "rows": rows}
    return predicted(case, kept)


def predicted(case: Case, kept: dict) -> dict:
    """What was measured, with what its first two sizes say of the others."""
    runs = [Measured(**r) for r in kept["runs"]]
    known = math.isfinite(case.cores)
    found = from_runs(
        runs,
        stages=(StageCapacity("decode", runs[0].cpu_seconds),) if known else (),
        sweep=kept["sweep"],
        cores_per_node=float(CORES) if known else math.inf,
        devices_per_node=case.per_node or 64,
        like=Capacities(RATE),
    )
    rows = []
    for row in kept["rows"]:
        n, gap = row["devices"], row["measured"]
        p = predict(found, n, None if case.per_node else 1)
        nodes = p.nodes
        # On the knee: what is scarce would do for 0.85 to 1.15 of the devices.
        ratios = [case.store / n, case.cores * nodes / n, case.loaders]
        knee = any(0.85 <= r <= 1.15 for r in ratios) and min(ratios) > 0.85
        error = 100 * (p.gap - gap)
        limit = 10 if knee else 5
        rows.append(
            {
                "devices": n,
                "predicted": p.gap,
                "low": p.low,
                "high": p.high,
                "measured": gap,
                "error_points": error,
                "knee": knee,
                "wall": p.wall,
                "right": abs(error) <= limit,
                "in_interval": p.low - 0.02 <= gap <= p.high + 0.02,
            }
        )
    return {**kept, "rows": rows}


# Devices that take 120 ms for a step: with 30 ms, eight workers and their loaders keep two
# cores busy with what a step costs besides, and that is then what the plain loops measure.
_real = functools.partial(Spec, kind="real", step_ms=120.0)
DOCTOR = {
    # a lock of each worker that is faster than its device: more workers bring their own
    "own lock, fast enough": _real("own_lock", ms=5.2),
    "own lock, too slow": _real("own_lock", ms=14),
    "own waits of each loader": _real("wait", ms=24),
    "threads of a library": _real("pool", ms=4.8),
}


def ask_doctor(only: str, seconds: float, sizes: tuple[int, ...] = (4, 8)) -> None:
    """Gaps that `ronde doctor` predicts from 1 and from 2 workers, beside plain loops."""
    with tempfile.TemporaryDirectory(prefix="doctor-scale-") as folder:
        for name, spec in DOCTOR.items():
            if only not in name:
                continue
            print(name, flush=True)
            real = {}
            for n in sizes:
                rates = plain(replace(spec, workers=n), folder)
                real[n] = 1 - rates["real"] / rates["synthetic"]
            for workers in (1, 2):
                values = diagnose(replace(spec, workers=workers), folder, seconds, to=max(sizes))
                rows = {r["devices"]: r for r in values.get("scale", [])}
                for n in [n for n in sizes if n in rows]:
                    gap, shared = rows[n]["gap"], rows[n]["shared_gap"]
                    unknown = shared is not None
                    right = abs(gap - real[n]) <= 0.1 or (unknown and gap <= real[n] <= shared)
                    told = f"{100 * gap:.0f} %" + (f" or {100 * shared:.0f} %" if unknown else "")
                    print(
                        f"   {'ok ' if right else 'OFF'} {n} from {workers}: predicted {told}, "
                        f"measured {100 * real[n]:.0f} %",
                        flush=True,
                    )
                print(f"       walls {values.get('walls', values.get('error'))}", flush=True)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--quick", action="store_true")
    arguments.add_argument("--doctor", action="store_true", help="ask ronde doctor itself")
    arguments.add_argument("--seconds", type=float, default=8.0, help="of one measurement")
    arguments.add_argument(
        "--jobs", type=int, default=3, help="cases at a time: nearly all of it is sleep"
    )
    arguments.add_argument("--only", default="", help="cases whose name contains this")
    arguments.add_argument("--json", type=Path)
    arguments.add_argument("--again", type=Path, help="predict the runs of such a file again")
    asked = arguments.parse_args()
    if asked.doctor:
        ask_doctor(asked.only, 2 * asked.seconds)
        return
    context = mp.get_context("fork")
    cases = [c for c in CASES if asked.only in c.name]
    if asked.quick:
        cases = (
            cases[:1]
            + [c for c in cases if c.name.startswith("cores")][:1]
            + [c for c in cases if c.name.startswith("own")][:1]
        )
    all_rows, kept = [], []
    pool = concurrent.futures.ProcessPoolExecutor(asked.jobs, mp_context=context)
    if asked.again:
        before = {k["case"]: k for k in json.loads(asked.again.read_text())}
        made = [(c, pool.submit(predicted, c, before[c.name])) for c in cases]
    else:
        made = [(c, pool.submit(judge, c, asked.seconds)) for c in cases]
    for case, answer in made:
        found = answer.result()
        kept.append(found)
        all_rows += found["rows"]
        one, two = found["runs"]
        seen = "  ".join(
            f"{r['devices']}: {100 * (1 - r['real'] / r['synthetic']):.0f} %" for r in (one, two)
        )
        print(f"{case.name}   (measured {seen})", flush=True)
        for r in found["rows"]:
            sign = "ok " if r["right"] else "OFF"
            knee = " knee" if r["knee"] else ""
            print(
                f"   {sign} {r['devices']:>2} devices: predicted "
                f"{100 * r['predicted']:5.1f} % ({100 * r['low']:.0f} to "
                f"{100 * r['high']:.0f}), "
                f"measured {100 * r['measured']:5.1f} %, error {r['error_points']:+5.1f}{knee}",
                flush=True,
            )
    pool.shutdown()
    off = [r for r in all_rows if not r["right"]]
    away = [abs(r["error_points"]) for r in all_rows if not r["knee"]]
    at = [abs(r["error_points"]) for r in all_rows if r["knee"]]
    print(
        f"\n{len(all_rows) - len(off)} of {len(all_rows)} within the bar; away from the "
        f"knee mean {statistics.mean(away):.1f}, worst {max(away):.1f} "
        f"points (n = {len(away)}, bar 5)"
        + (
            f"; on it mean {statistics.mean(at):.1f}, worst {max(at):.1f} (n = {len(at)}, bar 10)"
            if at
            else ""
        )
        + f"; inside the interval: {sum(r['in_interval'] for r in all_rows)}"
    )
    if asked.json:
        asked.json.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
