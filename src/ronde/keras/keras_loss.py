"""Keras losses as ``loss(output, target)``, and the losses that a model's layers add."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

import keras
from keras import ops
from ronde.world import ArgumentError

__all__ = ["regularized", "torch_loss"]


def torch_loss(loss: Any, model: Any, reduction: str) -> Callable[..., Any]:
    """``loss(output, target)`` of a Keras loss or of the script's own, plus ``model.losses``.

    Raises:
        ArgumentError: a reduction that cannot be summed over workers.
    """
    if isinstance(loss, keras.losses.Loss):
        loss = _of_class(loss, reduction)
    elif inspect.isfunction(loss) and loss.__module__.startswith("keras."):
        loss = _of_function(loss)
    if reduction == "sum" and regularized(model):
        raise ArgumentError(
            f"loss_reduction='sum': {regularized(model)[0]!r} has a regularizer, which Keras adds "
            "to a batch's loss once. Use a loss that is a mean."
        )

    layers, always = list(model._flatten_layers()), bool(regularized(model))

    def total(*arguments: Any) -> Any:
        value = loss(*arguments)
        # model.losses looks at every variable
        added = model.losses if always or any(layer._losses for layer in layers) else []
        if not added or not isinstance(value, torch.Tensor | tuple):
            return value
        extra = sum(added[1:], added[0])
        if isinstance(value, tuple):
            own = [layer.name for layer in layers if layer._losses]
            if own and vars(model).get("_ronde_shares"):
                raise ArgumentError(
                    f"the Keras layer {own[0]!r} adds its own loss (activity_regularizer or "
                    "add_loss), a mean over samples, but the training loss is a mean over weights "
                    "or unmasked positions: shares of a batch cannot be combined exactly. Train "
                    "on one worker without micro_batch, or drop the mask, the weights, or the "
                    "layer's loss."
                )
            return value[0] + extra * value[1], value[1]
        return value + extra

    return total


def regularized(model: Any) -> list[str]:
    """Names of the layers whose weights or outputs are regularized."""
    layers = list(model._flatten_layers())
    return [
        layer.name
        for layer in layers
        if layer.activity_regularizer is not None
        or any(v.regularizer is not None for v in layer._trainable_variables)
    ]


def _of_class(loss: Any, reduction: str) -> Callable[..., Any]:
    fine = "sum" if reduction == "sum" else "sum_over_batch_size"
    if loss.reduction not in (fine, "mean" if fine != "sum" else fine):
        raise ArgumentError(
            f"loss={type(loss).__name__}(reduction={loss.reduction!r}): expected {fine!r}"
            + (" without loss_reduction='sum'." if fine == "sum" else ".")
        )

    def call(output: Any, target: Any) -> Any:
        mask = keras.src.backend.get_keras_mask(output)
        if mask is None or reduction == "sum":
            return loss(target, output)
        wide = ops.convert_to_tensor(output, dtype=loss.dtype)
        losses = loss.call(ops.convert_to_tensor(target, dtype=loss.dtype), wide)
        weight = ops.cast(mask, losses.dtype)
        return (losses * weight).sum(), weight.sum()

    return call


def _of_function(loss: Callable[..., Any]) -> Callable[..., Any]:
    return lambda output, target: ops.mean(loss(target, output))
