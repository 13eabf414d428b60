"""Scripts that draw random numbers in a step, sound or with a fault behind the noise: ``noisy.py
NAME``.
"""

from __future__ import annotations

import random
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import ronde

NAME = sys.argv[1]
KIND, _, FAULT = NAME.partition("_")
torch.manual_seed(0)
STEPS = 20


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.mean, self.spread = nn.Linear(12, 8), nn.Linear(8, 3), nn.Linear(8, 3)
        self.decode = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 12), nn.Sigmoid())

    def sample(self, mean, logvar):
        std = torch.exp(0.5 * logvar)
        return mean + torch.randn_like(std) * std

    def forward(self, x):
        h = F.relu(self.encode(x))
        mean, logvar = self.mean(h), self.spread(h)
        return self.decode(self.sample(mean, logvar)), mean, logvar


def vae_loss(output, x):
    again, mean, logvar = output
    if FAULT == "sum":
        each = F.binary_cross_entropy(again, x, reduction="sum")
        return each - 0.5 * (1 + logvar - mean**2 - logvar.exp()).sum()
    each = F.binary_cross_entropy(again, x, reduction="none").sum(1)
    return (each - 0.5 * (1 + logvar - mean**2 - logvar.exp()).sum(1)).mean()


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.times = nn.Embedding(STEPS, 12)
        norm = nn.BatchNorm1d(16) if FAULT == "batchnorm" else nn.LayerNorm(16)
        self.into, self.body = nn.Linear(12, 16), nn.Sequential(norm, nn.ReLU(), nn.Dropout(0.1))
        self.out = nn.Linear(16, 12)

    def forward(self, x, t):
        h = self.into(x + self.times(t))
        if FAULT == "recomputed":
            h = checkpoint(
                lambda v: self.body(v + 0.1 * torch.randn_like(v)), h, use_reentrant=False
            )
        else:
            h = self.body(h)
        return self.out(h)


def noised(model, batch):
    x = batch[0]
    noise = torch.randn_like(x)
    t = torch.randint(0, STEPS, (x.shape[0],))
    keep = (torch.rand(x.shape[0], 1) < 0.9).double()
    level = (t[:, None].double() + 1) / STEPS
    return model((1 - level) * x * keep + level * noise, t), noise


class Noisy(nn.Module):
    """Noise of a fixed shape, and in several layers of one class."""

    def forward(self, x):
        return x * (1 + 0.1 * torch.randn(x.shape[1:])) + 0.1 * torch.normal(0.0, 1.0, x.shape)


class Dropped(nn.Module):
    def forward(self, x):
        return x if random.random() < 0.5 else 2 * x


def loss_with_noise(output, x):
    """Noise in the loss."""
    target = x[:, :4] + 0.1 * torch.randn(len(x), 4)
    kind = "sum" if FAULT == "sum" else "mean"
    return F.mse_loss(output, target, reduction=kind)


def flattened(output, x):
    """Draws for the tokens of all samples at once."""
    return F.mse_loss(output.reshape(-1) + 0.1 * torch.randn(output.numel()), x[:, :4].reshape(-1))


class Paired(nn.Module):
    """Blends samples with each other, in an order that is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 4)

    def forward(self, x):
        return self.inner(0.8 * x + 0.2 * x[torch.randperm(len(x))])


class Twice(nn.Module):
    """The backward pass computes both blocks again, with their noise."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(self.noisy, block, x, use_reentrant=False)
        return x

    @staticmethod
    def noisy(block, x):
        return block(x + 0.1 * torch.randn_like(x))


class Attentive(nn.Module):
    """Noise behind the dropout of an attention over as many tokens as a worker has samples."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(12, 20), nn.Linear(20, 12)

    def forward(self, x):
        h = self.into(x).view(len(x), 1, 5, 4)
        h = F.scaled_dot_product_attention(h, h, h, dropout_p=0.1)
        return self.out(h.reshape(len(x), 20)) + 0.1 * torch.randn_like(x)


class Jittered(nn.Module):
    """Noise in the loop, and in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(12, 8), nn.Linear(8, 12)

    def forward(self, x):
        h = self.into(x)
        return self.out(h + 0.1 * torch.randn_like(h))


class Counted(nn.Module):
    """Evaluates with noise of a kind that no place in the batch decides."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 12)

    def forward(self, x):
        return self.inner(x) + (0.0 if self.training else 0.1 * torch.poisson(x.abs()))


def rebuilt(output, x):
    return F.mse_loss(output, x, reduction="sum" if FAULT == "sum" else "mean")


def contrast(output, x):
    """Two noisy views of a sample are alike; with a fault, and unlike those of the others."""
    a, b = (F.normalize(output + 0.1 * torch.randn(output.shape), dim=1) for _ in range(2))
    if FAULT == "pairs":
        return F.cross_entropy(a @ b.T, torch.arange(len(a)))
    return -(a * b).sum(1).mean()


data = torch.rand(44, 12)
sets = torch.utils.data.TensorDataset(data, data)
layers = (nn.Linear(12, 8), Noisy(), nn.Linear(8, 8), Noisy(), Dropped(), nn.Linear(8, 4))
model, loss, forward = {
    "vae": (VAE(), vae_loss, None),
    "diffusion": (Denoiser(), F.mse_loss, noised),
    "layers": (nn.Sequential(*layers), loss_with_noise, None),
    "tokens": (nn.Linear(12, 4), flattened, None),
    "full": (nn.Linear(12, 4), lambda out, x: F.mse_loss(out, x[:, :4]), None),
    "looped": (VAE(), vae_loss, None),
    "contrast": (nn.Linear(12, 4), contrast, None),
    "twice": (Twice(), rebuilt, None),
    "attention": (Attentive(), rebuilt, None),
    "jittered": (Jittered(), rebuilt, None),
    "poisson": (Counted(), rebuilt, None),
    "shuffled": (Paired(), lambda out, x: F.mse_loss(out, x[:, :4]), None),
}[KIND]
if KIND == "full":  # 40 = 4 x 10, and 5 samples would be too few for it

    def loss(out, x):
        assert len(x) == (10 if ronde.world().size == 1 else 5), f"a batch of {len(x)}"
        return F.mse_loss(out, x[:, :4])

    sets = torch.utils.data.TensorDataset(data[:40], data[:40])
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
run = ronde.distribute(
    model,
    optimizer,
    sets,
    loss=loss,
    forward=forward,
    batch_size=10,
    randomness="worker",  # prove makes the draws the same itself
)
for epoch in run.epochs(5):
    for batch in run.batches():
        if KIND == "looped":
            run.backward(loss(model(batch[0]), batch[1]))
            run.update()
        elif KIND == "jittered":
            run.backward(loss(model(batch[0] + 0.1 * torch.randn_like(batch[0])), batch[1]))
            run.update()
        else:
            run.step(batch)
    worst = {"worst": lambda output, target: (output - target).abs().max()}
    run.evaluate(sets, worst if FAULT == "evaluation" else None)
