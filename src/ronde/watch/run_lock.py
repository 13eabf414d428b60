"""One process at a time writes to a run directory."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time

from ronde.watch.run_dir import RunDir
from ronde.world import CheckpointError

__all__ = ["lock_run"]

_held: dict[tuple[int, str], int] = {}  # process, and path of the lock -> its open file


def lock_run(run: RunDir) -> None:
    """Hold a run directory until this process ends; the kernel lets go of it even after a kill.

    A record lock: children do not inherit it. A file system that has no locks is used without.

    Raises:
        CheckpointError: another process holds it, or nothing can be written there.
    """
    if run.record.exists() and not run.record.is_file():
        raise CheckpointError(
            f"{run.record} is not a file, so the training cannot be recorded. Move it away."
        )
    path = run.path / ".lock"
    key = (os.getpid(), str(path.absolute()))
    if key in _held:
        return
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise CheckpointError(
            f"the run directory {run.path} cannot be written to ({error.strerror}). Make it "
            "writable, or choose another folder with --runs or RONDE_RUNS."
        ) from None
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            holder = _holder(descriptor)
            os.close(descriptor)
            raise CheckpointError(
                f"the run {run.name} is being trained already{holder}: two trainings would write "
                f"to {run.path} at once. Wait for it, stop it, or start another run with --name."
            ) from None
    _held[key] = descriptor  # closing it would let go of the lock
    told = {"process": os.getpid(), "host": socket.gethostname(), "since": time.time()}
    os.truncate(descriptor, 0)
    os.pwrite(descriptor, (json.dumps(told) + "\n").encode(), 0)


def _holder(descriptor: int) -> str:
    try:
        told = json.loads(os.pread(descriptor, 1000, 0))
        return f" (by process {int(told['process'])} on {told['host']})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""
