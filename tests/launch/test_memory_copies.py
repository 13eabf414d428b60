"""Copies in memory: a restart goes on from the newest, though no checkpoint was due."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest
from test_fault_matrix import faults, undisturbed  # noqa: F401

from processes import child
from ronde.checkpoint import write
from ronde.launch.node import MemoryFolder
from ronde.run.memory_copies import MemoryCopies
from ronde.world import world
from ronde.world.whole_file import name_generation
from sampling import long, some

pytestmark = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm")
PLANS = ["shard=parameters", "replicate", "tensor=2", "pipeline=2", "alone"]


def killed(folder, shm, plan, variables):
    """A training without checkpoints, in which a worker is killed after some steps."""
    workers, plan = (1, "replicate") if plan == "alone" else (2, plan)
    training = faults.Training(folder, f"kept-{shm.parent.name}-{shm.name}", plan, workers)
    given = {"SAVE_EVERY": "100000", "RONDE_SHM": str(shm), **variables}
    line = training.line("--restarts", "2", pause=0.05)
    with child(line, folder, given, fork=True) as began:
        training.wait(random.randint(15, 20), began)
        faults.kill(training, began)
        done = began.done(60)
    assert done.returncode == 0, done.stderr
    assert not list(shm.glob("ronde-*")), "a folder was left"
    return training, training.events("resume")[-1]


@pytest.mark.parametrize("plan", some(PLANS, 5))
def test_a_restart_goes_on_from_memory(undisturbed, tmp_path, plan):  # noqa: F811
    training, resumed = killed(undisturbed[0].folder, tmp_path, plan, {})
    assert resumed["step"] >= 4
    assert resumed["checkpoint"] == f"checkpoints/step-{resumed['step']:09d}"
    manifest = training.run / resumed["checkpoint"] / "manifest.json"
    assert "keep" not in json.loads(manifest.read_text())  # a store would keep no other
    assert not training.check(undisturbed[1], 1e-12)


@long
def test_they_can_be_turned_off(undisturbed, tmp_path):  # noqa: F811
    training, resumed = killed(
        undisturbed[0].folder, tmp_path, "replicate", {"RONDE_MEMORY_COPIES": "0"}
    )
    assert resumed["step"] == 0 and not resumed["checkpoint"]
    assert not training.check(undisturbed[1], 1e-12)


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """A run directory of generation ``a``, and a folder in memory with a copy of step 7."""
    monkeypatch.setenv("RONDE_SHM", str(tmp_path / "shm"))
    (tmp_path / "shm").mkdir()
    directory = tmp_path / "run"
    directory.mkdir()
    name_generation(directory, "a")
    folder = MemoryFolder(directory, "a")
    copy = Path(folder.variables["RONDE_MEMORY_DIR"], "step-000000007")
    copy.mkdir()
    (copy / "manifest.json").write_text("{}")
    yield folder, directory
    folder.close()
    assert not list((tmp_path / "shm").iterdir())


def test_the_newest_copy_becomes_a_checkpoint(memory):
    folder, directory = memory
    folder.hand_on()
    folder.hand_on()
    (only,) = (directory / "checkpoints").iterdir()
    assert only.name == "step-000000007" and (only / "manifest.json").read_text() == "{}"


def test_one_copy_is_kept(tmp_path):
    copies = MemoryCopies(world(), tmp_path)
    for step in (1, 2):
        copies._timed(lambda step=step: write(tmp_path, step, {}, {}))
    assert [p.name for p in tmp_path.iterdir()] == ["step-000000002"]


def test_a_newer_checkpoint_stays_alone(memory):
    folder, directory = memory
    (directory / "checkpoints" / "step-000000008").mkdir(parents=True)
    folder.hand_on()
    assert [p.name for p in (directory / "checkpoints").iterdir()] == ["step-000000008"]


def test_a_generation_that_the_run_went_on_without_adds_nothing(memory):
    folder, directory = memory
    name_generation(directory, "b")
    folder.hand_on()
    assert not list((directory / "checkpoints").iterdir())


def test_without_restarts_an_outer_runs_folder_is_not_used(monkeypatch):
    monkeypatch.setenv("RONDE_MEMORY_DIR", "/dev/shm/of-an-outer-run")
    assert MemoryFolder(None, "").variables == {"RONDE_MEMORY_DIR": ""}


@long
def test_a_launcher_that_was_killed_leaves_its_folder_to_the_next(tmp_path):
    folder = tmp_path / "shm"
    folder.mkdir()
    given = {"RONDE_SHM": str(folder), "SAVE_EVERY": "100000"}
    training = faults.Training(tmp_path, "left", "replicate")
    with child(training.line("--restarts", "1"), tmp_path, given) as began:
        training.wait(6, began)
        began.process.kill()
        began.done(10)
    assert list(folder.glob("ronde-*"))
    time.sleep(0.5)  # its workers have ended with it
    with child(training.line("--resume", pause=0.0), tmp_path, given, fork=True) as began:
        assert began.done(60).returncode == 0
    assert not list(folder.glob("ronde-*"))
