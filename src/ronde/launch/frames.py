"""Messages between the launcher and the agents on its hosts, over a pipe: orders as lines of JSON,
answers as frames of JSON and bytes.

Where something on the way takes bytes for text (Open MPI 5 drops NUL), each frame is a line of
Base64.
"""

from __future__ import annotations

import base64
import io
import json
import os
import select
import struct
import threading
import time
from typing import IO, Any

from ronde.launch.messages import Message

__all__ = ["MARKER", "Pipe", "Sender", "Silence", "from_line", "receive", "to_line"]

MARKER = b"\x1eronde agent\n"
"""What an agent writes first: whatever a login shell prints before it is not a frame."""

_SIZES = struct.Struct(">II")
_LARGEST = 1 << 28
_LONGEST_LOOK = 1.0


class Pipe(io.FileIO):
    """The reading end of a pipe; counts what comes, parts of frames too."""

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
            self._seconds += min(passed, _LONGEST_LOOK)
        return self._seconds


class Sender:
    """Writes frames to a file descriptor, from any thread.

    Args:
        text: as lines of Base64.

    Attributes:
        sent: when the last one was written, of ``time.monotonic()``.
    """

    def __init__(self, descriptor: int, text: bool = False) -> None:
        self._descriptor, self._text = descriptor, text
        self._lock = threading.Lock()
        self.sent = 0.0

    def send(self, message: Message) -> bool:
        """Write one frame; False if nobody reads any more."""
        head, data = json.dumps(message.values()).encode(), getattr(message, "data", b"")
        frame = _SIZES.pack(len(head), len(data)) + head + data
        rest = memoryview(base64.b64encode(frame) + b"\n" if self._text else frame)
        with self._lock:
            try:
                while rest:
                    rest = rest[os.write(self._descriptor, rest) :]
            except OSError:
                return False
            self.sent = time.monotonic()
        return True


def to_line(order: Message) -> bytes:
    """An order as a line."""
    values = order.values()
    if data := getattr(order, "data", b""):
        values["data"] = base64.b64encode(data).decode()
    return json.dumps(values, default=str).encode() + b"\n"


def from_line(line: bytes) -> Message:
    """The order that :func:`to_line` wrote."""
    return Message.of(json.loads(line), b"")


def receive(stream: IO[bytes]) -> Message | None:
    """Read one frame; None at the end of the stream, or if what comes is no frame."""
    first = stream.read(1)
    if first > b" ":  # of Base64: sizes begin with smaller bytes
        try:
            stream = io.BytesIO(base64.b64decode(first + stream.readline(), validate=False))
        except ValueError:
            return None
        first = b""
    sizes = first + stream.read(_SIZES.size - len(first))
    if len(sizes) < _SIZES.size:
        return None
    head, data = _SIZES.unpack(sizes)
    if head > _LARGEST or data > _LARGEST:
        return None
    try:
        values, payload = json.loads(stream.read(head)), stream.read(data)
        return Message.of(values, payload) if len(payload) == data else None
    except (LookupError, TypeError, ValueError):
        return None
