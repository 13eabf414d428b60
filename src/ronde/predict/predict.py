"""Predict a plan's step time term by term, its memory per device by kind, and its traffic, from
measured parts.

Nothing is fitted to step times. Each strategy is composed as follows:

- *Replicate* (DDP): the backward pass is walked gradient by gradient. Gradients fill 25 MB buckets
  (the first 1 MiB); a bucket's all-reduce starts when it is full and the previous one is done. What
  ends after the backward pass is exposed.
- *Shard* ``"optimizer"`` (ZeRO-1): as replicate, then each worker broadcasts the parameters it
  updated. ``"gradients"`` (ZeRO-2): parameters are gathered block by block, once per micro-batch,
  and kept until its backward ends. ``"parameters"`` (ZeRO-3, FSDP): gathered in both passes, except
  parameters outside blocks, which are kept. Gradients are reduce-scattered in each micro-batch's
  backward, and with ``shard_within`` then all-reduced over the copies.
- *Pipeline*: an event simulation of the schedule, then each worker's exposed exchange with its
  replicas. Sharded modules are gathered on every call.
- *Tensor*: the divisible share of each unit is divided (an estimate: divided products are less
  efficient), and activations are all-reduced, exposed.
- *On the CPU* FSDP2's hooks and copies take time of their own.
- Each further micro-batch adds its gradients to the existing ones.
- *Recompute*: the forward pass, or its cheap part, once more. *Offload*: gradients down and
  parameters up, exposed.

Memory is the largest sum at any moment of the step: states, kept activations, gradients so far,
temporary buffers. Verdicts: below 80 % of the device's memory *fits*, up to 95 % *risky* (Fujii
et al. 2024: 454 runs, none below 80 % failed).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

from ronde.plan import parse_reducer
from ronde.plan.batch import micro_batches_of
from ronde.plan.plan import Plan, Schedule
from ronde.plan.schedules import allowed, bubble, in_flight, worker_of
from ronde.predict.cluster import Cluster
from ronde.predict.collectives import CollectiveCost, Group, collective, groups
from ronde.predict.costs import Costs, not_counted
from ronde.predict.datasheets import DEVICES, costs_on
from ronde.predict.partition import Cut, HeldShare, cut_at, cut_chain
from ronde.predict.plan_setup import PlanSetup, measured_reducer
from ronde.predict.prediction import FITS, KINDS, RISKY, TERMS, Prediction, StageRow, Verdict
from ronde.predict.step_time import StepPrediction
from ronde.predict.unit_arrays import Chain, Gradients, chain
from ronde.world import ArgumentError

__all__ = [
    "FITS",
    "KINDS",
    "RISKY",
    "TERMS",
    "Prediction",
    "Predictor",
    "StageRow",
    "Verdict",
    "predict",
]


def predict(plan: Plan, costs: Costs, cluster: Cluster) -> Prediction:
    """What ``plan`` would take.

    Args:
        plan: its ``workers`` and ``batch_size`` count; where it does not say how many micro-batches
            a pipeline has, they are chosen.
        costs: of the model.
        cluster: what it would run on.

    Raises:
        ArgumentError: the plan does not divide its workers, or its pipeline cannot be cut or
            scheduled so.
    """
    return Predictor(costs, cluster)(plan)


class Predictor:
    """Predicts many plans for one model and cluster, and caches what they share.

    Args:
        costs: of the model.
        cluster: what it would run on.
    """

    def __init__(self, costs: Costs, cluster: Cluster) -> None:
        if (
            cluster.device in DEVICES
            and cluster.speed_is_estimate
            and costs.device != cluster.device
        ):
            costs = costs_on(costs, DEVICES[cluster.device])
        self.costs = costs
        self.cluster = cluster
        self._chains: dict[tuple[Any, ...], Chain] = {}
        self._bounds: dict[tuple[Any, ...], tuple[int, ...] | None] = {}
        self._one_device: dict[int, float] = {}
        self.trainable_bytes = float(chain(costs, 1).trainable.sum())
        self.base_bytes = max(costs.base_bytes, cluster.base_bytes) + (
            costs.script_bytes if cluster.device == "cpu" else 0.0
        )
        self.gradients = Gradients.of(costs)

    def __call__(self, plan: Plan, quick: bool = False, split_waits: bool = True) -> Prediction:
        """Predict ``plan``.

        Args:
            plan: which.
            quick: by closed form instead of simulation, and with a cut that similar plans share.
            split_waits: whether a pipeline is simulated again with free sends, to tell what it
                waits for; else all of it is bubble.

        Raises:
            ArgumentError: as :func:`predict`.
        """
        if plan.workers != plan.pipeline * plan.tensor * plan.replicas:
            raise ArgumentError(
                f"plan: {plan.workers} workers do not divide into pipeline={plan.pipeline} "
                f"× tensor={plan.tensor}; take a multiple of {plan.pipeline * plan.tensor}."
            )
        if plan.shard_within and plan.replicas % plan.shard_within:
            raise ArgumentError(
                f"plan: shard_within={plan.shard_within} does not divide {plan.replicas} replicas."
            )
        if (why := not_counted(plan, self.costs)) is not None:
            raise ArgumentError(f"plan: {why}.")
        share = math.ceil(plan.batch_size / plan.replicas)
        if plan.pipeline > 1:
            micro_batches = plan.accumulation
            if plan.micro_batch or plan.accumulation == 1:
                micro_batches = micro_batches_of(plan, share)
            reason = allowed(plan.schedule, plan.pipeline, plan.virtual, micro_batches)
            if reason:
                raise ArgumentError(f"plan: {reason}.")
        else:
            asked = plan.micro_batch
            micro_batches = (
                micro_batches_of(plan, share) if asked else min(plan.accumulation, share)
            )
        largest = math.ceil(share / micro_batches)
        plan = dataclasses.replace(
            plan,
            accumulation=micro_batches,
            micro_batch=largest if micro_batches > 1 or plan.pipeline > 1 else plan.micro_batch,
        )
        at = groups(plan.layout, self.cluster, plan.shard_within)
        step = StepPrediction(PlanSetup(self, plan, at, share, micro_batches, largest))
        return step.pipeline(quick, split_waits) if plan.pipeline > 1 else step.whole(quick)

    def floor_seconds(self, plan: Plan) -> float:
        """Lower bound of a plan's step: computation alone, in equal stages. Prunes the search."""
        share = math.ceil(plan.batch_size / plan.replicas)
        count = max(1, min(plan.accumulation, share))
        if plan.micro_batch:
            count = micro_batches_of(plan, share)
        group, wait = Group(1, "node", 1, 1), 0.0
        if plan.tensor > 1:
            group = groups(plan.layout, self.cluster)["tensor"]
        if plan.pipeline > 1:
            wait = bubble(plan.schedule, plan.pipeline, plan.virtual, count)
        total = float(self.chain_of(plan, share / count, group).seconds.sum())
        if plan.pipeline > 1 or plan.workers == 1:
            total /= self.costs.contention  # at best nobody else works meanwhile
        return count * total / plan.pipeline / (1.0 - wait)

    def floor_bytes(self, plan: Plan) -> float:
        """Lower bound of a pipeline worker's memory, wherever it is cut. Prunes the search.

        Worker w holds its states and ``f[w]`` micro-batches of what its stages save or more. Summed
        over all workers, each divided by its ``f``: S + states / max f <= memory * sum(1 / f).
        """
        share = math.ceil(plan.batch_size / plan.replicas)
        count = micro_batches_of(plan, share)
        group = groups(plan.layout, self.cluster)["tensor"]
        made = self.chain_of(plan, math.ceil(share / count), group)
        part = 1.0 / plan.replicas
        whole = part if plan.shard in ("gradients", "parameters") else 1.0
        states = float(made.optimizer.sum()) * (part if plan.shard != "none" else 1.0)
        states += float(made.parameters.sum()) * whole + float(made.buffers.sum())
        per_flight, most = _flights(plan.schedule, plan.pipeline, plan.virtual, count)
        activations = (float(made.saved.sum()) + states / most) / per_flight
        end = states + float(made.trainable.sum()) * whole
        fixed = self.base_bytes + self.costs.input_bytes * share
        return fixed + max(activations, end / plan.pipeline)

    def chain_of(self, plan: Plan, samples: float, group: Group) -> Chain:
        """The units' costs under a plan."""
        key = (samples, plan.tensor, plan.recompute, group)
        found = self._chains.get(key)
        if found is None:
            if len(self._chains) > 2048:
                self._chains.clear()
            sums = collective(self.cluster, "all_reduce", group)
            found = chain(
                self.costs,
                samples,
                tensor=plan.tensor,
                recompute=plan.recompute,
                speed=self.cluster.speed,
                reduce_seconds=sums if plan.tensor > 1 else None,
                launch_seconds=self.cluster.launch_seconds,
            )
            self._chains[key] = found
        return found

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
        if plan.split_at:
            return cut_at(self.costs, plan.split_at, plan.pipeline * plan.virtual)
        key: tuple[Any, ...]
        key = (plan.pipeline, plan.virtual, plan.recompute, plan.tensor, plan.optimize)
        if not quick:
            samples = plan.batch_size / plan.replicas / micro_batches
            key = (*key, samples, plan.schedule, micro_batches, held, send)
        if key not in self._bounds:
            found: Cut | None = cut_chain(
                made,
                plan.pipeline,
                virtual=plan.virtual,
                schedule=plan.schedule,
                optimize=plan.optimize,
                micro_batches=micro_batches,
                held=held,
                send_seconds=send,
            )
            self._bounds[key] = found.bounds if found else None
        return self._bounds[key]

    def one_device_seconds(self, batch_size: int) -> float:
        """The same global batch on one device, in micro-batches as large as fit."""
        if batch_size not in self._one_device:
            plan = Plan(workers=1, batch_size=batch_size)
            alone = Group(1, "node", 1, 1)
            small, large = self.chain_of(plan, 1, alone), self.chain_of(plan, batch_size, alone)
            states = small.parameters + small.trainable + small.optimizer + small.buffers
            room = RISKY * self.cluster.memory_bytes - (float(states.sum()) + self.base_bytes)
            first, last = (float(c.saved.sum()) + float(c.transient.max()) for c in (small, large))
            each = (last - first) / max(1, batch_size - 1)
            fit = batch_size
            if self.cluster.memory_bytes and room < first:
                fit = 0
            elif self.cluster.memory_bytes and each > 0:
                fit = math.floor(1 + (room - first) / each)
            if fit < 1:
                fit = max(self.costs.measured_samples, default=1)
            fit = min(max(1, fit), batch_size)
            count = math.ceil(batch_size / fit)
            made = self.chain_of(plan, batch_size / count, alone)
            further = (count - 1) * self.costs.accumulate_seconds / self.cluster.speed
            once = (self.costs.optimizer_seconds + self.costs.clip_seconds) / self.cluster.speed
            passes = count * float(made.seconds.sum()) + further
            self._one_device[batch_size] = passes / self.costs.contention + once
        return self._one_device[batch_size]

    def verdict(self, memory_bytes: float) -> Verdict:
        """Whether so many bytes fit into a device."""
        if not self.cluster.memory_bytes:
            return "unknown"
        used = memory_bytes / self.cluster.memory_bytes
        return "fits" if used < FITS else "risky" if used <= RISKY else "does not fit"

    def notes(self, plan: Plan, at: dict[str, Group]) -> list[str]:
        """Estimates and assumptions in a prediction."""
        notes = []
        device = DEVICES.get(self.cluster.device)
        if self.cluster.speed_is_estimate and device is not None:
            notes.append(
                f"times are from the data sheet of {device.name}, an estimate: products at "
                f"{device.reached:.0%} of peak, attention at {device.attention:.0%}, "
                f"{self.cluster.launch_seconds * 1e6:.0f} µs per operator"
            )
        elif self.cluster.speed_is_estimate:
            notes.append(
                f"computation is scaled by {self.cluster.speed:.3g} to "
                f"{self.cluster.device}: an estimate"
            )
        if plan.workers > 1 and not self.cluster.links:
            notes.append("no link was measured: exchange is treated as free")
        assumed = any(f.assumed for by in self.cluster.links.values() for f in by.values())
        if plan.workers > 1:
            notes += ["link speeds are from a data sheet, not measured"] if assumed else []
            notes += self.cluster.notes()
        own = parse_reducer(plan.reducer).name != "ring"
        if own and plan.replicas > 1 and measured_reducer(plan, self.cluster) is None:
            notes.append(
                f"reducer={plan.reducer} was not measured (ronde bench exchange --cluster): "
                "predicted as the ring"
            )
        if plan.offload != "none" and not self.cluster.host_bytes_per_second:
            notes.append("12 GB/s to the host's memory is assumed")
        return notes


@functools.lru_cache(maxsize=4096)
def _flights(
    schedule: Schedule, workers: int, virtual: int, micro_batches: int
) -> tuple[float, int]:
    """Of the fewest micro-batches that a stage of each worker holds: sum of 1 / f, and the most."""
    least = [micro_batches] * workers
    for stage, held in enumerate(in_flight(schedule, workers, virtual, micro_batches)):
        worker = worker_of(stage, workers)
        least[worker] = min(least[worker], held)
    return sum(1.0 / f for f in least), max(least)
