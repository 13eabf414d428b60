"""The shape of PyTorch's GCN example: the whole graph is the one sample of a step."""

import argparse

import graph
import torch
import torch.nn.functional as F

import ronde

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=100)
parser.add_argument("--nodes", type=int, default=300)
parser.add_argument("--dropout", type=float, default=0.5)
parser.add_argument("--lr", type=float, default=0.01)
args = parser.parse_args()

torch.manual_seed(0)
values, labels, edges = graph.groups(args.nodes)
order = torch.randperm(args.nodes)
for_test, for_training = order[: args.nodes // 3], order[args.nodes // 3 :]
model = graph.GCN(dropout=args.dropout)
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, weight_decay=5e-4)


def forward(model, nodes):
    chosen = nodes[0]
    return model(values, edges)[chosen], labels[chosen]


def accuracy(output, target):
    return (output.argmax(1) == target).double().mean()


run = ronde.distribute(
    model, optimizer, [for_training], loss=F.nll_loss, forward=forward, batch_size=1
)
for _ in run.epochs(args.epochs):
    for batch in run.batches():
        run.step(batch)
run.evaluate([for_test], {"accuracy": accuracy})
