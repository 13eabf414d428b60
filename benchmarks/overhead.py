"""What does Ronde cost? Steps a second and peak memory against hand-written DDP, Accelerate and
Lightning Fabric.

All four train the same model on the same data with two workers. They take turns in the same two
processes, some steps each, in an order that changes from round to round; what is printed is the
median over rounds of each one's time relative to the hand-written loop of the same round, so that a
disturbance of the machine strikes all alike. Peak memory is measured apart, in processes that run
one of them only.

    python benchmarks/overhead.py                     # all, prints a table and writes
    benchmarks/results/overhead.json python benchmarks/overhead.py --rounds 5 --only small
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

CONTESTANTS = ("ddp", "ronde", "accelerate", "fabric")
WORKERS = 2


def build(size: str) -> tuple[Any, Any, Any, Any, int]:
    """Model, optimizer, data set, loss and global batch: the same for all."""
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.data import Dataset, TensorDataset

    torch.manual_seed(0)
    if size == "small":
        model = nn.Sequential(
            nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
        )
        data: Any = TensorDataset(torch.randn(8192, 64), torch.randint(10, (8192,)))
        batch = 64
        loss: Any = F.cross_entropy
    elif size == "rows":  # a data set of one's own, read sample by sample

        class Rows(Dataset):
            def __init__(self) -> None:
                self.x, self.y = torch.randn(8192, 64), torch.randint(10, (8192,))

            def __len__(self) -> int:
                return len(self.x)

            def __getitem__(self, i: int) -> Any:
                return self.x[i], self.y[i]

        model = nn.Sequential(
            nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
        )
        data, batch, loss = Rows(), 64, F.cross_entropy
    else:
        width, length, vocabulary = 256, 64, 256

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embed = nn.Embedding(vocabulary, width)
                layer = nn.TransformerEncoderLayer(
                    width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
                )
                self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
                self.head = nn.Linear(width, vocabulary)

            def forward(self, x: Any) -> Any:
                return self.head(self.layers(self.embed(x)))

        def tokens(output: Any, target: Any) -> Any:
            return F.cross_entropy(output.flatten(0, 1), target.flatten())

        model = Net()
        data = TensorDataset(
            torch.randint(vocabulary, (2048, length)), torch.randint(vocabulary, (2048, length))
        )
        batch, loss = 16, tokens
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, data, loss, batch


def by_hand(size: str) -> Iterator[None]:
    """The loop that one writes with torch alone."""
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler

    model, optimizer, data, loss_of, batch = build(size)
    ddp = DistributedDataParallel(model)
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch // WORKERS, sampler=sampler)
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss_of(ddp(x), y).backward()
            optimizer.step()
            yield
        epoch += 1


def with_ronde(size: str) -> Iterator[None]:
    """The same under Ronde, with its record, its progress and its check for NaN as they are by
    default.
    """
    import ronde

    model, optimizer, data, loss_of, batch = build(size)
    run = ronde.distribute(model, optimizer, data, loss=loss_of, batch_size=batch)
    for _ in run.epochs(1_000_000):
        for chunk in run.batches():
            run.step(chunk)
            yield


def with_accelerate(size: str) -> Iterator[None]:
    """The same under Hugging Face Accelerate."""
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    model, optimizer, data, loss_of, batch = build(size)
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(data, batch // WORKERS, shuffle=True)
    )
    while True:
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(loss_of(model(x), y))
            optimizer.step()
            yield


def with_fabric(size: str) -> Iterator[None]:
    """The same under Lightning Fabric."""
    from lightning.fabric import Fabric
    from torch.utils.data import DataLoader

    model, optimizer, data, loss_of, batch = build(size)
    fabric = Fabric(accelerator="cpu", devices=WORKERS, strategy="ddp")
    fabric.launch()
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(data, batch // WORKERS, shuffle=True))
    epoch = 0
    while True:
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            fabric.backward(loss_of(model(x), y))
            optimizer.step()
            yield
        epoch += 1


MAKERS: dict[str, Callable[[str], Iterator[None]]] = {
    "ddp": by_hand,
    "ronde": with_ronde,
    "accelerate": with_accelerate,
    "fabric": with_fabric,
}


def worker(size: str, rounds: int, steps: int, names: list[str], out: str) -> None:
    """One of the processes: each contestant in turn, ``steps`` steps, ``rounds`` times."""
    import resource

    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    loops = {name: MAKERS[name](size) for name in names}
    for loop in loops.values():
        for _ in range(max(10, steps // 2)):
            next(loop)
    times: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds):
        turn = names[i % len(names) :] + names[: i % len(names)]
        for name in turn if i % 2 == 0 else reversed(turn):
            loop = loops[name]
            dist.barrier()
            start = time.perf_counter()
            for _ in range(steps):
                next(loop)
            times[name].append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        result = {
            "times": times,
            "steps": steps,
            "peak_megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "torch": torch.__version__,
        }
        Path(out).write_text(json.dumps(result))
    dist.barrier()
    os._exit(0)  # the loops are not at their end


def launch(size: str, rounds: int, steps: int, names: list[str]) -> dict[str, Any]:
    """Two processes under torchrun."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={WORKERS}",
            __file__,
        ]
        command += ["--worker", size, str(rounds), str(steps), ",".join(names), str(out)]
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "RONDE_RUNS": str(Path(folder) / "runs"),
            "RONDE_PROGRESS": "quiet",
        }
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1800)
        if not out.exists():
            sys.exit(done.stdout + done.stderr)
        return json.loads(out.read_text())


def import_cost(repeats: int = 7) -> dict[str, float]:
    """Median seconds of an import in a fresh process, taken in turn, with the bytecode that an
    installation has: sources under PYTHONDONTWRITEBYTECODE are compiled each time.
    """
    statements = {
        "torch": "import torch",
        "ronde": "import ronde",
        "torch, then ronde.distribute": "import torch, ronde; ronde.distribute",
        "accelerate": "import accelerate",
        "lightning.fabric": "import lightning.fabric",
    }
    times: dict[str, list[float]] = {name: [] for name in statements}
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "PYTHONPYCACHEPREFIX": folder, "PYTHONDONTWRITEBYTECODE": ""}
        for i in range(repeats + 1):
            for name, statement in statements.items():
                command = [sys.executable, "-c", statement]
                start = time.perf_counter()
                subprocess.run(command, check=True, capture_output=True, env=env)
                if i:  # the first fills the caches of files and bytecode
                    times[name].append(time.perf_counter() - start)
    return {name: statistics.median(t) for name, t in times.items()}


def order_cost() -> dict[str, Any]:
    """Start, seek and memory of the order and of a resume in the middle of an epoch, by size of the
    data set.
    """
    code = """
import json, resource, sys, time
import torch
from torch.utils.data import Dataset
from ronde.feed import Feed, LoaderSettings, Order
from ronde.plan import shares
n = int(sys.argv[1])
class Rows(Dataset):
    def __len__(self): return n
    def __getitem__(self, i): return i
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.perf_counter()
feed = Feed(Rows(), Order(n, 0), LoaderSettings(), 0)
def rest(): return shares(3, n - n // 3, n, 64, 1, 2)
batches = feed.read(rest)
next(batches)
first = time.perf_counter() - start
for _ in range(200): next(batches)
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
print(json.dumps({"first_batch_ms": first * 1e3, "grown_megabytes": grown}))
"""
    found = {}
    for n in (10**5, 10**7, 10**9):
        runs = [
            json.loads(
                subprocess.run(
                    [sys.executable, "-c", code, str(n)], check=True, capture_output=True, text=True
                ).stdout
            )
            for _ in range(3)
        ]
        found[f"{n:.0e}"] = {k: statistics.median(r[k] for r in runs) for k in runs[0]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument(
        "--only", choices=["small", "rows", "large", "import", "order"], help="one part only"
    )
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "overhead.json"))
    parser.add_argument("--worker", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        size, rounds, steps, names, out = arguments.worker
        worker(size, int(rounds), int(steps), names.split(","), out)
        return
    path = Path(arguments.out)
    report: dict[str, Any] = (
        json.loads(path.read_text()) if arguments.only and path.exists() else {}
    )
    report["machine"] = {
        "cores": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
    }
    for size, steps in (("small", 200), ("rows", 200), ("large", 8)):
        if arguments.only not in (None, size):
            continue
        found = launch(size, arguments.rounds, steps, list(CONTESTANTS))
        times = found["times"]
        part = report[size] = {
            "torch": found["torch"],
            "rounds": arguments.rounds,
            "steps_per_round": steps,
        }
        for name in CONTESTANTS:
            ratios = sorted(d / t for d, t in zip(times["ddp"], times[name], strict=True))
            quarter = len(ratios) // 4
            part[name] = {
                "steps_per_second": steps / statistics.median(times[name]),
                "relative_to_ddp": statistics.median(ratios),
                "quartiles": [ratios[quarter], ratios[-1 - quarter]],
                "peak_megabytes": launch(size, 2, steps, [name])["peak_megabytes"],
            }
        print(f"\n{size}: {WORKERS} workers, {arguments.rounds} rounds of {steps} steps")
        print(f"{'':12}{'steps/s':>10}{'of DDP':>9}{'quartiles':>16}{'peak MB':>10}")
        for name in CONTESTANTS:
            p = part[name]
            quartiles = f"{p['quartiles'][0]:.3f}–{p['quartiles'][1]:.3f}"
            print(
                f"{name:12}{p['steps_per_second']:10.1f}{p['relative_to_ddp']:9.3f}{quartiles:>16}{p['peak_megabytes']:10.0f}",
                flush=True,
            )
        _write(path, report)
    if arguments.only in (None, "import"):
        report["import_seconds"] = import_cost()
        print("\nimport, seconds (median)")
        for name, seconds in report["import_seconds"].items():
            print(
                f"{name:30}{seconds:8.3f}{seconds / report['import_seconds']['torch']:8.2f} × torch"
            )
    if arguments.only in (None, "order"):
        report["order"] = order_cost()
        print("\norder: first batch after a resume at two thirds of the epoch")
        for n, values in report["order"].items():
            print(
                f"{n:>8} samples{values['first_batch_ms']:10.1f} "
                f"ms{values['grown_megabytes']:8.1f} MB"
            )
    _write(path, report)


def _write(path: Path, report: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
