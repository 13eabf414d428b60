"""What measuring a training costs it, and how often that is worth it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch

from ronde.world import World

__all__ = ["MeasuringCost"]

_LAST = 10  # steps that count: the first ones are slow


class MeasuringCost:
    """Times what this process, and its device, spend on measuring a step; chooses how seldom that
    is to be.

    Attributes:
        exchanges: seconds of exchanges so far.
    """

    def __init__(self, me: World) -> None:
        self._steps: list[float] = []
        self._hooks: list[float] = []
        self.exchanges: list[float] = []
        self._costs: list[float] = []
        self._begun = 0.0
        self._cuda = me.device.type == "cuda"
        self._events: list[list[Any]] = []
        self._seconds = 0.0

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Inside, it measures."""
        begun, ends = time.perf_counter(), None
        if self._cuda:
            ends = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
            ends[0].record()
        yield
        if ends is not None:
            ends[1].record()
            self._events.append(ends)
        self._seconds += time.perf_counter() - begun

    def begin(self) -> None:
        """A step begins."""
        now = time.perf_counter()
        self._steps.append(now - self._begun)
        self._begun = now

    def note(self, hooks: float | None) -> None:
        """A measured step is over, but for its exchange. Waits for the device.

        Args:
            hooks: seconds in hooks of layers; None: it had none.
        """
        self._hooks += [] if hooks is None else [hooks]
        device = 0.0
        if self._events:
            torch.cuda.synchronize()
            device = sum(a.elapsed_time(b) for a, b in self._events) / 1e3
        self._costs.append(max(self._seconds, device))
        self._seconds, self._events = 0.0, []

    def every(self, share: float, least: int, layers_every: int) -> int:
        """The power of two, and at least ``least``, by which measuring costs a share of a step.

        Args:
            layers_every: measured steps for one in which layers are measured.
        """
        layers = median(self._hooks or [0.0]) / layers_every
        # The fastest exchange: others wait for a rank that is late, and would without it.
        cost = median(self._costs[-_LAST:]) + min(self.exchanges or [0.0]) + layers
        step = max(median(self._steps[-_LAST:]) - cost, 1e-6)
        return max(least, 1 << max(0, math.ceil(math.log2(cost / share / step))))
