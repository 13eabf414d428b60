"""Latency and bandwidth between every two hosts: ``python -m ronde.measure.pair_links``.

One worker a host. In each round of a tournament, every host has another partner, so that all pairs
are measured in as many rounds as there are hosts.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from ronde.watch import MARK
from ronde.world import World
from ronde.world.connect import connect
from ronde.world.consensus import gather_json

__all__ = ["measure_pairs", "rounds"]

_LARGE_BYTES = 8 << 20  # so that the latency is hardly a part of its time


def rounds(size: int) -> list[list[tuple[int, int]]]:
    """The rounds of a tournament: each pair once, nobody twice in a round (circle method).

    Example:
        >>> rounds(3)
        [[(1, 2)], [(0, 2)], [(0, 1)]]
    """
    places: list[int | None] = [*range(size)] + ([None] if size % 2 else [])
    tournament = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        round_ = [(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None]
        tournament.append(sorted(round_))
        places = [places[0], places[-1], *places[1:-1]]
    return sorted(tournament, reverse=True)


def _echo(first: bool, other: int, data: torch.Tensor, times: int, group: Any) -> list[float]:
    """Seconds of each way there and back."""
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        if first:
            dist.send(data, other, group)
            dist.recv(data, other, group)
        else:
            dist.recv(data, other, group)
            dist.send(data, other, group)
        if data.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds


def measure_pairs(me: World) -> list[dict[str, Any]]:
    """Every pair: ``a``, ``b``, ``backend``, ``latency`` of one way in seconds, ``bandwidth`` in
    bytes/s; over gloo, and over NCCL where the workers have GPUs. A collective.
    """
    pairs = _measured(me, "gloo", dist.new_group(backend="gloo"), torch.device("cpu"))
    if me.device.type == "cuda":
        pairs += _measured(me, "nccl", None, me.device)
    return sorted(pairs, key=lambda p: (p["a"], p["b"], p["backend"]))


def _measured(me: World, backend: str, group: Any, device: torch.device) -> list[dict[str, Any]]:
    small = torch.zeros(8, dtype=torch.uint8, device=device)
    large = torch.zeros(_LARGE_BYTES, dtype=torch.uint8, device=device)
    mine = []
    for number in rounds(me.size):
        for pair in number:
            if me.rank in pair:
                first, other = me.rank == pair[0], pair[me.rank == pair[0]]
                _echo(first, other, small, 3, group)  # connections are made by the first
                latency = statistics.median(_echo(first, other, small, 30, group)) / 2
                # The fastest: other traffic only makes a way longer.
                took = min(_echo(first, other, large, 3, group)) / 2
                if first:
                    bandwidth = _LARGE_BYTES / max(took - latency, 1e-9)
                    link = {"a": pair[0], "b": pair[1], "backend": backend, "latency": latency}
                    mine.append({**link, "bandwidth": bandwidth})
        dist.barrier(group)
    return [p for each in gather_json(me, mine) for p in each]


if __name__ == "__main__":
    here = connect(60.0)
    pairs = measure_pairs(here)
    if here.is_main:
        sys.stdout.write(MARK + json.dumps({"pairs": pairs}) + "\n")
        sys.stdout.flush()
