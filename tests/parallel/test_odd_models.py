"""Models whose passes are unusual, under plans that divide them: as one process, or refused by name.

Reversible layers (a backward pass of their own), implicit ones (a fixed point whose gradient is
solved for), parameters handed out by modules, key-value caches, and blocks that change their input.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

import ronde
import zygote
from processes import PATHS, TESTS, forked
from sampling import some

WIDTH = 8


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layers):
        a, b = x.chunk(2, -1)
        with torch.no_grad():
            for layer in layers:
                a, b = layer(a, b)
        ctx.layers = layers
        ctx.save_for_backward(a, b)
        return torch.cat([a, b], -1)

    @staticmethod
    def backward(ctx, gradient):
        (a, b), (ga, gb) = ctx.saved_tensors, gradient.chunk(2, -1)
        for layer in reversed(ctx.layers):
            a, b, ga, gb = layer.back(a, b, ga, gb)
        return torch.cat([ga, gb], -1), None


class ReversibleLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = (
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in "fg"
        )

    def forward(self, a, b):
        a = a + self.f(b)
        return a, b + self.g(a)

    def back(self, a, b, ga, gb):
        with torch.enable_grad():
            a = a.detach().requires_grad_()
            g = self.g(a)
            g.backward(gb)
            b = (b - g).detach().requires_grad_()
            ga = ga + a.grad
            f = self.f(b)
            f.backward(ga)
        return (a - f).detach(), b.detach(), ga, gb + b.grad


class Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 2 * WIDTH), nn.Linear(2 * WIDTH, 5)
        self.layers = nn.ModuleList(ReversibleLayer() for _ in range(4))

    def forward(self, x):
        return self.last(_Reversed.apply(self.first(x), self.layers))


class Implicit(nn.Module):
    """A deep equilibrium model (Bai et al. 2019): a hook solves for the fixed point's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(6, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.cell = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.last = nn.Linear(WIDTH, 5)

    def forward(self, x):
        x = self.first(x)

        def once(z):
            return torch.tanh(0.3 * self.cell(z) + x)

        z = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(20):
                z = once(z)
        z = once(z)
        if self.training:
            start = z.detach().clone().requires_grad_()
            end = once(start)

            def solve(gradient):
                found = gradient
                for _ in range(20):
                    found = torch.autograd.grad(end, start, found, retain_graph=True)[0] + gradient
                return found

            z.register_hook(solve)
        return self.last(torch.tanh(self.middle(z)))


class Latents(nn.Module):
    """Hands its own parameter out: as a view, or as it is."""

    def __init__(self, view: bool) -> None:
        super().__init__()
        self.latents, self.view = nn.Parameter(torch.randn(3, WIDTH)), view

    def forward(self, n):
        return self.latents.expand(n, -1, -1) if self.view else self.latents


class Perceiver(nn.Module):
    view = True

    def __init__(self) -> None:
        super().__init__()
        self.latents, self.first = Latents(self.view), nn.Linear(6, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.last = nn.Linear(WIDTH, 5)

    def forward(self, x):
        h, held = torch.tanh(self.first(x)), self.latents(len(x))
        for layer in self.layers:
            held = held + torch.tanh(layer(held)) * h[:, None]
            h = h + held.mean(1)
        return self.last(h)


class Handed(Perceiver):
    view = False


class Cache:
    def __init__(self) -> None:
        self.keys: dict[int, torch.Tensor] = {}

    def update(self, i, key):
        self.keys[i] = torch.cat([self.keys[i], key], 1) if i in self.keys else key
        return self.keys[i]


class CachedBlock(nn.Module):
    """Adds a key to the cache, which its second pass must not find there."""

    def __init__(self, i: int) -> None:
        super().__init__()
        self.i, self.key, self.out = i, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, cache):
        keys = cache.update(self.i, torch.sin(self.key(x))[:, None])
        return x + self.out(torch.tanh(x * keys.sum(1)))


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 5)
        self.blocks = nn.ModuleList(CachedBlock(i) for i in range(3))

    def forward(self, x):
        h, cache = self.first(x), Cache()
        for block in self.blocks:
            h = block(h, cache)
        return self.last(h)


class ChangingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x *= 1.3
        return x + self.b(torch.tanh(self.a(x)))


class Changing(nn.Sequential):
    def __init__(self) -> None:
        blocks = nn.Sequential(*(ChangingBlock() for _ in range(3)))
        super().__init__(nn.Linear(6, WIDTH), blocks, nn.Linear(WIDTH, 5))


MODELS = {m.__name__: m for m in (Reversible, Implicit, Perceiver, Handed, Cached, Changing)}
TWO = [
    ("Reversible", "shard=gradients"),
    ("Reversible", "shard=gradients,recompute=full,micro_batch=2"),
    ("Reversible", "shard=parameters"),
    ("Implicit", "shard=parameters"),
    ("Implicit", "pipeline=2"),
    ("Implicit", "recompute=full"),
    ("Perceiver", "shard=parameters"),
    ("Handed", "pipeline=2"),
    ("Cached", "recompute=full"),
    ("Cached", "shard=parameters,recompute=selective"),
    ("Changing", "recompute=full"),
]
FOUR = [
    ("Perceiver", "pipeline=2,shard=parameters"),
    ("Perceiver", "pipeline=2,shard=gradients"),
    ("Handed", "pipeline=2,shard=parameters"),
    ("Reversible", "pipeline=2,shard=gradients"),
]
REFUSED = {
    ("Reversible", "shard=parameters"): "reversible layers",
    ("Changing", "recompute=full"): "changes a tensor or an object that it is given",
}


def built(kind: str):
    torch.manual_seed(3)
    model = MODELS[kind]().double()
    g = torch.Generator().manual_seed(4)
    x = torch.randn(16, 6, generator=g, dtype=torch.float64)
    data = TensorDataset(x, torch.randint(0, 5, (16,), generator=g))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), data


def plain(kind: str) -> dict[str, torch.Tensor]:
    model, optimizer, data = built(kind)
    for start in (0, 8, 0, 8):
        x, y = data[start : start + 8]
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.state_dict()


def train(kind: str, plan: str, file: Path) -> None:
    model, optimizer, data = built(kind)
    run = ronde.distribute(
        model,
        optimizer,
        data,
        loss=F.cross_entropy,
        plan=plan,
        batch_size=8,
        shuffle=False,
    )
    for _ in range(2):
        for batch in run.batches():
            run.step(batch)
    run.export(file)


@pytest.mark.parametrize(("workers", "cases"), some([(2, TWO), (4, FOUR)], 2))
def test_the_same_training_or_refused_by_name(workers, cases, tmp_path):
    for i, (kind, plan) in enumerate(cases):
        file = tmp_path / f"{i}.safetensors"
        done = zygote.run(
            forked(TESTS / "parallel" / "test_odd_models.py", workers, kind, plan, file),
            env={**os.environ, "PYTHONPATH": PATHS},
            cwd=tmp_path,
            timeout=60,
        )
        if (kind, plan) in REFUSED:
            assert done.returncode and f"PlanError: {plan.split(',')[0].split('=')[0]}" in (
                done.stderr
            ), done.stderr
            assert REFUSED[kind, plan] in done.stderr
            continue
        assert done.returncode == 0, f"{kind} {plan}\n{done.stdout}{done.stderr}"
        found, expected = load_file(file), plain(kind)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert (found[name] - value).abs().max() <= 1e-12, f"{kind} {plan}: {name}"


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
