"""Replicas whose weights are no longer equal are named: by majority, or both of two."""

from __future__ import annotations

import json

import pytest
import torch

from processes import TESTS, python
from ronde.parallel.replica_check import part_digest
from sampling import ALL

CASES = [("replicate", 2, 0, "differs between rank 0 and rank 1"), ("replicate", 2, -1, "")]
if ALL:
    CASES += [
        ("replicate", 3, 1, "of rank 1 differs from that of ranks 0, 2"),
        ("shard=optimizer", 2, 1, ""),  # its own part, which it sends to all after the next step
        ("shard=parameters,shard_within=2", 4, 3, "differs between"),
        ("pipeline=2", 4, 0, "of rank 0 differs from that of ranks 1 to 3"),  # tied weights
        ("tensor=2", 4, 0, "differs between"),
        ("shard=parameters", 2, 1, ""),  # every part is held once
    ]


def flipped(folder, plan: str, workers: int, *arguments: object) -> list[str]:
    """The error on each rank."""
    command = [str(TESTS / "saving_worker.py"), "flip", plan, str(workers), str(folder)]
    done = python([*command, *map(str, arguments)], TESTS, 150)
    assert done.returncode == 0, done.stdout + done.stderr
    errors = json.loads(done.stdout)
    assert len(set(errors)) == 1, errors
    return errors


@pytest.mark.parametrize(("plan", "workers", "rank", "text"), CASES)
def test_a_flipped_bit_is_named(plan, workers, rank, text, tmp_path):
    errors = flipped(tmp_path, plan, workers, rank, 4)
    assert text in errors[0] and bool(errors[0]) == bool(text)
    if text:
        assert "after step 6" in errors[0] and "At step 3 they were equal" in errors[0]


def test_no_checkpoint_has_a_flipped_bit(tmp_path):
    errors = flipped(tmp_path, "replicate", 3, 1, 4, 5)
    assert "after step 5" in errors[0] and "of rank 1 differs" in errors[0]
    assert not list(tmp_path.rglob("step-*"))


@pytest.mark.parametrize("shape", [(), (4, 6), (5, 7)])
@pytest.mark.parametrize("skipped", [0, 1])
@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.bfloat16, torch.float8_e5m2, torch.complex64, torch.bool],
)
def test_any_bit_changes_the_digest(dtype, skipped, shape):
    """Of any size, in order or transposed; its place in its storage does not."""
    size, count = dtype.itemsize, int(torch.Size(shape).numel())
    raw = torch.randint(0, 2, ((skipped + count) * size,), dtype=torch.uint8)
    bits = 1 if dtype == torch.bool else 8
    raw *= 2**bits - 1
    part = raw.view(dtype)[skipped:].reshape(shape).mT if len(shape) > 1 else raw.view(dtype)[-1]
    digest = part_digest(part)
    assert part_digest(part.clone()) == digest
    for at in range(len(raw) - part.numel() * size, len(raw)):
        for bit in range(bits):
            raw[at] ^= 1 << bit
            assert part_digest(part) != digest, (at, bit)
            raw[at] ^= 1 << bit
    assert part_digest(part) == digest
