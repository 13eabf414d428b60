"""Hosts, engines on them, and one training on one process, for the tests of the launcher."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from safetensors.torch import load_file
from test_hosts import TRAIN

from lab import lab, missing, no_slurm, slurm
from processes import ronde_run


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """The working directory, the same path on all hosts; ``private`` in it is each host's own."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "private").mkdir()
    (folder / "train.py").write_text(TRAIN)
    return folder


@pytest.fixture(scope="module")
def hosts(place):
    """Two hosts."""
    if missing():
        pytest.skip(missing())
    with lab(place / "lab", 2, place / "private") as made:
        yield made


@pytest.fixture(scope="module")
def one(place):
    """The weights of one process after four epochs."""
    done = ronde_run(["run", "--workers", "1", "train.py", "one.st", "4"], place)
    assert done.returncode == 0, done.stderr
    return load_file(place / "one.st")


@pytest.fixture(scope="module")
def cluster(hosts):
    """Slurm on the hosts; None where it is not installed."""
    if no_slurm():
        yield None
        return
    with slurm(hosts) as made:
        yield made


@pytest.fixture
def short():
    """A folder with a short path, for the sockets of Ray."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)
