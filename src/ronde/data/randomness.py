"""Augmentation randomness keyed by (seed, epoch, sample): the same in whichever process reads it.

``random``, ``numpy.random`` and torch's CPU generator are seeded before a sample is read and
restored afterwards, because the reader may share its process with the model. That costs about 10 µs
a sample and 200 µs a batch, more than reading tensor rows. A dataset that draws nothing is
therefore read without keys, under one cheap check per batch that falls back to keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ronde.data.order import key_of
from ronde.introspect import Marks, restore_states, seed_all, states

T = TypeVar("T")


class KeyedRandomness:
    """Reads samples under keys.

    Args:
        seed: the run's seed.
        watch: consecutive reads under keys that draw nothing before the data set is believed to
            draw nothing.
    """

    def __init__(self, seed: int, watch: int = 64) -> None:
        self.seed = seed
        self.watch = watch
        self.draws = False
        self._quiet = 0

    def batch(
        self,
        epoch: int,
        keys: Sequence[int],
        read_one: Callable[[int], Any],
        read_all: Callable[[], T],
        collate: Callable[[list[Any]], T],
    ) -> T:
        """Read some samples of ``epoch`` and collate them.

        Args:
            keys: one for each sample, among those of the epoch.
            read_one: ``read_one(j)`` reads the j-th of them, called under the sample's own key.
            read_all: reads and collates all of them, used where nothing is drawn.
            collate: makes a batch of what ``read_one`` gave, called under a key of the first
                sample.
        """
        if not self.draws and self._quiet >= self.watch:
            marks = Marks()
            result = read_all()
            if marks.unmoved():
                return result
            marks.put_back()
            self.draws = (
                True  # it does draw, rarely: read this batch again, and all others, under keys
            )
        before = states()
        try:
            samples = [
                self._keyed(key_of(self.seed, 1, epoch, k), read_one, j) for j, k in enumerate(keys)
            ]
            return self._keyed(key_of(self.seed, 2, epoch, keys[0]), collate, samples)
        finally:
            restore_states(before)

    def _keyed(self, key: int, call: Callable[[Any], T], argument: Any) -> T:
        seed_all(key)
        if self.draws:
            return call(argument)
        marks = Marks()
        result = call(argument)
        if marks.unmoved():
            self._quiet += 1
        else:
            self.draws = True
        return result
