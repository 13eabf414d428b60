"""Planted faults of a fourth kind, each a small training of its own: ``hidden_faults.py NAME``.
What they do wrong shows late or elsewhere.
"""

from __future__ import annotations

import collections
import dataclasses
import random
import sys

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiated
import torch.nn.functional as F
from torch import nn

import ronde

FAULT = sys.argv[1]


def samples(n: int = 41, seed: int = 0) -> torch.utils.data.TensorDataset:
    drawn = torch.Generator().manual_seed(seed)
    return torch.utils.data.TensorDataset(
        torch.randn(n, 6, generator=drawn), torch.randint(0, 3, (n,), generator=drawn)
    )


def network(*between: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), *between, nn.Tanh(), nn.Linear(8, 3))


def distributed(model: nn.Module, data, **given) -> tuple[torch.optim.Optimizer, ronde.Run]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return optimizer, ronde.distribute(
        model, optimizer, data, **{"loss": F.cross_entropy, "batch_size": 8, **given}
    )


# -- right while all workers have equally many samples ---------------------------------


class Standardised(nn.Module):
    """With the mean of the workers' means."""

    def forward(self, x):
        found = torch.cat([x.mean(0), (x * x).mean(0)])
        if dist.is_initialized():
            found = differentiated.all_reduce(found) / dist.get_world_size()
        mean, square = found.chunk(2)
        return (x - mean) / (square - mean**2 + 1e-3).sqrt()


def hand_synced() -> None:
    distributed(network(Standardised()), samples(63), batch_size=10)[1].fit(3)


def fails_later() -> None:
    """Of the last batch each worker has one sample, which batch normalisation refuses; it was wrong
    before.
    """
    distributed(network(nn.BatchNorm1d(8)), samples(42))[1].fit(3)


def rate_of_means() -> None:
    model = network()
    optimizer, run = distributed(model, samples(63), batch_size=10)
    for _ in run.epochs(3):
        for x, y in run.batches():
            value = F.cross_entropy(model(x), y)
            mean = value.detach().clone()
            if dist.is_initialized():
                dist.all_reduce(mean)
                mean /= dist.get_world_size()
            optimizer.param_groups[0]["lr"] = 0.1 * float(mean)
            run.backward(value)
            run.update()


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = network()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        return self.inner(x) / (1 + 0.01 * self.seen)


def empty_counted() -> None:
    """49 samples in batches of 8: of the last one a worker has none, and is given one that does not
    count.
    """
    model = Counting()
    _, run = distributed(model, samples(49))
    for _ in run.epochs(3):
        for batch in run.batches():
            run.step(batch)
            here = torch.tensor(float(len(batch[0])))
            if dist.is_initialized():
                dist.all_reduce(here)
            model.seen += here


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = network()
        self.register_buffer("centre", torch.zeros(3))

    def forward(self, x):
        out = self.inner(x) - self.centre
        total = torch.cat([out.detach().sum(0), torch.tensor([float(len(out))]).to(out)])
        if dist.is_initialized():
            dist.all_reduce(total)
        self.centre.mul_(0.9).add_(total[:-1] / total[-1], alpha=0.1)
        return out


def empty_exchange() -> None:
    """The model of who has no samples is not called: the others wait for it."""
    _, run = distributed(Centred(), samples(49))
    for _ in run.epochs(3):
        for batch in run.batches():
            run.step(batch)


# -- nothing seeds it ------------------------------------------------------------------


def unseeded_data() -> None:
    data = torch.utils.data.TensorDataset(torch.randn(41, 6), torch.randint(0, 3, (41,)))
    distributed(network(), data)[1].fit(3)


def unseeded_split() -> None:
    train, _ = torch.utils.data.random_split(samples(60), [48, 12])
    distributed(network(), train)[1].fit(3)


def unseeded_target() -> None:
    """A network beside the model, which ronde.distribute does not see."""
    target = nn.Linear(6, 3)
    distributed(
        network(), samples(), forward=lambda m, b: (m(b[0]), target(b[0]).detach()), loss=F.mse_loss
    )[1].fit(3)


def unseeded_rate() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=random.choice([0.1, 0.2, 0.3, 0.4]))
    ronde.distribute(model, optimizer, samples(), loss=F.cross_entropy, batch_size=8).fit(3)


# -- carried from batch to batch -------------------------------------------------------


def own_centres() -> None:
    """Of the loss, with an optimizer that ronde does not know."""
    torch.manual_seed(0)
    centres = nn.Parameter(torch.randn(3, 3))
    theirs = torch.optim.SGD([centres], lr=0.5)
    _, run = distributed(
        network(),
        samples(),
        loss=lambda out, y: F.cross_entropy(out, y) + 0.5 * (out - centres[y]).pow(2).sum(1).mean(),
    )
    for _ in run.epochs(3):
        for batch in run.batches():
            theirs.zero_grad()
            run.step(batch)
            theirs.step()


def remembered_outputs() -> None:
    """By sample, in a dictionary of each process."""
    known: dict[int, torch.Tensor] = {}
    model, data = network(), samples(20)
    numbered = torch.utils.data.TensorDataset(*data.tensors, torch.arange(20))
    _, run = distributed(model, numbered, forward=lambda m, b: (m(b[0]), b[1]))
    for _ in run.epochs(4):
        for x, y, i in run.batches():
            out = model(x)
            before = torch.stack([known.get(int(j), out[r].detach()) for r, j in enumerate(i)])
            run.backward(F.cross_entropy(out, y) + F.mse_loss(out, before))
            run.update()
            known.update({int(j): out[r].detach() for r, j in enumerate(i)})


def seen_temperature() -> None:
    model, seen = network(), 0
    model.temperature = 1.0
    _, run = distributed(model, samples(), forward=lambda m, b: (m(b[0]) / m.temperature, b[1]))
    for _ in run.epochs(3):
        for batch in run.batches():
            run.step(batch)
            seen += len(batch[0])
            model.temperature = 1 / (1 + 0.01 * seen)


class Recurrent(nn.Module):
    """Goes on from where the last batch ended."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.cells, self.head, self.state = nn.GRU(6, 8, batch_first=True), nn.Linear(8, 3), None

    def forward(self, x):
        known = self.state is not None and self.state.shape[1] >= len(x)
        out, state = self.cells(x[:, None], self.state[:, : len(x)] if known else None)
        if self.training:
            self.state = state.detach()
        return self.head(out[:, -1])


def hidden_state() -> None:
    distributed(Recurrent(), torch.utils.data.DataLoader(samples(), 8), batch_size=None)[1].fit(3)


class Remembering(nn.Module):
    """What it has seen in training changes evaluation."""

    def __init__(self):
        super().__init__()
        self.inner, self.mean = network(), torch.zeros(3)

    def forward(self, x):
        out = self.inner(x)
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * out.detach().mean(0)
        return out if self.training else out - self.mean


def kept_for_evaluation() -> None:
    data = samples()
    distributed(Remembering(), data)[1].fit(3, validate=data)


def metric_of_a_probe() -> None:
    """One value for each sample, by a probe that each worker trains on its own."""
    model, data = network(), samples()
    probe = nn.Linear(3, 3)
    theirs = torch.optim.SGD(probe.parameters(), lr=0.1)
    _, run = distributed(model, data)
    for _ in run.epochs(3):
        for x, y in run.batches():
            run.step((x, y))
            theirs.zero_grad()
            F.cross_entropy(probe(model(x).detach()), y).backward()
            theirs.step()
        run.evaluate(
            data, metrics={"probe": lambda out, y: F.cross_entropy(probe(out), y, reduction="none")}
        )


def late_standardise() -> None:
    """Samples are mixed from the second step on: no state, though the first is equal."""
    holds: list[ronde.Run] = []

    def forward(m, batch):
        out = m(batch[0])
        return out + (0.1 * holds[0].state.step if holds else 0.0) * out.mean(0), batch[1]

    _, run = distributed(network(), samples(), forward=forward)
    holds.append(run)
    run.fit(3)


def standardised_evaluation() -> None:
    model, data = network(), samples()
    distributed(
        model,
        data,
        forward=lambda m, b: ((out := m(b[0])) - (0 if m.training else 1) * out.mean(0), b[1]),
    )[1].fit(3, validate=data)


def by_another_name() -> None:
    """It asks for its rank where nobody sees it."""
    group = dist.distributed_c10d

    def forward(m, batch):
        me = group._get_default_group().rank() if group.GroupMember.WORLD is not None else 0
        return m(batch[0]) * (1.0 + me), batch[1]

    distributed(network(), samples(), forward=forward)[1].fit(3)


# -- dropout drops nothing in the proof, but its rate counts ---------------------------


def dropout_by_world() -> None:
    distributed(network(nn.Dropout(0.2 / ronde.world().size)), samples())[1].fit(3)


def dropout_on_rank_0() -> None:
    me = ronde.world()
    distributed(network(nn.Dropout(0.5 if me.rank == 0 and me.size > 1 else 0.0)), samples())[
        1
    ].fit(3)


def lstm_dropout_by_world() -> None:
    model = Recurrent()
    model.cells = nn.GRU(6, 8, 2, dropout=0.4 / ronde.world().size, batch_first=True)
    model.register_forward_pre_hook(lambda module, _: setattr(module, "state", None))
    distributed(model, samples())[1].fit(3)


def functional_dropout() -> None:
    rate = 0.1 * (1 + ronde.world().rank)
    distributed(
        network(),
        samples(),
        forward=lambda m, b: (F.dropout(m(b[0]), rate, training=m.training), b[1]),
    )[1].fit(3)


# -- no numbers ------------------------------------------------------------------------


def evaluating_on_main() -> None:
    """Rank 0 looks at some samples by itself, and trains on in evaluation mode: without dropout."""
    model = nn.Sequential(network(), nn.Dropout(0.5))
    data = samples()
    _, run = distributed(model, data)
    for _ in run.epochs(3):
        if run.is_main:
            model.eval()
            model(data[0][0][None])
        for batch in run.batches():
            run.step(batch)


def dropout_on_rank_1() -> None:
    """One process never calls it."""
    me = ronde.world()
    distributed(
        network(),
        samples(),
        forward=lambda m, b: (F.dropout(m(b[0]), 0.3) if me.rank == 1 else m(b[0]), b[1]),
    )[1].fit(3)


def nothing_but_nan() -> None:
    """A sum, too, which nobody can see."""
    distributed(
        network(),
        samples(),
        loss=lambda out, y: F.cross_entropy(out / (out * 0), y, reduction="sum"),
        on_nan="ignore",
    )[1].fit(3)


def nan_later() -> None:
    model = network()
    _, run = distributed(model, samples(), on_nan="ignore")
    for _ in run.epochs(3):
        for batch in run.batches():
            run.step(batch)
            if run.state.step == 2:
                with torch.no_grad():
                    model[0].weight.fill_(float("nan"))


# -- gradients -------------------------------------------------------------------------


def between_parts(change) -> None:
    model = network()
    _, run = distributed(model, samples(), micro_batch=2)
    for _ in run.epochs(3):
        for parts in run.batches():
            for x, y in parts:
                run.backward(F.cross_entropy(model(x), y))
                norm = float(sum(p.grad.pow(2).sum() for p in model.parameters())) ** 0.5
                for p in model.parameters():
                    change(p, norm)
            run.update()


def scaled_between() -> None:
    between_parts(lambda p, norm: p.grad.mul_(min(1.0, 0.01 / norm)))


def signs_between() -> None:
    between_parts(lambda p, norm: p.grad.data.sign_())


def decay_between() -> None:
    between_parts(lambda p, norm: p.grad.add_(p.detach(), alpha=0.01))


def gradient_noise() -> None:
    model = network()
    _, run = distributed(model, samples())
    for _ in run.epochs(3):
        for x, y in run.batches():
            run.backward(F.cross_entropy(model(x), y))
            for p in model.parameters():
                p.grad.add_(torch.randn_like(p.grad), alpha=0.01)
            run.update()


# -- sound -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    y: torch.Tensor
    name: str = "batch"

    def to(self, *where, **how):
        return dataclasses.replace(self, x=self.x.to(*where, **how), y=self.y.to(*where, **how))


def in_batches_of(kind, forward) -> None:
    """Of single precision, from a file or from numpy."""
    x, y = samples().tensors
    single = torch.utils.data.TensorDataset(torch.from_numpy(x.numpy().astype("float32")), y)

    def collate(rows):
        return kind(x=torch.stack([r[0] for r in rows]), y=torch.stack([r[1] for r in rows]))

    data = torch.utils.data.DataLoader(single, 8, shuffle=True, collate_fn=collate)
    _, run = distributed(network(), data, batch_size=None, forward=forward)
    run.fit(3, validate=data)


def of_a_record() -> None:
    in_batches_of(Batch, lambda m, b: (m(b.x), b.y))


def of_a_mapping() -> None:
    in_batches_of(collections.UserDict, lambda m, b: (m(b["x"]), b["y"]))


globals()[FAULT]()
