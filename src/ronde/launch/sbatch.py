"""A batch job of Slurm: its script, its submission, and its output while it runs."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ronde.launch.job import Submission
from ronde.launch.slurm import job_state
from ronde.world import ArgumentError, WorldError

__all__ = ["BatchJob", "follow_job", "limit_seconds", "submit"]

_PLAIN = re.compile(r"[^\x00-\x1f\x7f]+")
_TIME = re.compile(r"(\d+-)?\d+(:\d{1,2}){0,2}")
_WARNING = "--signal=B:USR1@120"  # to ronde run alone, two to three minutes before the limit
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL")


def limit_seconds(text: str) -> int:
    """A time limit as sbatch takes it, in seconds.

    Example:
        >>> limit_seconds("20"), limit_seconds("1:30:00"), limit_seconds("2-12")
        (1200, 5400, 216000)

    Raises:
        ArgumentError: it is none.
    """
    if not _TIME.fullmatch(text):
        raise ArgumentError(
            f"--time {text!r}: expected minutes, 20:00:00, or 2-12:00:00 (days-hours)."
        )
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:  # hours first
        hours, minutes, seconds = [*parts, 0, 0][:3]
    else:
        hours, minutes, seconds = {1: [0, *parts, 0], 2: [0, *parts], 3: parts}[len(parts)]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


@dataclass(frozen=True)
class BatchJob(Submission):
    """A job to submit.

    Attributes:
        limit: time limit, as sbatch takes it.
        directives: further options of sbatch.
        array: places of an array of runs, ``0-9``; each reads ``SLURM_ARRAY_TASK_ID``.
        requeue: whether Slurm may start it again, which resumes the run; then it saves and leaves
            before the time limit.
    """

    limit: str | None = None
    directives: Sequence[str] = ()
    array: str | None = None
    requeue: bool = False
    folder: Path = field(default_factory=Path.cwd)

    def __post_init__(self) -> None:
        """Refuse what sbatch would refuse late, or read as something else."""
        if self.limit is not None:
            limit_seconds(self.limit)
        if self.array is not None and not re.fullmatch(r"[\d,%:-]+", self.array):
            raise ArgumentError(f"--array {self.array!r}: expected places, as in 0-9 or 1,3,5%2.")
        for directive in self.directives:
            if not directive.startswith("--") or not _PLAIN.fullmatch(directive):
                raise ArgumentError(f"{directive!r} is no option of sbatch: expected --name=value.")

    def text(self) -> str:
        """The batch script."""
        tasks = self.tasks or self.gpus
        lines = [
            f"--job-name={self.name}",
            f"--nodes={self.nodes}",
            *([f"--ntasks-per-node={tasks}"] if tasks else []),
            *([f"--gpus-per-node={self.gpus}"] if self.gpus else []),
            *([f"--cpus-per-task={self.cores}"] if self.cores else []),
            *([f"--time={self.limit}"] if self.limit else []),
            f"--output={'slurm-%A_%a.out' if self.array else 'slurm-%j.out'}",
            # Slurm requeues by default where the cluster says so: the run would begin anew
            *(["--requeue", "--open-mode=append", _WARNING] if self.requeue else ["--no-requeue"]),
            *([f"--array={self.array}"] if self.array else []),
            *map(shlex.quote, self.directives),
        ]
        place = (
            "$SLURM_JOB_ID" if self.array is None else "$SLURM_ARRAY_JOB_ID-$SLURM_ARRAY_TASK_ID"
        )
        leaves = ["--restarts", "0"] if self.requeue else []
        run = shlex.join([sys.executable, "-m", "ronde", "run", "--slurm", *leaves, *self.options])
        again = " ${SLURM_RESTART_COUNT:+--resume}" if self.requeue else ""
        parts = [
            "#!/bin/bash",
            *(f"#SBATCH {line}" for line in lines),
            "",
            "set -euo pipefail",
            f"cd {shlex.quote(str(self.folder))}",
            "# One call for all nodes: Ronde starts a step on each. Before the time limit it saves "
            "and leaves,\n# and Slurm starts the job again, which resumes."
            if self.requeue
            else "# One call for all nodes: Ronde starts a step on each.",
            f'exec {run} --name {shlex.quote(self.name)}-job"{place}"{again} '
            f"{shlex.join(self.command)}",
        ]
        return "\n".join(parts) + "\n"


def submit(batch: BatchJob) -> str:
    """Submit a job and return its number.

    Raises:
        ArgumentError: there is no sbatch here.
        WorldError: Slurm refuses it.
    """
    if shutil.which("sbatch") is None:
        raise ArgumentError(
            "sbatch was not found: submit where Slurm's commands are. --dry-run prints the script."
        )
    done = subprocess.run(
        ["sbatch", "--parsable"], input=batch.text(), capture_output=True, text=True, timeout=60
    )
    if done.returncode != 0:
        raise WorldError(f"Slurm refuses the job: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip().split(";")[0]


def follow_job(job: str, show: Callable[[bytes], None], say: Callable[[str], None]) -> str:
    """Show a job's output until it ends, and return its last state: ``COMPLETED``, ``FAILED`` …

    Args:
        job: its number.
        show: called with what it printed.
        say: called with a line about each change: waiting and why, running, ended.
    """
    file, place, last = Path(f"slurm-{job}.out"), 0, ""
    state = ""
    while True:
        state, reason = job_state(job, 60.0)
        shown = f"{state.lower()} ({reason})" if state == "PENDING" else state.lower()
        if shown != last and state:
            say(f"job {job}: {shown}")
            last = shown
        if file.exists():
            with file.open("rb") as opened:
                os.lseek(opened.fileno(), place, os.SEEK_SET)
                while data := opened.read(1 << 16):
                    show(data)
                    place += len(data)
        if state in _ENDED or not state:
            return state
        time.sleep(1.0)
