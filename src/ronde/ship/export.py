"""Export a model to ONNX, with a symbolic batch."""

from __future__ import annotations

import inspect
import logging
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ronde.introspect.code_owner import is_user_file
from ronde.measure.model_call import ModelCall, inference_copy
from ronde.ship.bundle import ShipError
from ronde.world.paths import need

__all__ = ["export_onnx"]

_MOST_BYTES = 1_800_000_000  # protobuf holds 2 GB; larger models would need files beside it


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before, logging.root.manager.disable = logging.root.manager.disable, logging.CRITICAL
        try:
            yield
        finally:
            logging.root.manager.disable = before


def symbolic_batch(model: nn.Module, call: ModelCall) -> dict[str, Any]:
    """The shapes that torch's exporters are told: of every tensor, the first size is the batch."""
    batch = torch.export.Dim("batch", min=1)
    signature = inspect.signature(model.forward)
    given = signature.bind(*call.args, **call.kwargs).arguments
    shapes = tree_map(lambda v: {0: batch} if isinstance(v, torch.Tensor) else None, dict(given))
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD and name in shapes:
            shapes.update(shapes.pop(name))
    result: dict[str, Any] = shapes
    return result


def export_onnx(model: nn.Module, call: ModelCall, path: Path) -> None:
    """Write a model as ONNX. The batch size is symbolic, the model in evaluation mode.

    Args:
        model: left as it is.
        call: example arguments, of two samples or more.
        path: of the file.

    Raises:
        ShipError: the exporter cannot follow the model, or it fixes the batch size.
    """
    for package in ("onnx", "onnxscript", "onnxruntime"):
        need(package, "ship", "exporting to ONNX")
    tensors = {p.data_ptr(): p for p in model.state_dict().values() if isinstance(p, torch.Tensor)}
    size = sum(p.numel() * p.element_size() for p in tensors.values())
    if size > _MOST_BYTES:
        raise ShipError(
            f"the model has {size / 1e9:.1f} GB of weights; an ONNX file holds "
            f"{_MOST_BYTES / 1e9:.1f} GB. --to torch has no such limit."
        )
    if call.samples < 2:
        raise ShipError("an export needs a batch of two samples or more.")
    dynamic = symbolic_batch(model, call)
    try:
        with _quiet(), torch.no_grad():
            torch.onnx.export(
                inference_copy(model),
                call.args,
                str(path),
                kwargs=call.kwargs,
                dynamo=True,
                dynamic_shapes=dynamic,
                external_data=False,
                verbose=False,
            )
    except Exception as error:
        raise ShipError(f"torch cannot export this model: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """The innermost cause, and the line of the model where it arose."""
    place = ""
    while True:
        for frame in traceback.extract_tb(error.__traceback__):
            if is_user_file(frame.filename):
                place = f" ({Path(frame.filename).name}:{frame.lineno}: {(frame.line or '')[:80]})"
        if error.__cause__ is None:
            break
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[0][:300] + place
