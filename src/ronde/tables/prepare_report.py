"""``ronde prepare --report``: each column before and after, leaks, and drift, as one HTML file."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ronde.tables.arrow import one_table
from ronde.tables.reading import columns_of, read_batches
from ronde.tables.recipe import Recipe
from ronde.tables.scores import auc, stability
from ronde.tables.steps import read_as
from ronde.watch import html
from ronde.world import ArgumentError

MOST_ROWS = 200_000
_LEVELS = 12  # that are drawn
_MISSING = "(missing)"

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class DrawnRows:
    """Every ``stride``-th row of some files, as they are."""

    table: Any
    rows: int
    stride: int


@dataclass(frozen=True)
class ColumnView:
    """What is known of a column.

    Attributes:
        missing: share of rows, before.
        alone: how well it predicts the target on rows held out: AUC, or R²; None: no target.
        drift: the population stability index of the second file, and what chance gives; or None.
    """

    name: str
    missing: float
    alone: float | None
    drift: tuple[float, float] | None

    @property
    def leaks(self) -> bool:
        """Whether it predicts the target all but perfectly."""
        return self.alone is not None and self.alone >= 0.99

    @property
    def drifts(self) -> bool:
        """Whether the second file differs, beyond chance."""
        return self.drift is not None and self.drift[0] > max(0.1, 3 * self.drift[1])


def take_sample(recipe: Recipe, files: Sequence[Path]) -> DrawnRows:
    """Every so-manieth row of the columns that the recipe reads, and of the target."""
    import pyarrow as pa

    more = [name for name in (recipe.target, recipe.key) if name is not None]
    present = [n for n in [*recipe.steps, *more] if all(n in columns_of(f) for f in files)]
    tables: list[tuple[Any, Any]] = []
    rows, stride = 0, 1
    for file in files:
        for batch in read_batches(file, present, *recipe.csv_types):
            first = -rows % stride
            drawn = batch.take(pa.array(range(first, batch.num_rows, stride), pa.int64()))
            tables.append((pa.Table.from_batches([drawn]), file))
            rows += batch.num_rows
            while rows > MOST_ROWS * stride:  # half of what is there, spread as evenly
                stride *= 2
                joined = one_table(tables, recipe.where)
                tables = [(joined.take(pa.array(range(0, joined.num_rows, 2))), "earlier files")]
    if not tables:
        raise ArgumentError(f"{recipe.where}: {files[0]} holds no row.")
    return DrawnRows(one_table(tables, recipe.where), rows, stride)


def _numbers(column: Any) -> Floats:
    """Values as floats; missing, and what is no number, is NaN."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = column.type
    if pa.types.is_temporal(kind):
        column = pc.cast(pc.cast(column, pa.timestamp("us")), pa.int64())
    elif pa.types.is_boolean(kind):
        column = pc.cast(column, pa.int8())
    elif not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)):
        column = pc.utf8_length(pc.cast(column, pa.string()))
    values = np.asarray(pc.cast(column, pa.float64(), safe=False).to_numpy(zero_copy_only=False))
    return np.where(np.isfinite(values), values, np.nan)


def _texts(column: Any) -> list[str]:
    return [_MISSING if v is None or v == "" or v != v else str(v) for v in column.to_pylist()]


def _edges(values: Floats) -> Floats:
    present = values[~np.isnan(values)]
    if not len(present):
        return np.zeros(0)
    return np.unique(np.quantile(present, np.linspace(0, 1, 11)[1:-1], method="lower"))


class _Groups:
    """Rows of a column as group numbers: bins of a number, frequent levels; 0 is missing."""

    def __init__(self, kind: str, column: Any) -> None:
        self.kind = kind
        if kind == "level":
            names, counts = np.unique(
                np.array(_texts(column), object).astype(str), return_counts=True
            )
            order = sorted(zip(names, counts, strict=True), key=lambda p: (-p[1], p[0]))
            self.levels = {str(n): i + 1 for i, (n, _) in enumerate(order[:200]) if n != _MISSING}
            self.count = max(self.levels.values(), default=0) + 2
        else:
            self.edges = _edges(_numbers(column))
            self.count = len(self.edges) + 2

    def of(self, column: Any) -> npt.NDArray[np.int64]:
        """The group of each row."""
        if self.kind == "level":
            other = self.count - 1
            return np.array(
                [0 if t == _MISSING else self.levels.get(t, other) for t in _texts(column)],
                np.int64,
            )
        values = _numbers(column)
        return np.where(np.isnan(values), 0, 1 + np.searchsorted(self.edges, values, "left"))


def _target(sample: DrawnRows, name: str | None) -> tuple[Floats, bool] | None:
    """The target as numbers, and whether it is one of two values."""
    if name is None or name not in sample.table.column_names:
        return None
    column = sample.table[name]
    texts = _texts(column)
    values = sorted(set(texts) - {_MISSING})
    if len(values) == 2:
        codes = {values[0]: 0.0, values[1]: 1.0}
        return np.array([codes.get(t, math.nan) for t in texts]), True
    import pyarrow as pa

    if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        return _numbers(column), False
    return None


def _alone(groups: npt.NDArray[np.int64], count: int, target: tuple[Floats, bool]) -> float:
    """How well the mean by group, of every other row, predicts the rows between."""
    y, two = target
    known = ~np.isnan(y)
    groups, y = groups[known], y[known]
    # halves: the mean of its own rows would predict a column of distinct values perfectly
    fit, test = slice(0, None, 2), slice(1, None, 2)
    if len(y) < 20:  # of ten rows, chance alone predicts ten
        return 0.5 if two else 0.0
    total = np.bincount(groups[fit], weights=y[fit], minlength=count)
    n = np.bincount(groups[fit], minlength=count)
    mean = np.where(n > 0, total / np.maximum(n, 1), y[fit].mean())
    guess = mean[groups[test]]
    if two:
        positive = y[test] > 0.5
        if positive.all() or not positive.any():
            return 0.5
        area = auc(guess, positive, np.ones(len(guess)))
        return max(area, 1 - area)
    spread = float(((y[test] - y[test].mean()) ** 2).sum())
    return 1 - float(((y[test] - guess) ** 2).sum()) / spread if spread else 0.0


def _drift(first: npt.NDArray[np.int64], second: npt.NDArray[np.int64], count: int) -> Any:
    """The population stability index between two sets of rows, and its mean where both are drawn
    from one distribution.
    """
    a, b = (np.bincount(g, minlength=count) for g in (first, second))
    used = (a + b) > 0
    chance = float(used.sum() - 1) * (1 / max(a.sum(), 1) + 1 / max(b.sum(), 1))
    return stability(a[used], b[used]), chance


def view_columns(recipe: Recipe, sample: DrawnRows, other: DrawnRows | None) -> list[ColumnView]:
    """What the report says of each column."""
    target, views = _target(sample, recipe.target), []
    for name, do in recipe.steps.items():
        groups = _Groups(read_as(do), sample.table[name])
        mine = groups.of(sample.table[name])
        drift = None
        if other is not None and name in other.table.column_names:
            drift = _drift(mine, groups.of(other.table[name]), groups.count)
        alone = _alone(mine, groups.count, target) if target is not None else None
        missing = recipe.fitted[name]["missing"] / recipe.state["rows"]  # type: ignore[index]
        views.append(ColumnView(name, missing, alone, drift))
    return views


def _bars(axes: Any, names: Sequence[str], heights: Sequence[float], color: str) -> None:
    axes.bar(range(len(names)), heights, color=color, width=0.8)
    short = [n if len(n) <= 10 else n[:9] + "…" for n in names]
    axes.set_xticks(
        range(len(names)),
        short,
        rotation=45 if len(names) > 5 else 0,
        ha="right" if len(names) > 5 else "center",
        fontsize=8,
    )


def _plot_before(recipe: Recipe, name: str, sample: DrawnRows, target: Any) -> Any:
    do = recipe.steps[name]

    def plot(axes: Any) -> str:
        column, line = sample.table[name], 0.0 if read_as(do) == "level" else 1.5
        if read_as(do) == "level":
            texts = np.array(_texts(column), object).astype(str)
            names, place, counts = np.unique(texts, return_inverse=True, return_counts=True)
            order = np.argsort(-counts, kind="stable")[:_LEVELS]
            _bars(axes, [str(names[i]) for i in order], [int(counts[i]) for i in order], html.REAL)
            middles, groups = np.arange(len(order), dtype=float), [place == i for i in order]
        else:
            values = _numbers(column)
            if read_as(do) == "time":
                values = 1970 + values / 31_556_952e6  # years, which an axis can name
            present = values[~np.isnan(values)]
            if not len(present):
                return "no value"
            axes.hist(present, bins=40, color=html.REAL)
            edges = np.unique([present.min(), *_edges(values), present.max()])
            pairs = list(itertools.pairwise(edges)) or [(edges[0], edges[0])]
            middles = np.array([(low + high) / 2 for low, high in pairs])
            groups = [(values >= low) & (values <= high) for low, high in pairs]
        axes.set_ylabel("rows")
        if target is not None:
            means = [
                np.nanmean(target[0][g]) if (~np.isnan(target[0][g])).any() else math.nan
                for g in groups
            ]
            side = axes.twinx()
            side.plot(middles, means, color=html.INK, marker="o", markersize=3, linewidth=line)
            if target[1]:
                side.set_ylim(0, 1)
            side.set_ylabel(f"mean of {recipe.target}")
        return f"{name} before: {len(column)} rows"

    return plot


def _plot_after(recipe: Recipe, name: str, prepared: Any) -> Any:
    made = [each for each in recipe.outputs if each.column == name]

    def plot(axes: Any) -> str:
        if all(each.type == "byte" for each in made) and len(made) > 1:
            shown = made[:_LEVELS]
            ones = [float(np.nansum(_numbers(prepared[each.name]))) for each in shown]
            _bars(
                axes, [each.name.removeprefix(f"{name}=") for each in shown], ones, html.SYNTHETIC
            )
        else:
            values = _numbers(prepared[made[0].name])
            values = values[~np.isnan(values)]
            codes = [n - 0.5 for n in range(made[0].size + 1)]
            axes.hist(
                values, bins=codes if codes[1:] and len(codes) < 100 else 40, color=html.SYNTHETIC
            )
        axes.set_ylabel("rows")
        return f"{name} after: {', '.join(each.name for each in made[:_LEVELS])}"

    return plot


def draw_column(recipe: Recipe, name: str, rows: DrawnRows) -> str:
    """A column before and after a fitted recipe, side by side, as HTML."""
    target = _target(rows, recipe.target)
    before = _plot_before(recipe, name, rows, target)
    after = _plot_after(recipe, name, recipe.apply(rows.table))
    colors = "--ink:#1d2330; --faint:#c9cfda; --synthetic:#2f6fde; --real:#c2410c"
    drawn = "".join(
        f'<div style="flex: 1">{html.draw(f"{word}-{n}", 2.2, f"{name} {word}", plot)}</div>'
        for n, (word, plot) in enumerate((("before", before), ("after", after)))
    )
    return f'<div style="display: flex; background: white; {colors}">{drawn}</div>'


def write_prepare_report(
    path: Path, recipe: Recipe, files: Sequence[Path], against: Sequence[Path] = ()
) -> list[ColumnView]:
    """Write the report of a fitted recipe; returns what it says of each column.

    Args:
        files: the tables that are drawn.
        against: of a second table, whose drift from the first is measured.

    Raises:
        RondeError: the file cannot be written.
    """
    sample = take_sample(recipe, files)
    other = take_sample(recipe, against) if against else None
    views = view_columns(recipe, sample, other)
    target = _target(sample, recipe.target)
    out_of_fold = recipe.needs_folds and all(map(recipe.was_fitted_on, files))
    prepared = recipe.apply(sample.table, out_of_fold)
    charts = []
    for n, view in enumerate(views):
        made = [each.name for each in recipe.outputs if each.column == view.name]
        steps = ", ".join(
            f"{k}: {v}" if v is not True else k for k, v in recipe.steps[view.name].items()
        )
        after = f"{', '.join(made[:4])}{f' and {len(made) - 4} more' if len(made) > 4 else ''}"
        for place, caption, remark, plot in (
            (
                "b",
                view.name,
                f"before: {view.missing:.1%} missing",
                _plot_before(recipe, view.name, sample, target),
            ),
            ("a", after, f"after {steps or 'nothing'}", _plot_after(recipe, view.name, prepared)),
        ):
            charts.append((caption, remark, html.draw(f"{place}{n}", 2.2, caption, plot)))
    html.write_page(
        path,
        "ronde prepare",
        recipe.where,
        _headline(views, other is not None),
        [
            (
                "rows",
                f"{sample.rows:,}",
                "drawn: all" if sample.stride == 1 else f"drawn: 1 in {sample.stride}",
            ),
            ("columns", f"{len(views)} → {len(recipe.outputs)}", ""),
            *([("rows of the second file", f"{other.rows:,}", "")] if other else []),
        ],
        charts,
        [_table(views, target, other is not None)],
    )
    return views


def _headline(views: Sequence[ColumnView], second: bool) -> str:
    parts = []
    for names, text in (
        ([v.name for v in views if v.leaks], "predicts the target alone: is it known before?"),
        ([v.name for v in views if v.drifts], "has drifted in the second file."),
    ):
        if names:
            parts.append(f"{', '.join(names)} {text}")
    drift = " No column has drifted in the second file." if second else ""
    return " ".join(parts) or f"No column predicts the target alone.{drift}"


def _table(views: Sequence[ColumnView], target: Any, second: bool) -> html.Section:
    heads = ["column", "missing"]
    heads += [f"alone ({'AUC' if target[1] else 'R²'})"] if target is not None else []
    heads += ["drift (PSI)", "by chance"] if second else []
    rows = []
    for view in views:
        cells = [view.name, f"{view.missing:.1%}"]
        if target is not None:
            cells.append(f"{view.alone:.3f}")
        if second:
            cells += [f"{x:.3f}" for x in view.drift] if view.drift else ["absent", "–"]
        rows.append(("cause" if view.leaks or view.drifts else "", cells))
    foot = (
        "Alone: the mean of the target by bin or value, taken from every other row, predicts the "
        "rows between; 0.99 and more counts as a leak. Drift: the population stability index over "
        "ten quantile bins, or values, and missing; more than 0.1 and three times chance counts."
    )
    return html.Section("Columns", heads, rows, foot=foot)
