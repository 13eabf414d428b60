"""This worker's rows of a table: read, checked, and encoded as numbers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from ronde.data.order import key_of, permute
from ronde.tables.reading import read_share
from ronde.world import ArgumentError, World
from ronde.world.consensus import gather_json
from ronde.world.paths import need

__all__ = ["TableRows", "gather_arrays", "keyed_sample", "read_rows", "spread"]

Floats = npt.NDArray[np.floating[Any]]
Levels = dict[str, list[str] | None]
"""Categorical column -> its values in the order of their codes; None where the table has codes."""


@dataclass(frozen=True)
class TableRows:
    """Some rows of a table.

    Attributes:
        x: (n, columns) float32; NaN is missing, a category is its code.
        y: (n,) float64 labels.
        weight: (n,) float64, or None.
        ids: (n,) places of the rows in the whole table.
        total: rows of the whole table.
        names: of the columns.
        levels: the categorical columns among them.
    """

    x: npt.NDArray[np.float32]
    y: npt.NDArray[np.float64]
    weight: npt.NDArray[np.float64] | None
    ids: npt.NDArray[np.int64]
    total: int
    names: list[str]
    levels: Levels

    def at(self, which: Any) -> TableRows:
        """Some of them."""
        weight = None if self.weight is None else self.weight[which]
        return replace(self, x=self.x[which], y=self.y[which], weight=weight, ids=self.ids[which])


def gather_arrays(me: World, mine: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Every rank's array, one after another in rank order, on every rank. A collective."""
    if me.size == 1:
        return mine
    counts = gather_json(me, len(mine))
    padded = np.zeros((max(counts), *mine.shape[1:]), mine.dtype)
    padded[: len(mine)] = mine
    sent = torch.from_numpy(padded)
    received = [torch.empty_like(sent) for _ in counts]
    dist.all_gather(received, sent)
    return np.concatenate([r.numpy()[:n] for r, n in zip(received, counts, strict=True)])


def own_slice(total: int, me: World) -> slice:
    """Which rows of so many are this worker's."""
    return slice(total * me.rank // me.size, total * (me.rank + 1) // me.size)


def own_frame(data: Any, me: World, own: bool) -> tuple[Any, int, int]:
    """This worker's rows of a table or Parquet files, the place of the first, and rows in all."""
    if isinstance(data, str | os.PathLike):
        need("pyarrow", "tables", "a path as data")
        table, low, total = read_share(data, 0 if own else me.rank, 1 if own else me.size)
        return as_frame(table), low, total
    frame = as_frame(data)
    mine = slice(0, len(frame)) if own else own_slice(len(frame), me)
    return frame[mine], mine.start, len(frame)


def check_tables(
    problem: str, columns: Any, rows: int, total: int, own: bool, me: World
) -> list[int]:
    """Rows of each rank. A collective.

    Raises:
        ArgumentError: a rank has a problem, or another table than the others; on every rank.
    """
    every = gather_json(me, [problem, columns, rows, total])
    for rank, (wrong, *_) in enumerate(every):
        if wrong:
            raise ArgumentError(f"{wrong} (rows of rank {rank}).")
    for rank, (_, names, _, count) in enumerate(every):
        if names != every[0][1] or (not own and count != every[0][3]):
            raise ArgumentError(f"rank {rank} holds another table than rank 0.")
    return [count for *_, count, _ in every]


def _numbers(name: str, column: Any) -> npt.NDArray[np.float64]:
    import narwhals as nw

    if not (column.dtype.is_numeric() or column.dtype == nw.Boolean):
        raise ArgumentError(
            f"column {name!r} is of type {column.dtype}. Give numbers, booleans, or text."
        )
    return np.asarray(column.cast(nw.Float64).to_numpy(), dtype=np.float64)


def _codes(column: Any, levels: Sequence[str]) -> npt.NDArray[np.float64]:
    """The places of a column's values in ``levels``; NaN where it is not there or missing."""
    import narwhals as nw

    missing = column.is_null().to_numpy()
    values = np.asarray(column.cast(nw.String).fill_null("").to_list(), dtype=str)
    if not levels or not len(values):
        return np.full(len(values), np.nan)
    known = np.asarray(levels, dtype=str)
    place = np.minimum(np.searchsorted(known, values), len(known) - 1)
    return np.where((known[place] == values) & ~missing, place, np.nan)


def encode_frame(
    frame: Any, names: Sequence[str], levels: Mapping[str, list[str] | None]
) -> npt.NDArray[np.float32]:
    """Some columns of a table as one matrix of float32."""
    columns = []
    for name in names:
        known = levels.get(name)
        column = frame[name]
        columns.append(_numbers(name, column) if known is None else _codes(column, known))
    return np.array(columns, np.float64).reshape(len(names), len(frame)).T.astype(np.float32)


def encode_numbers(frame: Any) -> npt.NDArray[np.float64]:
    """A table of numbers as one matrix."""
    columns = [_numbers(name, frame[name]) for name in frame.columns]
    return np.array(columns, np.float64).reshape(len(columns), len(frame)).T


def as_frame(data: Any) -> Any:
    """A table of pandas, polars, or Arrow, as one of narwhals.

    Raises:
        ArgumentError: it is no table, or narwhals is missing.
    """
    need("narwhals", "tables", "a table as data")
    import narwhals as nw

    try:
        return nw.from_native(data, eager_only=True)
    except TypeError:
        raise ArgumentError(
            f"data is {type(data).__name__}. Give (features, labels), (features, labels, weights), "
            "a table of pandas, polars, or Arrow, or the path of Parquet files."
        ) from None


def _is_text(dtype: Any) -> bool:
    import narwhals as nw

    return dtype in (nw.String, nw.Categorical, nw.Enum)


def _arrays(
    data: Sequence[Any], categories: Sequence[str | int], me: World, own: bool
) -> TableRows:
    """TableRows of ``(features, labels)`` arrays."""
    x, y, *more = (np.asarray(each) for each in data)
    if x.ndim != 2 or y.shape != x.shape[:1] or any(w.shape != y.shape for w in more):
        shapes = ", ".join(str(each.shape) for each in (x, y, *more))
        raise ArgumentError(f"data has the shapes {shapes}: they must be (n, columns), (n,), (n,).")
    names = [f"f{i}" for i in range(x.shape[1])]
    mine = slice(0, len(y)) if own else own_slice(len(y), me)
    weight = more[0][mine].astype(np.float64) if more else None
    named = [each if isinstance(each, str) else f"f{each}" for each in categories]
    return TableRows(
        x[mine].astype(np.float32),
        y[mine].astype(np.float64),
        weight,
        np.arange(mine.start, mine.stop),
        len(y),
        names,
        dict.fromkeys(named),
    )


def _from_frame(
    data: Any,
    label: str | None,
    weight: str | None,
    categories: Sequence[str | int],
    levels: Levels | None,
    me: World,
    own: bool,
) -> TableRows:
    frame, low, total = own_frame(data, me, own)
    lacking = [c for c in (label, weight) if c is not None and c not in frame.columns]
    if label is None or lacking:
        what = "label is missing" if label is None else f"the table has no column {lacking[0]!r}"
        raise ArgumentError(f"{what}: it has {', '.join(map(repr, frame.columns))}.")
    names = [c for c in frame.columns if c not in (label, weight)]
    if levels is None:
        text = [c for c in names if _is_text(frame[c].dtype)]
        levels = {**dict.fromkeys(map(str, categories)), **_levels(frame, text, me)}
    return TableRows(
        encode_frame(frame, names, levels),
        _numbers(label, frame[label]),
        None if weight is None else _numbers(weight, frame[weight]),
        np.arange(low, low + len(frame)),
        total,
        names,
        levels,
    )


def _levels(frame: Any, columns: Sequence[str], me: World) -> Levels:
    """The values of text columns, over all workers, sorted. A collective."""
    import narwhals as nw

    own = {c: frame[c].drop_nulls().cast(nw.String).unique().to_list() for c in columns}
    every = gather_json(me, own)
    return {c: sorted(set().union(*(each.get(c, []) for each in every))) for c in columns}


def _problem(rows: TableRows) -> str:
    """What cannot be trained on, in a sentence; empty if nothing."""
    for i, name in enumerate(rows.names):
        column = rows.x[:, i]
        if np.isinf(column).any():
            return f"column {name!r} has values that are infinite as float32"
        if name in rows.levels:
            known = column[~np.isnan(column)]
            if ((known < 0) | (known != np.floor(known)) | (known >= 2**24)).any():
                return f"column {name!r} is categorical, and has values that are no codes 0, 1, 2 …"
    if unknown := [name for name in rows.levels if name not in rows.names]:
        return f"categories names {unknown[0]!r}, which is no column"
    if not np.isfinite(rows.y).all():
        return "labels are missing or infinite"
    if rows.weight is not None and not (np.isfinite(rows.weight) & (rows.weight >= 0)).all():
        return "weights are negative, missing, or infinite"
    return ""


def read_rows(
    data: Any,
    me: World,
    *,
    label: str | None,
    weight: str | None,
    categories: Sequence[str | int] = (),
    levels: Levels | None = None,
    own: bool = False,
) -> TableRows:
    """This worker's rows. A collective.

    Args:
        data: ``(features, labels)`` or ``(features, labels, weights)`` arrays, a table, or the path
            of Parquet files.
        label, weight: columns of a table.
        categories: categorical columns that have codes 0, 1, 2 … .
        levels: the categories of another table, which these rows are encoded by.
        own: whether ``data`` is this worker's rows alone, and not all rows.

    Raises:
        ArgumentError: on every rank, naming the column.
    """
    if isinstance(data, tuple | list):
        rows = _arrays(data, categories, me, own)
    else:
        rows = _from_frame(data, label, weight, categories, levels, me, own)
    columns = [rows.names, sorted(rows.levels), rows.weight is None]
    counts = check_tables(_problem(rows), columns, len(rows.y), rows.total, own, me)
    if own:
        low = sum(counts[: me.rank])
        rows = replace(rows, ids=np.arange(low, low + len(rows.y)), total=sum(counts))
    return rows


def keyed_sample(rows: TableRows, count: int, seed: int, me: World) -> TableRows:
    """The same ``count`` rows of the whole table on every rank. A collective."""
    if rows.total > count:
        drawn = permute(np.arange(count), rows.total, key_of(seed, 0x7EE5))
        chosen = rows.at(np.isin(rows.ids, drawn))
    else:
        chosen = rows
    weight = None if chosen.weight is None else gather_arrays(me, chosen.weight)
    ids = gather_arrays(me, chosen.ids)
    order = np.argsort(ids)  # one order on any number of workers, for bins
    every = replace(
        chosen, x=gather_arrays(me, chosen.x), y=gather_arrays(me, chosen.y), weight=weight, ids=ids
    )
    return every.at(order)


def spread(rows: TableRows, me: World) -> TableRows:
    """Give a worker without rows one of the worker with the most. A collective.

    The libraries cannot train on no rows. Sums over all rows are the same wherever a row is.
    """
    counts = gather_json(me, len(rows.y))
    if sum(counts) < me.size:
        raise ArgumentError(
            f"{sum(counts)} rows on {me.size} workers: start at most one worker a row."
        )
    for empty in [r for r, n in enumerate(counts) if n == 0]:
        donor = int(np.argmax(counts))  # the first of several: the same one on every rank
        counts[donor], counts[empty] = counts[donor] - 1, 1
        weight = np.ones(1) if rows.weight is None else rows.weight[-1:]
        parts = [rows.y[-1:], weight, rows.ids[-1:], *rows.x[-1:]] if me.rank == donor else []
        row = np.concatenate(parts).astype(np.float64) if parts else np.empty(0)
        row = gather_arrays(me, row)
        if me.rank == donor:
            rows = rows.at(slice(0, -1))
        elif me.rank == empty:
            rows = replace(
                rows,
                x=row[None, 3:].astype(np.float32),
                y=row[:1],
                weight=None if rows.weight is None else row[1:2],
                ids=row[2:3].astype(np.int64),
            )
    return rows


def largest_codes(rows: TableRows, me: World) -> dict[str, int]:
    """The largest code of each categorical column, over all workers. A collective."""
    own = {}
    for name in rows.levels:
        column = rows.x[:, rows.names.index(name)]
        own[name] = int(np.nanmax(column)) if (~np.isnan(column)).any() else -1
    every = gather_json(me, own)
    return {name: max(each[name] for each in every) for name in rows.levels}
