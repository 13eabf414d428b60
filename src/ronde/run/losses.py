"""Calls the script's forward and loss functions, and checks their values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ronde.world import LossError

__all__ = ["LossCall"]


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
