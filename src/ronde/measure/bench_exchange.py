"""Benchmark the reducers between workers: latency and bus bandwidth over sizes.

``ronde bench exchange`` starts workers that run ``python -m ronde.measure.bench_exchange``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ronde.exchange import Exchange, Members, build_reducer
from ronde.measure.bench_links import fit_link
from ronde.plan import REDUCERS, parse_reducer
from ronde.watch import MARK
from ronde.world import World
from ronde.world.consensus import gather_json

__all__ = ["default_reducers", "measure_reducers", "parse_sizes"]


def default_reducers() -> list[str]:
    """The reducers that exchange in every step."""
    return [name for name, kind in REDUCERS.items() if not kind.local and name != "auto"]


def parse_sizes(text: str) -> list[int]:
    """Read ``4KiB,1MiB,16MiB``, or a range ``4KiB-256MiB`` in steps of four.

    Raises:
        ArgumentError: a size that cannot be read.

    Example:
        >>> parse_sizes("4KiB-64KiB"), parse_sizes("1MiB")
        ([4096, 16384, 65536], [1048576])
    """
    from ronde.world import ArgumentError
    from ronde.world.units import parse_bytes

    def size(word: str) -> int:
        count = parse_bytes(word)
        if count is None or not 4 <= count <= 4 << 30:
            raise ArgumentError(f"--sizes {text}: {word!r} is no size from 4 bytes to 4 GiB.")
        return int(count) // 4 * 4

    sizes: list[int] = []
    for part in text.split(","):
        low, dash, high = part.partition("-")
        now, last = size(low), size(high if dash else low)
        while now <= last:
            sizes.append(now)
            now *= 4
    return sorted(set(sizes))


def measure_reducers(
    me: World, names: Sequence[str], sizes: Sequence[int], in_flight: int = 1
) -> dict[str, Any]:
    """Time reducers in turns. A collective: every rank gets the same answer.

    Args:
        in_flight: buckets of up to 16 MiB that are averaged at once, as in a training; fewer if
            they are larger. Times are of one of them.

    Returns:
        dict: ``workers``, ``hosts``, ``rows`` of reducer, bytes, seconds, and bus bandwidth, and
        ``fits``, the line through each reducer's times.
    """
    members = Members.of(me)
    rows: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    for size in sizes:
        exchanges: dict[str, Exchange] = {}
        for name in names:
            try:
                exchanges[name] = Exchange(build_reducer(parse_reducer(name), members))
            except Exception as error:  # the same on all ranks: hierarchical on uneven nodes
                skipped[name] = str(error)
        at_once = min(in_flight, max(1, in_flight * (16 << 20) // size))
        flats = [torch.ones(size // 4, device=me.device) for _ in range(at_once)]
        times: dict[str, list[float]] = {name: [] for name in exchanges}
        repeats = 1
        for turn in range(10):  # the first is not counted
            for name, exchange in exchanges.items():
                seconds = _seconds(exchange, flats, repeats)
                if turn:
                    times[name].append(seconds)
            slowest = max(gather_json(me, max((t[-1] for t in times.values() if t), default=0.0)))
            if not turn:
                # small ones are over before a clock can tell
                repeats = 8 if size < 512 << 10 else 1
            elif slowest * repeats * turn > 1.0:  # seconds of a case, about
                break
        for name, values in times.items():
            seconds = max(gather_json(me, statistics.median(values)))
            bus = 2 * (me.size - 1) / me.size * size / seconds
            rows.append(
                {"reducer": name, "bytes": size, "seconds": seconds, "bus_bytes_per_second": bus}
            )
        for exchange in exchanges.values():
            exchange.reducer.close()
    fits = {}
    for name in dict.fromkeys(row["reducer"] for row in rows):
        points = [(float(r["bytes"]), r["seconds"]) for r in rows if r["reducer"] == name]
        if len(points) > 1:
            fit = fit_link(points, me.size)
            fits[name] = {"alpha": fit.alpha, "beta": fit.beta, "residual": fit.residual}
    return {
        "workers": me.size,
        "hosts": list(dict.fromkeys(members.hosts)),
        "backend": dist.get_backend(),
        "rows": rows,
        "fits": fits,
        "skipped": skipped,
    }


def _seconds(exchange: Exchange, flats: Sequence[torch.Tensor], times: int) -> float:
    dist.barrier()
    start = time.perf_counter()
    for _ in range(times):
        for future in [exchange.average(flat, lane) for lane, flat in enumerate(flats)]:
            future.wait()
    if flats[0].is_cuda:
        torch.cuda.synchronize(flats[0].device)
    exchange.check()
    return (time.perf_counter() - start) / times / len(flats)


def run_exchange_bench(arguments: Sequence[str] | None = None) -> None:
    """Run one worker of ``ronde bench exchange``."""
    parser = argparse.ArgumentParser(prog="python -m ronde.measure.bench_exchange")
    parser.add_argument("--reducers", default=",".join(default_reducers()))
    parser.add_argument("--sizes", default="4KiB-256MiB")
    parser.add_argument("--in-flight", type=int, default=1, help="buckets that go at once")
    parser.add_argument("--output", help="file for the answer as JSON; rank 0 writes")
    options = parser.parse_args(arguments)
    from ronde.world.connect import connect

    me = connect()
    names, sizes = options.reducers.split(","), parse_sizes(options.sizes)
    answer = measure_reducers(me, names, sizes, options.in_flight)
    if me.is_main and options.output:
        with open(options.output, "w") as file:
            json.dump(answer, file)
    elif me.is_main and os.environ.get("RONDE_LAUNCHER_PID"):
        print(MARK + json.dumps({"exchange": answer}), flush=True)
    dist.barrier()


if __name__ == "__main__":
    run_exchange_bench()
