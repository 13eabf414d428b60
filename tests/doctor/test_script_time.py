"""The script's own time in its loop: counted where the script spends it, and never where it trains.

The scripts move the clock themselves: what is counted is exact.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from processes import ronde_run
from ronde.doctor import script_time
from ronde.doctor.loop_trial import judge_script_loop
from ronde.doctor.script_time import ScriptTime, mean_over_periods, timing_event

SCRIPT = """
import json, os, sys, torch, ronde
from torch import nn
from torch.nn import functional as F
from ronde.doctor import doctor, script_time
from ronde.run import hooks

kind, folder = sys.argv[1:]
now = [0.0]
script_time.perf_counter = lambda: now[0]


def work(seconds):
    now[0] += seconds


class Slow(nn.Linear):
    def forward(self, x):
        work(0.5)
        return super().forward(x)


torch.manual_seed(0)
model, teacher = Slow(4, 3), Slow(4, 3)
data = torch.utils.data.TensorDataset(torch.randn(160, 4), torch.randint(3, (160,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
options = {"micro_batch": 2} if kind == "micro" else {}
rates = {"synthetic": 16.0, "real": 16.0}
answer = {"refused": None, "samples_per_second": rates, "batch": 8, "executor": "none",
          "healthy": True, "cause": None, "prescriptions": [], "notes": []}
doctor.examine = lambda run, options, tell: dict(answer)
hooks.observer = doctor.Doctor({}, __import__("pathlib").Path(folder) / "answer.json")
run = ronde.distribute(model, optimizer, data, loss=F.cross_entropy, batch_size=8, **options)
for epoch in run.epochs(1):
    work(100)  # outside of the loop over batches
    for batch in run.batches():
        work(0.01)
        if kind == "own":
            inputs, target = batch
            loss = F.cross_entropy(model(inputs), target)
            work(2)  # between the passes nothing can be told apart: not counted
            run.backward(loss)
            work(1)
            run.update()
        elif kind == "micro":
            for inputs, target in batch:
                run.backward(F.cross_entropy(model(inputs), target))
            run.update()
        elif kind == "teacher":
            with torch.no_grad():
                teacher(batch[0])
            run.step(batch)
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


@pytest.mark.parametrize("kind", ["own", "micro", "teacher"])
def test_passes_that_the_script_makes_are_not_its_own_time(tmp_path, kind):
    found = started(tmp_path, kind)["script_loop"]
    assert (found["before_seconds"], found["after_seconds"]) == pytest.approx((0.01, 0.03))


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


def looped(monkeypatch, steps, every, first, own=False):
    """What a loop costs that works 0.6 s in each ``every``-th step, 0.001 s in the others."""
    now = [0.0]
    monkeypatch.setattr(script_time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(script_time, "_compiles", lambda: False)
    clock, model = ScriptTime(), torch.nn.Linear(1, 1)
    for step in range(steps):
        clock.handed()
        rare = 0.6 if step % every == first else 0.001
        if own:  # it works between the batch and its own forward pass
            now[0] += rare
            model(torch.ones(1))
            now[0] += 1.0
            clock.enter(own=True)
        else:
            clock.enter()
        now[0] += 0.02
        clock.leave()
        now[0] += 0.0 if own else rare
        clock.enter()
    return clock


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("first", [0, 19, 7])
def test_work_in_every_twentieth_step_is_counted_whole(monkeypatch, first, own):
    clock = looped(monkeypatch, 60, 20, first, own)
    found = clock.cost()
    whole = (0.6 + 19 * 0.001) / 20
    assert found["before_seconds"] + found["after_seconds"] == pytest.approx(whole)
    assert clock.wanted_steps() == 0


@pytest.mark.parametrize("first", [0, 49])
def test_a_rare_cost_is_waited_for_until_it_comes_again(monkeypatch, first):
    wanted = looped(monkeypatch, 60, 50, first).wanted_steps()
    assert wanted in (101, 103)
    clock = looped(monkeypatch, wanted, 50, first)
    assert clock.cost()["after_seconds"] == pytest.approx((0.6 + 49 * 0.001) / 50)


def test_costs_that_come_now_and_then_are_a_plain_mean():
    for values in ([1.0] * 9, [0.0] * 9 + [6.0], [0, 6, 0, 0, 6, 0, 6, 0, 0, 0], [0.0] * 5):
        assert mean_over_periods(values) == sum(values) / len(values)


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
    return {"before_seconds": before, "after_seconds": after, "period_seconds": 0.2, "steps": 9}


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


class Device:
    """A device that works on for 0.4 s after a step was asked for, and its events."""

    def __init__(self, clock):
        self.clock = clock
        self.busy_until = 0.0

    def event(self):
        device = self

        class Event:
            def record(self):
                self.at = max(device.clock[0], device.busy_until)

            def query(self):
                return self.at <= device.clock[0]

            def elapsed_time(self, other):
                return 1e3 * (other.at - self.at)

        return Event()


@pytest.mark.parametrize(("reads", "expected"), [(False, 0.0), (True, 0.05)])
def test_a_wait_for_the_device_is_not_the_scripts_time(monkeypatch, reads, expected):
    now = [0.0]
    monkeypatch.setattr(script_time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(script_time, "_compiles", lambda: False)  # another test may have
    device = Device(now)
    clock = ScriptTime(device.event)
    for _ in range(80):
        now[0] += 0.01  # waits for its input
        clock.handed()
        clock.enter()
        device.busy_until = max(now[0], device.busy_until) + 0.4
        clock.leave()
        if reads:
            now[0] = max(now[0], device.busy_until)  # loss.item()
        now[0] += 0.05  # and prints it
        clock.enter()
        device.busy_until = min(device.busy_until, now[0] + 1.0)  # a queue is not endless
    found = clock.cost()
    assert found["before_seconds"] + found["after_seconds"] == pytest.approx(expected, abs=1e-9)


def test_what_cannot_be_measured_is_not_told(monkeypatch):
    assert timing_event(torch.device("cpu")) == (None, True)
    assert timing_event(torch.device("meta")) == (None, False)
    monkeypatch.setattr(script_time, "_compiles", lambda: True)
    clock = ScriptTime()
    assert clock.cost() is None
    for _ in range(20):
        clock.handed()
        clock.enter(own=True)
        clock.enter()
        clock.leave()
        clock.enter()
    assert clock.cost() is None  # no hooks beside torch.compile: the pass is not told apart
    assert not torch.nn.modules.module._global_forward_hooks
