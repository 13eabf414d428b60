"""The shape of PyTorch's GCN example: the whole graph is the one sample of a step."""

import argparse

import graph
import torch
import torch.nn.functional as F
from accelerate import Accelerator

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=100)
parser.add_argument("--nodes", type=int, default=300)
parser.add_argument("--dropout", type=float, default=0.5)
parser.add_argument("--lr", type=float, default=0.01)
args = parser.parse_args()

accelerator = Accelerator()
torch.manual_seed(0)
values, labels, edges = (part.to(accelerator.device) for part in graph.groups(args.nodes))
order = torch.randperm(args.nodes)
for_test, for_training = order[: args.nodes // 3], order[args.nodes // 3 :]
model = graph.GCN(dropout=args.dropout)
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, weight_decay=5e-4)
model, optimizer = accelerator.prepare(model, optimizer)

for _ in range(args.epochs):
    model.train()
    optimizer.zero_grad()
    loss = F.nll_loss(model(values, edges)[for_training], labels[for_training])
    accelerator.backward(loss)
    optimizer.step()
model.eval()
with torch.no_grad():
    right = model(values, edges).argmax(1)[for_test] == labels[for_test]
accelerator.print(f"evaluate  accuracy {right.double().mean():.4f}")
