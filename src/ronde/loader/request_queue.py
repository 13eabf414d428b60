"""Micro-batches on their way to those who read them: an epoch's, and behind them the first of the
next, so that reading never begins anew.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ronde.data import Order
from ronde.loader.reader import Ask
from ronde.plan.batch import Share
from ronde.world import RondeError

__all__ = ["RequestLine", "RequestQueue", "ask_of"]

Shares = Callable[[], Iterator[Share]]


def ask_of(order: Order, share: Share, low: int, high: int) -> Ask:
    """What is to be read for positions ``low`` to ``high`` of a share."""
    upto = share.stop if (low, high) == share.micro[-1] else 0
    if low == high:
        # An empty share still yields a batch, so that a script's own lines run: the first sample of
        # the global batch, which is weighted with zero.
        low, high = share.start, share.start + 1
    return Ask(share.epoch, low, order.ids(share.epoch, low, high).tolist(), upto)


class RequestQueue:
    """What is asked for, in order. It is gone through once, maybe in another thread than that which
    takes what comes of it.

    It holds neither the feed nor what reads: loading processes are ended in order only where they
    are part of no cycle.

    Args:
        order: which sample stands where.
        shares: makes the shares of (the rest of) one epoch.

    Attributes:
        asked: shares that were asked for and not yet handed out.
    """

    def __init__(self, order: Order, shares: Shares) -> None:
        self.asked: deque[Share] = deque()
        self._order = order
        self._shares = shares
        self._after: Shares | None = None
        self._lock = threading.Lock()
        self._entered = False

    def follow(self, after: Shares | None) -> None:
        """An epoch begins to be handed out: the shares of the next, if they are known."""
        with self._lock:
            self._after, self._entered = after, False

    def entered(self) -> bool:
        """An epoch was handed out. Whether the next one has been entered; if not, it will not
        be.
        """
        with self._lock:
            self._after = None
            return self._entered

    def leads_to(self, first: Share) -> bool:
        """Whether what comes next is this share."""
        return bool(self.asked) and self.asked[0] == first

    def hand_out(self, share: Share) -> None:
        """The share that everything was taken of.

        Raises:
            RondeError: it is not the one that was asked for.
        """
        if self.asked.popleft() != share:
            raise RondeError(
                "batches came in another order than they were asked for: at epoch "
                f"{share.epoch}, sample {share.start}"
            )

    def __iter__(self) -> Iterator[Ask]:
        shares: Iterator[Share] = self._shares()
        while True:
            for share in shares:
                self.asked.append(share)
                for low, high in share.micro:
                    yield ask_of(self._order, share, low, high)
            with self._lock:
                if self._after is None:
                    return
                shares, self._after, self._entered = self._after(), None, True


@dataclass
class RequestLine:
    """A road, and what comes along it."""

    road: RequestQueue
    results: Iterator[Any]

    def end(self) -> None:
        """Nothing more is taken of it."""
        self.results.close()  # type: ignore[attr-defined]
