"""Classify rows of a table: a transformer looks at the categories (Huang et al. 2020)."""

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
parser.add_argument("--classes", type=int, default=2, help="the target is 0, 1, 2, …")
parser.add_argument("--width", type=int, default=32, help="numbers that describe a category")
parser.add_argument("--layers", type=int, default=3)
parser.add_argument("--heads", type=int, default=4)
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--batch", type=int, default=64, help="rows in a training step")
parser.add_argument("--lr", type=float, default=1e-3)
args = parser.parse_args()


class TabTransformer(nn.Module):
    """Layers of attention between the categories of a row; then a network on all of its columns."""

    def __init__(self, numbers, sizes, classes):
        super().__init__()
        self.columns = nn.ModuleList(nn.Embedding(size, args.width) for size in sizes)
        self.blocks = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(
                args.width, args.heads, 4 * args.width, batch_first=True, norm_first=True
            ),
            args.layers,
            enable_nested_tensor=False,
        )
        self.norm = nn.LayerNorm(numbers)
        inputs = numbers + len(sizes) * args.width
        self.head = nn.Sequential(
            nn.Linear(inputs, 2 * args.width), nn.ReLU(), nn.Linear(2 * args.width, classes)
        )

    def forward(self, numbers, codes):
        columns = zip(self.columns, codes.unbind(1), strict=True)
        rows = self.blocks(torch.stack([column(code) for column, code in columns], 1))
        return self.head(torch.cat([rows.flatten(1), self.norm(numbers)], 1))


def forward(model, batch):
    (numbers, codes), target = batch
    return model(numbers, codes), target


def accuracy(output, target):
    return (output.argmax(1) == target).float()


recipe = feed.Recipe.read(args.prepare).fit(args.data)  # kept in every checkpoint
train, valid = (feed.table(files, recipe=recipe) for files in (args.data, args.valid))
torch.manual_seed(0)
model = TabTransformer(len(train.source.numeric), train.source.sizes, args.classes)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
run = ronde.distribute(
    model, optimizer, train, loss=F.cross_entropy, forward=forward, batch_size=args.batch
)
for _ in run.epochs(args.epochs):
    for batch in run.batches():
        run.step(batch)
    run.evaluate(valid, metrics={"accuracy": accuracy})
