"""Samples as bytes without pickle, because a cache file may come from someone else.

A value is a small JSON description plus raw buffers. Only types that round-trip exactly are
accepted: numbers, strings, bytes, NumPy arrays, CPU tensors, plain Pillow images, and tuples, named
tuples, lists and dicts of those.
"""

from __future__ import annotations

import importlib
import json
import struct
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

_ALIGN = 64  # of each buffer inside its record, so that numbers stand where their type may stand
_LENGTH = struct.Struct("<I")
_RAW, _TREE = b"r", b"t"
_SCALARS = (bool, int, float, str, type(None))
_DTYPES = {
    str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)
}
_IMAGE_MODES = ("L", "RGB", "RGBA", "CMYK", "YCbCr", "I", "F", "LA", "I;16")


class CannotEncode(TypeError):
    """The value would not round-trip."""


def _find_class(module: str, name: str) -> type | None:
    """Look up a tuple or dict class: a NamedTuple of a loaded module, or one of Ronde's.

    Its constructor is never called, so a damaged file cannot run code.
    """
    if module not in sys.modules and module.startswith("ronde."):
        importlib.import_module(module)
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type) or not issubclass(found, tuple | dict):
        return None
    if module.startswith("ronde."):
        return found
    if not issubclass(found, tuple) or not hasattr(found, "_fields"):
        return None
    return found if found.__slots__ == () else None  # type: ignore[attr-defined]


class _Writer:
    def __init__(self) -> None:
        self.parts: list[bytes | memoryview] = []
        self.end = 0

    def buffer(self, data: bytes | memoryview) -> int:
        """Reserve a place for these bytes."""
        gap = -self.end % _ALIGN
        if gap:
            self.parts.append(bytes(gap))
        start = self.end + gap
        self.parts.append(data)
        self.end = start + len(data)
        return start

    def tree(self, value: Any) -> Any:
        kind = type(value)
        if kind in _SCALARS:
            return value
        if kind in (tuple, list):
            return ["t" if kind is tuple else "l", *(self.tree(v) for v in value)]
        if kind is dict:
            if any(type(k) not in _SCALARS for k in value):
                raise CannotEncode("a dict whose keys are not numbers or strings")
            return ["d", *([k, self.tree(v)] for k, v in value.items())]
        if kind is bytes:
            return ["b", self.buffer(value), len(value)]
        if kind is np.ndarray:
            return self._array("a", value)
        if isinstance(value, np.generic):
            return self._array("n", np.asarray(value))
        if kind is torch.Tensor:
            return self._tensor(value)
        # a NamedTuple, or a row of a table
        if isinstance(value, tuple) and _find_class(kind.__module__, kind.__qualname__) is kind:
            return ["N", kind.__module__, kind.__qualname__, *(self.tree(v) for v in value)]
        if isinstance(value, dict) and _find_class(kind.__module__, kind.__qualname__) is kind:
            return ["D", kind.__module__, kind.__qualname__, *self.tree(dict(value))[1:]]
        image = sys.modules.get("PIL.Image")
        if image is not None and kind is image.Image and value.mode in _IMAGE_MODES:
            data = value.tobytes()
            return [
                "p",
                value.mode,
                *value.size,
                self.buffer(data),
                len(data),
                self.tree(dict(value.info)),
            ]
        raise CannotEncode(f"{kind.__module__}.{kind.__qualname__}")

    def _array(self, letter: str, value: np.ndarray) -> Any:
        if value.dtype.hasobject:
            raise CannotEncode("a NumPy array of Python objects")
        if (
            value.dtype.fields is not None
            or value.dtype.subdtype is not None
            or value.dtype.metadata
        ):
            raise CannotEncode(f"a NumPy array of dtype {value.dtype}")
        order = _order(value.ndim, value.strides)
        flat = np.ascontiguousarray(value.transpose(order) if order else value).reshape(-1)
        data = flat.view(np.uint8).data if flat.size and value.dtype.itemsize else b""  # type: ignore[arg-type]
        return [
            letter,
            value.dtype.str,
            list(value.shape),
            self.buffer(data),
            *([order] if order else []),
        ]

    def _tensor(self, value: torch.Tensor) -> Any:
        name = str(value.dtype).removeprefix("torch.")
        if (
            value.device.type != "cpu"
            or value.layout is not torch.strided
            or value.requires_grad
            or value.is_quantized
            or name not in _DTYPES
        ):
            raise CannotEncode(
                f"a tensor on {value.device}, {value.layout}, "
                f"{name}{', with gradient' if value.requires_grad else ''}"
            )
        order = _order(value.ndim, value.stride())
        plain = value.resolve_conj().resolve_neg()
        flat = (plain.permute(order) if order else plain).contiguous().reshape(-1)
        data: bytes | memoryview = flat.view(torch.uint8).numpy().data if flat.numel() else b""
        return ["T", name, list(value.shape), self.buffer(data), *([order] if order else [])]


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
        text = json.dumps(writer.tree(value), separators=(",", ":")).encode()
    except RecursionError:
        raise CannotEncode("a value that contains itself, or is nested too deeply") from None
    head = _TREE + _LENGTH.pack(len(text)) + text
    return [head, bytes(-len(head) % _ALIGN), *writer.parts]


class _Reader:
    def __init__(self, data: memoryview) -> None:
        self.data = data

    def buffer(self, start: int, size: int) -> memoryview:
        if start < 0 or size < 0 or start + size > len(self.data):
            raise ValueError("a buffer outside its record")
        return self.data[start : start + size]

    def tree(self, node: Any) -> Any:
        if type(node) is not list:
            return node
        letter = node[0]
        if letter == "t":
            return tuple([self.tree(n) for n in node[1:]])
        if letter == "l":
            return [self.tree(n) for n in node[1:]]
        if letter == "d":
            return {k: self.tree(v) for k, v in node[1:]}
        if letter == "b":
            return bytes(self.buffer(node[1], node[2]))
        if letter in ("N", "D"):
            kind = _find_class(node[1], node[2])
            if kind is None:
                raise ValueError(f"{node[1]}.{node[2]} is not there")
            if letter == "N":
                return tuple.__new__(kind, [self.tree(n) for n in node[3:]])
            named: dict[Any, Any] = dict.__new__(kind)
            dict.update(named, {k: self.tree(v) for k, v in node[3:]})
            return named
        if letter in ("a", "n"):
            dtype = np.dtype(node[1])
            count = _count(node[2])
            if dtype.hasobject:
                raise ValueError("a NumPy array of Python objects")
            # Never read-only, and never shared: an augmentation may work in place.
            shape, order = _memory_shape(node)
            array = np.ndarray(
                shape,
                dtype,
                self.buffer(node[3], count * dtype.itemsize) if count * dtype.itemsize else None,
            )
            if order:
                array = array.transpose(_undone(order))
            return array[()] if letter == "n" else array
        if letter == "T":
            made = _DTYPES[node[1]]
            count = _count(node[2])
            if not count:
                return torch.empty(node[2], dtype=made)
            shape, order = _memory_shape(node)
            tensor = torch.frombuffer(
                self.buffer(node[3], count * made.itemsize), dtype=made, count=count
            ).reshape(shape)
            return tensor.permute(_undone(order)) if order else tensor
        if letter == "p":
            from PIL import Image

            image = Image.frombytes(node[1], (node[2], node[3]), self.buffer(node[4], node[5]))
            image.info = self.tree(node[6])
            return image
        raise ValueError(f"unknown part {letter!r}")


def _order(dimensions: int, strides: Sequence[int]) -> list[int]:
    """Dimensions from outermost to innermost in memory; empty if that is their order.

    An image is often channels × height × width over interleaved pixels, and speed depends on
    keeping that layout.
    """
    own = list(range(dimensions))
    found = sorted(own, key=lambda d: -abs(strides[d]))
    return [] if found == own else found


def _undone(order: list[int]) -> list[int]:
    found = [0] * len(order)
    for place, dimension in enumerate(order):
        found[dimension] = place
    return found


def _memory_shape(node: list[Any]) -> tuple[list[int], list[int]]:
    """The shape in memory, and the order of its dimensions there."""
    order: list[int] = node[4] if len(node) > 4 else []
    if order and sorted(order) != list(range(len(node[2]))):
        raise ValueError("an invalid order of dimensions")
    return [node[2][d] for d in order] if order else node[2], order


def _count(shape: list[int]) -> int:
    count = 1
    for size in shape:
        if type(size) is not int or size < 0:
            raise ValueError("an invalid shape")
        count *= size
    return count


def decode_sample(data: bytearray | memoryview) -> Any:
    """Decode what :func:`encode_sample` encoded.

    Args:
        data: the parts, joined, writable. Arrays and tensors that come back lie in it: it must not
            be used again.

    Raises:
        ValueError: these bytes are not an encoded value.
    """
    view = memoryview(data)
    kind = bytes(view[:1])
    if kind == _RAW:
        return bytes(view[1:])
    if kind != _TREE:
        raise ValueError("not an encoded sample")
    try:
        (size,) = _LENGTH.unpack_from(view, 1)
        start = 1 + _LENGTH.size
        node = json.loads(bytes(view[start : start + size]))
        return _Reader(view[start + size + (-(start + size) % _ALIGN) :]).tree(node)
    except Exception as error:  # NumPy's parser of types alone raises SyntaxError
        raise ValueError(f"not an encoded sample: {error}") from None
