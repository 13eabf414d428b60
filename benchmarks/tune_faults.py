"""Kill a search at random moments, and compare it with the one that was not.

9 trials, 3 rungs, 2 devices. A signal 9 goes to the tuner, to a trial's launcher, or to a worker;
a tuner that was killed is started again with ``--resume``. Then the best trial, all results, and
the weights of the best are compared with those of the undisturbed search, in float64. Steps that
were trained again are counted by the script itself: those since the last checkpoint of a trial
that was killed::

    python benchmarks/tune_faults.py --kills 50
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

SCRIPT = """
import argparse, time, torch, ronde
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--hidden", type=int)
args = parser.parse_args()
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
x = torch.randn(1200, 8)
y = (x @ torch.randn(8, 1)).sin()
model = torch.nn.Sequential(
    torch.nn.Linear(8, args.hidden), torch.nn.Tanh(), torch.nn.Linear(args.hidden, 1)
)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
data = torch.utils.data.TensorDataset
run = ronde.distribute(
    model, optimizer, data(x[:1000], y[:1000]), loss=torch.nn.functional.mse_loss, batch_size=10,
    save_every=20,
)
for _ in run.epochs(9):
    for batch in run.batches():
        run.step(batch)
        if run.rank == 0:
            with open(f"steps-{args.lr}-{args.hidden}.txt", "a") as steps:
                print(run.state.step, file=steps)
        time.sleep(0.05)  # so that signals come while it trains, too
    run.evaluate(data(x[1000:], y[1000:]))
"""
SEARCH = [
    "--space", "lr=log:1e-4..1e-1", "--space", "hidden=4,16", "--goal", "min:loss",
    "--method", "halving", "--max", "9000", "--min", "1000", "--devices", "2",
]  # fmt: skip


def killable(command: psutil.Process) -> dict[str, list[psutil.Process]]:
    """The tuner, the launchers of its trials, and their workers."""
    found: dict[str, list[psutil.Process]] = {"tuner": [command], "launcher": [], "worker": []}
    for child in command.children(recursive=True):
        try:
            words = " ".join(child.cmdline())
        except psutil.Error:
            continue
        if "launch/worker.py" in words:
            found["worker"].append(child)
        elif "ronde run" in words:
            found["launcher"].append(child)
    return found


def search(folder: Path, trials: int, kills: int, rng: random.Random) -> dict[str, Any]:
    """Search, killed so often on the way."""
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    ronde = [sys.executable, "-m", "ronde", "tune", "--quiet"]
    killed: Counter[str] = Counter()
    words = [*ronde, *SEARCH, "--trials", str(trials), "--name", "s", "train.py"]
    began = time.monotonic()
    process = subprocess.Popen(words, cwd=folder, stdout=subprocess.DEVNULL)
    while True:
        try:
            process.wait(rng.uniform(0.3, 3.0))
        except subprocess.TimeoutExpired:
            if killed.total() < kills:
                groups = killable(psutil.Process(process.pid))
                if groups["worker"]:  # not while it starts
                    kind = rng.choices(list(groups), (1, 2, 2))[0]
                    rng.choice(groups[kind]).kill()
                    killed[kind] += 1
            continue
        if process.returncode in (0, 1, 2):
            break
        words = [*ronde, "--resume", "s", "--devices", "2"]
        process = subprocess.Popen(words, cwd=folder, stdout=subprocess.DEVNULL)
    result = json.loads((folder / "runs" / "s" / "result.json").read_text())
    run = folder / result["best"]["run"]
    newest = max(run.glob("checkpoints/step-*"))
    weights: dict[str, torch.Tensor] = {}
    for file in newest.glob("*.safetensors"):
        weights |= {k: v for k, v in load_file(file).items() if v.is_floating_point()}
    steps = [path.read_text().split() for path in folder.glob("steps-*.txt")]
    return {
        "steps": sum(len(set(each)) for each in steps),
        "again": sum(len(each) - len(set(each)) for each in steps),
        "result": result,
        "weights": weights,
        "kills": dict(killed),
        "seconds": round(time.monotonic() - began),
        "status": process.returncode,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=9)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        whole = search(Path(name) / "whole", asked.trials, 0, random.Random(0))
        killed = search(Path(name) / "killed", asked.trials, asked.kills, random.Random(asked.seed))
    ours, theirs = killed["result"], whole["result"]
    pairs = zip(ours["trials"], theirs["trials"], strict=True)
    values = [
        0.0 if a == b else abs(a - b) if None not in (a, b) else float("inf")
        for our, their in pairs
        for a, b in zip(our["results"], their["results"], strict=True)
    ]
    names = killed["weights"].keys() & whole["weights"].keys()
    answer = {
        "kills": killed["kills"],
        "status": killed["status"],
        "same best": ours["best"]["trial"] == theirs["best"]["trial"],
        "results differ by": max(values),
        "weights of the best differ by": max(
            float((killed["weights"][n] - whole["weights"][n]).abs().max()) for n in names
        ),
        "tensors compared": len(names),
        "steps": [whole["steps"], killed["steps"]],
        "steps trained again": [whole["again"], killed["again"]],
        "seconds": [whole["seconds"], killed["seconds"]],
    }
    print(json.dumps(answer, indent=1))
    if asked.json:
        asked.json.write_text(json.dumps(answer, indent=1) + "\n")


if __name__ == "__main__":
    main()
