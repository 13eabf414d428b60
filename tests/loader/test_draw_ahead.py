"""The next epoch's order is drawn beside the training only where nothing can tell."""

from __future__ import annotations

import json

from processes import ronde_run

SCRIPT = """
import json, os, random, sys, time
import numpy as np, torch, ronde
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler
from ronde.loader import draw_ahead

draw_ahead._COSTLY = 1e9
draw_ahead._DRAWS = 0.0
draw_ahead._PATIENCE = 1e5


class Computes:
    def __init__(self):
        self.n = 40
        self.calls = 0
        self.weights = torch.ones(40)
        self.bias = np.zeros(40)

    def __len__(self):
        return self.n

    def __iter__(self):
        scores = torch.rand(40) * self.weights + torch.tensor(self.bias)
        if kind == "reads losses":
            scores = scores * torch.tensor(hardness)
        if kind == "counts":
            self.calls += 1
            scores = scores.roll(self.calls)
        if kind == "own generator":
            scores = scores.roll(places.randrange(40))
        if kind == "reads a file":
            scores = scores.roll(int(open("losses.txt").read()))
        if kind == "prints":
            print("drawn", ahead, flush=True)
        if kind == "by epoch":
            scores = scores.roll(self.epoch)
        random.random(), np.random.rand()
        return iter(torch.argsort(scores).tolist())


class ByEpoch(Computes):
    def set_epoch(self, epoch):
        self.epoch = epoch


def train():
    global hardness, places
    hardness, places = [1.0] * 40, random.Random(5)
    draw_ahead._WORTH_SECONDS = 0.0 if ahead else 1e9
    random.seed(1)
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3))
    data = TensorDataset(torch.randn(40, 4), torch.randint(3, (40,)), torch.arange(40))
    sampler = ByEpoch() if kind == "by epoch" else Computes()
    if kind == "weighted":
        sampler = WeightedRandomSampler(torch.ones(40), 40)
    loader = DataLoader(data, batch_size=10, sampler=sampler)
    run = ronde.distribute(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loader, loss=F.cross_entropy,
        forward=lambda model, batch: (model(batch[0]), batch[1]),
    )
    seen = []
    open("losses.txt", "w").write("0")
    for epoch in run.epochs(4):
        for batch in run.batches():
            seen.append(batch[2].tolist())
            loss = run.step(batch)
            if kind == "reads losses":
                hardness[batch[2][0]] = 3.0 + float(loss)
            if kind == "weights change":
                sampler.weights[batch[2][0]] *= 4.0
            if kind == "bias changes" and epoch == 1:
                sampler.bias[batch[2][0]] += 1.0
            open("losses.txt", "w").write(str(run.state.step))
    values = [float(p.detach().double().sum()) for p in model.parameters()]
    draw = run.port.data.order.draw
    return json.loads(json.dumps([seen, values, random.random(), float(torch.rand(())), draw.taken]))


found = {}
for kind in sys.argv[1:]:
    for ahead in (True, False):
        found[f"{kind} {ahead}"] = train()
print(json.dumps(found))
"""
SAFE = {"plain": 3, "weighted": 3}
# The values that it would have seen, or nothing is drawn early. The bias changes in one epoch.
UNSAFE = {
    "reads losses": 0,
    "weights change": 0,
    "bias changes": 2,
    "counts": 0,
    "own generator": 0,
    "reads a file": 0,
    "prints": 0,
    "by epoch": 0,
}


def test_an_early_draw_is_the_draw(tmp_path):
    (tmp_path / "s.py").write_text(SCRIPT)
    kinds = {**SAFE, **UNSAFE}
    done = ronde_run(["run", "--workers", "1", "--runs", "none", "s.py", *kinds], tmp_path, 100)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    found = json.loads(next(line for line in lines if line.startswith("{")))
    for kind in kinds:
        assert found[f"{kind} True"][:4] == found[f"{kind} False"][:4], kind
    assert {kind: found[f"{kind} True"][4] for kind in kinds} == kinds
    assert {found[f"{kind} False"][4] for kind in kinds} == {0}
    assert lines.count("drawn True") == lines.count("drawn False") == 4
