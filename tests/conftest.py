"""What holds for every test: nothing of the machine's own launcher or run folder leaks in."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Generator
from multiprocessing.util import get_temp_dir
from pathlib import Path

import pytest

import zygote

_LAUNCHERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TRAINING_JOB_NAME",
)
_PREFIXES = ("SLURM_", "OMPI_", "PMI_", "MPI_LOCAL", "SM_", "TORCHELASTIC_", "PET_", "RONDE_")


# A shell lets what it starts with "&" ignore Ctrl-C, and so would all processes that a test presses
# it for.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

DURATIONS = Path(__file__).with_name("durations.json")
"""File -> test function -> seconds of all its cases, and of its longest: ``make durations``."""

_QUICK_SECONDS = 0.2
_measured: dict[str, dict[str, list[float]]] = {}


def _durations() -> dict[str, dict[str, list[float]]]:
    return json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}


def _is_quick(found: list[float] | None) -> bool:
    return found is None or found[1] <= _QUICK_SECONDS  # a test that was never measured is new


def _shares(item: pytest.Item) -> bool:
    """Whether a test uses a fixture of its whole file: a warm world, a training. The first such
    test pays for it, whichever that is.
    """
    known = item._fixtureinfo.name2fixturedefs  # type: ignore[attr-defined]
    return any(
        fixture.scope == "module" for name in item.fixturenames for fixture in known.get(name, ())
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the fast lane."""
    parser.addoption(
        "--quick",
        action="store_true",
        help=f"run only tests measured at {_QUICK_SECONDS} s or less, and new ones",
    )
    parser.addoption(
        "--record-durations",
        action="store_true",
        help=f"write what each test took to tests/{DURATIONS.name}",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The fast lane does not import a file that has no quick test."""
    if config.getoption("--quick") and collection_path.suffix == ".py":
        tests = _durations().get(collection_path.relative_to(config.rootpath).as_posix())
        if tests and not any(map(_is_quick, tests.values())):
            return True
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Whole files change places, the longest first, so that at the end no process is left alone
    with a long one; a file's tests stay in their order.
    """
    known = _durations()

    def of(item: pytest.Item) -> dict[str, list[float]]:
        return known.get(item.path.relative_to(config.rootpath).as_posix(), {})

    if config.getoption("--quick"):

        def quick(item: pytest.Item) -> bool:
            return _is_quick(of(item).get(item.name.partition("[")[0])) and not _shares(item)

        config.hook.pytest_deselected(items=[i for i in items if not quick(i)])
        items[:] = [i for i in items if quick(i)]
    seconds = {item.path: sum(all_cases for all_cases, _ in of(item).values()) for item in items}
    items.sort(key=lambda item: -seconds[item.path])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up what a test took, fixtures included."""
    file, _, name = report.nodeid.partition("::")
    cases = _measured.setdefault(file, {}).setdefault(name.partition("[")[0], [0.0, 0.0])
    cases[0] += report.duration
    cases[1] = max(cases[1], report.duration)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Keep the measured durations, in the process that hears of all tests."""
    if session.config.getoption("--record-durations") and not hasattr(
        session.config, "workerinput"
    ):
        kept = {f: t for f, t in _durations().items() if (session.config.rootpath / f).exists()}
        found = kept | _measured
        rows = []
        for file, tests in sorted(found.items()):
            row = {name: [round(x, 2) for x in cases] for name, cases in sorted(tests.items())}
            rows.append(f"{json.dumps(file)}: {json.dumps(row)}".replace("], ", "],\n  "))
        DURATIONS.write_text("{\n" + ",\n".join(rows) + "\n}\n")


@pytest.fixture(scope="session", autouse=True)
def clean_environment():
    """The tests themselves may run inside a Slurm job or a container: its variables are put away
    meanwhile.
    """
    saved = {k: v for k, v in os.environ.items() if k in _LAUNCHERS or k.startswith(_PREFIXES)}
    for name in saved:
        del os.environ[name]
    zygote.measure_briefly()
    yield
    os.environ.update(saved)


@pytest.fixture(autouse=True)
def same_environment():
    """What a command run in this process sets (`SM_HOSTS` in a container) ends with its test."""
    before = dict(os.environ)
    yield
    if dict(os.environ) != before:
        os.environ.clear()
        os.environ.update(before)


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
    # what tests write is kept for a while where pytest keeps it
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    # multiprocessing's, which stays until this process ends: not in the folder below
    get_temp_dir()
    folder = tempfile.TemporaryDirectory(prefix="ronde-tests-", ignore_cleanup_errors=True)
    config.add_cleanup(folder.cleanup)
    os.environ["TMPDIR"] = tempfile.tempdir = folder.name


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    """Nothing that a test began may leave a temporary file behind, whichever of its processes were
    killed. A run that it did not train is none of the next test's loop.
    """
    yield
    if group := sys.modules.get("ronde.run.group"):
        group._latest = None
    # a fixture's pool goes with the fixture
    if left := {name for name in _temporary() - _known if f"-{os.getpid()}-" not in name}:
        _known.update(left)
        raise AssertionError(f"left in the temporary folder: {', '.join(sorted(left))}")
