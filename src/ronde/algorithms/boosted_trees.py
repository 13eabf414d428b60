"""Gradient-boosted trees that are the same model on any number of workers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from ronde.algorithms.boosting_record import BoostingRecord
from ronde.algorithms.exact_sums import total_of
from ronde.algorithms.table_rows import TableRows, gather_arrays, keyed_sample, read_rows, spread
from ronde.algorithms.tree_libraries import ALLOWED, LIBRARIES, Booster, TreeSettings
from ronde.algorithms.tree_model import TreeModel
from ronde.algorithms.tree_objectives import OBJECTIVES, Objective, on_grid
from ronde.data.order import key_of, permute
from ronde.world import ArgumentError, World
from ronde.world.connect import connect
from ronde.world.consensus import agree, broadcast_json

__all__ = ["trees"]

F64 = npt.NDArray[np.float64]


def trees(
    data: Any,
    *,
    objective: Literal["binary", "regression", "multiclass"],
    label: str | None = None,
    weight: str | None = None,
    categories: Sequence[str | int] = (),
    library: Literal["xgboost", "lightgbm"] = "xgboost",
    rounds: int = 100,
    depth: int = 6,
    rate: float = 0.1,
    bins: int = 255,
    subsample: float = 1.0,
    validate: Any = None,
    metric: str | None = None,
    early_stop: int | None = None,
    save_every: int | None = None,
    keep: int = 3,
    seed: int = 0,
    sample: int = 200_000,
    own_rows: bool = False,
    params: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> TreeModel:
    """Train boosted trees with XGBoost or LightGBM: the same model on one worker or on several.

    All workers share the cut points of one sample, and gradients are rounded so that sums over rows
    are exact. The model is written to the run directory too, in the library's own format.

    Args:
        data: ``(features, labels)`` or ``(features, labels, weights)`` arrays; a table of pandas,
            polars, or Arrow; or the path of Parquet files. Each worker takes its share of the rows.
            Features are used as float32, NaN is missing.
        objective: ``"binary"`` (labels 0 and 1), ``"regression"``, or ``"multiclass"`` (labels 0,
            1, 2, …).
        label, weight: columns of a table.
        categories: categorical columns that have codes 0, 1, 2, …. Columns of text are categorical
            anyway.
        library: which library trains.
        rounds: most rounds of trees.
        depth: of a tree.
        rate: learning rate.
        bins: most cut points of a column.
        subsample: share of the rows that each round uses.
        validate: rows as ``data``. Metrics are over all of them, whichever worker holds them.
        metric: which metric stops early: ``"logloss"``, ``"auc"``, ``"rmse"``, ``"error"``. None is
            the first of the objective's.
        early_stop: rounds without a better metric until the training ends. The model is that of the
            best round.
        save_every: rounds between checkpoints.
        keep: how many of the newest checkpoints to keep.
        seed: key of the samples.
        sample: rows whose values become cut points.
        own_rows: each worker gives its own rows as ``data`` (and ``validate``), some perhaps none.
            The table is theirs in rank order.
        params: parameters of the library that give the same model on any number of workers.
        name: of the run directory, unless ``ronde run`` names it.

    Returns:
        TreeModel: the same on every rank.

    Raises:
        ArgumentError: an argument or a column cannot be used.
        CheckpointError: the run cannot be resumed.

    Example:
        >>> import numpy as np
        >>> x = np.random.default_rng(0).normal(size=(500, 3))
        >>> model = trees((x, x[:, 0] > 0), objective="binary", rounds=10, name="example")
        >>> model.predict(x).shape, model.rounds
        ((500,), 10)
    """
    given = {k: v for k, v in locals().items() if k not in ("data", "validate", "name", "keep")}
    me = connect()
    _check(given, validate)
    agree(me, {k: repr(v) for k, v in given.items()}, "ronde.algorithms.trees")
    reading: dict[str, Any] = {"label": label, "weight": weight, "own": own_rows}
    rows = read_rows(data, me, categories=categories, **reading)
    held_out = None
    if validate is not None:
        held_out = read_rows(validate, me, categories=categories, levels=rows.levels, **reading)
        if held_out.names != rows.names:
            raise ArgumentError("validate has other columns than data.")
    rows = spread(rows, me)
    training = _Training(
        me, OBJECTIVES[objective], library, rows, held_out, _settings(given, rows, me), given, keep
    )
    return training.run(BoostingRecord(me, name, _facts(given, rows)))


def _check(given: Mapping[str, Any], validate: Any) -> None:
    library, objective = given["library"], given["objective"]
    if library not in ALLOWED:
        raise ArgumentError(f"library={library!r}: use 'xgboost' or 'lightgbm'.")
    if objective not in OBJECTIVES:
        raise ArgumentError(f"objective={objective!r}: use {', '.join(map(repr, OBJECTIVES))}.")
    for count in ("rounds", "depth", "bins", "sample", "early_stop", "save_every"):
        value = given[count]
        if value is not None and (not isinstance(value, int) or value < 1 + (count == "bins")):
            raise ArgumentError(f"{count}={value!r}: give a number above {int(count == 'bins')}.")
    if not 0 < given["subsample"] <= 1:
        raise ArgumentError(f"subsample={given['subsample']!r}: give a share above 0, at most 1.")
    metrics = OBJECTIVES[objective].metrics
    if given["metric"] not in (None, *metrics):
        raise ArgumentError(
            f"metric={given['metric']!r}: objective {objective!r} has {', '.join(metrics)}."
        )
    if given["early_stop"] and validate is None:
        raise ArgumentError("early_stop needs validate: rows that the trees are not trained on.")
    for param in given["params"] or {}:
        if param == "use_quantized_grad":
            raise ArgumentError(
                "use_quantized_grad trains another, worse model on several workers (LightGBM 4.7). "
                "Leave it out."
            )
        if param not in ALLOWED[library]:
            raise ArgumentError(
                f"params has {param!r}, which is not known to give the same model on any number of "
                f"workers, or is an argument of trees(). Use {', '.join(ALLOWED[library])}."
            )


def _facts(given: Mapping[str, Any], rows: TableRows) -> dict[str, Any]:
    """What a resume must find unchanged."""
    left_out = ("rounds", "save_every", "own_rows", "early_stop")
    facts = {k: repr(v) for k, v in given.items() if k not in left_out}
    return facts | {"rows": rows.total, "columns": rows.names}


def _settings(given: Mapping[str, Any], rows: TableRows, me: World) -> TreeSettings:
    """The settings of a booster, with the prior that it begins with. A collective."""
    objective, library = given["objective"], given["library"]
    weight = np.ones_like(rows.y) if rows.weight is None else rows.weight
    total = total_of(weight, me)
    if not total:
        raise ArgumentError("all weights are 0.")
    classes = 1
    if objective == "regression":
        prior = base = [total_of(rows.y * weight, me) / total]
    else:
        classes = _classes(objective, rows, me)
        sums = [total_of(weight * (rows.y == k), me) / total for k in range(classes)]
        if classes == 2 and objective == "binary":
            share, classes = sums[1], 1
            if share in (0, 1):
                raise ArgumentError(f"all labels are {int(share)}: there is nothing to learn.")
            prior, base = [share], [math.log(share) - math.log(1 - share)]
        else:
            # labels may skip a number: a class without rows has no logarithm
            prior = base = [math.log(max(s, 1e-9)) for s in sums]
    native = OBJECTIVES[objective].names[library].format(classes)
    return TreeSettings(
        objective,
        native,
        classes,
        base,
        prior,
        given["depth"],
        given["rate"],
        given["bins"],
        given["seed"],
        dict(given["params"] or {}),
    )


def _classes(objective: str, rows: TableRows, me: World) -> int:
    seen = gather_arrays(me, np.unique(rows.y))
    largest = max(seen)
    if min(seen) < 0 or any(seen != np.floor(seen)) or (objective == "binary" and largest > 1):
        labels = "0 and 1" if objective == "binary" else "0, 1, 2, …"
        shown = ", ".join(f"{v:g}" for v in sorted(set(seen))[:5])
        raise ArgumentError(
            f"objective={objective!r} takes the labels {labels}; there are {shown}."
        )
    return 2 if objective == "binary" else max(int(largest) + 1, 2)


@dataclass
class _Best:
    """The best round so far."""

    rounds: int = 0
    value: float = math.inf
    metrics: dict[str, float] = field(default_factory=dict)


class _Training:
    """The rounds of one training."""

    def __init__(
        self,
        me: World,
        objective: Objective,
        library: str,
        rows: TableRows,
        validate: TableRows | None,
        settings: TreeSettings,
        given: Mapping[str, Any],
        keep: int,
    ) -> None:
        self._me, self._objective, self._library = me, objective, library
        self._rows, self._validate, self._settings = rows, validate, settings
        self._given, self._keep = given, keep
        self._loss, self._best = math.nan, _Best()
        self._weight = np.ones_like(rows.y) if rows.weight is None else rows.weight
        self._labels = self._weights = np.empty(0)
        if validate is not None:
            self._labels = gather_arrays(me, validate.y)
            own = np.ones_like(validate.y) if validate.weight is None else validate.weight
            self._weights = gather_arrays(me, own)

    def run(self, run: BoostingRecord) -> TreeModel:
        me, given, rows = self._me, self._given, self._rows
        self._run = run
        sample = keyed_sample(rows, given["sample"], given["seed"], me)
        run.begin(
            f"{self._library} {self._given['objective']}",
            rows.total,
            f"{rows.total:,} rows on {me.size} worker{'s' * (me.size > 1)}, "
            f"cut points of {len(sample.y):,} rows, gradients on a 2^-20 grid",
        )
        start, content, state = run.resume()
        if state:
            self._best = _Best(**state["best"])
        with run.recorded():
            booster = LIBRARIES[self._library](
                self._settings, rows, sample, self._validate, content, me
            )
            self._last = booster
            booster.run(start, given["rounds"], self._gradients, self._after)
            last = booster.rounds()
            model: TreeModel = booster.model(self._best.rounds if given["early_stop"] else last)
            model.metrics = self._best.metrics
            run.finish(model)
        return model

    def _gradients(
        self, number: int, margin: F64
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        rows, weight = self._rows, self._weight
        # for the record alone: its last bits may depend on the number of workers
        losses = self._objective.loss(margin, rows.y) * weight
        sums = self._sum([float(losses.sum()), float(weight.sum())])
        self._loss = sums[0] / sums[1]
        weight = weight[:, None] if margin.ndim > 1 else weight
        pair = [each * weight for each in self._objective.gradients(margin, rows.y)]
        if (share := self._given["subsample"]) < 1:
            # by a row's place in the whole table: the same rows however they are shared
            place = permute(rows.ids, rows.total, key_of(self._given["seed"], 0x5A9, number))
            left_out = place >= max(1, round(share * rows.total))
            for each in pair:
                each[left_out] = 0
        # one grid for all workers, or they would round to different multiples
        largest = torch.tensor([float(np.abs(each).max()) for each in pair], dtype=torch.float64)
        if self._me.size > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        gradients, hessians = (on_grid(v, m) for v, m in zip(pair, largest.tolist(), strict=True))
        return gradients, hessians

    def _sum(self, values: list[float]) -> list[float]:
        both = torch.tensor(values, dtype=torch.float64)
        if self._me.size > 1:
            dist.all_reduce(both)
        return both.tolist()

    def _after(self, rounds: int, booster: Booster) -> bool:
        given, run = self._given, self._run
        metrics = self._metrics(booster)
        run.step(rounds, self._loss, given["rate"], metrics)
        over = False
        if metrics:
            value = metrics[given["metric"] or next(iter(metrics))]
            value = -value if given["metric"] == "auc" else value
            if value < self._best.value:
                self._best = _Best(rounds, value, metrics)
            over = bool(given["early_stop"]) and rounds - self._best.rounds >= given["early_stop"]
        leaves = run.leaves(rounds)
        if leaves or (given["save_every"] and rounds % given["save_every"] == 0):
            run.save(
                rounds, booster.content(), {"best": dataclasses.asdict(self._best)}, self._keep
            )
        if leaves:
            run.leave()
        return over or rounds == given["rounds"]

    def _metrics(self, booster: Booster) -> dict[str, float]:
        """Metrics over all validation rows, computed once, by rank 0. A collective."""
        if self._validate is None:
            return {}
        margins = gather_arrays(self._me, booster.validation_margins())
        own = {}
        if self._me.is_main:
            own = {
                name: call(margins, self._labels, self._weights)
                for name, call in self._objective.metrics.items()
            }
        metrics: dict[str, float] = broadcast_json(self._me, own)
        return metrics
