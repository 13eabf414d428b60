"""Read, restore, seed and compare the states of Python's, NumPy's and torch's generators."""

from __future__ import annotations

import _random
import ctypes
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

_States = tuple[torch.Tensor, Any, Any]


def states() -> _States:
    """States of torch's CPU generator, ``random`` and ``numpy.random``."""
    return torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)


def restore_states(saved: _States) -> None:
    """Restore :func:`states`."""
    torch.set_rng_state(saved[0])
    random.setstate(saved[1])
    np.random.set_state(saved[2])


def seed_all(key: int) -> None:
    """Seed the three generators with one 64-bit key."""
    torch.default_generator.manual_seed(key)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)


GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
"""The kinds of generators that an object may hold."""


def undo_draws(one: Any) -> Callable[[], Any] | None:
    """A call that puts a generator back as it is now; None for anything else."""
    kind = type(one)  # never isinstance(): a proxy's __class__ answers for the object behind it
    if issubclass(kind, np.random.Generator):
        one, kind = one.bit_generator, type(one.bit_generator)
    if issubclass(kind, np.random.BitGenerator):
        return functools.partial(setattr, one, "state", one.state)
    if issubclass(kind, np.random.RandomState):
        return functools.partial(one.set_state, one.get_state(legacy=False))
    if issubclass(kind, random.Random) and not issubclass(kind, random.SystemRandom):
        return functools.partial(one.setstate, one.getstate())
    if issubclass(kind, torch.Generator):
        return functools.partial(one.set_state, one.get_state())
    return None  # also SystemRandom, which has no state


# The instance behind random.random() and the others: a bound method knows it.
_PYTHON: Any = random.random.__self__  # type: ignore[attr-defined]

_MT19937_BYTES = 624 * 4 + 4  # its words and its position
_PYTHON_OFFSET = object.__basicsize__  # past the header that every object has
_PYTHON_PLACE = (id(_PYTHON) + _PYTHON_OFFSET, _random.Random.__basicsize__ - _PYTHON_OFFSET)


def _memory(address: int, size: int) -> memoryview:
    """Some memory, which is read at once: ``ctypes.string_at`` takes three times as long."""
    return memoryview((ctypes.c_char * size).from_address(address))


_python_memory = _memory(*_PYTHON_PLACE)


class _Numpy:
    """NumPy's global generator, checked cheaply: ``get_state`` takes 40 µs, a memory comparison
    less than one.

    Its normal numbers come in pairs, and the second is cached outside that memory. A cached one
    implies a draw, which the memory shows, so the state is read only after the memory has changed.
    """

    def __init__(self) -> None:
        self._generator: Any = None
        self._address, self._memory = 0, memoryview(b"")
        self._known = b""  # the memory for which it is known that no second number is kept

    def memory(self) -> bytes | None:
        """A value that changes with every draw; None if only the full state shows it."""
        generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if not isinstance(generator, np.random.MT19937):
            return None
        if generator is not self._generator:
            self._address = generator.ctypes.state_address
            self._memory = _memory(self._address, _MT19937_BYTES)
            self._generator, self._known = generator, b""
        now = self._memory.tobytes()
        if now != self._known:
            if np.random.get_state(legacy=False)["has_gauss"]:
                return None
            self._known = now
        return now

    def unmoved(self, then: bytes) -> bool:
        """Whether nothing has been drawn since ``memory`` returned ``then``."""
        return (
            np.random.get_bit_generator() is self._generator  # type: ignore[attr-defined]
            and self._memory.tobytes() == then
        )

    def put_back(self, then: bytes) -> None:
        """Undo draws since ``memory`` returned ``then``."""
        state = np.random.get_state(legacy=False)
        ctypes.memmove(self._address, then, _MT19937_BYTES)
        if state["has_gauss"]:
            np.random.set_state({**np.random.get_state(legacy=False), "has_gauss": 0, "gauss": 0.0})


_numpy = _Numpy()


def _plain(state: Any) -> str:
    return repr(
        {
            k: _plain(v) if isinstance(v, dict) else v.tolist() if isinstance(v, np.ndarray) else v
            for k, v in state.items()
        }
    )


class Marks:
    """A cheap mark of the three generators, to detect draws."""

    def __init__(self) -> None:
        self._torch = torch.default_generator.get_state()
        self._python = _python_memory.tobytes()
        self._python_gauss = _PYTHON.gauss_next
        self._numpy = _numpy.memory()
        self._numpy_state = np.random.get_state(legacy=False) if self._numpy is None else None

    def _moves(self) -> Iterator[tuple[str, bool]]:
        """Each generator, and whether it was drawn from since."""
        yield "torch", not torch.equal(self._torch, torch.default_generator.get_state())
        same = _python_memory.tobytes() == self._python and _PYTHON.gauss_next == self._python_gauss
        yield "Python", not same
        if self._numpy is not None:
            yield "NumPy", not _numpy.unmoved(self._numpy)
        else:
            yield "NumPy", _plain(np.random.get_state(legacy=False)) != _plain(self._numpy_state)

    def unmoved(self) -> bool:
        """Whether nothing has been drawn since."""
        return not any(moved for _, moved in self._moves())

    def moved(self) -> list[str]:
        """The generators that were drawn from since."""
        return [name for name, moved in self._moves() if moved]

    def put_back(self) -> None:
        """Undo draws since the mark."""
        torch.default_generator.set_state(self._torch)
        ctypes.memmove(_PYTHON_PLACE[0], self._python, _PYTHON_PLACE[1])
        _PYTHON.gauss_next = self._python_gauss
        if self._numpy is not None:
            _numpy.put_back(self._numpy)
        else:
            np.random.set_state(self._numpy_state)  # type: ignore[arg-type]
