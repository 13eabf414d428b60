"""Named stages of an input pipeline, and the random numbers of the current sample.

A *stage* is a step on a sample's way to the device: ``read``, ``decode``, ``augment``, ``collate``,
``copy``, or any name a script chooses. Naming one is almost free; ``ronde doctor`` times stages and
removes them.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import numpy as np

F = TypeVar("F", bound=Callable[..., Any])


class Listener(Protocol):
    """Observes stages while samples are made; see :func:`listen`."""

    def call(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a stage, or return what it would have returned."""

    def enter(self, name: str) -> None:
        """A stage block begins."""

    def leave(self, name: str) -> None:
        """A stage block ends."""


listener: Listener | None = None
"""Who looks on in this process: None in every ordinary training."""


def listen(who: Listener | None) -> Listener | None:
    """Install a listener, or None; return the previous one."""
    global listener
    before, listener = listener, who
    return before


class stage:
    """Name a step of the input pipeline, as a decorator or a ``with`` block.

    A function can be timed and removed; a block can only be timed. ``copy`` names the transfer to
    the device.

    Args:
        name: as it shall be called; those of Ronde's own are ``read``, ``decode``, ``augment``,
            ``collate`` and ``copy``.

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

            raise ArgumentError(
                f'ronde.feed.stage({name!r}): expected a name, as ronde.feed.stage("augment").'
            )
        self.name = name

    def __call__(self, function: F) -> F:
        """Wrap a function under this stage's name."""
        name = self.name

        @functools.wraps(function)
        def named(*args: Any, **kwargs: Any) -> Any:
            return (
                function(*args, **kwargs)
                if listener is None
                else listener.call(name, function, args, kwargs)
            )

        named.ronde_stage = name  # type: ignore[attr-defined]
        return named  # type: ignore[return-value]

    def __enter__(self) -> None:
        if listener is not None:
            listener.enter(self.name)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if listener is not None:
            listener.leave(self.name)


class _Current(threading.local):
    keys: sample_keys | None = None


_current = _Current()


class sample_keys:
    """Set the random keys of the samples this thread is making.

    Args:
        n: how many samples.
        key: ``key(j)``: the 64-bit key of the j-th of them; only asked for where something is
            drawn.

    Attributes:
        at: which of them is being made; None where that is not known, as inside a data set's own
            ``__getitems__``.
        unclear: whether :func:`rng` was asked for while that was not known.
    """

    __slots__ = ("_before", "_key", "at", "made", "n", "unclear")

    def __init__(self, n: int, key: Callable[[int], int]) -> None:
        self.n = n
        self._key = key
        self.at: int | None = None
        self.made: dict[int, np.random.Generator] = {}
        self.unclear = False

    def __enter__(self) -> Self:
        self._before = _current.keys
        _current.keys = self
        return self

    def __exit__(self, *_: object) -> None:
        _current.keys = self._before

    def generator(self, j: int) -> np.random.Generator:
        """Sample ``j``'s generator, continued from its previous step."""
        made = self.made.get(j)
        if made is None:
            # Philox takes any key as it is: no seeding, and no two keys with one stream.
            made = self.made[j] = np.random.Generator(
                np.random.Philox(key=self._key(j) & 0xFFFFFFFFFFFFFFFF)
            )
        return made


class sample_key(sample_keys):
    """Set this thread's random key for one sample; :func:`rng` depends on ``key`` alone."""

    __slots__ = ()

    def __init__(self, key: int) -> None:
        super().__init__(1, lambda _: key)
        self.at = 0


def current_keys() -> sample_keys | None:
    """The keys of the samples this thread is making; None outside Ronde's loading."""
    return _current.keys


def rng() -> np.random.Generator:
    """The random generator of the current sample: a function of (seed, epoch, sample), whoever
    makes it.

    Use it inside a dataset, an augmentation or a collate function that Ronde drives. Unlike the
    global generators of torch, Python and NumPy, several threads can use it at once. Elsewhere it
    returns an unseeded generator. In a ``__getitems__``, use :func:`rngs`; otherwise
    samples are made one by one, so that each has its own generator.

    Example:
        >>> from ronde.data.named_stages import sample_key  # Ronde enters it for each sample
        >>> with sample_key(7):
        ...     first = rng().random()
        >>> with sample_key(7):
        ...     first == rng().random()
        True
    """
    keys = _current.keys
    if keys is None:
        return np.random.default_rng()
    at = keys.at
    if at is None:
        keys.unclear = keys.n > 1
        at = 0
    return keys.generator(at)


def rngs(n: int) -> list[np.random.Generator]:
    """The random generators of each sample of a batch, for whoever handles all in one call: a
    ``__getitems__``, or a step on the device.

    Args:
        n: how many samples the step was given.

    Raises:
        ArgumentError: Ronde is making another number of samples here.

    Example:
        >>> def shifted(images):
        ...     return [image + r.normal() for image, r in zip(images, rngs(len(images)),
        ...     strict=True)]
    """
    keys = _current.keys
    if keys is None:
        return list(np.random.default_rng().spawn(n))
    if keys.at is not None and n == 1:
        return [keys.generator(keys.at)]
    if n != keys.n:
        from ronde.world import ArgumentError

        raise ArgumentError(
            f"ronde.feed.rngs({n}): {keys.n} samples are being made here, each with its own "
            "generator."
        )
    return [keys.generator(j) for j in range(n)]
