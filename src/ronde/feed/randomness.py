"""Randomness of augmentation keyed by (seed, epoch, sample): the same whichever process reads the sample.

``random``, ``numpy.random`` and torch's default CPU generator are seeded before a sample is read, and put back
afterwards, since the reader may share its process with the model. That costs some 10 µs a sample and 200 µs a batch,
more than reading rows of a tensor: a data set that was seen to draw nothing is read without, under one cheap
comparison per batch that falls back to keys if something was drawn after all.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch

from ronde.feed.order import key_of

__all__ = ["KeyedRandomness", "restore_states", "seed_all", "states"]

T = TypeVar("T")

_States = tuple[torch.Tensor, Any, Any]

_MT19937_BYTES = 624 * 4 + 4  # its words and its position


def states() -> _States:
    """The states of torch's CPU generator, ``random`` and ``numpy.random``."""
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def restore_states(saved: _States) -> None:
    """Put back what :func:`states` gave."""
    torch.set_rng_state(saved[0])
    random.setstate(saved[1])
    np.random.set_state(saved[2])


def seed_all(key: int) -> None:
    """Seed the three generators with one 64-bit key."""
    torch.default_generator.manual_seed(key)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)


def _numpy_mark() -> Any:
    """Something that changes when ``numpy.random`` draws. ``get_state`` takes 40 µs; a copy of the memory 1 µs."""
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if isinstance(generator, np.random.MT19937):
        return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
    return repr(generator.state)


def _marks() -> tuple[torch.Tensor, Any]:
    return torch.get_rng_state(), _numpy_mark()


class KeyedRandomness:
    """Run reads under keys.

    Args:
        seed: the run's seed.
        watch: consecutive reads under keys that draw nothing before the data set is believed to draw nothing.
    """

    def __init__(self, seed: int, watch: int = 64) -> None:
        self.seed = seed
        self.watch = watch
        self._quiet = 0
        self._draws = False
        self._python: Any = None  # state of ``random`` when last looked at: taking it costs 10 µs

    def batch(
        self,
        epoch: int,
        ids: list[int],
        read_one: Callable[[int], Any],
        read_all: Callable[[], T],
        collate: Callable[[list[Any]], T],
    ) -> T:
        """Read samples ``ids`` of ``epoch`` and make a batch of them.

        Args:
            read_one: reads one sample, called under the sample's own key.
            read_all: reads and collates all of them, used where nothing is drawn.
            collate: makes a batch of what ``read_one`` gave, called under a key of the first sample.
        """
        if not self._draws and self._quiet >= self.watch:
            torch_before, numpy_before = _marks()
            result = read_all()
            torch_now, numpy_now = _marks()
            python_now = random.getstate()
            unmoved = torch.equal(torch_before, torch_now) and numpy_before == numpy_now
            if unmoved and python_now == self._python:
                return result
            # It draws after all (or the script drew from ``random`` between two batches, which looks the same from
            # here): read this batch again under keys, and look anew.
            torch.set_rng_state(torch_before)
            self._python = python_now
            if unmoved:
                self._quiet = max(0, self.watch - len(ids))
            else:
                self._draws = True
        before = states()
        try:
            samples = [self._keyed(key_of(self.seed, 1, epoch, i), read_one, i) for i in ids]
            return self._keyed(key_of(self.seed, 2, epoch, ids[0] if ids else 0), collate, samples)
        finally:
            restore_states(before)
            self._python = before[1]

    def _keyed(self, key: int, call: Callable[[Any], T], argument: Any) -> T:
        seed_all(key)
        if self._draws:
            return call(argument)
        marks, python = _marks(), random.getstate()
        result = call(argument)
        now = _marks()
        if torch.equal(marks[0], now[0]) and marks[1] == now[1] and python == random.getstate():
            self._quiet += 1
        else:
            self._draws = True
        return result
