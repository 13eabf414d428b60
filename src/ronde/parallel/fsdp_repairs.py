"""Repairs of FSDP2, one function or class each: what upstream does wrong, and where it is reported.

Numbers are issues and pull requests of pytorch/pytorch. torch 2.13 needs all of them; a repair goes
with the first torch in which its issue is closed.
:func:`silence_renamed_collectives`, :func:`skip_unused_inputs`, and :func:`bypass_attributes` take
effect when this module is imported.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from ronde.checkpoint import shard_like
from ronde.world import PlanError

__all__ = [
    "ELEMENTWISE",
    "KeepContainers",
    "KeepParameters",
    "clone_views",
    "exchange_unused",
    "split_scalars",
    "step_locally",
    "unfuse",
]

# torch's optimizers that treat every number by itself
ELEMENTWISE = frozenset(
    "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop SGD".split()  # noqa: SIM905
)


def silence_renamed_collectives() -> None:
    """FSDP2 of torch 2.13 calls collectives by names that torch 2.13 deprecates (#186124)."""
    warnings.filterwarnings(
        "ignore",
        message=r"`torch\.distributed\.(all_gather_into|reduce_scatter)_tensor` is deprecated",
        category=FutureWarning,
    )


def skip_unused_inputs() -> None:
    """An input that a block does not use must have no gradient.

    FSDP2 passes a block's inputs through an autograd function that turns a missing gradient into
    zeros. An upstream parameter that no result depends on would then be trained on them by weight
    decay and momentum. #133498 proposed the same change; torch 2.13 does not have it.
    """
    try:
        from torch.distributed.fsdp._fully_shard import _fsdp_param_group as module

        base: Any = module.RegisterPostBackwardFunction
    except (ImportError, AttributeError):  # a torch that does it another way
        return

    class WithContext(base):  # type: ignore[misc]
        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            base.setup_context(ctx, inputs, output)
            ctx.set_materialize_grads(False)

    class WithoutContext(base):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            ctx.set_materialize_grads(False)
            return base.forward(ctx, *inputs)

    repaired = WithContext if "setup_context" in vars(base) else WithoutContext
    repaired.__name__ = base.__name__
    module.RegisterPostBackwardFunction = repaired  # type: ignore[misc]


class _ParameterPlace:
    """A module whose parameters are set and read where torch keeps them."""

    def __init__(self, module: nn.Module) -> None:
        self.__dict__["module"] = module

    def __getattr__(self, name: str) -> Any:
        held = self.module._parameters
        return held[name] if name in held else getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.module._parameters[name] = value


def bypass_attributes() -> None:
    """A parameter may have the name of another attribute, as a Keras layer's variable.

    FSDP2 sets and reads parameters as attributes where a class has a ``__setattr__`` of its own
    (since #120340, not reported as a defect): needed while Keras's layers have one.
    """
    try:
        from torch.distributed.fsdp._fully_shard import _fsdp_param_group

        module: Any = _fsdp_param_group
        find = module._get_param_module_infos
    except (ImportError, AttributeError):  # a torch that does it another way
        return

    def infos(*args: Any) -> Any:
        modules = find(*args)
        for info in modules:
            info.module = place(info.module)
            info.shared_modules[:] = map(place, info.shared_modules)
        return modules

    def place(module: Any) -> Any:
        own = getattr(module.__setattr__, "__func__", None) is not nn.Module.__setattr__
        return _ParameterPlace(module) if own else module

    module._get_param_module_infos = infos


silence_renamed_collectives()
skip_unused_inputs()
bypass_attributes()


def clone_views(output: Any) -> Any:
    """Replace views and parameters among a module's outputs by copies.

    A view that is changed in place loses the hook that gathers parameters for the backward pass
    (#181832; torch 2.13 only warns). A parameter, or a view of one, is freed when the module ends.
    """
    if not torch.is_grad_enabled():
        return output

    def clone(t: Any) -> Any:
        if isinstance(t, torch.Tensor) and t.requires_grad and (t._base is not None or t.is_leaf):
            return t.clone()
        return t

    return tree_map(clone, output)


def exchange_unused(module: FSDPModule) -> None:
    """Exchange parameters that only some workers used.

    FSDP2 reduces those that have a gradient, so workers that used different ones wait for ever or
    mix them up (#158719). The option exists from torch 2.12 on: with that as the oldest torch, the
    question whether it is there goes.
    """
    if hasattr(module, "set_reduce_scatter_unused_params"):
        module.set_reduce_scatter_unused_params(True)


def split_scalars(parameters: Iterable[nn.Parameter]) -> set[nn.Parameter]:
    """Parameters without dimensions, which FSDP2 refuses (#130810), or without elements, which its
    exchange refuses: every worker holds them.
    """
    return {p for p in parameters if p.dim() == 0 or p.numel() == 0}


class KeepContainers:
    """Let a block add to the lists and dictionaries it is given.

    FSDP2 hands a block copies of them, so a cache that a block fills stays empty for its caller
    (#157832). What the block changed in a copy is written back. FSDP2's hooks must be on the block
    already, so that these surround them.
    """

    def __init__(self, block: nn.Module) -> None:
        self._originals: list[list[Any]] = []  # one entry per call that has not ended
        self._copies: list[list[tuple[Any, Any, dict[Any, Any]]]] = []
        block.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
        block.register_forward_pre_hook(self._after, with_kwargs=True)
        block.register_forward_hook(self._write_back, always_call=True)

    def _before(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        self._originals.append(_containers((*args, *kwargs.values())))

    def _after(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        pairs = zip(self._originals[-1], _containers((*args, *kwargs.values())), strict=True)
        self._copies.append([(old, new, dict(_items(new))) for old, new in pairs if old is not new])

    def _write_back(self, *_: Any) -> None:
        if not self._originals:  # a hook failed before this one saw the call
            return
        # FSDP2's own hook may have failed in between: then there are no copies of this call.
        copies = self._copies.pop() if len(self._copies) == len(self._originals) else []
        self._originals.pop()
        for old, new, before in copies:
            if [(k, id(v)) for k, v in _items(new)] == [(k, id(v)) for k, v in before.items()]:
                continue
            was = dict(_items(old))
            originals = {id(value): was[key] for key, value in before.items()}
            now = {key: originals.get(id(value), value) for key, value in _items(new)}
            old.clear()
            if isinstance(old, list):
                old.extend(now.values())
            else:
                old.update(now)


class KeepParameters:
    """Refuse a parameter that a script has put in place of a divided one.

    FSDP2 puts its own there again at the next forward pass, without a word (not reported). Its
    hooks must be on the module already. ``inside``: of the modules in it that FSDP2 has divided.
    """

    def __init__(self, module: nn.Module, inside: Sequence[KeepParameters] = ()) -> None:
        self.places: list[tuple[dict[str, Any], str]]
        theirs = {id(held) for keep in inside for held, _ in keep.places}
        held = [m._parameters for m in module.modules() if id(m._parameters) not in theirs]
        self.places = [(each, n) for each in held for n in each if isinstance(each[n], DTensor)]
        self._own: set[int] = set()  # divided ones, and whole ones once they were gathered
        self._note()
        self._all = (*inside, self)
        module.register_forward_pre_hook(self._before, prepend=True)
        self._first = module.register_forward_pre_hook(self._gathered)

    def _note(self) -> None:
        self._own |= {id(held.get(name)) for held, name in self.places}

    def _gathered(self, *_: Any) -> None:
        self._note()
        self._first.remove()

    def _before(self, *_: Any) -> None:
        for keep in self._all:
            keep.check()

    def check(self) -> None:
        """Raise PlanError if one was replaced."""
        for held, name in self.places:
            if id(held.get(name)) not in self._own:
                raise PlanError(
                    f"a layer's parameter {name!r} was replaced after ronde.distribute had divided "
                    "the model over the workers: the new one would be ignored. Replace it before "
                    "ronde.distribute, or only its values (weight.data = whole), on every worker."
                )


def _containers(values: Iterable[Any]) -> list[Any]:
    """The outermost lists and dictionaries among arguments."""
    result: list[Any] = []
    for value in values:
        if type(value) is list or type(value) is dict:
            result.append(value)
        elif isinstance(value, tuple):
            result += _containers(value)
    return result


def _items(container: Any) -> Iterable[tuple[Any, Any]]:
    return enumerate(container) if isinstance(container, list) else container.items()


def unfuse(optimizer: Optimizer) -> None:
    """torch 2.13 has no fused SGD and Adagrad for DTensors (not reported). The plain step computes
    the same.
    """
    fused = any(group.get("fused") for group in optimizer.param_groups)
    if fused and type(optimizer).__name__ in ("SGD", "Adagrad"):
        for group in optimizer.param_groups:
            group["fused"] = False
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]


def step_locally(optimizer: Optimizer) -> None:
    """Let one of torch's elementwise optimizers step over plain tensors, see :class:`_LocalStep`.

    Others keep DTensors. Doing it again changes nothing.
    """
    kind = type(optimizer)
    is_known = kind.__name__ in ELEMENTWISE and kind is getattr(torch.optim, kind.__name__, None)
    hooks = getattr(optimizer, "_optimizer_step_pre_hooks", {}).values()
    if is_known and not any(isinstance(getattr(h, "__self__", None), _LocalStep) for h in hooks):
        _LocalStep(optimizer)


class _LocalStep:
    """Swaps DTensors for this worker's plain parts while an optimizer steps.

    Same operations, same numbers, without the 20 µs that each operation on a DTensor costs, ten
    times a parameter (#134191, #109477). Between steps the optimizer holds DTensors, state too.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._groups: list[list[torch.Tensor]] = []  # parameters of each group, outside of a step
        self._swapped: list[tuple[DTensor, torch.Tensor, dict[str, Any] | None]] = []
        optimizer.register_step_pre_hook(self._narrow)
        optimizer.register_step_post_hook(self._widen)

    def _narrow(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._groups:  # the last step raised
            self._widen()
        groups = optimizer.param_groups
        has_closure = len(args) > 1 or kwargs.get("closure") is not None
        if has_closure or any(group.get("differentiable") for group in groups):
            return  # a closure makes gradients within the step
        if not all(_matches_gradient(p) for group in groups for p in group["params"]):
            return
        for group in groups:
            self._groups.append(group["params"])
            group["params"] = [self._swap(p, optimizer.state) for p in group["params"]]

    def _swap(self, p: torch.Tensor, state: Any) -> torch.Tensor:
        if not isinstance(p, DTensor) or p.grad is None:
            return p
        part = p._local_tensor.detach()
        part.grad = p.grad._local_tensor  # type: ignore[attr-defined]
        outer = state.pop(p, None)
        if outer is not None:
            state[part] = {
                k: v._local_tensor if isinstance(v, DTensor) else v for k, v in outer.items()
            }
        self._swapped.append((p, part, outer))
        return part

    def _widen(self, *_: Any) -> None:
        originals, self._groups = self._groups, []
        swapped, self._swapped = self._swapped, []
        for group, parameters in zip(self.optimizer.param_groups, originals, strict=False):
            group["params"] = parameters
        state = self.optimizer.state
        for p, part, outer in swapped:
            inner = state.pop(part, None)
            if inner is None:
                if outer is not None:
                    state[p] = outer
                continue
            for k, v in inner.items():
                if isinstance(v, torch.Tensor) and v.dim() and v.shape == part.shape:
                    old = outer.get(k) if outer else None
                    kept = isinstance(old, DTensor) and old._local_tensor is v
                    inner[k] = old if kept else shard_like(v, p)
            state[p] = inner


def _matches_gradient(p: torch.Tensor) -> bool:
    g = p.grad
    if not isinstance(p, DTensor) or g is None:
        return True
    return isinstance(g, DTensor) and g.placements == p.placements
