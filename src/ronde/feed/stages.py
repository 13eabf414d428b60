"""Stages of an input pipeline, by name, and the randomness of the sample that is being made.

A *stage* is what is done to a sample on its way to the device: ``read``, ``decode``, ``augment``, ``collate``, ``copy``, or any name that
a script gives. Naming one costs nothing to speak of; ``ronde doctor`` times it and takes it out.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, TypeVar

import numpy as np

__all__ = ["Listener", "listen", "listener", "rng", "sample_key", "stage"]

F = TypeVar("F", bound=Callable[..., Any])


class Listener(Protocol):
    """What looks on while samples are made; see :func:`listen`."""

    def call(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a stage, or give what it would have given."""

    def enter(self, name: str) -> None:
        """A stage that is a block of lines begins."""

    def leave(self, name: str) -> None:
        """It ends."""


listener: Listener | None = None
"""Who looks on in this process: None in every ordinary training."""


def listen(who: Listener | None) -> Listener | None:
    """Put a listener in place, or none; returns the one that was there."""
    global listener
    before, listener = listener, who
    return before


class stage:
    """Name a step of the input pipeline, as a decorator or around some lines.

    A function can be timed and taken out; a block can only be timed. ``copy`` names the way to the device.

    Args:
        name: as it shall be called; those of Ronde's own are ``read``, ``decode``, ``augment``, ``collate`` and ``copy``.

    Example:
        >>> @stage("augment")
        ... def brighten(image):
        ...     return image * 1.1
        >>> with stage("parse"):
        ...     fields = "a,b".split(",")
    """

    def __init__(self, name: str) -> None:
        if not isinstance(name, str) or not name:
            from ronde.world import ArgumentError

            raise ArgumentError(f'ronde.feed.stage({name!r}): expected a name, as ronde.feed.stage("augment").')
        self.name = name

    def __call__(self, function: F) -> F:
        """The function under this stage's name."""
        name = self.name

        @functools.wraps(function)
        def named(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if listener is None else listener.call(name, function, args, kwargs)

        named.ronde_stage = name  # type: ignore[attr-defined]
        return named  # type: ignore[return-value]

    def __enter__(self) -> None:
        if listener is not None:
            listener.enter(self.name)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if listener is not None:
            listener.leave(self.name)


class _Current(threading.local):
    key: int | None = None
    made: np.random.Generator | None = None


_current = _Current()


class sample_key:
    """While a sample is made in this thread, :func:`rng` is a function of ``key`` alone."""

    __slots__ = ("_before", "_key")

    def __init__(self, key: int) -> None:
        self._key = key

    def __enter__(self) -> None:
        self._before = (_current.key, _current.made)
        _current.key, _current.made = self._key, None

    def __exit__(self, *_: object) -> None:
        _current.key, _current.made = self._before


def rng() -> np.random.Generator:
    """The random numbers of the sample that is being made: a function of (seed, epoch, sample), whoever makes it.

    Inside a data set or an augmentation that Ronde drives; unlike torch's, Python's and NumPy's global generators it can be used by
    several threads at once. Elsewhere it gives an unseeded generator.

    Example:
        >>> with sample_key(7):
        ...     first = rng().random()
        >>> with sample_key(7):
        ...     first == rng().random()
        True
    """
    if _current.key is None:
        return np.random.default_rng()
    if _current.made is None:
        _current.made = np.random.Generator(np.random.Philox(key=_current.key))
    return _current.made
