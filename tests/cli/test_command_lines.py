"""Command lines as people mistype them: a sentence that says what to do, and no traceback."""

from __future__ import annotations

import dataclasses
import shlex

import pytest

from processes import ronde_batch, ronde_run
from ronde.watch import Ended, Evaluated, Record, Started, StepRecorded, Warned

STRICT = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--lr")
parser.parse_args()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lines")
    (folder / "strict.py").write_text(STRICT)
    (folder / "silent.py").write_text("print('hello')\n")
    return folder


def test_lines_that_are_refused(folder):
    (folder / "empty").mkdir()
    (folder / "full").mkdir()
    (folder / "full" / "train.py").touch()
    speed = "expected the speed of a node's link to the others, such as 100Gbit or 25GB/s."
    lines = {
        "run --wrokers 2 strict.py": "Did you mean --workers?",
        "run --wrokers=2 strict.py": "option --wrokers is not known. Did you mean --workers?",
        "prove --setps 3 strict.py": "Did you mean --steps?",
        "plan --devcies 2 strict.py": "Did you mean --devices?",
        "doctor --sceonds 3 strict.py": "Did you mean --seconds?",
        "scale --wrokers 2 strict.py": "is not known",
        "run -w 2 strict.py": "option -w is not known. Ronde's options come before the script",
        "rnu strict.py": "Did you mean 'run'?",
        "show --crve x": "--curve",
        "plan --device H100 --network 100 strict.py": f"--network 100: {speed}",
        "plan --device H100 --network fast strict.py": speed,
        "plan --device H100 --network 0Gbit strict.py": speed,
        "plan --network 100Gbit strict.py": "--network describes devices that are not here: add",
        "plan --per-node 4 strict.py": "--per-node describes devices that are not here",
        "plan --device H100 --per-node 0 strict.py": "'--per-node'",
        "plan --device H100 --devices 12 --per-node 8 strict.py": "nodes of 8 H100-80GB.",
        "run empty": "empty is a folder, not a script.\n",
        "plan full": "full is a folder, not a script. Did you mean full/train.py?",
        "run strct.py": "script not found: strct.py",
        "run full/trian.py": "Did you mean full/train.py?",
        "run --runs none --name x strict.py": "--name needs what a run keeps, and --runs none keeps nothing.",
        "run --runs none --restarts 1 strict.py": "--restarts needs what a run keeps, and --runs none",
        "run --min-workers 1 strict.py": "give --restarts, and several hosts",
        "run --horovod --until 5 strict.py": "--until is not for scripts that use Horovod",
        "run --horovod --stop-on nan strict.py": "--stop-on is not for scripts that use Horovod",
        "run --watch=0 strict.py": "--watch=0: expected a number of steps above 0",
        "run --stop-on nan,nosuch strict.py": "no rule nosuch. There are: all, ",
        "run --stop-on , strict.py": "no rule is named",
        "run --stop-on nan --runs none strict.py": "--stop-on needs what a run keeps",
        "run --mpi-world --spark local strict.py": "--mpi-world is not for --spark",
        "check": "name the hosts: --hosts a,b",
        "run --output some strict.py": "'some' is not one of",
    }
    for done, text in zip(
        ronde_batch([line.split() for line in lines], folder), lines.values(), strict=True
    ):
        assert done.returncode == 2 and "Traceback" not in done.stderr, done
        assert text in done.stderr, done


def test_options_that_come_after_the_script(folder):
    hint = "put it before the script: --workers 2 strict.py"
    done = ronde_run(["run", "-n", "1", "strict.py", "--workers", "2"], folder)
    assert done.returncode == 2
    assert done.stderr.count(hint) == 1 and "unrecognized arguments" in done.stdout + done.stderr

    done = ronde_run(["plan", "strict.py", "--devices", "2"], folder)
    assert done.returncode == 2 and "put it before the script: --devices 2 strict.py" in done.stderr


def test_runs_none_points_to_nothing(folder):
    line = ["run", "-n", "1", "--runs", "none", "silent.py", "--workers=2"]
    done = ronde_run(line, folder)
    assert done.returncode == 0, done.stderr
    assert "put it before the script: --workers=2 silent.py" in done.stderr
    assert "nothing is kept" in done.stdout and "ronde-run-" not in done.stdout + done.stderr


def test_names_are_shown_as_they_are(folder):
    """Neither emoji nor markup, whoever they are from: arguments, a record, a name, a warning."""
    odd = "r1:x: [bold]b[/] [link"
    start = Started(1, odd, odd, 3, odd, odd, odd, odd, 5, odd, 8, 2, 1, {"batch_size": 4}, {})
    values = [
        dataclasses.replace(start, hosts={odd: 2, "b": 1}),
        StepRecorded(1, 0, 0.5, 0.1, 4),
        Evaluated(1, 0, 4, {odd: 0.5}, odd),
        Warned(odd),
        Ended("failed", 1, 0, 4, 1.0, 1.0, odd, 0),
    ]
    for name in ("r1:x", "[r2]"):
        record = Record(folder / "odd" / name / "record.jsonl")
        record.write(*values)
        record.close()
    (folder / "odd" / "[r2]" / "checkpoints" / "step-000000001").mkdir(parents=True)
    lines = [
        ["show", "r1:x", "--runs", "odd"],
        ["show", "[r2]", "--runs", "odd", "--curve", "no:x:"],
        ["show", "r1:x", "--runs", "odd", "--curve", f"{odd}/{odd}"],
        ["runs", "--runs", "odd"],
        ["runs", "--runs", "no:x:"],
        ["checkpoints", "[r2]", "--runs", "odd", "--verify"],
        ["run", "--hosts", "r1:x", "strict.py"],
        ["run", "--plan", "[bold]:x:", "strict.py"],
        ["run", "--r1:x:[b]", "strict.py"],
        ["run", "[bold]:x:.py"],
        ["submit", "--dry-run", "--array", "[bold]:x:", "strict.py"],
    ]
    said = []
    for done in ronde_batch(lines, folder, env={"COLUMNS": "200"}):
        text = done.stdout + done.stderr
        assert "Traceback" not in text and "❌" not in text, text
        said.append(" ".join(text.replace("│", " ").split()))
    assert "r1:x: failed" in said[0] and f"3 workers on {odd}:2, b:1 ({odd})" in said[0]
    assert f"warning: {odd}" in said[0] and f"{odd}: {odd}, 5 parameters, {odd}" in said[0]
    assert f"{odd} {odd} 0.5000" in said[0] and f"failed: {odd}; its output" in said[0]
    for text, where in zip(
        ("no:x:", f"{odd}/{odd}: 0.5", "[r2] failed", "no:x:", "damaged: ", "r1:x:"),
        said[1:],
        strict=False,
    ):
        assert text in where, where
    assert all("[bold]:x:" in text for text in (said[7], said[9], said[10]))
    assert "--r1:x:[b]" in said[8], said[8]


TRAINS = """
import torch, ronde
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(8, 3), torch.randn(8, 1))
run = ronde.distribute(model, optimizer, data, loss=torch.nn.functional.mse_loss, batch_size=4)
for epoch in run.epochs(2):
    for batch in run.batches():
        run.step(batch)
    run.evaluate(data)
"""


def test_a_terminal_that_has_fewer_characters(folder):
    (folder / "trains.py").write_text(TRAINS)
    ascii_only = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = ronde_run(["run", "-n", "1", "--name", "plain", "trains.py"], folder, env=ascii_only)
    assert done.returncode == 0, done.stderr
    assert "plain: completed" in done.stdout and "evaluate  loss" in done.stdout
    assert done.stdout.isascii() and done.stderr == ""

    (folder / "runs" / "folder" / "record.jsonl").mkdir(parents=True)
    lines = {
        "show folder": "record.jsonl cannot be read (Is a directory)",
        "runs": "unreadable",
        "run -n 1 train.ipynb": "jupyter nbconvert --to script train.ipynb",
        "prove train.ipynb": "train.ipynb is a notebook, and workers run scripts",
    }
    answers = ronde_batch([shlex.split(line) for line in lines], folder)
    for done, (line, text) in zip(answers, lines.items(), strict=True):
        assert text in done.stdout + done.stderr, (line, done)
        assert "Traceback" not in done.stderr, line
