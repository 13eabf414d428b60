"""What holds for every test: nothing of the machine's own launcher or run folder leaks in."""

from __future__ import annotations

import os

import pytest

_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TRAINING_JOB_NAME")
_PREFIXES = ("SLURM_", "OMPI_", "PMI_", "MPI_LOCAL", "SM_", "TORCHELASTIC_", "RONDE_")


@pytest.fixture(scope="session", autouse=True)
def clean_environment():
    """The tests themselves may run inside a Slurm job or a container: its variables are put away meanwhile."""
    saved = {k: v for k, v in os.environ.items() if k in _LAUNCHERS or k.startswith(_PREFIXES)}
    for name in saved:
        del os.environ[name]
    yield
    os.environ.update(saved)
