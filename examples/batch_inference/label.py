"""Apply a trained network to the rows of a table: a line ``row label`` for each."""

import argparse

import torch
from model import network

import ronde

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--data", default="rows.parquet", help="Parquet, without --items of ronde map")
parser.add_argument("--batch", type=int, default=64, help="rows in a forward pass")
args = parser.parse_args()

model = network()
model.load_state_dict(ronde.weights("digits"))
model.eval()
for chunk in ronde.items(f"rows:{args.data}"):
    with chunk.output("labels.txt") as out, torch.inference_mode():
        for batch in chunk.batches(args.batch):
            images = torch.tensor([row["image"] for _, row in batch])
            for (row, _), label in zip(batch, model(images).argmax(1), strict=True):
                print(row, int(label), file=out)
