"""What does scheduling workers on the CPU as batch change? Seconds of a step with it, without it,
and of hand-written torch.

    python benchmarks/scheduling.py                  # prints a table and writes
    benchmarks/results/scheduling.json python benchmarks/scheduling.py --rounds 3

The same small transformer trains on two workers under several plans. Ronde as it is, Ronde with
RONDE_SCHEDULING=other, and loops written by hand with torch's DistributedDataParallel and FSDP2
take turns, round after round, each in processes of its own; printed is the median over rounds of
each round's ratio to Ronde as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

WORKERS, WARM, STEPS = 2, 4, 20
PLANS = ("replicate", "shard=gradients", "shard=parameters", "pipeline=2,micro_batch=2")
BATCH = 16


def build() -> tuple[Any, Any, Any, Any]:
    """Model, optimizer, data set, loss."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.TransformerEncoderLayer(128, 4, 512, 0.0, batch_first=True) for _ in range(6))
    )
    data = torch.utils.data.TensorDataset(torch.randn(16, 64, 128), torch.randn(16, 64, 128))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-5), data, nn.functional.mse_loss


def timed(one: Any) -> float:
    """Median seconds of a step."""
    import torch.distributed as dist

    taken = []
    for _ in range(WARM + STEPS):
        dist.barrier()
        start = time.perf_counter()
        one()
        dist.barrier()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[WARM:])


def with_ronde() -> dict[str, float]:
    """Every plan, by Ronde."""
    import ronde

    found = {}
    for plan in PLANS:
        model, optimizer, data, loss = build()
        run = ronde.distribute(model, optimizer, data, loss=loss, batch_size=BATCH, plan=plan)

        def one(run: Any = run) -> None:
            for batch in run.batches():
                run.step(batch)

        found[plan] = timed(one)
    return found


def by_hand() -> dict[str, float]:
    """The plans that torch has ready, by its own means."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found = {}
    for plan in PLANS[:3]:
        model, _, data, loss = build()
        if plan == "replicate":
            model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        else:
            mesh = init_device_mesh("cpu", (WORKERS,))
            for layer in model:
                fully_shard(layer, mesh=mesh, reshard_after_forward=plan == "shard=parameters")
            fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        own = BATCH // WORKERS
        inputs, targets = (t[rank * own : (rank + 1) * own] for t in data.tensors)

        def one(
            model: Any = model,
            optimizer: Any = optimizer,
            inputs: Any = inputs,
            targets: Any = targets,
            loss: Any = loss,
        ) -> None:
            optimizer.zero_grad()
            loss(model(inputs), targets).backward()
            optimizer.step()

        found[plan] = timed(one)
    dist.destroy_process_group()
    return found


def start(what: str) -> dict[str, float]:
    """One contestant, in processes of its own."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "RONDE_RUNS": "none",
        "RONDE_DEVICE": "cpu",
    }
    environment["RONDE_SCHEDULING"] = "other" if what == "other" else ""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={WORKERS}",
        __file__,
        "--worker",
        what,
    ]
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=300
    )
    told = next(line for line in done.stdout.splitlines() if line.startswith("{"))
    return {str(k): float(v) for k, v in json.loads(told).items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--json", type=Path, default=Path(__file__).parent / "results" / "scheduling.json"
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        found = by_hand() if given.worker == "torch" else with_ronde()
        if os.environ["RANK"] == "0":
            print(json.dumps(found), flush=True)
        return
    who = ["ronde", "other", "torch"]
    rounds = []
    for r in range(given.rounds):
        order = who[r % 3 :] + who[: r % 3]
        found = {what: start(what) for what in order}
        rounds.append(found)
        print(
            f"round {r + 1} of {given.rounds}: "
            + ", ".join(
                f"{w} {' '.join(f'{1e3 * v:.0f}' for v in found[w].values())} ms" for w in who
            ),
            flush=True,
        )
    rows = []
    for plan in PLANS:
        row: dict[str, Any] = {
            "plan": plan,
            "ronde_seconds": statistics.median(f["ronde"][plan] for f in rounds),
        }
        for what in who[1:]:
            if plan in rounds[0][what]:
                row[what] = statistics.median(f[what][plan] / f["ronde"][plan] for f in rounds)
        rows.append(row)
    print(f"\n{'plan':28} {'Ronde':>9} {'as usual':>9} {'torch by hand':>14}")
    for row in rows:
        torch = f"× {row['torch']:.2f}" if "torch" in row else ""
        print(
            f"{row['plan']:28} {1e3 * row['ronde_seconds']:6.1f} ms "
            f"{'× ' + format(row['other'], '.2f'):>9} {torch:>14}"
        )
    import torch as installed

    about = {
        "torch": installed.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": os.cpu_count(),
    }
    given.json.write_text(json.dumps({"rounds": rounds, "rows": rows, **about}, indent=2) + "\n")


if __name__ == "__main__":
    main()
