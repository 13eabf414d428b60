"""A factorization machine (Rendle 2010): yes or no, from categories and pairs of them."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import ronde
from ronde import feed

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--data", default="train.parquet", help="Parquet, CSV, or Arrow")
parser.add_argument("--valid", default="valid.parquet", help="the same, held out")
parser.add_argument("--prepare", default="prepare.yaml", help="how columns become codes")
parser.add_argument("--factors", type=int, default=16, help="numbers that describe a category")
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch", type=int, default=64, help="rows in a training step")
parser.add_argument("--lr", type=float, default=5e-3)
parser.add_argument("--l2", type=float, default=1e-3, help="penalty of the squared weights")
args = parser.parse_args()


class FactorizationMachine(nn.Module):
    """A bias, a weight for each category, and a product of factors for each pair of them."""

    def __init__(self, sizes, factors):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))
        self.weight = nn.Embedding(sum(sizes), 1)
        self.factors = nn.Embedding(sum(sizes), factors)
        nn.init.zeros_(self.weight.weight)
        nn.init.normal_(self.factors.weight, std=0.05)
        starts = torch.tensor([0, *sizes[:-1]]).cumsum(0)
        self.register_buffer("starts", starts)

    def forward(self, codes):
        rows = codes + self.starts
        factors = self.factors(rows)
        pairs = (factors.sum(1) ** 2 - (factors**2).sum(1)).sum(1) / 2
        return self.bias + self.weight(rows).sum((1, 2)) + pairs


def loss(output, target):
    return F.binary_cross_entropy_with_logits(output, target.to(output.dtype))


def accuracy(output, target):
    return ((output > 0) == (target > 0)).float()


recipe = feed.Recipe.read(args.prepare).fit(args.data)  # kept in every checkpoint
train, valid = (feed.table(files, recipe=recipe) for files in (args.data, args.valid))
torch.manual_seed(0)
model = FactorizationMachine(train.source.sizes, args.factors)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.l2)
run = ronde.distribute(model, optimizer, train, loss=loss, batch_size=args.batch)
for _ in run.epochs(args.epochs):
    for batch in run.batches():
        run.step(batch)
    run.evaluate(valid, metrics={"accuracy": accuracy})
