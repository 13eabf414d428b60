"""One end for all: after Ctrl-C, or after a process of the run is killed anywhere, nothing of the run
is alive on any host 2 s later.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from test_hosts import on

from lab import missing, no_slurm
from processes import child, ronde
from sampling import ALL, long

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

ENDS = ("ctrl-c", "connection", "launcher", "agent")
ENGINES = {"ssh": "ssh", "mpirun.openmpi": "mpirun", "mpirun.mpich": "mpirun", "slurm": "srun"}
GRID = [(engine, end) for engine in ENGINES for end in ENDS]
SECONDS = 2.0


def command(engine: str, hosts, place, tmp_path, request, words):
    """A command line that starts a run over an engine, with its variables."""
    if engine == "slurm":
        if (made := request.getfixturevalue("cluster")) is None:
            pytest.skip(no_slurm())
        into = ["salloc", "-Q", "--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=1"]
        return [*into, *ronde("run", "--slurm", "--workers", "3", *words)], made.env
    if engine == "ssh":
        return ronde("run", *on(hosts), *words), {}
    if (found := shutil.which(engine)) is None:
        pytest.skip(f"{engine} not found")
    (tmp_path / "mpirun").write_text(f'#!/bin/sh\nexec {found} "$@"\n')
    (tmp_path / "mpirun").chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    return ronde("run", *on(hosts), "--mpi", *words), path


@pytest.mark.parametrize(("engine", "end"), GRID if ALL else [("ssh", "ctrl-c")])
def test_nothing_is_left(hosts, place, tmp_path, request, engine, end):
    mark = f"end-{engine}-{end}"
    train = ["--name", mark, "train.py", "x.st", "100000", "forever", mark]
    words, variables = command(engine, hosts, place, tmp_path, request, train)
    # what a killed agent or mpirun leaves there is swept by the next one
    temporary = {"TMPDIR": str(tmp_path)}
    with child(words, place, {**variables, **temporary}) as started:
        started.wait_for("begun", 60)
        run = of_run(mark, hosts.names)
        assert len([p for p in run if "worker.py" in " ".join(p.cmdline())]) == 3
        (launcher,) = [p for p in run if p.cmdline()[1:4] == ["-m", "ronde", "run"]]
        if end == "ctrl-c":
            launcher.send_signal(signal.SIGINT)
        elif end == "launcher":
            launcher.kill()
        else:
            victim(end, ENGINES[engine], hosts.names[1]).kill()
        limit, ours = time.monotonic() + SECONDS, (launcher.pid, started.pid)
        while (
            left := [p for p in of_run(mark, hosts.names) if p.pid not in ours]
        ) and time.monotonic() < limit:
            time.sleep(0.05)
        assert not list(filter(None, map(said, left)))
        done = started.done(10)
        # an Open MPI that starts next finds its folder empty, whoever ended the one before
        assert not list(tmp_path.glob("ompi.*"))
        if end == "ctrl-c":
            assert done.returncode == 130
            assert "stopped by SIGINT; every worker has ended" in done.stderr
        elif end != "launcher":
            assert done.returncode == 1
            assert f"host {hosts.names[1]} is lost" in done.stderr


def of_run(mark: str, names) -> list[psutil.Process]:
    """Processes of a run here and on its hosts, whose namespaces are below this one."""
    found = []
    for process in psutil.process_iter():
        words = said(process)
        agent = "ronde.launch.agent" in words
        there = agent and (any(name in words for name in names) or _on(process) in names)
        if mark in words.split() or there:
            found.append(process)
    return found


def said(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def victim(end: str, client: str, host: str) -> psutil.Process:
    """The agent on a host, or the process here that connects the launcher with it."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            words = process.cmdline()
            if not any("ronde.launch.agent" in word for word in words):
                continue
            starts = any(Path(word).name.startswith(client) for word in words[:2])
            if end == "connection" and starts and host in " ".join(words):
                found.append(process)
            if (
                end == "agent"
                and words[3:5] == ["-m", "ronde.launch.agent"]
                and _on(process) == host
            ):
                found.append(process)
    assert found, f"no {end} of {host}"
    return found[0]


def _on(process: psutil.Process) -> str:
    """The name of the host on which a process is."""
    words = ["nsenter", "-t", str(process.pid), "-u", "hostname"]
    return subprocess.run(words, capture_output=True, text=True).stdout.strip()


@long
@pytest.mark.skipif(bool(no_slurm()), reason=no_slurm())
@pytest.mark.parametrize("end", ["cancelled", "time limit"])
@pytest.mark.parametrize("way", ["salloc", "submit"])
def test_slurm_ends_the_job(hosts, place, cluster, tmp_path, way, end):
    """Which host, why, and what to do, whoever of launcher and agents Slurm tells first."""
    mark, environment = f"{way}-{end.split()[0]}", {**os.environ, **cluster.env}
    train = ["--name", mark, "train.py", "x.st", "100000", "forever", mark]
    words = ["salloc", "-Q", "--nodes=2", "--job-name", mark, *ronde("run", "--slurm", *train)]
    if way == "submit":
        words = ronde("submit", "--nodes=2", "--tasks=1", f"--sbatch=--job-name={mark}", *train)
    with child(words, place, {**cluster.env, "TMPDIR": str(tmp_path)}) as started:
        started.wait_for("begun", 60)
        ask = ["squeue", "-h", "-n", mark, "-o", "%i"]
        told = subprocess.run(ask, env=environment, capture_output=True, text=True, timeout=20)
        job = told.stdout.split()[0]
        stop = ["scancel", job]
        if end != "cancelled":  # Slurm looks at limits every half a minute
            stop = ["scontrol", "update", f"JobId={job}", "EndTime=now+1"]
        subprocess.run(stop, env=environment, check=True, timeout=20)
        done = started.done(60)
        assert not list(filter(None, map(said, of_run(mark, hosts.names))))
    assert done.returncode != 0
    text = done.stdout + done.stderr
    why = {"cancelled": "the job was cancelled", "time limit": "the time limit of the job has come"}
    cure = {"cancelled": "--resume", "time limit": "Ask for more with --time"}
    (line,) = [each for each in text.splitlines() if "every worker has ended" in each]
    assert any(f"({name}: {why[end]}" in line for name in hosts.names) and cure[end] in line, text
