"""Test whether an optimizer updates each parameter independently of the others.

Some updates depend on all parameters: Lamb clips by the norm of all gradients, Prodigy estimates
one distance. On a worker with only part of the parameters they would silently use a partial norm.
"""

from __future__ import annotations

import copy
import types
import warnings
from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch.optim import Optimizer

from ronde.keras import is_keras
from ronde.plan import Plan
from ronde.world import ArgumentError, World
from ronde.world.consensus import broadcast_json

__all__ = ["REFUSED", "check_coupling", "coupling", "ways_refused"]

# Optimizers that cannot compute on parts of a parameter, and why.
REFUSED = {
    "Adafactor": "its factored moments are means over whole rows and columns, which torch 2.13 "
    "cannot compute on shards",
    "Rprop": "torch 2.13 cannot run it on shards",
    "Muon": "it orthogonalizes whole matrices, and rounds differently on shards",
    "SparseAdam": "it takes sparse gradients, which FSDP2 does not shard",
    "LBFGS": "it keeps its own flat list of whole parameters",
}

# Known by name: torch's own, and optimizers whose step cannot be tried in isolation.
_COUPLED = """
    LBFGS SAM Prodigy DAdaptAdam DAdaptSGD DAdaptAdaGrad DAdaptLion DAdaptAdan
""".split()  # noqa: SIM905
# A trial uses this many parameters per group, groups, and elements along each dimension.
_PER_GROUP, _GROUPS, _EDGE = 3, 4, 4
_STEPS = 3
_SIZES = (1e-3, 1e3, 1.0)  # gradient scales: any clipping threshold lies in between


def coupling(optimizer: Optimizer) -> str:
    """Why a step needs all parameters: ``"coupled"``, ``"random"``, or the trial's error.

    ``""`` if it does not. The optimizer and all random states stay unchanged.

    Example:
        >>> coupling(torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1))
        ''
    """
    kind = type(optimizer)
    if isinstance(declared := getattr(optimizer, "coupling", None), str):  # Keras's
        return declared
    if kind.__name__ in _COUPLED:
        return "coupled"
    if kind.__module__.startswith("torch.optim."):
        return ""
    try:
        with torch.random.fork_rng([]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _try_step(optimizer)
    except Exception as error:
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}{': ' + lines[0] if lines else ''}"


def check_coupling(plan: Plan, optimizer: Optimizer, me: World) -> None:
    """Refuse a plan that gives a coupled optimizer only part of the parameters.

    Raises:
        ArgumentError: its update of one parameter depends on the others.
    """
    zero1 = plan.shard == "optimizer" and plan.replicas > 1
    if not (plan.pipeline > 1 or plan.tensor > 1 or zero1):
        return
    name, which = type(optimizer).__name__, f"plan={plan.spec!r}"
    found = broadcast_json(me, coupling(optimizer) if me.is_main else None)
    if found == "coupled":
        cure = "shard='gradients' or 'parameters', under which torch computes global norms"
        if name in _COUPLED:
            cure = "another optimizer"
        raise ArgumentError(
            f"{which}: {name} computes the update of each parameter from all of them (such as a "
            "norm of all gradients), and here a worker updates only some. Use plan='replicate' "
            f"(shard='none'), or {cure}."
        )
    if found and me.is_main:
        why = f"its step could not be tried: {found}"
        if found == "random":
            why = "it draws random numbers, which differ for part of the parameters"
        warnings.warn(
            f"{which}: a worker updates only part of the parameters, and {name} may update them "
            f"differently than with all of them ({why}). plan='replicate' gives it all.",
            stacklevel=2,
        )


def ways_refused(model: torch.nn.Module, optimizer: Optimizer) -> dict[str, str]:
    """Plans that :func:`ronde.distribute` refuses for this optimizer or for gradient hooks.

    Plan -> why.

    Example:
        >>> model = torch.nn.Linear(2, 2)
        >>> list(ways_refused(model, torch.optim.Rprop(model.parameters())))
        ['shard=gradients', 'shard=parameters', 'tensor']
    """
    name = type(optimizer).__name__
    refused: dict[str, str] = {}
    if name in REFUSED:
        ways = ["shard=gradients", "shard=parameters"]
        if name != "SparseAdam":  # embeddings stay whole under tensor
            ways.append("tensor")
        refused |= dict.fromkeys(ways, f"{name}: {REFUSED[name]}")
    for parameter, p in model.named_parameters():
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            why = f"{parameter!r} has a hook on its gradient"
            refused |= dict.fromkeys(("shard=gradients", "shard=parameters", "tensor"), why)
            break
    if coupling(optimizer) == "coupled":
        why = f"{name} computes the update of each parameter from all of them"
        refused |= dict.fromkeys(("pipeline", "tensor", "shard=optimizer"), why)
    if is_keras(model):
        from ronde.keras.keras_refusals import refusals

        refused |= refusals(model, optimizer)
    return refused


def _try_step(optimizer: Optimizer) -> str:
    together = _step(optimizer, None, 0)
    if not _close(together, _step(optimizer, None, 1)):
        return "random"
    alone = [_step(optimizer, i, 0)[i] for i in range(len(together))]
    return "" if _close(together, alone) else "coupled"


def _step(optimizer: Optimizer, only: int | None, seed: int) -> list[torch.Tensor]:
    """Small parameters after some steps of a copied optimizer that has all of them, or one."""
    made, chosen = _shrink(optimizer)
    if only is not None:
        for group in made.param_groups:
            group["params"][:] = [p for p in group["params"] if p is chosen[only]]
    torch.manual_seed(seed)
    draw = torch.Generator().manual_seed(1)
    step = type(made).step
    # without hooks of all optimizers
    step = getattr(step, "__wrapped__", step) if hasattr(step, "hooked") else step
    for n in range(_STEPS):
        for i, p in enumerate(chosen):
            gradient = torch.randn(p.shape, generator=draw, dtype=torch.float64)
            gradient *= _SIZES[(i + n) % len(_SIZES)]
            p.grad = gradient.to(p.device, p.dtype) if only is None or i == only else None
        step(made)
    return [p.detach() for p in chosen]


def _shrink(optimizer: Optimizer) -> tuple[Optimizer, list[torch.Tensor]]:
    """A copy of an optimizer with small parameters in place of its own, and some of those."""
    draw = torch.Generator().manual_seed(2)
    memo: dict[int, Any] = {}
    made: Any = object.__new__(type(optimizer))
    memo[id(optimizer)] = made
    small: dict[torch.Tensor, torch.Tensor] = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            shape = [min(n, _EDGE) for n in p.shape]
            values = torch.randn(shape, generator=draw, dtype=torch.float64)
            values = values.to("cpu" if p.is_meta else p.device, p.dtype)
            memo[id(p)] = small[p] = torch.nn.Parameter(values, requires_grad=p.requires_grad)
    state: Any = defaultdict(dict)
    memo[id(optimizer.state)] = state
    for p, values_of in optimizer.state.items():
        if p in small:
            state[small[p]] = {k: _cut(v, p, small[p]) for k, v in values_of.items()}
    # Leave out the script's hooks and the step that a scheduler has wrapped: they are bound to the
    # original.
    functions = types.FunctionType | types.MethodType
    attributes = optimizer.__dict__.items()
    hooks = [k for k, _ in attributes if k.startswith("_optimizer_")]
    free = {k: v for k, v in attributes if k not in hooks and not isinstance(v, functions)}
    made.__dict__.update(copy.deepcopy(free, memo))
    made.__dict__.update({k: OrderedDict() for k in hooks})
    chosen: list[torch.Tensor] = []
    for i, group in enumerate(made.param_groups):
        trained = [p for p in group["params"] if p.requires_grad]
        spread = trained[:: max(1, len(trained) // _PER_GROUP)][:_PER_GROUP]
        group["params"][:] = spread if i < _GROUPS else []
        chosen += group["params"]
    return made, chosen


def _cut(value: Any, whole: torch.Tensor, small: torch.Tensor) -> Any:
    if isinstance(value, torch.Tensor) and value.shape == whole.shape:
        return value[tuple(slice(n) for n in small.shape)].clone()
    return copy.deepcopy(value)


def _close(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Whether they are equal up to rounding."""
    for a, b in zip(one, other, strict=True):
        eps = torch.finfo(a.dtype).eps
        if not torch.allclose(a.double(), b.double(), rtol=eps**0.75, atol=eps, equal_nan=True):
            return False
    return True
