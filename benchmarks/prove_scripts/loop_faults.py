"""Planted faults of a fifth kind: what the loop does to a batch, rows that are not the samples asked
for, and what each rank does after a step: ``loop_faults.py NAME``.
"""

from __future__ import annotations

import sys
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiated
import torch.nn.functional as F
from torch import nn

import ronde

FAULT = sys.argv[1]
ME = ronde.world()
DRAWN = torch.Generator().manual_seed(0)
X, Y = torch.randn(41, 6, generator=DRAWN), torch.randint(0, 3, (41,), generator=DRAWN)
DATA = torch.utils.data.TensorDataset(X, Y)
torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
SGD = torch.optim.SGD(MODEL.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
GIVEN = {"loss": F.cross_entropy, "batch_size": 8}


def train(change=lambda x, y: (x, y), after=lambda run: None, data=DATA, model=MODEL, by=SGD):
    run = ronde.distribute(model, by, data, **GIVEN)
    for _ in run.epochs(3):
        for x, y in run.batches():
            run.step(change(x, y))
            after(run)


# -- what the loop does to the batch -----------------------------------------------------


def flip_mixes() -> None:
    train(lambda x, y: (0.7 * x + 0.3 * x.flip(0), y))


def in_place_mixes() -> None:
    train(lambda x, y: (x.mul_(0.7).add_(0.3 * x.roll(1, 0)), y))


def standardizes() -> None:
    train(lambda x, y: ((x - x.mean(0)) / (x.std(0, correction=0) + 0.1), y))


def drawn_partners() -> None:
    def mix(x, y):
        part, order = float(np.random.beta(1, 1)), torch.randperm(len(x))
        return part * x + (1 - part) * x[order], y

    train(mix)


def targets_mixed() -> None:
    """Only the targets: no input of the model differs."""
    GIVEN["loss"] = lambda out, y: F.cross_entropy(out, y)
    train(lambda x, y: (x, 0.7 * F.one_hot(y, 3).double() + 0.3 * F.one_hot(y.flip(0), 3).double()))


def keeps_hard_half() -> None:
    """The half of the rows whose loss is largest."""

    def hard(x, y):
        loss = F.cross_entropy(MODEL(x), y, reduction="none")
        kept = loss.topk(-(-len(y) // 2)).indices
        return x[kept], y[kept]

    train(hard)


def last_batch_blended() -> None:
    """With what the loop kept of the batch before."""
    kept: list[torch.Tensor] = []

    def blend(x, y):
        before = kept.pop() if kept else x
        kept.append(x)
        n = min(len(x), len(before))
        return torch.cat([0.7 * x[:n] + 0.3 * before[:n], x[n:]]), y

    train(blend)


def own_loop_mixes() -> None:
    run = ronde.distribute(MODEL, SGD, DATA, **GIVEN)
    for _ in run.epochs(3):
        for x, y in run.batches():
            run.backward(F.cross_entropy(MODEL(0.7 * x + 0.3 * x.flip(0)), y))
            run.update()


def scaled_by_rank() -> None:
    train(lambda x, y: (x * (1 + 0.1 * ME.rank), y))


# -- the rows ------------------------------------------------------------------------------


def drops_rows() -> None:
    def collate(samples):
        kept = [s for s in samples if s[0][0] > 0] or samples[:1]
        return torch.utils.data.default_collate(kept)

    loader = torch.utils.data.DataLoader(DATA, 8, collate_fn=collate)
    GIVEN["batch_size"] = None
    train(data=loader)


def keeps_longest() -> None:
    """One row a batch fewer: of the share, and of the whole batch."""

    def collate(samples):
        kept = sorted(samples, key=lambda s: -float(s[0].sum()))[: max(1, len(samples) - 1)]
        return torch.utils.data.default_collate(kept)

    loader = torch.utils.data.DataLoader(DATA, 8, collate_fn=collate)
    GIVEN["batch_size"] = None
    train(data=loader)


class Divided(torch.utils.data.Dataset):
    """Each rank keeps its part."""

    def __init__(self):
        at = torch.arange(ME.rank, 40, ME.size)
        self.x, self.y = X[at], Y[at]

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Streamed(torch.utils.data.IterableDataset):
    def __len__(self):
        return 40

    def __iter__(self):
        size = dist.get_world_size() if dist.is_initialized() else 1
        me = dist.get_rank() if dist.is_initialized() else 0
        yield from ((X[i], Y[i]) for i in range(me, 40, size))


def divides_itself() -> None:
    train(data=Divided())


def stream_divides_itself() -> None:
    train(data=Streamed())


def same_index() -> None:
    """As long as ever, but rank 1 gives other samples under an index."""

    class Other(Divided):
        def __len__(self):
            return 41

        def __getitem__(self, i):
            at = (i + 20 * ME.rank) % 41
            return X[at], Y[at]

    train(data=Other())


# -- ranks that differ ---------------------------------------------------------------------


def decay_of_rank_1() -> None:
    run = ronde.distribute(MODEL, SGD, DATA, **GIVEN)
    if ME.rank == 1:
        SGD.param_groups[0]["weight_decay"] = 0.02
    run.fit(3)


def momentum_after_step_2() -> None:
    def after(run):
        if run.rank == 1 and run.state.step == 2:
            SGD.param_groups[0]["momentum"] = 0.8

    train(after=after)


def rate_of_rank_1() -> None:
    def after(run):
        SGD.param_groups[0]["lr"] = 0.1 / (run.state.step + (run.rank == 1))

    train(after=after)


def state_of_rank_1() -> None:
    """Rank 1 forgets its momentum."""

    def after(run):
        if run.rank == 1 and run.state.step == 3:
            SGD.state.clear()

    train(after=after)


def left_out_update() -> None:
    """Rank 1 leaves one layer out once."""
    step = SGD.step

    def some(*given):
        last = MODEL[2].bias
        if ME.rank == 1 and SGD.state.get(last, {}).get("seen", 0) == 2:
            last.grad = None
        step(*given)
        SGD.state[last]["seen"] = SGD.state[last].get("seen", 0) + 1

    SGD.step = some
    train()


def frozen_on_rank_1() -> None:
    run = ronde.distribute(MODEL, SGD, DATA, **GIVEN)
    if ME.rank == 1:
        del SGD.param_groups[0]["params"][-1]
    run.fit(3)


def alike_on_all() -> None:
    """The gradient is doubled where there are several workers, which nobody sees it ask."""
    group = dist.distributed_c10d.GroupMember

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * (1 if group.WORLD is None else 2)

    GIVEN["forward"] = lambda m, batch: (Doubled.apply(m(batch[0])), batch[1])
    train()


def buffer_of_rank_1() -> None:
    MODEL.register_buffer("seen", torch.zeros(()))

    def after(run):
        MODEL.seen += run.rank

    train(after=after)


# -- names that were wrong -----------------------------------------------------------------


def rate_by_clock() -> None:
    began = time.time() // 1e6 * 1e6  # of its own hour

    def after(run):
        SGD.param_groups[0]["lr"] = 0.1 / (1 + (time.time() - began) * 1e-5)

    train(after=after)


def rate_by_elapsed() -> None:
    began = time.perf_counter()

    def after(run):
        SGD.param_groups[0]["lr"] = 0.1 / (1 + time.perf_counter() - began)

    train(after=after)


def scheduled_by_clock() -> None:
    GIVEN["scheduler"] = torch.optim.lr_scheduler.LambdaLR(
        SGD, lambda step: 0.5 + (time.time() % 1000) / 2000
    )
    train()


def weights_by_clock() -> None:
    def after(run):
        with torch.no_grad():
            MODEL[0].bias.mul_(1 - 1e-9 * (time.time() % 1e6))

    train(after=after)


def broken_off() -> None:
    """Each worker goes to the next epoch by the accuracy of its own samples."""
    run = ronde.distribute(MODEL, SGD, DATA, **GIVEN)
    for _ in run.epochs(6):
        for x, y in run.batches():
            run.step((x, y))
            with torch.no_grad():
                right = (MODEL(x).argmax(1) == y).double().mean()
            if right > 0.7:
                break


def skips_batches() -> None:
    """Batches with a large loss are left out."""
    run = ronde.distribute(MODEL, SGD, DATA, **GIVEN)
    for _ in run.epochs(6):
        for x, y in run.batches():
            with torch.no_grad():
                large = F.cross_entropy(MODEL(x), y) > 1.15
            if not large:
                run.step((x, y))


# -- seen on another number of workers -----------------------------------------------------


class Averaged(nn.Module):
    """Standardizes with the mean of the workers' means."""

    def forward(self, x):
        found = torch.cat([x.mean(0), (x * x).mean(0)])
        if dist.is_initialized():
            found = differentiated.all_reduce(found) / dist.get_world_size()
        mean, square = found.chunk(2)
        return (x - mean) / (square - mean**2 + 1e-3).sqrt()


def even_shares() -> None:
    """Every batch is even."""
    data = torch.utils.data.TensorDataset(X[:40], Y[:40])
    train(data=data, model=nn.Sequential(MODEL[0], Averaged(), *MODEL[1:]))


globals()[FAULT]()
