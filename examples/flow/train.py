"""Train the network. ``ronde tune`` searches over its arguments."""

import argparse

import torch
import torch.nn.functional as F
from model import accuracy, digits, network

import ronde

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--weights", help="write the weights here at the end")
args = parser.parse_args()

torch.manual_seed(0)
model = network()
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
run = ronde.distribute(model, optimizer, digits("train"), loss=F.cross_entropy, batch_size=32)
for _ in run.epochs(args.epochs):
    for batch in run.batches():
        run.step(batch)
    run.evaluate(digits("validation"), metrics={"accuracy": accuracy})
if args.weights:
    run.export(args.weights)
