"""A Keras model under Ronde is trained as ``Model.fit`` trains it on one device, weight by weight."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import zygote
from processes import PATHS, TESTS, forked
from sampling import ALL, long

pytestmark = pytest.mark.skipif(find_spec("keras") is None, reason="needs the extra keras")

BOUND = 1e-10


def case(model: str, optimizer: str = "SGD", plan: str = "replicate", **options: object) -> dict:
    return {"model": model, "optimizer": optimizer, "plan": plan, "options": options}


def train(
    cases: list[dict], workers: int, folder: Path, *words: str, **variables: str
) -> list[dict]:
    """What rank 0 has after each case: weights by place, and the loss of an evaluation."""
    folder.mkdir()
    listing = folder / "cases.json"
    listing.write_text(json.dumps(cases))
    done = zygote.run(
        forked(TESTS / "keras_worker.py", workers, folder, listing, *words, imports=["keras"]),
        env={**os.environ, "PYTHONPATH": PATHS, "KERAS_BACKEND": "torch", **variables},
        cwd=folder,
        timeout=170,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [dict(np.load(folder / f"{i}.npz")) for i in range(len(cases))]


def difference(found: dict, wanted: dict) -> float:
    assert "refused" not in found, found["refused"]
    assert found.keys() == wanted.keys()
    return max(float(np.abs(found[k].astype("f8") - wanted[k]).max()) for k in wanted)


SAME_AS_FIT = [
    case("mlp", optimizer)
    for optimizer in [
        "SGD",
        "Adam",
        "AdamW",
        "Nadam",
        "clipped",
        "RMSprop",
        "Adadelta",
        "Adagrad",
        "Adamax",
        "Lion",
        "Ftrl",
    ]
] + [
    case("regularized"),
    case("convolutions", "Adam"),
    case("transformer", "AdamW"),
    case("mlp", "Lamb"),
]
DRAWS = [case("noise"), case("blocks", "Adam")]  # Ronde draws other numbers than Keras
DIVIDED = [
    case("masked", "SGD", "shard=parameters"),
    case("mlp", "AdamW", "shard=optimizer"),
    case("mlp", "clipped", "shard=gradients"),
    case("mlp", "Nadam", "shard=gradients"),
    case("blocks", "AdamW", "shard=parameters"),
    case("convolutions", "SGD", "shard=parameters"),
    case("transformer", "AdamW", "shard=parameters"),
    case("regularized", "Adagrad", "shard=parameters"),
    case("mlp", "Adam", "pipeline=2,micro_batch=5", sync_batchnorm=False),
    case("noise", "AdamW", "pipeline=2,micro_batch=5", sync_batchnorm=False),
    case("transformer", "AdamW", "pipeline=2,micro_batch=5", sync_batchnorm=False),
    case("mlp", "Lamb", "shard=parameters"),
    case("mlp", "Muon", "shard=optimizer"),
    case("regularized", "SGD", "pipeline=2"),
]
REFUSED = {
    ("clipped", "shard=gradients"): "SGD clips by norms (clip_norm= of ronde.distribute",
    ("Adagrad", "shard=parameters"): "'sequential/dense_2/kernel' has a constraint",
    ("Lamb", "shard=parameters"): "Lamb computes with whole parameters",
    ("SGD", "pipeline=2"): "'dense' has a regularizer",
}


@pytest.mark.parametrize("workers", [1, 2, 3] if ALL else [2])
def test_replicas_train_as_fit_does(workers, tmp_path):
    cases = SAME_AS_FIT if ALL else SAME_AS_FIT[::2]
    found = train(cases, workers, tmp_path / "ronde")
    wanted = train(cases, 1, tmp_path / "fit", "plain")
    check_equal(cases, found, wanted)


def test_random_layers_draw_the_same_on_any_number_of_workers(tmp_path):
    cases = DRAWS if ALL else DRAWS[:1]
    found = train(cases, 3, tmp_path / "three")
    check_equal(cases, found, train(cases, 1, tmp_path / "alone"))


def test_divided_models_train_as_one_does_or_are_refused_by_name(tmp_path):
    cases = DIVIDED if ALL else DIVIDED[::3] + DIVIDED[-1:]
    found = train(cases, 2, tmp_path / "two")
    for each, result in zip(cases, found, strict=True):
        why = REFUSED.get((each["optimizer"], each["plan"]))
        assert (why or "") in str(result.get("refused", "")), (each, result)
        assert ("refused" in result) == bool(why), (each, result)
    kept = [(c, f) for c, f in zip(cases, found, strict=True) if "refused" not in f]
    alone = [{**c, "plan": "replicate"} for c, _ in kept]
    check_equal([c for c, _ in kept], [f for _, f in kept], train(alone, 1, tmp_path / "one"))


@long
def test_hybrids_train_as_one_does(tmp_path):
    options = {"sync_batchnorm": False}
    cases = [
        case("transformer", "AdamW", "pipeline=2,shard=parameters,micro_batch=5", **options),
        case("noise", "Nadam", "pipeline=2,shard=optimizer,micro_batch=5", **options),
        case("blocks", "Adam", "shard=parameters,shard_within=2"),
    ]
    found = train(cases, 4, tmp_path / "four")
    alone = [{**each, "plan": "replicate"} for each in cases]
    check_equal(cases, found, train(alone, 1, tmp_path / "one"))


CHAIN = [
    (1, "replicate"),
    (2, "pipeline=2,micro_batch=5"),
    (4, "shard=parameters"),
    (2, "shard=parameters"),
    (1, "replicate"),
]


def test_a_run_is_resumed_on_other_numbers_of_workers_and_plans(tmp_path):
    chain = CHAIN if ALL else CHAIN[1:3]
    made = [("mlp", "Nadam", "a"), ("transformer", "AdamW", "b")][not ALL :]
    for epoch, (workers, plan) in enumerate(chain, 1):
        cases = [{**case(m, o, plan, name=name), "epochs": epoch} for m, o, name in made]
        runs = {"RUNS": str(tmp_path / "runs"), "RONDE_RESUME": "1" if epoch > 1 else "0"}
        found = train(cases, workers, tmp_path / f"{epoch}", **runs)
    whole = [{**case(m, o), "epochs": len(chain)} for m, o, _ in made]
    check_equal(cases, found, train(whole, 1, tmp_path / "whole"))


def test_products_are_in_half_precision_where_asked(tmp_path):
    plans = ("replicate", "shard=parameters", "pipeline=2,micro_batch=5")
    cases = [
        {**case("mlp", "SGD", p, precision="bf16", sync_batchnorm=False), "floatx": "float32"}
        for p in plans
    ]
    found = train(cases, 2, tmp_path / "two")
    half, full = train([cases[0], {**case("mlp"), "floatx": "float32"}], 1, tmp_path / "one")
    for result in found:
        assert difference(result, half) < 0.01 and result["0"].dtype == "float32"
    assert difference(half, full) > 1e-5


def test_fit_calls_back_as_keras_does(tmp_path):
    """Losses, metrics, the epoch it stops at, the file of the best epoch, and restored weights."""
    cases = [case("mlp", "SGD", "fit")]
    found = train(cases, 2, tmp_path / "two")
    wanted = train(cases, 1, tmp_path / "fit", "plain")
    assert 1 < len(wanted[0]["loss"]) < 6
    check_equal(cases, found, wanted)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for part, tag, key in [
        ("train", "epoch_loss", "loss"),
        ("validation", "epoch_loss", "val_loss"),
    ]:
        board = EventAccumulator(str(tmp_path / "two" / "0.board" / part)).Reload()
        written = [event.value for event in board.Scalars(tag)]
        assert written == pytest.approx(wanted[0][key].tolist(), rel=1e-6)


SAID = {
    "built": "has no weights yet: call the model on one batch",
    "used": "optimizer=SGD has trained already",
    "half": "'half' computes in float16, which needs a scaled loss",
    "adafactor": "optimizer=Adafactor: its state",
    "ema": "optimizer=SGD(use_ema=…): Ronde does this itself; use run.average()",
    "steps": "give ronde.distribute(…, micro_batch=N)",
    "rate": "learning_rate is a function; give a schedule",
    "grow": "batch='grow' with a Keras LearningRateSchedule",
    "reduction": "MeanSquaredError(reduction='sum'): expected 'sum_over_batch_size'",
    "none": "MeanSquaredError(reduction=None): expected",
    "verbose": "ronde.keras.fit(…, verbose=…): not supported",
    "class_weight": "ronde.keras.fit(…, class_weight=…): not supported",
    "compile": "model is not compiled",
    "callback": "callbacks: CSVLogger is not supported by ronde.keras.fit; EarlyStopping",
    "monitor": "EarlyStopping(monitor='val_loss'): there is loss. Metrics are measured on",
    "metric": "AUC is no mean over samples",
    "data": "x: expected two arrays, or a torch Dataset or DataLoader; found list",
    "validation": "validation_data: expected (x, y)",
    "memory": "{'dense.kernel': 4096, 'dense.bias': 256, ",  # two moments of float64
}


def test_what_is_not_supported_is_refused_by_name(tmp_path):
    (told,) = train([case("mlp", plan="refused")], 1, tmp_path / "refused")
    missing = {k: str(told.get(k, "nothing")) for k, v in SAID.items() if v not in str(told.get(k))}
    assert not missing


def check_equal(cases: list[dict], found: list[dict], wanted: list[dict]) -> None:
    far = {
        f"{c['model']} {c['optimizer']} {c['plan']}": difference(a, b)
        for c, a, b in zip(cases, found, wanted, strict=True)
    }
    print(far)
    assert max(far.values()) <= BOUND, far
