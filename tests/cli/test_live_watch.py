"""``ronde run --watch`` tells alerts while it trains, and ``--stop-on`` ends the run, saved."""

from __future__ import annotations

import json
import textwrap

from processes import ronde_run
from ronde.cli.live_watch import LiveWatch, parse_watch
from ronde.watch import RunDir
from ronde.watch.rules import RULES

SCRIPT = textwrap.dedent(
    """
    import os, time, torch, ronde

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    x, y = torch.randn(96, 4) + 1000, torch.arange(96) % 3  # inputs far from zero
    x[50] += float(os.environ.get("BAD", "0"))
    run = ronde.distribute(model, torch.optim.SGD(model.parameters(), lr=1e-6),
                           torch.utils.data.TensorDataset(x, y),
                           loss=torch.nn.functional.cross_entropy, batch_size=8)
    for _ in run.epochs(int(os.environ["EPOCHS"])):
        for batch in run.batches():
            run.step(batch)
            time.sleep(float(os.environ["PAUSE"]))
    """
)


def alerts(folder):
    lines = map(json.loads, (folder / "runs" / "a" / "record.jsonl").read_text().splitlines())
    return [line for line in lines if line["type"] == "alert"]


def test_a_rule_ends_the_run_and_a_resume_goes_on(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["-n", "2", "--name", "a", "--stop-on", "nan,inputs"]
    slow = {"EPOCHS": "1000", "PAUSE": "0.02"}
    done = ronde_run(["run", "-q", *words, "train.py"], tmp_path, 60, slow)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "alert   inputs   step 1, samples 0–7\n" in done.stderr
    saved = max(int(p.name[5:]) for p in (tmp_path / "runs" / "a" / "checkpoints").iterdir())
    assert done.stderr.rstrip().endswith(
        f"ended by a rule: inputs, saved at step {saved}; go on with: ronde run --resume --name a …"
    )
    (alert,) = alerts(tmp_path)
    assert (alert["rule"], alert["step"]) == ("inputs", 1)
    epochs = {"EPOCHS": str(saved // 12 + 5), "PAUSE": "0"}
    done = ronde_run(["run", "-q", "--resume", *words, "train.py"], tmp_path, 60, epochs)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "alert" not in done.stderr  # it was told
    assert alerts(tmp_path) == [alert]
    health = (tmp_path / "runs" / "a" / "health.jsonl").read_text().splitlines()
    described = [line for line in map(json.loads, health) if line["type"] == "tensors"]
    resumed = [line for line in described if line["step"] > saved]
    assert resumed[-1]["layers"] == described[0]["layers"] == [""]
    judged = ronde_run(["watch", "a", "--json"], tmp_path)
    assert [json.loads(line)["rule"] for line in judged.stdout.splitlines()] == ["inputs"]


def test_the_end_is_judged_too(tmp_path):
    """A loss that is not finite ends the run at once, before anybody has looked."""
    (tmp_path / "train.py").write_text(SCRIPT)
    variables = {"EPOCHS": "1", "PAUSE": "0", "BAD": "nan"}
    done = ronde_run(["run", "-q", "--name", "a", "-n", "2", "--watch", "train.py"], tmp_path, 60, variables)  # fmt: skip
    assert done.returncode == 1
    (nan,) = (alert for alert in alerts(tmp_path) if alert["rule"] == "nan")
    assert f"alert   nan   step {nan['step']}, " in done.stderr
    assert "LossError" in done.stderr


def test_what_fails_is_told_once(tmp_path, monkeypatch):
    run, said = RunDir(tmp_path), []
    run.record.write_text('{"type": "step", "step": 1}\n')
    monkeypatch.setattr("ronde.watch.judge.Judge.look", lambda self: 1 / 0)
    with LiveWatch(run, [], said.append, lambda: None) as live:
        pass
    live.close()
    live.close()
    assert said == ["rules are not judged any more (ZeroDivisionError: division by zero)"]


def test_stopping_implies_watching():
    assert parse_watch(None, "all") == ("auto", list(RULES))
    assert parse_watch("8", "nan") == ("8", ["nan"])
