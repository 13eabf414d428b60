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
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from ronde.watch import MARK

__all__ = ["Router"]

_MARK = MARK.encode()


def _sweep() -> None:
    """Remove this user's folders left by launchers that were killed."""
    for folder in Path(tempfile.gettempdir()).glob("ronde-*-*"):
        pid = folder.name.split("-")[1]
        with contextlib.suppress(OSError):
            if (
                pid.isdigit()
                and not psutil.pid_exists(int(pid))
                and folder.stat().st_uid == os.getuid()
            ):
                shutil.rmtree(folder, ignore_errors=True)


class Router:
    """Reads the FIFOs of ``workers`` ranks until closed.

    Args:
        logs: folder for ``rank-K.log``, appended to; None keeps nothing.
        show: called with bytes that rank 0 printed.
        message: called with each progress message of rank 0. A message ``{"log": text}`` of any
            rank goes to its log only.
    """

    def __init__(
        self,
        workers: int,
        logs: Path | None,
        show: Callable[[bytes], None],
        message: Callable[[dict[str, Any]], None],
    ) -> None:
        _sweep()
        self._folder = tempfile.TemporaryDirectory(prefix=f"ronde-{os.getpid()}-")
        self._show = show
        self._message = message
        self._rest: dict[int, bytes] = {}
        self._selector = selectors.DefaultSelector()
        self._logs: dict[int, BinaryIO] = {}
        self._fds: dict[int, int] = {}
        self.paths: dict[int, str] = {}
        if logs is not None:
            logs.mkdir(parents=True, exist_ok=True)
        for rank in range(workers):
            path = Path(self._folder.name) / f"rank-{rank}"
            os.mkfifo(path, 0o600)
            # Read-write, so that it never reaches end of file when a worker closes it.
            fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
            self._fds[rank] = fd
            self.paths[rank] = str(path)
            self._selector.register(fd, selectors.EVENT_READ, rank)
            if logs is not None:
                self._logs[rank] = (logs / f"rank-{rank}.log").open("ab", buffering=0)
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._loop, name="ronde-console", daemon=True)
        self._thread.start()

    @property
    def error_folder(self) -> Path:
        """A private folder for the workers' error files, removed with the router."""
        return Path(self._folder.name)

    def _loop(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    return
                self._drain(key.data)

    def _drain(self, rank: int) -> None:
        while True:
            try:
                data = os.read(self._fds[rank], 1 << 16)
            except BlockingIOError:
                return
            if not data:
                return
            self._take(rank, data)

    def _take(self, rank: int, data: bytes) -> None:
        data = self._messages(rank, data)
        self._log(rank, data)
        if data and rank == 0:
            self._show(data)

    def _log(self, rank: int, data: bytes) -> None:
        if data and rank in self._logs:
            with contextlib.suppress(OSError):  # a full disk must not stop the training
                self._logs[rank].write(data)

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
                self._log(rank, plain + str(message["log"]).encode())
                if rank == 0 and plain:
                    self._show(plain)
                plain = b""
            elif rank == 0:
                self._message(message)
            data = data[end + 1 :]
        return plain + data

    def close(self) -> None:
        """Read what is left and release everything."""
        os.write(self._wake_write, b"x")
        self._thread.join()
        for rank in self._fds:
            self._drain(rank)
        for rank, rest in self._rest.items():
            self._log(rank, rest)
        for fd in (*self._fds.values(), self._wake_read, self._wake_write):
            os.close(fd)
        for log in self._logs.values():
            log.close()
        self._selector.close()
        self._folder.cleanup()


def to_terminal(data: bytes) -> None:
    """Write bytes to this process's own standard output."""
    try:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except (OSError, ValueError):
        pass  # nobody reads any more, or the disk is full; the log has it
