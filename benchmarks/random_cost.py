"""What does ``randomness="global"`` cost? Steps of a BERT-like model and of a CNN, in turns with
steps of the same model under ``randomness="worker"``, in one process. Counts the seconds that one
thread computes, so that other work on the machine matters little.

    python benchmarks/random_cost.py [--rounds 20]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

os.environ.setdefault("RONDE_RUNS", "none")

import ronde


class Bert(nn.Module):
    """BERT's layers (Devlin et al. 2018), smaller: dropout on attention and on each residual."""

    def __init__(self, width: int = 192, layers: int = 2, words: int = 4000) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Parameter(torch.zeros(64, width))
        self.drop = nn.Dropout(0.1)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, "gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(self.drop(self.words(x) + self.places))
        return self.head(hidden[:, 0])


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        parts = [nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)]
        self.inner = nn.Sequential(*parts, nn.ReLU(), nn.Conv2d(width, width, 3, padding=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keep = x.new_empty(len(x), 1, 1, 1).bernoulli_(0.9)  # stochastic depth
        return F.relu(x + self.inner(x) * keep / 0.9)


class Cnn(nn.Module):
    """Residual convolutions with stochastic depth, dropout of channels, and of features."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.Sequential(Residual(width), nn.Dropout2d(0.1), nn.MaxPool2d(2))
        self.more = nn.Sequential(Residual(width), nn.MaxPool2d(2), Residual(width))
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(width * 64, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.more(self.blocks(self.first(x))))


def steps(kind: str, randomness: str) -> Iterator[float]:
    """Seconds of each step."""
    torch.manual_seed(0)
    if kind == "BERT":
        model: nn.Module = Bert()
        data = TensorDataset(torch.randint(0, 4000, (80, 64)), torch.randint(0, 2, (80,)))
        batch = 8
    else:
        model = Cnn()
        data = TensorDataset(torch.randn(160, 3, 32, 32), torch.randint(0, 10, (160,)))
        batch = 16
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    loss = F.cross_entropy
    run = ronde.distribute(
        model, optimizer, data, loss=loss, batch_size=batch, randomness=randomness
    )
    while True:
        for batch in run.batches():
            began = time.process_time()
            run.step(batch)
            yield time.process_time() - began


def main() -> None:
    """Print a table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=20)
    rounds = options.parse_args().rounds
    torch.set_num_threads(1)
    print("| model | worker, ms a step | global, ms a step | ratio, median | its quartiles |")
    print("|---|---|---|---|---|")
    for kind in ("BERT", "CNN"):
        ways = {name: steps(kind, name) for name in ("worker", "global")}
        for way in ways.values():
            for _ in range(4):  # caches, and the steps that look for other draws
                next(way)
        times: dict[str, list[float]] = {name: [] for name in ways}
        for i in range(rounds):
            for name in sorted(ways, reverse=bool(i % 2)):
                times[name].append(next(ways[name]))
        pairs = zip(times["global"], times["worker"], strict=True)
        ratios = [g / w for g, w in pairs]
        low, middle, high = statistics.quantiles(ratios, n=4)
        off, on = (statistics.median(times[n]) * 1e3 for n in ("worker", "global"))
        print(f"| {kind} | {off:.1f} | {on:.1f} | {middle:.3f} | {low:.3f} – {high:.3f} |")


if __name__ == "__main__":
    main()
