"""Queue of micro-batches to read: an epoch's, then without a pause the next one's."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ronde.data import Order
from ronde.loader.reader import Ask, ask_of
from ronde.plan.batch import Share
from ronde.world import RondeError

Shares = Callable[[], Iterator[Share]]


class RequestQueue:
    """The requests, in order, iterated once, possibly in another thread than the consumer.

    It references neither the feed nor the readers: loading processes end in order only outside
    reference cycles.

    Args:
        order: which sample stands where.
        shares: makes the shares of (the rest of) one epoch.
        before: asked for first.

    Attributes:
        asked: shares that were asked for and not yet handed out.
    """

    def __init__(self, order: Order, shares: Shares, before: Sequence[Ask] = ()) -> None:
        self.asked: deque[Share] = deque()
        self._order = order
        self._before = before
        self._shares = shares
        self._after: Shares | None = None
        self._lock = threading.Lock()
        self._entered = False

    def follow(self, after: Shares | None) -> None:
        """Start handing out an epoch, with the next epoch's shares if known."""
        with self._lock:
            self._after, self._entered = after, False

    def entered(self) -> bool:
        """Finish an epoch. Returns whether the next has been entered; if not, it never will be."""
        with self._lock:
            self._after = None
            return self._entered

    def leads_to(self, first: Share) -> bool:
        """Whether this share comes next."""
        return bool(self.asked) and self.asked[0] == first

    def hand_out(self, share: Share) -> None:
        """Mark a share as fully taken.

        Raises:
            RondeError: it is not the one that was asked for.
        """
        if self.asked.popleft() != share:
            raise RondeError(
                f"batches arrived in the wrong order: at epoch {share.epoch}, sample {share.start}"
            )

    def __iter__(self) -> Iterator[Ask]:
        yield from self._before
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
    """A request queue and the iterator of its results."""

    road: RequestQueue
    results: Iterator[Any]

    def end(self) -> None:
        """Take nothing more."""
        self.results.close()  # type: ignore[attr-defined]
