"""A recipe in training: the same weights on 1 and 4 workers, kept in checkpoints and exports."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("duckdb")
pa = pytest.importorskip("pyarrow")
pytest.importorskip("narwhals")

import pyarrow.parquet as pq  # noqa: E402

from processes import TESTS, ronde_run  # noqa: E402
from ronde import feed  # noqa: E402
from ronde.world import ArgumentError  # noqa: E402

STEPS = {
    "age": {"impute": "median", "scale": "standard", "missing_flag": True},
    "city": {"codes": True, "rare": 3, "target_mean": {"smooth": 5, "folds": 3}},
    "pay": {"log": True, "scale": "standard", "bins": 4},
}


def rows(seed, n):
    draw = np.random.default_rng(seed)
    age = np.where(draw.random(n) < 0.1, np.nan, draw.integers(18, 90, n))
    city = np.array(["Rome", "Oslo", "Zürich", "Bern", "Ulm"])[draw.zipf(1.7, n) % 5]
    pay = draw.lognormal(9, 1, n)
    y = (pay > 8000) ^ (draw.random(n) < 0.1)
    return pa.table(
        {"id": np.arange(n) + seed * n, "age": age, "city": city, "pay": pay, "y": y.astype("i8")}
    )


@pytest.fixture
def folder(tmp_path):
    for i, n in enumerate((70, 60)):
        pq.write_table(rows(i, n), tmp_path / f"train{i}.parquet")
    recipe = feed.Recipe(STEPS, "y", "id").fit(tmp_path / "train*.parquet")
    recipe.write(tmp_path / "recipe.json")
    return tmp_path


def train(folder, workers, out, steps=0, recipe="recipe.json", *options):
    words = [str(w) for w in (folder, folder / recipe, folder / out, steps)]
    options = options or ("--runs", "none")
    script = str(TESTS / "recipe_worker.py")
    return ronde_run(["run", "-q", "-n", str(workers), *options, script, *words], folder, 150)


def test_the_prepared_rows_are_those_of_the_recipe(folder):
    recipe = feed.Recipe.read(folder / "recipe.json")
    data = feed.table(folder / "train*.parquet", recipe=recipe, cache=folder / "cache")
    made = recipe.apply(folder / "train*.parquet").to_pydict()
    (numbers, codes), y = data.collate(data.__getitems__(range(len(data))))
    assert data.source.numeric == ["age", "age_missing", "city_mean", "pay"]
    assert data.source.categorical == ["city_code", "pay_bin"] and data.source.sizes == [6, 5]
    for i, name in enumerate(data.source.numeric):
        assert numbers[:, i].tolist() == np.array(made[name], dtype="f4").tolist(), name
    for i, name in enumerate(data.source.categorical):
        assert codes[:, i].tolist() == made[name]
    assert y.tolist() == made["y"]
    # out of fold: of two rows of a city, those of different folds have different means
    means = {
        (c, i % 3, m)
        for c, i, m in zip(made["city_code"], made["id"], made["city_mean"], strict=True)
    }
    assert len(means) > len({c for c, _, _ in means})


def test_weights_are_equal_on_1_and_4_workers_and_predictions_after_the_export(folder):
    for workers in (1, 4):
        done = train(folder, workers, f"{workers}.safetensors")
        assert done.returncode == 0, done.stderr
    one, four = (load_file(folder / f"{n}.safetensors") for n in (1, 4))
    for name, value in one.items():
        assert torch.allclose(value, four[name], rtol=0, atol=1e-12), name
    kept = feed.Recipe.read(folder / "1.safetensors")
    assert kept.digest == feed.Recipe.read(folder / "recipe.json").digest
    test = rows(9, 30)  # of other rows than those of the fit
    pq.write_table(test, folder / "test.parquet")
    data = feed.table(folder / "test.parquet", recipe=kept, cache=folder / "cache")
    (numbers, codes), _ = data.collate(data.__getitems__(range(30)))
    made = kept.apply(test)
    served = np.stack([made[n].to_numpy() for n in data.source.numeric], 1).astype("f4")
    assert np.array_equal(numbers.numpy(), served)
    assert [codes[:, i].tolist() for i in (0, 1)] == [
        made[n].to_pylist() for n in data.source.categorical
    ]


def test_a_resume_with_another_recipe_says_what_differs(folder):
    run_dir = ("--runs", str(folder / "runs"), "--name", "one")
    first = train(folder, 2, "x.safetensors", 3, "recipe.json", *run_dir)
    assert first.returncode == 0, first.stderr
    steps = {**STEPS, "city": {**STEPS["city"], "rare": 12}}
    feed.Recipe(steps, "y", "id").fit(folder / "train*.parquet").write(folder / "other.json")
    other = train(folder, 2, "x.safetensors", 0, "other.json", *run_dir, "--resume")
    assert other.returncode != 0
    assert "rare of 'city' is 12, and was 3" in other.stderr, other.stderr
    again = train(folder, 1, "x.safetensors", 0, "recipe.json", *run_dir, "--resume")
    assert again.returncode == 0, again.stderr
    assert feed.Recipe.read(folder / "x.safetensors").steps == STEPS


def test_what_does_not_go_together_is_refused(folder):
    recipe = feed.Recipe.read(folder / "recipe.json")
    train_files, cache = folder / "train*.parquet", folder / "cache"
    other = rows(0, 5).set_column(1, "age", pa.array(["x"] * 5))
    pq.write_table(other, folder / "other.parquet")
    pq.write_table(rows(0, 5).drop_columns("pay"), folder / "short.parquet")
    for make, says in (
        (lambda: feed.table(train_files, recipe=feed.Recipe(STEPS, "y", "id")), "is not fitted"),
        (
            lambda: feed.table(folder / "other.parquet", recipe=recipe, cache=cache),
            r"recipe\.json, column 'age': .*other\.parquet has string, and .* needs number",
        ),
        (
            lambda: feed.table(folder / "short.parquet", recipe=recipe, cache=cache),
            r"column 'pay': .*short\.parquet has no such column",
        ),
    ):
        with pytest.raises(ArgumentError, match=says):
            make()
