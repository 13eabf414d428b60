"""The batch contract as arithmetic: which worker takes which samples of a global batch.

Pure functions of (global batch, workers, micro-batch).
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ronde.plan.plan import Plan


def split(start: int, stop: int, parts: int) -> list[tuple[int, int]]:
    """Cut positions [start, stop) into ``parts`` runs; sizes differ by at most one, larger ones
    first.

    Example:
        >>> split(0, 7, 3)
        [(0, 3), (3, 5), (5, 7)]
        >>> split(0, 1, 2)
        [(0, 1), (1, 1)]
    """
    size, extra = divmod(stop - start, parts)
    bounds = [start + i * size + min(i, extra) for i in range(parts + 1)]
    return list(itertools.pairwise(bounds))


@dataclass(frozen=True, slots=True)
class Share:
    """One worker's part of one global batch.

    Attributes:
        epoch: which epoch.
        start, stop: positions of the whole global batch in the epoch's order.
        micro: positions of this worker's micro-batches, in order; the same number on every worker.
        samples: samples of this worker, 0 where the batch is smaller than the world.
    """

    epoch: int
    start: int
    stop: int
    micro: tuple[tuple[int, int], ...]
    samples: int

    @property
    def global_samples(self) -> int:
        """Samples of the whole global batch."""
        return self.stop - self.start


def shares(
    epoch: int,
    offset: int,
    epoch_samples: int,
    batch_size: int,
    rank: int,
    size: int,
    micro_batch: int | None = None,
    drop_last: bool = False,
    parts: int | None = None,
    ends: Sequence[int] | None = None,
) -> Iterator[Share]:
    """This worker's share of every global batch of an epoch, from sample ``offset`` on.

    Every rank gets equally many shares with equally many micro-batches, so no rank waits for one
    that has finished. A share may be empty if the batch is smaller than the world.

    Args:
        offset: samples of this epoch already used.
        batch_size: global samples per optimizer step.
        micro_batch: most samples that a worker holds at once; None for its whole share.
        parts: exactly so many micro-batches instead, the last of them empty where there are fewer
            samples (a pipeline).
        ends: the position after each global batch, where their sizes differ; ``batch_size`` and
            ``drop_last`` do not count then. ``offset`` is one of them, or 0.

    Example:
        >>> [s.micro for s in shares(0, 0, 10, 4, rank=1, size=3)]
        [((2, 3),), ((6, 7),), ((9, 10),)]
        >>> [s.samples for s in shares(0, 0, 10, 4, rank=2, size=3)]
        [1, 1, 0]
    """
    start = offset
    following = iter(ends[bisect.bisect_right(ends, offset) :]) if ends is not None else None
    while start < epoch_samples:
        if following is not None:
            stop = int(next(following))
        else:
            stop = min(start + batch_size, epoch_samples)
            if drop_last and stop - start < batch_size:
                return
        # In each step: split() would make the bounds of every rank.
        each, extra = divmod(stop - start, size)
        low = start + rank * each + min(rank, extra)
        high = low + each + (rank < extra)
        micro: tuple[tuple[int, int], ...]
        if parts is not None:
            micro = tuple(split(low, high, parts))
        elif micro_batch is None:
            micro = ((low, high),)
        else:  # by the largest share: every rank has as many
            micro = tuple(split(low, high, math.ceil((each + (extra > 0)) / micro_batch)))
        yield Share(epoch, start, stop, micro, high - low)
        start = stop


def epoch_steps(epoch_samples: int, batch_size: int, drop_last: bool) -> int:
    """Optimizer steps of a whole epoch."""
    return epoch_samples // batch_size if drop_last else math.ceil(epoch_samples / batch_size)


def micro_batches_of(plan: Plan, samples: int) -> int:
    """Number of micro-batches in a worker's share: from ``micro_batch``, or enough to keep a
    pipeline busy.

    Args:
        plan: which.
        samples: of the largest share that a replica gets.

    Example:
        >>> micro_batches_of(Plan(micro_batch=8), 20), micro_batches_of(Plan(pipeline=2,
        ...     workers=2), 64)
        (3, 8)
        >>> micro_batches_of(Plan(pipeline=4, workers=4, schedule="interleaved", micro_batch=4),
        ...     20)  # in rounds of four
        8
    """
    if plan.micro_batch is not None:
        count = -(-samples // plan.micro_batch)
    else:
        # a bubble of (S - 1) / (4 S + S - 1): below a fifth
        count = min(samples, 4 * plan.pipeline) if plan.pipeline > 1 else 1
    if plan.pipeline > 1 and plan.schedule not in ("gpipe", "1f1b"):
        # these go round in groups of as many as there are workers
        count = -(-count // plan.pipeline) * plan.pipeline
    return count
