"""What a model costs in seconds: against known sleeps; nothing of the script is changed by
measuring it.
"""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cost_models import MSE, numbers, sgd
from ronde.measure.time_units import _disturbance, measure
from ronde.measure.timed_model import Rounds
from ronde.predict.costs import Costs
from ronde.run.losses import LossCall
from ronde.world import ArgumentError
from tiny_models import Sleep

# -- times -----------------------------------------------------------------------------


def test_sleeping_layers_are_told_apart():
    model = nn.Sequential(Sleep(0.02, 0.01), Sleep(0.005, 0.03), Sleep(0.01, 0.02))
    # of so many rounds, one is undisturbed on a busy machine, too
    costs = measure(model, sgd(model), MSE, numbers(8), 8, seconds=2.0)
    forward = [u.forward_seconds.at(8) for u in costs.units[:3]]
    back = [u.backward_seconds.at(8) for u in costs.units[:3]]
    assert forward[0] >= 0.015 and forward[0] > forward[2] > forward[1]
    assert back[1] >= 0.025 and back[1] > back[2] > back[0]
    assert costs.threads == torch.get_num_threads()
    assert costs.device.startswith("cpu")


def test_what_is_computed_again_is_timed_with_its_blocks_computed_again():
    # A block whose forward pass sleeps does so again in its backward pass, as its last layer keeps
    # what the sleeping one returns.
    model = nn.Sequential(
        *(nn.Sequential(Sleep(0.01, 0.001), nn.Linear(8, 8)) for _ in range(3)), nn.Linear(8, 8)
    )
    own = [vars(m).get("forward") for m in model.modules()]
    costs = measure(
        model,
        sgd(model),
        MSE,
        numbers(8),
        8,
        seconds=0.3,
    )
    assert {u.block for u in costs.units if u.recomputed} == {"0", "1", "2"} and costs.again == (
        "selective",
        "full",
    )
    assert costs.again_seconds["full"].at(8) >= 0.025
    assert [vars(m).get("forward") for m in model.modules()] == own
    assert Costs.from_dict(json.loads(json.dumps(costs.to_dict()))) == costs


class Awkward(nn.Module):
    """Several inputs, a recurrent layer, batch normalisation, dropout, state of its own, an odd
    output.
    """

    def __init__(self):
        super().__init__()
        self.seen = 0
        self.rnn = nn.LSTM(8, 8, batch_first=True)
        self.norm, self.drop, self.frozen = nn.BatchNorm1d(8), nn.Dropout(0.5), nn.BatchNorm1d(8)
        self.head = nn.Linear(16, 8)

    def forward(self, x, extra):
        self.seen += 1
        _, (h, _) = self.rnn(x)
        h = self.drop(self.frozen(self.norm(h[0])))
        random.random(), np.random.rand()
        return {"out": (self.head(torch.cat([h, extra], 1)),), "more": None}


def test_nothing_of_the_script_changes_bit_by_bit():
    torch.manual_seed(3)
    model = Awkward()
    model.frozen.eval()
    model.head.bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    compute = LossCall(
        lambda out, y: F.mse_loss(out["out"][0], y),
        lambda m, batch: (m(batch["x"], batch["e"]), batch["y"]),
    )
    batch = {"x": torch.randn(8, 4, 8), "e": torch.randn(8, 8), "y": torch.randn(8, 8)}
    compute(model, batch)[0].backward()
    optimizer.step()
    scheduler.step()
    compute(model, batch)[0].backward()

    def snapshot():
        return {
            **{f"w {k}": v.clone() for k, v in model.state_dict().items()},
            **{f"g {k}": p.grad.clone() for k, p in model.named_parameters() if p.grad is not None},
            **{
                f"o {i} {k}": torch.as_tensor(v).clone()
                for i, s in optimizer.state_dict()["state"].items()
                for k, v in s.items()
            },
            **{f"v {k}": torch.tensor(b._version) for k, b in model.named_buffers()},
            "rng": torch.get_rng_state(),
            "batch": torch.cat([t.flatten() for t in batch.values()]),
        }

    identity = [(p, p.grad, p.requires_grad) for p in model.parameters()]
    flags, hooks = (
        [m.training for m in model.modules()],
        [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
    )
    before, python_state, numpy_state = (
        snapshot(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
    )
    step = optimizer.step
    threads, seen, rate = torch.get_num_threads(), model.seen, optimizer.param_groups[0]["lr"]
    costs = measure(
        model,
        optimizer,
        compute,
        lambda n: {k: t[:n] for k, t in batch.items()},
        8,
        seconds=0.2,
        threads=1,
    )
    after = snapshot()
    assert list(before) == list(after)
    assert all(torch.equal(before[k], after[k]) for k in before), [
        k for k in before if not torch.equal(before[k], after[k])
    ]
    assert all(
        p is q and p.grad is g and p.requires_grad == r
        for q, (p, g, r) in zip(model.parameters(), identity, strict=True)
    )
    assert (random.getstate(), np.random.get_state()[1].tolist()) == (python_state, numpy_state)
    assert [m.training for m in model.modules()] == flags
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert (torch.get_num_threads(), model.seen, optimizer.param_groups[0]["lr"]) == (
        threads,
        seen,
        rate,
    )
    assert optimizer.step is step
    assert [u.name for u in costs.units] == ["rnn", "norm", "frozen", "drop", "head", "(loss)"]
    assert costs.units[0].flops > 0 and costs.optimizer_seconds > 0


def test_a_model_without_values_is_refused():
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    with pytest.raises(ArgumentError, match="meta"):
        measure(model, sgd(model), MSE, numbers(4, out=4), 4)


def test_the_disturbance_is_how_far_two_halves_of_the_rounds_differ():
    readings = [1.0, 1.5] * 3  # every second round was disturbed
    assert _disturbance(Rounds({}, {8: readings})) == pytest.approx(0.5)
    assert _disturbance(Rounds({}, {8: readings[::2]})) == 0
