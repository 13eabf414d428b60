"""Which checkpoints stay, and ``ronde checkpoints``."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ronde
from damage import flip
from processes import ronde_run
from ronde.checkpoint import KeepPolicy, list_checkpoints, write


def test_policies_are_parsed_or_refused():
    parse = KeepPolicy.parse
    assert parse(2) == parse("2") == KeepPolicy(2)
    assert parse("last=5, every=1000 ,best=min:val/loss") == KeepPolicy(5, (1000,), "min:val/loss")
    assert parse("best=accuracy") == KeepPolicy(3, (), "accuracy")
    wrong = (
        0,
        -1,
        True,
        None,
        1.5,
        "",
        "last",
        "last=0",
        "last=-1",
        "every=x",
        "last=1,last=2",
    )
    for keep in (*wrong, "best=", "first=3", "last=²"):
        with pytest.raises(ronde.ArgumentError, match="expected a number of checkpoints"):
            parse(keep)
    merged = KeepPolicy.merge([parse(1), parse("last=2,every=10"), parse("every=4,last=1")])
    assert merged == KeepPolicy(2, (4, 10))


def test_what_stays_does_not_depend_on_when_it_is_pruned():
    """Pruned after each save or once at the end: the same checkpoints stay."""
    draw = random.Random(0)
    for _ in range(200):
        policy = KeepPolicy(draw.randint(1, 3), tuple(draw.sample([7, 10, 25], draw.randint(0, 2))))
        steps = sorted(draw.sample(range(1, 100), 30))
        there: list[int] = []
        for step in steps:
            there.append(step)
            gone = policy.doomed(there)
            assert step not in gone
            there = [s for s in there if s not in gone]
        gone = policy.doomed(steps)
        assert there == [s for s in steps if s not in gone]
        for n in policy.every:
            for count in {s // n for s in steps} - {0}:
                assert min(s for s in steps if s // n == count) in there


def _ronde(folder: Path, *arguments: str, status: int = 0) -> str:
    words = ["checkpoints", "a", "--runs", str(folder), *arguments]
    done = ronde_run(words, folder, env={"COLUMNS": "200"})
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_command(tmp_path):
    folder = tmp_path / "a" / "checkpoints"
    state = {"plan": {"pipeline": 2, "workers": 2, "batch_size": 4}, "workers": 2}
    state |= {"same_tensors": {"again": "x"}, "best": {"step": 20}}
    for step in (10, 20, 30, 40):
        tensors = {"model.safetensors": {"x": torch.full((3,), float(step))}}
        write(folder, step, tensors, {**state, "step": step})
    (tmp_path / "a" / "record.jsonl").touch()
    rows = json.loads(_ronde(tmp_path, "--json"))
    assert [row["step"] for row in rows] == [40, 30, 20, 10]
    assert all(row["plan"] == "pipeline=2" and row["whole"] is None for row in rows)
    assert [row["best"] for row in rows] == [False, False, True, False]

    flip(folder / "step-000000040" / "model.safetensors", 500)
    told = _ronde(tmp_path, "--verify", status=1)
    assert told.count("whole") == 3 and "does not match its digest" in told
    told = _ronde(tmp_path, "--export", str(tmp_path / "x.safetensors"))
    assert "weights of step 30" in told
    assert "warning: step-000000040 is not a whole checkpoint" in told
    weights = load_file(tmp_path / "x.safetensors")  # of the newest whole one
    assert weights.keys() == {"x", "again"} and float(weights["again"][0]) == 30
    _ronde(tmp_path, "--export", str(tmp_path / "x.safetensors"), "--step", "10")
    assert float(load_file(tmp_path / "x.safetensors")["x"][0]) == 10

    told = _ronde(tmp_path, "--prune", "1")
    assert "would remove" in told and "step-000000010" in told and "add --yes" in told
    assert "step-000000020" not in told  # the best one
    assert len(list_checkpoints(folder)) == 4
    _ronde(tmp_path, "--prune", "last=1", "--yes")
    assert [p.name[-2:] for p in list_checkpoints(folder)] == ["40", "30", "20"]
    assert "goes with --prune only" in _ronde(tmp_path, "--yes", status=2)
    assert "stays in any case" in _ronde(tmp_path, "--prune", "best=loss", status=2)


UNSAVABLE = """
import torch, ronde

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
data = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.randn(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
run = ronde.distribute(model, optimizer, data, loss=torch.nn.functional.mse_loss, batch_size=4)
for _ in run.epochs(1):
    for batch in run.batches():
        run.step(batch)
    for state in optimizer.state.values():
        state["momentum_buffer"] = state["momentum_buffer"].to(torch.complex128)
"""


def test_rank_0_writes_for_all_and_cannot(tmp_path):
    """Where hosts share no folder, rank 0 takes all parts in before it says that one is refused."""
    (tmp_path / "train.py").write_text(UNSAVABLE)
    words = ["run", "--workers", "2", "--plan", "shard=parameters", "train.py"]
    done = ronde_run(words, tmp_path, env={"RONDE_RUN_DIR_SHARED": "0"})
    assert done.returncode == 0, done.stderr
    assert "is of type torch.complex128" in done.stdout + done.stderr
    assert not list(tmp_path.glob("runs/*/checkpoints/step-*"))
