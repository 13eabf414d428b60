"""Rows of Parquet and Arrow files by batches of ids: row groups are decoded whole and cached."""

from __future__ import annotations

import json
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ronde.data.sources.base import (
    BaseSource,
    Batch,
    Sample,
    check_ids,
    classes_of,
    digest_values,
    unknown_class,
)
from ronde.data.sources.byte_ranges import Store, expand, one_folder
from ronde.data.sources.packed import is_pack
from ronde.tables.reading import arrow_batches, open_arrow
from ronde.world import ArgumentError, SampleError
from ronde.world.paths import is_remote, need


class _RowGroup(NamedTuple):
    """One row group, of the columns that are read."""

    rows: int
    decoded_bytes: int
    nulls: frozenset[str]  # columns that are known to hold nulls


def _children(kind: Any) -> list[Any]:
    """The types that an Arrow type nests."""
    kind = getattr(kind, "storage_type", kind)
    return [kind.field(i).type for i in range(kind.num_fields)]


def _leaves(kind: Any) -> int:
    """How many columns of a Parquet file a field of this type spans."""
    return sum(map(_leaves, _children(kind))) or 1


class _File:
    """A file of row groups; each process opens it once."""

    kind = ""

    def __init__(self, path: str, store: Store) -> None:
        self.path, self.size = path, store.size(path)
        self._store = store
        self._opened: tuple[Any, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def _load(self) -> tuple[Any, Any]:
        """The schema, and what the row groups are read by."""
        raise NotImplementedError

    def _open(self) -> tuple[Any, Any]:
        import pyarrow as pa

        if self._opened is None:
            try:
                self._opened = self._load()
            except (pa.ArrowInvalid, OSError) as error:
                raise ArgumentError(
                    f"{self.path} cannot be read as {self.kind}: {str(error).splitlines()[0]}"
                ) from error
        return self._opened

    @property
    def schema(self) -> Any:
        return self._open()[0]

    def row_groups(self, columns: list[str]) -> list[_RowGroup]:
        raise NotImplementedError

    def read(self, g: int, columns: list[str]) -> Any:
        """Some columns of a row group as a table."""
        raise NotImplementedError


class _ParquetFile(_File):
    kind = "Parquet"

    def _load(self) -> tuple[Any, Any]:
        import pyarrow.parquet as pq

        with self._store.open(self.path, self.size) as file:
            metadata = pq.read_metadata(file)
        return metadata.schema.to_arrow_schema(), metadata

    def row_groups(self, columns: list[str]) -> list[_RowGroup]:
        schema, metadata = self._open()
        # Not by its path: "a.b" may be a part of "a", or a column of its own.
        names = [field.name for field in schema for _ in range(_leaves(field.type))]
        kept = set(columns)
        wanted = [(c, name) for c, name in enumerate(names) if name in kept]
        row_groups = []
        for g in range(metadata.num_row_groups):
            group = metadata.row_group(g)
            chunks = [(n, group.column(c)) for c, n in wanted]
            size = sum(chunk.total_uncompressed_size for _, chunk in chunks)
            nulls = {n for n, c in chunks if c.statistics is not None and c.statistics.null_count}
            row_groups.append(_RowGroup(group.num_rows, size, frozenset(nulls)))
        return row_groups

    def read(self, g: int, columns: list[str]) -> Any:
        import pyarrow.parquet as pq

        # Without Arrow's own threads: the reader may be one of many, and a forked process has none
        # of them. A remote row group is fetched in a few large ranges.
        with (
            self._store.open(self.path, self.size) as file,
            pq.ParquetFile(
                file, metadata=self._open()[1], pre_buffer=is_remote(self.path)
            ) as opened,
        ):
            table = opened.read_row_group(g, columns=columns, use_threads=False)
        # Arrow takes "a.b" also for a part of "a".
        return table.select([i for i, name in enumerate(table.column_names) if name in columns])


class _ArrowFile(_File):
    """An Arrow file or stream, memory-mapped; each record batch is a row group."""

    kind = "Arrow"

    def __init__(self, path: str, store: Store) -> None:
        if is_remote(path):
            raise ArgumentError(f"feed.parquet: {path}: Arrow files are read locally only.")
        super().__init__(path, store)

    def _load(self) -> tuple[Any, Any]:
        import pyarrow as pa

        with self._store.open(self.path, self.size) as file:
            reader = open_arrow(pa.memory_map(file))
            return reader.schema, list(arrow_batches(reader))

    def row_groups(self, columns: list[str]) -> list[_RowGroup]:
        return [
            # 0 bytes: they stay in the page cache, not in this process.
            _RowGroup(b.num_rows, 0, frozenset(n for n in columns if holds_nulls(b.column(n))))
            for b in self._open()[1]
        ]

    def read(self, g: int, columns: list[str]) -> Any:
        import pyarrow as pa

        return pa.Table.from_batches([self._open()[1][g]]).select(columns)


def holds_nulls(column: Any) -> bool:
    """Whether an Arrow column, or a fixed-size list in it, holds nulls."""
    import pyarrow as pa

    return bool(column.null_count) or (
        pa.types.is_fixed_size_list(column.type)
        and any(chunk.flatten().null_count for chunk in getattr(column, "chunks", [column]))
    )


def _is_view(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string_view(kind) or pa.types.is_binary_view(kind))


def _nests_views(kind: Any) -> bool:
    return any(_is_view(child) or _nests_views(child) for child in _children(kind))


def _takeable(table: Any) -> Any:
    """A table without what Arrow's ``take`` lacks or is slow at: views, dictionaries, chunks."""
    import pyarrow as pa

    for i, field in enumerate(table.schema):
        kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        if _is_view(kind):
            kind = pa.string() if pa.types.is_string_view(kind) else pa.binary()
        if kind != field.type:
            table = table.set_column(i, field.name, table.column(i).cast(kind))
    return table.combine_chunks()


def _to_column(column: Any, has_nulls: bool, where: str) -> Any:
    """An Arrow column as a NumPy array, 2-D for fixed-size lists; else as a list.

    Args:
        has_nulls: whether the column holds nulls in any row: whole numbers are then floating-point
            in every batch, with NaN, and lists of constant length lists. What a column is must not
            depend on which rows are read together.
        where: what the error begins with.
    """
    import pyarrow as pa

    kind = column.type
    if pa.types.is_decimal(kind) or (has_nulls and pa.types.is_integer(kind)):
        column = column.cast(pa.float64(), safe=False)
    elif has_nulls and pa.types.is_boolean(kind):
        column = column.cast(pa.int8()).cast(pa.float64())
    listed = pa.types.is_fixed_size_list(kind) and pa.types.is_primitive(kind.value_type)
    if pa.types.is_primitive(column.type):
        values = column.to_numpy()
    elif listed and not has_nulls:
        values = column.combine_chunks().flatten().to_numpy(zero_copy_only=False)
        values = values.reshape(-1, kind.list_size)
    else:
        return column.to_pylist()
    whole = pa.types.is_integer(column.type) or pa.types.is_boolean(column.type)
    if (whole or listed) and holds_nulls(column):
        raise SampleError(
            f"{where} holds nulls that the file does not declare. Rewrite it with statistics."
        )
    return values


def _is_bytes(kind: Any) -> bool:
    import pyarrow as pa

    return bool(
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
    )


def _holds_files(kind: Any) -> bool:
    """Whether a column holds bytes, or structs of ``bytes`` and ``path`` (Hugging Face)."""
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return kind.get_field_index("bytes") >= 0 and _is_bytes(kind.field("bytes").type)
    return _is_bytes(kind)


def _class_names(schema: Any, label: str | None) -> list[str] | None:
    """Class names of a label, as Hugging Face stores them in the schema's metadata."""
    try:
        feature = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"][label]
        classed = feature.get("_type") == "ClassLabel"
        return [str(name) for name in feature["names"]] if classed else None
    except (KeyError, TypeError, ValueError):
        return None


def _file_of(path: str, store: Store) -> _File:
    is_arrow = path.endswith((".arrow", ".feather", ".ipc"))
    return (_ArrowFile if is_arrow else _ParquetFile)(path, store)


def _check_columns(file: _File, columns: Sequence[str], first: Any, first_path: str) -> None:
    """Refuse a column that a file lacks, has twice, or has with another type than the first."""
    names = list(file.schema.names)
    for name in columns:
        if name not in first.names:
            raise ArgumentError(
                f"feed.parquet: {file.path} has no column {name!r}: choose among "
                f"{', '.join(first.names)}."
            )
        if names.count(name) > 1:
            raise ArgumentError(
                f"feed.parquet: {file.path} has {names.count(name)} columns named {name!r}. "
                "Rename them, or name the other columns with columns=[…]."
            )
        kind: Any = file.schema.field(name).type if name in names else "missing"
        if kind != "missing" and _nests_views(kind):
            raise ArgumentError(
                f"feed.parquet: {file.path}: the column {name!r} is {kind}; Arrow cannot pick rows "
                "of nested views. Write it with plain strings, or leave it out with columns=[…]."
            )
        if kind != first.field(name).type:
            raise ArgumentError(
                f"feed.parquet: the column {name!r} is {first.field(name).type} in {first_path} "
                f"and {kind} in {file.path}."
            )


def _check_data(schema: Any, name: str, path: str) -> None:
    """Refuse a column for ``data=`` that holds neither bytes nor texts."""
    import pyarrow as pa

    kind = schema.field(name).type
    if not (_holds_files(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise ArgumentError(
            f"feed.parquet: data={name!r}: the column is {kind} in {path}: expected bytes, or a "
            "struct of bytes and path."
        )


class _Entry:
    """A table that is held or being made, and its bytes while they count."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.table: Any = None
        self.bytes = 0


class TableCache:
    """The row groups read last, up to a number of bytes. Thread-safe; of several threads that want
    one, one decodes it.

    Args:
        most_bytes: the most that it holds; a larger table is handed out and not kept.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._clear()

    def _clear(self) -> None:
        self._lock = threading.Lock()
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._bytes = 0
        self._process = os.getpid()  # last: whoever reads it takes the new lock

    def __getstate__(self) -> int:
        return self.most_bytes

    def __setstate__(self, most_bytes: int) -> None:
        self.__init__(most_bytes)  # type: ignore[misc]

    def get(self, key: int, make: Callable[[int], Any]) -> Any:
        """The table of a key; ``make(key)`` where it is not held."""
        # A forked child has none of the threads that may hold a lock: it would wait forever.
        if self._process != os.getpid():
            self._clear()
        with self._lock:
            entry = self._entries.setdefault(key, _Entry())
            self._entries.move_to_end(key)
        with entry.lock:
            if entry.table is None:
                entry.table = make(key)
                self._keep(key, entry)
            return entry.table

    def _keep(self, key: int, entry: _Entry) -> None:
        with self._lock:
            if self._entries.get(key) is not entry:
                return  # given up for others while it was made
            if entry.table.nbytes > self.most_bytes:
                del self._entries[key]
                return
            entry.bytes = entry.table.nbytes
            self._bytes += entry.bytes
            while self._bytes > self.most_bytes:
                self._bytes -= self._entries.popitem(last=False)[1].bytes


class ParquetSource(BaseSource):
    """See :func:`parquet`.

    Attributes:
        paths: the files.
        columns: names of the columns that are read.
        groups: row groups in all files.
    """

    def __init__(
        self,
        paths: list[str],
        columns: Sequence[str] | None,
        store: Store,
        cache_bytes: int,
        blocks: bool | None,
        sample: tuple[str, str | None, str | None] | None,
    ) -> None:
        self.paths = paths
        self._sample = sample
        self._number: dict[Any, int] = {}
        self._files = [_file_of(path, store) for path in paths]
        first = self._files[0].schema
        self.columns = list(columns) if columns is not None else list(first.names)
        for file in self._files:
            _check_columns(file, self.columns, first, paths[0])
        if sample is not None:
            _check_data(first, sample[0], paths[0])
            self.classes = _class_names(first, sample[1])
        groups = [
            ((f, g), group)
            for f, file in enumerate(self._files)
            for g, group in enumerate(file.row_groups(self.columns))
            if group.rows
        ]
        if not groups:
            raise ArgumentError(
                f"feed.parquet: no rows in {paths[0]}"
                + (f" and {len(paths) - 1} more." if len(paths) > 1 else ".")
            )
        self._group_file = [place for place, _ in groups]
        self._nulls = frozenset().union(*(group.nulls for _, group in groups))
        counts = [group.rows for _, group in groups]
        self._starts = np.cumsum([0, *counts], dtype=np.int64)
        self.groups = len(groups)
        self._cache = TableCache(cache_bytes)
        sizes = [group.decoded_bytes for _, group in groups]
        if blocks if blocks is not None else is_remote(paths[0]) or sum(sizes) > cache_bytes:
            self.blocks = tuple(counts)
            self.window = int(min(64, max(2, cache_bytes // max(1, *sizes))))
        names = [p.rpartition("/")[2] for p in paths]
        self._fingerprint = digest_values(
            "parquet", names, [file.size for file in self._files], counts, self.columns, sample
        )

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __repr__(self) -> str:
        return (
            f"parquet: {len(self):,} rows × {len(self.columns)} columns in {self.groups:,} row "
            f"groups of {len(self.paths):,} files"
        )

    @property
    def fingerprint(self) -> str:
        """Covers file names, sizes, row groups and columns."""
        return self._fingerprint

    def files(self) -> list[str]:
        """The files."""
        return self.paths

    @property
    def schema(self) -> dict[str, Any]:
        """The Arrow type of each column."""
        schema = self._files[0].schema
        return {name: schema.field(name).type for name in self.columns}

    def _decode(self, number: int, columns: list[str] | None = None) -> Any:
        """A row group as a table."""
        import pyarrow as pa

        f, g = self._group_file[number]
        try:
            table = self._files[f].read(g, self.columns if columns is None else columns)
        except (pa.ArrowException, OSError) as error:
            raise SampleError(
                f"{self.paths[f]}, row group {g}, cannot be read: {str(error).splitlines()[0]}"
            ) from error
        return _takeable(table)

    def _path(self, i: int) -> str:
        """The file that holds row ``i``."""
        return self.paths[
            self._group_file[int(np.searchsorted(self._starts, i, side="right")) - 1][0]
        ]

    def count_classes(self, known: list[str] | None = None) -> ParquetSource:
        """Map labels to sorted classes, or to ``known``; texts are read once, whole.

        Raises:
            ArgumentError: a label is none of the classes.
        """
        import pyarrow as pa

        label = self._sample[1] if self._sample is not None else None
        if label is None:
            return self
        kind = self.schema[label]
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        are_texts = pa.types.is_string(kind) or pa.types.is_large_string(kind)
        names = self._texts(label) if are_texts else self.classes
        if not are_texts and known in (None, names):
            return self
        if names is None:
            raise ArgumentError(
                f"feed.parquet: the labels {label!r} of {self.paths[0]} are unnamed "
                "numbers; classes= and like= need names."
            )
        classes = names if known is None else known
        wrong = next((name for name in names if name not in classes), None)
        if wrong is not None:
            raise ArgumentError(
                f"feed.parquet: {self.paths[0]}, column {label!r}: {unknown_class(wrong, classes)}."
            )
        numbers = {name: i for i, name in enumerate(classes)}
        # A number of Hugging Face's counts its own names, a text is one.
        self._number = numbers if are_texts else {i: numbers[n] for i, n in enumerate(names)}
        self.classes = classes
        self._fingerprint = digest_values(self._fingerprint, classes)
        return self

    def _texts(self, label: str) -> list[str]:
        """The texts in a column, sorted."""
        texts: set[str | None] = set()
        for group in range(self.groups):
            texts.update(self._decode(group, [label]).column(label).unique().to_pylist())
        return sorted(text for text in texts if text is not None)

    def take(self, ids: Sequence[int]) -> dict[str, Any]:
        """Rows as columns: NumPy arrays for numbers, lists for texts and bytes."""
        wanted = check_ids(ids, len(self))
        if not wanted.size:
            return {name: [] for name in self.columns}
        import pyarrow as pa

        groups = np.searchsorted(self._starts, wanted, side="right") - 1
        held = {g: self._cache.get(g, self._decode) for g in np.unique(groups).tolist()}
        by_group = np.argsort(groups, kind="stable")
        cuts = np.flatnonzero(np.diff(groups[by_group])) + 1
        parts = [
            held[int(groups[rows[0]])].take(pa.array(wanted[rows] - self._starts[groups[rows[0]]]))
            for rows in np.split(by_group, cuts)
        ]
        table = pa.concat_tables(parts).take(pa.array(np.argsort(by_group)))
        # A label stays a whole number beside a null, which is an error of its row.
        label = self._sample[1] if self._sample is not None else None
        return {
            name: table.column(name).to_pylist()
            if name == label and name in self._nulls
            else _to_column(
                table.column(name), name in self._nulls, f"{self.paths[0]}: the column {name!r}"
            )
            for name in self.columns
        }

    def read(self, ids: Sequence[int]) -> Any:
        """Rows of these ids, in this order: dicts, or :class:`Sample` with ``data=``.

        Raises:
            SampleError: a file cannot be read; it is named.
        """
        columns = self.take(ids)
        if self._sample is None:
            return Batch(columns)
        data, label, name = self._sample
        labels = [None] * len(ids) if label is None else columns[label]
        labels = labels.tolist() if isinstance(labels, np.ndarray) else labels
        if self._number:
            labels = [None if one is None else self._number[one] for one in labels]
        names = columns[name] if name is not None else [str(i) for i in ids]
        values = columns[data]
        if any(isinstance(d, dict) for d in values):  # a struct of bytes and path
            if name is None:
                names = [(d or {}).get("path") or n for d, n in zip(values, names, strict=True)]
            values = [d and d["bytes"] for d in values]
        for i, d, one in zip(ids, values, labels, strict=True):
            if d is None or (
                label is not None and (one is None or (isinstance(one, float) and math.isnan(one)))
            ):
                raise SampleError(
                    f"{self._path(i)}: row {i} of the table has no "
                    f"{(data if d is None else label)!r}: the column is empty there."
                )
        return [Sample(d, one, n) for d, one, n in zip(values, labels, names, strict=True)]


def parquet_files(paths: Sequence[str], label: str | None = None, **options: Any) -> ParquetSource:
    """Rows of Parquet files as :class:`Sample`, from the one column of files and the labels.

    Args:
        label: the column of labels; None is Hugging Face's ClassLabel, or else the column
            ``label``; ``""`` is none. Texts become classes.
        options: as :func:`parquet` takes them.

    Raises:
        ArgumentError: several columns hold files, or none does; it says which.
    """
    given = list(paths) if len(paths) > 1 else paths[0]
    data = options.pop("data", None)
    need("pyarrow", "tables", "feed.parquet")
    store = Store(options.get("options"))
    first = expand(given, store, "feed.parquet")[0]
    schema = _file_of(first, store).schema
    names = list(schema.names)
    if data is None:
        held = [
            name
            for name in dict.fromkeys(names)
            if names.count(name) == 1 and _holds_files(schema.field(name).type)
        ]
        if len(held) != 1:
            what = (
                f"its columns {', '.join(map(repr, held))} all hold"
                if held
                else f"none of its columns {', '.join(names)} holds"
            )
            raise ArgumentError(f"{first}: {what} bytes: choose one with data='…'.")
        data = held[0]
    if label is None:
        classed = [name for name in names if _class_names(schema, name) is not None]
        label = classed[0] if len(classed) == 1 else "label"
        if label not in names:
            raise ArgumentError(
                f"{first} has no column 'label': choose among "
                f"{', '.join(n for n in names if n != data)} with labels='…', or "
                "labels='none'."
            )
    source = parquet(given, data=data, label=label or None, **options)
    return source if source._number else source.count_classes()


def parquet(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    columns: Sequence[str] | None = None,
    data: str | None = None,
    label: str | None = None,
    name: str | None = None,
    classes: Sequence[str] | None = None,
    like: Any = None,
    blocks: bool | None = None,
    cache_bytes: int = 512 << 20,
    options: Mapping[str, Any] | None = None,
) -> ParquetSource:
    """Rows of Parquet or Arrow files, read by batches of ids (extra ``tables``).

    A batch is read by column, never by row; torch's ``default_collate`` of it returns tensors. Row
    groups are decoded whole and cached, up to ``cache_bytes`` per process. Integers with nulls
    become floats with NaN. Times are ``datetime64`` with NaT for null, which ``default_collate``
    turns into the smallest integer. Arrow files and streams (``.arrow``, ``.feather``, ``.ipc``)
    are memory-mapped; their record batches are their row groups.

    Args:
        paths: a file, a folder of ``.parquet`` or else of ``.arrow`` files, a glob, URLs, or a
            list of files, globs, and folders of ``.parquet`` files.
        columns: which are read; None for all.
        data: a column of bytes, or of structs of ``bytes`` and ``path`` as Hugging Face's data sets
            have it: samples are then :class:`Sample` of it, ``label`` and ``name``, as
            :func:`folder` gives them.
        label: the column of labels, with ``data``. Hugging Face's names of its classes are the
            source's ``classes``.
        name: the column of names, with ``data``; the struct's path or else the row's number where
            there is none.
        classes: with ``label``, the names that labels count from 0; the column is then read once,
            whole. In Hugging Face's data sets, numbers stand for names: they become those of the
            same names here.
        like: another source, or a pipeline of one, whose classes count here too: the training
            set's, for a test set.
        blocks: whether the order goes by row groups (see :class:`Order`); None where files are
            remote, or larger than ``cache_bytes``. A training can only be resumed under the order
            that it began with.
        cache_bytes: memory for decoded row groups.
        options: for fsspec.

    Raises:
        ArgumentError: no such file or column, files that do not agree, a pack; it says which.
    """
    need("pyarrow", "tables", "feed.parquet")
    store = Store(options)
    place = one_folder(paths, ".parquet")
    if place is not None and is_pack(place, options):
        raise ArgumentError(f"{place} is a pack of tars. Open it with feed.tar({place!r}).")
    ending = ".parquet"
    if place is not None and not is_remote(place):
        endings = {file.suffix for file in Path(place).iterdir()} & {".parquet", ".arrow"}
        ending = ".arrow" if endings == {".arrow"} else ".parquet"
    files = expand(paths, store, "feed.parquet", ending)
    if data is None and (label is not None or name is not None):
        raise ArgumentError("feed.parquet: label= and name= go with data=, the column of bytes.")
    if data is not None:
        columns = [c for c in (data, label, name) if c is not None]
    known = classes_of(classes, like, "feed.parquet")
    if known is not None and label is None:
        raise ArgumentError("feed.parquet: classes= and like= go with data= and label=.")
    sample = (data, label, name) if data is not None else None
    source = ParquetSource(files, columns, store, cache_bytes, blocks, sample)
    return source if known is None else source.count_classes(known)
