"""An optimizer whose update of one parameter depends on all of them never gets only some."""

from __future__ import annotations

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
    coupling = ""

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


class Silent(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


class Nested(Silent):
    coupling = ""

    def __init__(self, params):
        super().__init__(params, lr=0.05, momentum=0.9)
        torch.optim.SGD([torch.zeros(1)])  # torch gives its step() hooks as well
"""
exec(OPTIMIZERS)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
    )


def test_what_is_known_of_an_optimizer():
    parts = list(model().parameters())

    class Named(torch.optim.AdamW):
        """With torch's own step."""

    class Clipping(torch.optim.SGD):
        def step(self, closure=None):
            nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 0.5)
            return super().step(closure)

    assert coupling(torch.optim.AdamW(parts)) == coupling(Named(parts)) == ""
    assert coupling(Lamb(parts)) == coupling(torch.optim.LBFGS(parts)) == "coupled"  # noqa: F821
    clipping = Clipping(parts, lr=0.1)
    assert coupling(clipping) == "unknown"
    clipping.coupling = "coupled"
    assert coupling(clipping) == "coupled"
    assert coupling(Lars(parts)) == ""  # noqa: F821


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


def test_one_that_tells_nothing_is_asked(trained):
    said = trained("Silent", "shard=optimizer")
    assert "Silent, which is not one of torch's optimizers" in said
    assert "optimizer.coupling = ''" in said


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("Nested", "shard=optimizer"),
        *some(
            [("Lamb", "shard=parameters"), ("Lars", "shard=optimizer"), ("Lars", "pipeline=2")], 3
        ),
    ],
)
def test_the_others_train_it_as_one_process(kind, plan, trained):
    alone, parted = trained(kind), trained(kind, plan)
    for name, value in alone.items():
        torch.testing.assert_close(parted[name], value, rtol=1e-10, atol=1e-12)
