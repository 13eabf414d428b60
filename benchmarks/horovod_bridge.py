"""A training step through the Horovod bridge against DistributedDataParallel, interleaved.

    python benchmarks/horovod_bridge.py [--workers 2] [--rounds 12]

Both train copies of the same model on the same batches, in the same processes, in turns. The ratio
is DDP's time divided by the bridge's: 1 is as fast as DDP, below 1 is slower. Target: >= 0.95.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time

import ronde

MODELS = ("mlp", "cnn", "transformer")


def model_of(name: str):
    import torch
    from torch import nn

    torch.manual_seed(0)
    if name == "mlp":  # many small layers: overhead per tensor
        layers = [m for _ in range(12) for m in (nn.Linear(256, 256), nn.ReLU())]
        return nn.Sequential(*layers, nn.Linear(256, 10)), torch.randn(64, 256)
    if name == "cnn":  # the network of Horovod's MNIST example, wider
        model = nn.Sequential(
            *(nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5), nn.ReLU()),
            *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10)),
        )
        return model, torch.randn(64, 1, 28, 28)
    layer = nn.TransformerEncoderLayer(256, 4, 1024, 0.0, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 4), nn.Flatten(), nn.LazyLinear(10)), (
        torch.randn(8, 64, 256)
    )


def measure(name: str, rounds: int, steps: int) -> dict[str, object]:
    import torch
    import torch.nn.functional as F
    from torch.nn.parallel import DistributedDataParallel

    import ronde.horovod.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    model, batch = model_of(name)
    model(batch)
    target = torch.randint(10, (len(batch),))
    ours, theirs = copy.deepcopy(model), DistributedDataParallel(copy.deepcopy(model))
    optimizers = {
        "bridge": hvd.DistributedOptimizer(
            torch.optim.SGD(ours.parameters(), lr=0.01), ours.named_parameters()
        ),
        "ddp": torch.optim.SGD(theirs.parameters(), lr=0.01),
    }
    models = {"bridge": ours, "ddp": theirs}

    def some_steps(way: str) -> float:
        hvd.barrier()
        begin = time.perf_counter()
        for _ in range(steps):
            optimizers[way].zero_grad()
            F.cross_entropy(models[way](batch), target).backward()
            optimizers[way].step()
        return (time.perf_counter() - begin) / steps

    for way in models:
        some_steps(way)
    times: dict[str, list[float]] = {"bridge": [], "ddp": []}
    for turn in range(rounds):
        for way in ("bridge", "ddp") if turn % 2 else ("ddp", "bridge"):
            times[way].append(some_steps(way))
    ratios = [d / b for d, b in zip(times["ddp"], times["bridge"], strict=True)]
    exact = zip(ours.parameters(), theirs.parameters(), strict=True)
    difference = max(float((p - q).detach().abs().max()) for p, q in exact)
    hvd.shutdown()
    return {
        "model": name,
        "parameters": sum(p.numel() for p in ours.parameters()),
        "ddp_ms": statistics.median(times["ddp"]) * 1e3,
        "bridge_ms": statistics.median(times["bridge"]) * 1e3,
        "ratio": statistics.median(ratios),
        "quartiles": statistics.quantiles(ratios, n=4)[::2],
        "difference": difference,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--json")
    given = parser.parse_args()
    found = []
    for name in given.models.split(","):
        row = ronde.launch(measure, (name, given.rounds, given.steps), workers=given.workers)[0]
        found.append(row)
        low, high = row["quartiles"]
        print(
            f"{name:12} {row['parameters']:>10,} parameters  DDP {row['ddp_ms']:7.2f} ms  "
            f"bridge {row['bridge_ms']:7.2f} ms  ratio {row['ratio']:.3f} ({low:.3f}-{high:.3f})  "
            f"largest difference {row['difference']:.1e}",
            flush=True,
        )
    if given.json:
        with open(given.json, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
