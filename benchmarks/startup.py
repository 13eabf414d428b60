"""Time from a command to the end of the first step: ``ronde run`` beside torchrun by hand.

On one machine, and on two hosts in network namespaces with their own sshd, which need root::

    python benchmarks/startup.py --rounds 7

Both start the same plain script of torch.distributed, with the same variables. torchrun is started
on both hosts at once over ssh, with the address of the first one, as a person would. The two take
turns, and which one begins changes each round.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from lab import lab, missing

SCRIPT = """
import datetime, os, sys, time
import torch
import torch.distributed as dist
from torch import nn

torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.randn(4, 8)).sum().backward()
optimizer.step()
dist.barrier()
if dist.get_rank() == 0:
    with open(sys.argv[1], "w") as file:
        file.write(str(time.time()))
dist.barrier()
dist.destroy_process_group()
"""
FIXED = {"OMP_NUM_THREADS": "1", "RONDE_DEVICE": "cpu", "RONDE_FEED": "none"}


def timed(commands: list[list[str]], place: Path) -> float:
    """Seconds until rank 0 has written that the first step is done."""
    stamp = place / "stamp"
    stamp.unlink(missing_ok=True)
    environment = {**os.environ, **FIXED}
    start = time.time()
    running = [
        subprocess.Popen(
            words, cwd=place, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for words in commands
    ]
    for process in running:
        said, _ = process.communicate(timeout=120)
        if process.returncode:
            sys.exit(
                f"{shlex.join(process.args)} ended with {process.returncode}:\n{said.decode()}"
            )
    return float(stamp.read_text()) - start


def compare(ways: dict[str, list[list[str]]], place: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds of each way, in turns; the first round warms the caches and does not count."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        names = list(ways)[:: 1 if number % 2 else -1]
        for name in names:
            seconds = timed(ways[name], place)
            if number:
                found[name].append(seconds)
                print(f"{name:<28}{seconds:6.2f} s", file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=("one", "two"), default="")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 8])
    options = parser.parse_args()
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    ronde = [sys.executable, "-m", "ronde", "run", "-q", "--runs", "none"]
    results: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(prefix="startup-") as folder:
        place = Path(folder)
        (place / "step.py").write_text(SCRIPT)
        step = ["step.py", str(place / "stamp")]
        if options.only != "two":
            for workers in map(str, options.workers):
                by_hand = [*torchrun, "--standalone", "--nproc-per-node", workers, *step]
                ways = {
                    "torchrun": [by_hand],
                    "ronde": [[*ronde, "-n", workers, *step]],
                    "ronde --no-spares": [[*ronde, "-n", workers, "--no-spares", *step]],
                }
                name = f"one machine, {workers} worker{'s' if workers != '1' else ''}"
                results[name] = compare(ways, place, options.rounds)
        if options.only != "one":
            if why := missing():
                sys.exit(why)
            with lab(place / "lab", 2) as hosts:
                config = ["--ssh-config", str(hosts.ssh_config)]
                first = hosts.address(hosts.names[0])
                by_hand = []
                for number, name in enumerate(hosts.names):
                    words = [*torchrun, "--nnodes", "2", "--node-rank", str(number)]
                    words += ["--nproc-per-node", "1", "--master-addr", first]
                    words += ["--master-port", "29511", *step]
                    fixed = {**FIXED, "GLOO_SOCKET_IFNAME": "eth0"}
                    told = " ".join(f"{k}={v}" for k, v in fixed.items())
                    line = f"cd {place}; {told} exec {shlex.join(words)}"
                    by_hand.append(["ssh", "-F", str(hosts.ssh_config), name, line])
                both = ",".join(f"{name}:1" for name in hosts.names)
                ways = {
                    "torchrun": by_hand,
                    "ronde": [[*ronde, *config, "--hosts", both, *step]],
                }
                results["two hosts, 1 worker each"] = compare(ways, place, options.rounds)
    for what, found in results.items():
        medians = {name: statistics.median(seconds) for name, seconds in found.items()}
        told = ", ".join(
            f"{name} {seconds:.2f} s ({seconds / medians['torchrun']:.2f}×)"
            for name, seconds in medians.items()
        )
        print(f"{what}: {told}")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
