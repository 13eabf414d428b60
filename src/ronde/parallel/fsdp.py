"""Shard: the replicas divide parameters, gradients and the optimizer's state among them, by torch's
FSDP2.

Rajbhandari et al. 2020 (ZeRO-2 and ZeRO-3), Zhao et al. 2023 ("PyTorch FSDP"). The model's repeated
blocks are gathered one by one while they compute; everything else is gathered for the whole step.
Five things are added to FSDP2:

- *The root*: forward and loss run inside a module of Ronde's own that holds the script's model, so
  that what the script calls on its model (a method, a child, an attribute) finds whole parameters.
- *Sums*: the loss is scaled by samples / global samples and gradients are added up, as in
  :class:`Replicate`. A worker whose share is empty runs a stand-in with weight zero, since every
  worker has to take part in every exchange.
- *Unused parameters*: what only some workers reached gets zeros from the others; what nobody
  reached has no gradient.
- *The update*: optimizers that treat every number by itself step over plain tensors, without the
  cost of DTensors.
- *Scalars*: FSDP2 cannot divide a parameter without dimensions (a temperature, say): it is
  replicated.
"""

from __future__ import annotations

import random
import types
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
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
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from ronde.parallel.batchnorm import absent, synchronise
from ronde.parallel.ddp import Replicate
from ronde.parallel.dtensor_fixes import mend
from ronde.parallel.optimizer_coupling import REFUSED
from ronde.parallel.recompute import large_children, repeated_blocks
from ronde.parallel.strategy import Compute, Flags, Part, Scale, Strategy, Work, trainable
from ronde.parallel.zero1 import Zero1, buckets
from ronde.plan import Plan
from ronde.plan.plan import ShardLevel
from ronde.world import ArgumentError, PlanError, RondeError, World
from ronde.world.consensus import broadcast_json
from ronde.world.meshes import group_of, mesh_of

# FSDP2 of torch 2.13 calls collectives by the names that torch 2.13 says are old.
warnings.filterwarnings(
    "ignore",
    message=r"`torch\.distributed\.(all_gather_into|reduce_scatter)_tensor` is deprecated",
    category=FutureWarning,
)

__all__ = ["Shard", "Sharded", "fully_shard_model", "replica_mesh", "shard"]

_LOSS, _WEIGHT, _WAY, _LEFT_OUT, _UNUSED = 0, 1, 2, 3, 4
# The first forward passes in which the workers compare what they call, block by block. On a GPU
# that waits for it at every block, and the steps by which a prediction is corrected come soon; on
# the CPU it takes some hundredths of a step.
_LOOKED_AT_FIRST, _LOOKED_AT_FIRST_GPU = 16, 3
_LOOK_EVERY = 50  # steps
_WAYS = 4093  # a prime below 2 ** 12: sums over 4,096 workers are exact in float32

# torch's own
_BY_NUMBER = (
    "ASGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "SGD",
)

# torch 2.13 has no fused step of theirs for shards; the plain one computes the same
_NOT_FUSED = (
    "SGD",
    "Adagrad",
)


def _let_gradients_miss() -> None:
    """What a block is given and does not use has no gradient, with FSDP2 either: the function that
    it puts there makes zeros of it, and a parameter that no result depends on would be trained on
    them (weight decay, momentum)."""
    try:
        from torch.distributed.fsdp._fully_shard import _fsdp_param_group as module

        base: Any = module.RegisterPostBackwardFunction
    except (ImportError, AttributeError):  # another torch, with another way
        return

    class Missing(base):  # type: ignore[misc]
        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            base.setup_context(ctx, inputs, output)
            ctx.set_materialize_grads(False)

    class MissingToo(base):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            ctx.set_materialize_grads(False)
            return base.forward(ctx, *inputs)

    found = Missing if "setup_context" in vars(base) else MissingToo
    found.__name__ = base.__name__
    module.RegisterPostBackwardFunction = found  # type: ignore[misc]


_let_gradients_miss()


# -- dividing a model ------------------------------------------------------------------


def replica_mesh(plan: Plan, me: World) -> DeviceMesh:
    """The mesh along which this worker's replicas divide the model: ``("shard",)``, or
    ``("replicate", "shard")`` for a hybrid.

    With ``shard_within``, neighbouring replicas share one copy. A collective over all workers.
    """
    layout, within = plan.layout, plan.shard_within
    if within is not None and (within < 2 or layout.replicas % within):
        raise ArgumentError(
            f"shard_within={within}: expected a divisor, 2 or more, of the "
            f"{layout.replicas} replicas that this plan has ({plan.spec!r}). "
            f"With {layout.replicas}, or without shard_within, all of them share one copy."
        )
    within = within or layout.replicas
    shape = {
        "pipeline": layout.pipeline,
        "replicate": layout.replicas // within,
        "shard": within,
        "tensor": layout.tensor,
    }
    shape = {name: n for name, n in shape.items() if n > 1 or name == "shard"}
    whole = mesh_of(me.device.type, shape)
    wanted = ("replicate", "shard") if "replicate" in shape else ("shard",)
    return whole if len(shape) == len(wanted) else whole[wanted]


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """This worker's part of a tensor, sharing its memory."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _from_first(tensors: Sequence[torch.Tensor], mesh: DeviceMesh) -> None:
    """Give every worker of the mesh the values of its first one."""
    with torch.no_grad():
        for run in buckets([local_shard(t) for t in tensors if not t.is_meta]):
            flat = torch.cat([t.reshape(-1) for t in run]).to(
                torch.device(mesh.device_type, torch.cuda.current_device())
                if mesh.device_type == "cuda"
                else "cpu"
            )
            for dim in range(mesh.ndim):
                dist.broadcast(flat.view(torch.uint8), group=mesh.get_group(dim), group_src=0)
            for t, part in zip(run, torch.split(flat, [t.numel() for t in run]), strict=True):
                t.copy_(part.view_as(t))


def _part_like(value: torch.Tensor, like: DTensor) -> torch.Tensor:
    """Divide a whole tensor as ``like`` is divided."""
    mesh = like.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    mine = value
    for dim, placement in enumerate(like.placements):
        if type(placement) is Split:
            chunks = mine.chunk(mesh.size(dim), placement.dim)
            place = coordinate[dim]
            mine = chunks[place] if place < len(chunks) else mine.narrow(placement.dim, 0, 0)
        elif not isinstance(placement, Whole):
            raise ArgumentError(
                "the optimizer has state already, which cannot be divided over shards and "
                "tensor parallel workers at once: build it fresh, "
                "and resume from a checkpoint of Ronde."
            )
    return DTensor.from_local(
        mine.clone().to(local_shard(like).device),
        mesh,
        like.placements,
        run_check=False,
        shape=value.shape,
        stride=value.contiguous().stride(),
    )


def adopt(optimizer: Optimizer, new: Mapping[torch.Tensor, nn.Parameter]) -> None:
    """Put parameters in the place of old ones, group by group, in the same order; state moves
    along.
    """
    if type(optimizer).__name__ in _NOT_FUSED and any(
        group.get("fused") for group in optimizer.param_groups
    ):
        for group in optimizer.param_groups:
            group["fused"] = False
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
    step_locally(optimizer)
    for group in optimizer.param_groups:
        group["params"][:] = [new.get(p, p) for p in group["params"]]
    for old, now in new.items():
        if old is now or old not in optimizer.state:
            continue
        state = optimizer.state.pop(old)
        assert isinstance(now, DTensor)
        optimizer.state[now] = {
            k: _part_like(v, now)
            if isinstance(v, torch.Tensor) and v.shape == old.shape and v.dim()
            else v
            for k, v in state.items()
        }


def refuse_hooks(parameters: Mapping[str, torch.Tensor], plan: str, within: str = "") -> None:
    """A hook on a parameter's gradient would be lost with the parameter, which gives way to its
    parts.

    Raises:
        ArgumentError: there is one.
    """
    for name, p in parameters.items():
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            raise ArgumentError(
                f"{plan}: {name.removeprefix(within)!r} has a hook on its gradient, which "
                "this plan keeps in parts. Do in run.backward(…), before "
                "run.update(), what the hook does, or use shard='none' or 'optimizer'."
            )


def refuse_optimizer(optimizer: Optimizer, plan: str, other: str) -> None:
    """Some optimizers cannot compute on parts of a parameter.

    Args:
        plan: what was asked for.
        other: a plan that gives it whole parameters.

    Raises:
        ArgumentError: this is one.
    """
    name = type(optimizer).__name__
    if name in REFUSED:
        cure = (
            ", or shard='none'."
            if name in ("LBFGS", "SparseAdam")
            else f", or {other}, which gives it whole parameters."
        )
        raise ArgumentError(
            f"{plan} cannot carry {name} out: {REFUSED[name]}. Use another optimizer{cure}"
        )


class _LocalStep:
    """Lets an optimizer that treats every number by itself step over this worker's parts as plain
    tensors.

    The same operations on the same numbers: what falls away is what torch spends on each operation
    of a DTensor, some 20 µs, ten times a parameter. Between steps the optimizer holds DTensors,
    state and all.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._given: list[list[torch.Tensor]] = []
        self._moved: list[tuple[DTensor, torch.Tensor, dict[str, Any] | None]] = []
        optimizer.register_step_pre_hook(self._narrow)
        optimizer.register_step_post_hook(self._widen)

    def _narrow(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._given:  # the step before raised
            self._widen()
        groups = optimizer.param_groups
        if (
            len(args) > 1
            or kwargs.get("closure") is not None
            or any(group.get("differentiable") for group in groups)
        ):
            return  # a closure's gradients are made within the step
        for group in groups:
            for p in group["params"]:
                g = p.grad
                if (
                    isinstance(p, DTensor)
                    and g is not None
                    and not (isinstance(g, DTensor) and g.placements == p.placements)
                ):
                    return
        state = optimizer.state
        for group in groups:
            self._given.append(group["params"])
            parts = []
            for p in group["params"]:
                if not isinstance(p, DTensor) or p.grad is None:
                    parts.append(p)
                    continue
                part = p._local_tensor.detach()
                part.grad = p.grad._local_tensor  # type: ignore[attr-defined]
                outer = state.pop(p, None)
                if outer is not None:
                    state[part] = {
                        k: v._local_tensor if isinstance(v, DTensor) else v
                        for k, v in outer.items()
                    }
                self._moved.append((p, part, outer))
                parts.append(part)
            group["params"] = parts

    def _widen(self, *_: Any) -> None:
        given, self._given = self._given, []
        moved, self._moved = self._moved, []
        for group, parameters in zip(self.optimizer.param_groups, given, strict=False):
            group["params"] = parameters
        state = self.optimizer.state
        for p, part, outer in moved:
            inner = state.pop(part, None)
            if inner is None:
                if outer is not None:
                    state[p] = outer
                continue
            for k, v in inner.items():
                if isinstance(v, torch.Tensor) and v.dim() and v.shape == part.shape:
                    old = outer.get(k) if outer else None
                    if isinstance(old, DTensor) and old._local_tensor is v:
                        inner[k] = old
                    else:
                        inner[k] = DTensor.from_local(
                            v,
                            p.device_mesh,
                            p.placements,
                            run_check=False,
                            shape=p.shape,
                            stride=p.stride(),
                        )
            state[p] = inner


def step_locally(optimizer: Optimizer) -> None:
    """See :class:`_LocalStep`; nothing for an optimizer that is not one of torch's which treat
    every number by itself.
    """
    kind = type(optimizer)
    known = kind.__name__ in _BY_NUMBER and kind is getattr(torch.optim, kind.__name__, None)
    hooks = getattr(optimizer, "_optimizer_step_pre_hooks", {}).values()
    if known and not any(isinstance(getattr(hook, "__self__", None), _LocalStep) for hook in hooks):
        _LocalStep(optimizer)


def _clone_views(output: Any) -> Any:
    """What a module returns, no tensor of it a view: changed in place, a view would lose the hook
    that FSDP2 puts on it.
    """
    if not torch.is_grad_enabled():
        return output
    return tree_map(
        lambda t: (
            t.clone()
            if isinstance(t, torch.Tensor) and t.requires_grad and t._base is not None
            else t
        ),
        output,
    )


def _alone(model: nn.Module, blocks: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Blocks that share no parameter with what is outside of them, and are not next to nothing."""
    ids = {id(block) for block in blocks.values()}
    holders: dict[
        torch.Tensor, set[int | None]
    ] = {}  # which block a parameter is in, by each of its names; None: in none
    for name, p in model.named_parameters(remove_duplicate=False):
        module, holder = model, None
        for step in name.split(".")[:-1]:
            module = module._modules[step]  # type: ignore[assignment]
            holder = id(module) if id(module) in ids else holder
        holders.setdefault(p, set()).add(holder)
    total = sum(p.numel() for p in holders)

    def stands_alone(block: nn.Module) -> bool:
        held = list(block.parameters())
        return sum(p.numel() for p in held) * 1000 >= total and all(
            holders[p] == {id(block)} for p in held
        )

    return {name: block for name, block in blocks.items() if stands_alone(block)}


def _check_types(
    groups: Mapping[str, Sequence[tuple[str, nn.Parameter]]], level: ShardLevel
) -> None:
    for where, named in groups.items():
        by_type: dict[torch.dtype, str] = {}
        for name, p in named:
            if p.requires_grad:
                by_type.setdefault(p.dtype, name)
        if len(by_type) > 1:
            shown = ", ".join(
                f"{name!r} is {str(dtype).removeprefix('torch.')}"
                for dtype, name in by_type.items()
            )
            raise ArgumentError(
                f"shard={level!r}: FSDP2 exchanges what is trained in {where} in one type, "
                f"but {shown}. Give them one type "
                "(model.float(), with precision='bf16' for speed), freeze one of them, or "
                "use shard='optimizer'."
            )


@dataclass
class Sharded:
    """A model that :func:`fully_shard_model` has divided.

    Attributes:
        root: the module given, an FSDP2 module now; its forward pass is to be called.
        mesh: along which it is divided.
        blocks: those that are gathered one by one, by name.
        whole: parameters that every worker holds whole; their gradients are to be summed over the
            mesh by whoever called.
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
        """Let go of whole parameters that a forward pass without a backward pass left behind."""
        for module in self.modules:
            module.reshard()

    def add_up(self, tensor: torch.Tensor) -> None:
        """Sum a tensor over the mesh, in place."""
        for dim in range(self.mesh.ndim):
            dist.all_reduce(tensor, group=self.mesh.get_group(dim))


def fully_shard_model(
    model: nn.Module,
    mesh: DeviceMesh,
    level: ShardLevel,
    optimizer: Optimizer | None = None,
    blocks: Mapping[str, nn.Module] | None = None,
    offload: bool = False,
) -> Sharded:
    """Divide a model, or a stage of one, over a mesh. Gradients are summed, not averaged.

    Args:
        model: called as a whole; its parameters become DTensors outside of forward and backward.
            They may be DTensors of another mesh (tensor parallel) already, which ``mesh`` is then a
            sibling of.
        mesh: 1-D (all share one copy), or 2-D (the first dimension holds copies, the second shares
            each).
        level: ``"gradients"`` keeps a block's parameters from forward to backward pass,
            ``"parameters"`` gathers them twice.
        optimizer: its groups get the new parameters in place of the old, in their order.
        blocks: name -> module, gathered one by one; None for :func:`repeated_blocks` or the largest
            children. Each must be used by being called.
        offload: parameters and gradients wait in the host's memory.

    Raises:
        ArgumentError: FSDP2 cannot divide this model, or this optimizer.
    """
    if level not in ("gradients", "parameters"):
        raise ArgumentError(
            f"fully_shard_model: level={level!r} must be 'gradients' or 'parameters'."
        )
    if optimizer is not None:
        refuse_optimizer(optimizer, f"shard={level!r}", "shard='optimizer'")
    mend()
    within = "model." if isinstance(model, _Root) else ""  # names as the script knows them
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ArgumentError(
                f"shard={level!r}: {name.removeprefix(within)!r} has sparse=True, and "
                "FSDP2 cannot divide sparse gradients. Build it with sparse=False, or use "
                "shard='none' or 'optimizer'."
            )
    chosen = _alone(
        model, blocks if blocks is not None else repeated_blocks(model) or large_children(model)
    )
    before = dict(model.named_parameters(remove_duplicate=False))
    lazy = [name for name, p in before.items() if is_lazy(p)]
    if lazy:
        raise ArgumentError(
            f"shard={level!r}: {lazy[0].removeprefix(within)!r} has no shape yet: run one "
            "batch through the model before ronde.distribute."
        )
    whole = {p for p in before.values() if p.dim() == 0}
    inside = {
        id(p): name.removeprefix(within)
        for name, block in chosen.items()
        for p in block.parameters()
    }
    groups: dict[str, list[tuple[str, nn.Parameter]]] = {}
    for name, p in before.items():
        if p not in whole:
            groups.setdefault(
                f"{inside[id(p)]!r}" if id(p) in inside else "the model outside of its blocks", []
            ).append((name.removeprefix(within), p))
    _check_types(groups, level)
    refuse_hooks(before, f"shard={level!r}", within)
    _from_first(list(dict.fromkeys(before.values())), mesh)
    with torch.no_grad():
        for p in before.values():
            if not isinstance(p, DTensor) and not p.is_contiguous():
                p.data = p.data.contiguous()

    policy: OffloadPolicy = CPUOffloadPolicy() if offload else OffloadPolicy()
    options: dict[str, Any] = {"mesh": mesh, "offload_policy": policy, "ignored_params": whole}
    for block in chosen.values():
        # before FSDP2's own
        block.register_forward_hook(lambda _module, _inputs, output: _clone_views(output))
        fully_shard(block, reshard_after_forward=level == "parameters", **options)
        _Containers(block)
    fully_shard(model, reshard_after_forward=False, **options)
    result = Sharded(model, mesh, chosen, [p for p in dict.fromkeys(before.values()) if p in whole])
    for part in result.modules:
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
        if hasattr(part, "set_reduce_scatter_unused_params"):  # from torch 2.12 on
            part.set_reduce_scatter_unused_params(True)
    if optimizer is not None:
        after = dict(model.named_parameters(remove_duplicate=False))
        adopt(optimizer, {before[name]: after[name] for name in before})
    return result


# -- which blocks may be gathered one by one -------------------------------------------


class _Uses(TorchFunctionMode):
    """Notes parameters that are computed with while the block that holds them is not being
    called.
    """

    def __init__(self, blocks: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.holder = {id(p): name for name, block in blocks.items() for p in block.parameters()}
        self.calls: list[str] = []
        self.inside: list[str] = []
        self.outside: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # a shape, a type or a device is known of a shard too
        if isinstance(result, torch.Tensor | tuple | list):
            for value in tree_leaves((args, kwargs)):
                name = self.holder.get(id(value))
                if (
                    name is not None
                    and name not in self.inside
                    and any(isinstance(r, torch.Tensor) for r in tree_leaves(result))
                ):
                    self.outside.add(name)
        return result


def called(work: Work, blocks: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Blocks that forward passes of 1, 2 and 4 samples all called, and used by nothing but calling
    them.

    All blocks where the model cannot run so. It is left as it was: evaluation mode, no gradients,
    no randomness used up, buffers put back.
    """
    model, uses = work.model, _Uses(blocks)
    handles = []
    for name, block in blocks.items():

        def enter(_module: nn.Module, _inputs: Any, name: str = name) -> None:
            uses.inside.append(name)
            uses.calls.append(name)

        def leave(_module: nn.Module, _inputs: Any, _output: Any) -> None:
            uses.inside.pop()

        handles += [
            block.register_forward_pre_hook(enter, prepend=True),
            block.register_forward_hook(leave, always_call=True),
        ]
    modes = [(m, m.training) for m in model.modules()]
    buffers = [(b, b.clone()) for b in model.buffers()]
    model.eval()
    always = set(blocks)
    device = next(model.parameters()).device
    drawn = random.getstate(), np.random.get_state()
    try:
        for samples in (1, 2, 4):
            uses.calls.clear()
            with (
                torch.random.fork_rng([device] if device.type == "cuda" else []),
                torch.no_grad(),
                uses,
            ):
                work.compute(work.sample(samples))
            always &= set(uses.calls)
    except Exception:
        if always == set(blocks):
            # a script that owns its loop may have another way through the model; a data set may be
            # smaller
            return dict(blocks)
    finally:
        random.setstate(drawn[0])
        np.random.set_state(drawn[1])
        for handle in handles:
            handle.remove()
        for m, training in modes:
            m.training = training
        for b, value in buffers:
            b.data.copy_(value)
    return {
        name: block for name, block in blocks.items() if name in always and name not in uses.outside
    }


# -- the strategy ----------------------------------------------------------------------


class _Containers:
    """Lists and dictionaries that a block is given stay the caller's: FSDP2 hands the block copies,
    and what it adds to them would be lost.

    Args:
        block: FSDP2's hooks are on it already.
    """

    def __init__(self, block: nn.Module) -> None:
        self._given: list[list[Any]] = []  # one entry a call that has not ended
        self._copies: list[list[tuple[Any, Any, dict[Any, Any]]]] = []
        block.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
        block.register_forward_pre_hook(self._after, with_kwargs=True)
        block.register_forward_hook(self._ended, always_call=True)

    def _before(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        self._given.append(_containers((*args, *kwargs.values())))

    def _after(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        pairs = zip(self._given[-1], _containers((*args, *kwargs.values())), strict=True)
        self._copies.append([(old, new, dict(_items(new))) for old, new in pairs if old is not new])

    def _ended(self, *_: Any) -> None:
        # FSDP2's own hook may have failed
        copies = self._copies.pop() if len(self._copies) == len(self._given) else []
        self._given.pop()
        for old, new, before in copies:
            if [(k, id(v)) for k, v in _items(new)] == [(k, id(v)) for k, v in before.items()]:
                continue
            was = dict(_items(old))
            theirs = {id(value): was[key] for key, value in before.items()}
            now = {key: theirs.get(id(value), value) for key, value in _items(new)}
            old.clear()
            if isinstance(old, list):
                old.extend(now.values())
            else:
                old.update(now)


def _containers(given: Iterable[Any]) -> list[Any]:
    """The outermost lists and dictionaries among arguments."""
    found: list[Any] = []
    for value in given:
        if type(value) is list or type(value) is dict:
            found.append(value)
        elif isinstance(value, tuple):
            found += _containers(value)
    return found


def _items(container: Any) -> Iterable[tuple[Any, Any]]:
    return enumerate(container) if isinstance(container, list) else container.items()


class _Root(nn.Module):
    """What FSDP2 sees as the whole model: runs whatever is called within it, so that its hooks
    surround all of it.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.active = False
        self.passes = 0

    def forward(self, call: Callable[[], Any]) -> Any:
        self.active = True
        try:
            return _clone_views(call())
        finally:
            self.active = False


def _through(model: nn.Module, root: _Root) -> None:
    """Let ``model(…)`` go through the root also where the script calls it by itself."""
    given = model.__dict__.get("forward")

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        once = given or partial(type(self).forward, self)
        return once(*args, **kwargs) if root.active else root(partial(once, *args, **kwargs))

    model.forward = types.MethodType(forward, model)  # type: ignore[method-assign]


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
        work, me = self._work, self.me
        if isinstance(work.model, FSDPModule) or any(
            isinstance(p, DTensor) for p in work.model.parameters()
        ):
            raise ArgumentError(
                "model, or a part of it, is divided over workers already (FSDP2 or "
                "DTensor): give ronde.distribute the plain module, it divides it. "
                "Two trainings that share a part go under replicate or shard='optimizer'."
            )
        _from_first([*work.model.parameters(), *work.model.buffers()], self._mesh)
        found = _alone(work.model, repeated_blocks(work.model) or large_children(work.model))
        names = broadcast_json(me, list(called(work, found)))
        self._root = _Root(work.model)
        self.sharded = fully_shard_model(
            self._root,
            self._mesh,
            self._level,
            work.optimizer,
            {f"model.{n}": found[n] for n in names},
            self._offload,
        )
        if work.fill is not None:
            work.fill(self.owns)
        _through(work.model, self._root)
        self._several = self._mesh.ndim > 1
        self._reached_names: set[str] = set()
        self._watched: dict[int, Any] = {}
        self._order = group_of("order") if self.sharded.blocks else None
        self._listen()
        self._take_note()
        self.sync_buffers()

    def _take_note(self) -> None:
        """Which parameters are trained, and what is exchanged beside their gradients."""
        named = trainable(self.model)
        self.names = [name for name, _ in named]
        self.parameters = [p for _, p in named]
        self._flags = Flags(self.model)
        self._scalars = [p for p in self.sharded.whole if p.requires_grad]
        dtype = (
            torch.float64
            if {p.dtype for p in self.parameters} == {torch.float64}
            else torch.float32
        )
        self._payload = torch.zeros(
            _UNUSED + len(named) + len(self._scalars), dtype=dtype, device=self.me.device
        )
        self._loss_slot, self._weight_slot = self._payload[_LOSS], self._payload[_WEIGHT]
        self._heard: set[nn.Module] = set()

    # -- what a forward pass tells -----------------------------------------------------

    def _listen(self) -> None:
        holders = {id(m): block for block in self.sharded.blocks.values() for m in block.modules()}
        places: dict[nn.Module, list[tuple[str, nn.Module, str]]] = {}
        for name, _ in self.model.named_parameters():
            path, _, attribute = name.rpartition(".")
            owner = self.model.get_submodule(path)
            places.setdefault(holders.get(id(owner), self._root), []).append(
                (name, owner, attribute)
            )
        for index, module in enumerate([*self.sharded.blocks.values(), self._root]):
            module.register_forward_pre_hook(partial(self._hear, places.get(module, [])))
            if self._order is not None and module is not self._root:
                # before it is gathered
                module.register_forward_pre_hook(partial(self._compare, index), prepend=True)
        if self._order is not None:
            self._root.register_forward_pre_hook(self._next_pass, prepend=True)
            self._root.register_forward_hook(partial(self._compare, -1))
        self._way = 0
        self._called: set[int] = set()
        self._left_out = self._always = False  # a block was not called, here; anywhere
        whole = set(self.sharded.whole)
        outside = [
            (owner, a)
            for _, owner, a in places.get(self._root, [])
            if owner._parameters[a] not in whole
        ]
        self._witness = outside[0] if outside else None

    def _hear(
        self, places: list[tuple[str, nn.Module, str]], module: nn.Module, _inputs: Any
    ) -> None:
        """Now whole parameters are in place: note which of them the backward pass will reach."""
        if module in self._heard or not torch.is_grad_enabled():
            return
        self._heard.add(module)
        for name, owner, attribute in places:
            p = owner._parameters[attribute]
            if p is None or not p.requires_grad or id(p) in self._watched:
                continue

            def reached(parameter: torch.Tensor, name: str = name) -> None:
                # it is called too where the pass came by without a gradient
                if parameter.grad is not None:
                    self._reached_names.add(name)

            self._watched[id(p)] = (p, p.register_post_accumulate_grad_hook(reached))  # type: ignore[no-untyped-call]

    def _next_pass(self, _module: nn.Module, _inputs: Any) -> None:
        self._root.passes += 1
        self._called.clear()

    def _compare(self, index: int, _module: nn.Module, *_: Any) -> None:
        """Do all workers call the same blocks in the same order? If not, FSDP2 waits for ever, or
        mixes layers of one size up.

        Looked at in the first forward passes, then in each whose number is a power of two, and in
        all once a pass has left a block out. Whatever mixes layers up in another is found by
        :meth:`finish`, on the CPU before the update, on GPUs in one step of fifty.
        """
        self._way = (self._way * 31 + index + 2) % _WAYS
        passes = self._root.passes
        self._called.add(index)
        if index == -1 and len(self._called) <= len(self.sharded.blocks):
            self._left_out = True
        first = _LOOKED_AT_FIRST if self.me.device.type == "cpu" else _LOOKED_AT_FIRST_GPU
        if passes > first and passes & (passes - 1) and not self._always:
            return
        mine = torch.tensor([index], device=self.me.device)
        everyone = [torch.empty_like(mine) for _ in range(self.me.size)]
        dist.all_gather(everyone, mine, group=self._order)
        found = [int(i) for i in everyone]
        if len(set(found)) > 1:
            names = [n.removeprefix("model.") for n in self.sharded.blocks]
            shown = "; ".join(
                f"rank {r}: {repr(names[i]) if i >= 0 else 'the end'}" for r, i in enumerate(found)
            )
            raise self._astray(shown)

    def _astray(self, shown: str) -> PlanError:
        return PlanError(
            f"shard={self._level!r}: the workers' forward passes go different ways "
            f"({shown}). FSDP2 gathers a block when it is called, so "
            "all must call the same ones: which are called must not depend on a worker's "
            "samples or randomness (layer dropping, early "
            "exits). Use shard='optimizer', or compute the block and multiply its result by zero."
        )

    def before_batch(self, present: bool) -> None:
        """See :meth:`Strategy.before_batch`."""
        super().before_batch(present)
        self._way = 0

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
                if "storage of size 0" not in str(error):
                    raise
                raise PlanError(
                    f"shard={self._level!r}: a gathered parameter was read after it had "
                    "been let go. The forward pass or the loss differentiates by itself "
                    "(torch.autograd.grad, a gradient penalty), which FSDP2 takes for the "
                    "backward pass; or a block hands on what it makes in a list or a "
                    "dictionary only, and returns nothing. Use shard='optimizer', or 'none'."
                ) from error

    def micro(self, compute: Compute | None, part: Part, scale: Scale | None) -> None:
        """See :meth:`Strategy.micro`. Gradients are added up with every micro-batch, so that none
        is held whole.
        """
        assert compute is not None
        if not self._begun:
            self._begun = True
            self._reached_names.clear()
            self._payload.zero_()
            for p in self.parameters:
                p.grad = None
        if self._several:  # over nodes, only once
            for module in self.sharded.modules:
                module.set_requires_all_reduce(part.last, recurse=False)
        factor = 0.0
        if part.samples:
            value, weight = compute()
            self._weighted = weight is not None
            factor = 1 / part.global_samples
            if weight is not None:
                self._weight_slot.add_(weight, alpha=factor)
            else:
                factor *= part.samples
            self._loss_slot.add_(value.detach(), alpha=factor)
        else:
            with absent():
                value, weight = compute()
            self._weighted = weight is not None
        self._backward(value, factor, scale)
        if self._is_whole():
            raise RondeError(
                f"shard={self._level!r}: the backward pass ended without the exchange. In "
                "a loop of its own a script must call the model itself, "
                "run.model(…), and that must return tensors, or lists, tuples, "
                "dictionaries or dataclasses of them. Or use run.step(batch)."
            )

    def _is_whole(self) -> bool:
        return self._witness is not None and not isinstance(
            self._witness[0]._parameters[self._witness[1]], DTensor
        )

    def finish(self) -> torch.Tensor:
        """See :meth:`Strategy.finish`."""
        if self._seen is not None:
            self._choose_buffers(self._seen)
        self.local_loss = self._loss_slot.clone()
        self._begun = False
        payload, n = self._payload, len(self.names)
        unused = [i for i, name in enumerate(self.names) if name not in self._reached_names]
        if unused:
            payload[_UNUSED:][unused] = 1
        for i, p in enumerate(self._scalars, _UNUSED + n):
            if p.grad is not None:
                payload[i] = p.grad
        payload[_WAY], payload[_LEFT_OUT] = self._way, self._left_out
        self.sharded.add_up(payload)
        # to look, on a GPU, is to wait for it
        looked_at = self.me.device.type == "cpu" or self._steps % _LOOK_EVERY == 1
        if looked_at and payload[_WAY] != self._way * self.me.size:
            raise self._astray(f"found after step {self._steps}")
        self._always = self._always or (looked_at and bool(payload[_LEFT_OUT]))
        scalars = {p: payload[i] for i, p in enumerate(self._scalars, _UNUSED + n)}
        nobody = (
            (payload[_UNUSED : _UNUSED + n] > self.me.size - 0.5).tolist()
            if unused
            else [False] * n
        )
        for p, none in zip(self.parameters, nobody, strict=True):
            if none:
                p.grad = None
            elif p in scalars:
                p.grad = scalars[p].to(p.dtype)
        loss = payload[_LOSS].clone()
        if self._weighted:
            weight = payload[_WEIGHT]
            gradients = [local_shard(p.grad) for p in self.parameters if p.grad is not None]
            if gradients:
                torch._foreach_mul_(gradients, (1 / weight).to(gradients[0]))
            loss = loss / weight
        return loss

    @torch.no_grad()
    def clip(self, max_norm: float) -> None:
        """See :meth:`Strategy.clip`. The norm is summed up over those that hold different parts."""
        held: dict[tuple[DeviceMesh, tuple[int, ...]] | None, list[torch.Tensor]] = {}
        for p in self.parameters:
            if isinstance(p.grad, DTensor):
                dims = tuple(
                    d
                    for d, placement in enumerate(p.grad.placements)
                    if not isinstance(placement, Whole)
                )
                held.setdefault((p.grad.device_mesh, dims), []).append(local_shard(p.grad))
            elif p.grad is not None:
                held.setdefault(None, []).append(p.grad)
        total = torch.zeros((), dtype=self._payload.dtype, device=self.me.device)
        for place, gradients in held.items():
            square = torch.stack(torch._foreach_norm(gradients)).to(total).square().sum()
            if place is not None:
                for d in place[1]:
                    dist.all_reduce(square, group=place[0].get_group(d))
            total += square
        factor = (max_norm / (total.sqrt() + 1e-6)).clamp(max=1.0)
        for gradients in held.values():
            torch._foreach_mul_(gradients, factor.to(gradients[0]))

    def updated(self) -> None:
        """See :meth:`Strategy.updated`."""
        # a forward pass of the script's own, after the backward pass, would hold old values
        self.sharded.reshard()

    def loaded(self) -> None:
        """See :meth:`Strategy.loaded`."""
        self.sharded.reshard()

    def infer(self, call: Callable[[Any], Any], batch: Any) -> Any:
        """See :meth:`Strategy.infer`. Every worker has to call it equally often."""
        result = self._root(partial(call, batch))
        self.sharded.reshard()
        return result

    # -- between steps -----------------------------------------------------------------

    def refresh(self) -> bool:
        """See :meth:`Strategy.refresh`."""
        changed = self._flags.changed()
        if changed:
            for p in self.parameters:
                p.grad = None  # of what was frozen: it would be trained on
            self._take_note()
        return changed

    def start_epoch(self) -> None:
        """See :meth:`Strategy.start_epoch`."""
        self.refresh()
        if self._steps:
            self.sync_buffers()


def shard(plan: Plan, work: Work, me: World) -> Strategy:
    """The strategy of a plan that divides the model, or the optimizer's state, over replicas and
    does nothing else.
    """
    mesh = replica_mesh(plan, me)
    if plan.sync_batchnorm:
        synchronise(work.model, group_of("batchnorm"))
    if plan.shard == "optimizer":
        if work.fill is not None:
            work.fill(lambda name: True)
        return Zero1(plan, work, me, mesh.get_group(mesh.ndim - 1))
    return Shard(work, me, mesh, plan.shard, plan.offload == "parameters")
