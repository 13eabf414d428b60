"""Shard: replicas divide parameters, gradients and optimizer state with torch's FSDP2.

Rajbhandari et al. 2020 (ZeRO-2 and ZeRO-3), Zhao et al. 2023 ("PyTorch FSDP"). The model's repeated
blocks are gathered one by one while they compute, everything else for the whole step. Ronde adds:

- *The root*: forward and loss run inside a module of Ronde's that holds the script's model, so that
  whatever the script reads of its model (a method, a child, an attribute) has whole parameters.
- *Sums*: the loss is scaled by samples / global samples and gradients are summed, as in
  :class:`Replicate`. A worker with an empty share runs a stand-in of weight zero, because every
  worker must take part in every exchange.
- *Unused parameters*: if only some workers used a parameter, the others add zeros. If none did, it
  has no gradient.

Repairs of FSDP2 itself are in :mod:`ronde.parallel.fsdp_repairs`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as Whole
from torch.distributed.tensor import Shard as Split
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ronde.capture.intercept import Reads, calls_heard
from ronde.checkpoint import shard_like
from ronde.introspect import SavedState
from ronde.parallel import fsdp_repairs
from ronde.parallel.batchnorm import absent, synchronize_batchnorms
from ronde.parallel.buckets import broadcast_packed
from ronde.parallel.ddp import Replicate, payload_dtype
from ronde.parallel.dtensor_fixes import extend_scaler, fix_dtensors
from ronde.parallel.optimizer_coupling import REFUSED
from ronde.parallel.own_calls import OwnCalls, wrap_forward
from ronde.parallel.recompute import large_children, repeated_blocks
from ronde.parallel.strategy import (
    Compute,
    Flags,
    Part,
    Scale,
    Strategy,
    Work,
    scale_tensors,
    trainable,
)
from ronde.parallel.zero1 import Zero1
from ronde.plan import Plan
from ronde.plan.plan import ShardLevel
from ronde.world import ArgumentError, PlanError, RondeError, World
from ronde.world.consensus import broadcast_json
from ronde.world.meshes import group_of, mesh_of
from ronde.world.tensors import local_part

__all__ = ["Shard", "Sharded", "fully_shard_model", "replica_mesh", "shard", "shard_module"]

_LOSS, _WEIGHT, _CALLS, _LEFT_OUT, _UNUSED = 0, 1, 2, 3, 4  # slots of the payload
# In the first forward passes workers compare the blocks they call, one by one. On the CPU that
# takes some hundredths of a step. A GPU waits at every block, and the steps that correct a
# prediction come soon.
_CHECKED_PASSES, _CHECKED_PASSES_GPU = 16, 3
_CHECK_EVERY_STEPS = 50  # on a GPU: reading what was exchanged waits for it
_HASHES = 4093  # a prime below 2 ** 12: sums over 4,096 workers are exact in float32


# -- dividing a model ------------------------------------------------------------------


def shard_width(plan: Plan, replicas: int) -> int:
    """How many replicas share one copy: ``shard_within``, or all of them."""
    within = plan.shard_within
    if within is None:
        return replicas
    if within < 2 or replicas % within:
        raise ArgumentError(
            f"shard_within={within}: expected a divisor, 2 or more, of the {replicas} replicas "
            f"of this plan ({plan.spec!r}). Without shard_within, all of them share one copy."
        )
    return within


def replica_mesh(plan: Plan, me: World) -> DeviceMesh:
    """The mesh over which replicas divide the model: ``("shard",)`` or ``("replicate", "shard")``.

    With ``shard_within``, neighboring replicas share one copy. A collective over all workers.
    """
    whole = sharded_mesh(plan, me)
    names = whole.mesh_dim_names or ()
    wanted = ("replicate", "shard") if "replicate" in names else ("shard",)
    return whole if len(names) == len(wanted) else whole[wanted]


def sharded_mesh(plan: Plan, me: World) -> DeviceMesh:
    """The mesh of all workers of which :func:`replica_mesh` is a part. A collective over all."""
    layout, within = plan.layout, shard_width(plan, plan.layout.replicas)
    copies = layout.replicas // within
    sizes = (layout.pipeline, copies, within, layout.tensor)
    dims = zip(("pipeline", "replicate", "shard", "tensor"), sizes, strict=True)
    shape = {name: n for name, n in dims if n > 1 or name == "shard"}
    return mesh_of(me.device.type, shape)


def _broadcast_first(tensors: Sequence[torch.Tensor], mesh: DeviceMesh) -> None:
    """Give every worker of the mesh the values of its first one."""
    device = torch.device("cpu")
    if mesh.device_type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    for dim in range(mesh.ndim):
        broadcast_packed(tensors, device, mesh.get_group(dim))


def _divide_as(whole: torch.Tensor, like: DTensor) -> torch.Tensor:
    """Divide a whole tensor as ``like`` is divided."""
    mesh = like.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    part = whole
    for dim, placement in enumerate(like.placements):
        if type(placement) is Split:
            chunks = part.chunk(mesh.size(dim), placement.dim)
            place = coordinate[dim]
            part = chunks[place] if place < len(chunks) else part.narrow(placement.dim, 0, 0)
        elif not isinstance(placement, Whole):
            raise ArgumentError(
                "The optimizer already has state, which cannot be divided over sharding and tensor "
                "parallel workers at once. Build it fresh, and resume from a checkpoint of Ronde."
            )
    return shard_like(part.clone().to(local_part(like).device), like)


def adopt(optimizer: Optimizer, new: Mapping[torch.Tensor, nn.Parameter]) -> None:
    """Replace an optimizer's parameters by divided ones, in place, and divide their state alike."""
    fsdp_repairs.unfuse(optimizer)
    fsdp_repairs.step_locally(optimizer)
    for group in optimizer.param_groups:
        group["params"][:] = [new.get(p, p) for p in group["params"]]
    for old, now in new.items():
        if old is now or old not in optimizer.state:
            continue
        state = optimizer.state.pop(old)
        assert isinstance(now, DTensor)
        optimizer.state[now] = {
            k: _divide_as(v, now)
            if isinstance(v, torch.Tensor) and v.dim() and v.shape == old.shape
            else v
            for k, v in state.items()
        }


def refuse_divided(model: nn.Module) -> None:
    """Raise ArgumentError if FSDP2 or DTensor has divided the model, or a part of it, before."""
    if isinstance(model, FSDPModule) or any(isinstance(p, DTensor) for p in model.parameters()):
        raise ArgumentError(
            "The model, or a part of it, is divided over workers already (FSDP2 or DTensor). Give "
            "ronde.distribute the plain module, it divides it. Two trainings that share a part "
            "need replicate or shard='optimizer'."
        )


def refuse_hooks(parameters: Mapping[str, torch.Tensor], plan: str, within: str = "") -> None:
    """Raise ArgumentError for a hook on a gradient: dividing replaces the parameter it is on."""
    for name, p in parameters.items():
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            raise ArgumentError(
                f"{plan}: {name.removeprefix(within)!r} has a hook on its gradient, which this "
                "plan divides. Register it after ronde.distribute, where it gets the averaged "
                "gradient, or use shard='none' or 'optimizer'."
            )


def refuse_optimizer(optimizer: Optimizer, plan: str, other: str) -> None:
    """Raise ArgumentError if an optimizer cannot compute on parts; ``other`` is a plan that can."""
    name = type(optimizer).__name__
    if name in REFUSED:
        cure = "shard='none'." if name in ("LBFGS", "SparseAdam") else ""
        cure = cure or f"{other}, which gives it whole parameters."
        raise ArgumentError(
            f"{plan} cannot carry {name} out: {REFUSED[name]}. Use another optimizer, or {cure}"
        )


def _refuse_lazy_and_sparse(model: nn.Module, level: ShardLevel, within: str) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ArgumentError(
                f"shard={level!r}: {name.removeprefix(within)!r} has sparse=True, and FSDP2 cannot "
                "divide sparse gradients. Build it with sparse=False, or use shard='none' or "
                "'optimizer'."
            )
    for name, p in model.named_parameters():
        if is_lazy(p):
            raise ArgumentError(
                f"shard={level!r}: {name.removeprefix(within)!r} has no shape yet. Run one batch "
                "through the model before ronde.distribute."
            )


def _refuse_mixed_types(
    parameters: Mapping[str, nn.Parameter],
    blocks: Mapping[str, nn.Module],
    level: ShardLevel,
    within: str,
) -> None:
    """FSDP2 exchanges each block in one type, and what is outside of the blocks too."""
    holders = {id(p): name for name, block in blocks.items() for p in block.parameters()}
    trained: dict[str | None, dict[torch.dtype, str]] = {}  # block -> type -> a parameter of it
    for name, p in parameters.items():
        if p.requires_grad and p.dim():
            by_type = trained.setdefault(holders.get(id(p)), {})
            by_type.setdefault(p.dtype, name.removeprefix(within))
    for block, by_type in trained.items():
        if len(by_type) > 1:
            where = repr(block.removeprefix(within)) if block else "the model outside of its blocks"
            types = [f"{n!r} is {str(t).removeprefix('torch.')}" for t, n in by_type.items()]
            raise ArgumentError(
                f"shard={level!r}: FSDP2 needs one type for the trained parameters of {where}, but "
                f"{', '.join(types)}. Use one type (model.float(), with precision='bf16' for "
                "speed), freeze one of them, or use shard='optimizer'."
            )


@dataclass
class Sharded:
    """A model that :func:`fully_shard_model` has divided.

    Attributes:
        root: the module, now an FSDP2 module; call its forward pass.
        mesh: the mesh it is divided over.
        blocks: those that are gathered one by one, by name.
        whole: parameters that every worker holds whole. The caller sums their gradients.
    """

    root: nn.Module
    mesh: DeviceMesh
    blocks: dict[str, nn.Module]
    whole: list[nn.Parameter] = field(default_factory=list)

    @property
    def modules(self) -> list[FSDPModule]:
        """All FSDP2 modules, the root last."""
        return [m for m in [*self.blocks.values(), self.root] if isinstance(m, FSDPModule)]

    def reshard(self) -> None:
        """Free whole parameters that a forward pass without a backward pass left behind."""
        for module in self.modules:
            module.reshard()

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum a tensor over the mesh, in place."""
        for dim in range(self.mesh.ndim):
            dist.all_reduce(tensor, group=self.mesh.get_group(dim))


def shard_module(module: nn.Module, **options: Any) -> fsdp_repairs.KeepParameters:
    """Divide one module that is gathered when it is called, with options of ``fully_shard``."""
    # Registered before FSDP2's own hook, which then sees the copies.
    module.register_forward_hook(lambda _m, _inputs, output: fsdp_repairs.clone_views(output))
    fully_shard(module, **options)
    fsdp_repairs.KeepContainers(module)
    sum_gradients(module)
    return fsdp_repairs.KeepParameters(module)


def sum_gradients(module: nn.Module) -> None:
    """Let an FSDP2 module sum gradients, where it would average them, and those of all workers."""
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    fsdp_repairs.exchange_unused(module)


def fully_shard_model(
    model: nn.Module,
    mesh: DeviceMesh,
    level: ShardLevel,
    optimizer: Optimizer,
    blocks: dict[str, nn.Module],
    offload: bool,
) -> Sharded:
    """Divide a model, or a stage of one, over a mesh. Gradients are summed, not averaged.

    Args:
        model: called as a whole. Its parameters become DTensors outside of forward and backward.
            They may be DTensors of a sibling mesh (tensor parallel) already.
        mesh: 1-D (all share one copy), or 2-D (the first dimension holds copies, the second shares
            each).
        level: ``"gradients"`` keeps a block's parameters from forward to backward pass,
            ``"parameters"`` gathers them twice.
        optimizer: its groups get the new parameters in place of the old, in their order.
        blocks: name -> module, gathered one by one. Each must be used by being called.
        offload: parameters and gradients wait in the host's memory.

    Raises:
        ArgumentError: FSDP2 cannot divide this model, or this optimizer.
    """
    refuse_optimizer(optimizer, f"shard={level!r}", "shard='optimizer'")
    within = "model." if isinstance(model, RootModule) else ""  # names as the script knows them
    _refuse_lazy_and_sparse(model, level, within)
    before = dict(model.named_parameters(remove_duplicate=False))
    _refuse_mixed_types(before, blocks, level, within)
    refuse_hooks(before, f"shard={level!r}", within)
    _broadcast_first(list(dict.fromkeys(before.values())), mesh)
    with torch.no_grad():
        for p in before.values():
            if not isinstance(p, DTensor) and not p.is_contiguous():
                p.data = p.data.contiguous()

    whole = fsdp_repairs.split_scalars(before.values())
    policy: OffloadPolicy = CPUOffloadPolicy() if offload else OffloadPolicy()
    options: dict[str, Any] = {"mesh": mesh, "offload_policy": policy, "ignored_params": whole}
    twice = level == "parameters"
    keep = [shard_module(b, reshard_after_forward=twice, **options) for b in blocks.values()]
    fully_shard(model, reshard_after_forward=False, **options)
    fsdp_repairs.KeepParameters(model, keep)
    sum_gradients(model)
    result = Sharded(model, mesh, blocks, [p for p in dict.fromkeys(before.values()) if p in whole])
    after = dict(model.named_parameters(remove_duplicate=False))
    adopt(optimizer, {before[name]: after[name] for name in before})
    return result


# -- which blocks may be gathered one by one -------------------------------------------


def _independent_blocks(model: nn.Module, blocks: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Blocks that share no parameter with the rest and hold at least a thousandth of the model."""
    ids = {id(block) for block in blocks.values()}
    # parameter -> the block around it, by each of its names; None: outside of all blocks
    holders: dict[torch.Tensor, set[int | None]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        module, holder = model, None
        for step in name.split(".")[:-1]:
            module = module._modules[step]  # type: ignore[assignment]
            holder = id(module) if id(module) in ids else holder
        holders.setdefault(p, set()).add(holder)
    total = sum(p.numel() for p in holders)

    def is_independent(block: nn.Module) -> bool:
        own = list(block.parameters())
        is_large = sum(p.numel() for p in own) * 1000 >= total
        return is_large and all(holders[p] == {id(block)} for p in own)

    return {name: block for name, block in blocks.items() if is_independent(block)}


def _called_blocks(work: Work, blocks: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Blocks that are called for 1, 2 and 4 samples, and whose parameters nothing else reads.

    All blocks if the model cannot run like that. The model is left as it was: the passes run in
    evaluation mode, use up no randomness, and buffers are put back.
    """
    model = work.model
    reads = Reads({id(p): name for name, block in blocks.items() for p in block.parameters()})
    called: set[str] = set()

    def enter(name: str, *_: Any) -> None:
        reads.inside.append(name)
        called.add(name)

    def leave(*_: Any) -> None:
        reads.inside.pop()

    before = SavedState(model)
    model.eval()
    always = set(blocks)
    device = next(model.parameters()).device
    cuda = [device] if device.type == "cuda" else []
    try:
        with calls_heard(blocks, enter, leave):
            for samples in (1, 2, 4):
                called.clear()
                with work.trial(), torch.random.fork_rng(cuda), torch.no_grad(), reads:
                    work.compute(work.sample(samples))
                always &= called
    except Exception:
        # A script that owns its loop may run the model another way; a data set may be smaller.
        if always == set(blocks):
            return dict(blocks)
    finally:
        before.restore()
    return {n: block for n, block in blocks.items() if n in always and n not in reads.read}


def choose_blocks(work: Work, me: World) -> dict[str, nn.Module]:
    """The blocks to gather one by one, by their names under :class:`RootModule`, as rank 0 says."""
    blocks = repeated_blocks(work.model) or large_children(work.model)
    blocks = _independent_blocks(work.model, blocks)
    names = broadcast_json(me, list(_called_blocks(work, blocks)))
    return {f"model.{name}": blocks[name] for name in names}


# -- the strategy ----------------------------------------------------------------------


class RootModule(nn.Module):
    """What FSDP2 takes for the whole model: it runs any call, so FSDP2's hooks surround it all."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.active = False
        self.passes = 0
        self.own_calls: OwnCalls | None = None

    def forward(self, call: Callable[[], Any]) -> Any:
        self.active = True
        try:
            return fsdp_repairs.clone_views(call())
        finally:
            self.active = False

    def intercept_model(self, free: Callable[[], None]) -> None:
        """Let ``model(…)`` go through this module when the script calls it itself, too. ``free``:
        lets go of whole parameters.
        """

        def around(forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            if self.active:
                return forward(*args, **kwargs)
            with self.own_calls.passing() if self.own_calls else nullcontext():
                result = self(partial(forward, *args, **kwargs))
            if not torch.is_grad_enabled():  # no backward pass follows, which would free them
                free()
            return result

        wrap_forward(self.model, around)


class Shard(Replicate):
    """Carries ``shard="gradients"`` and ``"parameters"`` out, on all workers.

    Args:
        mesh: see :func:`replica_mesh`.
        level: see :func:`fully_shard_model`.
    """

    run_empty_inference = True

    def __init__(
        self, work: Work, me: World, mesh: DeviceMesh, level: ShardLevel, offload: bool = False
    ) -> None:
        self._work, self._mesh, self._level, self._offload = work, mesh, level, offload
        super().__init__(work.model, me, run_empty=True)

    def _build(self) -> None:
        work = self._work
        refuse_divided(work.model)
        _broadcast_first([*work.model.parameters(), *work.model.buffers()], self._mesh)
        self._divide()
        if work.fill is not None:
            work.fill(self.owns)
        self._attach()

    def _divide(self) -> None:
        work, blocks = self._work, choose_blocks(self._work, self.me)
        self._root = RootModule(work.model)
        fix_dtensors(self.me)
        self.sharded = fully_shard_model(
            self._root, self._mesh, self._level, work.optimizer, blocks, self._offload
        )

    def _attach(self) -> None:
        """Follow each forward pass of the divided model."""
        self._root.intercept_model(self.sharded.reshard)
        self._has_copies = self._mesh.ndim > 1
        self._reached_names: set[str] = set()
        self._watched: dict[int, Any] = {}
        self._register_hooks()
        self._set_trained()
        self.sync_buffers()

    def _set_trained(self) -> None:
        """Which parameters are trained, and the payload that is exchanged with their gradients."""
        named = trainable(self.model)
        self.names = [name for name, _ in named]
        self.parameters = [p for _, p in named]
        self._flags = Flags(self.model)
        self._scalars = [p for p in self.sharded.whole if p.requires_grad and p.numel()]
        size, dtype = _UNUSED + len(named) + len(self._scalars), payload_dtype(self.parameters)
        self._payload = torch.zeros(size, dtype=dtype, device=self.me.device)
        self._loss_slot, self._weight_slot = self._payload[_LOSS], self._payload[_WEIGHT]
        self._inspected: set[nn.Module] = set()

    # -- hooks of forward passes -------------------------------------------------------

    def _register_hooks(self) -> None:
        blocks = self.sharded.blocks
        holders = {id(m): block for block in blocks.values() for m in block.modules()}
        places: dict[nn.Module, list[tuple[str, nn.Module, str]]] = {}
        for name, _ in self.model.named_parameters():
            path, _, attribute = name.rpartition(".")
            owner = self.model.get_submodule(path)
            block = holders.get(id(owner), self._root)
            places.setdefault(block, []).append((name, owner, attribute))
        for module in [*blocks.values(), self._root]:
            watch = partial(self._watch_parameters, places.get(module, []))
            module.register_forward_pre_hook(watch)
        self._call_hash = 0
        self._called: set[int] = set()
        self._left_out = False  # a block was not called on this worker
        self._check_all = False  # ... on any worker
        if blocks:
            self._order = group_of("order")
            for index, block in enumerate(blocks.values()):
                # prepended: before FSDP2 gathers the block
                block.register_forward_pre_hook(partial(self._compare, index), prepend=True)
            self._root.register_forward_pre_hook(self._begin_pass, prepend=True)
            self._root.register_forward_hook(partial(self._compare, -1))
        whole = set(self.sharded.whole)
        outside = [
            (o, a) for _, o, a in places.get(self._root, []) if o._parameters[a] not in whole
        ]
        self._probe = outside[0] if outside else None

    def _watch_parameters(
        self, places: list[tuple[str, nn.Module, str]], module: nn.Module, _inputs: Any
    ) -> None:
        """Whole parameters are in place now: note which ones the backward pass will reach."""
        if module in self._inspected:
            return
        self._inspected.add(module)
        for name, owner, attribute in places:
            p = owner._parameters[attribute]
            if p is None or not p.requires_grad or id(p) in self._watched:
                continue

            def reached(parameter: torch.Tensor, name: str = name) -> None:
                # also called when the pass came by without a gradient
                if parameter.grad is not None:
                    self._reached_names.add(name)

            self._watched[id(p)] = (p, p.register_post_accumulate_grad_hook(reached))  # type: ignore[no-untyped-call]

    def _begin_pass(self, _module: nn.Module, _inputs: Any) -> None:
        self._root.passes += 1
        self._called.clear()

    def _compare(self, index: int, _module: nn.Module, *_: Any) -> None:
        """Refuse workers that call different blocks: FSDP2 would wait for ever, or mix layers up.

        Compares the first forward passes, then those whose number is a power of two, and all once a
        pass has left a block out. :meth:`finish` finds what mixes layers up in between, before the
        update on the CPU, every fifty steps on GPUs.
        """
        if not self._root.active and index >= 0 and self._root.own_calls is not None:
            self._root.own_calls.enter(list(self.sharded.blocks)[index].removeprefix("model."))
        self._call_hash = (self._call_hash * 31 + index + 2) % _HASHES
        passes = self._root.passes
        self._called.add(index)
        if index == -1 and len(self._called) <= len(self.sharded.blocks):
            self._left_out = True
        first = _CHECKED_PASSES if self.me.device.type == "cpu" else _CHECKED_PASSES_GPU
        if passes > first and passes & (passes - 1) and not self._check_all:
            return
        mine = torch.tensor([index], device=self.me.device)
        everyone = [torch.empty_like(mine) for _ in range(self.me.size)]
        dist.all_gather(everyone, mine, group=self._order)
        indices = [int(i) for i in everyone]
        if len(set(indices)) > 1:
            names = [repr(n.removeprefix("model.")) for n in self.sharded.blocks]
            calls = [names[i] if i >= 0 else "the end" for i in indices]
            raise self._diverged("; ".join(f"rank {r}: {c}" for r, c in enumerate(calls)))

    def _diverged(self, where: str) -> PlanError:
        return PlanError(
            f"shard={self._level!r}: the workers' forward passes go different ways ({where}). "
            "FSDP2 gathers a block when it is called, so all workers must call the same blocks, "
            "whatever their samples and random numbers (layer dropping, early exits). Use "
            "shard='optimizer', or compute the block and multiply its result by zero."
        )

    def before_batch(self, present: bool) -> None:
        """See :meth:`Strategy.before_batch`."""
        super().before_batch(present)
        self._call_hash = 0

    # -- one step ----------------------------------------------------------------------

    def step(
        self,
        micros: Sequence[Any],
        parts: Sequence[Part],
        compute: Callable[[Any], Any],
        scale: Scale | None,
    ) -> None:
        """See :meth:`Strategy.step`."""
        for micro, part in zip(micros, parts, strict=True):
            try:
                self.micro(partial(self._root, partial(compute, micro)), part, scale)
            except RuntimeError as error:
                if "mixed torch.Tensor and DTensor" in str(error):
                    raise PlanError(
                        f"shard={self._level!r}: a layer was called when its parameters were in "
                        "parts again: by itself, outside of the block that holds it, as reversible "
                        "layers do in a backward pass of their own. Use shard='gradients' or "
                        "'optimizer'."
                    ) from error
                if "storage of size 0" not in str(error):
                    raise
                raise PlanError(
                    f"shard={self._level!r}: a gathered parameter was read after it was freed. "
                    "Either the forward pass or the loss calls torch.autograd.grad (a gradient "
                    "penalty), which FSDP2 takes for the backward pass; or a block returns nothing "
                    "and hands its result on in a list or a dictionary. Use shard='optimizer' or "
                    "'none'."
                ) from error

    def micro(self, compute: Compute | None, part: Part, scale: Scale | None) -> None:
        """See :meth:`Strategy.micro`. Each micro-batch is reduced, so no gradient is ever whole."""
        assert compute is not None
        if not self._begun:
            self._begun = True
            self._reached_names.clear()
            self._payload.zero_()
            for p in self.parameters:
                p.grad = None
        if self._has_copies:  # they are summed once a step
            for module in self.sharded.modules:
                module.set_requires_all_reduce(part.last, recurse=False)
        if part.samples:
            value, weight = compute()
            factor = self._weigh(weight, part)
            self._loss_slot.add_(value.detach(), alpha=factor)
        else:
            with absent():
                value, weight = compute()
            self._weighted, factor = weight is not None or part.weight is not None, 0.0
        extend_scaler(scale, self.me)
        self._backward(value, factor, scale)
        if self._is_gathered():
            raise RondeError(
                f"shard={self._level!r}: the backward pass ended without the exchange. Call the "
                "model itself, run.model(…), and let it return tensors, or lists, tuples, "
                "dictionaries or dataclasses of them. Or use run.step(batch)."
            )

    def _is_gathered(self) -> bool:
        if self._probe is None:
            return False
        owner, attribute = self._probe
        return not isinstance(owner._parameters[attribute], DTensor)

    def finish(self) -> torch.Tensor:
        """See :meth:`Strategy.finish`."""
        if self._seen is not None:
            self._choose_buffers(self._seen)
        self.local_loss = self._loss_slot.clone()
        self._begun = False
        self._exchange_payload()
        payload = self._payload
        loss = payload[_LOSS].clone()
        if self._weighted:
            weight = payload[_WEIGHT]
            gradients = [local_part(p.grad) for p in self.parameters if p.grad is not None]
            scale_tensors(gradients, 1 / weight)
            loss = loss / weight
        return loss

    def _exchange_payload(self) -> None:
        """Sum losses, unused flags and scalars' gradients, and check that all called the same."""
        payload, n = self._payload, len(self.names)
        unused = [i for i, name in enumerate(self.names) if name not in self._reached_names]
        if unused:
            payload[_UNUSED:][unused] = 1
        for i, p in enumerate(self._scalars, _UNUSED + n):
            if p.grad is not None:
                payload[i] = p.grad
        payload[_CALLS].fill_(self._call_hash)  # payload[i] = x waits for a GPU
        payload[_LEFT_OUT].fill_(self._left_out)
        self.sharded.all_reduce(payload)
        # Reading a GPU's numbers means waiting for it.
        if self.me.device.type == "cpu" or self._steps % _CHECK_EVERY_STEPS == 1:
            if payload[_CALLS] != self._call_hash * self.me.size:
                raise self._diverged(f"found after step {self._steps}")
            self._check_all = self._check_all or bool(payload[_LEFT_OUT])
        scalars = {p: payload[i] for i, p in enumerate(self._scalars, _UNUSED + n)}
        flags = payload[_UNUSED : _UNUSED + n]
        nobody = (flags > self.me.size - 0.5).tolist() if unused else [False] * n
        for p, is_unused in zip(self.parameters, nobody, strict=True):
            if is_unused:
                p.grad = None
            elif p in scalars:
                p.grad = scalars[p].to(p.dtype)

    @torch.no_grad()
    def clip(self, max_norm: float) -> None:
        """See :meth:`Strategy.clip`. Squares are summed over the workers that hold the parts."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        total = torch.zeros((), dtype=self._payload.dtype, device=self.me.device)
        add_squares(total, gradients)
        factor = (max_norm / (total.sqrt() + 1e-6)).clamp(max=1.0)
        scale_tensors([local_part(g) for g in gradients], factor)

    def updated(self) -> None:
        """See :meth:`Strategy.updated`."""
        # A forward pass of the script's own, after the backward pass, would keep old values.
        self.sharded.reshard()

    def watch(self, calls: OwnCalls) -> None:
        """See :meth:`Strategy.watch`."""
        self._root.own_calls = calls

    def loaded(self) -> None:
        """See :meth:`Strategy.loaded`."""
        self.sharded.reshard()

    def infer(self, call: Callable[[Any], Any], batch: Any) -> Any:
        """See :meth:`Strategy.infer`. All workers must call it equally often."""
        result = self._root(partial(call, batch))
        self.sharded.reshard()
        return result

    # -- between steps -----------------------------------------------------------------

    def refresh(self) -> bool:
        """See :meth:`Strategy.refresh`."""
        changed = self._flags.changed()
        if changed:
            self.on_change()
            for p in self.parameters:
                p.grad = None  # a frozen one's would be trained on
            self._set_trained()
        return changed

    def start_epoch(self) -> None:
        """See :meth:`Strategy.start_epoch`."""
        self.refresh()
        if self._steps:
            self.sync_buffers()


@torch.no_grad()
def add_squares(total: torch.Tensor, gradients: Sequence[torch.Tensor]) -> None:
    """Add the squares of all elements of gradients to a 0-d tensor, those of divided ones summed
    over the workers that hold the parts. A collective of these.
    """
    alike: dict[Any, list[torch.Tensor]] = {}
    for g in gradients:
        part = local_part(g)
        values = part.coalesce().values() if part.is_sparse else part
        alike.setdefault((_divided_over(g), g.dtype), []).append(values)
    for (place, _), parts in alike.items():
        square = torch.stack(torch._foreach_norm(parts)).to(total).square().sum()
        if place is not None:
            for dim in place[1]:
                dist.all_reduce(square, group=place[0].get_group(dim))
        total += square


def _divided_over(gradient: torch.Tensor) -> tuple[DeviceMesh, tuple[int, ...]] | None:
    """The mesh, and the dimensions of it, over which a gradient is divided."""
    if not isinstance(gradient, DTensor):
        return None
    dims = [d for d, p in enumerate(gradient.placements) if not isinstance(p, Whole)]
    return gradient.device_mesh, tuple(dims)


def shard(plan: Plan, work: Work, me: World) -> Strategy:
    """The strategy of a plan that only shards: the model, or the optimizer's state."""
    mesh = replica_mesh(plan, me)
    if plan.sync_batchnorm:
        synchronize_batchnorms(work.model, group_of("batchnorm"))
    if plan.shard == "optimizer":
        if work.fill is not None:
            work.fill(lambda name: True)
        return Zero1(plan, work, me, mesh.get_group(mesh.ndim - 1))
    return Shard(work, me, mesh, plan.shard, plan.offload == "parameters")
