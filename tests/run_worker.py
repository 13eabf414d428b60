"""Run by every rank: uses each part of a Run and prints what came of it, as JSON, on rank 0."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import ronde

out = Path(sys.argv[1])
out.mkdir(exist_ok=True)
os.environ["RONDE_RUNS"] = str(out / "runs")
del os.environ["RONDE_PROGRESS"]
results: dict = {}


def rows(n: int, classes: int = 3, seed: int = 0) -> TensorDataset:
    g = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(n, 5, generator=g).double(), torch.randint(classes, (n,), generator=g)
    )


def classifier() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def start(model=None, data=None, **options):
    model = model or classifier()
    optimizer = options.pop("optimizer", None) or sgd(model)
    options.setdefault("loss", F.cross_entropy)
    options.setdefault("batch_size", 8)
    return ronde.distribute(model, optimizer, data if data is not None else rows(30), **options)


def train(run, epochs=1):
    losses = []
    for _ in run.epochs(epochs):
        for batch in run.batches():
            losses.append(float(run.step(batch)))
    return losses


def checksum(model) -> float:
    return float(sum(p.detach().double().abs().sum() for p in model.parameters()))


# evaluate: plain callables of each kind, torchmetrics, sets smaller than the world, (sum, weight)
# losses
def accuracy(output, target):
    return (output.argmax(1) == target).double().mean()


def per_sample(output, target):
    return (output.argmax(1) == target).double()


def pair(output, target):
    return float((output.argmax(1) == target).sum()), len(target)


import torchmetrics  # noqa: E402


class Collected(torchmetrics.Metric):
    """Its states are lists of tensors of several types: a rank without samples must have them
    too.
    """

    def __init__(self):
        super().__init__()
        self.add_state("outputs", [], dist_reduce_fx="cat")
        self.add_state("targets", [], dist_reduce_fx="cat")

    def update(self, output, target):
        self.outputs.append(output)
        self.targets.append(target)

    def compute(self):
        outputs, targets = (
            torchmetrics.utilities.dim_zero_cat(self.outputs),
            torchmetrics.utilities.dim_zero_cat(self.targets),
        )
        return torch.stack([outputs.abs().sum(), (targets + 1).sum(), torch.tensor(len(targets))])


warnings.simplefilter("error")  # torchmetrics warns of a compute() without update(): none must come
run = start()
for n in (1, 2, 29, 64):
    metrics = {
        "accuracy": accuracy,
        "per_sample": per_sample,
        "pair": pair,
        "tm_accuracy": torchmetrics.classification.MulticlassAccuracy(
            num_classes=3, average="micro"
        ),
        "tm_list": Collected(),
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*positive|No negative|No positive.*")
        warnings.filterwarnings("ignore", category=UserWarning, module="torchmetrics")
        results[f"evaluate {n}"] = run.evaluate(rows(n, seed=n), metrics)
results["evaluate loader"] = run.evaluate(DataLoader(rows(29, seed=29), 4), {"accuracy": accuracy})
results["training mode kept"] = run.model.training
warnings.simplefilter("default")

# exact evaluation, against torch by hand
model = run.model
x, y = rows(29, seed=29).tensors
with torch.no_grad():
    results["by hand"] = {
        "loss": float(F.cross_entropy(model(x), y)),
        "accuracy": float(accuracy(model(x), y)),
    }

# fit, schedule, clipping, micro-batches
model = classifier()
optimizer = sgd(model)
calls = []
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: calls.append(s) or 1.0)
run = start(model, optimizer=optimizer, scheduler=scheduler, micro_batch=2, clip_norm=0.5)
results["fit"] = run.fit(epochs=2, validate=rows(10), metrics={"accuracy": accuracy})
results["scheduler steps"] = max(calls)
results["state"] = [run.state.epoch, run.state.step, run.state.samples]
results["fit weights"] = checksum(model)

# a sampler of the user's own, drawn again each epoch
sampler = WeightedRandomSampler([1.0, 5.0] * 15, num_samples=20)
run = start(data=DataLoader(rows(30), 6, sampler=sampler), batch_size=None)
results["sampler"] = train(run, 2)

# drop_last
run = start(drop_last=True)
train(run, 2)
results["drop_last"] = [run.state.step, run.state.samples]

# tied, frozen and lazy parameters; export under every name
torch.manual_seed(5)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(5, 5)
        self.b = nn.Linear(5, 5)
        self.b.weight = self.a.weight
        self.frozen = nn.Linear(5, 3)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.frozen(self.b(torch.tanh(self.a(x))))


tied = Tied().double()
frozen_before = tied.frozen.weight.clone()
run = start(tied)
train(run)
results["tied"] = bool(tied.a.weight is tied.b.weight) and bool(
    frozen_before.equal(tied.frozen.weight)
)
results["tied weights"] = checksum(tied)
run.export(out / "tied.safetensors")
saved = run.save()
results["saved on main only"] = (saved is not None) == run.is_main

torch.manual_seed(6 + run.rank)  # ranks would initialise differently: rank 0's values count
lazy = nn.Sequential(nn.LazyLinear(7), nn.Tanh(), nn.LazyLinear(3)).double()
run = start(lazy, optimizer=sgd(lazy))
train(run)
results["lazy"] = [list(p.shape) for p in lazy.parameters()]

# thawed between epochs
model = classifier()
model[0].requires_grad_(False)
run = start(model)
first = model[0].weight.clone()
for epoch in run.epochs(2):
    if epoch == 1:
        results["frozen first"] = bool(first.equal(model[0].weight))
        model[0].requires_grad_(True)
    for batch in run.batches():
        run.step(batch)
results["thawed later"] = not first.equal(model[0].weight)
results["thawed weights"] = checksum(model)


# thawed, then frozen, in the middle of an epoch
model = classifier()
model[0].requires_grad_(False)
run = start(model, data=rows(40))
for _ in run.epochs(1):
    for i, batch in enumerate(run.batches()):
        if i in (1, 3):
            model[0].requires_grad_(i == 1)
        run.step(batch)
results["thawed within"] = checksum(model)

# an early stop, then a loop of the script's own
run = start()
for _ in run.epochs(9):
    for batch in run.batches():
        run.step(batch)
    break
results["after a break"] = [
    sum(1 for batch in run.batches() if run.step(batch) is not None) for _ in range(2)
]


# dictionaries as batches, forward=, and a loss that takes one value
class Dicts(torch.utils.data.Dataset):
    def __len__(self):
        return 19

    def __getitem__(self, i):
        x, y = rows(19)[i]
        return {"x": x, "y": y, "name": f"row {i}"}


run = start(
    data=Dicts(),
    forward=lambda model, b: F.cross_entropy(model(b["x"]), b["y"]),
    loss=lambda value: value,
)
results["dicts"] = train(run)


# sparse gradients, and a tail smaller than the world
class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 4, sparse=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.embed(x).mean(1))


g = torch.Generator().manual_seed(0)
words = TensorDataset(torch.randint(20, (19, 5), generator=g), torch.randint(3, (19,), generator=g))
torch.manual_seed(2)
for micro in (None, 1):
    sparse = Sparse().double()
    run = start(
        sparse,
        words,
        optimizer=torch.optim.SGD(sparse.parameters(), lr=0.5),
        batch_size=6,
        micro_batch=micro,
    )
    train(run, 2)
    results[f"sparse {micro}"] = checksum(sparse)
    torch.manual_seed(2)

# growing the batch
for kind, rule in (("SGD", None), ("AdamW", None), ("SGD", "none"), ("AdamW", "linear")):
    model = classifier()
    # a tensor, which a scheduler writes to
    rate = 0.1 if rule else torch.tensor(0.1, dtype=torch.float64)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=rate)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    run = start(
        model,
        optimizer=optimizer,
        scheduler=scheduler,
        batch="grow",
        batch_size=3,
        lr_rule=rule,
        warmup_steps=4,
    )
    rates = []
    for _ in run.epochs(3):
        for batch in run.batches():
            run.step(batch)
            rates.append(float(optimizer.param_groups[0]["lr"]))
    results[f"grow {kind} {rule}"] = [
        run.plan.batch_size,
        run.plan.lr_rule,
        run.plan.lr_factor,
        run.plan.warmup_steps,
        rates[0],
        run.steps_per_epoch,
    ]

# half precision
for precision in ("bf16", "fp16"):
    run = start(
        classifier().float(),
        DataLoader(TensorDataset(rows(30).tensors[0].float(), rows(30).tensors[1]), 8),
        batch_size=None,
        precision=precision,
    )
    losses = train(run, 3)
    results[precision] = losses[-1] < losses[0]


# buffers that a step changes and the next one reads are rank 0's on all ranks
class Memory(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(5, 3)
        self.register_buffer("seen", torch.zeros(5, dtype=torch.float64))
        self.register_buffer("constant", torch.ones(3))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.seen.mul_(0.5).add_(x.mean(0))
        return self.fc(x - self.seen)


class Reassigned(Memory):
    def forward(self, x):
        if self.training:
            self.seen = 0.5 * self.seen + x.detach().mean(0)
        return self.fc(x - self.seen)


alike = []
for kind in (Memory, Reassigned):
    memory = kind().double()
    run = start(memory)
    for _ in run.epochs(2):
        for batch in run.batches():
            value = memory.seen.clone()  # as the step will find it: rank 0's
            values = [torch.zeros_like(value) for _ in range(run.world_size)]
            if run.world_size > 1:
                torch.distributed.all_gather(values, value)
                alike.append(all(v.equal(values[0]) for v in values))
            run.step(batch)
results["buffers alike before each step"] = all(alike)

# one tensor as the learning rate of two groups
model = classifier()
rate = torch.tensor(0.1, dtype=torch.float64)
optimizer = torch.optim.SGD(
    [{"params": model[0].parameters()}, {"params": model[2].parameters()}], lr=rate
)
start(model, optimizer=optimizer, batch="grow")
results["grow a shared rate"] = [float(g["lr"]) for g in optimizer.param_groups]

memory = Memory().double()
run = start(memory)
train(run, 2)
run.evaluate(rows(5))
sums = [torch.zeros(5, dtype=torch.float64) for _ in range(run.world_size)]
if run.world_size > 1:
    torch.distributed.all_gather(sums, memory.seen)
results["buffers alike"] = all(s.equal(sums[0]) for s in sums)

run.log({"note": "hello", "tensor": torch.tensor(1.5)})
results["dir"] = run.dir.name if run.dir else None
if run.is_main:
    (out / "results.json").write_text(json.dumps(results))
os.sync()
