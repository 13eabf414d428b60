"""Warns of the script's own state that no checkpoint would hold."""

from __future__ import annotations

from ronde.run.callback import Callback
from ronde.run.parts import Parts
from ronde.run.unregistered import claim, unregistered

__all__ = ["ReportsUnregistered"]


class ReportsUnregistered(Callback):
    """Looks at the ends of epochs and before a checkpoint, where one is written."""

    def __init__(self, parts: Parts) -> None:
        claim(parts.optimizer, parts.scheduler)

    def epoch_ended(self, parts: Parts) -> None:
        """See :class:`Callback`."""
        if parts.world.is_main and parts.directory is not None:
            for warning in unregistered():
                parts.warn(warning)

    before_save = epoch_ended
