"""Train the network whose weights label.py gets."""

import argparse

import torch
from model import network
from pyarrow import parquet

import ronde

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=5)
args = parser.parse_args()

rows = parquet.read_table("rows.parquet").to_pydict()
data = torch.utils.data.TensorDataset(torch.tensor(rows["image"]), torch.tensor(rows["label"]))
torch.manual_seed(0)
model = network()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loss = torch.nn.functional.cross_entropy
run = ronde.distribute(model, optimizer, data, loss=loss, batch_size=128)
for _ in run.epochs(args.epochs):
    for batch in run.batches():
        run.step(batch)
