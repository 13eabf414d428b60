"""Norms of gradients, weights, and updates, of the parts that a worker holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ronde.checkpoint import box_of
from ronde.parallel.replica_check import held_parameters
from ronde.run.parts import Parts
from ronde.world.consensus import gather_json
from ronde.world.tensors import local_part

__all__ = ["TensorNorms"]

_SAMPLED_ELEMENTS = 4096  # elements of a part, whose updates are measured


class TensorNorms:
    """The parts of parameters whose norms this worker takes.

    Attributes:
        names: of all parameters, the same on all ranks.
    """

    def __init__(self, run: Parts) -> None:
        tied = run.work.tied
        held = {
            name: p
            for name, p in held_parameters(run.strategy, tied).items()
            if p.is_floating_point()
        }
        everyone = gather_json(run.world, {n: str(box_of(p, n)) for n, p in held.items()})
        every = dict(run.model.named_parameters(remove_duplicate=False))
        self.all = {tied.get(n, n): every[tied.get(n, n)] for n in every}
        self.names = list(self.all)
        holders: dict[tuple[str, str], list[int]] = {}
        for rank, boxes in enumerate(everyone):
            for name, box in boxes.items():
                holders.setdefault((name, box), []).append(rank)
        load, mine = [0] * run.world.size, set[str]()
        # the largest first, each to the one with the least to do
        for (name, _), ranks in sorted(holders.items(), key=lambda x: -self.all[x[0][0]].numel()):
            rank = min(ranks, key=load.__getitem__)
            load[rank] += self.all[name].numel()
            if rank == run.world.rank:
                mine.add(name)
        self._own = [(i, held[n]) for i, n in enumerate(self.names) if n in mine]
        self._own = [(i, p) for i, p in self._own if local_part(p).numel()]
        self._before: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []
        self._places: list[int] = []
        device = run.world.device
        self.values = torch.zeros(4, len(self.names), dtype=torch.float64, device=device)
        self._at = torch.tensor([i for i, _ in self._own], dtype=torch.int64, device=device)
        self._scale: torch.Tensor | None = None

    def gradients(self) -> None:
        """Take the squares of gradients; a missing one is -1."""
        self.values.zero_()
        grads = [(i, p.grad) for i, p in self._own]
        held = [(i, _values(local_part(g))) for i, g in grads if g is not None]
        squares = _squares([g for _, g in held])
        at = self._at
        if len(held) < len(grads):
            missing = [i for i, g in grads if g is None]
            self.values[0, missing] = -1.0
            at = torch.tensor([i for i, _ in held], dtype=torch.int64, device=at.device)
        if held:
            self.values[0].index_copy_(0, at, squares.to(self.values))

    def keep(self) -> None:
        """Copy a sample of the weights, before they are updated."""
        parts = [local_part(p) for _, p in self._own]
        self._views = [_strided(part) for part in parts]
        self._places = [_place(part) for part in parts]
        if [_place(view) for view in self._views] != self._places:
            self._places = []  # a copy: the memory of a part has gaps
        self._before = torch.cat(self._views) if parts else None

    def updates(self) -> None:
        """Compare with that sample, and take the squares of the weights."""
        before, self._before = self._before, None
        if before is None:
            return
        parts = [local_part(p) for _, p in self._own]
        if [_place(part) for part in parts] != self._places:  # new ones, or copies
            self._views = [_strided(part) for part in parts]
        after = torch.cat(self._views)
        sizes = [len(view) for view in self._views]
        if self._scale is None:
            ratios = [p.numel() / n for p, n in zip(parts, sizes, strict=True)]
            self._scale = torch.tensor(ratios, dtype=torch.float64, device=after.device)
        moved = torch._foreach_norm(list(torch.split(after - before, sizes)), 2.0)
        updates = torch.stack(list(moved)).double().square() * self._scale
        equal = torch.stack([e.sum() for e in torch.split(after == before, sizes)]) * self._scale
        for row, each in enumerate((_squares(parts), updates, equal), 1):
            self.values[row].index_copy_(0, self._at, each.to(self.values))


def _place(part: torch.Tensor) -> int:
    return part.untyped_storage().data_ptr()


def _stride(part: torch.Tensor) -> int:
    return -(-part.numel() // _SAMPLED_ELEMENTS)


def _strided(part: torch.Tensor) -> torch.Tensor:
    """A view of every so many elements in the order of memory, whatever the layout."""
    if part.is_contiguous():
        return part.view(-1)[:: _stride(part)]
    strides = part.stride()
    order = sorted(range(part.ndim), key=lambda d: -strides[d])
    return part.permute(order).reshape(-1)[:: _stride(part)]


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _squares(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sums of squares; half-precision ones are added up in float32."""
    norms_of_tensors: list[Any] = [None] * len(tensors)
    for dtype in {t.dtype for t in tensors}:
        at = [i for i, t in enumerate(tensors) if t.dtype == dtype]
        wide = torch.float32 if dtype.itemsize < 4 else dtype
        norms = torch._foreach_norm([tensors[i] for i in at], 2.0, wide)
        for i, norm in zip(at, norms, strict=True):
            norms_of_tensors[i] = norm.double()
    return (
        torch.stack(norms_of_tensors).square()
        if norms_of_tensors
        else torch.zeros(0, dtype=torch.float64)
    )
