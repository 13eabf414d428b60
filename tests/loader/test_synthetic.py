"""Synthetic data has the structure, shapes, types and ranges of the real, and is a function of it
and a seed.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

import ronde
from ronde.feed import Pipeline, rng, synthetic
from ronde.world import ArgumentError


class Texts(Dataset):
    """Token sequences of 1 to 30 tokens out of 5 … 94, with a label out of 3 … 6; the augmentation
    draws.
    """

    def __init__(self, n: int = 100) -> None:
        self.n = n
        self.reads = 0

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        self.reads += 1
        draw = np.random.default_rng(i)
        tokens = draw.integers(5, 95, draw.integers(1, 31)) if random.random() < 2 else None
        return {
            "tokens": tokens,
            "label": int(draw.integers(3, 7)),
            "weight": np.float32(draw.random()),
            "name": f"{i}.txt",
        }


def padded(samples):
    width = max(len(s["tokens"]) for s in samples)
    rows = torch.zeros(len(samples), width, dtype=torch.int64)
    for row, s in zip(rows, samples, strict=True):
        row[: len(s["tokens"])] = torch.from_numpy(s["tokens"])
    return rows, torch.tensor([s["label"] for s in samples])


@pytest.mark.parametrize("values", ["recycled", "random"])
def test_like_a_data_set(values):
    real = Texts()
    before = random.getstate()
    made = synthetic(real, n=1000, batches=3, batch_size=5, values=values)
    assert random.getstate() == before
    assert len(made) == 1000 and len(made.held) == 15 and real.reads == 15
    all_real = [real[i] for i in range(100)]
    lengths = {len(s["tokens"]) for s in all_real}
    for sample in [made[i] for i in range(1000)]:
        assert list(sample) == ["tokens", "label", "weight", "name"]
        assert [type(v) for v in sample.values()] == [np.ndarray, int, np.float32, str]
        assert sample["tokens"].dtype == np.int64 and len(sample["tokens"]) in lengths
        assert (
            sample["tokens"].min() >= 5
            and sample["tokens"].max() <= 94
            and 3 <= sample["label"] <= 6
        )
        assert 0 <= sample["weight"] <= 1
    same = [
        any(np.array_equal(h["tokens"], r["tokens"]) and h["label"] == r["label"] for r in all_real)
        for h in made.held
    ]
    assert all(same) if values == "recycled" else sum(same) < 5
    for start in range(0, 990, 15):  # each run of as many as are held gives each of them once
        assert len({made[i]["name"] for i in range(start, start + 15)}) == 15
    again = synthetic(Texts(), n=1000, batches=3, batch_size=5, values=values)
    assert all(np.array_equal(again[i]["tokens"], made[i]["tokens"]) for i in range(0, 1000, 7))
    with pytest.raises(IndexError):
        made.source.read([1000])


def test_like_a_loader_and_a_pipeline():
    loader = DataLoader(Texts(), batch_size=6, collate_fn=padded, num_workers=0)
    made = synthetic(loader, batches=9)
    assert len(made) == 100 and len(made.batches) == 9
    assert {tuple(x.shape[:1]) for x, _ in made.batches} == {(6,)} and all(
        y.dtype == torch.int64 for _, y in made.batches
    )
    assert len({x.shape[1] for x, _ in made.batches}) > 1, "lengths vary as they do"
    assert made.batches is made.batches
    cycle = made.cycle()
    assert [next(cycle) is made.batches[k % 9] for k in range(20)] == [True] * 20

    class Source:
        fingerprint = "s"

        def __len__(self):
            return 40

        def read(self, ids):
            return [np.full(4, i) for i in ids]

    pipeline = (
        Pipeline(Source())
        .map(lambda a: a + rng().integers(100), "augment")
        .on_device(lambda b: b * 2)
    )
    one, two = synthetic(pipeline, seed=3), synthetic(pipeline, seed=3)
    assert all(np.array_equal(a, b) for a, b in zip(one.held, two.held, strict=True)), (
        "keyed, not drawn anew"
    )
    assert one.finish is pipeline.finish
    assert not all(
        np.array_equal(a, b)
        for a, b in zip(one.held, synthetic(pipeline, seed=4).held, strict=True)
    )
    plain = synthetic(Source())
    assert sorted(int(x[0]) for x in plain.held) == list(range(40))


def test_it_can_be_trained_on(tmp_path, monkeypatch):
    monkeypatch.setenv("RONDE_RUNS", "none")
    monkeypatch.setenv("RONDE_DEVICE", "cpu")
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    made = synthetic([torch.rand(8, 3), torch.randint(2, (8,))], n=64)
    run = ronde.distribute(
        model, torch.optim.SGD(model.parameters(), 0.1), made, loss=F.cross_entropy, batch_size=16
    )
    steps = 0
    for _ in run.epochs(2):
        for batch in run.batches():
            assert torch.isfinite(run.step(batch))
            steps += 1
    assert steps == 8


def test_arguments():
    batch = [torch.rand(8, 3)]
    for call, text in (
        (lambda: synthetic(batch, n=0), "n=0"),
        (lambda: synthetic(batch, batches=True), "batches=True"),
        (lambda: synthetic(batch, batch_size=-1), "batch_size=-1"),
        (lambda: synthetic(batch, values="made up"), "values='made up'"),
        (lambda: synthetic([torch.rand(8, 3), torch.rand(7)]), r"taken apart.*\[7, 8\]"),
        (lambda: synthetic(["a", "b"]), "no tensor"),
        (lambda: synthetic(torch.tensor(3.0)), "taken apart"),
        (lambda: synthetic(3), r"like=int\): expected a data set"),
        (lambda: synthetic(Texts(0)), "it is empty"),
    ):
        with pytest.raises(ArgumentError, match=text):
            call()
