"""Why are the devices idle? Planted faults are named, healthy input is left alone, and the training
is as it was.
"""

from __future__ import annotations

import io
import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import yaml
from rich.console import Console
from torch.utils.data import DataLoader, Dataset, Subset

from processes import child, marked, ronde, ronde_batch, ronde_run
from ronde.adapt import dataset_facts
from ronde.cli.answer_screen import print_answer
from ronde.cli.doctor import screen
from ronde.cli.doctor_apply import apply_prescriptions, check_writable
from ronde.doctor.doctor import attributes_kept
from ronde.doctor.prescribe import Facts, outlook, prescriptions, remedies
from ronde.doctor.verdict import Measurements, TimedStage, judge
from ronde.world import ArgumentError
from sampling import long, some

# -- what the numbers say --------------------------------------------------------------


def seen(rounds, stages=(), **more):
    given = {"workers": 1, "loaders": 2, "executor": "processes", "cores": 8, "batch": 16, **more}
    wait = [(given["batch"] * (1 / r["real"] - 1 / r["synthetic"]),) for r in rounds]
    given = {"waits": tuple((max(w, 0.0),) * given["workers"] for (w,) in wait), **given}
    return Measurements(rounds=tuple(rounds), stages=tuple(stages), **given)


def rounds(n=3, **arms):
    """The same rates in every round but for some thousandths."""
    return [
        {
            name.replace("__", ":"): rate * (1 + 0.004 * ((i + len(name)) % 3 - 1))
            for name, rate in arms.items()
        }
        for i in range(n)
    ]


STAGES = (
    TimedStage("read", wall_seconds=0.0002, cpu_seconds=0.0001),
    TimedStage("decode", wall_seconds=0.004, cpu_seconds=0.004),
    TimedStage("augment", wall_seconds=0.0003, cpu_seconds=0.0003),
    TimedStage("python", wall_seconds=0.0001, cpu_seconds=0.0001),
)


def test_the_stage_that_takes_the_loaders_time_is_the_cause():
    found = judge(
        seen(
            rounds(synthetic=1000, real=400, beside=1000),
            STAGES,
        )
    )
    assert found["cause"]["stage"] == "decode"
    assert not found["healthy"] and found["refused"] is None
    assert found["gap"] == pytest.approx(0.6, abs=0.02)
    assert found["gap_low"] < 0.6 < found["gap_high"]
    rows = {r["name"]: r for r in found["stages"]}
    assert rows["decode"]["lost_points"] == pytest.approx(59, abs=2)
    assert rows["decode"]["capacity_samples_per_second"] == pytest.approx(2 / 0.004)
    assert rows["decode"]["cpu_ms_per_sample"] == pytest.approx(4)
    # What overlaps is not counted twice.
    assert sum(r["lost_points"] for r in rows.values()) <= 61


def test_two_stages_that_each_close_the_gap_keep_it_between_them():
    both = rounds(synthetic=1000, real=500, beside=1000)
    stages = (TimedStage("read", wall_seconds=0.002), TimedStage("decode", wall_seconds=0.0025))
    rows = {r["name"]: r for r in judge(seen(both, stages))["stages"]}
    assert rows["decode"]["lost_points"] + rows["read"]["lost_points"] <= 51
    assert all(rows[name]["alone_points"] > 40 for name in ("read", "decode"))
    assert sum("if it alone were free" in row["note"] for row in rows.values()) == 1


def test_stages_that_follow_each_other_share_the_gap_by_their_time():
    stages = [
        TimedStage(n, wall_seconds=t)
        for n, t in (("read", 0.001), ("decode", 0.006), ("augment", 0.003))
    ]
    rates = rounds(synthetic=1000, real=1 / 0.011)
    found = judge(seen(rates, stages, loaders=0, executor="none"))
    rows = {r["name"]: r for r in found["stages"]}
    assert found["cause"]["stage"] == "decode"
    assert found["cause"]["points"] == rows["decode"]["lost_points"]
    assert sum(r["lost_points"] for r in rows.values()) == pytest.approx(100 * found["gap"], abs=2)
    # 11 by itself, and its share of the rest
    assert rows["decode"]["lost_points"] == pytest.approx(55, abs=5)
    assert "11 if it alone were free" in rows["decode"]["note"]
    # Where their times do not account for what is lost, nothing is laid at their door.
    short = [TimedStage(s.name, wall_seconds=s.wall_seconds / 4) for s in stages]
    rows = {r["name"]: r for r in judge(seen(rates, short, loaders=0, executor="none"))["stages"]}
    assert rows["decode"]["lost_points"] < 5


@pytest.mark.parametrize("real", [1000, 985, 960])
def test_a_small_gap_is_healthy(real):
    found = judge(seen(rounds(synthetic=1000, real=real), STAGES))
    assert found["healthy"] and found["cause"] is None and found["refused"] is None
    assert remedies(found, Facts(1, 2, "processes", 8)) == []


def test_a_gap_that_the_same_arm_shows_against_itself_is_no_verdict():
    wild = [
        {"synthetic": s, "real": r} for s, r in ((1000, 900), (1000, 600), (1000, 880), (1000, 620))
    ]
    found = judge(seen(wild, STAGES))
    assert "differs from itself" in found["refused"]
    assert ". Stop other programs; more rounds may settle it" in found["refused"]
    assert not found["healthy"] and found["cause"] is None
    assert remedies(found, Facts(1, 2, "processes", 8)) == []


def test_a_machine_that_slows_down_makes_no_gap_uncertain():
    # Every round has a gap of 20 %, and a machine of its own speed.
    drifting = [
        {"synthetic": 1000 * f, "real": 800 * f, "beside": 1000 * f} for f in (0.97, 1.0, 1.03, 1.0)
    ]
    found = judge(seen(drifting, STAGES))
    assert found["gap"] == pytest.approx(0.2) and found["gap_high"] - found["gap_low"] < 0.01
    assert not found["healthy"] and found["refused"] is None and found["cause"]["stage"] == "decode"


def test_the_interval_of_a_gap_covers_it_where_reading_alone_is_noisy():
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        arms = {
            "synthetic": (1000, 0.01),
            "real": (800, 0.06),
            "beside": (900, 0.01),
            "limited": (900, 0.01),
        }
        noisy = [
            {name: rate * (1 + s * rng.standard_normal()) for name, (rate, s) in arms.items()}
            for _ in range(3)
        ]
        found = judge(seen(noisy, STAGES))
        covered += found["gap_low"] <= 0.2 <= found["gap_high"]
    assert covered > 0.85 * 400  # by the noise of all arms alike it were two thirds


def test_a_rank_with_a_smaller_share_or_none_is_no_straggler():
    alone = [(1000.0, 1000.0, 1000.0)] * 3
    found = judge(seen(rounds(synthetic=2950, real=2930), STAGES, workers=3, alone=alone))
    assert found["healthy"] and found["straggler"] is None


def test_a_step_that_is_slower_beside_the_loaders_is_their_neighbours_fault():
    found = judge(seen(rounds(synthetic=1000, real=700, beside=720), STAGES))
    assert found["cause"]["stage"] == "neighbour"
    assert found["neighbour"]["points"] == pytest.approx(28, abs=2)
    assert "decode" in found["neighbour"]["cause"]
    assert next(r for r in found["stages"] if r["name"] == "decode")["lost_points"] < 5
    assert found["cause"]["within"] == "decode"
    # Loaders that could not feed a faster step are the cause themselves.
    found = judge(seen(rounds(synthetic=1000, real=500, beside=600), STAGES, loading=540))
    assert found["cause"]["stage"] == "decode" and found["neighbour"]["points"] < 5
    assert next(r for r in found["stages"] if r["name"] == "decode")[
        "lost_points"
    ] == pytest.approx(48, abs=2)
    found = judge(
        seen(rounds(synthetic=1000, real=1050), STAGES)
    )  # faster than its ceiling, by chance
    assert (
        found["gap"] == 0
        and found["gap_high"] >= 0
        and all(r["lost_points"] >= 0 for r in found["stages"])
    )


def test_what_one_thread_in_the_loaders_mends_is_oversubscription():
    found = judge(seen(rounds(synthetic=1000, real=300, limited=980, beside=900), STAGES))
    assert found["cause"]["stage"] == "oversubscription"
    assert found["cause"]["within"] == "decode"
    facts = Facts(1, 2, "processes", 8)
    listed = prescriptions(found, facts, remedies(found, facts), 8)
    assert listed[0]["id"] == "thread-limit" and listed[0]["settings"] == {"threads": 1}


def test_what_is_left_when_samples_are_only_replayed_is_the_way_between_processes():
    waits = {"replayed": 0.024, "real": 0.025}
    found = judge(
        seen(
            rounds(synthetic=1000, real=390, replayed=400, beside=1000),
            STAGES[:1],
            arm_waits=waits,
            waits=((0.025,),) * 3,
        )
    )
    assert found["cause"]["stage"] == "transport"
    assert found["cause"]["points"] == pytest.approx(60, abs=2)


def test_a_rank_whose_step_is_slower_is_a_straggler():
    alone = ((500.0, 330.0), (498.0, 331.0), (501.0, 329.0))
    found = judge(seen(rounds(synthetic=650, real=645), STAGES, workers=2, alone=alone))
    assert found["cause"] == {
        "stage": "straggler",
        "points": pytest.approx(34, abs=1),
        "rank": 1,
        "of": "ideal",
    }
    assert found["straggler"]["slower"] == pytest.approx(1.51, abs=0.02)
    assert found["exchange_points"] < 3


def test_a_slow_exchange_is_told_from_a_slow_step():
    alone = ((500.0, 497.0), (498.0, 502.0), (501.0, 499.0))
    found = judge(seen(rounds(synthetic=650, real=645), STAGES, workers=2, alone=alone))
    assert found["cause"]["stage"] == "exchange"
    assert found["exchange_points"] == pytest.approx(35, abs=1)
    assert found["straggler"] is None


def test_predictions_keep_the_measured_gap_here_and_name_the_wall():
    values = judge(seen(rounds(synthetic=1000, real=980), STAGES))
    rows, walls = outlook(values, Facts(1, 2, "processes", 8, devices_per_node=8), 16)
    assert [r["devices"] for r in rows] == [1, 2, 4, 8, 16]
    assert rows[0]["gap"] == values["gap"]
    # 4.5 ms of the eight cores of a node for each sample: 1,770 a second, for devices that want
    # 1,000 each.
    assert rows[-1]["gap"] > 0.5
    assert (
        walls[0]["stage"] == "decode" and walls[0]["limit"] == "cores" and walls[0]["devices"] == 2
    )


def test_remedies_that_were_tried_and_bring_nothing_are_left_out():
    import dataclasses

    values = judge(
        seen(
            rounds(synthetic=1000, real=400, beside=1000),
            (TimedStage("read", wall_seconds=0.005, cpu_seconds=0.004),),
        )
    )
    facts = Facts(1, 2, "processes", 8, pipeline=True)
    found = remedies(values, facts)
    assert {"loaders", "threads", "cache-read"} <= {r.id for r in found}
    tried = [
        dataclasses.replace(
            r,
            rate={"loaders": 950.0, "threads": 401.0}.get(r.id),
            tried=r.id in ("loaders", "threads"),
        )
        for r in found
    ]
    listed = prescriptions(values, facts, tried, 1)
    names = [p["id"] for p in listed]
    assert "threads" not in names
    assert next(p for p in listed if p["id"] == "loaders")["gain_here_points"] == pytest.approx(
        55, abs=2
    )
    assert [p["number"] for p in listed] == list(range(1, len(listed) + 1))


# -- what is shown ---------------------------------------------------------------------


def noisy(real: float, **more) -> dict:
    """A machine that drifts: rates of one round belong together, those of several do not."""
    ceilings = (5000.0, 5369.0, 7000.0, 4000.0, 5600.0)
    rounds = tuple({"synthetic": c, "real": c * real} for c in ceilings)
    found = judge(Measurements(2, 2, "processes", 8, 16, rounds, **more))
    shown = {"script": "train.py", "model": "Net", "device": "cpu", "measured_seconds": 20.0}
    return {**found, **shown, "scale": [], "walls": [], "prescriptions": []}


@pytest.mark.parametrize("real", [0.55, 0.8, 0.97, 1.0, 1.02])
def test_the_numbers_of_a_screen_agree_with_each_other(real):
    values = noisy(real)
    rates, gap = values["samples_per_second"], values["gap"]
    assert rates["real"] == pytest.approx(rates["synthetic"] * (1.0 - gap))
    assert rates["real"] <= rates["synthetic"]
    text = text_of(screen(values))
    assert "CAUSE" not in text or not values["healthy"]
    if gap <= (values["gap_high"] - values["gap_low"]) / 2 and not values["refused"]:
        assert "no measurable gap" in text and "GAP" not in text
    else:
        assert f"GAP {100 * gap:.0f} %" in text


def test_what_workers_lose_between_them_is_no_part_of_the_gap():
    alone = tuple((5500.0, 5500.0) for _ in range(5))
    values = noisy(0.97, alone=alone)
    text = text_of(screen(values))
    assert values["cause"]["stage"] == "exchange" and 40 < values["cause"]["points"] < 60
    line = next(line for line in text.splitlines() if "CAUSE" in line)
    assert "of what the workers reach without it (11,000 samples/s)" in line
    assert text.index("CAUSE") < text.index("synthetic"), "the headline comes first"


def test_at_most_three_lines_of_notes_unless_all_are_asked_for():
    values = noisy(0.7)
    values["notes"] = [f"caveat {i}: it changes the gap by {i} points." for i in range(9)]
    text = text_of(screen(values))
    assert "caveat 2" in text and "caveat 3" not in text and "9 notes in all: --verbose" in text
    assert "caveat 8" in text_of(screen(values, verbose=True))


def test_a_narrow_terminal_cuts_no_number():
    stage = TimedStage("a_long_name_of_a_stage_of_ones_own", "loading", 0.00001, 0.00002)
    values = noisy(0.55, stages=(stage,))
    values["stages"][0]["note"] = "waits 91 % of its time; 40 if it alone were free"
    wide, narrow = (text_of(screen(values), width) for width in (200, 60))
    cells = next(line for line in wide.splitlines() if "a_long" in line).split()[1:4]
    assert "," in cells[0]
    line = next(line for line in narrow.splitlines() if "a_long" in line)
    assert line.split()[1:4] == cells


def text_of(parts, width=200):
    console = Console(width=width, file=io.StringIO())
    print_answer(console, parts)
    return console.file.getvalue()


class OpensPool(Dataset):
    """Makes threads of its own with its first sample, as libraries do."""

    def __len__(self):
        return 8

    def __getitem__(self, i):
        if not hasattr(self, "pool"):
            self.pool = ThreadPoolExecutor(1)
        return self.pool.submit(float, i).result()


def test_processes_forked_after_a_look_at_samples_do_not_wait_for_threads_left_behind():
    data = OpensPool()
    wrapped = Subset(data, range(4))
    with attributes_kept(wrapped):
        assert not dataset_facts(wrapped, 2).error
        assert "pool" in vars(data)
    loader = DataLoader(wrapped, num_workers=1, timeout=20)
    assert [float(x) for x in loader] == [0.0, 1.0, 2.0, 3.0]


# -- the script itself -----------------------------------------------------------------

JOB = """
import sys, time, torch, ronde
from torch.utils.data import DataLoader, Dataset

fault, loaders = sys.argv[1], int(sys.argv[2])
print("said by the script")

class Data(Dataset):
    def __init__(self):
        self.transform = self.change
    def __len__(self):
        return 512
    @ronde.feed.stage("read")
    def load(self, i):
        if fault == "read":
            time.sleep(0.02)
        if fault == "broken" and i == 38:
            raise OSError("sample 38 is broken")
        return torch.full((8,), float(i))
    def change(self, x):
        if fault == "augment":
            time.sleep(0.01)
        return x / 100
    def __getitem__(self, i):
        return self.transform(self.load(i)), torch.tensor([0.5])

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
    def forward(self, x):
        time.sleep(0.03)
        return self.layer(x)

if __name__ == "__main__":
    model = Net()
    size = 8 * ronde.world().size
    data = DataLoader(Data(), batch_size=size, num_workers=loaders, shuffle=True)
    run = ronde.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01), data, loss=torch.nn.functional.mse_loss)
    steps = 0
    for batch in run.batches():
        run.step(batch)
        steps += 1
        if steps == 3:
            break
    print("trained", run.plan.workers, run.port.data.settings.num_workers)
"""


@pytest.fixture
def job(tmp_path):
    (tmp_path / "train.py").write_text(JOB)
    return tmp_path


def examine(job, *arguments, seconds="6", workers="1"):
    out = job / "doctor.json"
    options = f"--workers {workers} --seconds {seconds} --rounds 2 --json {out}".split()
    done = ronde_run(["doctor", *options, "train.py", *arguments], job, timeout=150)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return json.loads(out.read_text()), done


KEYS = """
    script workers device samples_per_second gap gap_low gap_high healthy refused stages
    exchange_points straggler neighbour startup_seconds scale walls prescriptions notes cause
"""
STAGE_KEYS = "name capacity_samples_per_second cpu_ms_per_sample lost_points low high note"
PRESCRIPTION_KEYS = "number id text settings label gap_here gap_largest gain_here_points"


def has(values, keys):
    return values.keys() >= set(keys.split())


@long
def test_a_slow_read_is_named_cured_and_the_cure_is_read_by_ronde_run(job):
    (job / "train.feed.yaml").write_text("# mine\nprefetch: 1\n")
    out = job / "doctor.json"
    options = f"--workers 1 --seconds 5 --rounds 2 --apply loaders --json {out}".split()
    command = ["doctor", *options, "train.py", "read", "1"]
    done = ronde_run(command, job, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    values = json.loads(out.read_text())
    assert has(values, KEYS)
    assert values["cause"]["stage"] == "read"
    assert not values["healthy"]
    row = next(s for s in values["stages"] if s["name"] == "read")
    assert has(row, STAGE_KEYS)
    assert row["lost_points"] > 30
    for p in values["prescriptions"]:
        assert has(p, PRESCRIPTION_KEYS)
        assert p["label"] in ("same bits", "same distribution")
    lines = done.stdout.splitlines()
    assert "said by the script" not in done.stdout and "\x1b" not in done.stdout
    assert len(lines[: next(i for i, line in enumerate(lines) if line.startswith("written"))]) <= 24
    assert "CAUSE  storage read" in done.stdout and "points gained of" in done.stdout
    assert (job / "train.feed.yaml.before").read_text() == "# mine\nprefetch: 1\n"
    settings = yaml.safe_load((job / "train.feed.yaml").read_text())
    asked = next(p for p in values["prescriptions"] if p["id"] == "loaders")["settings"]
    assert settings == {"prefetch": 1, **asked} and settings["workers"] > 1
    assert (
        values["applied"]["prescriptions"] == ["loaders"]
        and values["applied"]["gap"] < values["gap"]
    )
    assert not (job / "runs").exists()
    ran = ronde_run(
        ["run", "--workers", "1", "--runs", "none", "train.py", "read", "1"], job, timeout=60
    )
    assert f"trained 1 {settings['workers']}" in ran.stdout


def test_the_answer_of_the_command(job):
    """How true it is: benchmarks/doctor_truth.py."""
    values, done = examine(job, "augment", "0", seconds="4")
    assert has(values, KEYS) and values["executor"] == "none"
    assert 0 <= values["gap"] <= 1 and values["samples_per_second"]["real"] > 0
    assert {"read", "augment", "collate"} <= {stage["name"] for stage in values["stages"]}
    assert "said by the script" not in done.stdout and "\x1b" not in done.stdout


@pytest.mark.parametrize("command", some(["doctor", "scale"], 2))
def test_a_sample_that_one_rank_cannot_read_ends_all_of_them(job, command):
    done = ronde_run([command, "--workers", "2", "train.py", "broken", "1"], job, timeout=100)
    assert done.returncode not in (0, 1) and "sample 38 is broken" in done.stderr, (
        done.stdout + done.stderr
    )


def test_ctrl_c_ends_every_process(job):
    line = ronde("doctor", "--workers", "1", "--seconds", "60", "train.py", "read", "2")
    with child(line, job) as started:
        limit = time.monotonic() + 60
        # command, worker, its loaders
        while len(marked(started.mark)) < 4 and time.monotonic() < limit:
            time.sleep(0.1)
        started.process.send_signal(signal.SIGINT)
        done = started.done(30)
    assert done.returncode == 130
    assert "every process has ended" in done.stdout


def test_bad_arguments_are_refused_before_anything_starts(job):
    cases = [
        ("--seconds 0 train.py", "'--seconds'"),
        ("--rounds 0 train.py", "'--rounds'"),
        ("--to 0 train.py", "'--to'"),
        ("--nodes 9 --to 8 train.py", "--nodes 9 is more than the 8 devices"),
        ("--apply 1,,2 train.py", "--apply '1,,2': expected numbers or names"),
        ("--apply 0 train.py", "--apply '0': expected numbers or names"),
        (
            "--apply foo train.py",
            "--apply foo: no prescription is called so; there are loaders, threads, ",
        ),
        ("--apply 1,loader train.py", "Did you mean loaders?"),
        ("--json none/x.json train.py", "--json none/x.json: there is no folder"),
        ("--workers none train.py", "none"),
        ("--feed gone.yaml train.py", "gone.yaml cannot be read"),
        ("gone.py", "script not found: gone.py"),
    ]
    commands = [["doctor", *words.split()] for words, _ in cases]
    for (command, text), done in zip(cases, ronde_batch(commands, job), strict=True):
        assert done.returncode == 2, command
        assert text in done.stderr.replace("\n", " "), (command, done.stderr)


VALUES = {
    "healthy": False,
    "gap": 0.4,
    "samples_per_second": {"synthetic": 100.0, "real": 60.0},
    "prescriptions": [
        {"number": 1, "id": "loaders", "settings": {"workers": 4}, "text": "more", "gap_here": 0.1},
        {"number": 2, "id": "script-loop", "text": "log less", "settings": None, "gap_here": None},
    ],
}


@pytest.mark.parametrize("mine", [None, b"# mine\nprefetch: 3\n"])
def test_settings_that_could_not_be_tried_are_undone(tmp_path, mine):
    script, file = str(tmp_path / "train.py"), tmp_path / "train.feed.yaml"
    if mine is not None:
        file.write_bytes(mine)

    def stopped(settings):
        assert yaml.safe_load(file.read_text()) == {"workers": 4}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        apply_prescriptions(VALUES, ["1"], script, "none", stopped, Console(quiet=True))
    assert (file.read_bytes() if file.exists() else None) == mine


def test_what_cannot_be_applied_is_said_and_nothing_written(tmp_path):
    script = str(tmp_path / "train.py")
    with pytest.raises(
        ArgumentError,
        match="no prescription 3; there are 2: this time the doctor prescribes 1 \\(loaders\\), "
        "2 \\(script-loop\\)",
    ):
        apply_prescriptions(VALUES, ["3"], script, "none", lambda _: {}, Console(quiet=True))
    quiet = Console(quiet=True)
    with pytest.raises(ArgumentError, match="log less takes more than settings"):
        apply_prescriptions(VALUES, ["1", "script-loop"], script, "none", lambda _: {}, quiet)
    healthy = {**VALUES, "healthy": True, "prescriptions": []}
    assert apply_prescriptions(healthy, ["1"], script, "none", lambda _: {}, quiet) is None
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "train.feed.yaml").mkdir()
    with pytest.raises(ArgumentError, match="may not be written"):
        check_writable(script)


def test_a_script_that_fails_or_never_distributes_is_told(job):
    (job / "broken.py").write_text("raise RuntimeError('no data here')")
    (job / "idle.py").write_text("print('nothing')")
    broken = ronde_run(["doctor", "--workers", "1", "broken.py"], job)
    assert broken.returncode == 2 and "no data here" in broken.stderr
    idle = ronde_run(["doctor", "--workers", "1", "idle.py"], job)
    assert idle.returncode == 2 and "without calling ronde.distribute" in idle.stderr
