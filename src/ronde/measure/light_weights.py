"""Keep a model small whose work is only counted: initial values of large weights are not drawn.

Memory that nobody wrote to takes no room: the pages of ``torch.empty`` come with the first write.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ronde.measure.model_units import structure
from ronde.profile.monkeypatch import put

_LARGE_BYTES = 4 << 20  # from here on a tensor's values are left out
_KEPT_LAYERS = 2  # of a list of equal ones: the first may be given another input
_FILLS = (torch.Tensor.normal_, torch.Tensor.uniform_)
_INITS = ("trunc_normal_", "orthogonal_")  # they compute with what they have drawn


def _is_large(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.device.type == "cpu"
        and value.numel() * value.element_size() >= _LARGE_BYTES
    )


class NoInitialValues(TorchFunctionMode):
    """Random values are not written to large tensors, while this is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> NoInitialValues:
        self._undo = [put(nn.init, name, _unless_large) for name in _INITS]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for undo in self._undo:
            undo()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        fills = func in _FILLS or getattr(func, "__module__", "") == nn.init.__name__
        if fills and _is_large(filled := args[0] if args else kwargs.get("tensor")):
            return filled
        return func(*args, **(kwargs or {}))


def _unless_large(init: Callable[..., Any]) -> Callable[..., Any]:
    def fill(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return tensor if _is_large(tensor) else init(tensor, *args, **kwargs)

    return fill


@contextlib.contextmanager
def short_lists(model: nn.Module) -> Iterator[dict[str, int]]:
    """Leaves two of each list of equal layers in the model.

    Yields:
        Name of a list -> how many layers it has.
    """
    lengths: dict[str, int] = {}
    whole: list[tuple[nn.Module, dict[str, Any]]] = []
    for name, module in model.named_modules():
        layers = list(module.children())
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(layers) > _KEPT_LAYERS:
            inside = any(name.startswith(f"{outer}.") for outer in lengths)
            nested = all(any(True for _ in layer.children()) for layer in layers)
            if nested and not inside and len({structure(layer) for layer in layers}) == 1:
                lengths[name] = len(layers)
                whole.append((module, module._modules))
    for module, layers_of in whole:
        module._modules = dict(list(layers_of.items())[:_KEPT_LAYERS])
    try:
        yield lengths
    finally:
        for module, layers_of in whole:
            module._modules = layers_of


@contextlib.contextmanager
def small_values(model: nn.Module) -> Iterator[None]:
    """Gives large weights values that hold little memory: no two rows or columns are alike, as the
    trial of a division needs it, but all are windows of one row of random numbers.
    """
    large = [p for p in model.parameters() if _is_large(p) and p.dim() > 1]
    before = [p.data for p in large]
    random = torch.Generator().manual_seed(0)
    for p in large:
        strides = (*([1] * p.dim()),)
        length = sum(p.shape) - p.dim() + 1
        row = torch.randn(length, generator=random) / p.shape[-1] ** 0.5
        p.data = row.to(p.dtype).as_strided(p.shape, strides)
    try:
        yield
    finally:
        for p, data in zip(large, before, strict=True):
            p.data = data
