"""Train a variational autoencoder on scikit-learn's handwritten digits."""

import argparse

import torch
from torch.utils.data import DataLoader

import ronde
import vae
from ronde import feed

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch", type=int, default=64, help="images in a training step")
parser.add_argument("--lr", type=float, default=1e-3)
args = parser.parse_args()


def with_noise(images):
    """Draw the noise with the sample, so that it is the same on any number of workers."""
    return feed.Pipeline(feed.dataset(images)).map(lambda image: (image, torch.randn(vae.LATENT)))


def forward(model, batch):
    images, noise = batch
    reconstruction, mean, logvar = model(images, noise)
    return reconstruction, images, mean, logvar


torch.manual_seed(0)
train_set, test_set = map(with_noise, vae.digits())
loader = DataLoader(train_set, batch_size=args.batch, shuffle=True)
test_loader = DataLoader(test_set, batch_size=args.batch)
model = vae.VAE()
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

run = ronde.distribute(
    model, optimizer, loader, loss=vae.loss, loss_reduction="sum", forward=forward
)
for _ in run.epochs(args.epochs):
    for batch in run.batches():
        run.step(batch)
    run.evaluate(test_loader)

with run.whole_model() as whole, torch.no_grad():
    sample = whole.decode(torch.randn(8, vae.LATENT))
run.print(f"8 samples, mean brightness {sample.mean():.4f}")
