"""``ronde tune``: real trials, killed and started again, against the search that was not."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import zygote
from ronde.jobs.trials import HOPELESS, Goal, progress_of
from ronde.jobs.tuner import TunePlan, Tuner
from ronde.watch import Alert, Record, RunDir
from ronde.watch.record import Ended, Epoch, Evaluated, StepRecorded
from ronde.world import ArgumentError, RondeError

SCRIPT = """
import argparse, torch, ronde
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
lr = parser.parse_args().lr
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
x = torch.randn(60, 4)
y = x @ torch.randn(4, 1)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=lr)
train, test = torch.utils.data.TensorDataset(x[:40], y[:40]), torch.utils.data.TensorDataset(x[40:], y[40:])
run = ronde.distribute(model, optimizer, train, loss=torch.nn.functional.mse_loss, batch_size=10)
for _ in run.epochs(4):
    for batch in run.batches():
        with open(f"steps-{lr}.txt", "a") as steps:
            print(run.state.step, run.rank, file=steps)
        run.step(batch)
    run.evaluate(test)
"""
WORDS = (
    "--space", "lr=log:1e-3..1", "--goal", "min:loss", "--trials", "2", "--method", "halving",
    "--eta", "2", "--max", "2ep", "--devices", "2", "--name", "s", "train.py",
)  # fmt: skip


def tune(folder: Path, *words: str) -> subprocess.Popen[str]:
    return zygote.Popen(
        [sys.executable, "-m", "ronde", "tune", *words],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.timeout(170)
def test_a_search_that_was_killed_is_what_single_trainings_give(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    first = tune(tmp_path, *WORDS)
    trials = tmp_path / "runs" / "s" / "trials"
    until = time.monotonic() + 60
    while not list(trials.glob("t001/checkpoints/step-*")) and time.monotonic() < until:
        time.sleep(0.1)
    os.kill(first.pid, signal.SIGKILL)
    first.communicate(timeout=30)
    file = tmp_path / "runs" / "s" / "result.json"
    before = json.loads(file.read_text())
    assert before["ended"] == "" and before["log"] == ["lr"] and before["trials"][1]["running"]
    second = tune(tmp_path, "--resume", "s", "--devices", "2")
    told, errors = second.communicate(timeout=150)
    assert second.returncode == 0, errors
    found = json.loads(file.read_text())
    assert found["ended"] == "done" and not any(t["running"] for t in found["trials"])
    alone = tmp_path / "alone"
    for trial in found["trials"]:  # the whole training of each, in one process
        words = [sys.executable, "train.py", "--lr", str(trial["values"]["lr"])]
        done = zygote.run(
            words, cwd=tmp_path, timeout=60, env={**os.environ, "RONDE_RUNS": str(alone)}
        )
        assert done.returncode == 0, done.stderr
    expected = [
        progress_of(RunDir(alone / f"train-{n}"), Goal(False, "loss"), (40, 80)).results
        for n in (1, 2)
    ]
    best = min((0, 1), key=lambda n: expected[n][0])
    assert found["best"]["trial"] == best
    for number, trial in enumerate(found["trials"]):
        rungs = 2 if number == best else 1
        assert trial["results"] == pytest.approx(list(expected[number][:rungs]), abs=1e-12)
        # one that falls behind keeps no checkpoint
        kept = list((trials / f"t00{number}" / "checkpoints").glob("step-*"))
        assert bool(kept) == (number == best)
    assert found["samples"] == 2 * 40 + 40
    assert f"best t00{best}" in told
    assert "again, whole: ronde run train.py --lr" in told
    # the best one went on with both devices
    steps = (tmp_path / f"steps-{found['best']['values']['lr']}.txt").read_text().split("\n")[:-1]
    assert {line.split()[1] for line in steps} == {"0", "1"}


@pytest.mark.timeout(170)
def test_a_rule_ends_a_trial_that_diverges(tmp_path: Path) -> None:
    endless = SCRIPT.replace("run.epochs(4)", "run.epochs(4 if lr < 1 else 10**9)")
    (tmp_path / "train.py").write_text(endless.replace("=10)", "=10, on_nan='ignore')"))
    words = ("--space", "lr=0.1,10", "--goal", "min:loss", "--method", "grid", "--devices", "2")
    process = tune(tmp_path, *words, "--name", "s", "train.py")
    told, errors = process.communicate(timeout=160)
    assert process.returncode == 0, errors
    found = json.loads((tmp_path / "runs" / "s" / "result.json").read_text())
    good, bad = found["trials"]
    assert (good["rule"], bad["rule"]) == ("", "diverging")
    assert bad["results"][-1] is None
    assert found["best"]["trial"] == 0
    assert "ended by a rule: diverging" in told
    assert [line.split()[-1] for line in told.splitlines() if line.startswith("t001")] == [
        "diverging"
    ]


def test_an_alert_ends_a_trial_that_has_not_trained_whole(tmp_path: Path) -> None:
    events = [
        Evaluated(4, 0, 40, {"loss": 0.5}),
        Ended("paused", 4, 0, 40, None, 1.0),
        Alert(4, "", rule="overfit"),
        Alert(4, "", rule="loss-flat"),
    ]
    Record(tmp_path / "record.jsonl").write(StepRecorded(4, 0, 1.0, 0.1, 40), *events)
    goal, run = Goal(False, "loss"), RunDir(tmp_path)
    found = progress_of(run, goal, (40, 80), HOPELESS)
    assert (found.results, found.rule) == ((0.5, None), "loss-flat")
    found = progress_of(run, goal, (40,), HOPELESS)
    assert (found.results, found.rule) == ((0.5,), "")
    found = progress_of(run, goal, (40, 80))
    assert (found.results, found.rule) == ((0.5,), "")


class Launcher:
    """Trains at once."""

    def __init__(self, runs: Path, name: str, command: list[str], until: str, *_: object) -> None:
        self.record = Record(runs / name / "record.jsonl")
        self.samples, self.loss = int(until.partition("@")[0] or 9), float(command[-1])
        self.end = "paused" if until else "completed"

    def ended(self) -> int:
        for n in (n for n in (1, 3, 9) if n <= self.samples):
            self.record.write(StepRecorded(n, 0, 1.0, 0.1, n))
            self.record.write(Evaluated(n, 0, n, {"loss": self.loss / n}))
        self.record.write(Ended(self.end, self.samples, 0, self.samples, None, 1.0))
        return 0

    def leave(self) -> None:
        """Has trained."""

    wait = leave


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ronde.jobs.tuner.TrialProcess", Launcher)
    monkeypatch.setattr("ronde.jobs.tuner.LOOK_SECONDS", 0.0)


@pytest.mark.usefixtures("at_once")
def test_launchers_that_are_killed_are_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    statuses, trained = [-9, -9, -9, -9, 0], Launcher.ended
    # four times before its trial gets anywhere
    monkeypatch.setattr(Launcher, "ended", lambda self: statuses.pop(0) or trained(self))
    found = Tuner(tmp_path, TunePlan(["train.py"], ["lr=0..1"], "min:loss", 1), 1).run()
    assert found.best["result"] == found.best["values"]["lr"] / 9
    assert not statuses
    statuses[:] = [-9] * 99
    with pytest.raises(RondeError, match="trial t000 ends with status -9 and comes no further"):
        Tuner(tmp_path / "b", TunePlan(["train.py"], ["lr=0..1"], "min:loss", 1), 1).run()
    assert 10 < len(statuses) < 90


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("method", ["bayes", "bayes+halving", "hyperband"])
def test_a_killed_search_asks_for_the_same_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    pytest.importorskip("optuna")
    plan = TunePlan(["train.py"], ["lr=0..1"], "min:loss", 11, method, "1", "9", batch=2)
    whole = Tuner(tmp_path / "whole", plan, 3).run()
    trained = Launcher.ended
    for looks in (2, 3, 4):
        left = iter(range(looks - 1))

        def ended(self: Launcher, left=left) -> int:
            if next(left, None) is None:
                raise KeyboardInterrupt
            return trained(self)

        with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
            killed.setattr(Launcher, "ended", ended)
            Tuner(tmp_path / "cut", plan, 3).run()
    cut = Tuner(tmp_path / "cut", plan, 3).run()
    assert [(t["values"], t["results"]) for t in cut.trials] == [
        (t["values"], t["results"]) for t in whole.trials
    ]
    assert cut.best["trial"] == whole.best["trial"]
    assert max(len(t["results"]) for t in whole.trials) == (1 if method == "bayes" else 3)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--goal", "max:a", "train.py"), "--space is missing"),
        (("--space", "lr=0..1", "train.py"), "--goal is missing"),
        (("--space", "lr=0..1", "--goal", "a", "train.py"), "--goal a: expected max:METRIC"),
        (("--space", "lr=0..1", "--goal", "max:a", "--method", "x", "train.py"), "--method x: exp"),
        (
            ("--space", "lr=0..1", "--goal", "max:a", "--method", "hyperband", "train.py"),
            "say how long one trains, as --max 9ep",
        ),
        (("--space", "lr=0..1", "--goal", "max:a", "none.py"), "script not found: none.py"),
        (("--resume", "none"), "holds no search"),
        (
            ("--space", "lr=0..1", "--goal", "max:a", "--warm", "x", "train.py"),
            "--warm x: it holds",
        ),
        (("--space", "lr=0..1", "--goal", "max:a", "--budget", "x", "train.py"), "--budget x: exp"),
        (("--devices", "2", "--workers", "3", "train.py"), "there are 2 devices for all trials"),
    ],
)
def test_wrong_arguments_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], error: str
) -> None:
    from ronde.cli.app import app

    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    with pytest.raises(ArgumentError, match=error):
        app(["tune", *words], standalone_mode=False)


def test_a_goal_that_never_comes_ends_the_search(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ("--space", "lr=0.1,0.2", "--goal", "max:acuracy", "--trials", "2", "--method", "grid")
    process = tune(tmp_path, *words, "--devices", "1", "train.py")
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 2
    assert "--goal max:acuracy: the script's evaluations have loss@evaluate" in errors


def test_a_rung_is_reached_at_a_step_that_the_record_leaves_out(tmp_path: Path) -> None:
    Record(tmp_path / "record.jsonl").write(
        StepRecorded(1000, 0, 1.0, 0.1, 1000),
        Evaluated(1003, 0, 40, {"loss": 0.5}),
        Epoch(0, 1003, 1003, None),
        Ended("paused", 1003, 1, 1003, None, 1.0),
    )
    found = progress_of(RunDir(tmp_path), Goal(False, "loss"), (1003, 2006))
    assert (found.results, found.samples) == ((0.5,), 1003)


def test_a_full_disk_costs_no_values(tmp_path: Path) -> None:
    plan = TunePlan(["train.py"], ["lr=1,2"], "min:loss", 2)
    file = tmp_path / "trials.jsonl"
    file.write_text(before := json.dumps({"trial": 0, "values": {"lr": 2}}) + "\n")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            Tuner(tmp_path, plan, 1)._begin()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert file.read_text() == before
