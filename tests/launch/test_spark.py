"""``ronde run --spark`` in barrier mode: the same training, one end, and errors."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import shlex
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest
from test_hosts import TRAIN, equal, one  # noqa: F401

from processes import child, ronde, ronde_run
from sampling import ALL, long

DOCS = Path(__file__).parents[2] / "docs"
ABSENT = "" if importlib.util.find_spec("pyspark") else "Spark is absent: pip install '.[spark]'"
ABSENT = ABSENT or ("" if shutil.which("java") else "Spark needs Java: java was not found")

pytestmark = pytest.mark.skipif(bool(ABSENT), reason=ABSENT)
MASTER = "local-cluster[2,1,1024]" if ALL else "local[2]"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("spark")
    (folder / "train.py").write_text(TRAIN)
    return folder


@long
def test_the_documentation_in_barrier_mode(place, one):  # noqa: F811
    """The page's command, on this machine."""
    page = (DOCS / "engines" / "spark.md").read_text()
    (line,) = re.findall(r"^ronde run --spark spark://.*$", page, re.M)
    odd = ["a $(touch caught)", "-x"]
    words = [*shlex.split(line)[1:], "spark.st", "4", *odd]
    words[1:1] = ["--name", "spark"]
    words[words.index("--spark") + 1] = MASTER
    words[words.index("--workers") + 1] = "2"
    done = ronde_run(words, place, 150.0)
    assert done.returncode == 0, done.stdout + done.stderr
    equal(place / "spark.st", one)
    assert "I am 0 2 0 2 0" in done.stdout and f"{odd!r}" in done.stdout
    assert not (place / "caught").exists() and "completed" in done.stdout
    logs = sorted(p.name for p in (place / "runs" / "spark" / "logs").iterdir())
    assert logs == ["rank-0.log", "rank-1.log"]
    assert not [p.name for p in place.iterdir() if p.name in ("work", "spark-warehouse")]


def test_errors_before_spark_starts(place):
    words = ["run", "--spark", "local[2]", "train.py", "x.st", "1"]
    done = ronde_run(words, place)
    assert done.returncode == 2 and "--spark needs --workers N" in done.stderr
    words[3:3] = ["--workers", "2"]
    for variables, told in (
        ({"JAVA_HOME": str(place)}, f"JAVA_HOME={place} has no bin/java"),
        ({"JAVA_HOME": None, "PATH": "/nowhere"}, "java is not on PATH"),
    ):
        done = ronde_run(words, place, env=variables)
        assert done.returncode == 2 and told in done.stderr and "default-jre" in done.stderr


@long
def test_fewer_slots_than_workers(place):
    for master in ("local[2]", MASTER):  # executors of the second one come up while it waits
        words = ["run", "--spark", master, "--workers", "3", "train.py", "x.st", "1"]
        done = ronde_run(words, place, 150.0)
        said = re.sub(r"\s+", " ", done.stderr)
        assert done.returncode == 2 and "Traceback" not in said
        told = "3 workers need 3 slots (cores of executors), and Spark has 2. Use --workers 2"
        assert told in said


@long
@pytest.mark.parametrize("end", ["ctrl-c", "launcher", "driver", "agent", "connection"])
def test_one_end_for_all(place, tmp_path, end):
    mark = f"end-{end}"
    words = ["--spark", MASTER, "--workers", "2", "train.py", "x.st", "100000", "forever", mark]

    def of_run() -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                argv = process.cmdline()
                ours = "ronde.launch.node" in argv or "worker.py" in " ".join(argv)
                if ours and process.cwd() == str(place):
                    found.append(process)
        return found

    # what a killed agent leaves there is swept by the next one
    with child(ronde("run", *words), place, {"TMPDIR": str(tmp_path)}) as started:
        started.wait_for("begun", 120)
        run = {p: " ".join(p.cmdline()) for p in of_run()}
        assert len([p for p, words in run.items() if "worker.py" in words]) == 2
        victims = {
            "driver": ("spark_engine", psutil.Process(started.pid).children()),
            "agent": ("-P -u -m ronde.launch.node", [p for p in run if "tunnel" not in run[p]]),
            "connection": ("tunnel.py", list(run)),
        }
        if end in victims:
            wanted, among = victims[end]
            (victim,) = [p for p in among if wanted in " ".join(p.cmdline())]
            victim.kill()
        else:
            started.process.send_signal(signal.SIGINT if end == "ctrl-c" else signal.SIGKILL)
        limit = time.monotonic() + 2.0
        while (left := of_run()) and time.monotonic() < limit:
            time.sleep(0.05)
        assert not left
        done = started.done(15)
        if end == "ctrl-c":
            assert done.returncode == 130
            assert "stopped by SIGINT; every worker has ended" in done.stderr
        elif end in victims:
            assert done.returncode == 1 and "is lost" in done.stderr, done.stderr
