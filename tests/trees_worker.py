"""Trains boosted trees on data sets that scikit-learn ships and on a made one, with shares of rows
as asked: ``trees_worker.py FOLDER LIBRARY CASE…`` with cases ``DATA@WORKERS/SHARES``.

Started once: every world is forked from it. Rank 0 writes FOLDER/LIBRARY-CASE.model, the model's
own file, and what it predicts beside it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import sklearn.datasets as shipped

import forked  # first: it decides the number of threads
import ronde
from ronde import algorithms

LOADERS = {
    "cancer": (shipped.load_breast_cancer, "binary"),
    "diabetes": (shipped.load_diabetes, "regression"),
    "wine": (shipped.load_wine, "multiclass"),
    "digits": (shipped.load_digits, "multiclass"),
    "iris": (shipped.load_iris, "multiclass"),
}


def made(number: int):
    """Columns with missing values and categories, and weights of many sizes."""
    rng = np.random.default_rng(number)
    n = 900
    x = rng.normal(size=(n, 6))
    x[:, 4], x[:, 5] = rng.integers(0, 12, n), rng.integers(0, 3, n)
    y = x[:, 0] * x[:, 1] + np.sin(2 * x[:, 2]) + (x[:, 4] % 3) + rng.normal(size=n) / 2
    x[rng.random(x.shape) < 0.1] = np.nan
    kind = ("binary", "regression", "multiclass")[number % 3]
    y = {"binary": y > 1, "regression": y * 1e4, "multiclass": np.digitize(y, [0, 1, 2])}[kind]
    return x, y.astype(float), rng.random(n) ** 4 * 10, kind, [4, 5]


def load(name: str):
    if name.startswith("made"):
        return made(int(name[4:]))
    loader, kind = LOADERS[name]
    x, y = loader(return_X_y=True)
    return x, y.astype(float), np.ones(len(y)), kind, []


def own_share(n: int, shares: str, me: ronde.World) -> slice:
    """Even; the first with a tenth; or the first with none."""
    size = me.size
    cuts = [n * r // size for r in range(size + 1)]
    if size > 1 and shares != "even":
        first = 0 if shares == "empty" else n // 10
        cuts = [0, *(first + (n - first) * r // (size - 1) for r in range(size))]
    return slice(cuts[me.rank], cuts[me.rank + 1])


def train(folder: Path, library: str, name: str, shares: str, file: str):
    x, y, w, objective, categories = load(name)
    me = ronde.world()
    n = len(y) * 4 // 5
    order = np.random.default_rng(0).permutation(len(y))
    x, y, w = x[order], y[order], w[order]
    learned, held_out = (x[:n], y[:n], w[:n]), (x[n:], y[n:], w[n:])
    if shares != "whole":
        learned = tuple(a[own_share(n, shares, me)] for a in learned)
        held_out = tuple(a[own_share(len(y) - n, shares, me)] for a in held_out)
    model = algorithms.trees(
        learned,
        objective=objective,
        library=library,
        categories=categories,
        rounds=12,
        depth=4,
        rate=0.3,
        subsample=0.8,
        validate=held_out,
        early_stop=4,
        sample=500,
        own_rows=shares != "whole",
    )
    if me.is_main:
        model.save(folder / f"{file}.model")
        margins = model.predict(x[n:])
        np.savez(
            folder / f"{file}.npz", p=margins, y=y[n:], w=w[n:], **model.metrics, n=model.rounds
        )


def main():
    folder, library, *cases = sys.argv[1:]
    os.environ.update({"RONDE_RUNS": "none", "RONDE_PROGRESS": "quiet", "RONDE_DEVICE": "cpu"})
    for case in cases:
        name, world = case.split("@")
        size, shares = world.split("/")
        file = f"{library}-{name}-{size}-{shares}"
        arguments = (Path(folder), library, name, shares, file)
        forked.fork(int(size), lambda given=arguments: train(*given), 60)


if __name__ == "__main__":
    __import__("xgboost"), __import__("lightgbm")
    main()
