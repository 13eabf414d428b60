"""What links give and processes add, and scripts that are planned from beginning to end."""

from __future__ import annotations

import re
import signal
import time

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from processes import child, forked, marked, python, ronde, ronde_run
from ronde.cli.bench import measure_links
from ronde.measure import bench_links
from ronde.measure.planner import gauge
from ronde.parallel import Work
from ronde.plan import Plan
from ronde.predict.cluster import Cluster
from ronde.run.losses import LossCall
from sampling import long

# -- links -----------------------------------------------------------------------------


def test_a_link_is_fitted_by_a_line():
    fit = bench_links.fit_link([(1e4, 0.0012), (1e6, 0.011), (1e7, 0.101)], ranks=4)
    assert (
        fit.alpha == pytest.approx(0.001, rel=0.2)
        and fit.beta == pytest.approx(1e8, rel=0.05)
        and fit.ranks == 4
        and fit.residual < 0.1
    )


def bench(tmp_path, *args, timeout=150.0):
    # that no process is left, it sees itself
    return ronde_run(["bench", "cluster", *args], tmp_path, timeout)


def test_bench_cluster_writes_a_file_that_plans_read(tmp_path):
    done = bench(tmp_path, "--workers", "2", "--quick", "--output", "c.yaml")
    assert done.returncode == 0, done.stderr + done.stdout
    found = Cluster.load(tmp_path / "c.yaml")
    assert set(found.links) == set(bench_links.COLLECTIVES)
    for by in found.links.values():
        assert (
            set(by) == {"node"}
            and by["node"].beta > 1e6
            and by["node"].alpha >= 0
            and by["node"].ranks == 2
        )
    assert (found.nodes, found.devices_per_node, found.device) == (1, 2, "cpu")
    assert found.base_bytes > 50 << 20 and found.memory_bytes > 1 << 28
    assert "all_reduce" in done.stdout and "written to c.yaml" in done.stdout
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.yaml"]


def test_bench_cluster_tells_what_is_wrong_before_it_starts_anything(tmp_path):
    for args, said in (
        (["--workers", "0"], "expected a whole number"),
        (["--workers", "1000"], "more workers than devices"),
        (["--output", "no/where.yaml"], "there is no folder"),
    ):
        done = bench(tmp_path, *args)
        assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
    assert "ronde bench cluster --workers 2" in bench(tmp_path, "--help").stdout


def test_ctrl_c_leaves_no_process_and_no_file(tmp_path):
    line = ronde("bench", "cluster", "--workers", "2")
    with child(line, tmp_path, fork=True) as started:
        limit = time.monotonic() + 60
        while len(marked(started.mark)) < 3 and time.monotonic() < limit:
            time.sleep(0.1)
        time.sleep(1.0)
        started.process.send_signal(signal.SIGINT)
        done = started.done(30)
    assert done.returncode == 130 and "nothing was written" in done.stderr, (
        done.returncode,
        done.stdout,
        done.stderr,
    )
    assert "Traceback" not in done.stderr and not list(tmp_path.iterdir())


@long
def test_this_machines_links_are_measured_once_and_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("RONDE_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("RONDE_DEVICE", "cpu")
    # of the one who keeps it: tests run on busy machines
    monkeypatch.setattr(bench_links, "DISTURBED_SHARE", 100.0)
    told = []

    def quickly(count):
        return measure_links(count, ["--quick"])

    first = bench_links.default_cluster(2, quickly, told.append)
    assert (
        len(told) == 1 and first.devices == 2 and set(first.links) == set(bench_links.COLLECTIVES)
    )

    def fail(*_, **__):
        raise AssertionError("measured again")

    assert bench_links.default_cluster(2, fail) == first
    (kept,) = (tmp_path / "state").iterdir()
    assert kept.suffix == ".yaml"
    # what an earlier version kept is measured again
    monkeypatch.setattr(bench_links, "_METHOD", bench_links._METHOD + 1)
    with pytest.raises(AssertionError, match="measured again"):
        bench_links.default_cluster(2, fail)


TOGETHER = """
import dataclasses, sys
from pathlib import Path

import torch
from torch import nn

from ronde.world.connect import connect
import ronde.run.losses
from ronde.parallel import Work
from ronde.plan import Plan
from ronde.measure import planner

me = connect()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
x, y = torch.randn(16, 32), torch.randn(16, 8)
work = Work(
    model,
    torch.optim.SGD(model.parameters(), lr=0.1),
    lambda b: (nn.functional.mse_loss(model(b[0]), b[1]), None),
    lambda n: (x[:n], y[:n]),
)
plain = planner.measure
planner.measure = lambda *a, **k: dataclasses.replace(plain(*a, **k), measured_samples=(1, 4, 16) if me.is_main else (1, 2, 8))
before = {k: v.clone() for k, v in model.state_dict().items()}
calls = ronde.run.losses.LossCall(nn.functional.mse_loss, None)
costs = planner.gauge(work, Plan(batch_size=16, workers=2), calls, None, lambda _: None)
assert costs.clip_seconds == 0
clipped = planner.gauge(work, Plan(batch_size=16, workers=2, clip_norm=1.0), calls, None, lambda _: None)
assert clipped.clip_seconds > 0
assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items()) and all(p.grad is None for p in model.parameters())
assert costs.accumulate_seconds >= 0
assert costs.optimizer_seconds > 0  # of an optimizer that keeps nothing
assert all(u.forward_seconds.at(8) > 0 for u in costs.units if u.parameter_bytes)
Path(sys.argv[1], str(me.rank)).touch()
"""


def test_workers_that_measure_together_agree_on_sizes_and_leave_the_model_alone(tmp_path):
    (tmp_path / "together.py").write_text(TOGETHER)
    done = python(forked(tmp_path / "together.py", 2, tmp_path)[1:], tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "0").exists() and (tmp_path / "1").exists()


def test_no_pipeline_is_planned_where_none_could_be_cut():
    class Packed(nn.Module):
        """What the recurrent layer is given cannot be sent, and so the head's place is no cut
        either.
        """

        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.GRU(3, 8, batch_first=True), nn.Linear(8, 1)

        def forward(self, x):
            lengths = torch.full((len(x),), x.shape[1])
            packed = nn.utils.rnn.pack_padded_sequence(
                x, lengths, batch_first=True, enforce_sorted=False
            )
            return self.head(self.rnn(packed)[1][-1])

    def places(model, data, **asked):
        batch = data, torch.zeros(len(data), 1)
        work = Work(
            model,
            torch.optim.SGD(model.parameters(), 0.1),
            lambda b: ((model(b[0]) - b[1]).square().mean(), None),
            lambda n: tuple(t[:n] for t in batch),
        )
        calls = LossCall(nn.functional.mse_loss, None)
        costs = gauge(work, Plan(batch_size=8, **asked), calls, 1, lambda _: None)
        return sum(u.cut_after for u in costs.units[:-1]), costs.notes

    count, notes = places(Packed(), torch.randn(8, 5, 3))
    assert count == 0 and any(
        n.startswith("no pipeline: there is no place to cut the model") for n in notes
    )
    normed = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(3)))
    count, notes = places(normed, torch.randn(8, 3), sync_batchnorm=True)
    assert count == 0 and any(n.startswith("no pipeline: sync_batchnorm=True") for n in notes)


LOOPS = {
    "own": (
        "for x in run.batches():\n        run.backward(run.model(x).mean())\n        run.update()",
        True,
    ),
    "keyword": ("run.backward(loss=one)\n    run.update()", True),
    "attribute": ("self.run.backward(one)\n    self.run.update()", True),
    "step": ("for x in run.batches():\n        loss = run.step(x)", False),
    "either": ("run.step(x) if fast else run.backward(x)\n    run.update()", False),
    "torch": ("loss.backward()\n    optimizer.step()\n    metrics.update()", False),
    "function": (
        "class Twice(torch.autograd.Function):\n        def backward(ctx, g): return g\n   "
        " seen.update()",
        False,
    ),
    "trainer": ("self.backward(loss)\n    self.update()\n    self.run.step(x)", False),
}


ASKED = """
import os, runpy, sys
from ronde.measure import script_loop
for folder in sys.argv[1:]:
    child = os.fork()
    if not child:
        os.chdir(folder)
        sys.path[0], sys.argv = folder, ["train.py"]
        runpy.run_path("train.py", run_name="__main__")
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, folder
"""


def test_a_script_that_owns_its_loop_is_known_by_its_source(tmp_path):
    (tmp_path / "ask.py").write_text(ASKED)
    cases = [(loop, place) for loop in LOOPS for place in ("train.py", "engine.py")]
    asks = "from ronde.measure.script_loop import own_loop\nprint(own_loop())\n"
    folders = []
    for number, (loop, place) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "train.py").write_text(f"import engine\n{asks}")
        (folder / "engine.py").write_text("")
        with (folder / place).open("a") as file:
            file.write(f"def train(self):\n    {LOOPS[loop][0]}\n")
        folders.append(str(folder))
    done = python(["ask.py", *folders], tmp_path)
    assert done.returncode == 0, done.stderr
    for (loop, place), answer in zip(cases, done.stdout.split("\n"), strict=False):
        assert bool(re.fullmatch(rf"{place}:\d+", answer)) == LOOPS[loop][1], (loop, answer)
    assert len(done.stdout.splitlines()) == len(cases)


AUTO = """
import sys, torch, ronde
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(24, 24), nn.ReLU()) for _ in range(4)))
data = torch.utils.data.TensorDataset(torch.randn(320, 24), torch.randn(320, 24))
run = ronde.distribute(model, torch.optim.AdamW(model.parameters(), 1e-3), data, loss=nn.functional.mse_loss, batch_size=8, clip_norm=1.0, plan=sys.argv[1])
for epoch in run.epochs(1):
    for batch in run.batches():
        run.step(batch)
run.export(sys.argv[2])
"""


@long
def test_a_plan_that_chooses_itself_trains_the_same(tmp_path):
    (tmp_path / "train.py").write_text(AUTO)
    told = []
    for workers, plan in (("1", "replicate"), ("2", "auto")):
        out = tmp_path / f"{plan}.safetensors"
        env = {"RONDE_STATE": str(tmp_path / "state")}
        done = ronde_run(
            ["run", "--workers", workers, "--runs", "none", "train.py", plan, str(out)],
            tmp_path,
            120,
            env,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        told.append(done.stdout + done.stderr)
    whole, chosen = (load_file(tmp_path / f"{plan}.safetensors") for plan in ("replicate", "auto"))
    assert whole.keys() == chosen.keys() and all(
        torch.allclose(whole[k], chosen[k], rtol=1e-4, atol=1e-6) for k in whole
    )
    for text in told[1:]:
        assert re.search(r"plan \S+: (Use one device\b.*For 2: s|S)plit", text), text


def test_a_script_that_fails_does_so_before_this_machines_links_are_measured(tmp_path):
    (tmp_path / "train.py").write_text("import ronde\nopen('missing.csv')\n")
    done = ronde_run(["plan", "train.py"], tmp_path, 60, {"RONDE_STATE": str(tmp_path / "state")})
    assert (
        done.returncode not in (0, None)
        and "failed before its model was measured" in done.stderr
        and "missing.csv" in done.stderr
    )
    assert "links" not in done.stderr and not (tmp_path / "state").exists()
