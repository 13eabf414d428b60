"""Samples as bytes without pickle.

A value is a safetensors file: its arrays as bytes, and how they nest as JSON in the header. Only
types that round-trip exactly are accepted: numbers, strings, bytes, NumPy arrays, CPU tensors, and
tuples, named tuples, lists and dicts of those.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save

_RAW, _TREE = b"r", b"s"
_SCALARS = (bool, int, float, str, type(None))
_DTYPES = {
    str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)
}


class CannotEncode(TypeError):
    """The value would not round-trip."""


def _find_class(module: str, name: str) -> type | None:
    """Look up a tuple or dict class: a NamedTuple of a loaded module, or one of Ronde's.

    Its constructor is never called, so a damaged file cannot run code.
    """
    if module not in sys.modules and module.startswith("ronde."):
        importlib.import_module(module)
    kind: Any = sys.modules.get(module)
    for part in name.split("."):
        kind = getattr(kind, part, None)
    if not isinstance(kind, type) or not issubclass(kind, tuple | dict):
        return None
    if module.startswith("ronde."):
        return kind
    if not issubclass(kind, tuple) or not hasattr(kind, "_fields"):
        return None
    return kind if kind.__slots__ == () else None  # type: ignore[attr-defined]


class _Writer:
    """The tree of a value, and its arrays by name."""

    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray] = {}

    def hold(self, value: np.ndarray) -> list[Any]:
        """Keep bytes as they lie in memory: their name, and the dimensions from the outermost.

        An image is often channels × height × width over interleaved pixels, and speed depends on
        keeping that layout. The bytes of an element, its last dimension, stay together: a dimension
        that repeats elements has stride 0.
        """
        last = value.ndim - 1
        order = [*sorted(range(last), key=lambda d: -value.strides[d]), last]
        name = str(len(self.arrays))
        self.arrays[name] = np.ascontiguousarray(value.transpose(order))
        return [name, order]

    def tree(self, value: Any) -> Any:
        kind = type(value)
        if kind in _SCALARS:
            return value
        if kind in (tuple, list):
            return ["t" if kind is tuple else "l", *map(self.tree, value)]
        if kind is dict:
            if any(type(k) not in _SCALARS for k in value):
                raise CannotEncode("a dict whose keys are not numbers or strings")
            return ["d", *([k, self.tree(v)] for k, v in value.items())]
        if kind is bytes:
            return ["b", *self.hold(np.frombuffer(value, np.uint8))]
        if kind is np.ndarray or isinstance(value, np.generic):
            return ["a" if kind is np.ndarray else "n", *self._array(np.asarray(value))]
        if kind is torch.Tensor:
            return ["T", *self._tensor(value)]
        # a NamedTuple, or a row of a table
        is_nested = isinstance(value, tuple | dict)
        if is_nested and _find_class(kind.__module__, kind.__qualname__) is kind:
            plain = dict(value) if isinstance(value, dict) else tuple(value)
            return ["N", kind.__module__, kind.__qualname__, self.tree(plain)]
        raise CannotEncode(f"{kind.__module__}.{kind.__qualname__}")

    def _array(self, value: np.ndarray) -> list[Any]:
        if value.dtype.hasobject:
            raise CannotEncode("a NumPy array of Python objects")
        dtype = value.dtype
        if dtype.metadata or np.dtype(dtype.str) != dtype:  # structured, or another package's
            raise CannotEncode(f"a NumPy array of dtype {dtype}")
        if not dtype.itemsize or any(stride < 0 for stride in value.strides):
            value = value.copy()
        return [dtype.str, *self.hold(value[..., None].view(np.uint8))]

    def _tensor(self, value: torch.Tensor) -> list[Any]:
        if (
            value.device.type != "cpu"
            or value.layout is not torch.strided
            or value.requires_grad
            or value.is_quantized
            or (name := str(value.dtype).removeprefix("torch.")) not in _DTYPES
        ):
            raise CannotEncode(
                f"a tensor on {value.device}, {value.layout}, "
                f"{value.dtype}{', with gradient' if value.requires_grad else ''}"
            )
        plain = value.resolve_conj().resolve_neg()
        return [name, *self.hold(plain.unsqueeze(-1).view(torch.uint8).numpy())]


def encode_sample(value: Any) -> list[bytes | memoryview]:
    """Encode a value as parts to write one after another.

    Args:
        value: a sample.

    Returns:
        list: of buffers; they may share memory with the value.

    Raises:
        CannotEncode: it holds something that would not come back as it was; the type is named.

    Example:
        >>> decode_sample(bytearray(b"".join(encode_sample(("a.jpg", 3, np.arange(2))))))
        ('a.jpg', 3, array([0, 1]))
    """
    if type(value) is bytes:
        return [_RAW, value]
    writer = _Writer()
    try:
        tree = json.dumps(writer.tree(value), separators=(",", ":"))
    except RecursionError:
        raise CannotEncode("a value that contains itself, or is nested too deeply") from None
    return [_TREE, save(writer.arrays, {"tree": tree})]


def _restored(node: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """The value of a tree."""
    if type(node) is not list:
        return node
    letter, *parts = node

    def held(name: str, order: list[int]) -> np.ndarray:
        return arrays[name].transpose([order.index(d) for d in range(len(order))])

    def array(dtype: str, *where: Any) -> np.ndarray:
        return held(*where).view(np.dtype(dtype))[..., 0]

    def tensor(dtype: str, *where: Any) -> torch.Tensor:
        return torch.from_numpy(held(*where)).view(_DTYPES[dtype])[..., 0]

    def named(module: str, name: str, inner: Any) -> Any:
        kind: Any = _find_class(module, name)
        if kind is None:
            raise ValueError(f"{module}.{name} is not there")
        if issubclass(kind, tuple):
            return tuple.__new__(kind, _restored(inner, arrays))
        made = dict.__new__(kind)
        dict.update(made, _restored(inner, arrays))
        return made

    makers: dict[str, Callable[..., Any]] = {
        "t": lambda *parts: tuple(_restored(p, arrays) for p in parts),
        "l": lambda *parts: [_restored(p, arrays) for p in parts],
        "d": lambda *parts: {k: _restored(v, arrays) for k, v in parts},
        "b": lambda name, order: arrays[name].tobytes(),
        "a": array,
        "n": lambda *parts: array(*parts)[()],
        "T": tensor,
        "N": named,
    }
    return makers[letter](*parts)


def decode_sample(data: bytearray | memoryview) -> Any:
    """Decode what :func:`encode_sample` encoded.

    Args:
        data: the parts, joined, writable. Arrays and tensors that come back lie in it: it must not
            be used again.

    Raises:
        ValueError: these bytes are not an encoded value.
    """
    view = memoryview(data)
    kind, view = bytes(view[:1]), view[1:]
    if kind == _RAW:
        return bytes(view)
    if kind != _TREE:
        raise ValueError("not an encoded sample")
    try:
        start = 8 + int.from_bytes(view[:8], "little")
        header = json.loads(bytes(view[8:start]))
        tree = json.loads(header.pop("__metadata__")["tree"])
        arrays = {}
        # Read in place: safetensors' own reader would copy.
        for name, about in header.items():
            first, end = about["data_offsets"]
            part = np.frombuffer(view[start + first : start + end], np.uint8)
            arrays[name] = part.reshape(about["shape"])
        return _restored(tree, arrays)
    except Exception as error:  # NumPy's parser of types alone raises SyntaxError
        raise ValueError(f"not an encoded sample: {error}") from None
