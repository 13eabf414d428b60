"""Run by every rank: two trainings in one loop, with Ronde or in plain PyTorch.

``several_worker.py CASES FOLDER [KILL]``: CASES are kinds of loops, separated by ``/``, each with a
plan after ``@`` or ``plain``; each writes its losses and weights to FOLDER. KILL is ``step:N``
(after N steps of both runs) or ``save:N`` (inside the Nth checkpoint, between the files of the
first run and those of the second).
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import ronde

FOLDER = Path(sys.argv[2])
KILL = sys.argv[3] if len(sys.argv) > 3 else ""
KIND, OUT = "", FOLDER
EPOCHS = 3
losses: dict[str, dict[int, float]] = {"D": {}, "G": {}}


class Rows(Dataset):
    """A sample, its noise and a place between the two, each a function of its index."""

    def __init__(self, n: int = 37) -> None:
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        draw = torch.randn(9, generator=g, dtype=torch.float64)
        return draw[:5], draw[5:8], draw[8:].sigmoid()


def networks():
    torch.manual_seed(1)
    critic = nn.Sequential(
        nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 1)
    )
    generator = nn.Sequential(nn.Linear(3, 12), nn.Tanh(), nn.Linear(12, 5))
    if KIND == "norm":
        generator.insert(1, nn.BatchNorm1d(12))
        critic.insert(3, nn.BatchNorm1d(12))
    return critic.double(), generator.double()


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.5, 0.99), eps=1e-3)


def note(name, step, loss):
    losses[name][step] = float(loss.detach())


# -- the losses: of the discriminator, and of the generator --------------------------------


def ones(logits):
    return F.binary_cross_entropy_with_logits(logits, torch.ones_like(logits))


def zeros(logits):
    return F.binary_cross_entropy_with_logits(logits, torch.zeros_like(logits))


def penalty(critic, real, fake, place):
    between = (place * real + (1 - place) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return 10 * ((slope.norm(2, dim=1) - 1) ** 2).mean()


def critic_loss(critic, real, fake, place):
    if KIND == "wgan":
        return critic(fake).mean() - critic(real).mean() + penalty(critic, real, fake, place)
    return ones(critic(real)) + zeros(critic(fake))


def generator_loss(critic, fake):
    return -critic(fake).mean() if KIND == "wgan" else ones(critic(fake))


# -- plain PyTorch -------------------------------------------------------------------------


def plain() -> None:
    critic, generator = networks()
    of_d, of_g = adam(critic), adam(generator)
    data, noise = Rows(), Rows(23)
    d = g = 0

    def batches(rows, size):
        return [
            tuple(map(torch.stack, zip(*(rows[i] for i in range(low, min(low + size, len(rows)))))))
            for low in range(0, len(rows), size)
        ]

    for _ in range(EPOCHS):
        pairs = [(b, b) for b in batches(data, 8)]
        if KIND == "zip":
            pairs = list(zip(batches(data, 8), batches(noise, 6)))
        for (real, z, place), (_, z_g, _) in pairs:
            fake = generator(z)
            of_d.zero_grad()
            loss = critic_loss(critic, real, fake.detach(), place)
            loss.backward()
            of_d.step()
            d += 1
            note("D", d, loss)
            if KIND == "wgan" and d % 3:
                continue
            if KIND == "zip":
                fake = generator(z_g)
            for _ in range(2 if KIND == "twice" else 1):
                fake = generator(z) if KIND == "twice" else fake
                of_g.zero_grad()
                loss = generator_loss(critic, fake)
                loss.backward()
                of_g.step()
                g += 1
                note("G", g, loss)
    finish(critic, generator)


def finish(critic, generator) -> None:
    weights = {
        name: [p.tolist() for p in model.state_dict().values()]
        for name, model in (("D", critic), ("G", generator))
    }
    OUT.write_text(json.dumps({"losses": losses, "weights": weights}))


# -- the same with Ronde -------------------------------------------------------------------


def start(**options):
    critic, generator = networks()
    options.setdefault("sync_batchnorm", KIND == "norm")
    # which step is resumed is not left to chance
    common = {"shuffle": False, "async_save": not KILL.startswith("step"), **options}
    D = ronde.distribute(
        critic, adam(critic), Rows(), loss=ones, forward=lambda m, b: m(b[0]), batch_size=8,
        save_every=2, **common,
    )  # fmt: skip
    shared = KIND != "zip"
    common |= {"shuffle": None} if shared else {"shuffle": False, "batch_size": 6}
    G = ronde.distribute(
        generator, adam(generator), D if shared else Rows(23), name="generator",
        loss=ones, forward=lambda m, b: critic(m(b[1])), **common,
    )  # fmt: skip
    return D, G


def die_in_save(n: int) -> None:
    from ronde.checkpoint import files

    add, calls = files.add, []

    def counted(temporary, name, *rest, **named):
        if name.startswith("generator."):
            calls.append(name)
            if len(calls) == 2 * n - 1:
                os.kill(os.getpid(), signal.SIGKILL)
        return add(temporary, name, *rest, **named)

    files.add = counted


def step_g(D, G, z, fake=None):
    fake = G.model(z) if fake is None else fake
    G.backward(generator_loss(D.model, fake))
    loss = G.update()
    note("G", G.state.step, loss)


def main() -> None:
    how, _, at = KILL.partition(":")
    if how == "save":
        die_in_save(int(at))
    D, G = start()

    def stop():
        if how == "step" and D.state.step + G.state.step >= int(at):
            os.kill(os.getpid(), signal.SIGKILL)

    def train_d(real, z, place):
        fake = G.model(z)
        D.backward(critic_loss(D.model, real, fake.detach(), place))
        loss = D.update()
        note("D", D.state.step, loss)
        stop()
        return fake

    if KIND == "zip":
        for _ in zip(D.epochs(EPOCHS), G.epochs(EPOCHS)):
            for batch, (_, z, _) in zip(D.batches(), G.batches()):
                train_d(*batch)
                step_g(D, G, z)
                stop()
    else:
        for _ in D.epochs(EPOCHS):
            for real, z, place in D.batches():
                fake = train_d(real, z, place)
                if KIND == "wgan" and D.state.step % 3:
                    continue
                for _ in range(2 if KIND == "twice" else 1):
                    step_g(D, G, z, None if KIND == "twice" else fake)
                stop()
    files = {name: FOLDER / f"{KIND}.{name}" for name in "DG"}
    D.export(files["D"])
    G.export(files["G"])
    if D.is_main:
        from safetensors.torch import load_file

        weights = {}
        for name, model in (("D", D.model), ("G", G.model)):
            named = load_file(files[name])
            weights[name] = [named[n].tolist() for n in model.state_dict(keep_vars=True)]
        OUT.write_text(json.dumps({"losses": losses, "weights": weights}))


if __name__ == "__main__":
    for case in sys.argv[1].split("/"):
        KIND, _, plan = case.partition("@")
        OUT = FOLDER / case
        losses = {"D": {}, "G": {}}
        if plan == "plain":
            plain()
            continue
        if plan:
            os.environ["RONDE_PLAN"] = plan
        main()
