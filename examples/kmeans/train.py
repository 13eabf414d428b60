"""Clusters of a table's rows: k-means by batches, each center drawn to the rows nearest to it."""

import argparse

import pandas
import torch
from pyarrow import dataset
from torch import nn

import ronde
from ronde import feed

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--data", default="train.parquet", help="Parquet, CSV, or Arrow: a file")
parser.add_argument("--clusters", type=int, default=10)
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--batch", type=int, default=256, help="rows in a training step")
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--out", default="centers.csv", help="in the units of the table")
args = parser.parse_args()


class Centers(nn.Module):
    """The squared distance of each row to each center."""

    def __init__(self, rows):
        super().__init__()
        self.centers = nn.Parameter(rows.clone())

    def forward(self, rows):
        return (rows.unsqueeze(1) - self.centers).square().sum(2)


def nearest(distances):
    return distances.min(1).values.mean()


names = dataset.dataset(args.data, format=args.data.rpartition(".")[2]).schema.names
rows = feed.table(args.data, numeric=names, normalize=True)
draw = torch.Generator().manual_seed(0)
first = torch.randperm(len(rows), generator=draw)[: args.clusters].tolist()
model = Centers(torch.stack([rows[i][0] for i in first]))
run = ronde.distribute(
    model, torch.optim.Adam(model.parameters(), lr=args.lr), rows, loss=nearest,
    forward=lambda model, batch: (model(batch[0]),), batch_size=args.batch,
)  # fmt: skip
for _ in run.epochs(args.epochs):
    for batch in run.batches():
        run.step(batch)
    run.evaluate(rows)

with run.whole_model() as whole:
    mean, std = (torch.tensor(v).float() for v in (rows.source.mean, rows.source.std))
    centers = whole.centers.detach().float().cpu() * std + mean
if run.is_main:
    pandas.DataFrame(centers.numpy(), columns=names).to_csv(args.out, index=False)
