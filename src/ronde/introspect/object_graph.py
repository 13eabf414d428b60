"""Walk over what an object is made of, and tell whose code it runs."""

from __future__ import annotations

import functools
import sys
import sysconfig
from collections import deque
from collections.abc import Iterator
from itertools import islice
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

__all__ = ["object_parts", "user_modules", "nested", "held"]

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


@functools.cache
def _installed() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple({paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def _users(module: str) -> bool:
    """Whether a module is the script's, or of those who wrote it: neither Python's own nor an
    installed one.
    """
    file = getattr(sys.modules.get(module), "__file__", None)
    return module == "__main__" or (
        file is not None
        and not file.startswith(_installed())
        and module.partition(".")[0] != "ronde"
    )


def user_modules() -> list[ModuleType]:
    """Modules of the script and of those who wrote it."""
    return [
        module
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and _users(name)
    ]


def nested(dataset: Any) -> list[Any]:
    """A data set and those that it is made of: ``Subset``, ``ConcatDataset`` and any wrapper that
    keeps what it wraps.
    """
    found: list[Any] = []

    def visit(one: Any, depth: int) -> None:
        ours = depth == 0 or isinstance(one, Dataset) or _users(type(one).__module__)
        if (
            depth > 8
            or not ours
            or any(one is f for f in found)
            or not hasattr(one, "__dict__")
            or isinstance(one, type)
        ):
            return
        found.append(one)
        for name in _INNER:
            inner = vars(one).get(name)
            for item in inner if isinstance(inner, list | tuple) else [inner]:
                if hasattr(item, "__getitem__"):
                    visit(item, depth + 1)

    visit(dataset, 0)
    return found


_PARTS = 2000


_ITEMS = 64  # of a list or dictionary: beyond that it holds samples


_ENDS = (
    type,
    ModuleType,
    FunctionType,
    BuiltinFunctionType,
    torch.Tensor,
    np.ndarray,
    np.generic,
    str,
    bytes,
    int,
    float,
    complex,
)


def _vars(one: Any) -> dict[str, Any]:
    try:
        found: dict[str, Any] = vars(one)
    except Exception:  # it has none; or it stands in for something else, and may raise anything
        return {}
    return found


def object_parts(dataset: Any) -> list[Any]:
    """What a data set is made of, as far as attributes, lists and dictionaries lead: its
    transforms, what they hold, and so on.
    """
    found: dict[int, Any] = {}
    queue = deque([dataset])
    while queue and len(found) < _PARTS:
        one = queue.popleft()
        if one is None or issubclass(type(one), _ENDS) or id(one) in found:
            continue
        found[id(one)] = one
        if issubclass(type(one), dict):
            queue.extend(islice(dict.values(one), _ITEMS))
        elif type(one) in (list, tuple):
            queue.extend(one[:_ITEMS])
        queue.extend(_vars(one).values())
    return list(found.values())


def held(dataset: Any) -> Iterator[tuple[Any, str, Any]]:
    """Plain functions that a data set, and objects of the user's in it, keep as attributes
    (``loader=PIL.Image.open``): owner, name, value.
    """
    datasets = nested(dataset)
    for one in object_parts(dataset):
        if any(one is d for d in datasets) or _users(type(one).__module__):
            for name, value in list(_vars(one).items()):
                if type(value) in (FunctionType, BuiltinFunctionType):
                    yield one, name, value
