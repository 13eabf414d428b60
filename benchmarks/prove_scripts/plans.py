"""Scripts that some plans carry out and others cannot: which must be said, and no other training
come out of it. ``plans.py NAME``.
"""

from __future__ import annotations

import copy
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import ronde

NAME = sys.argv[1]
torch.manual_seed(0)
x, y = torch.randn(44, 8), torch.randint(0, 3, (44,))
data, forward, loss = TensorDataset(x, y), None, F.cross_entropy


class Lists(nn.Module):
    """Blocks that keep what they made in a list and a dictionary of the caller's."""

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 12), nn.GELU())

        def forward(self, x, kept, named):
            x = x + self.inner(x)
            kept.append(x)
            named[len(named)] = x
            return x

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 12)
        self.blocks = nn.ModuleList(self.Keeps() for _ in range(4))
        self.last = nn.Linear(12, 3)

    def forward(self, x):
        x = self.first(x)
        kept, named = [x], {}
        for block in self.blocks:
            x = block(x, kept, named=named)
        assert kept[0] is kept[0] and len(kept) == 5
        return self.last(x + kept[2] * 0.5 + named[0])


class Heads(nn.Module):
    """Which heads are called depends on the samples; the first few know only the first."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.SiLU()) for _ in range(4)])
        self.heads = nn.ModuleList(nn.Linear(8, 3) for _ in range(4))

    def forward(self, x, task):
        x = self.body(x)
        out = x.new_zeros(len(x), 3)
        for k in task.unique().tolist():
            out[task == k] = self.heads[k](x[task == k])
        return out


class Counts(nn.Module):
    """A schedule of its own, by the number of forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 12)
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        if self.training:
            self.passes += 1
        return x + self.inner(x) * (self.passes / 10).clamp(max=1.0)


class Pairs(nn.Module):
    """Every sample against every other."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (
            nn.Linear(8, 6),
            nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 6)),
        )

    def forward(self, x):
        return self.one(x) @ self.other(x).T


class Mapped(nn.Module):
    """Calls layers within torch.func.vmap, with weights that other layers make."""

    def __init__(self) -> None:
        super().__init__()
        self.made, self.inner, self.last = (
            nn.Linear(8, 64),
            nn.Linear(8, 8, bias=False),
            nn.Linear(8, 3),
        )

    def forward(self, x):
        def one(row):
            weight = self.inner.weight + 0.1 * self.made(row).view(8, 8)
            return torch.func.functional_call(self.inner, {"weight": weight}, (row,))

        return self.last(torch.func.vmap(one)(x))


def layers() -> nn.Sequential:
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)], nn.Linear(8, 3)
    )


def checked(out, target):
    if target.max() >= 3:  # a number out of the batch, which a path may depend on
        raise ValueError("three classes")
    return F.cross_entropy(out, target)


def with_task(model, batch):
    return model(batch[0], batch[1]), batch[2]


def smooth(model, batch):
    inputs = batch[0].detach().requires_grad_(True)
    out = model(inputs)
    (slope,) = torch.autograd.grad(out.sum(), inputs, create_graph=True)
    return out, slope, batch[1]


model = {"lists": Lists, "heads": Heads, "pairs": Pairs, "mapped": Mapped}.get(NAME, layers)()
if NAME == "heads":
    data = TensorDataset(x, torch.where(torch.arange(44) < 4, 0, torch.arange(44) % 4), y)
    forward = with_task
elif NAME == "counts":
    model = nn.Sequential(nn.Linear(8, 12), *[Counts() for _ in range(4)], nn.Linear(12, 3))
elif NAME == "pairs":
    forward, loss = (
        (lambda model, batch: (model(batch[0]),)),
        lambda out: F.cross_entropy(out, torch.arange(len(out))),
    )
elif NAME == "checked":
    loss = checked
elif NAME == "early":  # run is not there yet while a plan is laid out
    loss = lambda out, target: (  # noqa: E731
        F.cross_entropy(out, target) + 0.01 * run.state.step * out.square().mean()
    )
elif NAME == "slope":
    forward, loss = (
        smooth,
        lambda out, slope, target: F.cross_entropy(out, target) + slope.square().mean(),
    )
elif NAME == "hooked":
    model[-1].weight.register_hook(lambda gradient: gradient * 2)
average = copy.deepcopy(model) if NAME == "average" else None
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
run = ronde.distribute(
    model, optimizer, data, forward=forward, loss=loss, batch_size=12, shuffle=False
)
if NAME == "called":
    other = layers()
    second = ronde.distribute(
        other,
        torch.optim.SGD(other.parameters(), lr=0.01),
        data,
        forward=lambda m, batch: (m(batch[0]) + model(batch[0]).detach(), batch[1]),
        loss=loss,
        batch_size=12,
    )
    second.fit(1)
for _ in run.epochs(2):
    for batch in run.batches():
        run.step(batch)
        with torch.no_grad():
            if NAME == "clipped":
                for p in model.parameters():
                    p.clamp_(-0.2, 0.2)
            if average is not None:
                for a, p in zip(average.parameters(), model.parameters(), strict=True):
                    a.lerp_(p, 0.1)
