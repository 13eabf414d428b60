"""Linear, logistic, or softmax regression on a table, as the target's column asks for."""

import argparse

import torch
import torch.nn.functional as F
from pyarrow import dataset, types
from torch import nn

import ronde
from ronde import feed

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--data", default="train.parquet", help="Parquet, CSV, or Arrow: a file")
parser.add_argument("--valid", default="valid.parquet", help="the same, held out")
parser.add_argument("--target", default="target", help="the column to predict")
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


table = dataset.dataset(args.data, format=args.data.rpartition(".")[2])
columns = [field for field in table.schema if field.name != args.target]
texts = [f.name for f in columns if types.is_string(f.type) or types.is_large_string(f.type)]
numbers = [f.name for f in columns if f.name not in texts]
train = feed.table(
    args.data, numeric=numbers, categorical=texts, target=args.target, normalize=True
)
valid = feed.table(args.valid, like=train, target=args.target)


def forward(model, batch):
    inputs, target = batch
    numbers, codes = inputs if texts else (inputs, torch.empty(len(inputs), 0).long())
    return model(numbers, codes), target


def squared_error(output, target):
    return F.mse_loss(output[:, 0], target)


def accuracy(output, target):
    return (output.argmax(1) == target).float()


target = table.to_table(columns=[args.target])[0]
is_class = not types.is_floating(target.type)
outputs = len(target.unique()) if is_class else 1
torch.manual_seed(0)
model = Linear(len(numbers), train.source.sizes, outputs)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.l2)
run = ronde.distribute(
    model, optimizer, train, forward=forward, batch_size=args.batch,
    loss=F.cross_entropy if is_class else squared_error,
)  # fmt: skip
for _ in run.epochs(args.epochs):
    for batch in run.batches():
        run.step(batch)
    run.evaluate(valid, metrics={"accuracy": accuracy} if is_class else {})
