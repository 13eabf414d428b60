"""The shape of PyTorch's ImageNet example: step schedule by epoch, validation, best accuracy."""

import argparse

import net
import torch
from torch import nn
from torch.utils.data import DataLoader

import ronde

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=9)
parser.add_argument("--images", type=int, default=1400)
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--lr", type=float, default=0.1)
args = parser.parse_args()

torch.manual_seed(0)
train_set = net.Digits(slice(args.images), augment=True)
val_set = net.Digits(slice(args.images, args.images + 397), augment=False)
train_loader = DataLoader(train_set, args.batch, shuffle=True)
val_loader = DataLoader(val_set, args.batch)
model = net.resnet()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.1)
run = ronde.distribute(model, optimizer, train_loader, loss=criterion, sync_batchnorm=True)
kept = run.register(scheduler=scheduler, best=0.0)
metrics = {"top1": net.in_top(1), "top5": net.in_top(5)}
for _ in run.epochs(args.epochs):
    for batch in run.batches():
        run.step(batch)
    kept.best = max(run.evaluate(val_loader, metrics)["top1"], kept.best)
    scheduler.step()
