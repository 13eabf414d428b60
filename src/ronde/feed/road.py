"""Micro-batches on their way to those who read them: an epoch's, and behind them the first of the next, so that reading never begins anew."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ronde.feed.mark import Mark
from ronde.feed.order import Order
from ronde.feed.reader import Ask
from ronde.plan.batch import Share

__all__ = ["Line", "Road", "ask_of"]

Shares = Callable[[], Iterator[Share]]


def ask_of(order: Order, share: Share, low: int, high: int) -> Ask:
    """What is to be read for positions ``low`` to ``high`` of a share."""
    if low == high:
        # An empty share still yields a batch, so that a script's own lines run: the first sample of the global
        # batch, which is weighted with zero.
        low, high = share.start, share.start + 1
    return Ask(share.epoch, low, order.ids(share.epoch, low, high).tolist())


class Road:
    """What is asked for, in order. It is gone through once, maybe in another thread than that which takes what comes of it.

    It holds neither the feed nor what reads: loading processes are ended in order only where they are part of no cycle.

    Args:
        order: which sample stands where.
        shares: makes the shares of (the rest of) one epoch.
        look: makes a mark of the data set before the next epoch is entered, None where it cannot; None where none is needed.

    Attributes:
        asked: shares that were asked for and not yet handed out.
    """

    def __init__(self, order: Order, shares: Shares, look: Callable[[], Mark | None] | None = None) -> None:
        self.asked: deque[Share] = deque()
        self._order = order
        self._shares = shares
        self._look = look
        self._after: Shares | None = None
        self._lock = threading.Lock()
        self._over = False
        self._entered = False
        self._before: Mark | None = None

    def follow(self, after: Shares | None) -> None:
        """An epoch begins to be handed out: the shares of the next, if they are known."""
        with self._lock:
            self._after, self._entered, self._before = after, False, None

    @property
    def goes_on(self) -> bool:
        """Whether the next epoch has been entered, or will be."""
        with self._lock:
            return self._entered or (self._after is not None and not self._over)

    def leads_to(self, first: Share) -> bool:
        """Whether what comes next is this share."""
        if self.asked:
            return self.asked[0] == first
        with self._lock:
            return not self._entered and self._after is not None and next(self._after(), None) == first

    def unchanged(self) -> bool:
        """Whether the data set is what it was when the next epoch was entered."""
        return self._before is None or self._look is None or self._before == self._look()

    def __iter__(self) -> Iterator[Ask]:
        shares: Iterator[Share] = self._shares()
        while True:
            for share in shares:
                self.asked.append(share)
                for low, high in share.micro:
                    yield ask_of(self._order, share, low, high)
            with self._lock:
                if self._after is None:
                    self._over = True
                    return
            self._before = self._look() if self._look is not None else None
            with self._lock:
                if self._look is not None and self._before is None:  # nobody could tell whether it counts
                    self._over = True
                    return
                shares, self._after, self._entered = self._after(), None, True


@dataclass
class Line:
    """A road, and what comes along it."""

    road: Road
    results: Iterator[Any]

    def end(self) -> None:
        """Nothing more is taken of it."""
        self.results.close()  # type: ignore[attr-defined]
