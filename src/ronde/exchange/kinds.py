"""The registry of reducers: a new one is a class, a line here, and one in
:mod:`ronde.plan.reducers`.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from ronde.exchange.collective import Hierarchical, OwnServers, Ring
from ronde.exchange.compressed import LowRank, SixteenBits, TopK
from ronde.exchange.local_steps import DiLoCo, LocalSteps
from ronde.exchange.reducer import Members, Reducer
from ronde.plan.reducers import ReducerChoice

__all__ = ["KINDS", "build_reducer"]


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
    "topk": TopK,
    "powersgd": LowRank,
    "local": LocalSteps,
    "post-local": LocalSteps,
    "diloco": DiLoCo,
}
"""The name of a reducer -> what builds it. A collective."""


def build_reducer(choice: ReducerChoice, members: Members) -> Reducer:
    """Build a reducer on this worker. A collective."""
    return KINDS[choice.name](choice, members)
