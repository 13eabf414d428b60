"""A Keras model under Ronde is trained as ``Model.fit`` trains it on one device, weight by weight."""

from __future__ import annotations

import json
from importlib.util import find_spec

import numpy as np
import pytest

from processes import TESTS, python
from sampling import ALL, long

pytestmark = pytest.mark.skipif(find_spec("keras") is None, reason="needs the extra keras")

BOUND = 1e-10


def case(model: str, optimizer: str = "SGD", plan: str = "replicate", **options: object) -> dict:
    return {"model": model, "optimizer": optimizer, "plan": plan, "options": options}


def alone(cases: list[dict]) -> list[dict]:
    """As one worker trains them."""
    return [{**each, "plan": "replicate"} for each in cases]


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


HYBRID = [
    case("transformer", "AdamW", "pipeline=2,shard=parameters,micro_batch=5", sync_batchnorm=False),
    case("noise", "Nadam", "pipeline=2,shard=optimizer,micro_batch=5", sync_batchnorm=False),
    case("blocks", "Adam", "shard=parameters,shard_within=2"),
]
HALF = [
    {**case("mlp", "SGD", p, precision="bf16", sync_batchnorm=False), "floatx": "float32"}
    for p in ("replicate", "shard=parameters", "pipeline=2,micro_batch=5")
]
CHAIN = [
    (1, "replicate"),
    (2, "pipeline=2,micro_batch=5"),
    (4, "shard=parameters"),
    (2, "shard=parameters"),
    (1, "replicate"),
][slice(None) if ALL else slice(1, 3)]
RESUMED = [("mlp", "Nadam", "a"), ("transformer", "AdamW", "b")][not ALL :]
SIZES = [1, 2, 3] if ALL else [2]
FITTED = SAME_AS_FIT if ALL else SAME_AS_FIT[::3]
DRAWN = DRAWS if ALL else DRAWS[:1]
CUT = DIVIDED if ALL else DIVIDED[::3] + DIVIDED[-1:]
KEPT = [each for each in CUT if (each["optimizer"], each["plan"]) not in REFUSED]
FIT = [case("mlp", "SGD", "fit")]

# name of a world -> its workers, its cases, and variables
WORLDS: dict[str, tuple] = {
    **{f"fitted {n}": (n, FITTED) for n in SIZES},
    "fitted by keras": (1, FITTED, {"PLAIN": "1"}),
    "drawn 3": (3, DRAWN),
    "drawn 1": (1, DRAWN),
    "cut": (2, CUT),
    "kept 1": (1, alone(KEPT)),
    "half 2": (2, HALF),
    "half 1": (1, [HALF[0], {**case("mlp"), "floatx": "float32"}]),
    "fit": (2, FIT),
    "fit of keras": (1, FIT, {"PLAIN": "1"}),
    "refused": (1, [case("mlp", plan="refused")]),
    "resumed": (1, [case("mlp", plan="resumed")]),
    "whole": (1, [{**case(m, o), "epochs": len(CHAIN)} for m, o, _ in RESUMED]),
}
for epoch, (workers, plan) in enumerate(CHAIN, 1):
    cases = [{**case(m, o, plan, name=name), "epochs": epoch} for m, o, name in RESUMED]
    runs = {"RONDE_RUNS": "runs", "RONDE_RESUME": str(int(epoch > 1))}
    WORLDS[f"chain {epoch}"] = (workers, cases, runs)
if ALL:
    WORLDS |= {"hybrid 4": (4, HYBRID), "hybrid 1": (1, alone(HYBRID))}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """All worlds, forked of one process that has imported Keras, which takes seconds."""
    folder = tmp_path_factory.mktemp("keras")
    (folder / "worlds.json").write_text(json.dumps(WORLDS))
    done = python([str(TESTS / "keras_worker.py"), "worlds.json"], folder, 900 if ALL else 170)
    (folder / "said.txt").write_text(done.stdout + done.stderr)
    return folder


@pytest.fixture
def trained(folder):
    """What rank 0 of a world has after each case: weights by place, and an evaluation's loss."""

    def of(world: str) -> list[dict]:
        files = [folder / world / f"{i}.npz" for i in range(len(WORLDS[world][1]))]
        assert all(file.exists() for file in files), (folder / "said.txt").read_text()
        return [dict(np.load(file)) for file in files]

    return of


@pytest.mark.parametrize("workers", SIZES)
def test_replicas_train_as_fit_does(trained, workers):
    check_equal(FITTED, trained(f"fitted {workers}"), trained("fitted by keras"))


def test_random_layers_draw_the_same_on_any_number_of_workers(trained):
    check_equal(DRAWN, trained("drawn 3"), trained("drawn 1"))


def test_divided_models_train_as_one_does_or_are_refused_by_name(trained):
    found = trained("cut")
    for each, result in zip(CUT, found, strict=True):
        why = REFUSED.get((each["optimizer"], each["plan"]))
        assert (why or "") in str(result.get("refused", "")), (each, result)
        assert ("refused" in result) == bool(why), (each, result)
    check_equal(KEPT, [f for f in found if "refused" not in f], trained("kept 1"))


@long
def test_hybrids_train_as_one_does(trained):
    check_equal(HYBRID, trained("hybrid 4"), trained("hybrid 1"))


def test_a_run_is_resumed_on_other_numbers_of_workers_and_plans(trained):
    check_equal(WORLDS["whole"][1], trained(f"chain {len(CHAIN)}"), trained("whole"))


def test_products_are_in_half_precision_where_asked(trained):
    half, full = trained("half 1")
    for result in trained("half 2"):
        assert difference(result, half) < 0.01 and result["0"].dtype == "float32"
    assert difference(half, full) > 1e-5


def test_fit_calls_back_as_keras_does(trained, folder):
    """Losses, metrics, the epoch it stops at, the file of the best epoch, and restored weights."""
    wanted = trained("fit of keras")
    assert 1 < len(wanted[0]["loss"]) < 6
    check_equal(FIT, trained("fit"), wanted)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for part, tag, key in [
        ("train", "epoch_loss", "loss"),
        ("validation", "epoch_loss", "val_loss"),
    ]:
        board = EventAccumulator(str(folder / "fit" / "0.board" / part)).Reload()
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
    "two means": "adds its own loss (activity_regularizer or add_loss), a mean over samples, but",
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


def test_fit_goes_on_with_the_epoch_and_the_counters_that_it_had(trained):
    (wrong,) = trained("resumed")
    assert {every: str(text) for every, text in wrong.items()} == {"4": "{}", "5": "{}"}


def test_what_is_not_supported_is_refused_by_name(trained):
    (told,) = trained("refused")
    missing = {k: str(told.get(k, "nothing")) for k, v in SAID.items() if v not in str(told.get(k))}
    assert not missing


def check_equal(cases: list[dict], found: list[dict], wanted: list[dict]) -> None:
    far = {
        f"{c['model']} {c['optimizer']} {c['plan']}": difference(a, b)
        for c, a, b in zip(cases, found, wanted, strict=True)
    }
    print(far)
    assert max(far.values()) <= BOUND, far
