"""What may be read before its time: what nobody can change between two epochs, or what loading processes would not see if somebody did."""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections import deque
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, default_collate

from ronde.feed.arena import Arena
from ronde.feed.found import _users, _vars
from ronde.feed.mark import _of_function, _slots, held_arrays
from ronde.feed.pipeline import Pipeline
from ronde.feed.sources import BaseSource, BytesCache, DatasetSource, Store

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


def ours(dataset: Dataset[Any], collate: Any = default_collate) -> bool:
    """Whether a data set is a pipeline, or a part of one, of ronde's own sources and steps alone, and so is what collates it: always the same
    for the same index.

    Example:
        >>> ours(torch.utils.data.TensorDataset(torch.zeros(3)))
        False
    """
    while type(dataset) is Subset:
        dataset = dataset.dataset
    calls, source = [collate], dataset
    if isinstance(dataset, Pipeline) and _is_ours(dataset):
        calls += [*(step.call for step in dataset.steps), dataset.collate, dataset.finish]
        source = dataset.source  # type: ignore[assignment]
    if not all(call is None or call is default_collate or (_is_ours(call) and _spec_is_ours(call)) for call in calls):
        return False
    own = isinstance(source, BaseSource) and not isinstance(source, DatasetSource) and _is_ours(source)
    return own and not held_arrays(cast("BaseSource", source))


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
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return True  # not Linux: it may be
    for line in lines:
        place, kind = line.split(maxsplit=2)[:2]
        low, high = (int(end, 16) for end in place.split("-"))
        if low <= address < high:
            return kind.endswith("s")
    return True


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
    if isinstance(one, Arena | BytesCache | Store):  # what they share is what would be read
        return []
    if isinstance(one, BaseSource) and not isinstance(one, DatasetSource) and _is_ours(one):
        return held_arrays(one)
    slots = [getattr(one, name) for c in kind.__mro__ for name in _slots(c) if hasattr(one, name)]
    return [kind, *_vars(one).values(), *slots]
