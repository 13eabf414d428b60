"""What both scripts share: scikit-learn's digits, the two networks, and how to draw."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset

LATENT = 16


class Digits(Dataset[tuple[Tensor, Tensor]]):
    """An image of 8 x 8 pixels between -1 and 1, and noise for a generated one."""

    def __init__(self) -> None:
        images = torch.tensor(load_digits().images, dtype=torch.float32)
        self.images = images.unsqueeze(1) / 8 - 1

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], torch.randn(LATENT)


def generator() -> nn.Module:
    """Noise to an image."""
    return nn.Sequential(
        nn.Linear(LATENT, 64 * 4), nn.Unflatten(1, (64, 2, 2)), nn.ReLU(),
        nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.ConvTranspose2d(32, 1, 4, 2, 1), nn.Tanh(),
    )  # fmt: skip


def discriminator() -> nn.Module:
    """An image to a number: how real it looks."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 4, 2, 1), nn.LeakyReLU(0.2),
        nn.Conv2d(32, 64, 4, 2, 1), nn.BatchNorm2d(64), nn.LeakyReLU(0.2),
        nn.Flatten(), nn.Linear(64 * 4, 1),
    )  # fmt: skip


@torch.no_grad()
def draw(model: nn.Module, count: int = 6) -> str:
    """Generated digits, as text."""
    model.eval()
    noise = torch.randn(count, LATENT, generator=torch.Generator().manual_seed(0))
    images = model(noise.to(next(model.parameters()).device)).squeeze(1).cpu()
    shades = ((images + 1) * 2.499).long().clamp(0, 4)
    rows = (
        "  ".join("".join(" .:*#"[p] * 2 for p in image[y]) for image in shades) for y in range(8)
    )
    return "\n".join(rows)
