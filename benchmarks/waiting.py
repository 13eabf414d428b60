"""How shall compute threads wait for each other? Milliseconds of a step, back to back and after a
wait, by how long OpenMP's threads spin.

    python benchmarks/waiting.py                  # prints a table and writes
    benchmarks/results/waiting.json python benchmarks/waiting.py --rounds 9

One process with two compute threads (``alone``), and two such processes at once, which share cores
where there are fewer than four (``beside``). GNU OpenMP as it comes, with
``OMP_WAIT_POLICY=PASSIVE`` (threads sleep at once) and with ``GOMP_SPINCOUNT=10000`` take turns,
round after round, each in processes of its own; printed is the median over rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

THREADS, WARM, STEPS, WAIT_SECONDS = 2, 10, 40, 0.02
WAYS = {
    "as it comes": {},
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
    "10,000 spins": {"GOMP_SPINCOUNT": "10000"},
}
JOBS = ("small step after a wait", "perceptron", "transformer")


def worker(job: str) -> None:
    """Print the median milliseconds of a step, without the wait."""
    import time

    import torch
    from torch import nn

    torch.manual_seed(0)
    if job == "transformer":
        model = nn.Sequential(
            *(nn.TransformerEncoderLayer(128, 4, 512, 0.0, batch_first=True) for _ in range(4))
        )
        x = torch.randn(8, 64, 128)
    elif job == "perceptron":
        model, x = (
            nn.Sequential(
                nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
            ),
            torch.randn(64, 256),
        )
    else:
        model, x = nn.Linear(768, 10), torch.randn(64, 768)
    optimizer = torch.optim.AdamW(model.parameters())
    taken = []
    for _ in range(WARM + STEPS):
        if "wait" in job:
            time.sleep(WAIT_SECONDS)
        start = time.perf_counter()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        taken.append(time.perf_counter() - start)
    print(1e3 * statistics.fmean(taken[WARM:]))


def measure(way: str, job: str, processes: int) -> float:
    """Of the slowest of so many processes at once."""
    plain = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    env = {**plain, "OMP_NUM_THREADS": str(THREADS), **WAYS[way]}
    started = [
        subprocess.Popen(
            [sys.executable, __file__, "--worker", job], env=env, stdout=subprocess.PIPE, text=True
        )
        for _ in range(processes)
    ]
    return max(float(p.communicate(timeout=300)[0]) for p in started)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "waiting.json"
    )
    asked = parser.parse_args()
    if asked.worker:
        worker(asked.worker)
        return
    cases = [(job, processes) for processes in (1, 2) for job in JOBS]
    found: dict[tuple[str, int, str], list[float]] = {
        (job, processes, way): [] for job, processes in cases for way in WAYS
    }
    for _ in range(asked.rounds):
        for (job, processes, way), taken in found.items():
            taken.append(measure(way, job, processes))
    rows = []
    print(f"{'':34}" + "".join(f"{way:>14}" for way in WAYS))
    for job, processes in cases:
        middle = {way: statistics.median(found[job, processes, way]) for way in WAYS}
        rows.append({"job": job, "processes": processes, "milliseconds": middle})
        print(
            f"{job + (' (alone)' if processes == 1 else ' (beside)'):34}"
            + "".join(f"{ms:>11.2f} ms" for ms in middle.values())
        )
    machine = {
        "machine": platform.machine(),
        "processor": platform.processor(),
        "cores": os.cpu_count(),
        "system": platform.system(),
    }
    told = {
        "threads": THREADS,
        "wait_seconds": WAIT_SECONDS,
        "rounds": asked.rounds,
        **machine,
        "rows": rows,
    }
    asked.out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
