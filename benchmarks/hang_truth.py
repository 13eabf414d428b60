"""Does `ronde run` name the rank that hangs, and the line, and leave slow runs alone?

Each case is one small training on three workers. Twelve hang on purpose: the verdict must name the
rank and the line that is marked in the script. Six are slow and alive: none may be ended.

    python benchmarks/hang_truth.py                 # all, some minutes
    python benchmarks/hang_truth.py --only lock     # those whose name holds this
    python benchmarks/hang_truth.py --seconds 10    # with the default time limit
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
_LIMIT = 180.0

_SCRIPT = """
import fcntl, os, queue, signal, subprocess, sys, threading, time, torch
import torch.distributed as dist
import ronde
T = float(os.environ["SECONDS"])
RANK = int(os.environ.get("RANK", "0"))
torch.manual_seed(0)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(3, 8)
        self.head = torch.nn.Linear(8, 1)
    def forward(self, x):
        forward(self)
        return self.head(self.body(x).relu())

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 240
    def __getitem__(self, i):
        read(i)
        return torch.full((3,), i / 240), torch.ones(1)

class Kept:
    def state_dict(self):
        keep()
        return {"n": 1}
    def load_state_dict(self, state):
        pass

def nothing(*_): pass
forward = read = keep = after = measure = caught = done = nothing
metrics, save_at, workers, failing = {}, 0, 0, None
lock = threading.Lock()
mine = lambda: RANK == 1 and run.state.step == 6
{setup}
torch.manual_seed(0)
model = Net()
data = torch.utils.data.DataLoader(Data(), batch_size=12, num_workers=workers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def loss(output, target):
    if failing is not None and mine():
        raise failing
    return torch.nn.functional.mse_loss(output, target)
run = ronde.distribute(model, optimizer, data, loss=loss)
run.register(kept=Kept())
for epoch in run.epochs(1):
    for batch in run.batches():
        try:
            run.step(batch)
        except ValueError:
            caught()
        if after() == "leave":
            break
        if run.state.step == save_at:
            run.save()
    done()
    if metrics:
        run.evaluate(data, metrics=metrics)
print("trained", flush=True)
"""


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        name: what is wrong.
        setup: code that plants it. The line of a hang ends with ``# HERE``.
        rank: the rank that hangs; None: nobody does.
    """

    name: str
    setup: str
    rank: int | None = 1


HANGS = (
    Case(
        "a branch that one rank takes",
        """
        def after():
            if RANK == 1 and run.state.step == 6:
                dist.barrier()  # HERE
        """,
    ),
    Case(
        "fewer batches on one rank",
        """
        def after():
            return "leave" if mine() else None
        def done():
            if run.state.step == 6:
                dist.barrier()  # HERE
        """,
    ),
    Case(
        "an exception that the script swallows",
        """
        failing = ValueError("bad label")
        def caught():
            dist.barrier()  # HERE
        """,
    ),
    Case(
        "a deadlocked loader",
        """
        workers = 1
        def read(i):
            if RANK == 1 and i > 100:
                lock.acquire()
                lock.acquire()  # HERE
        """,
    ),
    Case(
        "a stopped process",
        """
        def after():
            if mine():
                os.kill(os.getpid(), signal.SIGSTOP)  # HERE
        """,
    ),
    Case(
        "collectives in another order",
        """
        def after():
            if run.state.step == 6:
                a, b = torch.ones(4), torch.ones(2, 2)
                if RANK == 1:
                    dist.recv(b, 0)  # HERE
                dist.all_reduce(a)
                if RANK == 0:
                    dist.send(b, 1)
        """,
    ),
    Case(
        "storage that does not answer",
        """
        def read(i):
            if RANK == 1 and i > 100:
                os.open(os.environ["FIFO"], os.O_RDONLY)  # HERE
        """,
    ),
    Case(
        "a lock that somebody holds",
        """
        def after():
            if run.state.step == 6:
                held = os.environ["LOCK"] + ".held"
                while RANK == 1 and not os.path.exists(held):
                    time.sleep(0.01)
                file = globals()["kept_open"] = open(os.environ["LOCK"], "w")
                if RANK:
                    fcntl.flock(file, fcntl.LOCK_EX)  # HERE
                    open(held, "w").close()
        """,
    ),
    Case(
        "a subprocess that waits for input",
        """
        def after():
            if mine():
                process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
                process.wait()  # HERE
        """,
    ),
    Case(
        "a sleep in the model of one rank",
        """
        def forward(model):
            if mine():
                time.sleep(1e6)  # HERE
        """,
    ),
    Case(
        "a metric that does not return",
        """
        def judge(output, target):
            if RANK == 1:
                threading.Event().wait()  # HERE
            return (output - target).abs().mean()
        metrics = {"judge": judge}
        """,
    ),
    Case(
        "a save that does not return",
        """
        save_at = 6
        def keep():
            if mine():
                queue.Queue().get()  # HERE
        """,
    ),
)

SLOW = (
    Case(
        "one rank computes for long",
        """
        def after():
            limit = time.monotonic() + 2.5 * T
            while mine() and time.monotonic() < limit:
                torch.randn(200, 200) @ torch.randn(200, 200)
        """,
        None,
    ),
    Case(
        "a slow evaluation",
        """
        def judge(output, target):
            if RANK == 1:
                time.sleep(0.6 * T)
            return (output - target).abs().mean()
        metrics = {"judge": judge}
        """,
        None,
    ),
    Case(
        "a slow save",
        """
        save_at = 6
        def keep():
            if mine():
                time.sleep(2 * T)
        """,
        None,
    ),
    Case(
        "a slow start",
        """
        if RANK == 1:
            time.sleep(3 * T)
        """,
        None,
    ),
    Case(
        "storage that gets slower",
        """
        def read(i):
            if RANK == 1:
                time.sleep(min(0.001 * i, 0.1 * T))
        """,
        None,
    ),
    Case(
        "a process that is stopped again and again",
        """
        def after():
            if RANK == 1 and run.state.step in (6, 9, 12):
                subprocess.Popen(["sh", "-c", f"sleep 2; kill -CONT {os.getpid()}"])
                os.kill(os.getpid(), signal.SIGSTOP)
        """,
        None,
    ),
)


def measure(case: Case, seconds: float) -> dict[str, Any]:
    """Run one case and compare."""
    text = _SCRIPT.replace("{setup}", textwrap.dedent(case.setup).strip())
    lines = text.splitlines()
    line = next((n for n, each in enumerate(lines, 1) if each.endswith("# HERE")), 0)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(text)
        os.mkfifo(Path(folder) / "fifo")
        command = [sys.executable, "-m", "ronde", "run", "-q", "-n", "3", "--name", "case"]
        command += ["--hang-timeout", str(seconds), "train.py"]
        environment = {
            **os.environ,
            "SECONDS": str(seconds),
            "FIFO": f"{folder}/fifo",
            "LOCK": f"{folder}/lock",
            "RONDE_DEVICE": "cpu",
        }
        start = time.monotonic()
        try:
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_LIMIT
            )
            status, said = done.returncode, done.stderr
        except subprocess.TimeoutExpired:
            status, said = -1, "it hung on"
        took = time.monotonic() - start
        record = Path(folder) / "runs" / "case" / "record.jsonl"
        events = [json.loads(x) for x in record.open()] if record.exists() else []
    found = [e for e in events if e["type"] == "hang" and not e["slow"]]
    named = found[0] if found else {"rank": None, "place": "", "sentence": said.strip()[-300:]}
    if case.rank is None:
        right = status == 0 and not found
    else:
        right = bool(found) and named["rank"] == case.rank and named["place"] == f"train.py:{line}"
    return {
        "case": case.name,
        "hangs": case.rank is not None,
        "right": right,
        "rank": [named["rank"], case.rank],
        "place": [named["place"], f"train.py:{line}" if line else ""],
        "seconds": round(took, 1),
        "sentence": named["sentence"] if found or status else "",
        "slow": [e["sentence"] for e in events if e["type"] == "hang" and e["slow"]],
    }


def main() -> None:
    """Measure all cases, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=4.0, help="--hang-timeout")
    parser.add_argument("--jobs", type=int, default=2, help="trainings at the same time")
    parser.add_argument("--out", type=Path, default=_HERE / "results" / "hang_truth.json")
    given = parser.parse_args()
    cases = [c for c in (*HANGS, *SLOW) if given.only in c.name]
    with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        rows = list(pool.map(lambda c: measure(c, given.seconds), cases))
    for row in rows:
        kind = "hangs" if row["hangs"] else "slow"
        print(f"{'right' if row['right'] else 'WRONG'}  {kind:5}  {row['case']}", flush=True)
        print(f"       {row['seconds']:5.1f} s  {row['sentence'] or '-'}")
        for sentence in row["slow"]:
            print(f"       slow: {sentence}")
    for kind, wanted in (("hangs", True), ("slow", False)):
        of = [r for r in rows if r["hangs"] is wanted]
        print(f"{kind}: {sum(r['right'] for r in of)} of {len(of)} right")
    if not given.only:
        result = {"seconds": given.seconds, "workers": 3, "cases": rows}
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
