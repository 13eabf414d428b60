"""Checkpoints are written in the background: the copy counts, never two at once, killed at every
point of a save, and a failure is told at once.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from pathlib import Path

import pytest
import torch

from processes import TESTS, child, python, ronde_run
from ronde.checkpoint import Saver, verify, wait_for_saves, write
from ronde.watch import Checkpointed, Warned
from ronde.watch import read as read_record
from sampling import ALL, some


def worker(*arguments: object, before: str = "", timeout: int = 150) -> str:
    command = [str(TESTS / "saving_worker.py"), *map(str, arguments)]
    if before:
        shell = ["unshare", "-m", "sh", "-c", f'{before} && exec "$@"', "sh", sys.executable]
        with child([*shell, *command], TESTS) as started:
            done = started.done(timeout)
    else:
        done = python(command, TESTS, timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def events(folder: Path) -> tuple[list[Checkpointed], list[str]]:
    found = read_record(folder / "record.jsonl")
    saved = [e for e in found if isinstance(e, Checkpointed)]
    return saved, [e.text for e in found if isinstance(e, Warned)]


def test_what_was_copied_is_written(tmp_path):
    saver, go = Saver(), threading.Event()
    x, y = torch.arange(12.0).reshape(3, 4), torch.ones(5, dtype=torch.bfloat16)
    for step in (1, 2):  # the second time into the same memory
        x.fill_(step)
        copies = saver.copy({"model.safetensors": {"x": x.t(), "y": y}})
        assert saver.missing_bytes({"x": x, "y": y}) == 0

        def job(step: int = step, copies: dict = copies) -> Path:
            go.wait(10)
            return write(tmp_path, step, copies, {"n": step})

        saver.begin(step, job, 0.0, wait=False)
        x.fill_(-1.0)
        assert saver.is_writing and saver.poll() is None and not wait_for_saves(0.05)
        go.set()
        written = saver.finish()
        assert written.error == "" and written.path is not None and written.bytes > 0
        found = verify(written.path).load("model.safetensors")
        assert torch.equal(found["x"], torch.full((4, 3), float(step)))
        assert torch.equal(found["y"], y)
        go.clear()
    assert wait_for_saves()


def test_an_error_in_the_thread_is_told():
    saver = Saver()

    def job() -> None:
        raise ZeroDivisionError("oh")

    saver.begin(7, job, 0.0, wait=False)
    assert "step 7 could not be written: ZeroDivisionError('oh')" in saver.finish().error


# Rank 0 of replicate crosses 7 points in each save, and 2 more where it removes an old checkpoint.
_REPLICATE = [f"0:{n}" for n in range(1, 24)]
_EACH = [f"{rank}:{n}" for n in range(1, 12) for rank in (0, 1)]
_PLANS = {
    "replicate": (2, _REPLICATE, 12),
    "shard=parameters": (2, _EACH, 13),
    "pipeline=2": (2, _EACH, 1),
    "tensor=2": (2, _EACH, 1),
    "shard=optimizer": (2, _EACH, 1),
    "pipeline=2,shard=parameters": (4, _EACH, 3),
    "tensor=2,shard=parameters": (4, _EACH, 3),
}


@pytest.mark.parametrize("plan", list(_PLANS) if ALL else list(_PLANS)[1:2])
def test_killed_at_a_point_of_a_save(plan, tmp_path):
    workers, points, every = _PLANS[plan]
    told = json.loads(
        worker("kill", plan, workers, tmp_path, *some(points, every), timeout=900 if ALL else 150)
    )
    assert sum(killed for _, killed, *_ in told) >= len(told) - 1, told
    for point, _, back, difference, left in told:
        assert difference == 0, point
        assert back % 2 == 0, point
        assert [p for p in left if not p.startswith("step-")] == [], point
    assert len({back for _, _, back, *_ in told}) > 1


def test_a_slow_disk_makes_the_training_wait(tmp_path):
    worker("slow", "replicate", 2, tmp_path, 0.2)
    saved, warned = events(tmp_path)
    assert [e.step for e in saved] == [2, 4, 6, 8]
    assert sum("saving falls behind" in text for text in warned) == 1, warned
    assert all(e.stall_seconds <= e.seconds for e in saved)


@pytest.mark.parametrize("plan", some(["shard=parameters", "replicate"], 2))
def test_a_failure_is_told_and_the_training_goes_on(plan, tmp_path):
    rank = 0 if plan == "replicate" else 1
    worker("fail", plan, 2, tmp_path, rank, 4)
    saved, warned = events(tmp_path)
    assert [e.step for e in saved] == [2, 6, 8]
    (text,) = [text for text in warned if "could not be written" in text]
    assert "checkpoint of step 4" in text and "goes on" in text
    assert ("rank 1: " in text) == (rank == 1)


SLOW = """
import time, torch, ronde
from ronde.checkpoint import files

write = files.write_tensors


def slowly(*args):
    time.sleep(6.0)  # longer than exit handlers may take
    files.write_tensors = write
    return write(*args)


files.write_tensors = slowly
model = torch.nn.Linear(2, 1)
data = torch.utils.data.TensorDataset(torch.ones(4, 2), torch.ones(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss = torch.nn.functional.mse_loss
run = ronde.distribute(model, optimizer, data, loss=loss, batch_size=2, save_every=1)
for batch in run.batches():
    run.step(batch)
    assert run.state.step < 2, "on purpose"
"""


def test_a_worker_that_fails_waits_for_its_last_checkpoint(tmp_path):
    (tmp_path / "train.py").write_text(SLOW)
    done = ronde_run(["run", "-q", "-n", "1", "--name", "it", "train.py"], tmp_path)
    assert "on purpose" in done.stderr
    assert verify(tmp_path / "runs/it/checkpoints/step-000000001").step == 1


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="mounting needs root")
def test_a_full_disk_keeps_the_last_one(tmp_path):
    """There is room for one checkpoint and a half: the second one would replace the first."""
    full = tmp_path / "checkpoints"
    mount = f'mkdir "{full}" && mount -t tmpfs -o size=3200k none "{full}"'
    found = json.loads(worker("disk", "shard=parameters", 2, tmp_path, before=mount))
    assert found == [2, [], ["step-000000002"]]
    saved, warned = events(tmp_path)
    assert [e.step for e in saved] == [2]
    texts = [text for text in warned if "could not be written" in text]
    assert len(texts) >= 3 and all("No space left on device" in text for text in texts)
