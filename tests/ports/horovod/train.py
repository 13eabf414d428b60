"""The shape of Horovod's MNIST example, before Horovod."""

import argparse

import net
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import ronde

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--images", type=int, default=1400)
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--dropout", type=float, default=0.5)
parser.add_argument("--lr", type=float, default=0.1)
args = parser.parse_args()

torch.manual_seed(0)
train_loader = DataLoader(net.digits(slice(args.images)), args.batch, shuffle=True)
test_set = net.digits(slice(args.images, args.images + 397))
test_loader = DataLoader(test_set, args.batch)
model = net.Net(args.dropout)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.5)


def accuracy(output, target):
    return (output.argmax(1) == target).double()


run = ronde.distribute(model, optimizer, train_loader, loss=F.nll_loss)
for epoch in run.epochs(args.epochs):
    for batch_idx, batch in enumerate(run.batches()):
        loss = run.step(batch)
        if batch_idx % 10 == 0:
            run.print(f"epoch {epoch + 1}  step {batch_idx}  loss {loss.item():.4f}")
    run.evaluate(test_loader, {"accuracy": accuracy})
