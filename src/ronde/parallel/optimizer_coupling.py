"""Test whether an optimizer updates each parameter independently, if its class does not tell.

Some updates depend on all parameters: Lamb clips by the norm of all gradients, Prodigy estimates
one distance. On a worker that sees only part of the parameters, such an optimizer would silently
use part of the norm.
"""

from __future__ import annotations

import copy
import types
import warnings
from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch.optim import Optimizer

from ronde.plan import Plan
from ronde.world import ArgumentError, World
from ronde.world.consensus import broadcast_json

__all__ = ["REFUSED", "check_coupling", "coupling", "ways_refused"]

# Optimizers that cannot compute on parts of a parameter, and why.
REFUSED = {
    "Adafactor": "its factored moments are means over whole rows and columns, which torch 2.13 "
    "cannot compute on shards",
    "Rprop": "torch 2.13 cannot run it on shards",
    "Muon": "it orthogonalises whole matrices, and on shards does so in another order of rounding",
    "SparseAdam": "it takes sparse gradients, which FSDP2 does not divide",
    "LBFGS": "it keeps a flat list of whole parameters of its own",
}

# Known by name: torch's, and those whose step cannot be tried by itself.
_COUPLED = (
    "LBFGS",
    "SAM",
    "Prodigy",
    "DAdaptAdam",
    "DAdaptSGD",
    "DAdaptAdaGrad",
    "DAdaptLion",
    "DAdaptAdan",
)
# parameters of a group, groups, and numbers along each dimension that take part in a trial
_EACH, _GROUPS, _LARGEST = (
    3,
    4,
    4,
)
_STEPS = 3
_SIZES = (1e-3, 1e3, 1.0)  # of gradients: whatever is clipped at is in between


def coupling(optimizer: Optimizer) -> str:
    """Why part of the parameters is not enough for a step: ``"coupled"``, ``"random"`` or the error
    of the trial; ``""`` if it is.

    The optimizer and all randomness stay unchanged.

    Example:
        >>> coupling(torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1))
        ''
    """
    kind = type(optimizer)
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
    """Refuse a plan that shows an optimizer only part of the parameters if it needs all.

    Raises:
        ArgumentError: it treats all parameters together.
    """
    parted = (
        plan.pipeline > 1 or plan.tensor > 1 or (plan.shard == "optimizer" and plan.replicas > 1)
    )
    if not parted:
        return
    name, which = type(optimizer).__name__, f"plan={plan.spec!r}"
    found = broadcast_json(me, coupling(optimizer) if me.is_main else None)
    if found == "coupled":
        cure = (
            "shard='gradients' or 'parameters', where torch computes what is common to all over all"
        )
        if name in _COUPLED:
            cure = "another optimizer"
        raise ArgumentError(
            f"{which}: {name} derives what it does to one parameter from all of them (a "
            "norm of all gradients, say), and here a worker "
            f"updates a part of them. Use plan='replicate' (shard='none'), or {cure}."
        )
    if found and me.is_main:
        why = (
            "it draws random numbers, other ones for a part of the parameters"
            if found == "random"
            else f"its step could not be tried: {found}"
        )
        warnings.warn(
            f"{which}: a worker updates a part of the parameters, and whether {name} does "
            "to them what it does where it has all is not known "
            f"({why}). plan='replicate' gives it all.",
            stacklevel=2,
        )


def ways_refused(model: torch.nn.Module, optimizer: Optimizer) -> dict[str, str]:
    """What :func:`ronde.distribute` will refuse for this optimizer, or for gradient hooks: plan ->
    why.

    Example:
        >>> model = torch.nn.Linear(2, 2)
        >>> list(ways_refused(model, torch.optim.Rprop(model.parameters())))
        ['shard=gradients', 'shard=parameters', 'tensor']
    """
    name = type(optimizer).__name__
    found: dict[str, str] = {}
    if name in REFUSED:
        found.update(
            dict.fromkeys(("shard=gradients", "shard=parameters"), f"{name}: {REFUSED[name]}")
        )
        if name != "SparseAdam":  # embeddings stay whole
            found["tensor"] = f"{name}: {REFUSED[name]}"
    for parameter, p in model.named_parameters():
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            why = f"{parameter!r} has a hook on its gradient"
            found.update(dict.fromkeys(("shard=gradients", "shard=parameters", "tensor"), why))
            break
    if coupling(optimizer) == "coupled":
        found.update(
            dict.fromkeys(
                ("pipeline", "tensor", "shard=optimizer"),
                f"{name} derives what it does to one parameter from all of them",
            )
        )
    return found


def _try_step(optimizer: Optimizer) -> str:
    together = _step(optimizer, None, 0)
    if not _close(together, _step(optimizer, None, 1)):
        return "random"
    alone = [_step(optimizer, i, 0)[i] for i in range(len(together))]
    return "" if _close(together, alone) else "coupled"


def _step(optimizer: Optimizer, only: int | None, seed: int) -> list[torch.Tensor]:
    """Small parameters after some steps of a similar optimizer that holds all of them, or ``only``
    one.
    """
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
            gradient = (
                torch.randn(p.shape, generator=draw, dtype=torch.float64)
                * _SIZES[(i + n) % len(_SIZES)]
            )
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
            shape = [min(n, _LARGEST) for n in p.shape]
            values = torch.randn(shape, generator=draw, dtype=torch.float64).to(
                "cpu" if p.is_meta else p.device, p.dtype
            )
            memo[id(p)] = small[p] = torch.nn.Parameter(values, requires_grad=p.requires_grad)
    state: Any = defaultdict(dict)
    memo[id(optimizer.state)] = state
    for p, values_of in optimizer.state.items():
        if p in small:
            state[small[p]] = {k: _cut(v, p, small[p]) for k, v in values_of.items()}
    # Without what is bound to this one: hooks of the script's, and the step that a scheduler has
    # put there.
    bound = [
        k
        for k, v in optimizer.__dict__.items()
        if k.startswith("_optimizer_") or isinstance(v, types.FunctionType | types.MethodType)
    ]
    made.__dict__.update(
        copy.deepcopy({k: v for k, v in optimizer.__dict__.items() if k not in bound}, memo)
    )
    made.__dict__.update({k: OrderedDict() for k in bound if k.startswith("_optimizer_")})
    chosen: list[torch.Tensor] = []
    for i, group in enumerate(made.param_groups):
        trained = [p for p in group["params"] if p.requires_grad]
        group["params"][:] = (
            trained[:: max(1, len(trained) // _EACH)][:_EACH] if i < _GROUPS else []
        )
        chosen += group["params"]
    return made, chosen


def _cut(value: Any, whole: torch.Tensor, small: torch.Tensor) -> Any:
    if isinstance(value, torch.Tensor) and value.shape == whole.shape:
        return value[tuple(slice(n) for n in small.shape)].clone()
    return copy.deepcopy(value)


def _close(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Whether they are equal up to rounding."""
    return all(
        torch.allclose(
            a.double(),
            b.double(),
            rtol=torch.finfo(a.dtype).eps ** 0.75,
            atol=torch.finfo(a.dtype).eps,
            equal_nan=True,
        )
        for a, b in zip(one, other, strict=True)
    )
