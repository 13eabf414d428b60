"""A process that is led over its pipes, and ends when its input does."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import IO

from ronde.world import ArgumentError

__all__ = ["Child"]


class Child:
    """A process with all three of its streams in pipes, in a session of its own: Ctrl-C comes to
    the launcher alone.

    Args:
        argv: its command.
        environment: its variables besides those of this process.

    Attributes:
        printed: the last lines of its standard error, without those that are empty.

    Raises:
        ArgumentError: it cannot be started.
    """

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self.printed: list[str] = []
        try:
            self._process = subprocess.Popen(
                argv,
                env={**os.environ, **(environment or {})},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise ArgumentError(f"{argv[0]} cannot be started: {error}") from None
        assert self._process.stdout is not None
        self.stdout: IO[bytes] = self._process.stdout
        self._errors = threading.Thread(target=self._read_errors, daemon=True)
        self._errors.start()

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.note(line)

    def note(self, line: bytes) -> None:
        """Keep a line that it has printed."""
        if text := line.decode(errors="replace").strip():
            self.printed = [*self.printed[-60:], text]  # mpirun's long words follow those of ssh

    def lines(self, seconds: float) -> Iterator[bytes]:
        """What it writes to its standard output; after so many seconds, it is killed."""
        timer = threading.Timer(max(0.0, seconds), self.kill)
        timer.start()
        try:
            while line := self.stdout.readline():
                yield line
        finally:
            timer.cancel()

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def write(self, data: bytes) -> None:
        """Write to its standard input; one that has ended takes nothing."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(data)
            self._process.stdin.flush()

    def wait(self) -> int:
        """Its exit status, once it has ended and all that it printed is there."""
        # not for ever: what it has started may hold the pipe open
        self._errors.join(2.0)
        return self._process.wait()

    def kill(self) -> None:
        """Kill it, and what it has started: mpirun starts others."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self, seconds: float) -> None:
        """End its input, and kill it where it has not ended after some seconds."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()
