"""What plain.py and train.py share: the text, the model, its loss, and how it is evaluated and
sampled.
"""

import math
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def _sources() -> Iterator[Path]:
    """Python files of the standard library, in the same order wherever it is installed."""
    for folder, inner, files in os.walk(sysconfig.get_paths()["stdlib"]):
        inner[:] = sorted(set(inner) - SKIPPED)
        yield from (Path(folder, name) for name in sorted(files) if name.endswith(".py"))


def standard_library(megabytes: float) -> bytes:
    """The first ``megabytes`` of the standard library's source code."""
    size, text = int(megabytes * 1e6), bytearray()
    for path in _sources():
        text += path.read_bytes()
        if len(text) >= size:
            break
    return bytes(text[:size])


class Text(Dataset[tuple[Tensor, Tensor]]):
    """A text cut into pieces of ``context`` bytes; the target of each byte is the one after it."""

    def __init__(self, text: bytes, context: int) -> None:
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.context = context

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.context
        piece = self.bytes[start : start + self.context + 1]
        return piece[:-1], piece[1:]


def load(megabytes: float, context: int, file: str = "") -> tuple[Text, Text]:
    """The text to train on, and the last twentieth of it, which is held out."""
    size = int(megabytes * 1e6)
    text = Path(file).read_bytes()[:size] if file else standard_library(megabytes)
    cut = len(text) - len(text) // 20
    return Text(text[:cut], context), Text(text[cut:], context)


class Block(nn.Module):
    """Attention to the bytes before, then a small network on each byte."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = (
            nn.Linear(width, 3 * width, bias=False),
            nn.Linear(width, width, bias=False),
        )
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A decoder-only transformer over bytes. The embedding and the output layer are one tensor."""

    def __init__(self, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.context = context
        self.byte = nn.Embedding(256, width)
        self.place = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.byte.weight
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)

    def forward(self, text: Tensor) -> Tensor:
        places = torch.arange(text.shape[1], device=text.device)
        return self.head(self.norm(self.blocks(self.byte(text) + self.place(places))))


def loss(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy of the next byte, in nats."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def warmup_cosine(optimizer: torch.optim.Optimizer, steps: int, warmup: int = 40) -> LambdaLR:
    """The learning rate rises for ``warmup`` steps and then falls, along a cosine, to a tenth."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, steps - warmup))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * done))

    return LambdaLR(optimizer, factor)


@torch.no_grad()
def evaluate(model: GPT, data: Text) -> float:
    """Mean loss over all of ``data``."""
    model.eval()
    losses = [
        (loss(model(inputs), target).item(), len(inputs))
        for inputs, target in DataLoader(data, batch_size=64)
    ]
    model.train()
    return sum(value * count for value, count in losses) / len(data)


@torch.no_grad()
def sample(model: GPT, prompt: str, length: int, temperature: float = 0.7) -> str:
    """``prompt`` and what the model writes after it."""
    model.eval()
    draw, device = torch.Generator().manual_seed(0), next(model.parameters()).device
    text = torch.tensor([list(prompt.encode())])
    for _ in range(length):
        logits = model(text[:, -model.context :].to(device))[0, -1].cpu()
        following = torch.multinomial(F.softmax(logits / temperature, dim=0), 1, generator=draw)
        text = torch.cat([text, following[None]], dim=1)
    return bytes(text[0].tolist()).decode(errors="replace")
