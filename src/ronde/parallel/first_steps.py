"""Checks a divided training at its first steps: turns a silent error into one that has a name.

Two things must hold after an optimizer step, whatever the plan and the model: no gradient was left
out of the exchange, and all workers that hold the same part of a parameter hold the same values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ronde.checkpoint import box_of
from ronde.parallel.strategy import Strategy
from ronde.plan import Plan
from ronde.world import PlanError, World
from ronde.world.consensus import gather_json
from ronde.world.tensors import local_part

__all__ = ["CHECKED_STEPS", "check_step", "held_parameters", "late_gradient", "part_digest"]

CHECKED_STEPS = 2
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Optimizer steps that are checked, after the start and after a resume."""

_ROUNDING = 16  # machine epsilons between workers whose processors round differently


def check_step(strategy: Strategy, tied: Mapping[str, str], plan: Plan, me: World) -> bool:
    """Check gradients and weights after an optimizer step. A collective.

    Costs one pass over this worker's weights and an exchange of a few bytes for each parameter.

    Args:
        tied: state name of a shared tensor -> its first name.

    Returns:
        bool: whether all workers that hold the same part hold the same bits of it; False if their
        processors round differently.

    Raises:
        PlanError: on every rank, with the parameter and the ranks that differ.
    """
    held = held_parameters(strategy, tied)
    divided = plan.shard in ("gradients", "parameters")
    mine: dict[str, Any] = {"late": late_gradient(strategy.model) if divided else None}
    mine["parts"] = {n: [str(box_of(p, n)), part_digest(local_part(p))] for n, p in held.items()}
    everyone = gather_json(me, mine)
    for rank, each in enumerate(everyone):
        if each["late"]:
            raise PlanError(
                f"plan={plan.spec!r}: parameter {each['late']!r} got a gradient after its block's "
                f"gradients had been exchanged (rank {rank}), so a part of it would be lost. A "
                "backward pass of the model's own calls the block's layers; use "
                "shard='optimizer' or 'none'."
            )
    differing = _differing(everyone)
    for name, ranks in differing:
        apart = _furthest(held.get(name), ranks, me)
        if apart > _ROUNDING:
            raise PlanError(
                f"plan={plan.spec!r}: after the step, parameter {name!r} has other values on rank "
                f"{ranks[1]} than on rank {ranks[0]}, and both hold the same part of it. The "
                "script or the model changes it on some ranks only, or its gradient was not "
                "exchanged; ronde prove names where it begins."
            )
    return not differing


def held_parameters(strategy: Strategy, tied: Mapping[str, str]) -> dict[str, nn.Parameter]:
    """The trainable parameters of which this worker holds a part, by first name.

    Args:
        tied: state name of a shared tensor -> its first name.
    """
    found: dict[str, nn.Parameter] = {}
    # FSDP puts its shards back for state_dict(): until then, it may hold whole parameters.
    for name, value in strategy.model.state_dict(keep_vars=True).items():
        if isinstance(value, nn.Parameter) and value.requires_grad and strategy.owns(name):
            found.setdefault(tied.get(name, name), value)
    return found


def late_gradient(model: nn.Module) -> str | None:
    """The name of a parameter with a gradient that FSDP2 did not exchange, or None."""
    from torch.distributed.fsdp import FSDPModule  # too slow to import for plans without it

    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        group = module._get_fsdp_state()._fsdp_param_group
        for p in group.fsdp_params if group else ():
            whole = getattr(p, "_unsharded_param", None)
            if p.unsharded_accumulated_grad is not None or (
                whole is not None and whole.grad is not None
            ):
                return p._param_fqn or p._module_info.param_name
    return None


@torch.no_grad()
def part_digest(part: torch.Tensor) -> str:
    """A digest of a tensor's bits, where they are, in one pass at the speed of memory. Any one bit
    changes it.
    """
    if not part.numel():
        return ""
    part = part.contiguous()
    if part.is_complex():
        part = torch.view_as_real(part)
    flat, size = part.reshape(-1), part.element_size()
    if flat.storage_offset() * size % 8:
        flat = flat.clone()
    # Sums of integers wrap, so they are exact, in any order. Words of eight bytes are summed as
    # fast as they are read; narrower ones one by one.
    end = flat.numel() * size // 8 * 8 // size
    parts = flat[:end].view(torch.int64), flat[end:].view(_INTEGERS[size])
    sums = torch.stack([each.sum(dtype=torch.int64) for each in parts])
    return " ".join(f"{n % 2**64:x}" for n in sums.tolist())


def _differing(everyone: list[Any]) -> list[tuple[str, list[int]]]:
    """Parameters of which two ranks hold the same box with other values: name, and two ranks."""
    found: list[tuple[str, list[int]]] = []
    names = dict.fromkeys(name for each in everyone for name in each["parts"])
    for name in names:
        first: dict[str, tuple[int, str]] = {}
        for rank, each in enumerate(everyone):
            if name not in each["parts"]:
                continue
            box, digest = each["parts"][name]
            before, other = first.setdefault(box, (rank, digest))
            if other != digest:
                found.append((name, [before, rank]))
                break
    return found


@torch.no_grad()
def _furthest(parameter: nn.Parameter | None, ranks: list[int], me: World) -> float:
    """How far apart two ranks' parts are, in epsilons of the largest value. A collective."""
    first, second = ranks
    apart = torch.zeros(1, dtype=torch.float64, device=me.device)
    if me.rank == first:
        assert parameter is not None
        dist.send(local_part(parameter).contiguous(), second)
    elif me.rank == second:
        assert parameter is not None
        mine = local_part(parameter)
        theirs = torch.empty_like(mine.contiguous())
        dist.recv(theirs, first)
        difference = torch.where(mine.isnan() & theirs.isnan(), 0, (theirs - mine).abs())
        epsilon = torch.finfo(mine.dtype).eps * max(float(mine.abs().max()), 1e-30)
        apart[0] = float(difference.nan_to_num(nan=math.inf).max()) / epsilon
    dist.all_reduce(apart, dist.ReduceOp.MAX)
    return float(apart)
