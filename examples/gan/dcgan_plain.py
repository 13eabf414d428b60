"""A DCGAN on scikit-learn's handwritten digits."""

import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import gan

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=30)
parser.add_argument("--batch", type=int, default=64, help="images in a training step")
parser.add_argument("--lr", type=float, default=1e-3)
args = parser.parse_args()


def loss(logits, real):
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, real))


torch.manual_seed(0)
loader = DataLoader(gan.Digits(), batch_size=args.batch, shuffle=True)
D, G = gan.discriminator(), gan.generator()
optimizer_d = torch.optim.Adam(D.parameters(), lr=args.lr, betas=(0.5, 0.999))
optimizer_g = torch.optim.Adam(G.parameters(), lr=args.lr, betas=(0.5, 0.999))

for epoch in range(args.epochs):
    for real, noise in loader:
        fake = G(noise)
        optimizer_d.zero_grad()
        loss_d = loss(D(real), 1.0) + loss(D(fake.detach()), 0.0)
        loss_d.backward()
        optimizer_d.step()
        optimizer_g.zero_grad()
        loss_g = loss(D(fake), 1.0)
        loss_g.backward()
        optimizer_g.step()
    print(f"epoch {epoch + 1}  D {loss_d.item():.4f}  G {loss_g.item():.4f}")

print(gan.draw(G))
