"""``ronde doctor`` on scripts: planted faults are named and cured, healthy input is left alone, and
the training is as it was.
"""

from __future__ import annotations

import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import yaml
from rich.console import Console
from torch.utils.data import DataLoader, Dataset, Subset

from processes import child, marked, ronde, ronde_batch, ronde_run
from ronde.adapt import dataset_facts
from ronde.cli.doctor_apply import apply_prescriptions, check_writable
from ronde.introspect import NO_TENSORS, SavedState, nested_datasets
from ronde.world import ArgumentError
from sampling import long, some


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
    with SavedState(*nested_datasets(wrapped), largest=NO_TENSORS):
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


BENCH = """
import torch, ronde
from ronde.measure import Arm, Bench

class Data(torch.utils.data.Dataset):
    made = 0
    def __len__(self):
        return 512
    def __getitem__(self, i):
        self.made += 1
        return torch.full((8,), float(i)), torch.tensor([0.5])

model, data = torch.nn.Linear(8, 1), Data()
run = ronde.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01), data,
                       loss=torch.nn.functional.mse_loss, batch_size=16)
with Bench(run) as bench:
    before = data.made if bench.batches else 0
    alone = bench.window(Arm("loading", first_only=True), 0.2)
    mine = data.made - before
    together = bench.window(Arm("loading"), 0.2)
print("rank", run.rank, "read", mine > 0, alone.steps > 0, together.steps > 0, flush=True)
"""


def test_while_the_first_worker_loads_alone_the_others_read_nothing(tmp_path):
    (tmp_path / "train.py").write_text(BENCH)
    command = ["run", "--workers", "2", "--runs", "none", "--output", "all", "train.py"]
    done = ronde_run(command, tmp_path, timeout=90)
    assert "rank 0 read True True True" in done.stdout, done.stdout + done.stderr
    assert "rank 1 read False True True" in done.stdout, done.stdout + done.stderr
