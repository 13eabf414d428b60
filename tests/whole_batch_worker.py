"""Run by every rank: a training whose loss is a sum over samples, or relates all samples of the
global batch. Rank 0 writes losses and weights, as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import ronde

out, kind, loop, options = Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]


class Views(torch.utils.data.Dataset):
    """Two views of each sample."""

    def __init__(self, n: int) -> None:
        self.x = torch.randn(n, 6, generator=torch.Generator().manual_seed(1)).double()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int):
        return self.x[i], self.x[i].sin()


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 6))
        self.scale = nn.Parameter(torch.tensor([2.0]))

    def forward(self, x):
        return self.blocks(x)


def nt_xent(a, b, scale):
    z = F.normalize(torch.cat([a, b]), dim=1)
    n = len(a)
    similar = (z @ z.T * scale).masked_fill(torch.eye(2 * n, dtype=torch.bool), -1e9)
    return F.cross_entropy(similar, torch.cat([torch.arange(n, 2 * n), torch.arange(n)]))


def simclr(a, b):
    return nt_xent(run.gather(a), run.gather(b), model.scale)


def views(model, batch):
    return model(batch[0]), model(batch[1])


torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
model = Encoder()
optimizer = torch.optim.SGD(model.parameters(), lr=2e-2, momentum=0.9)
how = {"loss": nn.MSELoss(reduction="sum"), "loss_reduction": "sum"}
if kind == "simclr":
    how = {"loss": simclr, "forward": views}
data, test = Views(41), Views(23)
run = ronde.distribute(
    model, optimizer, data, batch_size=20, clip_norm=5.0, **how, **eval(f"dict({options})")
)
losses = []
for _ in run.epochs(2):
    for batch in run.batches():
        if loop == "step":
            losses.append(float(run.step(batch)))
            continue
        for micro in batch if "micro_batch" in options else [batch]:
            values = views(model, micro) if kind == "simclr" else (model(micro[0]), micro[1])
            run.backward(how["loss"](*values))
        losses.append(float(run.update()))
    losses.append(run.evaluate(test)["loss"])
run.export(out.with_suffix(".safetensors"))
if run.is_main:
    out.write_text(json.dumps(losses))
