"""Tables as training data: a float32 matrix and an int64 matrix of codes, by a fitted recipe."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import default_collate

from ronde.data.build_once import build_once, cache_root
from ronde.data.pipeline import Pipeline
from ronde.data.sources.base import BaseSource, Batch, check_ids, digest_values
from ronde.tables import Recipe
from ronde.tables.arrow import as_level, as_number, family
from ronde.tables.reading import SUFFIXES
from ronde.tables.recipe import narrow
from ronde.tables.steps import level_order
from ronde.world import ArgumentError
from ronde.world.paths import files_of, need

_VERSION = 5

Matrix = npt.NDArray[Any]


class _Matrix(NamedTuple):
    """A matrix on disk, raw, in C order."""

    name: str
    type: str
    shape: tuple[int, ...]

    def open(self, folder: Path) -> Matrix:
        # Raw, without a header: an upgrade that changes the form changes _VERSION.
        if 0 in self.shape:  # an empty file cannot be mapped
            return np.empty(self.shape, self.type)
        return np.memmap(folder / self.name, self.type, "r", shape=self.shape).view(np.ndarray)


class _Target:
    """The target column, batch by batch: numbers, or texts that become classes."""

    def __init__(self, name: str, classes: Sequence[str] | None) -> None:
        self.name = name
        self.classes = classes
        self.kind = "text" if classes is not None else ""
        self._parts: list[Any] = []
        self._rows = 0

    def add(self, batch: Any, file: Path) -> None:
        place = f"{file}: the target {self.name!r}"
        if self.name not in batch.schema.names:
            raise ArgumentError(f"{file} has no column {self.name!r}, which is the target.")
        column = batch.column(self.name)
        kind = family(column.type, place)
        if self.classes is not None or kind == "text":
            kind, column = "text", as_level(column, place)
        elif kind in ("number", "bool"):
            kind, column = "number", _whole_or_float(column, place)
        if kind != (self.kind or kind) or kind == "time":
            raise ArgumentError(f"{place} is {kind}: expected {self.kind or 'numbers or texts'}.")
        self.kind = kind
        if column.null_count:
            row = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
            raise ArgumentError(
                f"{place} is missing, or no finite number; the first such row of the table is "
                f"{self._rows + row:,}."
            )
        self._parts.append(column.dictionary_encode() if kind == "text" else column.to_numpy())
        self._rows += batch.num_rows

    def values(self) -> Matrix:
        """float32, int64, or the int64 classes of texts, which ``classes`` then holds, sorted.

        Raises:
            ArgumentError: a text is none of the classes that were given, or a number is beyond
                float32.
        """
        if self.kind == "text":
            return self._class_numbers()
        values = np.concatenate([np.zeros(0, np.int64), *self._parts])
        return narrow(values, self.name, "feed.table") if values.dtype.kind == "f" else values

    def _class_numbers(self) -> Matrix:
        import pyarrow as pa
        import pyarrow.compute as compute

        texts = pa.chunked_array(self._parts)
        if self.classes is None:
            self.classes = sorted(texts.unique().to_pylist(), key=level_order)
        known = pa.array(self.classes, pa.string())
        numbers = compute.fill_null(
            compute.index_in(texts.cast(pa.string()), value_set=known), -1
        ).to_numpy()
        if (unknown := numbers < 0).any():
            row = int(np.argmax(unknown))
            raise ArgumentError(
                f"feed.table: the target {self.name!r} is an unknown class "
                f"({texts[row].as_py()!r}); the first such row of the table is {row:,}."
            )
        return cast("Matrix", numbers.astype(np.int64))


def _whole_or_float(column: Any, place: str) -> Any:
    """Numbers as int64 or, where they are no whole numbers, as float64 with null for infinity."""
    import pyarrow as pa

    if pa.types.is_floating(column.type) or pa.types.is_decimal(column.type):
        return as_number(column, place)
    try:
        return column.cast(pa.int64())
    except pa.ArrowInvalid as error:
        raise ArgumentError(f"{place}: {error}") from None


def _build(files: Sequence[Path], recipe: Recipe, target: _Target | None, folder: Path) -> None:
    """Write the matrices, and ``about.json`` with their shapes and the classes."""
    rows = 0
    with ExitStack() as stack:
        numeric, coded = (
            stack.enter_context((folder / name).open("wb")) for name in ("numeric", "codes")
        )
        for file in files:
            for batch in recipe.batches(file):
                numbers, codes = recipe.matrices(batch, "feed.table")
                numbers.tofile(numeric)
                codes.astype(np.int32).tofile(coded)  # half of the bytes that a batch needs
                if target is not None:
                    target.add(batch, file)
                rows += batch.num_rows
    if not rows:
        raise ArgumentError(f"feed.table: {files[0]} holds no row.")
    matrices = [
        _Matrix("numeric", "float32", (rows, numbers.shape[1])),
        _Matrix("codes", "int32", (rows, codes.shape[1])),
    ]
    if target is not None:
        values = target.values()
        values.tofile(folder / "target")
        matrices.append(_Matrix("target", str(values.dtype), (rows,)))
    about = {"matrices": matrices, "classes": target.classes if target is not None else None}
    (folder / "about.json").write_text(json.dumps(about))


class TableSource(BaseSource):
    """See :func:`table`.

    Attributes:
        recipe: the fitted recipe.
        numeric, categorical: names of the columns that the recipe makes: numbers, and codes.
        sizes: how many codes each categorical column has, 0 included: the rows of an embedding.
        target: name of the column, or None.
        classes: texts of a target that became 0, 1, …; None for a target of numbers.
    """

    def __init__(self, folder: Path, key: str, recipe: Recipe, target: str | None) -> None:
        about = json.loads((folder / "about.json").read_text())
        self.recipe = recipe
        self.numeric = [each.name for each in recipe.outputs if not each.size]
        self.categorical = [each.name for each in recipe.outputs if each.size]
        self.sizes = [each.size for each in recipe.outputs if each.size]
        self.target, self.classes = target, about["classes"]
        self._matrices = [_Matrix(name, kind, tuple(s)) for name, kind, s in about["matrices"]]
        self._folder, self._key = folder, key
        self._arrays: list[Matrix] | None = None

    def __len__(self) -> int:
        return self._matrices[0].shape[0]

    def __repr__(self) -> str:
        return (
            f"table: {len(self):,} rows, {len(self.numeric)} numeric and "
            f"{len(self.categorical)} categorical columns, target {self.target!r}"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_arrays": None}  # a memory map would be copied as an array

    @property
    def fingerprint(self) -> str:
        """Covers the files, the recipe, and the target."""
        return digest_values("table", self._key)

    def _open(self) -> list[Matrix]:
        if self._arrays is None:
            try:
                self._arrays = [each.open(self._folder) for each in self._matrices]
            except (OSError, ValueError) as error:
                raise ArgumentError(
                    f"{self._folder}, where the matrices of a table are kept, is missing or "
                    f"damaged ({error}). Run again to rebuild it."
                ) from error
        return self._arrays

    def read(self, ids: Sequence[int]) -> Batch:
        """``(inputs, target)`` of these rows, gathered by column block."""
        wanted = check_ids(ids, len(self))
        numeric, codes, *target = self._open()
        inputs: list[torch.Tensor] = []
        if self.numeric:
            inputs.append(torch.from_numpy(np.take(numeric, wanted, axis=0)))
        if self.categorical:
            inputs.append(torch.from_numpy(np.take(codes, wanted, axis=0)).to(torch.int64))
        columns = inputs[0] if len(inputs) == 1 else tuple(inputs)
        return Batch((columns, *(torch.from_numpy(np.take(t, wanted)) for t in target)))


def table(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    recipe: Recipe | None = None,
    like: Pipeline | None = None,
    target: str | None = None,
    cache: str | os.PathLike[str] | None = None,
    **columns: Any,
) -> Pipeline:
    """Rows of Parquet, CSV or Arrow files as numbers: ``(inputs, target)`` (extra ``tables``).

    The files are prepared once, in batches, into matrices on disk that all processes of a machine
    map into memory. They are written atomically, and rebuilt when a file or the recipe changes.

    Args:
        path: a file, a folder, a glob, or a list of such; ``.parquet``, ``.csv`` (with a header),
            ``.arrow``/``.feather``/``.ipc``.
        recipe: a fitted :class:`Recipe`: its numbers become a ``float32`` matrix, its codes and
            bins an ``int64`` one. Each checkpoint and :meth:`ronde.Run.export` keep it.
        like: another table, whose recipe and classes count here too: the training set's, for a
            test set.
        target: the column to predict, that of the recipe where None: floating-point numbers as
            ``float32``, whole ones as ``int64``, texts as ``int64`` classes 0, 1, …
            (``source.classes``). A missing or infinite target is an error.
        cache: folder for the matrices; ``$XDG_CACHE_HOME/ronde/tables`` or
            ``~/.cache/ronde/tables`` where None.

    Returns:
        A pipeline read by batch; its ``source`` is a :class:`TableSource`. Inputs are one matrix,
        or ``[numbers, codes]`` where the recipe makes both. Without a target, a row is
        ``(inputs,)``.

    Raises:
        ArgumentError: no recipe, no such file or column, a column of another type than at the fit,
            a target that is missing or unknown; it says which.
        SampleError: a file is damaged; it is named.

    Example:
        >>> import pathlib, tempfile
        >>> here = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (here / "t.csv").write_text("age,city,y\\n30,Rome,1\\n,Oslo,0\\n50,Rome,1\\n")
        >>> recipe = Recipe({"age": {"impute": "mean"}, "city": {"codes": True}}, target="y")
        >>> data = table(here / "t.csv", recipe=recipe.fit(here / "t.csv"), cache=here / "cache")
        >>> (ages, cities), y = data.collate(data.__getitems__([0, 1, 2]))
        >>> ages[:, 0].tolist(), cities[:, 0].tolist(), y.tolist(), data.source.sizes
        ([30.0, 40.0, 50.0], [2, 1, 2], [1, 0, 1], [3])
    """
    need("pyarrow", "tables", "feed.table")
    source = getattr(like, "source", None)
    if like is not None and not isinstance(source, TableSource):
        raise ArgumentError("feed.table: like= takes a table from feed.table.")
    if recipe is None and source is not None:
        recipe = source.recipe
        target = source.target if target is None else target
    if recipe is None or columns:
        raise ArgumentError(
            f"feed.table{f': {next(iter(columns))}= is unknown; it' if columns else ''} takes the "
            'columns from recipe=, a fitted one: feed.Recipe({"age": {"scale": "standard"}, '
            '"city": {"codes": True}}, target="y").fit(files), or what ronde prepare wrote.'
        )
    recipe.fitted  # noqa: B018 - an error where it is not fitted
    files = files_of(path, "feed.table", SUFFIXES)
    for file in files:
        if file.suffix.lower() not in SUFFIXES:
            raise ArgumentError(f"feed.table: {file} is none of {', '.join(SUFFIXES)}.")
    reads = recipe
    if target not in (None, recipe.target):
        fields = {"where": recipe.where, "state": recipe.state, "inputs": recipe.inputs}
        reads = Recipe(recipe.steps, target, recipe.key, **fields)  # type: ignore[arg-type]
    classes = source.classes if source is not None else None
    # Which files are those of the fit decides where a target mean is out of fold.
    states = [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    key = digest_values(
        *("table", _VERSION, states, json.dumps(classes)),
        *(reads.digest, json.dumps(recipe.inputs)),
    )

    def make(into: Path) -> None:
        column = _Target(reads.target, classes) if reads.target is not None else None
        _build(files, reads, column, into)

    root = cache_root() / "tables" if cache is None else Path(cache)
    source = TableSource(build_once(root, key, make), key, recipe, reads.target)
    return Pipeline(source, collate=default_collate)
