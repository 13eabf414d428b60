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


class MeasuringCost:
    """Times what this process, and its device, spend on measuring steps, from the first one on;
    chooses how seldom that is to be.

    On CPUs, processor time counts: waiting for other ranks costs nothing.

    Attributes:
        clock: tells seconds.
        exchanges: seconds of exchanges so far.
        besides: seconds spent elsewhere on measurements of this step: in hooks of layers.
    """

    def __init__(self, me: World) -> None:
        self.exchanges: list[float] = []
        self.besides = 0.0
        self._steps: list[float] = []
        self._costs: list[float] = []
        self._begun = 0.0
        self._cuda = me.device.type == "cuda"
        self.clock = time.process_time if me.device.type == "cpu" else time.perf_counter
        self._events: list[list[Any]] = []
        self._seconds = 0.0

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Inside, it measures."""
        begun, ends = self.clock(), []
        if self._cuda:
            ends = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
            ends[0].record()
        yield
        if ends:
            ends[1].record()
            self._events.append(ends)
        self._seconds += self.clock() - begun

    def begin(self) -> None:
        """A step begins. Waits for the device."""
        device, now = 0.0, self.clock()
        if self._begun:
            if self._events:
                torch.cuda.synchronize()
                device = sum(a.elapsed_time(b) for a, b in self._events) / 1e3
            self._costs.append(max(self._seconds, device) + self.besides)
            self._steps.append(now - self._begun)
        self._begun = self.clock()
        self._seconds, self.besides, self._events = 0.0, 0.0, []

    def every(self, share: float, least: int, layers_every: int, writing: float) -> int:
        """The power of two, and at least ``least``, by which measuring costs a share of a step.

        Args:
            layers_every: measured steps for one in which layers are measured, as in the first half.
            writing: seconds to write what one step gives.
        """
        half = len(self._costs) // 2
        plain = median(self._costs[half:])
        layers = max(0.0, median(self._costs[half // 2 : half]) - plain)
        # The fastest exchange: others wait for a rank that is late, and would without it.
        exchange = min(self.exchanges, default=0.0)
        cost = max(plain + layers / layers_every + exchange + writing, 1e-9)
        step = max(median(self._steps[half:]) - plain - exchange, 1e-6)
        return max(least, 1 << max(0, math.ceil(math.log2(cost / share / step))))
