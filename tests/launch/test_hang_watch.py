"""Real runs that hang: named in one sentence, ended, and nothing is left."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import time

import pytest

from processes import PATHS, environment, ronde_run
from ronde.launch.hang_watch import WatchedWorker
from ronde.watch.stack_place import locate, threads_of
from sampling import long, some

SCRIPT = textwrap.dedent(
    """
    import os, signal, sys, time, torch, ronde
    way = sys.argv[1]; torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(160, 3), torch.randn(160, 1))
    options = dict(loss=torch.nn.functional.mse_loss, batch_size=4)
    run = ronde.distribute(model, optimizer, data, **options)
    for epoch in run.epochs(1):
        for batch in run.batches():
            run.step(batch)
            if run.state.step == 5 and run.rank == 1:
                if way == "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                elif way != "once" or not os.path.exists("hung"):
                    open("hung" if way == "once" else os.devnull, "w").close()
                    time.sleep(100)
    """
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hangs")
    (folder / "train.py").write_text(SCRIPT)
    return folder


@pytest.mark.parametrize(
    ("way", "sentence"),
    some(
        [
            (
                "branch",
                "Rank 1 has not reached the exchange of step 6; it is at train.py:17 "
                "(`time.sleep(100)`), inside `if run.state.step == 5 and run.rank == 1`; rank 0 is "
                "waiting for it.",
            ),
            ("stop", "Rank 1 is stopped (SIGSTOP, or Ctrl-Z) in step 6, for "),
        ],
        2,
    ),  # benchmarks/hang_truth.py has all
)
def test_a_hang_ends_the_run(folder, way, sentence):
    line = ["run", "-q", "-n", "2", "--name", way, "--hang-timeout", "3", "train.py", way]
    done = ronde_run(line, folder)
    assert done.returncode == 1 and sentence in done.stderr, done.stderr
    events = [json.loads(x) for x in (folder / "runs" / way / "record.jsonl").open()]
    hang, end = events[-2:]
    assert (hang["type"], hang["rank"], hang["step"], hang["waiting"]) == ("hang", 1, 6, [0])
    assert hang["place"] == ("train.py:17" if way == "branch" else "train.py:14")
    assert end["status"] == "failed" and end["error"] == hang["sentence"]
    shown = json.loads(ronde_run(["show", way, "--json"], folder).stdout)
    assert shown["hangs"][-1]["sentence"] == hang["sentence"]
    if way == "branch":
        log = (folder / "runs" / way / "logs" / "rank-0.log").read_text()
        assert "The stack of rank 0:" in log and "ddp.py" in log


@long
def test_a_hang_is_followed_by_a_restart(folder):
    line = ["run", "-q", "-n", "2", "--name", "again", "--hang-timeout", "3", "--restarts", "1"]
    done = ronde_run([*line, "train.py", "once"], folder)
    assert done.returncode == 0, done.stderr
    assert "restart 1 of 1" in done.stderr and "Rank 1 has not reached the exchange" in done.stderr
    events = [json.loads(x) for x in (folder / "runs" / "again" / "record.jsonl").open()]
    kinds = [e["type"] for e in events if e["type"] in ("hang", "restart", "end")]
    kinds = [k for n, k in enumerate(kinds) if k not in kinds[:n]]  # a notice may come before
    assert kinds == ["hang", "restart", "end"] and events[-1]["status"] == "completed"


BUSY = """
import os, sys, threading, time, torch.distributed
from pathlib import Path
from ronde.launch import worker
from ronde.world.heartbeat import Heartbeat

def deep(n):
    return n and deep(n - 1)

def busy():
    while True:
        for n in range(200):
            deep(n % 40)
        time.sleep(0.0005)

def waits():
    print("ready", flush=True)
    time.sleep(60)

worker.show_stacks()
beat = Heartbeat(Path(os.environ["RONDE_WATCH_DIR"]), 0)
beat.answer(False)
for _ in range(3):
    threading.Thread(target=busy, daemon=True).start()
waits()
"""


def test_a_look_at_busy_threads_does_no_harm(tmp_path):
    """To read the stacks of running threads in a signal would crash the process, now and then."""
    file = tmp_path / "busy.py"
    file.write_text(BUSY)
    own = {"RONDE_WATCH_DIR": str(tmp_path), "RANK": "0", "PYTHONPATH": PATHS}
    process = subprocess.Popen(
        [sys.executable, str(file)], env=environment(own), stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        worker = WatchedWorker(0, tmp_path)
        worker.look(time.monotonic())
        for _ in range(10):
            dump, _ = worker.stacks()
            assert process.poll() is None, dump
            main, *others = threads_of(dump)
            assert [f for _, _, f in main] == ["waits", "<module>"]
            assert sum("busy" in [f for _, _, f in other] for other in others) == 3
        assert locate(dump).line == BUSY.splitlines().index("    time.sleep(60)") + 1
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
