"""Boosted trees: the same file on any number of workers, after a kill too; and what is refused."""

from __future__ import annotations

import os
import runpy
import sys

import numpy as np
import pytest
from sklearn.metrics import log_loss, mean_squared_error, roc_auc_score

import zygote
from processes import PATHS, TESTS, ronde_run
from ronde import algorithms
from ronde.tables.scores import auc
from ronde.world import ArgumentError, CheckpointError
from sampling import ALL

WORLDS = ["1/whole", "2/whole", "2/empty", "3/uneven", "4/even"]
DATA = ["made0", "made1", "wine"]
if ALL:
    DATA += ["cancer", "diabetes", "digits", "iris", *(f"made{i}" for i in range(2, 15))]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("library", ["xgboost", "lightgbm"])
def test_the_file_is_the_same_on_any_number_of_workers(library, tmp_path):
    cases = [f"{name}@{w}" for name in DATA for w in (WORLDS if ALL else WORLDS[:1] + WORLDS[2:4])]
    done = zygote.run(
        [sys.executable, str(TESTS / "trees_worker.py"), str(tmp_path), library, *cases],
        env={**os.environ, "PYTHONPATH": PATHS},
        timeout=590,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name in DATA:
        files = {p.read_bytes() for p in tmp_path.glob(f"{library}-{name}-*.model")}
        assert len(files) == 1, name
    _check_metrics(np.load(tmp_path / f"{library}-made0-3-uneven.npz"))
    found = np.load(tmp_path / f"{library}-made1-2-empty.npz")
    error = mean_squared_error(found["y"], found["p"], sample_weight=found["w"])
    assert error**0.5 == pytest.approx(float(found["rmse"]), rel=1e-5)


def _check_metrics(found):
    """Over all validation rows, as scikit-learn has them; no mean over workers."""
    p, y, w = found["p"].astype(float), found["y"], found["w"]
    assert log_loss(y, p, sample_weight=w) == pytest.approx(float(found["logloss"]), rel=1e-5)
    assert roc_auc_score(y, p, sample_weight=w) == pytest.approx(float(found["auc"]), abs=1e-5)
    assert found["auc"] > 0.65


SCRIPT = """
import os, signal, sys
import numpy as np
import ronde
from ronde import algorithms
from ronde.algorithms.boosting_record import BoostingRecord
def train(library):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(600, 5))
    y = x[:, 0] * x[:, 1] + x[:, 2] > 0
    return algorithms.trees((x, y), objective="binary", library=library, rounds=25, depth=3,
                            subsample=0.5, save_every=2, validate=(x[::2], y[::2]))
def dies_at(last, step=BoostingRecord.step):
    def stepped(self, rounds, *more):
        if rounds == last and ronde.world().rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        step(self, rounds, *more)
    BoostingRecord.step = stepped
if __name__ == "__main__":
    if len(sys.argv) > 2:
        dies_at(int(sys.argv[2]))
    train(sys.argv[1])
"""
KILLS = [("xgboost", 7, 3, 2)]
if ALL:
    KILLS += [("lightgbm", 4 + n, 2 + n % 2, 1 + n % 4) for n in range(10)]
    KILLS += [("xgboost", 3 + 2 * n, 2 + n % 2, 1 + n % 4) for n in range(10)]


@pytest.mark.parametrize(("library", "last", "before", "after"), KILLS)
def test_a_killed_training_resumes_on_another_number_of_workers(
    library, last, before, after, monkeypatch, tmp_path
):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = ["--name", "killed", "train.py", library]
    run = tmp_path / "runs" / "killed"
    done = ronde_run(["run", "--workers", str(before), *command, str(last)], tmp_path)
    assert done.returncode != 0 and list((run / "checkpoints").glob("step-*")), done.stderr
    done = ronde_run(["run", "--workers", str(after), "--resume", *command], tmp_path)
    assert done.returncode == 0 and "resumed at round" in done.stdout + done.stderr, done.stdout
    monkeypatch.setenv("RONDE_RUNS", "none")
    alone = runpy.run_path(str(tmp_path / "train.py"))["train"](library)
    (file,) = run.glob("model.*")
    alone.save(tmp_path / file.name)
    assert (tmp_path / file.name).read_bytes() == file.read_bytes()


# From the first round on: faulthandler's signal handler leaves errno changed (CPython 3.11), so that a
# file that is not there is OSError 0 to whoever looks for one just then, as importing libraries do.
ASKED = """
import signal, sys, threading
from train import BoostingRecord, train
main, over, sent = threading.main_thread().ident, threading.Event(), []
def ask():
    while not over.wait(0.005):
        sent.append(signal.pthread_kill(main, signal.SIGRTMIN + 7))
asking = threading.Thread(target=ask)
def stepped(self, *given, step=BoostingRecord.step):
    if asking.ident is None:
        asking.start()
    step(self, *given)
BoostingRecord.step = stepped
try:
    train(sys.argv[1])
finally:
    over.set()
print("asked", len(sent) > 10)
"""


@pytest.mark.parametrize("library", ["xgboost", "lightgbm"])
def test_the_hang_watch_may_ask_for_stacks_at_any_time(library, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "asked.py").write_text(ASKED)
    done = ronde_run(["run", "--workers", "2", "asked.py", library], tmp_path)
    assert done.returncode == 0 and "asked True" in done.stdout, done.stdout + done.stderr


def test_a_resume_with_other_arguments_is_refused(quiet, tmp_path, monkeypatch):
    monkeypatch.setenv("RONDE_RUNS", str(tmp_path))
    x = np.arange(40.0)[:, None]
    common = {"objective": "regression", "rounds": 2, "save_every": 1, "name": "run"}
    algorithms.trees((x, x[:, 0]), **common)
    monkeypatch.setenv("RONDE_RESUME", "1")
    with pytest.raises(CheckpointError, match=r"written with depth 6, and now it is 2\. Resume"):
        algorithms.trees((x, x[:, 0]), depth=2, **common)
    with pytest.raises(CheckpointError, match="written with rows 40, and now it is 39"):
        algorithms.trees((x[1:], x[1:, 0]), **common)


@pytest.fixture
def quiet(monkeypatch):
    monkeypatch.setenv("RONDE_RUNS", "none")
    monkeypatch.setenv("RONDE_PROGRESS", "quiet")


@pytest.fixture
def table(quiet):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(300, 3))
    return x, (x[:, 0] > 0).astype(float)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"library": "lightgbm", "params": {"use_quantized_grad": True}}, "use_quantized_grad"),
        ({"params": {"subsample": 0.5}}, "not known to give the same model"),
        ({"objective": "rank"}, "objective='rank'"),
        ({"library": "catboost"}, "use 'xgboost' or 'lightgbm'"),
        ({"early_stop": 3}, "early_stop needs validate"),
        ({"metric": "rmse"}, "metric='rmse'"),
        ({"categories": [1]}, "has values that are no codes"),
        ({"categories": [7]}, "which is no column"),
        ({"rounds": 0}, "rounds=0"),
    ],
)
def test_what_would_not_be_the_same_model_is_refused(given, said, table):
    with pytest.raises(ArgumentError, match=said):
        algorithms.trees(table, **{"objective": "binary", **given})


def test_rows_that_cannot_be_trained_on_are_named(table):
    x, y = table
    for bad, said in [
        ((np.where(x == x[0, 1], np.inf, x), y), "'f1' has values that are infinite"),
        ((x, np.where(y > 0, np.nan, y)), "labels are missing or infinite"),
        ((x, y, -y), "weights are negative"),
        ((x, y + 1), "there are 1, 2"),
        ((x, y * 0), "all labels are 0"),
        ((x, y[:-1]), "shapes"),
        ("nowhere.parquet", "does not exist"),
        ([1, 2, 3], "shapes"),
        (3, "data is int"),
    ]:
        with pytest.raises(ArgumentError, match=said):
            algorithms.trees(bad, objective="binary")


@pytest.mark.parametrize("library", ["xgboost", "lightgbm"])
def test_a_table_with_text_predicts_from_tables_and_files(library, table, tmp_path):
    pd = pytest.importorskip("pandas")
    x, y = table
    color = np.array(["red", "blue", None, "green"], dtype=object)[(x[:, 1] * 9).astype(int) % 4]
    frame = pd.DataFrame({"a": x[:, 0], "color": color, "y": (color == "red") ^ (y > 0)})
    frame.to_parquet(tmp_path / "rows.parquet", row_group_size=70)
    common = {"objective": "binary", "label": "y", "library": library, "rounds": 20, "depth": 3}
    model = algorithms.trees(frame, **common)
    of_file = algorithms.trees(tmp_path / "rows.parquet", **common)
    p = model.predict(frame)
    assert ((p > 0.5) == frame["y"]).mean() > 0.9
    assert np.array_equal(p, of_file.predict(frame))
    model.save(tmp_path / "model")
    loaded = algorithms.TreeModel.load(tmp_path / "model", library)
    assert np.array_equal(p, loaded.predict(frame))


def test_the_auc_is_that_of_pairs():
    rng = np.random.default_rng(0)
    score, y, w = rng.integers(0, 20, 300).astype(float), rng.integers(0, 2, 300), rng.random(300)
    assert auc(score, y.astype(float), w) == pytest.approx(roc_auc_score(y, score, sample_weight=w))
