"""Export a model to ONNX, with a symbolic batch."""

from __future__ import annotations

import copy
import inspect
import logging
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only

from ronde.introspect.code_owner import is_user_file
from ronde.ship.bundle import ShipError
from ronde.world.paths import need

__all__ = ["ModelCall", "call_of", "export_onnx"]

_MOST_BYTES = 1_800_000_000  # protobuf holds 2 GB; larger models would need files beside it


@dataclass(frozen=True)
class ModelCall:
    """The arguments of one forward pass.

    Attributes:
        args: positional.
        kwargs: by name.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """In the order in which an export names them."""
        leaves, _ = tree_flatten((self.args, self.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    @property
    def samples(self) -> int:
        """Of the batch: the first size of every tensor.

        Raises:
            ShipError: they differ.
        """
        sizes = {t.shape[0] if t.dim() else 0 for t in self.tensors}
        if len(sizes) != 1 or 0 in sizes:
            raise ShipError(
                "the model's inputs have no common batch: their first sizes are "
                f"{', '.join(map(str, sorted(sizes)))}."
            )
        return sizes.pop()

    def rows(self, low: int, high: int) -> ModelCall:
        """Some samples of the batch."""
        args, kwargs = tree_map_only(torch.Tensor, lambda t: t[low:high], (self.args, self.kwargs))
        return ModelCall(args, kwargs)

    def double(self) -> ModelCall:
        """In float64."""

        def wide(t: torch.Tensor) -> torch.Tensor:
            return t.double() if t.is_floating_point() else t

        args, kwargs = tree_map_only(torch.Tensor, wide, (self.args, self.kwargs))
        return ModelCall(args, kwargs)


def call_of(model: nn.Module, use: Callable[[nn.Module], Any]) -> ModelCall:
    """The arguments with which a script calls its model.

    Args:
        use: calls it, once or more: the first call counts.

    Raises:
        ShipError: it does not.
    """
    calls: list[ModelCall] = []

    def seen(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        args, kwargs = tree_map_only(torch.Tensor, lambda t: t.detach().clone(), (args, kwargs))
        calls.append(ModelCall(args, kwargs))

    handle = model.register_forward_pre_hook(seen, with_kwargs=True)
    try:
        with torch.no_grad():
            use(model)
    finally:
        handle.remove()
    if not calls:
        raise ShipError("the script computes its loss without calling the model: nothing to ship.")
    return calls[0]


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before, logging.root.manager.disable = logging.root.manager.disable, logging.CRITICAL
        try:
            yield
        finally:
            logging.root.manager.disable = before


def inference_copy(model: nn.Module) -> nn.Module:
    """A copy on the CPU, in evaluation mode."""
    return copy.deepcopy(model).cpu().eval()


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
    size = sum(p.numel() * p.element_size() for p in model.state_dict().values())
    if size > _MOST_BYTES:
        raise ShipError(
            f"the model has {size / 1e9:.1f} GB of weights; an ONNX file holds "
            f"{_MOST_BYTES / 1e9:.1f} GB. --to torch has no such limit."
        )
    if call.samples < 2:
        raise ShipError("an export needs a batch of two samples or more.")
    batch = torch.export.Dim("batch", min=1)
    args, kwargs = tree_map(
        lambda v: {0: batch} if isinstance(v, torch.Tensor) else None, (call.args, call.kwargs)
    )
    parameters = inspect.signature(model.forward).parameters.values()
    names = [p.name for p in parameters]
    starred = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)
    dynamic = {starred: args} if starred else dict(zip(names, args, strict=False))
    dynamic.update(kwargs)
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
