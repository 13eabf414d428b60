"""The nodes of a Slurm allocation, through ``srun``: one step a node."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from ronde.launch.engine import Engine, Host
from ronde.world import ArgumentError
from ronde.world.launchers import expand_nodelist, repeated

__all__ = ["Slurm", "allocation", "job_state"]

_OVER = (
    "the time limit of the job has come. Ask for more with --time, or let it save before and be "
    "started again: ronde submit --requeue."
)
_CANCELLED = (
    "the job was cancelled, with scancel or by the cluster. What it saved can go on: ronde run "
    "--resume."
)
_STATES = {"TIMEOUT": _OVER, "CANCELLED": _CANCELLED, "NODE_FAIL": "Slurm lost a node of the job."}

_MEANINGS = (
    ("due to time limit", _OVER),
    ("cancelled", _CANCELLED),
)


def allocation(env: Mapping[str, str] = os.environ) -> list[Host]:
    """The nodes of the allocation that this process runs in, with ``--ntasks-per-node`` slots where
    the job asked for tasks, else one slot per device.

    Raises:
        ArgumentError: this is no allocation.
    """
    listed = env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
    if not env.get("SLURM_JOB_ID") or not listed:
        raise ArgumentError(
            "--slurm: this is not inside an allocation of Slurm (SLURM_JOB_ID is not set). Call it "
            "in a batch script (sbatch), or after 'salloc --nodes 2'."
        )
    alike = repeated(env.get("SLURM_NTASKS_PER_NODE", ""), 0)
    tasks = env.get("SLURM_TASKS_PER_NODE", "") if env.get("SLURM_NTASKS") else ""
    names = expand_nodelist(listed)
    return [Host(name, alike or repeated(tasks, i)) for i, name in enumerate(names)]


class Slurm(Engine):
    """Starts agents as steps of the allocation."""

    name = "srun"

    def __init__(self, env: Mapping[str, str] = os.environ) -> None:
        if shutil.which("srun") is None:
            raise ArgumentError("srun was not found: --slurm needs Slurm's commands here.")
        listed = expand_nodelist(env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST") or "")
        self._job = env.get("SLURM_JOB_ID")
        cores = env.get("SLURM_JOB_CPUS_PER_NODE", "")
        self._cores = {name: repeated(cores, i) for i, name in enumerate(listed)}

    def command(self, host: Host, agent: Sequence[str]) -> list[str]:
        """One task on one node, with all of the node's share of the job."""
        cores = self._cores.get(host.name)
        return [
            "srun",
            "--nodes=1",
            "--ntasks=1",
            "--ntasks-per-node=1",
            f"--nodelist={host.name}",
            *([f"--cpus-per-task={cores}"] if cores else []),
            # the agent gives its workers all that the job has there
            "--cpu-bind=none",
            "--mem=0",
            # steps of one job wait for each other's cores otherwise
            "--overlap",
            "--unbuffered",
            "--kill-on-bad-exit=1",
            "--quiet",
            *agent,
        ]

    def meaning(self, host: Host, status: int, printed: str) -> str:
        """What srun meant; where it said nothing, the state of the job."""
        said = re.sub(r"\s+", " ", printed.lower())
        meant = next((meant for words, meant in _MEANINGS if words in said), "")
        if meant or self._job is None:
            return meant
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            meant = _STATES.get(job_state(self._job, 5.0)[0], "")
        return meant


def job_state(job: str, seconds: float) -> tuple[str, str]:
    """A job's state, and why it waits; empty once Slurm has forgotten it.

    Raises:
        OSError, subprocess.TimeoutExpired: nobody answers in so many seconds.
    """
    ask = ["scontrol", "--oneliner", "show", "job", job]
    done = subprocess.run(ask, capture_output=True, text=True, timeout=seconds)
    job_itself = done.stdout.partition("\n")[0]  # an array's other tasks follow
    fields = dict(re.findall(r"(\w+)=(\S*)", job_itself))
    return fields.get("JobState", ""), fields.get("Reason", "")
