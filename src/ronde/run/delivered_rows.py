"""Counts the rows of a batch, which are fewer than its samples where a collate function has left
some out: a mean over fewer rows weighs less in the mean of the global batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import default_collate

from ronde.introspect import is_ronde
from ronde.loader import LoaderSettings
from ronde.run.losses import LossCall
from ronde.world import ArgumentError, World
from ronde.world.consensus import gather_json
from ronde.world.tensors import parts

__all__ = ["Lengths", "Rows", "collates", "lengths"]

Lengths = dict[str, int]
"""Where the rows of a batch may be counted: ``0[1]`` is the first dimension of its second tensor,
``1[1]`` the second dimension, ``list[1]`` the items of a list there.
"""

_MOST_ITEMS = 16  # of a list that is looked into: a longer one has an item for each sample
_MOST_FIELDS = 3  # a list as long as this may be inputs, target and weight


def lengths(batch: Any) -> Lengths:
    """The lengths in a batch.

    Example:
        >>> lengths((torch.zeros(5, 3), [torch.zeros(5)]))
        {'list': 2, '0[0]': 5, '1[0]': 3, 'list[1]': 1, '0[1][0]': 5}
    """
    found: Lengths = {}
    _measure(batch, "", found)
    return found


def _measure(value: Any, path: str, found: Lengths) -> None:
    if isinstance(value, torch.Tensor):
        dims = value.dim()
        if dims:
            found["0" + path] = value.size(0)
        if dims > 1:
            found["1" + path] = value.size(1)
    elif not isinstance(value, PackedSequence) and (held := parts(value)) is not None:
        if is_list := isinstance(value, list | tuple):
            found["list" + path] = len(held)
        if not is_list or len(held) <= _MOST_ITEMS:
            for key, each in held.items():
                _measure(each, f"{path}[{key}]", found)


def collates(settings: LoaderSettings) -> bool:
    """Whether samples are collated by a function of the script's, which may leave some out."""
    return settings.collate is not default_collate and not is_ronde(settings.collate)


class Rows:
    """How many of a micro-batch's samples its mean is over. All ranks read alike.

    Args:
        asks: means of several micro-batches are averaged, so it matters.
        collates: the script has a collate function, which may leave samples out at any step.

    Attributes:
        asks, collates: as given.
        is_open: whether :meth:`settle` is due.
        weighs: whether means are weighted by rows.
        unclear: what is to be said where they cannot be counted, or empty.
    """

    def __init__(self, asks: bool, collates: bool) -> None:
        self.asks = self.is_open = asks
        self.weighs = False
        self.unclear = ""
        self.collates = collates
        self._counted: list[tuple[str, int]] = []  # where, and the rows of a sample there

    def settle(self, me: World, micros: Sequence[Lengths], samples: Sequence[int]) -> None:
        """Choose where rows are counted, by the first micro-batches of all ranks. A collective."""
        self.is_open = False
        mine = [[n, found] for n, found in zip(samples, micros, strict=True) if n]
        facts = [(n, found) for rank in gather_json(me, mine) for n, found in rank]
        self._counted = _choose(facts)
        if self._counted:
            fewer = any(found[key] != n * k for n, found in facts for key, k in self._counted)
            self.weighs = self.collates or fewer
        elif any(key.startswith("0") for _, found in facts for key in found):
            n, found = facts[0]
            dims = sorted({size for key, size in found.items() if key.startswith("0")})
            self.unclear = (
                f"a batch of {n} samples has tensors of {', '.join(map(str, dims)) or 'no'} rows: "
                f"ronde cannot tell how many samples are in it, and weighs its mean by {n}. If "
                "samples may be left out, return (sum, weight) from the loss: "
                "docs/batch-contract.md#weighted-losses"
            )

    def of(self, found: Lengths, samples: int, loss: LossCall) -> float | None:
        """The samples whose rows are in a micro-batch; None if means are not weighted by rows.

        Raises:
            ArgumentError: they are fewer for the first time, which the other ranks do not know; or
                there are none.
        """
        if not self._counted or not samples:
            return 0 if self.weighs else None
        read = [found[key] / k for key, k in self._counted if key in found] or [samples]
        if not self.weighs and (samples in read or loss.pairs or loss.reduction == "sum"):
            return None
        rows = Counter(read).most_common(1)[0][0]  # a tensor may be as long by chance
        if self.weighs and (rows or loss.pairs or loss.reduction == "sum"):
            return rows
        raise ArgumentError(
            f"this worker's batch has {rows:g} rows for its {samples} samples"
            + (
                ": no sample of it is left, so it has no mean. Have collate_fn keep one, or use a "
                "larger batch_size or micro_batch."
                if not rows
                else ", which the other workers do not know: a mean over them would weigh as "
                "much as one over all. Leave samples out in the DataLoader's collate_fn, or "
                "return (sum, weight) from the loss."
            )
        )

    def in_evaluation(self, found: Lengths, samples: int) -> float:
        """The samples whose rows are in a micro-batch."""
        read = [found[key] / k for key, k in self._counted if key in found] if samples else []
        return Counter(read).most_common(1)[0][0] if read else samples


def _choose(facts: Sequence[tuple[int, Lengths]]) -> list[tuple[str, int]]:
    """Where rows are counted, and how many a sample has there."""
    if not facts:
        return []
    common = set.intersection(*(set(found) for _, found in facts))
    keys = [key for key in facts[0][1] if key in common]
    fewest = min(n for n, _ in facts)

    def of(kind: str) -> list[str]:
        top = kind == "list" and fewest <= _MOST_FIELDS
        return [key for key in keys if key.startswith(kind) and not (top and key == "list")]

    def times(key: str) -> int:
        found = {lengths[key] / n for n, lengths in facts}
        each = found.pop()
        return int(each) if not found and each >= 1 and each == int(each) else 0

    for kind in ("0", "1", "list"):
        fits = [(key, k) for key in of(kind) if (k := times(key))]
        # of tensors with time first, all have the samples second
        if fits and (kind != "1" or len(fits) == len(of("0"))):
            return [(key, k) for key, k in fits if k == min(k for _, k in fits)]
    for kind in ("0", "list"):  # some are left out already
        inner = [key for key in of(kind) if key != "list"]
        alike = all(len({lengths[key] for key in inner}) == 1 for _, lengths in facts)
        if inner and alike and all(lengths[inner[0]] <= n for n, lengths in facts):
            return [(key, 1) for key in inner]
    return []
