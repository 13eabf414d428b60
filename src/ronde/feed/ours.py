"""What may be read before its time: what nobody can change between two epochs, or what loading processes would not see if somebody did."""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections import deque
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset

from ronde.feed.found import _users, _vars
from ronde.feed.mark import _of_function, _slots
from ronde.feed.pipeline import Pipeline
from ronde.feed.sources import BaseSource, DatasetSource

__all__ = ["ours", "shares_state"]

_MOST = 20_000  # objects
_ITEMS = 64  # of a container


def _is_ours(call: Any) -> bool:
    kind = call if isinstance(call, type | FunctionType) else type(call)
    return kind.__module__.partition(".")[0] == "ronde"


def _spec_is_ours(call: Any) -> bool:
    """Whether all that a step calls is ronde's: what it was given (an image's transforms, a tokenizer) may be the user's."""
    for value in _vars(call).values():
        for one in value if isinstance(value, list | tuple) else (value,):
            if callable(one) and not isinstance(one, type) and not _is_ours(one):
                return False
            if _is_ours(one) and not isinstance(one, type) and not _spec_is_ours(one):
                return False
    return True


def ours(dataset: Dataset[Any]) -> bool:
    """Whether a data set is a pipeline, or a part of one, of ronde's own sources and steps alone: always the same for the same index.

    Example:
        >>> ours(torch.utils.data.TensorDataset(torch.zeros(3)))
        False
    """
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    if isinstance(dataset, Pipeline):
        steps = [*(step.call for step in dataset.steps), dataset.collate, dataset.finish]
        if not all(call is None or call is torch.utils.data.default_collate or (_is_ours(call) and _spec_is_ours(call)) for call in steps):
            return False
        source: Any = dataset.source
    else:
        source = dataset
    return isinstance(source, BaseSource) and not isinstance(source, DatasetSource) and _is_ours(source)


def shares_state(dataset: Any) -> bool:
    """Whether a data set, or a variable that its functions read, is shared between processes (a ``multiprocessing.Value`` that tells loading
    processes the epoch, a tensor in shared memory), or that cannot be told, since it is made of very much.

    Example:
        >>> import multiprocessing
        >>> class Data:
        ...     epoch = multiprocessing.Value("i", 0)
        >>> shares_state(Data()), shares_state([1, 2])
        (True, False)
    """
    seen: dict[int, Any] = {}
    queue: deque[Any] = deque([dataset])
    try:
        while queue:
            one = queue.popleft()
            if one is None or issubclass(type(one), str | bytes | int | float | complex | np.generic) or id(one) in seen:
                continue
            seen[id(one)] = one
            if len(seen) > _MOST or _is_shared(one):
                return True
            queue.extend(_inside(one))
    except Exception:  # it changes while it is looked at, or stands in for something else and may raise anything
        return True
    return False


def _is_shared(one: Any) -> bool:
    kind = type(one)
    if issubclass(kind, torch.Tensor):
        return bool(one.is_shared())
    if issubclass(kind, np.memmap):
        return bool(one.mode != "r")
    # Ronde's caches are: what they keep is what would be read.
    return issubclass(kind, mmap.mmap | ctypes._SimpleCData | ctypes.Array | ctypes.Structure) or kind.__module__.startswith(
        "multiprocessing."
    )


def _inside(one: Any) -> list[Any]:
    kind = type(one)
    if issubclass(kind, torch.Tensor | np.ndarray):
        return []
    if issubclass(kind, dict):
        return [*list(one.values())[:_ITEMS], *_vars(one).values()]
    if issubclass(kind, list | tuple | deque):
        return [*list(one)[:_ITEMS], *_vars(one).values()]
    if issubclass(kind, FunctionType):
        return _of_function(one)
    if issubclass(kind, MethodType):
        return [one.__func__, one.__self__]
    if issubclass(kind, functools.partial):
        return [one.func, *one.args, *one.keywords.values()]
    if issubclass(kind, staticmethod | classmethod):
        return [one.__func__]
    if issubclass(kind, property):
        return [one.fget]
    if issubclass(kind, type):
        return [*vars(one).values(), *one.__bases__] if _users(one.__module__) else []
    if issubclass(kind, ModuleType):
        return []
    if kind.__module__.startswith("ronde."):
        return (
            [v for v in _vars(one).values() if not isinstance(v, mmap.mmap)]
            if not isinstance(one, BaseSource) or isinstance(one, DatasetSource)
            else []
        )
    slots = [getattr(one, name) for c in kind.__mro__ for name in _slots(c) if hasattr(one, name)]
    return [kind, *_vars(one).values(), *slots]
