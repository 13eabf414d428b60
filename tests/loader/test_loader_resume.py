"""A run over a feed pipeline whose worker is killed, resumed at another size, is the run that was
never stopped: the same samples, each once an epoch, with the same augmentation bit for bit, whoever
loads them.

A sample of the grid; ``RONDE_TEST_ALL=1`` runs all of it.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from processes import TESTS, python, ronde_run
from sampling import ALL

WORKER = TESTS / "feed_resume_worker.py"
# 4 steps an epoch; the last one is short, for 3 workers by more than one sample each
N, BATCH, EPOCHS = (23, 6, 3)
STEPS = EPOCHS * 4

EXECUTORS = ("none", "threads", "processes")
GRID = [
    (executor, first, second, kill, kind)
    for (executor, first, second, kill), kind in zip(
        itertools.product(EXECUTORS, (1, 2, 3), (1, 2, 3), (3, 7, 11)),
        itertools.cycle(["folder", "arrays", "cached", "folder", "cached"]),
        strict=False,
    )
]
SAMPLE = [("processes", 1, 3, 7, "arrays")]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("feed_resume")
    (folder / "data").mkdir()
    draw = np.random.default_rng(0)
    for i in range(N):
        (folder / "data" / f"{i}.bin").write_bytes(draw.normal(size=6).tobytes())
    return folder


@pytest.fixture(scope="module")
def whole(data):
    """One process, in which samples are read one after the other, never stopped."""
    seen = data / "whole"
    done = python(
        [str(WORKER), str(data / "data"), "folder", "-1"],
        data,
        env={"SEEN": str(seen), "RONDE_RUNS": "none"},
    )
    assert done.returncode == 0, done.stderr
    return by_step(seen, 0, STEPS), torch.load(f"{seen}.pt", weights_only=True)


def by_step(seen: Path, start: int, stop: int) -> dict[int, Counter]:
    """Which samples were trained on at each step, over all workers, with a digest of what the model
    was given.
    """
    found: dict[int, Counter] = defaultdict(Counter)
    for line in seen.read_text().splitlines():
        if not line.startswith("begin"):
            step, number, digest = line.split()
            if start <= int(step) < stop:
                found[int(step)][int(number), digest] += 1
    return found


def test_the_uninterrupted_run_is_what_it_should_be(whole):
    seen, _ = whole
    assert sorted(seen) == list(range(STEPS))
    digests = set()
    for epoch in range(EPOCHS):
        steps = [seen[s] for s in range(epoch * 4, epoch * 4 + 4)]
        assert [sum(s.values()) for s in steps] == [6, 6, 6, 5]
        assert sorted(number for s in steps for number, _ in s) == list(range(N))
        digests |= {digest for s in steps for _, digest in s}
    assert len(digests) == EPOCHS * N, "each augmentation is another one"


@pytest.mark.parametrize(("executor", "first", "second", "kill", "kind"), GRID if ALL else SAMPLE)
def test_killed_and_resumed_at_another_size(data, whole, executor, first, second, kill, kind):
    name = f"{executor}-{first}-{second}-{kill}-{kind}"
    settings = data / f"{name}.yaml"
    settings.write_text(
        yaml.safe_dump({"executor": executor, "workers": 0 if executor == "none" else 2})
    )
    common = ["run", "--runs", str(data / "runs"), "--name", name, "--feed", str(settings)]
    script = [str(WORKER), str(data / "data"), kind]
    one, two = data / f"{name}.1", data / f"{name}.2"
    memory = data / "memory"
    memory.mkdir(exist_ok=True)
    # Every process is gone at the end of each, loading processes and those that were not killed
    # too: ronde_run looks.
    died = ronde_run(
        [*common, "-n", str(first), *script, str(kill)],
        data,
        timeout=100,
        env={"SEEN": str(one), "RONDE_SHM": str(memory)},
    )
    assert died.returncode != 0, died.stdout
    assert "SIGKILL" in died.stdout + died.stderr
    assert not list(memory.iterdir()), "what a killed worker cached in memory goes with the run"
    again = ronde_run(
        [*common, "-n", str(second), "--resume", *script, "-1"],
        data,
        timeout=100,
        env={"SEEN": str(two), "RONDE_SHM": str(memory)},
    )
    assert again.returncode == 0, again.stdout + again.stderr
    assert not list(memory.iterdir())

    begins = [line.split() for line in two.read_text().splitlines() if line.startswith("begin")]
    assert len(begins) == second
    start = int(begins[0][2])
    assert {int(b[2]) for b in begins} == {start} and 0 < start <= kill and start % 4 != 0, (
        "in the middle of an epoch"
    )
    before, after = by_step(one, 0, start), by_step(two, start, STEPS)
    seen, weights = whole
    assert {**before, **after} == seen
    found = torch.load(f"{two}.pt", weights_only=True)
    for key, value in weights.items():
        assert torch.allclose(found[key], value, rtol=1e-12, atol=1e-12)
