"""Train a variational autoencoder on scikit-learn's handwritten digits."""

import argparse

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader

import vae

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch", type=int, default=64, help="images in a training step")
parser.add_argument("--lr", type=float, default=1e-3)
args = parser.parse_args()

accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
torch.manual_seed(0)
train_set, test_set = vae.digits()
loader = DataLoader(train_set, batch_size=args.batch, shuffle=True)
test_loader = DataLoader(test_set, batch_size=args.batch)
model = vae.VAE()
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
model, optimizer, loader, test_loader = accelerator.prepare(model, optimizer, loader, test_loader)

for epoch in range(args.epochs):
    for images in loader:
        reconstruction, mean, logvar = model(images)
        loss = vae.loss(reconstruction, images, mean, logvar)
        optimizer.zero_grad()
        accelerator.backward(loss * accelerator.num_processes)  # gradients are averaged
        optimizer.step()
    total = 0.0
    with torch.no_grad():
        for images in test_loader:
            reconstruction, mean, logvar = model(images)
            parts = accelerator.gather_for_metrics((reconstruction, images, mean, logvar))
            total += vae.loss(*parts).item()
    accelerator.print(f"epoch {epoch + 1}  evaluate  loss {total / len(test_set):.4f}")

with torch.no_grad():
    sample = accelerator.unwrap_model(model).decode(
        torch.randn(8, vae.LATENT, device=accelerator.device)
    )
accelerator.print(f"8 samples, mean brightness {sample.mean():.4f}")
