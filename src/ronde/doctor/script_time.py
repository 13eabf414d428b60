"""Measure the time that a script takes between Ronde's calls in its loop over batches.

Hooks on all modules find the forward passes that the script makes itself: these, and what follows a
pass with gradients, are training, and are not counted. On a GPU, where a script that reads a value
waits for the device, no more is counted than the device is idle.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from ronde.run.loop import Loop
from ronde.world.tensors import tensors_in

__all__ = ["ScriptTime", "TimedLoop", "timing_event"]

_SKIPPED = 3  # steps at the start
_FEWEST = 5  # steps that say something


class _Forwards:
    """The forward passes of this thread between two of Ronde's calls."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._depth = 0
        self._start = 0.0
        self._seconds = 0.0
        self._trains_from: float | None = None
        self._hooks = (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave),
        )

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        if not self._depth:
            self._start = perf_counter()
        self._depth += 1

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        self._depth = max(0, self._depth - 1)
        if self._depth or self._trains_from is not None:
            return
        if any(t.requires_grad for t in tensors_in(output)):
            self._trains_from = self._start  # a loss and a backward pass follow
        elif next(module.parameters(), None) is not None:
            self._seconds += perf_counter() - self._start

    def end(self, now: float) -> tuple[float, bool]:
        """Remove the hooks. Seconds of training, and whether a pass had gradients."""
        for hook in self._hooks:
            hook.remove()
        trains = self._trains_from
        return self._seconds + (now - trains if trains is not None else 0.0), trains is not None


class ScriptTime:
    """The script's own time in one loop.

    Args:
        event: makes a timing event of the device; None on a CPU.

    Example:
        >>> clock = ScriptTime()
        >>> for _ in range(10):
        ...     clock.handed()  # run.batches() gives a batch
        ...     clock.enter()  # run.step() begins
        ...     clock.leave()  # and ends
        ...     clock.enter()  # the next batch is asked for
        >>> sorted(clock.cost())
        ['after_seconds', 'before_seconds', 'period_seconds', 'steps']
    """

    def __init__(self, event: Callable[[], Any] | None = None) -> None:
        self.event = event
        self.measurable = True  # False where the device has no timing events
        self._handed = 0
        self._period = 0.0
        self._each: tuple[list[float], list[float]] = ([], [])  # before each step, and after it
        self._pending = [0.0, 0.0]
        self._excluded = 0.0
        self._begun: float | None = None  # when the current batch was given
        self._since: float | None = None  # since when the script runs
        self._stepped = 0  # 1 after the step: an index
        self._blind = False  # the script makes forward passes that cannot be told apart
        self._forwards: _Forwards | None = None
        self._idle: list[float] = []
        self._events: list[Any] = []
        self._late: list[tuple[Any, Any, float]] = []
        self._own = False  # the script makes the forward pass
        self._asked = self._wait = 0.0

    # -- called in each step -----------------------------------------------------------

    def handed(self) -> None:
        """A batch is given to the script."""
        now = perf_counter()
        if self._stepped:
            self._commit(now)
        if self._begun is None:
            self._begun = now
        self._stepped = 0
        self._handed += 1
        if len(self._events) == 1:
            self._wait = now - self._asked
            self._mark()
        self._open(now)

    def enter(self, own: bool = False) -> None:
        """A call of Ronde begins. ``own``: the script has made the forward pass."""
        since, self._since = self._since, None
        if since is None:
            return
        now = self._asked = perf_counter()
        spent = now - since
        self._own |= own
        if self._forwards is not None:
            seconds, trains = self._forwards.end(now)
            self._forwards = None
            # a pass of its own may call no module
            spent = 0.0 if own and not trains else spent - seconds
        else:
            self._blind |= own
        self._pending[self._stepped] += spent
        if len(self._events) == 2 and not self._stepped:
            self._mark()

    def leave(self) -> None:
        """The step ends, and the script goes on."""
        if self._begun is None:
            return
        self._stepped = 1
        if self.event is not None:
            self._read_idle()
            self._mark()
        self._open(perf_counter())

    def _open(self, now: float) -> None:
        if self._forwards is None and not _compiles():
            self._forwards = _Forwards()
        self._since = now

    def _commit(self, now: float) -> None:
        """The time from one batch to the next is complete."""
        if self._handed > _SKIPPED and self._begun is not None:
            for each, seconds in zip(self._each, self._pending, strict=True):
                each.append(seconds)
            self._period += now - self._begun - self._excluded
        self._pending = [0.0, 0.0]
        self._excluded = 0.0
        self._begun = now

    # -- called now and then -----------------------------------------------------------

    def pause(self) -> tuple[float, bool]:
        """Ronde evaluates inside of the loop; give the result to :meth:`resume`."""
        running = self._since is not None
        self.enter()
        return perf_counter(), running

    def resume(self, paused: tuple[float, bool]) -> None:
        """The script goes on, if it ran."""
        if self._begun is not None:
            start, running = paused
            now = perf_counter()
            self._excluded += now - start
            if running:
                self._open(now)

    def end_reading(self) -> None:
        """The loop over batches has ended, or was left."""
        self._since = None
        if self._forwards is not None:
            self._forwards.end(0.0)
            self._forwards = None
        if self._stepped:
            self._commit(perf_counter())
        self._begun, self._stepped, self._events = None, 0, []
        self._pending = [0.0, 0.0]

    def _mark(self) -> None:
        assert self.event is not None
        event = self.event()
        event.record()
        self._events.append(event)

    def _read_idle(self) -> None:
        """Device seconds from the end of a step to the next, without the wait for input. They are
        read in later steps, when nothing waits for them.
        """
        events, self._events = self._events, []
        if len(events) >= 2:
            last = events[1 if self._own or len(events) < 3 else 2]
            self._late.append((events[0], last, self._wait))
        while self._late and self._late[0][1].query():
            first, last, wait = self._late.pop(0)
            self._idle.append(max(0.0, first.elapsed_time(last) / 1e3 - wait))

    def wanted_steps(self) -> int:
        """Steps in all that show how often a rare cost comes that was seen once; 0 if none was."""
        for each in self._each:
            found = peaks(each) if len(each) >= _FEWEST else []
            if len(found) == 1:  # in step k, and again in 2k, if not in 2k - 1
                return 2 * (found[0] + _SKIPPED + 1) + 1
        return 0

    def cost(self) -> dict[str, Any] | None:
        """Seconds of a step, on average: ``before_seconds`` from a batch to its step,
        ``after_seconds`` from there to the next batch, of ``period_seconds`` in all. None if it
        cannot be told.
        """
        steps = len(self._each[0])
        if steps < _FEWEST or self._period <= 0 or not self.measurable or self._blind:
            return None
        if self.event is not None and not self._idle:
            return None
        before, after = map(mean_over_periods, self._each)
        if self.event is not None and before + after > 0:
            share = min(1.0, mean_over_periods(self._idle) / (before + after))
            before, after = before * share, after * share
        return {
            "steps": steps,
            "before_seconds": before,
            "after_seconds": after,
            "period_seconds": self._period / steps,
        }


class TimedLoop(Loop):
    """The script's loop under its clock."""

    def __init__(self, clock: ScriptTime, *given: Any, **named: Any) -> None:
        self._clock = clock
        super().__init__(*given, **named)

    def batches(self) -> Iterator[Any]:
        """See :class:`Loop`."""
        self._clock.end_reading()  # an earlier loop may have been left
        return super().batches()

    def items(self, micros: list[Any]) -> Iterator[Any]:
        """See :class:`Loop`."""
        for given in super().items(micros):
            self._clock.handed()
            yield given
            self._clock.enter()


def peaks(values: Sequence[float]) -> list[int]:
    """Where a cost comes that most steps do not have; empty if it is little of the whole."""
    usual, most = sorted(values)[len(values) // 2], max(values)
    found = [i for i, v in enumerate(values) if v - usual > (most - usual) / 2]
    rare = sum(values[i] - usual for i in found)
    few = len(found) <= len(values) / 3
    return found if few and rare > 0.1 * sum(values) else []


def mean_over_periods(values: Sequence[float]) -> float:
    """The mean of a cost per step, over whole periods if it comes in every k-th step only.

    Example:
        >>> mean_over_periods([0.0, 0.0, 6.0] * 2 + [0.0])
        2.0
    """
    found = peaks(values)
    apart = {b - a for a, b in itertools.pairwise(found)}
    # one distance, and no room for another before the first or after the last
    if len(apart) != 1 or max(found[0], len(values) - 1 - found[-1]) >= max(apart):
        return sum(values) / len(values)
    whole = values[found[0] + 1 : found[-1] + 1]
    return sum(whole) / len(whole)


def _compiles() -> bool:
    """Whether torch.compile has run here: hooks on modules would make it compile again."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return bool(getattr(dynamo, "counters", {}).get("frames")) if dynamo is not None else False


def timing_event(device: torch.device) -> tuple[Callable[[], Any] | None, bool]:
    """What makes timing events on a device, and whether its time can be measured."""
    if device.type == "cpu":
        return None, True
    if device.type == "cuda" and torch.cuda.is_available():
        return partial(torch.cuda.Event, enable_timing=True), True
    return None, False
