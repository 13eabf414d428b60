"""Trains Keras models under plans, in one world after another: ``keras_worker.py WORLDS``.

Worlds with ``PLAIN`` train with ``Model.fit`` of Keras instead, which others are compared with.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path

os.environ["KERAS_BACKEND"] = "torch"

import numpy as np
import torch

import keras
import ronde.keras
from forked import forget_runs, fork
from ronde.measure.memory_account import optimizer_bytes

keras.config.set_floatx("float64")
L, O = keras.layers, keras.optimizers  # noqa: E741


@keras.saving.register_keras_serializable()
class Blocks(keras.Model):
    """Layers in a list, a default of ``training``, and a weight of the model itself."""

    def __init__(self, **options):
        super().__init__(**options)
        self.first = L.Dense(12, "relu")
        self.blocks = [L.Dense(12, "relu") for _ in range(2)]
        self.drop = L.Dropout(0.3)
        self.norm = L.BatchNormalization()
        self.last = L.Dense(5)

    def call(self, x, training=False):
        x = self.first(x)
        for block in self.blocks:
            x = self.drop(block(x), training=training)
        return self.last(self.norm(x))


def blocks():
    model = Blocks()
    model(np.zeros((2, 16)))
    return model


def noise():
    layers = [L.Dense(12, "relu"), L.Dropout(0.2, seed=7), L.GaussianNoise(0.1), L.Dropout(0.2)]
    return keras.Sequential([L.Input((16,)), *layers, L.Dense(5)])


def regularized():
    layers = [
        L.Dense(12, "relu", kernel_regularizer="l2"),
        L.Dense(12, "relu", activity_regularizer="l1"),
        L.Dense(5, kernel_constraint=keras.constraints.MaxNorm(0.8)),
    ]
    return keras.Sequential([L.Input((16,)), *layers])


def mlp():
    layers = [L.Dense(16, "relu"), L.Dense(16, "relu"), L.Dense(16, "relu"), L.Dense(5)]
    return keras.Sequential([L.Input((16,)), *layers])


def convolutions():
    inputs = L.Input((16,))
    x = L.Conv2D(8, 3, padding="same", use_bias=False)(L.Reshape((4, 4, 1))(inputs))
    x = L.ReLU()(L.BatchNormalization()(x))
    x = L.Add()([x, L.DepthwiseConv2D(3, padding="same")(x)])
    x = L.GlobalAveragePooling2D()(L.BatchNormalization(momentum=0.9)(x))
    return keras.Model(inputs, L.Dense(5)(x))


def transformer():
    inputs = L.Input((16,))
    x = L.Dense(16)(L.Reshape((4, 4))(inputs))
    for _ in range(2):
        h = L.LayerNormalization()(x)
        x = L.Add()([x, L.MultiHeadAttention(2, 8)(h, h)])
        h = L.LayerNormalization()(x)
        x = L.Add()([x, L.Dense(16)(L.Dense(32, "gelu")(h))])
    return keras.Model(inputs, L.Dense(5)(L.GlobalAveragePooling1D()(x)))


def masked():
    """Attention takes the mask from its inputs: the second one has none."""
    inputs = L.Input((16,))
    ids = keras.ops.cast(keras.ops.clip(keras.ops.abs(inputs) * 4, 0, 9), "int32")
    x = L.LayerNormalization()(L.Embedding(10, 8, mask_zero=True)(ids))
    for _ in range(2):
        x = L.LayerNormalization()(L.Add()([x, L.MultiHeadAttention(2, 4)(x, x)]))
        x = L.LayerNormalization()(L.Add()([x, L.Dense(8)(L.Dense(16, "gelu")(x))]))
    return keras.Model(inputs, L.Dense(5)(L.GlobalAveragePooling1D()(x)))


OPTIMIZERS = {
    "SGD": lambda: O.SGD(0.05, momentum=0.9, nesterov=True),
    "Adam": lambda: O.Adam(0.01, amsgrad=True, clipvalue=0.01),
    "AdamW": lambda: O.AdamW(0.01, weight_decay=0.02),
    "Nadam": lambda: O.Nadam(O.schedules.CosineDecay(0.01, 8)),
    "clipped": lambda: O.SGD(0.05, global_clipnorm=0.1),
} | {
    name: lambda name=name: getattr(O, name)(0.01)
    for name in ("RMSprop", "Adadelta", "Adagrad", "Adamax", "Lion", "Ftrl", "Lamb", "Muon")
}


def data(n: int):
    g = np.random.default_rng(0)
    return g.normal(size=(n, 16)), g.integers(0, 5, n)


def build(kind: str, floatx: str = "float64"):
    keras.config.set_floatx(floatx)
    keras.backend.clear_session()  # names count from 1 again, on all ranks
    keras.utils.set_random_seed(3)
    return globals()[kind]()


def loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def weights(model) -> dict[str, np.ndarray]:
    found = {str(i): np.array(v) for i, v in enumerate(model.variables) if "seed" not in v.path}
    return {**found, "parameters": sum(v.size for v in found.values())}


def callbacks(file: Path) -> list:
    c = keras.callbacks
    return [
        c.LearningRateScheduler(lambda epoch, rate: rate * 0.7 if epoch else rate),
        c.EarlyStopping("val_accuracy", patience=1, mode="max", restore_best_weights=True),
        c.ModelCheckpoint(file, monitor="val_loss", save_best_only=True),
    ]


def by_fit(case: dict, file: Path, fit) -> dict:
    """A compiled model's own training, by Keras's ``fit`` or Ronde's."""
    model, (x, y) = build(case["model"]), data(75)
    model.compile(OPTIMIZERS[case["optimizer"]](), loss(), metrics=["accuracy"])
    held = (x[:33] + 0.1, y[:33])
    more = callbacks(file)
    if fit is ronde.keras.fit:
        more.append(keras.callbacks.TensorBoard(file.with_suffix(".board")))
    history = fit(
        model,
        x,
        y,
        batch_size=20,
        epochs=6,
        shuffle=False,
        validation_data=held,
        callbacks=more,
        **case["options"],
    )
    found = {f"end {k}": v for k, v in weights(model).items()}
    found |= {k: np.array(v) for k, v in history.history.items() if k != "accuracy"}
    return found | weights(keras.models.load_model(file))


def resumed(_case: dict, file: Path) -> dict:
    """``fit`` that dies while it evaluates, and goes on: what of its history is not the whole one's."""
    (x, y), now, wrong = data(75), {}, {}

    def schedule(epoch, rate):
        now["epoch"] = epoch
        return rate

    def dying(target, _output):
        if now["epoch"] == now["dies"]:
            raise InterruptedError
        return keras.ops.zeros(len(target))

    def trained(every: int, dies: int, resume: bool = False) -> dict:
        os.environ |= {"RONDE_RUN_DIR": f"{file}.{every}", "RONDE_RESUME": str(int(resume))}
        forget_runs()
        now["dies"] = dies
        model, stopping = build("mlp"), keras.callbacks.EarlyStopping("val_loss", patience=9)
        model.compile(OPTIMIZERS["SGD"](), loss(), metrics=[dying])
        given = [keras.callbacks.LearningRateScheduler(schedule), stopping]
        options = {"validation_data": (x[:33] + 0.1, y[:33]), "callbacks": given}
        options |= {"save_every": every, "async_save": False, "batch_size": 20, "epochs": 4}
        history = ronde.keras.fit(model, x, y, **options).history
        return {**history, "best": stopping.best, "wait": stopping.wait}

    for every, dies in ((4, 1), (5, 2)):  # saved at an epoch's last step of four, and in its midst
        whole = trained(99, 99)
        with suppress(InterruptedError):
            trained(every, dies)
        found = trained(every, 99, resume=True)
        wanted = {k: v[dies:] if isinstance(v, list) else v for k, v in whole.items()}
        wrong[str(every)] = str({k: (found[k], wanted[k]) for k in found if found[k] != wanted[k]})
    return wrong


def plain(case: dict, file: Path) -> dict:
    """As Keras trains, except that float64 stays float64."""
    from keras.src.backend.common import dtypes

    dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64"
    if case["plan"] == "fit":
        return by_fit(case, file, keras.Model.fit)
    model, (x, y) = build(case["model"]), data(75)
    model.compile(OPTIMIZERS[case["optimizer"]](), loss())
    model.fit(x, y, batch_size=20, epochs=2, shuffle=False, verbose=0)
    return {**weights(model), "loss": model.evaluate(x[:33], y[:33], verbose=0)}


def trained(case: dict, file: Path) -> dict:
    if case["plan"] == "fit":
        return by_fit(case, file, ronde.keras.fit)
    if case["plan"] in ("refused", "resumed"):
        return globals()[case["plan"]](case, file)
    floatx = case.get("floatx", "float64")
    model, (x, y) = build(case["model"], floatx), data(75)
    x = x.astype(floatx)
    rows = torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y))
    options = {"batch_size": 20, "shuffle": False, "sync_batchnorm": True, **case["options"]}
    run = ronde.distribute(
        model, OPTIMIZERS[case["optimizer"]](), rows, loss=loss(), plan=case["plan"], **options
    )
    for _ in run.epochs(case.get("epochs", 2)):
        for batch in run.batches():
            run.step(batch)
    part = torch.utils.data.Subset(rows, range(33))
    found = {"loss": run.evaluate(part)["loss"]}
    with run.whole_model() as whole:
        found |= weights(whole)
        if run.is_main:
            whole.save(file)
            loaded = keras.models.load_model(file)
            assert torch.equal(loaded(x, training=False), whole(x, training=False))
    return found


def refused(_case: dict, _file: Path) -> dict:
    """What is refused, in its own words."""
    x, y = data(20)
    rows = torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y))
    c, fit = keras.callbacks, ronde.keras.fit
    told = {}

    def compiled(metrics=("accuracy",)):
        model = build("mlp")
        model.compile("sgd", loss(), metrics=list(metrics))
        return model

    def give(optimizer="SGD", model=None, lost=None, **options):
        made = OPTIMIZERS.get(optimizer, lambda: optimizer)()
        return ronde.distribute(
            model or build("mlp"), made, rows, loss=lost or loss(), batch_size=5, **options
        )

    def step(weighted):
        run = give(model=build("regularized"), lost=weighted, micro_batch=2)
        for batch in run.batches():
            run.step(batch)

    half = L.Dense(5, dtype="mixed_float16", name="half")
    used = O.SGD(0.1)
    used.build(build("mlp").trainable_variables)
    asked = {
        "built": lambda: give(model=keras.Sequential([L.Dense(3)])),
        "used": lambda: give(used),
        "half": lambda: give(model=keras.Sequential([L.Input((16,)), half])),
        "adafactor": lambda: give(O.Adafactor(0.1)),
        "ema": lambda: give(O.SGD(0.1, use_ema=True)),
        "steps": lambda: give(O.SGD(0.1, gradient_accumulation_steps=2)),
        "rate": lambda: give(O.SGD(lambda: 0.1)),
        "grow": lambda: give("Nadam", batch="grow"),
        "reduction": lambda: give(lost=keras.losses.MeanSquaredError(reduction="sum")),
        "none": lambda: give(lost=keras.losses.MeanSquaredError(reduction=None)),
        "two means": lambda: step(lambda output, target: (output.sum(), target.sum() + 1)),
        "verbose": lambda: fit(compiled(), x, y, verbose=0),
        "class_weight": lambda: fit(compiled(), x, y, class_weight={0: 2.0}),
        "compile": lambda: fit(build("mlp"), x, y),
        "callback": lambda: fit(compiled(), x, y, callbacks=c.CSVLogger("x.csv")),
        "monitor": lambda: fit(compiled(), x, y, callbacks=[c.EarlyStopping("val_loss")]),
        "metric": lambda: fit(compiled([keras.metrics.AUC()]), x, y),
        "data": lambda: fit(compiled(), [x], y),
        "validation": lambda: fit(compiled(), x, y, validation_data=(x, y, y)),
    }
    for name, call in asked.items():
        try:
            call()
        except ronde.RondeError as error:
            told[name] = f"{type(error).__name__}: {error}"
    model = build("mlp")
    run = ronde.distribute(model, OPTIMIZERS["AdamW"](), rows, loss=loss(), batch_size=5)
    told["memory"] = str(optimizer_bytes(model, run.port.parts.optimizer)[0])
    return told


def train_all(out: Path, cases: list[dict], variables: dict[str, str]) -> None:
    """The cases of a world, in each rank; rank 0 writes what it has."""
    os.environ.update(variables)
    for i, case in enumerate(cases):
        forget_runs()
        try:
            found = (plain if "PLAIN" in variables else trained)(case, out / f"{i}.keras")
        except ronde.RondeError as error:
            found = {"refused": f"{type(error).__name__}: {error}"}
        if os.environ.get("RANK", "0") == "0":
            np.savez(out / f"{i}.npz", **found)


if __name__ == "__main__":
    os.environ |= {"RONDE_RUNS": "none", "RONDE_PROGRESS": "quiet"}
    for name, (workers, cases, *more) in json.loads(Path(sys.argv[1]).read_text()).items():
        Path(name).mkdir()
        try:
            fork(workers, partial(train_all, Path(name).absolute(), cases, dict(*more)))
        except SystemExit:  # a test misses its files; the others go on
            traceback.print_exc()
