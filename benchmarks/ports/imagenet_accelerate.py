"""The shape of PyTorch's ImageNet example: step schedule by epoch, validation, best accuracy."""

import argparse
import shutil

import net
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=9)
parser.add_argument("--images", type=int, default=1400)
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--lr", type=float, default=0.1)
args = parser.parse_args()

accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
torch.manual_seed(0)
train_set = net.Digits(slice(args.images), augment=True)
val_set = net.Digits(slice(args.images, args.images + 397), augment=False)
train_loader = DataLoader(train_set, args.batch, shuffle=True)
val_loader = DataLoader(val_set, args.batch)
model = nn.SyncBatchNorm.convert_sync_batchnorm(net.resnet())
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.1)
model, optimizer, train_loader, val_loader = accelerator.prepare(
    model, optimizer, train_loader, val_loader
)
best = 0.0

for epoch in range(args.epochs):
    model.train()
    for images, target in train_loader:
        loss = criterion(model(images), target)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
    model.eval()
    top1 = top5 = 0.0
    with torch.no_grad():
        for images, target in val_loader:
            output, target = accelerator.gather_for_metrics((model(images), target))
            top1 += net.in_top(1)(output, target).sum().item() / len(val_set)
            top5 += net.in_top(5)(output, target).sum().item() / len(val_set)
    accelerator.print(f"epoch {epoch + 1}  evaluate  top1 {top1:.4f}  top5 {top5:.4f}")
    scheduler.step()
    is_best = top1 > best
    best = max(top1, best)
    weights = accelerator.unwrap_model(model).state_dict()
    state = {"epoch": epoch + 1, "model": weights, "best": best}
    state |= {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    accelerator.save(state, "checkpoint.pt")
    if is_best and accelerator.is_main_process:
        shutil.copyfile("checkpoint.pt", "best.pt")
