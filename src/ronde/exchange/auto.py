"""``reducer=auto``: measure the exact reducers on buckets of the model's sizes; keep the answer."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ronde.exchange.reducer import Exchange, Members, Reducer
from ronde.plan.reducers import ReducerChoice, parse_reducer
from ronde.world import World
from ronde.world.consensus import broadcast_json, gather_json
from ronde.world.paths import state_folder
from ronde.world.whole_file import write_whole

__all__ = ["bucket_sizes", "choose_reducer", "exact_candidates", "time_buckets"]

_ROUNDS, _MOST_ROUNDS = 3, 25
_SECONDS = 1.0  # in which small sizes, whose times vary more, are measured in more rounds
_MOST_BYTES = 100 << 20  # of gradients that a measurement exchanges
_WORTH_FACTOR = 1.03  # how much faster than the plain collective another reducer must be
_METHOD = 2  # raised when the measurement changes

Build = Callable[[ReducerChoice, Members], Reducer]


def exact_candidates(members: Members) -> list[str]:
    """The exact reducers that can differ from the plain collective here."""
    sizes = {len(members.on_node(node)) for node in set(members.nodes)}
    nodes = len(set(members.nodes))
    names = ["ring", "servers"]
    if nodes > 1 and len(sizes) == 1 and max(sizes) > 1:
        names.append("hierarchical")
    return names


def time_buckets(exchange: Exchange, sizes: Sequence[int], members: Members) -> float:
    """Seconds that this worker takes to average buckets of these bytes, all in flight at once."""
    flats = [torch.ones(max(1, n // 4), device=members.device) for n in sizes]
    dist.barrier()
    start = time.perf_counter()
    for future in [exchange.average(flat, i) for i, flat in enumerate(flats)]:
        future.wait()
    if members.device.type == "cuda":
        torch.cuda.synchronize(members.device)
    exchange.check()
    return time.perf_counter() - start


def bucket_sizes(total: int, bucket_mib: float) -> list[int]:
    """The sizes of the buckets of a gradient, as many as are worth a measurement."""
    most = int(bucket_mib * 2**20)
    total = min(total, max(_MOST_BYTES, most))
    return [most] * (total // most) + ([total % most] if total % most >= 4 else [])


def _state_file(members: Members, total: int) -> Path:
    backend = dist.get_backend()
    servers = len(os.environ.get("RONDE_SERVERS", "").split())
    facts = [_METHOD, members.hosts, members.nodes, str(members.device.type), backend, servers]
    key = hashlib.sha256(repr([*facts, total, torch.__version__]).encode()).hexdigest()[:16]
    return state_folder() / f"exchange-{key}.json"


def choose_reducer(me: World, members: Members, total_bytes: int, build: Build) -> tuple[str, str]:
    """Choose the fastest exact reducer for a model. A collective.

    Args:
        total_bytes: bytes of all gradients.
        build: makes a reducer.

    Returns:
        tuple[str, str]: its name, and a sentence that says why.
    """
    file = _state_file(members, total_bytes)
    kept: Any = None
    if me.is_main:
        with contextlib.suppress(OSError, ValueError):
            kept = json.loads(file.read_text())
    kept = broadcast_json(me, kept)
    fresh = not (isinstance(kept, dict) and set(kept) == set(exact_candidates(members)))
    if fresh:
        kept = _measure(me, members, total_bytes, build)
        if me.is_main:
            with contextlib.suppress(OSError):  # a measurement that is not kept is made again
                file.parent.mkdir(parents=True, exist_ok=True)
                write_whole(file, json.dumps(kept))
    return _decide(kept, total_bytes, "" if fresh else f", measured before ({file})")


def _measure(me: World, members: Members, total: int, build: Build) -> dict[str, float]:
    names = exact_candidates(members)
    exchanges = {name: Exchange(build(parse_reducer(name), members)) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    rounds, spent = -1, 0.0  # the first warms up
    while rounds < _ROUNDS or (rounds < _MOST_ROUNDS and spent < _SECONDS):
        for name, exchange in exchanges.items():  # in turns, so that drift meets all
            sizes = bucket_sizes(total, exchange.reducer.bucket_mib)
            times[name].append(max(gather_json(me, time_buckets(exchange, sizes, members))))
        spent += sum(values[-1] for values in times.values())
        rounds += 1
    for exchange in exchanges.values():
        exchange.reducer.close()
    return {name: float(np.median(values[1:])) for name, values in times.items()}


def _decide(seconds: dict[str, float], total: int, source: str) -> tuple[str, str]:
    ring = seconds["ring"]
    best = min(seconds, key=lambda name: seconds[name])
    shown = f"{total / 2**20:.3g} MiB of gradients"
    if best == "ring" or ring < seconds[best] * _WORTH_FACTOR:
        others = ", ".join(f"{n} {t * 1e3:.3g}" for n, t in seconds.items() if n != "ring")
        why = f"ring: nothing is faster for {shown} ({ring * 1e3:.3g} ms; {others} ms)"
        return "ring", f"reducer auto: {why}{source}"
    return best, (
        f"reducer auto: {best} averages {shown} in {seconds[best] * 1e3:.3g} ms, ring in "
        f"{ring * 1e3:.3g} ms{source}"
    )
