"""The record of a run whose script is none of Ronde's: the launcher writes its start and end."""

from __future__ import annotations

import os
import platform
import socket

from ronde.watch import SCHEMA_VERSION, Ended, RunDir, Started, append_events, summarise
from ronde.world import VERSION


def record_start(
    directory: RunDir, framework: str, command: list[str], hosts: list[tuple[str, int]]
) -> None:
    """Write that workers start.

    Args:
        framework: what trains: ``TensorFlow``, ``Horovod``, or ``MPI``.
        command: the script, or ``-m`` and its module, and its arguments.
        hosts: name and number of workers of each; an empty name is this machine.
    """
    words = 2 if command[0] == "-m" else 1
    named = {host or socket.gethostname(): count for host, count in hosts}
    append_events(
        directory.record,
        Started(
            schema=SCHEMA_VERSION,
            run=directory.name,
            script=command[words - 1],
            workers=sum(named.values()),
            device="",
            host=next(iter(named)),
            hosts=named if len(named) > 1 else {},
            launcher=os.environ.get("RONDE_LAUNCHER", "ronde run"),
            model="",
            parameters=0,
            optimizer="",
            samples=0,
            steps_per_epoch=0,
            threads=0,
            plan={},
            framework=framework,
            versions={"python": platform.python_version(), "ronde": VERSION},
            arguments=command[words:],
        ),
    )


def record_end(directory: RunDir, seconds: float) -> None:
    """Write that the script has ended well, unless it recorded a training itself."""
    start = summarise(directory).start
    if start is None or not start.framework:
        return
    append_events(
        directory.record,
        Ended(
            status="completed",
            step=0,
            epoch=0,
            samples=0,
            samples_per_second=None,
            seconds=seconds,
        ),
    )
