"""What predicting a plan starts from: its layout, collective costs and unit costs."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ronde.plan import parse_reducer
from ronde.plan.plan import Plan
from ronde.predict.cluster import Cluster, Collective, LinkFit
from ronde.predict.collectives import CollectiveCost, Group, collective
from ronde.predict.costs import Costs
from ronde.predict.partition import HeldShare
from ronde.predict.unit_arrays import Chain

FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20
"""Gradients that torch's DistributedDataParallel exchanges together."""


def measured_reducer(plan: Plan, cluster: Cluster) -> LinkFit | None:
    """The fit of a plan's reducer for so many replicas; None for the backend's all-reduce, or where
    it was not measured.
    """
    fit = cluster.reducers.get(str(parse_reducer(plan.reducer)))
    return fit if fit is not None and fit.ranks == plan.replicas else None


def base_bytes(costs: Costs, cluster: Cluster) -> float:
    """What a worker holds before the model."""
    return cluster.base_bytes + (costs.script_bytes if cluster.device == "cpu" else 0.0)


@dataclass(frozen=True)
class PlanSetup:
    """A plan on a cluster: what its memory and its time are both predicted from.

    Attributes:
        plan, costs, cluster: which.
        groups: the groups of the plan's layout, by name.
        share: samples of one worker in a step, in ``micro_batches`` of at most ``largest``.
        made: the units' costs at the usual micro-batch, ``peak`` at the largest.
        bounds: of a pipeline's stages.
    """

    plan: Plan
    costs: Costs
    cluster: Cluster
    groups: dict[str, Group]
    share: int
    micro_batches: int
    largest: int
    made: Chain
    peak: Chain
    bounds: tuple[int, ...] = ()

    @functools.cached_property
    def parts(self) -> int:
        """Workers that share out the states that they hold."""
        return self.groups["shard"].ranks if self.plan.shard != "none" else 1

    @functools.cached_property
    def held(self) -> HeldShare:
        """The part of its stage's states that a worker holds."""
        of_fsdp = 1 / self.parts if self.fsdp else 1.0
        return HeldShare(of_fsdp, of_fsdp, 1 / self.parts)

    @property
    def fsdp(self) -> bool:
        """Whether parameters are gathered block by block."""
        return self.plan.shard in ("gradients", "parameters") and self.parts > 1

    def part_of(self, trainable: float) -> float:
        """So many bytes as a share of the model's trainable bytes."""
        every = self.costs.trainable_bytes
        return trainable / every if every else 0.0

    def wire(self, kind: Collective, group: str) -> CollectiveCost:
        """Cost of a collective over a group of the layout."""
        return collective(self.cluster, kind, self.groups[group])

    @functools.cached_property
    def all_reduce(self) -> CollectiveCost:
        """Cost of the plan's reducer over its replicas."""
        if (fit := measured_reducer(self.plan, self.cluster)) is not None:
            return CollectiveCost(fit.alpha, 1 / fit.beta)
        return self.wire("all_reduce", "replicas")
