"""The command that an alert prints shows the alert again, and the record has the alerts that are
judged afterwards.
"""

from __future__ import annotations

import shlex
import textwrap

import pytest

from processes import ronde_run
from ronde.watch import Alert, RunDir, read
from ronde.watch.judge import Judge, alert_line
from sampling import some

SCRIPT = textwrap.dedent(
    """
    import argparse, os, pathlib, signal, torch, ronde
    import torch.nn.functional as F

    asked = argparse.ArgumentParser()
    asked.add_argument("--fault", default="")
    asked.add_argument("--epochs", type=int, default=10)
    asked = asked.parse_args()
    fault = asked.fault.split(",")
    drift = 0.05 if "dead" in fault else 0.0

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.relu = torch.nn.Linear(4, 8), torch.nn.ReLU()
            self.kept, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 3)

        def forward(self, x):
            return self.last(self.kept(self.relu(self.first(x)))), drift * self.first.bias.sum()

    torch.manual_seed(0)
    model, x = Net(), torch.randn(96, 4)
    y = torch.arange(96) % 3
    if "nan" in fault:
        x[77] = torch.nan
    trained = [p for n, p in model.named_parameters() if "kept" not in fault or n != "kept.weight"]
    rate = 0.0 if "flat" in fault else 1.0 if "dead" in fault else 0.05
    optimizer = torch.optim.SGD(trained, lr=rate)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 100.0 if step > 70 and "explodes" in fault else 1.0)
    data = torch.utils.data.TensorDataset(x, y)
    run = ronde.distribute(model, optimizer, data, batch_size=8, scheduler=scheduler, seed=1,
                           loss=lambda out, y: F.cross_entropy(out[0], y) + out[1],
                           save_every=20 if {"flat", "explodes"} & {*fault} else 3, keep=100)
    for _ in run.epochs(asked.epochs):
        for batch in run.batches():
            run.step(batch)
            if "dies" in fault and run.state.step == 50 and run.rank and not os.path.exists("died"):
                pathlib.Path("died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
        run.evaluate(data)
    """
)


def recorded(run: RunDir) -> list[Alert]:
    return [event for event in read(run.record) if isinstance(event, Alert)]


def fact(alert: Alert) -> tuple:
    return alert.rule, alert.step, alert.tensor, alert.rank, alert.samples, alert.text


@pytest.mark.parametrize(
    ("fault", "rules", "options"),
    some(
        [
            ("nan", {"nan"}, ["--watch=2"]),
            ("explodes", {"exploding-gradient"}, ["--watch=1"]),
            ("dead", {"dead-units"}, ["--watch=1", "--plan", "shard=parameters"]),
            ("kept", {"unchanged"}, ["--watch"]),
            ("flat", {"loss-flat", "overtrained"}, ["--watch=64"]),
        ],
        3,
    ),
)
def test_what_an_alert_prints_shows_it_again(tmp_path, fault, rules, options):
    (tmp_path / "train.py").write_text(SCRIPT)
    epochs = "30" if fault == "flat" else "10"
    script = ["train.py", "--fault", fault, "--epochs", epochs]
    begun = ronde_run(["run", "-q", "-n", "2", "--name", "a", *options, *script], tmp_path, 90)
    alerts = recorded(RunDir(tmp_path / "runs" / "a"))
    assert rules <= {alert.rule for alert in alerts}, begun.stdout + begun.stderr
    said = ronde_run(["watch", "a"], tmp_path).stdout
    commands = [
        line.partition("look again: ")[2] for line in said.splitlines() if "look again" in line
    ]
    assert len(commands) == len(alerts)
    for alert, command in zip(alerts, commands, strict=True):
        if alert.rule not in rules:
            continue
        words = shlex.split(command)
        assert words[:2] == ["ronde", "run"] and "--from" in words
        done = ronde_run(words[1:], tmp_path, 90)
        new = max((tmp_path / "runs").glob("train-*"), key=lambda p: int(p.name[6:]))
        shown = recorded(RunDir(new))
        assert fact(alert) in map(fact, shown), (command, shown, done.stdout + done.stderr)
        judged = Judge(RunDir(new)).look()
        assert list(map(alert_line, judged)) == list(map(alert_line, shown))


@pytest.mark.parametrize(
    ("fault", "legs"),
    some(
        [
            # paused, completed, and then trained longer
            (
                "kept,explodes",
                [("-n 2 --until 200", 4, 75), ("-n 1 --resume", 4, 0), ("-n 2 --resume", 10, 1)],
            ),
            ("kept,explodes,dies", [("-n 2 --restarts 1", 10, 1)]),
        ],
        1,
    ),
    ids=["resumed", "restarted"],
)
def test_the_record_has_the_alerts_that_are_judged_afterwards(tmp_path, fault, legs):
    (tmp_path / "train.py").write_text(SCRIPT)
    run, counts = RunDir(tmp_path / "runs" / "a"), [0]
    for options, epochs, status in legs:
        words = ["run", "-q", "--name", "a", "--watch=1", *options.split(), "train.py"]
        done = ronde_run([*words, "--fault", fault, "--epochs", str(epochs)], tmp_path, 120)
        assert done.returncode == status, done.stdout + done.stderr
        counts.append(len(recorded(run)))
    assert counts[1] and counts[-1] > counts[len(legs) - 1]
    judged = ronde_run(["watch", "a", "--json"], tmp_path)
    assert judged.stdout.splitlines() == [alert_line(alert) for alert in recorded(run)]
