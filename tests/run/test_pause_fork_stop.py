"""A training that pauses (``--until``) and goes on with another number of workers is the training
that never paused; one that begins with a checkpoint (``--from``) is the rest of that training; one
that was stopped stays so.
"""

from __future__ import annotations

import csv
import json
import subprocess
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import processes
import ronde
from ronde.run import loop
from sampling import some

SCRIPT = textwrap.dedent(
    """
    import argparse, os, sys, time, torch
    import torch.nn.functional as F
    from torch.utils.data import DataLoader, Dataset
    import ronde

    asked = argparse.ArgumentParser()
    asked.add_argument("--lr", type=float, default=0.01)
    asked.add_argument("--save-every", type=int)
    asked.add_argument("--decay", type=float, default=0.01)
    asked.add_argument("--epochs", type=int, default=3)
    asked.add_argument("--stop", type=int)
    asked.add_argument("--stops", choices=("all", "one", "soon"))
    asked.add_argument("--leave", choices=("break", "return", "exit"))
    asked.add_argument("--patience", type=int)
    asked.add_argument("--die", type=int)
    asked.add_argument("--own", action="store_true")
    asked.add_argument("--width", type=int, default=8)
    asked = asked.parse_args()

    class Rows(Dataset):  # 37 samples, batches of 8: the last one is short
        def __len__(self): return 37
        def __getitem__(self, i):
            g = torch.Generator().manual_seed(i)
            return torch.randn(6, generator=g, dtype=torch.float64), i, i % 3

    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(6, asked.width), torch.nn.Tanh(), torch.nn.Dropout(0.2),
                                torch.nn.Linear(asked.width, 3)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=asked.lr, weight_decay=asked.decay)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 9)
    seen = []

    def forward(model, batch):
        x, i, y = batch
        if model.training:
            seen.append(i)
        return model(x), y

    run = ronde.distribute(model, optimizer, DataLoader(Rows(), 8, shuffle=True), loss=F.cross_entropy,
                           forward=forward, scheduler=scheduler, seed=5, save_every=asked.save_every,
                           patience=asked.patience, keep_best=asked.patience and "min:given")
    given = [5.0, 4.0, 6.0, 4.5, 4.2, 3.0, 1.0]  # an evaluation each

    def epoch():
        for batch in run.batches():
            if run.state.step == asked.die:
                run.port.parts.watcher.flush()
                os._exit(9)
            seen.clear()
            run.step(batch)
            own = torch.zeros(37, dtype=torch.int64)
            own[torch.cat(seen)] = 1
            if run.state.step == asked.stop and (asked.stops == "all" or run.rank == run.world_size - 1):
                run.stop("enough", together=asked.stops != "soon")
            if asked.stops == "soon":
                time.sleep(0.01)
            run.log({"seen": run.reduce(own, "sum").nonzero().flatten().tolist(), "lr": optimizer.param_groups[0]["lr"]})
        run.evaluate(Rows(), {"given": lambda out, y: given[run.state.epoch % 7]})

    if asked.own:
        for _ in range(run.state.epoch, 3):
            epoch()
    else:
        def train():
            for number in run.epochs(asked.epochs):
                epoch()
                if number == 1 and asked.leave == "break": break
                if number == 1 and asked.leave == "return": return number
                if number == 1 and asked.leave == "exit": sys.exit()
        train()
    run.export(run.dir.path / "final.safetensors")
    """
)


def ronde_run(folder: Path, *arguments: str, status: int = 0) -> str:
    done = processes.ronde_run(["run", "-q", *arguments], folder, 60)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def events(folder: Path, name: str) -> dict[str, dict[int, object]]:
    """Losses, rates, and evaluations by step."""
    shown = json.loads(processes.ronde_run(["show", name, "--json"], folder).stdout)
    found: dict[str, dict[int, object]] = {"loss": {int(s): v for s, v in shown["curve"]}}
    assert len(found["loss"]) == len(shown["curve"])
    for kind in ("lr", "evaluate/loss"):
        series = shown["series"][kind]
        found[kind] = {int(s): v for s, v in series}
    return found


def started(folder: Path, name: str) -> dict:
    first = (folder / "runs" / name / "record.jsonl").read_text().splitlines()[0]
    return json.loads(first)


def seen(folder: Path, name: str) -> dict[int, list[int]]:
    lines = (folder / "runs" / name / "record.jsonl").read_text().splitlines()
    logged = [e for e in map(json.loads, lines) if e["type"] == "log"]
    assert len({e["step"] for e in logged}) == len(logged)  # no step twice
    return {e["step"]: e["values"]["seen"] for e in logged}


def weights_differ(folder: Path, *names: str) -> float:
    a, b = (load_file(folder / "runs" / n / "final.safetensors") for n in names)
    return max(float((a[k] - w).abs().max()) for k, w in b.items())


def newest(folder: Path, name: str) -> Path:
    return max((folder / "runs" / name / "checkpoints").iterdir())


def assert_same(folder: Path, name: str, whole: str = "whole") -> None:
    assert seen(folder, name) == seen(folder, whole)
    mine, theirs = events(folder, name), events(folder, whole)
    lines = (folder / "runs" / name / "record.jsonl").read_text()
    assert lines.count('"type": "evaluate"') == len(theirs["evaluate/loss"])  # none twice
    for kind, values in theirs.items():
        assert mine[kind] == pytest.approx(values, rel=1e-12, abs=1e-12), kind
    assert weights_differ(folder, name, whole) < 1e-12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pause")
    (folder / "train.py").write_text(SCRIPT)
    for command in ("init -q", "add train.py", "-c user.name=a -c user.email=a@b commit -q -m a"):
        subprocess.run(["git", *command.split()], cwd=folder, check=True, timeout=30)
    ronde_run(folder, "-n", "1", "--name", "whole", "train.py", "--save-every", "5")
    return folder


@pytest.mark.parametrize(
    ("name", "legs", "script"),
    [
        # in the middle of an epoch; after its last step
        ("steps", [("20", 24, 3), ("37", 37, 5)], []),
        # at the first evaluation from there on, which ends an epoch; that checkpoint is there already
        ("evaluate", [("1@evaluate", 37, 5), ("74@evaluate", 74, 10)], ["--save-every", "5"]),
        ("own", [("30@evaluate", 37, 5), ("45", 45, 6)], ["--own"]),
    ],
)
def test_pauses_are_the_undisturbed_training(folder, name, legs, script):
    resume: list[str] = []
    for at, (until, samples, step) in enumerate(legs):
        workers = str(1 + at % 2)
        options = ["-n", workers, "--name", name, *resume, "--until", until, "train.py", *script]
        said = ronde_run(folder, *options, status=75)
        resume = ["--resume"]
        assert f"paused at {samples} samples (step {step}). Go on with: ronde run --resume" in said
        listed = json.loads(processes.ronde_run(["runs", "--json"], folder).stdout)
        (mine,) = [r for r in listed if r["run"] == name]
        assert (mine["status"], mine["step"], mine["samples"]) == ("paused", step, samples)
    ronde_run(
        folder, *["-n", str(1 + len(legs) % 2), "--name", name, "--resume", "train.py", *script]
    )
    assert_same(folder, name)


def test_a_run_that_is_there_already_pauses_without_a_step(folder):
    options = [
        "-n",
        "1",
        "--name",
        "there",
        "--restarts",
        "1",
        "--until",
        "10@evaluate",
        "train.py",
    ]
    for again in ([], ["--resume"]):
        said = ronde_run(folder, *again, *options, status=75)
        assert "paused at 37 samples (step 5)" in said and "restart" not in said
    # the training ends there
    options[options.index("10@evaluate")] = "100@evaluate"
    ronde_run(folder, "--resume", *options)
    assert_same(folder, "there")


def test_what_cannot_be_a_pause_is_refused(folder):
    for options, text in (
        (["--until", "soon"], "--until soon: expected a number of samples"),
        (["--until", "0"], "--until 0: expected"),
        (["--until", "5", "--runs", "none"], "--runs none keeps nothing"),
    ):
        assert text in ronde_run(folder, *options, "train.py", status=2)


def test_the_record_says_what_was_started(folder):
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True
    )
    start = started(folder, "whole")
    assert start["git"] == {"commit": commit.stdout.strip(), "dirty": False}
    assert (start["arguments"], start["origin"]) == (["--save-every", "5"], "")
    assert start["versions"].keys() == {"python", "torch", "ronde"}
    with (folder / "train.py").open("a") as file:
        file.write("# changed\n")
    ronde_run(folder, "-n", "1", "--name", "changed", "train.py", "--lr", "0.02")
    start = started(folder, "changed")
    assert start["git"] == {"commit": commit.stdout.strip(), "dirty": True}
    assert start["arguments"] == ["--lr", "0.02"]
    (folder / "train.py").write_text(SCRIPT)


def test_without_git_nothing_is_said(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    ronde_run(tmp_path, "-n", "1", "--name", "outside", "train.py")
    assert started(tmp_path, "outside")["git"] == {}


def after(values: dict[int, object], step: int) -> dict[int, object]:
    return {s: v for s, v in values.items() if s > step}


def test_a_fork_is_the_rest_of_the_training(folder):
    said = ronde_run(folder, "-n", "2", "--from", "whole@5", "--name", "fork", "train.py")
    assert started(folder, "fork")["origin"] == "whole@5"
    assert seen(folder, "fork") == after(seen(folder, "whole"), 5)
    mine, theirs = events(folder, "fork"), events(folder, "whole")
    for kind in ("loss", "lr"):
        assert mine[kind] == pytest.approx(after(theirs[kind], 5), rel=1e-12), kind
    # the checkpoint is of the end of an epoch, which may not have been evaluated
    assert mine["evaluate/loss"] == pytest.approx(theirs["evaluate/loss"], rel=1e-12), said
    assert weights_differ(folder, "fork", "whole") < 1e-12
    assert sorted(p.name for p in (folder / "runs/whole/checkpoints").iterdir()) == [
        f"step-{step:09d}" for step in (5, 10, 15)
    ]


def test_what_the_script_of_a_fork_changes_counts(folder):
    script = ["train.py", "--lr", "0.02", "--decay", "0.5"]
    begin = ["-n", "1", "--from", str(folder / "runs/whole@10"), "--name", "changed-fork"]
    ronde_run(folder, *begin, *script, "--die", "12", status=9)
    # it has no checkpoint of its own yet: the resume begins with the same one
    options = ["--resume", "-n", "2", "--name", "changed-fork", *script]
    done = processes.ronde_run(["run", *options], folder, 60)
    assert "lr 0.01 → 0.02" in done.stdout and "weight_decay 0.01 → 0.5" in done.stdout, done
    assert started(folder, "changed-fork")["origin"] == "whole@10"
    lr = events(folder, "changed-fork")["lr"]
    whole = after(events(folder, "whole")["lr"], 10)
    assert lr == pytest.approx({step: 2 * rate for step, rate in whole.items()}, rel=1e-12)
    manifest = json.loads(newest(folder, "changed-fork").joinpath("manifest.json").read_text())
    (group,) = manifest["state"]["optimizer"]["groups"]
    assert group["settings"]["weight_decay"] == 0.5
    assert weights_differ(folder, "changed-fork", "whole") > 1e-4


def test_a_comparison_says_what_differs(folder):
    script = ["train.py", "--lr=0.02", "--decay", "0.5"]
    ronde_run(folder, "-n", "2", "--from", "whole@5", "--name", "compared", *script)
    runs = ["runs", "--compare", "whole", "compared"]
    commands = [runs, [*runs, "--json"], [*runs, "--csv"], runs[:3], [*runs, "who"], ["runs", "a"]]
    shown, as_json, as_csv, *refused = processes.ronde_batch(commands, folder)
    answer = json.loads(as_json.stdout)
    assert answer["runs"] == ["whole", "compared"]
    assert answer["differs"] == {
        "--save-every": ["5", None],
        "origin": ["", "whole@5"],
        "workers": [1, 2],
        "--lr": [None, "0.02"],
        "--decay": [None, "0.5"],
    }
    for at, name in enumerate(answer["runs"]):
        losses = events(folder, name)
        results = {key: values[at] for key, values in answer["results"].items()}
        assert results["loss"] == losses["loss"][15]
        assert results["best evaluate/loss"] == min(losses["evaluate/loss"].values())
        assert results["best evaluate/given"] == max(5.0, 4.0, 6.0)
        assert (results["steps"], results["status"]) == (15, "completed")
    head, *rows = csv.reader(as_csv.stdout.splitlines())
    assert head == ["run", *answer["differs"], *answer["results"]]
    assert [row[:2] for row in rows] == [["whole", "5"], ["compared", ""]]
    assert "--decay" in shown.stdout and "whole@5" in shown.stdout and "└───" in shown.stdout
    assert [done.returncode for done in refused] == [2, 2, 2]
    for done, text in zip(
        refused, ("needs two runs or more", "no run 'who'", "are for --compare"), strict=True
    ):
        assert text in done.stderr


def test_what_cannot_be_a_fork_is_refused(folder):
    for options, text in (
        (["--from", "who"], "no run 'who' in runs. Did you mean whole?"),
        (
            ["--from", "whole@7"],
            "whole has no checkpoint of step 7; it has those of steps 5, 10, 15",
        ),
        (["--from", "whole@5", "--resume"], "give one of them"),
        (["--from", "whole", "--horovod"], "not for scripts that use Horovod"),
    ):
        said = ronde_run(folder, *options, "train.py", status=2)
        assert text in " ".join(said.split()), said
    said = ronde_run(folder, "-n", "1", "--from", "whole@5", "train.py", "--width", "9", status=1)
    assert "the checkpoint is of another model" in said


def told(folder: Path, name: str) -> tuple[str, str, int]:
    """Status, reason, and steps."""
    shown = json.loads(processes.ronde_run(["show", name, "--json"], folder).stdout)
    return shown["status"], shown["reason"], shown["step"]


@pytest.mark.parametrize("own", some([[], ["--own"]], 2))
def test_a_stop_on_all_ranks_is_after_this_step(folder, own):
    name, script = f"stop{len(own)}", ["train.py", *own, "--stop", "7", "--stops", "all"]
    ronde_run(folder, "-n", "2", "--name", name, *script)
    assert told(folder, name) == ("completed", "enough", 7)
    evaluations = events(folder, name)["evaluate/loss"]
    assert 7 in evaluations  # the body of the loop has ended as usual
    assert (folder / "runs" / name / "final.safetensors").exists()
    shown = processes.ronde_run(["show", name], folder).stdout
    assert f"{name}: completed (stopped: enough)" in shown
    done = processes.ronde_run(
        ["run", "-n", "1", "--name", name, "--resume", "train.py", *own], folder, 60
    )
    assert told(folder, name) == ("completed", "enough", 7), done.stdout
    assert own or "nothing left to train: stopped (enough)" in done.stdout
    # a fork is not bound by it
    ronde_run(folder, "-n", "1", "--name", f"on{name}", "--from", name, "train.py", *own)
    assert seen(folder, f"on{name}") == after(seen(folder, "whole"), 7)


def test_a_stop_on_one_rank_ends_all_at_one_step(folder):
    script = ["train.py", "--epochs", "10000", "--stop", "3", "--stops", "soon"]
    ronde_run(folder, "-n", "2", "--name", "soon", *script)
    status, reason, step = told(folder, "soon")
    assert (status, reason) == ("completed", "enough") and step > 3
    assert newest(folder, "soon").name == f"step-{step:09d}"


def test_a_stop_on_one_rank_alone_is_refused(folder):
    script = ["train.py", "--stop", "3", "--stops", "one"]
    said = ronde_run(folder, "-n", "2", *script, status=1)
    assert "called run.stop(reason)" in said, said
    assert "Call it on every worker, or with together=False." in said


@pytest.mark.parametrize("how", some(["break", "return"], 2))
def test_a_resume_does_not_undo_a_break(folder, how):
    ronde_run(folder, "-n", "2", "--name", how, "train.py", "--save-every", "5", "--leave", how)
    assert told(folder, how) == ("completed", "", 10)
    done = processes.ronde_run(
        ["run", "-n", "1", "--name", how, "--resume", "train.py"], folder, 60
    )
    assert "the script left run.epochs before the resume" in done.stdout
    assert told(folder, how) == ("completed", "", 10)


def test_a_resume_goes_on_after_an_exit(folder):
    ronde_run(folder, "-n", "1", "--name", "exit", "train.py", "--leave", "exit")
    ronde_run(folder, "-n", "2", "--name", "exit", "--resume", "train.py")
    assert_same(folder, "exit")


def test_patience_counts_on_after_a_resume(folder):
    script = ["train.py", "--epochs", "7", "--patience", "3"]
    begin = ["-n", "2", "--name", "patience"]
    ronde_run(folder, *begin, "--until", "100@evaluate", *script, status=75)  # one of three
    ronde_run(folder, *begin, "--resume", *script)
    reason = "no better given in 3 evaluations; the best is 4, of step 10"
    assert told(folder, "patience") == ("completed", reason, 25)
    said = ronde_run(folder, "-n", "1", "train.py", "--patience", "0", status=1)
    assert "patience=0 must be a whole number above 0" in said


def test_where_breaks_cannot_be_told_it_says_so(tmp_path, monkeypatch, capsys):
    assert loop.shows_breaks()
    monkeypatch.setattr(loop, "shows_breaks", lambda: False)
    monkeypatch.setenv("RONDE_RUNS", str(tmp_path))
    monkeypatch.setenv("RONDE_DEVICE", "cpu")
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
    loss = torch.nn.functional.mse_loss
    run = ronde.distribute(model, optimizer, data, loss=loss, batch_size=4, name="left")
    for _ in run.epochs(2):
        for batch in run.batches():
            run.step(batch)
        break
    record = (tmp_path / "left" / "record.jsonl").read_text()
    assert "Call run.stop(reason) to end the training" in capsys.readouterr().out
    assert "this Python does not show whether by break, return, or an error" in record


DIVIDED = textwrap.dedent(
    """
    import torch, ronde
    from torch import nn

    torch.manual_seed(3)
    body = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()]
    model = nn.Sequential(*body, nn.Linear(8, 3)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.utils.data.TensorDataset(torch.randn(44, 6, dtype=torch.float64), torch.arange(44) % 3)
    run = ronde.distribute(model, optimizer, data, loss=nn.functional.cross_entropy, batch_size=8, seed=5)
    for _ in run.epochs(3):
        for batch in run.batches():
            run.step(batch)
    run.export(run.dir.path / "final.safetensors")
    """
)


@pytest.mark.parametrize(
    ("plan", "workers"), some([("shard=parameters", 3), ("pipeline=2", 4), ("tensor=2", 4)], 3)
)
def test_a_pause_under_a_divided_plan(folder, plan, workers):
    (folder / "divided.py").write_text(DIVIDED)
    if not (folder / "runs" / "undivided").exists():
        ronde_run(folder, "-n", "1", "--name", "undivided", "divided.py")
    words = ["--name", plan.replace("=", "-"), "--plan", plan]
    ronde_run(folder, "-n", "2", *words, "--until", "60", "divided.py", status=75)
    ronde_run(folder, "-n", str(workers), "--resume", *words, "divided.py")
    assert weights_differ(folder, words[1], "undivided") < 1e-9
    lines = (folder / "runs" / words[1] / "record.jsonl").read_text().splitlines()
    steps = [e["step"] for e in map(json.loads, lines) if e["type"] == "step"]
    assert steps == list(range(1, 19))
