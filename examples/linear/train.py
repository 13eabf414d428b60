"""Linear, logistic, or softmax regression on the columns that prepare.yaml names."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import ronde
from ronde import feed

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--data", default="train.parquet", help="Parquet, CSV, or Arrow")
parser.add_argument("--valid", default="valid.parquet", help="the same, held out")
parser.add_argument("--prepare", default="prepare.yaml", help="how columns become numbers")
parser.add_argument("--classes", type=int, default=2, help="of the target; 0: it is a number")
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--batch", type=int, default=64, help="rows in a training step")
parser.add_argument("--lr", type=float, default=0.02)
parser.add_argument("--l2", type=float, default=1e-3, help="penalty of the squared weights")
args = parser.parse_args()


class Linear(nn.Module):
    """A weight for each number, and one for each value of each category."""

    def __init__(self, numbers, levels, outputs):
        super().__init__()
        self.numbers = nn.Linear(numbers, outputs)
        self.levels = nn.ModuleList(nn.Embedding(n, outputs) for n in levels)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, numbers, codes):
        columns = zip(self.levels, codes.unbind(1), strict=True)
        return self.numbers(numbers) + sum(level(code) for level, code in columns)


def forward(model, batch):
    inputs, target = batch
    numbers, codes = inputs if train.source.sizes else (inputs, torch.empty(len(inputs), 0).long())
    return model(numbers, codes), target


def squared_error(output, target):
    return F.mse_loss(output[:, 0], target)


def accuracy(output, target):
    return (output.argmax(1) == target).float()


recipe = feed.Recipe.read(args.prepare).fit(args.data)  # kept in every checkpoint
train, valid = (feed.table(files, recipe=recipe) for files in (args.data, args.valid))
torch.manual_seed(0)
model = Linear(len(train.source.numeric), train.source.sizes, args.classes or 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.l2)
run = ronde.distribute(
    model, optimizer, train, forward=forward, batch_size=args.batch,
    loss=F.cross_entropy if args.classes else squared_error,
)  # fmt: skip
for _ in run.epochs(args.epochs):
    for batch in run.batches():
        run.step(batch)
    run.evaluate(valid, metrics={"accuracy": accuracy} if args.classes else {})
