"""Is a data set still what it was? What is read of the next epoch before this one has ended counts only if the script changed nothing between."""

from __future__ import annotations

import ctypes
import datetime
import decimal
import enum
import functools
import pathlib
import random
import re
import threading
import uuid
from collections import deque
from collections.abc import Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from ronde.feed.arena import Arena
from ronde.feed.found import _users, _vars
from ronde.feed.sources import BaseSource, BytesCache, DatasetSource, Store

__all__ = ["Mark", "mark"]

_MOST = 5000  # objects
_ITEMS = 64  # of a container that are looked into
_LONG = 1 << 20  # items of a container: more would take long
_LARGE = 1 << 28  # bytes of an array
_PLAIN = (
    *(
        type(None),
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        range,
        slice,
        enum.Enum,
        re.Pattern,
        np.dtype,
        np.generic,
        torch.dtype,
        torch.device,
    ),
    *(pathlib.PurePath, datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, uuid.UUID, type(Ellipsis), torch.Size),
)
_STATELESS = (type(threading.Lock()), type(threading.RLock()), BuiltinFunctionType, type(str.join), type(len), type(object.__init__))
# Their draws are what reading changes; one that the script puts in their place is another object.
_GENERATORS = (torch.Generator, np.random.Generator, np.random.BitGenerator, np.random.RandomState, random.Random)


class Mark:
    """What a data set looked like at one moment. Marks are equal where nothing is seen to have changed."""

    def __init__(self, seen: list[Any], held: list[Any]) -> None:
        self._seen = seen
        self._held = held  # else another object might get the number of one that is gone

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
    seen: list[Any] = []
    held: dict[int, Any] = {}
    queue: deque[Any] = deque([dataset])
    while queue:
        one = queue.popleft()
        if isinstance(one, _PLAIN):
            seen.append(one if not isinstance(one, float) or one == one else "nan")
            continue
        seen.append(id(one))
        if id(one) in held:
            continue
        held[id(one)] = one
        if len(held) > _MOST:
            return None
        try:
            inner = _inside(one, seen)
        except Exception:  # it changes while it is looked at, or stands in for something else and may raise anything
            return None
        if inner is None:
            return None
        queue.extend(inner)
    return Mark(seen, list(held.values()))


def _inside(one: Any, seen: list[Any]) -> list[Any] | None:
    """What is to be looked at next; None where an object cannot be looked into."""
    if isinstance(one, torch.Tensor):
        seen += [one._version, tuple(one.shape)]
        if one.device.type != "cpu":
            return []
        found = _of_array(one.detach().contiguous().reshape(-1).view(torch.uint8).numpy())  # one.data changes without a new version
        seen.append(found)
        return None if found is None else []
    if isinstance(one, np.ndarray):
        found = _of_array(one)
        seen += [one.shape, found]
        return None if found is None else []
    if isinstance(one, dict):
        if len(one) > _LONG:
            return None
        seen += [len(one), hash(tuple(map(id, one.values())))]
        return [*(part for pair in list(one.items())[:_ITEMS] for part in pair), *_vars(one).values()]
    if isinstance(one, list | tuple | set | frozenset | deque):
        if len(one) > _LONG:
            return None
        seen += [len(one), hash(tuple(map(id, one)))]  # their order, and which they are
        return [*(list(one)[:_ITEMS] if not isinstance(one, set | frozenset) else ()), *_vars(one).values()]
    if isinstance(one, ctypes._SimpleCData):
        seen.append(one.value)
        return []
    if isinstance(one, FunctionType):
        return _of_function(one)
    if isinstance(one, MethodType):
        return [one.__func__, one.__self__]
    if isinstance(one, functools.partial):
        return [one.func, *one.args, one.keywords]
    if isinstance(one, staticmethod | classmethod):
        return [one.__func__]
    if isinstance(one, property):
        return [one.fget]
    if isinstance(one, type):
        return _of_type(one)
    if isinstance(one, ModuleType):
        return [v for v in list(vars(one).values()) if isinstance(v, _PLAIN)] if _users(one.__name__) else []
    if isinstance(one, (*_STATELESS, *_GENERATORS)) or type(one).__name__ == "SemLock":
        return []
    if type(one).__module__.startswith("ronde."):
        return _of_ours(one)
    attributes = _vars(one)
    slots = [getattr(one, name) for kind in type(one).__mro__ for name in _slots(kind) if hasattr(one, name)]
    if not attributes and not slots and not _is_python(type(one)):
        return None
    return [type(one), *attributes.values(), *slots]


_INNER = ("data", "dataset", "_dataset", "source", "_source")


def _of_ours(one: Any) -> list[Any]:
    """What a user's code is part of: what ronde's own objects keep besides is what they read, or count."""
    if isinstance(one, Arena | BytesCache | Store) or (isinstance(one, BaseSource) and not isinstance(one, DatasetSource)):
        return []
    found: list[Any] = []
    for name, value in list(_vars(one).items()):
        for part in value if isinstance(value, list | tuple) else (value,):
            if callable(part) or type(part).__module__.startswith("ronde."):
                found.append(part)
        if name in _INNER:
            found.append(value)
    return found


def _is_python(kind: type) -> bool:
    return any("__dict__" in vars(c) or "__slots__" in vars(c) for c in kind.__mro__[:-1])


def _slots(kind: type) -> Iterator[str]:
    found = vars(kind).get("__slots__", ())
    yield from (name for name in ([found] if isinstance(found, str) else found) if not name.startswith("__"))


def _of_array(one: np.ndarray[Any, Any]) -> tuple[int, ...] | None:
    if isinstance(one, np.memmap):
        return ()  # a file, which may be large
    if one.nbytes > _LARGE or (one.dtype == object and one.size > _LONG):
        return None
    if one.dtype == object:
        return (hash(tuple(map(id, one.ravel().tolist()))),)
    flat = np.ascontiguousarray(one).reshape(-1).view(np.uint8)
    if flat.size <= 1 << 16:
        return (hash(flat.tobytes()),)
    words = flat[: flat.size // 8 * 8].view(np.uint64)
    # All of it by their sum, which is read as fast as memory gives it, and some by their place.
    return (int(words.sum()), hash(words[:: max(1, words.size // 4096)].tobytes()), hash(flat[words.size * 8 :].tobytes()))


def _of_type(one: type) -> list[Any]:
    if not _users(one.__module__):
        return []
    values = [v for k, v in list(vars(one).items()) if not k.startswith("__") or isinstance(v, FunctionType)]
    return [*(v for v in values if isinstance(v, (*_PLAIN, FunctionType, staticmethod, classmethod, property, list, dict))), *one.__bases__]


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _of_function(one: FunctionType) -> list[Any]:
    """What it reads besides its arguments, if the user wrote it."""
    if not _users(str(one.__globals__.get("__name__"))):
        return []
    found = [one.__globals__[name] for name in dict.fromkeys(_names(one.__code__)) if name in one.__globals__]
    found += [cell.cell_contents for cell in one.__closure__ or () if _filled(cell)]
    return [*found, *(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values()]


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
