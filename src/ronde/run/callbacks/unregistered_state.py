"""Warns of the script's own state that no checkpoint would hold."""

from __future__ import annotations

from ronde.run.callback import Callback
from ronde.run.parts import Parts
from ronde.run.unregistered import claim, unregistered

__all__ = ["ReportsUnregistered"]


_LOOKS = 3  # a scheduler may be stepped for the first time at the end of the first epoch


class ReportsUnregistered(Callback):
    """Looks at the first ends of epochs and before the first checkpoint, where one is written."""

    def __init__(self, parts: Parts) -> None:
        self._looks = _LOOKS
        claim(parts.optimizer, parts.scheduler)

    def epoch_ended(self, parts: Parts) -> None:
        """See :class:`Callback`."""
        if self._looks and parts.world.is_main and parts.directory is not None:
            self._looks -= 1
            for warning in unregistered():
                parts.warn(warning)

    before_save = epoch_ended
