"""Arrays on disk (npy) or in memory, read by batches of rows."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, bfloat16

from ronde.data.sources.base import BaseSource, Batch, check_ids, digest_values, tensor_of
from ronde.data.sources.byte_ranges import ByteRange, Store
from ronde.world import ArgumentError, SampleError
from ronde.world.paths import is_remote, local_path


def npy_header(
    store: Store, path: str, size: int, start: int = 0
) -> tuple[int, tuple[int, ...], np.dtype[Any]]:
    """The data offset, shape and type of an npy file; refuse one that cannot be mapped."""
    head = io.BytesIO(store.read([ByteRange(path, start, min(size - start, 4096), size)])[0])
    try:
        version = np.lib.format.read_magic(head)
        reader = (
            np.lib.format.read_array_header_1_0
            if version == (1, 0)
            else np.lib.format.read_array_header_2_0
        )
        shape, fortran, kind = reader(head)
    except ValueError as error:
        raise ArgumentError(f"{path} cannot be read as npy: {error}") from None
    if kind.hasobject:
        raise ArgumentError(f"{path} holds Python objects, which are not read from files.")
    if fortran and len(shape) > 1:
        raise ArgumentError(f"{path} is in Fortran order. Save np.ascontiguousarray of it.")
    offset = start + head.tell()
    needed = offset + kind.itemsize * int(np.prod(shape, dtype=np.int64))
    if needed > size:
        raise ArgumentError(
            f"{path} is truncated: it has {size:,} bytes, and {shape} of {kind} go to byte "
            f"{needed:,}."
        )
    return offset, tuple(shape), kind


@dataclass
class FileRows:
    """One array in a file: memory-mapped if local, fetched by rows if remote."""

    store: Store
    path: str
    size: int
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    _map: Any = field(default=None, init=False)

    def __post_init__(self) -> None:
        if not self.shape:
            raise ArgumentError(f"{self.path} holds a single number, not rows.")

    def __len__(self) -> int:
        return self.shape[0]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_map": None}

    def describe(self) -> tuple[Any, ...]:
        """What a fingerprint says of it."""
        name = self.path.rpartition("/")[2]
        # Raw numbers may be one of many parts of their file.
        part = () if not self.offset or name.endswith(".npy") else (self.offset,)
        return name, self.size, self.shape, self.dtype.str, *part

    def take(self, ids: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, Any]:
        """The rows of these ids."""
        if is_remote(self.path):
            length = self.dtype.itemsize * int(np.prod(self.shape[1:], dtype=np.int64))
            raw = self.store.read(
                [
                    ByteRange(self.path, self.offset + i * length, length, self.size)
                    for i in ids.tolist()
                ]
            )
            return np.frombuffer(bytearray(b"".join(raw)), dtype=self.dtype).reshape(
                len(ids), *self.shape[1:]
            )
        return np.asarray(self.mapped()[ids])

    def mapped(self) -> np.ndarray[Any, Any]:
        """The local file, memory-mapped.

        Raises:
            SampleError: it cannot be read, or has changed since it was opened.
        """
        if self._map is None:
            try:
                if Path(self.path).stat().st_size != self.size:
                    raise SampleError(
                        f"{self.path} changed after it was opened: it had {self.size:,} bytes."
                    )
                self._map = (
                    np.memmap(self.path, self.dtype, "r", self.offset, self.shape).view(np.ndarray)
                    if len(self)
                    else np.empty(self.shape, self.dtype)
                )
            except OSError as error:
                raise SampleError(
                    f"{self.path} cannot be read: {error.strerror or error}."
                ) from error
        mapped: np.ndarray[Any, Any] = self._map
        return mapped


class _Held:
    """An array in memory."""

    def __init__(self, values: np.ndarray[Any, Any], name: str) -> None:
        if not values.ndim:
            raise ArgumentError(f"feed.arrays: {name} is a single number, not rows.")
        if values.dtype.hasobject:
            raise ArgumentError(f"feed.arrays: {name} holds Python objects.")
        self.values = values
        self.name = name

    def __len__(self) -> int:
        return len(self.values)

    def describe(self) -> tuple[Any, ...]:
        return self.name, self.values.shape, self.values.dtype.str

    def take(self, ids: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, Any]:
        return np.asarray(self.values[ids])


class ArraySource(BaseSource):
    """See :func:`arrays`."""

    def __init__(self, columns: dict[str, Any] | tuple[Any, ...], alone: bool) -> None:
        self._columns = columns
        self._alone = alone
        lengths = {len(c) for c in self._parts()}
        if len(lengths) != 1:
            said = ", ".join(f"{c.describe()[0]}: {len(c):,}" for c in self._parts())
            raise ArgumentError(f"feed.arrays: the arrays have different lengths: {said}.")
        self._length = lengths.pop()
        if not self._length:
            raise ArgumentError(f"feed.arrays: {self._parts()[0].describe()[0]} has no rows.")

    def _parts(self) -> list[Any]:
        return list(self._columns.values() if isinstance(self._columns, dict) else self._columns)

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return (
            f"arrays: {len(self):,} rows of "
            f"{', '.join(str(c.describe()[0]) for c in self._parts())}"
        )

    @property
    def fingerprint(self) -> str:
        """Covers file names and sizes, array shapes and types."""
        names = list(self._columns) if isinstance(self._columns, dict) else None
        return digest_values("arrays", names, [c.describe() for c in self._parts()])

    def files(self) -> list[str]:
        """The files, if no array is in memory."""
        paths = [column.path for column in self._parts() if isinstance(column, FileRows)]
        return paths if len(paths) == len(self._parts()) else []

    def take(self, ids: Sequence[int]) -> Any:
        """Rows as columns: a dict, a tuple or one array, as the source was given."""
        wanted = check_ids(ids, len(self))
        if isinstance(self._columns, dict):
            return {name: column.take(wanted) for name, column in self._columns.items()}
        columns = tuple(column.take(wanted) for column in self._columns)
        return columns[0] if self._alone else columns

    def read(self, ids: Sequence[int]) -> Any:
        """Rows of these ids, in this order.

        Raises:
            SampleError: a file cannot be read; it is named.
        """
        rows = self.take(ids)
        if isinstance(rows, dict):
            return Batch({name: tensor_of(values) for name, values in rows.items()})
        if isinstance(rows, tuple):
            return Batch(tuple(tensor_of(values) for values in rows))
        return list(tensor_of(rows))


def _one(given: Any, name: str, store: Store) -> Any:
    if isinstance(given, str | os.PathLike):
        path = os.fspath(given) if is_remote(os.fspath(given)) else local_path(given)
        if not path.endswith(".npy"):
            raise ArgumentError(
                f"feed.arrays: {name}: {path} is no .npy file. Save each array of an .npz with "
                "numpy.save; feed.parquet reads Arrow files."
            )
        size = store.size(path)
        return FileRows(store, path, size, *npy_header(store, path, size))
    if isinstance(given, np.memmap) and isinstance(given.filename, str | os.PathLike):
        # Pickled, it would be copied whole into every loading process.
        path = os.fspath(given.filename)
        if (
            given.flags.c_contiguous
            and given.mode != "c"
            and given.base is not None
            and not isinstance(given.base, np.memmap)
        ):
            return FileRows(
                store, path, Path(path).stat().st_size, int(given.offset), given.shape, given.dtype
            )
    return _Held(_plain(given, name), name)


def _plain(given: Any, name: str) -> np.ndarray[Any, Any]:
    """An array, tensor or list as an equal NumPy array, or an ArgumentError."""
    if isinstance(given, np.ma.MaskedArray):
        raise ArgumentError(
            f"feed.arrays: {name} is a masked array, whose masked values would be read as ordinary "
            "ones. Pass array.filled(numpy.nan), or another fill value."
        )
    try:
        if isinstance(given, Tensor):
            if given.dtype == bfloat16:
                raise TypeError("NumPy has no torch.bfloat16. Pass tensor.float().")
            return np.asarray(given.detach().cpu().resolve_conj().resolve_neg().numpy())
        return np.asarray(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(f"feed.arrays: {name} is not an array: {error}") from None


def arrays(
    given: str | os.PathLike[str] | Mapping[str, Any] | Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
) -> ArraySource:
    """Rows of arrays on disk, memory-mapped and read by batches of ids.

    Samples are tensors; torch's ``default_collate`` of a batch returns whole columns without
    visiting rows.

    Args:
        given: a ``.npy`` file: its rows. A dict of names and ``.npy`` files (or arrays), or a
            folder of ``.npy`` files: dicts of a row of each; a tuple or list of them: tuples. Files
            may be URLs.
        options: for fsspec.

    Raises:
        ArgumentError: no such file, another kind of file, arrays of different lengths, Python
            objects.

    Example:
        >>> rows = arrays({"x": np.arange(6).reshape(3, 2), "y": np.asarray([0, 1, 0])})
        >>> rows[2]["x"].tolist(), int(rows[2]["y"])
        ([4, 5], 0)
    """
    store = Store(options)
    if isinstance(given, str | os.PathLike):
        path = os.fspath(given) if is_remote(os.fspath(given)) else local_path(given)
        if not is_remote(path) and Path(path).is_dir():
            files = sorted(p for p in Path(path).iterdir() if p.suffix == ".npy")
            if not files:
                raise ArgumentError(f"feed.arrays: the folder {path} holds no .npy file.")
            return ArraySource({p.stem: _one(str(p), p.stem, store) for p in files}, False)
        return ArraySource((_one(path, "array", store),), True)
    if isinstance(given, Mapping):
        if not given:
            raise ArgumentError("feed.arrays: no array was given.")
        return ArraySource(
            {str(name): _one(value, str(name), store) for name, value in given.items()}, False
        )
    if isinstance(given, np.ndarray | Tensor):
        return ArraySource((_one(given, "array", store),), True)
    parts = list(given)
    if not parts:
        raise ArgumentError("feed.arrays: no array was given.")
    return ArraySource(tuple(_one(value, str(i), store) for i, value in enumerate(parts)), False)
