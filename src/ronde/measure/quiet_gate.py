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

__all__ = ["OTHERS", "TOLERANCE", "Gate", "NoisyMachine", "Reference", "busy"]

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
    """A fixed piece of work of some milliseconds, and how long it takes just now.

    Args:
        device: where.
        seconds: about how long one reading lasts.
        calm: whether only the time counts that this thread worked: with one thread, being preempted
            is no disturbance.
    """

    def __init__(self, device: torch.device, seconds: float = 0.004, calm: bool = False) -> None:
        self._device = device
        self._now = time.thread_time if calm else time.perf_counter
        # Tensors of its own, without a generator: nobody's randomness is touched.
        self._a = torch.linspace(-1.0, 1.0, 192 * 192, device=device).view(192, 192)
        self._b = torch.empty_like(self._a)
        self._times = 1
        for _ in range(3):
            self._run(20)
        once = min(self._run(20) for _ in range(5)) / 20
        self._times = max(1, round(seconds / max(once, 1e-7)))

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
    """Seconds since boot that all cores have worked for anybody (and been taken by a host), this
    process has, and there were.
    """
    found = psutil.cpu_times()
    idle = found.idle + getattr(found, "iowait", 0.0)
    total = sum(found) - getattr(found, "guest", 0.0) - getattr(found, "guest_nice", 0.0)
    own = os.times()
    return total - idle, own.user + own.system, total


@dataclass
class Gate:
    """Says which rounds of measuring were disturbed, and whether the whole can be relied on.

    A round counts only if the fixed work next to it was about as fast as it has ever been: before,
    after and in between.

    Args:
        read: takes one reading of fixed work, in seconds: a :class:`Reference`.
        watch_others: whether the work of other processes counts too. It is what shows that a
            machine was busy from beginning to end.

    Attributes:
        readings: all, in order.
        rounds: of them, those next to a round.
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
        """Take the readings that come before."""
        self._began = busy()
        self.readings += [self.read() for _ in range(readings)]
        self._first = len(self.readings)

    def round(self) -> None:
        """Take the reading that goes with a round."""
        self.rounds.append(self.read())
        self.readings.append(self.rounds[-1])

    def end(self, readings: int = 12) -> None:
        """Take the readings that come after."""
        self.readings += [self.read() for _ in range(readings)]
        self._last = readings
        worked, own, total = (now - then for now, then in zip(busy(), self._began, strict=True))
        self.others = max(0.0, worked - own) / total if self.watch_others and total > 0 else 0.0

    @property
    def best(self) -> float:
        """Least reading."""
        return min(self.readings)

    def good(self) -> list[bool]:
        """Of each round, whether it was undisturbed, as far as is known by now."""
        limit = self.best * (1 + TOLERANCE)
        return [reading <= limit for reading in self.rounds]

    @property
    def drift(self) -> float:
        """How far the best reading moved from before to after, relatively."""
        if not self._first or not self._last:
            return 0.0
        return abs(min(self.readings[-self._last :]) / min(self.readings[: self._first]) - 1)

    @property
    def share(self) -> float:
        """Share of all readings that were disturbed."""
        return sum(r > self.best * (1 + TOLERANCE) for r in self.readings) / max(
            1, len(self.readings)
        )

    def level(self, repeats: float = 0.0) -> float:
        """Relative disturbance of what was kept: of the fixed work next to it, or between two
        halves of it where that is more.

        Args:
            repeats: relative distance between two halves of the same measurements.
        """
        kept = [r for r, good in zip(self.rounds, self.good(), strict=True) if good]
        return max(repeats, statistics.median(kept) / self.best - 1 if kept else self.share)

    def refuses(self, repeats: float, too_few: bool) -> bool:
        """Whether the whole cannot be relied on."""
        return too_few or self.level(repeats) > TOLERANCE or self.others > OTHERS

    def sentence(self) -> str:
        """What was seen."""
        told = (
            f"fixed work of {self.best * 1e3:.1f} ms took "
            f"{statistics.median(self.readings) / self.best - 1:+.0%} in the middle and "
            f"{max(self.readings) / self.best - 1:+.0%} at worst, {self.share:.0%} of "
            f"{len(self.readings)} readings were more than "
            f"{TOLERANCE:.0%} slow, its best moved by {self.drift:.0%} from before to after"
        )
        return told + (
            f", other processes took {self.others:.0%} of the cores' time"
            if self.watch_others
            else ""
        )

    def error(self, what: str, repeats: float = 0.0, too_few: bool = False) -> NoisyMachine:
        """Says why ``what`` cannot be relied on, and how disturbed it was."""
        why = "hardly a moment was undisturbed: " if too_few else ""
        again = (
            f"; the same measurement, done twice, differs by {repeats:.0%}"
            if repeats > TOLERANCE
            else ""
        )
        return NoisyMachine(
            f"the machine is too busy for {what} to be relied on "
            f"({why}{self.sentence()}{again}). Stop what else runs on it, and try again.",
            max(
                self.level(repeats),
                self.share if too_few else 0.0,
                self.others if self.others > OTHERS else 0.0,
            ),
        )
