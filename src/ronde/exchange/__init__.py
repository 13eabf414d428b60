"""How gradients are averaged over the workers: a reducer is DDP's communication hook behind one
small protocol.

Offers :func:`build_reducer`, the registry :data:`KINDS`, :class:`Exchange`, which runs a
:class:`Reducer` under DDP, :func:`choose_reducer`, which measures what ``auto`` takes, and
:class:`NoiseScale`. A new reducer is a class and a line in :mod:`ronde.plan.reducers` and in the
registry.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from ronde.exchange.auto import choose_reducer
from ronde.exchange.collective import Hierarchical, OwnServers, Ring
from ronde.exchange.compressed import Int8, LowRank, RandomK, SixteenBits, TopK
from ronde.exchange.local_steps import DiLoCo, LocalSteps
from ronde.exchange.noise_scale import NoiseScale
from ronde.exchange.reducer import Bucket, Exchange, Members, Reducer
from ronde.plan.reducers import ReducerChoice

__all__ = [
    "KINDS",
    "Bucket",
    "Exchange",
    "Members",
    "NoiseScale",
    "Reducer",
    "build_reducer",
    "choose_reducer",
]


def _servers(choice: ReducerChoice, members: Members) -> Reducer:
    if os.environ.get("RONDE_SERVERS"):
        from ronde.exchange.servers import Servers

        return Servers(choice, members)
    if members.device.type != "cpu" or len(set(members.nodes)) == 1:
        return OwnServers(choice, members)  # inside a machine, threads in Python are the wall
    from ronde.exchange.worker_servers import WorkerServers

    return WorkerServers(choice, members)


KINDS: dict[str, Callable[[ReducerChoice, Members], Reducer]] = {
    "ring": Ring,
    "hierarchical": Hierarchical,
    "servers": _servers,
    "fp16": SixteenBits,
    "bf16": SixteenBits,
    "int8": Int8,
    "topk": TopK,
    "randomk": RandomK,
    "powersgd": LowRank,
    "local": LocalSteps,
    "post-local": LocalSteps,
    "diloco": DiLoCo,
}
"""The name of a reducer -> what builds it. A collective."""


def build_reducer(choice: ReducerChoice, members: Members) -> Reducer:
    """Build a reducer on this worker. A collective."""
    return KINDS[choice.name](choice, members)
