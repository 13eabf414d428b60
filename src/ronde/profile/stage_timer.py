"""The stage timer of one reading thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from time import perf_counter_ns, process_time_ns, thread_time_ns
from typing import Any, Protocol

from ronde.profile.shared_counters import BYTES, CALLS, CPU, FIELDS, SAMPLES, STAGES, WALL, Slot

local = threading.local()

# A child of fork has one thread, whose account belongs to its parent.
os.register_at_fork(after_in_child=lambda: local.__dict__.clear())


class TimerOwner(Protocol):
    """The probe behind a timer, as replaced functions see it."""

    def call(self, name: str, function: Any, args: Any, kwargs: Any) -> Any:
        """Run a named stage."""


class StageTimer:
    """This thread's current stages, nested.

    Attributes:
        current: number of the innermost stage, -1 outside of all.
        size: samples that are being made together.
    """

    # fmt: off
    __slots__ = (
        "clock", "cpu", "current", "decode", "last", "probe", "python", "read", "sample", "size",
        "slot", "stack", "token", "values", "wall",
    )
    # fmt: on

    def __init__(self, probe: TimerOwner, slot: Slot, token: object) -> None:
        self.probe = probe
        self.slot = slot
        self.token = token
        self.values = slot.values
        self.python, self.read, self.decode = map(slot.stage, ("python", "read", "decode"))
        # Where one thread reads, the process's time has the threads of Arrow, OpenCV or BLAS in it.
        alone = threading.current_thread() is threading.main_thread()
        self.clock = process_time_ns if alone else thread_time_ns
        self.stack: list[int] = []
        self.current = -1
        self.wall = self.cpu = 0
        self.sample = self.size = 0
        self.last = [0] * STAGES  # the sample that each stage was last done for

    def begin(self, size: int) -> None:
        """Start a sample, or several made together."""
        self.sample += 1
        self.size = size

    def _charge(self) -> None:
        """Give the time since the last change to the current stage."""
        wall, cpu = perf_counter_ns(), self.clock()
        if self.current >= 0:
            at = self.current * FIELDS
            self.values[at + CPU] += cpu - self.cpu
            self.values[at + WALL] += wall - self.wall
        self.wall, self.cpu = wall, cpu

    def enter(self, number: int) -> None:
        """Enter a stage."""
        self._charge()
        self.stack.append(self.current)
        self.current = number
        at = number * FIELDS
        self.values[at + CALLS] += 1
        if self.last[number] != self.sample:
            self.last[number] = self.sample
            self.values[at + SAMPLES] += self.size

    def leave(self) -> None:
        """Leave the innermost stage."""
        self._charge()
        self.current = self.stack.pop()

    def run(self, number: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function as part of a stage."""
        if self.current == number:
            return function(*args, **kwargs)
        self.enter(number)
        try:
            return function(*args, **kwargs)
        finally:
            self.leave()

    def count_bytes(self, n: int) -> None:
        """Count bytes read."""
        self.values[self.read * FIELDS + BYTES] += n


def current_timer() -> StageTimer | None:
    """This thread's timer while it makes a sample, else None."""
    account: StageTimer | None = getattr(local, "account", None)
    return account if account is not None and account.current >= 0 else None
