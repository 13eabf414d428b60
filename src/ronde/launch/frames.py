"""Frames between the launcher and the agents on its hosts: JSON with bytes, over a pipe."""

from __future__ import annotations

import json
import os
import struct
import threading
from typing import IO, Any

__all__ = ["MARKER", "receive", "Sender"]

MARKER = b"\x1eronde agent\n"
"""What an agent writes first: whatever a login shell prints before it is not a frame."""

_SIZES = struct.Struct(">II")
_LARGEST = 1 << 28


class Sender:
    """Writes frames to a file descriptor, from any thread."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()

    def send(self, kind: str, data: bytes = b"", **values: Any) -> bool:
        """Write one frame; False if nobody reads any more.

        Args:
            kind: what it is.
            data: its bytes.
            values: JSON values.
        """
        head = json.dumps({"kind": kind, **values}).encode()
        rest = memoryview(_SIZES.pack(len(head), len(data)) + head + data)
        with self._lock:
            try:
                while rest:
                    rest = rest[os.write(self._descriptor, rest) :]
            except OSError:
                return False
        return True


def receive(stream: IO[bytes]) -> tuple[dict[str, Any], bytes] | None:
    """Read one frame; None at the end of the stream, or if what comes is no frame."""
    sizes = stream.read(_SIZES.size)
    if len(sizes) < _SIZES.size:
        return None
    head, data = _SIZES.unpack(sizes)
    if head > _LARGEST or data > _LARGEST:
        return None
    try:
        values = json.loads(stream.read(head))
    except ValueError:
        return None
    payload = stream.read(data)
    return (values, payload) if isinstance(values, dict) and len(payload) == data else None
