"""Is a data set still what it was? Loading processes that stay have a copy of it: if the script changes its own, they are started anew."""

from __future__ import annotations

import ctypes
import datetime
import decimal
import enum
import functools
import logging
import mmap
import pathlib
import random
import re
import threading
import uuid
from collections import deque
from collections.abc import Iterable, Iterator
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import numpy as np
import torch

from ronde.feed.arena import Arena
from ronde.feed.found import _users, _vars
from ronde.feed.sources import ArraySource, BaseSource, BytesCache, DatasetSource, Store

__all__ = ["Mark", "held_arrays", "mark"]

_MOST = 5000  # objects
_FEW = 64  # items of a container that are looked into whatever they are; more must be plain
_LONG = 1 << 22  # items: a second and a half for each million
_LARGE = 1 << 28  # bytes of all arrays
_HEAP = 1 << 9  # of a type's flags
_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, range, enum.Enum, re.Pattern, np.dtype, np.generic, torch.dtype, torch.device),
    *(pathlib.PurePath, datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, uuid.UUID, type(Ellipsis), torch.Size),
)
_STATELESS = (
    *(type(threading.Lock()), type(threading.RLock()), BuiltinFunctionType, type(str.join), type(object.__init__), logging.Logger),
    *(Arena, BytesCache, Store),
)
_GENERATORS = (torch.Generator, np.random.Generator, np.random.BitGenerator, np.random.RandomState, random.Random)
_GLOBAL = (getattr(random.uniform, "__self__", None), getattr(np.random.rand, "__self__", None), torch.default_generator)
_INNER = ("data", "dataset", "_dataset", "source", "_source")


class Mark:
    """What a data set looked like at one moment. Marks are equal where nothing is seen to have changed.

    Attributes:
        shared: whether memory that it holds is shared between processes: a ``multiprocessing.Value`` that tells loading processes the epoch, a
            tensor or array in shared memory, a mapped file.
    """

    def __init__(self, seen: list[Any], held: list[Any]) -> None:
        self._seen = seen
        self._held = held  # else another object might get the number of one that is gone
        self.shared = any(map(_is_shared, held))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mark) and self._seen == other._seen

    __hash__ = None  # type: ignore[assignment]


def mark(dataset: Any) -> Mark | None:
    """A mark of a data set and of all that it is made of: attributes, what containers hold, variables that its functions read.

    None where that cannot be told: it holds what cannot be looked into (an object of a library written in C), or very much.

    Example:
        >>> class Data:
        ...     strength = 1.0
        >>> data = Data()
        >>> before = mark(data)
        >>> same = before == mark(data)
        >>> data.strength = 2.0
        >>> same, before == mark(data)
        (True, False)
    """
    look = _Look()
    try:
        return Mark(look.seen, list(look.held.values())) if look.at(dataset) else None
    except Exception:  # it changes while it is looked at, or stands in for something else and may raise anything
        return None


class _Look:
    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.held: dict[int, Any] = {}
        self.room = _LARGE

    def at(self, dataset: Any) -> bool:
        """Look at all of it; false where something cannot be looked into."""
        queue: deque[Any] = deque([dataset])
        while queue:
            one = queue.popleft()
            if issubclass(type(one), _PLAIN):
                self.seen.append(one)
                continue
            self.seen.append(id(one))
            if id(one) in self.held:
                continue
            self.held[id(one)] = one
            inner = self.inside(one) if len(self.held) <= _MOST else None
            if inner is None:
                return False
            queue.extend(inner)
        return True

    def inside(self, one: Any) -> Iterable[Any] | None:
        """What is to be looked at next; None where an object cannot be looked into."""
        kind = type(one)
        if issubclass(kind, torch.Tensor):
            self.seen += [one._version, tuple(one.shape)]
            if one.device.type != "cpu":
                return []
            if one.nbytes > self.room:
                return None
            # One that is changed through one.data, or as an array, has no new version.
            return self.array(one.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
        if issubclass(kind, np.ndarray):
            self.seen.append(one.shape)
            return self.array(one)
        if issubclass(kind, dict):
            return self.items(one, [*one.keys(), *one.values()])
        if issubclass(kind, list | tuple | set | frozenset | deque):
            return self.items(one, list(one))
        if issubclass(kind, ctypes._SimpleCData):
            self.seen.append(one.value)
            return []
        if issubclass(kind, FunctionType):
            return _of_function(one)
        if issubclass(kind, MethodType):
            return [one.__func__, one.__self__]
        if issubclass(kind, functools.partial):
            return [one.func, *one.args, one.keywords, *_vars(one).values()]
        if issubclass(kind, staticmethod | classmethod):
            return [one.__func__]
        if issubclass(kind, property):
            return [one.fget]
        if issubclass(kind, type):
            return _of_type(one)
        if issubclass(kind, ModuleType) or issubclass(kind, _STATELESS) or kind.__name__ == "SemLock":
            return []
        if issubclass(kind, _GENERATORS):
            # Processes that stay draw on from a copy; the global ones are set for each sample.
            return [] if any(one is found for found in _GLOBAL) else None
        if kind.__module__.startswith("ronde."):
            return _of_ours(one)
        if kind is not SimpleNamespace and not all(_is_python(c) for c in kind.__mro__[:-1]):
            return None
        slots = [getattr(one, name) for c in kind.__mro__ for name in _slots(c) if hasattr(one, name)]
        return [kind, *_vars(one).values(), *slots]

    def items(self, one: Any, items: list[Any]) -> Iterable[Any] | None:
        """What a container holds: a few things of any kind, or many that are plain."""
        self.seen.append(len(items))
        if len(items) <= _FEW:
            return [*items, *_vars(one).values()]
        if len(items) > _LONG:
            return None
        unordered = issubclass(type(one), set | frozenset)
        found = 0
        for item in items:
            if issubclass(type(item), dict):
                item = tuple(item.items())
            if issubclass(type(item), list | tuple) and len(item) <= _FEW:
                item = tuple(p for part in item for p in (part if type(part) is tuple else (part,)))
                if not all(issubclass(type(part), _PLAIN) for part in item):
                    return None
            elif not issubclass(type(item), _PLAIN):
                return None
            found = found ^ hash(item) if unordered else hash((found, item))
        self.seen.append(found)
        return list(_vars(one).values())

    def array(self, one: np.ndarray[Any, Any]) -> Iterable[Any] | None:
        """By its values."""
        if isinstance(one, np.memmap):
            return []  # a file, which may be large
        self.room -= one.nbytes
        if self.room < 0 or type(one).__name__ == "MaskedArray":
            return None
        if one.dtype == object:
            return self.items(one, one.ravel().tolist())
        flat = np.ascontiguousarray(one).reshape(-1).view(np.uint8)
        if flat.size <= 1 << 16:
            self.seen.append(hash(flat.tobytes()))
            return []
        words = flat[: flat.size // 8 * 8].view(np.uint64)
        # All of it by their sum, which is read as fast as memory gives it, and some by their place.
        self.seen += [int(words.sum()), hash(words[:: max(1, words.size // 4096)].tobytes()), hash(flat[words.size * 8 :].tobytes())]
        return []


def _is_shared(one: Any) -> bool:
    kind = type(one)
    if issubclass(kind, torch.Tensor):
        if one.is_shared() or one.device.type != "cpu" or one.untyped_storage().resizable():
            return bool(one.is_shared())
        return _maps_shared(one.data_ptr())  # it lies in memory that is not torch's
    while issubclass(type(one), np.ndarray | memoryview):  # what it lies in: an array of ctypes, a mapped file
        if issubclass(type(one), np.memmap):
            return True
        one = one.base if issubclass(type(one), np.ndarray) else one.obj
        kind = type(one)
    if issubclass(kind, torch.Tensor):
        return _is_shared(one)
    return issubclass(kind, mmap.mmap | ctypes._SimpleCData | ctypes.Array | ctypes.Structure) or kind.__module__.startswith(
        "multiprocessing."
    )


def _maps_shared(address: int) -> bool:
    """Whether memory is shared between processes, as the system has it."""
    try:
        lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return True  # not Linux: it may be
    for line in lines:
        place, kind = line.split(maxsplit=2)[:2]
        low, high = (int(end, 16) for end in place.split("-"))
        if low <= address < high:
            return kind.endswith("s")
    return True


def _of_ours(one: Any) -> list[Any]:
    """What a user's code is part of: what ronde's own objects keep besides is what they read, or count."""
    if isinstance(one, BaseSource) and not isinstance(one, DatasetSource):
        return held_arrays(one)
    found: list[Any] = []
    for name, value in list(_vars(one).items()):
        for part in value if isinstance(value, list | tuple) else (value,):
            if callable(part) or type(part).__module__.startswith("ronde."):
                found.append(part)
        if name in _INNER:
            found.append(value)
    return found


def held_arrays(source: BaseSource) -> list[Any]:
    """Arrays of the script's that a source reads where they are."""
    return [origin for origin in source.origins() or () if isinstance(origin, np.ndarray)] if isinstance(source, ArraySource) else []


def _is_python(kind: type) -> bool:
    """Whether a class is written in Python, so that its attributes are all that it holds."""
    return bool(kind.__flags__ & _HEAP) and not isinstance(vars(kind).get("__new__"), BuiltinFunctionType)


def _slots(kind: type) -> Iterator[str]:
    found = vars(kind).get("__slots__", ())
    yield from (name for name in ([found] if isinstance(found, str) else found) if not name.startswith("__"))


def _of_type(one: type) -> list[Any]:
    if not _users(one.__module__):
        return []
    values = [v for k, v in list(vars(one).items()) if isinstance(v, FunctionType) or not k.startswith(("__", "_abc_"))]
    return [*(v for v in values if not isinstance(v, GetSetDescriptorType | MemberDescriptorType)), *one.__bases__]


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _of_function(one: FunctionType) -> list[Any]:
    """What it reads besides its arguments, if the user wrote it."""
    if not _users(str(one.__globals__.get("__name__"))):
        return []
    names = dict.fromkeys(_names(one.__code__))
    found = [one.__globals__[name] for name in names if name in one.__globals__]
    found += [vars(m)[name] for m in found if isinstance(m, ModuleType) and _users(m.__name__) for name in names if name in vars(m)]
    for cell in one.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # nothing is in it yet
            continue
    return [*found, *(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values()]
