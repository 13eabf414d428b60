"""The interfaces of a sample source and a pipeline step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from ronde.world import SampleError


@runtime_checkable
class Source(Protocol):
    """Random access by batches of ids; almost any map-style Dataset with ``__getitems__`` is one.

    Samples may have a ``name``, and the source may have ``source.name(i)``; errors use them.
    """

    def __len__(self) -> int: ...

    def read(self, ids: Sequence[int]) -> Sequence[Any]:
        """Return the samples of these ids, in this order; ids may repeat. Several threads may call
        it at once.

        Raises:
            SampleError: one of them cannot be read; it names the file.
        """

    @property
    def fingerprint(self) -> str:
        """Changes with the samples, their number or order; cheap (names and sizes only)."""


@dataclass(frozen=True)
class Step:
    """One step of a pipeline.

    Attributes:
        name: the stage it belongs to.
        call: of one sample.
    """

    name: str
    call: Callable[[Any], Any]


@dataclass(frozen=True)
class Bad:
    """A sample that cannot be used.

    Attributes:
        id: its index in the data set.
        text: which it is, in which stage it failed, and why.
        cause: the error, None where it was no error but an unusual shape.
    """

    id: int
    text: str
    cause: BaseException | None = None

    @classmethod
    def of(cls, i: int, name: str | None, at: str, cause: Exception) -> Bad:
        """Wrap an error from stage ``at``."""
        if isinstance(cause, SampleError):
            return cls(i, f"sample {i}: {cause}", cause)  # it names the file already
        return cls(
            i,
            f"sample {i}{f' ({name})' if name else ''}, stage {at}: "
            f"{type(cause).__name__}: {cause}",
            cause,
        )
