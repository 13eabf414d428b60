"""Start workers and watch them. Offers :func:`launch` (on this machine) and :class:`Outcome`.

TorchElastic's agent starts, watches and stops the processes. Ronde gives it a rendezvous on
loopback, routes the workers' output, and names the rank that failed first.
"""

from ronde.launch.local import Job, Outcome, check_workers, launch, resolve_workers

__all__ = ["Job", "Outcome", "check_workers", "launch", "resolve_workers"]
