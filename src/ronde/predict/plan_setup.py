"""What predicting a plan starts from: its layout, collective costs and unit costs."""

from __future__ import annotations

import dataclasses
from typing import Protocol

from ronde.plan import parse_reducer
from ronde.plan.plan import Plan
from ronde.predict.cluster import Cluster, Collective, LinkFit
from ronde.predict.collectives import CollectiveCost, Group, collective
from ronde.predict.costs import Costs
from ronde.predict.partition import HeldShare
from ronde.predict.prediction import Verdict
from ronde.predict.unit_arrays import Chain, Gradients


class PredictionSource(Protocol):
    """What predictions of all plans for one model and cluster share."""

    costs: Costs
    cluster: Cluster
    gradients: Gradients
    base_bytes: float
    trainable_bytes: float

    def chain_of(self, plan: Plan, samples: float, group: Group) -> Chain:
        """The units' costs under a plan."""

    def bounds_of(
        self,
        plan: Plan,
        made: Chain,
        held: HeldShare,
        micro_batches: int,
        send: CollectiveCost,
        quick: bool,
    ) -> tuple[int, ...] | None:
        """A plan's pipeline cut, or None."""

    def one_device_seconds(self, batch_size: int) -> float:
        """The same global batch on one device."""

    def verdict(self, memory_bytes: float) -> Verdict:
        """Whether so many bytes fit into a device."""

    def notes(self, plan: Plan, at: dict[str, Group]) -> list[str]:
        """Estimates and assumptions in a prediction."""


def measured_reducer(plan: Plan, cluster: Cluster) -> LinkFit | None:
    """The fit of a plan's reducer for so many replicas; None for the backend's all-reduce, or where
    it was not measured.
    """
    fit = cluster.reducers.get(str(parse_reducer(plan.reducer)))
    return fit if fit is not None and fit.ranks == plan.replicas else None


class PlanSetup:
    """A plan on a cluster: what its memory and its time are both predicted from.

    Attributes:
        groups: the groups of the plan's layout, by name.
        share: samples of one worker in a step, in ``micro_batches`` of at most ``largest``.
        held: the part of its stage's states that a worker holds.
        fsdp: whether parameters are gathered block by block.
        made: the units' costs at the usual micro-batch, ``peak`` at the largest.
    """

    def __init__(
        self,
        owner: PredictionSource,
        plan: Plan,
        groups: dict[str, Group],
        share: int,
        micro_batches: int,
        largest: int,
    ) -> None:
        self.owner, self.plan, self.groups = owner, plan, groups
        self.cluster, self.costs = owner.cluster, owner.costs
        self.share, self.micro_batches, self.largest = share, micro_batches, largest
        parts = groups["shard"].ranks
        level = ("none", "optimizer", "gradients", "parameters").index(plan.shard)
        self.parts = parts if level else 1
        of_fsdp = 1 / parts if level >= 2 else 1.0
        self.held = HeldShare(of_fsdp, of_fsdp, 1 / parts if level else 1.0)
        self.fsdp = level >= 2 and parts > 1
        reduced, gathered = self.costs.reduce_ratio, self.costs.gather_ratio

        def wire(kind: Collective, group: str, ratio: float) -> CollectiveCost:
            found = collective(self.cluster, kind, groups[group])
            return dataclasses.replace(found, seconds_per_byte=found.seconds_per_byte * ratio)

        self.all_reduce = wire("all_reduce", "replicas", reduced)
        if (fit := measured_reducer(plan, self.cluster)) is not None:
            self.all_reduce = CollectiveCost(fit.alpha, 1 / fit.beta, fit.assumed)
        self.copies = wire("all_reduce", "copies", reduced)
        self.gather = wire("all_gather", "shard", gathered)
        self.broadcast = wire("broadcast", "replicas", gathered)
        self.scatter = wire("reduce_scatter", "shard", reduced)
        self.made = owner.chain_of(plan, share / micro_batches, groups["tensor"])
        self.peak = self.made
        if largest != share / micro_batches:
            self.peak = owner.chain_of(plan, largest, groups["tensor"])
