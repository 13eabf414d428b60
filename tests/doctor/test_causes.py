"""What limits is asked and not assumed: samplers, waits, slow samples, locks, library threads."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from processes import ronde_run
from ronde.cli.answer_screen import print_answer
from ronde.cli.doctor import screen
from ronde.doctor.prescribe import Facts, outlook, prescriptions, remedies
from ronde.doctor.verdict import Measurements, TimedStage, judge

READ = (TimedStage("read", wall_seconds=0.004, cpu_seconds=0.0004),)


def judged(stages=READ, real=990.0, others=None, **more):
    arms = {"synthetic": 1000.0, "real": real, **(others or {})}
    rounds = tuple(
        {name: rate * (1 + 0.003 * ((i + len(name)) % 3 - 1)) for name, rate in arms.items()}
        for i in range(3)
    )
    given = {"workers": 1, "loaders": 2, "executor": "processes", "cores": 8, "batch": 16, **more}
    given = {"waits": ((16 / real - 16 / 1000,) * given["workers"],) * 3, **given}
    return judge(Measurements(rounds=rounds, stages=tuple(stages), **given))


def shown(values, facts, to=8):
    """The whole answer, and its screen."""
    values = {**values, "script": "t.py", "model": "Net", "device": "cpu", "measured_seconds": 9.0}
    values["scale"], values["walls"] = outlook(values, facts, to)
    values["prescriptions"] = prescriptions(values, facts, remedies(values, facts), to)
    console = Console(width=200, file=io.StringIO())
    print_answer(console, screen(values))
    return values, console.file.getvalue()


FACTS = Facts(1, 2, "processes", 8, devices_per_node=8)


def test_a_sampler_that_takes_a_third_of_each_epoch_is_the_verdict():
    order = {"seconds": 3.0, "share": 0.33}
    values, text = shown(judged(order=order), FACTS)
    assert (
        values["cause"] == {"stage": "sampler", "points": 33.0, "of": "epoch"}
        and not values["healthy"]
    )
    assert values["prescriptions"] == []
    assert "CAUSE  the sampler: 33 % of each epoch" in text and "nothing to prescribe" not in text
    # beside a larger loss it is no verdict
    values, _ = shown(judged(real=400, order=order), FACTS)
    assert values["cause"]["stage"] == "read" and values["cause"]["of"] == "gap"
    assert values["cause"]["points"] <= 100 * values["gap"]
    assert "loaders" in {p["id"] for p in values["prescriptions"]}
    assert judged(order={**order, "share": 0.03})["healthy"]


def test_the_input_gets_no_prescription_for_what_the_exchange_loses():
    alone = tuple((900.0, 900.0) for _ in range(3))
    values = judged(real=930, workers=2, alone=alone)  # 7 points of the input
    assert values["cause"]["stage"] == "exchange"
    assert remedies(values, replace(FACTS, workers=2)) == []
    straggler = {"stage": "straggler", "points": 20.0, "rank": 1, "within": "read"}
    assert remedies({**values, "gap": 0.2, "cause": straggler}, FACTS) is not None


def test_a_stage_that_waits_is_said_to():
    stages = (TimedStage("python", wall_seconds=0.0057, cpu_seconds=0.0005),)
    arms = {"replayed": 980.0}
    values, text = shown(judged(stages, 400, arms, waits=((0.024,),) * 3), FACTS)
    row = values["stages"][0]
    assert row["waits"] == pytest.approx(0.91, abs=0.01)
    assert "waits 91 % of its time" in text.replace("\n", " ")
    # it takes more loaders than there are cores
    (cure,) = [r for r in remedies(values, replace(FACTS, cores=2)) if r.id == "loaders"]
    assert cure.settings.workers > 2


def test_a_limit_of_each_worker_is_not_one_that_all_share():
    values = {**judged(), "loading_samples_per_second": 1500.0}
    facts = replace(FACTS, loading_sweep=((2, 1450.0), (4, 1500.0)))
    gaps, walls = {}, {}
    for scope in ("shared", "own", "unknown"):
        found, text = shown(values, replace(facts, scope=scope))
        gaps[scope], walls[scope] = found["scale"][-1], found["walls"]
        if scope == "unknown":
            assert "if workers share it: unknown" in text and "0% or 8" in text.replace("1%", "0%")
    assert gaps["shared"]["gap"] == pytest.approx(1 - 1500 / 8000, abs=0.03)
    assert walls["shared"][0] == {"stage": "read", "devices": 2, "limit": "storage"}
    assert gaps["own"]["gap"] < 0.05 and gaps["own"]["shared_gap"] is None and not walls["own"]
    assert gaps["unknown"]["gap"] < 0.05 and gaps["unknown"]["high"] > 0.75
    assert gaps["unknown"]["shared_gap"] == pytest.approx(gaps["shared"]["gap"])
    assert walls["unknown"][0]["limit"] == "unknown"


def test_loaders_are_a_wall_only_where_more_of_them_do_not_feed_the_devices_here():
    alone = {**judged(real=300.0, loaders=0, executor="none"), "loading_samples_per_second": 450.0}
    facts = replace(FACTS, loaders=0, executor="none", scope="own")
    for most, stages in ((4200.0, set()), (460.0, {"read"})):
        sweep = ((1, 450.0), (16, most), (32, 0.8 * most))
        rows, walls = outlook(alone, replace(facts, loading_sweep=sweep), 8)
        assert {w["stage"] for w in walls} == {r["wall"] for r in rows} - {None} == stages


JOB = """
import multiprocessing, sys, time, torch, ronde
from torch.utils.data import DataLoader, Dataset

class Data(Dataset):
    def __init__(self):
        self.lock = multiprocessing.get_context("fork").Lock()  # each worker has its own
    def __len__(self):
        return 512
    def __getitem__(self, i):
        with self.lock:
            time.sleep(0.004)
        return torch.full((8,), float(i)), torch.tensor([0.5])

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
    def forward(self, x):
        time.sleep(0.05)
        return self.layer(x)

model = Net()
data = DataLoader(Data(), batch_size=8 * ronde.world().size, num_workers=1, shuffle=True)
run = ronde.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01), data,
                       loss=torch.nn.functional.mse_loss)
for batch in run.batches():
    run.step(batch)
"""


def test_while_the_first_worker_loads_alone_the_others_read_nothing(tmp_path):
    script = JOB.replace("time.sleep(0.004)", "pass").replace("num_workers=1", "num_workers=0")
    script = script.replace(
        "            pass\n", "            self.made = getattr(self, 'made', 0) + 1\n"
    )
    head, _, _ = script.partition("for batch in")
    script = (
        head
        + """
from ronde.measure import Arm, Bench
with Bench(run) as bench:
    before = run.port.data.dataset.made if bench.batches else 0
    alone = bench.window(Arm("loading", first_only=True), 0.2)
    mine = run.port.data.dataset.made - before
    together = bench.window(Arm("loading"), 0.2)
print("rank", run.rank, "read", mine > 0, alone.steps > 0, together.steps > 0, flush=True)
"""
    )
    (tmp_path / "train.py").write_text(script)
    command = ["run", "--workers", "2", "--runs", "none", "--output", "all", "train.py"]
    done = ronde_run(command, tmp_path, timeout=90)
    assert "rank 0 read True True True" in done.stdout, done.stdout + done.stderr
    assert "rank 1 read False True True" in done.stdout, done.stdout + done.stderr
