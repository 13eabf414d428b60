"""Is the memory that is predicted the memory that is taken? Predicted before it is measured, in bytes of a process.

One device, six models, two batch sizes each. *Chain* is what plans are predicted from: the sum over the units, each weighed under
fake tensors; *tracker* is torch's own MemTracker on the whole step. What is measured is the peak of resident memory of a child
process that builds the model and takes two steps, above what it held before the model was built, with an allocator that gives
back what is freed.

    python benchmarks/plan_memory.py                     # all, prints a table and writes benchmarks/results/plan_memory.json
    python benchmarks/plan_memory.py --only gpt,lstm

A family of plans is one entry of ``FAMILIES``: how it is predicted, and how it is measured.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

HERE = Path(__file__).resolve()


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = (part.view(b, t, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary: int = 8000, width: int = 384, layers: int = 6, heads: int = 6, length: int = 128) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.norm2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class CNN(nn.Module):
    def __init__(self, channels: int = 64, blocks: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.Sequential(*(Residual(channels) for _ in range(blocks)))
        self.head = nn.Linear(channels, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class UNet(nn.Module):
    def __init__(self, channels: int = 32) -> None:
        super().__init__()

        def double(a: int, b: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), nn.Conv2d(b, b, 3, padding=1), nn.ReLU())

        c = channels
        self.down = nn.ModuleList([double(3, c), double(c, 2 * c), double(2 * c, 4 * c)])
        self.middle = double(4 * c, 8 * c)
        self.up = nn.ModuleList([nn.ConvTranspose2d(k * c, k * c // 2, 2, stride=2) for k in (8, 4, 2)])
        self.after = nn.ModuleList([double(k * c, k * c // 2) for k in (8, 4, 2)])
        self.head = nn.Conv2d(c, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for up, block in zip(self.up, self.after, strict=True):
            x = block(torch.cat([up(x), skips.pop()], 1))
        return self.head(x)


class Translator(nn.Module):
    def __init__(self, vocabulary: int = 4000, width: int = 256, layers: int = 3) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.net = nn.Transformer(width, 4, layers, layers, 4 * width, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, pair: torch.Tensor) -> torch.Tensor:
        source, target = pair.unbind(1)
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.head(self.net(self.tokens(source), self.tokens(target), tgt_mask=mask))


class LSTM(nn.Module):
    def __init__(self, vocabulary: int = 4000, width: int = 512) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.tokens(ids))[0])


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 2048), nn.ReLU(), *(m for _ in range(4) for m in (nn.Linear(2048, 2048), nn.ReLU())), nn.Linear(2048, 10)
    )


def _tokens_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def _text(b: int, vocabulary: int, length: int) -> Any:
    return torch.randint(vocabulary, (b, length)), torch.randint(vocabulary, (b, length))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any], Callable[..., Any], Callable[..., Any], tuple[int, int]]] = {
    # model, batch of b samples, loss, optimizer, batch sizes
    "mlp": (_mlp, lambda b: (torch.randn(b, 784), torch.randint(10, (b,))), F.cross_entropy, torch.optim.AdamW, (64, 1024)),
    "cnn": (
        CNN,
        lambda b: (torch.randn(b, 3, 32, 32), torch.randint(10, (b,))),
        F.cross_entropy,
        lambda p: torch.optim.SGD(p, 0.01, momentum=0.9),
        (32, 96),
    ),
    "gpt": (GPT, lambda b: _text(b, 8000, 128), _tokens_loss, torch.optim.AdamW, (8, 16)),
    "translator": (
        Translator,
        lambda b: (torch.randint(4000, (b, 2, 64)), torch.randint(4000, (b, 64))),
        _tokens_loss,
        torch.optim.Adam,
        (16, 48),
    ),
    "unet": (UNet, lambda b: (torch.randn(b, 3, 64, 64), torch.randint(2, (b, 64, 64))), F.cross_entropy, torch.optim.AdamW, (16, 32)),
    "lstm": (LSTM, lambda b: _text(b, 4000, 64), _tokens_loss, torch.optim.Adagrad, (16, 64)),
}


def one_device(name: str, samples: int, steps: int = 2) -> Callable[[], None]:
    """The child's part: kernels warmed on a small one, then the real one."""
    build, batches, loss, optimizer_class, _ = MODELS[name]

    def train(model: nn.Module, batch: Any, n: int) -> None:
        optimizer = optimizer_class(model.parameters())
        for _ in range(n):
            inputs, target = batch
            loss(model(inputs), target).backward()
            optimizer.step()
            optimizer.zero_grad()

    torch.manual_seed(0)
    train(build(), batches(2), 1)
    return lambda: train(build(), batches(samples), steps)


def predict_one_device(name: str, samples: int) -> dict[str, float]:
    """The chain's sum, and torch's MemTracker."""
    from ronde.run.losses import LossCall
    from ronde.study.memory import chain_peak, peak, weigh

    build, batches, loss, optimizer_class, sizes = MODELS[name]
    torch.manual_seed(0)
    model = build()
    optimizer = optimizer_class(model.parameters())
    compute = LossCall(loss, None)
    costs = weigh(model, optimizer, compute, batches, max(sizes))
    return {"chain": chain_peak(costs, samples), "tracker": float(peak(model, optimizer, compute, batches(samples))["Total"])}


FAMILIES: dict[str, tuple[Callable[[str, int], dict[str, float]], str]] = {"one device": (predict_one_device, "one_device")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="models, separated by commas")
    parser.add_argument("--family", help="families, separated by commas")
    parser.add_argument("--output", type=Path, default=HERE.parent / "results" / "plan_memory.json")
    arguments = parser.parse_args()
    from ronde.study.memory import measured_peak

    names = arguments.only.split(",") if arguments.only else list(MODELS)
    families = arguments.family.split(",") if arguments.family else list(FAMILIES)
    rows: list[dict[str, Any]] = []
    print(f"{'family':<12} {'model':<11} {'batch':>5} {'measured':>10} {'chain':>10} {'error':>7} {'tracker':>10} {'error':>7}   (MiB)")
    for family in families:
        predict, target = FAMILIES[family]
        for name in names:
            for samples in MODELS[name][4]:
                predicted = predict(name, samples)
                measured = measured_peak(f"{HERE}:{target}", name, samples, timeout=900).peak_bytes
                row: dict[str, Any] = {"family": family, "model": name, "batch": samples, "measured_bytes": measured, **predicted}
                row["chain_error"] = predicted["chain"] / measured - 1
                row["tracker_error"] = predicted["tracker"] / measured - 1
                rows.append(row)
                print(
                    f"{family:<12} {name:<11} {samples:>5} {measured / 2**20:>10.1f} {predicted['chain'] / 2**20:>10.1f} {row['chain_error']:>+7.1%}"
                    f" {predicted['tracker'] / 2**20:>10.1f} {row['tracker_error']:>+7.1%}",
                    flush=True,
                )
                _write(rows, arguments.output)
    for kind in ("chain", "tracker"):
        errors = [abs(r[f"{kind}_error"]) for r in rows]
        print(f"{kind}: mean error {statistics.mean(errors):.1%}, largest {max(errors):.1%}, {len(errors)} runs")
    print(f"written to {arguments.output}")


def _write(rows: list[dict[str, Any]], file: Path) -> None:
    """After each row; rows of models and families that were not asked for stay."""

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["family"], row["model"], row["batch"]

    held = {key(r): r for r in (json.loads(file.read_text())["rows"] if file.exists() else [])}
    held |= {key(r): r for r in rows}
    result: dict[str, Any] = {"torch": torch.__version__, "machine": platform.processor() or platform.machine()}
    for kind in ("chain", "tracker"):
        errors = [abs(r[f"{kind}_error"]) for r in held.values() if f"{kind}_error" in r]
        result[f"{kind}_mean_error"], result[f"{kind}_largest_error"] = statistics.mean(errors), max(errors)
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps({**result, "rows": list(held.values())}, indent=1) + "\n")


if __name__ == "__main__":
    main()
