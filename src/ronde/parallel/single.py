"""One device: the arithmetic of a plain loop, without exchange."""

from __future__ import annotations

import torch
from torch import nn

from ronde.parallel.strategy import (
    Compute,
    Flags,
    Part,
    Scale,
    Strategy,
    forget_frozen,
    part_gradients,
    scale_gradients,
    trainable,
)

__all__ = ["Single"]


class Single(Strategy):
    """Runs a one-worker plan."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.parameters = [p for _, p in trainable(model)]
        self._flags = Flags(model)
        self._loss: torch.Tensor | None = None
        self._weight: torch.Tensor | None = None
        self._samples = 1
        self.local_loss: torch.Tensor | None = None

    def micro(self, compute: Compute | None, part: Part, scale: Scale | None) -> None:
        """See :meth:`Strategy.micro`."""
        assert compute is not None
        if self._loss is None:
            for p in self.parameters:
                p.grad = None
        value, weight = compute()
        self._samples = part.global_samples
        if weight is None and part.weight is not None:
            value, weight = value * part.weight, value.new_tensor(part.weight)
        if weight is not None:
            # keeps its size near one until the true weight is known
            loss = value / part.global_samples
            self._weight = weight if self._weight is None else self._weight + weight
        elif part.summed or part.samples == part.global_samples:
            loss = value  # the whole batch at once: exactly the plain loop, bit for bit
        else:
            loss = value * (part.samples / part.global_samples)
        (loss if scale is None else scale(loss)).backward()  # type: ignore[no-untyped-call]
        if self._loss is None and not part.last:
            part_gradients(self.parameters)
        self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()

    def finish(self) -> torch.Tensor:
        """See :meth:`Strategy.finish`."""
        loss, weight = self._loss, self._weight
        self._loss = self._weight = None
        assert loss is not None
        self.local_loss = loss
        if weight is not None:
            factor = self._samples / weight
            part_gradients(self.parameters)
            scale_gradients(self.parameters, factor)
            loss = loss * factor
        return loss

    def start_epoch(self) -> None:
        """See :meth:`Strategy.start_epoch`."""
        self.parameters = [p for _, p in trainable(self.model)]
        self._flags = Flags(self.model)
        forget_frozen(self.model)

    def refresh(self) -> bool:
        """See :meth:`Strategy.refresh`."""
        changed = self._flags.changed()
        if changed:
            self.start_epoch()
        return changed
