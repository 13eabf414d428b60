"""Replicas whose weights are no longer equal are named: by majority, or both of two."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from processes import PATHS, TESTS, environment
from sampling import ALL

CASES = [
    ("replicate", 3, 1, "of rank 1 differs from that of ranks 0, 2"),
    ("replicate", 2, 0, "differs between rank 0 and rank 1"),
    ("replicate", 2, -1, ""),
]
if ALL:
    CASES += [
        ("shard=optimizer", 2, 1, ""),  # its own part, which it sends to all after the next step
        ("shard=parameters,shard_within=2", 4, 3, "differs between"),
        ("pipeline=2", 4, 0, "of rank 0 differs from that of ranks 1 to 3"),  # tied weights
        ("tensor=2", 4, 0, "differs between"),
        ("shard=parameters", 2, 1, ""),  # every part is held once
    ]


@pytest.mark.parametrize(("plan", "workers", "rank", "text"), CASES)
def test_a_flipped_bit_is_named(plan, workers, rank, text, tmp_path):
    command = [sys.executable, str(TESTS / "saving_worker.py"), "flip", plan, str(workers)]
    done = subprocess.run(
        [*command, str(tmp_path), str(rank), "4"],
        env=environment({"PYTHONPATH": PATHS}),
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert len(set(told)) == 1, told
    assert text in told[0] and bool(told[0]) == bool(text)
    if text:
        assert "after step 6" in told[0] and "At step 3 they were equal" in told[0]
