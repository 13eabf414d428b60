"""The timeline: times of operations as a trace for ``chrome://tracing`` or Perfetto."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any, TextIO

__all__ = ["ChromeTrace"]


class ChromeTrace:
    """Writes begin and end of each operation's phases, one process of the trace a tensor.

    The file is complete JSON after :meth:`stop`; viewers also read it before.
    """

    def __init__(self) -> None:
        self._file: TextIO | None = None
        self._lock = threading.Lock()
        self._cycles = False
        self._numbers: dict[str, int] = {}
        self._open: dict[str, str] = {}
        self._start = 0.0

    def start(self, path: str, mark_cycles: bool = False) -> None:
        """Begin a file; one that is being written ends first."""
        self.stop()
        with self._lock:
            self._file = Path(path).open("w")  # noqa: SIM115 (closed by stop)
            self._cycles, self._numbers, self._open = mark_cycles, {}, {}
            self._start = time.monotonic()
            self._file.write("[")
            first = {"start_time_since_epoch_in_micros": time.time_ns() // 1000}
            self._write({"name": "start_time", "ph": "M", "args": first}, first=True)

    def stop(self) -> None:
        """End the file."""
        with self._lock:
            if self._file is not None:
                self._file.write("\n]\n")
                self._file.close()
                self._file = None

    def begin(self, tensor: str, phase: str) -> None:
        """A phase of a tensor's operation begins."""
        if self._file is None:
            return
        with self._lock:
            self._open[tensor] = phase
            self._write({"name": phase, "ph": "B", "pid": self._number(tensor)})

    def end(self, tensor: str) -> None:
        """The phase that began last ends."""
        if self._file is None:
            return
        with self._lock:
            if (phase := self._open.pop(tensor, None)) is not None:
                self._write({"name": phase, "ph": "E", "pid": self._number(tensor)})

    def mark_cycle(self) -> None:
        """The coordinator takes up new operations."""
        if self._file is not None and self._cycles:
            with self._lock:
                self._write({"name": "CYCLE_START", "ph": "i", "s": "g", "pid": 0})

    def _number(self, tensor: str) -> int:
        if tensor not in self._numbers:
            self._numbers[tensor] = number = len(self._numbers) + 1
            self._write(
                {"name": "process_name", "ph": "M", "pid": number, "args": {"name": tensor}}
            )
        return self._numbers[tensor]

    def _write(self, event: dict[str, Any], first: bool = False) -> None:
        if self._file is None:
            return
        event["ts"] = round((time.monotonic() - self._start) * 1e6)
        event.setdefault("tid", 0)
        self._file.write(("\n" if first else ",\n") + json.dumps(event))
        self._file.flush()  # it is read while the run goes on, and after one that died
