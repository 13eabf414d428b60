"""Models that sharding meets: uneven, shared, tied and frozen layers, layers that its hooks do not
see; and those that it refuses.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import ronde
from tiny_models import CLASSES, GPT, LENGTH, VOCABULARY


class Uneven(nn.Sequential):
    """Layers of uneven sizes, none a multiple of the number of workers."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(6, 17),
            nn.Tanh(),
            nn.Linear(17, 5),
            nn.Tanh(),
            nn.Linear(5, 23),
            nn.Tanh(),
            nn.Linear(23, CLASSES),
        )


class Residual(nn.Module):
    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        # a bias before normalisation has no gradient in exact arithmetic
        self.a = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.b = nn.Conv2d(width, width, 3, padding=1)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.b(F.gelu(self.norm(self.a(x)))))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 5, 3)
        self.layer1 = nn.Sequential(Residual(5), Residual(5))
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x):
        return self.head(self.layer1(self.stem(x)).mean((2, 3)))


class SharedGPT(GPT):
    """Two blocks share a layer; a temperature without dimensions, a frozen parameter."""

    def __init__(self, dropout: float = 0.0, width: int = 12) -> None:
        super().__init__(width, dropout=dropout)
        self.blocks[3].down = self.blocks[1].down
        self.blocks[2].attention.out.weight.requires_grad_(False)
        self.temperature = nn.Parameter(torch.tensor(1.3))

    def forward(self, tokens):
        return super().forward(tokens) * self.temperature


class Unseen(nn.Module):
    """Used in ways that FSDP2's hooks do not see: by a method, by a layer's weight, one block
    several times, one never.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(4)
        )
        self.last = nn.Linear(6, CLASSES)

    def encode(self, x):
        x = self.layers[0](x) + self.layers[0](x * 0.5)
        return F.linear(x, self.layers[1][0].weight) + self.layers[2](x)

    def forward(self, x):
        return self.last(torch.tanh(self.encode(x)))


# -- refused ---------------------------------------------------------------------------


class Types(nn.Sequential):
    def to(self, *_, **__):  # keeps its types
        return self


def sparse() -> nn.Module:
    embedding = nn.Embedding(VOCABULARY, 4, sparse=True)
    return nn.Sequential(embedding, nn.Flatten(), nn.Linear(4 * LENGTH, CLASSES))


class Skipping(Uneven):
    """A layer that one worker leaves out."""

    def forward(self, x):
        for i, layer in enumerate(self):
            if i != 2 or ronde.world().rank == 0 or not torch.is_grad_enabled():
                x = layer(x)
            else:
                x = x[:, :5]
        return x


class Shuffling(nn.Module):
    """In one pass of many, each worker leaves another layer of one size out."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.last = nn.Linear(6, CLASSES)
        self.passes, self.at = 0, at

    def forward(self, x):
        self.passes += self.training
        for i, layer in enumerate(self.layers):
            if self.passes != self.at or i != ronde.world().rank + 1:
                x = layer(x)
        return self.last(x)


REFUSED = {
    "matrices": lambda: nn.Sequential(
        nn.Linear(6, 6, bias=False), nn.Linear(6, CLASSES, bias=False)
    ),
    "types": lambda: Types(nn.Sequential(nn.Linear(6, 4), nn.Linear(4, CLASSES).double())),
    "skipping": Skipping,
    "shuffling": lambda: Shuffling(3),
    "shuffling-late": lambda: Shuffling(19),  # in a pass that is not looked at
}
