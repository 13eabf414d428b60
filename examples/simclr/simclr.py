"""What plain.py and train.py share: two views of each digit, the encoder, and the loss."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset


def digits() -> tuple[Tensor, Tensor]:
    """Images (1,797, 1, 8, 8) from 0 to 1, and their labels."""
    found = load_digits()
    return torch.Tensor(found.images)[:, None] / 16, torch.tensor(found.target)


class Views(Dataset):
    """Two random views of each image: moved by a pixel, brighter or darker, with noise."""

    def __init__(self, images: Tensor) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.view(index), self.view(index)

    def view(self, index: int) -> Tensor:
        down, right = torch.randint(-1, 2, (2,)).tolist()
        moved = self.images[index].roll((down, right), (1, 2))
        return moved * (0.6 + 0.8 * torch.rand(())) + 0.1 * torch.randn(moved.shape)


class Encoder(nn.Module):
    """A small convolutional network, and the projection that SimCLR trains it with."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.Flatten(),
        )  # fmt: skip
        self.project = nn.Sequential(
            nn.Linear(32 * width, 2 * width), nn.ReLU(), nn.Linear(2 * width, 16)
        )

    def forward(self, image: Tensor) -> Tensor:
        return self.project(self.features(image))


def nt_xent(first: Tensor, second: Tensor, temperature: float = 0.5) -> Tensor:
    """Each view must find the other view of its image among all views of the batch."""
    views = F.normalize(torch.cat([first, second]), dim=1)
    alike = (views @ views.T / temperature).masked_fill(
        torch.eye(len(views), dtype=torch.bool, device=views.device), float("-inf")
    )
    other = torch.arange(len(views), device=views.device).roll(len(first))
    return F.cross_entropy(alike, other)


@torch.no_grad()
def nearest(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """How often the most similar of the other images has the same label."""
    features = F.normalize(model.features(images), dim=1)
    alike = (features @ features.T).fill_diagonal_(-1)
    return (labels[alike.argmax(1)] == labels).double().mean().item()
