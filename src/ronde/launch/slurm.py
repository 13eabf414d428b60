"""The nodes of a Slurm allocation, through ``srun``: one step a node."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence

from ronde.launch.engine import Engine, Host
from ronde.world import ArgumentError
from ronde.world.launchers import expand_nodelist, repeated

__all__ = ["Slurm", "allocation"]

_MEANINGS = (
    ("invalid node name", "it is no node of this cluster."),
    ("expired", "the allocation has ended: its time is over, or it was cancelled."),
    ("job/step already completing", "the allocation has ended."),
    ("invalid job id", "the allocation has ended."),
    ("unable to contact slurm controller", "Slurm's controller does not answer."),
    ("node failure", "Slurm lost the node."),
    ("not responding", "Slurm lost the node."),
    ("due to time limit", "the time limit of the job has come."),
    ("cancelled", "the job was cancelled."),
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
            "--cpu-bind=none",
            "--mem=0",
            "--overlap",
            "--unbuffered",
            "--kill-on-bad-exit=1",
            "--quiet",
            *agent,
        ]

    def meaning(self, host: Host, status: int, printed: str) -> str:
        """What srun meant."""
        said = re.sub(r"\s+", " ", printed.lower())
        return next((meant for words, meant in _MEANINGS if words in said), "")
