"""Who owns what in a pipeline: the cut, the paths a batch takes, and each worker's weights.

The model is followed once and cut into stages (:mod:`ronde.parallel.choose_cut`). Every worker
keeps its stages' parameters; the others become remote parameters. A batch that takes another path
is followed again, and refused if a stage needs weights that its worker has released.
"""

from __future__ import annotations

import itertools
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ronde.capture import Trace, TraceEvent, bounds_of
from ronde.capture.follow import follow
from ronde.parallel import choose_cut
from ronde.parallel.buckets import broadcast_packed
from ronde.parallel.dtensor_fixes import fix_dtensors
from ronde.parallel.fsdp import adopt, refuse_hooks, replica_mesh, shard_module
from ronde.parallel.own_calls import wrap_forward
from ronde.parallel.remote_parameter import RemoteParameters, element, held_elsewhere, make_remote
from ronde.parallel.stage_run import Diverged, Guards, Program, has_guards, program
from ronde.parallel.strategy import Flags, Work, trainable
from ronde.parallel.tensor_parallel import Divided
from ronde.parallel.zero1 import OptimizerParts
from ronde.plan import Place, Plan
from ronde.plan.schedules import worker_of
from ronde.world import ArgumentError, LossError, PlanError, RondeError, World
from ronde.world.consensus import ask_main
from ronde.world.meshes import group_of
from ronde.world.rendezvous import rendezvous
from ronde.world.tensors import tensors_in

__all__ = ["StageOwnership", "signature"]


def signature(batch: Any, training: bool, grad: bool) -> tuple[Any, ...]:
    """What decides a forward pass's path: shapes and types of the batch, and the modes."""
    shapes = tuple(
        (tuple(t.shape), t.dtype, tuple(t.stride())) for t in tensors_in(batch, attributes=True)
    )
    return (training, grad, torch.is_autocast_enabled("cpu"), shapes)


@dataclass(frozen=True)
class _Path:
    """A path through the model, and the values that it read from the batch."""

    program: Program
    guards: tuple[Any, ...]


class StageOwnership:
    """Cuts the model and keeps this worker's part of it.

    Args:
        stages: the stages this worker runs.
        replica_group: the replicas' process group, None without replicas.
        divided: the blocks that tensor parallel workers hold together, None without them.

    Attributes:
        points: where the stages after the first begin.
        parameters: the parameters this worker trains: ``whole``, ``split`` (over tensor parallel
            workers), or ``sharded_parameters`` (over the replicas, maybe over both).
        names: theirs.
        counted: identities of the parameters whose norm this worker counts.
        tied: groups of workers that share parameters, with those parameters.
        sharded: modules whose parameters are sharded over the replicas.
        optimizer_parts: how updated parameters are exchanged under ``shard=optimizer``.

    Raises:
        ArgumentError: the model cannot be cut this way.
    """

    def __init__(
        self,
        plan: Plan,
        work: Work,
        me: World,
        stages: list[int],
        replica_group: Any,
        divided: Divided | None,
    ) -> None:
        self.plan, self.me, self.work, self.model = plan, me, work, work.model
        self.layout, self.stages, self._replica_group = plan.layout, stages, replica_group
        self.place = self.layout.place(me.rank)
        self.last = plan.pipeline * plan.virtual - 1
        # identity -> the parameter that the model was followed with, if it was replaced since
        self._followed_as: dict[int, nn.Parameter] = {}
        self._stand_ins: dict[tuple[nn.Module, str], nn.Parameter] = {}
        self.sharded: list[nn.Module] = []
        # key of a parameter -> the sharded module that holds it, of any worker
        self._sharded_as: dict[int, int] = {}
        self._paths: dict[Any, list[_Path]] = {}
        self._remote = RemoteParameters(
            plan.spec
        )  # open while modules run for a stage, or are followed
        self._stage_of: dict[int, int] = {}  # key of a parameter -> the first stage that uses it
        # key of a parameter -> the workers that hold it; empty before the cut
        self._holders: dict[int, set[int]] = {}
        self._divided = divided
        if divided is None:
            broadcast_packed([*self.model.parameters(), *self.model.buffers()], me.device)
        else:
            self._keep_whole(divided)
        self._cut()
        self._take_parts()
        self._guard()

    def _keep_whole(self, divided: Divided) -> None:
        """Follow the model with the parameters that it had before they were divided."""
        for path, owner in self.model.named_modules(remove_duplicate=False):
            for name, p in owner._parameters.items():
                whole = divided.whole.get(f"{path}.{name}" if path else name)
                if whole is not None and p is not None:
                    self._followed_as[id(p)] = self._stand_ins[owner, name] = whole

    def _cut(self) -> None:
        """Follow the model; rank 0 decides the cut."""
        plan, samples = self.plan, self.plan.micro_batch or 1
        batch = self.work.sample(samples)
        training = self.model.training
        self.model.train()
        on_meta = self.work.fill is not None
        buffers = self._replace_meta() if on_meta else []
        try:
            with torch.enable_grad():
                trace = self._first_pass(batch)

                def choose() -> tuple[bool, list[str]]:
                    call = None if on_meta else (lambda: self.work.compute(batch)[0])
                    with self.work.trial(), self._undivided(), self._alone():
                        names = choose_cut.choose_cut(
                            plan, self.model, self.work.optimizer, trace, samples, call
                        )
                    return has_guards(trace), names

                self._guarded, names = ask_main(self.me, choose)
            named = {p.name: p for p in trace.points()}
            self.points = [named[name] for name in names]
            self._add_path(signature(batch, True, True), self.work.compute, batch, trace)
            if not trace.faked:
                # This model must really run to be followed: now, while all weights are here.
                with torch.enable_grad():
                    for size in self.work.sizes:
                        if size != samples:
                            self.program_of(self.work.sample(size))
        finally:
            self.model.train(training)
            for owner, name, buffer in buffers:
                owner._buffers[name] = buffer

    def _alone(self) -> AbstractContextManager[None]:
        """Only this worker runs the model."""
        runtime = self._divided.runtime if self._divided is not None else None
        return nullcontext() if runtime is None else runtime.alone()

    def _first_pass(self, batch: Any) -> Trace:
        try:
            return self._follow(self.work.compute, batch)
        except LossError as error:
            raise LossError(
                f"{error} A script that owns its loop (run.backward) cannot drive "
                f"plan={self.plan.spec!r}: use another plan for it."
            ) from error
        except RondeError:
            raise
        except Exception as error:
            raise ArgumentError(
                f"plan={self.plan.spec!r}: laying a pipeline out takes a forward pass and a loss "
                f"over a micro-batch, which failed ({type(error).__name__}: {error}). Give "
                "ronde.distribute the loss (and forward) that training uses. A script that owns "
                "its loop (run.backward) cannot drive a pipeline: use another plan for it."
            ) from error

    def _follow(self, call: Callable[[Any], Any], batch: Any) -> Trace:
        with self.work.trial(), self._undivided(), self.opened(), self._remote.plain():
            trace = follow(self.model, lambda: call(batch))
        if self._divided is not None:
            trace.together = tuple(
                (*block.column, *((block.path,) if block.narrow else ()), block.row)
                for block in self._divided.blocks
                if block.kind != "multihead"  # its layers are not called one by one
            )
        return trace

    def _replace_meta(self) -> list[tuple[nn.Module, str, torch.Tensor]]:
        """Replace meta tensors by shape-only stand-ins. Returns the original buffers."""
        made: dict[int, nn.Parameter] = {}
        buffers = []
        for owner in self.model.modules():
            for name, p in owner._parameters.items():
                if p is not None and p.is_meta:
                    empty = torch.zeros((), dtype=p.dtype, device=self.me.device).expand(p.shape)
                    new = nn.Parameter(empty, requires_grad=p.requires_grad)
                    stand_in = made.setdefault(id(p), new)
                    stand_in._ronde_strides = p.stride()  # type: ignore[attr-defined]
                    self._followed_as[id(p)] = self._stand_ins[owner, name] = stand_in
            for name, b in owner._buffers.items():
                if b is not None and b.is_meta:
                    buffers.append((owner, name, b))
                    zero = torch.zeros((), dtype=b.dtype, device=self.me.device)
                    owner._buffers[name] = zero.expand(b.shape)
        return buffers

    def key(self, parameter: torch.Tensor) -> int:
        """A parameter's identity in the followed pass."""
        return id(self._followed_as.get(id(parameter), parameter))

    def program_of(self, batch: Any) -> Program:
        """The program of a batch's path in the current modes."""
        modes = self.model.training, torch.is_grad_enabled()
        return self.path(signature(batch, *modes), self.work.compute, batch)

    def path(self, key: Any, call: Callable[[Any], Any], batch: Any) -> Program:
        """The path a batch takes: a known one or a new one; the same on every worker."""
        for path in self._paths.get(key, ()):
            guards = path.guards
            if not guards or self._guards(path.program, call, batch, len(guards)) == guards:
                return path.program
        if sum(map(len, self._paths.values())) > 64:
            self._paths.clear()
            self._weights_at.clear()
        return self._add_path(key, call, batch, self._follow(call, batch))

    def _guards(
        self, made: Program, call: Callable[[Any], Any], batch: Any, until: int | None = None
    ) -> tuple[Any, ...]:
        with self.work.trial(), self.opened(), self._remote.plain():
            return Guards(made, until).read(lambda: call(batch))

    def _add_path(self, key: Any, call: Callable[[Any], Any], batch: Any, trace: Trace) -> Program:
        may = self._may_run() if self._holders else None
        made = program(trace, bounds_of(trace, self.points, may))
        if self._holders:
            self._check_writes(made)
            self._check_reads(made)
        guards = self._guards(made, call, batch) if has_guards(trace) else ()
        self._paths.setdefault(key, []).append(_Path(made, guards))
        return made

    def _may_run(self) -> Callable[[int, TraceEvent], bool]:
        """Whether a stage's worker holds what an event uses: parameters, and current buffers."""
        buffers = {
            id(b): self.buffer_workers[n]
            for n, b in self.model.named_buffers(remove_duplicate=False)
            if n in self.buffer_workers
        }

        def may(stage: int, event: TraceEvent) -> bool:
            worker = self.worker_at(stage)
            if event.module is not None:
                used = event.module.buffers()
            else:
                used = self.model.get_submodule(event.inside).buffers(recurse=False)
            current = all(buffers.get(id(b), -1) in (-1, worker) for b in used)
            return current and all(self._holds(worker, p) for p in event.parameters)

        return may

    def worker_at(self, stage: int) -> int:
        """The worker that runs a stage."""
        return worker_of(stage, self.plan.pipeline)

    def _holds(self, worker: int, parameter: torch.Tensor) -> bool:
        return worker in self._holders.get(self.key(parameter), {worker})

    def _name_of(self, parameter: torch.Tensor) -> str:
        names = self.model.named_parameters(remove_duplicate=False)
        return next(n for n, p in names if self.key(p) == self.key(parameter))

    def _any_program(self) -> Program:
        return next(iter(self._paths.values()))[0].program

    def _check_reads(self, made: Program) -> None:
        """Refuse a path that uses weights which its stage's worker has released."""
        for stage in range(self.last + 1):
            for p in made.parameters(stage):
                if not self._holds(self.worker_at(stage), p):
                    raise Diverged(
                        f"stage {stage} of the pipeline uses {self._name_of(p)!r} for this batch. "
                        "It did not when the model was cut, and another worker holds it. Let the "
                        "first batches use all of the model, cut elsewhere with split_at, or use "
                        "another plan."
                    )

    def _check_writes(self, made: Program) -> None:
        """Refuse in-place changes of shared weights: only the stage's worker would see them."""
        for stage, p in made.writes:
            if not self._holders.get(self.key(p), set()) <= {self.worker_at(stage)}:
                raise PlanError(
                    f"the forward pass writes into {self._name_of(p)!r}, in stage {stage} of the "
                    f"pipeline, and under plan={self.plan.spec!r} another worker holds it. Scale "
                    "the layer's output, not its weights, or use plan='replicate', under which "
                    "every worker holds all weights."
                )

    def _take_parts(self) -> None:
        """Keep this worker's weights and release the others."""
        made = self._any_program()
        holders: dict[int, set[int]] = {}
        for stage in range(self.last + 1):
            for p in made.parameters(stage):
                self._stage_of.setdefault(id(p), stage)
                holders.setdefault(id(p), set()).add(self.worker_at(stage))
        mine, everyone = self.place.pipeline, list(self.model.parameters())
        self._place_unused(holders)
        self._holders = holders
        self._check_writes(made)
        self._held = {id(p) for p in everyone if mine in holders[self.key(p)]}
        self.counted = {id(p) for p in everyone if mine == min(holders[self.key(p)])}
        named = self.model.named_parameters(remove_duplicate=False)
        self._remote_names = {n for n, p in named if id(p) not in self._held}
        self._place_buffers(made)
        self._group_tied(everyone)
        for whole in self._stand_ins.values() if self._divided is not None else ():
            _drop_values(whole)
        self._release()
        for group in self.work.optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) in self._held]
        state = self.work.optimizer.state
        for released in [p for p in state if id(p) not in self._held]:
            del state[released]
        if self.work.fill is not None:
            self.work.fill(lambda name: self.owns(name) or name in self.buffer_workers)
        plan = self.plan
        self.optimizer_parts: OptimizerParts | None = None
        if plan.replicas > 1 and plan.shard == "optimizer":
            self.optimizer_parts = OptimizerParts(self.work.optimizer, self._replica_group)
        elif plan.replicas > 1 and plan.shard != "none":
            self._shard_stages(made, holders)
        self.list_parameters()

    def _place_unused(self, holders: dict[int, set[int]]) -> None:
        """Give parameters that no stage uses to the holder of their nearest neighbor by name."""
        parameters = self.model.named_parameters(remove_duplicate=False)
        named = [(name.split("."), self.key(p)) for name, p in parameters]
        used = [(i, path, holders[key]) for i, (path, key) in enumerate(named) if key in holders]
        for i, (path, key) in enumerate(named):
            if key not in holders:
                near = [
                    (_in_common(path, other), -abs(at - i), min(workers))
                    for at, other, workers in used
                ]
                shared, _, worker = max(near, default=(0, 0, 0))
                holders[key] = {worker if shared else 0}

    def _place_buffers(self, made: Program) -> None:
        """Find the worker that updates each buffer; -1 for all, if no module of a stage has it."""
        where: dict[int, int] = {}
        for stage in range(self.last, -1, -1):
            for module in made.modules(stage):
                where.update({id(b): self.worker_at(stage) for b in module.buffers()})
        buffers = self.model.named_buffers(remove_duplicate=False)
        self.buffer_workers = {name: where.get(id(b), -1) for name, b in buffers}

    def _group_tied(self, parameters: list[nn.Parameter]) -> None:
        """Make the process groups that sum gradients of weights which several workers hold."""
        tied: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for p in parameters:
            workers = tuple(sorted(self._holders[self.key(p)]))
            if len(workers) > 1:
                tied.setdefault(workers, []).append(p)
        self.tied = []
        here = self.place.replica, self.place.tensor
        places = itertools.product(range(self.layout.replicas), range(self.layout.tensor))
        for (workers, mine), place in itertools.product(sorted(tied.items()), list(places)):
            # Every rank makes every group, in the same order.
            group = group_of("tied", [self.layout.rank(Place(w, *place)) for w in workers])
            if self.place.pipeline in workers and place == here:
                self.tied.append((group, mine))

    def _release(self) -> None:
        """Shrink other workers' parameters to one element: the shape stays, the memory goes."""
        names = {id(p): name for name, p in self.model.named_parameters(remove_duplicate=False)}
        with torch.no_grad():
            for owner in self.model.modules():
                for name, p in owner._parameters.items():
                    if p is None or id(p) in self._held:
                        continue
                    path = names[id(p)]
                    if (owner, name) in self._stand_ins:
                        p = owner._parameters[name] = self._stand_ins.pop((owner, name))
                    elif held_elsewhere(p):  # tied, and released under another name
                        continue
                    else:
                        _drop_values(p)
                    key = self.key(p)
                    stage = self._stage_of.get(key, min(self._holders[key]))
                    make_remote(p, path, stage, self._remote)

    def list_parameters(self) -> None:
        """List the parameters this worker trains."""
        mine = [(n, p) for n, p in trainable(self.model) if n not in self._remote_names]
        self.names, self.parameters = [n for n, _ in mine], [p for _, p in mine]
        self.whole = [p for p in self.parameters if not isinstance(p, DTensor)]
        divided = [p for p in self.parameters if isinstance(p, DTensor)]
        self.split = [p for p in divided if p.device_mesh.mesh_dim_names == ("tensor",)]
        self.sharded_parameters = [
            p for p in divided if p.device_mesh.mesh_dim_names != ("tensor",)
        ]
        self._real = {self.key(p): p for p in self.model.parameters()}
        self._flags = Flags(self.model)
        self._weights_at: dict[tuple[Program, int], list[nn.Parameter]] = {}

    def weights_of(self, made: Program, stage: int) -> list[nn.Parameter]:
        """A stage's current trainable parameters."""
        if (made, stage) not in self._weights_at:
            current = [self._real.get(id(p), p) for p in made.parameters(stage)]
            self._weights_at[made, stage] = [p for p in current if p.requires_grad]
        return self._weights_at[made, stage]

    def _shard_stages(self, made: Program, holders: dict[int, set[int]]) -> None:
        """Shard this worker's modules over the replicas, gathered on call (FSDP2)."""
        fix_dtensors(self.me)
        users: dict[int, set[int]] = {}
        for _, event in made.events:
            for p in event.parameters:
                users.setdefault(id(p), set()).add(id(event.module) if event.kind == "call" else 0)
        mesh = replica_mesh(self.plan, self.me)
        before = dict(self.model.named_parameters(remove_duplicate=False))
        refuse_hooks(before, f"plan={self.plan.spec!r}")
        planned: list[nn.Module] = []  # the same on every worker
        for stage in range(self.last + 1):
            for module in made.modules(stage):
                held = [p for p in module.parameters() if p.dim()]
                alone = all(
                    users.get(self.key(p)) == {id(module)} and len(holders[self.key(p)]) == 1
                    for p in held
                )
                types = {p.dtype for p in held if p.requires_grad}
                if not held or not alone or len(types) > 1 or module in planned:
                    continue
                # FSDP2 exchanges a unit's gradients together, and has none for an expert that no
                # sample chose: such modules stay whole, and are summed with a flag each.
                if id(module) in made.partial:
                    continue
                self._sharded_as.update({self.key(p): len(planned) for p in held})
                planned.append(module)
                if stage not in self.stages:
                    continue
                for owner in module.modules():
                    for n, p in owner.named_parameters(recurse=False):
                        if p.dim():
                            self._stand_ins[owner, n] = self._followed_as.get(id(p), p)
                shard_module(
                    module,
                    mesh=mesh,
                    reshard_after_forward=self.plan.shard == "parameters",
                    ignored_params={p for p in module.parameters() if not p.dim()},
                )
                self.sharded.append(module)
        after = dict(self.model.named_parameters(remove_duplicate=False))
        changed = {name: p for name, p in before.items() if after[name] is not p}
        adopt(self.work.optimizer, {p: after[name] for name, p in changed.items()})
        for name, p in changed.items():
            self._followed_as[id(after[name])] = self._followed_as.pop(id(p), p)
            if not isinstance(p, DTensor):
                _drop_values(p)
        self.counted |= {id(after[name]) for name, p in changed.items() if id(p) in self.counted}

    def check_replicas(self, programs: Sequence[Program]) -> None:
        """Refuse micro-batches of which replicas use other sharded modules: before any exchange,
        since a replica gathers a module's weights from all others.

        Only a path that reads numbers from the batch can differ, and only then is this asked.
        """
        if not self._sharded_as or not self._guarded:
            return
        used = [
            [
                sorted({self._sharded_as[id(p)] for p in e.parameters if id(p) in self._sharded_as})
                for _, e in made.events
            ]
            for made in programs
        ]
        digest = zlib.crc32(repr([[row for row in rows if row] for rows in used]).encode())
        both = torch.tensor([digest, -digest], device=self.me.device)
        dist.all_reduce(both, dist.ReduceOp.MAX, group=self._replica_group)
        if both[0] != -both[1]:
            raise PlanError(
                f"under plan={self.plan.spec!r} the values of a batch decide which modules are "
                "called, and replicas would call others in the same step. They gather a module's "
                "weights together. Use shard=optimizer or no shard beside the pipeline, or call "
                "the same modules for each batch."
            )

    @contextmanager
    def _undivided(self) -> Iterator[None]:
        """Give sharded modules shape-only parameters, without FSDP2's hooks, to be followed."""
        if not self._stand_ins:
            yield
            return
        hooks = [(m, m._forward_pre_hooks, m._forward_hooks) for m in self.sharded]
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
        """Refuse the script's own calls of the model, and of modules that other workers hold."""

        def refuse_own_call(module: nn.Module, name: str) -> None:
            if absent.open:
                return
            lacks = "this worker does not hold its weights"
            if module is self.model:
                lacks = "a loop of its own cannot drive the stages of a pipeline"
            text = (
                f"the script calls {repr(name) if name else 'the model'} itself, and under "
                f"plan={absent.plan!r} {lacks} (rank {meeting.me.rank}). Let run.step() and "
                "run.evaluate() call the model, or use plan='replicate', 'shard', or 'tensor', "
                "under which the script can. For samples, let all ranks enter 'with "
                "run.whole_model() as model:' and call that model."
            )
            raise meeting.refuse(PlanError(text))

        def guard(module: nn.Module, name: str) -> None:
            def around(forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
                refuse_own_call(module, name)
                return forward(*args, **kwargs)

            wrap_forward(module, around)

        absent, meeting = self._remote, rendezvous(self.me)
        for name, module in self.model.named_modules():
            if module in self.sharded:  # before its weights are gathered from the replicas
                refuse = partial(lambda name, module, *_: refuse_own_call(module, name), name)
                module.register_forward_pre_hook(refuse, prepend=True)
            own = [p for p in module._parameters.values() if p is not None]
            remote = any(id(p) not in self._held for p in own)
            if (remote or module is self.model) and not isinstance(module, torch.jit.ScriptModule):
                guard(module, name)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Allow calls of modules with remote parameters, to run a stage or follow a pass."""
        was, self._remote.open = self._remote.open, True
        try:
            yield
        finally:
            self._remote.open = was

    def owns(self, name: str) -> bool:
        """Whether this worker holds a parameter or buffer, by its ``state_dict()`` name."""
        if name in self.buffer_workers:
            return self.buffer_workers[name] in (-1, self.place.pipeline)
        return name not in self._remote_names

    def table(self) -> list[dict[str, Any]]:
        """Per stage: worker, first module, parameters, bytes sent on per micro-batch."""
        made = self._any_program()
        return [
            {
                "stage": stage,
                "worker": self.worker_at(stage),
                "begins": self.points[stage - 1].name if stage else "(start)",
                "parameters": sum(p.numel() for p in made.parameters(stage)),
                "sends_bytes": sum(made.values[v].bytes for v in made.sends[stage]),
            }
            for stage in range(self.last + 1)
        ]

    def forget_paths(self) -> None:
        """Drop the known paths, because parameters were frozen, thawed or replaced."""
        self._paths = {}
        self.list_parameters()

    def has_changed(self) -> bool:
        """Whether a parameter was frozen, thawed or replaced since the last call."""
        return self._flags.changed()


def _drop_values(parameter: nn.Parameter) -> None:
    """Shrink the tensor to one element. :mod:`ronde.capture.follow` needs its strides."""
    strides = parameter.stride()
    parameter.data = element(parameter.dtype, parameter.device).expand(parameter.shape)
    parameter._ronde_strides = strides  # type: ignore[attr-defined]


def _in_common(one: list[str], other: list[str]) -> int:
    """Number of leading name parts two parameters share."""
    same = [a == b for a, b in zip(one, other, strict=False)]
    return [*same, False].index(False)
