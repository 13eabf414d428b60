"""What a plan's reducer costs: bytes and steps relative to the backend's all-reduce."""

from __future__ import annotations

from dataclasses import replace

from ronde.plan import parse_reducer
from ronde.plan.reducers import ReducerChoice
from ronde.predict.cluster import Cluster
from ronde.predict.collectives import CollectiveCost, Group, collective

__all__ = ["reducer_cost"]

_WIDE = 1024  # rows and columns of a typical matrix, for PowerSGD


def reducer_cost(text: str, ring: CollectiveCost, cluster: Cluster, group: Group) -> CollectiveCost:
    """Seconds to average gradients of so many bytes over ``group``, per step.

    As measured, if the cluster has it for so many workers; by the formulas of ``docs/reducers.md``
    otherwise. With N workers, n nodes, and g = N/n in each, the ring
    takes 2(N−1) steps and sends 2(N−1)/N of the bytes.

    Args:
        text: the plan's reducer.
        ring: the backend's all-reduce over the same group.

    Example:
        >>> one = CollectiveCost(0.001, 1e-9)
        >>> four = Group(4, "node", 4, 1)
        >>> reducer_cost("bf16", one, Cluster(devices_per_node=4), four).seconds_per_byte
        5e-10
    """
    choice = parse_reducer(text)
    if group.ranks <= 1 or choice.name == "ring":
        return ring
    measured = cluster.reducers.get(str(choice))
    if measured is not None and measured.ranks == group.ranks:
        return CollectiveCost(measured.alpha, 1 / measured.beta, measured.assumed)
    if choice.name == "hierarchical":
        return _hierarchical(ring, cluster, group)
    own = replace(ring, alpha=ring.alpha / (group.ranks - 1))  # 2 steps in place of 2(N−1)
    if choice.name == "servers":
        return own
    if choice.name == "auto":
        costs = (ring, own, _hierarchical(ring, cluster, group))
        return min(costs, key=lambda cost: cost(25 << 20))
    messages, share = _lossy(choice, group.ranks)
    return replace(
        ring,
        alpha=ring.alpha * messages,
        seconds_per_byte=ring.seconds_per_byte * share,
        assumed=True,
    )


def _hierarchical(ring: CollectiveCost, cluster: Cluster, group: Group) -> CollectiveCost:
    inside = group.per_node
    if group.scope == "node" or inside <= 1:
        return ring
    nodes = -(-group.ranks // inside)
    node = collective(cluster, "all_reduce", Group(inside, "node", inside, 1))
    rail = collective(cluster, "all_reduce", Group(nodes, "cluster", 1, inside * group.sisters))
    return CollectiveCost(
        node.alpha + rail.alpha,
        node.seconds_per_byte + rail.seconds_per_byte / inside,
        node.assumed or rail.assumed,
    )


def _lossy(choice: ReducerChoice, workers: int) -> tuple[float, float]:
    """Messages and bytes relative to the ring's, for gradients in float32."""
    first = choice.values[0] if choice.values else 0.0
    two_steps = 1 / max(1, workers - 1)
    if choice.kind.local:
        return 1 / first, 1 / first
    return {
        "fp16": (two_steps, 1 / 2),
        "bf16": (two_steps, 1 / 2),
        "topk": (0.5, 1.5 * workers * first),  # value and place, gathered from all
        "powersgd": (2.0, min(1.0, 2 * first / _WIDE)),
    }[choice.name]
