"""What does ``--watch`` cost? Processor time of steps with and without it, beside TensorBoard's
histograms and ``wandb.watch``.

One process per worker trains a model. Blocks of 8 steps take turns: nobody watches; every step is
measured (one of 8 with layers' outputs, as ``--watch`` does in 8 measurements); a ``SummaryWriter``
gets histograms of all gradients and weights at every step; ``wandb.watch`` logs them at every step.
What a block costs more than the median one that nobody watches is divided by how seldom each
measures in use: P steps for Ronde, as with ``watch=True``; 10 steps
for the others. What a watched run pays in steps that are not measured is timed in a third run.

    python benchmarks/watch_cost.py                  # prints a table, writes
    benchmarks/results/watch_cost.json python benchmarks/watch_cost.py --rounds 5 --only digits

Without wandb (``pip install wandb``; it runs offline), its column is empty.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
BLOCK = 8
WARM = 16
OTHERS_EVERY = 10
MODELS = ("digits", "gpt", "batchnorm")


def build(name: str) -> tuple[Any, Any, Any, int]:
    """Model, data set, loss, and global batch."""
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.data import TensorDataset

    torch.manual_seed(0)
    if name == "digits":
        model = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip
        data = TensorDataset(torch.randn(1792, 1, 8, 8), torch.randint(10, (1792,)))
        return model, data, F.cross_entropy, 32
    if name == "batchnorm":
        layers: list[nn.Module] = []
        for a, b, stride in ((3, 32, 1), (32, 64, 2), (64, 128, 2), (128, 160, 2)):
            layers += [nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]
        model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(160, 10))
        data = TensorDataset(torch.randn(512, 3, 32, 32), torch.randint(10, (512,)))
        return model, data, F.cross_entropy, 16
    sys.path.insert(0, str(ROOT / "examples" / "gpt"))
    import gpt

    text, _ = gpt.load(0.3, 64)
    return gpt.GPT(64, 96, 3, 4), text, gpt.loss, 32


def start(name: str, watch: bool | int, callbacks: tuple[Any, ...] = ()) -> Any:
    """A run of that model."""
    import torch

    import ronde

    model, data, loss, batch = build(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return ronde.distribute(
        model, optimizer, data, loss=loss, batch_size=batch, watch=watch, callbacks=callbacks
    )


def steps(run: Any) -> Any:
    """Batches without end."""
    for _ in run.epochs(1_000_000):
        yield from run.batches()


class Turns:
    """Lets the measuring callback rest, and wakes it."""

    def batch_taken(self, view: Any) -> None:
        self.callbacks = view.callbacks

    def watch(self, on: bool) -> None:
        from ronde.run.health import Health

        if on:
            self.callbacks.wake(Health)
        else:
            each = next(c for c in self.callbacks.all if isinstance(c, Health))
            self.callbacks.rest(each)


def blocks(name: str, watch: int, kinds: list[str], rounds: int) -> dict[str, list[float]]:
    """Processor seconds of a step, by kind of block."""
    turns = Turns()
    run = start(name, watch, (turns,))
    batches = steps(run)
    for _ in range(WARM):
        run.step(next(batches))
    named = list(run.model.named_parameters())
    writer = None
    if "tensorboard" in kinds and run.is_main:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(run.dir.path / "tb"))
    if "wandb" in kinds and run.is_main:
        import wandb

        wandb.init(mode="offline", dir=str(run.dir.path), settings=wandb.Settings(silent=True))
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    number = itertools.count(1)
    for i in range(rounds):
        for kind in random.Random(i).sample(kinds, len(kinds)):  # the same on all ranks
            turns.watch(kind == "ronde")
            wandb_on = kind == "wandb" and run.is_main
            if wandb_on:
                wandb.watch(run.model, log="all", log_freq=1)
            begun = time.process_time()
            for _ in range(BLOCK):
                run.step(next(batches))
                if kind == "tensorboard" and writer is not None:
                    at = next(number)
                    for parameter, value in named:
                        writer.add_histogram(f"w/{parameter}", value, at)
                        if value.grad is not None:
                            writer.add_histogram(f"g/{parameter}", value.grad, at)
                elif wandb_on:
                    wandb.log({})
            found[kind].append((time.process_time() - begun) / BLOCK)
            if wandb_on:
                wandb.unwatch(run.model)
    if "wandb" in kinds and run.is_main:
        wandb.finish()
    return found


def worker(name: str, rounds: int, kinds: list[str], out: str) -> None:
    """One of the processes."""
    import torch

    from ronde.run.options import WATCH_EVERY_STEPS

    every = WATCH_EVERY_STEPS
    measured = blocks(name, 1, kinds, rounds)
    # a small difference: it needs more rounds, which short steps allow
    more = 4 if name == "digits" else 1
    idle = blocks(name, 1 << 30, ["off", "ronde"], more * rounds)
    rank = os.environ.get("RANK", "0")
    found = {"every": every, "measured": measured, "idle": idle, "torch": torch.__version__}
    Path(f"{out}-{rank}").write_text(json.dumps(found))
    os._exit(0)  # the loops are not at their end


def _more(times: dict[str, list[float]], kind: str) -> float:
    """What a block costs more, each against that of its own round: a disturbance strikes both."""
    pairs = zip(times["off"], times[kind], strict=True)
    return statistics.median(b / a for a, b in pairs) - 1


def launch(name: str, workers: int, rounds: int, kinds: list[str]) -> dict[str, Any]:
    """The processes of one model, and the ratios of their times."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={workers}", __file__, "--worker", name, str(rounds)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "RONDE_RUNS": f"{folder}/runs"}
        env |= {"RONDE_PROGRESS": "quiet", "RONDE_DEVICE": "cpu"}
        done = subprocess.run(
            [*command, ",".join(kinds), str(out)],
            env=env, capture_output=True, text=True, timeout=1800,
        )  # fmt: skip
        files = sorted(Path(folder).glob("out-*"))
        if len(files) != workers:
            sys.exit(done.stdout + done.stderr)
        found = [json.loads(file.read_text()) for file in files]
    step = statistics.median(found[0]["measured"]["off"])
    result: dict[str, Any] = {"every": found[0]["every"], "step_ms": step * 1e3}
    for kind in kinds[1:]:
        more = [_more(each["measured"], kind) for each in found]
        seldom = result["every"] if kind == "ronde" else OTHERS_EVERY
        # rank 0 alone writes histograms, and the others wait for it
        each = statistics.mean(more) if kind == "ronde" else more[0]
        result[kind] = {"a_measured_step": each, "a_step": each / seldom}
    idle = [_more(each["idle"], "ronde") for each in found]
    result["ronde"]["a_step_not_measured"] = statistics.mean(idle)
    result["torch"] = found[0]["torch"]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, help="default: 40 for digits, 16 for the others")
    parser.add_argument("--only", choices=MODELS)
    parser.add_argument("--out", default=str(ROOT / "benchmarks" / "results" / "watch_cost.json"))
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        name, rounds, kinds, out = arguments.worker
        worker(name, int(rounds), kinds.split(","), out)
        return
    kinds = ["off", "ronde", "tensorboard"]
    kinds += ["wandb"] if importlib.util.find_spec("wandb") else []
    report: dict[str, Any] = {
        "machine": {
            "cores": os.cpu_count(),
            "processor": platform.processor() or platform.machine(),
            "python": platform.python_version(),
        },
        "results": {},
    }
    print(
        "model       workers   step      P   measured  not measured   a step | tensorboard  wandb"
    )
    for name in (arguments.only,) if arguments.only else MODELS:
        for workers in (1, 2):
            rounds = arguments.rounds or (40 if name == "digits" else 16)
            found = launch(name, workers, rounds, kinds) | {"rounds": rounds}
            report["results"][f"{name}-{workers}"] = found
            own = found["ronde"]
            nothing = {"a_step": float("nan")}
            others = [found.get(k, nothing)["a_step"] for k in ("tensorboard", "wandb")]
            print(
                f"{name:11} {workers:7} {found['step_ms']:6.1f} ms {found['every']:4} "
                f"{own['a_measured_step']:9.1%} {own['a_step_not_measured']:12.2%} "
                f"{own['a_step']:8.2%} | {others[0]:10.1%} {others[1]:6.1%}",
                flush=True,
            )
    Path(arguments.out).write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
