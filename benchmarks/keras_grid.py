"""Keras models on every plan, in float64: do 2 and 3 workers train the weights of one process?

    python benchmarks/keras_grid.py [--only MODEL,…] [--plans PLAN,…] [--again] [--seconds 900]

Eight models of ``keras.applications``, at 64 pixels (Xception at 72), and four transformers written
with Keras train two steps, of 5 samples and of 3, with SGD and momentum. Batch normalization is
synchronized. Pipelines train micro-batches of 2, 2, and 1, as one process does then; they cut the
shorter batch into as many, so models with batch normalization train two steps of 5 there.
Each row runs alone, in forks of this process; its result is the largest difference of a weight or
statistic from one process, relative to the largest value of that tensor, or why Ronde refused.
Results go to ``benchmarks/results/keras_grid.json``; rows that it has are not run again.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"

import numpy as np
import torch

import keras
import ronde

RESULTS = Path(__file__).parent / "results" / "keras_grid.json"
BOUND = 1e-10
CLASSES, BATCH, SAMPLES, MICRO, WORDS, LENGTH = 5, 5, 8, 2, 50, 12
IMAGES = (
    *("ResNet50", "MobileNetV2", "MobileNetV3Small", "EfficientNetB0", "DenseNet121"),
    *("ConvNeXtTiny", "MobileNet", "Xception"),
)
PLANS = (
    "replicate",
    "shard=optimizer",
    "shard=gradients",
    "shard=parameters",
    "pipeline",
    "tensor",
)
L = keras.layers


def vit() -> Any:
    """Patches of 8 pixels, a class token by averaging."""
    pixels = L.Input((64, 64, 3))
    x = L.Reshape((64, 32))(L.Conv2D(32, 8, 8)(pixels))
    for _ in range(3):
        h = L.LayerNormalization()(x)
        x = L.Add()([x, L.MultiHeadAttention(4, 8, dropout=0.1)(h, h)])
        h = L.LayerNormalization()(x)
        x = L.Add()([x, L.Dropout(0.1)(L.Dense(32)(L.Dense(64, "gelu")(h)))])
    return keras.Model(pixels, L.Dense(CLASSES)(L.GlobalAveragePooling1D()(x)))


@keras.saving.register_keras_serializable()
class Block(keras.layers.Layer):
    """A decoder's block, causal."""

    def __init__(self, width: int, **options: Any) -> None:
        super().__init__(**options)
        self.width = width
        self.norms = [L.LayerNormalization(), L.LayerNormalization()]
        self.attention = L.MultiHeadAttention(2, width // 2)
        self.up, self.down = L.Dense(2 * width, "relu"), L.Dense(width)
        self.drop = L.Dropout(0.1)

    def call(self, x: Any, training: bool | None = None) -> Any:
        h = self.norms[0](x)
        x = x + self.drop(self.attention(h, h, use_causal_mask=True), training=training)
        return x + self.drop(self.down(self.up(self.norms[1](x))), training=training)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "width": self.width}


@keras.saving.register_keras_serializable()
class Gpt(keras.Model):
    """A subclassed decoder with tied embeddings, a class from its last place."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.words = L.ReversibleEmbedding(WORDS, 32, tie_weights=True)
        self.places = L.Embedding(LENGTH, 32)
        self.blocks = [Block(32) for _ in range(3)]
        self.norm = L.LayerNormalization()

    def call(self, ids: Any) -> Any:
        x = self.words(ids) + self.places(keras.ops.arange(LENGTH))
        for block in self.blocks:
            x = block(x)
        return self.words(self.norm(x), reverse=True)[:, -1]


def gpt() -> Any:
    model = Gpt()
    model(np.zeros((2, LENGTH), "int64"))
    return model


def encoder() -> Any:
    """As BERT: embeddings with a mask of zeros, normalization after each sum."""
    ids = L.Input((LENGTH,), dtype="int64")
    x = L.LayerNormalization()(L.Embedding(WORDS, 32, mask_zero=True)(ids))
    for _ in range(3):
        x = L.LayerNormalization()(L.Add()([x, L.MultiHeadAttention(2, 16)(x, x)]))
        x = L.LayerNormalization()(L.Add()([x, L.Dense(32)(L.Dense(64, "gelu")(x))]))
    return keras.Model(ids, L.Dense(CLASSES)(L.GlobalAveragePooling1D()(x)))


def translator() -> Any:
    """An encoder and a decoder with cross-attention, over the two halves of the words."""
    ids = L.Input((LENGTH,), dtype="int64")
    embed = L.Embedding(WORDS, 32)
    source, target = embed(ids[:, : LENGTH // 2]), embed(ids[:, LENGTH // 2 :])
    for _ in range(2):
        h = L.LayerNormalization()(source)
        source = source + L.MultiHeadAttention(2, 16)(h, h)
        source = source + L.Dense(32)(L.Dense(64, "relu")(L.LayerNormalization()(source)))
    for _ in range(2):
        h = L.LayerNormalization()(target)
        target = target + L.MultiHeadAttention(2, 16)(h, h, use_causal_mask=True)
        target = target + L.MultiHeadAttention(2, 16)(L.LayerNormalization()(target), source)
        target = target + L.Dense(32)(L.Dense(64, "relu")(L.LayerNormalization()(target)))
    return keras.Model(ids, L.Dense(CLASSES)(target[:, -1]))


TEXTS: dict[str, Callable[[], Any]] = {"gpt": gpt, "encoder": encoder, "translator": translator}
MODELS = (*IMAGES, "vit", *TEXTS)


def build(name: str) -> Any:
    """The model, with the same weights in each process."""
    keras.utils.set_random_seed(3)
    if name in IMAGES:
        size = 72 if name == "Xception" else 64
        make = getattr(keras.applications, name)
        options = {"weights": None, "classes": CLASSES, "classifier_activation": None}
        return make(input_shape=(size, size, 3), **options)
    return TEXTS.get(name, vit)()


def data(model: str, piped: bool) -> Any:
    """Samples and their classes."""
    g = np.random.default_rng(0)
    count = 2 * BATCH if piped and model in IMAGES else SAMPLES
    size = 72 if model == "Xception" else 64
    x = g.normal(size=(count, size, size, 3))
    if model in TEXTS:
        x = g.integers(1, WORDS, (count, LENGTH))
        x[:, LENGTH - 2 :] *= g.integers(0, 2, (count, 2))  # a few are padding
    classes = WORDS if model == "gpt" else CLASSES
    y = torch.tensor(g.integers(0, classes, count))
    return torch.utils.data.TensorDataset(torch.tensor(x), y)


def train(name: str, plan: str, out: Path) -> None:
    """Train in this rank; rank 0 writes the weights, or why it was refused."""
    torch.set_num_threads(1)
    keras.config.set_floatx("float64")
    keras.config.disable_traceback_filtering()
    os.environ |= {"RONDE_RUNS": "none", "RONDE_PROGRESS": "warnings"}
    world, piped = int(os.environ["WORLD_SIZE"]), plan in ("pipeline", "micro")
    asked = {"pipeline": f"pipeline={world}", "tensor": f"tensor={world}", "micro": "replicate"}
    options: dict[str, Any] = {"micro_batch": MICRO} if piped else {"sync_batchnorm": True}
    try:
        run = ronde.distribute(
            build(name),
            keras.optimizers.SGD(0.01, momentum=0.9),
            data(name, piped),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            batch_size=BATCH,
            shuffle=False,
            plan=asked.get(plan, plan),
            **options,
        )
        began = time.monotonic()
        for _ in run.epochs(1):
            for batch in run.batches():
                run.step(batch)
        with run.whole_model() as whole:
            found = {
                f"w{i}": np.array(v) for i, v in enumerate(whole.variables) if "seed" not in v.path
            }
        found["seconds"] = np.array(time.monotonic() - began)
    except ronde.RondeError as error:
        found = {"refused": np.array(f"{type(error).__name__}: {error}")}
    if os.environ["RANK"] == "0":
        np.savez(out, **found)


def fork(size: int, work: Callable[[], None], seconds: float, log: Path) -> str:
    """Run ``work`` as each rank of a world. Returns how it failed, or an empty text."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    children: dict[int, int] = {}
    for rank in range(size):
        if pid := os.fork():
            children[pid] = rank
            continue
        at = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        os.environ |= {name: str(value) for name, value in at.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        file = os.open(f"{log}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1), os.dup2(file, 2)
        faulthandler.register(signal.SIGUSR2, all_threads=False)
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(status)
    limit, failed = time.monotonic() + seconds, ""
    while children and not failed:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            rank = children.pop(pid)
            if status:
                last = Path(f"{log}.{rank}").read_text(errors="replace").strip().splitlines()[-1:]
                failed = f"rank {rank}: {' '.join(last) or status}"
        elif time.monotonic() > limit:
            failed = f"no end in {seconds:.0f} s"
            for other in children:
                os.kill(other, signal.SIGUSR2)  # says where it is
            time.sleep(1.0)
        else:
            time.sleep(0.02)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return failed


def far(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> float:
    """The largest relative difference of a tensor's values."""
    assert found.keys() == wanted.keys()
    names = [n for n in wanted if n.startswith("w") and wanted[n].size]
    return max(
        float(np.abs(found[n] - wanted[n]).max() / max(float(np.abs(wanted[n]).max()), 1e-3))
        for n in names
    )


def rows(models: list[str], plans: list[str]) -> Iterator[tuple[str, str, int]]:
    for model in models:
        for workers in (2, 3):
            for plan in plans:
                yield model, plan, workers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(reversed(MODELS)))
    parser.add_argument("--plans", default=",".join(PLANS))
    parser.add_argument("--again", action="store_true", help="run rows again that failed")
    parser.add_argument("--seconds", type=float, default=900.0, help="limit of each row")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--logs", type=Path, help="keep the output of ranks there")
    asked = parser.parse_args()
    table: dict[str, Any] = json.loads(asked.out.read_text()) if asked.out.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        logs = asked.logs or place
        logs.mkdir(exist_ok=True)

        def weights(model: str, plan: str, workers: int) -> tuple[dict[str, Any], str]:
            file = place / f"{model}-{plan}-{workers}.npz"
            failed = ""
            if not file.exists():
                log = logs / file.stem
                failed = fork(workers, lambda: train(model, plan, file), asked.seconds, log)
            return ({} if failed else dict(np.load(file))), failed

        for model, plan, workers in rows(asked.only.split(","), asked.plans.split(",")):
            key = f"{model} {plan} {workers}"
            if key in table and not (asked.again and "failed" in table[key]):
                continue
            began = time.monotonic()
            found, failed = weights(model, plan, workers)
            row: dict[str, Any] = {"seconds": round(time.monotonic() - began, 1)}
            if failed:
                row["failed"] = failed
            elif "refused" in found:
                row["refused"] = str(found["refused"])
            else:
                wanted, failed = weights(model, "micro" if plan == "pipeline" else "replicate", 1)
                row |= (
                    {"failed": f"one process: {failed}"} if failed else {"far": far(found, wanted)}
                )
                row["steps_seconds"] = round(float(found["seconds"]), 1)
            table[key] = row
            asked.out.write_text(json.dumps(table, indent=1) + "\n")
            print(key, {k: v if k != "refused" else v[:90] for k, v in row.items()}, flush=True)
    wrong = [k for k, r in table.items() if "failed" in r or r.get("far", 0.0) > BOUND]
    exact = sum("far" in r for r in table.values()) - sum("far" in table[k] for k in wrong)
    refused = sum("refused" in r for r in table.values())
    print(f"{exact} exact (≤ {BOUND}), {refused} refused, {len(wrong)} wrong: {wrong}")


if __name__ == "__main__":
    main()
