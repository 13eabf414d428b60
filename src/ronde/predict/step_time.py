"""Compose a plan's step time from measured parts, term by term."""

from __future__ import annotations

import dataclasses
import math
from functools import partial

import numpy as np

from ronde.predict.collectives import Group, boundary_crosses, collective
from ronde.predict.peak_memory import PeakMemory
from ronde.predict.plan_setup import PlanSetup
from ronde.predict.prediction import TERMS, Prediction, StageRow
from ronde.predict.simulate import INPUT_SHARE, Times, run_step
from ronde.predict.stage_arrays import by_worker, closed_form, edges, ring, stage_arrays
from ronde.predict.unit_arrays import Array
from ronde.world import ArgumentError

_FIRST_BUCKET, _BUCKET = 1 << 20, 25 << 20  # torch's DistributedDataParallel
_DRAWN = 4_000  # micro-batches × stages up to which a picture can be read
_HOST_BYTES_PER_SECOND = 12e9


class StepPrediction:
    """Predicts one plan: its time, with its peak memory."""

    def __init__(self, setup: PlanSetup) -> None:
        self.setup, self.memory = setup, PeakMemory(setup)

    def whole(self, quick: bool) -> Prediction:
        """With the whole model on each worker, or each tensor-parallel or sharding group."""
        made, times = self.setup.made, self.setup.micro_batches
        forward, backward = float(made.forward.sum()), float(made.backward.sum())
        recompute, reduce = float(made.recompute.sum()), float(made.reduce.sum())
        terms = dict.fromkeys(TERMS, 0.0)
        # nobody else computes meanwhile
        alone = self.setup.costs.contention if self.setup.plan.workers == 1 else 1.0
        further = (times - 1) * self._accumulated(float(made.trainable.sum()))
        terms["compute"] = (times * (forward + backward - recompute - reduce) + further) / alone
        terms["recompute"] = times * recompute / alone
        terms["tensor"] = times * reduce
        if self.setup.plan.tensor > 1:  # its workers wait for each other in every block
            terms["tensor"] += (
                (self.setup.costs.lockstep - 1.0) * times * (forward + backward - reduce)
            )
        hidden = 0.0
        trainable = float(made.trainable.sum())
        parameters = float(made.parameters.sum())
        replicas = self.setup.plan.replicas
        sent = times * float(made.reduce_bytes.sum()) * ring(self.setup.plan.tensor)
        if self.setup.fsdp:
            hidden = self._sharded(terms)
            terms["exchange"] += (self.setup.costs.lockstep - 1.0) * times * (
                forward + backward
            ) + self.setup.all_reduce.alpha  # the loss is summed
            gathers = 2 if self.setup.plan.shard == "parameters" else 1
            sent += times * (gathers * parameters + trainable) * ring(self.setup.parts) / 2.0
            sent += trainable / self.setup.parts * ring(self.setup.groups["copies"].ranks)
        elif replicas > 1:
            exposed, hidden = self._buckets()
            terms["exchange"] = exposed
            terms["interference"] = (self.setup.cluster.interference - 1.0) * hidden
            sent += trainable * ring(replicas)
            if self.setup.plan.shard == "optimizer":
                terms["gather"] = self._broadcasts(trainable, float(self.setup.owner.tensors.sum()))
                sent += trainable * ring(self.setup.parts) / 2.0
        terms["optimizer"] = self._optimizer(trainable)
        terms["host"] = self._host(parameters, trainable)
        memory = self.memory.of_whole_model()
        return self._result(terms, memory, sent, 0.0, hidden, simulated=not quick)

    def _buckets(self) -> tuple[float, float]:
        """Seconds of the gradient exchange that the backward pass does not hide, and hides."""
        made, gradients = self.setup.made, self.setup.owner.gradients
        ready = np.cumsum(made.backward[::-1])
        # A bucket is sent when it is full, which is in the middle of a unit that has many
        # parameters.
        at = ready[::-1][gradients.unit] - gradients.before * made.backward[gradients.unit]
        behind = np.cumsum(gradients.share * made.trainable[gradients.unit])
        now = total = sent = 0.0
        limit, first = _FIRST_BUCKET, 0
        while first < len(behind) and behind[-1] > sent:
            last = min(int(np.searchsorted(behind, sent + limit)), len(behind) - 1)
            filled = float(behind[last]) - sent
            seconds = self.setup.all_reduce.alpha + self.setup.all_reduce.seconds_per_byte * filled
            seconds += self.setup.added["bucket"](
                filled, float(gradients.tensors[first : last + 1].sum()), 1
            )
            now = max(now, float(at[last])) + seconds
            total += seconds
            sent, first, limit = float(behind[last]), last + 1, _BUCKET
        exposed = max(0.0, now - float(ready[-1]))
        overlap = self.setup.cluster.bucket_overlap
        exposed = overlap * exposed + (1.0 - overlap) * total
        return exposed, total - exposed

    def _broadcasts(self, trainable: float, tensors: float) -> float:
        """Seconds for all workers to send the parameters they updated, one after another."""
        each = trainable / self.setup.parts
        messages = self.setup.parts * max(1, math.ceil(each / _BUCKET))
        added = self.setup.added["update"](trainable, tensors)
        return (
            messages * self.setup.broadcast.alpha
            + trainable * self.setup.broadcast.seconds_per_byte
            + added
        )

    def _gathered(self, size: float, tensors: float) -> float:
        """Seconds of FSDP2's gather of so many bytes."""
        return self.setup.gather(size) + self.setup.added["gather"](size, tensors)

    def _reduced(self, size: float, tensors: float, last: bool) -> float:
        """Seconds of FSDP2's gradient reduction; over the copies in the last micro-batch only."""
        return (
            self.setup.scatter(size)
            + (self.setup.copies(size / self.setup.parts) if last else 0.0)
            + self.setup.added["reduce"](size, tensors)
        )

    def _sharded(self, terms: dict[str, float]) -> float:
        """Add exposed gather and scatter seconds; returns the hidden ones."""
        kinds = ((1, True), (self.setup.micro_batches - 1, False))
        found = [(times, *self._sharded_pass(last)) for times, last in kinds if times]
        terms["gather"] = sum(times * gather for times, gather, _, _ in found)
        terms["exchange"] = sum(times * exchange for times, _, exchange, _ in found)
        return sum(times * hidden for times, _, _, hidden in found)

    def _sharded_pass(self, last_pass: bool) -> tuple[float, float, float]:
        """Exposed gather and scatter seconds of one micro-batch, and hidden ones of both."""
        made, overlap, slower = (
            self.setup.made,
            self.setup.cluster.overlap,
            self.setup.cluster.interference - 1.0,
        )
        starts = edges(made.blocks)
        inside = made.blocks[starts] >= 0

        def grouped(values: Array) -> Array:
            return np.asarray(np.add.reduceat(values, starts), dtype=float)

        # What is in no block is one group, gathered first and reduced last.
        parameters, trainable = grouped(made.parameters) * inside, grouped(made.trainable) * inside
        rest, rest_gradients = (
            float(made.parameters.sum() - parameters.sum()),
            float(made.trainable.sum() - trainable.sum()),
        )
        tensors = grouped(self.setup.owner.tensors) * inside
        others = float(self.setup.owner.tensors.sum() - tensors.sum())
        gather = np.array(
            [self._gathered(float(p), float(n)) for p, n in zip(parameters, tensors, strict=True)]
        )
        reduce = np.array(
            [
                self._reduced(float(g), float(n), last_pass)
                for g, n in zip(trainable, tensors, strict=True)
            ]
        )
        rest_gather, rest_reduce = (
            self._gathered(rest, others),
            self._reduced(rest_gradients, others, last_pass),
        )
        forward, backward = grouped(made.forward), grouped(made.backward)
        nothing = np.zeros(1)
        again = self.setup.plan.shard == "parameters"
        forward_wire = np.concatenate([gather[1:], nothing])  # the next block's parameters
        # before it, after it
        backward_wire = np.concatenate([nothing, gather[:-1]]) * again + np.concatenate(
            [reduce[1:], nothing]
        )
        first = rest_gather + float(gather[0])
        last = float(reduce[0]) + rest_reduce

        def exposed(compute: Array, wire: Array) -> float:
            return float(
                (np.maximum(compute, wire) + slower * np.minimum(compute, wire) - compute).sum()
            )

        gathers = float(gather.sum()) * (2 if again else 1) + rest_gather
        reduces = float(reduce.sum()) + last - float(reduce[0])
        parallel = first + exposed(forward, forward_wire) + exposed(backward, backward_wire) + last
        shown = overlap * min(
            parallel, gathers + reduces + slower * float((forward + backward).sum())
        ) + (1.0 - overlap) * (gathers + reduces)
        part = gathers / (gathers + reduces) if gathers + reduces else 0.0
        return shown * part, shown * (1.0 - part), max(0.0, gathers + reduces - shown)

    def _accumulated(self, trainable: float) -> float:
        """Seconds to add one micro-batch's gradients to the previous ones."""
        part = (
            trainable / self.setup.owner.trainable_bytes
            if self.setup.owner.trainable_bytes
            else 0.0
        )
        return (
            self.setup.costs.accumulate_seconds
            / self.setup.cluster.speed
            * part
            / (self.setup.parts if self.setup.fsdp else 1)
        )

    def _optimizer(self, trainable: float) -> float:
        """Seconds of clipping and the optimizer step."""
        part = (
            trainable / self.setup.owner.trainable_bytes
            if self.setup.owner.trainable_bytes
            else 0.0
        )
        # FSDP2 gives every worker a part of each parameter, ZeRO-1 some parameters whole.
        fixed = self.setup.costs.optimizer_fixed_seconds if self.setup.fsdp else 0.0
        step = fixed + (self.setup.costs.optimizer_seconds - fixed) / self.setup.parts
        # ZeRO-1 clips before it divides.
        fixed, clip = self.setup.costs.clip_fixed_seconds, self.setup.costs.clip_seconds
        clip = fixed + (clip - fixed) / self.setup.parts if self.setup.fsdp else clip
        return (step + clip) / self.setup.cluster.speed * part

    def _host(self, parameters: float, trainable: float) -> float:
        if self.setup.plan.offload == "none":
            return 0.0
        rate = self.setup.cluster.host_bytes_per_second or _HOST_BYTES_PER_SECOND
        moved = (trainable + parameters) / self.setup.parts
        if self.setup.plan.offload == "parameters":
            moved += 2 * self.setup.micro_batches * parameters / self.setup.parts
        return moved / rate

    def pipeline(self, quick: bool, split_waits: bool) -> Prediction:
        """With one or more stages on each worker."""
        plan, cluster = self.setup.plan, self.setup.cluster
        workers, virtual = plan.pipeline, plan.virtual
        at = self.setup.groups["stages"]
        inside, across = Group(2, "node", 2, 1), Group(2, "cluster", 1, at.sisters)
        near, far = collective(cluster, "send", inside), collective(cluster, "send", across)
        bounds = self.setup.owner.bounds_of(
            plan,
            self.setup.made,
            self.setup.held,
            self.setup.micro_batches,
            far if at.scope == "cluster" else near,
            quick,
        )
        if bounds is None:
            raise ArgumentError(
                f"pipeline: {workers * virtual} stages were asked for, and the model can "
                f"be cut into {len(self.setup.made.cuts) + 1} at most."
            )
        stages = stage_arrays(self.setup.made, bounds, plan)
        count = workers * virtual
        send, back = np.zeros(count), np.zeros(count)
        for s in range(count):
            if stages.send_bytes[s]:
                crosses = boundary_crosses(
                    plan.layout, cluster, int(stages.worker[s]), int(stages.worker[s + 1])
                )
                send[s] = (far if crosses else near)(float(stages.send_bytes[s]))
            if stages.back_bytes[s]:
                crosses = boundary_crosses(
                    plan.layout, cluster, int(stages.worker[s]), int(stages.worker[s - 1])
                )
                back[s] = (far if crosses else near)(float(stages.back_bytes[s]))
        passes = stages.backward
        if plan.schedule in ("zero-bubble", "zbv"):
            # In two parts it takes longer, but for the first stage's.
            apart = self.setup.costs.split_seconds.at(
                self.setup.share / self.setup.micro_batches
            ) / (cluster.speed * plan.tensor)
            passes = passes + np.concatenate([[0.0], passes[1:]]) * (
                apart / max(1e-12, float(passes.sum()))
            )
        # The first stage's backward pass has no input to be for: a zero-bubble schedule does all of
        # it in the weights' part.
        inputs = (0.0, *(INPUT_SHARE * passes[1:]).tolist())
        # All but the first add to gradients that are there: spread over all of them.
        further = (self.setup.micro_batches - 1) / self.setup.micro_batches
        backward = [
            float(b) + further * self._accumulated(float(t))
            for b, t in zip(passes, stages.trainable, strict=True)
        ]
        times = Times(
            tuple(stages.forward.tolist()),
            tuple(backward),
            tuple(send.tolist()),
            tuple(back.tolist()),
            inputs,
        )
        if quick:
            timeline = closed_form(
                plan,
                stages,
                self.setup.micro_batches,
                self.setup.owner.action_seconds,
                float(send.sum() + back.sum()),
            )
            unsent = timeline
        else:
            draw = self.setup.owner.draws and workers * virtual * self.setup.micro_batches <= _DRAWN
            simulated = partial(
                run_step,
                plan.schedule,
                workers,
                virtual,
                self.setup.micro_batches,
                overhead_seconds=self.setup.owner.action_seconds,
                contention=self.setup.costs.contention,
                copies=plan.replicas * plan.tensor,
            )
            timeline = simulated(times, keep_events=draw)
            unsent = self.setup.owner.simulated = timeline
            if split_waits:
                free = dataclasses.replace(times, send=(0.0,) * count, send_back=(0.0,) * count)
                unsent = simulated(free)
        trainable = by_worker(stages.trainable, stages, workers)
        parameters = by_worker(stages.parameters, stages, workers)
        starts = np.array(bounds[:-1])
        tensors = by_worker(np.add.reduceat(self.setup.owner.tensors, starts), stages, workers)
        modules = by_worker(
            np.add.reduceat((self.setup.made.parameters > 0).astype(float), starts), stages, workers
        )
        gather, exchange, sent = np.zeros(workers), np.zeros(workers), np.zeros(workers)
        optimizer, host = np.zeros(workers), np.zeros(workers)
        for w in range(workers):
            g, p, n, more = (
                float(trainable[w]),
                float(parameters[w]),
                float(tensors[w]),
                max(0.0, float(modules[w]) - 1.0),
            )
            if self.setup.fsdp:
                # Each module of a stage is gathered when it is called, and reduced when its
                # backward pass is done, micro-batch by micro-batch.
                times_gathered = self.setup.micro_batches * (2 if plan.shard == "parameters" else 1)
                gather[w] = times_gathered * (
                    self._gathered(p, n)
                    + more * (self.setup.gather.alpha + self.setup.added["gather"].call)
                )
                one = self._reduced(g, n, last=False) + more * (
                    self.setup.scatter.alpha + self.setup.added["reduce"].call
                )
                exchange[w] = self.setup.micro_batches * one
                sent[w] += (
                    (times_gathered * p + self.setup.micro_batches * g)
                    * ring(self.setup.parts)
                    / 2.0
                )
            elif plan.replicas > 1:
                exchange[w] = (
                    math.ceil(g / _BUCKET) * self.setup.all_reduce.alpha
                    + self.setup.all_reduce.seconds_per_byte * g
                )
                sent[w] += g * ring(plan.replicas)
                if plan.shard == "optimizer":
                    gather[w] = self._broadcasts(g, n)
                    sent[w] += g * ring(self.setup.parts) / 2.0
            optimizer[w] = self._optimizer(g)
            host[w] = self._host(p, g)
        tied = by_worker(stages.tied_bytes, stages, workers)
        exchange += np.array(
            [far(2.0 * float(b)) if at.scope == "cluster" else near(2.0 * float(b)) for b in tied]
        )
        messages = by_worker(
            stages.send_bytes + stages.back_bytes + stages.reduce_bytes * ring(plan.tensor),
            stages,
            workers,
        )
        sent += self.setup.micro_batches * messages + 2.0 * tied
        ends = np.array(timeline.done) + gather + exchange + optimizer + host
        last = int(ends.argmax())
        terms = dict.fromkeys(TERMS, 0.0)
        actions = (
            self.setup.micro_batches
            * virtual
            * (3 if plan.schedule in ("zero-bubble", "zbv") else 2)
        )
        terms["overhead"] = actions * self.setup.owner.action_seconds
        terms["recompute"] = self.setup.micro_batches * float(
            by_worker(stages.recompute, stages, workers)[last]
        )
        terms["tensor"] = self.setup.micro_batches * float(
            by_worker(stages.reduce, stages, workers)[last]
        )
        terms["compute"] = max(
            0.0, timeline.busy[last] - terms["overhead"] - terms["recompute"] - terms["tensor"]
        )
        terms["overhead"] += self.setup.owner.added["pipeline"].call
        waits = timeline.done[last] - timeline.busy[last]
        terms["p2p"] = min(waits, max(0.0, timeline.seconds - unsent.seconds))
        terms["bubble"] = waits - terms["p2p"]
        terms["gather"], terms["exchange"] = float(gather[last]), float(exchange[last])
        terms["optimizer"], terms["host"] = float(optimizer[last]), float(host[last])
        memory, rows = self.memory.of_pipeline(bounds, quick)
        names = () if quick else tuple(self.setup.costs.units[b].name for b in bounds[1:-1])
        return self._result(
            terms,
            memory,
            float(sent.max()),
            timeline.mean_bubble,
            0.0,
            not quick,
            rows,
            names,
            timeline.extrapolated and not quick,
        )

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
        plan = self.setup.plan
        notes = () if not simulated else tuple(self.setup.owner.notes(plan, self.setup.groups))
        if extrapolated:
            notes = (*notes, "simulated with fewer micro-batches and extrapolated linearly")
        placement = {}
        if simulated and plan.workers > 1:
            names = {"tensor": plan.tensor, "replicas": plan.replicas, "stages": plan.pipeline}
            placement = {
                name: self.setup.groups[name].sentence() for name, size in names.items() if size > 1
            }
            if plan.shard_within and plan.shard != "none":
                placement["shard"], placement["copies"] = (
                    self.setup.groups["shard"].sentence(),
                    self.setup.groups["copies"].sentence(),
                )
            if plan.pipeline > 1:
                placement["stages"] = (
                    "neighbours inside a node"
                    if self.setup.groups["stages"].scope == "node"
                    else "neighbours across nodes"
                )
        return Prediction(
            plan=plan,
            raw_step_seconds=sum(terms.values()),
            correction=self.setup.cluster.correction(plan.family, plan.workers),
            terms=terms,
            one_device_seconds=self.setup.owner.one_device_seconds(plan.batch_size),
            memory=memory,
            capacity_bytes=self.setup.cluster.memory_bytes,
            verdict=self.setup.owner.verdict(sum(memory.values())),
            exchanged_bytes=sent,
            bubble=bubble,
            micro_batches=self.setup.micro_batches,
            micro_samples=self.setup.largest,
            placement=placement,
            stages=stages,
            split_at=split_at,
            hidden_seconds=hidden,
            notes=notes,
            simulated=simulated,
        )
