"""Gradients that are unusual (sparse, complex, changed by hooks), two workers against a plain loop.
``python forked.py -n 2 gradients_worker.py``.
"""

from __future__ import annotations

import sys
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import ronde

STEPS, BATCH = 4, 7  # uneven shares


class Factors(nn.Module):
    """Matrix factorization with biases, whose gradients are the same memory."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.users, self.items = (nn.Embedding(6, 3, sparse=sparse) for _ in range(2))
        self.user_bias, self.item_bias = (nn.Embedding(6, 1, sparse=sparse) for _ in range(2))
        self.bias = nn.Parameter(torch.zeros(1, 1))

    def forward(self, pairs):
        u, i = pairs.t().contiguous()
        products = (self.users(u) * self.items(i)).sum(1, keepdim=True)
        return products + self.user_bias(u) + self.item_bias(i) + self.bias


def pairs():
    g = torch.Generator().manual_seed(1)
    x = torch.randint(6, (STEPS * BATCH, 2), generator=g)
    return x, torch.randn(len(x), 1, dtype=torch.float64, generator=g)


def weighted(output, target):
    weights = target.abs() + 0.5
    return (weights * (output - target) ** 2).sum(), weights.sum()


def plain(make, optimizer, data, loss, step=None):
    """One process, whole batches, nothing of Ronde."""
    torch.manual_seed(7)
    model = make().double()
    optimizer = optimizer(model.parameters())
    for x, y in zip(*(t.split(BATCH) for t in data), strict=True):
        optimizer.zero_grad()
        value = loss(model(x), y)
        (value[0] / value[1] if isinstance(value, tuple) else value).backward()
        if step is not None:
            step(model)
        optimizer.step()
    return model.state_dict()


def trained(make, optimizer, data, loss, **options):
    torch.manual_seed(7)
    model = make().double()
    run = ronde.distribute(
        model, optimizer(model.parameters()), TensorDataset(*data), loss=loss, batch_size=BATCH,
        shuffle=False, **options,
    )  # fmt: skip
    for batch in run.batches():
        run.step(batch)
    with run.whole_model() as whole:
        return {k: v.clone() for k, v in whole.state_dict().items()}


def same(name, found, expected, bound=1e-12):
    for key, want in expected.items():
        off = (found[key] - want).abs().max() / want.abs().max().clamp(min=1e-30)
        assert off <= bound, f"{name}: {key} is {off:.1e} off"


def sparse_gradients():
    data = pairs()
    for optimizer in (lambda p: torch.optim.SGD(p, 0.3), sparse_adam):
        for loss in (F.mse_loss, weighted):
            want = plain(Factors, optimizer, data, loss)
            for options in ({}, {"plan": "shard=optimizer"}, {"micro_batch": 2}):
                found = trained(Factors, optimizer, data, loss, **options)
                same(f"sparse {options}", found, want)


def sparse_adam(parameters):
    bias, *sparse = parameters
    bias.requires_grad_(False)  # its gradient is dense
    return torch.optim.SparseAdam(sparse, 0.03)


CASES = {f.__name__: f for f in (sparse_gradients,)}

if __name__ == "__main__":
    warnings.simplefilter("error")
    for name in sys.argv[1:] or CASES:
        CASES[name]()
    if dist.is_initialized():
        dist.barrier()  # rank 0 has the store
