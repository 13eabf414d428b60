"""Errors Ronde raises on purpose: each says what happened, what was expected, and what to do."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = [
    "ArgumentError",
    "CheckpointError",
    "FeedError",
    "LossError",
    "PlanError",
    "RondeError",
    "SampleError",
    "WorldError",
    "did_you_mean",
]


class RondeError(Exception):
    """Base of every error that Ronde raises on purpose."""


class ArgumentError(RondeError, ValueError):
    """An argument cannot be used. The text names it, what was given, and what was expected."""


class WorldError(RondeError, RuntimeError):
    """The processes form no world: variables contradict, ranks disagree, or a port is taken.

    Attributes:
        lost_rank: whether it is only that another rank has ended, which is not the cause.
    """

    def __init__(self, text: str = "", lost_rank: bool = False) -> None:
        super().__init__(text)
        self.lost_rank = lost_rank


class PlanError(RondeError, RuntimeError):
    """The plan cannot carry out what the script does, which only shows as it runs. Another plan
    can.
    """


class CheckpointError(RondeError, RuntimeError):
    """A checkpoint or run directory cannot be read or written safely."""


class LossError(RondeError, ArithmeticError):
    """The loss cannot be trained on: it is NaN, infinite, not a scalar, or an unexpected sum."""


class SampleError(RondeError, RuntimeError):
    """A sample cannot be read or decoded. The text names the file, or the place in it."""


class FeedError(RondeError, RuntimeError):
    """Loading cannot continue: a loading process died, or too many samples are bad."""


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "", prefix: str = "") -> str:
    """The known name that is closest to a mistyped one, for the end of an error.

    Args:
        otherwise: what to say where none is close.
        prefix: what stands before the name: its folder.

    Example:
        >>> did_you_mean("trian.py", ["train.py"])
        ' Did you mean train.py?'
    """
    import difflib  # only for an error

    close = difflib.get_close_matches(word, list(known), 1)
    return f" Did you mean {prefix}{close[0]}?" if close else otherwise
