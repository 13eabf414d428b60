"""Planted faults of a fourth kind, each a small training of its own: ``hidden_faults.py NAME``. What they do wrong shows late or elsewhere."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiated
import torch.nn.functional as F
from torch import nn

import ronde

FAULT = sys.argv[1]


def samples(n: int = 41, seed: int = 0) -> torch.utils.data.TensorDataset:
    drawn = torch.Generator().manual_seed(seed)
    return torch.utils.data.TensorDataset(torch.randn(n, 6, generator=drawn), torch.randint(0, 3, (n,), generator=drawn))


def network(*between: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), *between, nn.Tanh(), nn.Linear(8, 3))


def distributed(model: nn.Module, data, **given) -> tuple[torch.optim.Optimizer, ronde.Run]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return optimizer, ronde.distribute(model, optimizer, data, **{"loss": F.cross_entropy, "batch_size": 8, **given})


# -- right while all workers have equally many samples -----------------------------------------------------------------


class Standardised(nn.Module):
    """With the mean of the workers' means."""

    def forward(self, x):
        found = torch.cat([x.mean(0), (x * x).mean(0)])
        if dist.is_initialized():
            found = differentiated.all_reduce(found) / dist.get_world_size()
        mean, square = found.chunk(2)
        return (x - mean) / (square - mean**2 + 1e-3).sqrt()


def hand_synced() -> None:
    distributed(network(Standardised()), samples(63), batch_size=10)[1].fit(3)


def rate_of_means() -> None:
    model = network()
    optimizer, run = distributed(model, samples(63), batch_size=10)
    for _ in run.epochs(3):
        for x, y in run.batches():
            value = F.cross_entropy(model(x), y)
            mean = value.detach().clone()
            if dist.is_initialized():
                dist.all_reduce(mean)
                mean /= dist.get_world_size()
            optimizer.param_groups[0]["lr"] = 0.1 * float(mean)
            run.backward(value)
            run.update()


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = network()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        return self.inner(x) / (1 + 0.01 * self.seen)


def empty_counted() -> None:
    """49 samples in batches of 8: of the last one a worker has none, and is given one that does not count."""
    model = Counting()
    _, run = distributed(model, samples(49))
    for _ in run.epochs(3):
        for batch in run.batches():
            run.step(batch)
            here = torch.tensor(float(len(batch[0])))
            if dist.is_initialized():
                dist.all_reduce(here)
            model.seen += here


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = network()
        self.register_buffer("centre", torch.zeros(3))

    def forward(self, x):
        out = self.inner(x) - self.centre
        total = torch.cat([out.detach().sum(0), torch.tensor([float(len(out))]).to(out)])
        if dist.is_initialized():
            dist.all_reduce(total)
        self.centre.mul_(0.9).add_(total[:-1] / total[-1], alpha=0.1)
        return out


def empty_exchange() -> None:
    """The model of who has no samples is not called: the others wait for it."""
    _, run = distributed(Centred(), samples(49))
    for _ in run.epochs(3):
        for batch in run.batches():
            run.step(batch)


globals()[FAULT]()
