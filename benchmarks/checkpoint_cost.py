"""What a checkpoint in the background costs the training, compared with one that it waits for.

    python benchmarks/checkpoint_cost.py [--rounds 8] [--width 1536]

In one training, saves that wait and saves in the background take turns. *stall*: how long
``run.save`` returned later. *drag*: how much longer the steps took until the write had ended,
together. *compare*: how long it took to compare the weights of replicas, which comes before each
save. Medians over rounds, of the slowest rank; a table and ``results/checkpoint_cost.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "checkpoint_cost.json"
PLANS = ((1, "replicate"), (2, "replicate"), (2, "shard=parameters"))


def job(rounds: int, width: int, out: Path) -> None:
    import torch

    import ronde

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(width, width) for _ in range(10)]
    model = torch.nn.Sequential(*layers)
    data = torch.utils.data.TensorDataset(torch.randn(4096, width))
    run = ronde.distribute(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-5),
        data,
        loss=lambda x: x.square().mean(),
        forward=lambda m, batch: m(batch[0]),
        batch_size=64,
        keep=1,
    )
    saver = run.port.group.saving.saver
    batches = (batch for _ in iter(int, 1) for batch in run.batches())

    def step() -> float:
        start = time.perf_counter()
        run.step(next(batches)).item()
        return time.perf_counter() - start

    def save(wait: bool) -> float:
        run.barrier()
        start = time.perf_counter()
        run.save(wait=wait)
        return time.perf_counter() - start

    def compare() -> float:
        run.barrier()
        start = time.perf_counter()
        for call in run.port.group.members[0].callbacks.before_copy:
            call(run.port.parts)
        return time.perf_counter() - start

    found = {"waits": [], "stall": [], "drag": [], "step": [], "write": [], "compare": []}
    for i in range(rounds + 1):
        usual = statistics.median([step() for _ in range(6)])
        waits = save(True)
        step()
        stall = save(False)
        began, drag = time.perf_counter(), 0.0
        while run.reduce(int(saver.is_writing), "max"):
            drag += step() - usual
        write = time.perf_counter() - began
        row = {"waits": waits, "stall": stall, "drag": drag, "step": usual, "write": write}
        row = run.reduce({**row, "compare": compare()}, "max")
        if i:  # the first allocates the copies
            for name, value in row.items():
                found[name].append(value)
    if run.is_main:
        result = {name: statistics.median(values) for name, values in found.items()}
        size = sum(f.stat().st_size for f in max(run.dir.checkpoints.iterdir()).iterdir())
        out.write_text(json.dumps({**result, "bytes": size}))
    run.port.parts.place.ended = True


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--width", type=int, default=1536)
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        job(options.rounds, options.width, options.job)
        return
    rows = []
    for workers, plan in PLANS:
        with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
            out = Path(folder) / "out.json"
            command = [
                sys.executable,
                "-m",
                "ronde",
                "run",
                "-q",
                "-n",
                str(workers),
                "--plan",
                plan,
            ]
            command += ["--runs", folder, __file__, "--job", str(out)]
            command += ["--rounds", str(options.rounds), "--width", str(options.width)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=900)
            if done.returncode:
                sys.exit(done.stdout + done.stderr)
            rows.append({"workers": workers, "plan": plan, **json.loads(out.read_text())})
    print(f"{'workers':>7} {'plan':18} {'MB':>6} {'waits s':>8} {'stall s':>8} {'of it':>6} "
          f"{'drag s':>7} {'both':>6} {'step s':>7} {'compare s':>9}")  # fmt: skip
    for r in rows:
        print(
            f"{r['workers']:7} {r['plan']:18} {r['bytes'] / 1e6:6.0f} {r['waits']:8.3f} "
            f"{r['stall']:8.3f} {r['stall'] / r['waits']:6.1%} {r['drag']:7.3f} "
            f"{(r['stall'] + r['drag']) / r['waits']:6.1%} {r['step']:7.3f} {r['compare']:9.4f}"
        )
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    sys.exit(any(r["stall"] > 0.1 * r["waits"] for r in rows))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
