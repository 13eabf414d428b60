"""How far a run trains before it pauses: ``ronde run --until``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ronde.world import ArgumentError

__all__ = ["Until"]

_UNITS = {"": 1, "k": 1_000, "M": 1_000_000}


@dataclass(frozen=True)
class Until:
    """Where a run pauses.

    Attributes:
        samples: as :attr:`ronde.run.parts.State.samples` counts them.
        at_evaluation: whether it goes on to the first evaluation at or after them.
    """

    samples: int
    at_evaluation: bool = False

    @classmethod
    def parse(cls, text: str) -> Until:
        """Read ``SAMPLES[@evaluate]``.

        Raises:
            ArgumentError: it is something else.

        Example:
            >>> Until.parse("20k@evaluate")
            Until(samples=20000, at_evaluation=True)
        """
        match = re.fullmatch(r"(\d[\d_]*)([kM]?)(@evaluate)?", text)
        # int() reads 50_000 as Python does
        samples = int(match[1]) * _UNITS[match[2]] if match else 0
        if match is None or not samples:
            raise ArgumentError(
                f"--until {text}: expected a number of samples, as 50000 or 50k, or 50k@evaluate "
                "for the first evaluation from there on."
            )
        return cls(samples, match[3] is not None)
