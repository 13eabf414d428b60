"""A batch that is not finite is skipped: the same on all ranks, and exactly the training without
that update.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import ronde
from processes import TESTS, python, ronde_run
from ronde.run import group
from sampling import ALL

PLANS = ["shard=parameters:2"]
if ALL:
    PLANS += ["replicate:1", "replicate:2", "shard=optimizer:2", "pipeline=2:2", "tensor=2:2"]
    PLANS += ["pipeline=2,shard=parameters:4"]


def test_steps_that_are_not_finite_are_skipped(tmp_path):
    command = [str(TESTS / "nan_worker.py"), str(tmp_path), *PLANS]
    done = python(command, tmp_path, 600 if ALL else 170)
    assert done.returncode == 0, done.stdout + done.stderr
    (first, second), results = json.loads(done.stdout)
    assert len(results) == 2 * len(PLANS)
    for name, (told, difference) in results.items():
        assert difference <= 1e-12, name
        did = [each[:3] for each in told]
        if name.endswith("data"):
            assert did == [[first, "loss", "skip"], [second, "loss", "skip"]], name
        else:
            assert did == [[8, "gradient", "skip"]], name


def test_a_rank_alone_with_its_nan_ends_the_run_under_tensor_parallelism(tmp_path):
    job = TESTS.parent / "benchmarks" / "faults_job.py"
    (tmp_path / "x.nan").write_text("3")
    words = [
        "run",
        "-q",
        "-n",
        "2",
        "--plan",
        "tensor=2",
        "--hang-timeout",
        "0",
        str(job),
        "x",
        "1",
        "0",
    ]
    done = ronde_run(words, tmp_path, 60)
    assert done.returncode == 1
    assert "rank 1 failed first" in done.stderr, done.stderr
    assert "LossError: the loss is nan in step 3" in done.stderr, done.stderr


def _start(tmp_path: Path, monkeypatch, on_nan: str, model=None, loss=None, **options):
    monkeypatch.setenv("RONDE_RUNS", str(tmp_path))
    torch.manual_seed(0)
    model = model or torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(24, 3), torch.randn(24, 1))
    loss = loss or (lambda output, target: output.sum() * torch.nan)
    return ronde.distribute(
        model, optimizer, data, loss=loss, batch_size=2, on_nan=on_nan, **options
    )


def test_ten_in_a_row_are_an_error(tmp_path, monkeypatch):
    run = _start(tmp_path, monkeypatch, "skip")
    before = run.model.weight.clone()
    with pytest.raises(ronde.LossError, match="not finite in 11 steps in a row"):
        for batch in run.batches():
            run.step(batch)
    assert run.state.step == 10 and torch.equal(run.model.weight, before)


def test_buffers_are_as_before_the_skipped_batch(tmp_path, monkeypatch):
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    count = [0]

    def loss(output, target):
        count[0] += 1
        return output.square().mean() * (torch.nan if count[0] == 2 else 1.0)

    run = _start(tmp_path, monkeypatch, "skip", model, loss)
    seen = []
    for batch in run.batches():
        before = model[1].running_mean.clone()
        run.step(batch)
        seen.append(torch.equal(model[1].running_mean, before))
        if run.state.step == 3:
            break
    assert seen == [False, True, False]


def test_what_cannot_leave_out_a_step_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(group, "_latest", None)
    _first = _start(tmp_path, monkeypatch, "skip")
    with pytest.raises(ronde.ArgumentError, match="what one leaves out, the others have seen"):
        _start(tmp_path, monkeypatch, "error", name="second")
