"""Models whose costs the tests know, and what a child process does with one of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ronde.run.losses import LossCall
from tiny_models import convolutions, wide

MSE = LossCall(F.mse_loss, None)


def numbers(*shape, out=8):
    return lambda b: (torch.randn(b, *shape), torch.randn(b, out))


def words(b):
    return torch.randint(50, (b, 16)), torch.randint(50, (b, 16))


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1)


def tokens_loss(output, target):
    return F.cross_entropy(output["logits"].flatten(0, 1), target.flatten())


PEAKS = {
    # model, shape of a sample, batch
    "wide": (wide, (512,), 768),
    "convolutions": (convolutions, (3, 32, 32), 72),
}


def train(name: str):
    """The child's part: one small step warms the kernels, then two real ones."""

    def steps(samples: int, n: int) -> None:
        build, shape, _ = PEAKS[name]
        torch.manual_seed(0)
        model = build()
        optimizer = torch.optim.AdamW(model.parameters())
        x, y = torch.randn(samples, *shape), torch.randint(10, (samples,))
        for _ in range(n):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    steps(2, 1)
    return lambda: steps(PEAKS[name][2], 2)
