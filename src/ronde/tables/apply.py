"""A fitted recipe on record batches: the same NumPy code in training, in serving, and on Spark."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ronde.tables.arrow import as_kind
from ronde.tables.logarithm import log1p
from ronde.tables.steps import (
    PERIODS,
    POINT_ZERO,
    Steps,
    gives_number,
    read_as,
    whole_numbers,
)
from ronde.world import ArgumentError

Values = npt.NDArray[Any]


class Applied:
    """Makes the columns of :func:`outputs_of` of a batch.

    Args:
        steps: of the recipe, by column.
        fitted: state by column.
        key: the column that decides folds; None where no target mean is taken out of fold.
        out_of_fold: whether the rows are those of the fit: a row's target mean then leaves out the
            rows of its own fold.
    """

    def __init__(
        self, steps: Steps, fitted: Mapping[str, Any], key: str | None, out_of_fold: bool = False
    ) -> None:
        self._steps, self._fitted = steps, fitted
        self._key = key if out_of_fold else None

    def __call__(self, batch: Any, place: str = "the table") -> dict[str, Values]:
        """The outputs by name.

        Args:
            place: what errors begin with.

        Raises:
            ArgumentError: a column is missing, or of another kind than at the fit.
        """
        key = None
        if self._key is not None:
            key = as_kind(self._column(batch, self._key, place), "key", f"{place}, key")
        made: dict[str, Values] = {}
        for name, do in self._steps.items():
            kind = read_as(do)
            column = self._column(batch, name, place)
            column = as_kind(column, kind, f"{place}: the column {name!r}")
            _BY_KIND[kind](made, name, do, self._fitted[name], column, key)
            if "missing_flag" in do:
                made[f"{name}_missing"] = _numpy(column.is_null()).astype(np.int8)
        return made

    def _column(self, batch: Any, name: str, place: str) -> Any:
        if name not in batch.schema.names:
            raise ArgumentError(f"{place} has no column {name!r}, which the recipe was fitted on.")
        return batch.column(name)


def _numpy(column: Any) -> Values:
    return np.asarray(column.to_numpy(zero_copy_only=False))


def _number(made: dict[str, Values], name: str, do: Any, state: Any, column: Any, key: Any) -> None:
    x = _numpy(column)
    if "bins" in do:
        edges = np.asarray(state["edges"], dtype=np.float64)
        bins = np.searchsorted(edges, x, side="left") + 1
        made[f"{name}_bin"] = np.where(np.isnan(x), 0, bins).astype(np.int64)
    if not gives_number(do):
        return
    # below the smallest value of the fit, 1 + x may be no positive number
    if "log" in do and state.get("clip", [None])[0] is None:
        x = np.maximum(x, state["min"])
    if column.null_count and state["fill"] is not None:
        x = np.where(np.isnan(x), state["fill"], x)
    if "clip" in do:
        x = np.clip(x, *state["clip"])
    if "log" in do:
        x = log1p(x)
    if "scale" in do:
        # Quarters of very large values: their difference might overflow.
        part = 0.25 if max(-state["min"], state["max"]) > 1e300 else 1.0
        x = (x * part - state["center"] * part) / (state["width"] * part)
    made[name] = x


def _codes_of(column: Any, state: Any) -> Values:
    """0 for what is missing, rare, or new; 1, 2, … for the levels."""
    import pyarrow as pa
    import pyarrow.compute as compute

    levels = [level for level, _ in state["levels"]]
    if state["lower"]:
        column = compute.utf8_lower(column)
    where = compute.index_in(column, value_set=pa.array(levels, pa.string()), skip_nulls=True)
    # 2, 2.0, and " 2" are one, as they are to whoever wrote them
    if where.null_count and (whole := whole_numbers(levels)) is not None:
        plain = compute.replace_substring_regex(
            compute.utf8_trim_whitespace(column), POINT_ZERO, ""
        )
        again = compute.index_in(plain, value_set=pa.array(whole, pa.string()), skip_nulls=True)
        where = compute.coalesce(where, again)
    return _numpy(compute.fill_null(where, -1)).astype(np.int64) + 1


def _level(made: dict[str, Values], name: str, do: Any, state: Any, column: Any, key: Any) -> None:
    codes = _codes_of(column, state)
    if "codes" in do:
        made[f"{name}_code"] = codes
    if "one_hot" in do:
        for i, (level, _) in enumerate(state["levels"], 1):
            made[f"{name}={level}"] = (codes == i).astype(np.int8)
    if "target_mean" in do:
        if key is None:
            made[f"{name}_mean"] = np.array([state["prior"], *state["means"]])[codes]
        else:
            table = np.array([state["fold_priors"], *state["fold_means"]])
            made[f"{name}_mean"] = table[codes, _numpy(key) % state["folds"]]


def _time(made: dict[str, Values], name: str, do: Any, state: Any, column: Any, key: Any) -> None:
    import pyarrow.compute as compute

    functions: dict[str, Callable[[Any], Any]] = {
        "day_of_year": compute.day_of_year,
        "weekday": lambda c: compute.add(compute.day_of_week(c), 1),
        **{part: getattr(compute, part) for part in ("year", "month", "day", "hour", "minute")},
    }
    for part in do["date"]:
        field = functions[part](column)
        values = _numpy(compute.fill_null(field, 0)).astype(np.int64)
        if "cyclic" not in do or part not in PERIODS:
            made[f"{name}_{part}"] = values
            continue
        # one sine for each of the few values, not for each row
        circle = 2.0 * np.pi * np.arange(PERIODS[part] + 1) / PERIODS[part]
        absent = _numpy(column.is_null())
        for wave in (np.sin, np.cos):
            made[f"{name}_{part}_{wave.__name__}"] = np.where(absent, 0.0, wave(circle)[values])


def _text(made: dict[str, Values], name: str, do: Any, state: Any, column: Any, key: Any) -> None:
    import pyarrow as pa
    import pyarrow.compute as compute

    column = compute.fill_null(column, "")
    words = compute.split_pattern_regex(compute.utf8_lower(column), r"[^\p{L}\p{N}]+")
    rows, flat = _numpy(compute.list_parent_indices(words)), compute.list_flatten(words)
    real = _numpy(compute.not_equal(flat, ""))
    rows = rows[real]
    if do["text"].get("length"):
        made[f"{name}_chars"] = _numpy(compute.utf8_length(column)).astype(np.int64)
        made[f"{name}_words"] = np.bincount(rows, minlength=len(column)).astype(np.int64)
    if size := do["text"].get("words", 0):
        coded = flat.filter(pa.array(real)).dictionary_encode()
        # Python's own hash() has another seed in each process
        hashes = [zlib.crc32(w.encode()) % size for w in coded.dictionary.to_pylist()]
        at = np.array(hashes, dtype=np.int64)[_numpy(coded.indices)]
        counts = np.bincount(rows * size + at, minlength=len(column) * size)
        for i, each in enumerate(counts.reshape(len(column), size).T):
            made[f"{name}_{i}"] = each.astype(np.int64)


_BY_KIND: dict[str, Callable[..., None]] = {
    "number": _number,
    "level": _level,
    "time": _time,
    "text": _text,
}
