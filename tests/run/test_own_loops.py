"""Scripts that own their loop or make a hidden state: exact, or refused with one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import ronde
from processes import ronde_run
from ronde.world import PlanError
from sampling import some

MODEL = """
import json, sys, torch, ronde
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
plan, kind = sys.argv[1:]


class Language(nn.Module):
    def __init__(self, n=11, width=8, layers=2):
        super().__init__()
        self.width, self.layers = width, layers
        self.encoder, self.rnn = nn.Embedding(n, width), nn.LSTM(width, width, layers)
        self.decoder = nn.Linear(width, n)

    def init_hidden(self, samples):
        weight = next(self.parameters())
        shape = self.layers, samples, self.width
        return weight.new_zeros(shape), weight.new_full(shape, 0.5)

    def forward(self, x, hidden):
        out, hidden = self.rnn(self.encoder(x), hidden)
        return self.decoder(out), hidden


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(6, 16), nn.Linear(16, 6), nn.Linear(6, 3)
        self.drop = nn.Dropout(0.5 if kind == "dropout" else 0.0)

    def forward(self, x):
        return self.head(x + self.b(self.drop(F.gelu(self.a(x)))))
"""

HIDDEN = (
    MODEL
    + """
model = Language().double()
text = torch.randint(0, 11, (20, 7))
data = torch.utils.data.TensorDataset(text[:, :-1], text[:, 1:])
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
run = ronde.distribute(model, optimizer, data, loss=F.cross_entropy, batch_size=6, plan=plan)
losses = []
for _ in run.epochs(2):
    for x, y in run.batches():
        out, _ = model(x.t(), model.init_hidden(len(x)))
        run.backward(F.cross_entropy(out.permute(1, 2, 0), y))
        losses.append(float(run.update()))
    with torch.no_grad():
        out, _ = model(x.t(), model.init_hidden(len(x)))
if run.is_main:
    print(json.dumps(losses))
"""
)

RANDOM = (
    MODEL
    + """
model = Block()
data = torch.utils.data.TensorDataset(torch.randn(16, 6), torch.randint(0, 3, (16,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
states = [torch.get_rng_state().sum().item(), torch.rand(()).item()]
run = ronde.distribute(model, optimizer, data, loss=F.cross_entropy, batch_size=8, plan=plan)
states += [torch.get_rng_state().sum().item(), torch.rand(()).item()]
for _ in run.epochs(2):
    for batch in run.batches():
        run.step(batch)
        states += [torch.rand(()).item()]
    states += [torch.rand(()).item()]
if run.is_main:
    print(json.dumps(states))
"""
)

PIPELINE = (
    MODEL
    + """
model = Block()
data = torch.utils.data.TensorDataset(torch.randn(16, 6), torch.randint(0, 3, (16,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
said = {}


def refused(name, call):
    try:
        call()
    except Exception as error:
        said[name] = f"{type(error).__name__}: {error}"


def unpack(batch):
    x, y = batch


def begin(batch):
    x, *_ = batch


language = Language()
adam = torch.optim.Adam(language.parameters())
words = torch.randint(0, 11, (16, 5))
texts = torch.utils.data.TensorDataset(words, words)
loss = F.cross_entropy
refused("layout", lambda: ronde.distribute(language, adam, texts, loss=loss, batch_size=4, plan=plan))
run = ronde.distribute(
    model, optimizer, data, loss=F.cross_entropy, batch_size=4, micro_batch=2, plan=plan
)
losses = []
for batch in run.batches():
    refused("unpack", lambda: unpack(batch))
    refused("begin", lambda: begin(batch))
    refused("index", lambda: batch[0])
    refused("key", lambda: batch["x"])
    refused("method", lambda: batch.to("cpu"))
    refused("model", lambda: model(next(x for x, y in batch)))
    refused("backward", lambda: run.backward(torch.zeros((), requires_grad=True)))
    refused("update", lambda: run.update())
    losses.append(float(run.step(batch)))
said["losses"] = losses
if run.is_main:
    print(json.dumps(said))
"""
)


def answer(folder: Path, script: str, workers: int, plan: str, kind: str = "-"):
    (folder / "train.py").write_text(script)
    command = ["run", "--workers", str(workers), "--runs", "none", "train.py", plan, kind]
    done = ronde_run(command, folder, 120)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(next(line for line in done.stdout.splitlines() if line[:1] in "[{"))


def test_a_hidden_state_of_new_zeros_is_the_same_under_shard(tmp_path: Path) -> None:
    one = answer(tmp_path, HIDDEN, 1, "replicate")
    for plan in some(["shard=parameters", "shard=gradients"], 2):
        other = answer(tmp_path, HIDDEN, 2, plan)
        torch.testing.assert_close(torch.tensor(other), torch.tensor(one), rtol=1e-12, atol=0)


def test_tensor_parallelism_leaves_the_generator_as_replicate_does(tmp_path: Path) -> None:
    replicate = answer(tmp_path, RANDOM, 2, "replicate")
    assert answer(tmp_path, RANDOM, 2, "tensor=2") == replicate
    masked = answer(tmp_path, RANDOM, 2, "tensor=2", "dropout")
    # Blocks that draw get other masks from layer to layer and step to step.
    assert masked[:4] == replicate[:4] and masked[-1] == replicate[-1]
    assert masked[4] != replicate[4] and len(set(masked)) > 6


@pytest.mark.parametrize(
    ("workers", "plan"), some([(2, "pipeline=2"), (4, "pipeline=2,shard=optimizer")], 2)
)
def test_a_loop_of_its_own_gets_one_sentence_under_a_pipeline(
    tmp_path: Path, workers: int, plan: str
) -> None:
    said = answer(tmp_path, PIPELINE, workers, plan)
    losses = said.pop("losses")
    assert len(losses) == 4 and all(0 < loss < 5 for loss in losses)  # it trains on
    for name in ("unpack", "begin", "index", "key", "method"):
        kind = "AttributeError" if name == "method" else "PlanError"
        assert said[name].startswith(kind), said[name]
        assert f"Under plan='{plan}" in said[name]
        assert "pass the batch whole to run.step(batch), or use another plan" in said[name]
    count = "2 micro-batches" if workers == 2 else "1 micro-batch"
    assert count in said["unpack"]
    assert "the script calls the model itself, and under plan=" in said["model"]
    for name in ("backward", "update"):
        assert "cannot drive the plan" in said[name] and "run.step(batch)" in said[name]
    assert "missing 1 required positional argument: 'hidden'" in said["layout"]
    assert "A script that owns its loop (run.backward) cannot drive a pipeline" in said["layout"]


def test_two_micro_batches_do_not_pass_for_inputs_and_target() -> None:
    two = ronde.MicroBatches([(1, 2), (3, 4)])
    with pytest.raises(PlanError, match="unpacks a batch"):
        inputs, target = two
    with pytest.raises(PlanError, match="for micro in batch"):
        for inputs, target in [two]:
            raise AssertionError((inputs, target))
    assert [a + b for a, b in two] == [3, 7] and two[0] == (1, 2) and list(two) == [(1, 2), (3, 4)]
    assert not hasattr(two, "to") and ronde.MicroBatches(two) == two and len([*two]) == 2
