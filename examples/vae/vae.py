"""What plain.py and train.py share: the digits, the model, and its loss."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

LATENT = 4


def digits() -> tuple[Tensor, Tensor]:
    """Images of 64 pixels from 0 to 1: those to train on, and the last fifth, which is held out."""
    images = torch.Tensor(load_digits().data) / 16
    return images[:1437], images[1437:]


class VAE(nn.Module):
    """A variational autoencoder with one hidden layer on each side."""

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.hidden = nn.Linear(64, hidden)
        self.mean = nn.Linear(hidden, LATENT)
        self.logvar = nn.Linear(hidden, LATENT)
        self.decoder = nn.Sequential(nn.Linear(LATENT, hidden), nn.ReLU(), nn.Linear(hidden, 64))

    def forward(self, image: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        hidden = F.relu(self.hidden(image))
        mean, logvar = self.mean(hidden), self.logvar(hidden)
        if noise is None:
            noise = torch.randn_like(mean)
        return self.decode(mean + noise * torch.exp(0.5 * logvar)), mean, logvar

    def decode(self, latent: Tensor) -> Tensor:
        return torch.sigmoid(self.decoder(latent))


def loss(reconstruction: Tensor, image: Tensor, mean: Tensor, logvar: Tensor) -> Tensor:
    """Reconstruction and divergence, summed over pixels and samples."""
    divergence = -0.5 * torch.sum(1 + logvar - mean.pow(2) - logvar.exp())
    return F.binary_cross_entropy(reconstruction, image, reduction="sum") + divergence
