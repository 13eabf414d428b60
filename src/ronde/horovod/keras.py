"""Horovod's interface for Keras, on its torch backend: ``import ronde.horovod.keras as hvd``."""

# ruff: noqa: E402, F401, F403
from __future__ import annotations

import os
import sys
from typing import Any

# Keras reads the variable once, when it is imported.
_backend = os.environ.setdefault("KERAS_BACKEND", "torch")
if "keras" in sys.modules:
    _backend = sys.modules["keras"].backend.backend()
if _backend != "torch":
    raise ImportError(
        f"horovod.keras runs on Keras's torch backend; this process uses {_backend!r}. Set "
        "KERAS_BACKEND=torch, or use ronde run --tensorflow."
    )
try:
    import keras
except ImportError as error:
    raise ImportError(
        f"horovod.keras needs Keras 3 (pip install 'ronde[keras]'): {error}"
    ) from error

import numpy
import torch

from ronde.horovod import keras_callbacks as callbacks
from ronde.horovod import lifecycle
from ronde.horovod import torch as _torch
from ronde.horovod.compression import Compression
from ronde.horovod.lifecycle import *
from ronde.horovod.torch import Adasum, Average, Max, Min, Product, Sum
from ronde.world import ArgumentError

_IGNORED = {
    "device_dense",
    "device_sparse",
    "name",
    "num_groups",
    "groups",
    "scale_local_gradients",
    "sparse_as_dense",
}


def init(*args: Any, **options: Any) -> None:  # type: ignore[no-redef]
    """Initialize the bridge; Keras uses the GPU of this process from now on."""
    lifecycle.init(*args, **options)
    if torch.cuda.is_available():
        torch.cuda.set_device(lifecycle.local_rank() % torch.cuda.device_count())


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    backward_passes_per_step: int = 1,
    process_set: Any = lifecycle.global_process_set,
    **options: Any,
) -> Any:
    """Let a Keras optimizer average the gradients of all ranks before each update.

    Args:
        optimizer: a Keras optimizer; it stays what it is, so that models are saved as without
            Horovod.
        compression, op, gradient_predivide_factor, process_set: as for ``hvd.allreduce``.
        backward_passes_per_step: 1; Keras accumulates gradients itself.
        options: Horovod's others, which have no meaning here.

    Returns:
        The same optimizer.

    Raises:
        ArgumentError: it is no Keras optimizer, or an option is refused.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ArgumentError(
            f"hvd.DistributedOptimizer takes a Keras optimizer, not {type(optimizer).__name__}."
        )
    if keras.config.dtype_policy().name == "mixed_float16":
        raise ArgumentError(
            "mixed_float16: each rank would skip steps by itself. Use mixed_bfloat16."
        )
    if backward_passes_per_step != 1:
        raise ArgumentError(
            f"backward_passes_per_step={backward_passes_per_step}: give the optimizer "
            f"gradient_accumulation_steps={backward_passes_per_step} instead."
        )
    if unknown := set(options) - _IGNORED - {"average_aggregated_gradients"}:
        raise TypeError(f"hvd.DistributedOptimizer has no argument {sorted(unknown)[0]!r}")
    if hasattr(optimizer, "_horovod"):
        return optimizer
    apply = optimizer.apply
    scale = {"op": op, "process_set": process_set}
    if gradient_predivide_factor != 1.0:
        size = process_set.size() or 1
        scale |= {
            "op": Sum,
            "prescale_factor": 1.0 / gradient_predivide_factor,
            "postscale_factor": gradient_predivide_factor / size,
        }

    def averaged(grads: Any, trainable_variables: Any = None) -> Any:
        grads = list(grads)
        # Layers that the loss does not reach have None, on all ranks alike.
        there = [i for i, gradient in enumerate(grads) if gradient is not None]
        if lifecycle.size() > 1 and there:
            packed = [compression.compress(grads[i]) for i in there]
            sent = [tensor for tensor, _ in packed]
            names = f"keras.{optimizer.name}.{len(sent)} gradients"
            for i, mean, (_, context) in zip(
                there, _torch.grouped_allreduce(sent, name=names, **scale), packed, strict=True
            ):
                grads[i] = compression.decompress(mean, context)
        return apply(grads, trainable_variables)

    optimizer.apply = averaged  # of this object: a class of ours would be saved with the model
    optimizer._horovod = True
    return optimizer


def allreduce(value: Any, name: str | None = None, average: bool = True, **options: Any) -> Any:
    """The average, or sum, of a number or an array over all ranks, as NumPy has it."""
    options.setdefault("op", Average if average else Sum)
    tensor = _tensor(value)
    if not tensor.is_floating_point() and options["op"] is Average:
        tensor = tensor.double()  # the mean of whole numbers is none
    return _plain(_torch.allreduce(tensor, name=name, **options))


def allgather(value: Any, name: str | None = None, **options: Any) -> Any:
    """The arrays of all ranks, one after the other, as NumPy has it."""
    return _plain(_torch.allgather(_tensor(value), name=name, **options))


def broadcast(value: Any, root_rank: int, name: str | None = None, **options: Any) -> Any:
    """A number or an array of one rank, on all, as NumPy has it."""
    return _plain(_torch.broadcast(_tensor(value), root_rank, name=name, **options))


def broadcast_global_variables(root_rank: int) -> None:
    """Refused: Keras 3 has no list of all variables.

    Raises:
        NotImplementedError: always, with what to use.
    """
    raise NotImplementedError(
        "Keras 3 has no global variables: give fit the callback "
        f"hvd.callbacks.BroadcastGlobalVariablesCallback({root_rank})."
    )


def load_distributed(
    filepath: Any,
    custom_optimizers: Any = None,
    custom_objects: Any = None,
    compression: Any = Compression.none,
) -> Any:
    """Load a Keras model whose optimizer averages gradients, as `DistributedOptimizer` makes it.

    Args:
        filepath: a ``.keras`` or ``.h5`` file.
        custom_optimizers: classes of optimizers that Keras does not know.
        custom_objects: name -> class, as in ``keras.models.load_model``.
        compression: of the gradients.
    """
    known = {each.__name__: each for each in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**known, **(custom_objects or {})})
    if getattr(model, "optimizer", None) is not None:
        DistributedOptimizer(model.optimizer, compression=compression)
    return model


load_model = load_distributed  # Horovod's name for it


def _tensor(value: Any) -> torch.Tensor:
    return torch.as_tensor(numpy.asarray(keras.ops.convert_to_numpy(value)))


def _plain(tensor: torch.Tensor) -> Any:
    array = tensor.cpu().numpy()
    return array if array.ndim else array[()]
