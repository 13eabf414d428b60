"""Gradients that are unusual (sparse, complex, changed by hooks) are averaged exactly, or refused."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import ronde
import zygote
from processes import PATHS, TESTS, forked
from ronde.run import group
from ronde.watch import Warned, read


def test_gradients_on_two_workers(tmp_path):
    done = zygote.run(
        forked(TESTS / "gradients_worker.py", 2),
        env={**os.environ, "PYTHONPATH": PATHS},
        cwd=tmp_path,
        timeout=170,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_exception_of_the_loss_says_which_samples_it_had(monkeypatch):
    monkeypatch.setenv("RONDE_RUNS", "none")

    def loss(output, target):
        if run.state.step == 2:
            raise ValueError("too large")
        return (output - target).square().mean()

    model, data = nn.Linear(2, 1), TensorDataset(torch.randn(12, 2), torch.randn(12, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = ronde.distribute(model, optimizer, data, loss=loss, batch_size=4, shuffle=False)
    with pytest.raises(ValueError, match="too large") as caught:
        for batch in run.batches():
            run.step(batch)
    note = "(rank 0, step 3, epoch 0, 4 samples: indices 8, 9, 10, 11)"
    assert caught.value.__notes__ == [note]


def test_a_backward_hook_of_one_process_sees_the_whole_batch(tmp_path, monkeypatch):
    monkeypatch.setenv("RONDE_RUNS", str(tmp_path))
    monkeypatch.setattr(group, "_latest", None)  # a training of its own
    model, data = nn.Linear(2, 1), TensorDataset(torch.randn(12, 2), torch.randn(12, 1))
    model.register_full_backward_hook(lambda *_: None)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = ronde.distribute(model, optimizer, data, loss=nn.MSELoss(), batch_size=4)
    for batch in run.batches():
        run.step(batch)
    assert not [e for e in read(run.dir.path / "record.jsonl") if isinstance(e, Warned)]


def test_weights_that_no_checkpoint_can_hold_are_refused_at_the_start(tmp_path, monkeypatch):
    def begin(dtype):
        monkeypatch.setattr(group, "_latest", None)  # a training of its own
        model, data = nn.Linear(2, 1).to(dtype), TensorDataset(*torch.randn(2, 12, 2))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        return ronde.distribute(model, optimizer, data, loss=nn.MSELoss(), batch_size=4)

    monkeypatch.setenv("RONDE_RUNS", str(tmp_path))
    with pytest.raises(ronde.ArgumentError, match=r"'bias' is of type torch.complex128.*complex64"):
        begin(torch.complex128)
    begin(torch.complex64)
    monkeypatch.setenv("RONDE_RUNS", "none")
    begin(torch.complex128)
