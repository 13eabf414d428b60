"""Export a model to ONNX, with a symbolic batch."""

from __future__ import annotations

import inspect
import logging
import re
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


def export_program(model: nn.Module, call: ModelCall) -> torch.export.ExportedProgram:
    """A model as a graph of torch, in evaluation mode; each tensor's first size is the batch, and
    symbolic.
    """
    model = inference_copy(model)
    _name_keywords(model, call)
    batch = torch.export.Dim("batch", min=1)
    given = inspect.signature(model.forward).bind(*call.args, **call.kwargs).arguments
    shapes = tree_map(lambda v: {0: batch} if isinstance(v, torch.Tensor) else None, dict(given))
    return torch.export.export(model, call.args, call.kwargs, dynamic_shapes=shapes)


def _name_keywords(model: nn.Module, call: ModelCall) -> None:
    """Show the ``**kwargs`` of a model's ``forward`` as arguments with the names of the call:
    torch 2.13 exports no other.
    """
    forward, signature = model.forward, inspect.signature(model.forward)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    more = [n for n in call.kwargs if n not in {p.name for p in own}]
    named = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in more]

    def explicit(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    if named:
        explicit.__signature__ = signature.replace(parameters=own + named)  # type: ignore[attr-defined]
        model.forward = explicit


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
    if call.samples < 2:  # torch takes a size of 1 for a constant
        raise ShipError("an export needs a batch of two samples or more.")
    try:
        with _quiet(), torch.no_grad():
            program = export_program(model, call)
            torch.onnx.export(program, (), str(path), external_data=False, verbose=False)
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
    if fixed := re.search(r"specialized it to be a constant \((\d+)\)", str(error)):
        return f"its code takes a batch of {fixed[1]} only."
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[0][:300] + place
