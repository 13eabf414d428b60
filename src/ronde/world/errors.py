"""The errors that Ronde raises on purpose: each says what was found, what was expected and what to
do.
"""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "CheckpointError",
    "FeedError",
    "LossError",
    "PlanError",
    "RondeError",
    "SampleError",
    "WorldError",
]


class RondeError(Exception):
    """Base of every error that Ronde raises on purpose."""


class ArgumentError(RondeError, ValueError):
    """An argument cannot be used: its name, what was found and what was expected are in the
    text.
    """


class WorldError(RondeError, RuntimeError):
    """The processes do not form a world: variables contradict each other, ranks disagree, a port is
    taken.
    """


class PlanError(RondeError, RuntimeError):
    """The plan cannot carry out what the script does, which shows as it runs. Another plan can."""


class CheckpointError(RondeError, RuntimeError):
    """A checkpoint or run directory cannot be read or written safely."""


class LossError(RondeError, ArithmeticError):
    """The loss is not a number that can be trained on: NaN, infinite, or not a scalar."""


class SampleError(RondeError, RuntimeError):
    """A sample cannot be read or decoded: the file, or the place in it, is named."""


class FeedError(RondeError, RuntimeError):
    """Samples can no longer be loaded: a loading process has died, or too many samples are bad."""
