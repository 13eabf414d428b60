"""Who leaves? A small network on a table that a fitted recipe prepares while it is read."""

import argparse

import torch
import torch.nn.functional as F

import ronde
from ronde import feed

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--data", default="raw-*.csv")
parser.add_argument("--test", default="test.csv")
parser.add_argument("--recipe", default="prepared/_recipe.json")
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--out", default="churn.safetensors")
args = parser.parse_args()


class Net(torch.nn.Module):
    def __init__(self, numbers: int, sizes: list[int]) -> None:
        super().__init__()
        self.embeddings = torch.nn.ModuleList(torch.nn.Embedding(size, 4) for size in sizes)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(numbers + 4 * len(sizes), 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)
        )

    def forward(self, inputs):
        numbers, codes = inputs
        vectors = [embed(codes[:, i]) for i, embed in enumerate(self.embeddings)]
        return self.layers(torch.cat([numbers, *vectors], 1))[:, 0]


def loss(output, target):
    return F.binary_cross_entropy_with_logits(output, target.float())


def accuracy(output, target):
    return ((output > 0) == (target > 0)).float().mean()


recipe = feed.Recipe.read(args.recipe)
train, test = (feed.table(files, recipe=recipe) for files in (args.data, args.test))
torch.manual_seed(0)
model = Net(len(train.source.numeric), train.source.sizes)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
run = ronde.distribute(model, optimizer, train, loss=loss, batch_size=64)
for _ in run.epochs(args.epochs):
    for batch in run.batches():
        run.step(batch)
    run.evaluate(test, metrics={"accuracy": accuracy})
run.export(args.out)  # weights and recipe in one file
