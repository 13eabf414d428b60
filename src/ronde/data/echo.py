"""Data echoing: train on each batch several times (Choi et al., "Faster Neural Network Training
with Data Echoing", 2019).

Positions in an epoch count echoed batches, so a run can stop and resume at any of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ronde.data.order import Ids, Order
from ronde.plan.batch import Share
from ronde.world import ArgumentError


@dataclass(frozen=True)
class Echoed(Order):
    """Another order with each global batch repeated; a shorter last batch too.

    Attributes:
        of: the other order.
        times: how many times.
        batch_size: of a global batch.
    """

    of: Order = field(default_factory=lambda: Order(1))
    times: int = 1
    batch_size: int = 1

    @property
    def kind(self) -> str:
        """See :attr:`Order.kind`."""
        return f"{self.of.kind}, batches of {self.batch_size} {self.times} times each"

    def ids(self, epoch: int, start: int, stop: int) -> Ids:
        """Dataset indices of positions ``start`` … ``stop`` - 1 of ``epoch``, int64."""
        places = np.arange(start, min(stop, self.epoch_samples), dtype=np.int64)
        n, size = self.of.epoch_samples, self.batch_size
        whole = n - n % size
        of = places // size // self.times * size + places % size
        of = np.where(
            places < whole * self.times,
            of,
            whole + (places - whole * self.times) % max(1, n - whole),
        )
        runs = np.split(of, np.flatnonzero(np.diff(of) != 1) + 1)
        return np.concatenate(
            [self.of.ids(epoch, int(r[0]), int(r[-1]) + 1) for r in runs if r.size]
            or [np.empty(0, dtype=np.int64)]
        )

    def again(self, last: Share, share: Share) -> bool:
        """Whether a share repeats the samples of the one before it."""
        size = self.batch_size
        whole = self.of.epoch_samples // size * size * self.times
        return (
            last.epoch == share.epoch
            and share.stop <= whole
            and share.start == last.stop
            and share.start % size == 0
            and share.stop - share.start == last.stop - last.start == size
            and share.start // size % self.times != 0
        )


def echoed(order: Order, times: int, batch_size: int) -> Order:
    """Repeat each global batch of an order ``times`` times.

    Raises:
        ArgumentError: of a sampler that draws: its draws are told apart by their position, which
            echoing changes.

    Example:
        >>> echoed(Order(5, shuffle=False), 2, 2).ids(0, 0, 10).tolist()
        [0, 1, 0, 1, 2, 3, 2, 3, 4, 4]
    """
    if order.draw is not None:
        raise ArgumentError(
            "feed setting echo cannot be combined with the script's own sampler. Let ronde "
            "shuffle, or remove echo."
        )
    return Echoed(
        order.n,
        order.seed,
        order.shuffle,
        length=order.epoch_samples * times,
        of=order,
        times=times,
        batch_size=batch_size,
    )
