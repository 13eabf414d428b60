"""Check that the machine is quiet enough to measure, by timing a fixed piece of work repeatedly."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil
import torch

from ronde.world import RondeError

TOLERANCE = 0.10
"""A reading counts as disturbed if it exceeds the best one by more than this share."""

OTHERS = 0.25
"""All readings count as disturbed if other processes take more than this share of all cores."""


class NoisyMachine(RondeError):
    """The measurement is unreliable because other work disturbed the machine.

    Attributes:
        level: relative disturbance, 0 to 1 and above.
    """

    def __init__(self, text: str, level: float) -> None:
        super().__init__(text)
        self.level = level


class Reference:
    """Times a fixed piece of work of about 4 ms on ``device``.

    ``cpu_time``: count only this thread's CPU time. With one thread, being preempted is no
    disturbance then.
    """

    def __init__(self, device: torch.device, cpu_time: bool = False) -> None:
        self._device = device
        self._now = time.thread_time if cpu_time else time.perf_counter
        # Made without a generator, so that no random state changes.
        self._a = torch.linspace(-1.0, 1.0, 192 * 192, device=device).view(192, 192)
        self._b = torch.empty_like(self._a)
        for _ in range(3):
            self._run(20)
        once = min(self._run(20) for _ in range(5)) / 20
        self._times = max(1, round(0.004 / max(once, 1e-7)))

    def _run(self, times: int) -> float:
        start = self._now()
        for _ in range(times):
            torch.mm(self._a, self._a, out=self._b)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._now() - start

    def __call__(self) -> float:
        """Seconds of one reading."""
        with torch.no_grad():
            return self._run(self._times)


def busy() -> tuple[float, float, float]:
    """CPU seconds since boot: of all processes (and of the host), of this process, and in all."""
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    own = os.times()
    return total - idle, own.user + own.system, total


@dataclass
class Gate:
    """Says which rounds of a measurement were disturbed, and whether it can be trusted.

    A round counts only if the fixed work next to it was about as fast as its best.

    Args:
        read: takes a reading of fixed work, in seconds: a :class:`Reference`.
        watch_others: whether other processes count too. This detects a machine that is busy from
            beginning to end.

    Attributes:
        readings: all, in order.
        rounds: those taken with a round.
        others: share of all cores' time that other processes took.
    """

    read: Callable[[], float]
    watch_others: bool = True
    readings: list[float] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)
    others: float = 0.0
    _began: tuple[float, float, float] = (0.0, 0.0, 0.0)
    _first: int = 0
    _last: int = 0

    def begin(self, readings: int = 12) -> None:
        """Take readings before the first round."""
        self._began = busy()
        self.readings += [self.read() for _ in range(readings)]
        self._first = len(self.readings)

    def round(self) -> None:
        """Take the reading of a round."""
        self.rounds.append(self.read())
        self.readings.append(self.rounds[-1])

    def end(self, readings: int = 12) -> None:
        """Take readings after the last round."""
        self.readings += [self.read() for _ in range(readings)]
        self._last = readings
        worked, own, total = (now - then for now, then in zip(busy(), self._began, strict=True))
        self.others = max(0.0, worked - own) / total if self.watch_others and total > 0 else 0.0

    @property
    def best(self) -> float:
        """The fastest reading."""
        return min(self.readings)

    def good(self) -> list[bool]:
        """For each round, whether it was undisturbed, as far as is known now."""
        limit = self.best * (1 + TOLERANCE)
        return [reading <= limit for reading in self.rounds]

    @property
    def drift(self) -> float:
        """Relative change of the best reading, from before to after."""
        if not self._first or not self._last:
            return 0.0
        return abs(min(self.readings[-self._last :]) / min(self.readings[: self._first]) - 1)

    @property
    def share(self) -> float:
        """Share of readings that were disturbed."""
        limit = self.best * (1 + TOLERANCE)
        return sum(r > limit for r in self.readings) / max(1, len(self.readings))

    def level(self, repeats: float = 0.0) -> float:
        """Relative disturbance of the undisturbed rounds: of their readings, or ``repeats``, the
        difference between two halves of the measurements.
        """
        kept = [r for r, good in zip(self.rounds, self.good(), strict=True) if good]
        return max(repeats, statistics.median(kept) / self.best - 1 if kept else self.share)

    def refuses(self, repeats: float, too_few: bool) -> bool:
        """Whether the measurement cannot be trusted."""
        return too_few or self.level(repeats) > TOLERANCE or self.others > OTHERS

    def error(self, what: str, repeats: float = 0.0, too_few: bool = False) -> NoisyMachine:
        """The error that says why ``what`` cannot be trusted."""
        reasons = ["hardly any round was undisturbed"] if too_few else []
        if self.others > OTHERS:
            reasons.append(f"other processes took {self.others:.0%} of the cores' time")
        if repeats > TOLERANCE:
            reasons.append(f"two halves of the measurements differ by {repeats:.0%}")
        middle, worst = statistics.median(self.readings) / self.best, max(self.readings) / self.best
        reasons.append(
            f"fixed work of {self.best * 1e3:.1f} ms took {middle - 1:+.0%} in the median and "
            f"{worst - 1:+.0%} at worst, and its best moved by {self.drift:.0%}"
        )
        level = max(
            self.level(repeats),
            self.share if too_few else 0.0,
            self.others if self.others > OTHERS else 0.0,
        )
        return NoisyMachine(
            f"the machine is too busy to trust {what}: {'; '.join(reasons)}. Stop other programs "
            "and try again.",
            level,
        )
