"""Gradients of one optimizer on a process group of its own, without asking the coordinator.

All ranks have agreed on the buckets, so each sends them in one order. A rank that waits longer than
usual announces that it does: the coordinator then names who is missing. The first bucket carries a
count of the ranks that step, by which ranks that joined learn when to end.
"""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist

from ronde.horovod.bridge import Bridge, HorovodInternalError

__all__ = ["FastLane"]

_PATIENCE, _BETWEEN = datetime.timedelta(seconds=2), datetime.timedelta(seconds=0.5)


class FastLane:
    """The exchange of agreed buckets.

    Args:
        here: the bridge, for waits that take long.
        number: of the optimizer.
        group: of all ranks, used by this optimizer only.
        flats: the buckets; the first has an element at its end for the count.
    """

    def __init__(self, here: Bridge, number: int, group: Any, flats: list[torch.Tensor]) -> None:
        self._here, self._number, self._group, self._flats = here, number, group, flats
        self._works: list[Any] = [None] * len(flats)
        self._step = 0

    @property
    def sending(self) -> bool:
        """Whether a bucket is under way."""
        return any(work is not None for work in self._works)

    def send(self, place: int) -> None:
        """Begin to sum a bucket; all ranks must send them in the same order."""
        self._step += place == 0
        self._works[place] = dist.all_reduce(self._flats[place], group=self._group, async_op=True)

    def receive(self, place: int) -> None:
        """Wait for a bucket's sum.

        Raises:
            HorovodInternalError: a rank does something else, has ended, or stalls.
        """
        work = self._works[place]
        if not self._done(work, _PATIENCE):
            self._wait_aloud(work)
        self._works[place] = None

    def _done(self, work: Any, patience: datetime.timedelta) -> bool:
        try:
            work.wait(patience)
        except RuntimeError as error:
            if not work.is_completed():
                return False  # no failure: only the patience has ended
            self.give_up(f"the exchange of gradients broke: {error}")
        return True

    def _wait_aloud(self, work: Any) -> None:
        """Wait, and let the coordinator know: it names the missing ranks, and ends a stall."""
        key = (0, "step", f"optimizer {self._number}, step {self._step}")
        handle = self._here.submit(key, {}, lambda _: None)
        self._here.say_waiting(key)
        while not self._done(work, _BETWEEN):
            if handle.error is not None:
                self.give_up(str(handle.error))
        self._here.retract(key)

    def give_up(self, why: str) -> None:
        """Raise; buckets under way make the group unusable, and with it the bridge."""
        self._here.poison(why)
        raise HorovodInternalError(why)

    # ------------------------------------------------------------------ after join

    def join(self) -> None:
        """Take part in a step with zeros."""
        for place, flat in enumerate(self._flats):
            flat.zero_()
            self.send(place)

    def joined_all(self) -> bool:
        """Go on taking part; True once a step had no rank that steps."""
        if not self.sending:
            return True
        if not all(work.is_completed() for work in self._works):
            return False
        for place in range(len(self._flats)):
            self.receive(place)
        if self._flats[0][-1] == 0:
            return True
        self.join()
        return False
