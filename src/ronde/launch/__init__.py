"""Start workers and watch them. Offers :func:`launch` (on this machine) and :class:`Outcome`.

TorchElastic's agent starts, watches and stops the processes. Ronde gives it a rendezvous on
loopback, routes the workers' output, and names the rank that failed first.
"""

from ronde.launch.agent import Job, Outcome
from ronde.launch.console import Output
from ronde.launch.engine import parse_hostfile, parse_hosts
from ronde.launch.facts import notes, share
from ronde.launch.fleet import Fleet, environment_for
from ronde.launch.local import check_workers, launch, resolve_workers
from ronde.launch.mpi import Mpi
from ronde.launch.slurm import Slurm, allocation
from ronde.launch.ssh import Ssh

__all__ = [
    "Fleet",
    "Job",
    "Mpi",
    "Slurm",
    "allocation",
    "Outcome",
    "Output",
    "Ssh",
    "check_workers",
    "environment_for",
    "launch",
    "notes",
    "parse_hostfile",
    "parse_hosts",
    "resolve_workers",
    "share",
]
