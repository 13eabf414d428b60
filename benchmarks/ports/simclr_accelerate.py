"""Train an encoder of digits without labels, by SimCLR's contrastive loss."""

import argparse

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.distributed.nn.functional import all_gather
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader

import simclr

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--warmup", type=int, default=2, help="epochs before the rate falls")
parser.add_argument("--images", type=int, default=1797)
parser.add_argument("--batch", type=int, default=256, help="images in a training step")
parser.add_argument("--lr", type=float, default=3e-3)
args = parser.parse_args()

accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
torch.manual_seed(0)
images, labels = (part[: args.images] for part in simclr.digits())
loader = DataLoader(simclr.Views(images), batch_size=args.batch, shuffle=True, drop_last=True)
model = simclr.Encoder()
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
scheduler = CosineAnnealingLR(optimizer, args.epochs - args.warmup)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for epoch in range(args.epochs):
    for first, second in loader:
        features = model(torch.cat([first, second]))
        views = features.chunk(2)
        if accelerator.num_processes > 1:
            views = [torch.cat(all_gather(view)) for view in views]
        loss = simclr.nt_xent(*views)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
    if epoch >= args.warmup:
        scheduler.step()
    encoder = accelerator.unwrap_model(model)
    score = simclr.nearest(encoder, images.to(accelerator.device), labels.to(accelerator.device))
    accelerator.print(f"epoch {epoch + 1}  evaluate  nearest neighbor {score:.4f}")
