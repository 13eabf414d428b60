"""What holds for every test: nothing of the machine's own launcher or run folder leaks in."""

from __future__ import annotations

import os

import pytest

_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TRAINING_JOB_NAME")
_PREFIXES = ("SLURM_", "OMPI_", "PMI_", "MPI_LOCAL", "SM_", "TORCHELASTIC_", "RONDE_")


# They begin first, longest first, so that at the end no process is left alone with a long file.
_LONGEST = [
    "docs",
    "doctor",
    "cli",
    "resume",
    "shard",
    "pipeline",
    "plan_costs",
    "cut",
    "launchers_real",
    "tensor",
    "examples",
    "feed_executor",
    "pipeline_foreign",
    "reshard",
    "run",
    "prove",
    "equality",
    "feed_resume",
    "plan_memory",
    "plan_search",
    "scale",
    "errors",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole files change places; a file's tests stay in their order."""
    place = {f"test_{name}": i for i, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


@pytest.fixture(scope="session", autouse=True)
def clean_environment():
    """The tests themselves may run inside a Slurm job or a container: its variables are put away meanwhile."""
    saved = {k: v for k, v in os.environ.items() if k in _LAUNCHERS or k.startswith(_PREFIXES)}
    for name in saved:
        del os.environ[name]
    yield
    os.environ.update(saved)
