"""Servers and workers that are killed at random moments while gradients are exchanged.

    python benchmarks/exchange_faults.py [--tries 20] [--seed 0]

Two workers train with two reduction servers; nearly all of a step is exchange. One of the four
processes is killed at a random moment. The run must name it, start again by itself, leave no
process, and end with the weights of a run that nobody disturbed, bit for bit.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from safetensors.torch import load_file

SCRIPT = """
import torch, torch.nn.functional as F, ronde
from torch.utils.data import TensorDataset
g = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(96, 512, generator=g), torch.randint(3, (96,), generator=g))
torch.manual_seed(3)
model = torch.nn.Sequential(
    torch.nn.Linear(512, 2048), torch.nn.Tanh(), torch.nn.Linear(2048, 1024), torch.nn.Tanh(),
    torch.nn.Linear(1024, 3),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
run = ronde.distribute(
    model, optimizer, data, loss=F.cross_entropy, batch_size=8, save_every=8
)
for epoch in run.epochs(5):
    for batch in run.batches():
        run.step(batch)
        if run.state.step == 1:
            print("TRAINING", flush=True)
run.export(run.dir.path / "final.safetensors")
"""
RONDE = [
    sys.executable,
    "-m",
    "ronde",
    "run",
    "--runs",
    "runs",
    "-q",
    "-n",
    "2",
    "--servers",
    "2",
    "--restarts",
    "2",
    "--no-spares",
]


def begin(folder: Path, *options: str) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([*RONDE, *options, "train.py"], cwd=folder, **pipes)


def finish(running: subprocess.Popen[str], said: str = "") -> str:
    try:
        rest, _ = running.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        running.kill()
        raise SystemExit(f"FAILS: hangs after {said}") from None
    return said + rest


def processes(running: subprocess.Popen[str]) -> dict[str, list[psutil.Process]]:
    """The servers and the workers of a run."""
    found: dict[str, list[psutil.Process]] = {"server": [], "worker": []}
    for each in psutil.Process(running.pid).children(recursive=True):
        line = " ".join(each.cmdline())
        if "reduction_server" in line:
            found["server"].append(each)
        elif "launch/worker" in line and each.environ().get("RANK"):
            found["worker"].append(each)
    return found


def one_try(folder: Path, number: int, draws: random.Random, seconds: float, whole: Path) -> str:
    name = f"try{number}"
    running = begin(folder, "--name", name)
    said = ""
    while "TRAINING" not in said:
        line = running.stdout.readline()
        if not line:
            return f"FAILS  it ended early: {finish(running, said)}"
        said += line
    kind = draws.choice(("server", "worker"))
    there = processes(running)
    victim = draws.choice(there[kind])
    rank = victim.environ().get("RANK") if kind == "worker" else ""
    after = draws.uniform(0, 0.8 * seconds)
    time.sleep(after)
    if not victim.is_running() or running.poll() is not None:
        return f"too late  {kind} after {after:.2f} s: the run had ended"
    victim.send_signal(signal.SIGKILL)
    killed = time.perf_counter()
    said = finish(running, said)
    ended = time.perf_counter() - killed
    _, left = psutil.wait_procs([p for some in there.values() for p in some], timeout=10)
    named = "reduction server" in said if kind == "server" else f"rank {rank}" in said
    restarted = "restart 1 of 2" in said and "restart 2" not in said
    final = folder / "runs" / name / "final.safetensors"
    if not final.exists():
        return f"FAILS  {kind} after {after:.2f} s: {said}"
    ours, theirs = load_file(final), load_file(whole)
    equal = all(bool((ours[k] == theirs[k]).all()) for k in theirs)
    good = running.returncode == 0 and restarted and named and not left and equal
    again = "started again" if restarted else "NOT STARTED AGAIN"
    return (
        f"{'holds' if good else 'FAILS'}  {kind} killed after {after:.2f} s: "
        f"{again}, ended in {ended:.1f} s, {'named' if named else 'NOT NAMED'}, "
        f"{len(left)} processes left, weights {'equal' if equal else 'DIFFER'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tries", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draws = random.Random(options.seed)
    results = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "train.py").write_text(SCRIPT)
        running = begin(folder, "--name", "whole")
        while "TRAINING" not in running.stdout.readline():
            pass
        start = time.perf_counter()
        finish(running)
        seconds = time.perf_counter() - start
        print(f"undisturbed: {seconds:.1f} s from the first step to the end", flush=True)
        whole = folder / "runs" / "whole" / "final.safetensors"
        for number in range(options.tries):
            results.append(one_try(folder, number, draws, seconds, whole))
            print(results[-1], flush=True)
    held, late = (sum(r.startswith(w) for r in results) for w in ("holds", "too late"))
    print(f"{held} of {len(results) - late} hold; {late} came too late")
    raise SystemExit(held + late < len(results))


if __name__ == "__main__":
    main()
