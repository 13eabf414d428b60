"""Rules on machines and on the pace of steps: each fires on the lines that it is for, and no other
one does; live and afterwards, the alerts are the same.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from record_lines import end, resume, step
from record_lines import start as line_of_start
from ronde.watch import RunDir
from ronde.watch.judge import Judge, alert_line
from ronde.watch.rule import MACHINES
from ronde.watch.rules import RULES

GIB = 1 << 30
BEGUN = 1000.0  # when the workers were started


def start(**changes: object) -> dict:
    known = {"workers": 2, "device": "cpu", "threads": 2, "time": BEGUN + 1}
    return line_of_start(**{**known, **changes})


def steps(seconds: object) -> list[dict]:
    """A record of steps that took so long each."""
    at = BEGUN + 2 + np.cumsum(seconds)  # type: ignore[call-overload]
    return [step(i, 1 / i, time=float(t)) for i, t in enumerate(at, 1)]


def line(number: int, **changes: object) -> dict:
    """The line of the ``number``-th ten seconds of a busy CPU training; a callable is called."""
    changes = {k: v(number) if callable(v) else v for k, v in changes.items()}
    each = {"steps": 100, "waited": 1.0, "loading": 0.5, "why": []}
    ranks = [each | {"rank": r, **changes.get(f"rank{r}", {})} for r in range(2)]  # type: ignore[dict-item]
    values = {"time": BEGUN + 10 * number, "seconds": 10.0, "since_start": 10.0 * number}
    values |= {"host": "a", "cpu": [90.0, 95.0, 99.0], "cores": 4, "idle": 2.0, "throttled": 0}
    values |= {"memory": 4 * GIB, "memory_limit": 32 * GIB, "disk_free": 80 * GIB}
    values |= {"disk_total": 100 * GIB, "gpu": [], "gpu_memory": [], "gpu_memory_limit": []}
    values |= {"step": 100 * number, "last_step": 10**6, "training": True, "ranks": ranks}
    return {"type": "resources", **values, **{k: v for k, v in changes.items() if k in values}}


def gpus(number: int, **changes: object) -> dict:
    values = {"gpu": [[50.0, 90.0, 97.0]] * 2, "gpu_memory": [20 * GIB] * 2, "cpu": [5.0] * 3}
    values |= {"gpu_memory_limit": [80 * GIB] * 2, "rank0": {"waited": None}}
    return line(number, **{**values, "rank1": {"waited": None}, **changes})


def grows(number: int) -> float:
    return (4 + 0.02 * number) * GIB  # by 7.2 GiB an hour


def fills_a_cache(number: int) -> float:
    return grows(min(number, 200))


SAVED = {"type": "checkpoint", "step": 9, "path": "", "bytes": 50 * GIB, "seconds": 1.0}
GPU = {"device": "NVIDIA H100", "workers": 2}
FAST = [0.02] * 900
SLOW = [*FAST[:149], 1.5, *([*FAST[:49], 0.9] * 15)]
OTHERS = {"cpu": [20.0, 30.0, 40.0], "idle": 1.0}  # two other programs keep the cores busy


def lines(count: int, make=line, **changes: object) -> list[dict]:
    return [make(number, **changes) for number in range(1, count + 1)]


def case(resources: list[dict], *rules: str, record: list[dict] | None = None, **changes) -> tuple:
    """A record, lines of resources, what of the start is unusual, and the rules that fire."""
    return steps(FAST) if record is None else record, resources, changes, list(rules)


IDLE = {"cpu": [9.0, 20.0, 31.0], "idle": 65.0}
PAUSES = {"rank0": {"steps": 0}, "rank1": {"steps": 0}}
UNUSED = {"gpu": [[0.0] * 3] * 2, "gpu_memory": [1] * 2, "gpu_memory_limit": [9] * 2}
EPOCH = {"type": "epoch", "epoch": 0, "samples": 1, "time": 0.0, "samples_per_second": 1.0}
EPOCHS = [{**EPOCH, "step": step} for step in range(149, 900, 50)]
LONG = {"steps_per_epoch": 20_000}
CASES = {
    "busy": case(lines(40)),
    "idle": case(lines(14, **IDLE), "low-utilization"),
    "idle for a minute": case(lines(6, **IDLE)),
    "others have the cores": case(lines(40, **OTHERS)),
    "few threads": case(lines(40, cpu=[40.0, 45.0, 49.0], idle=50.0), threads=1),
    "it evaluates": case(lines(14, cpu=[20.0] * 3, idle=70.0, **PAUSES)),
    "busy devices": case(lines(40, gpus), **GPU),
    "an idle device": case(
        lines(14, gpus, gpu=[[50.0, 90.0, 97.0], [9.0, 10.0, 30.0]]), "low-utilization", **GPU
    ),
    "idle devices of a training on the CPU": case(lines(40, **UNUSED)),
    "waits for batches": case(lines(14, rank1={"loading": 4.0}), "input-bound"),
    "runs ahead of its device": case(lines(14, gpus, rank1={"loading": 8.0}), **GPU),
    "device waits for batches": case(
        lines(14, gpus, rank1={"loading": 8.0}, gpu=[[50.0, 80.0, 89.0]] * 2), "input-bound", **GPU
    ),
    "leaks": case(lines(130, memory=grows), "host-memory"),
    "leaks, but ends before": case(lines(130, memory=grows, last_step=20_000)),
    "fills a cache in the first epoch": case(lines(400, memory=fills_a_cache), **LONG),
    "leaks in the first epoch": case(
        lines(130, memory=lambda n: 23 * GIB + grows(n)), "host-memory", **LONG
    ),
    "leaks on the device": case(
        lines(130, gpus, gpu_memory=lambda n: [20 * GIB, 10 * grows(n)]), "gpu-memory", **GPU
    ),
    "no room for checkpoints": case(lines(3), "disk-full", record=[SAVED, *steps(FAST)]),
    "a small disk": case(lines(3, disk_free=GIB // 2), "disk-full"),
    "a large disk": case(lines(3, disk_free=4 * GIB)),
    "throttled": case(lines(14, throttled=45), "throttled"),
    "throttled now and then": case(lines(40, throttled=9)),
    "never starts": case(lines(130, training=False, ranks=[], step=0), "slow-start", record=[]),
    "starts late": case([*lines(100, training=False, step=0), *lines(110)[100:]]),
    "outliers": case([], "outlier-steps", record=steps(SLOW)),
    "outliers after evaluations": case(
        [], record=sorted([*steps(SLOW), *EPOCHS], key=lambda e: e["step"])
    ),
    "short outliers": case([], record=steps([*FAST[:600], *([0.02, 0.19] * 100)])),
    "a slow rank": case(lines(5, rank0={"waited": 4.0}), "imbalance"),
    "slow in turns": case(lines(40, rank0=lambda n: {"waited": 4.0 * (n % 3 != 0)})),
    "a rank is not known": case(lines(5, rank0={"waited": 4.0}), workers=3),
}


def write(path: Path, record: list[dict], resources: list[dict]) -> RunDir:
    path.mkdir(parents=True, exist_ok=True)
    for name, values in (("record", record), ("resources", resources)):
        (path / f"{name}.jsonl").write_text("".join(json.dumps(v) + "\n" for v in values))
    return RunDir(path)


def record_of(name: str) -> list[dict]:
    """The record of a case, with an end long after the last line."""
    events, lines, changes, _ = CASES[name]
    over = end(time=BEGUN + 10 * len(lines) + 60)
    return [start(**changes), *({"time": BEGUN + 2, **e} for e in events), over]


@pytest.mark.parametrize("name", CASES)
def test_a_rule_fires_on_the_lines_that_it_is_for(name, tmp_path):
    judge = Judge(write(tmp_path / "big", record_of(name), CASES[name][1]))
    judge.look()
    assert not judge.failed
    assert [a.rule for a in judge.alerts] == CASES[name][3]
    for alert in judge.alerts:
        assert alert.text and alert.remedy
        assert bool(alert.again) == (alert.rule == "outlier-steps")


def test_every_rule_has_a_case_on_which_it_fires():
    machines = {n for n, rule in RULES.items() if rule.needs in (*MACHINES, "start", "steps")}
    assert {rule for *_, alerts in CASES.values() for rule in alerts} == machines


def test_the_texts_have_the_numbers_and_end_with_what_to_do(tmp_path):
    def alert(name, index=0):
        judge = Judge(write(tmp_path / name, record_of(name), CASES[name][1]))
        judge.look()
        return judge.alerts[index]

    idle = alert("idle")
    assert idle.text == (
        "the workers never used more than 31 % of 4 cores, and 65 % were idle, for 2 minutes"
    )
    assert idle.remedy == "ronde doctor train.py"
    slow = alert("a slow rank")
    assert slow.text == "rank 0 waits 30 ms of each step of 100 ms for rank 1"
    assert slow.rank == 1
    assert alert("leaks").text == (
        "memory of the workers grows by 7.2 GiB an hour: full in 3.6 h, and the training takes "
        "27.5 h more; 6.13 GiB of 32 GiB are used"
    )
    assert alert("outliers").text == (
        "8 of 491 steps took more than 5 times the median of 20 ms; step 150 took 1.5 s"
    )


def test_what_was_not_measured_is_not_judged(tmp_path):
    judge = Judge(write(tmp_path / "a", [start(workers=1), *steps(FAST)], []))
    judge.look()
    summary = judge.summary()
    assert "not judged (no resources measured yet)" in summary
    assert "(one worker)" in summary and "(not fp16)" in summary
    write(tmp_path / "b", record_of("busy devices"), lines(14))  # NVML was not there
    judge = Judge(RunDir(tmp_path / "b"))
    judge.look()
    assert "2 not judged (GPUs are not measured: pip install nvidia-ml-py)" in judge.summary()


def test_alerts_are_the_same_however_the_reading_is_cut(tmp_path):
    """The record is written a second late, and resources up to four."""
    resources = lines(60, cpu=[9.0] * 3, idle=80.0, throttled=80, rank0={"waited": 4.0})
    events = [start(), *steps([0.5] * 1000), {**SAVED, "step": 1000, "time": BEGUN + 503}]
    again = resume(1000, time=BEGUN + 520)
    more = [{**e, "step": 1000 + e["step"], "time": e["time"] + 520} for e in steps([0.5] * 200)]
    events += [start(time=BEGUN + 520), again, *more]
    whole = Judge(write(tmp_path / "whole", events, resources))
    whole.look()
    expected = [alert_line(a) for a in whole.alerts]
    assert [a.rule for a in whole.alerts] == [
        *("imbalance", "low-utilization", "throttled", "disk-full")
    ]
    for seed in range(3):
        choice, now = random.Random(seed), BEGUN
        run = write(tmp_path / str(seed) / "whole", [], [])
        judge = Judge(run)
        while now < BEGUN + 700:
            now += choice.uniform(0.1, 30)
            late = now - choice.uniform(0, 4)
            write(
                run.path,
                [e for e in events if e["time"] < now - 1],
                [e for e in resources if e["time"] < late],
            )
            judge.look()
        write(run.path, events, resources)
        judge.look()
        assert [alert_line(a) for a in judge.alerts] == expected
