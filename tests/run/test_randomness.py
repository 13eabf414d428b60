"""``randomness="global"``: dropout and noise are the same on any number of workers, under any plan.

Also what is said of draws that cannot be the same, and that torch's functions are put back.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

import ronde
import zygote
from processes import PATHS, TESTS, forked
from ronde.capture import GlobalDraws, replaced
from ronde.run.parts import Parts
from ronde.world import PlanError

ALONE = [
    "torch@replicate",
    "eager@replicate",
    "plain@replicate",
    "views@replicate",
    "torch@replicate+own",
]
TWO = {
    "torch@replicate": "torch",
    "torch@shard=optimizer": "torch",
    "torch@shard=gradients": "torch",
    "torch@shard/2": "torch",
    "torch@pipeline=2": "torch",
    "torch@tensor=2": "torch",
    "eager@tensor=2": "eager",
    "plain@tensor=2": "plain",
    "plain@replicate,recompute=full": "plain",
    "plain@pipeline=2,recompute=selective": "plain",
    "again@replicate/2": "plain",
    "again-reentrant@replicate": "plain",
    "torch@replicate/3+own": "own",
    "views@replicate/2": "views",
}
THREE = {"torch@replicate": "torch", "plain@shard": "plain", "views@replicate": "views"}


def train(workers, folder, *cases):
    done = zygote.run(
        forked(TESTS / "random_worker.py", workers, folder, *cases),
        env={**os.environ, "PYTHONPATH": PATHS},
        timeout=170,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def ends(folder, case):
    name = folder / case.replace("/", "_")
    return load_file(f"{name}.losses")["losses"], load_file(f"{name}.safetensors")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    train(1, folder, *ALONE)
    ended = {case.partition("@")[0]: ends(folder, case) for case in ALONE[:-1]}
    return {**ended, "own": ends(folder, ALONE[-1])}


@pytest.mark.parametrize(("workers", "cases"), [(2, TWO), (3, THREE)])
def test_any_number_of_workers_under_any_plan(alone, tmp_path, workers, cases):
    train(workers, tmp_path, *cases)
    for case, kind in cases.items():
        losses, weights = ends(tmp_path, case)
        torch.testing.assert_close(losses, alone[kind][0], atol=1e-12, rtol=0)
        for name, expected in alone[kind][1].items():
            torch.testing.assert_close(weights[name], expected, atol=1e-12, rtol=0, msg=case)


def test_a_resume_on_another_number_of_workers_goes_on_with_the_same_numbers(alone, tmp_path):
    train(2, tmp_path, "torch@replicate+quit")
    train(3, tmp_path, "torch@replicate+resume")
    losses, weights = ends(tmp_path, "torch@replicate+resume")
    torch.testing.assert_close(losses, alone["torch"][0][2:], atol=1e-12, rtol=0)
    for name, expected in alone["torch"][1].items():
        torch.testing.assert_close(weights[name], expected, atol=1e-12, rtol=0)


class _Model(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.linear, self.draw = nn.Linear(3, 4), draw
        self.lstm = nn.LSTM(4, 4, 2, dropout=0.5)

    def forward(self, x):
        return self.draw(self, self.linear(x)).sum(1, keepdim=True)


def _own(model, x):
    return x + torch.rand(x.shape, generator=torch.Generator().manual_seed(0))


def _numpy(model, x):
    import numpy

    return x * numpy.random.rand()


def _padded(model, x):
    # as a batch padded to its longest sample: another shape in other shares
    return x * F.dropout(torch.ones(len(x), 30 + len(x))).sum(1, keepdim=True)


@pytest.mark.parametrize(
    ("draw", "said"),
    [
        (lambda model, x: model.lstm(x)[0], "torch's generator"),
        (_numpy, "NumPy's generator"),
        (_own, "a generator of the script's own"),
        (_padded, "depends on the other samples"),
        (lambda model, x: x[torch.randperm(len(x))], "permutes the samples of a worker's share"),
        (lambda model, x: F.dropout(x) * torch.rand(()) + torch.randn(4), ""),
    ],
)
def test_what_cannot_be_the_same_is_said(monkeypatch, draw, said):
    monkeypatch.setenv("RONDE_RUNS", "none")
    said_of = []
    monkeypatch.setattr(Parts, "warn", lambda self, text, differs=False: said_of.append(text))
    model = _Model(draw)
    run = ronde.distribute(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        TensorDataset(torch.randn(24, 3), torch.randn(24, 1)),
        loss=F.mse_loss,
        batch_size=8,
    )
    for batch in run.batches():
        run.step(batch)
    said_of = [s for s in said_of if "another number of workers" in s]
    assert len(said_of) == bool(said), said_of
    assert all(said in text for text in said_of), said_of


def test_torch_is_put_back_and_the_draws_are_what_they_should_be():
    before = torch.rand, torch._VF.dropout, F.scaled_dot_product_attention
    draws = GlobalDraws("replicate", 1, 0, pytest.fail, {})
    with replaced():
        draws.begin(1, 0, 40_000, 7, True)
        kept = F.dropout(torch.ones(40_000, 4), 0.3)
        normal, uniform = torch.randn(40_000, 4), torch.rand(40_000, 4)
        waits = torch.empty(40_000, 4).exponential_(2.0)
        draws.end()
        draws.close()
        assert torch.rand is not before[0]
    assert (torch.rand, torch._VF.dropout, F.scaled_dot_product_attention) == before
    assert "uniform_" not in vars(torch.Tensor)
    assert abs((kept == 0).double().mean() - 0.3) < 0.005
    assert abs(kept.double().mean() - 1) < 0.01
    assert abs(normal.mean()) < 0.02
    assert abs(normal.std() - 1) < 0.02
    assert abs(uniform.mean() - 0.5) < 0.01
    assert 0 <= uniform.min() <= uniform.max() < 1
    assert abs(waits.mean() - 0.5) < 0.01
    columns = torch.corrcoef(torch.cat([kept, normal, uniform, waits], 1).T)
    assert (columns - torch.eye(16)).abs().max() < 0.03


def test_a_part_whose_place_is_unknown_is_refused():
    draws = GlobalDraws("tensor=2", 2, 1, pytest.fail, {})
    with replaced():
        draws.begin(1, 0, 8, 7, True)
        with pytest.raises(PlanError, match=r"tensor=2.*randomness='worker'"):
            F.dropout(torch.ones(8, 4), 0.3)
        draws.close()


def test_without_it_each_workers_own_numbers_are_said(tmp_path):
    warn = []
    from ronde.plan import Plan, Share
    from ronde.run.step_draws import StepDraws
    from ronde.world import World

    me = World(0, 2, 0, 2, 0, torch.device("cpu"), "python", "here")
    parts = SimpleNamespace(
        plan=Plan(workers=2), world=me, part="", warn=lambda text, differs: warn.append(text)
    )
    draws = StepDraws(parts, {}, lambda: True)
    draws.hand_out(Share(0, 0, 4, ((0, 2),), 2), 0)
    draws.begin_step(Share(0, 0, 4, ((0, 2),), 2), [None])
    torch.rand(1)
    draws.end_step()
    assert len(warn) == 1
    assert "randomness='global'" in warn[0]
