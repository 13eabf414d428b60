"""All plans that Ronde can carry out, as candidates of a search."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Literal

from ronde.plan.batch import micro_batches_of
from ronde.plan.plan import Plan, Schedule, ShardLevel
from ronde.plan.reducers import parse_reducer
from ronde.plan.schedules import allowed
from ronde.predict.cluster import Cluster
from ronde.predict.costs import Costs, not_counted

_SCHEDULES: tuple[tuple[Schedule, int], ...] = (
    ("1f1b", 1),
    ("gpipe", 1),
    ("interleaved", 2),
    ("looped", 2),
    ("interleaved", 3),
    ("interleaved", 4),
    ("looped", 4),
)
_TENSOR = (2, 4, 8, 16)  # inside one node: its messages cannot hide
_RECOMPUTES: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
_SHARDED: list[ShardLevel] = ["optimizer", "gradients", "parameters"]


def supported(plan: Plan, costs: Costs, cluster: Cluster) -> bool:
    """Whether the runtime carries out a plan, and the costs tell what it takes."""
    whole = plan.pipeline == 1 and plan.tensor == 1
    if (
        plan.workers != plan.pipeline * plan.tensor * plan.replicas
        or plan.batch_size < plan.replicas
        or (plan.tensor > 1 and plan.pipeline == 1 and plan.shard == "optimizer")
        or not_counted(plan, costs) is not None
        or not costs.refused.keys().isdisjoint((f"shard={plan.shard}", *_ways(plan)))
        or (plan.shard != "none" and plan.replicas < 2)
        or (plan.tensor > 1 and costs.tensor_divides % plan.tensor)
        or (plan.offload != "none" and (cluster.device == "cpu" or not whole))
    ):
        return False
    if plan.shard_within is not None and (
        plan.shard not in ("gradients", "parameters")
        or not whole
        or plan.replicas % max(1, plan.shard_within)
    ):
        return False
    if plan.pipeline == 1:
        return plan.virtual == 1
    places = sum(u.cut_after for u in costs.units[:-1]) + 1
    if plan.pipeline * plan.virtual > places:
        return False
    return allowed(plan.schedule, plan.pipeline, plan.virtual, plan.accumulation) is None


def _ways(plan: Plan) -> Iterator[str]:
    if plan.tensor > 1:
        yield "tensor"
    if plan.pipeline > 1:
        yield "pipeline"
        yield plan.schedule
    if plan.pipeline > 1 and plan.tensor > 1:
        yield "pipeline × tensor"


def candidates(base: Plan, costs: Costs, cluster: Cluster) -> Iterator[list[Plan]]:
    """All plans for ``base.workers`` workers: ladders of falling micro-batch size for whole models,
    then pipelines, each by itself.
    """
    places = sum(u.cut_after for u in costs.units[:-1]) + 1
    divided = list(_divided(base, cluster))
    for one in divided:
        yield from _whole(one, costs, cluster)
    for one in divided:
        for pipeline in range(2, min(base.workers, places) + 1):
            if base.workers % (pipeline * one.tensor) == 0:
                yield from _pipelines(one, pipeline, places, costs, cluster)


def _divided(base: Plan, cluster: Cluster) -> Iterator[Plan]:
    """Layers whole, or divided over the workers of a node."""
    for tensor in (1, *_TENSOR):
        if base.workers % tensor or tensor > max(1, cluster.devices_per_node):
            continue
        yield dataclasses.replace(base, tensor=tensor, pipeline=1)


def _whole(base: Plan, costs: Costs, cluster: Cluster) -> Iterator[list[Plan]]:
    """Ladders of plans without a pipeline."""
    tensor, replicas = base.tensor, base.workers // base.tensor
    node = cluster.devices_per_node
    if replicas > base.batch_size:
        return
    levels: list[ShardLevel] = ["none"]
    if replicas > 1:
        levels += _SHARDED
    for shard in levels:
        withins: list[int | None] = [None]
        whole = shard in ("gradients", "parameters")
        if tensor == 1 and whole and 1 < node < replicas and replicas % node == 0:
            withins.append(node)
        for within in withins:
            offloads: list[Literal["none", "optimizer", "parameters"]] = ["none"]
            if cluster.device != "cpu" and tensor == 1 and within is None:
                offloads.append("optimizer")
                if shard != "none" or replicas == 1:
                    offloads.append("parameters")
            for recompute, offload in itertools.product(_RECOMPUTES, offloads):
                # Offload is for what does not fit at all: full recomputation saves more.
                if offload != "none" and recompute == "selective":
                    continue
                for reducer in _reducers(base, shard, cluster):
                    one = dataclasses.replace(
                        base,
                        shard=shard,
                        shard_within=within,
                        recompute=recompute,
                        offload=offload,
                        reducer=reducer,
                    )
                    if supported(one, costs, cluster):
                        yield _accumulated(one)


def _reducers(base: Plan, shard: ShardLevel, cluster: Cluster) -> list[str]:
    """How whole gradients can be averaged: as the script's plan says, or by what was measured to
    be exact and fast.
    """
    replicas = base.workers // base.tensor
    if shard not in ("none", "optimizer") or base.tensor > 1 or replicas == 1:
        return ["ring"]
    if base.reducer != "ring":
        return [base.reducer]
    measured = [n for n, fit in cluster.reducers.items() if fit.ranks == replicas]
    return ["ring", *(n for n in measured if parse_reducer(n).kind.exact)]


def _pipelines(
    base: Plan, pipeline: int, places: int, costs: Costs, cluster: Cluster
) -> Iterator[list[Plan]]:
    """Plans with so many workers along a pipeline."""
    replicas = base.workers // (pipeline * base.tensor)
    if replicas > base.batch_size:
        return
    share = math.ceil(base.batch_size / replicas)
    levels: list[ShardLevel] = ["none"]
    levels += ["optimizer", "parameters"] if replicas > 1 else []
    probe = dataclasses.replace(
        base,
        pipeline=pipeline,
        shard_within=None,
        offload="none",
        recompute="none",
        shard="none",
        reducer="ring",
    )
    for schedule, virtual in _SCHEDULES:
        if pipeline * virtual > places:
            continue
        for micro in _counts(schedule, pipeline, virtual, share):
            one = dataclasses.replace(probe, virtual=virtual, schedule=schedule, micro_batch=micro)
            count = micro_batches_of(one, share)
            for recompute, shard in itertools.product(_RECOMPUTES, levels):
                made = dataclasses.replace(
                    one, accumulation=count, shard=shard, recompute=recompute
                )
                if supported(made, costs, cluster):
                    yield [made]


def _accumulated(plan: Plan) -> list[Plan]:
    share = math.ceil(plan.batch_size / plan.replicas)
    ladder = []
    micro = share
    while True:
        count = math.ceil(share / micro)
        ladder.append(
            dataclasses.replace(plan, micro_batch=micro if count > 1 else None, accumulation=count)
        )
        if micro == 1:
            return ladder
        micro = math.ceil(micro / 2)


def _counts(schedule: Schedule, pipeline: int, virtual: int, share: int) -> list[int]:
    """Micro-batch sizes worth trying: one micro-batch a pipeline worker, two, …, one sample."""
    wanted = [pipeline * f for f in (1, 2, 4, 8, 16)]
    fine: dict[int, int] = {}  # of those that come to as many, the size that they have then
    for asked in {max(1, math.ceil(share / n)) for n in wanted} | {1}:
        plan = Plan(
            pipeline, pipeline=pipeline, virtual=virtual, schedule=schedule, micro_batch=asked
        )
        count = micro_batches_of(plan, share)
        if allowed(schedule, pipeline, virtual, count) is None:
            fine[count] = math.ceil(share / count)
    return sorted(fine.values(), reverse=True)
