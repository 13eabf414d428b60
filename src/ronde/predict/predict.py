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
from ronde.predict.collectives import Group, collective, groups
from ronde.predict.costs import Costs, not_counted
from ronde.predict.datasheets import DEVICES, costs_on
from ronde.predict.partition import cut_at, cut_chain
from ronde.predict.plan_setup import PlanSetup, base_bytes, measured_reducer
from ronde.predict.prediction import (
    FITS_SHARE,
    KINDS,
    RISKY_SHARE,
    TERMS,
    Prediction,
    StageRow,
    Verdict,
)
from ronde.predict.step_time import StepParts, StepPrediction, send_costs
from ronde.predict.unit_arrays import Chain, chain
from ronde.world import ArgumentError

__all__ = [
    "FITS_SHARE",
    "KINDS",
    "RISKY_SHARE",
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
        self.base_bytes = base_bytes(costs, cluster)

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
        # The mean micro-batch decides the time, the largest one the memory.
        usual = share / micro_batches
        made = self.chain_of(plan, usual, at["tensor"])
        setup = PlanSetup(
            plan=plan,
            costs=self.costs,
            cluster=self.cluster,
            groups=at,
            share=share,
            micro_batches=micro_batches,
            largest=largest,
            made=made,
            peak=made if largest == usual else self.chain_of(plan, largest, at["tensor"]),
        )
        if plan.pipeline == 1:
            return self._prediction(setup, StepPrediction(setup).whole(), quick)
        setup = dataclasses.replace(setup, bounds=self.bounds_of(setup, quick))
        step = StepPrediction(setup).pipeline(quick, split_waits)
        return self._prediction(setup, step, quick)

    def _prediction(self, setup: PlanSetup, step: StepParts, quick: bool) -> Prediction:
        plan, memory = setup.plan, step.memory
        # Fragments grow with the tensors, not with what was there before them.
        memory["base"] += self.cluster.reserved * (sum(memory.values()) - memory["base"])
        placement: dict[str, str] = {}
        notes: list[str] = []
        if not quick:
            notes = self.notes(plan)
            names = {"tensor": plan.tensor, "replicas": plan.replicas, "stages": plan.pipeline}
            places = [name for name, size in names.items() if size > 1]
            if plan.shard_within and plan.shard != "none":
                places += ["shard", "copies"]
            placement = {name: setup.groups[name].sentence() for name in places}
            if plan.pipeline > 1:
                near = setup.groups["stages"].scope == "node"
                placement["stages"] = f"neighbours {'inside a node' if near else 'across nodes'}"
        return Prediction(
            plan=plan,
            step_seconds=sum(step.terms.values()),
            terms=step.terms,
            one_device_seconds=self.one_device_seconds(plan.batch_size),
            memory=memory,
            capacity_bytes=self.cluster.memory_bytes,
            verdict=self.verdict(sum(memory.values())),
            exchanged_bytes=step.sent,
            bubble=step.bubble,
            micro_batches=setup.micro_batches,
            micro_samples=setup.largest,
            placement=placement,
            stages=step.stages,
            split_at=() if quick else tuple(self.costs.units[b].name for b in setup.bounds[1:-1]),
            hidden_seconds=step.hidden,
            notes=tuple(notes),
        )

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
        made = self._chains.get(key)
        if made is None:
            if len(self._chains) > 2048:  # some 30 MB, with 100 units
                self._chains.clear()
            sums = collective(self.cluster, "all_reduce", group)
            made = chain(
                self.costs,
                samples,
                tensor=plan.tensor,
                recompute=plan.recompute,
                speed=self.cluster.speed,
                reduce_seconds=sums if plan.tensor > 1 else None,
                launch_seconds=self.cluster.launch_seconds,
            )
            self._chains[key] = made
        return made

    def bounds_of(self, setup: PlanSetup, quick: bool) -> tuple[int, ...]:
        """A plan's pipeline cut."""
        plan, count = setup.plan, setup.plan.pipeline * setup.plan.virtual
        if plan.split_at:
            return cut_at(self.costs, plan.split_at, count)
        *_, send = send_costs(self.cluster, setup.groups["stages"])
        key: tuple[Any, ...]
        key = (plan.pipeline, plan.virtual, plan.recompute, plan.tensor, plan.optimize)
        # A cut takes longer than a closed form: plans that hardly differ share one.
        if not quick:
            samples = plan.batch_size / plan.replicas / setup.micro_batches
            key = (*key, samples, plan.schedule, setup.micro_batches, setup.held, send)
        if key not in self._bounds:
            best = cut_chain(
                setup.made,
                plan.pipeline,
                virtual=plan.virtual,
                schedule=plan.schedule,
                optimize=plan.optimize,
                micro_batches=setup.micro_batches,
                held=setup.held,
                send_seconds=send,
            )
            self._bounds[key] = best.bounds if best else None
        if (bounds := self._bounds[key]) is None:
            raise ArgumentError(
                f"pipeline: {count} stages were asked for, and the model can "
                f"be cut into {len(setup.made.cuts) + 1} at most."
            )
        return bounds

    def one_device_seconds(self, batch_size: int) -> float:
        """The same global batch on one device, in micro-batches as large as fit."""
        if batch_size not in self._one_device:
            plan = Plan(workers=1, batch_size=batch_size)
            alone = Group(1, "node", 1, 1)
            small, large = self.chain_of(plan, 1, alone), self.chain_of(plan, batch_size, alone)
            states = small.parameters + small.trainable + small.optimizer + small.buffers
            room = RISKY_SHARE * self.cluster.memory_bytes - (float(states.sum()) + self.base_bytes)
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
            self._one_device[batch_size] = passes + once
        return self._one_device[batch_size]

    def verdict(self, memory_bytes: float) -> Verdict:
        """Whether so many bytes fit into a device."""
        if not self.cluster.memory_bytes:
            return "unknown"
        used = memory_bytes / self.cluster.memory_bytes
        return "fits" if used < FITS_SHARE else "risky" if used <= RISKY_SHARE else "does not fit"

    def notes(self, plan: Plan) -> list[str]:
        """What a prediction leaves open, beside the assumed numbers of an answer."""
        notes = []
        if plan.workers > 1:
            notes = self.cluster.notes()
            if not self.cluster.links:
                notes = ["no link was measured: exchange is treated as free"]
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
