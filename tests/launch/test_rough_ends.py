"""Ends that nobody planned: each is told in a sentence, with a status that is not 0, and the run
directory has one writer.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from processes import child, python, ronde, ronde_run
from ronde.launch.console import Router
from ronde.launch.job import Job, Nodes
from ronde.launch.node import Node
from ronde.launch.supervise import Workers
from sampling import some

SCRIPT = textwrap.dedent(
    """
    import os, sys, time, torch, ronde
    WAY, STEP = sys.argv[1], int(sys.argv[2])
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(32, 3), torch.randn(32, 1))
    run = ronde.distribute(model, optimizer, data, loss=torch.nn.functional.mse_loss, batch_size=4,
                           save_every=1, name="rough" if WAY == "python" else None)
    if WAY == "nothing":
        sys.exit()
    for epoch in run.epochs(1):
        for batch in run.batches():
            run.step(batch)
            if run.state.step == STEP:
                if WAY == "wait":
                    print("trained", flush=True)
                    time.sleep(60)
                if WAY == "left" and run.rank == run.world_size - 1:
                    os._exit(0)
    """
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rough")
    (folder / "train.py").write_text(SCRIPT)
    return folder


def record(folder, name):
    return [json.loads(line) for line in (folder / "runs" / name / "record.jsonl").open()]


@pytest.mark.parametrize("workers", some([2, 1], 2))
def test_a_rank_that_leaves_with_status_0(folder, workers):
    name = f"left-{workers}"
    line = ["run", "-q", "-n", str(workers), "--name", name, "--hang-timeout", "3"]
    line += ["train.py", "left", "3"]
    done = ronde_run(line, folder)
    assert done.returncode == 1
    told = "rank 1 had ended, with status 0" if workers > 1 else "the workers left with status 0"
    assert told in done.stderr, done.stderr
    end = record(folder, name)[-1]
    assert (end["type"], end["status"]) == ("end", "failed"), end
    assert told in end["error"]


def test_a_script_that_does_not_train_ends_well(folder):
    done = ronde_run(["run", "-q", "-n", "1", "--name", "no", "train.py", "nothing", "-1"], folder)
    assert done.returncode == 0, done.stderr


def test_a_run_has_one_writer(folder):
    again = ["run", "-q", "-n", "1", "--name", "rough", "--resume", "train.py", "none", "-1"]
    line = ["run", "-q", "-n", "1", "--name", "rough", "train.py", "wait", "3"]
    with child(ronde(*line), folder, fork=True) as first:
        first.wait_for("trained", 60)
        before = record(folder, "rough")
        refused = [
            ronde_run(again, folder),
            python(["train.py", "python", "-1"], folder, env={"RONDE_RESUME": "1"}),
        ]
        for done in refused:
            assert done.returncode != 0 and "is being trained already (by process" in done.stderr
        assert record(folder, "rough") == before, "the second one wrote to the record"
        first.kill()
    done = ronde_run(again, folder)  # the kernel let go of the lock
    assert done.returncode == 0, done.stderr
    assert [e["step"] for e in record(folder, "rough") if e["type"] == "resume"] == [2]


def test_a_run_directory_that_cannot_be_written_to(folder):
    (folder / "runs" / "odd" / ".lock").mkdir(parents=True)
    (folder / "runs" / "odd" / "plan.yaml").touch()
    line = ["run", "-n", "1", "--name", "odd", "--resume", "train.py", "none", "-1"]
    done = ronde_run(line, folder)
    assert done.returncode == 2
    assert "cannot be written to (Is a directory). Make it writable" in done.stderr


class EndsBetweenLooks:
    """Starts workers that end just after a look at them, and before the next one."""

    pid = 0

    def start(self, environment, output, over):
        process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])

        class Late:
            pid = process.pid

            def poll(self):
                code = process.poll()
                process.wait(60)
                return code

        return Late()


def test_a_failure_between_two_looks_is_a_failure(tmp_path):
    router = Router(1, lambda _: None)
    try:
        workers = Workers([], [{"RANK": "0"}], router, starter=EndsBetweenLooks())
        assert {rank: failed.code for rank, failed in workers.wait().items()} == {0: 3}
    finally:
        router.close()


EARLY = """
import os, signal, time
from ronde.launch import Job, agent, run_here


class Early(agent.Router):
    def __init__(self, *given):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        super().__init__(*given)


agent.Router = Early
outcome = run_here(Job(["sleep.py"], 1), print, print)
assert outcome.interrupted, outcome
"""


def test_ctrl_c_while_the_workers_are_about_to_start(tmp_path):
    (tmp_path / "sleep.py").write_text("import time; time.sleep(5); open('trained', 'w')")
    done = python(["-c", EARLY], tmp_path, timeout=60)
    assert done.returncode == 0 and not done.stdout, done.stdout + done.stderr
    assert not (tmp_path / "trained").exists()


FIRST = """
import os, signal, time

if os.environ["RANK"] == "1":
    signal.signal(signal.SIGTERM, lambda *_: open("ends", "w"))  # slowly
    open("up", "w")
    while True:
        time.sleep(1)
while not os.path.exists("up"):
    time.sleep(0.02)
raise ValueError("on purpose")
"""


def test_a_failure_is_told_though_another_host_ends_the_workers(tmp_path, monkeypatch):
    """It fails because of this one, and its own may all have ended before."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(FIRST)
    router = Router(2, lambda _: None)
    node = Node(Job(["train.py"], 2), Nodes(), "first", router, lambda _: None, 0.0)

    def stop() -> None:
        while not (tmp_path / "ends").exists():
            time.sleep(0.02)
        node.stop(signal.SIGINT, 1.5)

    threading.Thread(target=stop, daemon=True).start()
    outcome = node.run()
    assert (outcome.rank, outcome.error) == (0, "ValueError: on purpose")
