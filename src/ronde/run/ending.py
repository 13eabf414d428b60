"""How the runs of a loop end before their last epoch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Ending"]


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
