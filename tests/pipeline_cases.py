"""Models for plans that split the model, and the plain loop that they are compared with. All in
float64, without dropout.

No parameter here has a gradient that is zero in exact arithmetic (a key bias, a bias before
normalisation): AdamW would blow its rounding up.
"""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset

VOCABULARY, LENGTH = 13, 6


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
    def __init__(self, width: int, heads: int, cross: bool = False) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(3 * width, width),
        )
        if cross:
            self.norm3, self.cross = nn.LayerNorm(width), Attention(width, heads)

    def forward(self, x, mask=None, memory=None):
        x = x + self.attention(self.norm1(x), mask=mask)
        if memory is not None:
            x = x + self.cross(self.norm3(x), memory)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def causal(length: int) -> torch.Tensor:
    return torch.ones(length, length, dtype=torch.bool).triu(1)


class GPT(nn.Module):
    """Embedding and head tied."""

    def __init__(self, width: int = 12, layers: int = 4) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, 2) for _ in range(layers))
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


MODELS = {
    m.__name__: m
    for m in (
        MLP,
        Residual,
        UNet,
        GPT,
        EncoderDecoder,
        LSTM,
        Odd,
        Frozen,
        Masked,
        Tables,
        Mixture,
        Dropping,
        Handed,
        Joined,
        Branch,
        Ending,
        Fourier,
        Rescaled,
    )
}


def data(kind: str, n: int) -> Dataset[Any]:
    g = torch.Generator().manual_seed(n)
    if kind in ("Residual", "UNet"):
        x: torch.Tensor = torch.randn(n, 1, 6, 6, generator=g, dtype=torch.float64)
    elif kind in ("GPT", "LSTM", "EncoderDecoder", "Masked"):
        x = torch.randint(VOCABULARY, (n, LENGTH), generator=g)
    else:
        x = torch.randn(n, 6, generator=g, dtype=torch.float64)
    if kind == "GPT":
        return TensorDataset(x, x.roll(-1, 1))
    if kind == "EncoderDecoder":
        return TensorDataset(x, torch.randint(VOCABULARY, (n, LENGTH + 1), generator=g))
    return TensorDataset(x, torch.randint(5, (n,), generator=g))


def forward(model, batch):
    if isinstance(model, EncoderDecoder):
        return model(batch[0], batch[1][:, :-1])["logits"], batch[1][:, 1:]
    return model(batch[0]), batch[1]


def mean_loss(output, target):
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def weighted_loss(output, target):
    """(sum, weight): some samples count for nothing."""
    total = F.cross_entropy(
        output.flatten(0, -2), target.flatten(), ignore_index=1, reduction="sum"
    )
    return total, (target != 1).sum()


def build(case: dict) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(7)
    model = MODELS[case["kind"]]().double()
    if case.get("optimizer") == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01
        )
    else:
        # Two groups: their settings must be kept apart.
        small = [p for p in model.parameters() if p.ndim < 2]
        large = [p for p in model.parameters() if p.ndim >= 2]
        optimizer = torch.optim.AdamW(
            [{"params": large}, {"params": small, "weight_decay": 0.0, "lr": 2e-3}], lr=5e-3
        )
    return (
        model,
        optimizer,
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 5) * 0.97**s),
    )


def plain(case: dict) -> dict[str, torch.Tensor]:
    """By hand: one process, whole batches. Weights, losses, and the loss over the data set at the
    end.
    """
    model, optimizer, scheduler = build(case)
    samples, size, losses = data(case["kind"], case["n"]), case["batch"], []
    loss = weighted_loss if case.get("weighted") else mean_loss
    while len(losses) < case["steps"]:
        for start in range(0, case["n"], size):
            optimizer.zero_grad()
            value = loss(*forward(model, samples[start : start + size]))
            if isinstance(value, tuple):
                value = value[0] / value[1]
            value.backward()
            if case.get("clip"):
                nn.utils.clip_grad_norm_(model.parameters(), case["clip"])
            optimizer.step()
            scheduler.step()
            losses.append(value.detach())
            if len(losses) == case["steps"]:
                break
    model.eval()
    with torch.no_grad():
        value = loss(*forward(model, samples[:]))
    if isinstance(value, tuple):
        value = value[0] / value[1]
    state = {k: v.detach().clone() for k, v in model.state_dict().items()}
    return {**state, "losses": torch.stack(losses), "evaluation": value}


def by_ronde(case: dict) -> tuple[dict[str, torch.Tensor], Any]:
    """The same through ronde.distribute: what this worker holds at the end."""
    import ronde

    case = copy.deepcopy(case)
    model, optimizer, scheduler = build(case)
    run = ronde.distribute(
        model,
        optimizer,
        data(case["kind"], case["n"]),
        loss=weighted_loss if case.get("weighted") else mean_loss,
        forward=forward,
        batch_size=case["batch"],
        shuffle=False,
        scheduler=scheduler,
        clip_norm=case.get("clip"),
        plan=case["plan"],
        split_at=case.get("split_at"),
        precision=case.get("precision", "fp32"),
    )
    losses: list[torch.Tensor] = []
    for _ in run.epochs(10_000):
        for batch in run.batches():
            losses.append(run.step(batch).double())
            if len(losses) == case["steps"]:
                break
        if len(losses) == case["steps"]:
            break
    evaluated = run.evaluate(data(case["kind"], case["n"]))["loss"]
    held = {}
    for name, value in model.state_dict().items():
        if run.port.strategy.owns(name):
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            held[name] = value.detach().clone()
    return {
        **held,
        "losses": torch.stack(losses),
        "evaluation": torch.tensor(evaluated, dtype=torch.float64),
    }, run


def largest_difference(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> tuple[float, str]:
    """Of any element that was found, relative to the largest of its tensor; and where."""
    worst, where = 0.0, ""
    for name, got in found.items():
        want = expected[name]
        scale = want.double().abs().max().clamp(min=1e-30)
        difference = float(
            ((got.double() - want.double()).abs().max() / scale).nan_to_num(nan=float("inf"))
        )
        if difference > worst:
            worst, where = difference, name
    return worst, where
