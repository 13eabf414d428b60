"""A loss that is a sum, and one that relates all samples of a batch: N workers train as one does, or
the first step says why not.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from processes import PATHS, TESTS, forked, python, ronde_run
from sampling import some

WORKER = TESTS / "whole_batch_worker.py"


def train(folder, name, workers, kind, loop="step", options=""):
    out = folder / f"{name}.json"
    command = forked(WORKER, workers, out, kind, loop, options)[1:]
    done = python(command, folder, 100, {"PYTHONPATH": PATHS, "RONDE_RUNS": "none"})
    if done.returncode:
        return done.stdout + done.stderr
    return json.loads(out.read_text()), load_file(out.with_suffix(".safetensors"))


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    return {kind: train(folder, kind, 1, kind) for kind in ("sum", "simclr")}


CASES = [
    ("sum", 3, "step", ""),
    ("sum", 2, "own", "micro_batch=3"),
    ("sum", 2, "step", "pipeline=2,micro_batch=5"),
    ("sum", 2, "step", "shard='parameters'"),
    ("sum", 2, "step", "tensor=2"),
    ("simclr", 2, "step", ""),
    ("simclr", 3, "own", ""),
    ("simclr", 2, "step", "shard='parameters'"),
    ("simclr", 3, "step", "shard='optimizer'"),
]


@pytest.mark.parametrize("kind,workers,loop,options", some(CASES, 6))
def test_workers_train_as_one(one, tmp_path, kind, workers, loop, options):
    """The last batch has one sample, and the last of the evaluation three: shares are empty."""
    losses, weights = one[kind]
    others, theirs = train(tmp_path, "many", workers, kind, loop, options)
    assert losses[0] > 2 and losses == pytest.approx(others, rel=1e-12, abs=1e-14)
    for name, tensor in weights.items():
        assert tensor.dtype == torch.float64
        torch.testing.assert_close(theirs[name], tensor, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "workers,options,text",
    [
        (1, "micro_batch=3", "needs a worker's whole share at once, and this step has 7"),
        (1, "loss_reduction='sum'", "does not go with loss_reduction='sum'"),
        (2, "pipeline=2,micro_batch=5", "plan='pipeline=2,micro_batch=5' runs them before"),
        (2, "tensor=2", "for run.gather(), use plan='replicate' or 'shard'"),
    ],
)
def test_what_cannot_gather_says_so(tmp_path, workers, options, text):
    said = train(tmp_path, "bad", workers, "simclr", "step", options)
    assert isinstance(said, str) and text in " ".join(said.split()), said


KINDS = """
import sys
import torch, ronde
import torch.nn.functional as F
from torch import nn

kind, loop = sys.argv[1:]
torch.manual_seed(0)
x, y = torch.randn(48, 6), torch.randint(0, 3, (48, 4))
for row, n in enumerate(torch.randint(1, 5, (48,))):
    y[row, n:] = -100


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 24), nn.Dropout(0.1), nn.Tanh(), nn.Linear(24, 12))

    def forward(self, x, y=None):
        out = self.net(x).unflatten(1, (3, 4))
        return out if y is None else F.cross_entropy(out, y)


def contrast(out, y):
    z = F.normalize(out.flatten(1), dim=1)
    return F.cross_entropy(z @ z.T.roll(1, 0) * 5, torch.arange(len(z)))


losses = {
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "weighted": F.cross_entropy,
    "relation": contrast,
    "mean": lambda out, y: F.cross_entropy(out, y.clamp(min=0)),
    "inside": lambda loss: loss,
}
model = Net()
how = {"forward": lambda model, batch: model(*batch)} if kind == "inside" else {}
data = torch.utils.data.TensorDataset(x, y)
run = ronde.distribute(
    model, torch.optim.SGD(model.parameters(), 0.1), data, loss=losses[kind], batch_size=16, **how
)
for batch in run.batches():
    if loop == "step":
        run.step(batch)
    else:
        run.backward(losses[kind](model(batch[0]), batch[1]))
        run.update()
assert all(m.training for m in model.modules())
"""

SUM = "the loss is a sum over the samples it is given, not their mean (step 1:"
NO_MEAN = "the loss is no mean over samples"


def kinds(folder, run, *words):
    (folder / "train.py").write_text(KINDS)
    done = run(folder, *words)
    said = " ".join((done.stdout + done.stderr).replace("│", " ").split())
    kind = words[0]
    assert done.returncode == (1 if kind == "sum" else 0), said
    assert (SUM in said) == (kind == "sum"), said
    assert (NO_MEAN in said) == (kind in ("weighted", "relation", "inside")), said
    return said


@pytest.mark.parametrize("kind", ["sum", "relation", "inside"])
def test_the_first_step_of_one_process_says_what_the_loss_is(tmp_path, kind):
    kinds(tmp_path, lambda folder, *words: python(["train.py", *words], folder), kind, "step")


@pytest.mark.parametrize("kind,loop,differs", [("weighted", "step", True), ("mean", "step", False)])
def test_the_summary_promises_nothing_that_is_not_so(tmp_path, kind, loop, differs):
    def run(folder, *words):
        return ronde_run(["run", "--workers", "2", "train.py", *words], folder)

    said = kinds(tmp_path, run, kind, loop)
    assert "the same samples, order, and rate on any number of workers" in said
    assert ("but not the same training: see the warnings" in said) == differs, said
    assert ("`ronde prove` checks the rest" in said) == (not differs), said
