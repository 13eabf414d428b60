"""Randomness of augmentation keyed by (seed, epoch, sample): the same whichever process reads the sample.

``random``, ``numpy.random`` and torch's default CPU generator are seeded before a sample is read, and put back
afterwards, since the reader may share its process with the model. That costs some 10 µs a sample and 200 µs a batch,
more than reading rows of a tensor: a data set that was seen to draw nothing is read without, under one cheap
comparison per batch that falls back to keys if something was drawn after all.
"""

from __future__ import annotations

import _random
import ctypes
import random
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from ronde.feed.order import key_of

__all__ = ["KeyedRandomness", "Marks", "restore_states", "seed_all", "states"]

T = TypeVar("T")

_States = tuple[torch.Tensor, Any, Any]


def states() -> _States:
    """The states of torch's CPU generator, ``random`` and ``numpy.random``."""
    return torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)


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


# The instance behind random.random() and the others: a bound method knows it.
_PYTHON: Any = random.random.__self__  # type: ignore[attr-defined]

_MT19937_BYTES = 624 * 4 + 4  # its words and its position
_PYTHON_OFFSET = object.__basicsize__  # past the header that every object has
_PYTHON_PLACE = (id(_PYTHON) + _PYTHON_OFFSET, _random.Random.__basicsize__ - _PYTHON_OFFSET)


class _Numpy:
    """numpy's global generator, looked at cheaply: ``get_state`` takes 40 µs, a comparison of its memory less than one.

    Its normal numbers come in pairs, of which the second is kept outside that memory. That one is kept can only follow a draw,
    which the memory shows, so the state is asked for only when the memory has changed since it was last asked for.
    """

    def __init__(self) -> None:
        self._generator: Any = None
        self._address = 0
        self._known = b""  # the memory for which it is known that no second number is kept

    def memory(self) -> bytes | None:
        """What changes when anything is drawn; None if only the whole state tells."""
        generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if not isinstance(generator, np.random.MT19937):
            return None
        if generator is not self._generator:
            self._generator, self._address, self._known = generator, generator.ctypes.state_address, b""
        now = ctypes.string_at(self._address, _MT19937_BYTES)
        if now != self._known:
            if np.random.get_state(legacy=False)["has_gauss"]:
                return None
            self._known = now
        return now

    def unmoved(self, then: bytes) -> bool:
        """Whether nothing has been drawn since ``memory`` gave ``then``."""
        return np.random.get_bit_generator() is self._generator and ctypes.string_at(self._address, _MT19937_BYTES) == then  # type: ignore[attr-defined]

    def put_back(self, then: bytes) -> None:
        """Undo what has been drawn since ``memory`` gave ``then``."""
        state = np.random.get_state(legacy=False)
        ctypes.memmove(self._address, then, _MT19937_BYTES)
        if state["has_gauss"]:
            np.random.set_state({**np.random.get_state(legacy=False), "has_gauss": 0, "gauss": 0.0})


_numpy = _Numpy()


def _plain(state: Any) -> str:
    return repr({k: _plain(v) if isinstance(v, dict) else v.tolist() if isinstance(v, np.ndarray) else v for k, v in state.items()})


class Marks:
    """The three generators as they are now, cheaply: to see whether anything draws from them."""

    def __init__(self) -> None:
        self._torch = torch.default_generator.get_state()
        self._python = ctypes.string_at(*_PYTHON_PLACE)
        self._python_gauss = _PYTHON.gauss_next
        self._numpy = _numpy.memory()
        self._numpy_state = np.random.get_state(legacy=False) if self._numpy is None else None

    def unmoved(self) -> bool:
        """Whether nothing has been drawn since."""
        if ctypes.string_at(*_PYTHON_PLACE) != self._python or _PYTHON.gauss_next != self._python_gauss:
            return False
        if self._numpy is not None:
            if not _numpy.unmoved(self._numpy):
                return False
        elif _plain(np.random.get_state(legacy=False)) != _plain(self._numpy_state):
            return False
        return torch.equal(self._torch, torch.default_generator.get_state())

    def put_back(self) -> None:
        """Undo what has been drawn since."""
        torch.default_generator.set_state(self._torch)
        ctypes.memmove(_PYTHON_PLACE[0], self._python, _PYTHON_PLACE[1])
        _PYTHON.gauss_next = self._python_gauss
        if self._numpy is not None:
            _numpy.put_back(self._numpy)
        else:
            np.random.set_state(self._numpy_state)  # type: ignore[arg-type]


class KeyedRandomness:
    """Run reads under keys.

    Args:
        seed: the run's seed.
        watch: consecutive reads under keys that draw nothing before the data set is believed to draw nothing.
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
        """Read some samples of ``epoch`` and make a batch of them.

        Args:
            keys: one for each sample, among those of the epoch.
            read_one: ``read_one(j)`` reads the j-th of them, called under the sample's own key.
            read_all: reads and collates all of them, used where nothing is drawn.
            collate: makes a batch of what ``read_one`` gave, called under a key of the first sample.
        """
        if not self.draws and self._quiet >= self.watch:
            marks = Marks()
            result = read_all()
            if marks.unmoved():
                return result
            marks.put_back()
            self.draws = True  # it does draw, rarely: read this batch again, and all others, under keys
        before = states()
        try:
            samples = [self._keyed(key_of(self.seed, 1, epoch, k), read_one, j) for j, k in enumerate(keys)]
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
