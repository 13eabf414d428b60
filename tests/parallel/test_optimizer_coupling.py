"""An optimizer whose update of one parameter depends on all of them never gets only some."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from processes import ronde_run
from ronde.parallel.optimizer_coupling import coupling, ways_refused
from sampling import some

OPTIMIZERS = """
import torch


class Lamb(torch.optim.Optimizer):
    def __init__(self, params, lr=0.05, max_grad_norm=0.1):
        super().__init__(params, dict(lr=lr, max_grad_norm=max_grad_norm))

    @torch.no_grad()
    def step(self, closure=None):
        every = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in every]).norm()
        for g in self.param_groups:
            scale = (g["max_grad_norm"] / norm).clamp(max=1.0)
            for p in g["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * scale * g["lr"])


class Lars(torch.optim.Optimizer):
    def __init__(self, params, lr=0.05):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is not None:
                    m = self.state[p].setdefault("m", torch.zeros_like(p))
                    m.mul_(0.9).add_(p.grad)
                    p.sub_(m * (p.norm() / (m.norm() + 1e-8)) * g["lr"])
"""
exec(OPTIMIZERS)


class Clipping(torch.optim.SGD):
    def step(self, closure=None):
        nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 0.5)
        return super().step(closure)


class Central(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is not None and p.dim() > 1:
                    p.grad.sub_(p.grad.mean(dim=1, keepdim=True))
        return super().step(closure)


class Noisy(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for g in self.param_groups:
            for p in g["params"]:
                p.add_(torch.randn_like(p), alpha=1e-3)


class Asking(torch.optim.SGD):
    def step(self, closure):
        return super().step(closure)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
    )


@pytest.mark.parametrize("kind", [Lamb, Clipping, type("LBFGS", (torch.optim.SGD,), {})])  # noqa: F821
def test_all_together(kind):
    assert coupling(kind(model().parameters(), lr=0.1)) == "coupled"


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, Lars, Central])  # noqa: F821
def test_each_by_itself(kind):
    parts = list(model().parameters())
    assert coupling(kind([{"params": parts[:2], "lr": 0.3}, {"params": parts[2:]}], lr=0.1)) == ""


def test_what_will_be_refused_is_known_before():
    every = {"pipeline", "tensor", "shard=optimizer", "shard=gradients", "shard=parameters"}
    built = model()
    assert ways_refused(built, torch.optim.AdamW(built.parameters())) == {}
    coupled = {"pipeline", "tensor", "shard=optimizer"}
    assert set(ways_refused(built, Lamb(built.parameters()))) == coupled  # noqa: F821
    assert set(ways_refused(built, torch.optim.LBFGS(built.parameters()))) == every
    assert set(ways_refused(built, torch.optim.Adafactor(built.parameters()))) == {
        "tensor",
        "shard=gradients",
        "shard=parameters",
    }
    assert set(ways_refused(built, torch.optim.SparseAdam(built.parameters()))) == {
        "shard=gradients",
        "shard=parameters",
    }
    built[2].weight.register_hook(lambda g: g)
    assert (
        "'2.weight'" in ways_refused(built, torch.optim.SGD(built.parameters()))["shard=parameters"]
    )


def test_what_cannot_be_tried_is_said():
    assert coupling(Noisy(model().parameters(), lr=0.1)) == "random"
    assert "TypeError" in coupling(Asking(model().parameters(), lr=0.1))


def test_nothing_of_the_optimizer_changes():
    net = model()
    optimizer = Central(net.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append(1))
    net(torch.randn(2, 3, 3, 3)).sum().backward()
    optimizer.step()
    before = copy.deepcopy([net.state_dict(), optimizer.state_dict()])
    gradients = [p.grad.clone() for p in net.parameters()]
    drawn, calls = torch.get_rng_state(), len(called)
    assert coupling(optimizer) == ""
    after = [net.state_dict(), optimizer.state_dict()]
    assert (
        str(before) == str(after)
        and torch.equal(drawn, torch.get_rng_state())
        and len(called) == calls
    )
    assert all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), gradients))
    assert scheduler.optimizer is optimizer and "step" in vars(optimizer)


TRAIN = (
    OPTIMIZERS
    + """
import sys, ronde
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).double()
data = torch.utils.data.TensorDataset(torch.randn(46, 4).double(), torch.randn(46, 1).double())
optimizer = globals()[sys.argv[1]](model.parameters())
run = ronde.distribute(model, optimizer, data, loss=nn.functional.mse_loss, batch_size=10)
run.fit(epochs=2)
run.export("weights.safetensors")
"""
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Weights, or what was said, of an optimizer under a plan; each is run once."""

    @functools.cache
    def train(kind: str, plan: str = ""):
        folder = tmp_path_factory.mktemp("run")
        (folder / "train.py").write_text(TRAIN)
        done = ronde_run(
            [
                "run",
                "--workers",
                "2" if plan else "1",
                *(["--plan", plan] if plan else []),
                "train.py",
                kind,
            ],
            folder,
            timeout=120,
        )
        return (
            load_file(folder / "weights.safetensors")
            if done.returncode == 0
            else " ".join((done.stdout + done.stderr).split())
        )

    return train


@pytest.mark.parametrize("plan", some(["shard=optimizer", "pipeline=2", "tensor=2"], 3))
def test_a_plan_that_would_give_it_a_part_is_refused(plan, trained):
    said = trained("Lamb", plan)
    assert (
        isinstance(said, str)
        and "Lamb computes the update of each parameter from all of them" in said
        and "replicate" in said
    )


@pytest.mark.parametrize(
    ("kind", "plan"),
    some([("Lamb", "shard=parameters"), ("Lars", "shard=optimizer"), ("Lars", "pipeline=2")], 3),
)
def test_the_others_train_it_as_one_process(kind, plan, trained):
    alone, parted = trained(kind), trained(kind, plan)
    for name, value in alone.items():
        torch.testing.assert_close(parted[name], value, rtol=1e-10, atol=1e-12)
