"""Route worker output: each rank's to its own log, rank 0's also to the terminal.

A worker writes standard output and error into one FIFO: their order is kept, and nothing written
before a kill is lost. One thread reads all FIFOs.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from ronde.launch import messages as m
from ronde.watch import MARK
from ronde.world.processes import memory_root, pid_space, temporary_prefix

__all__ = ["Output", "Router"]

_MARK = MARK.encode()


def _sweep() -> None:
    """Remove this user's folders left by launchers that were killed."""
    roots = (Path(tempfile.gettempdir()), memory_root())
    for folder in chain(*(root.glob(f"ronde-*-{pid_space()}-*") for root in roots)):
        pid = folder.name.split("-")[1]
        with contextlib.suppress(OSError):
            if (
                pid.isdigit()
                and not psutil.pid_exists(int(pid))
                and folder.stat().st_uid == os.getuid()
            ):
                shutil.rmtree(folder, ignore_errors=True)


class Output:
    """The launcher's end: each rank's output goes to its own log, rank 0's also to the terminal.

    Args:
        workers: how many.
        logs: folder for ``rank-K.log``, appended to; None keeps nothing.
        show: called with bytes that rank 0 printed.
        message: called with progress messages of rank 0.
        names: a prefix for each rank's lines; then the lines of all ranks are shown.
    """

    def __init__(
        self,
        workers: int,
        logs: Path | None,
        show: Callable[[bytes], None],
        message: Callable[[dict[str, Any]], None],
        names: list[str] | None = None,
    ) -> None:
        self._show, self._message, self._names = show, message, names
        self._logs = logs
        self._files: dict[int, BinaryIO] = {}
        self._lines = [b""] * workers
        self._lock = threading.Lock()  # nodes write at the same time
        if logs is not None:
            logs.mkdir(parents=True, exist_ok=True)

    def name(self, names: list[str]) -> None:
        """Change the prefixes of lines, where they have some: ranks are on other hosts now."""
        if self._names is not None:
            self._names = names + self._names[len(names) :]

    def out(self, rank: int, data: bytes) -> None:
        """Log bytes that a worker printed, and show them if they are to be seen."""
        self.log(rank, data)
        if self._names is not None:
            with self._lock:
                *lines, self._lines[rank] = (self._lines[rank] + data).split(b"\n")
                prefix = self._names[rank].encode()
                if lines:
                    self._show(b"".join(prefix + line + b"\n" for line in lines))
        elif rank == 0:
            self._show(data)

    def log(self, rank: int, data: bytes) -> None:
        """Append bytes to a worker's log."""
        if self._logs is None:
            return
        with contextlib.suppress(OSError, ValueError):  # a full disk must not stop the training
            if rank not in self._files:
                self._files[rank] = (self._logs / f"rank-{rank}.log").open("ab", buffering=0)
            self._files[rank].write(data)

    def message(self, rank: int, message: dict[str, Any]) -> None:
        """Hand over a progress message of rank 0; those of others are dropped."""
        if rank == 0 and "leave" not in message:
            self._message(message)

    def close(self) -> None:
        """Show unfinished lines and close the logs."""
        for rank, rest in enumerate(self._lines):
            if rest and self._names is not None:
                self._show(self._names[rank].encode() + rest + b"\n")
        for file in self._files.values():
            file.close()


class Router:
    """Reads the FIFOs of this node's ``workers`` until closed.

    Args:
        send: takes what they write. A message ``{"log": text}`` goes to the log only.
        first: global rank of the first of them.

    Attributes:
        printed: rank -> when it printed last, of ``time.monotonic()``.
    """

    def __init__(self, workers: int, send: Callable[[m.Message], object], first: int = 0) -> None:
        _sweep()
        self._folder = tempfile.TemporaryDirectory(prefix=temporary_prefix())
        self._send, self._first = send, first
        self._rest: dict[int, bytes] = {}
        self.printed: dict[int, float] = {}
        self._selector = selectors.DefaultSelector()
        self._fds: dict[int, int] = {}
        self.paths: dict[int, str] = {}
        for rank in range(workers):
            path = Path(self._folder.name) / f"rank-{rank}"
            os.mkfifo(path, 0o600)
            # Read-write, so that it never reaches end of file when a worker closes it.
            fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
            self._fds[rank] = fd
            self.paths[rank] = str(path)
            self._selector.register(fd, selectors.EVENT_READ, rank)
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._loop, name="ronde-console", daemon=True)
        self._thread.start()

    @property
    def error_folder(self) -> Path:
        """A private folder for the workers' error files, removed with the router."""
        return Path(self._folder.name)

    def say(self, text: str) -> None:
        """Show a line of the launcher's own, as if rank 0 had printed it."""
        self._send(m.Out(0, f"{text}\n".encode()))

    def log(self, rank: int, text: str) -> None:
        """Append text to a rank's log."""
        self._send(m.Log(rank, text.encode()))

    def _loop(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    return
                self._drain(key.data)

    def _drain(self, rank: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._fds[rank], 1 << 16):
                self._out(rank, self._messages(rank, data))

    def _out(self, rank: int, data: bytes) -> None:
        if data:
            self.printed[self._first + rank] = time.monotonic()
            self._send(m.Out(self._first + rank, data))

    def _messages(self, rank: int, data: bytes) -> bytes:
        """Handle the messages in a rank's output and return the rest."""
        data = self._rest.pop(rank, b"") + data
        plain = b""
        while (start := data.find(_MARK)) >= 0:
            end = data.find(b"\n", start)
            if end < 0:
                plain, self._rest[rank] = plain + data[:start], data[start:]
                return plain
            plain += data[:start]
            try:
                message = json.loads(data[start + 1 : end])
            except ValueError:
                message = None
            if not isinstance(message, dict):
                plain += data[start : end + 1]  # it was the script's own
            elif "log" in message:
                self._out(rank, plain)
                self._send(m.Log(self._first + rank, str(message["log"]).encode()))
                plain = b""
            elif self._first + rank == 0 or "leave" in message:
                self._send(m.Progress(self._first + rank, message))
            data = data[end + 1 :]
        return plain + data

    def close(self) -> None:
        """Read what is left and release everything."""
        os.write(self._wake_write, b"x")
        self._thread.join()
        for rank in self._fds:
            self._drain(rank)
        for rank, rest in self._rest.items():
            self._send(m.Log(self._first + rank, rest))
        for fd in (*self._fds.values(), self._wake_read, self._wake_write):
            os.close(fd)
        self._selector.close()
        self._folder.cleanup()


def to_terminal(data: bytes) -> None:
    """Write bytes to this process's own standard output."""
    try:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except (OSError, ValueError):
        pass  # nobody reads any more, or the disk is full; the log has it
