"""A training script with one planted fault: ``faults.py NAME``. Each branch is what somebody really
wrote.
"""

from __future__ import annotations

import os
import random
import sys

import torch
import torch.nn.functional as F
from torch import nn

import ronde

FAULT = sys.argv[1]
torch.manual_seed(1)


class Dataset(torch.utils.data.Dataset):
    def __init__(self, n: int = 40) -> None:
        self.x, self.y = torch.randn(n, 6), torch.randint(0, 4, (n,))

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int):
        x = self.x[i]
        if FAULT == "augment_urandom":
            x = x + int.from_bytes(os.urandom(2), "big") / 2**16
        if FAULT == "data_by_rank":
            x = x * (1 + int(os.environ.get("RANK", 0)))
        return x, self.y[i]


class UnseededSampler(torch.utils.data.Sampler):
    def __len__(self) -> int:
        return 40

    def __iter__(self):
        return iter(random.SystemRandom().sample(range(40), 40))


class RankSampler(UnseededSampler):
    def __iter__(self):
        return iter(
            list(range(40))[int(os.environ.get("WORLD_SIZE", 1)) - 1 :]
            + list(range(int(os.environ.get("WORLD_SIZE", 1)) - 1))
        )


class Standardise(nn.Module):
    def forward(self, x):
        return (x - x.mean(0)) / (x.std(0, unbiased=False) + 1)


class Ranked(nn.Module):
    def forward(self, x):
        return x * 2 if int(os.environ.get("RANK", 0)) == 1 else x


class Noise(nn.Module):
    def forward(self, x):
        return x + 0.1 * torch.randn_like(x) if self.training else x


class Flaky(nn.Module):
    def forward(self, x):
        return x * (1 + int.from_bytes(os.urandom(2), "big") * 1e-6)


class DropMine(nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.3)  # on in evaluation too


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.seen += x.abs().mean().detach()
        return x


class BatchGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g / g.norm()


class Normed(nn.Module):
    def forward(self, x):
        return BatchGrad.apply(x)


class Langevin(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        with torch.no_grad():
            for g in self.param_groups:
                for p in g["params"]:
                    p.add_(torch.randn_like(p), alpha=1e-3)


class PerRank(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.mul_(1 - 1e-3 * int(os.environ.get("WORLD_SIZE", 1)))


LAYERS = {
    "batchnorm": nn.BatchNorm1d,
    "standardise": lambda n: Standardise(),
    "rank_forward": lambda n: Ranked(),
    "noise": lambda n: Noise(),
    "flaky": lambda n: Flaky(),
    "dropout_eval": lambda n: DropMine(),
    "buffer": lambda n: Counter(),
    "batch_gradient": lambda n: Normed(),
}


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(6, width)
        self.mix = LAYERS.get(FAULT, lambda n: nn.Identity())(width)
        self.second = nn.Linear(width, width)
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.mix(self.first(x))))))


def contrastive(out, y):
    z = F.normalize(out, dim=1)
    return F.cross_entropy(z @ z.T / 0.5, torch.arange(len(z)))


LOSSES = {
    "loss_sum": lambda out, y: F.cross_entropy(out, y, reduction="sum"),
    "loss_ignored": lambda out, y: F.cross_entropy(out, y.masked_fill(y == 0, -100)),
    "loss_class_weights": lambda out, y: F.cross_entropy(
        out, y, weight=torch.tensor([1.0, 2.0, 3.0, 4.0])
    ),
    "loss_contrastive": contrastive,
    "loss_rmse": lambda out, y: F.mse_loss(out, F.one_hot(y, 4).double()).sqrt(),
}

if FAULT == "init_urandom":
    torch.manual_seed(int.from_bytes(os.urandom(4), "big"))
if FAULT == "init_by_workers":
    torch.manual_seed(ronde.world().size)
width = (
    8 * ronde.world().size if FAULT == "model_by_workers" else 6 if FAULT == "tied_by_data" else 8
)
model = Net(width)
torch.manual_seed(2)
data = Dataset(
    40 // ronde.world().size
    if FAULT == "data_by_workers"
    else 40 + ronde.world().rank
    if FAULT == "data_length_by_rank"
    else 40
)
if FAULT == "tied_by_data":
    model.second.weight.data = model.first.weight.data
if FAULT == "frozen_copy":
    optimizer = torch.optim.SGD(
        [p.detach().clone().requires_grad_() for p in model.parameters()], lr=0.1
    )
else:
    lr = 0.1 * ronde.world().size if FAULT == "lr_by_workers" else 0.1
    kind = {"langevin": Langevin, "optimizer_by_workers": PerRank}.get(FAULT, torch.optim.SGD)
    optimizer = kind(model.parameters(), lr=lr, momentum=0.9)
if FAULT == "hook_clip":
    for p in model.parameters():
        p.register_hook(lambda g: g.clamp(-0.01, 0.01))
if FAULT == "hook_divide":
    model.second.weight.register_hook(lambda g: g / int(os.environ.get("WORLD_SIZE", 1)))
if FAULT == "unseeded_sampler":
    data = torch.utils.data.DataLoader(data, batch_size=8, sampler=UnseededSampler())
if FAULT == "sampler_by_workers":
    data = torch.utils.data.DataLoader(data, batch_size=8, sampler=RankSampler())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
loss = LOSSES.get(FAULT, F.cross_entropy)
size = 8 * ronde.world().size if FAULT == "batch_by_workers" else 8
micro = 2 if FAULT in ("accumulate_twice", "clip_micro", "micro_sum") else None
if FAULT == "micro_sum":

    def loss(out, y):
        return F.cross_entropy(out, y, reduction="sum")


run = ronde.distribute(
    model,
    optimizer,
    data,
    loss=loss,
    batch_size=size,
    micro_batch=micro,
    scheduler=scheduler,
    seed=5,
)
if FAULT == "replaced_head":
    model.head = nn.Linear(8, 4)
test = Dataset(11)
accuracy = {"accuracy": lambda out, y: (out.argmax(1) == y).double()}
METRICS = {
    "metric_max": {"worst": lambda out, y: F.cross_entropy(out, y, reduction="none").max()},
    "metric_f1": {
        "f1": lambda out, y: (
            2 * ((out[:, 1] > -1) & (y == 1)).sum() / ((out[:, 1] > -1).sum() + (y == 1).sum())
        )
    },
}

for _epoch in run.epochs(6):
    for batch in run.batches():
        if FAULT in ("own_divides", "accumulate_twice", "clip_micro", "own_sum"):
            for x, y in batch if micro else [batch]:
                value = F.cross_entropy(
                    model(x), y, reduction="sum" if FAULT == "own_sum" else "mean"
                )
                run.backward(value / len(batch) if FAULT == "accumulate_twice" else value)
                if FAULT == "clip_micro":
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            if FAULT == "own_divides":
                for p in model.parameters():
                    p.grad /= run.world_size
            run.update()
        else:
            run.step(batch)
        if FAULT == "scheduler_by_rank" and run.rank == 1:
            scheduler.step()
        if FAULT == "scheduler_by_workers":
            for _ in range(run.world_size - 1):
                scheduler.step()
        if FAULT == "weights_on_rank_0" and run.is_main:
            with torch.no_grad():
                model.head.bias.clamp_(-0.05, 0.05)
        if FAULT == "weights_by_share":
            with torch.no_grad():
                model.head.bias.add_(batch[0].mean(), alpha=1e-3)
        if FAULT == "stops_early" and run.world_size > 1 and run.state.step >= 4:
            break
    if FAULT == "evaluate_a_part":
        run.evaluate(torch.utils.data.Subset(test, range(run.rank * 2, 11)), metrics=accuracy)
    else:
        run.evaluate(test, metrics=METRICS.get(FAULT, accuracy))
