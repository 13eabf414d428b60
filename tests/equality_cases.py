"""Cases for the equality tests: models, data and losses, and the plain PyTorch loop they are
compared with.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

VOCABULARY, LENGTH, CLASSES = 13, 7, 5


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


class LSTM(nn.Module):
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


class _Hands(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.through, self.beside = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x, _given):
        return x + torch.tanh(self.through(x)), self.beside(x)


class Handed(nn.Module):
    """Blocks hand the next one what it does not use: those parameters have no gradient, and no
    weight decay.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Hands() for _ in range(3))
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
        if kind in ("cnn", "norm"):
            self.x = torch.randn(n, 1, 6, 6, generator=g, dtype=torch.float64).to(dtype)
            self.y = torch.randint(CLASSES, (n,), generator=g)
        elif kind in ("transformer", "tokens"):
            self.x = torch.randint(VOCABULARY, (n, LENGTH), generator=g)
            self.y = self.x.roll(-1, 1).clone()
            # padding: samples have different numbers of targets, some none at all
            if kind == "tokens":
                lengths = torch.randint(0, LENGTH + 1, (n,), generator=g)
                self.y[torch.arange(LENGTH)[None] >= lengths[:, None]] = -100
        elif kind == "lstm":
            self.x = torch.randint(VOCABULARY, (n, LENGTH), generator=g)
            self.y = torch.randint(CLASSES, (n,), generator=g)
        else:
            self.x = torch.randn(n, 6, generator=g, dtype=torch.float64).to(dtype)
            self.y = torch.randint(CLASSES, (n,), generator=g)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


MODELS = {
    "cnn": CNN,
    "norm": Norm,
    "transformer": Transformer,
    "tokens": Transformer,
    "lstm": LSTM,
    "unused": Unused,
    "handed": Handed,
}


def mean_loss(output, target):
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def token_loss(output, target):
    """(sum, weight): the mean over the tokens that count."""
    total = F.cross_entropy(
        output.flatten(0, -2), target.flatten(), ignore_index=-100, reduction="sum"
    )
    return total, (target != -100).sum()


@dataclass(frozen=True)
class Case:
    kind: str
    optimizer: str = "sgd"
    micro: bool = False  # four micro-batches a step
    schedule: bool = True
    clip: float | None = 0.1
    dtype: str = "float64"
    batch: int = 6
    n: int = 25  # 25 = 4 × 6 + 1: the last batch is smaller than two workers
    steps: int = 20
    shuffle: bool = False
    sync_batchnorm: bool = False

    @property
    def name(self) -> str:
        flags = [
            self.kind,
            self.optimizer,
            "accumulate" if self.micro else "",
            "plain" if not self.schedule else "",
            self.dtype,
        ]
        flags += [f"n{self.n}b{self.batch}", "shuffled" if self.shuffle else ""]
        return "-".join(f for f in flags if f)

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        torch.manual_seed(7)
        model = MODELS[self.kind]().to(getattr(torch, self.dtype))
        if self.optimizer == "sgd":
            optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, weight_decay=0.01)
        else:
            # Two groups: their settings must be kept apart.
            small = [p for p in model.parameters() if p.ndim < 2]
            large = [p for p in model.parameters() if p.ndim >= 2]
            optimizer = torch.optim.AdamW(
                [{"params": large}, {"params": small, "weight_decay": 0.0, "lr": 2e-3}], lr=5e-3
            )
        schedule = lambda s: min(1.0, (s + 1) / 5) * 0.97**s  # noqa: E731
        return (
            model,
            optimizer,
            torch.optim.lr_scheduler.LambdaLR(optimizer, schedule) if self.schedule else None,
        )

    def loss(self):
        return token_loss if self.kind == "tokens" else mean_loss

    def data(self) -> Samples:
        return Samples(self.kind, self.n, getattr(torch, self.dtype))


def plain_loop(case: Case, order=None) -> dict[str, torch.Tensor]:
    """The training written by hand: one process, whole batches, nothing of Ronde. Returns the
    weights and the losses.
    """
    model, optimizer, scheduler = case.build()
    data = case.data()
    losses = []
    model.train()
    epoch = 0
    while len(losses) < case.steps:
        if order is None:
            batches = DataLoader(data, case.batch, shuffle=False)
        else:
            ids = order(epoch)
            batches = [
                (data.x[ids[i : i + case.batch]], data.y[ids[i : i + case.batch]])
                for i in range(0, case.n, case.batch)
            ]
        for x, y in itertools.islice(batches, case.steps - len(losses)):
            optimizer.zero_grad()
            loss = case.loss()(model(x), y)
            if isinstance(loss, tuple):
                loss = loss[0] / loss[1]
            loss.backward()
            if case.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), case.clip)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            losses.append(loss.detach())
        epoch += 1
    return {**{k: v.clone() for k, v in model.state_dict().items()}, "losses": torch.stack(losses)}


def ronde_loop(case: Case, own_loop: bool = False) -> tuple[dict[str, torch.Tensor], Any]:
    """The same training through ronde.distribute, on however many workers there are."""
    import ronde

    model, optimizer, scheduler = case.build()
    run = ronde.distribute(
        model,
        optimizer,
        DataLoader(case.data(), case.batch, shuffle=case.shuffle),
        loss=case.loss(),
        scheduler=scheduler,
        clip_norm=case.clip,
        micro_batch=max(1, math.ceil(math.ceil(case.batch / ronde.world().size) / 4))
        if case.micro
        else None,
        sync_batchnorm=case.sync_batchnorm,
    )
    losses = []
    for _ in run.epochs(10_000):
        for batch in run.batches():
            if own_loop:
                for x, y in batch if isinstance(batch, ronde.MicroBatches) else [batch]:
                    run.backward(case.loss()(run.model(x), y))
                losses.append(run.update())
            else:
                losses.append(run.step(batch))
            if len(losses) == case.steps:
                break
        if len(losses) == case.steps:
            break
    return {
        **{k: v.clone() for k, v in model.state_dict().items()},
        "losses": torch.stack(losses),
    }, run


def largest_difference(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> tuple[float, str]:
    """Of any element, relative to the largest of its tensor; and where."""
    worst, where = 0.0, ""
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        scale = want.double().abs().max().clamp(min=1e-30)
        difference = float(
            ((found[name].double() - want.double()).abs().max() / scale).nan_to_num(
                nan=float("inf")
            )
        )
        if difference > worst:
            worst, where = difference, name
    return worst, where
