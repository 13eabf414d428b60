"""Compose a plan's step time from measured parts, term by term."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import partial

import numpy as np

from ronde.plan.plan import Plan
from ronde.predict.cluster import Cluster
from ronde.predict.collectives import CollectiveCost, Group, boundary_crosses, collective
from ronde.predict.costs import Array
from ronde.predict.peak_memory import PeakMemory
from ronde.predict.plan_setup import BUCKET_BYTES, FIRST_BUCKET_BYTES, PlanSetup
from ronde.predict.prediction import TERMS, StageRow
from ronde.predict.simulate import Timeline, Times, run_step
from ronde.predict.unit_arrays import Stages, edges, ring, stage_arrays

# FSDP2 with gloo on 2 cores, a gather or a reduction: fitted to benchmarks/results/plan_truth.json
_SHARD_CALL_SECONDS, _SHARD_SECONDS_PER_BYTE = 7e-4, 3e-10


@dataclass
class StepParts:
    """A predicted step: seconds by kind, bytes by kind, and what a :class:`Prediction` says of
    them.
    """

    terms: dict[str, float]
    memory: dict[str, float]
    sent: float
    hidden: float = 0.0
    bubble: float = 0.0
    stages: tuple[StageRow, ...] = ()


class StepPrediction:
    """Predicts one plan: its time, with its peak memory."""

    def __init__(self, setup: PlanSetup) -> None:
        self.setup, self.memory = setup, PeakMemory(setup)
        self.copies = setup.wire("all_reduce", "copies")
        self.gather = setup.wire("all_gather", "shard")
        self.broadcast = setup.wire("broadcast", "replicas")
        self.scatter = setup.wire("reduce_scatter", "shard")

    def whole(self) -> StepParts:
        """With the whole model on each worker, or each tensor-parallel or sharding group."""
        made, times = self.setup.made, self.setup.micro_batches
        forward, backward = float(made.forward.sum()), float(made.backward.sum())
        recompute, reduce = float(made.recompute.sum()), float(made.reduce.sum())
        terms = dict.fromkeys(TERMS, 0.0)
        further = (times - 1) * self._accumulated(float(made.trainable.sum()))
        terms["compute"] = times * (forward + backward - recompute - reduce) + further
        terms["recompute"] = times * recompute
        terms["tensor"] = times * reduce
        hidden = 0.0
        trainable = float(made.trainable.sum())
        parameters = float(made.parameters.sum())
        replicas = self.setup.plan.replicas
        sent = times * float(made.reduce_bytes.sum()) * ring(self.setup.plan.tensor)
        if self.setup.fsdp:
            hidden = self._sharded(terms)
            terms["exchange"] += self.setup.all_reduce.alpha  # the loss is summed
            gathers = 2 if self.setup.plan.shard == "parameters" else 1
            # A gather or a scatter sends half of what a ring's all-reduce does.
            sent += times * (gathers * parameters + trainable) * ring(self.setup.parts) / 2.0
            sent += trainable / self.setup.parts * ring(self.setup.groups["copies"].ranks)
        elif replicas > 1:
            exposed, hidden = self._buckets()
            terms["exchange"] = exposed
            terms["interference"] = (self.setup.cluster.interference - 1.0) * hidden
            sent += trainable * ring(replicas)
            if self.setup.plan.shard == "optimizer":
                terms["gather"] = self._broadcasts(trainable)
                sent += trainable * ring(self.setup.parts) / 2.0
        terms["optimizer"] = self._optimizer(trainable)
        terms["host"] = self._host(parameters, trainable)
        return StepParts(terms, self.memory.of_whole_model(), sent, hidden)

    def _buckets(self) -> tuple[float, float]:
        """Seconds of the gradient exchange that the backward pass does not hide, and hides."""
        made, gradients = self.setup.made, self.setup.costs.gradients
        ready = np.cumsum(made.backward[::-1])
        # A bucket is sent when it is full, which is in the middle of a unit that has many
        # parameters.
        at = ready[::-1][gradients.unit] - gradients.before * made.backward[gradients.unit]
        behind = np.cumsum(gradients.share * made.trainable[gradients.unit])
        now = total = sent = 0.0
        limit, first = FIRST_BUCKET_BYTES, 0
        while first < len(behind) and behind[-1] > sent:
            last = min(int(np.searchsorted(behind, sent + limit)), len(behind) - 1)
            filled = float(behind[last]) - sent
            seconds = self.setup.all_reduce.alpha + self.setup.all_reduce.seconds_per_byte * filled
            now = max(now, float(at[last])) + seconds
            total += seconds
            sent, first, limit = float(behind[last]), last + 1, BUCKET_BYTES
        exposed = max(0.0, now - float(ready[-1]))
        # Where nothing hides, all of it is exposed, whenever a bucket was ready.
        overlap = self.setup.cluster.bucket_overlap
        exposed = overlap * exposed + (1.0 - overlap) * total
        return exposed, total - exposed

    def _broadcasts(self, trainable: float) -> float:
        """Seconds for all workers to send the parameters they updated, one after another."""
        wire, parts = self.broadcast, self.setup.parts
        messages = parts * max(1, math.ceil(trainable / parts / BUCKET_BYTES))
        wired = messages * wire.alpha + trainable * wire.seconds_per_byte
        return wired + self._handled(trainable)

    def _gathered(self, size: float) -> float:
        """Seconds of FSDP2's gather of so many bytes."""
        return self.gather(size) + self._handled(size)

    def _reduced(self, size: float, last: bool) -> float:
        """Seconds of FSDP2's gradient reduction; over the copies in the last micro-batch only."""
        copies = self.copies(size / self.setup.parts) if last else 0.0
        return self.scatter(size) + copies + self._handled(size)

    def _handled(self, size: float) -> float:
        """Seconds of the hooks and the copies to and from flat buffers of FSDP2 and ZeRO-1."""
        if size <= 0 or self.setup.cluster.device != "cpu":
            return 0.0  # on an accelerator they run beside its kernels
        return _SHARD_CALL_SECONDS + _SHARD_SECONDS_PER_BYTE * size

    def _sharded(self, terms: dict[str, float]) -> float:
        """Add exposed gather and scatter seconds; returns the hidden ones."""
        kinds = ((1, True), (self.setup.micro_batches - 1, False))
        passes = [(times, *self._sharded_pass(last)) for times, last in kinds if times]
        terms["gather"] = sum(times * gather for times, gather, _, _ in passes)
        terms["exchange"] = sum(times * exchange for times, _, exchange, _ in passes)
        return sum(times * hidden for times, _, _, hidden in passes)

    def _sharded_pass(self, last_pass: bool) -> tuple[float, float, float]:
        """Exposed gather and scatter seconds of one micro-batch, and hidden ones of both."""
        made, cluster = self.setup.made, self.setup.cluster
        overlap, slower = cluster.overlap, cluster.interference - 1.0
        starts = edges(made.blocks)
        inside = made.blocks[starts] >= 0

        def grouped(values: Array) -> Array:
            return np.asarray(np.add.reduceat(values, starts), dtype=float)

        # What is in no block is one group, gathered first and reduced last.
        parameters, trainable = grouped(made.parameters) * inside, grouped(made.trainable) * inside
        rest = float(made.parameters.sum() - parameters.sum())
        rest_gradients = float(made.trainable.sum() - trainable.sum())
        gather = np.array([self._gathered(p) for p in parameters.tolist()])
        reduce = np.array([self._reduced(g, last_pass) for g in trainable.tolist()])
        rest_gather = self._gathered(rest)
        rest_reduce = self._reduced(rest_gradients, last_pass)
        forward, backward = grouped(made.forward), grouped(made.backward)
        nothing = np.zeros(1)
        again = self.setup.plan.shard == "parameters"
        forward_wire = np.concatenate([gather[1:], nothing])  # the next block's parameters
        before, after = (
            np.concatenate([nothing, gather[:-1]]),
            np.concatenate([reduce[1:], nothing]),
        )
        backward_wire = before * again + after
        first = rest_gather + float(gather[0])
        last = float(reduce[0]) + rest_reduce

        def exposed(compute: Array, wire: Array) -> float:
            both = np.maximum(compute, wire) + slower * np.minimum(compute, wire)
            return float((both - compute).sum())

        gathers = float(gather.sum()) * (2 if again else 1) + rest_gather
        reduces = float(reduce.sum()) + last - float(reduce[0])
        parallel = first + exposed(forward, forward_wire) + exposed(backward, backward_wire) + last
        wire = gathers + reduces
        least = min(parallel, wire + slower * float((forward + backward).sum()))
        shown = overlap * least + (1.0 - overlap) * wire
        part = gathers / wire if wire else 0.0
        return shown * part, shown * (1.0 - part), max(0.0, wire - shown)

    def _accumulated(self, trainable: float) -> float:
        """Seconds to add one micro-batch's gradients to the previous ones."""
        seconds = self.setup.costs.accumulate_seconds / self.setup.cluster.speed
        return (
            seconds * self.setup.part_of(trainable) / (self.setup.parts if self.setup.fsdp else 1)
        )

    def _optimizer(self, trainable: float) -> float:
        """Seconds of clipping and the optimizer step."""
        step = self.setup.costs.optimizer_seconds / self.setup.parts
        # ZeRO-1 clips before it divides.
        clip = self.setup.costs.clip_seconds / (self.setup.parts if self.setup.fsdp else 1)
        return (step + clip) / self.setup.cluster.speed * self.setup.part_of(trainable)

    def _host(self, parameters: float, trainable: float) -> float:
        if self.setup.plan.offload == "none":
            return 0.0
        # PCIe 3.0 with 16 lanes gives about 12 GB/s; the answer says that it is assumed.
        rate = self.setup.cluster.host_bytes_per_second or 12e9
        moved = (trainable + parameters) / self.setup.parts
        if self.setup.plan.offload == "parameters":
            moved += 2 * self.setup.micro_batches * parameters / self.setup.parts
        return moved / rate

    def pipeline(self, quick: bool, split_waits: bool) -> StepParts:
        """With one or more stages on each worker."""
        setup, plan = self.setup, self.setup.plan
        near, far, usual = send_costs(setup.cluster, setup.groups["stages"])
        micro_batches, bounds = setup.micro_batches, setup.bounds
        stages = stage_arrays(setup.made, bounds, plan)
        times = self._pass_times(stages, near, far)
        timeline, unsent = self._timelines(stages, times, quick, split_waits)
        gather, exchange, sent, optimizer, host = self._after_passes(stages, bounds)
        tied = stages.by_worker(stages.tied_bytes)
        exchange += np.array([usual(2.0 * float(b)) for b in tied])
        messages = stages.send_bytes + stages.back_bytes + stages.reduce_bytes * ring(plan.tensor)
        sent += micro_batches * stages.by_worker(messages) + 2.0 * tied
        last = int((np.array(timeline.done) + gather + exchange + optimizer + host).argmax())
        terms = self._pipeline_terms(stages, timeline, unsent, last)
        terms["gather"], terms["exchange"] = float(gather[last]), float(exchange[last])
        terms["optimizer"], terms["host"] = float(optimizer[last]), float(host[last])
        memory, rows = self.memory.of_pipeline(bounds, quick)
        bubble = timeline.mean_bubble
        return StepParts(terms, memory, float(sent.max()), 0.0, bubble, rows)

    def _pass_times(self, stages: Stages, near: CollectiveCost, far: CollectiveCost) -> Times:
        """Of each stage, for one micro-batch."""
        setup, plan = self.setup, self.setup.plan

        def seconds(size: float, one: int, other: int) -> float:
            ends = int(stages.worker[one]), int(stages.worker[other])
            wire = far if boundary_crosses(plan.layout, setup.cluster, *ends) else near
            return wire(size)

        send, back = (
            [seconds(float(b), s, s + way) if b else 0.0 for s, b in enumerate(sizes)]
            for sizes, way in ((stages.send_bytes, 1), (stages.back_bytes, -1))
        )
        # All but the first add to gradients that are there: spread over all of them.
        further = (setup.micro_batches - 1) / setup.micro_batches
        added = [further * self._accumulated(float(t)) for t in stages.trainable]
        backward = tuple((stages.backward + added).tolist())
        forward = tuple(stages.forward.tolist())
        if setup.costs.sends_block:
            forward = tuple(map(sum, zip(forward, send, strict=True)))
            backward = tuple(map(sum, zip(backward, back, strict=True)))
            send = back = [0.0] * len(forward)
        return Times(forward, backward, tuple(send), tuple(back))

    def _timelines(
        self, stages: Stages, times: Times, quick: bool, split_waits: bool
    ) -> tuple[Timeline, Timeline]:
        """The pipeline's step, and the same with free sends."""
        setup, plan = self.setup, self.setup.plan
        action_seconds = setup.cluster.action_seconds
        if quick:
            sends = float(np.sum(times.send) + np.sum(times.send_back))
            timeline = _closed_form(plan, stages, setup.micro_batches, action_seconds, sends)
            return timeline, timeline
        simulated = partial(
            run_step,
            plan.schedule,
            plan.pipeline,
            plan.virtual,
            setup.micro_batches,
            overhead_seconds=action_seconds,
        )
        count = plan.pipeline * plan.virtual
        timeline = simulated(times)
        if not split_waits:
            return timeline, timeline
        free = dataclasses.replace(times, send=(0.0,) * count, send_back=(0.0,) * count)
        return timeline, simulated(free)

    def _after_passes(self, stages: Stages, bounds: tuple[int, ...]) -> tuple[Array, ...]:
        """By worker: seconds of gathers and of exchanges, bytes sent, seconds of the optimizer and
        of the host's memory.
        """
        setup, plan, workers = self.setup, self.setup.plan, self.setup.plan.pipeline
        starts, micro_batches = np.array(bounds[:-1]), setup.micro_batches
        modules = np.add.reduceat((setup.made.parameters > 0).astype(float), starts)
        of_workers = zip(
            stages.by_worker(stages.trainable).tolist(),
            stages.by_worker(stages.parameters).tolist(),
            stages.by_worker(modules).tolist(),
            strict=True,
        )
        by_kind = np.zeros((5, workers))
        gather, exchange, sent, optimizer, host = by_kind
        wire = setup.all_reduce
        call = _SHARD_CALL_SECONDS if setup.cluster.device == "cpu" else 0.0
        for w, (g, p, m) in enumerate(of_workers):
            more = max(0.0, m - 1.0)
            if setup.fsdp:
                # Each module of a stage is gathered when it is called, and reduced when its
                # backward pass is done, micro-batch by micro-batch.
                gathers = micro_batches * (2 if plan.shard == "parameters" else 1)
                gather[w] = gathers * (self._gathered(p) + more * (self.gather.alpha + call))
                reduces = self._reduced(g, last=False) + more * (self.scatter.alpha + call)
                exchange[w] = micro_batches * reduces
                sent[w] = (gathers * p + micro_batches * g) * ring(setup.parts) / 2.0
            elif plan.replicas > 1:
                exchange[w] = math.ceil(g / BUCKET_BYTES) * wire.alpha + wire.seconds_per_byte * g
                sent[w] = g * ring(plan.replicas)
                if plan.shard == "optimizer":
                    gather[w] = self._broadcasts(g)
                    sent[w] += g * ring(setup.parts) / 2.0
            optimizer[w], host[w] = self._optimizer(g), self._host(p, g)
        return tuple(by_kind)

    def _pipeline_terms(
        self, stages: Stages, timeline: Timeline, unsent: Timeline, worker: int
    ) -> dict[str, float]:
        """What the passes of a worker spend their time on."""
        setup, plan = self.setup, self.setup.plan
        terms = dict.fromkeys(TERMS, 0.0)
        actions = setup.micro_batches * plan.virtual * 2
        terms["overhead"] = actions * setup.cluster.action_seconds
        for name, seconds in (("recompute", stages.recompute), ("tensor", stages.reduce)):
            of_worker = stages.by_worker(seconds)[worker]
            terms[name] = setup.micro_batches * float(of_worker)
        known = terms["overhead"] + terms["recompute"] + terms["tensor"]
        terms["compute"] = max(0.0, timeline.busy[worker] - known)
        waits = timeline.done[worker] - timeline.busy[worker]
        terms["p2p"] = min(waits, max(0.0, timeline.seconds - unsent.seconds))
        terms["bubble"] = waits - terms["p2p"]
        return terms


def send_costs(
    cluster: Cluster, stages: Group
) -> tuple[CollectiveCost, CollectiveCost, CollectiveCost]:
    """A send inside a node, one between nodes, and the one of most stages."""
    near = collective(cluster, "send", Group(2, "node", 2, 1))
    far = collective(cluster, "send", Group(2, "cluster", 1, stages.sisters))
    return near, far, far if stages.scope == "cluster" else near


def _closed_form(
    plan: Plan, stages: Stages, micro_batches: int, overhead_seconds: float, send_seconds: float
) -> Timeline:
    """The textbook's step: the busiest worker, plus the others' time for one micro-batch."""
    workers = plan.pipeline
    each = stages.by_worker(stages.seconds + 2 * overhead_seconds)
    busiest = float(each.max())
    wait = (float(each.sum()) - busiest + send_seconds) / plan.virtual
    seconds = micro_batches * busiest + wait
    busy = tuple((micro_batches * each).tolist())
    return Timeline(seconds, busy, (seconds,) * workers, ())
