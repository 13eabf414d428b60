"""Run by every rank: trains models that draw random numbers, as ``randomness="global"`` draws them.

``random_worker.py FOLDER CASE…``: a case is ``KIND@PLAN``, with ``/MICRO`` for a micro-batch,
``+own`` for a loop of the script's own, ``+quit`` and ``+resume`` for a training in two parts.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import ronde
from ronde.run.parts import Parts

WIDTH = 8
WARNINGS: list[str] = []


def _warn(parts, text, differs=False):
    if "another number of workers" in text:
        WARNINGS.append(text)


class Attention(nn.Module):
    def __init__(self, eager):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.heads, self.eager = 2, eager

    def forward(self, x):
        n, tokens, _ = x.shape
        q, k, v = (
            layer(x).view(n, tokens, self.heads, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        p = 0.2 if self.training else 0.0
        if self.eager:
            mixed = F.dropout((q @ k.mT / 2).softmax(-1), p) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(n, tokens, -1))


class Layer(nn.Module):
    def __init__(self, eager):
        super().__init__()
        self.attention, self.norm = Attention(eager), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        inner = self.attention(self.norm(x))
        keep = x.new_empty(len(x), 1, 1).bernoulli_(0.8)  # stochastic depth
        x = x + self.drop(inner) * keep / 0.8
        return x + self.drop(self.down(self.drop(F.relu(self.up(x)))))


class Layers(nn.Module):
    """Noise, layers with dropout of four kinds, RReLU. With ``torch``'s own layers, sequences
    first.
    """

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.inside = nn.Linear(3, WIDTH)
        self.layers = nn.ModuleList([Layer(kind == "eager") for _ in range(2)])
        self.torch = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.2) if kind == "torch" else None
        self.multi = nn.MultiheadAttention(WIDTH, 2, 0.2) if kind == "torch" else None
        self.outside = nn.Linear(WIDTH, 1)

    def forward(self, x):
        x = self.inside(x)
        x = x + 0.1 * torch.randn_like(x)
        for layer in self.layers:
            if self.kind.startswith("again"):
                x = checkpoint(layer, x, use_reentrant=self.kind == "again-reentrant")
            else:
                x = layer(x)
        x = F.rrelu(x, training=True)
        if self.torch is not None:
            x = self.torch(x.transpose(0, 1))
            x = (x + self.multi(x, x, x)[0]).transpose(0, 1)
        return self.outside(x.mean(1))


class Convolutions(nn.Module):
    """Two views of each image in one batch, dropout of channels and tokens, a scale for all."""

    def __init__(self, kind):
        super().__init__()
        self.first, self.second = nn.Conv1d(6, WIDTH, 1), nn.Linear(WIDTH, 1)

    def forward(self, x):
        x = torch.cat([x, 2 * x])
        x = F.dropout1d(F.relu(self.first(x)), 0.2) * torch.rand(())
        tokens = F.alpha_dropout(x.mT.flatten(0, 1), 0.2, True)
        return self.second(tokens.unflatten(0, (len(x), -1)).mean(1)).view(2, -1, 1).sum(0)


def train(case, folder):
    what, _, flags = case.partition("+")
    kind, plan = what.split("@")
    plan, _, micro = plan.partition("/")
    torch.manual_seed(3)
    model = (Convolutions if kind == "views" else Layers)(kind)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    numbers = torch.Generator().manual_seed(5)
    samples = [torch.randn(*s, generator=numbers) for s in ((20, 6, 3), (20, 1))]
    if flags in ("quit", "resume"):
        os.environ["RONDE_RUNS"] = str(folder / "runs")
        os.environ["RONDE_RESUME"] = "1" if flags == "resume" else "0"
    run = ronde.distribute(
        model,
        optimizer,
        TensorDataset(*samples),
        loss=F.mse_loss,
        batch_size=7,  # 7, 7 and 6 of 20, shared by 2 and 3
        micro_batch=int(micro) if micro else None,
        plan=plan,
        randomness="global",
        name="run",
        save_every=2,
    )
    losses = []
    for _ in run.epochs(2):
        for batch in run.batches():
            if flags == "own":
                micros = batch if micro else [batch]
                for x, y in micros:
                    run.backward(F.mse_loss(run.model(x), y))
                losses.append(float(run.update()))
            else:
                losses.append(float(run.step(batch)))
            if flags == "quit" and run.state.step == 2:
                run.save()
                return
    assert not WARNINGS, WARNINGS
    run.export(folder / f"{case.replace('/', '_')}.safetensors")
    if run.is_main:
        file = folder / f"{case.replace('/', '_')}.losses"
        save_file({"losses": torch.tensor(losses)}, file)


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    os.environ["RONDE_RUNS"] = "none"
    Parts.warn = _warn
    for case in sys.argv[2:]:
        train(case, Path(sys.argv[1]))
