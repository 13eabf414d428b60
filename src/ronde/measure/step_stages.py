"""Time named stages that run within a training step, or replay their results."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from ronde.data.named_stages import Listener
from ronde.world.tensors import tensors_in


class StepStages:
    """Stages that the training process runs within a step, such as a copy to the device.

    They belong to the input, so the synthetic rate is measured without them: their results for a
    recycled batch are replayed. Stages called outside a step go to the listener before.
    """

    def __init__(self) -> None:
        self.before: Listener | None = None
        self.functions: set[str] = set()
        self.blocks: set[str] = set()
        self.wall: dict[str, float] = defaultdict(float)
        self.cpu: dict[str, float] = defaultdict(float)
        self._inside = False
        self._replay = False
        self._batch = 0
        self._calls: Counter[str] = Counter()
        self._results: dict[tuple[int, str, int], Any] = {}
        self._stack: list[list[Any]] = []  # name, start, CPU start, wall and CPU time of children
        self._owner = (os.getpid(), threading.get_ident())

    def _is_mine(self) -> bool:
        return self._inside and self._owner == (os.getpid(), threading.get_ident())

    def _next(self) -> Listener | None:
        return self.before if self._owner[0] == os.getpid() else None

    @contextlib.contextmanager
    def step(self, batch: int, *, replay: bool) -> Iterator[None]:
        """One step on the recycled batch of this number; ``replay``: without these stages."""
        self._batch, self._replay, self._inside = batch, replay, True
        self._calls.clear()
        try:
            yield
        finally:
            self._inside = False
            self._stack.clear()

    def clear(self) -> None:
        """Forget times, keep results."""
        self.wall.clear()
        self.cpu.clear()

    def call(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """See :class:`ronde.data.named_stages.Listener`."""
        if not self._is_mine():
            if (listener := self._next()) is not None:
                return listener.call(name, function, args, kwargs)
            return function(*args, **kwargs)
        self.functions.add(name)
        self._calls[name] += 1
        key = (self._batch, name, self._calls[name])
        if self._replay and key in self._results:
            return self._results[key]
        self._start(name)
        try:
            value = function(*args, **kwargs)
        finally:
            self.leave(name)
        # A tensor of an autograd graph belongs to its own step and cannot be replayed.
        if key not in self._results and not any(t.requires_grad for t in tensors_in(value)):
            self._results[key] = value
        return value

    def enter(self, name: str) -> None:
        """See :class:`ronde.data.named_stages.Listener`."""
        if self._is_mine():
            self.blocks.add(name)
            self._start(name)
        elif (listener := self._next()) is not None:
            listener.enter(name)

    def _start(self, name: str) -> None:
        self._stack.append([name, time.perf_counter(), time.thread_time(), 0.0, 0.0])

    def leave(self, name: str) -> None:
        """See :class:`ronde.data.named_stages.Listener`."""
        if not self._is_mine():
            if (listener := self._next()) is not None:
                listener.leave(name)
            return
        if not self._stack:
            return
        started, wall, cpu, inner_wall, inner_cpu = self._stack.pop()
        wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
        self.wall[started] += wall - inner_wall
        self.cpu[started] += cpu - inner_cpu
        if self._stack:
            self._stack[-1][3] += wall
            self._stack[-1][4] += cpu
