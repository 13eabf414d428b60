"""A DCGAN on scikit-learn's handwritten digits."""

import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import gan
import ronde

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

run_d = ronde.distribute(D, optimizer_d, loader, loss=loss, sync_batchnorm=True)
run_g = ronde.distribute(G, optimizer_g, run_d, loss=loss, sync_batchnorm=True, name="generator")
for epoch in run_d.epochs(args.epochs):
    for real, noise in run_d.batches():
        fake = G(noise)
        run_d.backward(loss(D(real), 1.0) + loss(D(fake.detach()), 0.0))
        loss_d = run_d.update()
        run_g.backward(loss(D(fake), 1.0))
        loss_g = run_g.update()
    if run_d.is_main:
        print(f"epoch {epoch + 1}  D {loss_d.item():.4f}  G {loss_g.item():.4f}")

with run_g.whole_model() as whole:
    run_d.print(gan.draw(whole))
