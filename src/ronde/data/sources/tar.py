"""Samples in tars, as WebDataset and ``ronde pack`` write them, with random access."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from ronde.data.sources.base import (
    BaseSource,
    Names,
    Sample,
    check_ids,
    classes_of,
    digest_values,
    unknown_class,
)
from ronde.data.sources.byte_ranges import (
    ByteRange,
    Store,
    expand,
    one_folder,
)
from ronde.data.sources.packed import PackSource, read_manifest
from ronde.data.sources.tar_index import TarIndex, index_of
from ronde.world import ArgumentError, SampleError
from ronde.world.paths import is_remote

Label = str | Callable[[dict[str, Any]], Any]


def _suffix(ending: str) -> str:
    return ending.lstrip(".").lower()


class TarSource(BaseSource):
    """See :func:`tar`.

    Attributes:
        paths: the tars.
        keys: of the samples.
    """

    def __init__(
        self,
        paths: list[str],
        indices: list[TarIndex],
        store: Store,
        data: Sequence[str] | None,
        label: Label | None,
    ) -> None:
        self.paths = paths
        self._store = store
        self._sizes = [index.state[0] for index in indices]
        counts = [len(index.keys) for index in indices]
        self._starts = np.cumsum([0, *counts], dtype=np.int64)
        suffixes = sorted({s for index in indices for s in index.suffixes})
        self.suffixes = suffixes
        members = np.cumsum([0, *(len(index.offset) for index in indices)], dtype=np.int64)
        firsts = [index.first[1:] + at for index, at in zip(indices, members, strict=False)]
        self._first = np.concatenate([[0], *firsts]).astype(np.int64)
        number = {s: i for i, s in enumerate(suffixes)}
        kinds = [np.asarray([number[s] for s in i.suffixes], np.int32)[i.suffix] for i in indices]
        self._suffix = np.concatenate(kinds)
        self._offset = np.concatenate([index.offset for index in indices])
        self._size = np.concatenate([index.size for index in indices])
        self.keys = Names.joined([index.keys for index in indices])
        self._label = label
        self.function = label if callable(label) else None
        self._data = None if data is None else [_suffix(d) for d in data]
        tars = [p.rpartition("/")[2] for p in paths]
        by_name = label if isinstance(label, str) else None
        self._fingerprint = digest_values("tar", tars, self._sizes, counts, data, by_name)

    def count_classes(self, known: list[str]) -> TarSource:
        """Map labels that are texts to the numbers of these classes."""
        self._fingerprint = digest_values(self._fingerprint, known)
        self.classes = known
        return self

    def __len__(self) -> int:
        return len(self.keys)

    def __repr__(self) -> str:
        size = sum(self._sizes)
        return f"tar: {len(self):,} samples in {len(self.paths):,} files of {size:,} bytes"

    @property
    def fingerprint(self) -> str:
        """Covers tar names, sizes and samples."""
        return self._fingerprint

    def files(self) -> list[str]:
        """The tars, unless a function makes the labels."""
        return [] if self.function else self.paths

    def name(self, i: int) -> str:
        """Sample ``i``'s key and tar."""
        return f"{self.keys[i]} in {self.paths[self._shard(i)]}"

    def _shard(self, i: int) -> int:
        return int(np.searchsorted(self._starts, i, side="right")) - 1

    def read(self, ids: Sequence[int]) -> list[Any]:
        """The samples of these ids, in this order.

        Raises:
            SampleError: a tar cannot be read, has changed, or lacks what was asked for; it is
                named.
        """
        wanted = check_ids(ids, len(self)).tolist()
        plans = [self._members(i) for i in wanted]
        of_shard = [
            (self._shard(i), m) for i, each in zip(wanted, plans, strict=True) for m in each
        ]
        flat = iter(self._store.read([self._range(*place) for place in of_shard]))
        raw = [[next(flat) for _ in members] for members in plans]
        return [
            self._sample(i, members, data)
            for i, members, data in zip(wanted, plans, raw, strict=True)
        ]

    def _range(self, shard: int, member: int) -> ByteRange:
        at, size = int(self._offset[member]), int(self._size[member])
        return ByteRange(self.paths[shard], at, size, self._sizes[shard])

    def _members(self, i: int) -> list[int]:
        members = range(int(self._first[i]), int(self._first[i + 1]))
        # A label may be made of any file of the sample, by a function.
        if self._data is None or callable(self._label):
            return list(members)
        wanted = {*self._data, *([] if self._label is None else [_suffix(self._label)])}
        return [m for m in members if self.suffixes[self._suffix[m]] in wanted]

    def _sample(self, i: int, members: list[int], raw: list[bytes]) -> Any:
        key = self.keys[i]
        files = {self.suffixes[self._suffix[m]]: d for m, d in zip(members, raw, strict=True)}
        if self._data is None:
            return {"__key__": key, **files}
        data = next((d for suffix, d in files.items() if suffix in self._data), None)
        if data is None:
            every = self._suffix[int(self._first[i]) : int(self._first[i + 1])]
            raise SampleError(
                f"{self._place(key, i)} has no .{', .'.join(self._data)}; it has "
                f"{', '.join('.' + self.suffixes[k] for k in every)}."
            )
        if self._label is None:
            return Sample(data, None, key)
        if callable(self._label):
            return Sample(data, self._counted(self._label({"__key__": key, **files}), key, i), key)
        suffix = _suffix(self._label)
        if suffix not in files:
            raise SampleError(f"{self._place(key, i)} has no label .{suffix}.")
        return Sample(data, self._counted(self._parsed(files[suffix], suffix, key, i), key, i), key)

    def _place(self, key: str, i: int) -> str:
        return f"{self.paths[self._shard(i)]}: the sample {key!r}"

    def _counted(self, label: Any, key: str, i: int) -> Any:
        """A label's class number, if there are classes."""
        if self.classes is None or not isinstance(label, str):
            return label
        name = label.strip()
        if name not in self.classes:
            raise SampleError(f"{self._place(key, i)}: {unknown_class(name, self.classes)}.")
        return self.classes.index(name)

    def _parsed(self, raw: bytes, suffix: str, key: str, i: int) -> Any:
        try:
            if suffix in ("cls", "cls2", "index", "inx", "id"):
                return int(raw)
            return json.loads(raw) if suffix == "json" or suffix.endswith(".json") else raw.decode()
        except ValueError:
            raise SampleError(
                f"{self._place(key, i)}: its label .{suffix} cannot be read: {raw[:40]!r}."
            ) from None


def tar(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    data: str | Sequence[str] | None = None,
    label: Label | None = None,
    classes: Sequence[str] | None = None,
    like: Any = None,
    options: Mapping[str, Any] | None = None,
) -> TarSource | PackSource:
    """Samples in tars with random access: WebDataset's, or a pack of ``ronde pack``.

    Consecutive files whose paths agree up to the first dot of the file name are one sample. Offsets
    are read from the headers once and kept in an index: next to the tar
    (``shard.tar.ronde-index``), or below ``~/.cache/ronde`` if that folder is read-only. The index
    is rebuilt if the tar's size or time changed; for a remote tar its ETag, checksum or time
    counts.

    Samples are dicts, ``{"__key__": "0001", "jpg": b"…", "cls": b"7"}``; with ``data=`` they are
    :class:`Sample`. A pack returns what ``feed.folder`` returned: same samples, labels, names,
    order and fingerprint.

    Args:
        paths: a pack, a tar, a folder of tars, a glob (``shards/*.tar``), braces
            (``shard-{000..012}.tar``), URLs, or a list of such.
        data: the ending that is the sample's data, or several of which the first found counts:
            ``("jpg", "png")``.
        label: with ``data``, the ending that is its label (``cls`` as an integer, ``json`` as what
            it says, others as text), or a function of the dict.
        classes: the names that labels count from 0, where labels are texts, or those of a pack of
            class folders.
        like: another source, or a pipeline of one, whose classes count here too: the training
            set's, for a test set.
        options: for fsspec.

    Raises:
        ArgumentError: no such tar; compressed, truncated, damaged, or with links; it is named.

    Example:
        >>> import io, tarfile, tempfile
        >>> path = tempfile.mkdtemp() + "/a.tar"
        >>> with tarfile.open(path, "w") as out:
        ...     for name in ("0.txt", "0.cls", "1.txt", "1.cls"):
        ...         member = tarfile.TarInfo(name)
        ...         member.size = 1
        ...         out.addfile(member, io.BytesIO(name[:1].encode()))
        >>> tar(path)[1]
        {'__key__': '1', 'txt': b'1', 'cls': b'1'}
        >>> tar(path, data="txt", label="cls")[1]
        Sample(data=b'1', label=1, name='1')
    """
    store = Store(options)
    if label is not None and data is None:
        raise ArgumentError(
            'feed.tar: label= needs data=, as in data=("jpg", "png"), label="cls". '
            "Without data=, samples are dicts of all their files."
        )
    known = classes_of(classes, like, "feed.tar")
    wanted = [data] if isinstance(data, str) else None if data is None else list(data)
    place = one_folder(paths, ".tar")
    if place is not None and (manifest := read_manifest(place, store)) is not None:
        pack = PackSource(place, manifest, store)
        return pack if known is None else pack.count_classes(known)
    files = expand(paths, store, "feed.tar", ".tar")
    remote = {is_remote(path) for path in files}
    if len(remote) > 1:
        raise ArgumentError("feed.tar: one source cannot mix local and remote tars. Use two.")
    if len(files) == 1 or not remote.pop():
        indices = [index_of(store, path) for path in files]
    else:
        # one request after another for each: threads wait for several at a time
        with ThreadPoolExecutor(8) as pool:
            indices = list(pool.map(lambda path: index_of(store, path), files))
    if not sum(len(index.keys) for index in indices):
        raise ArgumentError(
            f"feed.tar: no samples in {files[0]}"
            + (f" and {len(files) - 1} more." if len(files) > 1 else ".")
        )
    source = TarSource(files, indices, store, wanted, label)
    return source if known is None else source.count_classes(known)
