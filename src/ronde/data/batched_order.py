"""An order whose global batches are given: those of a script's ``batch_sampler``."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ronde.data.order import Ids, Order


def _none(epoch: int) -> Sequence[Sequence[int]]:
    return ()


@dataclass(frozen=True)
class BatchOrder(Order):
    """Global batches of any sizes; their number and sizes may vary by epoch.

    Attributes:
        batches: ``batches(epoch)`` -> the ids of each global batch of an epoch, in order.
        first_epoch: digest of epoch 0's batches. A run resumes only with the same.
    """

    batches: Callable[[int], Sequence[Sequence[int]]] = field(default=_none, compare=False)
    first_epoch: str = ""

    @property
    def kind(self) -> str:
        """See :attr:`Order.kind`."""
        return f"batches of {self.sampler} ({self.first_epoch})"

    def samples_in(self, epoch: int) -> int:
        """See :meth:`Order.samples_in`."""
        return len(self._drawn(epoch))

    def ends(self, epoch: int) -> tuple[int, ...]:
        """See :meth:`Order.ends`."""
        self._drawn(epoch)
        ends: tuple[int, ...] = self.__dict__["_ends"][epoch]
        return ends

    def _drawn(self, epoch: int) -> Ids:
        held: dict[int, Ids] = self.__dict__.setdefault("_flat", {})
        ids = held.get(epoch)
        if ids is None:
            batches = self.batches(epoch)
            ends: dict[int, tuple[int, ...]] = self.__dict__.setdefault("_ends", {})
            ends[epoch] = tuple(itertools.accumulate(map(len, batches)))
            ids = held[epoch] = np.fromiter((i for b in batches for i in b), dtype=np.int64)
            # Epoch 0 stays: its sizes are asked for whenever a run is described.
            for old in [e for e in held if e not in (0, epoch)]:
                del held[old], ends[old]
        return ids


def batch_order(
    n: int, seed: int, batches: Callable[[int], Sequence[Sequence[int]]], sampler: str
) -> BatchOrder:
    """The order of a function that gives the batches of an epoch.

    Args:
        n: samples in the data set.
        seed: of the run.
        batches: ``batches(epoch)`` -> ids of each global batch; a pure function.
        sampler: the class that makes them.

    Example:
        >>> order = batch_order(5, 0, lambda epoch: [[4, 0], [1, 2, 3]], "ByLength")
        >>> order.ids(0, 1, 4).tolist(), order.ends(0), order.sizes(0)
        ([0, 1, 2], (2, 5), [2, 3])
    """
    first = batches(0)
    digest = hashlib.sha256(repr([list(b) for b in first]).encode()).hexdigest()[:12]
    return BatchOrder(
        n,
        seed,
        True,
        draw=lambda epoch: [i for batch in batches(epoch) for i in batch],
        length=sum(map(len, first)),
        sampler=sampler,
        batches=batches,
        first_epoch=digest,
    )
