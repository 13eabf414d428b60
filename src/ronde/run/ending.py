"""How the runs of a loop end before their last epoch."""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Ending", "is_left_by_script", "shows_breaks"]

# Where a loop pops its iterator: POP_ITER is Python 3.14's.
_POPS = {dis.opmap[name] for name in ("POP_TOP", "POP_ITER") if name in dis.opmap}


@dataclass
class Ending:
    """What a checkpoint says about the end of its training; empty in most.

    Attributes:
        stopped: why the training is over before its last epoch; empty if it is not.
        paused: whether it was written by a pause (``ronde run --until``).
        loops: name of a run -> its loops over ``run.epochs``, from the first, that are over because
            the script left the last of them.
    """

    stopped: str = ""
    paused: bool = False
    loops: dict[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Its form in a checkpoint: without what is empty."""
        return {name: value for name, value in vars(self).items() if value}

    def restore(self, found: Mapping[str, Any]) -> None:
        """Continue from :meth:`to_dict`; a pause is over."""
        self.stopped = found.get("stopped", "")
        self.loops = dict(found.get("loops", {}))


def is_left_by_script() -> bool:
    """Whether a loop is left with ``break`` or ``return``, asked in the generator that it closes.

    An exception on its way, as of ``sys.exit``, closes it as well, and cannot be seen from there.
    But then the loop's frame is at the instruction that raised.
    """
    frame = sys._getframe(2)
    return frame.f_lasti >= 0 and frame.f_code.co_code[frame.f_lasti] in _POPS


def shows_breaks() -> bool:
    """Whether :func:`is_left_by_script` can be believed: other Pythons may compile or end loops in
    another way. Tried on three loops whose end is known.
    """
    answers = []

    def loop() -> Iterator[None]:
        try:
            yield
        except GeneratorExit:
            answers.append(is_left_by_script())
            raise

    def breaks() -> None:
        for _ in loop():
            break

    def returns() -> None:
        for _ in loop():
            return

    def raises() -> None:
        for _ in loop():
            raise KeyError

    for leave in (breaks, returns, raises):
        with suppress(KeyError):
            leave()
    return answers == [True, True, False]
