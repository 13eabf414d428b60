"""Rows of Parquet files by batches of ids: row groups are decoded whole and cached."""

from __future__ import annotations

import copy
import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

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
from ronde.data.sources.byte_ranges import (
    ByteRange,
    BytesCache,
    Store,
    expand,
    inside,
)
from ronde.data.sources.tar import is_pack
from ronde.world import ArgumentError, SampleError
from ronde.world.paths import is_remote, local_path, need

Columns = dict[str, Any]


class _Ranges(io.RawIOBase):
    """A remote file with some ranges in memory; others are fetched when read."""

    def __init__(self, store: Store, path: str, size: int, held: list[tuple[int, bytes]]) -> None:
        self._store, self._path, self._size, self._held = store, path, size, held
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = 0) -> int:
        self._place = offset + (0, self._place, self._size)[whence]
        return self._place

    def read(self, size: int = -1) -> bytes:
        length = self._size - self._place if size < 0 else min(size, self._size - self._place)
        start = self._place
        self._place += length
        for at, data in self._held:
            if at <= start and start + length <= at + len(data):
                return data[start - at : start - at + length]
        return self._store.read([ByteRange(self._path, start, length)])[0]


def plain_type(kind: Any) -> Any:
    """A type without Arrow views (``string_view``, ``list_view``), which ``take`` cannot handle."""
    import pyarrow as pa

    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        return pa.string() if pa.types.is_string_view(kind) else pa.binary()
    if pa.types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, plain_type(kind.value_type), kind.ordered)
    if pa.types.is_struct(kind):
        return pa.struct(
            [
                kind.field(i).with_type(plain_type(kind.field(i).type))
                for i in range(kind.num_fields)
            ]
        )
    if pa.types.is_map(kind):
        return pa.map_(plain_type(kind.key_type), plain_type(kind.item_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(plain_type(kind.value_type)), kind.list_size)
    if (pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind)) and plain_type(
        kind.value_type
    ) == kind.value_type:
        return kind  # ``take`` handles these
    if pa.types.is_large_list(kind) or pa.types.is_large_list_view(kind):
        return pa.large_list(kind.value_field.with_type(plain_type(kind.value_type)))
    if pa.types.is_list(kind) or pa.types.is_list_view(kind):
        return pa.list_(kind.value_field.with_type(plain_type(kind.value_type)))
    return kind


def holds_nulls(column: Any) -> bool:
    """Whether an Arrow column, or a fixed-size list in it, holds nulls."""
    import pyarrow as pa

    return bool(column.null_count) or (
        pa.types.is_fixed_size_list(column.type)
        and any(chunk.flatten().null_count for chunk in getattr(column, "chunks", [column]))
    )


def to_columns(
    table: Any, nulls: frozenset[str], where: str, as_it_is: str | None = None
) -> Columns:
    """An Arrow table as columns: numbers as NumPy arrays, fixed-size lists as 2-D arrays, others as
    Arrow arrays.

    Args:
        nulls: columns that hold nulls somewhere: of them, whole numbers are floating-point
            everywhere, with NaN, and lists of constant length Arrow arrays everywhere. What a
            column is must not depend on which rows are read together.
        where: for errors.
        as_it_is: a column that stays an Arrow array if it is among ``nulls``.
    """
    import pyarrow as pa

    found: Columns = {}
    for name, chunked in zip(table.column_names, table.columns, strict=True):
        plain = plain_type(chunked.type)
        if plain == chunked.type:
            column = chunked.combine_chunks()
        elif "list_view" in str(chunked.type):
            # pyarrow 26 casts these into lists whose last offset lies behind its buffer
            column = pa.array(chunked.to_pylist(), plain)
        else:
            column = chunked.cast(plain).combine_chunks()
        if isinstance(column, pa.ChunkedArray):  # of no chunk at all, or too long for one array
            column = (
                pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
            )
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        kind = column.type
        if pa.types.is_decimal(kind):
            column, kind = column.cast(pa.float64()), pa.float64()
        if name == as_it_is and name in nulls:
            found[name] = column
            continue
        whole = pa.types.is_integer(kind) or pa.types.is_boolean(kind)
        listed = pa.types.is_fixed_size_list(kind) and pa.types.is_primitive(kind.value_type)
        if whole and name in nulls:
            column, kind = (
                column.cast(pa.int8()).cast(pa.float64())
                if pa.types.is_boolean(kind)
                else column.cast(pa.float64(), safe=False),
                pa.float64(),
            )
        elif (whole or listed) and name not in nulls and holds_nulls(column):
            raise SampleError(
                f"{where}: the column {name!r} holds nulls that the file does not declare. Rewrite "
                "it with statistics."
            )
        if listed and name not in nulls:
            found[name] = (
                column.flatten().to_numpy(zero_copy_only=False).reshape(-1, kind.list_size)
            )
        elif pa.types.is_primitive(kind):
            found[name] = column.to_numpy(zero_copy_only=False)
        else:
            found[name] = column
    return found


def gather(
    ids: np.ndarray[Any, np.dtype[np.int64]],
    starts: np.ndarray[Any, np.dtype[np.int64]],
    groups: dict[int, Columns],
) -> Columns:
    """Rows of several groups, in id order; texts and bytes as lists.

    Args:
        starts: the first id of each group, and the end.
        groups: columns of those groups that hold the ids.
    """
    import pyarrow as pa

    of = np.searchsorted(starts, ids, side="right") - 1
    by_group = np.argsort(of, kind="stable")
    sorted_groups = of[by_group]
    cuts = np.flatnonzero(np.diff(sorted_groups)) + 1
    parts = np.split(by_group, cuts)
    names = list(next(iter(groups.values())))
    found: Columns = {}
    rows = [
        (places, ids[places] - starts[of[places[0]]], groups[int(of[places[0]])])
        for places in parts
        if len(places)
    ]
    for name in names:
        columns = [columns[name] for _, _, columns in rows]
        if all(isinstance(column, np.ndarray) for column in columns):
            out = np.empty((len(ids), *columns[0].shape[1:]), dtype=np.result_type(*columns))
            for places, local_rows, group in rows:
                out[places] = group[name][local_rows]
            found[name] = out
        else:
            values: list[Any] = [None] * len(ids)
            for places, local_rows, group in rows:
                for place, value in zip(
                    places.tolist(), group[name].take(pa.array(local_rows)).to_pylist(), strict=True
                ):
                    values[place] = value
            found[name] = values
    return found


def _leaves(kind: Any) -> int:
    """How many file columns a field of this type spans."""
    if hasattr(kind, "storage_type"):
        return _leaves(kind.storage_type)
    return (
        sum(_leaves(kind.field(i).type) for i in range(kind.num_fields)) if kind.num_fields else 1
    )


def _owners(metadata: Any) -> list[str]:
    """The field of each file column; paths are ambiguous (``a.b`` may be a part of ``a``)."""
    return [
        field.name
        for field in metadata.schema.to_arrow_schema()
        for _ in range(_leaves(field.type))
    ]


def columns_bytes(columns: Columns) -> int:
    """Bytes of memory."""
    return sum(int(column.nbytes) for column in columns.values())


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

    kind = plain_type(kind)
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
        import pyarrow as pa

        self.paths = paths
        self._store = store
        self._sample = sample
        self._number: dict[Any, int] = {}
        self._metadata: dict[int, Any] = {}
        self._sizes = [store.size(path) for path in paths]
        counts: list[int] = []
        self._group_file: list[tuple[int, int]] = []
        nulls: set[str] = set()
        known: list[str] | None = None
        bytes_of: list[int] = []
        for f, path in enumerate(paths):
            metadata = self._of_file(f)
            schema = metadata.schema.to_arrow_schema()
            names = list(schema.names)
            twice = next(
                (name for name in (names if columns is None else columns) if names.count(name) > 1),
                None,
            )
            if twice is not None:
                raise ArgumentError(
                    f"feed.parquet: {path} has {names.count(twice)} columns named {twice!r}. Leave "
                    "it out with columns=[…]."
                )
            if known is None:
                known, first = names, schema
                for name in columns or ():
                    if name not in names:
                        hint = (
                            f" Values in folder names ({name}=…) are not read. Write them into the "
                            "files."
                            if f"/{name}=" in path
                            else ""
                        )
                        raise ArgumentError(
                            f"feed.parquet: {path} has no column {name!r}: choose among "
                            f"{', '.join(names)}.{hint}"
                        )
                self.columns = list(columns) if columns is not None else names
                if sample is not None:
                    kind = (
                        plain_type(schema.field(sample[0]).type)
                        if names.count(sample[0]) == 1
                        else None
                    )
                    if kind is not None and not (
                        _holds_files(kind)
                        or pa.types.is_string(kind)
                        or pa.types.is_large_string(kind)
                    ):
                        raise ArgumentError(
                            f"feed.parquet: data={sample[0]!r}: the column is {kind} in "
                            f"{path}: expected bytes, or a struct of bytes and path."
                        )
                    self.classes = _class_names(schema, sample[1])
            else:
                for name in self.columns:
                    if name not in names or schema.field(name).type != first.field(name).type:
                        has = schema.field(name).type if name in names else "missing"
                        raise ArgumentError(
                            f"feed.parquet: the column {name!r} is "
                            f"{first.field(name).type} in {paths[0]} and {has} in {path}."
                        )
            owners = _owners(metadata)
            for g in range(metadata.num_row_groups):
                group = metadata.row_group(g)
                if not group.num_rows:
                    continue
                counts.append(group.num_rows)
                self._group_file.append((f, g))
                size = 0
                for c, name in enumerate(owners):
                    if name in self.columns:
                        chunk = group.column(c)
                        size += chunk.total_uncompressed_size
                        if (
                            chunk.statistics is not None
                            and chunk.statistics.has_null_count
                            and chunk.statistics.null_count
                        ):
                            nulls.add(name)
                bytes_of.append(size)
        if not counts:
            raise ArgumentError(
                f"feed.parquet: no rows in {paths[0]}"
                + (f" and {len(paths) - 1} more." if len(paths) > 1 else ".")
            )
        self._nulls = frozenset(nulls)
        self._starts = np.cumsum([0, *counts], dtype=np.int64)
        self.groups = len(counts)
        self._cache: BytesCache[int, Columns] = BytesCache(cache_bytes, columns_bytes)
        if blocks if blocks is not None else is_remote(paths[0]) or sum(bytes_of) > cache_bytes:
            self.blocks = tuple(counts)
            self.window = int(min(64, max(2, cache_bytes // max(1, max(bytes_of)))))
        names = [p.rpartition("/")[2] for p in paths]
        self._fingerprint = digest_values(
            "parquet", names, self._sizes, counts, self.columns, sample
        )

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __repr__(self) -> str:
        return (
            f"parquet: {len(self):,} rows × {len(self.columns)} columns in {self.groups:,} row "
            f"groups of {len(self.paths):,} files"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_metadata": {}}  # each process reads the footers that it needs

    @property
    def fingerprint(self) -> str:
        """Covers file names, sizes, row groups and columns."""
        return self._fingerprint

    @property
    def schema(self) -> dict[str, Any]:
        """The Arrow type of each column."""
        schema = self._of_file(0).schema.to_arrow_schema()
        return {name: schema.field(name).type for name in self.columns}

    def _of_file(self, f: int) -> Any:
        if f not in self._metadata:
            import pyarrow as pa
            import pyarrow.parquet as pq

            path = self.paths[f]
            try:
                if is_remote(path):
                    size = self._sizes[f]
                    tail = min(size, 64 << 10)
                    held = [
                        (size - tail, self._store.read([ByteRange(path, size - tail, tail)])[0])
                    ]
                    self._metadata[f] = pq.read_metadata(
                        pa.PythonFile(_Ranges(self._store, path, size, held), mode="r")
                    )
                else:
                    self._metadata[f] = pq.read_metadata(path)
            except (pa.ArrowInvalid, OSError) as error:
                raise ArgumentError(
                    f"{path} cannot be read as Parquet: {str(error).splitlines()[0]}"
                ) from error
        return self._metadata[f]

    def _decode(self, wanted: list[int]) -> list[Columns]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        held = self._fetched(wanted)
        found: list[Columns] = []
        for number in wanted:
            f, g = self._group_file[number]
            path = self.paths[f]
            try:
                file: Any = (
                    pa.PythonFile(
                        _Ranges(self._store, path, self._sizes[f], held[number]), mode="r"
                    )
                    if held
                    else path
                )
                # Without Arrow's own threads: the reader may be one of many, and a forked process
                # has none of them.
                with pq.ParquetFile(
                    file, metadata=self._of_file(f), memory_map=not held, pre_buffer=False
                ) as opened:
                    table = opened.read_row_group(g, columns=self.columns, use_threads=False)
                # Arrow takes "a.b" also for a part of "a".
                table = table.select(
                    [i for i, name in enumerate(table.column_names) if name in self.columns]
                )
            except (pa.ArrowException, OSError) as error:
                raise SampleError(
                    f"{path}, row group {g}, cannot be read: {str(error).splitlines()[0]}"
                ) from error
            # Labels of samples stay whole numbers beside a null, which is an error of its row: as
            # floating-point ones they were no classes.
            label = self._sample[1] if self._sample is not None else None
            found.append(to_columns(table, self._nulls, f"{path}, row group {g}", label))
        return found

    def _fetched(self, wanted: list[int]) -> dict[int, list[tuple[int, bytes]]]:
        """The bytes of some row groups' columns, fetched together; empty for local files."""
        if not is_remote(self.paths[0]):
            return {}
        places: list[tuple[int, ByteRange]] = []
        for number in wanted:
            f, g = self._group_file[number]
            group = self._of_file(f).row_group(g)
            for c, name in enumerate(_owners(self._of_file(f))):
                if name in self.columns:
                    chunk = group.column(c)
                    start = chunk.data_page_offset
                    if chunk.dictionary_page_offset is not None:
                        start = min(start, chunk.dictionary_page_offset)
                    places.append(
                        (number, ByteRange(self.paths[f], start, chunk.total_compressed_size))
                    )
        data = self._store.read([place for _, place in places])
        held: dict[int, list[tuple[int, bytes]]] = {number: [] for number in wanted}
        for (number, place), raw in zip(places, data, strict=True):
            held[number].append((place.offset, raw))
        return held

    def _path(self, i: int) -> str:
        """The file that holds row ``i``."""
        return self.paths[
            self._group_file[int(np.searchsorted(self._starts, i, side="right")) - 1][0]
        ]

    def count_classes(self, known: list[str] | None = None) -> ParquetSource:
        """Map text labels to sorted classes, or to ``known``; reads the column once.

        Raises:
            ArgumentError: a label is none of the classes.
        """
        import pyarrow as pa

        label = self._sample[1] if self._sample is not None else None
        if label is None:
            return self
        kind = plain_type(self.schema[label])
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            if known is not None and known != self.classes:
                if self.classes is None:
                    raise ArgumentError(
                        f"feed.parquet: the labels {label!r} of {self.paths[0]} are unnamed "
                        "numbers; classes= and like= need names."
                    )
                wrong = next((name for name in self.classes if name not in known), None)
                if wrong is not None:
                    raise ArgumentError(
                        f"feed.parquet: {self.paths[0]}: {unknown_class(wrong, known)}."
                    )
                self._number = {i: known.index(name) for i, name in enumerate(self.classes)}
                self.classes = known
                self._fingerprint = digest_values(self._fingerprint, known)
            return self
        found: set[str] = set()
        only = copy.copy(self)
        only.columns = [label]
        for group in range(self.groups):
            found.update(
                v for v in only._decode([group])[0][label].unique().to_pylist() if v is not None
            )
        wrong = next(
            (name for name in sorted(found) if known is not None and name not in known), None
        )
        if known is not None and wrong is not None:
            raise ArgumentError(
                f"feed.parquet: {self.paths[0]}, column {label!r}: {unknown_class(wrong, known)}."
            )
        self.classes = sorted(found) if known is None else known
        self._number = {name: i for i, name in enumerate(self.classes)}
        self._fingerprint = digest_values(self._fingerprint, self.classes)
        return self

    def take(self, ids: Sequence[int]) -> Columns:
        """Rows as columns: NumPy arrays for numbers, lists for texts and bytes."""
        wanted = check_ids(ids, len(self))
        if not wanted.size:
            return {name: [] for name in self.columns}
        groups = np.unique(np.searchsorted(self._starts, wanted, side="right") - 1).tolist()
        return gather(wanted, self._starts, self._cache.get(groups, self._decode))

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
    first, schema = _first_schema(given, options)
    names = list(schema.names)
    if data is None:
        held = [
            name
            for name in dict.fromkeys(names)
            if names.count(name) == 1 and _holds_files(schema.field(name).type)
        ]
        if len(held) != 1:
            found = (
                f"its columns {', '.join(map(repr, held))} all hold"
                if held
                else f"none of its columns {', '.join(names)} holds"
            )
            raise ArgumentError(f"{first}: {found} bytes: choose one with data='…'.")
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


def _first_schema(paths: Any, options: Mapping[str, Any]) -> tuple[str, Any]:
    """The first file, and its schema."""
    need("pyarrow", "tables", "feed.parquet")
    import pyarrow as pa
    import pyarrow.parquet as pq

    store = Store(options.get("options"))
    first = expand(paths, store, "feed.parquet")[0]
    try:
        if is_remote(first):
            return first, pq.read_schema(
                pa.PythonFile(_Ranges(store, first, store.size(first), []), mode="r")
            )
        return first, pq.read_schema(first)
    except (pa.ArrowInvalid, OSError) as error:
        raise ArgumentError(
            f"{first} cannot be read as Parquet: {str(error).splitlines()[0]}"
        ) from error


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
    """Rows of Parquet files, read by batches of ids (extra ``tables``).

    A batch is read by column, never by row; torch's ``default_collate`` of it returns tensors. Row
    groups are decoded whole and cached, up to ``cache_bytes`` per process. Integers with nulls
    become floats with NaN. Times are ``datetime64`` with NaT for null, which ``default_collate``
    turns into the smallest integer.

    Args:
        paths: a file, a folder, a glob, URLs, or a list of such.
        columns: which are read; None for all.
        data: a column of bytes, or of structs of ``bytes`` and ``path`` as Hugging Face's data sets
            have it: samples are then :class:`Sample` of it, ``label`` and ``name``, as
                :func:`folder` gives them.
        label: the column of labels, with ``data``. Hugging Face's names of its classes are the
            source's ``classes``.
        name: the column of names, with ``data``; the struct's path or else the row's number where
            there is none.
        classes: with ``label``, the names that labels count from 0; the column is then read once,
            whole. In Hugging Face's data
            sets, numbers stand for names: they become those of the same names here.
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
    files: list[str] = []
    if isinstance(paths, str | os.PathLike):
        text = (os.fspath(paths) if is_remote(os.fspath(paths)) else local_path(paths)).rstrip("/")
        here = not is_remote(text) and os.path.isdir(text)  # noqa: PTH112
        # A folder that exists is itself, whatever its name looks like.
        plain = here or (
            is_remote(text) and not text.endswith(".parquet") and not set("*[{") & set(text)
        )
        if plain and is_pack(text, options):
            raise ArgumentError(f"{text} is a pack of tars. Open it with feed.tar({text!r}).")
        if here:
            files = inside(text, ".parquet", "feed.parquet")
    if data is None and (label is not None or name is not None):
        raise ArgumentError("feed.parquet: label= and name= go with data=, the column of bytes.")
    if data is not None:
        columns = [c for c in (data, label, name) if c is not None]
    files = files or expand(paths, store, "feed.parquet")
    known = classes_of(classes, like, "feed.parquet")
    if known is not None and label is None:
        raise ArgumentError("feed.parquet: classes= and like= go with data= and label=.")
    sample = (data, label, name) if data is not None else None
    source = ParquetSource(files, columns, store, cache_bytes, blocks, sample)
    return source if known is None else source.count_classes(known)
