"""The same run over every engine: command lines on the hosts of a lab, or on this machine."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lab import no_slurm
from processes import ronde
from sampling import ALL

ENGINES = ("ssh", "mpirun.openmpi", "mpirun.mpich", "slurm", "ray", "spark")


def absent(engine: str) -> str:
    """Why an engine cannot be tried here; empty if it can."""
    if engine == "slurm":
        return no_slurm()
    if engine == "ray":
        return "" if importlib.util.find_spec("ray") else "Ray is not installed"
    if engine == "spark":
        there = importlib.util.find_spec("pyspark") and shutil.which("java")
        return "" if there else "Spark or Java is not installed"
    return "" if shutil.which(engine) else f"{engine} not found"


def started_by(
    engine: str, hosts: Any, cluster: Any, folder: Path, workers: int, words: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """A command line that starts workers over an engine, half of them on each host where it has
    hosts, and its variables.

    Args:
        hosts: two of them, in a lab.
        cluster: Slurm on them.
        folder: a short path, for what the engine needs on the way.
    """
    if why := absent(engine):
        pytest.skip(why)
    each = (workers + 1) // 2, workers // 2
    named = ",".join(f"{h}:{n}" for h, n in zip(hosts.names, each, strict=True))
    over = ["--ssh-config", str(hosts.ssh_config), "--hosts", named]
    if engine == "ssh":
        return ronde("run", *over, *words), {}
    if engine == "slurm":
        into = ["salloc", "-Q", "--nodes=2", f"--ntasks-per-node={each[0]}", "--cpus-per-task=1"]
        return [*into, *ronde("run", "--slurm", "--workers", str(workers), *words)], cluster.env
    if engine == "ray":
        line = ronde("run", "--ray", "local", "--workers", str(workers), *words)
        return line, {"RAY_TMPDIR": str(folder)}
    if engine == "spark":
        master = f"local-cluster[2,{each[0]},1024]" if ALL else f"local[{workers}]"
        return ronde("run", "--spark", master, "--workers", str(workers), *words), {}
    own = folder / engine
    own.mkdir(exist_ok=True)
    if not (own / "mpirun").exists():
        # MPICH looks for its parts beside the name that it was called by
        (own / "mpirun").write_text(f'#!/bin/sh\nexec {shutil.which(engine)} "$@"\n')
        (own / "mpirun").chmod(0o755)
    return ronde("run", *over, "--mpi", *words), {"PATH": f"{own}:{os.environ['PATH']}"}
