"""Train an encoder of digits without labels, by SimCLR's contrastive loss."""

import argparse

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader

import ronde
import simclr

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--warmup", type=int, default=2, help="epochs before the rate falls")
parser.add_argument("--images", type=int, default=1797)
parser.add_argument("--batch", type=int, default=256, help="images in a training step")
parser.add_argument("--lr", type=float, default=3e-3)
args = parser.parse_args()

torch.manual_seed(0)
images, labels = (part[: args.images] for part in simclr.digits())
loader = DataLoader(simclr.Views(images), batch_size=args.batch, shuffle=True, drop_last=True)
model = simclr.Encoder()
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
scheduler = CosineAnnealingLR(optimizer, args.epochs - args.warmup)


def forward(model, views):
    return tuple(map(run.gather, model(torch.cat(views)).chunk(2)))


run = ronde.distribute(model, optimizer, loader, loss=simclr.nt_xent, forward=forward)
run.register(scheduler=scheduler)
for epoch in run.epochs(args.epochs):
    for batch in run.batches():
        run.step(batch)
    if epoch >= args.warmup:
        scheduler.step()
    with run.whole_model() as encoder:
        score = simclr.nearest(encoder, images, labels)
    run.print(f"epoch {epoch + 1}  evaluate  nearest neighbor {score:.4f}")
