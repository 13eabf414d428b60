"""What a dataset holds open: threads and forks share the position of an open file."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Iterator
from multiprocessing.context import BaseContext
from typing import Any

import torch
from torch.utils.data import IterableDataset

from ronde.introspect.code_owner import is_ronde, user_modules
from ronde.introspect.object_graph import attributes, walk
from ronde.introspect.random_state import restore_states, states, undo_draws

_FEW_ENTRIES = 1000  # entries of what is copied

_LIBRARIES = ("h5py", "zipfile", "tarfile", "sqlite3", "lmdb", "webdataset", "rasterio")
# what these libraries say of a file, and keep without it
_CLOSED = ("ZipInfo", "TarInfo", "Row", "Empty", "Reference")


def _space(one: Any) -> dict[Any, Any]:
    """An object's attributes, or a dictionary's entries."""
    return one if type(one) is dict else attributes(one)


def _is_open(value: Any) -> bool:
    if type(value).__module__.partition(".")[0] in _LIBRARIES:
        return type(value).__name__ not in _CLOSED
    if not isinstance(value, io.IOBase) or isinstance(value, io.BytesIO | io.StringIO):
        return False
    try:
        return value.readable() and value.fileno() > 2
    except Exception:  # closed, or no file: an HTTPResponse raises AttributeError here
        return False


def describe_open(dataset: Any) -> str | None:
    """What a dataset or its parts hold open, as text: ``"Volumes.file (BufferedReader)"``; None if
    nothing.

    Ronde's own sources do not count: they read at offsets, or open files per process.
    """
    for one in walk(dataset):
        if is_ronde(type(one)) or _is_open(one):
            continue
        inside = (
            list(_space(one).items()) if type(one) not in (list, tuple) else list(enumerate(one))
        )
        for name, value in inside:
            if _is_open(value):
                place = (
                    f"{type(one).__name__}.{name}"
                    if type(one) not in (dict, list, tuple)
                    else f"an entry {name!r}"
                )
                return f"{place} ({type(value).__name__})"
    return None


def shares_within(dataset: Any) -> bool:
    """Whether a worker's loaders share something that other workers have for themselves: a lock, a
    queue, or a server of ``multiprocessing``, in the dataset or in a module of the script.
    """
    modules = (value for module in user_modules() for value in list(vars(module).values()))
    return any(
        type(one).__module__.partition(".")[0] in ("multiprocessing", "_multiprocessing")
        and not isinstance(one, type)
        for one in (*walk(dataset), *modules)
        if not isinstance(one, BaseContext)
    )


def detached_copy(dataset: Any) -> Any:
    """The dataset to take samples from in advance: a copy of a stream, whose first sample belongs
    to the script; else itself.

    Tensors and large containers are shared. A stream that cannot be copied (locks, started
    generators) is returned itself.
    """
    if not isinstance(dataset, IterableDataset):
        return dataset
    shared = {
        id(v): v
        for one in walk(dataset)
        for v in _values(one)
        if isinstance(v, torch.Tensor) or _is_large(v)
    }
    attempts: tuple[Callable[[], Any], ...] = (
        lambda: copy.deepcopy(dataset, shared),
        lambda: copy.copy(dataset),
    )
    for attempt in attempts:
        with contextlib.suppress(Exception):
            return attempt()
    return dataset


def _values(one: Any) -> list[Any]:
    return list(one) if type(one) in (list, tuple) else list(_space(one).values())


def _is_large(value: Any) -> bool:
    try:
        return hasattr(value, "__array_interface__") or len(value) > _FEW_ENTRIES
    except Exception:  # it has no length, or does not tell
        return False


@contextlib.contextmanager
def reopen_files(dataset: Any) -> Iterator[None]:
    """Make a dataset reopen, in each process, what it opened within the block."""
    before = [(space, dict(space)) for one in walk(dataset) if (space := _space(one))]
    try:
        yield
    finally:
        for space, old in before:
            for name, value in list(space.items()):
                if old.get(name) is not value and any(_is_open(part) for part in walk(value)):
                    if name in old:
                        space[name] = old[name]
                    else:
                        del space[name]


@contextlib.contextmanager
def preserve_state(dataset: Any) -> Iterator[None]:
    """Undo the block's random draws, and close the files that the dataset opened in it."""
    before = states()
    of_modules = (value for module in user_modules() for value in list(vars(module).values()))
    calls = (undo_draws(one) for one in (*walk(dataset), *of_modules))
    undo = [call for call in calls if call is not None]
    try:
        with reopen_files(dataset):
            yield
    finally:
        for put_back in undo:
            put_back()
        restore_states(before)
