"""The same training: N workers against a plain PyTorch loop written by hand, weight by weight."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
from safetensors.torch import load_file

import zygote
from equality_cases import Case, largest_difference, plain_loop
from processes import PATHS, TESTS, forked
from ronde.feed import key_of, permute
from sampling import ALL

HERE = TESTS


EXACT = [
    Case("cnn", "sgd"),
    Case("cnn", "adamw", micro=True),
    Case("transformer", "adamw"),
    Case("transformer", "sgd", micro=True),
    Case("lstm", "sgd", micro=True),
    Case("lstm", "adamw"),
    Case("unused", "adamw"),
    Case("unused", "adamw", micro=True),
    Case("unused", "sgd", clip=None),
    Case("tokens", "adamw"),
    Case("tokens", "sgd", micro=True),
    Case("cnn", "sgd", schedule=False, clip=None, batch=7, n=23),
    Case("cnn", "adamw", batch=1, n=3),  # every batch smaller than the world
    Case("transformer", "adamw", shuffle=True),
]
SINGLE = [dataclasses.replace(c, dtype="float32") for c in EXACT[:8]]
NORM = [
    Case("norm", "sgd", sync_batchnorm=True, n=24),
    Case("norm", "adamw", sync_batchnorm=True, batch=7, n=23),
]
# The script runs forward and loss by itself.
OWN_CASES = [
    Case("lstm", "adamw"),
    Case("cnn", "sgd", micro=True),
    Case("tokens", "adamw"),
    NORM[0],
    NORM[1],
]
OWN = [{**dataclasses.asdict(c), "own_loop": True} for c in OWN_CASES]


def run_cases(cases: list[dict], workers: int, folder: Path) -> list[dict]:
    """Train the cases on ``workers`` real processes; what rank 0 ended with."""
    listing, out = folder / "cases.json", folder / "out"
    out.mkdir()
    listing.write_text(json.dumps(cases))
    done = zygote.run(
        forked(HERE / "equality_worker.py", workers, listing, out),
        env={**os.environ, "PYTHONPATH": PATHS},
        cwd=folder,
        timeout=170,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [load_file(out / f"{i}.safetensors") for i in range(len(cases))]


def oracle(case: Case) -> dict:
    order = (
        (lambda epoch: permute(range(case.n), case.n, key_of(0, epoch))) if case.shuffle else None
    )
    return plain_loop(case, order)


@pytest.mark.parametrize("workers", [1, 2, 3] if ALL else [1, 3])
def test_the_same_training_on_any_number_of_workers(workers, tmp_path):
    cases = [*EXACT, *SINGLE, *NORM]
    listed = [*(dataclasses.asdict(c) for c in cases), *OWN]
    if not ALL:
        listed = listed[:: {1: 5, 2: 2, 3: 3}[workers]]
    found = run_cases(listed, workers, tmp_path)
    failures = []
    for result, values in zip(found, listed, strict=True):
        own = values.pop("own_loop", False)
        case = Case(**values)
        difference, where = largest_difference(result, oracle(case))
        bound = 1e-12 if case.dtype == "float64" else 1e-5
        print(
            f"{workers} workers {case.name}{' own loop' if own else ''}: {difference:.1e} ({where})"
        )
        if not difference <= bound:
            failures.append(f"{case.name}: {where} differs by {difference:.2e}, bound {bound:.0e}")
    assert not failures, "\n".join(failures)


def test_the_comparison_can_fail():
    """A plain loop with another batch size is another training, and the measure says so."""
    difference, _ = largest_difference(
        plain_loop(Case("cnn", "sgd")), plain_loop(Case("cnn", "sgd", batch=5))
    )
    assert difference > 1e-3
