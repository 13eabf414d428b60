"""``ronde run --ray`` on a real cluster of two nodes: the same training, one end, and errors."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file
from test_hosts import TRAIN, equal

from lab import lab, missing
from processes import PATHS, child, ronde, ronde_run
from sampling import long

DOCS = Path(__file__).parents[2] / "docs"
ABSENT = "" if importlib.util.find_spec("ray") else "Ray is not installed: pip install '.[ray]'"

pytestmark = pytest.mark.skipif(bool(ABSENT), reason=ABSENT)
on_hosts = pytest.mark.skipif(bool(missing()), reason=missing())
VARIABLES = {"OMP_NUM_THREADS": "1", "RONDE_DEVICE": "cpu", "PYTHONPATH": PATHS}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ray")
    (folder / "train.py").write_text(TRAIN)
    return folder


@pytest.fixture(scope="module")
def one(place):
    done = ronde_run(["run", "--workers", "1", "train.py", "one.st", "4"], place)
    assert done.returncode == 0, done.stderr
    return load_file(place / "one.st")


@pytest.fixture(scope="module")
def cluster(place):
    """Two hosts, a node of Ray on each, with two and one CPUs."""
    with lab(place / "lab", 2) as hosts:
        first, second = hosts.names
        temporary = Path(f"/tmp/r{os.getpid()}")  # Ray's sockets need short paths
        options = f"--object-store-memory 80000000 --disable-usage-stats --temp-dir {temporary}"
        start = f"cd {place}; {shlex.join(f'{k}={v}' for k, v in VARIABLES.items())} "
        start += f"HOME={place} RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0 "
        ray = shlex.join([sys.executable, "-m", "ray.scripts.scripts", "start"])
        try:
            with_dashboard = "--include-dashboard=false"
            for name, words in (
                (first, f"--head --port 6379 --num-cpus 2 {with_dashboard} {options}a"),
                (second, f"--address {hosts.address(first)}:6379 --num-cpus 1 {options}b"),
            ):
                own = f"--node-ip-address {hosts.address(name)}"
                told = f"{start}{ray} {words} {own} > ray-{name}.txt 2>&1 || cat ray-{name}.txt"
                assert not hosts.ssh(name, told, 90.0)
            yield hosts
        finally:
            for letter in "ab":
                shutil.rmtree(f"{temporary}{letter}", ignore_errors=True)


def launcher(hosts, place, *words: str) -> list[str]:
    """``ronde run --ray`` on the first host."""
    into = ["nsenter", "-t", str(psutil.Process(hosts.pids[hosts.names[0]]).children()[0].pid)]
    return [
        *into,
        "-m",
        "-n",
        "-p",
        "-u",
        f"--wd={place}",
        *ronde("run", "--ray", f"{hosts.address(hosts.names[0])}:6379", *words),
    ]


def on_ray(hosts, place, *words: str, seconds: float = 60.0):
    with child(launcher(hosts, place, *words), place, {"PYTHONPATH": PATHS}) as started:
        return started.done(seconds)


@long
@on_hosts
def test_same_training_on_two_nodes(cluster, place, one):
    first, second = cluster.names
    odd = ["a $(touch caught)", "-x"]
    words = ["--workers", "3", "--output", "all", "--name", "both", "train.py", "two.st", "4", *odd]
    done = on_ray(cluster, place, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    equal(place / "two.st", one)
    assert f"3 workers on {first}:2, {second}:1" in done.stdout
    assert "completed" in done.stdout and not (place / "caught").exists()
    assert f"[{second} 2] I am 2 3 0 1 1 {second} {odd!r}" in done.stdout.splitlines()
    logs = sorted(p.name for p in (place / "runs" / "both" / "logs").iterdir())
    assert logs == [f"rank-{r}.log" for r in range(3)]
    done = on_ray(cluster, place, "--workers", "4", "train.py", "x.st", "1")
    assert done.returncode == 2
    said = re.sub(r"\s+", " ", done.stderr)
    assert "4 workers need 4 CPUs; the cluster has 3 on 2 nodes. Use --workers 3" in said
    assert "Traceback" not in said


def of_run(mark: str, place: Path) -> list[psutil.Process]:
    """Workers, agents and launchers of a run; they are in its folder."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if mark in words or ("ronde.launch.node" in words and process.cwd() == str(place)):
                found.append(process)
    return found


@long
@on_hosts
@pytest.mark.parametrize("end", ["ctrl-c", "launcher", "driver", "task", "agent", "connection"])
def test_one_end_for_all(cluster, place, tmp_path, end):
    mark = f"end-{end}"
    words = ["--workers", "3", "train.py", "x.st", "100000", "forever", mark]
    # what a killed agent leaves there is swept by the next one
    variables = {"PYTHONPATH": PATHS, "TMPDIR": str(tmp_path)}
    with child(launcher(cluster, place, *words), place, variables) as started:
        started.wait_for("begun", 60)
        assert len([p for p in of_run(mark, place) if "worker.py" in " ".join(p.cmdline())]) == 3
        if end in ("ctrl-c", "launcher"):
            found = [p for p in of_run(mark, place) if p.cmdline()[1:4] == ["-m", "ronde", "run"]]
            assert len(found) == 1
            found[0].send_signal(signal.SIGINT if end == "ctrl-c" else signal.SIGKILL)
        else:
            victims = {
                "driver": "ronde.launch.ray_engine",
                "task": "ray::run_agent",
                "agent": "python -P -u -m ronde.launch.node",
                "connection": "launch/tunnel.py",
            }
            found = [p for p in psutil.process_iter() if _says(p, victims[end])]
            found[-1].kill()
        limit = time.monotonic() + 2.0
        while (left := of_run(mark, place)) and time.monotonic() < limit:
            time.sleep(0.05)
        left = [" ".join(p.cmdline()) for p in left]
        assert not [words for words in left if "ronde run" not in words]
        done = started.done(15)
        if end == "ctrl-c":
            assert done.returncode == 130
            assert "stopped by SIGINT; every worker has ended" in done.stderr
        elif end != "launcher":
            assert done.returncode == 1 and "is lost" in done.stderr, done.stderr


def _says(process: psutil.Process, wanted: str) -> bool:
    with contextlib.suppress(psutil.Error):
        return wanted in " ".join(process.cmdline())
    return False


def test_the_documentation_on_a_cluster_of_its_own(place, one):
    """The page's command, without an address where no cluster is; then errors."""
    page = (DOCS / "engines" / "ray.md").read_text()
    (line,) = re.findall(r"^ronde run --ray --workers .*$", page, re.M)
    with tempfile.TemporaryDirectory(dir="/tmp") as short:  # for Ray's sockets
        told_by_the_page(place, one, line, {"RAY_TMPDIR": short, "RAY_ADDRESS": "local"})


def told_by_the_page(place, one, line, home):
    words = [*shlex.split(line)[1:], "alone.st", "4"]
    words[words.index("--workers") + 1] = "2"
    done = ronde_run(words, place, env=home)
    assert done.returncode == 0, done.stdout + done.stderr
    equal(place / "alone.st", one)
    for address, told in (
        ("local", "500 workers need 500 CPUs; the cluster has "),
        ("127.0.0.1:1", "nothing answers at 127.0.0.1:1"),
        ("nowhere.invalid:6379", "nothing answers at nowhere.invalid:6379"),
    ):
        done = ronde_run(
            ["run", "--ray", address, "-n", "500", "train.py", "x.st", "1"], place, env=home
        )
        assert done.returncode == 2 and told in done.stderr and "Traceback" not in done.stderr
