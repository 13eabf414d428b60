"""Keras's BatchNormalization over the samples of all workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import keras
from keras import ops
from ronde.world import ArgumentError

__all__ = ["make_synchronizable"]

Total = Callable[[torch.Tensor], torch.Tensor]


def make_synchronizable(layer: Any) -> None:
    """Let ``parallel.batchnorm`` find a batch normalization, and give it sums over workers."""
    if isinstance(layer, keras.layers.BatchNormalization):
        layer.synchronized = False  # torch's backend raises where it is set; the plan says it

        def normalize_over(total_of: Total, weight: Callable[[], float]) -> None:
            vars(layer)["_moments"] = lambda x, mask: _moments(layer, x, mask, total_of, weight())

        vars(layer)["normalize_over"] = normalize_over


def _moments(
    layer: Any, x: torch.Tensor, mask: Any, total_of: Total, weight: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance over all workers' samples, in two passes; shape: the channels."""
    if layer.renorm:
        raise ArgumentError(
            f"{layer.name!r}: BatchNormalization(renorm=True) cannot be synchronized: it corrects "
            "by statistics of one worker. Leave renorm or sync_batchnorm out."
        )
    axes = layer._reduction_axes
    keep = (
        torch.ones_like(x) if mask is None else ops.cast(mask, x.dtype).unsqueeze(-1).expand_as(x)
    )
    keep = keep * weight
    count = keep.sum(axes)
    sums = total_of(torch.cat([(x * keep).sum(axes), count]))
    total, n = sums[: len(count)], sums[len(count) :].detach()
    n = n if mask is None else n + keras.backend.epsilon()  # as Keras's own masked moments
    mean = total / n
    shape = [1] * x.dim()
    shape[layer.axis] = -1
    centred = x - mean.view(shape)
    variance = total_of((centred * centred * keep).sum(axes)) / n
    return mean, variance
