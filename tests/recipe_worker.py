"""Train on a table that a recipe prepares: ``recipe_worker.py FOLDER RECIPE OUT STEPS``.

Stops after STEPS steps of the second epoch where STEPS is not 0; the run directory is FOLDER/runs.
"""

import sys
from pathlib import Path

import torch

import ronde
from ronde import feed

folder, recipe, out, steps = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])

torch.manual_seed(0)
data = feed.table(
    folder / "train*.parquet", recipe=feed.Recipe.read(recipe), cache=folder / "cache"
)


class Net(torch.nn.Module):
    def __init__(self, numbers, sizes):
        super().__init__()
        self.embeddings = torch.nn.ModuleList(torch.nn.Embedding(n, 3) for n in sizes)
        self.last = torch.nn.Linear(numbers + 3 * len(sizes), 1)

    def forward(self, inputs):
        numbers, codes = inputs
        parts = [e(codes[:, i]) for i, e in enumerate(self.embeddings)]
        return self.last(torch.cat([numbers.double(), *parts], 1))[:, 0]


def loss(output, target):
    return torch.nn.functional.binary_cross_entropy_with_logits(output, target.double())


model = Net(len(data.source.numeric), data.source.sizes).double()
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
run = ronde.distribute(model, optimizer, data, loss=loss, batch_size=16)
done = 0
for epoch in run.epochs(2):
    for batch in run.batches():
        run.step(batch)
        done += 1
        if done == steps:
            run.save()
            sys.exit(0)
run.export(out)
