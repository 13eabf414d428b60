"""The stage timer of one reading thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from time import perf_counter_ns, process_time_ns, thread_time_ns
from typing import Any, Protocol

from ronde.profile.shared_counters import (
    BYTES,
    CALLS,
    CPU,
    FIELDS,
    FLAGS,
    FUNCTION,
    INSIDE,
    SAMPLES,
    STAGES,
    THROUGH,
    WALL,
    Slot,
)

local = threading.local()

# A child of fork has one thread, whose account belongs to its parent.
os.register_at_fork(after_in_child=lambda: local.__dict__.clear())


class TimerOwner(Protocol):
    """The probe behind a timer, as hooks on library functions see it."""

    remove: frozenset[str]

    def place(self, account: StageTimer, stage: str, key: Any, kind: str) -> Any:
        """The call's position within its sample."""

    def earlier(self, account: StageTimer, place: Any, args: Any = ()) -> Any:
        """The result of an earlier call at this place, or ``MISSING``."""

    def learn(
        self, account: StageTimer, place: Any, value: Any, args: Any = (), final: bool = False
    ) -> None:
        """Keep a result for later calls."""

    def call(self, name: str, function: Any, args: Any, kwargs: Any) -> Any:
        """Run a named stage."""

    def note_file(self, path: str, size: int, cached: bool | None) -> None:
        """A file was opened."""


class StageTimer:
    """This thread's current stages, nested.

    Attributes:
        current: number of the innermost stage, -1 outside of all.
        size: samples that are being made together.
        turn: samples that this process had made before these.
        real: nothing is replayed now.
        replayed: stages of which results were given again since the batch began.
        in_library: a library's call is being counted.
    """

    # fmt: off
    __slots__ = (
        "clock", "counts", "cpu", "current", "decode", "files", "in_library", "last", "opened",
        "pending", "probe", "python", "read", "real", "replayed", "sample", "size", "slot", "stack",
        "token", "turn", "values", "wall",
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
        self.in_library = False
        self.stack: list[int] = []
        self.current = -1
        self.wall = self.cpu = 0
        self.sample = self.size = self.turn = self.files = 0
        self.last = [0] * STAGES  # the sample that each stage was last done for
        self.counts: dict[Any, int] = {}
        self.real = False
        self.replayed: set[str] = set()
        self.pending: list[Any] = []
        self.opened: list[tuple[Any, Any]] = []

    def begin(self, size: int, turn: int) -> None:
        """Start a sample, or several made together."""
        self.sample += 1
        self.size = size
        self.turn = turn
        if self.counts:
            self.counts.clear()

    def settle(self) -> None:
        """Finish the sample: kept results are final."""
        if self.pending:
            for kept in self.pending:
                kept.settle()
            self.pending.clear()
        if self.opened:
            self.opened.clear()

    def enter(self, number: int, how: int = FUNCTION) -> None:
        """Enter a stage; -1 counts for none."""
        wall, cpu = perf_counter_ns(), self.clock()
        values, current = self.values, self.current
        if current >= 0:
            at = current * FIELDS
            values[at + CPU] += cpu - self.cpu
            values[at + WALL] += wall - self.wall
            if number >= 0 and current != self.python:
                values[at + FLAGS] |= 1 << (INSIDE + number)
        self.stack.append(current)
        self.current = number
        self.wall, self.cpu = wall, cpu
        if number >= 0:
            at = number * FIELDS
            values[at + CALLS] += 1
            values[at + FLAGS] |= how
            if self.last[number] != self.sample:
                self.last[number] = self.sample
                values[at + SAMPLES] += self.size

    def leave(self) -> None:
        """Leave the innermost stage."""
        wall, cpu = perf_counter_ns(), self.clock()
        current = self.current
        if current >= 0:
            values = self.values
            at = current * FIELDS
            values[at + CPU] += cpu - self.cpu
            values[at + WALL] += wall - self.wall
        self.current = self.stack.pop()
        self.wall, self.cpu = wall, cpu

    def run(self, number: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function as part of a stage."""
        self.enter(number)
        try:
            return function(*args, **kwargs)
        finally:
            self.leave()

    def run_library(
        self, name: str, number: int, how: int, function: Any, args: Any, kwargs: Any
    ) -> Any:
        """Call a library's function as part of a stage, and count its share of ``read``."""
        if self.in_library or not name:
            return self.run_as(number, how, function, args, kwargs)
        self.in_library, start = True, perf_counter_ns()
        try:
            return self.run_as(number, how, function, args, kwargs)
        finally:
            self.in_library = False
            at = self.slot.stage(THROUGH + name) * FIELDS
            self.values[at + WALL] += perf_counter_ns() - start

    def run_as(self, number: int, how: int, function: Any, args: Any, kwargs: Any) -> Any:
        """Call a function as part of a stage, unless that is the current one."""
        if self.current == number:
            return function(*args, **kwargs)
        self.enter(number, how)
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
