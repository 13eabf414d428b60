"""Cases for the equality tests: models, data and losses, and the plain PyTorch loop they are
compared with.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from tiny_models import CNN, DeepLSTM, Norm, Relay, Samples, Transformer, Unused

MODELS = {
    "cnn": CNN,
    "norm": Norm,
    "transformer": Transformer,
    "tokens": Transformer,
    "lstm": DeepLSTM,
    "unused": Unused,
    "handed": Relay,
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

    def model(self) -> nn.Module:
        return MODELS[self.kind]()

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        if not self.schedule:
            return None
        return torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda s: min(1.0, (s + 1) / 5) * 0.97**s
        )

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        torch.manual_seed(7)
        model = self.model().to(getattr(torch, self.dtype))
        if self.optimizer == "sgd":
            optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, weight_decay=0.01)
        else:
            # Two groups: their settings must be kept apart.
            small = [p for p in model.parameters() if p.ndim < 2]
            large = [p for p in model.parameters() if p.ndim >= 2]
            optimizer = torch.optim.AdamW(
                [{"params": large}, {"params": small, "weight_decay": 0.0, "lr": 2e-3}], lr=5e-3
            )
        return model, optimizer, self.scheduler(optimizer)

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
        **{k: v.detach().clone() for k, v in model.state_dict(keep_vars=True).items()},
        "losses": torch.stack(losses),
    }, run


def largest_difference(
    actual: dict[str, torch.Tensor],
    expected: dict[str, torch.Tensor],
    part: bool = False,
    aside: str = "$^",
) -> tuple[float, str]:
    """Of any element, relative to the largest of its tensor; and where.

    ``part``: this is what one worker holds of it. ``aside``: names that are not compared.
    """
    assert part or actual.keys() == expected.keys()
    worst, where = 0.0, ""
    for name, got in actual.items():
        want = expected[name].double()
        apart = (got.double() - want).abs().max() / want.abs().max().clamp(min=1e-30)
        difference = float(apart.nan_to_num(nan=math.inf))
        if difference > worst and not re.search(aside, name):
            worst, where = difference, name
    return worst, where
