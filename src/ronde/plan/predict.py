"""What a plan would take: step time term by term, memory per device by kind, bytes exchanged; composed from measured parts.

Nothing is fitted to step times. How each strategy is composed:

- *Replicate* (DDP): the backward pass is walked unit by unit, gradients fill 25 MB buckets (the first 1 MiB), and each bucket's
  all-reduce begins when it is full and the one before is done. What ends after the backward pass is exposed.
- *Shard* ``"optimizer"`` (ZeRO-1): as replicate, then each worker broadcasts the parameters that it updated. ``"gradients"`` (ZeRO-2):
  parameters are gathered block by block, once per micro-batch, and kept to the end of its backward pass. ``"parameters"`` (ZeRO-3,
  FSDP): gathered in both passes, but for those in no block, which are kept. Gradients are reduce-scattered in the backward pass of
  each micro-batch. Over neighbours alone (``shard_within``), the parts are then all-reduced over the copies.
- *Pipeline*: an event simulation of the schedule's lists, then each worker's exchange with its replicas, not hidden. Under shard its
  modules are gathered whenever they are called.
- *Tensor*: the share of each unit that can be divided is (an estimate: a divided matrix product is less efficient than a whole one),
  and activations are all-reduced, not hidden.
- *On the CPU* all of these take what the runtime adds (``Cluster.added``: hooks, copies into and out of flat buffers, waking up), and a
  sharded model takes at each layer as long as its slowest worker does (``Costs.lockstep``): both measured, like the collectives.
- *Recompute*: the forward pass, or the cheap part of it, once more. *Offload*: gradients down and parameters up, not hidden.

Memory is the largest sum at any one moment of the step: states, activations kept so far, gradients made so far, what a unit needs
for a moment. Verdicts: below 80 % of the device's memory *fits*, up to 95 % *risky* (Fujii et al. 2024: 454 runs, none below 80 % failed).
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ronde.plan.chain import Array, Chain, chain
from ronde.plan.cluster import Added, Cluster
from ronde.plan.cost import Costs
from ronde.plan.links import Group, Link, boundary_crosses, collective, groups
from ronde.plan.partition import Cut, Held, cut_at, cut_chain
from ronde.plan.plan import Plan, Schedule
from ronde.plan.schedules import actions, allowed, bubble, in_flight, worker_of, zbv_gaps
from ronde.plan.simulate import INPUT_SHARE, Timeline, Times, run_step
from ronde.world import ArgumentError

__all__ = ["FITS", "KINDS", "RISKY", "TERMS", "Prediction", "Predictor", "StageRow", "Verdict", "choose_micro_batches", "predict"]

Verdict = Literal["fits", "risky", "does not fit", "unknown"]
KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers", "transient", "communication", "base")
"""What memory is held for, in this order everywhere."""
TERMS = ("compute", "recompute", "tensor", "gather", "exchange", "interference", "bubble", "p2p", "overhead", "optimizer", "host")
"""What step time is spent on, in this order everywhere."""
FITS, RISKY = 0.80, 0.95
"""Shares of a device's memory up to which a plan *fits* and is *risky*."""

_FIRST_BUCKET, _BUCKET = 1 << 20, 25 << 20  # torch's DistributedDataParallel
_PENDING = 256  # sends that the pipeline's runtime keeps open
_DRAWN = 4_000  # micro-batches × stages up to which a picture can be read
_WALKED = 1_500  # micro-batches × stages up to which a pipeline's memory is followed action by action
_GLOO_SEGMENT = float(1 << 20)  # largest piece of a tensor that gloo's ring sends at once
_HOST_BYTES_PER_SECOND = 12e9
_MOMENTS = ("adam", "lamb", "rmsprop", "adagrad", "adadelta")


@dataclass(frozen=True, slots=True)
class StageRow:
    """One stage of a pipeline in a prediction.

    Attributes:
        stage, worker: which, and who holds it.
        first, last: names of its first and last unit.
        units: how many.
        forward_seconds, backward_seconds: of one micro-batch.
        parameter_bytes: before sharding.
        memory_bytes: its states as its worker holds them, and its activations.
        in_flight: micro-batches whose activations it holds at once.
        send_bytes: of one micro-batch, to the next stage.
    """

    stage: int
    worker: int
    first: str
    last: str
    units: int
    forward_seconds: float
    backward_seconds: float
    parameter_bytes: float
    memory_bytes: float
    in_flight: int
    send_bytes: float


@dataclass(frozen=True)
class Prediction:
    """What a plan would take.

    Attributes:
        plan: with its micro-batch and accumulation.
        raw_step_seconds: one optimizer step, as composed.
        correction: measured / predicted of earlier runs of this family on this cluster; 1 where there was none.
        terms: seconds of the worker that is done last, by kind (``TERMS``); they sum to ``raw_step_seconds``.
        one_device_seconds: the same global batch on one device of this kind, were its memory enough.
        memory: bytes of the worker that needs most, by kind (``KINDS``), at its fullest moment.
        capacity_bytes: of one device; 0 where not known.
        verdict: whether it fits.
        exchanged_bytes: sent by one worker in one step, the one that sends most.
        bubble: share of the step in which a worker of the pipeline waits, on average; 0 without a pipeline.
        micro_batches: per step and worker.
        micro_samples: samples of the largest one.
        placement: which group stands where.
        stages: of a pipeline, in order.
        split_at: names of the units that begin its stages, as the plan would carry it out.
        hidden_seconds: exchange that runs beside the backward pass.
        notes: what in it is an estimate or an assumption.
        simulated: whether by event simulation; False for the closed form used to leave plans out.
    """

    plan: Plan
    raw_step_seconds: float
    correction: float
    terms: dict[str, float]
    one_device_seconds: float
    memory: dict[str, float]
    capacity_bytes: float
    verdict: Verdict
    exchanged_bytes: float
    bubble: float
    micro_batches: int
    micro_samples: int
    placement: dict[str, str] = field(default_factory=dict)
    stages: tuple[StageRow, ...] = ()
    split_at: tuple[str, ...] = ()
    hidden_seconds: float = 0.0
    notes: tuple[str, ...] = ()
    simulated: bool = False

    @property
    def step_seconds(self) -> float:
        """One optimizer step, corrected."""
        return self.raw_step_seconds * self.correction

    @property
    def samples_per_second(self) -> float:
        """Over all workers."""
        return self.plan.batch_size / self.step_seconds if self.step_seconds else 0.0

    @property
    def speedup(self) -> float:
        """Against one device."""
        return self.one_device_seconds / self.step_seconds if self.step_seconds else 0.0

    @property
    def efficiency(self) -> float:
        """Speed-up per worker."""
        return self.speedup / self.plan.workers

    @property
    def memory_bytes(self) -> float:
        """Of the worker that needs most."""
        return sum(self.memory.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with what is derived."""
        values = dataclasses.asdict(self)
        values["plan"] = self.plan.to_dict()
        for name in ("step_seconds", "samples_per_second", "speedup", "efficiency", "memory_bytes"):
            values[name] = getattr(self, name)
        values["spec"], values["family"] = self.plan.spec, self.plan.family
        return values


def predict(plan: Plan, costs: Costs, cluster: Cluster) -> Prediction:
    """What ``plan`` would take.

    Args:
        plan: its ``workers`` and ``batch_size`` count; where it does not say how many micro-batches a pipeline has, they are chosen.
        costs: of the model.
        cluster: what it would run on.

    Raises:
        ArgumentError: the plan does not divide its workers, or its pipeline cannot be cut or scheduled so.
    """
    return Predictor(costs, cluster)(plan)


def choose_micro_batches(schedule: Schedule, workers: int, virtual: int, samples: int, target: int | None = None) -> int:
    """How many micro-batches a replica's ``samples`` are cut into: four per worker of the pipeline, or fewer where there are not so many.

    Raises:
        ArgumentError: the schedule allows none.

    Example:
        >>> choose_micro_batches("1f1b", 4, 1, 64), choose_micro_batches("interleaved", 4, 2, 7)
        (16, 7)
    """
    want = min(samples, target or 4 * workers)
    for count in range(max(1, want), 0, -1):
        if allowed(schedule, workers, virtual, count) is None:
            return count
    raise ArgumentError(f"pipeline: {allowed(schedule, workers, virtual, 1)}.")


@dataclass(frozen=True, eq=False, slots=True)
class _Stages:
    """The stages of a cut as arrays, one number a stage."""

    bounds: tuple[int, ...]
    worker: Array
    forward: Array
    backward: Array
    recompute: Array
    reduce: Array
    parameters: Array
    trainable: Array
    optimizer: Array
    buffers: Array
    saved: Array
    transient: Array
    send_bytes: Array
    back_bytes: Array
    tied_bytes: Array
    reduce_bytes: Array


class Predictor:
    """Predicts many plans for one model on one cluster, and keeps what they have in common.

    Args:
        costs: of the model.
        cluster: what it would run on.
    """

    def __init__(self, costs: Costs, cluster: Cluster) -> None:
        self.costs = costs
        self.cluster = cluster
        self._chains: dict[tuple[Any, ...], Chain] = {}
        self._bounds: dict[tuple[Any, ...], tuple[int, ...] | None] = {}
        self._one_device: dict[int, float] = {}
        self._trainable = float(chain(costs, 1).trainable.sum())
        self._base = max(costs.base_bytes, cluster.base_bytes)
        self.added = {name: cluster.added.get(name, Added()) for name in ("gather", "reduce", "bucket", "update")}
        self.tensors = np.array([u.tensors for u in costs.units], dtype=float)
        self.action_seconds = cluster.action_seconds
        if costs.action_seconds and "action" in cluster.added:
            self.action_seconds = costs.action_seconds / cluster.speed + cluster.added["action"].call
        self.simulated: Timeline | None = None
        self.draws = False

    def timeline(self, plan: Plan) -> Timeline | None:
        """One step of a pipeline as it is simulated, for a picture; None where it has too many actions to be drawn."""
        self.draws = True
        try:
            self(plan, split_waits=False)
        finally:
            self.draws = False
        return self.simulated if self.simulated is not None and self.simulated.events else None

    def __call__(self, plan: Plan, quick: bool = False, split_waits: bool = True) -> Prediction:
        """What ``plan`` would take.

        Args:
            plan: which.
            quick: by closed form instead of simulation, and with a cut that similar plans share.
            split_waits: whether a pipeline is simulated again with free sends, to tell what it waits for; else all of it is bubble.

        Raises:
            ArgumentError: as :func:`predict`.
        """
        if plan.workers != plan.pipeline * plan.tensor * plan.replicas:
            raise ArgumentError(
                f"plan: {plan.workers} workers do not divide into pipeline={plan.pipeline} × tensor={plan.tensor}; "
                f"take a multiple of {plan.pipeline * plan.tensor}."
            )
        if plan.shard_within and plan.replicas % plan.shard_within:
            raise ArgumentError(f"plan: shard_within={plan.shard_within} does not divide {plan.replicas} replicas.")
        share = math.ceil(plan.batch_size / plan.replicas)
        if plan.pipeline > 1:
            micro_batches = math.ceil(share / plan.micro_batch) if plan.micro_batch else plan.accumulation
            if not plan.micro_batch and plan.accumulation == 1:
                micro_batches = choose_micro_batches(plan.schedule, plan.pipeline, plan.virtual, share)
            reason = allowed(plan.schedule, plan.pipeline, plan.virtual, micro_batches)
            if reason:
                raise ArgumentError(f"plan: {reason}.")
        else:
            micro_batches = math.ceil(share / plan.micro_batch) if plan.micro_batch else min(plan.accumulation, share)
        largest = math.ceil(share / micro_batches)
        plan = dataclasses.replace(
            plan, accumulation=micro_batches, micro_batch=largest if micro_batches > 1 or plan.pipeline > 1 else plan.micro_batch
        )
        at = groups(plan.layout, self.cluster, plan.shard_within)
        step = _Step(self, plan, at, share, micro_batches, largest)
        return step.pipeline(quick, split_waits) if plan.pipeline > 1 else step.whole(quick)

    def floor_seconds(self, plan: Plan) -> float:
        """What a plan's computation alone takes at least, in equal stages if it is a pipeline: to leave plans out early."""
        share = math.ceil(plan.batch_size / plan.replicas)
        count = math.ceil(share / plan.micro_batch) if plan.micro_batch else max(1, min(plan.accumulation, share))
        group = groups(plan.layout, self.cluster)["tensor"] if plan.tensor > 1 else Group(1, "node", 1, 1)
        total = float(self.chain_of(plan, share / count, group).seconds.sum())
        wait = bubble(plan.schedule, plan.pipeline, plan.virtual, count) if plan.pipeline > 1 else 0.0
        return count * total / plan.pipeline / (1.0 - wait) * self.cluster.corrections.get(plan.family, 1.0)

    def chain_of(self, plan: Plan, samples: float, group: Group) -> Chain:
        """The units' costs under a plan."""
        key = (samples, plan.tensor, plan.recompute, group)
        found = self._chains.get(key)
        if found is None:
            if len(self._chains) > 256:
                self._chains.clear()
            reduce_seconds = collective(self.cluster, "all_reduce", group) if plan.tensor > 1 else None
            found = chain(
                self.costs,
                samples,
                tensor=plan.tensor,
                recompute=plan.recompute,
                speed=self.cluster.speed,
                reduce_seconds=reduce_seconds,
            )
            self._chains[key] = found
        return found

    def bounds_of(self, plan: Plan, made: Chain, held: Held, micro_batches: int, send: Link, quick: bool) -> tuple[int, ...] | None:
        """Where a plan's pipeline is cut; None where it cannot be."""
        if plan.split_at:
            return cut_at(
                self.costs, plan.split_at, plan.pipeline, virtual=plan.virtual, schedule=plan.schedule, micro_batches=micro_batches
            ).bounds
        key: tuple[Any, ...] = (plan.pipeline, plan.virtual, plan.recompute, plan.tensor, plan.optimize)
        if not quick:
            key = (*key, plan.batch_size / plan.replicas / micro_batches, plan.schedule, micro_batches, held, send)
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
        """The same global batch on one device, in micro-batches as large as its memory takes (or were measured, if not one sample fits)."""
        if batch_size not in self._one_device:
            plan = Plan(workers=1, batch_size=batch_size)
            alone = Group(1, "node", 1, 1)
            small, large = self.chain_of(plan, 1, alone), self.chain_of(plan, batch_size, alone)
            held = float((small.parameters + small.trainable + small.optimizer + small.buffers).sum()) + self._base
            room = RISKY * self.cluster.memory_bytes - held
            first = float(small.saved.sum()) + float(small.transient.max())
            each = (float(large.saved.sum()) + float(large.transient.max()) - first) / max(1, batch_size - 1)
            fit = batch_size
            if self.cluster.memory_bytes:
                fit = math.floor(1 + (room - first) / each) if each > 0 and room >= first else (batch_size if room >= first else 0)
            if fit < 1:
                fit = max(self.costs.measured_samples, default=1)
            fit = min(max(1, fit), batch_size)
            count = math.ceil(batch_size / fit)
            made = self.chain_of(plan, batch_size / count, alone)
            self._one_device[batch_size] = count * float(made.seconds.sum()) + self.costs.optimizer_seconds / self.cluster.speed
        return self._one_device[batch_size]

    def verdict(self, memory_bytes: float) -> Verdict:
        """Whether so many bytes fit into a device."""
        if not self.cluster.memory_bytes:
            return "unknown"
        used = memory_bytes / self.cluster.memory_bytes
        return "fits" if used < FITS else "risky" if used <= RISKY else "does not fit"

    def notes(self, plan: Plan, at: dict[str, Group]) -> list[str]:
        """What in a prediction is an estimate or an assumption."""
        notes = []
        if self.cluster.speed_is_estimate:
            notes.append(f"computation is scaled by {self.cluster.speed:.3g} to {self.cluster.device}: an estimate")
        if plan.workers > 1 and not self.cluster.links:
            notes.append("no link was measured: exchange is taken as free")
        elif plan.workers > 1 and any(f.assumed for by in self.cluster.links.values() for f in by.values()):
            notes.append("link speeds are from a data sheet, not measured")
        if plan.tensor > 1:
            notes.append("tensor-parallel units are divided, not measured: an estimate")
        if plan.recompute == "selective" and not any(u.selective_saved_bytes.at(1) for u in self.costs.units):
            notes.append("selective recomputation was not measured: half of the activations for 15 % of a forward pass is assumed")
        if plan.pipeline > 1 and plan.schedule in ("zero-bubble", "zbv"):
            notes.append("the two parts of a backward pass are taken as equal")
        if plan.offload != "none" and not self.cluster.host_bytes_per_second:
            notes.append("12 GB/s to the host's memory is assumed")
        return notes


_Moment = dict[str, Array]
"""What is held at one moment beside the states, by kind: one number a unit, or one for all."""


class _Step:
    """One plan being predicted."""

    def __init__(self, owner: Predictor, plan: Plan, at: dict[str, Group], share: int, micro_batches: int, largest: int) -> None:
        self.owner, self.plan, self.at = owner, plan, at
        self.cluster, self.costs = owner.cluster, owner.costs
        self.share, self.micro_batches, self.largest = share, micro_batches, largest
        parts = at["shard"].ranks
        level = ("none", "optimizer", "gradients", "parameters").index(plan.shard)
        self.parts = parts if level else 1
        self.held = Held(1 / parts if level >= 2 else 1.0, 1 / parts if level >= 2 else 1.0, 1 / parts if level >= 1 else 1.0)
        self.fsdp = level >= 2 and parts > 1
        self.all_reduce = collective(self.cluster, "all_reduce", at["replicas"])
        self.copies = collective(self.cluster, "all_reduce", at["copies"])
        self.gather = collective(self.cluster, "all_gather", at["shard"])
        self.broadcast = collective(self.cluster, "broadcast", at["replicas"])
        self.scatter = collective(self.cluster, "reduce_scatter", at["shard"])
        self.added = owner.added
        self.made = owner.chain_of(plan, share / micro_batches, at["tensor"])
        self.peak = self.made if largest == share / micro_batches else owner.chain_of(plan, largest, at["tensor"])

    # The whole model on each worker, or on each group of tensor-parallel or sharding workers.

    def whole(self, quick: bool) -> Prediction:
        made, times = self.made, self.micro_batches
        forward, backward = float(made.forward.sum()), float(made.backward.sum())
        recompute, reduce = float(made.recompute.sum()), float(made.reduce.sum())
        terms = dict.fromkeys(TERMS, 0.0)
        terms["compute"] = times * (forward + backward - recompute - reduce)
        terms["recompute"] = times * recompute
        terms["tensor"] = times * reduce
        hidden = 0.0
        trainable = float(made.trainable.sum())
        parameters = float(made.parameters.sum())
        replicas = self.plan.replicas
        sent = times * float(made.reduce_bytes.sum()) * _ring(self.plan.tensor)
        if self.fsdp:
            hidden = self._sharded(terms)
            terms["exchange"] += (self.costs.lockstep - 1.0) * times * (forward + backward) + self.all_reduce.alpha  # the loss is summed
            gathers = 2 if self.plan.shard == "parameters" else 1
            sent += times * (gathers * parameters + trainable) * _ring(self.parts) / 2.0
            sent += times * trainable / self.parts * _ring(self.at["copies"].ranks)
        elif replicas > 1:
            exposed, hidden = self._buckets()
            terms["exchange"] = exposed
            terms["interference"] = (self.cluster.interference - 1.0) * hidden
            sent += trainable * _ring(replicas)
            if self.plan.shard == "optimizer":
                terms["gather"] = self._broadcasts(trainable, float(self.owner.tensors.sum()))
                sent += trainable * _ring(self.parts) / 2.0
        terms["optimizer"] = self._optimizer(trainable)
        terms["host"] = self._host(parameters, trainable)
        memory = self._whole_memory()
        return self._result(terms, memory, sent, 0.0, hidden, simulated=not quick)

    def _buckets(self) -> tuple[float, float]:
        """Seconds of the gradients' exchange that are exposed after the backward pass, and hidden in it."""
        made = self.made
        ready = np.cumsum(made.backward[::-1])
        now = 0.0
        total = 0.0
        filled = 0.0
        limit = _FIRST_BUCKET
        count = 0
        last = len(made) - 1
        held = 0.0
        for k, size in enumerate(made.trainable[::-1]):
            filled += float(size)
            held += float(self.owner.tensors[last - k])
            if filled >= limit or (k == last and filled > 0):
                count = max(1, round(filled / limit))
                seconds = count * self.all_reduce.alpha + self.all_reduce.seconds_per_byte * filled
                seconds += self.added["bucket"](filled, held, count)
                held = 0.0
                now = max(now, float(ready[k])) + seconds
                total += seconds
                filled = 0.0
                limit = _BUCKET
        exposed = max(0.0, now - float(ready[-1]))
        overlap = self.cluster.bucket_overlap
        exposed = overlap * exposed + (1.0 - overlap) * total
        return exposed, total - exposed

    def _broadcasts(self, trainable: float, tensors: float) -> float:
        """Seconds until every worker has sent the parameters that it updated, one worker after the other."""
        each = trainable / self.parts
        messages = self.parts * max(1, math.ceil(each / _BUCKET))
        added = self.added["update"](trainable, tensors)
        return messages * self.broadcast.alpha + trainable * self.broadcast.seconds_per_byte + added

    def _gathered(self, size: float, tensors: float) -> float:
        """Seconds of gathering so many bytes of parameters by FSDP2."""
        return self.gather(size) + self.added["gather"](size, tensors)

    def _reduced(self, size: float, tensors: float) -> float:
        """Seconds of reducing so many bytes of gradients by FSDP2."""
        return self.scatter(size) + self.copies(size / self.parts) + self.added["reduce"](size, tensors)

    def _sharded(self, terms: dict[str, float]) -> float:
        """Adds the seconds of gathering parameters and scattering gradients that are exposed; gives those that are hidden."""
        made, times, overlap, slower = self.made, self.micro_batches, self.cluster.overlap, self.cluster.interference - 1.0
        starts = _edges(made.blocks)
        inside = made.blocks[starts] >= 0

        def grouped(values: Array) -> Array:
            return np.asarray(np.add.reduceat(values, starts), dtype=float)

        # What is in no block is one group, gathered first and reduced last.
        parameters, trainable = grouped(made.parameters) * inside, grouped(made.trainable) * inside
        rest, rest_gradients = float(made.parameters.sum() - parameters.sum()), float(made.trainable.sum() - trainable.sum())
        tensors = grouped(self.owner.tensors) * inside
        others = float(self.owner.tensors.sum() - tensors.sum())
        gather = np.array([self._gathered(float(p), float(n)) for p, n in zip(parameters, tensors, strict=True)])
        reduce = np.array([self._reduced(float(g), float(n)) for g, n in zip(trainable, tensors, strict=True)])
        rest_gather, rest_reduce = self._gathered(rest, others), self._reduced(rest_gradients, others)
        forward, backward = grouped(made.forward), grouped(made.backward)
        nothing = np.zeros(1)
        again = self.plan.shard == "parameters"
        forward_wire = np.concatenate([gather[1:], nothing])  # the next block's parameters
        backward_wire = np.concatenate([nothing, gather[:-1]]) * again + np.concatenate([reduce[1:], nothing])  # before it, after it
        first = rest_gather + float(gather[0])
        last = float(reduce[0]) + rest_reduce

        def exposed(compute: Array, wire: Array) -> float:
            return float((np.maximum(compute, wire) + slower * np.minimum(compute, wire) - compute).sum())

        gathers = float(gather.sum()) * (2 if again else 1) + rest_gather
        reduces = float(reduce.sum()) + last - float(reduce[0])
        parallel = first + exposed(forward, forward_wire) + exposed(backward, backward_wire) + last
        shown = overlap * min(parallel, gathers + reduces + slower * float((forward + backward).sum())) + (1.0 - overlap) * (
            gathers + reduces
        )
        part = gathers / (gathers + reduces) if gathers + reduces else 0.0
        terms["gather"], terms["exchange"] = times * shown * part, times * shown * (1.0 - part)
        return times * max(0.0, gathers + reduces - shown)

    def _optimizer(self, trainable: float) -> float:
        part = trainable / self.owner._trainable if self.owner._trainable else 0.0
        # FSDP2 gives every worker a part of each parameter, ZeRO-1 some parameters whole.
        fixed = self.costs.optimizer_fixed_seconds if self.fsdp else 0.0
        return (fixed + (self.costs.optimizer_seconds - fixed) / self.parts) / self.cluster.speed * part

    def _host(self, parameters: float, trainable: float) -> float:
        if self.plan.offload == "none":
            return 0.0
        rate = self.cluster.host_bytes_per_second or _HOST_BYTES_PER_SECOND
        moved = (trainable + parameters) / self.parts
        if self.plan.offload == "parameters":
            moved += 2 * self.micro_batches * parameters / self.parts
        return moved / rate

    def _whole_memory(self) -> dict[str, float]:
        made, plan = self.peak, self.plan
        parameters = float(made.parameters.sum())
        always = dict.fromkeys(KINDS, 0.0)
        always["parameters"] = parameters * self.held.parameters
        always["optimizer"] = float(made.optimizer.sum()) * self.held.optimizer
        always["buffers"] = float(made.buffers.sum())
        always["base"] = self.owner._base
        if plan.offload in ("optimizer", "parameters"):
            always["optimizer"] = 0.0
        if plan.offload == "parameters":
            always["parameters"] -= parameters * self.held.parameters
        moments = self._sharded_moments() if self.fsdp else self._plain_moments()
        # The worst unit of each kind of moment, then the worst of those.
        found: list[dict[str, float]] = []
        for moment in moments:
            u = int(np.sum([np.broadcast_to(v, len(made)) for v in moment.values()], axis=0).argmax())
            found.append({kind: float(np.broadcast_to(v, len(made))[u]) for kind, v in moment.items()})
        worst = max(found, key=lambda kinds: sum(kinds.values()))
        return {kind: size + worst.get(kind, 0.0) for kind, size in always.items()}

    def _scratch(self, trainable: float) -> float:
        """What the optimizer needs for a moment while it steps."""
        part = self.held.optimizer if self.plan.shard == "optimizer" else self.held.gradients
        if self.costs.optimizer_transient_bytes:  # counted, not assumed
            return self.costs.optimizer_transient_bytes * part * (trainable / self.owner._trainable if self.owner._trainable else 0.0)
        moments = self.peak.optimizer.sum() > 0 and any(m in self.costs.optimizer.lower() for m in _MOMENTS)
        return trainable * self.held.gradients if moments and self.cluster.device != "cpu" and self.plan.offload == "none" else 0.0

    def _ring_buffer(self, size: float, ranks: int) -> float:
        """What gloo's all-reduce of so many bytes holds beside them: two segments of at most 1 MiB."""
        return 2.0 * min(_GLOO_SEGMENT, size / (2 * ranks)) if self.cluster.device == "cpu" and ranks > 1 else 0.0

    def _plain_moments(self) -> list[_Moment]:
        """What whole parameters need beside them in the forward pass, the backward pass and the optimizer's step."""
        made, plan, replicas = self.peak, self.plan, self.plan.replicas
        trainable = float(made.trainable.sum())
        inputs = self.costs.input_bytes * self.share
        kept = np.cumsum(made.saved)
        so_far = np.cumsum(made.trainable[::-1])[::-1]  # gradients made until a unit's backward pass is done
        late = np.cumsum(made.late[::-1])[::-1]
        communication = np.zeros(len(made))
        several = self.micro_batches > 1
        if replicas > 1 and plan.tensor == 1:
            # DDP's buckets hold all gradients from the first step on. A new one stands beside them until it is copied; between
            # micro-batches all stand beside them, and are copied in the last one.
            before: float | Array = trainable
            forward_gradients = trainable
            if several:
                # The second micro-batch has the first one's; if it is the last, what is behind it has been copied.
                before = 2.0 * trainable if self.micro_batches > 2 else trainable + np.maximum(so_far, np.cumsum(made.trainable))
                forward_gradients = 2.0 * trainable
            gradients, new = np.zeros(len(made)) + before, made.trainable + late
            full = trainable
            # Two exchanges run at once, in the last micro-batch, when there are gradients.
            at_once = 2.0 * self._ring_buffer(min(trainable, _BUCKET), replicas)
            communication = np.where(so_far > made.trainable, at_once * (self.micro_batches <= 2), 0.0)
        elif several:
            gradients, new = np.full(len(made), trainable), made.trainable + late  # made, and then added
            forward_gradients = full = trainable
        else:
            gradients, new = so_far, late
            forward_gradients, full = 0.0, trainable
        update = self._scratch(trainable)
        exchanged = 0.0
        if replicas > 1 and plan.shard == "optimizer":
            exchanged = min(trainable / self.parts, float(_BUCKET))  # a copy of what is sent
        if replicas > 1 and plan.tensor > 1:
            exchanged = min(trainable, float(_BUCKET))  # gradients are copied into buckets
        return [
            {"gradients": np.array(forward_gradients), "activations": kept, "transient": made.transient + inputs},
            {
                "gradients": gradients,
                "activations": kept,
                "transient": made.transient_backward + new + inputs,
                "communication": communication,
            },
            {"gradients": np.array(full), "transient": np.array(update + inputs)},
            {"gradients": np.array(full), "transient": np.array(inputs), "communication": np.array(exchanged)},
        ]

    def _sharded_moments(self) -> list[_Moment]:
        """The same of FSDP2. It gathers into one buffer and copies out of that into parameters; in the forward pass the buffer stays until
        the next block is gathered, in the backward pass the next block is gathered ahead. Gradients are copied into one buffer, which
        stays until the next block's are. What is in no block is gathered first and its gradients are reduced last.
        On the CPU gloo gathers, and reduces, in a copy of its own.
        """
        made, again = self.peak, self.plan.shard == "parameters"
        n, parts = len(made), self.parts
        copy = 1.0 if self.cluster.device == "cpu" else 0.0
        starts = _edges(made.blocks)
        inside = made.blocks[starts] >= 0
        run = np.repeat(np.arange(len(starts)), np.diff([*starts, n]))  # unit -> which run of units it is in

        def of_runs(values: Array) -> Array:
            return np.asarray(np.add.reduceat(values, starts), dtype=float) * inside

        whole, grads = of_runs(made.parameters), of_runs(made.trainable)
        before, after = np.zeros(len(starts)), np.zeros(len(starts))  # of the block before a run, its parameters; after it, its gradients
        last_gathered = np.zeros(len(starts))  # the buffer of the block that was gathered last before a run, or of itself
        rest = float(made.parameters.sum() - whole.sum())
        held, behind_it = 0.0, 0.0
        for r in range(len(starts)):
            before[r] = held
            held = float(whole[r]) if inside[r] else held
            last_gathered[r] = held or rest
        for r in reversed(range(len(starts))):
            after[r] = behind_it
            behind_it = float(grads[r]) if inside[r] else behind_it
        until = np.cumsum(whole)  # gathered up to and with a run
        loose = ~inside[run]
        rest_trainable = float(made.trainable.sum() - grads.sum())
        rest_made = np.cumsum((made.trainable * loose)[::-1])[::-1] + np.cumsum(made.late[::-1])[::-1]
        behind = float(grads.sum()) - np.cumsum(grads)  # gradients of blocks after a run
        own = np.where(loose, 0.0, _within(made.trainable, starts, n))  # made in this block so far
        if self.micro_batches > 1:
            sharded = np.full(n, float(made.trainable.sum()) / parts)  # from the micro-batch before
        else:
            sharded = behind[run] / parts
        kept = np.cumsum(made.saved)
        inputs = self.costs.input_bytes * self.share
        first = np.concatenate([[True], run[1:] != run[:-1]])
        last = np.concatenate([run[1:] != run[:-1], [True]])
        never = -np.inf
        gathered_forward = (whole[run] if again else until[run]) + rest
        gathered_backward = whole[run] if again else until[run]
        kept_before = kept - made.saved
        earlier = np.concatenate([[0.0], made.crossing_grad[:-1]])  # gradient of what a block was given
        forward: _Moment = {
            "parameters": gathered_forward,
            "gradients": sharded * (self.micro_batches > 1),
            "activations": kept,
            "transient": made.transient + inputs,
            "communication": last_gathered[run],
        }
        gather: _Moment = {
            "parameters": gathered_forward - whole[run],
            "gradients": sharded * (self.micro_batches > 1),
            "activations": kept_before,
            "transient": np.array(inputs),
            # The buffer of the one before, this one's, and gloo's copy.
            "communication": np.where(first & ~loose, np.where(before > 0, before, rest)[run] + (1.0 + copy) * whole[run], never),
        }
        backward: _Moment = {
            "parameters": gathered_backward + rest,
            "gradients": sharded + rest_made,
            "activations": kept,
            "transient": made.transient_backward + inputs,
            "communication": (again * before + after)[run] + own,
        }
        ahead: _Moment = {  # the block before is gathered when this one's backward pass begins
            "parameters": gathered_backward + rest,
            "gradients": sharded + rest_made,
            "activations": kept,
            "transient": made.crossing_grad + inputs,
            "communication": np.where(last & ~loose, (again * (1.0 + copy) * before + after)[run], never),
        }
        reduced: _Moment = {
            "parameters": gathered_backward - whole[run] + rest,
            "gradients": sharded + rest_made + grads[run] / parts,
            "activations": kept_before,
            "transient": earlier + inputs,
            "communication": np.where(first & ~loose, (again * before + max(1.0 + copy, 2.0 - 1.0 / parts) * grads)[run], never),
        }
        trainable = float(made.trainable.sum())
        final: _Moment = {
            "gradients": np.array(trainable / parts),
            "transient": np.array(inputs),
            "communication": np.array((1.0 + max(copy, 1.0)) * rest_trainable),
        }
        update: _Moment = {"gradients": np.array(trainable / parts), "transient": np.array(self._scratch(trainable) + inputs)}
        return [forward, gather, backward, ahead, reduced, final, update]

    # A pipeline.

    def pipeline(self, quick: bool, split_waits: bool) -> Prediction:
        plan, cluster = self.plan, self.cluster
        workers, virtual = plan.pipeline, plan.virtual
        at = self.at["stages"]
        inside, across = Group(2, "node", 2, 1), Group(2, "cluster", 1, at.sisters)
        near, far = collective(cluster, "send", inside), collective(cluster, "send", across)
        bounds = self.owner.bounds_of(plan, self.made, self.held, self.micro_batches, far if at.scope == "cluster" else near, quick)
        if bounds is None:
            raise ArgumentError(
                f"pipeline: {workers * virtual} stages were asked for, and the model can be cut into {len(self.made.cuts) + 1} at most."
            )
        stages = _arrays(self.made, bounds, plan)
        count = workers * virtual
        send, back = np.zeros(count), np.zeros(count)
        for s in range(count):
            if stages.send_bytes[s]:
                crosses = boundary_crosses(plan.layout, cluster, int(stages.worker[s]), int(stages.worker[s + 1]))
                send[s] = (far if crosses else near)(float(stages.send_bytes[s]))
            if stages.back_bytes[s]:
                crosses = boundary_crosses(plan.layout, cluster, int(stages.worker[s]), int(stages.worker[s - 1]))
                back[s] = (far if crosses else near)(float(stages.back_bytes[s]))
        # The first stage's backward pass has no input to be for: a zero-bubble schedule does all of it in the weights' part.
        inputs = (0.0, *(INPUT_SHARE * stages.backward[1:]).tolist())
        times = Times(tuple(stages.forward.tolist()), tuple(stages.backward.tolist()), tuple(send.tolist()), tuple(back.tolist()), inputs)
        if quick:
            timeline = _closed_form(plan, stages, self.micro_batches, self.owner.action_seconds, float(send.sum() + back.sum()))
            unsent = timeline
        else:
            draw = self.owner.draws and workers * virtual * self.micro_batches <= _DRAWN
            timeline = run_step(
                plan.schedule, workers, virtual, self.micro_batches, times, overhead_seconds=self.owner.action_seconds, keep_events=draw
            )
            unsent = self.owner.simulated = timeline
            if split_waits:
                free = dataclasses.replace(times, send=(0.0,) * count, send_back=(0.0,) * count)
                unsent = run_step(plan.schedule, workers, virtual, self.micro_batches, free, overhead_seconds=self.owner.action_seconds)
        trainable = _by_worker(stages.trainable, stages, workers)
        parameters = _by_worker(stages.parameters, stages, workers)
        starts = np.array(bounds[:-1])
        tensors = _by_worker(np.add.reduceat(self.owner.tensors, starts), stages, workers)
        modules = _by_worker(np.add.reduceat((self.made.parameters > 0).astype(float), starts), stages, workers)
        gather, exchange, sent = np.zeros(workers), np.zeros(workers), np.zeros(workers)
        optimizer, host = np.zeros(workers), np.zeros(workers)
        for w in range(workers):
            g, p, n, more = float(trainable[w]), float(parameters[w]), float(tensors[w]), max(0.0, float(modules[w]) - 1.0)
            if self.fsdp:
                # Each module of a stage is gathered when it is called, and reduced when its backward pass is done, micro-batch by micro-batch.
                times_gathered = self.micro_batches * (2 if plan.shard == "parameters" else 1)
                gather[w] = times_gathered * (self._gathered(p, n) + more * (self.gather.alpha + self.added["gather"].call))
                one = self._reduced(g, n) + more * (self.scatter.alpha + self.copies.alpha + self.added["reduce"].call)
                exchange[w] = self.micro_batches * one
                once = g * _ring(self.parts) / 2.0 + g / self.parts * _ring(self.at["copies"].ranks)
                sent[w] += times_gathered * p * _ring(self.parts) / 2.0 + self.micro_batches * once
            elif plan.replicas > 1:
                exchange[w] = math.ceil(g / _BUCKET) * self.all_reduce.alpha + self.all_reduce.seconds_per_byte * g
                sent[w] += g * _ring(plan.replicas)
                if plan.shard == "optimizer":
                    gather[w] = self._broadcasts(g, n)
                    sent[w] += g * _ring(self.parts) / 2.0
            optimizer[w] = self._optimizer(g)
            host[w] = self._host(p, g)
        tied = _by_worker(stages.tied_bytes, stages, workers)
        exchange += np.array([far(2.0 * float(b)) if at.scope == "cluster" else near(2.0 * float(b)) for b in tied])
        messages = _by_worker(stages.send_bytes + stages.back_bytes + stages.reduce_bytes * _ring(plan.tensor), stages, workers)
        sent += self.micro_batches * messages + 2.0 * tied
        ends = np.array(timeline.done) + gather + exchange + optimizer + host
        last = int(ends.argmax())
        terms = dict.fromkeys(TERMS, 0.0)
        actions = self.micro_batches * virtual * (3 if plan.schedule in ("zero-bubble", "zbv") else 2)
        terms["overhead"] = actions * self.owner.action_seconds
        terms["recompute"] = self.micro_batches * float(_by_worker(stages.recompute, stages, workers)[last])
        terms["tensor"] = self.micro_batches * float(_by_worker(stages.reduce, stages, workers)[last])
        terms["compute"] = max(0.0, timeline.busy[last] - terms["overhead"] - terms["recompute"] - terms["tensor"])
        waits = timeline.done[last] - timeline.busy[last]
        terms["p2p"] = min(waits, max(0.0, timeline.seconds - unsent.seconds))
        terms["bubble"] = waits - terms["p2p"]
        terms["gather"], terms["exchange"] = float(gather[last]), float(exchange[last])
        terms["optimizer"], terms["host"] = float(optimizer[last]), float(host[last])
        memory, rows = self._pipeline_memory(bounds, quick)
        names = () if quick else tuple(self.costs.units[b].name for b in bounds[1:-1])
        return self._result(
            terms, memory, float(sent.max()), timeline.mean_bubble, 0.0, not quick, rows, names, timeline.extrapolated and not quick
        )

    def _pipeline_memory(self, bounds: tuple[int, ...], quick: bool) -> tuple[dict[str, float], tuple[StageRow, ...]]:
        plan, workers = self.plan, self.plan.pipeline
        stages = _arrays(self.peak, bounds, plan)
        flight = np.array(in_flight(plan.schedule, workers, plan.virtual, self.micro_batches), dtype=float)
        # What stages share is not divided over the replicas by FSDP2.
        undivided = np.zeros((3, len(stages.worker)))
        for tie in self.peak.ties if self.fsdp else ():
            for s in {int(np.searchsorted(bounds, u, side="right")) - 1 for u in tie.units}:
                undivided[:, s] += tie.parameter_bytes, tie.trainable_bytes, tie.optimizer_bytes

        def divided(values: Array, share: float, whole: Array) -> Array:
            return (values - whole) * share + whole

        parameters = divided(stages.parameters, self.held.parameters, undivided[0])
        gradients = divided(stages.trainable, self.held.gradients, undivided[1])
        if self.fsdp and plan.shard == "gradients":
            parameters = parameters + stages.parameters - undivided[0]
        optimizer = divided(stages.optimizer, self.held.optimizer, undivided[2])
        if plan.offload in ("optimizer", "parameters"):
            optimizer = np.zeros(len(optimizer))
        if plan.offload == "parameters":
            parameters = parameters - stages.parameters * self.held.parameters
        activations = flight * stages.saved
        # What was sent is let go of at the end of the step (256 messages at most); what was received when its backward pass is done.
        arrives = np.concatenate([[0.0], stages.send_bytes[:-1]])
        returns = np.concatenate([stages.back_bytes[1:], [0.0]])
        buffers = flight * arrives + returns
        states = {"parameters": parameters, "optimizer": optimizer, "buffers": stages.buffers}
        by_worker = {kind: _by_worker(values, stages, workers) for kind, values in states.items()}
        inputs = self.costs.input_bytes * self.share  # every worker reads its replica's samples
        whole = _by_worker(stages.trainable, stages, workers)
        held_gradients = _by_worker(gradients, stages, workers)
        tied = _by_worker(stages.tied_bytes, stages, workers)
        found = []
        for w in range(workers):
            if quick or self.micro_batches * len(stages.worker) > _WALKED:
                moment = self._flown(w, stages, flight, arrives, returns, held_gradients[w])
            else:
                moment = self._walked(w, stages, arrives, returns, undivided[1])
            # Gradients are copied into buckets and summed when no activation is held any more; then the optimizer steps.
            summed = max(float(tied[w]), (0.0 if self.fsdp or plan.replicas == 1 else float(whole[w])))
            sending = whole[w] / self.parts if plan.shard == "optimizer" and plan.replicas > 1 else 0.0
            ends = [
                {"gradients": float(held_gradients[w]), "communication": max(min(summed, _BUCKET), min(sending, _BUCKET))},
                {"gradients": float(held_gradients[w]), "transient": self._scratch(float(whole[w]))},
            ]
            found.append(max([moment, *ends], key=lambda kinds: sum(kinds.values())))
            found[-1]["transient"] = found[-1].get("transient", 0.0) + inputs
        totals = [sum(kinds.values()) + sum(float(v[w]) for v in by_worker.values()) for w, kinds in enumerate(found)]
        worst = int(np.argmax(totals))
        memory = {kind: found[worst].get(kind, 0.0) + (float(by_worker[kind][worst]) if kind in by_worker else 0.0) for kind in KINDS}
        memory["base"] = self.owner._base
        if quick:
            return memory, ()
        total = parameters + gradients + optimizer + activations + stages.buffers + buffers
        rows = tuple(
            StageRow(
                stage=s,
                worker=int(stages.worker[s]),
                first=self.costs.units[bounds[s]].name,
                last=self.costs.units[bounds[s + 1] - 1].name,
                units=bounds[s + 1] - bounds[s],
                forward_seconds=float(stages.forward[s]),
                backward_seconds=float(stages.backward[s]),
                parameter_bytes=float(stages.parameters[s]),
                memory_bytes=float(total[s]),
                in_flight=int(flight[s]),
                send_bytes=float(stages.send_bytes[s]),
            )
            for s in range(len(stages.worker))
        )
        return memory, rows

    def _flown(self, worker: int, stages: _Stages, flight: Array, arrives: Array, returns: Array, gradients: float) -> dict[str, float]:
        """What a worker of a pipeline holds at its fullest, without walking through its list: all gradients and all that is in flight."""
        mine = stages.worker == worker
        sent = np.maximum(0.0, min(self.micro_batches, _PENDING) - flight) * stages.send_bytes
        if self.fsdp:
            gradients += float(stages.trainable[mine].max())
        return {
            "gradients": gradients,
            "activations": float((flight * stages.saved)[mine].sum()),
            "transient": float(stages.transient[mine].max()),
            "communication": float((sent + flight * arrives + returns)[mine].sum()),
        }

    def _walked(self, worker: int, stages: _Stages, arrives: Array, returns: Array, undivided: Array) -> dict[str, float]:
        """What a worker of a pipeline holds at its fullest, action by action, as the runtime does.

        A received tensor is held until the gradient of it has been sent. What was sent is held to the end of the step (the last 256 of
        it), and an activation that is sent is one of those that its stage has saved.
        """
        plan, made, bounds = self.plan, self.peak, stages.bounds
        part = 1.0 / self.parts if self.fsdp else 1.0
        held = (stages.trainable - undivided) * part + undivided  # gradients of a stage
        order = actions(plan.schedule, plan.pipeline, plan.virtual, self.micro_batches, True)[worker]
        forward: dict[int, tuple[float, float, float]] = {}  # most in a pass: saved so far, for a moment, exchanged
        first: dict[int, tuple[float, float, float, float]] = {}  # and of a stage's first backward pass: gradients
        later: dict[int, tuple[float, float, float, float]] = {}
        split = plan.schedule in ("zero-bubble", "zbv")
        tied = np.zeros(len(made))  # gradients of what several units share, where the pass makes them
        owned, weights = made.trainable.copy(), made.parameters.copy()
        for_a_moment = made.transient_backward.copy()
        for tie in made.ties:
            tied[list(tie.units)] += tie.trainable_bytes
            if len({int(np.searchsorted(bounds, u, side="right")) for u in tie.units}) > 1:
                # The others' gradient of it is made on another worker.
                for_a_moment[tie.units[0]] = max(0.0, for_a_moment[tie.units[0]] - tie.trainable_bytes)
            owned[tie.units[0]] -= tie.trainable_bytes
            weights[tie.units[0]] -= tie.parameter_bytes
        for s in {a.stage for a in order}:
            units = slice(bounds[s], bounds[s + 1])
            kept, new, shared = np.cumsum(made.saved[units]), owned[units], tied[units]
            so_far, late = np.cumsum(new[::-1])[::-1], np.cumsum(shared[::-1])[::-1]
            gathered = waiting = reducing = np.zeros(len(kept))
            if self.fsdp:
                edges = _edges(made.blocks[units])
                run = np.repeat(np.arange(len(edges)), np.diff([*edges, len(kept)]))
                # Each module is gathered by itself; what goes into a reduction is held until the stage's whole backward pass is done.
                gathered = np.add.reduceat(weights[units], edges)[run] * (plan.shard == "parameters")
                own = np.add.reduceat(new, edges)[run]
                waiting = np.cumsum(np.add.reduceat(new, edges)[::-1])[::-1][run] - own
                # Parameters are let go of before gradients are copied into a buffer, and reduced into another.
                reducing = np.maximum(gathered, own * (1.0 + part))
            else:
                own = new
            first_gradients = so_far * part + late + (own if self.fsdp else 0.0)
            at = int((kept + made.transient[units] + 2 * gathered).argmax())
            forward[s] = float(kept[at]), float(made.transient[units][at]), float(2 * gathered[at])
            wire = waiting + reducing
            # In later micro-batches a gradient is made, and then added to what is there.
            both = (first, first_gradients, for_a_moment[units]), (later, np.full(len(kept), held[s]), for_a_moment[units] + own + late)
            for table, gradients_at, transient_at in both:
                at = int((kept + transient_at + gradients_at + wire).argmax())
                table[s] = float(gradients_at[at]), float(kept[at]), float(transient_at[at]), float(wire[at])
        activations = gradients_held = communication = 0.0
        best: dict[str, float] = {}
        most = -1.0
        done: set[int] = set()
        passed: set[tuple[int, int]] = set()
        sent: dict[tuple[int, int], float] = {}
        pending: deque[tuple[float, tuple[int, int] | None]] = deque()

        def look(gradients: float, saved: float, transient: float, exchanged: float) -> None:
            nonlocal most, best
            total = gradients + saved + transient + exchanged
            if total > most:
                most = total
                best = {"gradients": gradients, "activations": saved, "transient": transient, "communication": exchanged}

        for stage, kind, micro in order:
            key = (stage, micro)
            if kind == "RECV_F":
                communication += float(arrives[stage])
            elif kind == "RECV_B":
                communication += float(returns[stage])
            elif kind == "F":
                kept_most, transient, exchanged = forward[stage]
                look(gradients_held, activations + kept_most, transient, communication + exchanged)
                activations += float(stages.saved[stage])
            elif kind == "SEND_F":
                message = float(stages.send_bytes[stage])
                sent[key] = min(message, float(stages.saved[stage]))
                communication += message - sent[key]
                pending.append((message, key))
            elif kind in ("B", "I"):
                gradients_most, kept_most, transient, exchanged = (later if stage in done else first)[stage]
                others = gradients_held - (float(held[stage]) if stage in done else 0.0)
                look(others + gradients_most, activations - float(stages.saved[stage]) + kept_most, transient, communication + exchanged)
                if stage not in done:
                    gradients_held += float(held[stage])
                    done.add(stage)
                communication += float(stages.back_bytes[stage] - returns[stage])
            elif kind == "SEND_B":
                communication -= float(arrives[stage])
                pending.append((float(stages.back_bytes[stage]), None))
            if kind == ("W" if split else "B"):
                activations -= float(stages.saved[stage])
                communication += sent.get(key, 0.0)  # what was sent stays
                passed.add(key)
            if len(pending) > _PENDING:
                message, origin = pending.popleft()
                if origin is None or origin in passed:
                    communication -= message
                else:
                    communication -= message - sent[origin]
                    sent[origin] = 0.0
        return best

    def _result(
        self,
        terms: dict[str, float],
        memory: dict[str, float],
        sent: float,
        bubble: float,
        hidden: float,
        simulated: bool,
        stages: tuple[StageRow, ...] = (),
        split_at: tuple[str, ...] = (),
        extrapolated: bool = False,
    ) -> Prediction:
        plan = self.plan
        notes = () if not simulated else tuple(self.owner.notes(plan, self.at))
        if extrapolated:
            notes = (*notes, "simulated with fewer micro-batches and continued in a line")
        placement = {}
        if simulated and plan.workers > 1:
            names = {"tensor": plan.tensor, "replicas": plan.replicas, "stages": plan.pipeline}
            placement = {name: self.at[name].sentence() for name, size in names.items() if size > 1}
            if plan.shard_within and plan.shard != "none":
                placement["shard"], placement["copies"] = self.at["shard"].sentence(), self.at["copies"].sentence()
            if plan.pipeline > 1:
                placement["stages"] = "neighbours inside a node" if self.at["stages"].scope == "node" else "neighbours across nodes"
        return Prediction(
            plan=plan,
            raw_step_seconds=sum(terms.values()),
            correction=self.cluster.corrections.get(plan.family, 1.0),
            terms=terms,
            one_device_seconds=self.owner.one_device_seconds(plan.batch_size),
            memory=memory,
            capacity_bytes=self.cluster.memory_bytes,
            verdict=self.owner.verdict(sum(memory.values())),
            exchanged_bytes=sent,
            bubble=bubble,
            micro_batches=self.micro_batches,
            micro_samples=self.largest,
            placement=placement,
            stages=stages,
            split_at=split_at,
            hidden_seconds=hidden,
            notes=notes,
            simulated=simulated,
        )


def _ring(ranks: int) -> float:
    """Bytes that a worker sends for each byte that a ring all-reduces."""
    return 2.0 * (ranks - 1) / ranks


def _within(values: Array, starts: npt.NDArray[np.intp], count: int) -> Array:
    """The sum over a unit and those after it in its run."""
    total = np.cumsum(values[::-1])[::-1]
    ends = np.append(starts[1:], count)
    behind = np.append(total, 0.0)[ends]
    return np.asarray(total - np.repeat(behind, np.diff([*starts, count])), dtype=float)


def _edges(blocks: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    """Units that begin a block, or a run of units that are in none."""
    return np.concatenate([[0], np.flatnonzero(np.diff(blocks)) + 1]).astype(np.intp)


def _arrays(made: Chain, bounds: tuple[int, ...], plan: Plan) -> _Stages:
    starts = np.array(bounds[:-1])
    count = len(starts)
    worker = np.array([worker_of(s, plan.pipeline, plan.schedule) for s in range(count)])

    def sums(values: Array) -> Array:
        return np.asarray(np.add.reduceat(values, starts), dtype=float)

    parameters, trainable, optimizer = sums(made.parameters), sums(made.trainable), sums(made.optimizer)
    tied = np.zeros(count)
    for tie in made.ties:
        owners = sorted({int(np.searchsorted(starts, u, side="right")) - 1 for u in tie.units})
        if len(owners) > 1:
            first = int(np.searchsorted(starts, tie.units[0], side="right")) - 1
            for s in owners:
                tied[s] += tie.trainable_bytes
                if s != first:
                    parameters[s] += tie.parameter_bytes
                    trainable[s] += tie.trainable_bytes
                    optimizer[s] += tie.optimizer_bytes
    ends = np.array(bounds[1:]) - 1
    apart = worker[1:] != worker[:-1]
    send = np.zeros(count)
    back = np.zeros(count)
    send[:-1] = made.crossing[ends[:-1]] * apart
    back[1:] = made.crossing_grad[ends[:-1]] * apart
    return _Stages(
        bounds=bounds,
        worker=worker,
        forward=sums(made.forward),
        backward=sums(made.backward),
        recompute=sums(made.recompute),
        reduce=sums(made.reduce),
        parameters=parameters,
        trainable=trainable,
        optimizer=optimizer,
        buffers=sums(made.buffers),
        saved=sums(made.saved),
        transient=np.asarray(np.maximum.reduceat(made.transient_backward, starts), dtype=float),
        send_bytes=send,
        back_bytes=back,
        tied_bytes=tied,
        reduce_bytes=sums(made.reduce_bytes),
    )


def _by_worker(values: Array, stages: _Stages, workers: int) -> Array:
    return np.asarray(np.bincount(stages.worker.astype(np.intp), weights=values, minlength=workers), dtype=float)


def _closed_form(plan: Plan, stages: _Stages, micro_batches: int, overhead_seconds: float, send_seconds: float) -> Timeline:
    """The textbook's step: the busiest worker without a pause, and the others' time for one micro-batch, as far as the schedule waits for it."""
    workers = plan.pipeline
    thrice = plan.schedule in ("zero-bubble", "zbv")
    each = _by_worker(stages.forward + stages.backward + (3 if thrice else 2) * overhead_seconds, stages, workers)
    busiest = float(each.max())
    gaps = zbv_gaps(workers, micro_batches) if plan.schedule == "zbv" else 1.0
    wait = (float(each.sum()) - busiest) / plan.virtual * gaps / (3.0 if thrice else 1.0) + send_seconds / plan.virtual
    seconds = micro_batches * busiest + wait
    busy = tuple((micro_batches * each).tolist())
    return Timeline(seconds, busy, (seconds,) * workers, ())
