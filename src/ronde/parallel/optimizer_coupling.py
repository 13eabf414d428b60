"""Which optimizers update each parameter independently of the others.

Some updates depend on all parameters: Lamb clips by the norm of all gradients, Prodigy estimates
one distance. On a worker with only part of the parameters they would silently use a partial norm.
What torch does not tell is asked: an optimizer may have an attribute ``coupling``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from ronde.keras import is_keras
from ronde.plan import Plan
from ronde.world import ArgumentError

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

_COUPLED = """
    LBFGS SAM Lamb LAMB Prodigy DAdaptAdam DAdaptSGD DAdaptAdaGrad DAdaptLion DAdaptAdan
""".split()  # noqa: SIM905


def coupling(optimizer: Optimizer) -> str:
    """``"coupled"`` if a step computes each parameter's update from all of them, ``""`` if it does
    not, ``"unknown"`` if neither torch nor the optimizer's attribute ``coupling`` tells.

    Example:
        >>> coupling(torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1))
        ''
    """
    kind: Any = type(optimizer)
    if isinstance(declared := getattr(optimizer, "coupling", None), str):
        return declared
    if kind.__name__ in _COUPLED:
        return "coupled"
    return "" if kind.step.__module__.startswith("torch.optim.") else "unknown"


def check_coupling(plan: Plan, optimizer: Optimizer) -> None:
    """Refuse a plan that gives an optimizer only part of the parameters, and it may need all.

    Raises:
        ArgumentError: its update of one parameter depends on the others, or may.
    """
    zero1 = plan.shard == "optimizer" and plan.replicas > 1
    if not (plan.pipeline > 1 or plan.tensor > 1 or zero1):
        return
    name, which = type(optimizer).__name__, f"plan={plan.spec!r}"
    kind = coupling(optimizer)
    cure = "shard='gradients' or 'parameters', under which torch computes global norms"
    if kind == "coupled":
        if name in _COUPLED:
            cure = "another optimizer"
        raise ArgumentError(
            f"{which}: {name} computes the update of each parameter from all of them (such as a "
            "norm of all gradients), and here a worker updates only some. Use plan='replicate' "
            f"(shard='none'), or {cure}."
        )
    if kind:
        raise ArgumentError(
            f"{which}: a worker updates only part of the parameters, and {name}, which is not one "
            "of torch's optimizers, may compute each update from all of them. If it does not, "
            "say so before ronde.distribute: optimizer.coupling = ''. Else use plan='replicate', "
            f"or {cure}."
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
    if kind := coupling(optimizer):
        why = f"{name} computes the update of each parameter from all of them"
        if kind == "unknown":
            why = f"{name} may compute each update from all parameters (see optimizer.coupling)"
        refused |= dict.fromkeys(("pipeline", "tensor", "shard=optimizer"), why)
    if is_keras(model):
        from ronde.keras.keras_refusals import refusals

        refused |= refusals(model, optimizer)
    return refused
