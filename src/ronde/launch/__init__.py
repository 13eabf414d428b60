"""Start workers and watch them. Offers :func:`run_here`, :class:`Fleet`, its engines, and
:func:`ronde.launch`.

Workers meet on loopback or on the interface that leads to the other hosts. Their output is routed,
the rank that failed first is named, and after a failure they may be started again.
"""

import sys
from types import ModuleType
from typing import Any

from ronde.launch.console import Output
from ronde.launch.container import Container, container
from ronde.launch.engine import Ssh, parse_hostfile, parse_hosts
from ronde.launch.facts import notes, share
from ronde.launch.fleet import Fleet, environment_for
from ronde.launch.job import Job, Outcome
from ronde.launch.kubernetes import pod
from ronde.launch.local import check_workers, resolve_workers, run_here
from ronde.launch.mpi import Mpi
from ronde.launch.ray_engine import Ray
from ronde.launch.reduction_servers import ReductionServers
from ronde.launch.restarts import Restarts
from ronde.launch.slurm import Slurm, allocation
from ronde.launch.spark_engine import Spark
from ronde.launch.tensorflow import parameter_servers

__all__ = [
    "Container",
    "container",
    "Fleet",
    "Job",
    "Mpi",
    "Slurm",
    "allocation",
    "Outcome",
    "Ray",
    "Output",
    "ReductionServers",
    "Restarts",
    "Spark",
    "Ssh",
    "check_workers",
    "environment_for",
    "notes",
    "parse_hostfile",
    "parameter_servers",
    "parse_hosts",
    "pod",
    "resolve_workers",
    "run_here",
    "share",
]


class _Launch(ModuleType):
    """The room under the name of what it is for: ``ronde.launch(function, args, workers=2)``."""

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        from ronde.launch.call import launch

        return launch(*args, **kwargs)


sys.modules[__name__].__class__ = _Launch
