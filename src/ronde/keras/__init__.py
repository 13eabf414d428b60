"""Keras 3 models on the torch backend, as torch modules.

Offers :func:`adopt`, which ``ronde.distribute`` calls where the model is a Keras layer, and
:func:`is_keras`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

__all__ = ["adopt", "is_keras"]


def is_keras(model: Any) -> bool:
    """Whether a model is a Keras layer; Keras is not imported to find out."""
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(model, keras.Layer)


def adopt(
    model: Any, optimizer: Any, loss: Callable[..., Any], *, reduction: str, batch: str, device: str
) -> tuple[Any, Callable[..., Any]]:
    """Make a Keras model a torch module, in place, and its optimizer a torch optimizer.

    Args:
        model: a built Keras model.
        optimizer: a Keras optimizer without state, or a torch one over the model's parameters.
        loss: a Keras loss, or ``loss(output, target)``.
        reduction, batch: ``loss_reduction`` and ``batch`` of ``ronde.distribute``.
        device: this worker's device, where Keras makes its tensors from now on.

    Returns:
        tuple: the torch optimizer and ``loss(output, target)``, which adds ``model.losses``.

    Raises:
        ArgumentError: Keras runs on another backend, or something cannot be carried over.
    """
    from ronde.keras.keras_loss import torch_loss
    from ronde.keras.keras_optimizer import torch_optimizer
    from ronde.keras.owned_variables import check_backend, own, use_device

    check_backend()
    own(model)
    use_device(model, device)
    return torch_optimizer(optimizer, model, batch), torch_loss(loss, model, reduction)
