"""Norms that ``--watch`` measures are those of the whole model, whatever the plan, and the weights
are those of a training that nobody watches, bit for bit.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import ronde
from processes import TESTS, python
from ronde.run import group
from ronde.run.layer_outputs import LayerOutputs
from ronde.run.options import watch_every
from ronde.watch.health_record import HEALTH, HealthFile, rounded
from ronde.world import world
from sampling import ALL

PLANS = ["shard=parameters:2", "pipeline=2:2"]
if ALL:
    PLANS += [
        "replicate:1",
        "replicate:2",
        "shard=optimizer:2",
        "shard=gradients:2",
        "tensor=2:2",
        "replicate:3",
    ]
    PLANS += ["pipeline=2:4", "pipeline=2,shard=parameters:4", "tensor=2,shard=parameters:4"]
    PLANS += ["tensor=2:4", "pipeline=2,tensor=2:4", "pipeline=2,shard=optimizer:4"]


def test_exact_under_plans(tmp_path):
    command = [str(TESTS / "health_worker.py"), str(tmp_path), *PLANS]
    done = python(command, tmp_path, 600 if ALL else 120)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(done.stdout)
    assert len(results) > len(PLANS)
    for name, found in results.items():
        if isinstance(found, list):
            furthest, same_weights = found
            assert furthest < 1e-9, name
            assert same_weights, name
        else:  # a sample makes the first layer's outputs NaN
            assert found["step"] == 6, name
            assert found["samples"] == [60, 72], name
            plan, workers, _ = name.rsplit("-", 2)
            divides = [word for word in ("pipeline", "tensor") if word in plan]
            bad = [0, 1] if divides == ["tensor"] else [1] if divides else [0]
            if workers in ("1", "2"):  # else it depends on the shares
                assert found["bad_ranks"] == bad, name
            assert found["bad_ranks"], name
            assert found["first_bad"] == "conv", name


@pytest.mark.parametrize("value", [-1, "soon", 1.5])
def test_refuses_what_is_no_number_of_steps(value, monkeypatch):
    if isinstance(value, str):
        monkeypatch.setenv("RONDE_WATCH", value)
    with pytest.raises(ronde.ArgumentError, match="expected True, False, or a number of steps"):
        watch_every(value if isinstance(value, int | float) else False)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 8)
        self.rest = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(8, 3))

    def forward(self, x):
        return self.rest(self.first(x))


@pytest.fixture
def train(tmp_path, monkeypatch):
    """``train(name, watch, steps, at)``: the weights; ``at(run)`` is called before each step."""
    monkeypatch.setenv("RONDE_RUNS", str(tmp_path))
    monkeypatch.setenv("RONDE_DEVICE", "cpu")

    def call(name, watch, steps=12, at=lambda run: None, batch_size=10):
        monkeypatch.setattr(group, "_latest", None)
        generator = torch.Generator().manual_seed(1)
        torch.manual_seed(2)
        x, y = torch.randn(480, 4, generator=generator), torch.arange(480) % 3
        x[:, 1] = 5.0
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = ronde.distribute(
            model, optimizer, TensorDataset(x, y), loss=F.cross_entropy, batch_size=batch_size, name=name,
            watch=watch,
        )  # fmt: skip
        for batch in run.batches():
            if run.state.step == steps:
                break
            at(run)
            run.step(batch)
        run.port.parts.watcher.flush()
        return [p.detach().clone() for p in model.parameters()]

    call.folder = tmp_path
    return call


def lines(folder, name):
    return [json.loads(line) for line in (folder / name / HEALTH).read_text().splitlines()]


def test_what_a_file_has(train):
    def freeze(run):
        run.model.first.weight.requires_grad_(run.state.step < 9)

    train("a", 4, at=freeze)
    found = lines(train.folder, "a")
    kinds = ["tensors", "health", "activations", "inputs", "targets"]
    assert list(dict.fromkeys(line["type"] for line in found)) == kinds
    first, second = (line for line in found if line["type"] == "tensors")
    assert first["names"] == ["first.weight", "first.bias", "rest.1.weight", "rest.1.bias"]
    assert first["elements"] == [32, 8, 24, 3]
    here = __file__.rpartition("/")[2]
    source = Path(__file__).read_text().splitlines()
    rows = [
        next(n for n, line in enumerate(source, 1) if line.strip().startswith(f"self.{name} ="))
        for name in ("first", "rest")
    ]
    assert [p.rpartition("/")[2] for p in first["places"]] == [
        f"{here}:{n}" for n in (rows[0], rows[0], rows[1], rows[1])
    ]
    assert first["layers"] == ["first", "rest.0", "rest.1"]
    assert first["layer_kinds"] == ["other", "relu", "other"]
    assert [first["every"], first["left_out"]] == [4, ""]
    assert second["frozen"] == [True, False, False, False]
    assert second["step"] == 11  # the batch of step 10 was taken before
    measured = [line for line in found if line["type"] == "health"]
    assert [line["step"] for line in measured] == [*range(1, 13)]
    assert all(measured[-1][name][0] is None for name in ("gradient", "update", "same"))
    assert measured[0]["same"][3] == 0.0
    (inputs,) = (line for line in found if line["type"] == "inputs" and line["step"] == 1)
    assert inputs["constant"] == 0.25
    last = [line for line in found if line["type"] == "targets"][-1]
    assert sum(last["counts"]) == 100
    assert len(last["counts"]) == 3


def test_measures_less_often_in_a_large_file(train, monkeypatch):
    monkeypatch.setattr("ronde.run.health._MOST_BYTES", 24 * 4 * 4 * 8)
    train("c", 1, steps=30)
    found = lines(train.folder, "c")
    assert [line["every"] for line in found if line["type"] == "tensors"] == [1, 2]
    steps = [line["step"] for line in found if line["type"] == "health"]
    assert steps == [*range(1, 26), 26, 28, 30]


def test_a_file_that_cannot_be_written_changes_nothing(train, capsys):
    plain = train("d", False)
    (train.folder / "e").mkdir()

    def block(run):
        (run.dir.path / HEALTH).mkdir(exist_ok=True)

    assert all(map(torch.equal, plain, train("f", 1, at=block)))
    said = capsys.readouterr().err
    assert said.count("recording or showing this run failed (IsADirectoryError") == 1
    record = (train.folder / "f" / "record.jsonl").read_text()
    assert record.count('"type": "step"') == 12


def test_measuring_that_fails_changes_nothing(train, capsys, monkeypatch):
    plain = train("g", False)
    monkeypatch.setattr("ronde.run.tensor_norms._SAMPLED_ELEMENTS", 0)
    assert all(map(torch.equal, plain, train("h", 1)))
    said = capsys.readouterr().err
    assert said.count("rank 0 cannot measure (ZeroDivisionError") == 1
    assert said.count("1 of 1 ranks cannot measure this training") == 1


def test_numbers_and_torn_lines(tmp_path):
    assert [rounded(x) for x in (math.nan, -math.inf, 123456.0)] == ["nan", "-inf", 123500.0]
    path = tmp_path / HEALTH
    path.write_text('{"type": "hea')
    file = HealthFile(path)
    file.hold(torch.tensor([0.5]), lambda values: [{"type": "x", "values": list(values)}])
    file.flush()
    assert path.read_text() == '{"type": "hea\n{"type": "x", "values": [0.5]}\n'


def test_updates_of_weights_with_gaps_and_other_layouts(train):
    """Views of such weights would be copies, which no update changes."""

    def spread(run):
        if run.state.step == 0:
            with torch.no_grad():
                weight = run.model.first.weight
                weight.data = torch.cat([weight, weight], 1).clone()[:, ::2]
                run.model.rest[1].weight.data = run.model.rest[1].weight.data.t().contiguous().t()

    train("i", 1, at=spread)
    measured = [line for line in lines(train.folder, "i") if line["type"] == "health"]
    assert all(line["update"][0] > 0 for line in measured)
    assert all(line["same"][0] < 1 for line in measured)
    assert all(line["same"][2] < 1 for line in measured)


def test_the_outputs_of_a_recurrent_layer_are_seen():
    model = torch.nn.ModuleDict({"rnn": torch.nn.GRU(2, 3), "head": torch.nn.Linear(3, 1)})
    layers = LayerOutputs(model, ronde.Plan(), world())
    layers.open()
    model["head"](model["rnn"](torch.full((4, 1, 2), math.nan))[0])
    layers.close()
    assert layers.first_bad() == "rnn"


def test_layers_whose_order_no_rank_knows_are_left_out():
    plan = ronde.Plan(workers=2, batch_size=8, pipeline=2, virtual=2, schedule="interleaved")
    layers = LayerOutputs(torch.nn.Linear(2, 1), plan, world())
    layers.open()
    assert "several stages" in layers.left_out
    assert layers.first_bad() is None
