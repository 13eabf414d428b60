"""Keras 3 models on the torch backend, as torch modules.

Offers :func:`fit`, and for ``ronde.distribute`` :func:`is_keras` and :func:`adopt_keras`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["adopt_keras", "fit", "is_keras"]


def is_keras(model: Any) -> bool:
    """Whether a model is a Keras layer; Keras is not imported to find out."""
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(model, keras.Layer)


def adopt_keras(
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


def fit(
    model: Any,
    x: Any = None,
    y: Any = None,
    *,
    batch_size: int | None = None,
    epochs: int = 1,
    callbacks: Any = None,
    validation_data: Any = None,
    shuffle: bool | None = None,
    **options: Any,
) -> Any:
    """Train a compiled Keras model as ``Model.fit`` does, on one device or on many.

    Args:
        model: a built and compiled Keras model, with one loss; its metrics are means.
        x: samples, an array or a tensor, or a torch Dataset or DataLoader of ``(input, target)``.
        y: targets, if ``x`` is an array.
        batch_size: global samples a step; 32 unless a DataLoader has one.
        epochs: of the whole training, with those before a resume.
        callbacks: ``EarlyStopping``, ``ModelCheckpoint``, ``LearningRateScheduler``, and
            ``TensorBoard`` of Keras.
        validation_data: ``(x, y)``, or a torch Dataset or DataLoader: evaluated after each epoch,
            with the compiled metrics.
        shuffle: see ``ronde.distribute``.
        options: of ``ronde.distribute``: ``plan``, ``sync_batchnorm``, ``precision``, …

    Returns:
        keras.callbacks.History: ``history.history`` has ``loss``, ``val_loss``, and the metrics by
        epoch; ``history.run`` is the :class:`ronde.Run`.

    Raises:
        ArgumentError: an argument, a callback, a loss, or a metric is not supported; it is named.

    Example:
        >>> model.compile("adam", "mse")  # doctest: +SKIP
        >>> history = ronde.keras.fit(model, x, y, epochs=3)  # doctest: +SKIP
    """
    run: Any = importlib.import_module("ronde.run.keras_fit")  # a room above
    return run.fit_keras(
        model,
        x,
        y,
        batch_size=batch_size,
        epochs=epochs,
        callbacks=callbacks,
        validation_data=validation_data,
        shuffle=shuffle,
        options=options,
    )
