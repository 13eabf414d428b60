"""Compares the weights of replicas now and then: a bit that flipped on one rank has a name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ronde.checkpoint import box_of, local_part
from ronde.parallel.first_steps import held_parameters, part_digest
from ronde.parallel.strategy import Strategy
from ronde.world import World, WorldError
from ronde.world.consensus import gather_json
from ronde.world.identity import ranks_text

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
    """

    def __init__(self, every: int) -> None:
        self.possible = True
        self._every = every
        self._last = 0

    def is_due(self, step: int, save: bool = False) -> bool:
        """Whether to check after that step; ``save``: before it is saved."""
        return self.possible and self._last != step and (save or step % self._every == 0)

    def check(self, strategy: Strategy, tied: Mapping[str, str], me: World, step: int) -> None:
        """Compare. A collective.

        Args:
            tied: state name of a shared tensor -> its first name.
            step: optimizer steps done.

        Raises:
            WorldError: on every rank, with the ranks and the parameters that differ.
        """
        held = held_parameters(strategy, tied)
        mine = {n: [str(box_of(p, n)), part_digest(local_part(p))] for n, p in held.items()}
        compared, found = _differences(gather_json(me, mine))
        self.possible = compared > 0
        if not found:
            self._last = step
            return
        since = f"At step {self._last}" if self._last else "At first"
        more = f"; {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise WorldError(
            f"after step {step}, replicas of the model are not equal: "
            f"{'; '.join(found[:_SHOWN])}{more}. {since} they were equal: a bit has flipped in a "
            "worker's memory or processor, or the script changes weights on some ranks only. Take "
            "the host out if this happens again, and go on from a checkpoint that is not later "
            f"than step {self._last}."
        )


def _differences(everyone: list[dict[str, Any]]) -> tuple[int, list[str]]:
    """How many parts two ranks or more hold, and a phrase for each of which they hold other bits:
    the minority is named, or all of them if there is none.
    """
    compared, found = 0, []
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
            if len(ranks[0]) > len(ranks[1]):
                odd = sorted(rank for some in ranks[1:] for rank in some)
                found.append(
                    f"{name!r} of {ranks_text(odd)} differs from that of {ranks_text(ranks[0])}"
                )
            else:
                sides = " and ".join(ranks_text(some) for some in ranks)
                found.append(f"{name!r} differs between {sides}, and either may be wrong")
    return compared, found
