"""What plain.py and train.py share: the digits, moved at random, and a small residual network."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset


class Digits(Dataset):
    """Images and labels; ``augment`` crops and mirrors them at random."""

    def __init__(self, part: slice, augment: bool) -> None:
        found = load_digits()
        self.images = torch.Tensor(found.images[part])[:, None] / 16
        self.labels = torch.tensor(found.target[part])
        self.augment = augment

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index]
        if self.augment:
            top, left = torch.randint(0, 3, (2,)).tolist()
            image = F.pad(image, (1, 1, 1, 1))[:, top : top + 8, left : left + 8]
            if torch.rand(()) < 0.5:
                image = image.flip(2)
        return image, self.labels[index]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x):
        return F.relu(x + self.body(x))


def resnet(width: int = 8, classes: int = 10) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), Block(width), Block(width),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, classes),
    )  # fmt: skip


def in_top(k):
    def of(output, target):
        return (output.topk(k, 1).indices == target[:, None]).any(1).double()

    return of
