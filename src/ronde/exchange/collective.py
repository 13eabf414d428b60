"""Exact reducers of collectives: the backend's all-reduce, one in two levels, and one by shards."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ronde.exchange.reducer import (
    SHARD_BYTES,
    Bucket,
    Members,
    Reducer,
    gather_rows,
    mean_into,
    scatter_rows,
    wide,
)
from ronde.plan.reducers import ReducerChoice
from ronde.world import PlanError
from ronde.world.meshes import group_of

__all__ = ["Hierarchical", "OwnServers", "Ring"]


class Ring(Reducer):
    """The backend's own all-reduce: 2(N−1) steps, 2(N−1)/N of the gradient sent by each worker."""

    def __init__(self, choice: ReducerChoice, members: Members) -> None:
        super().__init__(choice, members)
        self.bucket_mib = choice.values[0]

    def average(self, bucket: Bucket) -> None:
        """See :meth:`Reducer.average`."""
        mean_into(bucket.flat, bucket.where.groups["all"], self.members.size)


class Hierarchical(Reducer):
    """Reduce inside the node, then across nodes between workers of equal local rank, then gather
    inside the node. Each worker sends (1/g) · 2(n−1)/n of the gradient across nodes.
    """

    lanes = 2

    def __init__(self, choice: ReducerChoice, members: Members) -> None:
        super().__init__(choice, members)
        self.bucket_mib = choice.values[0]
        self.local = members.on_node(members.nodes[members.rank])
        sizes = [len(members.on_node(node)) for node in range(max(members.nodes) + 1)]
        if len(set(sizes)) > 1:
            hosts = [members.hosts[members.on_node(node)[0]] for node in range(len(sizes))]
            shown = ", ".join(f"{n} on {h}" for n, h in zip(sizes, hosts, strict=True))
            raise PlanError(
                "reducer='hierarchical' exchanges between workers of equal local rank, so every "
                f"node needs the same number of workers; found {shown}. Use ring or servers."
            )

    def groups(self, lane: int) -> dict[str, Any]:
        """See :meth:`Reducer.groups`."""
        members, made = self.members, super().groups(lane)
        for node in range(max(members.nodes) + 1):  # every rank makes every group
            ranks = members.on_node(node)
            group = group_of(f"exchange node {lane}", ranks)
            if members.rank in ranks:
                made["node"] = group
        for place in range(len(self.local)):
            ranks = [members.on_node(node)[place] for node in range(max(members.nodes) + 1)]
            group = group_of(f"exchange rail {lane}", ranks)
            if members.rank in ranks:
                made["rail"] = group
        return made

    def average(self, bucket: Bucket) -> None:
        """See :meth:`Reducer.average`."""
        groups, size = bucket.where.groups, self.members.size
        if len(self.local) == 1:  # every worker is a node: there is no inner level
            mean_into(bucket.flat, groups["all"], size)
            return

        def rail(shard: torch.Tensor) -> None:
            if len(self.local) < size:
                dist.all_reduce(shard, group=groups["rail"])

        _by_shards(bucket, groups["node"], len(self.local), size, rail)


class OwnServers(Reducer):
    """Every worker is also a server: it sums an equal shard of each bucket and returns it. Two
    messages in sequence whatever N is; the bytes are the ring's.
    """

    lanes = 3

    def __init__(self, choice: ReducerChoice, members: Members) -> None:
        super().__init__(choice, members)
        self.bucket_mib = max(choice.values[0], SHARD_BYTES * members.size / 2**20)

    def average(self, bucket: Bucket) -> None:
        """See :meth:`Reducer.average`."""
        size = self.members.size
        _by_shards(bucket, bucket.where.groups["all"], size, size, lambda shard: None)


def _by_shards(bucket: Bucket, group: Any, parts: int, size: int, between: Any) -> None:
    """Average a bucket in equal, padded shards, one for each member of a group.

    Args:
        parts: members of the group.
        size: what the sum is divided by.
        between: called with the shard's sum before it is returned.
    """
    flat, where = bucket.flat, bucket.where
    n = flat.numel()
    shard = -(-n // parts)
    padded = where.buffer("sent", flat, flat.dtype, parts, shard)
    padded.view(-1)[:n] = flat
    received = where.buffer("received", flat, flat.dtype, parts, shard)
    # in float32 for 16 bits: the sum of many would lose their last bits, or overflow
    mine = scatter_rows(padded, received, group).sum(0, dtype=wide(flat.dtype)).div_(size)
    between(mine)
    gather_rows(mine.to(flat.dtype), padded, group)
    flat.copy_(padded.view(-1)[:n])
