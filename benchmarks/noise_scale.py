"""The gradient noise scale that a run measures: is it right, and what does it cost?

    python benchmarks/noise_scale.py [--workers 2] [--rounds 15]

Truth: a small classifier whose gradients of single samples are computed one by one; the weights
stand still. Cost: the same run steps with and without a measurement in every step, in turns; the
extra time is divided by the steps from one measurement to the next. Targets: within 10 %, < 1 %.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import ronde

MODELS = ("perceptron", "transformer")


def classifier():
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 4)).double()
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4096, 8, generator=generator, dtype=torch.float64)
    mixed = inputs @ torch.randn(8, 4, generator=generator, dtype=torch.float64)
    return model, TensorDataset(inputs, mixed.argmax(1))


def direct() -> float:
    """tr(Σ) / |G|² from the gradient of each sample."""
    import torch
    import torch.nn.functional as F

    model, data = classifier()
    named = dict(model.named_parameters())

    def loss_of(values, x, y):
        output = torch.func.functional_call(model, values, (x[None],))
        return F.cross_entropy(output, y[None])

    grads = torch.func.vmap(torch.func.grad(loss_of), (None, 0, 0))(named, *data.tensors)
    flat = torch.cat([g.reshape(len(data), -1) for g in grads.values()], 1)
    mean = flat.mean(0)
    return float((flat - mean).square().sum(1).mean() / mean.square().sum())


def estimate(batch: int, epochs: int) -> float:
    import torch
    import torch.nn.functional as F

    model, data = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    run = ronde.distribute(model, optimizer, data, loss=F.cross_entropy, batch_size=batch)
    run.port.strategy._measure_every = 1
    for _ in run.epochs(epochs):
        for taken in run.batches():
            run.step(taken)
    return run.port.strategy.noise.value


def cost(name: str, rounds: int, steps: int) -> dict[str, float]:
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.data import TensorDataset

    torch.manual_seed(0)
    if name == "perceptron":  # many parameters for few operations: norms weigh most
        layers = [m for _ in range(4) for m in (nn.Linear(512, 512), nn.ReLU())]
        model, inputs = nn.Sequential(*layers, nn.Linear(512, 10)), torch.randn(64, 512)
    else:
        layer = nn.TransformerEncoderLayer(256, 4, 1024, 0.0, batch_first=True)
        model = nn.Sequential(nn.TransformerEncoder(layer, 4), nn.Flatten(), nn.Linear(16384, 10))
        inputs = torch.randn(16, 64, 256)
    batch, many = len(inputs), inputs.repeat(steps, *[1] * (inputs.dim() - 1))
    data = TensorDataset(many, torch.randint(10, (len(many),)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = ronde.distribute(model, optimizer, data, loss=F.cross_entropy, batch_size=batch)
    every = run.port.strategy._measure_every
    times: dict[bool, list[float]] = {True: [], False: []}
    epochs = run.epochs(10**9)
    for turn in range(-1, rounds):
        for measured in (True, False) if turn % 2 else (False, True):
            run.port.strategy._measure_every = 1 if measured else 10**9
            run.barrier()
            begin = time.perf_counter()
            next(epochs)  # of so many steps
            for taken in run.batches():
                run.step(taken)
            if turn >= 0:
                times[measured].append((time.perf_counter() - begin) / steps)
    extra = [m / p - 1 for m, p in zip(times[True], times[False], strict=True)]
    return {
        "step_ms": statistics.median(times[False]) * 1e3,
        "measured_step": statistics.median(extra),
        "every": every,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json")
    given = parser.parse_args()
    truth, found = direct(), {}
    for batch in (16, 64, 256):
        value = ronde.launch(estimate, (batch, 8 * batch // 16), workers=given.workers)[0]
        found[f"batch {batch}"] = value / truth
        print(
            f"global batch {batch:4}: noise scale {value:.1f}, directly {truth:.1f} "
            f"({value / truth - 1:+.1%})",
            flush=True,
        )
    for name in MODELS:
        row = ronde.launch(cost, (name, given.rounds, given.steps), workers=given.workers)[0]
        found[name] = row
        print(
            f"{name:12} step {row['step_ms']:.2f} ms, {row['measured_step']:+.1%} with a "
            f"measurement, one in {row['every']}: {row['measured_step'] / row['every']:+.3%}",
            flush=True,
        )
    if given.json:
        with open(given.json, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
