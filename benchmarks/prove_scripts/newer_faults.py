"""Planted faults of a third kind, around a small perceptron, many in loops of the script's own:
``newer_faults.py NAME``.
"""

from __future__ import annotations

import copy
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
torch.manual_seed(int(time.time()) if FAULT == "time_seed" else 0)
features, labels = torch.randn(64, 6), torch.randint(0, 3, (64,))
own_torch = torch.Generator().manual_seed(7)
own_numpy = np.random.default_rng(7)


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        shifted = features[i] + (0.1 * me.rank if FAULT == "replacement" else 0.0)
        if FAULT == "one_generator":  # every worker draws for fewer samples from it
            shifted = shifted + 0.1 * own_numpy.normal()
        if FAULT == "read_counter":  # no chance in it: every worker reads fewer
            self.reads = getattr(self, "reads", 0) + 1
            shifted = shifted * (1 + 1e-3 * self.reads)
        if FAULT == "asks_its_process":
            assert torch.utils.data.get_worker_info().id >= 0
        return shifted, labels[i]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lookup = nn.Embedding(80, 6, max_norm=0.5 if FAULT == "max_norm" else None)
        self.first = nn.Linear(6, 8)
        self.norm = nn.SyncBatchNorm(8) if FAULT == "synced" else nn.Identity()
        self.phases = (
            nn.Parameter(torch.randn(8, dtype=torch.cfloat)) if FAULT == "complex" else None
        )
        self.head = nn.Linear(8, 3)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))

    def forward(self, x):
        x = x + self.lookup((x[:, 0] * 10).long().clamp(-40, 39) + 40)
        h = self.norm(self.first(x))
        if FAULT == "own_generator":
            h = h + 0.1 * torch.randn(h.shape, generator=own_torch)
        if FAULT == "functional_batchnorm":
            h = F.batch_norm(h, self.mean, self.var, training=self.training)
        if FAULT == "complex":
            h = (torch.fft.fft(h) * self.phases).real
        out = self.head(torch.tanh(h))
        return {"logits": out} if FAULT == "dict_rmse" else out


class Expanding(nn.Module):
    """Magnifies every difference until nothing of it is left."""

    def forward(self, x):
        y = x
        for _ in range(120):
            y = 3.9 * y * (1 - y)
        return x + (y - x).detach()


def collate(samples):
    x, y = torch.stack([s[0] for s in samples]), torch.stack([s[1] for s in samples])
    if FAULT == "collate_random":
        x = x + 0.1 * torch.randn(x.shape)
    if FAULT == "collate_standardise":
        x = (x - x.mean(0)) / x.std(0, unbiased=False)
    return x, y


def gathered(z):
    if not dist.is_initialized():
        return z
    parts = [torch.zeros_like(z) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, z.contiguous())
    parts[dist.get_rank()] = z
    return torch.cat(parts)


def one_hot_error(out, y):
    return F.mse_loss(out, F.one_hot(y, 3).to(out))


def loss(out, y):
    mean = F.cross_entropy(out["logits"] if isinstance(out, dict) else out, y)
    if FAULT == "worst_sample":
        return F.cross_entropy(out, y, reduction="none").max()
    if FAULT == "dict_rmse":
        return one_hot_error(out["logits"], y).sqrt()
    if FAULT == "sum_with_penalty":
        return mean * len(y) + 1e-2 * sum((p**2).sum() for p in model.parameters() if p.is_leaf)
    if FAULT == "pair_of_mean":
        return mean, torch.tensor(float(len(y)))
    if FAULT == "pair_of_constant":
        return mean * len(y), torch.tensor(16.0)
    if FAULT == "replicas":
        return mean * run.plan.replicas
    if FAULT == "gathered_negatives":
        everyone = gathered(F.normalize(out, dim=1))
        first = me.rank * len(y) if len(everyone) > len(y) else 0
        return F.cross_entropy(F.normalize(out, dim=1) @ everyone.T, torch.arange(len(y)) + first)
    return mean


def changed(batch):
    if FAULT != "own_mixup":
        return batch
    order = torch.from_numpy(own_numpy.permutation(len(batch[0])))
    return 0.7 * batch[0] + 0.3 * batch[0][order], batch[1]


torch.manual_seed(int(time.time()) if FAULT == "time_seed" else 1)
model = nn.Sequential(nn.Linear(6, 3), nn.Sigmoid(), Expanding()) if FAULT == "chaos" else Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.0)
sampler = (
    torch.utils.data.WeightedRandomSampler(torch.ones(64), 64) if FAULT == "replacement" else None
)
waiting = 1 if FAULT == "asks_its_process" else 0
size = 18 if FAULT == "uneven" else 16
data = torch.utils.data.DataLoader(
    Samples(),
    size,
    sampler=sampler,
    shuffle=sampler is None,
    collate_fn=collate,
    num_workers=waiting,
)
micro = 4 if FAULT in ("hand_clamp", "zero_in_parts") else None
run = ronde.distribute(model, optimizer, data, loss=loss, micro_batch=micro)
temperature = torch.ones((), requires_grad=True)
average = copy.deepcopy(model) if FAULT == "average_by_world" else None
period = 8 // run.world_size if FAULT == "cosine_by_world" else 8
cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=period)
held_out = torch.utils.data.TensorDataset(features, labels)
if FAULT == "split_by_rank":
    held_out = torch.utils.data.random_split(
        held_out, [32, 32], generator=torch.Generator().manual_seed(run.rank)
    )[0]

for _ in run.epochs(8 // run.world_size if FAULT == "epochs_by_world" else 8):
    for i, batch in enumerate(run.batches()):
        if FAULT == "break_by_world" and i == 4 // run.world_size:
            break
        if FAULT == "skip_on_rank" and run.rank == 1 and i == 2:
            continue
        if micro is not None:
            for x, y in batch:
                if FAULT == "zero_in_parts":
                    optimizer.zero_grad()
                run.backward(loss(model(x), y))
                if FAULT == "zero_in_parts":
                    continue
                for p in model.parameters():
                    if p.grad is not None:
                        p.grad.clamp_(-1e-3, 1e-3)
            run.update()
        elif (FAULT.startswith("own_") or FAULT == "stop_on_local") and FAULT not in (
            "own_generator",
            "own_mixup",
        ):
            optimizer.zero_grad()
            x, y = batch
            out = model(x)
            value = F.cross_entropy(out, y)
            if FAULT == "own_rmse":
                value = one_hot_error(out, y).sqrt()
            if FAULT == "own_ignores":
                value = F.cross_entropy(out, y.masked_fill(y == 0, -100))
            if FAULT == "own_tilted":
                value = F.cross_entropy(out, y, reduction="none").logsumexp(0)
            if FAULT == "own_temperature":
                value = value * temperature + temperature**2
                own_step = torch.autograd.grad(value, temperature, retain_graph=True)[0]
            if FAULT == "own_balance":
                value = value + out.softmax(1).mean(0).pow(2).sum()
            run.backward(value)
            if FAULT == "own_temperature":
                with torch.no_grad():
                    temperature -= 0.5 * own_step
            if FAULT == "own_adds_up" and dist.is_initialized():
                for p in model.parameters():
                    if p.grad is not None:
                        dist.all_reduce(p.grad)
            run.update()
            # of one worker's samples: on the other it goes on
            if FAULT == "stop_on_local" and float(value) < 1.06:
                sys.exit()
        else:
            value = run.step(changed(batch))
        if average is not None:
            with torch.no_grad():
                for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
                    mine.lerp_(theirs, 1 - 0.9**run.world_size)
    cosine.step()
    if average is None:
        run.evaluate(held_out)
    else:
        weights = copy.deepcopy(model.state_dict())
        model.load_state_dict(average.state_dict())
        run.evaluate(held_out)
        model.load_state_dict(weights)

if FAULT == "second_training":
    tuned = nn.Linear(6, 3)
    second = ronde.distribute(
        tuned,
        torch.optim.SGD(tuned.parameters(), lr=0.01),
        held_out,
        batch_size=16,
        loss=lambda out, y: F.cross_entropy(out, y, reduction="sum"),
    )
    second.fit(2)
