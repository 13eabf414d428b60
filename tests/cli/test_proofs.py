"""What a run says about its training follows from what was proved, and warnings are never hidden."""

import dataclasses
import json
from pathlib import Path

import pytest

from processes import ronde_run
from ronde.plan import Plan
from ronde.watch.proofs import Proof, digests_of, keep_proofs, kept_proofs, plan_kind, smallest_like
from ronde.world import RondeError
from sampling import long

pytestmark = pytest.mark.timeout(180)

SCRIPT = """
import sys
import torch, ronde
from parts import width
torch.manual_seed(0)
norm = [torch.nn.BatchNorm1d(width)] if "norm" in sys.argv else []
net = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.ReLU(), *norm, torch.nn.Linear(width, 1))
data = torch.utils.data.TensorDataset(torch.randn(32, 8), torch.randn(32, 1))
run = ronde.distribute(
    net, torch.optim.SGD(net.parameters(), 0.1), data, loss=torch.nn.functional.mse_loss, batch_size=16
)
for _ in run.epochs(3):
    for batch in run.batches():
        run.step(batch)
"""
UNPROVED = (
    "the same samples, order, and rate on any number of workers. `ronde prove` checks the rest"
)
PROVED = "proved equal on 2 workers under replicate (6 steps, float64,"


def said_by(folder, *args):
    done = ronde_run(args, folder)
    return done, " ".join((done.stdout + done.stderr).replace("│", " ").split())


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "parts.py").write_text("width = 4\n")
    return tmp_path


def test_a_proof_is_told_until_the_script_changes(folder):
    run = ["run", "--workers", "2", "train.py"]
    done, said = said_by(folder, "run", "--prove", *run[1:])
    assert done.returncode == 0 and PROVED in said and UNPROVED not in said, said
    shown = json.loads(ronde_run(["show", "--json"], folder).stdout)
    assert shown["proof"].startswith(PROVED)
    # other arguments and another kind of plan have no proof; the same script has one, unasked
    _, other = said_by(folder, *run, "--more")
    _, again = said_by(folder, *run)
    _, sharded = said_by(folder, "run", "--plan", "shard=optimizer", *run[1:])
    assert PROVED in again and PROVED not in other and UNPROVED in other
    assert UNPROVED in sharded and "proved equal" not in sharded
    (folder / "parts.py").write_text("width = 5\n")  # a module of the script's
    _, changed = said_by(folder, *run)
    assert UNPROVED in changed and "proved equal" not in changed
    assert not list((folder / "runs" / ".proofs").iterdir())


@long
def test_what_differs_ends_a_run_that_asks_for_a_proof_and_is_told_quietly(folder):
    command = ["--workers", "2", "train.py", "norm"]
    done, said = said_by(folder, "run", "--prove", *command)
    assert done.returncode == 1 and "differs: 2 workers against one process" in said, said
    assert "nothing was trained" in said and "completed" not in said
    done = ronde_run(["run", "-q", *command], folder)
    assert done.returncode == 0 and done.stdout == ""
    assert done.stderr.startswith("warning: batch normalization ('2') sees 8 samples")
    assert "cannot" not in done.stderr and done.stderr.count("\n") == 1
    _, shown = said_by(folder, "show")
    assert "but not the same training: see the warnings" in shown
    done, said = said_by(folder, "run", "--prove", "--plan", "auto", *command)
    assert done.returncode == 2 and "--prove needs to know the plan" in said


def test_the_store_of_proofs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("1")
    command, proof = ["train.py", "--lr", "1"], Proof((2, 3), 6, 0.0)
    files = digests_of(["train.py", "gone.py"])
    file = keep_proofs(Path("runs"), command, files, {"replicate": proof})
    keep_proofs(Path("runs"), command, files, {"shard=optimizer": proof})
    assert kept_proofs(Path("runs"), command) == {"replicate": proof, "shard=optimizer": proof}
    assert kept_proofs(Path("runs"), ["train.py"]) == {}
    keep_proofs(Path("runs"), command, files, {"replicate": None})  # it differs now
    assert kept_proofs(Path("runs"), command) == {"shard=optimizer": proof}
    for broken in ('{"proofs": 3, "files": {}}', "{", "[]", '{"proofs": {"a": {}}, "files": {}}'):
        file.write_text(broken)
        assert kept_proofs(Path("runs"), command) == {}
    Path("other").write_text("a file")
    with pytest.raises(RondeError, match="cannot be written"):
        keep_proofs(Path("other"), command, files, {"replicate": proof})


@pytest.mark.parametrize(
    "spec,workers,kind,least",
    [
        ("replicate", 8, "replicate", 2),
        ("replicate", 1, "replicate", 2),
        ("zero3", 8, "shard=parameters", 2),
        ("pipeline=4", 4, "pipeline=2", 2),
        ("pipeline=4", 8, "pipeline=2,replicate", 4),
        ("pipeline=4,shard=optimizer", 4, "pipeline=2", 2),  # one replica: nothing to shard
        ("pipeline=4,shard=optimizer", 8, "pipeline=2,shard=optimizer", 4),
        ("tensor=2,recompute=full", 2, "tensor=2,recompute=full", 2),
        ("replicate,reducer=hierarchical", 4, "replicate,reducer=hierarchical", 2),
    ],
)
def test_a_proof_is_of_a_kind_of_plan(spec, workers, kind, least):
    plan = dataclasses.replace(Plan.parse(spec), workers=workers)
    small = smallest_like(plan)
    assert (plan_kind(plan), small.workers) == (kind, least)
    assert plan_kind(small) == kind  # what was proved is what was asked
