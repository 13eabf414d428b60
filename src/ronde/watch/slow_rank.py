"""Which rank the others wait for in every step: what each has waited in exchanges says it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from ronde.watch.hang_judge import HangVerdict, RankView
from ronde.world.identity import ranks_text
from ronde.world.units import format_seconds

__all__ = ["STEPS", "SlowRanks", "slowest"]

STEPS = 10  # of a window, at least
_PART = 0.2  # of a step that the others wait
_WINDOWS = 2  # in a row: a machine has other things to do now and then


class SlowRanks:
    """Compares ranks over windows of time. All take the same steps, and who waits least in
    their exchanges is who the others wait for: no clock of another rank is needed.

    Args:
        size: number of ranks.
        seconds: of a window, at least.

    Example::

        slow = SlowRanks(workers, 10.0)
        verdict = slow.look(time.monotonic(), views)  # each second
    """

    def __init__(self, size: int, seconds: float) -> None:
        self._size, self._seconds = size, seconds
        self._start: tuple[float, dict[int, RankView]] | None = None
        self._before: tuple[int | None, int] = None, 0  # the rank of the last windows, how many
        self._told: set[int] = set()

    def look(self, now: float, views: Sequence[RankView]) -> HangVerdict | None:
        """A rank that was slow in two windows in a row, once; None otherwise.

        Args:
            now: of ``time.monotonic()``.
            views: the ranks that are known.
        """
        ranks = {v.rank: v for v in views if v.waited_seconds >= 0 and not v.cuda}
        if len(ranks) < max(self._size, 2):
            return None
        if self._start is None or any(ranks[r].steps < v.steps for r, v in self._start[1].items()):
            self._start = now, ranks
            return None
        begun, first = self._start
        seconds, steps = now - begun, min(v.steps - first[r].steps for r, v in ranks.items())
        if seconds < self._seconds or steps < STEPS:
            return None
        self._start = now, ranks
        waited = {
            r: (v.waited_seconds - first[r].waited_seconds) / max(v.steps - first[r].steps, 1)
            for r, v in ranks.items()
        }
        slow, lost = slowest(waited)
        late = slow if lost >= _PART * seconds / steps else None
        self._before = late, self._before[1] + 1 if late == self._before[0] else 1
        if late is None or self._before[1] < _WINDOWS or late in self._told:
            return None
        self._told.add(late)
        view, others = ranks[late], sorted(ranks.keys() - {late})
        why = "".join(f"; {each}" for each in view.reasons)
        on = f" on {view.host}" if view.host else ""
        verb = "waits" if len(others) == 1 else "wait"
        return HangVerdict(
            f"Rank {late}{on} is slow: {ranks_text(others)} {verb} for it {format_seconds(lost)} "
            f"of each step of {format_seconds(seconds / steps)}, up to step {view.step}{why}.",
            late,
            view.step,
            waiting=tuple(others),
            slow=True,
        )


def slowest(waited: Mapping[int, float]) -> tuple[int, float]:
    """The rank that has waited least, and for how long the others wait for it in the median.

    Example:
        >>> slowest({0: 0.25, 1: 0.0, 2: 0.25})
        (1, 0.25)
    """
    slow = min(waited, key=lambda r: (waited[r], r))
    return slow, statistics.median(w for r, w in waited.items() if r != slow) - waited[slow]
