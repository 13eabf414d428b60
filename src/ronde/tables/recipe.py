"""A preparation recipe: steps by column, what they have learned of a table, and applying both."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from ronde.tables.apply import Applied
from ronde.tables.arrow import (
    READ_BY,
    WHOLE_KEY,
    arrow_of_spark,
    family,
    is_whole_type,
    one_table,
)
from ronde.tables.engines import Arrow, Kinds, canonical, duckdb_engine, spark_engine
from ronde.tables.fit import fit_steps
from ronde.tables.reading import SUFFIXES, columns_of, is_parquet, read_batches
from ronde.tables.steps import PreparedColumn, checked, near, outputs_of, read_as
from ronde.world import ArgumentError
from ronde.world.paths import file_digest, files_of, is_remote, need

ENGINES = ("duckdb", "arrow", "spark")
_VERSION = 1
_FIELDS = ("columns", "target", "key")
_ROWS = 1 << 17  # of a batch: some tens of megabytes of float64, and long loops in NumPy


class Recipe:
    """How the columns of a table become numbers and codes; fitted once, applied anywhere.

    Args:
        columns: steps by column, such as ``{"age": {"impute": "median", "scale": "standard"}}``.
        target: the column to predict.
        key: a column of whole numbers; decides the folds of target means.
        where: what errors begin with.
        state: what was learned, as :meth:`to_dict` gives it.

    Attributes:
        steps: the steps of each column, checked.
        target, key: names, or None.
        state: None before :meth:`fit`; then ``rows``, and ``columns`` with the state of each.
        inputs: name and SHA-256 of each file that it was fitted on.

    Raises:
        ArgumentError: a step is unknown, or its value is none it takes.

    Example:
        >>> import pyarrow as pa
        >>> table = pa.table({"age": [30.0, None, 50.0], "city": ["Rome", "Oslo", "Rome"]})
        >>> recipe = Recipe({"age": {"scale": "standard"}, "city": {"codes": True}}).fit(table)
        >>> recipe.apply(table).to_pydict()
        {'age': [-1.0, 0.0, 1.0], 'city_code': [2, 1, 2]}
    """

    def __init__(
        self,
        columns: Mapping[str, Any],
        target: str | None = None,
        key: str | None = None,
        *,
        where: str = "recipe",
        state: Mapping[str, Any] | None = None,
        inputs: Sequence[Mapping[str, str]] = (),
    ) -> None:
        self.steps = checked(columns, where)
        self.target, self.key, self.where = target, key, where
        self.state = dict(state) if state is not None else None
        self.inputs = [dict(each) for each in inputs]
        self.needs_folds = any("target_mean" in do for do in self.steps.values())
        for field, name in (("target", target), ("key", key)):
            if name is None and self.needs_folds:
                raise ArgumentError(f"{where}: target_mean needs {field}: the name of a column.")
            if name is not None and not isinstance(name, str):
                raise ArgumentError(f"{where}: {field} {name!r} is no name of a column.")
            if name in self.steps:
                raise ArgumentError(f"{where}: {field} {name!r} is among columns.")
        if self.state is not None:
            names = [target, key, *(each.name for each in self.outputs)]
            if twice := sorted({n for n in names if n is not None and names.count(n) > 1}):
                raise ArgumentError(f"{where}: two columns would be called {twice[0]!r}.")

    def __repr__(self) -> str:
        fitted = f"fitted, sha256 {self.digest[:12]}" if self.state else "not fitted"
        return f"recipe: {len(self.steps)} columns, {fitted}"

    # -- files ---------------------------------------------------------------------------

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Recipe:
        """A recipe of a YAML file; a fitted one of JSON, or of a model that ``run.export`` wrote.

        Raises:
            ArgumentError: the file is missing, or holds no recipe.
        """
        file = Path(path)
        if file.suffix == ".safetensors":
            return cls._exported(file)
        try:
            text = file.read_text(encoding="utf-8")
            given = json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
        except OSError as error:
            raise ArgumentError(f"{file} cannot be read: {error.strerror}.") from None
        except (ValueError, yaml.YAMLError) as error:
            line = str(error).replace("\n", " ")
            raise ArgumentError(f"{file} is neither YAML nor JSON: {line}") from None
        return cls.of(given, file.name)

    @classmethod
    def _exported(cls, file: Path) -> Recipe:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(file, "numpy") as opened:
                text = (opened.metadata() or {}).get("recipe")
        except (OSError, SafetensorError) as error:
            raise ArgumentError(f"{file} cannot be read: {error}.") from None
        if text is None:
            raise ArgumentError(f"{file} holds no recipe: it was trained without one.")
        return cls.of(json.loads(text), file.name)

    @classmethod
    def of(cls, given: Any, where: str = "recipe") -> Recipe:
        """A recipe of what :meth:`to_dict` gave, or a YAML file holds."""
        if not isinstance(given, dict):
            raise ArgumentError(f"{where} must have the field columns.")
        version = given.get("version", _VERSION)
        if version != _VERSION:
            raise ArgumentError(
                f"{where} is a recipe of version {version}; this Ronde reads version {_VERSION}."
            )
        known = (*_FIELDS, "version", "fitted", "inputs")
        for field in given:
            if field not in known:
                raise ArgumentError(f"{where}: unknown field {field!r}{near(field, known, '.')}")
        fields = {name: given.get(name) for name in _FIELDS}
        more = {"state": given.get("fitted"), "inputs": given.get("inputs", ())}
        return cls(**fields, where=where, **more)  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON holds it."""
        fields = {"version": _VERSION, "target": self.target, "key": self.key}
        fitted = {"fitted": self.state, "inputs": self.inputs} if self.state else {}
        return {**fields, "columns": self.steps, **fitted}

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write YAML; or JSON, which keeps what was fitted, to a name ending in ``.json``."""
        file, given = Path(path), self.to_dict()
        if file.suffix == ".json":
            file.write_text(json.dumps(given, indent=1, ensure_ascii=False) + "\n", "utf-8")
            return
        fields = {k: v for k, v in given.items() if k in _FIELDS and v is not None}
        file.write_text(yaml.safe_dump(fields, sort_keys=False, allow_unicode=True), "utf-8")

    @property
    def digest(self) -> str:
        """SHA-256 of the steps and of what was fitted; the same on every engine."""
        # not of the files: rows in another order, or in other parts, are the same fit
        given = {k: v for k, v in self.to_dict().items() if k != "inputs"}
        return hashlib.sha256(_json(given).encode()).hexdigest()

    def difference(self, then: Recipe) -> str:
        """The first thing in which this recipe differs from an earlier one, in a sentence."""
        now, before = self._facts(), then._facts()
        for what in {**before, **now}:
            if _json(now.get(what)) != _json(before.get(what)):
                pair = [reprlib.repr(facts.get(what)) for facts in (now, before)]
                return f"{what} is {pair[0]}, and was {pair[1]}"
        return "nothing"

    def _facts(self) -> dict[str, Any]:
        """What its digest is of, one thing after the other."""
        state = self.state or {"rows": None, "columns": {}}
        facts: dict[str, Any] = {"target": self.target, "key": self.key, "columns": [*self.steps]}
        for kind, columns in (("", self.steps), ("fitted ", state["columns"])):
            for name, fields in columns.items():
                facts |= {f"{kind}{field} of {name!r}": value for field, value in fields.items()}
        return {**facts, "rows of the fit": state["rows"]}

    # -- fit -----------------------------------------------------------------------------

    def fit(
        self, data: Any, engine: str | None = None, threads: int | None = None, spark: Any = None
    ) -> Recipe:
        """A fitted copy.

        Args:
            data: paths of Parquet, CSV, or Arrow files; or a pandas, Polars, Arrow, or Spark frame.
            engine: ``duckdb``, ``arrow``, or ``spark``. By default a Spark frame is fitted on
                Spark, another frame on PyArrow, files on DuckDB.
            threads: of DuckDB; all usable cores by default.
            spark: a session, to read paths with Spark.

        Raises:
            ArgumentError: a column is missing, or has another type than its steps need.
            SampleError: a file is damaged.
        """
        need("pyarrow", "tables", "Fitting a recipe")
        if engine is not None and engine not in ENGINES:
            raise ArgumentError(f"engine={engine!r}: choose {', '.join(ENGINES)}.")
        need("narwhals", "tables", "Fitting a recipe")
        opened, files = _open(self, data, engine, threads, spark)
        with contextlib.closing(opened):
            state = fit_steps(opened, self.steps, self.target, self.key, self.where)
        inputs = [{"name": file.name, "sha256": file_digest(file)} for file in files]
        return Recipe(
            self.steps, self.target, self.key, where=self.where, state=state, inputs=inputs
        )

    @property
    def reads(self) -> Kinds:
        """What a fit reads: of each column whether it is a number, a level, a time, a text."""
        kinds = {name: read_as(do) for name, do in self.steps.items()}
        folds = {str(self.target): "number", str(self.key): "key"} if self.needs_folds else {}
        return {**kinds, **folds}

    # -- apply ---------------------------------------------------------------------------

    @property
    def fitted(self) -> dict[str, Any]:
        """State by column.

        Raises:
            ArgumentError: the recipe is not fitted.
        """
        if self.state is None:
            raise ArgumentError(f"{self.where} is not fitted: call fit() first.")
        columns: dict[str, Any] = self.state["columns"]
        return columns

    @cached_property
    def outputs(self) -> list[PreparedColumn]:
        """The columns it makes, in their order."""
        return outputs_of(self.steps, self.fitted)

    def apply(self, data: Any, out_of_fold: bool = False) -> Any:
        """The prepared table, as the same kind of frame; an Arrow table for paths.

        Never refits. Target and key are handed on where the table has them.

        Args:
            data: as for :meth:`fit`.
            out_of_fold: whether the rows are those of the fit: a target mean then leaves out the
                rows of its own fold. Paths are recognized by their digest.

        Raises:
            ArgumentError: a column is missing, or of another type than at the fit.
        """
        import pyarrow as pa

        if is_spark(data):
            return self._apply_on_spark(data, out_of_fold)
        if is_path(data):
            files = files_of(data, "recipe.apply", SUFFIXES)
            made = [(pa.Table.from_batches(self.batches(file)), file) for file in files]
            return one_table(made, "recipe.apply")
        table, back = _arrow_table(data, self)
        make = Applied(self.steps, self.fitted, self.key, out_of_fold)
        parts = table.to_batches(max_chunksize=_ROWS) or [_empty(table.schema)]
        return back(pa.Table.from_batches([self._prepared(make, part, "data") for part in parts]))

    def matrices(
        self, prepared: Any, where: str
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """A prepared table, or batch, as a model takes it: numbers, and codes, one column each.
        ``where``: what an error begins with.

        Raises:
            ArgumentError: a number is beyond float32.
        """

        def stacked(coded: bool, kind: Any) -> npt.NDArray[Any]:
            names = [each.name for each in self.outputs if bool(each.size) == coded]
            matrix = np.empty((prepared.num_rows, len(names)), kind)
            for column, name in zip(matrix.T, names, strict=True):
                values = np.asarray(prepared[name])
                column[:] = values if coded else narrow(values, name, where)
            return matrix

        return stacked(False, np.float32), stacked(True, np.int64)

    def batches(self, file: Path) -> Iterator[Any]:
        """The prepared record batches of a file."""
        types = check_columns(self, [file], applied=True)
        handed = [n for n in (self.target, self.key) if n is not None and n in types[0]]
        # a file of the fit has its rows in the target means
        out_of_fold = self.needs_folds and self.was_fitted_on(file)
        make = Applied(self.steps, self.fitted, self.key, out_of_fold)
        parts = read_batches(file, [*self.steps, *handed], *self.csv_types)
        empty = True
        for part in parts:
            empty = False
            yield self._prepared(make, part, str(file))
        if empty:
            import pyarrow as pa

            # A CSV file without rows has no types of its own.
            usual = {"number": pa.float64(), "key": pa.int64(), None: pa.null()}
            names = {n: usual.get(self.reads.get(n), pa.string()) for n in [*self.steps, *handed]}
            schema = pa.schema([(n, types[0][n] or kind) for n, kind in names.items()])
            yield self._prepared(make, _empty(schema), str(file))

    @property
    def csv_types(self) -> tuple[frozenset[str], frozenset[str]]:
        """The columns that a CSV file holds as text, and as numbers."""
        texts = frozenset(n for n, kind in self.reads.items() if kind in ("level", "time", "text"))
        return texts, frozenset(n for n, kind in self.reads.items() if kind == "number")

    def was_fitted_on(self, file: Path) -> bool:
        """Whether a file is one of those of the fit, by its SHA-256.

        Raises:
            ArgumentError: the fit was on a frame, which leaves nothing to tell by.
        """
        if not self.inputs:
            raise ArgumentError(
                f"{self.where} was fitted on a frame, so it cannot tell whether {file} holds the "
                "rows of the fit, which target_mean must leave out. Fit it on files."
            )
        return file_digest(file) in {each["sha256"] for each in self.inputs}

    def _prepared(self, make: Applied, batch: Any, place: str) -> Any:
        import pyarrow as pa

        made = make(batch, place)
        handed = [n for n in (self.key, self.target) if n is not None and n in batch.schema.names]
        names = [each.name for each in self.outputs]
        columns = [batch.column(n) for n in handed] + [pa.array(made[n]) for n in names]
        return pa.record_batch(columns, names=[*handed, *names])

    def _apply_on_spark(self, frame: Any, out_of_fold: bool) -> Any:
        from pyspark.sql import types

        kinds = {"double": types.DoubleType, "long": types.LongType, "byte": types.ByteType}
        check_columns(self, [frame], applied=True)
        handed = [n for n in (self.key, self.target) if n is not None and n in frame.columns]
        schema = types.StructType(
            [frame.schema[n] for n in handed]
            + [types.StructField(o.name, kinds[o.type]()) for o in self.outputs]
        )
        make, prepared = Applied(self.steps, self.fitted, self.key, out_of_fold), self._prepared

        def each(batches: Iterator[Any]) -> Iterator[Any]:
            yield from (prepared(make, batch, "the Spark frame") for batch in batches)

        wanted = [frame["`" + n.replace("`", "``") + "`"] for n in [*handed, *self.steps]]
        return frame.select(*wanted).mapInArrow(each, schema)


def narrow(values: npt.NDArray[Any], name: str, where: str) -> npt.NDArray[np.float32]:
    """Numbers as float32; missing is NaN.

    Raises:
        ArgumentError: one is beyond float32.
    """
    with np.errstate(over="ignore"):
        narrowed = values.astype(np.float32)
    if (bad := np.isinf(narrowed)).any():
        raise ArgumentError(
            f"{where}: the column {name!r} holds {values[np.argmax(bad)]:g}, beyond float32. Scale "
            "it, clip it, or take its log."
        )
    return narrowed


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def is_path(data: Any) -> bool:
    """Whether data are paths of files rather than a frame."""
    return isinstance(data, str | os.PathLike | list | tuple)


def is_spark(data: Any) -> bool:
    """Whether data are a frame of Spark."""
    return hasattr(data, "sparkSession")


def _empty(schema: Any) -> Any:
    import pyarrow as pa

    return pa.record_batch([pa.array([], f.type) for f in schema], names=schema.names)


def _arrow_table(data: Any, recipe: Recipe, is_fit: bool = False) -> tuple[Any, Any]:
    """The columns of a frame that a recipe reads, and what makes a frame of its kind again."""
    import narwhals as nw
    import pyarrow as pa

    needed = [*recipe.reads, *(n for n in (recipe.target, recipe.key) if n is not None)]

    def among(names: Sequence[Any]) -> list[str]:
        if is_fit:
            _check_names(recipe, recipe.reads, names, "the table")
        present = [n for n in dict.fromkeys(needed) if n in names]
        if twice := next((n for n in present if list(names).count(n) > 1), None):
            raise ArgumentError(f"{recipe.where}: the table has two columns named {twice!r}.")
        return present

    if isinstance(data, pa.RecordBatch):
        table = pa.Table.from_batches([data]).select(among(data.schema.names))
        return table, lambda made: (made.combine_chunks().to_batches() or [_empty(made.schema)])[0]
    if isinstance(data, pa.Table):
        return data.select(among(data.column_names)), lambda made: made
    if hasattr(data, "iloc"):  # pandas allows two columns of one name, which narwhals refuses
        data = data[among(list(data.columns))]
    try:
        frame: Any = nw.from_native(data)
    except TypeError:
        raise ArgumentError(
            f"recipe: {type(data).__name__} is no table: expected paths of files, or a pandas, "
            "Polars, Arrow, or Spark frame."
        ) from None
    frame = frame.collect() if isinstance(frame, nw.LazyFrame) else frame
    frame = frame.select(among(frame.columns))

    def back(prepared: Any) -> Any:
        made = nw.from_arrow(prepared, backend=frame.implementation).to_native()
        if hasattr(data, "iloc"):
            made.index = data.index
        return made

    return frame.to_arrow(), back


def _types_of(source: Any, needed: Iterable[str]) -> dict[str, Any]:
    """Arrow types by column of a file, or of an Arrow or Spark frame."""
    if isinstance(source, Path):
        return columns_of(source, needed)
    if is_spark(source):
        return {field.name: arrow_of_spark(field.dataType) for field in source.schema}
    return dict(zip(source.schema.names, source.schema.types, strict=True))


def check_columns(
    recipe: Recipe, sources: Sequence[Any], applied: bool = False
) -> list[dict[str, Any]]:
    """The types of each file or frame, which have all columns that the recipe reads.

    Raises:
        ArgumentError: a column is missing, or its type is none for the steps.
    """
    all_types = []
    reads = {n: k for n, k in recipe.reads.items() if not applied or n in recipe.steps}
    for source in sources:
        place = str(source) if isinstance(source, Path) else "the table"
        types = _types_of(source, reads)
        _check_names(recipe, reads, list(types), place, applied)
        for name, kind in reads.items():
            where = f"{recipe.where}, column {name!r}"
            if types[name] is not None and family(types[name], where) not in READ_BY[kind]:
                raise ArgumentError(
                    f"{where}: {place} has {types[name]}, and "
                    f"{', '.join(recipe.steps.get(name, ())) or 'this'} needs "
                    f"{' or '.join(READ_BY[kind])}."
                )
            if kind == "key" and types[name] is not None and not is_whole_type(types[name]):
                raise ArgumentError(f"{where}: {place} has {types[name]}: {WHOLE_KEY}")
        all_types.append(types)
    if not applied:
        _check_families(recipe, sources, all_types)
    return all_types


def _check_families(
    recipe: Recipe, sources: Sequence[Any], all_types: Sequence[Mapping[str, Any]]
) -> None:
    """Refuse a level that is text in one file and a number in another: engines spell it apart."""
    import pyarrow as pa

    for name in (n for n, kind in recipe.reads.items() if kind == "level"):
        first: dict[str, str] = {}
        for source, types in zip(sources, all_types, strict=True):
            if (kind := types.get(name)) is not None and not pa.types.is_null(kind):
                place = f"{recipe.where}, column {name!r}"
                first.setdefault(family(kind, place), f"{kind} in {source}")
        if len(first) > 1:
            one, other, *_ = first.values()
            raise ArgumentError(
                f"{recipe.where}, column {name!r} is {one}, and {other}. Cast one to the other."
            )


def _check_names(
    recipe: Recipe, reads: Iterable[str], names: Sequence[Any], place: str, applied: bool = False
) -> None:
    """Refuse a column to read that is missing, or whose name another one has too."""
    for name in reads:
        if name not in names:
            if name == recipe.target:
                raise ArgumentError(
                    f"{recipe.where}: target_mean uses {name!r}, which {place} lacks: fine "
                    "when applying, not when fitting."
                )
            hint = near(name, map(str, names), ".")
            raise ArgumentError(
                f"{recipe.where}, column {name!r}: {place} has no such column{hint}"
            )
        same = [other for other in names if str(other).casefold() == name.casefold()]
        if len(same) > 1 and not applied:
            raise ArgumentError(
                f"{recipe.where}, column {name!r}: {place} has {same[0]!r} and {same[1]!r}, and "
                "DuckDB and Spark ignore case. Rename one."
            )


def _open(
    recipe: Recipe, data: Any, engine: str | None, threads: int | None, spark: Any
) -> tuple[Any, list[Path]]:
    """An engine that answers the queries of a fit, and the files that it reads."""
    kinds = recipe.reads
    files: list[Path] = []
    if is_path(data) and engine == "spark":
        paths = [os.fspath(p) for p in (data if isinstance(data, list | tuple) else [data])]
        if not any(map(is_remote, paths)):
            files = files_of(paths, "recipe.fit", SUFFIXES)
            _check_families(recipe, files, [columns_of(file) for file in files])
        data = spark.read.parquet(*paths)
    if is_spark(data):
        [types] = check_columns(recipe, [data])
        return spark_engine(data, kinds, _fractional(kinds, [types])), files
    if engine == "spark":
        raise ArgumentError("engine='spark' fits a Spark frame, or paths of Parquet files.")
    if is_path(data):
        files = files_of(data, "recipe.fit", SUFFIXES)
        all_types = check_columns(recipe, files)

        def batches() -> Iterator[Any]:
            for file in files:
                for part in read_batches(file, list(kinds), *recipe.csv_types):
                    yield canonical(part, kinds, str(file))

    else:
        table, _ = _arrow_table(data, recipe, is_fit=True)
        all_types = check_columns(recipe, [table])

        def batches() -> Iterator[Any]:
            for part in table.to_batches(max_chunksize=_ROWS) or [_empty(table.schema)]:
                yield canonical(part, kinds, "the table")

    if engine == "arrow" or (engine is None and not files):
        return Arrow(batches), files
    fractional = _fractional(kinds, all_types)
    given = None if files and all(map(is_parquet, files)) else batches
    return duckdb_engine(files, given, kinds, fractional, threads), files


def _fractional(kinds: Kinds, types: Sequence[Mapping[str, Any]]) -> set[str]:
    """Levels that are floats, whose text is not left to an engine."""
    import pyarrow.types as t

    return {
        name
        for name, kind in kinds.items()
        for each in types
        if kind == "level"
        and each[name] is not None
        and (t.is_floating(each[name]) or t.is_decimal(each[name]))
    }
