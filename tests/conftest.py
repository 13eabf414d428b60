"""What holds for every test: nothing of the machine's own launcher or run folder leaks in."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Generator
from multiprocessing.util import get_temp_dir
from pathlib import Path

import pytest

_LAUNCHERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TRAINING_JOB_NAME",
)
_PREFIXES = ("SLURM_", "OMPI_", "PMI_", "MPI_LOCAL", "SM_", "TORCHELASTIC_", "RONDE_")


# A shell lets what it starts with "&" ignore Ctrl-C, and so would all processes that a test presses
# it for.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

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
    """The tests themselves may run inside a Slurm job or a container: its variables are put away
    meanwhile.
    """
    saved = {k: v for k, v in os.environ.items() if k in _LAUNCHERS or k.startswith(_PREFIXES)}
    for name in saved:
        del os.environ[name]
    yield
    os.environ.update(saved)


_NOT_OURS = ("pytest-of-", "torchinductor_")
_known: set[str] = set()  # was there, or has been told


def _temporary() -> set[str]:
    return {
        path.name
        for path in Path(tempfile.gettempdir()).iterdir()
        if not path.name.startswith(_NOT_OURS)
    }


def pytest_configure(config: pytest.Config) -> None:
    """A temporary folder of this process's own: what is left in it, a test has left."""
    os.environ.setdefault(
        "PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir()
    )  # what tests write is kept for a while where pytest keeps it
    # multiprocessing's, which stays until this process ends: not in the folder below
    get_temp_dir()
    folder = tempfile.TemporaryDirectory(prefix="ronde-tests-", ignore_cleanup_errors=True)
    config.add_cleanup(folder.cleanup)
    os.environ["TMPDIR"] = tempfile.tempdir = folder.name


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    """Nothing that a test began may leave a temporary file behind, whichever of its processes were
    killed.
    """
    yield
    if left := {
        name for name in _temporary() - _known if f"-{os.getpid()}-" not in name
    }:  # a fixture's pool goes with the fixture
        _known.update(left)
        raise AssertionError(f"left in the temporary folder: {', '.join(sorted(left))}")
