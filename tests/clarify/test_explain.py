"""Explanations: against brute force over all coalitions, closed forms, and the sum of the values."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
import xgboost

from processes import ronde_run
from ronde.clarify.explain import explain_trees
from ronde.clarify.shapley import shapley_values
from ronde.world import ArgumentError


def brute_force(predict, sample, background, players) -> list[float]:
    """The definition: the mean gain over all orders, by coalitions."""
    n = int(players.max()) + 1

    def worth(present: set[int]) -> float:
        mask = np.isin(players, list(present))
        return float(np.mean(predict(np.where(mask[None], sample[None], background))))

    return [
        sum(
            math.factorial(k) * math.factorial(n - k - 1) / math.factorial(n) * (worth({*rest, i}) - worth(set(rest)))
            for k in range(n)
            for rest in itertools.combinations([j for j in range(n) if j != i], k)
        )
        for i in range(n)
    ]  # fmt: skip


def bumpy(x: np.ndarray) -> np.ndarray:
    flat = x.reshape(len(x), -1)
    return (
        np.sin(flat[:, 0] * flat[:, 1])
        + flat[:, 2] ** 2
        - np.abs(flat[:, -1]) * flat[:, 0]
        + 0.1 * flat.sum(axis=1)
    )


def test_shapley_values_are_those_of_brute_force() -> None:
    g = np.random.default_rng(0)
    background = g.normal(size=(5, 8))
    samples = g.normal(size=(3, 8))
    explained = shapley_values(bumpy, samples, background, np.arange(8))
    for i, sample in enumerate(samples):
        wanted = brute_force(bumpy, sample, background, np.arange(8))
        assert np.abs(explained.values[i] - wanted).max() <= 1e-9
    assert explained.gaps.max() <= 1e-12
    grid = np.arange(16).reshape(4, 4) // 4  # four players of an image, a row each
    image = g.normal(size=(1, 4, 4))
    values = shapley_values(bumpy, image, g.normal(size=(3, 4, 4)), grid).values
    assert values.shape == (1, 4)
    one = shapley_values(bumpy, samples, background, np.zeros(8, dtype=int))
    assert one.gaps.max() <= 1e-12


def test_sampled_values_depend_on_the_sample_only_and_add_up() -> None:
    g = np.random.default_rng(1)
    weights = g.normal(size=30)
    background, samples = g.normal(size=(4, 30)), g.normal(size=(6, 30))

    def linear(x: np.ndarray) -> np.ndarray:
        return x @ weights

    whole = shapley_values(linear, samples, background, np.arange(30), budget=400)
    assert np.abs(whole.values - weights * (samples - background.mean(axis=0))).max() < 1e-9
    assert whole.gaps.max() < 1e-12
    curved = shapley_values(bumpy, samples, background, np.arange(30), budget=400)
    assert curved.gaps.max() < 1e-12
    for first, last in ((0, 2), (2, 5), (5, 6)):  # any division gives the same bits
        part = shapley_values(
            bumpy, samples[first:last], background, np.arange(30), budget=400, first=first
        )
        assert np.array_equal(part.values, curved.values[first:last])


def test_trees_use_the_librarys_own_values(tmp_path: Path) -> None:
    g = np.random.default_rng(2)
    x = g.normal(size=(200, 5))
    booster = xgboost.train({"nthread": 1}, xgboost.DMatrix(x, bumpy(x)), 5)
    booster.save_model(tmp_path / "model.ubj")
    found, _ = explain_trees(tmp_path / "model.ubj", x[:20])
    assert found.values.shape == (20, 5) and found.gaps.max() <= 1e-5
    named = xgboost.train(
        {"nthread": 1}, xgboost.DMatrix(x, bumpy(x), feature_names=list("abcde")), 5
    )
    named.save_model(tmp_path / "named.ubj")
    again, names = explain_trees(tmp_path / "named.ubj", x[:20, ::-1], list("edcba"))
    assert names == list("abcde") and np.array_equal(again.values, found.values)
    with pytest.raises(ArgumentError, match="trained with column 'e'"):
        explain_trees(tmp_path / "named.ubj", x[:20, :4], list("abcd"))
    (tmp_path / "none.ubj").write_text("x")
    with pytest.raises(ArgumentError, match=r"none\.ubj: "):
        explain_trees(tmp_path / "none.ubj", x)


SCRIPT = """
import torch
from torch import nn
import ronde

torch.manual_seed(0)
x = torch.randn(64, 4)
data = torch.utils.data.TensorDataset(x, (x @ torch.tensor([3.0, -2.0, 0.0, 1.0]))[:, None])
model = nn.Linear(4, 1)
run = ronde.distribute(model, torch.optim.SGD(model.parameters(), lr=0.2), data, loss=nn.functional.mse_loss, batch_size=16)
run.fit(20)
"""


@pytest.mark.parametrize("method", ["shapley", "ig"])
def test_explain_a_run(tmp_path: Path, method: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = ronde_run(["run", "--workers", "1", "train.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    columns = np.random.default_rng(0).normal(size=(10, 4))
    names = ["height", "weight", "shoe", "age"]
    pq.write_table(
        pa.table({**dict(zip(names, columns.T, strict=True)), "team": ["a"] * 10}),
        tmp_path / "t.parquet",
    )
    options = ["--data", "t.parquet", "--method", method, "--json", "e.json", "--report", "e.html"]
    done = ronde_run(["clarify", "explain", *options], tmp_path, 120)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "e.json").read_text())
    values = np.array(found["values"])
    assert found["names"] == names and values.shape == (10, 4) and found["gap"] < 1e-6
    slopes = values[1] - values[0], columns[1] - columns[0]  # of a linear model, whatever the base
    assert np.allclose(slopes[0] / slopes[1], [3, -2, 0, 1], atol=0.01)
    assert "sum check largest |base + sum - output|" in done.stdout
    assert "height moves the output most" in (tmp_path / "e.html").read_text()
    if method == "ig":
        np.savez(tmp_path / "one.npz", input=np.zeros((5, 3)))
        wrong = {
            "--data none.npz": "expected arrays in a .npz file",
            "--data one.npz": "cannot take samples of shape (3,); in training they had (4,)",
            "--output 7": "the model has 1 outputs",
            "--method lime": "'lime' is not one of",
            "--method trees": "name a model file",
        }
        for words, text in wrong.items():
            refused = ronde_run(["clarify", "explain", *words.split()], tmp_path)
            assert refused.returncode == 2 and text in refused.stderr, refused.stderr


TEXT = """
tokens = torch.randint(10, 30, (256, 8))
tokens[torch.arange(256), torch.randint(0, 8, (256,))] = 3 + 4 * label  # a word for each class
data = torch.utils.data.TensorDataset(tokens, label)


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(30, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.embed(x).mean(1))


model = Bag()
"""
IMAGE = """
x = 0.1 * torch.randn(256, 1, 14, 14)
x[:, 0, 4:6, 10:12] += 2 * label[:, None, None]  # patch 19 of 7 by 7
data = torch.utils.data.TensorDataset(x, label)
model = nn.Sequential(nn.Conv2d(1, 4, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(196, 2))
"""
CLASSIFY = """
run = ronde.distribute(model, torch.optim.Adam(model.parameters(), lr=0.05), data, loss=nn.functional.cross_entropy, batch_size=32)
run.fit(6)
"""


@pytest.mark.parametrize(("world", "method"), [(TEXT, "shapley"), (IMAGE, "ig")])
def test_the_planted_word_and_patch_are_the_strongest(
    tmp_path: Path, world: str, method: str
) -> None:
    head = "import torch\nfrom torch import nn\nimport ronde\n\ntorch.manual_seed(0)\nlabel = torch.arange(256) % 2\n"
    (tmp_path / "train.py").write_text(head + world + CLASSIFY)
    done = ronde_run(["run", "--workers", "1", "train.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    places = [5, 2, 7, 0]
    if world is TEXT:
        rows = np.random.default_rng(0).integers(10, 30, (4, 8))
        rows[range(4), places] = [3, 7, 3, 7]
        expected = places
    else:
        rows = 0.1 * np.random.default_rng(0).normal(size=(4, 1, 14, 14))
        rows[1::2, 0, 4:6, 10:12] += 2
        expected = [19] * 4
    np.savez(tmp_path / "some.npz", input=rows)
    options = ["--data", "some.npz", "--output", "1", "--method", method]
    files = ["--json", "e.json", "--report", "e.html"]
    done = ronde_run(["clarify", "explain", *options, *files], tmp_path, 120)
    assert done.returncode == 0, done.stdout + done.stderr
    values = np.array(json.loads((tmp_path / "e.json").read_text())["values"])
    assert np.abs(values).argmax(axis=1).tolist() == expected
    strongest = values[range(4), expected]
    assert (strongest[1::2] > 0).all() and (strongest[::2] < 0).all()
    kind = "token" if world is TEXT else "patch"
    best = int(np.abs(values).mean(axis=0).argmax())
    assert f"{kind} {best} moves the output most" in (tmp_path / "e.html").read_text()
    vocabulary = {f"word{i}": i for i in range(30)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary)).save(str(tmp_path / "t.json"))
    words = ["clarify", "explain", *options, *files, "--tokenizer"]
    done = ronde_run([*words, "t.json"], tmp_path)
    if world is TEXT:
        assert done.returncode == 0, done.stdout + done.stderr
        texts = json.loads((tmp_path / "e.json").read_text())
        assert texts["gap"] < 1e-9 and set(texts["names"]) == {f"word{i}" for i in set(rows.flat)}
        found = np.array(texts["values"])[:, [texts["names"].index(w) for w in ("word3", "word7")]]
        expected = [[v, 0] if i % 2 == 0 else [0, v] for i, v in enumerate(strongest)]
        assert np.allclose(found, expected, atol=1e-12)
    else:
        refused = "--tokenizer is for tokens: this model's values are of each patch"
        assert done.returncode == 2 and refused in done.stderr, done.stderr
    (tmp_path / "bad.json").write_text("{}")
    for file in ("bad.json", "missing.json"):
        done = ronde_run([*words, file], tmp_path)
        assert done.returncode == 2 and f"--tokenizer {file}: " in done.stderr, done.stderr
