"""Many models under every plan: the same training as in one process, or refused by name; never
torch's own error, other weights, or a hang.

A sample; ``RONDE_TEST_ALL=1`` runs every model under every plan.
"""

from __future__ import annotations

import json
import os
import sys

import pytest

import grid
import grid_models
import zygote
from processes import PATHS, TESTS
from sampling import ALL, long

# Cells that failed before, and one plan of each kind on models of each kind.
SAMPLE = {
    "own_implicit_energy": {2: ["recompute=selective,micro_batch=2", "tensor=2"]},
    "own_in_place_residual": {2: ["recompute=full"]},
    "own_moe_switch": {
        2: [
            "shard=gradients,micro_batch=2",
            "pipeline=2,virtual=2,schedule=interleaved,micro_batch=2",
        ],
        4: ["pipeline=2,shard=parameters,micro_batch=1"],
    },
    "own_tasks_by_row": {4: ["pipeline=4,micro_batch=2"]},
    "own_recurrent_adaptive": {2: ["shard=parameters", "pipeline=2,micro_batch=2"]},
}
FOREIGN = {
    "longt5": {2: ["recompute=selective,micro_batch=2"]},
    "cogview3": {2: ["replicate"]},
    "deepseek_v3": {4: ["tensor=2,shard=parameters", "pipeline=2,shard=optimizer,micro_batch=2"]},
}
REFUSED = {
    ("own_tasks_by_row", "pipeline=4,micro_batch=2"): "which this forward pass does not call",
    ("own_recurrent_adaptive", "shard=parameters"): "forward passes go different ways",
    ("own_in_place_residual", "recompute=full"): "has been changed since",
}


def cells(loaded: list[str]) -> list[tuple[str, int, list[str]]]:
    if ALL:
        own = [name for name in grid_models.BUILDERS if name.startswith("own_")]
        names = [*own, *(name for package in loaded for name in grid_models.foreign(package))]
        return [(name, n, plans) for name in names for n, plans in grid.PLANS.items()]
    chosen = FOREIGN if loaded else SAMPLE
    return [(name, n, plans) for name, by in chosen.items() for n, plans in by.items()]


@pytest.mark.timeout(4 * 3600 if ALL else 300)
@pytest.mark.parametrize(
    "packages",
    [[], pytest.param(["transformers", "diffusers"], marks=long)],
    ids=["own", "foreign"],
)
def test_the_same_training_or_refused_by_name(packages, tmp_path):
    for package in packages:
        pytest.importorskip(package)
    out = tmp_path / "cells.jsonl"
    todo = cells(packages)
    done = zygote.run(
        [sys.executable, str(TESTS / "grid.py"), str(out), json.dumps([packages, todo])],
        env={**os.environ, "PYTHONPATH": PATHS},
        cwd=tmp_path,
        timeout=4 * 3600 if ALL else 280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [{**json.loads(line), "trace": ""} for line in out.read_text().splitlines()]
    assert len(rows) == sum(len(plans) for _, _, plans in todo)
    wrong = []
    for row in rows:
        text = REFUSED.get((row["model"], row["plan"]))
        if text is not None:
            right = row["outcome"] == "refused" and text in row["text"]
        else:
            right = row["outcome"] in (("exact", "refused") if ALL else ("exact",))
        wrong += [] if right else [row]
    assert not wrong, "\n".join(map(json.dumps, wrong))
