"""A plan's memory at each moment of a step, unit by unit; the largest sum counts."""

from __future__ import annotations

import dataclasses
from collections import deque

import numpy as np

from ronde.plan.schedules import actions, in_flight
from ronde.predict.costs import Array
from ronde.predict.plan_setup import BUCKET_BYTES, FIRST_BUCKET_BYTES, PlanSetup, base_bytes
from ronde.predict.prediction import KINDS, StageRow
from ronde.predict.unit_arrays import Stages, edges, holders, stage_arrays, within

_PENDING_SENDS = 256  # sends that the pipeline's runtime keeps open

_Moment = dict[str, Array]
"""What is held at one moment beside the states, by kind: one number a unit, or one for all."""


class PeakMemory:
    """Predicts a plan's peak memory."""

    def __init__(self, setup: PlanSetup) -> None:
        self.setup = setup

    def of_whole_model(self) -> dict[str, float]:
        """Peak by kind, with the whole model on each worker or sharding group."""
        made, plan = self.setup.peak, self.setup.plan
        parameters = float(made.parameters.sum())
        always = dict.fromkeys(KINDS, 0.0)
        always["parameters"] = parameters * self.setup.held.parameters
        always["optimizer"] = float(made.optimizer.sum()) * self.setup.held.optimizer
        always["buffers"] = float(made.buffers.sum())
        always["base"] = base_bytes(self.setup.costs, self.setup.cluster)
        if plan.offload in ("optimizer", "parameters"):
            always["optimizer"] = 0.0
        if plan.offload == "parameters":
            always["parameters"] -= parameters * self.setup.held.parameters
        moments = self._sharded_moments() if self.setup.fsdp else self._plain_moments()
        # The worst unit of each kind of moment, then the worst of those.
        fullest: list[dict[str, float]] = []
        for moment in moments:
            u = int(
                np.sum([np.broadcast_to(v, len(made)) for v in moment.values()], axis=0).argmax()
            )
            fullest.append(
                {kind: float(np.broadcast_to(v, len(made))[u]) for kind, v in moment.items()}
            )
        worst = max(fullest, key=lambda kinds: sum(kinds.values()))
        return {kind: size + worst.get(kind, 0.0) for kind, size in always.items()}

    def _scratch(self, trainable: float) -> float:
        """Temporary memory of the optimizer's step."""
        setup = self.setup
        by_optimizer = setup.plan.shard == "optimizer"
        part = setup.held.optimizer if by_optimizer else setup.held.gradients
        if setup.costs.optimizer_transient_bytes:  # counted, not assumed
            return setup.costs.optimizer_transient_bytes * part * setup.part_of(trainable)
        keeps_moments = setup.peak.optimizer.sum() > 0 and any(
            name in setup.costs.optimizer.lower()
            for name in ("adam", "lamb", "rmsprop", "adagrad", "adadelta")
        )
        on_device = setup.cluster.device != "cpu" and setup.plan.offload == "none"
        return trainable * setup.held.gradients if keeps_moments and on_device else 0.0

    def _ring_buffer(self, size: float, ranks: int) -> float:
        """gloo's all-reduce buffers: two segments of at most 1 MiB."""
        return (
            2.0 * min(float(1 << 20), size / (2 * ranks))
            if self.setup.cluster.device == "cpu" and ranks > 1
            else 0.0
        )

    def _plain_moments(self) -> list[_Moment]:
        """Extra memory of whole parameters in forward, backward and optimizer step."""
        made, plan, replicas = self.setup.peak, self.setup.plan, self.setup.plan.replicas
        trainable = float(made.trainable.sum())
        inputs = self.setup.costs.input_bytes * self.setup.share
        kept = np.cumsum(made.saved)
        # gradients made until a unit's backward pass is done
        so_far = np.cumsum(made.trainable[::-1])[::-1]
        late = np.cumsum(made.late[::-1])[::-1]
        communication = np.zeros(len(made))
        several = self.setup.micro_batches > 1
        if replicas > 1 and plan.tensor == 1:
            # DDP's buckets hold all gradients from the first step on. A new one stands beside them
            # until it is copied; between micro-batches all stand beside them, and are copied in the
            # last one.
            before: float | Array = trainable
            forward_gradients = trainable
            if several:
                # The second micro-batch has the first one's; if it is the last, what is behind it
                # has been copied.
                before = (
                    2.0 * trainable
                    if self.setup.micro_batches > 2
                    else trainable + np.maximum(so_far, np.cumsum(made.trainable))
                )
                forward_gradients = 2.0 * trainable
            gradients, new = np.zeros(len(made)) + before, made.trainable + late
            full = trainable
            # Two exchanges run at once, in the last micro-batch, as soon as buckets are full.
            behind = so_far - made.trainable
            first = (behind >= min(FIRST_BUCKET_BYTES, trainable)) * np.array(
                [self._ring_buffer(min(g, BUCKET_BYTES), replicas) for g in behind]
            )
            second = (behind >= FIRST_BUCKET_BYTES + BUCKET_BYTES) * self._ring_buffer(
                BUCKET_BYTES, replicas
            )
            communication = (first + second) * (self.setup.micro_batches <= 2)
        elif several:
            # made, and then added
            gradients, new = (
                np.full(len(made), trainable),
                made.trainable + late,
            )
            forward_gradients = full = trainable
        else:
            gradients, new = so_far, late
            forward_gradients, full = 0.0, trainable
        update = self._scratch(trainable)
        exchanged = 0.0
        if replicas > 1 and plan.shard == "optimizer":
            exchanged = min(
                trainable / self.setup.parts, float(BUCKET_BYTES)
            )  # a copy of what is sent
        if replicas > 1 and plan.tensor > 1:
            exchanged = min(trainable, float(BUCKET_BYTES))  # gradients are copied into buckets
        return [
            {
                "gradients": np.array(forward_gradients),
                "activations": kept,
                "transient": made.transient + inputs,
            },
            {
                "gradients": gradients,
                "activations": kept,
                "transient": made.transient_backward + new + inputs,
                "communication": communication,
            },
            {"gradients": np.array(full), "transient": np.array(update + inputs)},
            {
                "gradients": np.array(full),
                "transient": np.array(inputs),
                "communication": np.array(exchanged),
            },
        ]

    def _sharded_moments(self) -> list[_Moment]:
        """The same under FSDP2.

        It gathers into one buffer and copies parameters out of it. In the forward pass the buffer
        stays until the next block is gathered; in the backward pass the next block is gathered
        ahead. Gradients are copied into one buffer, which stays until the next block's. Parameters
        outside all blocks are gathered first and reduced last. On the CPU, gloo gathers and reduces
        in its own copy.
        """
        made, again = self.setup.peak, self.setup.plan.shard == "parameters"
        n, parts = len(made), self.setup.parts
        copy = 1.0 if self.setup.cluster.device == "cpu" else 0.0
        starts = edges(made.blocks)
        inside = made.blocks[starts] >= 0
        # unit -> which run of units it is in
        run = np.repeat(np.arange(len(starts)), np.diff([*starts, n]))

        def of_runs(values: Array) -> Array:
            return np.asarray(np.add.reduceat(values, starts), dtype=float) * inside

        whole, grads = of_runs(made.parameters), of_runs(made.trainable)
        # of the block before a run, its parameters; after it, its gradients
        before, after = (
            np.zeros(len(starts)),
            np.zeros(len(starts)),
        )
        # the buffer of the block that was gathered last before a run, or of itself
        last_gathered = np.zeros(len(starts))
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
        rest_made = (
            np.cumsum((made.trainable * loose)[::-1])[::-1] + np.cumsum(made.late[::-1])[::-1]
        )
        behind = float(grads.sum()) - np.cumsum(grads)  # gradients of blocks after a run
        own = np.where(loose, 0.0, within(made.trainable, starts, n))  # made in this block so far
        if self.setup.micro_batches > 1:
            sharded = np.full(n, float(made.trainable.sum()) / parts)  # from the micro-batch before
        else:
            sharded = behind[run] / parts
        kept = np.cumsum(made.saved)
        inputs = self.setup.costs.input_bytes * self.setup.share
        first = np.concatenate([[True], run[1:] != run[:-1]])
        last = np.concatenate([run[1:] != run[:-1], [True]])
        never = -np.inf
        gathered_forward = (whole[run] if again else until[run]) + rest
        gathered_backward = whole[run] if again else until[run]
        kept_before = kept - made.saved
        # gradient of what a block was given
        earlier = np.concatenate([[0.0], made.crossing_grad[:-1]])
        forward: _Moment = {
            "parameters": gathered_forward,
            "gradients": sharded * (self.setup.micro_batches > 1),
            "activations": kept,
            "transient": made.transient + inputs,
            "communication": last_gathered[run],
        }
        gather: _Moment = {
            "parameters": gathered_forward - whole[run],
            "gradients": sharded * (self.setup.micro_batches > 1),
            "activations": kept_before,
            "transient": np.array(inputs),
            # The buffer of the one before, this one's, and gloo's copy.
            "communication": np.where(
                first & ~loose,
                np.where(before > 0, before, rest)[run] + (1.0 + copy) * whole[run],
                never,
            ),
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
            "communication": np.where(
                last & ~loose, (again * (1.0 + copy) * before + after)[run], never
            ),
        }
        reduced: _Moment = {
            "parameters": gathered_backward - whole[run] + rest,
            "gradients": sharded + rest_made + grads[run] / parts,
            "activations": kept_before,
            "transient": earlier + inputs,
            "communication": np.where(
                first & ~loose,
                (again * before + max(1.0 + copy, 2.0 - 1.0 / parts) * grads)[run],
                never,
            ),
        }
        trainable = float(made.trainable.sum())
        final: _Moment = {
            "gradients": np.array(trainable / parts),
            "transient": np.array(inputs),
            "communication": np.array((1.0 + max(copy, 1.0)) * rest_trainable),
        }
        update: _Moment = {
            "gradients": np.array(trainable / parts),
            "transient": np.array(self._scratch(trainable) + inputs),
        }
        return [forward, gather, backward, ahead, reduced, final, update]

    # A pipeline.

    def of_pipeline(
        self, bounds: tuple[int, ...], quick: bool
    ) -> tuple[dict[str, float], tuple[StageRow, ...]]:
        """Peak by kind of the fullest pipeline worker, and a row per stage."""
        plan, workers = self.setup.plan, self.setup.plan.pipeline
        stages = stage_arrays(self.setup.peak, bounds, plan)
        if self.setup.costs.sends_block:  # nothing that was sent or received is held twice
            none = np.zeros(len(stages.worker))
            stages = dataclasses.replace(stages, send_bytes=none, back_bytes=none)
        flight = np.array(
            in_flight(plan.schedule, workers, plan.virtual, self.setup.micro_batches), dtype=float
        )
        # What stages share is not divided over the replicas by FSDP2.
        undivided = np.zeros((3, len(stages.worker)))
        for tie in self.setup.peak.ties if self.setup.fsdp else ():
            for s, last in zip(*holders(tie, bounds, stages.worker), strict=True):
                undivided[[0, 2], s] += tie.parameter_bytes, tie.optimizer_bytes
                undivided[1, last] += tie.trainable_bytes

        def divided(values: Array, share: float, whole: Array) -> Array:
            return (values - whole) * share + whole

        parameters = divided(stages.parameters, self.setup.held.parameters, undivided[0])
        gradients = divided(stages.trainable, self.setup.held.gradients, undivided[1])
        if self.setup.fsdp and plan.shard == "gradients":
            parameters = parameters + stages.parameters - undivided[0]
        optimizer = divided(stages.optimizer, self.setup.held.optimizer, undivided[2])
        if plan.offload in ("optimizer", "parameters"):
            optimizer = np.zeros(len(optimizer))
        if plan.offload == "parameters":
            parameters = parameters - stages.parameters * self.setup.held.parameters
        activations = flight * stages.saved
        # What was sent is let go of at the end of the step (256 messages at most); what was
        # received when its backward pass is done.
        arrives = np.concatenate([[0.0], stages.send_bytes[:-1]])
        returns = np.concatenate([stages.back_bytes[1:], [0.0]])
        buffers = flight * arrives + returns
        states = {"parameters": parameters, "optimizer": optimizer, "buffers": stages.buffers}
        each = {kind: stages.by_worker(values) for kind, values in states.items()}
        inputs = (
            self.setup.costs.input_bytes * self.setup.share
        )  # every worker reads its replica's samples
        whole = stages.by_worker(stages.trainable)
        held_gradients = stages.by_worker(gradients)
        tied = stages.by_worker(stages.tied_bytes)
        fullest = []
        for w in range(workers):
            if quick or self.setup.micro_batches * len(stages.worker) > 1_500:  # too many actions
                moment = self._flown(w, stages, flight, arrives, returns, held_gradients[w])
            else:
                moment = self._walked(w, stages, arrives, returns, undivided[1])
            # Gradients are copied into buckets and summed when no activation is held any more; then
            # the optimizer steps.
            summed = max(
                float(tied[w]), (0.0 if self.setup.fsdp or plan.replicas == 1 else float(whole[w]))
            )
            sending = (
                whole[w] / self.setup.parts
                if plan.shard == "optimizer" and plan.replicas > 1
                else 0.0
            )
            ends = [
                {
                    "gradients": float(held_gradients[w]),
                    "communication": max(min(summed, BUCKET_BYTES), min(sending, BUCKET_BYTES)),
                },
                {
                    "gradients": float(held_gradients[w]),
                    "transient": self._scratch(float(whole[w])),
                },
            ]
            fullest.append(max([moment, *ends], key=lambda kinds: sum(kinds.values())))
            fullest[-1]["transient"] = fullest[-1].get("transient", 0.0) + inputs
        totals = [
            sum(kinds.values()) + sum(float(v[w]) for v in each.values())
            for w, kinds in enumerate(fullest)
        ]
        worst = int(np.argmax(totals))
        memory = {
            kind: fullest[worst].get(kind, 0.0)
            + (float(each[kind][worst]) if kind in each else 0.0)
            for kind in KINDS
        }
        memory["base"] = base_bytes(self.setup.costs, self.setup.cluster)
        if quick:
            return memory, ()
        total = parameters + gradients + optimizer + activations + stages.buffers + buffers
        rows = tuple(
            StageRow(
                stage=s,
                worker=int(stages.worker[s]),
                first=self.setup.costs.units[bounds[s]].name,
                last=self.setup.costs.units[bounds[s + 1] - 1].name,
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

    def _flown(
        self,
        worker: int,
        stages: Stages,
        flight: Array,
        arrives: Array,
        returns: Array,
        gradients: float,
    ) -> dict[str, float]:
        """Upper bound of a pipeline worker's peak: all gradients, all activations in flight."""
        mine = stages.worker == worker
        sent = (
            np.maximum(0.0, min(self.setup.micro_batches, _PENDING_SENDS) - flight)
            * stages.send_bytes
        )
        if self.setup.fsdp:
            gradients += float(stages.trainable[mine].max())
        return {
            "gradients": gradients,
            "activations": float((flight * stages.saved)[mine].sum()),
            "transient": float(stages.transient_backward[mine].max()),
            "communication": float((sent + flight * arrives + returns)[mine].sum()),
        }

    def _walked(
        self, worker: int, stages: Stages, arrives: Array, returns: Array, undivided: Array
    ) -> dict[str, float]:
        """A pipeline worker's peak, action by action as at run time.

        A received tensor is held until its gradient is sent. The last 256 sent tensors are held to
        the end of the step; a sent activation is one that its stage has saved.
        """
        plan, made, bounds = self.setup.plan, self.setup.peak, stages.bounds
        part = 1.0 / self.setup.parts if self.setup.fsdp else 1.0
        held = (stages.trainable - undivided) * part + undivided  # gradients of a stage
        order = actions(plan.schedule, plan.pipeline, plan.virtual, self.setup.micro_batches, True)[
            worker
        ]
        forward: dict[
            int, tuple[float, float, float]
        ] = {}  # most in a pass: saved so far, for a moment, exchanged
        first: dict[
            int, tuple[float, float, float, float]
        ] = {}  # and of a stage's first backward pass: gradients
        later: dict[int, tuple[float, float, float, float]] = {}
        # gradients of what several units share, where the pass makes them
        tied = np.zeros(len(made))
        owned, weights = made.trainable.copy(), made.parameters.copy()
        for_a_moment = made.transient_backward.copy()
        for tie in made.ties:
            tied[list(tie.units)] += tie.trainable_bytes
            if len(holders(tie, bounds, stages.worker)[0]) > 1:
                # The others' gradient of it is made on another worker.
                for_a_moment[tie.units[0]] = max(
                    0.0, for_a_moment[tie.units[0]] - tie.trainable_bytes
                )
            owned[tie.units[0]] -= tie.trainable_bytes
            weights[tie.units[0]] -= tie.parameter_bytes
        for s in {a.stage for a in order}:
            units = slice(bounds[s], bounds[s + 1])
            kept, new, shared = np.cumsum(made.saved[units]), owned[units], tied[units]
            so_far, late = np.cumsum(new[::-1])[::-1], np.cumsum(shared[::-1])[::-1]
            gathered = waiting = reducing = np.zeros(len(kept))
            if self.setup.fsdp:
                begins = edges(made.blocks[units])
                run = np.repeat(np.arange(len(begins)), np.diff([*begins, len(kept)]))
                # Each module is gathered by itself; what goes into a reduction is held until the
                # stage's whole backward pass is done.
                gathered = np.add.reduceat(weights[units], begins)[run] * (
                    plan.shard == "parameters"
                )
                own = np.add.reduceat(new, begins)[run]
                waiting = np.cumsum(np.add.reduceat(new, begins)[::-1])[::-1][run] - own
                # Parameters are let go of before gradients are copied into a buffer, and reduced
                # into another.
                reducing = np.maximum(gathered, own * (1.0 + part))
            else:
                own = new
            first_gradients = so_far * part + late + (own if self.setup.fsdp else 0.0)
            at = int((kept + made.transient[units] + 2 * gathered).argmax())
            forward[s] = float(kept[at]), float(made.transient[units][at]), float(2 * gathered[at])
            wire = waiting + reducing
            # In later micro-batches a gradient is made, and then added to what is there.
            both = (
                (first, first_gradients, for_a_moment[units]),
                (later, np.full(len(kept), held[s]), for_a_moment[units] + own + late),
            )
            for table, gradients_at, transient_at in both:
                at = int((kept + transient_at + gradients_at + wire).argmax())
                table[s] = (
                    float(gradients_at[at]),
                    float(kept[at]),
                    float(transient_at[at]),
                    float(wire[at]),
                )
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
                best = {
                    "gradients": gradients,
                    "activations": saved,
                    "transient": transient,
                    "communication": exchanged,
                }

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
            if kind == "B":
                gradients_most, kept_most, transient, exchanged = (
                    later if stage in done else first
                )[stage]
                others = gradients_held - (float(held[stage]) if stage in done else 0.0)
                look(
                    others + gradients_most,
                    activations - float(stages.saved[stage]) + kept_most,
                    transient,
                    communication + exchanged,
                )
                if stage not in done:
                    gradients_held += float(held[stage])
                    done.add(stage)
                communication += float(stages.back_bytes[stage] - returns[stage])
                activations -= float(stages.saved[stage])
                communication += sent.get(key, 0.0)  # what was sent stays
                passed.add(key)
            elif kind == "SEND_B":
                communication -= float(arrives[stage])
                pending.append((float(stages.back_bytes[stage]), None))
            if len(pending) > _PENDING_SENDS:
                message, origin = pending.popleft()
                if origin is None or origin in passed:
                    communication -= message
                else:
                    communication -= message - sent[origin]
                    sent[origin] = 0.0
        return best
