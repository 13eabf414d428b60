"""Items of a map: files, lines of a file, rows of a table, or a list; found once, read by range."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ronde.world import ArgumentError

if TYPE_CHECKING:
    import numpy

__all__ = ["Items", "find_items", "load_items"]


@dataclass(frozen=True)
class Items:
    """All items, in their order.

    Attributes:
        source: as the user named them: a pattern, ``lines:FILE``, ``rows:FILE.parquet``, ``@FILE``.
        starts: where each item's bytes begin in all bytes, and their end: (items + 1,) int64.
        names: their names, a line of JSON each; empty where the source itself holds them.
        first: the place of the first one in the source.
    """

    source: str
    starts: numpy.ndarray[Any, numpy.dtype[numpy.int64]]
    names: bytes = b""
    first: int = 0

    def __len__(self) -> int:
        return len(self.starts) - 1

    def part(self, low: int, high: int) -> Items:
        """Items ``low`` to ``high``, under the same keys."""
        # names are JSON, so that a line break in one is no end of a line
        lines = self.names.splitlines()[low:high]
        return Items(self.source, self.starts[low : high + 1], b"\n".join(lines), self.first + low)

    def bytes_of(self, low: int, high: int) -> int:
        """How many bytes items ``low`` to ``high`` have."""
        return int(self.starts[high] - self.starts[low])

    def are_there(self) -> bool:
        """Whether any of the files is there, seen from here; True where items are no files."""
        kind, _, file = self.source.partition(":")
        if self.source.startswith("@") or (kind in ("lines", "rows") and file):
            return True
        return any(os.path.exists(json.loads(line)) for line in self.names.splitlines())  # noqa: PTH110

    def save(self, folder: Path) -> None:
        """Write them to a folder, for :func:`load_items`."""
        import numpy

        numpy.save(folder / "items.npy", self.starts)
        (folder / "items.txt").write_bytes(self.names)
        about = {"source": self.source, "first": self.first, "bytes": _file_bytes(self.source)}
        (folder / "items.json").write_text(json.dumps(about))

    def read(self, low: int, high: int) -> Iterator[tuple[Any, Any]]:
        """Keys and records of items ``low`` to ``high``: a path and a path, a number and a line
        without its end, a number and a dict of the row's values, or a line and a line.
        """
        kind, _, file = self.source.partition(":")
        if kind == "lines" and file:
            with open(file, "rb") as lines:
                lines.seek(int(self.starts[low]))
                for number in range(low, high):
                    size = int(self.starts[number + 1] - self.starts[number])
                    yield (
                        self.first + number,
                        lines.read(size).rstrip(b"\r\n").decode("utf-8", "surrogateescape"),
                    )
        elif kind == "rows" and file:
            yield from _rows(file, self.first + low, self.first + high)
        else:
            for line in self.names.splitlines()[low:high]:
                name = json.loads(line)
                yield (name, name) if self.source.startswith("@") else (name, Path(name))


def find_items(source: str) -> Items:
    """Find the items, and their sizes.

    Args:
        source: ``'data/*.tar'``, files by pattern, ``**`` for all folders below;
            ``lines:FILE``; ``rows:FILE.parquet``; ``@FILE``, a name a line.

    Raises:
        ArgumentError: there is no such file, or nothing in it.
    """
    kind, _, file = source.partition(":")
    try:
        if kind == "lines" and file:
            listed = Items(source, _line_starts(file))
        elif kind == "rows" and file:
            listed = Items(source, _row_starts(file))
        elif source.startswith("@"):
            lines = Path(source[1:]).read_text().splitlines()
            names = [line.strip() for line in lines if line.strip()]
            listed = _named(source, names, [1] * len(names))
        else:
            # As text: a million Paths take long to make.
            paths = sorted(p for p in glob.iglob(source, recursive=True) if os.path.isfile(p))  # noqa: PTH113, PTH207
            listed = _named(source, paths, [os.path.getsize(p) for p in paths])  # noqa: PTH202
    except OSError as error:
        raise ArgumentError(f"--items {source}: {error.filename}: {error.strerror}.") from None
    if not len(listed):
        nothing = f"no file matches it in {Path.cwd()}" if not file and source[0] != "@" else "none"
        raise ArgumentError(f"--items {source}: {nothing}.")
    return listed


def load_items(folder: Path) -> Items:
    """Those that :meth:`Items.save` wrote.

    Raises:
        ArgumentError: the file that holds them is gone, or has another size: their places in it
            are others.
    """
    import numpy

    about = json.loads((folder / "items.json").read_text())
    then, now = about.get("bytes"), _file_bytes(about["source"])
    if then is not None and then != now:
        what = f"no such file in {Path.cwd()}" if now is None else f"{now:,} bytes"
        raise ArgumentError(
            f"--items {about['source']}: the map was planned with {then:,} bytes; now {what}. "
            "Bring that file back, or plan another map with another --out."
        )
    starts = numpy.load(folder / "items.npy", mmap_mode="r")
    return Items(about["source"], starts, (folder / "items.txt").read_bytes(), about["first"])


def _file_bytes(source: str) -> int | None:
    """The size of the file whose lines or rows are the items; None if there is none."""
    kind, _, file = source.partition(":")
    is_one = kind in ("lines", "rows") and os.path.isfile(file)  # noqa: PTH113
    return os.path.getsize(file) if is_one else None  # noqa: PTH202


def _named(source: str, names: list[str], sizes: list[int]) -> Items:
    import numpy

    starts = numpy.zeros(len(names) + 1, numpy.int64)
    numpy.cumsum(numpy.maximum(sizes, 1), out=starts[1:])  # an empty file is an item too
    return Items(source, starts, "\n".join(map(json.dumps, names)).encode())


def _line_starts(file: str) -> Any:
    import numpy

    ends, at, last = [numpy.zeros(1, numpy.int64)], 0, b"\n"
    with open(file, "rb") as data:
        while block := data.read(1 << 24):  # 16 MiB at once: no loop over lines
            breaks = numpy.flatnonzero(numpy.frombuffer(block, numpy.uint8) == 10)
            ends.append(breaks.astype(numpy.int64) + at + 1)
            at, last = at + len(block), block[-1:]
    if last != b"\n":
        ends.append(numpy.array([at]))
    return numpy.concatenate(ends)


def _row_starts(file: str) -> Any:
    import numpy

    table = _parquet(file)
    groups = [table.metadata.row_group(i) for i in range(table.metadata.num_row_groups)]
    # a file says no row's size: those of a group share its bytes evenly
    sizes = [
        numpy.full(g.num_rows, max(g.total_byte_size // max(g.num_rows, 1), 1)) for g in groups
    ]
    return numpy.cumsum(numpy.concatenate([numpy.zeros(1, numpy.int64), *sizes]))


def _rows(file: str, low: int, high: int) -> Iterator[tuple[int, dict[str, Any]]]:
    table, first = _parquet(file), 0
    for index in range(table.metadata.num_row_groups):
        count = table.metadata.row_group(index).num_rows
        if first < high and low < first + count:
            start = max(low - first, 0)
            part = table.read_row_group(index).slice(start, min(high - first, count) - start)
            number = first + start
            for batch in part.to_batches(max_chunksize=1024):  # few rows as Python objects at once
                for row in batch.to_pylist():
                    yield number, row
                    number += 1
        first += count


def _parquet(file: str) -> Any:
    from ronde.world.paths import need

    need("pyarrow", "tables", f"--items rows:{file}")
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(file)
    except pyarrow.ArrowInvalid as error:
        raise ArgumentError(f"--items rows:{file}: {str(error).rstrip('.')}.") from None
