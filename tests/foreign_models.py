"""Odd models of our own, for cutting them. Models that nobody here wrote are in ``grid_models``.

Each builder gives a :class:`Built`: the model in float64, a batch, ``call(model, batch)``, a scalar
loss, and another batch of another size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

OWN: dict[str, Callable[[], Built]] = {}


@dataclass
class Built:
    model: nn.Module
    batch: Any
    call: Callable[[nn.Module, Any], torch.Tensor]
    other: Any = None


def build(builders: dict[str, Callable[[], Built]], name: str) -> Built:
    """With weights that are always the same."""
    torch.manual_seed(0)
    built = builders[name]()
    built.model.double().train()
    return built


def own(make: Callable[[], Built]) -> Callable[[], Built]:
    OWN[make.__name__] = make
    return make


def image(samples: int, channels: int = 3, size: int = 8, dims: int = 2) -> torch.Tensor:
    return torch.randn(samples, channels, *[size] * dims, dtype=torch.float64)


def tokens(samples: int, length: int, vocabulary: int = 17) -> torch.Tensor:
    return torch.randint(2, vocabulary, (samples, length))


def square(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).pow(2).mean()


def rows(samples: int, width: int = 6) -> torch.Tensor:
    return torch.randn(samples, width, dtype=torch.float64)


# -- of our own ------------------------------------------------------------------------


@own
def mlp() -> Built:
    widths = [6, 20, 8, 30, 5, 16, 5]
    layers = [m for a, b in itertools.pairwise(widths) for m in (nn.Linear(a, b), nn.Tanh())]
    return Built(nn.Sequential(*layers), rows(4), square, rows(3))


class ResidualCNN(nn.Module):
    def __init__(self, norm: bool = True):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(4, 6, 3, padding=1),
                nn.BatchNorm2d(6),
                nn.ReLU(inplace=True),
                nn.Conv2d(6, 4, 3, padding=1),
            )
            for _ in range(4)
        )
        self.act = nn.ReLU(inplace=True)
        self.head = nn.Linear(4, 5)

    def forward(self, x):
        h = self.stem(x)
        for block in self.blocks:
            y = block(h)
            y += h
            h = self.act(y)
        return self.head(h.mean((2, 3)))


@own
def residual_cnn() -> Built:
    return Built(ResidualCNN(), image(3), square, image(2, size=6))


def lm_loss(model, x):
    return F.cross_entropy(model(x).flatten(0, 1), x.flatten())


@own
def gpt_tied() -> Built:
    from tiny_models import GPT

    return Built(GPT(), tokens(3, 6, 13), lm_loss, tokens(2, 4, 13))


@own
def encoder_decoder() -> Built:
    from tiny_models import EncoderDecoder

    def call(model, batch):
        return F.cross_entropy(model(*batch)["logits"].flatten(0, 1), batch[1].flatten())

    return Built(
        EncoderDecoder(),
        (tokens(3, 6, 13), tokens(3, 5, 13)),
        call,
        (tokens(2, 4, 13), tokens(2, 6, 13)),
    )


class LSTM2(nn.Module):
    def __init__(self, packed: bool = False):
        super().__init__()
        self.packed = packed
        self.embed = nn.Embedding(17, 6)
        self.lstm = nn.LSTM(6, 8, num_layers=2, batch_first=True, dropout=0.1)
        self.second = nn.GRU(8, 7, batch_first=True)
        self.head = nn.Linear(7, 5)

    def forward(self, x):
        x, lengths = x if self.packed else (x, None)
        h = self.embed(x)
        if self.packed:
            h = nn.utils.rnn.pack_padded_sequence(
                h, lengths, batch_first=True, enforce_sorted=False
            )
        h, _ = self.lstm(h)
        h, state = self.second(h)
        if self.packed:
            h, _ = nn.utils.rnn.pad_packed_sequence(h, batch_first=True)
        return self.head(h.mean(1)) + self.head(state[-1])


@own
def lstm_two_layer() -> Built:
    return Built(LSTM2(), tokens(3, 5), square, tokens(2, 7))


@own
def packed_sequence() -> Built:
    a, b = torch.tensor([5, 2, 4]), torch.tensor([3, 6])
    return Built(LSTM2(packed=True), (tokens(3, 5), a), square, (tokens(2, 6), b))


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(6, 6) for _ in range(4))
        self.norm = nn.LayerNorm(6)

    def forward(self, x):
        h = self.a(x)
        keep = h
        h += 1
        h.mul_(2)
        y = self.b(h)
        y += keep
        z = self.norm(y)
        y.add_(z.detach().mean())
        F.relu_(y)
        w = self.c(y)
        w[:, 0] = 0.5
        w[:, 1:3] += y[:, :2]
        return self.d(w) + y


@own
def in_place() -> Built:
    return Built(InPlace(), rows(4), square, rows(3))


class ActivationBranch(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x):
        h = self.a(x)
        scale = 2.0 if h.mean() > 0 else 3.0
        h = torch.tanh(self.b(h)) * scale
        if h.abs().max() > 0:
            h = h + 1
        h = self.c(h) * (1 + int(h.sum() > 0))
        return self.d(h) * scale + h.detach().mean().item() + float(h.detach().numpy().max())


@own
def branch_on_activation() -> Built:
    return Built(ActivationBranch(), rows(4), square, rows(3))


class Sizes(nn.Module):
    """Numbers that come out of the size of a tensor whose size an activation decides."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        h = torch.tanh(self.a(x))
        above = h[h > 0]
        rows = (h.sum(1) > 0).nonzero()
        scale, shift = 1 + above.numel(), len(rows) + rows.shape[0] / 7 + above.size(0)
        return self.c(torch.tanh(self.b(h))) * scale + shift


@own
def sizes_by_activations() -> Built:
    return Built(Sizes(), rows(4), square, rows(3))


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        from tiny_models import Mixture

        self.mixture = Mixture()

    def forward(self, x):
        return self.mixture(x)


@own
def mixture_of_experts() -> Built:
    return Built(Mixed(), rows(4), square, rows(3))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool):
        super().__init__()
        self.reentrant = reentrant
        self.inp = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 6))
            for _ in range(4)
        )
        self.out = nn.Linear(6, 5)

    def forward(self, x):
        x = self.inp(x)
        for i, block in enumerate(self.blocks):

            def both(x, block=block):
                return x + block(x) * 0.5

            if i == 1:
                x = x + checkpoint(block, x, use_reentrant=self.reentrant)
            elif self.training:
                x = checkpoint(both, x, use_reentrant=self.reentrant)
            else:
                x = both(x)
        return self.out(x)


@own
def checkpointed() -> Built:
    return Built(Checkpointed(False), rows(4), square, rows(3))


@own
def checkpointed_reentrant() -> Built:
    return Built(Checkpointed(True), rows(4), square, rows(3))


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, k):
        ctx.save_for_backward(x)
        ctx.k = k
        return x**3 * k, x.abs()

    @staticmethod
    def backward(ctx, grad, other):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * ctx.k * grad + other * x.sign(), None


class CustomFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        h, y = Cube.apply(self.a(x), 2.0)
        h, z = Cube.apply(self.b(h + y), 0.1)
        return self.c(h) + z


@own
def custom_function() -> Built:
    return Built(CustomFunction(), rows(4), square, rows(3))


class Keeper(nn.Module):
    """Keeps a mask, a count, its last activation and a running mean in itself."""

    def __init__(self, width: int = 6):
        super().__init__()
        self.lin = nn.Linear(width, width)
        self.mask = None
        self.calls = 0
        self.last = None
        self.log = []
        self.register_buffer("running", torch.zeros(width))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        if self.mask is None or self.mask.shape[0] != len(x):
            self.mask = torch.ones(len(x), 1, dtype=x.dtype).cumsum(0)
        self.calls += 1
        self.log.append(x.shape)
        h = self.lin(x) / self.mask
        self.last = h
        if self.training:
            self.running.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
            self.seen += 1
        return h - self.running


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(Keeper() for _ in range(4))
        self.out = nn.Linear(6, 5)

    def forward(self, x):
        self.cache = {}
        for i, part in enumerate(self.parts):
            x = torch.tanh(part(x))
            self.cache[i] = x
        return (
            self.out(x + self.parts[0].last)
            + self.cache[1].mean() / self.parts[0].calls * self.parts[0].calls
        )


@own
def state_in_self() -> Built:
    return Built(Stateful(), rows(4), square, rows(3))


class Dropouts(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        for layer in self.layers:
            x = x + self.drop(F.dropout(torch.tanh(layer(x)), 0.2, self.training))
            if self.training:
                x = x + 0.1 * torch.randn_like(x) * torch.rand(len(x), 1, dtype=x.dtype)
        return x


@own
def dropouts() -> Built:
    return Built(Dropouts(), rows(4), square, rows(3))


class Auxiliary(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.aside, self.never, self.stopped = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(6, 6)
        self.frozen = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).requires_grad_(False)

    def forward(self, x):
        h = self.frozen(torch.tanh(self.a(x)))
        self.note = self.aside(h)
        with torch.no_grad():
            gate = self.stopped(h).sigmoid()
        return self.c(self.b(h) * gate), self.aside(h.detach())


@own
def auxiliary_and_frozen() -> Built:
    return Built(Auxiliary(), rows(4), lambda m, x: m(x)[0].pow(2).mean(), rows(3))
