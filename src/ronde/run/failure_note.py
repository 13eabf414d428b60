"""Adds to an exception in the middle of a step where it was: rank, step, and samples."""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any

from ronde.world import LossError

if TYPE_CHECKING:
    from ronde.run.parts import Parts

__all__ = ["follow_run", "note_place"]

_SHOWN = 8
_runs: list[weakref.ref[Any]] = []  # the newest first
_before = sys.excepthook


def follow_run(run: Parts) -> None:
    """From now on, note the place of exceptions that end the script within a step of this run."""
    _runs[:] = [weakref.ref(run), *(ref for ref in _runs if ref() is not None)]
    if sys.excepthook is not _hook:
        global _before
        _before, sys.excepthook = sys.excepthook, _hook


def note_place(error: BaseException) -> None:
    """Add a note to an exception, once; its type, text and traceback stay the script's."""
    known = any(each.startswith("(rank ") for each in getattr(error, "__notes__", ()))
    if known or not isinstance(error, Exception):
        return
    for run in filter(None, [ref() for ref in _runs]):
        share = run.place.share
        if share is None:
            continue
        place = f"(rank {run.world.rank}, step {run.state.step + 1}"
        low, high = share.micro[0][0], share.micro[-1][1]
        place += f", epoch {share.epoch}, {share.samples} samples"
        if share.samples and not isinstance(error, LossError):
            ids = run.data.order.ids(share.epoch, low, high).tolist()
            shown = ", ".join(map(str, ids[:_SHOWN])) + (", …" if len(ids) > _SHOWN else "")
            place += f": indices {shown}"
        error.add_note(f"{place})")
        from ronde.plan.torch_errors import meaning  # of errors only

        if (meant := meaning(str(error), run.plan)) is not None:
            error.add_note(f"That is: {meant}")
        return


def _hook(kind: Any, error: BaseException, trace: Any) -> None:
    note_place(error)
    _before(kind, error, trace)
