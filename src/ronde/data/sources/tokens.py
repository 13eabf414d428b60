"""Windows of a token array on disk."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ronde.data.sources.arrays import FileRows, npy_header
from ronde.data.sources.base import BaseSource, Batch, check_ids, digest_values
from ronde.data.sources.byte_ranges import ByteRange, Store, expand
from ronde.world import ArgumentError
from ronde.world.paths import is_remote


class TokenSource(BaseSource):
    """See :func:`tokens`.

    Attributes:
        length: tokens of each sample.
        total: tokens in all files.
    """

    def __init__(self, files: list[FileRows], length: int, stride: int, store: Store) -> None:
        self.length = length
        self.stride = stride
        self._files = files
        self._store = store
        self.total = sum(map(len, files))
        counts = [max(0, (len(file) - length - 1) // stride + 1) for file in files]
        self._starts = np.cumsum([0, *counts], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __repr__(self) -> str:
        return (
            f"tokens: {len(self):,} windows of {self.length:,}, {self.total:,} tokens in "
            f"{len(self._files):,} files"
        )

    @property
    def fingerprint(self) -> str:
        """Covers file names and sizes, and the windows."""
        return digest_values(
            "tokens",
            [(f.path.rpartition("/")[2], f.size, f.dtype.str) for f in self._files],
            self.length,
            self.stride,
        )

    def files(self) -> list[str]:
        """The files."""
        return [file.path for file in self._files]

    def _windows(self, f: int) -> Any:
        """All windows of a local file as rows of one array view."""
        # a view: of the file, only the pages of the wanted rows are read
        return np.lib.stride_tricks.sliding_window_view(self._files[f].mapped(), self.length + 1)

    def take(self, ids: Sequence[int]) -> torch.Tensor:
        """Windows of these ids: int64, one row of ``length`` + 1 tokens each."""
        wanted = check_ids(ids, len(self))
        files = np.searchsorted(self._starts, wanted, side="right") - 1
        places = (wanted - self._starts[files]) * self.stride
        out = np.empty((len(wanted), self.length + 1), dtype=np.int64)
        if is_remote(self._files[0].path):
            asked = []
            for f, place in zip(files.tolist(), places.tolist(), strict=True):
                file = self._files[f]
                item = file.dtype.itemsize
                asked.append(
                    ByteRange(
                        file.path, file.offset + place * item, (self.length + 1) * item, file.size
                    )
                )
            for row, raw, f in zip(out, self._store.read(asked), files.tolist(), strict=True):
                row[:] = np.frombuffer(raw, dtype=self._files[f].dtype)
            return torch.from_numpy(out)
        if len(self._files) == 1:
            out[:] = self._windows(0)[places]
        else:
            for f in np.unique(files).tolist():
                rows = np.flatnonzero(files == f)
                out[rows] = self._windows(f)[places[rows]]
        return torch.from_numpy(out)

    def read(self, ids: Sequence[int]) -> Batch:
        """``(inputs, targets)`` of these ids, int64, targets shifted by one token.

        Raises:
            SampleError: a file cannot be read; it is named.
        """
        rows = self.take(ids)
        return Batch((rows[:, :-1], rows[:, 1:]))


def tokens(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    length: int,
    dtype: str | np.dtype[Any] | None = None,
    *,
    stride: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> TokenSource:
    """Windows of tokens on disk: sample ``i`` is ``(inputs, targets)`` of ``length`` tokens,
    targets shifted by one.

    Files are memory-mapped. A window never spans two files.

    Args:
        path: a ``.npy`` file, or raw numbers one after the other (``train.bin``); a glob or a list
            for several.
        length: tokens of a sample.
        dtype: of raw numbers, as ``"uint16"``; a ``.npy`` file knows its own.
        stride: from one window's begin to the next; ``length`` where None, so that each token is a
            target once.
        options: for fsspec.

    Raises:
        ArgumentError: no such file, not a whole number of tokens, or fewer than one window.

    Example:
        >>> import tempfile
        >>> path = tempfile.mkdtemp() + "/text.bin"
        >>> np.arange(9, dtype=np.uint16).tofile(path)
        >>> inputs, targets = tokens(path, length=4, dtype="uint16")[1]
        >>> inputs.tolist(), targets.tolist()
        ([4, 5, 6, 7], [5, 6, 7, 8])
    """
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise ArgumentError(f"feed.tokens: length={length!r} must be a whole number, 1 or more.")
    step = length if stride is None else stride
    if isinstance(step, bool) or not isinstance(step, int) or step < 1:
        raise ArgumentError(f"feed.tokens: stride={stride!r} must be a whole number, 1 or more.")
    store = Store(options)
    files: list[FileRows] = []
    for one in expand(path, store, "feed.tokens"):
        size = store.size(one)
        if one.endswith(".npy"):
            offset, shape, kind = npy_header(store, one, size)
            if len(shape) != 1:
                raise ArgumentError(
                    f"feed.tokens: {one} has the shape {shape}; tokens must be one-dimensional."
                )
            if dtype is not None and np.dtype(dtype) != kind:
                raise ArgumentError(f"feed.tokens: {one} holds {kind}, not dtype={str(dtype)!r}.")
            count = shape[0]
        else:
            if dtype is None:
                raise ArgumentError(
                    f'feed.tokens: {one} is raw: give its type, such as dtype="uint16".'
                )
            kind, offset = np.dtype(dtype), 0
            if size % kind.itemsize:
                raise ArgumentError(
                    f"feed.tokens: {one} has {size:,} bytes, which is not a whole number of {kind} "
                    "tokens."
                )
            count = size // kind.itemsize
        if kind.kind not in "iu":
            raise ArgumentError(f"feed.tokens: {one} holds {kind}; tokens are integers.")
        files.append(FileRows(store, one, size, offset, (count,), kind))
    source = TokenSource(files, length, step, store)
    if not len(source):
        raise ArgumentError(
            f"feed.tokens: {source.total:,} tokens in {files[0].path} are fewer than "
            f"length + 1 = {length + 1:,}."
        )
    return source
