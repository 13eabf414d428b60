"""A manifest that is well formed, has the right digest, and is wrong: the checkpoint before it is
resumed from, with a sentence for the one that is passed over.
"""

from __future__ import annotations

import copy
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

WRONG = [None, -1, 1.5, True, "x", [], {}, [[]], 2**70, float("nan")]
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


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every key and item in it."""
    found = []
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inside in items:
        found.append((*path, key))
        if isinstance(inside, dict | list):
            found += places(inside, (*path, key))
    return found


def mutated(body: dict[str, Any], place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    body = copy.deepcopy(body)
    inner: Any = body
    for key in place[:-1]:
        inner = inner[key]
    if value is GONE:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    return body


# What no resume depends on: the time, the policy for old ones, and what says which training it was, which is refused by name.
FREE = ("written", "keep", "format", "version", "digest")


def test_wrong_manifests_are_passed_over(checkpoints, capsys):
    newest = checkpoints / "step-000000004"
    whole = json.loads((newest / "manifest.json").read_text())
    cases = []
    for k, place in enumerate(p for p in places(whole) if p[0] not in FREE):
        cases.append((place, GONE))
        cases += [(place, WRONG[(k + j) % len(WRONG)]) for j in (0, 3, 7)]
    cases = cases[:: max(1, len(cases) // 200)]
    assert len(cases) >= 200
    told = {"passed over": 0, "another training": 0, "loaded": 0}
    loaded, unlike = set(), []
    for place, value in cases:
        write_manifest(newest, mutated(whole, place, value))
        capsys.readouterr()
        try:
            run = start()
        except ronde.CheckpointError as error:  # another batch size, seed, data set, …
            told["another training"] += 1
            if not any(w in str(error) for w in ("be continued", " is of ", "are not those")):
                unlike.append((place, value, str(error)))
            continue
        except Exception as error:
            unlike.append((place, value, repr(error)))
            continue
        if run.state.step == 3:
            told["passed over"] += 1
            said = capsys.readouterr()
            if "step-000000004 is not a whole checkpoint: " not in said.out + said.err:
                unlike.append((place, value, "no sentence"))
        else:
            told["loaded"] += 1
            loaded.add(".".join(map(str, place)))
        run.port.group.members[0].finish("completed")
    # Settings that cannot be told from others, and what the run has no use for, may be loaded.
    # Two of them: a place in a generator's state and its next Gaussian, where any number is one.
    places_loaded = {
        p.split(".")[1]
        for p in loaded
        if not p.startswith(("state.randomness.numpy.", "state.randomness.python.1"))
    }
    assert places_loaded <= {
        *("averages", "best", "data", "given", "optimizer", "plan", "registered", "scaler"),
        "scheduler",
    }, loaded
    assert not unlike, "\n".join(map(str, unlike))
    assert told["passed over"] > 120, told


def test_what_stands_in_a_file_s_place(checkpoints, capsys):
    """FIFOs and folders, files of another type, and folders under another name."""
    newest = checkpoints / "step-000000004"
    spare = checkpoints.parent / "spare"
    shutil.copytree(newest, spare)

    def resumed() -> int:
        run = start()
        run.port.group.members[0].finish("completed")
        return run.state.step

    for name in ("manifest.json", "model.safetensors", "optimizer.safetensors"):
        for place in (os.mkfifo, os.mkdir, lambda p: p.symlink_to(spare / p.name)):
            (newest / name).unlink()
            place(newest / name)
            assert resumed() == 3, (name, place)
            shutil.rmtree(newest)
            shutil.copytree(spare, newest)
    shutil.rmtree(newest)
    newest.mkdir()
    assert resumed() == 3
    newest.rmdir()
    os.mkfifo(newest)
    assert resumed() == 3
    newest.unlink()
    shutil.copytree(spare, newest)
    assert resumed() == 4
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
