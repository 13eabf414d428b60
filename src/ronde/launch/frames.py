"""Messages between the launcher and the agents on its hosts: lines of JSON over a pipe, both ways.

Bytes are Base64 in them: what is on the way may take bytes for text (Open MPI 5 drops NUL).
"""

from __future__ import annotations

import base64
import io
import json
import os
import select
import threading
import time
from typing import Any

from ronde.launch.messages import Message

__all__ = ["MARKER", "Pipe", "Sender", "Silence", "from_line", "to_line"]

MARKER = b"\x1eronde agent\n"
"""What an agent writes first: whatever a login shell prints before it is no message."""


class Pipe(io.FileIO):
    """The reading end of a pipe; counts what comes, parts of lines too."""

    reads = 0

    def readinto(self, buffer: Any) -> int | None:
        """Read as ``FileIO`` does."""
        count = super().readinto(buffer)
        self.reads += 1
        return count


class Silence:
    """How long nothing has come through a pipe, in seconds for which this process was awake.

    A process that gets no CPU wakes late, and finds unread what came meanwhile: it must not take
    its own sleep for the other side's silence.
    """

    def __init__(self, pipe: Pipe) -> None:
        self._pipe, self._reads, self._seconds = pipe, pipe.reads, 0.0
        self.longest = 0.0
        """The longest silence that ended."""
        self._poll = select.poll()
        self._poll.register(pipe, select.POLLIN)
        self._looked = time.monotonic()

    def seconds(self) -> float:
        """Look at the pipe once; to be called every second, or more often."""
        now = time.monotonic()
        passed, self._looked = now - self._looked, now
        if self._poll.poll(0) or self._pipe.reads != self._reads:
            self.longest = max(self.longest, self._seconds)
            self._reads, self._seconds = self._pipe.reads, 0.0
        else:
            self._seconds += min(passed, 1.0)
        return self._seconds


class Sender:
    """Writes messages to a file descriptor, from any thread.

    Attributes:
        sent: when the last one was written, of ``time.monotonic()``.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self.sent = 0.0

    def send(self, message: Message) -> bool:
        """Write one; False if nobody reads any more."""
        rest = memoryview(to_line(message))
        with self._lock:
            try:
                while rest:
                    rest = rest[os.write(self._descriptor, rest) :]
            except OSError:
                return False
            self.sent = time.monotonic()
        return True


def to_line(message: Message) -> bytes:
    """A message as a line."""
    values = message.values()
    if "data" in values:
        values["data"] = base64.b64encode(values["data"]).decode()
    return json.dumps(values, default=str).encode() + b"\n"


def from_line(line: bytes) -> Message:
    """The message that :func:`to_line` wrote.

    Raises:
        LookupError, TypeError, ValueError: it is none.
    """
    return Message.of(json.loads(line))
