"""The calls of a run that only exchange something among the ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Literal

from ronde.run import script_collectives
from ronde.world.rendezvous import Rendezvous

__all__ = ["CollectiveCalls"]


class CollectiveCalls:
    """See :class:`Run`, which has these calls."""

    is_main: bool
    _rendezvous: Rendezvous

    def barrier(self) -> None:
        """Wait until every rank is here. Call it on every worker.

        Raises:
            WorldError: a rank called something else, or ended.

        Example:
            >>> if run.is_main:  # doctest: +SKIP
            ...     torch.save(vocabulary, "vocabulary.pt")
            >>> run.barrier()  # doctest: +SKIP
            >>> vocabulary = torch.load("vocabulary.pt")  # doctest: +SKIP
        """
        script_collectives.barrier(self._rendezvous)

    def reduce(self, value: Any, op: Literal["mean", "sum", "max"] = "mean") -> Any:
        """Combine a value of each rank. Call it on every worker: all get the same result.

        Numbers are exact: integers stay integers, and a sum of floats is rounded once. Tensors are
        computed in float64, rounded once to their own type, and carry no gradient. A sum of integer
        tensors is int64, their mean is float64. A NaN on any rank makes a maximum NaN.

        Args:
            value: a number, a tensor, or a dictionary of these, with the same names, types, and
                shapes on every rank.
            op: ``"mean"`` (each rank weighs the same), ``"sum"``, or ``"max"``.

        Returns:
            What ``value`` is: a number, a tensor on its device, or a dictionary.

        Raises:
            ArgumentError: a value that cannot be reduced, on every rank.
            WorldError: ranks give different operations, names, types, or shapes.

        Example:
            >>> run.reduce({"reward": 12.5, "episodes": 3}, "sum")  # doctest: +SKIP
            {'reward': 31.0, 'episodes': 7}
        """
        return script_collectives.reduce(self._rendezvous, value, op)

    def gather_objects(self, obj: Any) -> list[Any]:
        """Collect a JSON value of each rank. Call it on every worker.

        Args:
            obj: None, numbers, text, and lists or dictionaries of them. Tuples arrive as lists.

        Returns:
            list: the values by rank, the same on every rank.

        Raises:
            ArgumentError: JSON does not hold a value, on every rank.
            WorldError: a rank called something else, or ended.

        Example:
            >>> run.gather_objects({"rank": run.rank})  # doctest: +SKIP
            [{'rank': 0}, {'rank': 1}]
        """
        return script_collectives.gather_objects(self._rendezvous, obj)

    def main_first(self) -> AbstractContextManager[None]:
        """Run a block on rank 0, then on all other ranks. Enter it on every worker.

        Raises:
            WorldError: on the other ranks, if rank 0's block failed; or if ranks call other things.

        Example:
            >>> with run.main_first():  # rank 0 downloads, the others find it  # doctest: +SKIP
            ...     data = load_dataset("wikitext")
        """
        return script_collectives.main_first(self._rendezvous)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print`` on rank 0; nothing on other ranks."""
        if self.is_main:
            print(*args, **kwargs)
