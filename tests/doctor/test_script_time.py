"""The script's own time in its loop: counted where the script spends it, and never where it trains.

The scripts move the clock themselves: what is counted is exact.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from processes import ronde_run
from ronde.doctor.loop_trial import judge_script_loop

SCRIPT = """
import json, os, sys, torch, ronde
from torch import nn
from torch.nn import functional as F
from ronde.doctor import doctor, loop_trial
from ronde.run import hooks

kind, folder = sys.argv[1:]
now = [0.0]
loop_trial.perf_counter = lambda: now[0]


def work(seconds):
    now[0] += seconds


class Slow(nn.Linear):
    def forward(self, x):
        work(0.5)
        return super().forward(x)


torch.manual_seed(0)
model = Slow(4, 3)
data = torch.utils.data.TensorDataset(torch.randn(160, 4), torch.randint(3, (160,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rates = {"synthetic": 16.0, "real": 16.0}
answer = {"refused": None, "samples_per_second": rates, "batch": 8, "executor": "none",
          "healthy": True, "cause": None, "prescriptions": [], "notes": []}
doctor.examine = lambda run, options, tell: dict(answer)
hooks.observer = doctor.Doctor({}, __import__("pathlib").Path(folder) / "answer.json")
run = ronde.distribute(model, optimizer, data, loss=F.cross_entropy, batch_size=8)
for epoch in run.epochs(1):
    work(100)  # outside of the loop over batches
    for batch in run.batches():
        work(0.01)
        if kind == "own":
            inputs, target = batch
            loss = F.cross_entropy(model(inputs), target)
            run.backward(loss)
            run.update()
        else:
            run.step(batch)
        work(0.03)
        if run.state.step == 12:
            run.evaluate(data)  # not counted, and not a part of the step
            run.save()
"""


def started(tmp_path: Path, kind: str, workers: int = 1) -> dict:
    (tmp_path / "s.py").write_text(SCRIPT)
    args = ["run", "--workers", str(workers), "--name", kind, "s.py", kind, str(tmp_path)]
    done = ronde_run(args, tmp_path, 60)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((tmp_path / "answer.json").read_text())


def test_passes_that_the_script_makes_are_not_told_from_its_own_time(tmp_path):
    answer = started(tmp_path, "own")
    assert answer["script_loop"] is None and "was not timed" in answer["notes"][0]


def test_the_doctor_lets_the_script_take_steps(tmp_path):
    answer = started(tmp_path, "step", 2)
    loop = answer["script_loop"]
    assert (loop["before_seconds"], loop["after_seconds"]) == pytest.approx((0.01, 0.03))
    # the model's pass in run.step; the evaluation is left out
    assert loop["step_seconds"] == pytest.approx(0.54)
    # 40 ms beside a step of 0.5 s
    assert loop["points"] == pytest.approx(100 * 0.04 / 0.54)
    assert answer["cause"] == {
        "stage": "script",
        "points": pytest.approx(loop["points"]),
        "of": "loop",
    }
    assert not answer["healthy"] and answer["prescriptions"][0]["id"] == "script-loop"
    assert answer["notes"] == []


def canned(executor="none", real=100.0, cause=None):
    return {
        "refused": None,
        "samples_per_second": {"synthetic": 100.0, "real": real},
        "batch": 10,
        "executor": executor,
        "healthy": cause is None,
        "cause": cause,
        "prescriptions": [{"number": 1, "id": "loaders"}] if cause else [],
    }


def cost(before, after):
    return {"before_seconds": before, "after_seconds": after, "period_seconds": 0.2}


def test_the_loop_is_the_cause_only_where_it_costs_more_than_the_rest():
    read = {"stage": "read", "points": 50.0}
    assert judge_script_loop(canned(), [None])["script_loop"] is None
    small = judge_script_loop(canned(), [cost(0.001, 0.003), cost(0.0, 0.0)])
    assert small["healthy"] and small["script_loop"]["points"] == pytest.approx(100 * 4 / 104)
    # Loaders go on meanwhile: a loop that is shorter than the wait for them costs nothing.
    hidden = judge_script_loop(canned("threads", 50.0, read), [cost(0.05, 0.04)])
    assert hidden["script_loop"]["points"] == 0 and hidden["cause"] is read
    both = judge_script_loop(canned("none", 50.0, read), [cost(0.05, 0.04)])
    assert both["script_loop"]["points"] == pytest.approx(100 * (0.5 - 10 / 29))
    assert both["cause"] is read
    assert [p["id"] for p in both["prescriptions"]] == ["loaders", "script-loop"]
    refused = judge_script_loop({**canned(), "refused": "noise"}, [cost(0.0, 0.5)])
    assert refused["healthy"] and refused["cause"] is None


def test_beside_a_gpu_only_what_makes_steps_longer_counts():
    hidden = {**cost(0.0, 0.04), "period_seconds": 0.101}
    waited = {**cost(0.0, 0.06), "period_seconds": 0.15}
    values = {**canned("threads"), "noise": 0.01}
    assert judge_script_loop(values, [hidden], on_gpu=True)["script_loop"]["points"] == 0
    loop = judge_script_loop(values, [waited], on_gpu=True)["script_loop"]
    assert loop["after_seconds"] == pytest.approx(0.15 - 0.101)
