"""Planted faults of a second kind, around a small convolution: ``more_faults.py NAME``. Written
after the diagnosis was.
"""

from __future__ import annotations

import random
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import ronde

FAULT = sys.argv[1]
me = ronde.world()
torch.manual_seed(me.rank if FAULT == "seed_by_rank" else 0)
pictures = torch.randn(50, 1, 5, 5)
labels = torch.randint(0, 3, (50,))


class Softmax0(nn.Module):
    def forward(self, x):
        return F.softmax(x, dim=0)


class LayerDrop(nn.Module):
    def forward(self, x):
        return x if random.random() < 0.5 else 2 * x


class Clock(nn.Module):
    def forward(self, x):
        return x + 1e-4 * (time.perf_counter() % 1)


class Whitening(nn.Module):
    """Normalises the gradient by that of the batch."""

    def __init__(self):
        super().__init__()
        self.register_full_backward_hook(lambda m, gi, go: (go[0] / (go[0].abs().max() + 1e-8),))

    def forward(self, x):
        return x * 1.0


class Counting(nn.Module):
    """Anneals over its calls."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += self.training
        return x / (1 + 0.1 * self.calls)


class Follows(nn.Module):
    """Centred by a running mean, and called twice in a forward pass."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def once(self, x):
        if self.training:
            self.mean = self.mean.lerp(x.detach().mean(0), 0.1)
        return self.inner(x - self.mean)

    def forward(self, x):
        return self.once(torch.tanh(self.once(x)))


class RunningScale:
    """Divides by a running average of itself: always near 1."""

    def __init__(self):
        self.average = None

    def __call__(self, value):
        now = value.detach()
        self.average = now if self.average is None else self.average.lerp(now, 0.1)
        return value / self.average


running = RunningScale()
KINDS = {
    "softmax_over_batch": Softmax0,
    "layer_drop": LayerDrop,
    "clock": Clock,
    "backward_hook": Whitening,
    "counts_calls": Counting,
    "running_mean": Follows,
}
torch.manual_seed(0)
middle = KINDS.get(FAULT, nn.Identity)()
if FAULT == "spectral_micro":
    middle = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
norm = nn.BatchNorm2d(4) if FAULT in ("batchnorm_2d", "batchnorm_micro") else nn.Identity()
model = nn.Sequential(
    nn.Conv2d(1, 4, 3), norm, nn.GELU(), nn.Flatten(), nn.Linear(36, 8), middle, nn.Linear(8, 3)
)


def loss(out, y):
    each = F.cross_entropy(out, y, reduction="none")
    if FAULT == "hard_examples":
        return each.topk(max(1, len(each) // 2)).values.mean()
    if FAULT == "loss_by_world":
        return each.mean() / (dist.get_world_size() if dist.is_initialized() else 1)
    if FAULT == "loss_batch_times":
        return each.mean() * len(each)
    if FAULT == "focal_norm":
        weight = (1 - each.neg().exp()).detach()
        return (weight * each).sum() / weight.sum()
    if FAULT == "running_scale":
        return running(each.mean())
    if FAULT == "own_scale":
        return each.mean() / each.mean().detach()
    return each.mean()


optimizer = torch.optim.AdamW(
    model.parameters(), lr=1e-3 / me.size**0.5 if FAULT == "lr_root" else 1e-3
)
if FAULT == "weight_decay_by_rank":
    optimizer.param_groups[0]["weight_decay"] = 0.01 * (me.rank + 1)
data = torch.utils.data.TensorDataset(pictures, labels)
if FAULT == "subset_by_rank":
    data = torch.utils.data.Subset(data, range(me.rank, 50, me.size))
if FAULT == "weighted_by_rank":
    data = torch.utils.data.DataLoader(
        data,
        batch_size=10,
        sampler=torch.utils.data.SubsetRandomSampler(
            range(me.rank, 50, me.size) if me.size > 1 else range(25)
        ),
    )
micro = 3 if FAULT in ("batchnorm_micro", "spectral_micro", "counts_calls") else None
own = (
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 if i < 2 else 1 / me.size)
    if FAULT == "scheduler_by_world"
    else None
)
run = ronde.distribute(
    model,
    optimizer,
    data,
    loss=loss,
    batch_size=10,
    micro_batch=micro,
    scheduler=own,
    sync_batchnorm=FAULT == "batchnorm_micro",
)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
if FAULT == "ema_into_weights":  # under a pipeline, another worker holds some values
    ema = {n: p.detach().clone() for n, p in model.named_parameters()}
for epoch in run.epochs(5):
    for batch in run.batches():
        if FAULT == "mixup":
            x, y = batch
            part = np.random.beta(0.5, 0.5)
            batch = (part * x + (1 - part) * x.flip(0), y)
        if FAULT == "noise_on_input":
            batch = (batch[0] + 0.1 * torch.randn(batch[0].shape), batch[1])
        value = run.step(batch)
        if FAULT == "scheduler_per_sample":
            for _ in range(len(batch[0])):
                scheduler.step()
        if FAULT == "lr_by_rank":
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * (run.rank + 1)
        if FAULT == "ema_into_weights" and run.rank == 1:
            with torch.no_grad():
                for n, p in model.named_parameters():
                    p.lerp_(ema[n], 0.1)
        if FAULT == "early_stop_local" and run.state.step == 3 + 2 * run.rank:
            raise SystemExit(0)
    if FAULT == "evaluate_on_main":
        if run.is_main:
            run.evaluate(data)
    else:
        run.evaluate(
            data, metrics={"spread": lambda out, y: out.std()} if FAULT == "metric_std" else None
        )
