"""Values of any kind taken apart and put together again: the tensors in arguments and results."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

__all__ = ["Opaque", "build", "flatten", "tensors_in"]


class Opaque(Exception):
    """A value holds tensors where nobody can get at them."""


def flatten(value: Any, leaves: list[Any]) -> Any:
    """Take a value apart: tensors and constants go to ``leaves``, the answer says how to put it together again."""
    if isinstance(value, torch.Tensor) or value is None or isinstance(value, bool | int | float | str | bytes):
        leaves.append(value)
        return None
    if isinstance(value, PackedSequence):
        return (PackedSequence, [flatten(v, leaves) for v in value])
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return (type(value), [flatten(v, leaves) for v in value])
    if type(value) in (list, tuple):
        return (type(value), [flatten(v, leaves) for v in value])
    if type(value) is dict:
        return (dict, list(value), [flatten(v, leaves) for v in value.values()])
    if pytree.is_structseq(value) or type(value) not in pytree.SUPPORTED_NODES:
        if type(value).__module__.startswith("torch.return_types"):
            return (type(value), [flatten(v, leaves) for v in value])
        if _holds_tensors(value):
            raise Opaque
        leaves.append(value)
        return None
    parts, spec = pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)
    return ((type(value), spec), [flatten(v, leaves) for v in parts])


def _holds_tensors(value: Any) -> bool:
    inside = list(getattr(value, "__dict__", {}).values())
    if isinstance(value, list | tuple | set):
        inside += list(value)
    elif isinstance(value, Mapping):
        inside += list(value.values())
    return any(isinstance(v, torch.Tensor) or (isinstance(v, list | tuple | dict) and bool(tensors_in(v))) for v in inside)


def build(shape: Any, leaves: Iterator[Any]) -> Any:
    """Put together what :func:`flatten` took apart."""
    if shape is None:
        return next(leaves)
    kind = shape[0]
    if kind is dict:
        return dict(zip(shape[1], [build(s, leaves) for s in shape[2]], strict=True))
    parts = [build(s, leaves) for s in shape[1]]
    if type(kind) is tuple:
        return pytree.SUPPORTED_NODES[kind[0]].unflatten_fn(parts, kind[1])
    if kind is PackedSequence or hasattr(kind, "_fields"):
        return kind(*parts)
    return kind(parts)


def tensors_in(value: Any, attributes: bool = False) -> list[torch.Tensor]:
    """Every tensor in an argument or a result, as far as can be seen.

    Args:
        value: of any kind.
        attributes: look at what any object has, too: a batch may be of a class of the script's own.

    Example:
        >>> [t.shape[0] for t in tensors_in({"a": [torch.zeros(2)], "b": (1, torch.zeros(3))})]
        [2, 3]
    """
    found: list[torch.Tensor] = []
    _gather(value, found, attributes, [])
    return found


def _gather(value: Any, found: list[torch.Tensor], attributes: bool, within: list[Any]) -> None:
    """``within``: objects that are being looked into, which may lead back to themselves."""
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif value is None or isinstance(value, bool | int | float | str | bytes | torch.dtype | torch.device | type):
        pass
    elif isinstance(value, tuple | list | set):
        for v in value:
            _gather(v, found, attributes, within)
    elif isinstance(value, Mapping):
        for v in value.values():
            _gather(v, found, attributes, within)
    elif isinstance(value, slice):
        for v in (value.start, value.stop, value.step):
            _gather(v, found, attributes, within)
    elif type(value) in pytree.SUPPORTED_NODES:
        for v in pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)[0]:
            _gather(v, found, attributes, within)
    elif (dataclasses.is_dataclass(value) or attributes) and not any(value is outer for outer in within):
        for v in _held(value, attributes):
            _gather(v, found, attributes, [*within, value])


def _held(value: Any, attributes: bool) -> list[Any]:
    """What a dataclass, or any other object that is data, has as attributes."""
    if dataclasses.is_dataclass(value):
        return [getattr(value, f.name, None) for f in dataclasses.fields(value)]
    if not attributes or callable(value) or isinstance(value, ModuleType):
        return []
    slots = [getattr(value, name, None) for kind in type(value).__mro__ for name in _names(kind)]
    return [*vars(value).values(), *slots] if hasattr(value, "__dict__") else slots


def _names(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)
