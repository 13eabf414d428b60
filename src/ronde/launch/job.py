"""What to launch, where, and how it ended."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ronde.launch.mpi_world import VARIABLE
from ronde.watch.hang_judge import HangVerdict

__all__ = ["Job", "Nodes", "Outcome", "Submission"]


@dataclass(frozen=True)
class Job:
    """What to launch.

    Attributes:
        command: script path and arguments, or ``-m``, module and arguments.
        workers: how many.
        directory: the run directory; None leaves nothing behind.
        environment: further variables for the workers.
        restarts: whether others follow when one fails: then all are ended at once.
        hang_timeout: after how many seconds without progress a worker hangs; None does not watch.
        spares: whether workers may be forks of one process that has imported torch.
        tensorflow: how many of the workers are parameter servers of a TensorFlow cluster; None: the
            script is none of TensorFlow's.
    """

    command: list[str]
    workers: int
    directory: Path | None = None
    environment: dict[str, str] = field(default_factory=dict)
    restarts: bool = False
    hang_timeout: float | None = None
    spares: bool = True
    tensorflow: int | None = None

    @property
    def in_mpi(self) -> bool:
        """Whether workers are the processes of an MPI world."""
        return VARIABLE in self.environment

    @property
    def forks(self) -> bool:
        """Whether workers are forks: one import of torch pays for several, or for a restart."""
        return self.spares and not self.in_mpi and (self.workers > 1 or self.restarts)

    @property
    def leaves(self) -> bool:
        """Whether workers save and leave when they are asked to."""
        return self.environment.get("RONDE_LEAVE") == "1"


@dataclass(frozen=True)
class Submission:
    """A ``ronde run`` that a scheduler is to start.

    Attributes:
        command: the script and its arguments, or ``-m``, a module and its arguments.
        name: name of the run and the job.
        options: further options of ``ronde run``.
        nodes: how many.
        gpus: per node; None for a job without GPUs.
        tasks: workers per node; None: one per GPU.
        cores: per worker.
    """

    command: Sequence[str]
    name: str
    options: Sequence[str] = ()
    nodes: int = 1
    gpus: int | None = None
    tasks: int | None = None
    cores: int | None = None


@dataclass(frozen=True)
class Nodes:
    """Where the workers of this node stand among those of all nodes, and where they meet.

    Attributes:
        rank: place of this node among the nodes.
        count: how many nodes.
        address: address of node 0 on which its store listens.
        port: port of that store; on node 0 the one that ``listener`` is bound to.
        listener: node 0's bound socket.
        interface: the interface of this node that leads to the others.
        patience: how long to wait for node 0, in seconds.
        tells: whether nodes tell each other when one fails; else their launcher does.
        first: global rank of this node's first worker; None where all nodes have as many.
        total: workers of all nodes; None likewise.
    """

    rank: int = 0
    count: int = 1
    address: str = "127.0.0.1"
    port: int = 0
    listener: socket.socket | None = None
    interface: str = "lo"
    patience: float = 60.0
    tells: bool = False
    first: int | None = None
    total: int | None = None

    def first_of(self, job: Job) -> int:
        """Global rank of this node's first worker."""
        return job.workers * self.rank if self.first is None else self.first

    def total_of(self, job: Job) -> int:
        """Workers of all nodes."""
        return self.total or job.workers * self.count


@dataclass(frozen=True)
class Outcome:
    """How the launch ended.

    Attributes:
        status: exit status for the shell: 0 only if every worker ended well.
        rank: the rank that failed first.
        error: its error, one line.
        before: where the error is only that another rank was gone: what is known of that one, which
            ended early with status 0; else empty.
        traceback: its traceback, empty where it was killed or ended by itself.
        exited: whether it ended by itself, with ``sys.exit`` and a number, as argparse does.
        consequence: whether it is only that another rank was gone.
        again: whether the workers were asked to leave, so that the run can be resumed.
        paused: whether they left at the number of samples of ``--until``.
        left: whether one called ``os._exit(0)``, and no rank failed.
        interrupted: whether a signal to the launcher ended it.
        hang: what was found where the run hung; None where it did not.
    """

    status: int
    rank: int | None = None
    error: str | None = None
    traceback: str = ""
    exited: bool = False
    interrupted: bool = False
    before: str = ""
    consequence: bool = False
    left: bool = False
    again: bool = False
    paused: bool = False
    seconds: float = 0.0
    hang: HangVerdict | None = None
