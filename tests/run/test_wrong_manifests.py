"""A manifest that is well formed, has the right digest, and is wrong: the checkpoint before it is
resumed from, with a sentence for the one that is passed over.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import TensorDataset

import ronde
from ronde.checkpoint.manifest import file_digest, manifest_digest

GONE = object()


def start(model=None) -> ronde.Run:
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 2),
            torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 6]),
        ],
        [2],
    )
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    return ronde.distribute(
        model,
        optimizer,
        TensorDataset(x, torch.arange(16) % 2),
        loss=nn.functional.cross_entropy,
        scheduler=scheduler,
        batch_size=4,
        name="fuzzed",
        save_every=1,
    )


@pytest.fixture
def checkpoints(tmp_path, monkeypatch) -> Path:
    """Those of steps 2, 3 and 4 of an epoch of four."""
    monkeypatch.setenv("RONDE_RUNS", str(tmp_path))
    run = start()
    for _ in run.epochs(1):
        for batch in run.batches():
            run.step(batch)
    monkeypatch.setenv("RONDE_RESUME", "1")
    return tmp_path / "fuzzed" / "checkpoints"


def write_manifest(path: Path, body: dict[str, Any]) -> None:
    body["digest"] = manifest_digest(body)
    (path / "manifest.json").write_text(json.dumps(body, indent=1))


@pytest.mark.parametrize(
    ("place", "value", "why"),
    [
        (("step",), -1, "step is -1, expected a whole number"),
        (("epoch_samples",), 1.5, "epoch_samples is 1.5, expected a whole number"),
        (("epoch_samples",), 99, "epoch_samples is 99, an epoch has 16"),
        (("workers",), None, "workers is None, expected a whole number, 1 or more"),
        (("plan",), [], "plan is [], expected a mapping"),
        (("plan", "lr_factor"), GONE, "plan has no lr_factor"),
        (("optimizer", "groups"), GONE, "optimizer has no groups"),
        (("scheduler",), GONE, "scheduler is missing"),
        (("randomness", "numpy"), GONE, "randomness has no numpy"),
    ],
)
def test_a_wrong_manifest_is_passed_over(checkpoints, capsys, place, value, why):
    newest = checkpoints / "step-000000004"
    body = json.loads((newest / "manifest.json").read_text())
    inner = body["state"]
    for key in place[:-1]:
        inner = inner[key]
    if value is GONE:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    write_manifest(newest, body)
    run = start()
    said = capsys.readouterr()
    assert run.state.step == 3
    assert "step-000000004 is not a whole checkpoint: " in said.out + said.err
    assert why in said.out + said.err
    run.port.group.members[0].finish("completed")


@pytest.mark.parametrize(
    ("place", "value"), [(("optimizer", "groups"), "x"), (("scheduler",), [1])]
)
def test_what_is_wrong_deeper_inside_is_refused(checkpoints, place, value):
    newest = checkpoints / "step-000000004"
    body = json.loads((newest / "manifest.json").read_text())
    inner = body["state"]
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    write_manifest(newest, body)
    with pytest.raises(ronde.CheckpointError, match="step-000000004 cannot be loaded"):
        start()


def test_what_stands_in_a_file_s_place(checkpoints, capsys):
    """FIFOs and folders, files of another type, and folders under another name."""
    newest = checkpoints / "step-000000004"
    spare = checkpoints.parent / "spare"
    shutil.copytree(newest, spare)

    def resumed() -> int:
        run = start()
        run.port.group.members[0].finish("completed")
        return run.state.step

    for name in ("manifest.json", "model.safetensors"):
        for place in (os.mkfifo, os.mkdir, lambda p: p.symlink_to(spare / p.name)):
            (newest / name).unlink()
            place(newest / name)
            assert resumed() == 3, (name, place)
            shutil.rmtree(newest)
            shutil.copytree(spare, newest)
    newest.rename(checkpoints / "step-000000009")
    assert resumed() == 3  # a checkpoint of step 4 is not one of step 9
    said = capsys.readouterr()
    assert "manifest.json is of step 4" in said.out + said.err
    (checkpoints / "step-000000009").rename(newest)

    # a file of another type whose digest is right: another model
    file = newest / "model.safetensors"
    save_file({k: v.half() for k, v in load_file(file).items()}, file)
    body = json.loads((newest / "manifest.json").read_text())
    body["files"]["model.safetensors"] = {"bytes": file.stat().st_size, "sha256": file_digest(file)}
    write_manifest(newest, body)
    with pytest.raises(ronde.CheckpointError, match=r"'0\.weight' is of type torch\.float16 there"):
        start()
