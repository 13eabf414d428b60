"""Tiny models and data sets that several tests train.

No parameter has a gradient that is zero in exact arithmetic (a key bias, a bias before
normalization), because AdamW would blow up its rounding error.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

VOCABULARY, LENGTH, CLASSES = 13, 7, 5


def call(model: nn.Module, batch: Any) -> Any:
    return model(batch[0]), batch[1]


@dataclass(frozen=True)
class Kind:
    """How a model is built and called."""

    build: Callable[[], nn.Module]
    samples: str = "mlp"  # of Samples
    forward: Callable[[nn.Module, Any], Any] = call
    blocks: int | None = None  # how many of its blocks are split in two
    aside: str = "$^"  # parameters whose gradient is zero in exact arithmetic
    needs: str = "torch"
    styles: Callable[[], dict[str, Any]] | None = None


class CNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(1, 4, 3, padding=1)
        self.b = nn.Conv2d(4, 6, 3)
        self.c = nn.Linear(6, CLASSES)

    def forward(self, x):
        x = F.gelu(self.a(x))
        return self.c(F.gelu(self.b(x)).mean((2, 3)))


class Norm(CNN):
    """With batch normalisation over 2d and 1d inputs."""

    def __init__(self) -> None:
        super().__init__()
        # a bias before normalisation has no gradient in exact arithmetic
        self.a = nn.Conv2d(1, 4, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(4)
        self.bn1 = nn.BatchNorm1d(6, momentum=None)

    def forward(self, x):
        x = F.gelu(self.bn(self.a(x)))
        return self.c(self.bn1(F.gelu(self.b(x)).mean((2, 3))))


class Transformer(nn.Module):
    """Two layers, embedding and head tied. No key bias: its gradient is zero in exact
    arithmetic.
    """

    def __init__(self, width: int = 12, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.randn(LENGTH, width) * 0.1)
        self.register_buffer(
            "mask", torch.triu(torch.full((LENGTH, LENGTH), float("-inf")), 1), persistent=False
        )
        for i in range(2):
            setattr(self, f"norm_a{i}", nn.LayerNorm(width))
            setattr(self, f"qkv{i}", nn.Linear(width, 3 * width, bias=False))
            setattr(self, f"out{i}", nn.Linear(width, width))
            setattr(self, f"norm_b{i}", nn.LayerNorm(width))
            setattr(self, f"up{i}", nn.Linear(width, 2 * width))
            setattr(self, f"down{i}", nn.Linear(2 * width, width))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens) + self.position
        b, t, w = x.shape
        for i in range(2):
            q, k, v = (
                getattr(self, f"qkv{i}")(getattr(self, f"norm_a{i}")(x))
                .view(b, t, 3, self.heads, w // self.heads)
                .permute(2, 0, 3, 1, 4)
            )
            scores = q @ k.transpose(-1, -2) / math.sqrt(w // self.heads) + self.mask.to(x.dtype)
            x = x + getattr(self, f"out{i}")(
                (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, w)
            )
            x = x + getattr(self, f"down{i}")(
                F.gelu(getattr(self, f"up{i}")(getattr(self, f"norm_b{i}")(x)))
            )
        return self.head(x)


class DeepLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.lstm = nn.LSTM(8, 10, num_layers=2, batch_first=True)
        self.head = nn.Linear(10, CLASSES)

    def forward(self, tokens):
        return self.head(self.lstm(self.embed(tokens))[0][:, -1])


class Unused(nn.Module):
    """Some parameters are never used, some only by some samples, some are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.never = nn.Linear(6, 8)
        self.rare = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        # which workers and micro-batches use it changes from step to step
        if bool((x[:, 0] > 0.55).any()):
            x = x + self.rare(x) * (x[:, :1] > 0.55)
        return self.last(self.frozen(x))


class _Relay(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.through, self.beside = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x, _given):
        return x + torch.tanh(self.through(x)), self.beside(x)


class Relay(nn.Module):
    """Blocks hand the next one what it does not use: those parameters have no gradient, and no
    weight decay.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Relay() for _ in range(3))
        self.last = nn.Linear(6, CLASSES)

    def forward(self, x):
        given = x
        for block in self.blocks:
            x, given = block(x, given)
        return self.last(x)


class Samples(Dataset):
    """(input, target) pairs, made without torch's global randomness."""

    def __init__(self, kind: str, n: int, dtype: torch.dtype) -> None:
        g = torch.Generator().manual_seed(n)
        if kind == "cnn":
            self.x = torch.randn(n, 1, 6, 6, generator=g, dtype=torch.float64).to(dtype)
            self.y = torch.randint(CLASSES, (n,), generator=g)
        elif kind in ("transformer", "tokens"):
            self.x = torch.randint(VOCABULARY, (n, LENGTH), generator=g)
            self.y = self.x.roll(-1, 1).clone()
            # padding: samples have different numbers of targets, some none at all
            if kind == "tokens":
                lengths = torch.randint(0, LENGTH + 1, (n,), generator=g)
                self.y[torch.arange(LENGTH)[None] >= lengths[:, None]] = -100
        elif kind == "padded":  # the last word of some samples is none
            self.x = torch.randint(1, VOCABULARY, (n, LENGTH), generator=g)
            self.x[::3, -1] = 0
            self.y = self.x.roll(-1, 1).clone()
        elif kind in ("lstm", "pairs"):
            self.x = torch.randint(VOCABULARY, (n, LENGTH), generator=g)
            self.y = torch.randint(CLASSES, (n,), generator=g)
            if kind == "pairs":
                self.y = torch.randint(VOCABULARY, (n, LENGTH + 1), generator=g)
        else:
            self.x = torch.randn(n, 6, generator=g, dtype=torch.float64).to(dtype)
            self.y = torch.randint(CLASSES, (n,), generator=g)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class MLP(nn.Module):
    """Layers of very different widths."""

    def __init__(self) -> None:
        super().__init__()
        widths = [6, 20, 8, 30, 5, 16, 5]
        self.layers = nn.Sequential(
            *(m for a, b in itertools.pairwise(widths) for m in (nn.Linear(a, b), nn.Tanh()))
        )

    def forward(self, x):
        return self.layers(x)


class Residual(nn.Module):
    """Convolutions with residuals, and operations in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(6, 4, 3, padding=1)
            )
            for _ in range(5)
        )
        self.head = nn.Linear(4, 5)

    def forward(self, x):
        h = self.stem(x)
        for block in self.blocks:
            h = F.relu(h + block(h), inplace=True)
        return self.head(h.mean((2, 3)))


class UNet(nn.Module):
    """Skips over many modules, and normalisation by groups."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            [
                nn.Conv2d(1, 4, 3, padding=1),
                nn.Conv2d(4, 8, 3, padding=1, stride=2),
                nn.Conv2d(8, 8, 3, padding=1),
            ]
        )
        self.middle = nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 8, 3, padding=1))
        self.up = nn.ModuleList(
            [
                nn.Conv2d(16, 8, 3, padding=1),
                nn.ConvTranspose2d(16, 4, 2, stride=2),
                nn.Conv2d(8, 4, 3, padding=1),
            ]
        )
        self.head = nn.Conv2d(4, 5, 1)

    def forward(self, x):
        skips = []
        for layer in self.down:
            x = F.silu(layer(x))
            skips.append(x)
        x = self.middle(x)
        for layer in self.up:
            x = F.silu(layer(torch.cat([x, skips.pop()], 1)))
        return self.head(x).mean((2, 3))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (
            nn.Linear(width, width),
            nn.Linear(width, width, bias=False),
            nn.Linear(width, width),
        )
        self.out = nn.Linear(width, width)

    def forward(self, x, memory=None, mask=None):
        memory = x if memory is None else memory

        def heads(t):
            return t.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        scores = (
            heads(self.q(x))
            @ heads(self.k(memory)).transpose(-1, -2)
            / math.sqrt(x.shape[-1] / self.heads)
        )
        if mask is not None:
            scores = scores.masked_fill(mask, float("-inf"))
        return self.out((scores.softmax(-1) @ heads(self.v(memory))).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, cross: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(3 * width, width),
        )
        if cross:
            self.norm3, self.cross = nn.LayerNorm(width), Attention(width, heads)

    def forward(self, x, mask=None, memory=None):
        x = x + self.dropout(self.attention(self.norm1(x), mask=mask))
        if memory is not None:
            x = x + self.cross(self.norm3(x), memory)
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


def causal(length: int) -> torch.Tensor:
    return torch.ones(length, length, dtype=torch.bool).triu(1)


class GPT(nn.Module):
    """Embedding and head tied."""

    def __init__(self, width: int = 12, layers: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, 2, False, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens):
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        mask = causal(tokens.shape[1])
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


class EncoderDecoder(nn.Module):
    """Two inputs; what the encoder made is read by every block of the decoder."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.encoder = nn.ModuleList(Block(width, 2) for _ in range(2))
        self.decoder = nn.ModuleList(Block(width, 3, cross=True) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, source, target):
        memory = self.embed(source)
        for block in self.encoder:
            memory = block(memory)
        x = self.embed(target)
        for block in self.decoder:
            x = block(x, causal(target.shape[1]), memory)
        return {"logits": self.head(x)}


class LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.first, self.second = nn.LSTM(8, 10, batch_first=True), nn.LSTM(10, 9, batch_first=True)
        self.head = nn.Linear(9, 5)

    def forward(self, tokens):
        x, (h, c) = self.first(self.embed(tokens))
        x, _ = self.second(x, (h[..., :9], c[..., :9]))
        return self.head(x[:, -1])


class Odd(nn.Module):
    """A frozen part, a part that is never used, and one whose output the loss does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.never, self.frozen = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.aside, self.last = nn.Linear(8, 3), nn.Linear(8, 5)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        x = torch.tanh(self.first(x))
        self.note = self.aside(x)
        return self.last(torch.tanh(self.frozen(x)))


class Frozen(Odd):
    """Nothing of the first stage takes gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)


class Masked(nn.Module):
    """Leaves its mask out where it masks nothing: the path depends on what is in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 5)

    def forward(self, tokens):
        mask = tokens > 1
        keep = None if bool(mask.all()) else mask[..., None].double()
        h = self.embed(tokens)
        for block in self.blocks:
            h = h + torch.tanh(block(h))
            if keep is not None:
                h = h * keep
        return self.head(h.sum(1) / max(int(mask.sum()), 1) * mask.sum())


class Tables(nn.Module):
    """The gradients of its tables, and of what passes a cut, are views of the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(6, 12)
        self.tables = nn.ParameterList(
            nn.Parameter(torch.randn(*shape) / 3) for shape in ((2, 6), (3, 4), (6, 2), (12, 1))
        )
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        given = self.scale(x)
        h = given
        for table, layer in zip(self.tables, self.layers, strict=True):
            shift = table.reshape(1, 12) + self.tables[0].reshape(1, 12) + given.reshape(-1, 12)
            h = h + torch.tanh(layer(h)) * shift + (table.reshape(12) + self.tables[1].reshape(12))
        return self.head(h)


class Experts(nn.Module):
    """Two of four experts for each sample. One that no sample chose is not called, and has no
    gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)) for _ in range(4)
        )

    def forward(self, x):
        weight, chosen = self.gate(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            row, place = (chosen == i).nonzero(as_tuple=True)
            if len(row):
                out[row] += expert(x[row]) * weight[row, place, None]
        return x + out


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), Experts()) for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Dropping(Mixture):
    """The pass takes a number out of an activation, and so is followed with the values of one
    micro-batch: other experts another time.
    """

    def forward(self, x):
        return super().forward(x) * (
            1 + 0 * int(x.argmax()) + 0 * float(self.first(x).detach().mean())
        )


class Tasks(nn.Module):
    """A column of the batch chooses each sample's head; one that no sample chose is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 8)
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5)) for _ in range(2)
        )

    def forward(self, x):
        h = torch.tanh(self.second(torch.tanh(self.first(x))))
        out = h.new_zeros(len(x), 5)
        for task, head in enumerate(self.heads):
            mine = (x[:, 0] > 0) == bool(task)
            if mine.any():
                out[mine] = head(h[mine])
        return out


class Switch(Tasks):
    """The first sample chooses the head of all, as where a batch holds one task's samples."""

    def forward(self, x):
        h = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.heads[int(x[0, 0] > 0)](h)


class Handed(nn.Module):
    """Constants and the batch go through modules that do nothing, some of them in evaluation
    only.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stub, self.none = nn.Identity(), nn.Dropout(0.0)
        self.drop = nn.Sequential(nn.Dropout(0.0), nn.Identity())
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.last = nn.Linear(6, 5)

    def forward(self, x):
        x = self.stub(x) * 2
        place = (
            self.none(torch.arange(6, dtype=x.dtype) / 6).sin()
            + self.drop(torch.arange(6, dtype=x.dtype)).cos()
        )
        for layer in self.layers:
            layer = layer.to(x.dtype)
            x = torch.tanh(layer(x) + place)
        return self.last(x)


class Kept(nn.Module):
    """No parameters, and a buffer that training alone fills in."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones(()))

    def forward(self, x):
        if self.training:
            self.factor.fill_(1.5)
        return x * self.factor


class Branch(nn.Module):
    """Layers that training alone calls, at one of which a stage begins; where ``ends``, nothing but
    the loss comes after them otherwise.
    """

    ends = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 8)
        self.aside, self.read = nn.Linear(8, 8), nn.Linear(8, 5)
        self.kept, self.head = Kept(), nn.Linear(8, 5)

    def forward(self, x):
        h = torch.tanh(self.second(torch.tanh(self.first(x))))
        out = self.head(h) if self.ends else h
        noted = self.read(torch.tanh(self.aside(h))) if self.training else 0
        return (out if self.ends else self.head(self.kept(torch.sigmoid(h)))) + 0.3 * noted


class Ending(Branch):
    ends = True


class Fourier(nn.Module):
    """Complex weights held as pairs of real ones: how they lie in memory is looked at in every
    stage.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(4, 4, 2) / 3) for _ in range(4))
        self.layers, self.head = nn.ModuleList(nn.Linear(6, 6) for _ in range(4)), nn.Linear(6, 5)

    def forward(self, x):
        for weight, layer in zip(self.weights, self.layers, strict=True):
            x = torch.tanh(
                layer(x) + torch.fft.irfft(torch.fft.rfft(x) @ torch.view_as_complex(weight), n=6)
            )
        return self.head(x)


class Rescaled(MLP):
    """Writes into its own weights, once they are evaluated."""

    def forward(self, x):
        if not self.training:
            with torch.no_grad():
                self.layers[-2].weight.div_(2)
        return super().forward(x)


class Joined(nn.Module):
    """What a stage makes of the batch alone goes on to the next, and also into what it makes of the
    stage before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.key, self.own, self.query = (
            nn.Linear(6, 8),
            nn.Linear(8, 8),
            nn.Linear(6, 8),
            nn.Linear(8, 8),
        )
        self.later, self.last = nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x):
        key = self.key(torch.tanh(self.first(x)))
        own = self.own(x)
        return self.last(torch.tanh(self.later(torch.sigmoid(self.query(own) * key)) + own))


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


class AttentionBlock(nn.Module):
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


class TiedGPT(nn.Module):
    """A small GPT whose head is its embedding."""

    def __init__(self, width: int = 32, layers: int = 3, vocabulary: int = 50) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.zeros(16, width))
        self.blocks = nn.ModuleList(AttentionBlock(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        x = self.tokens(ids) + self.places[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(x), "hidden": x}


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


class ResidualMLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        # in two: 7, in three: 5, 5, 4; in two and again in two: 4, 3
        self.up = nn.Linear(width, 14)
        self.down = nn.Linear(14, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class UnevenNet(nn.Module):
    """Uneven shapes, tied and frozen weights, buffers."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.Sequential(*(ResidualMLP(6) for _ in range(3)))
        self.norm = nn.BatchNorm1d(6) if norm else nn.LayerNorm(6)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(6, 11)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(0.5))
        self.register_buffer("count", torch.arange(3))

    def forward(self, x):
        # nothing before it that it takes away again: AdamW blows such gradients, mere rounding, up
        x = self.norm(self.embed(x))
        return self.head((self.blocks(x) + self.frozen(x)) * self.scale)
