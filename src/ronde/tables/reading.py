"""Parquet, CSV, and Arrow files as record batches of the columns asked for."""

from __future__ import annotations

import contextlib
import csv
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ronde.world import ArgumentError, SampleError

SUFFIXES = (".parquet", ".pq", ".csv", ".arrow", ".feather", ".ipc")


def is_parquet(file: Path) -> bool:
    """Whether a file is Parquet, by its name."""
    return file.suffix.lower() in (".parquet", ".pq")


def open_arrow(source: Any) -> Any:
    """Open an Arrow IPC file or stream (Hugging Face's ``datasets`` writes streams)."""
    import pyarrow as pa

    try:
        return pa.ipc.open_file(source)
    except pa.ArrowInvalid:
        source.seek(0)
        return pa.ipc.open_stream(source)


def arrow_batches(reader: Any) -> Iterator[Any]:
    """The record batches, in order."""
    count = getattr(reader, "num_record_batches", None)
    yield from (reader.get_batch(i) for i in range(count)) if count is not None else reader


def read_batches(
    file: Path, columns: Sequence[str], text: frozenset[str], numbers: frozenset[str]
) -> Iterator[Any]:
    """Record batches of some columns of a file."""
    import pyarrow as pa

    wanted = list(dict.fromkeys(columns))
    with _readable(file):
        if is_parquet(file):
            import pyarrow.parquet as pq

            opened = pq.ParquetFile(file)
            _check(file, opened.schema_arrow.names, columns)
            yield from opened.iter_batches(batch_size=1 << 16, columns=wanted)
        elif file.suffix.lower() == ".csv":
            import pyarrow.csv as pc

            _check(file, _header(file), columns)
            types = {**dict.fromkeys(text, pa.string()), **dict.fromkeys(numbers, pa.float64())}
            # Of texts only an empty one is missing: NA, null and nan are countries and names, as
            # they are in Parquet.
            convert = pc.ConvertOptions(
                include_columns=wanted, column_types=types, strings_can_be_null=False
            )
            options = pc.ReadOptions(block_size=8 << 20)
            parse = pc.ParseOptions(newlines_in_values=True)
            for batch in pc.open_csv(file, options, parse, convert):
                filled = [_without_empty(column) for column in batch.columns]
                yield pa.record_batch(filled, names=batch.schema.names)
        else:
            with pa.memory_map(str(file)) as source:
                reader = open_arrow(source)
                _check(file, reader.schema.names, columns)
                for part in arrow_batches(reader):
                    yield part.select(wanted)


@contextlib.contextmanager
def _readable(file: Any) -> Iterator[None]:
    """Name the file in an error of its reader."""
    import pyarrow as pa

    try:
        yield
    except pa.ArrowInvalid as error:
        raise SampleError(f"{file} cannot be read: {str(error).splitlines()[0]}") from None
    except OSError as error:
        raise SampleError(f"{file} cannot be read: {error.strerror or error}.") from error


def read_share(path: Any, part: int, parts: int) -> tuple[Any, int, int]:
    """Some of the rows of Parquet files: a table, the place of its first row, and rows in all.

    Only the row groups that hold them are read.

    Args:
        path: a file, or a folder of files.
        part, parts: which of so many equal shares.
    """
    import pyarrow as pa
    import pyarrow.dataset as ds

    if not Path(path).exists():
        raise ArgumentError(f"{path} does not exist. Give a Parquet file or a folder of them.")
    with _readable(path):
        files = ds.dataset(path, format="parquet")
        total = files.count_rows()
        low, high = total * part // parts, total * (part + 1) // parts
        at, tables = 0, [files.schema.empty_table()]
        for fragment in files.get_fragments():
            for group in fragment.split_by_row_group():
                count = group.row_groups[0].num_rows  # count_rows() is the whole file's
                first, last = max(low, at), min(high, at + count)
                if first < last:
                    table = group.to_table(schema=files.schema)
                    tables.append(table.slice(first - at, last - first))
                at += count
    return pa.concat_tables(tables), low, total


def _header(file: Path) -> list[str]:
    """The column names of a CSV file; a quoted name may span lines."""
    with open(file, encoding="utf-8-sig", errors="surrogateescape", newline="") as lines:
        try:
            names = next((row for row in csv.reader(lines)), [])
        except csv.Error as error:
            raise SampleError(
                f"{file} cannot be read: its first line is not a line of column names ({error})."
            ) from None
    if not any(name.strip() for name in names):
        raise ArgumentError(f"{file} is empty. A CSV file begins with a line of column names.")
    return names


def _without_empty(column: Any) -> Any:
    """A text column with empty strings as missing values."""
    import pyarrow as pa
    import pyarrow.compute as compute

    return (
        compute.if_else(compute.equal(column, ""), pa.scalar(None, pa.string()), column)
        if pa.types.is_string(column.type)
        else column
    )


def _check(file: Path, names: Sequence[str], columns: Sequence[str]) -> None:
    for column in columns:
        if column not in names:
            hint = ""
            if len(names) == 1 and (
                mark := next((m for m in (";", "\t", "|") if m in names[0]), None)
            ):
                hint = f" Its columns seem to be separated by {mark!r}, not commas."
            if any(part.startswith(f"{column}=") for part in file.parts):
                hint = (
                    f" Values in folder names ({column}=…) are not read. Write them into the files."
                )
            raise ArgumentError(
                f"{file} has no column {column!r}: choose among {', '.join(names)}.{hint}"
            )
    _check_once(file, names, columns)


def _check_once(file: Path, names: Sequence[str], columns: Iterable[str]) -> None:
    for column in columns:
        if list(names).count(column) > 1:
            raise ArgumentError(f"{file} has {list(names).count(column)} columns named {column!r}.")


def columns_of(file: Path, needed: Iterable[str] = ()) -> dict[str, Any]:
    """The Arrow type of each column of a file; None in a CSV file, whose reader decides.

    Raises:
        ArgumentError: two columns have the name of one that is needed.
        SampleError: the file cannot be read.
    """
    import pyarrow as pa

    with _readable(file):
        if file.suffix.lower() == ".csv":
            names = _header(file)
            _check_once(file, names, needed)
            return dict.fromkeys(names)
        if is_parquet(file):
            import pyarrow.parquet as pq

            schema = pq.read_schema(file)
        else:
            with pa.memory_map(str(file)) as source:
                schema = open_arrow(source).schema
    _check_once(file, schema.names, needed)
    return dict(zip(schema.names, schema.types, strict=True))
