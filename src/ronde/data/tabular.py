"""Tables as training data: a float32 matrix and an int64 matrix of categories."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast, overload

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import default_collate

from ronde.data.build_once import build_once, cache_root, identity, missing_message
from ronde.data.pipeline import Pipeline
from ronde.data.sources.base import BaseSource, Batch, Tuple, check_ids, digest_values
from ronde.data.sources.parquet import plain_type
from ronde.tables.reading import has_leading_zeros, read_batches
from ronde.world import ArgumentError, SampleError
from ronde.world.paths import files_of, need

_VERSION = 3
_ROWS = 1 << 16
_SUFFIXES = (".parquet", ".pq", ".csv", ".arrow", ".feather", ".ipc")

Matrix = npt.NDArray[Any]


@dataclass
class _Columns:
    """What the first pass learned about the columns."""

    numeric: list[str]
    categorical: list[str]
    target: str | None
    rows: int = 0
    mean: list[float] = field(default_factory=list)
    std: list[float] = field(default_factory=list)
    missing: dict[str, int] = field(default_factory=dict)
    vocabularies: dict[str, list[str]] = field(default_factory=dict)
    target_kind: str = ""  # "float", "int" or "class"
    classes: list[str] | None = None


class _Rows(Batch):
    """Rows as columns: numbers, categories or both, and the target."""

    __slots__ = ()

    @overload
    def __getitem__(self, i: int) -> Any: ...
    @overload
    def __getitem__(self, i: slice) -> Batch: ...
    def __getitem__(self, i: int | slice) -> Any:
        inputs, *target = cast("tuple[Any, ...]", self.columns)
        if isinstance(i, slice):
            return _Rows((tuple(x[i] for x in inputs), *(t[i] for t in target)))
        if not -len(self) <= i < len(self):
            raise IndexError(i)
        row = tuple(x[i] for x in inputs)
        one = row[0] if len(row) == 1 else Tuple(row)
        return Tuple((one, *(t[i] for t in target)))

    def __len__(self) -> int:
        return len(cast("tuple[Any, ...]", self.columns)[0][0])

    @property
    def collated(self) -> Any:
        """``[inputs, target]`` or ``[inputs]``, with ``[numbers, categories]`` for both kinds."""
        inputs, *target = cast("tuple[Any, ...]", self.columns)
        found = inputs[0] if len(inputs) == 1 else list(inputs)
        return [found, *target]


def _as_float64(column: Any, name: str, file: Path) -> Matrix:
    """A column as float64, with NaN for missing values."""
    import pyarrow as pa

    kind = column.type
    if pa.types.is_dictionary(kind):
        column, kind = column.dictionary_decode(), column.type.value_type
    if not (
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_decimal(kind)
        or pa.types.is_null(kind)
    ):
        raise ArgumentError(
            f"{file}: the column {name!r} is {kind}, not a number. List it in categorical=, or "
            "leave it out."
        )
    try:
        return np.asarray(
            column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False), dtype=np.float64
        )
    except pa.ArrowInvalid as error:
        raise SampleError(f"{file}: the column {name!r}: {error}") from None


def _finite_mask(values: Matrix) -> npt.NDArray[np.bool_]:
    """Mask of finite float32 values: one infinity would dominate a mean and spread."""
    with np.errstate(over="ignore"):
        return np.isfinite(values.astype(np.float32))


def _as_strings(column: Any, name: str, file: Path) -> Any:
    """A column as an Arrow string array."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    try:
        return column.cast(pa.string())
    except pa.ArrowException:
        raise ArgumentError(
            f"{file}: the column {name!r} is {column.type}, whose values cannot be compared as "
            "text. Leave it out."
        ) from None


def _sorted(values: set[str]) -> list[str]:
    """Numbers by value, then texts; NaN has no place in an order, so it counts as text."""

    def key(value: str) -> tuple[int, float, str]:
        try:
            number = float(value)
        except ValueError:
            return (1, 0.0, value)
        return (0, number, value) if math.isfinite(number) else (1, 0.0, value)

    return sorted(values, key=key)


_POINT_ZERO = r"\.0+$"


def _whole_numbers(values: Sequence[str]) -> Any:
    """A vocabulary of distinct whole numbers as an Arrow array without ".0", else None."""
    import pyarrow as pa

    plain = [re.sub(_POINT_ZERO, "", value.strip()) for value in values]
    if not all(re.fullmatch(r"-?(0|[1-9][0-9]*)", value) for value in plain) or len(
        set(plain)
    ) < len(plain):
        return None
    return pa.array(plain, type=pa.string())


def _are_booleans(values: Iterable[str]) -> bool:
    """Whether all values are booleans, which Arrow and pandas spell differently."""
    return {value.lower() for value in values} <= {"true", "false"}


class _Moments:
    """Batchwise mean and spread of columns without cancellation (Chan, Golub and LeVeque, 1979)."""

    def __init__(self, columns: int) -> None:
        self.n = np.zeros(columns)
        self.mean = np.zeros(columns)
        self.squares = np.zeros(columns)

    def add(self, k: int, values: Matrix) -> None:
        """Add finite values of column ``k``."""
        if not len(values):
            return
        n, mean = len(values), float(values.mean())
        squares = float(np.square(values - mean).sum())
        apart, total = mean - self.mean[k], self.n[k] + n
        self.squares[k] += squares + apart * apart * self.n[k] * n / total
        self.mean[k] += apart * n / total
        self.n[k] = total

    def std(self) -> Matrix:
        """Population standard deviation; 1 for a constant column."""
        found = np.sqrt(self.squares / np.maximum(self.n, 1))
        return np.where(found > 0, found, 1.0)


def _target_kind(kind: Any, name: str, file: Path) -> str:
    import pyarrow as pa

    kind = plain_type(kind)
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return "float"
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return "int"
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return "class"
    raise ArgumentError(f"{file}: the target {name!r} is {kind}: expected numbers or texts.")


def _first_pass(
    files: Sequence[Path], found: _Columns, like: _Columns | None, texts: frozenset[str]
) -> None:
    """Count the rows; without ``like``, also learn means, spreads, vocabularies and classes."""
    moments = _Moments(len(found.numeric))
    words: dict[str, set[str]] = {name: set() for name in found.categorical}
    classes: set[str] = set()
    for file in files:
        for batch in _read(file, found, texts):
            found.rows += batch.num_rows
            if found.target is not None:
                kind = _target_kind(batch.column(found.target).type, found.target, file)
                if like is not None and kind == "class" and like.target_kind in ("int", "float"):
                    raise ArgumentError(
                        f"{file}: the target {found.target!r} holds texts, and numbers in "
                        "the table of like=."
                    )
                if (
                    found.target_kind
                    and kind != found.target_kind
                    and {kind, found.target_kind} != {"int", "float"}
                ):
                    raise ArgumentError(
                        f"{file}: the target {found.target!r} holds texts here and numbers "
                        "elsewhere."
                    )
                found.target_kind = (
                    "float" if "float" in (kind, found.target_kind) and kind != "class" else kind
                )
                if kind == "class" and like is None:
                    classes.update(
                        v
                        for v in _as_strings(batch.column(found.target), found.target, file)
                        .unique()
                        .to_pylist()
                        if v is not None
                    )
            for k, name in enumerate(found.numeric):
                values = _as_float64(batch.column(name), name, file)
                good = values[_finite_mask(values)]
                found.missing[name] = found.missing.get(name, 0) + len(values) - len(good)
                moments.add(k, good)
            for name in found.categorical:
                column = batch.column(name)
                found.missing[name] = found.missing.get(name, 0) + column.null_count
                if like is None:
                    words[name].update(
                        v
                        for v in _as_strings(column, name, file).unique().to_pylist()
                        if v is not None
                    )
    if like is not None:
        found.mean, found.std, found.vocabularies, found.classes = (
            like.mean,
            like.std,
            like.vocabularies,
            like.classes,
        )
        found.target_kind = like.target_kind or found.target_kind
        return
    found.mean, found.std = moments.mean.tolist(), moments.std().tolist()
    found.vocabularies = {
        name: _sorted({v.lower() for v in values} if _are_booleans(values) else values)
        for name, values in words.items()
    }
    found.classes = _sorted(classes) if found.target_kind == "class" else None


def _read(file: Path, found: _Columns, texts: frozenset[str]) -> Iterator[Any]:
    columns = [
        *found.numeric,
        *found.categorical,
        *([found.target] if found.target is not None else []),
    ]
    return read_batches(file, columns, texts, frozenset(found.numeric))


def _reserve_array(file: Path, kind: Any, shape: tuple[int, ...]) -> Any:
    """A new array with its disk space reserved: a full disk under a memory map is a SIGBUS."""
    found = np.lib.format.open_memmap(file, "w+", kind, shape)  # type: ignore[no-untyped-call]
    with open(file, "r+b") as opened:
        os.posix_fallocate(opened.fileno(), 0, file.stat().st_size)
    return found


def _build(
    files: Sequence[Path], found: _Columns, like: _Columns | None, fill: str | float, folder: Path
) -> None:
    """Write ``numeric.npy``, ``categorical.npy``, ``target.npy`` and ``about.json``."""
    import pyarrow as pa
    import pyarrow.compute as compute

    texts = frozenset(found.categorical)
    if found.target is not None and (
        like.target_kind == "class"
        if like is not None
        else any(has_leading_zeros(f, found.target) for f in files if f.suffix.lower() == ".csv")
    ):
        texts |= {found.target}  # of CSV files: the others say what they hold
    _first_pass(files, found, like, texts)
    if not found.rows:
        raise ArgumentError(f"feed.table: {files[0]} holds no row.")
    fills = np.asarray(
        found.mean if fill == "mean" else [np.nan if fill == "nan" else fill] * len(found.numeric),
        dtype=np.float64,
    )
    numeric = _reserve_array(folder / "numeric.npy", np.float32, (found.rows, len(found.numeric)))
    codes = _reserve_array(
        folder / "categorical.npy", np.int32, (found.rows, len(found.categorical))
    )
    kind = np.float32 if found.target_kind == "float" else np.int64
    target = _reserve_array(
        folder / "target.npy", kind, (found.rows if found.target is not None else 0,)
    )
    vocabularies = {
        name: pa.array(values, type=pa.string()) for name, values in found.vocabularies.items()
    }
    whole = {name: _whole_numbers(values) for name, values in found.vocabularies.items()}
    at = 0
    for file in files:
        for batch in _read(file, found, texts):
            end = at + batch.num_rows
            for k, name in enumerate(found.numeric):
                values = _as_float64(batch.column(name), name, file)
                numeric[at:end, k] = np.where(_finite_mask(values), values, fills[k])
            for k, name in enumerate(found.categorical):
                values = _as_strings(batch.column(name), name, file)
                if _are_booleans(found.vocabularies[name]):
                    values = compute.utf8_lower(values)
                where = compute.index_in(values, value_set=vocabularies[name], skip_nulls=True)
                # 2, 2.0 and " 2" are one, as they are to whoever wrote them
                if whole[name] is not None:
                    plain = compute.replace_substring_regex(
                        compute.utf8_trim_whitespace(values), _POINT_ZERO, ""
                    )
                    where = compute.coalesce(
                        where, compute.index_in(plain, value_set=whole[name], skip_nulls=True)
                    )
                codes[at:end, k] = compute.add(compute.fill_null(where, -1), 1).to_numpy(
                    zero_copy_only=False
                )
            if found.target is not None:
                target[at:end] = _targets(batch.column(found.target), found, file, at)
            at = end
    if at != found.rows:
        raise SampleError(
            f"{files[0]}: {found.rows:,} rows in the first pass and {at:,} in the second. It "
            "changed while it was read."
        )
    for array in (numeric, codes, target):
        array.flush()
    (folder / "about.json").write_text(json.dumps(found.__dict__))


def _targets(column: Any, found: _Columns, file: Path, at: int) -> Matrix:
    import pyarrow as pa
    import pyarrow.compute as compute

    def refuse(bad: Matrix, what: str) -> None:
        rows = np.flatnonzero(bad)
        raise ArgumentError(
            f"{file}: the target {found.target!r} {what}; the first such row of the table "
            f"is {at + int(rows[0]):,}."
        )

    if column.null_count:
        refuse(column.is_null().to_numpy(zero_copy_only=False), "is missing")
    if found.target_kind == "class":
        texts = _as_strings(column, str(found.target), file)
        values = compute.fill_null(
            compute.index_in(texts, value_set=pa.array(found.classes, type=pa.string())), -1
        ).to_numpy(zero_copy_only=False)
        if (values < 0).any():
            refuse(
                values < 0,
                f"is an unknown class ({texts[int(np.flatnonzero(values < 0)[0])].as_py()!r})",
            )
        return cast("Matrix", values)
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    numbers = column.cast(
        pa.float64() if found.target_kind == "float" else pa.int64(), safe=False
    ).to_numpy(zero_copy_only=False)
    if found.target_kind == "float":
        if np.isnan(numbers).any():
            refuse(np.isnan(numbers), "is NaN")
        if not (known := _finite_mask(numbers)).all():
            refuse(~known, f"is infinite as float32 ({numbers[np.argmin(known)]:g})")
    if found.target_kind == "int":
        given = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
        if (given != numbers).any():  # NaN too: it equals nothing
            refuse(
                given != numbers,
                f"is not a 64-bit integer ({given[np.argmax(given != numbers)]:g})",
            )
    return cast("Matrix", numbers)


class TableSource(BaseSource):
    """See :func:`table`.

    Attributes:
        numeric, categorical: names of the columns.
        target: name of the column, or None.
        vocabularies: by categorical column: what the codes 1, 2, … stand for; 0 is missing or
            unknown.
        sizes: of each categorical column, how many codes there are: the rows of an embedding.
        mean, std: of each numeric column, over the rows that have a finite value.
        missing: values that were missing, by column.
        fill: what a missing number has become: ``"mean"``, ``"nan"`` or a number.
        normalize: whether numbers are read as ``(x - mean) / std``.
    """

    def __init__(self, folder: Path, key: str, normalize: bool, fill: str | float = "mean") -> None:
        self.columns = _Columns(**json.loads((folder / "about.json").read_text()))
        self.numeric, self.categorical, self.target = (
            self.columns.numeric,
            self.columns.categorical,
            self.columns.target,
        )
        self.vocabularies, self.missing, self.classes = (
            self.columns.vocabularies,
            self.columns.missing,
            self.columns.classes,
        )
        self.mean, self.std = self.columns.mean, self.columns.std
        self.sizes = [len(self.vocabularies[name]) + 1 for name in self.categorical]
        self.normalize = normalize
        self.fill = fill
        self._folder = folder
        self._key = key
        self._arrays: tuple[Matrix, Matrix, Matrix] | None = None
        self._shift = np.asarray(self.mean, dtype=np.float32)
        self._scale = (1.0 / np.asarray(self.std, dtype=np.float64)).astype(np.float32)

    def __len__(self) -> int:
        return self.columns.rows

    def __repr__(self) -> str:
        return (
            f"table: {len(self):,} rows, {len(self.numeric)} numeric and "
            f"{len(self.categorical)} categorical columns, target {self.target!r}"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_arrays": None}  # a memory map would be copied as an array

    @property
    def fingerprint(self) -> str:
        """Covers the files, the columns, and how they were encoded."""
        return digest_values("table", self._key, self.normalize)

    def _open(self) -> tuple[Matrix, Matrix, Matrix]:
        if self._arrays is None:
            names = ("numeric", "categorical", "target")
            paths = [self._folder / f"{name}.npy" for name in names]
            try:
                # An empty one cannot be mapped.
                numeric, codes, target = (
                    np.load(p, mmap_mode="r" if p.stat().st_size > 128 else None).view(np.ndarray)
                    for p in paths
                )
            except (OSError, ValueError) as error:
                raise missing_message(self._folder, "the matrices of a table", error) from error
            self._arrays = (numeric, codes, target)
        return self._arrays

    def read(self, ids: Sequence[int]) -> Batch:
        """``(inputs, target)`` of these rows, gathered by column block."""
        wanted = check_ids(ids, len(self))
        numeric, codes, target = self._open()
        inputs: list[torch.Tensor] = []
        if self.numeric:
            found = np.take(numeric, wanted, axis=0)
            if self.normalize:
                found -= self._shift
                found *= self._scale
            inputs.append(torch.from_numpy(found))
        if self.categorical:
            inputs.append(torch.from_numpy(np.take(codes, wanted, axis=0)).to(torch.int64))
        return _Rows(
            (tuple(inputs), torch.from_numpy(np.take(target, wanted)))
            if self.target is not None
            else (tuple(inputs),)
        )


def _names(value: Any, argument: str) -> list[str]:
    found = [value] if isinstance(value, str) else list(value)
    for name in found:
        if not isinstance(name, str):
            raise ArgumentError(f"feed.table: {argument}={value!r}: expected names of columns.")
        if found.count(name) > 1:
            raise ArgumentError(f"feed.table: {argument} names the column {name!r} twice.")
    return found


def table(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    numeric: Sequence[str] = (),
    categorical: Sequence[str] = (),
    target: str | None = None,
    like: Pipeline | None = None,
    missing: str | float | None = None,
    normalize: bool | None = None,
    cache: str | os.PathLike[str] | None = None,
) -> Pipeline:
    """Rows of Parquet, CSV or Arrow files as numbers: ``(inputs, target)`` (extra ``tables``).

    The files are read once, in batches, into matrices on disk that all processes of a machine map
    into memory. They are written atomically, and rebuilt when a file changes.

    Args:
        path: a file, a folder, a glob, or a list of such; ``.parquet``, ``.csv`` (with a header),
            ``.arrow``/``.feather``/``.ipc``.
        numeric: columns that become a ``float32`` matrix: whole numbers above 2^24 lose their last
            digits.
        categorical: columns that become an ``int64`` matrix of codes: 1, 2, … count the values that
            occur, sorted; 0 is a missing or unknown one. True, TRUE and true are one value where a
            column holds nothing but truth values; a value ``2.0`` that does not occur is ``2``
            where it holds nothing but whole numbers. The order of columns is that of these two
            lists.
        target: the column to predict: floating-point numbers as ``float32``, whole ones as
            ``int64``, texts as ``int64`` classes 0, 1, … (``source.classes``); so are whole numbers
            of a CSV file if one of them is written as ``007``. None gives ``[inputs]`` alone.
        like: another table, whose vocabularies, classes, means and deviations count here too: the
            training set's, for a test set. Columns are the same where none are given, and so are
            ``missing`` and ``normalize``.
        missing: what a missing number (null or NaN; an infinite one too, or one beyond ``float32``)
            becomes: ``"mean"`` of the column's others, ``"nan"``, or a number. How many there were
            stands in ``source.missing``. None is that of ``like``, else ``"mean"``. A missing
            target is an error, and so is an infinite one. Of texts in a CSV file only an empty one
            is missing; ``NA`` and ``null`` are texts as others.
        normalize: read numbers as ``(x - mean) / std`` of their column. None is that of ``like``,
            else False.
        cache: folder for the matrices; ``$XDG_CACHE_HOME/ronde/tables`` or
            ``~/.cache/ronde/tables`` where None.

    Returns:
        A pipeline read by batch; its ``source`` is a :class:`TableSource`. Inputs are one matrix,
        or ``[numbers, codes]`` where both kinds of columns are named.

    Raises:
        ArgumentError: no such file or column, a column that is no number, a target that is missing,
            unknown, or no whole number where that of ``like`` is; it says which.
        SampleError: a file is damaged; it is named.

    Example:
        >>> import pathlib, tempfile
        >>> here = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (here / "t.csv").write_text("age,city,y\\n30,Rome,1\\n,Oslo,0\\n50,Rome,1\\n")
        >>> data = table(here / "t.csv", numeric=["age"], categorical=["city"], target="y",
        ...     cache=here / "cache")
        >>> (ages, cities), y = data.collate(data.__getitems__([0, 1, 2]))
        >>> ages[:, 0].tolist(), cities[:, 0].tolist(), y.tolist(), data.source.vocabularies
        ([30.0, 40.0, 50.0], [2, 1, 2], [1, 0, 1], {'city': ['Oslo', 'Rome']})
    """
    need("pyarrow", "tables", "feed.table")
    known: _Columns | None = None
    if like is not None:
        source = getattr(like, "source", like)
        if not isinstance(source, TableSource):
            raise ArgumentError("feed.table: like= takes a table from feed.table.")
        known = source.columns
        missing = source.fill if missing is None else missing
        normalize = source.normalize if normalize is None else normalize
        if not len(numeric) and not len(categorical):
            numeric, categorical = known.numeric, known.categorical
            target = known.target if target is None else target
        if list(numeric) != known.numeric or list(categorical) != known.categorical:
            raise ArgumentError(
                "feed.table: like= has other columns: numeric "
                f"{', '.join(known.numeric) or 'none'}; categorical "
                f"{', '.join(known.categorical) or 'none'}."
            )
    found = _Columns(_names(numeric, "numeric"), _names(categorical, "categorical"), target)
    twice = set(found.numeric) & set(found.categorical) | (
        {target} & {*found.numeric, *found.categorical}
    )
    if twice:
        raise ArgumentError(
            f"feed.table: the column {sorted(str(t) for t in twice)[0]!r} is named twice "
            "among numeric, categorical and target."
        )
    if not found.numeric and not found.categorical:
        raise ArgumentError("feed.table needs columns: numeric=[…], categorical=[…] or both.")
    missing = "mean" if missing is None else missing
    if isinstance(missing, str) and missing not in ("mean", "nan"):
        raise ArgumentError(f"feed.table: missing={missing!r}: expected 'mean', 'nan' or a number.")
    files = files_of(path, "feed.table", _SUFFIXES)
    for file in files:
        if file.suffix.lower() not in _SUFFIXES:
            raise ArgumentError(f"feed.table: {file} is none of {', '.join(_SUFFIXES)}.")
    key = digest_values(
        "table",
        _VERSION,
        identity(files),
        found.numeric,
        found.categorical,
        target,
        repr(missing),
        known.__dict__ if known else None,
    )
    make: Callable[[Path], None] = lambda into: _build(files, found, known, missing, into)  # noqa: E731
    folder = build_once(
        cache_root(cache) / "tables" if cache is None else cache_root(cache), key, make
    )
    return Pipeline(TableSource(folder, key, bool(normalize), missing), collate=default_collate)
