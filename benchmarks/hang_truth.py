"""Does `ronde run` name the rank that hangs, and the line, and leave slow runs alone?

Each case is one small training on three workers, with the default options. Those that hang on
purpose must be named with the rank and the line that is marked in the script, within 15 s. The
others are slow and alive: none may be ended. Links are slowed with tc, in a network namespace: that
needs root.

    python benchmarks/hang_truth.py                 # all, some minutes
    python benchmarks/hang_truth.py --only lock     # those whose name holds this
    python benchmarks/hang_truth.py --seconds 4     # --hang-timeout 4: those that hang are ended
    python benchmarks/hang_truth.py --restarts      # with --restarts 1, which waits for 60 s only
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
_LIMIT = 400.0
_NAMED_SECONDS = 15.0
_SLOW_LINK = (
    "ip link set lo up && tc qdisc add dev lo root tbf rate {rate} burst 128kb latency 400ms && "
    'exec "$@"'
)

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
        self.body = torch.nn.Linear(3, width)
        self.head = torch.nn.Linear(width, 1)
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
def hangs():
    if not os.path.exists(name := f"{os.environ['HUNG']}-{RANK}"):
        with open(name, "w") as file:
            file.write(str(time.time()))
forward = read = keep = after = measure = caught = done = nothing
metrics, save_at, workers, failing, width = {}, 0, 0, None, 8
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
        rate: of the link between the workers; empty for loopback's.
    """

    name: str
    setup: str
    rank: int | None = 1
    rate: str = ""


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
    Case(
        "a wait in each step",
        """
        def after():
            if RANK == 1 and run.state.step <= 4:
                time.sleep(1.2 * T)
        """,
        None,
    ),
    Case(
        "a wait now and then",
        """
        def after():
            if RANK == 1 and run.state.step % 8 == 0:
                time.sleep(1.2 * T)
        """,
        None,
    ),
    Case(
        "an upload by one rank",
        """
        import socket
        SINK = (
            "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1],"
            " flush=True); c, _ = s.accept()\\nwhile c.recv(65536): pass"
        )
        def after():
            if RANK == 0 and run.state.step == 6:
                sink = subprocess.Popen([sys.executable, "-c", SINK], stdout=subprocess.PIPE)
                link = socket.create_connection(("127.0.0.1", int(sink.stdout.readline())))
                limit = time.monotonic() + 2.5 * T
                while time.monotonic() < limit:
                    link.sendall(bytes(20_000))
                    time.sleep(0.1)
                link.close()
        """,
        None,
    ),
    Case(
        "a subprocess that sleeps",
        """
        def after():
            if RANK == 0 and run.state.step == 6:
                subprocess.run(["sleep", str(2.5 * T)])
        """,
        None,
    ),
    Case(
        "a subprocess that computes",
        """
        BUSY = "import sys, time\\nwhile time.time() < float(sys.argv[1]): pass"
        def after():
            if RANK == 0 and run.state.step == 6:
                subprocess.run([sys.executable, "-c", BUSY, str(time.time() + 2.5 * T)])
        """,
        None,
    ),
    Case(
        "a rank that prints",
        """
        def after():
            limit = time.monotonic() + 2.5 * T
            while RANK == 0 and run.state.step == 6 and time.monotonic() < limit:
                print("still here", flush=True)
                time.sleep(1)
        """,
        None,
    ),
    Case(
        "a long pause in an evaluation",
        """
        paused = []
        def judge(output, target):
            if RANK == 1 and not paused:
                paused.append(time.sleep(4 * T))
            return (output - target).abs().mean()
        metrics = {"judge": judge}
        """,
        None,
    ),
    Case(
        "a link of 1 Mbit/s",  # 12 s for each exchange, from the start on
        """
        width = 20_000
        def after():
            return "leave" if run.state.step == 4 else None
        """,
        None,
        "1mbit",
    ),
    Case(
        "25 million parameters at 150 Mbit/s",
        """
        width = 5_000_000
        def after():
            return "leave" if run.state.step == 3 else None
        """,
        None,
        "150mbit",
    ),
)


def measure(case: Case, seconds: float | None, restarts: bool = False) -> dict[str, Any]:
    """Run one case and compare."""
    text = _SCRIPT.replace("{setup}", textwrap.dedent(case.setup).strip())
    text = re.sub(r"^( +)(.*# HERE)$", r"\1hangs()\n\1\2", text, flags=re.MULTILINE)
    lines = text.splitlines()
    line = next((n for n, each in enumerate(lines, 1) if each.endswith("# HERE")), 0)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(text)
        os.mkfifo(Path(folder) / "fifo")
        command = [sys.executable, "-m", "ronde", "run", "-q", "-n", "3", "--name", "case"]
        command += ["--hang-timeout", str(seconds)] if seconds else []
        command += ["--restarts", "1"] if restarts else []
        command += ["train.py"]
        if case.rate:
            shaped = _SLOW_LINK.format(rate=case.rate)
            command = ["unshare", "-n", "sh", "-c", shaped, "-", *command]
        environment = {
            **os.environ,
            "SECONDS": str(seconds or 10.0),
            "FIFO": f"{folder}/fifo",
            "LOCK": f"{folder}/lock",
            "HUNG": f"{folder}/hung",
            "RONDE_DEVICE": "cpu",
        }
        record = Path(folder) / "runs" / "case" / "record.jsonl"

        shown = Path(folder) / "output"

        def found() -> list[dict[str, Any]]:
            events = [json.loads(x) for x in record.open()] if record.exists() else []
            if events or case.rank is None:
                return [e for e in events if e["type"] == "hang"]
            # a hang before the record has begun is printed only
            words = r"^warning: (Rank (\d+) .*?it is at (train.py:\d+).*)"
            said = re.search(words, shown.read_text(), re.MULTILINE)
            if said is None:
                return []
            named = {"sentence": said[1], "rank": int(said[2]), "place": said[3]}
            return [{"time": time.time(), "slow": True, **named}]

        start = time.monotonic()
        output = shown.open("w+")
        hangs: list[dict[str, Any]] = []
        with (
            output,
            subprocess.Popen(
                command, cwd=folder, env=environment, stdout=output, stderr=output
            ) as process,
        ):
            while process.poll() is None and time.monotonic() < start + _LIMIT:
                time.sleep(0.2)
                if case.rank is not None and not seconds and (hangs := found()):
                    process.send_signal(signal.SIGINT)
                    process.wait()
            status = process.poll()
            if status is None:
                process.kill()
            output.seek(0)
            said = output.read()
        took = time.monotonic() - start
        hangs = hangs or found()
        hung = Path(folder) / f"hung-{case.rank}"
        begun = float(hung.read_text()) if hung.exists() else None
    ended = [e for e in hangs if not e["slow"]]
    hangs = ended if seconds else hangs
    named = hangs[0] if hangs else {"rank": None, "place": "", "sentence": said.strip()[-300:]}
    after = named["time"] - begun if begun and hangs else None
    if case.rank is None:
        right = status == 0 and not ended and "restart 1" not in said
    else:
        right = bool(hangs) and named["rank"] == case.rank and named["place"] == f"train.py:{line}"
        right = right and (bool(seconds) or (after is not None and after <= _NAMED_SECONDS))
    return {
        "case": case.name,
        "hangs": case.rank is not None,
        "right": right,
        "rank": [named["rank"], case.rank],
        "place": [named["place"], f"train.py:{line}" if line else ""],
        "seconds": round(took, 1),
        "named_after_seconds": None if after is None else round(after, 1),
        "sentence": named["sentence"] if (case.rank is not None and hangs) or status else "",
        "slow": [e["sentence"] for e in hangs if e["slow"]] if case.rank is None else [],
    }


def main() -> None:
    """Measure all cases, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, help="--hang-timeout; default: the default")
    parser.add_argument("--restarts", action="store_true", help="with --restarts 1")
    parser.add_argument("--jobs", type=int, default=2, help="trainings at the same time")
    parser.add_argument("--out", type=Path, default=_HERE / "results" / "hang_truth.json")
    given = parser.parse_args()
    slows_links = os.geteuid() == 0 and shutil.which("tc") and shutil.which("unshare")
    cases = [c for c in (*HANGS, *SLOW) if given.only in c.name and (slows_links or not c.rate)]
    with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        rows = list(pool.map(lambda c: measure(c, given.seconds, given.restarts), cases))
    for row in rows:
        kind = "hangs" if row["hangs"] else "slow"
        print(f"{'right' if row['right'] else 'WRONG'}  {kind:5}  {row['case']}", flush=True)
        after = row["named_after_seconds"]
        named = f", named after {after} s" if after else ""
        print(f"       {row['seconds']:5.1f} s{named}  {row['sentence'] or '-'}")
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
