"""Models for plans that split the model, and the plain loop that they are compared with. All in
float64, without dropout.

No parameter here has a gradient that is zero in exact arithmetic (a key bias, a bias before
normalisation): AdamW would blow its rounding up.
"""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import zygote
from processes import PATHS, TESTS, forked
from sampling import ALL
from tiny_models import (
    GPT,
    LENGTH,
    LSTM,
    MLP,
    VOCABULARY,
    Branch,
    Dropping,
    EncoderDecoder,
    Ending,
    Fourier,
    Frozen,
    Handed,
    Joined,
    Masked,
    Mixture,
    Odd,
    Rescaled,
    Residual,
    Switch,
    Tables,
    Tasks,
    UNet,
)

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
        Switch,
        Tasks,
    )
}


def data(kind: str, n: int, length: int = LENGTH) -> Dataset[Any]:
    g = torch.Generator().manual_seed(n)
    if kind in ("Residual", "UNet"):
        x: torch.Tensor = torch.randn(n, 1, 6, 6, generator=g, dtype=torch.float64)
    elif kind in ("GPT", "LSTM", "EncoderDecoder", "Masked"):
        x = torch.randint(VOCABULARY, (n, length), generator=g)
    else:
        x = torch.randn(n, 6, generator=g, dtype=torch.float64)
    if kind == "GPT":
        return TensorDataset(x, x.roll(-1, 1))
    if kind == "EncoderDecoder":
        return TensorDataset(x, torch.randint(VOCABULARY, (n, length + 1), generator=g))
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
    averaged = [p.detach().clone() for p in model.parameters()]
    samples, size, losses = (
        data(case["kind"], case["n"], case.get("length", LENGTH)),
        case["batch"],
        [],
    )
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
            torch._foreach_lerp_(averaged, [p.detach() for p in model.parameters()], 0.1)
            losses.append(value.detach())
            if len(losses) == case["steps"]:
                break
    model.eval()
    with torch.no_grad():
        value = loss(*forward(model, samples[:]))
    if isinstance(value, tuple):
        value = value[0] / value[1]
    state = {k: v.detach().clone() for k, v in model.state_dict().items()}
    state |= {"losses": torch.stack(losses), "evaluation": value}
    if case.get("average"):
        with torch.no_grad():
            for p, average in zip(model.parameters(), averaged, strict=True):
                p.copy_(average)
            value = loss(*forward(model, samples[:]))
        state["averaged"] = value[0] / value[1] if isinstance(value, tuple) else value
    return state


def by_ronde(case: dict) -> tuple[dict[str, torch.Tensor], Any]:
    """The same through ronde.distribute: what this worker holds at the end."""
    import ronde

    case = copy.deepcopy(case)
    model, optimizer, scheduler = build(case)
    run = ronde.distribute(
        model,
        optimizer,
        data(case["kind"], case["n"], case.get("length", LENGTH)),
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
    average = run.average(decay=0.9) if case.get("average") else None
    losses: list[torch.Tensor] = []
    for _ in run.epochs(10_000):
        for batch in run.batches():
            losses.append(run.step(batch).double())
            if len(losses) == case["steps"]:
                break
        if len(losses) == case["steps"]:
            break
    evaluated = run.evaluate(data(case["kind"], case["n"], case.get("length", LENGTH)))["loss"]
    held = {}
    if average is not None:
        with average.applied():
            value = run.evaluate(
                data(case["kind"], case["n"], case.get("length", LENGTH)), name="averaged"
            )["loss"]
            held["averaged"] = torch.tensor(value, dtype=torch.float64)
        with run.whole_model() as whole:
            held |= {k: v.detach().clone() for k, v in whole.state_dict().items()}
    for name, value in model.state_dict(keep_vars=True).items():
        if run.port.strategy.owns(name):
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            held[name] = value.detach().clone()
    return {
        **held,
        "losses": torch.stack(losses),
        "evaluation": torch.tensor(evaluated, dtype=torch.float64),
    }, run


def launch(
    cases: list[dict], workers: int, folder: Path, worker: str = "pipeline_worker.py", *imports: str
) -> Path:
    """Train on so many real processes; the folder in which each rank wrote what it holds."""
    listing, out = folder / "cases.json", folder / "out"
    out.mkdir()
    listing.write_text(json.dumps(cases))
    names = ["torch.distributed.pipelining", *imports]
    done = zygote.run(
        forked(TESTS / worker, workers, listing, out, imports=names),
        env={**os.environ, "PYTHONPATH": PATHS},
        cwd=folder,
        timeout=560 if ALL else 170,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out
