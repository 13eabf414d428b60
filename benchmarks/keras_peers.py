"""Ronde beside Keras's own data parallelism, and beside hand-written DDP.

    python benchmarks/keras_peers.py [--nightly FOLDER] [--steps 20] [--rounds 6]

*Exact*: two models train batches of 5 and 3 samples, over two workers, with SGD: how far are the
weights from one process, relative to the largest value of each tensor? Ronde in float64, and, with
a folder that holds ``keras-nightly`` (``pip install --no-deps --target FOLDER keras-nightly``), its
``DataParallel``, which computes in float32 and is given the same parts of each batch.

*Speed*: two workers train the same model with Ronde and with DDP, as Keras's guide writes it, in
turns of some steps; the ratio is DDP's time over Ronde's, by wall and by processor time.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"

import numpy as np
import torch

import keras
import ronde
from keras_grid import build as build_large
from keras_grid import far, fork

L = keras.layers
PARTS = {1: [[[0, 1, 2, 3, 4], [5, 6, 7]]], 2: [[[0, 1, 2], [5, 6]], [[3, 4], [7]]]}


def mlp() -> Any:
    return [L.Dense(16, "relu"), L.Dense(5)]


def normalized() -> Any:
    return [L.Dense(16), L.BatchNormalization(), L.ReLU(), L.Dense(5)]


def build(name: str) -> Any:
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    return keras.Sequential([L.Input((16,)), *globals()[name]()])


def rows() -> tuple[Any, Any]:
    g = np.random.default_rng(0)
    return g.normal(size=(8, 16)), g.integers(0, 5, 8)


def loss() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def by_fit(name: str, out: Path) -> None:
    """``Model.fit`` of whatever Keras this is, over as many processes as there are."""
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    if world > 1:
        keras.distribution.initialize()
        keras.distribution.set_distribution(keras.distribution.DataParallel())
    model, (x, y) = build(name), rows()
    data = torch.utils.data.TensorDataset(torch.tensor(x, dtype=torch.float32), torch.tensor(y))
    loader = torch.utils.data.DataLoader(data, batch_sampler=PARTS[world][rank])
    model.compile(keras.optimizers.SGD(0.1), loss())
    model.fit(loader, epochs=2, verbose=0, shuffle=False)
    save(model, out)


def by_ronde(name: str, out: Path) -> None:
    keras.config.set_floatx("float64")
    os.environ |= {"RONDE_RUNS": "none", "RONDE_PROGRESS": "warnings"}
    x, y = rows()
    data = torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y))
    options = {"batch_size": 5, "shuffle": False, "sync_batchnorm": True}
    sgd = keras.optimizers.SGD(0.1)
    run = ronde.distribute(build(name), sgd, data, loss=loss(), **options)
    for _ in run.epochs(2):
        for batch in run.batches():
            run.step(batch)
    with run.whole_model() as whole:
        save(whole, out)


def save(model: Any, out: Path) -> None:
    if os.environ["RANK"] == "0":
        values = enumerate(model.variables)
        np.savez(out, **{f"w{i}": keras.ops.convert_to_numpy(v) for i, v in values})


def exact(way: str) -> dict[str, Any]:
    train, found = {"ronde": by_ronde, "nightly": by_fit}[way], {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("mlp", "normalized"):
            files = {}
            for world in (1, 2):
                out = Path(folder, f"{name}-{world}.npz")
                work = functools.partial(train, name, out)
                failed = fork(world, work, 120.0, Path(folder, "log"))
                files[world] = None if failed else dict(np.load(out))
                if failed:
                    found[name] = failed
            if name not in found:
                found[name] = far(files[2], files[1])
    return {"keras": keras.__version__, **found}


def speed(name: str, steps: int, rounds: int, out: Path) -> None:
    """In each of two workers: turns of Ronde and of DDP. Rank 0 writes seconds and CPU seconds."""
    torch.set_num_threads(1)
    os.environ |= {"RONDE_RUNS": "none", "RONDE_PROGRESS": "warnings"}
    g, batch = torch.Generator().manual_seed(0), 16
    x = torch.randn(batch * steps, 64, 64, 3, generator=g)
    data = torch.utils.data.TensorDataset(x, torch.randint(0, 5, (len(x),), generator=g))

    def optimizer(model: Any) -> Any:
        return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-3)

    hand = build_large(name)
    model = build_large(name)
    run = ronde.distribute(
        model, keras.optimizers.Adam(1e-3), data, loss=loss(), batch_size=batch, save_every=None
    )
    ddp = torch.nn.parallel.DistributedDataParallel(hand)
    updates, criterion = optimizer(hand), loss()
    sampler = torch.utils.data.DistributedSampler(data)
    loader = torch.utils.data.DataLoader(data, batch_size=batch // 2, sampler=sampler)

    def by_hand() -> None:
        for inputs, targets in loader:
            updates.zero_grad()
            criterion(targets, ddp(inputs, training=True)).backward()
            updates.step()

    epochs = iter(run.epochs(rounds + 1))

    def with_ronde() -> None:
        next(epochs)
        for each in run.batches():
            run.step(each)

    taken: dict[str, list[list[float]]] = {"ronde": [], "ddp": []}
    for turn in range(rounds + 1):
        for way, work in (("ronde", with_ronde), ("ddp", by_hand))[:: 1 if turn % 2 else -1]:
            torch.distributed.barrier()
            began, cpu = time.monotonic(), time.process_time()
            work()
            torch.distributed.barrier()
            if turn:  # the first one warms up
                taken[way].append([time.monotonic() - began, time.process_time() - cpu])
    if run.is_main:
        out.write_text(json.dumps(taken))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nightly", type=Path, help="a folder that holds keras-nightly")
    parser.add_argument("--exact", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=6)
    asked = parser.parse_args()
    if asked.exact:
        print(json.dumps(exact(asked.exact)))
        return
    for way in ("ronde", "nightly"):
        path = str(asked.nightly) if way == "nightly" else ""
        if way == "nightly" and not path:
            continue
        env = {**os.environ, "PYTHONPATH": f"{path}:{os.environ.get('PYTHONPATH', '')}"}
        command = [sys.executable, __file__, "--exact", way]
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
        print(f"exact {way}: {done.stdout.strip().splitlines()[-1]}", flush=True)
    for name in ("vit", "MobileNetV3Small"):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "times.json")
            work = functools.partial(speed, name, asked.steps, asked.rounds, out)
            if failed := fork(2, work, 900.0, Path(folder, "log")):
                print(f"speed {name}: {failed}")
                continue
            taken = json.loads(out.read_text())
        pairs = list(zip(taken["ddp"], taken["ronde"], strict=True))
        wall, cpu = (statistics.median(d[i] / r[i] for d, r in pairs) for i in (0, 1))
        step = statistics.median(r[0] for r in taken["ronde"]) / asked.steps
        print(
            f"speed {name}: {wall:.3f} of DDP by wall time, {cpu:.3f} by processor time (median of "
            f"{len(pairs)} turns of {asked.steps} steps, {1000 * step:.0f} ms each; "
            f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores)",
            flush=True,
        )


if __name__ == "__main__":
    main()
