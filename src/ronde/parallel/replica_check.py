"""Compares the weights of workers that hold the same part of a model: at the first steps, where a
silent error of a plan or a script shows, and now and then, for a bit that flipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ronde.checkpoint import box_of
from ronde.parallel.strategy import Strategy
from ronde.plan import Plan
from ronde.world import PlanError, World, WorldError
from ronde.world.consensus import gather_json
from ronde.world.identity import ranks_text
from ronde.world.tensors import local_part

__all__ = [
    "CHECKED_STEPS",
    "ReplicaCheck",
    "check_step",
    "held_parameters",
    "late_gradient",
    "part_digest",
]

CHECKED_STEPS = 2
"""Optimizer steps that are checked, after the start and after a resume."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROUNDING_EPSILONS = 16  # of the largest value: processors may round differently
_SHOWN = 5


def check_step(strategy: Strategy, tied: Mapping[str, str], plan: Plan, me: World) -> bool:
    """Check gradients and weights after an optimizer step. A collective.

    No gradient may be left out of the exchange, and all workers that hold the same part of a
    parameter must hold the same values. Costs one pass over this worker's weights and an exchange
    of a few bytes for each parameter.

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
    late = late_gradient(strategy.model) if divided else None
    everyone = gather_json(me, [late, _digests(held)])
    for rank, (name, _) in enumerate(everyone):
        if name:
            raise PlanError(
                f"plan={plan.spec!r}: parameter {name!r} got a gradient after its block's "
                f"gradients had been exchanged (rank {rank}), so a part of it would be lost. A "
                "backward pass of the model's own calls the block's layers; use "
                "shard='optimizer' or 'none'."
            )
    differing = _differences([digests for _, digests in everyone])[2]
    for name, first, second in differing:
        if _compared(held.get(name), first, second, me)[2] > _ROUNDING_EPSILONS:
            raise PlanError(
                f"plan={plan.spec!r}: after the step, parameter {name!r} has other values on rank "
                f"{second} than on rank {first}, and both hold the same part of it. The "
                "script or the model changes it on some ranks only, or its gradient was not "
                "exchanged; ronde prove names where it begins."
            )
    return not differing


def held_parameters(strategy: Strategy, tied: Mapping[str, str]) -> dict[str, nn.Parameter]:
    """The trainable parameters of which this worker holds a part, by first name.

    Args:
        tied: state name of a shared tensor -> its first name.
    """
    held: dict[str, nn.Parameter] = {}
    # FSDP puts its shards back for state_dict(): until then, it may hold whole parameters.
    for name, value in strategy.model.state_dict(keep_vars=True).items():
        if isinstance(value, nn.Parameter) and value.requires_grad and strategy.owns(name):
            held.setdefault(tied.get(name, name), value)
    return held


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


def _digests(held: Mapping[str, nn.Parameter]) -> dict[str, list[str]]:
    """Parameter -> the box of the whole that this worker holds, and a digest of its values."""
    return {n: [str(box_of(p, n)), part_digest(local_part(p))] for n, p in held.items()}


class ReplicaCheck:
    """Compares digests of all parameters between the workers that hold the same part.

    A check costs one pass over this worker's weights and an exchange of some sixty bytes for each
    parameter.

    Args:
        every: optimizer steps from one check to the next.

    Attributes:
        possible: whether two workers hold the same part of anything, with the same bits so far.
        due: no step before this one is checked, unless it is saved.
    """

    def __init__(self, every: int) -> None:
        self.possible = True
        self.due = 1
        self._every = every
        self._last = 0

    def begin(self, step: int, save: bool) -> bool:
        """Whether to check after that step; ``save``: before it is saved."""
        every = self._every
        early = step < every and not step & (step - 1)  # 4, 8, 16, ...: soon, and seldom
        due = save or early or step % every == 0
        later = every * (step // every + 1)
        self.due = min(later, 1 << step.bit_length()) if step < every else later
        return self.possible and self._last != step and due

    def check(
        self,
        strategy: Strategy,
        tied: Mapping[str, str],
        me: World,
        step: int,
        explain: Callable[[], str],
    ) -> None:
        """Compare. A collective.

        Args:
            tied: state name of a shared tensor -> its first name.
            step: optimizer steps done.
            explain: what is known of the cause if replicas differ; empty if nothing is. It raises
                if the ranks disagree on something else. A collective.

        Raises:
            WorldError: on every rank, with the ranks and the parameters that differ.
        """
        held = held_parameters(strategy, tied)
        compared, phrases, parts = _differences(gather_json(me, _digests(held)))
        self.possible = compared > 0
        if not phrases:
            self._last = step
            return
        since = f"At step {self._last}" if self._last else "At first"
        shown = "; ".join(phrases[:_SHOWN])
        more = f"; {len(phrases) - _SHOWN} more" if len(phrases) > _SHOWN else ""
        why, cure = explain(), ""
        if not why:
            name, first, second = parts[0]
            count, of, _ = _compared(held.get(name), first, second, me)
            same = (
                f"{count} of the {of} elements of {name!r} differ, and all else that Ronde compares"
            )
            if count == len(parts) == 1:
                why = (
                    f"{same} is equal. A bit has flipped in a worker's memory or processor, or the "
                    "script changes that weight on some ranks only"
                )
                cure = "Take the host out if this happens again, and go on"
            else:
                why = (
                    f"{same} (rates, settings, the place in the data, what is frozen) is equal. "
                    "Something changes weights, gradients, or the optimizer's state on some ranks "
                    "only: see .data, .grad and optimizer.state in the script"
                )
        raise WorldError(
            f"after step {step}, replicas of the model are not equal: {shown}{more}. {since} they "
            f"were equal: {why}. {cure or 'Go on'} from a checkpoint that is not later than step "
            f"{self._last}."
        )


@torch.no_grad()
def _compared(
    parameter: nn.Parameter | None, first: int, second: int, me: World
) -> tuple[int, int, float]:
    """How many elements of a part differ between two ranks, of how many; how far apart they are, in
    epsilons of the largest value. A collective.
    """
    result = torch.zeros(3, dtype=torch.float64, device=me.device)
    if me.rank in (first, second):
        assert parameter is not None
        mine = local_part(parameter).contiguous()
        if me.rank == first:
            dist.send(mine, second)  # the values: digests say that they differ, not by how much
        else:
            theirs = torch.empty_like(mine)
            dist.recv(theirs, first)
            same = (mine == theirs) | (mine.isnan() & theirs.isnan())
            apart = torch.where(same, 0, (theirs - mine).abs())
            epsilon = torch.finfo(mine.dtype).eps * max(float(mine.abs().max()), 1e-30)
            result[0], result[1] = int((~same).sum()), mine.numel()
            result[2] = float(apart.nan_to_num(nan=math.inf).max()) / epsilon
    dist.all_reduce(result)
    count, of, furthest = result.tolist()
    return int(count), int(of), furthest


def _differences(
    everyone: list[dict[str, Any]],
) -> tuple[int, list[str], list[tuple[str, int, int]]]:
    """How many parts two ranks or more hold, a phrase for each of which they hold other bits, and
    its name with two such ranks: the minority is named, or all of them if there is none.
    """
    compared, phrases, which = 0, list[str](), list[tuple[str, int, int]]()
    for name in dict.fromkeys(name for each in everyone for name in each):
        parts: dict[str, dict[str, list[int]]] = {}
        for rank, each in enumerate(everyone):
            if name in each:
                box, digest = each[name]
                parts.setdefault(box, {}).setdefault(digest, []).append(rank)
        for digests in parts.values():
            ranks = sorted(digests.values(), key=len, reverse=True)
            compared += sum(map(len, ranks)) > 1
            if len(ranks) < 2:
                continue
            which.append((name, ranks[0][0], ranks[1][0]))
            if len(ranks[0]) > len(ranks[1]):
                odd = sorted(rank for some in ranks[1:] for rank in some)
                phrases.append(
                    f"{name!r} of {ranks_text(odd)} differs from that of {ranks_text(ranks[0])}"
                )
            else:
                sides = " and ".join(ranks_text(some) for some in ranks)
                phrases.append(f"{name!r} differs between {sides}, and either may be wrong")
    return compared, phrases, which
