"""Receive batches from loading processes in a thread, so that training waits for neither transfer
nor release.

A batch arrives as a shared-memory handle that must be requested, and releasing megabytes takes
milliseconds. Both happen here, one batch ahead, while the training computes. GPU batches use
torch's own thread, which also pins them.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

_PATIENCE_SECONDS = 2.0

_Work = queue.SimpleQueue["Reading | None"]


class Reading:
    """One pass over an iterator from its second batch on: the next is fetched while one is used."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._found: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._room = threading.Semaphore(1)
        self._idle = threading.Event()
        self._over = False
        self._old: deque[Any] = deque()
        self._held: Any = None

    def go(self) -> None:
        """Run in the thread."""
        try:
            while True:
                self._room.acquire()
                self._old.clear()  # what the training has let go of
                if self._over:
                    return
                try:
                    self._found.put((next(self._iterator), None))
                except BaseException as error:
                    self._found.put((None, error))
                    return
        finally:
            self._old.clear()
            self._idle.set()

    def take(self) -> Any:
        """The next batch, in iterator order.

        Raises:
            BaseException: what the iterator raised, StopIteration too.
        """
        batch, error = self._found.get()
        if error is not None:
            try:
                raise error
            finally:
                # Its traceback leads to this frame: with the name in it the iterator would be part
                # of a cycle, and whose turn it is when that is collected would wait 5 s for each
                # loading process.
                del error
        # Who asks for this one still holds the one before: that before it is nobody's.
        if self._held is not None:
            self._old.append(self._held)
        self._held = batch
        self._room.release()
        return batch

    def close(self, seconds: float) -> bool:
        """Stop. Returns whether the iterator is idle within so many seconds."""
        self._over, self._held = True, None
        self._room.release()
        return self._idle.wait(seconds)


def _receive(work: _Work) -> None:
    while True:
        reading = work.get()
        if reading is None:
            return
        reading.go()
        del reading


def _end(work: _Work, thread: threading.Thread, last: list[weakref.ref[Reading]]) -> None:
    for reading in last:
        if (one := reading()) is not None:  # a training that was left between two epochs
            one.close(0.0)
    work.put(None)
    if thread is not threading.current_thread() and thread.is_alive():
        thread.join(_PATIENCE_SECONDS)


class Receiver:
    """A thread for all epochs: starting or ending threads around a fork may hang the child."""

    def __init__(self) -> None:
        self._process = -1
        self._finalizer: weakref.finalize[Any, Any] | None = None

    def read(self, iterator: Iterator[Any]) -> Reading:
        """Start receiving from an iterator, which nothing else may use meanwhile."""
        # a forked child has the queue, not the thread
        if self._finalizer is None or self._process != os.getpid():
            if self._finalizer is not None:
                self._finalizer.detach()
            self._work: _Work = queue.SimpleQueue()
            thread = threading.Thread(
                target=_receive, args=(self._work,), name="ronde-receive", daemon=True
            )
            thread.start()
            self._process = os.getpid()
            self._last: list[weakref.ref[Reading]] = []
            self._finalizer = weakref.finalize(self, _end, self._work, thread, self._last)
        reading = Reading(iterator)
        self._last[:] = [weakref.ref(reading)]
        self._work.put(reading)
        return reading

    def leave(self) -> None:
        """Abandon a stuck thread; another takes its place."""
        if self._finalizer is not None:
            self._finalizer.detach()
            self._work.put(None)
        self._finalizer = None

    def close(self) -> None:
        """End the thread; it restarts on demand."""
        if self._finalizer is not None and self._process == os.getpid():
            self._finalizer()
        self._finalizer = None
