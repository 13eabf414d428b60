"""Synthetic data has the structure, shapes, types and ranges of the real, and is a function of it
and a seed.
"""

from __future__ import annotations

import random
from collections import namedtuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset

import ronde
from ronde.feed import Pipeline, rng, synthetic
from ronde.world import ArgumentError, SampleError

Pair = namedtuple("Pair", "x y")


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


@pytest.mark.parametrize(
    "batch",
    [
        torch.rand(9, 3),
        [torch.rand(9, 3), torch.arange(9)],
        (
            np.ones((9, 2), np.uint8),
            {"y": torch.arange(9), "names": [f"{i}" for i in range(9)], "scale": 2.0},
        ),
        Pair(torch.rand(9, 2, dtype=torch.bfloat16), torch.arange(9) > 4),
        {"x": [torch.rand(9, 2), torch.rand(9)], "none": None},
    ],
    ids=["tensor", "list", "nested", "named", "dict"],
)
def test_like_a_batch(batch):
    def forms(value):
        if isinstance(value, dict):
            return {k: forms(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [type(value), [forms(v) for v in value]]
        return (type(value), getattr(value, "dtype", None), tuple(getattr(value, "shape", ())))

    made = synthetic(batch, n=50)
    assert len(made) == 50 and len(made.held) == 9
    assert [forms(b) for b in made.batches] == [forms(batch)] * 8
    first = made.batches[0]
    for a, b in zip(_tensors(first), _tensors(batch), strict=True):
        assert torch.equal(a, b), "the first one is the batch itself"
    loader = DataLoader(made, 4, collate_fn=made.collate)
    assert len(list(loader)) == 13


def _tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    values = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, list | tuple)
        else ()
    )
    return [t for v in values for t in _tensors(v)]


def test_a_small_batch_is_filled_up_within_its_ranges():
    made = synthetic([torch.tensor([[0.25], [0.75]]), torch.tensor([4, 6])], n=20)
    assert len(made.held) == 8
    assert {int(s[1]) for s in made.held} <= {4, 5, 6}
    assert all(0.25 <= float(s[0]) <= 0.75 for s in made.held)
    assert [int(s[1]) for s in made.held[:2]] == [4, 6]
    assert all(b[0].shape == (2, 1) for b in made.batches)


def test_extreme_ranges_hold():
    columns = [
        torch.tensor([[-(2**63), 2**63 - 1]] * 8),
        np.array([[0, 255]] * 8, np.uint8),
        torch.tensor([[float("nan"), 1.0, float("-inf")]] * 8),
        torch.zeros(8, 0),
        torch.tensor([True] * 8),
    ]
    made = synthetic(columns, values="random")
    for ints, bytes_, floats, nothing, truth in made.held:
        assert ints.dtype == torch.int64 and bytes_.dtype == np.uint8 and nothing.shape == (0,)
        assert bool((floats == 1.0).all()) and bool(truth)


def test_a_stream_and_bad_samples():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(torch.arange(1000).reshape(500, 2))

    made = synthetic(Stream(), batch_size=2, batches=5)
    assert [int(x[0]) for x in made.held] == list(range(0, 20, 2)) and len(made) == 10

    class Broken(Dataset):
        def __init__(self, worst):
            self.worst = worst

        def __len__(self):
            return 200

        def __getitem__(self, i):
            if i % 3 == 0 or self.worst:
                raise SampleError(f"{i}.jpg is truncated")
            return i

    assert all(i % 3 for i in synthetic(Broken(False)).held)
    with pytest.raises(SampleError, match=r"\.jpg is truncated"):
        synthetic(Broken(True))


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
