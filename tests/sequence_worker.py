"""Run by every rank: layers with dropout whose tokens are divided. Writes this rank's masks, and
what it says when a layer is left out.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import ronde


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.5, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(16, 11)
        self.skips = False

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers[: 1 if self.skips else 2]:
            x = layer(x)
        return self.head(x)


torch.manual_seed(0)
model = Encoder().double()
masks: list[list[bool]] = []


def note(_module, _inputs, output):
    if output.requires_grad and model.training:
        masks.append((output == 0).flatten().tolist())


tokens = torch.randint(11, (16, 6))
run = ronde.distribute(
    model,
    torch.optim.AdamW(model.parameters(), lr=1e-2),
    TensorDataset(tokens, tokens),
    loss=lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten()),
    batch_size=8,
    shuffle=False,
    plan="tensor=2,sequence_parallel",
)
model.layers[1].dropout1.register_forward_hook(note)
losses, said = [], ""
for _ in run.epochs(2):
    for batch in run.batches():
        losses.append(float(run.step(batch)))
model.skips = True
try:
    for batch in run.batches():
        run.step(batch)
except ronde.PlanError as error:
    said = str(error)
run.port.parts.place.ended = True
(Path(sys.argv[1]) / f"{run.rank}.json").write_text(json.dumps([masks, losses, said]))
