"""Calls the script's forward and loss functions, checks their values, and counts the rows that a
mean is over: fewer than the batch's samples where a collate function has left some out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import default_collate

from ronde.loader import LoaderSettings
from ronde.world import ArgumentError, LossError, World
from ronde.world.consensus import gather_json
from ronde.world.tensors import parts

__all__ = ["Lengths", "LossCall", "Rows", "collates", "lengths"]


def _shape(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return "a dictionary of " + ", ".join(map(repr, value))
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of " + ", ".join(type(v).__name__ for v in value)
    return type(value).__name__


class LossCall:
    """Calls ``forward`` (None for ``(inputs, target)`` batches) and ``loss`` on a micro-batch.

    ``reduction`` is ``"sum"`` if the loss is a sum over the samples it is given, else ``"mean"``.
    """

    def __init__(
        self,
        loss: Callable[..., Any],
        forward: Callable[[nn.Module, Any], Any] | None,
        reduction: str = "mean",
    ) -> None:
        self.loss = loss
        self.forward = forward
        self.reduction = reduction
        self.pairs = False  # whether the last one was (sum, weight)
        self._keep_for: Any = None
        self._kept: tuple[Any, ...] | None = None

    def keep(self, batch: Any) -> None:
        """Keep the loss's arguments when it is called on this very batch."""
        self._keep_for, self._kept = batch, None

    def kept(self) -> tuple[Any, ...] | None:
        """The arguments that were kept, once."""
        kept, self._keep_for, self._kept = self._kept, None, None
        return kept

    def arguments(self, model: nn.Module, batch: Any) -> tuple[Any, ...]:
        """The arguments of the loss and the metrics."""
        if self.forward is not None:
            values = self.forward(model, batch)
            return values if isinstance(values, tuple) else (values,)
        try:
            if isinstance(batch, Mapping | str | bytes):
                raise TypeError
            inputs, target = batch
        except (TypeError, ValueError):
            raise LossError(
                f"a batch is {_shape(batch)}, not (inputs, target): give forward=lambda model, "
                "batch: (model(…), …), which returns the arguments of loss()."
            ) from None
        return model(inputs), target

    def __call__(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``(mean, None)`` or ``(sum, weight)`` of one micro-batch."""
        arguments = self.arguments(model, batch)
        if batch is self._keep_for:
            self._kept = arguments
        return self.check(self.loss(*arguments))

    def check(self, value: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A loss's value as ``(mean, None)`` or ``(sum, weight)``; LossError for others."""
        self.pairs = isinstance(value, tuple | list)
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            return value.reshape(()), None
        pair = isinstance(value, tuple | list) and len(value) == 2
        if pair and self.reduction == "sum":
            raise LossError(
                "loss_reduction='sum', but the loss returned a pair: expected the sum over the "
                "samples given, a scalar. Leave loss_reduction out for (sum, weight)."
            )
        if pair and isinstance(value[0], torch.Tensor) and value[0].numel() == 1:
            total, weight = value
            if not isinstance(weight, torch.Tensor):
                weight = torch.full((), float(weight), device=total.device)
            if weight.numel() == 1:
                dtype = torch.promote_types(total.dtype, torch.float32)
                return total.reshape(()), weight.detach().reshape(()).to(dtype)
        raise LossError(
            f"loss returned {_shape(value)}, expected a scalar (0-d tensor): the mean over the "
            "samples given (reduction='mean'), or (sum, weight) for a weighted mean. Add .mean(), "
            "or return (losses.sum(), weight)."
        )


Lengths = dict[str, int]
"""Where the rows of a batch may be counted: ``0[1]`` is the first dimension of its second tensor,
``1[1]`` the second dimension, ``list[1]`` the items of a list there.
"""


def lengths(batch: Any) -> Lengths:
    """The lengths in a batch.

    Example:
        >>> lengths((torch.zeros(5, 3), [torch.zeros(5)]))
        {'list': 2, '0[0]': 5, '1[0]': 3, 'list[1]': 1, '0[1][0]': 5}
    """
    sizes: Lengths = {}
    _measure(batch, "", sizes)
    return sizes


def _measure(value: Any, path: str, sizes: Lengths) -> None:
    if isinstance(value, torch.Tensor):
        dims = value.dim()
        if dims:
            sizes["0" + path] = value.size(0)
        if dims > 1:
            sizes["1" + path] = value.size(1)
    elif isinstance(value, PackedSequence):
        return
    elif isinstance(value, list | tuple):
        sizes["list" + path] = len(value)
        if len(value) <= 16:  # a longer one has an item for each sample
            for i, each in enumerate(value):
                _measure(each, f"{path}[{i}]", sizes)
    elif (held := parts(value)) is not None:
        for key, each in held.items():
            _measure(each, f"{path}[{key}]", sizes)


def collates(settings: LoaderSettings) -> bool:
    """Whether samples are collated by a function of the script's, which may leave some out."""
    if settings.collate is default_collate:
        return False
    from ronde.introspect import is_ronde

    return not is_ronde(settings.collate)


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
        mine = [[n, sizes] for n, sizes in zip(samples, micros, strict=True) if n]
        facts = [(n, sizes) for rank in gather_json(me, mine) for n, sizes in rank]
        self._counted = _choose(facts)
        if self._counted:
            fewer = any(sizes[key] != n * k for n, sizes in facts for key, k in self._counted)
            self.weighs = self.collates or fewer
        elif any(key.startswith("0") for _, sizes in facts for key in sizes):
            n, sizes = facts[0]
            dims = sorted({size for key, size in sizes.items() if key.startswith("0")})
            self.unclear = (
                f"a batch of {n} samples has tensors of {', '.join(map(str, dims)) or 'no'} rows: "
                f"ronde cannot tell how many samples are in it, and weighs its mean by {n}. If "
                "samples may be left out, return (sum, weight) from the loss: "
                "docs/batch-contract.md#weighted-losses"
            )

    def of(self, sizes: Lengths, samples: int, loss: LossCall) -> float | None:
        """The samples whose rows are in a micro-batch; None if means are not weighted by rows.

        Raises:
            ArgumentError: they are fewer for the first time, which the other ranks do not know; or
                there are none.
        """
        if not self._counted or not samples:
            return 0 if self.weighs else None
        read = [sizes[key] / k for key, k in self._counted if key in sizes] or [samples]
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

    def in_evaluation(self, sizes: Lengths, samples: int) -> float:
        """The samples whose rows are in a micro-batch."""
        read = [sizes[key] / k for key, k in self._counted if key in sizes] if samples else []
        return Counter(read).most_common(1)[0][0] if read else samples


def _choose(facts: Sequence[tuple[int, Lengths]]) -> list[tuple[str, int]]:
    """Where rows are counted, and how many a sample has there."""
    if not facts:
        return []
    common = set.intersection(*(set(sizes) for _, sizes in facts))
    keys = [key for key in facts[0][1] if key in common]
    fewest = min(n for n, _ in facts)

    def of(kind: str) -> list[str]:
        # of three samples, a list may be inputs, target, and weight
        top = kind == "list" and fewest <= 3
        return [key for key in keys if key.startswith(kind) and not (top and key == "list")]

    def times(key: str) -> int:
        sizes = {lengths[key] / n for n, lengths in facts}
        each = sizes.pop()
        return int(each) if not sizes and each >= 1 and each == int(each) else 0

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
