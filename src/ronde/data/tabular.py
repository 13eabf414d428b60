"""Tables as training data: a float32 matrix and an int64 matrix of categories."""

from __future__ import annotations

import json
import os
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
from ronde.tables import Recipe
from ronde.tables.apply import Applied
from ronde.tables.arrow import as_level, as_number
from ronde.tables.levels import level_order
from ronde.tables.reading import SUFFIXES, has_leading_zeros, read_batches
from ronde.tables.recipe import check_columns
from ronde.world import ArgumentError, SampleError
from ronde.world.paths import files_of, need

_VERSION = 4

Matrix = npt.NDArray[Any]


@dataclass
class _Columns:
    """The table's columns, and what they were prepared with."""

    numeric: list[str]
    categorical: list[str]
    target: str | None
    rows: int = 0
    missing: dict[str, int] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)
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


def _finite_mask(values: Matrix) -> npt.NDArray[np.bool_]:
    """Mask of finite float32 values: one infinity would dominate a mean and spread."""
    with np.errstate(over="ignore"):
        return np.isfinite(values.astype(np.float32))


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


def _first_pass(batches: Iterable[tuple[Path, Any]], found: _Columns, like: bool) -> None:
    """Count the rows, and learn of which kind the target is."""
    classes: set[str] = set()
    for file, batch in batches:
        found.rows += batch.num_rows
        if found.target is None:
            continue
        kind = _target_kind(batch.column(found.target).type, found.target, file)
        if like and kind == "class" and found.target_kind in ("int", "float"):
            raise ArgumentError(
                f"{file}: the target {found.target!r} holds texts, and numbers in the table of "
                "like=."
            )
        if like and found.target_kind:
            continue
        known = found.target_kind
        if known and kind != known and {kind, known} != {"int", "float"}:
            raise ArgumentError(
                f"{file}: the target {found.target!r} holds texts here and numbers elsewhere."
            )
        found.target_kind = "float" if "float" in (kind, known) and kind != "class" else kind
        if kind == "class":
            texts = as_level(batch.column(found.target), f"{file}: the target {found.target!r}")
            classes.update(v for v in texts.unique().to_pylist() if v is not None)
    if found.target_kind == "class" and found.classes is None:
        found.classes = sorted(classes, key=level_order)


def _within_float32(batch: Any, numeric: Sequence[str], file: Path) -> Any:
    """A batch whose numbers are null where float32 does not hold them."""
    import pyarrow as pa

    for name in numeric:
        column = as_number(batch.column(name), f"{file}: the column {name!r}")
        values = column.to_numpy(zero_copy_only=False)
        column = pa.array(values, mask=~_finite_mask(values))
        batch = batch.set_column(batch.schema.get_field_index(name), name, column)
    return batch


def _reserve_array(file: Path, kind: Any, shape: tuple[int, ...]) -> Any:
    """A new array with its disk space reserved: a full disk under a memory map is a SIGBUS."""
    found = np.lib.format.open_memmap(file, "w+", kind, shape)  # type: ignore[no-untyped-call]
    with open(file, "r+b") as opened:
        os.posix_fallocate(opened.fileno(), 0, file.stat().st_size)
    return found


def _build(
    files: Sequence[Path], found: _Columns, recipe: Recipe, fill: str | float | None, folder: Path
) -> None:
    """Write ``numeric.npy``, ``categorical.npy``, ``target.npy`` and ``about.json``.

    Args:
        recipe: fitted, or to be fitted on these files.
        fill: what a missing number becomes; None where the recipe is the user's and says it.
    """
    texts, numbers = recipe.csv_types
    if found.target is not None and (
        found.target_kind == "class"
        or any(has_leading_zeros(f, found.target) for f in files if f.suffix.lower() == ".csv")
    ):
        texts |= {found.target}  # of CSV files: the others say what they hold
    target = [] if found.target is None else [found.target]

    def batches(columns: Sequence[str]) -> Iterator[tuple[Path, Any]]:
        for file in files:
            for batch in read_batches(file, columns, texts, numbers):
                yield (
                    file,
                    _within_float32(batch, found.numeric, file) if fill is not None else batch,
                )

    _first_pass(
        (
            (f, b)
            for f in files
            for b in read_batches(f, target or [*recipe.steps][:1], texts, numbers)
        ),
        found,
        bool(found.target_kind),
    )
    if not found.rows:
        raise ArgumentError(f"feed.table: {files[0]} holds no row.")
    if recipe.state is None:
        recipe = recipe.fit_batches(lambda: batches([*recipe.steps]))
    if fill is not None:
        recipe = _filled(recipe, found.numeric, fill)
    _write_matrices(batches, files, found, recipe, folder)
    (folder / "about.json").write_text(json.dumps(found.__dict__))


def _filled(recipe: Recipe, numeric: Sequence[str], fill: str | float) -> Recipe:
    """A recipe that fills numbers and does not scale them, with the state of one that does."""
    state = {name: dict(each) for name, each in recipe.fitted.items()}
    for name in numeric:
        value = state[name]["center"] if fill == "mean" else None if fill == "nan" else fill
        state[name]["fill"] = value
    steps = {name: {} if name in numeric else do for name, do in recipe.steps.items()}
    return Recipe(steps, where=recipe.where, state={**(recipe.state or {}), "columns": state})


def _write_matrices(
    batches: Callable[[Sequence[str]], Iterator[tuple[Path, Any]]],
    files: Sequence[Path],
    found: _Columns,
    recipe: Recipe,
    folder: Path,
) -> None:
    numbers = [each.name for each in recipe.outputs if not each.size]
    coded = [each.name for each in recipe.outputs if each.size]
    numeric = _reserve_array(folder / "numeric.npy", np.float32, (found.rows, len(numbers)))
    codes = _reserve_array(folder / "categorical.npy", np.int32, (found.rows, len(coded)))
    kind = np.float32 if found.target_kind == "float" else np.int64
    target = _reserve_array(
        folder / "target.npy", kind, (found.rows if found.target is not None else 0,)
    )
    found.recipe = recipe.to_dict()
    missing = dict.fromkeys(recipe.steps, 0)
    appliers: dict[Path, Applied] = {}
    key = [recipe.key] if recipe.needs_folds else []
    at = 0
    for file, batch in batches([*recipe.steps, *filter(None, [*key, found.target])]):
        end = at + batch.num_rows
        if file not in appliers:
            appliers[file] = recipe.applied_to(file)
        made = appliers[file](batch, str(file), missing)
        for k, name in enumerate(numbers):
            numeric[at:end, k] = _float32(made[name], name, file)
        for k, name in enumerate(coded):
            codes[at:end, k] = made[name]
        if found.target is not None:
            target[at:end] = _targets(batch.column(found.target), found, file, at)
        at = end
    if at != found.rows:
        raise SampleError(
            f"{files[0]}: {found.rows:,} rows in the first pass and {at:,} in the second. It "
            "changed while it was read."
        )
    found.missing = missing
    for array in (numeric, codes, target):
        array.flush()


def _float32(values: Matrix, name: str, file: Path) -> Matrix:
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    if (bad := np.isinf(narrow)).any():
        raise ArgumentError(
            f"{file}: the prepared column {name!r} holds {values[np.argmax(bad)]:g}, beyond "
            "float32. Scale it, clip it, or take its log."
        )
    return narrow


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
        texts = as_level(column, f"{file}: the target {found.target!r}")
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
        numeric, categorical: names of the columns; of those that a recipe makes, where it has one.
        target: name of the column, or None.
        recipe: the fitted recipe, where :func:`table` was given one; else None.
        vocabularies: by categorical column: what the codes 1, 2, … stand for; 0 is missing or
            unknown.
        sizes: of each categorical column, how many codes there are: the rows of an embedding.
        mean, std: of each numeric column, over the rows that have a finite value; empty with a
            recipe.
        missing: values that were missing, by column.
        fill: what a missing number has become: ``"mean"``, ``"nan"`` or a number.
        normalize: whether numbers are read as ``(x - mean) / std``.
    """

    def __init__(
        self,
        folder: Path,
        key: str,
        normalize: bool,
        fill: str | float = "mean",
        prepared: bool = False,
    ) -> None:
        self.columns = _Columns(**json.loads((folder / "about.json").read_text()))
        recipe = Recipe.of(self.columns.recipe)
        self.recipe = recipe if prepared else None
        self.numeric = [each.name for each in recipe.outputs if not each.size]
        coded = [each for each in recipe.outputs if each.size]
        self.categorical = [each.name if prepared else each.column for each in coded]
        self.sizes = [each.size for each in coded]
        self.target, self.classes = self.columns.target, self.columns.classes
        self.missing = self.columns.missing
        state = recipe.fitted
        self.vocabularies = {
            name: [level for level, _ in state[each.column]["levels"]]
            for name, each in zip(self.categorical, coded, strict=True)
            if "levels" in state[each.column]
        }
        plain = [] if prepared else [state[name] for name in self.numeric]
        self.mean = [each["center"] for each in plain]
        self.std = [each["width"] for each in plain]
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
    recipe: Recipe | None = None,
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
        recipe: a fitted :class:`Recipe`, in place of ``numeric`` and ``categorical``: its numbers
            become the first matrix, its codes and bins the second. The target is that of the
            recipe where none is given. Each checkpoint and :meth:`ronde.Run.export` keep it.
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
    if recipe is not None:
        given = {
            "numeric": numeric,
            "categorical": categorical,
            "like": like,
            "missing": missing,
            "normalize": normalize,
        }
        if also := [name for name, value in given.items() if value not in ((), [], None)]:
            raise ArgumentError(
                f"feed.table: recipe= and {also[0]}= do not go together: the recipe decides."
            )
        recipe.fitted  # noqa: B018 - an error where it is not fitted
        found = _Columns([], [], recipe.target if target is None else target)
        if found.target in recipe.steps:
            raise ArgumentError(f"feed.table: the target {found.target!r} is among the columns.")
        normalize, missing = False, "mean"
    else:
        recipe, found, missing, normalize = _plain(
            numeric, categorical, target, like, missing, normalize
        )
    files = files_of(path, "feed.table", SUFFIXES)
    for file in files:
        if file.suffix.lower() not in SUFFIXES:
            raise ArgumentError(f"feed.table: {file} is none of {', '.join(SUFFIXES)}.")
    prepared = not found.numeric and not found.categorical
    if prepared:
        check_columns(recipe, files, applied=True)
    # Which files are those of the fit decides where a target mean is out of fold.
    key = digest_values(
        *("table", _VERSION, identity(files), json.dumps(found.__dict__), str(missing)),
        *(recipe.digest, json.dumps(recipe.inputs)),
    )
    fill = None if prepared else missing

    def make(into: Path) -> None:
        _build(files, found, recipe, fill, into)

    root = cache_root(cache) / "tables" if cache is None else cache_root(cache)
    source = TableSource(build_once(root, key, make), key, bool(normalize), missing, prepared)
    return Pipeline(source, collate=default_collate)


def _plain(
    numeric: Sequence[str],
    categorical: Sequence[str],
    target: str | None,
    like: Pipeline | None,
    missing: str | float | None,
    normalize: bool | None,
) -> tuple[Recipe, _Columns, str | float, bool]:
    """The recipe of ``numeric=`` and ``categorical=``, with the state of ``like``."""
    known: _Columns | None = None
    if like is not None:
        source = getattr(like, "source", like)
        if not isinstance(source, TableSource) or source.recipe is not None:
            raise ArgumentError("feed.table: like= takes a table from feed.table without recipe=.")
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
    steps: dict[str, Any] = {name: {"scale": "standard"} for name in found.numeric}
    steps.update({name: {"codes": True} for name in found.categorical})
    state = None
    if known is not None:
        state = known.recipe["fitted"]
        found.target_kind, found.classes = known.target_kind, known.classes
    recipe = Recipe(steps, where="feed.table", state=state)
    return recipe, found, missing, bool(normalize)
