"""The shape of Horovod's MNIST example, before Horovod."""

import argparse

import net
import torch
import torch.nn.functional as F
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--images", type=int, default=1400)
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--dropout", type=float, default=0.5)
parser.add_argument("--lr", type=float, default=0.1)
args = parser.parse_args()

accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
torch.manual_seed(0)
train_loader = DataLoader(net.digits(slice(args.images)), args.batch, shuffle=True)
test_set = net.digits(slice(args.images, args.images + 397))
test_loader = DataLoader(test_set, args.batch)
model = net.Net(args.dropout)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.5)
model, optimizer, train_loader, test_loader = accelerator.prepare(
    model, optimizer, train_loader, test_loader
)

for epoch in range(args.epochs):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        accelerator.backward(loss)
        optimizer.step()
        if batch_idx % 10 == 0:
            accelerator.print(f"epoch {epoch + 1}  step {batch_idx}  loss {loss.item():.4f}")
    model.eval()
    test_loss = right = 0.0
    with torch.no_grad():
        for data, target in test_loader:
            output, target = accelerator.gather_for_metrics((model(data), target))
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            right += (output.argmax(1) == target).sum().item()
    accelerator.print(
        f"evaluate  loss {test_loss / len(test_set):.4f}  accuracy {right / len(test_set):.4f}"
    )
