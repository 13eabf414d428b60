"""Boosted trees on 1, 2, and 3 workers: Ronde beside the libraries' own distributed mode.

    python benchmarks/trees.py            # AUC on test rows for each number of workers
    python benchmarks/trees.py --alone    # AUC beside the library alone on one machine
    python benchmarks/trees.py --rate     # seconds of a worker at a million rows, 1 and 2 workers

Each world is forked from this process, with one thread a worker. The libraries' own mode is the one
that their documentation shows: each worker gives its rows, XGBoost's workers meet at a tracker and
LightGBM's at a list of machines.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import time

os.environ |= {"OMP_NUM_THREADS": "1", "RONDE_RUNS": "none", "RONDE_PROGRESS": "quiet"}
os.environ |= {"RONDE_DEVICE": "cpu"}

import lightgbm as lgb
import numpy as np
import torch
import xgboost as xgb
from xgboost.collective import CommunicatorContext
from xgboost.tracker import RabitTracker

from ronde import algorithms

torch.set_num_threads(1)
ROUNDS, DEPTH, RATE, BINS = 60, 5, 0.1, 255


def made(n, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 12)).astype(np.float32)
    x[:, 5] = rng.integers(0, 9, n)
    score = x[:, 0] * x[:, 1] + np.sin(x[:, 2] * 2) + 0.3 * (x[:, 5] % 3) + rng.normal(size=n) / 2
    return x, (score > 0.4).astype(float)


def auc(p, y):
    ranks = np.empty(len(p))
    ranks[np.argsort(p, kind="stable")] = np.arange(1, len(p) + 1)
    ones, zeros = y.sum(), (1 - y).sum()
    return (ranks[y > 0].sum() - ones * (ones + 1) / 2) / (ones * zeros)


def free():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def world(size, work):
    """Run ``work(rank)`` in so many forks; what rank 0 returns, a number."""
    port, (read, write) = free(), os.pipe()
    children = []
    for rank in range(size):
        if not (pid := os.fork()):
            code = 1
            with contextlib.suppress(BaseException):
                names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size}
                names |= {"LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
                if size > 1:
                    os.environ |= {k: str(v) for k, v in names.items()} | {
                        "MASTER_ADDR": "127.0.0.1"
                    }
                result = work(rank)
                if rank == 0:
                    os.write(write, repr(float(result)).encode())
                code = 0
            os._exit(code)
        children.append(pid)
    os.close(write)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    with os.fdopen(read) as file:
        return float(file.read() or "nan") if not any(codes) else float("nan")


def share(rank, size, n):
    """Uneven: the first worker has a tenth."""
    cuts = [0, *(n // 10 + (n - n // 10) * r // max(1, size - 1) for r in range(size))]
    return slice(cuts[rank], cuts[rank + 1]) if size > 1 else slice(0, n)


def own_mode(library, size, rows, test):
    (x, y), (tx, ty) = rows, test
    if library == "xgboost":
        params = {"objective": "binary:logistic", "max_depth": DEPTH, "eta": RATE, "nthread": 1}
        params |= {"tree_method": "hist", "max_bin": BINS, "verbosity": 0}
        tracker = RabitTracker(host_ip="127.0.0.1", n_workers=size, sortby="task")
        if size > 1:
            tracker.start()
            given = tracker.worker_args()

        def work(rank):
            part = share(rank, size, len(y))
            context = CommunicatorContext(**given, dmlc_task_id=str(rank)) if size > 1 else None
            with context or contextlib.nullcontext():
                matrix = xgb.QuantileDMatrix(x[part], y[part], max_bin=BINS)
                booster = xgb.train(params, matrix, ROUNDS)
            return auc(booster.predict(xgb.DMatrix(tx)), ty)

        return world(size, work)
    params = {"objective": "binary", "max_depth": DEPTH, "num_leaves": 2**DEPTH}
    params |= {"learning_rate": RATE, "max_bin": BINS, "num_threads": 1, "verbosity": -1}
    ports = [free() for _ in range(size)]

    def work(rank):
        part, mine = share(rank, size, len(y)), dict(params)
        if size > 1:
            mine |= {"tree_learner": "data", "num_machines": size, "pre_partition": True}
            mine |= {"machines": ",".join(f"127.0.0.1:{p}" for p in ports), "time_out": 2}
            mine |= {"local_listen_port": ports[rank]}
        booster = lgb.train(mine, lgb.Dataset(x[part], y[part]), ROUNDS)
        return auc(booster.predict(tx), ty)

    return world(size, work)


def rondes(library, size, rows, test, rounds=ROUNDS, timed=False):
    x, y = rows

    def work(rank):
        part = share(rank, size, len(y)) if not timed else slice(None)
        began = time.process_time()
        model = algorithms.trees(
            (x[part], y[part]),
            objective="binary",
            library=library,
            rounds=rounds,
            depth=DEPTH,
            rate=RATE,
            bins=BINS,
            own_rows=not timed,
        )
        return time.process_time() - began if timed else auc(model.predict(test[0]), test[1])

    return world(size, work)


def holed(number, n):
    """Rows with two columns of categories and missing values."""
    rng = np.random.default_rng(number)
    x = rng.normal(size=(n, 6))
    x[:, 4], x[:, 5] = rng.integers(0, 12, n), rng.integers(0, 3, n)
    y = x[:, 0] * x[:, 1] + np.sin(2 * x[:, 2]) + (x[:, 4] % 3) + rng.normal(size=n) / 2
    x[rng.random(x.shape) < 0.1] = np.nan
    return x.astype(np.float32), (y > 1).astype(float)


def alone(library, x, y, tx):
    """Predictions of a plain training with the library."""
    if library == "xgboost":
        kinds = {"feature_types": ["q"] * 4 + ["c"] * 2, "enable_categorical": True}
        params = {"objective": "binary:logistic", "max_depth": DEPTH, "eta": RATE, "nthread": 1}
        params |= {"tree_method": "hist", "max_bin": BINS}
        booster = xgb.train(params, xgb.QuantileDMatrix(x, y, max_bin=BINS, **kinds), ROUNDS)
        return booster.predict(xgb.DMatrix(tx, **kinds))
    params = {"objective": "binary", "max_depth": DEPTH, "num_leaves": 2**DEPTH, "max_bin": BINS}
    params |= {"learning_rate": RATE, "num_threads": 1, "verbosity": -1}
    return lgb.train(params, lgb.Dataset(x, y, categorical_feature=[4, 5]), ROUNDS).predict(tx)


def beside_alone(library, rows, sets):
    found = []
    for seed in range(sets):
        x, y = holed(seed, 2 * max(rows, 2000))
        (x, y), (tx, ty) = (x[:rows], y[:rows]), (x[rows:], y[rows:])
        common = {"rounds": ROUNDS, "depth": DEPTH, "rate": RATE, "bins": BINS}
        model = algorithms.trees(
            (x, y), objective="binary", library=library, categories=[4, 5], **common
        )
        found.append(auc(model.predict(tx), ty) - auc(alone(library, x, y, tx), ty))
    largest = max(map(abs, found))
    print(
        f"{library:9} {rows:6,} rows: AUC beside the library alone {np.mean(found):+.4f} on "
        f"average, at most {largest:.4f} on {sets} sets",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", action="store_true")
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--rows", type=int)
    given = parser.parse_args()
    if given.alone:
        for library in ("xgboost", "lightgbm"):
            beside_alone(library, 720, 10)
            beside_alone(library, 20_000, 4)
        return
    if given.rate:
        rows = made(given.rows or 1_000_000)
        for library in ("xgboost", "lightgbm"):
            for rounds in (10, 40):
                began = time.perf_counter()
                one = rondes(library, 1, rows, None, rounds, True)
                middle = time.perf_counter()
                two = rondes(library, 2, rows, None, rounds, True)
                wall = middle - began, time.perf_counter() - middle
                print(
                    f"{library:9} {rounds} rounds: rank 0 computed for {one:.1f} s alone, "
                    f"{two:.1f} s beside another worker: {one / two:.2f}; wall "
                    f"{wall[0]:.1f} and {wall[1]:.1f} s "
                    f"at load {os.getloadavg()[0]:.0f}",
                    flush=True,
                )
        return
    for seed in range(3):
        rows, test = made(given.rows or 6000, seed), made(20_000, 100 + seed)
        for library in ("xgboost", "lightgbm"):
            for name, mode in (("own", own_mode), ("ronde", rondes)):
                found = [mode(library, n, rows, test) for n in (1, 2, 3)]
                spread = max(found) - min(found)
                shown = "  ".join(f"{each:.5f}" for each in found)
                print(f"set {seed}  {library:9} {name:6} {shown}  spread {spread:.5f}", flush=True)


if __name__ == "__main__":
    main()
