"""K-means and principal components on shares of rows: ``kmeans_worker.py FOLDER ROWS WORLD…`` with
worlds ``WORKERS/SHARES/ORDER``; every world is forked from it, and rank 0 writes FOLDER/WORLD.npz.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np

import forked
import ronde
from ronde import algorithms
from trees_worker import own_share


def work(file: Path, rows: str, shares: str, order: int):
    me, x = ronde.world(), np.load(rows)
    x = np.random.default_rng(order).permutation(x) if order else x
    own = shares != "whole"
    x = x[own_share(len(x), shares, me)] if own else x
    found = algorithms.kmeans(x, 5, own_rows=own)
    parts = algorithms.pca(x, 4, own_rows=own)
    if me.is_main:
        np.savez(file, inertia=found.inertia, centers=found.centers, **vars(parts))


def main():
    folder, rows, *worlds = sys.argv[1:]
    os.environ.update({"RONDE_RUNS": "none", "RONDE_DEVICE": "cpu"})
    for world in worlds:
        size, shares, order = world.split("/")
        arguments = (Path(folder) / f"{size}-{shares}-{order}.npz", rows, shares, int(order))
        forked.fork(int(size), lambda given=arguments: work(*given), 60)


if __name__ == "__main__":
    main()
