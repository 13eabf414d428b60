"""``ronde run --mpi-world``: the workers are one MPI world, as libmpi itself says."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
from pathlib import Path

import pytest

from lab import missing, no_slurm, slurm
from processes import PATHS, child, ronde, ronde_batch, ronde_run
from sampling import long, some

needs_mpi = pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun not found")

# Open MPI through ctypes: mpi4py is not needed to see what it would see.
RANK = """
import ctypes, json, os, pathlib, signal, sys
mpi = ctypes.CDLL("libmpi.so.40", ctypes.RTLD_GLOBAL)
comm, kind, total = (ctypes.byref(ctypes.c_char.in_dll(mpi, f"ompi_mpi_{n}"))
                     for n in ("comm_world", "int", "op_sum"))
mpi.MPI_Init(None, None)
rank, size, mine, found = (ctypes.c_int() for _ in range(4))
mpi.MPI_Comm_rank(comm, ctypes.byref(rank))
mpi.MPI_Comm_size(comm, ctypes.byref(size))
mine.value = 10 ** rank.value
mpi.MPI_Allreduce(ctypes.byref(mine), ctypes.byref(found), 1, kind, total, comm)
own = [int(os.environ[n]) for n in ("RANK", "WORLD_SIZE")]
print("IN " + json.dumps([rank.value, size.value, found.value, own]), flush=True)
once = pathlib.Path("killed")
if sys.argv[1:] == ["kill"] and rank.value == 1 and not once.exists():
    once.touch()
    os.kill(os.getpid(), signal.SIGKILL)
mpi.MPI_Barrier(comm)
mpi.MPI_Finalize()
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mpi")
    (folder / "rank.py").write_text(RANK)
    (folder / "private").mkdir()
    (folder / "mpi4py").mkdir()
    (folder / "mpi4py" / "__init__.py").touch()
    (folder / "mpi4py" / "MPI.py").write_text("print('imported')\n")
    (folder / "uses.py").write_text("from mpi4py import MPI\n")
    return folder


def seen(output: str) -> list[list]:
    lines = [line.partition("IN ")[2] for line in output.splitlines() if "IN [" in line]
    return sorted(json.loads(line) for line in lines)


@needs_mpi
def test_a_world_here_also_after_a_restart(place):
    words = ["run", "--workers", "3", "--output", "all", "--mpi-world", "--restarts", "1"]
    done = ronde_run([*words, "rank.py", "kill"], place, 120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "restart 1 of 1, from the beginning: rank 1: killed by signal 9" in done.stderr
    assert seen(done.stdout) == sorted(2 * [[r, 3, 111, [r, 3]] for r in range(3)])
    assert "rank.py: MPI" in done.stdout and "restarts  1" in done.stdout, done.stdout


@needs_mpi
@pytest.mark.parametrize("over", some([[], ["--mpi"]], 2))
def test_a_world_on_two_hosts(place, hosts, over):
    first, second = hosts.names
    words = ["run", "--ssh-config", str(hosts.ssh_config), "--hosts", f"{first}:2,{second}:1"]
    words += [*over, "--output", "all", "--mpi-world", "rank.py"]
    done = ronde_run(words, place, 120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert seen(done.stdout) == [[r, 3, 111, [r, 3]] for r in range(3)]
    assert f"[{second} 2] IN [2, 3" in done.stdout


@long
@needs_mpi
@pytest.mark.skipif(bool(missing() or no_slurm()), reason=missing() or no_slurm())
def test_a_world_on_two_nodes_of_slurm(place, hosts):
    with slurm(hosts) as cluster:
        into = ["salloc", "-Q", "--nodes=2"]
        words = ronde("run", "--slurm", "--workers", "3", "--output", "all", "--mpi-world")
        with child([*into, *words, "rank.py"], place, cluster.env) as started:
            done = started.done(120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert seen(done.stdout) == [[r, 3, 111, [r, 3]] for r in range(3)]
    assert f"[{hosts.names[1]} 2] IN [2, 3" in done.stdout


@long
@needs_mpi
def test_a_world_in_two_containers(place, hosts):
    with contextlib.ExitStack() as stack:
        own = place / "bin"
        own.mkdir()
        (own / "ssh").write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {hosts.ssh_config} "$@"\n')
        (own / "ssh").chmod(0o755)
        started = []
        for name in hosts.names:
            base = place / "service" / name
            config = base / "input" / "config" / "resourceconfig.json"
            config.parent.mkdir(parents=True)
            told = {"current_host": name, "hosts": hosts.names, "network_interface_name": "eth0"}
            config.write_text(json.dumps(told))
            words = ronde("run", "--workers", "2", "--mpi-world", "rank.py")
            given = [f"PYTHONPATH={PATHS}", f"SAGEMAKER_BASE_DIR={base}", "RONDE_DEVICE=cpu"]
            given += [f"PATH={own}:{os.environ['PATH']}"]
            line = f"cd {place} && {shlex.join(['env', *given, *words])}"
            ssh = ["ssh", "-F", str(hosts.ssh_config), name, line]
            started.append(stack.enter_context(child(ssh, place)))
        ends = [each.done(120) for each in started]
    assert [e.returncode for e in ends] == [0, 0], "".join(e.stdout + e.stderr for e in ends)
    assert seen(ends[0].stdout) == [[0, 4, 1111, [0, 4]]]


def test_without_it_mpi4py_is_refused(place):
    one = ronde_run(["run", "--workers", "1", "--runs", "none", "uses.py"], place)
    assert one.returncode == 0 and "imported" in one.stdout, one.stderr
    done = ronde_run(["run", "--workers", "2", "--runs", "none", "uses.py"], place)
    sentence = "mpi4py would see a world of 1, and this run has 2 workers. Start it with ronde run"
    assert done.returncode == 1 and sentence in done.stderr, done.stderr


def test_refusals(place):
    wrong = {
        ("--restarts", "1", "--hosts", "a:1,b:1"): "--restarts is for this machine only",
        ("--ray", "local"): "--mpi-world is not for --ray, whose workers mpirun does not start",
    }
    asked = [["run", "--mpi-world", *words, "rank.py"] for words in wrong]
    for done, sentence in zip(ronde_batch(asked, place), wrong.values(), strict=True):
        assert done.returncode == 2 and sentence in done.stderr, done.stderr
