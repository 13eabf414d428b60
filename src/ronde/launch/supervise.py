"""Start, watch and end the worker processes of one node, one generation of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ronde.launch.console import Router
from ronde.watch.process_facts import catches
from ronde.world.whole_file import AGAIN

__all__ = ["Stopped", "WorkerFailure", "Workers"]

_LOOK_SECONDS = 0.02


class Process(Protocol):
    """What is needed of a process, whoever started it."""

    pid: int

    def poll(self) -> int | None:
        """Its exit status, negative after a signal; None while it runs."""


class Starter(Protocol):
    """Starts a worker faster than a new interpreter.

    Attributes:
        pid: its process, which outlives workers; 0 if there is none.
    """

    pid: int

    def start(
        self, environment: Mapping[str, str], output: str, over: Callable[[], object]
    ) -> Process | None:
        """A running worker; None if it cannot, or if ``over`` says that none is needed."""

    def close(self) -> None:
        """Start no more of them."""


class Stopped(Exception):
    """The workers are to end."""


@dataclass(frozen=True)
class WorkerFailure:
    """How a worker failed.

    Attributes:
        code: exit status, negative after a signal.
        error_file: where the worker may have said more.
        timestamp: when this was seen, in seconds since 1970.
        stopped: whether it did not run any more: somebody sent it SIGSTOP.
    """

    code: int
    error_file: Path
    timestamp: float
    stopped: bool = False


class Workers:
    """The workers of this node, from their start to their end.

    Args:
        command: the script and its arguments.
        environments: variables of each, in the order of their local ranks; ``RANK`` is in them.
        router: where they write to.
        watchful: whether a worker that somebody has stopped counts as failed.
        starter: what starts them; None, or where it cannot: a new interpreter each.
        over: whether they are to end.

    Raises:
        Stopped: they are to end before all have been started.
    """

    def __init__(
        self,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        router: Router,
        watchful: bool = False,
        starter: Starter | None = None,
        over: Callable[[], object] = bool,
    ) -> None:
        self._watchful, self._over = watchful, over
        self._error_files = [router.error_folder / f"error-{e['RANK']}.json" for e in environments]
        self._ranks = [int(e["RANK"]) for e in environments]
        self._processes: list[Process] = []
        # local rank -> looks at which it was stopped, and where it was then
        self._stopped: dict[int, tuple[int, str]] = {}
        self._looked = time.monotonic()
        self.failures: dict[int, WorkerFailure] = {}
        self._asked: float | None = None
        self._leaving: set[int] = set()  # those that were asked to leave
        self.leaves = False  # whether one has ended because it was asked to
        self.paused = False  # whether that was a pause
        try:
            for local, own in enumerate(environments):
                environment = {
                    **os.environ,
                    **own,
                    "TORCHELASTIC_ERROR_FILE": str(self._error_files[local]),
                }
                output = router.paths[local]
                process = starter.start(environment, output, over) if starter else None
                if over():
                    raise Stopped
                self._processes.append(process or _interpreter(command, environment, output))
        except BaseException:
            self.kill()
            raise

    def wait(
        self, enough: Callable[[dict[int, int | None]], bool] = lambda _: False
    ) -> dict[int, WorkerFailure]:
        """Wait until all have ended, or one has failed. Returns rank -> failure.

        Some that were asked to leave, and do not in a minute, are left for :meth:`kill`.

        Args:
            enough: whether the others need not end, from the exit status of each rank.

        Raises:
            Stopped: they are to end.
        """
        while not self._look():
            codes = {r: p.poll() for r, p in zip(self._ranks, self._processes, strict=True)}
            if enough(codes) or self.failures:
                break
            if self._over():
                raise Stopped
            if self._asked is not None and time.monotonic() > self._asked + 60.0:
                break
            time.sleep(_LOOK_SECONDS)
        return self.failures

    def _look(self) -> bool:
        """Look at each once; whether all have ended."""
        # A second look could find the end of one whose status nobody has judged.
        codes = [process.poll() for process in self._processes]
        for local, code in enumerate(codes):
            if code and self._ranks[local] not in self.failures:
                note = self._error_files[local].with_suffix(".again")
                if code == AGAIN and note.exists():
                    self.leaves = True
                    self.paused |= note.read_text() == "paused"
                else:
                    self._fail(local, code)
        if time.monotonic() - self._looked >= 0.15:
            self._looked = time.monotonic()
            if self._asked is not None:
                self.ask_to_leave()
            if self._watchful:
                self._look_for_stopped()
        return None not in codes

    def _look_for_stopped(self) -> None:
        for local, process in enumerate(self._processes):
            looks, where = self._stopped.get(local, (0, ""))
            now = _stopped_at(process.pid) if process.poll() is None else ""
            looks = (looks if now == where else 0) + 1 if now else 0
            self._stopped[local] = looks, now
            if looks >= 3:  # 0.45 s in which this process was awake itself
                self._fail(local, -signal.SIGSTOP, stopped=True)

    def _fail(self, local: int, code: int, stopped: bool = False) -> None:
        file = self._error_files[local]
        self.failures.setdefault(
            self._ranks[local], WorkerFailure(code, file, time.time(), stopped)
        )

    @property
    def running(self) -> bool:
        """Whether one has not ended."""
        return any(process.poll() is None for process in self._processes)

    @property
    def ended(self) -> list[int]:
        """The ranks that have ended with status 0."""
        pairs = zip(self._ranks, self._processes, strict=True)
        return [rank for rank, process in pairs if process.poll() == 0]

    @property
    def left(self) -> bool:
        """Whether one has ended with status 0, and its script has not: it called ``os._exit``."""
        files = zip(self._error_files, self._processes, strict=True)
        return any(p.poll() == 0 and not f.with_suffix(".ended").exists() for f, p in files)

    def send(self, number: int) -> None:
        """Send a signal to those that run, and to what they have started."""
        for process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, number)

    def ask_to_leave(self) -> bool:
        """Ask those that know how to save and leave, now or as soon as they do; whether one does
        now.
        """
        self._asked = self._asked or time.monotonic()
        for process in self._processes:
            running = process.poll() is None and process.pid not in self._leaving
            if running and catches(process.pid, signal.SIGUSR1):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGUSR1)
                    self._leaving.add(process.pid)
        return bool(self._leaving)

    def end(self, seconds: Callable[[], float]) -> None:
        """Kill those that have not ended after some seconds, which may become fewer meanwhile."""
        start = time.monotonic()
        while not self._look() and time.monotonic() < start + seconds():
            time.sleep(_LOOK_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End all at once. One in an uninterruptible wait of the kernel is left behind."""
        self.send(signal.SIGKILL)
        limit = time.monotonic() + 5.0
        while self.running and time.monotonic() < limit:
            time.sleep(0.005)


def _interpreter(
    command: Sequence[str], environment: Mapping[str, str], output: str
) -> subprocess.Popen[bytes]:
    script = str(Path(__file__).with_name("worker.py"))
    with open(output, "wb") as file:
        return subprocess.Popen(
            [sys.executable, "-u", script, *command],
            env=dict(environment),
            stdout=file,
            stderr=file,
            # a group of its own: what it starts is signalled with it
            start_new_session=True,
        )


def _stopped_at(pid: int) -> str:
    """The processor time that a process has had if a signal has stopped it, not a debugger; else
    empty. One that is slowed by stopping it again and again has more at each look.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return " ".join(fields[11:13]) if fields[0] == "T" else ""
    except (OSError, IndexError):
        return ""
