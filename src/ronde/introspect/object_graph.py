"""Walk the objects that an object refers to; the only walker in the package."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from ronde.introspect.code_owner import is_user_module

_INNER = (
    "dataset",
    "datasets",
    "_dataset",
    "_datasets",
    "base",
    "source",
    "ds",
    "inner",
    "wrapped",
    "parent",
)

_MOST_OBJECTS = 2000  # beyond that they are samples, not parts of a data set
_MOST_ITEMS = 64  # of a list or dictionary: beyond that it holds samples
_FUNCTIONS = (FunctionType, BuiltinFunctionType)
_LEAVES = (
    type(None),
    type,
    ModuleType,
    torch.Tensor,
    np.ndarray,
    np.generic,
    str,
    bytes,
    int,
    float,
    complex,
)


def attributes(one: Any) -> dict[str, Any]:
    """An object's ``__dict__`` itself, or an empty dictionary."""
    try:
        names: dict[str, Any] = vars(one)
    except Exception:  # it has none; or it is a proxy, which may raise anything
        return {}
    return names


def children(one: Any) -> Iterable[Any]:
    """An object's attribute values, or the first items of a list, tuple or dictionary."""
    items: Iterable[Any] = ()
    # By type(), never isinstance(): a proxy's __class__ answers for the object behind it.
    if issubclass(type(one), dict):
        items = islice(dict.values(one), _MOST_ITEMS)
    elif type(one) in (list, tuple):
        items = one[:_MOST_ITEMS]
    return chain(items, list(attributes(one).values()))


def walk(
    root: Any,
    inside: Callable[[Any], Iterable[Any]] = children,
    *,
    functions: bool = False,
    most: int = _MOST_OBJECTS,
) -> list[Any]:
    """An object and those it refers to, directly or not; each once, nearest first.

    Numbers, strings, tensors, arrays, classes and modules are skipped.

    Args:
        inside: the objects to visit after this one.
        functions: plain functions count as objects too.
        most: objects to stop at.

    Example:
        >>> from types import SimpleNamespace
        >>> inner = SimpleNamespace(size=3)
        >>> walk(SimpleNamespace(transforms=[inner, "resize"]))[-1] is inner
        True
    """
    leaves = _LEAVES if functions else (*_LEAVES, *_FUNCTIONS)
    met: dict[int, Any] = {}
    queue = deque([root])
    while queue and len(met) < most:
        one = queue.popleft()
        if issubclass(type(one), leaves) or id(one) in met:
            continue
        met[id(one)] = one
        queue.extend(inside(one))
    return list(met.values())


def _wrapped(one: Any) -> Iterator[Any]:
    for name in _INNER:
        inner = attributes(one).get(name)
        for item in inner if isinstance(inner, list | tuple) else [inner]:
            if hasattr(item, "__getitem__") and (
                isinstance(item, Dataset) or is_user_module(type(item).__module__)
            ):
                yield item


def nested_datasets(dataset: Any) -> list[Any]:
    """A dataset and those inside it: ``Subset``, ``ConcatDataset`` and any wrapper."""
    return [one for one in walk(dataset, _wrapped) if hasattr(one, "__dict__")]
