"""What a checkpoint holds of one run, besides its parts."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ronde.checkpoint import KeepPolicy
from ronde.run.average import Averages
from ronde.run.best import KeepBest
from ronde.run.parts import Parts
from ronde.run.registered import Registry

__all__ = ["CheckpointContent", "Ending"]


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


@dataclass(eq=False)
class CheckpointContent:
    """What a checkpoint holds of one run, and when it was last saved.

    Attributes:
        keep: which checkpoints stay.
        async_save: whether checkpoints may be written in the background.
        save_every: optimizer steps between checkpoints, or None.
        ending: of the runs of the loop: how they end before their last epoch.
        given: the settings of the optimizer's groups as the script gave them.
        saved_step: the step of the last checkpoint; -1 if there is none.
        saved_at: ``time.monotonic()`` of the last checkpoint, or of the start.
        warned_of_save: whether the script was told that it saves after an epoch's last batch.
    """

    parts: Parts
    best: KeepBest
    keep: KeepPolicy
    async_save: bool
    save_every: int | None
    ending: Ending
    given: list[dict[str, Any]]
    registry: Registry = field(default_factory=Registry)
    averages: Averages = field(default_factory=Averages)
    saved_step: int = -1
    saved_at: float = field(default_factory=time.monotonic)
    warned_of_save: bool = False
