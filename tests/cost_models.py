"""Models whose costs the tests know, and what a child process does with one of them."""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch import nn

from ronde.run.losses import LossCall

MSE = LossCall(F.mse_loss, None)


def numbers(*shape, out=8):
    return lambda b: (torch.randn(b, *shape), torch.randn(b, out))


def words(b):
    return torch.randint(50, (b, 16)), torch.randint(50, (b, 16))


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1)


class _Sleeper(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient.clone(), None, None


class Sleep(nn.Module):
    """A layer that takes a known time in both passes, and no core."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.seconds = (forward, backward)
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return _Sleeper.apply(self.inner(x), *self.seconds)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm(x))


class Tied(nn.Module):
    """A small GPT whose head is its embedding."""

    def __init__(self, width: int = 32, layers: int = 3, vocabulary: int = 50) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.zeros(16, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        x = self.tokens(ids) + self.places[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(x), "hidden": x}


def tokens_loss(output, target):
    return F.cross_entropy(output["logits"].flatten(0, 1), target.flatten())


def wide() -> nn.Module:
    """Some 60 MiB of parameters, and activations that show."""
    return nn.Sequential(
        nn.Linear(512, 2048),
        nn.GELU(),
        nn.Linear(2048, 2048),
        nn.GELU(),
        nn.Linear(2048, 4096),
        nn.GELU(),
        nn.Linear(4096, 10),
    )


def convolutions() -> nn.Module:
    return nn.Sequential(
        *(
            m
            for i in range(5)
            for m in (
                nn.Conv2d(3 if i == 0 else 48, 48, 3, padding=1),
                nn.BatchNorm2d(48),
                nn.ReLU(),
            )
        ),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(48, 10),
    )


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
