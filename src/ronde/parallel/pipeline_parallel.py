"""Pipeline parallelism: the model is cut into stages; micro-batches flow through them in a
schedule's order.

Each worker keeps its stages' weights. The script's own forward pass runs on each worker, as far as
it concerns it (:mod:`ronde.parallel.stage_run`); what crosses a cut is sent point to point. Action
lists, sends and receives included, are those of ``torch.distributed.pipelining``
(:mod:`ronde.plan.schedules`).

GPipe: Huang et al. 2019. 1F1B: Narayanan et al. 2019. Interleaved: Narayanan et al. 2021. Looped:
Lamy-Poirier 2022. Zero-bubble: Qi et al. 2023.
"""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining._backward import (
    _get_grad_fn_or_grad_acc,
    stage_backward_input,
    stage_backward_weight,
)
from torch.distributed.tensor import DTensor

from ronde.capture import Trace, TraceEvent, bounds_of, stay
from ronde.capture.follow import follow
from ronde.checkpoint import local_part
from ronde.parallel import choose_cut
from ronde.parallel.dtensor_fixes import fix_dtensors
from ronde.parallel.fsdp import adopt, refuse_hooks, replica_mesh
from ronde.parallel.remote_parameter import Keeper, absent, element, make_remote
from ronde.parallel.stage_run import Diverged, Guards, Program, StageRun, has_guards, program
from ronde.parallel.strategy import (
    Flags,
    Part,
    Scale,
    Strategy,
    Work,
    backward,
    forget_frozen,
    part_gradients,
    scale_gradients,
    trainable,
)
from ronde.parallel.zero1 import OptimizerParts
from ronde.plan import Place, Plan
from ronde.plan.schedules import Action, actions, stages_of, worker_of
from ronde.world import ArgumentError, PlanError, RondeError, World
from ronde.world.consensus import broadcast_json
from ronde.world.meshes import group_of, mesh_of
from ronde.world.tensors import tensors_in

__all__ = ["PipelineParallel"]

_BUCKET_BYTES = 25 * 2**20


def _signature(batch: Any, training: bool, grad: bool) -> tuple[Any, ...]:
    """What decides a forward pass's path: shapes and types of the batch, and the modes."""
    shapes = tuple(
        (tuple(t.shape), t.dtype, tuple(t.stride())) for t in tensors_in(batch, attributes=True)
    )
    return (training, grad, torch.is_autocast_enabled("cpu"), shapes)


@dataclass(eq=False)
class _Flight:
    """A micro-batch in a stage, between its forward and backward."""

    program: Program
    received: dict[int, torch.Tensor] = field(default_factory=dict)
    sent: dict[int, torch.Tensor] = field(default_factory=dict)
    root: torch.Tensor | None = None
    factor: float = 0.0
    groups: Any = None
    later: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None


@dataclass(frozen=True)
class _Path:
    """A path through the model, and what it read from the batch."""

    program: Program
    guards: tuple[Any, ...]


class PipelineParallel(Strategy):
    """Runs a pipeline, replicated if there are more workers.

    Args:
        plan: ``pipeline`` workers, ``virtual`` stages on each, ``schedule``, ``split_at``.
        work: the model, its optimizer, forward and loss.
        me: this worker.

    Raises:
        ArgumentError: the model cannot be cut so.
    """

    whole_step = True

    def __init__(self, plan: Plan, work: Work, me: World) -> None:
        self.plan, self.me, self.work = plan, me, work
        self.model = work.model
        self.layout = plan.layout
        self.place = self.layout.place(me.rank)
        workers = plan.pipeline
        self.stages = stages_of(self.place.pipeline, workers, plan.virtual, plan.schedule)
        self.last = workers * plan.virtual - 1
        self.holds_result = self.last in self.stages
        self.counts = self.holds_result and self.place.tensor == 0
        self.run_empty_inference = plan.replicas > 1 and plan.shard in ("gradients", "parameters")
        _refuse(plan, self.model)
        self.along, self.data = group_of("pipeline"), None
        if plan.replicas > 1:
            # The mesh that the stages are divided on, where they are.
            replicas = (
                "shard"
                if plan.shard in ("gradients", "parameters") and plan.shard_within is None
                else "data"
            )
            mesh = mesh_of(me.device.type, {"pipeline": workers, replicas: plan.replicas})
            self.along, self.data = mesh.get_group("pipeline"), mesh.get_group(replicas)
        self._ranks = self.layout.along_pipeline(me.rank)
        # By identity: the parameter that the model was followed with, where it is another.
        self._was: dict[int, nn.Parameter] = {}
        self._stand_ins: dict[tuple[nn.Module, str], nn.Parameter] = {}
        self._sharded: list[nn.Module] = []
        self._programs: dict[Any, list[_Path]] = {}
        self._keeper = Keeper(plan.spec)  # open: modules are called for a stage, or to be followed
        self._stage_of: dict[int, int] = {}  # identity in that pass -> the first stage that uses it
        # By identity in the followed pass: the workers that hold it; empty before the cut.
        self._holders: dict[int, set[int]] = {}
        self._unsplit: set[tuple[Program, int]] = set()
        self._same_weights()
        self._cut()
        self._take_parts()
        self._guard()
        self._loss = torch.zeros(2, dtype=torch.float64, device=me.device)
        self._weighted = False
        self._samples = 1
        self._reached: set[int] = set()
        self._pending: list[tuple[Any, Any]] = []
        stay(self)  # every stage's pass is looked at

    # -- the cut -----------------------------------------------------------------------

    def _same_weights(self) -> None:
        """Broadcast rank 0's weights and buffers before each worker keeps its part."""
        with torch.no_grad():
            for tensor in [*self.model.parameters(), *self.model.buffers()]:
                if tensor.numel() and not tensor.is_meta:
                    data = tensor.detach().contiguous()
                    dist.broadcast(data, 0)
                    tensor.data.copy_(data)

    def _follow(self, call: Callable[[Any], Any], batch: Any) -> Trace:
        with self._undivided(), self._opened(), self._keeper.plain():
            return follow(self.model, lambda: call(batch))

    def _cut(self) -> None:
        """Follow the model; rank 0 decides the cut."""
        plan, samples = self.plan, self.plan.micro_batch or 1
        batch = self.work.sample(samples)
        training = self.model.training
        self.model.train()
        on_meta = self.work.fill is not None
        buffers = self._off_meta() if on_meta else []
        try:
            with torch.enable_grad():
                trace = self._follow(self.work.compute, batch)
                answer: dict[str, Any] = {}
                if self.me.is_main:
                    call = None if on_meta else (lambda: self.work.compute(batch)[0])
                    try:
                        with self._undivided():
                            answer = {
                                "names": choose_cut.choose_cut(
                                    plan, self.model, self.work.optimizer, trace, samples, call
                                )
                            }
                    except ArgumentError as error:
                        answer = {"error": str(error)}
            answer = broadcast_json(self.me, answer)
            if "error" in answer:
                raise ArgumentError(answer["error"])
            named = {p.name: p for p in trace.points()}
            self.points = [named[name] for name in answer["names"]]
            self._add(_signature(batch, True, True), self.work.compute, batch, trace)
            if not trace.faked:
                # Such a model must really run to be followed, which it cannot when other workers'
                # weights are gone.
                with torch.enable_grad():
                    for size in self.work.sizes:
                        if size != samples:
                            self._program(self.work.sample(size))
        finally:
            self.model.train(training)
            for owner, name, buffer in buffers:
                owner._buffers[name] = buffer

    def _off_meta(self) -> list[tuple[nn.Module, str, torch.Tensor]]:
        """Replace meta parameters by shape-only stand-ins to follow the model. Returns the original
        buffers.
        """
        made: dict[int, nn.Parameter] = {}
        buffers = []
        for owner in self.model.modules():
            for name, p in owner._parameters.items():
                if p is not None and p.is_meta:
                    empty = torch.zeros((), dtype=p.dtype, device=self.me.device).expand(p.shape)
                    stand_in = made.setdefault(
                        id(p), nn.Parameter(empty, requires_grad=p.requires_grad)
                    )
                    stand_in._ronde_strides = p.stride()  # type: ignore[attr-defined]
                    self._was[id(p)] = self._stand_ins[owner, name] = stand_in
            for name, b in owner._buffers.items():
                if b is not None and b.is_meta:
                    buffers.append((owner, name, b))
                    owner._buffers[name] = torch.zeros(
                        (), dtype=b.dtype, device=self.me.device
                    ).expand(b.shape)
        return buffers

    def _key(self, parameter: torch.Tensor) -> int:
        """A parameter's identity in the followed pass."""
        return id(self._was.get(id(parameter), parameter))

    def _made(self, trace: Trace) -> Program:
        return program(
            trace, bounds_of(trace, self.points, self._may_run() if self._holders else None)
        )

    def _may_run(self) -> Callable[[int, TraceEvent], bool]:
        """Whether a stage's worker holds what an event uses: parameters, and current buffers."""
        buffers = {
            id(b): self._buffer_of[n]
            for n, b in self.model.named_buffers(remove_duplicate=False)
            if n in self._buffer_of
        }

        def may(stage: int, event: TraceEvent) -> bool:
            worker = worker_of(stage, self.plan.pipeline, self.plan.schedule)
            if event.module is not None:
                used = list(event.module.buffers())
            else:
                used = list(self.model.get_submodule(event.inside).buffers(recurse=False))
            return all(
                worker in self._holders.get(self._key(p), {worker}) for p in event.parameters
            ) and all(buffers.get(id(b), -1) in (-1, worker) for b in used)

        return may

    def _program(self, batch: Any) -> Program:
        return self._path(
            _signature(batch, self.model.training, torch.is_grad_enabled()),
            self.work.compute,
            batch,
        )

    def _path(self, key: Any, call: Callable[[Any], Any], batch: Any) -> Program:
        """The path a batch takes: a known one or a new one; the same on every worker."""
        for path in self._programs.get(key, ()):
            if (
                not path.guards
                or self._guards(path.program, call, batch, len(path.guards)) == path.guards
            ):
                return path.program
        if sum(map(len, self._programs.values())) > 64:
            self._programs.clear()
            self._weights_at.clear()
        return self._add(key, call, batch, self._follow(call, batch))

    def _guards(
        self, made: Program, call: Callable[[Any], Any], batch: Any, until: int | None = None
    ) -> tuple[Any, ...]:
        with self._opened(), self._keeper.plain():
            return Guards(made, until).read(lambda: call(batch))

    def _add(self, key: Any, call: Callable[[Any], Any], batch: Any, trace: Trace) -> Program:
        made = self._made(trace)
        if self._holders:
            self._check_written(made)
            self._check_held(made)
        guards = self._guards(made, call, batch) if has_guards(trace) else ()
        self._programs.setdefault(key, []).append(_Path(made, guards))
        return made

    def _any_program(self) -> Program:
        return next(iter(self._programs.values()))[0].program

    def _take_parts(self) -> None:
        """Keep this worker's weights and release the others."""
        made = self._any_program()
        holders: dict[int, set[int]] = {}
        for stage in range(self.last + 1):
            for p in made.parameters(stage):
                self._stage_of.setdefault(id(p), stage)
                holders.setdefault(id(p), set()).add(
                    worker_of(stage, self.plan.pipeline, self.plan.schedule)
                )
        mine, everyone = self.place.pipeline, list(self.model.parameters())
        self._beside(holders)
        self._holders = holders
        self._check_written(made)
        self._kept = {id(p) for p in everyone if mine in holders[self._key(p)]}
        self._first = {id(p) for p in everyone if mine == min(holders[self._key(p)])}
        self._lost_names = {
            n
            for n, p in self.model.named_parameters(remove_duplicate=False)
            if id(p) not in self._kept
        }
        self._stage_buffers(made)
        tied: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for p in everyone:
            if len(holders[self._key(p)]) > 1:
                tied.setdefault(tuple(sorted(holders[self._key(p)])), []).append(p)
        self._tied = []
        for workers, parameters in sorted(tied.items()):
            # Every rank makes every group, in the same order.
            for replica in range(self.layout.replicas):
                for tensor in range(self.layout.tensor):
                    group = group_of(
                        "tied", [self.layout.rank(Place(w, replica, tensor)) for w in workers]
                    )
                    if mine in workers and (replica, tensor) == (
                        self.place.replica,
                        self.place.tensor,
                    ):
                        self._tied.append((group, parameters))
        self._let_go()
        for group in self.work.optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) in self._kept]
        state = self.work.optimizer.state
        for lost in [p for p in state if id(p) not in self._kept]:
            del state[lost]
        if self.work.fill is not None:
            self.work.fill(lambda name: self.owns(name) or name in self._buffer_of)
        plan = self.plan
        self._parts: OptimizerParts | None = None
        if plan.replicas > 1 and plan.shard == "optimizer":
            self._parts = OptimizerParts(self.work.optimizer, self.data)
        elif plan.replicas > 1 and plan.shard != "none":
            self._shard_stages(made, holders)
        self._own()

    def _let_go(self) -> None:
        """Shrink other workers' parameters to one element: the shape stays, the memory goes."""
        names = {id(p): name for name, p in self.model.named_parameters(remove_duplicate=False)}
        with torch.no_grad():
            for owner in self.model.modules():
                for name, p in owner._parameters.items():
                    if p is None or id(p) in self._kept:
                        continue
                    path = names[id(p)]
                    if (owner, name) in self._stand_ins:
                        p = owner._parameters[name] = self._stand_ins.pop((owner, name))
                    elif absent(p):  # tied: seen under another name already
                        continue
                    else:
                        _hollow(p)
                    stage = self._stage_of.get(self._key(p))
                    make_remote(
                        p,
                        path,
                        min(self._holders[self._key(p)]) if stage is None else stage,
                        self._keeper,
                    )

    def _own(self) -> None:
        """The parameters this worker trains."""
        self.parameters = [p for n, p in trainable(self.model) if n not in self._lost_names]
        divided = {id(p) for p in self.parameters if isinstance(p, DTensor)}
        self._whole = [p for p in self.parameters if id(p) not in divided]
        self._divided = [p for p in self.parameters if id(p) in divided]
        self._real = {self._key(p): p for p in self.model.parameters()}
        self._flags = Flags(self.model)
        self._weights_at: dict[tuple[Program, int], list[nn.Parameter]] = {}

    def _weights_of(self, made: Program, stage: int) -> list[nn.Parameter]:
        """A stage's current trainable parameters."""
        if (made, stage) not in self._weights_at:
            found = [self._real.get(id(p), p) for p in made.parameters(stage)]
            self._weights_at[made, stage] = [p for p in found if p.requires_grad]
        return self._weights_at[made, stage]

    def _shard_stages(self, made: Program, holders: dict[int, set[int]]) -> None:
        """Shard this worker's modules over the replicas, gathered on call (FSDP2)."""
        fix_dtensors()
        users: dict[int, set[int]] = {}
        for _, event in made.events:
            for p in event.parameters:
                users.setdefault(id(p), set()).add(id(event.module) if event.kind == "call" else 0)
        mesh = replica_mesh(self.plan, self.me)
        self._shard_mesh = mesh
        before = dict(self.model.named_parameters(remove_duplicate=False))
        refuse_hooks(before, f"plan={self.plan.spec!r}")
        for stage in self.stages:
            for module in made.modules(stage):
                held = [p for p in module.parameters() if p.dim()]
                alone = all(
                    users.get(self._key(p)) == {id(module)} and len(holders[self._key(p)]) == 1
                    for p in held
                )
                types = {p.dtype for p in held if p.requires_grad}
                if not held or not alone or len(types) > 1 or isinstance(module, FSDPModule):
                    continue
                for owner in module.modules():
                    held_here = [
                        (n, p) for n, p in owner.named_parameters(recurse=False) if p.dim()
                    ]
                    self._stand_ins.update(
                        {(owner, n): self._was.get(id(p), p) for n, p in held_here}
                    )
                fully_shard(
                    module,
                    mesh=mesh,
                    reshard_after_forward=self.plan.shard == "parameters",
                    ignored_params={p for p in module.parameters() if not p.dim()},
                )
                assert isinstance(module, FSDPModule)
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
                self._sharded.append(module)
        after = dict(self.model.named_parameters(remove_duplicate=False))
        changed = {name: p for name, p in before.items() if after[name] is not p}
        adopt(self.work.optimizer, {p: after[name] for name, p in changed.items()})
        for name, p in changed.items():
            self._was[id(after[name])] = self._was.pop(id(p), p)
            _hollow(p)
        self._first |= {id(after[name]) for name, p in changed.items() if id(p) in self._first}

    @contextmanager
    def _undivided(self) -> Iterator[None]:
        """Sharded modules as they were, with shape-only parameters: to follow, not to run."""
        if not self._stand_ins:
            yield
            return
        hooks = [(m, m._forward_pre_hooks, m._forward_hooks) for m in self._sharded]
        now = [(owner, n, owner._parameters[n]) for owner, n in self._stand_ins]
        try:
            for m, _, _ in hooks:
                m._forward_pre_hooks, m._forward_hooks = OrderedDict(), OrderedDict()
            for (owner, n), p in self._stand_ins.items():
                current = owner._parameters[n]
                if current is not None:
                    p.requires_grad_(current.requires_grad)
                owner._parameters[n] = p
            yield
        finally:
            for owner, n, kept in now:
                owner._parameters[n] = kept
            for m, before, after in hooks:
                m._forward_pre_hooks, m._forward_hooks = before, after

    def _guard(self) -> None:
        """Make the script's own calls of the model an error, because other workers' weights are
        missing.
        """

        def guard(module: nn.Module, name: str, given: Callable[..., Any] | None) -> None:
            def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
                if not keeper.open:
                    raise PlanError(
                        f"the script calls {name or 'model'!r} itself, and under "
                        f"plan={keeper.plan!r} this worker does not hold its weights. Let "
                        "run.step() and run.evaluate() call the model, or use a plan under "
                        "which the script can: replicate, shard or tensor."
                    )
                return (
                    given(*args, **kwargs)
                    if given is not None
                    else type(self).forward(self, *args, **kwargs)
                )

            # Not a hook: modules with hooks are followed in another way.
            module.forward = types.MethodType(forward, module)  # type: ignore[method-assign]

        keeper = self._keeper
        for name, module in self.model.named_modules():
            lost = any(
                p is not None and id(p) not in self._kept for p in module._parameters.values()
            )
            if lost and not isinstance(module, torch.jit.ScriptModule):
                guard(module, name, module.__dict__.get("forward"))

    @contextmanager
    def _opened(self) -> Iterator[None]:
        was, self._keeper.open = self._keeper.open, True
        try:
            yield
        finally:
            self._keeper.open = was

    def _beside(self, holders: dict[int, set[int]]) -> None:
        """Assign modules the followed pass did not use to the stage of their nearest neighbors by
        name.
        """
        named = [
            (name.split("."), self._key(p))
            for name, p in self.model.named_parameters(remove_duplicate=False)
        ]
        used = [(i, path, holders[key]) for i, (path, key) in enumerate(named) if key in holders]
        for i, (path, key) in enumerate(named):
            if key not in holders:
                near = [
                    (_in_common(path, other), -abs(at - i), min(workers))
                    for at, other, workers in used
                ]
                shared, _, worker = max(near, default=(0, 0, 0))
                holders[key] = {worker if shared else 0}

    def _check_held(self, made: Program) -> None:
        """Refuse another path if it uses weights its stage's worker released."""
        for stage in range(self.last + 1):
            worker = worker_of(stage, self.plan.pipeline, self.plan.schedule)
            for p in made.parameters(stage):
                if worker not in self._holders.get(self._key(p), {worker}):
                    name = next(
                        n
                        for n, q in self.model.named_parameters(remove_duplicate=False)
                        if self._key(q) == self._key(p)
                    )
                    raise Diverged(
                        f"stage {stage} of the pipeline uses {name!r} for this batch. It "
                        "did not when the model was cut, and another worker "
                        "holds it. Let the first batches use all of the model, cut "
                        "elsewhere with split_at, or use another plan."
                    )

    def _check_written(self, made: Program) -> None:
        """Refuse in-place changes to what several workers hold: only the stage's worker would see
        them.
        """
        for stage, p in made.writes:
            if not self._holders.get(self._key(p), set()) <= {
                worker_of(stage, self.plan.pipeline, self.plan.schedule)
            }:
                name = next(
                    n
                    for n, q in self.model.named_parameters(remove_duplicate=False)
                    if self._key(q) == self._key(p)
                )
                raise PlanError(
                    f"the forward pass writes into {name!r}, in stage {stage} of the "
                    f"pipeline, and under plan={self.plan.spec!r} another worker holds it. "
                    "Scale what the layer makes, not its weights; or use a plan under "
                    "which every worker holds them all: replicate."
                )

    def _stage_buffers(self, made: Program) -> None:
        """Which workers hold which buffers as they change: of modules that run whole in one
        stage.
        """
        where: dict[int, int] = {}
        for stage in range(self.last, -1, -1):
            for module in made.modules(stage):
                for buffer in module.buffers():
                    where[id(buffer)] = worker_of(stage, self.plan.pipeline, self.plan.schedule)
        self._buffer_of = {
            name: where.get(id(b), -1)
            for name, b in self.model.named_buffers(remove_duplicate=False)
        }

    def owns(self, name: str) -> bool:
        """See :meth:`Strategy.owns`."""
        if name in self._buffer_of:
            return self._buffer_of[name] in (-1, self.place.pipeline)
        return name not in self._lost_names

    def table(self) -> list[dict[str, Any]]:
        """Per stage: worker, first module, parameters, bytes sent on per micro-batch."""
        made = self._any_program()
        rows = []
        for stage in range(self.last + 1):
            rows.append(
                {
                    "stage": stage,
                    "worker": worker_of(stage, self.plan.pipeline, self.plan.schedule),
                    "begins": self.points[stage - 1].name if stage else "(start)",
                    "parameters": sum(p.numel() for p in made.parameters(stage)),
                    "sends_bytes": sum(made.values[v].bytes for v in made.sends[stage]),
                }
            )
        return rows

    # -- sends and receives ------------------------------------------------------------

    def _send(self, tensors: Sequence[torch.Tensor], worker: int) -> None:
        if not tensors:
            return
        whole = [t.detach().contiguous() for t in tensors]
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, t, self._ranks[worker], self.along) for t in whole]
        )
        self._pending.append((works, whole))
        if len(self._pending) > 256:
            for work in self._pending.pop(0)[0]:
                work.wait()

    def _receive(
        self, made: Program, values: Iterable[int], worker: int
    ) -> tuple[list[Any], dict[int, torch.Tensor]]:
        device = self.me.device
        got = {
            v: torch.empty(made.values[v].shape, dtype=made.values[v].dtype, device=device)
            for v in values
        }
        if not got:
            return [], got
        return dist.batch_isend_irecv(
            [dist.P2POp(dist.irecv, t, self._ranks[worker], self.along) for t in got.values()]
        ), got

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
            # a scaler begins with its first use, and not every stage has the loss
            scale(torch.zeros((), device=self.me.device))
        self._samples = parts[0].global_samples
        programs = [self._program(m) for m in micros]
        for made in programs:
            self._reached |= made.reached
        flights: dict[tuple[int, int], _Flight] = {}
        coming: dict[tuple[str, int, int], tuple[list[Any], dict[int, torch.Tensor]]] = {}
        plan = self.plan
        order = actions(plan.schedule, plan.pipeline, plan.virtual, len(micros), True)[
            self.place.pipeline
        ]
        with self._opened():
            for action in order:
                self._act(action, programs, micros, parts, compute, scale, flights, coming)
        self._sent_all()

    def _act(
        self,
        action: Action,
        programs: list[Program],
        micros: Sequence[Any],
        parts: Sequence[Part],
        compute: Callable[[Any], Any],
        scale: Scale | None,
        flights: dict[tuple[int, int], _Flight],
        coming: dict[tuple[str, int, int], tuple[list[Any], dict[int, torch.Tensor]]],
    ) -> None:
        stage, kind, micro = action
        made = programs[micro]
        key = (stage, micro)
        workers, schedule = self.plan.pipeline, self.plan.schedule
        if kind == "RECV_F":
            coming["F", stage, micro] = self._receive(
                made, made.sends[stage - 1], worker_of(stage - 1, workers, schedule)
            )
        elif kind == "RECV_B":
            coming["B", stage, micro] = self._receive(
                made, made.gradients[stage], worker_of(stage + 1, workers, schedule)
            )
        elif kind == "SEND_F":
            flight = flights[key]
            self._send(
                _as_followed(made, stage, flight.sent), worker_of(stage + 1, workers, schedule)
            )
        elif kind == "SEND_B":
            flight = flights[key]
            self._send(
                [_gradient(flight.received[v]) for v in made.gradients[stage - 1]],
                worker_of(stage - 1, workers, schedule),
            )
            flight.received = {}
        elif kind == "F":
            works, received = coming.pop(("F", stage, micro), ([], {}))
            for work in works:
                work.wait()
            if stage and not works:  # the stage before is on this worker too
                before = flights.get((stage - 1, micro))
                received = (
                    {v: before.sent[v].detach() for v in made.sends[stage - 1]}
                    if before is not None
                    else {}
                )
            flights[key] = self._forward(
                made, stage, received, micros[micro], parts[micro], compute
            )
        elif kind in ("B", "I"):
            works, gradients = coming.pop(("B", stage, micro), ([], {}))
            for work in works:
                work.wait()
            if stage < self.last and not works:
                after = flights.get((stage + 1, micro))
                if after is not None:
                    gradients = {v: _gradient(after.received[v]) for v in made.gradients[stage]}
                    after.received = {}
            self._backward(flights[key], stage, gradients, scale, whole=kind == "B")
        elif kind == "W":
            self._weights(flights[key], stage)

    def _forward(
        self,
        made: Program,
        stage: int,
        received: dict[int, torch.Tensor],
        micro: Any,
        part: Part,
        compute: Callable[[Any], Any],
    ) -> _Flight:
        takes = set(made.gradients[stage - 1]) if stage else set()
        for value in takes:
            received[value].requires_grad_(True)
        flight = _Flight(made, received)
        handed = {v: t.clone() if v in made.cloned else t for v, t in received.items()}
        run = StageRun(made, stage, handed)
        result = run.run(lambda: compute(micro))
        flight.sent = run.sent
        if stage == self.last:
            value, weight = result
            self._weighted = weight is not None
            factor = (
                (1.0 if weight is not None else part.samples) / part.global_samples
                if part.samples
                else 0.0
            )
            flight.root, flight.factor = value, factor
            if part.samples:  # an empty one is a stand-in
                self._loss[0] += value.detach().to(torch.float64) * factor
                if weight is not None:
                    self._loss[1] += weight.to(torch.float64)
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
            start = torch.tensor(flight.factor, dtype=value.dtype, device=value.device)
            return [value], [start if scale is None else scale(start)]
        values = [v for v in flight.program.gradients[stage] if flight.sent[v].requires_grad]
        return [flight.sent[v] for v in values], [gradients[v] for v in values]

    def _backward(
        self,
        flight: _Flight,
        stage: int,
        gradients: dict[int, torch.Tensor],
        scale: Scale | None,
        whole: bool,
    ) -> None:
        roots, starts = self._roots(flight, stage, gradients, scale)
        flight.root, flight.sent = None, {}
        inputs = [flight.received[v] for v in flight.program.gradients[stage - 1]] if stage else []
        if not roots:
            return
        if whole or (flight.program, stage) in self._unsplit:
            weights = self._weights_of(flight.program, stage)
            first = any(w.grad is None for w in weights)
            backward(tuple(roots), tuple(starts))
            if first:
                # What is sent back is on its way while the next micro-batch adds to the weights'
                # gradients.
                part_gradients([*weights, *inputs])
            return
        if not inputs:
            # nobody waits for it: all of it goes where a bubble would be
            flight.later = (
                roots,
                starts,
            )
            return
        for root, start in zip(roots, starts, strict=True):
            if root.is_leaf:  # handed on as it came
                root.grad = start if root.grad is None else root.grad + start
        pairs = [(r, g) for r, g in zip(roots, starts, strict=True) if not r.is_leaf]
        if not pairs:
            return
        roots, starts = [r for r, _ in pairs], [g for _, g in pairs]
        weights = self._weights_of(flight.program, stage)
        _, flight.groups = stage_backward_input(Once(roots), starts, inputs, iter(weights))  # type: ignore[arg-type]
        # What does not meet the path to an input is in none of its groups.
        found = {edge for group in flight.groups for edge in group["params"]}
        if any(len(group["intermediates"]) > 1 for group in flight.groups) or _bypassed(
            roots, flight.groups
        ):
            # A weight that is used in several places: torch 2.13 may count it twice, or not at all
            # where one of them does not lie on the path to an input. From here on, this stage's
            # pass is not split.
            flight.groups, found = None, set()
            self._unsplit.add((flight.program, stage))
        alone = [
            w
            for w in weights
            if self._key(w) in self._reached and _get_grad_fn_or_grad_acc(w) not in found
        ]
        if alone:
            for w, g in zip(
                alone,
                torch.autograd.grad(roots, alone, starts, retain_graph=True, allow_unused=True),
                strict=True,
            ):
                if g is not None:
                    w.grad = g if w.grad is None else w.grad + g
        for given in inputs:
            # sent while the other half of the pass goes on from the same memory
            if given.grad is not None:
                given.grad = given.grad.clone()

    def _weights(self, flight: _Flight, stage: int) -> None:
        """Run the deferred weight-gradient part of the backward."""
        weights = self._weights_of(flight.program, stage)
        if flight.later is not None:
            backward(tuple(flight.later[0]), tuple(flight.later[1]))
        elif flight.groups:
            stage_backward_weight(iter(weights), flight.groups)
        part_gradients(weights)
        flight.later = flight.groups = None

    def finish(self) -> torch.Tensor:
        """See :meth:`Strategy.finish`."""
        for p in self.parameters:
            if self._key(p) not in self._reached:
                p.grad = (
                    None  # zeros that came from another stage: with one process it has no gradient
                )
        for group, parameters in self._tied:
            self._sum([p for p in parameters if p.requires_grad], group)
        if self.plan.replicas > 1:
            self._sum(self._whole, self.data)
        mine = self._loss.clone() if self.counts else torch.zeros_like(self._loss)
        self.local_loss = self._loss[0].clone() if self.holds_result else None
        if self.plan.replicas == 1:  # who has it is done before the first stage: nobody waits twice
            dist.broadcast(
                mine, self._ranks[worker_of(self.last, self.plan.pipeline, self.plan.schedule)]
            )
        else:
            dist.all_reduce(mine)
        loss, weight = mine[0], mine[1]
        if bool(weight != 0):
            factor = self._samples / weight
            self._scale_gradients(factor)
            loss = loss * factor
        return loss

    def _scale_gradients(self, factor: torch.Tensor) -> None:
        scale_gradients(self._whole, factor)
        for p in self._divided:
            if p.grad is not None:
                local_part(p.grad).mul_(factor.to(p.dtype))

    def _sum(self, parameters: list[nn.Parameter], group: Any) -> None:
        """All-reduce gradients over a group, in buckets. A gradient that nobody has stays None."""
        if not parameters:
            return
        has = torch.tensor(
            [p.grad is not None for p in parameters], dtype=torch.uint8, device=self.me.device
        )
        dist.all_reduce(has, dist.ReduceOp.MAX, group=group)
        buckets: dict[torch.dtype, list[nn.Parameter]] = {}
        for p, used in zip(parameters, has.tolist(), strict=True):
            if not used:
                continue
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            bucket = buckets.setdefault(p.dtype, [])
            bucket.append(p)
            if sum(q.numel() * q.element_size() for q in bucket) >= _BUCKET_BYTES:
                _sum_bucket(buckets.pop(p.dtype), group)
        for bucket in buckets.values():
            _sum_bucket(bucket, group)

    def clip(self, max_norm: float) -> None:
        """See :meth:`Strategy.clip`: each weight counts once, whoever holds it."""
        square = torch.zeros((), dtype=torch.float64, device=self.me.device)
        for p in self._divided:
            if p.grad is not None:
                square += torch.linalg.vector_norm(local_part(p.grad)).to(torch.float64) ** 2
        if self._sharded:
            dist.all_reduce(square, group=self._shard_mesh.get_group(self._shard_mesh.ndim - 1))
        for p in self._whole:
            if p.grad is not None and id(p) in self._first:
                square += torch.linalg.vector_norm(p.grad).to(torch.float64) ** 2
        dist.all_reduce(square, group=self.along)
        self._scale_gradients((max_norm / (square.sqrt() + 1e-6)).clamp(max=1.0))

    def updated(self) -> None:
        """See :meth:`Strategy.updated`."""
        if self._parts is not None:
            self._parts.exchange()

    def loaded(self) -> None:
        """See :meth:`Strategy.loaded`."""
        if self._parts is not None:
            self._parts.let_go()
        for module in self._sharded:
            if isinstance(module, FSDPModule):
                module.reshard()

    # -- without gradients -------------------------------------------------------------

    def infer(self, call: Callable[[Any], Any], batch: Any) -> Any:
        """See :meth:`Strategy.infer`. Batches follow each other without waiting for the stages
        behind.
        """
        key = (
            id(getattr(call, "__code__", call)),
            *_signature(batch, self.model.training, torch.is_grad_enabled()),
        )
        made = self._path(key, call, batch)
        result = None
        workers, schedule = self.plan.pipeline, self.plan.schedule
        handed: dict[int, torch.Tensor] = {}
        for stage in self.stages:
            received: dict[int, torch.Tensor] = {}
            if stage:
                before = worker_of(stage - 1, workers, schedule)
                if before == self.place.pipeline:
                    received = handed
                else:
                    works, received = self._receive(made, made.sends[stage - 1], before)
                    for work in works:
                        work.wait()
            run = StageRun(
                made, stage, {v: t.clone() if v in made.cloned else t for v, t in received.items()}
            )
            with self._opened():
                result = run.run(lambda: call(batch))
            for module in made.modules(stage):
                if isinstance(module, FSDPModule):
                    module.reshard()
            if stage < self.last:
                handed = run.sent
                after = worker_of(stage + 1, workers, schedule)
                if after != self.place.pipeline:
                    self._send(_as_followed(made, stage, run.sent), after)
        return result if self.holds_result else None

    def start_epoch(self) -> None:
        """See :meth:`Strategy.start_epoch`."""
        self._sent_all()
        self.sync_buffers()

    def refresh(self) -> bool:
        """See :meth:`Strategy.refresh`."""
        if not self._flags.changed():
            return False
        forget_frozen(self.model)
        self._programs = {}
        self._own()
        return True

    def sync_buffers(self) -> None:
        """See :meth:`Strategy.sync_buffers`: along the replicas, for this worker's stages."""
        if self.plan.replicas == 1:
            return
        source = self.layout.along_replicas(self.me.rank)[0]
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                if buffer.numel() and self._buffer_of.get(name) in (-1, self.place.pipeline):
                    data = buffer.detach().contiguous()
                    dist.broadcast(data, source, group=self.data)
                    buffer.copy_(data)


def _hollow(parameter: nn.Parameter) -> None:
    """Let one element stand for the tensor. Its layout is kept for :mod:`ronde.capture.follow`."""
    strides = parameter.stride()
    parameter.data = element(parameter.dtype, parameter.device).expand(parameter.shape)
    parameter._ronde_strides = strides  # type: ignore[attr-defined]


def _sum_bucket(parameters: list[nn.Parameter], group: Any) -> None:
    gradients = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([g.reshape(-1) for g in gradients])
    dist.all_reduce(flat, group=group)
    for g, part in zip(gradients, torch.split(flat, [g.numel() for g in gradients]), strict=True):
        g.copy_(part.view_as(g))


def _as_followed(made: Program, stage: int, sent: dict[int, torch.Tensor]) -> list[torch.Tensor]:
    """A stage's outputs, in order; the next stage allocated for what was seen when following."""
    for v in made.sends[stage]:
        value, found = made.values[v], sent[v]
        if tuple(found.shape) != value.shape or found.dtype != value.dtype:
            raise RondeError(
                f"stage {stage} made a tensor of shape {list(found.shape)}, {found.dtype}, "
                f"where {list(value.shape)}, {value.dtype} was seen "
                "when the forward pass was followed: a pipeline needs shapes that depend "
                "on the batch's own shapes alone."
            )
    return [sent[v] for v in made.sends[stage]]


class Once(list[torch.Tensor]):
    """A list that can be iterated once. ``stage_backward_input`` iterates its outputs twice, the
    second time to detach them in place, which views refuse.
    """

    def __iter__(self) -> Any:
        found = list(super().__iter__())
        self.clear()
        return iter(found)


def _in_common(one: list[str], other: list[str]) -> int:
    """Number of leading name parts two parameters share."""
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


def _gradient(tensor: torch.Tensor) -> torch.Tensor:
    """A received tensor's gradient, or zeros if the backward did not reach it."""
    return tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)


def _bypassed(roots: Sequence[torch.Tensor], groups: Sequence[dict[str, Any]]) -> bool:
    """Whether a gradient reaches a group's weights on a path around its later part's first
    tensors.
    """
    ends = {node for group in groups for node in group["intermediates"]}
    weights = {node for group in groups for node in group["params"]}
    waiting: list[Any] = [r.grad_fn for r in roots]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node in weights:
            return True
        if node in ends:
            continue
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return False


def _refuse(plan: Plan, model: nn.Module) -> None:
    from ronde.parallel.batchnorm import batchnorms
    from ronde.plan.schedules import allowed

    if plan.sync_batchnorm and batchnorms(model):
        raise ArgumentError(
            "sync_batchnorm=True does not go with a pipeline: its micro-batches are "
            "normalised one by one. Use group or layer "
            "normalisation, or plan='replicate' or 'shard'."
        )
    if plan.tensor > 1:
        raise ArgumentError(
            f"plan={plan.spec!r}: a pipeline's stages are not split by layers as well. Use "
            "pipeline with shard, or tensor with shard."
        )
    if plan.shard in ("gradients", "parameters") and plan.schedule in ("zero-bubble", "zbv"):
        raise ArgumentError(
            f"plan={plan.spec!r}: {plan.schedule} puts part of the backward pass off, when "
            "sharded parameters have been let go. Use "
            "schedule=1f1b or interleaved, or shard=optimizer."
        )
    why = allowed(plan.schedule, plan.pipeline, plan.virtual, plan.accumulation)
    if why:
        raise ArgumentError(f"plan={plan.spec!r}: {why}.")
