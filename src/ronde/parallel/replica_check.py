"""Compares the weights of replicas now and then: a bit that flipped on one rank has a name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from ronde.checkpoint import box_of
from ronde.parallel.first_steps import held_parameters, part_digest
from ronde.parallel.strategy import Strategy
from ronde.world import World, WorldError
from ronde.world.consensus import gather_json
from ronde.world.identity import ranks_text
from ronde.world.tensors import local_part

__all__ = ["ReplicaCheck"]

_SHOWN = 5


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
        mine = {n: [str(box_of(p, n)), part_digest(local_part(p))] for n, p in held.items()}
        compared, found, parts = _differences(gather_json(me, mine))
        self.possible = compared > 0
        if not found:
            self._last = step
            return
        since = f"At step {self._last}" if self._last else "At first"
        more = f"; {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        why, cure = explain(), ""
        if not why:
            name, first, second = parts[0]
            count, of = _count_unequal(held.get(name), first, second, me)
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
            f"after step {step}, replicas of the model are not equal: "
            f"{'; '.join(found[:_SHOWN])}{more}. {since} they were equal: {why}. {cure or 'Go on'} "
            f"from a checkpoint that is not later than step {self._last}."
        )


@torch.no_grad()
def _count_unequal(
    parameter: torch.nn.Parameter | None, first: int, second: int, me: World
) -> tuple[int, int]:
    """How many elements of a part differ between two ranks, and of how many. A collective."""
    found = torch.zeros(2, dtype=torch.int64, device=me.device)
    if me.rank in (first, second):
        assert parameter is not None
        mine = local_part(parameter).contiguous()
        if me.rank == first:
            dist.send(mine, second)
        else:
            theirs = torch.empty_like(mine)
            dist.recv(theirs, first)
            unequal = (mine != theirs) & ~(mine.isnan() & theirs.isnan())
            found[0], found[1] = int(unequal.sum()), mine.numel()
    dist.all_reduce(found)
    count, of = found.tolist()
    return count, of


def _differences(
    everyone: list[dict[str, Any]],
) -> tuple[int, list[str], list[tuple[str, int, int]]]:
    """How many parts two ranks or more hold, a phrase for each of which they hold other bits, and
    its name with two such ranks: the minority is named, or all of them if there is none.
    """
    compared, found, which = 0, list[str](), list[tuple[str, int, int]]()
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
                found.append(
                    f"{name!r} of {ranks_text(odd)} differs from that of {ranks_text(ranks[0])}"
                )
            else:
                sides = " and ".join(ranks_text(some) for some in ranks)
                found.append(f"{name!r} differs between {sides}, and either may be wrong")
    return compared, found, which
