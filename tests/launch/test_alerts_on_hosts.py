"""On two hosts that do not share the run directory, a run pauses and goes on elsewhere, and its
alerts are in the record while it trains.
"""

from __future__ import annotations

import json
import textwrap
import time

import pytest
from safetensors.torch import load_file

from lab import lab, missing
from processes import child, ronde, ronde_run
from ronde.watch import Alert, RunDir, read
from ronde.watch.judge import Judge, alert_line

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

SCRIPT = textwrap.dedent(
    """
    import sys, time, torch, ronde
    from pathlib import Path

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
    x, y = torch.randn(40, 4, dtype=torch.float64), torch.randn(40, 1, dtype=torch.float64)
    optimizer = torch.optim.AdamW([*model[0].parameters(), model[2].bias], lr=0.01)
    run = ronde.distribute(model, optimizer, torch.utils.data.TensorDataset(x, y),
                           loss=torch.nn.functional.mse_loss, batch_size=4, seed=1)
    for _ in run.epochs(4):
        for batch in run.batches():
            run.step(batch)
            while run.state.step == 15 and sys.argv[1:] and not Path(sys.argv[1]).exists():
                run.port.parts.watcher.flush()
                time.sleep(0.05)
    run.export(run.dir.path / "final.safetensors")
    """
)


def test_pauses_and_tells_alerts_while_it_trains(tmp_path):
    own = tmp_path / "private"
    own.mkdir()
    for folder in (tmp_path, own):
        (folder / "train.py").write_text(SCRIPT)
    run, told = RunDir(own / "runs" / "a"), tmp_path / "told"
    with lab(tmp_path / "lab", 2, own) as hosts:
        first, second = hosts.names
        for name in hosts.names:
            hosts.ssh(name, f"cp {tmp_path}/train.py {own}/")
        words = ["run", "-q", "--ssh-config", str(hosts.ssh_config)]
        words += [
            "--hosts",
            f"{first}:1,{second}:1",
            "--name",
            "a",
            "--watch=1",
            "--until",
            "88",
            "train.py",
            str(told),
        ]
        with child(ronde(*words), own) as started:
            limit = time.monotonic() + 60
            while not run.record.is_file() or '"alert"' not in run.record.read_text():
                assert started.process.poll() is None and time.monotonic() < limit, started.stderr
                time.sleep(0.05)
            told.touch()
            done = started.done(60)
        assert done.returncode == 75, done.stdout + done.stderr
        assert "paused at 88 samples (step 22)" in done.stderr
    assert [p.name for p in (run.path / "checkpoints").iterdir()] == ["step-000000022"]
    alerts = [event for event in read(run.record) if isinstance(event, Alert)]
    assert [(a.rule, a.step, a.tensor) for a in alerts] == [("unchanged", 8, "2.weight")]
    assert list(map(alert_line, Judge(run).look())) == list(map(alert_line, alerts))
    for options in (["-n", "3", "--resume", "--name", "a"], ["-n", "1", "--name", "whole"]):
        done = ronde_run(["run", "-q", *options, "train.py"], own)
        assert done.returncode == 0, done.stdout + done.stderr
    steps = [json.loads(x) for x in run.record.read_text().splitlines()]
    assert [e["step"] for e in steps if e["type"] == "step"] == list(range(1, 41))
    whole = load_file(own / "runs" / "whole" / "final.safetensors")
    found = load_file(run.path / "final.safetensors")
    assert max(float((found[k] - w).abs().max()) for k, w in whole.items()) < 1e-9
