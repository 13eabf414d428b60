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
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import ronde
from ronde.run.step import note_place

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


def plain(make, optimizer, data, loss, prepare=None):
    """One process, whole batches, nothing of Ronde."""
    torch.manual_seed(7)
    model = make().double()
    optimizer = optimizer(model.parameters())
    after, clip = prepare(model) or (None, None) if prepare is not None else (None, None)
    for x, y in zip(*(t.split(BATCH) for t in data), strict=True):
        model.zero_grad()
        value = loss(model(x), y)
        (value[0] / value[1] if isinstance(value, tuple) else value).backward()
        if clip is not None:
            clip()
        optimizer.step()
        if after is not None:
            after()
    return model.state_dict()


def trained(make, optimizer, data, loss, prepare=None, later=None, **options):
    torch.manual_seed(7)
    model = make().double()
    if prepare is not None:
        prepare(model)
    run = ronde.distribute(
        model, optimizer(model.parameters()), TensorDataset(*data), loss=loss, batch_size=BATCH,
        shuffle=False, **options,
    )  # fmt: skip
    after, _ = later(model) or (None, None) if later is not None else (None, None)
    for batch in run.batches():
        run.step(batch)
        if after is not None:
            after()
    with run.whole_model() as whole:
        return {k: v.clone() for k, v in whole.state_dict().items()}


def same(name, actual, expected, bound=1e-12):
    for key, want in expected.items():
        off = (actual[key] - want).abs().max() / want.abs().max().clamp(min=1e-30)
        assert off <= bound, f"{name}: {key} is {off:.1e} off"


def sparse_gradients():
    data, sgd = pairs(), lambda p: torch.optim.SGD(p, 0.3)
    for optimizer, loss, options in (
        (sgd, F.mse_loss, {}),
        (sgd, weighted, {"micro_batch": 2}),
        (sparse_adam, weighted, {"plan": "shard=optimizer"}),
    ):
        want = plain(Factors, optimizer, data, loss)
        actual = trained(Factors, optimizer, data, loss, **options)
        same(f"sparse {options}", actual, want)


def sparse_adam(parameters):
    bias, *sparse = parameters
    bias.requires_grad_(False)  # its gradient is dense
    return torch.optim.SparseAdam(sparse, 0.03)


def net():
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def clamp_and_sign(model):
    first, *_, last = model.parameters()
    first.register_hook(lambda g: g.clamp(-0.05, 0.05))

    def half(p):
        p.grad.copy_(p.grad.sign() * p.grad.abs().sqrt())

    last.register_post_accumulate_grad_hook(half)


def hooks_on_gradients():
    x, y = pairs()
    data, sgd = (x.double() - 2.5, y), lambda p: torch.optim.SGD(p, 0.3)
    for loss, options in (
        (F.mse_loss, {}),
        (F.mse_loss, {"plan": "shard=optimizer"}),
        (weighted, {"micro_batch": 2}),
        (weighted, {"plan": "pipeline=2"}),
    ):
        want = plain(net, sgd, data, loss, clamp_and_sign)
        actual = trained(net, sgd, data, loss, clamp_and_sign, **options)
        same(f"hooks {options}", actual, want)
    actual = trained(net, sgd, data, loss, later=clamp_and_sign, plan="shard")
    same("hooks shard", actual, want)


def two_optimizers():
    x, y = pairs()
    data = x.double() - 2.5, y

    def first(parameters):
        return torch.optim.SGD(list(parameters)[:2], 0.1)

    def second(model):
        return torch.optim.Adam(list(model.parameters())[2:], 0.1).step, None

    want = plain(net, first, data, F.mse_loss, second)
    same("two optimizers", trained(net, first, data, F.mse_loss, later=second), want)


class Waves(nn.Module):
    """Complex weights, and real ones."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(2, 6), nn.Linear(6, 1)
        self.w = nn.Parameter(torch.randn(6, 6, dtype=torch.complex128))

    def forward(self, x):
        return self.b((self.a(x).to(self.w.dtype) @ self.w).abs())

    def double(self):  # would not change what is complex
        self.a.double(), self.b.double()
        return self


def complex_weights():
    x, y = pairs()
    data, sgd = (x.double() - 2.5, y), lambda p: torch.optim.SGD(p, 0.3)

    def clip(model):
        return None, lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    want = plain(Waves, sgd, data, weighted, clip)
    for plan, micro in (("replicate", 2), ("shard", None), ("pipeline=2", None)):
        actual = trained(Waves, sgd, data, weighted, plan=plan, clip_norm=0.1, micro_batch=micro)
        same(f"complex {plan}", actual, want)


class Climb(torch.optim.Optimizer):
    """Sharpness-aware minimization, first half: to the worst point near by (Foret et al. 2021)."""

    def __init__(self, parameters, rho=0.05):
        super().__init__(parameters, {"lr": rho})

    @torch.no_grad()
    def step(self):
        (group,) = self.param_groups
        used = [p for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in used]).norm()
        self.moved = [(p, p.grad * (group["lr"] / (norm + 1e-12))) for p in used]
        for p, by in self.moved:
            p.add_(by)

    @torch.no_grad()
    def back(self):
        for p, by in self.moved:
            p.sub_(by)


def sharpness_aware():
    x, y = pairs()
    x = x.double() - 2.5

    def begin():
        torch.manual_seed(7)
        model = net().double()
        climb = Climb(model.parameters())
        descend = torch.optim.SGD(model.parameters(), 0.3, momentum=0.9)
        descend.register_step_pre_hook(lambda *_: climb.back())
        return model, climb, descend

    model, *optimizers = begin()
    for batch in zip(x.split(BATCH), y.split(BATCH), strict=True):
        for optimizer in optimizers:
            model.zero_grad()
            F.mse_loss(model(batch[0]), batch[1]).backward()
            optimizer.step()
    want = model.state_dict()
    model, climb, descend = begin()
    data = TensorDataset(x, y)
    first = ronde.distribute(
        model, climb, data, loss=F.mse_loss, batch_size=BATCH, shuffle=False, micro_batch=2
    )
    second = ronde.distribute(model, descend, first, loss=F.mse_loss, name="second")
    for batch in first.batches():
        first.step(batch)
        second.step(batch)
    same("sharpness", model.state_dict(), want)


def line_search():
    x, y = pairs()
    x = x.double() - 2.5

    def begin():
        torch.manual_seed(7)
        model = net().double()
        return model, torch.optim.LBFGS(model.parameters(), 0.5, max_iter=3)

    model, lbfgs = begin()
    for batch in zip(x.split(BATCH), y.split(BATCH), strict=True):

        def closure(batch=batch):
            lbfgs.zero_grad()
            loss = F.mse_loss(model(batch[0]), batch[1])
            loss.backward()
            return loss

        lbfgs.step(closure)
    want = model.state_dict()
    model, lbfgs = begin()
    data, still = TensorDataset(x, y), torch.optim.SGD(model.parameters(), lr=0)
    run = ronde.distribute(model, still, data, loss=F.mse_loss, batch_size=BATCH, shuffle=False)
    still = torch.optim.SGD(model.parameters(), lr=0)
    again = ronde.distribute(model, still, run, loss=F.mse_loss, name="again")
    for batch in run.batches():
        run.step(batch)
        lbfgs.step(lambda batch=batch: again.step(batch))
    same("line search", model.state_dict(), want)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(2, 6), nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x):
        h = self.a(x)
        for _ in range(2):
            h = checkpoint(self.b, h, use_reentrant=True)
        return self.c(h)


def notes_of(work):
    try:
        work()
    except Exception as error:
        note_place(error)  # as when it ends the script
        return f"{type(error).__name__}: {error}\n" + "\n".join(error.__notes__)
    raise AssertionError("no error")


def failures():
    x, y = pairs()

    def begin(make, **options):
        model = make().double()
        optimizer = torch.optim.SGD(model.parameters(), 0.3)
        return ronde.distribute(
            model, optimizer, TensorDataset(x.double(), y), loss=F.mse_loss, batch_size=BATCH,
            shuffle=False, **options,
        )  # fmt: skip

    run = begin(net, plan="shard")
    said = notes_of(lambda: [run.model[0].weight * torch.ones(8, 2) for _ in run.batches()])
    assert f"(rank {run.rank}, step 1, epoch 0, {4 - run.rank} samples: indices" in said, said
    assert "That is: the script computes with the model's parameters itself" in said, said
    run = begin(Twice)
    said = notes_of(lambda: [run.step(batch) for batch in run.batches()])
    assert "That is: " in said and "use_reentrant=False" in said, said


CASES = {
    f.__name__: f
    for f in (
        sparse_gradients,
        hooks_on_gradients,
        two_optimizers,
        complex_weights,
        sharpness_aware,
        line_search,
        failures,
    )
}

if __name__ == "__main__":
    warnings.simplefilter("error")
    for name in sys.argv[1:] or CASES:
        CASES[name]()
    if dist.is_initialized():
        dist.barrier()  # rank 0 has the store
