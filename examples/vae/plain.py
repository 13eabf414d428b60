"""Train a variational autoencoder on scikit-learn's handwritten digits."""

import argparse

import torch
from torch.utils.data import DataLoader

import vae

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch", type=int, default=64, help="images in a training step")
parser.add_argument("--lr", type=float, default=1e-3)
args = parser.parse_args()

torch.manual_seed(0)
train_set, test_set = vae.digits()
loader = DataLoader(train_set, batch_size=args.batch, shuffle=True)
test_loader = DataLoader(test_set, batch_size=args.batch)
model = vae.VAE()
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

for epoch in range(args.epochs):
    for images in loader:
        reconstruction, mean, logvar = model(images)
        loss = vae.loss(reconstruction, images, mean, logvar)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    total = 0.0
    with torch.no_grad():
        for images in test_loader:
            reconstruction, mean, logvar = model(images)
            total += vae.loss(reconstruction, images, mean, logvar).item()
    print(f"epoch {epoch + 1}  evaluate  loss {total / len(test_set):.4f}")

with torch.no_grad():
    sample = model.decode(torch.randn(8, vae.LATENT))
print(f"8 samples, mean brightness {sample.mean():.4f}")
