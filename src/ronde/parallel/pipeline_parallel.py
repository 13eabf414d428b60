"""Pipeline parallelism: micro-batches flow through the model's stages in a schedule's order.

:mod:`ronde.parallel.stage_ownership` cuts the model, :mod:`ronde.parallel.stage_run` runs one stage
of the script's own forward pass. This file executes the action lists of
``torch.distributed.pipelining`` (:mod:`ronde.plan.schedules`): sends, receives, forward, backward.

GPipe: Huang et al. 2019. 1F1B: Narayanan et al. 2019. Interleaved: Narayanan et al. 2021. Looped:
Lamy-Poirier 2022.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.experimental import implicit_replication

from ronde.capture import stay
from ronde.parallel.buckets import broadcast_packed, exchange_packed
from ronde.parallel.dtensor_fixes import extend_scaler
from ronde.parallel.fsdp import add_squares, sharded_mesh
from ronde.parallel.stage_ownership import StageOwnership, signature
from ronde.parallel.stage_run import Program, StageRun
from ronde.parallel.strategy import (
    Part,
    Scale,
    Strategy,
    Work,
    backward,
    forget_frozen,
    part_gradients,
    scale_gradients,
)
from ronde.parallel.tensor_parallel import (
    Divided,
    complete_gradients,
    divide_stages,
)
from ronde.plan import Plan
from ronde.plan.schedules import Action, actions
from ronde.world import ArgumentError, RondeError, World
from ronde.world.meshes import group_of, mesh_of
from ronde.world.tensors import local_part

__all__ = ["PipelineParallel"]

_Arrival = tuple[list[Any], dict[int, torch.Tensor]]
"""Receives under way, and the tensors they fill, by value."""


@dataclass(eq=False)
class _Flight:
    """A micro-batch in a stage, between its forward and backward."""

    program: Program
    received: dict[int, torch.Tensor] = field(default_factory=dict)
    sent: dict[int, torch.Tensor] = field(default_factory=dict)
    root: torch.Tensor | None = None
    factor: float = 0.0


@dataclass(eq=False)
class _Step:
    """A step under way: its micro-batches and flights, by ``(stage, micro-batch)``."""

    programs: list[Program]
    micros: Sequence[Any]
    parts: Sequence[Part]
    compute: Callable[[Any], Any]
    scale: Scale | None
    flights: dict[tuple[int, int], _Flight] = field(default_factory=dict)
    coming: dict[tuple[str, int, int], _Arrival] = field(default_factory=dict)


class PipelineParallel(Strategy):
    """Runs a pipeline, replicated if there are more workers.

    Raises:
        ArgumentError: the plan or the model does not allow it.
    """

    whole_step = True

    def __init__(self, plan: Plan, work: Work, me: World) -> None:
        self.plan, self.me, self.work = plan, me, work
        self.model = work.model
        self.layout = plan.layout
        self.place = self.layout.place(me.rank)
        workers = plan.pipeline
        self.stages = list(range(self.place.pipeline, workers * plan.virtual, workers))
        self.last = workers * plan.virtual - 1
        self.holds_result = self.last in self.stages
        self.counts = self.holds_result and self.place.tensor == 0
        self.run_empty_inference = plan.replicas > 1 and plan.shard in ("gradients", "parameters")
        _refuse(plan, self.model)
        self.along, self.data = group_of("pipeline"), None
        self.divided: Divided | None = None
        if plan.replicas > 1 or plan.tensor > 1:
            sharded = self.run_empty_inference and plan.shard_within is None
            replicas = "shard" if sharded else "data"  # the same mesh as fully_shard's
            sizes = {"pipeline": workers, replicas: plan.replicas, "tensor": plan.tensor}
            mesh = mesh_of(me.device.type, {name: n for name, n in sizes.items() if n > 1})
            self.along = mesh.get_group("pipeline")
            self.data = mesh.get_group(replicas) if plan.replicas > 1 else None
            if plan.tensor > 1:
                whole = sharded_mesh(plan, me) if self.run_empty_inference else mesh
                self.divided = divide_stages(plan, work, me, whole["tensor"])
        self._ranks = self.layout.along_pipeline(me.rank)
        self._mixed_tensors = ExitStack()
        self.owner = StageOwnership(plan, work, me, self.stages, self.data, self.divided)
        self.points, self.parameters = self.owner.points, self.owner.parameters
        self.split_at = tuple(point.name for point in self.points)
        # the loss, its weight, and how many micro-batches have one
        self._loss = torch.zeros(3, dtype=torch.float64, device=me.device)
        self._samples = 1
        self._reached: set[int] = set()
        self._pending: list[tuple[Any, Any]] = []
        stay(self)  # every stage's pass is intercepted: patch once, not per pass

    def owns(self, name: str) -> bool:
        """See :meth:`Strategy.owns`."""
        return self.owner.owns(name)

    def table(self) -> list[dict[str, Any]]:
        """Per stage: worker, first module, parameters, bytes sent on per micro-batch."""
        return self.owner.table()

    # -- sends and receives ------------------------------------------------------------

    def _send(self, tensors: Sequence[torch.Tensor], worker: int) -> None:
        if not tensors:
            return
        whole = [t.detach().contiguous() for t in tensors]
        rank = self._ranks[worker]
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, t, rank, self.along) for t in whole])
        self._pending.append((works, whole))
        if len(self._pending) > 256:
            for work in self._pending.pop(0)[0]:
                work.wait()

    def _receive(self, made: Program, values: Iterable[int], worker: int) -> _Arrival:
        tensors = {}
        for v in values:
            value = made.values[v]
            tensors[v] = torch.empty(value.shape, dtype=value.dtype, device=self.me.device)
        rank = self._ranks[worker]
        ops = [dist.P2POp(dist.irecv, t, rank, self.along) for t in tensors.values()]
        return dist.batch_isend_irecv(ops) if ops else [], tensors

    def _sent_all(self) -> None:
        for works, _ in self._pending:
            for work in works:
                work.wait()
        self._pending.clear()

    # -- a step ------------------------------------------------------------------------

    def micro(self, compute: Any, part: Part, scale: Scale | None) -> None:
        """Not used in a pipeline; see :meth:`step`."""
        raise RondeError("under a pipeline a step is one call: use run.step(batch)")

    def step(
        self,
        micros: Sequence[Any],
        parts: Sequence[Part],
        compute: Callable[[Any], Any],
        scale: Scale | None,
    ) -> None:
        """See :meth:`Strategy.step`."""
        for p in self.parameters:
            p.grad = None
        self._loss.zero_()
        self._reached = set()
        if scale is not None:
            # a scaler starts with its first use, and not every stage has the loss
            scale(torch.zeros((), device=self.me.device))
            extend_scaler(scale, self.me)
        self._samples = parts[0].global_samples
        programs = [self.owner.program_of(m) for m in micros]
        self.owner.check_replicas(programs)
        for made in programs:
            self._reached |= made.reached
        plan, step = self.plan, _Step(programs, micros, parts, compute, scale)
        everyone = actions(plan.schedule, plan.pipeline, plan.virtual, len(micros), True)
        with self.owner.opened():
            for action in everyone[self.place.pipeline]:
                self._act(action, step)
        self._sent_all()

    def _act(self, action: Action, step: _Step) -> None:
        """Carry out one action of the schedule."""
        stage, kind, micro = action
        made, flights, coming = step.programs[micro], step.flights, step.coming
        key, worker_at = (stage, micro), self.owner.worker_at
        if kind == "RECV_F":
            values, worker = made.sends[stage - 1], worker_at(stage - 1)
            coming["F", stage, micro] = self._receive(made, values, worker)
        elif kind == "RECV_B":
            values, worker = made.gradients[stage], worker_at(stage + 1)
            coming["B", stage, micro] = self._receive(made, values, worker)
        elif kind == "SEND_F":
            self._send(_in_order(made, stage, flights[key].sent), worker_at(stage + 1))
        elif kind == "SEND_B":
            flight = flights[key]
            gradients = [_gradient(flight.received[v]) for v in made.gradients[stage - 1]]
            self._send(gradients, worker_at(stage - 1))
            flight.received = {}
        elif kind == "F":
            works, received = coming.pop(("F", stage, micro), ([], {}))
            for work in works:
                work.wait()
            if stage and not works:  # the stage before is on this worker too
                before = flights.get((stage - 1, micro))
                if before is not None:
                    received = {v: before.sent[v].detach() for v in made.sends[stage - 1]}
            flights[key] = self._forward(made, stage, received, micro, step)
        elif kind == "B":
            works, arrived = coming.pop(("B", stage, micro), ([], {}))
            for work in works:
                work.wait()
            if stage < self.last and not works:
                after = flights.get((stage + 1, micro))
                if after is not None:
                    arrived = {v: _gradient(after.received[v]) for v in made.gradients[stage]}
                    after.received = {}
            self._backward(flights[key], stage, arrived, step.scale)

    def _forward(
        self,
        made: Program,
        stage: int,
        received: dict[int, torch.Tensor],
        micro: int,
        step: _Step,
    ) -> _Flight:
        for value in made.gradients[stage - 1] if stage else ():
            received[value].requires_grad_(True)
        flight, part = _Flight(made, received), step.parts[micro]
        run = StageRun(made, stage, _clone_changed(made, received))
        result = run.run(lambda: step.compute(step.micros[micro]))
        flight.sent = run.sent
        if stage == self.last:
            value, weight = result
            factor = 0.0
            if part.samples:  # an empty micro-batch is a stand-in
                factor = (1.0 if weight is not None else part.samples) / part.global_samples
                factor = 1.0 if part.summed else factor
                if weight is None and part.weight is not None:
                    factor = part.weight / part.global_samples
                    self._loss[1] += part.weight
                    self._loss[2] += 1
            flight.root, flight.factor = value, factor
            if part.samples:
                self._loss[0] += value.detach().to(torch.float64) * factor
                if weight is not None:
                    self._loss[1] += weight.to(torch.float64)
                    self._loss[2] += 1
        return flight

    def _roots(
        self, flight: _Flight, stage: int, gradients: dict[int, torch.Tensor], scale: Scale | None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The tensors a stage's backward starts from, and their gradients."""
        if stage == self.last:
            value = flight.root
            assert value is not None
            if not value.requires_grad:
                return [], []
            start = torch.full((), flight.factor, dtype=value.dtype, device=value.device)
            return [value], [start if scale is None else scale(start)]
        values = [v for v in flight.program.gradients[stage] if flight.sent[v].requires_grad]
        return [flight.sent[v] for v in values], [gradients[v] for v in values]

    def _backward(
        self,
        flight: _Flight,
        stage: int,
        gradients: dict[int, torch.Tensor],
        scale: Scale | None,
    ) -> None:
        roots, starts = self._roots(flight, stage, gradients, scale)
        flight.root, flight.sent = None, {}
        inputs = [flight.received[v] for v in flight.program.gradients[stage - 1]] if stage else []
        if not roots:
            return
        weights = self.owner.weights_of(flight.program, stage)
        first = any(w.grad is None for w in weights)
        backward(tuple(roots), tuple(starts))
        if first:
            # The next micro-batch adds to the weights' gradients while inputs' are being sent.
            part_gradients([*weights, *inputs])

    def finish(self) -> torch.Tensor:
        """See :meth:`Strategy.finish`."""
        for p in self.parameters:
            if self.owner.key(p) not in self._reached:
                p.grad = None  # zeros sent by another stage; one process would have no gradient
        for group, parameters in self.owner.tied:
            self._sum([p for p in parameters if p.requires_grad], group)
        if self.plan.replicas > 1:
            self._sum([*self.owner.whole, *self.owner.split], self.data)
        if self.divided is not None:
            complete_gradients(self.divided, self.owner.names, self.parameters, self.me)
            # An optimizer may take all parameters at once, plain ones and DTensors.
            self._mixed_tensors.enter_context(implicit_replication())
        mine = self._loss.clone() if self.counts else torch.zeros_like(self._loss)
        self.local_loss = self._loss[0].clone() if self.holds_result else None
        if (
            self.plan.replicas == self.plan.tensor == 1
        ):  # the last stage finishes before the first: nobody waits twice
            dist.broadcast(mine, self._ranks[self.owner.worker_at(self.last)])
        else:
            dist.all_reduce(mine)
        loss, weight, weighted = mine[0], mine[1], mine[2]
        # Reading a GPU's numbers means waiting for it: there, an unweighted loss is scaled by 1.
        if self.me.device.type != "cpu" or bool(weighted):
            factor = torch.where(weighted != 0, self._samples / weight, 1)
            self._scale_gradients(factor)
            loss = loss * factor
        return loss

    def _scale_gradients(self, factor: torch.Tensor) -> None:
        scale_gradients(self.owner.whole, factor)
        for p in (*self.owner.split, *self.owner.sharded_parameters):
            if p.grad is not None:
                local_part(p.grad).mul_(factor.to(p.dtype))

    def _sum(self, parameters: list[nn.Parameter], group: Any) -> None:
        """All-reduce gradients over a group, in buckets; one that nobody has stays None."""
        if not parameters:
            return
        present = [p.grad is not None for p in parameters]
        has = torch.ones(len(parameters), dtype=torch.uint8, device=self.me.device)
        for i, own in enumerate(present):
            if not own:
                has[i].zero_()
        dist.all_reduce(has, dist.ReduceOp.MAX, group=group)
        # Who has all of them need not ask the device which ones others have.
        gradients = []
        for p, used in zip(parameters, present if all(present) else has.tolist(), strict=True):
            if used:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                gradients.append(local_part(p.grad))
        exchange_packed(gradients, lambda flat: dist.all_reduce(flat, group=group))

    def clip(self, max_norm: float) -> None:
        """See :meth:`Strategy.clip`: each weight counts once, whoever holds it."""
        held = (p for p in self.parameters if id(p) in self.owner.counted)
        square = torch.zeros((), dtype=torch.float64, device=self.me.device)
        add_squares(square, [p.grad for p in held if p.grad is not None])
        dist.all_reduce(square, group=self.along)
        self._scale_gradients((max_norm / (square.sqrt() + 1e-6)).clamp(max=1.0))

    def updated(self) -> None:
        """See :meth:`Strategy.updated`."""
        self._mixed_tensors.close()
        if self.owner.optimizer_parts is not None:
            self.owner.optimizer_parts.exchange()

    def loaded(self) -> None:
        """See :meth:`Strategy.loaded`."""
        if self.owner.optimizer_parts is not None:
            self.owner.optimizer_parts.let_go()
        for module in self.owner.sharded:
            if isinstance(module, FSDPModule):
                module.reshard()

    # -- without gradients -------------------------------------------------------------

    def infer(self, call: Callable[[Any], Any], batch: Any) -> Any:
        """See :meth:`Strategy.infer`. A stage starts the next batch without waiting for others."""
        modes = signature(batch, self.model.training, torch.is_grad_enabled())
        made = self.owner.path((id(getattr(call, "__code__", call)), *modes), call, batch)
        self.owner.check_replicas([made])
        result = None
        handed: dict[int, torch.Tensor] = {}
        for stage in self.stages:
            received: dict[int, torch.Tensor] = {}
            if stage:
                before = self.owner.worker_at(stage - 1)
                if before == self.place.pipeline:
                    received = handed
                else:
                    works, received = self._receive(made, made.sends[stage - 1], before)
                    for work in works:
                        work.wait()
            run = StageRun(made, stage, _clone_changed(made, received))
            with self.owner.opened():
                result = run.run(lambda: call(batch))
            for module in made.modules(stage):
                if isinstance(module, FSDPModule):
                    module.reshard()
            if stage < self.last:
                handed = run.sent
                after = self.owner.worker_at(stage + 1)
                if after != self.place.pipeline:
                    self._send(_in_order(made, stage, run.sent), after)
        return result if self.holds_result else None

    def start_epoch(self) -> None:
        """See :meth:`Strategy.start_epoch`."""
        self._sent_all()
        self.sync_buffers()

    def refresh(self) -> bool:
        """See :meth:`Strategy.refresh`."""
        if not self.owner.has_changed():
            return False
        self.on_change()
        forget_frozen(self.model)
        self.owner.forget_paths()
        self.parameters = self.owner.parameters
        return True

    def sync_buffers(self) -> None:
        """See :meth:`Strategy.sync_buffers`: along the replicas, for this worker's stages."""
        if self.plan.replicas == 1:
            return
        here, workers = (-1, self.place.pipeline), self.owner.buffer_workers
        mine = [b for name, b in self.model.named_buffers() if workers.get(name) in here]
        broadcast_packed(mine, self.me.device, self.data)


def _clone_changed(made: Program, received: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Clone the tensors that a later stage changes in place: leaves refuse it."""
    return {v: t.clone() if v in made.cloned else t for v, t in received.items()}


def _in_order(made: Program, stage: int, sent: dict[int, torch.Tensor]) -> list[torch.Tensor]:
    """A stage's outputs, in order. The next stage has allocated memory for the recorded shapes."""
    for v in made.sends[stage]:
        value, tensor = made.values[v], sent[v]
        if tuple(tensor.shape) != value.shape or tensor.dtype != value.dtype:
            raise RondeError(
                f"stage {stage} made a tensor of shape {list(tensor.shape)}, {tensor.dtype}; the "
                f"recorded forward pass had {list(value.shape)}, {value.dtype}. A pipeline needs "
                "shapes that depend on the batch's shapes alone."
            )
    return [sent[v] for v in made.sends[stage]]


def _gradient(tensor: torch.Tensor) -> torch.Tensor:
    """A received tensor's gradient, or zeros if the backward did not reach it."""
    return tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)


def _refuse(plan: Plan, model: nn.Module) -> None:
    from ronde.parallel.batchnorm import batchnorms
    from ronde.plan.schedules import allowed

    if plan.sync_batchnorm and batchnorms(model):
        raise ArgumentError(
            "sync_batchnorm=True does not work in a pipeline, which normalizes each micro-batch "
            "separately. Use group or layer normalization, or plan='replicate' or 'shard'."
        )
    why = allowed(plan.schedule, plan.pipeline, plan.virtual, plan.accumulation)
    if why:
        raise ArgumentError(f"plan={plan.spec!r}: {why}.")
