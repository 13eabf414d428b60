"""A U-Net (Ronneberger, Fischer, and Brox 2015) with group normalization."""

from itertools import pairwise

import torch
from torch import nn


def block(inputs, outputs):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.ReLU(),
    )  # fmt: skip


class UNet(nn.Module):
    """Images (n, 3, height, width) to logits (n, classes, height, width)."""

    def __init__(self, classes, width, depth):
        super().__init__()
        widths = [width * 2**i for i in range(depth + 1)]
        self.first = block(3, width)
        self.down = nn.ModuleList(block(a, b) for a, b in pairwise(widths))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in pairwise(widths))
        self.join = nn.ModuleList(block(2 * a, a) for a in widths[:-1])
        self.last = nn.Conv2d(width, classes, 1)

    def forward(self, image):
        levels = [self.first(image)]
        for down in self.down:
            levels.append(down(nn.functional.max_pool2d(levels[-1], 2)))
        x = levels.pop()
        for up, join in zip(reversed(self.up), reversed(self.join), strict=True):
            x = join(torch.cat([levels.pop(), up(x)], 1))
        return self.last(x)
