"""The run directory, the only state on disk: plan.yaml, record.jsonl, logs/, checkpoints/."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from ronde.world import ArgumentError, CheckpointError

_RUNNING_SECONDS = 30.0  # a run or job that writes no end and nothing else for so long has stopped
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class RunDir:
    """Paths inside a run directory."""

    path: Path

    @property
    def name(self) -> str:
        """The run's name."""
        return self.path.name

    @property
    def plan(self) -> Path:
        """The plan, YAML."""
        return self.path / "plan.yaml"

    @property
    def record(self) -> Path:
        """The record, JSON lines."""
        return self.path / "record.jsonl"

    @property
    def logs(self) -> Path:
        """Each rank's output."""
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        """The checkpoints."""
        return self.path / "checkpoints"

    @property
    def origin_file(self) -> Path:
        """Which checkpoint of another run it began with, if it did."""
        return self.path / "origin"

    @property
    def origin(self) -> str:
        """``RUN@STEP`` of that checkpoint, or empty."""
        return self.origin_file.read_text().strip() if self.origin_file.is_file() else ""

    @property
    def in_use(self) -> bool:
        """Whether a run has left a record, checkpoints or a plan here."""
        return self.record.exists() or self.checkpoints.exists() or self.plan.exists()


def is_recent(written: float) -> bool:
    """Whether what was written then, in seconds since 1970, is a sign that a run is alive."""
    return time.time() - written < _RUNNING_SECONDS


def script_stem(script: str | None = None) -> str:
    """Derive a run name from a script's path or a module's name."""
    text = (
        script
        if script is not None
        else (sys.argv[0] if sys.argv and sys.argv[0] not in ("", "-c", "-m") else "run")
    )
    path = Path(text)
    stem = path.stem if path.suffix == ".py" else text.rpartition("/")[2]
    if (
        stem in ("train", "main", "__main__", "run")
        and path.parent.name
        and _NAME.fullmatch(path.parent.name)
    ):
        stem = path.parent.name  # examples/gpt/train.py is "gpt", not one more "train"
    cleaned = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-.")
    return cleaned or "run"


def check_name(name: str) -> None:
    """Refuse a name that is not a plain folder name."""
    if not _NAME.fullmatch(name):
        raise ArgumentError(
            f"{name!r} is not a name for a run: use letters, digits, '.', '_' and '-', "
            "starting with a letter or digit."
        )


def claim_run_dir(runs: Path, name: str | None, stem: str, resume: bool) -> RunDir:
    """Create a run's directory, or find it to resume.

    Args:
        runs: folder of all runs, made if missing.
        name: the run's name; None numbers one after ``stem``.
        resume: the run must exist, and goes on.

    Raises:
        CheckpointError: it exists and is not to be resumed, or does not exist and is.
    """
    if resume:
        if name is None:
            newest = latest(runs, stem)
            if newest is None:
                raise CheckpointError(
                    f"nothing to resume: no run of {stem!r} in {runs}. Name one with "
                    "--name, or run without --resume."
                )
            return newest
        check_name(name)
        if not (runs / name).is_dir():
            raise CheckpointError(
                f"nothing to resume: {runs / name} does not exist. 'ronde runs' lists the "
                "runs; without --resume it is a new one."
            )
        return RunDir(runs / name)
    try:
        runs.mkdir(parents=True, exist_ok=True)
        if name is not None:
            check_name(name)
            run = RunDir(runs / name)
            if run.path.exists() and (not run.path.is_dir() or any(run.path.iterdir())):
                raise CheckpointError(
                    f"the run directory {run.path} exists already. Continue it with "
                    "--resume, choose another --name, or remove it; "
                    "nothing was changed."
                )
            run.path.mkdir(exist_ok=True)
            return run
        number = 1
        while True:
            while (runs / f"{stem}-{number}.2").exists():  # of a run that has been removed
                number += 1
            try:
                (runs / f"{stem}-{number}").mkdir()
                return RunDir(runs / f"{stem}-{number}")
            except FileExistsError:
                # Taken, perhaps by another launch just now: mkdir decides.
                number += 1
    except OSError as error:
        raise CheckpointError(f"the run directory in {runs} cannot be made: {error}") from error


def latest(runs: Path, stem: str | None = None) -> RunDir | None:
    """The most recently written run, of one script or of any."""
    if not runs.is_dir():
        return None
    known = [RunDir(p) for p in runs.iterdir() if p.is_dir() and RunDir(p).in_use]
    if stem is not None:
        known = [r for r in known if re.fullmatch(re.escape(stem) + r"(-\d+)?", r.name)]
    return max(
        known,
        key=lambda r: (r.record if r.record.exists() else r.path).stat().st_mtime,
        default=None,
    )


_held: dict[tuple[int, str], int] = {}  # process, and path of the lock -> its open file


def lock_run(run: RunDir) -> None:
    """Hold a run directory until this process ends; the kernel lets go of it even after a kill.

    A record lock: children do not inherit it. A file system that has no locks is used without.

    Raises:
        CheckpointError: another process holds it, or nothing can be written there.
    """
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
        # Other errors: the file system has no locks.
        if error.errno in (errno.EACCES, errno.EAGAIN):
            holder = _holder(descriptor)
            os.close(descriptor)
            raise CheckpointError(
                f"the run {run.name} is being trained already{holder}: two trainings would write "
                f"to {run.path} at once. Wait for it, stop it, or start another run with --name."
            ) from None
    _held[key] = descriptor  # closing it would let go of the lock
    owner = {"process": os.getpid(), "host": socket.gethostname(), "since": time.time()}
    # For the message of who finds it locked; the lock itself is the kernel's.
    os.truncate(descriptor, 0)
    os.pwrite(descriptor, (json.dumps(owner) + "\n").encode(), 0)


def _holder(descriptor: int) -> str:
    try:
        holder = json.loads(os.pread(descriptor, 1000, 0))
        return f" (by process {int(holder['process'])} on {holder['host']})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""
