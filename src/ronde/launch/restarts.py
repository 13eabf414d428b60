"""Whether a run goes on after its workers have ended: the next generation, or the end."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable
from pathlib import Path

from ronde.checkpoint.manifest import check_files, list_checkpoints, load_manifest
from ronde.launch.job import Outcome
from ronde.watch import Restarted, RunDir, append_events
from ronde.world import CheckpointError, WorldError
from ronde.world.whole_file import name_generation

__all__ = ["Restarts"]


class Restarts:
    """Counts generations of a run's workers, and decides after each whether another one follows.

    Args:
        most: how many restarts at most.
        directory: the run directory; None where nothing is kept.
        say: called with a line about each restart.
        renew: brings up again what workers need besides each other, and gives the variables by
            which they find it.
        start: where workers go on from while there is no checkpoint.
        own_backup: whether the script has checkpoints of its own, which nothing is known of.
    """

    def __init__(
        self,
        most: int,
        directory: Path | None,
        say: Callable[[str], None],
        renew: Callable[[], dict[str, str]] = dict,
        start: str = "the beginning",
        own_backup: bool = False,
    ) -> None:
        self._renew, self._start, self._own_backup = renew, start, own_backup
        self.most, self.say = most, say
        self._directory = None if directory is None else RunDir(directory)
        self._run = uuid.uuid4().hex[:8]
        self._error, self._newest = "", ""
        self._failures = 0
        self.generation = 0

    @property
    def name(self) -> str:
        """The name of this generation, unlike that of any other run's."""
        return f"{self._run}-{self.generation}"

    def begin(self) -> dict[str, str]:
        """Begin a generation: from now on, only its workers may write. Returns their variables."""
        if self._directory is not None:
            name_generation(self._directory.path, self.name)
        environment = {"RONDE_GENERATION": self.name}
        if self.generation:
            environment |= {"RONDE_RESUME": "1", **self._renew()}
        return environment

    def goes_on(self, outcome: Outcome) -> bool:
        """This generation ended because of ``outcome``: whether another one follows."""
        if not outcome.status or outcome.interrupted or outcome.exited or outcome.paused:
            return False
        if self._failures >= self.most:
            return False
        newest = self._checkpoint()
        same = (outcome.error, newest) == (self._error, self._newest)
        # a kill may come from outside; an exception at the same place comes again
        if outcome.traceback and same and not self._own_backup:
            self.say("the same error again, and no checkpoint in between: a restart does not help")
            return False
        if self._directory is not None:
            try:
                name_generation(self._directory.path, f"{self._run}-{self.generation + 1}")
            except WorldError as error:  # a full disk, say
                self.say(f"no restart: {error}")
                return False
        self._error, self._newest = outcome.error or "", newest
        self._failures += 1
        who = "" if outcome.rank is None or outcome.hang else f"rank {outcome.rank}: "
        reason = f"{who}{outcome.error}"
        self._again(f"restart {self._failures} of {self.most}, from", reason, outcome.rank)
        return True

    def grow(self, host: str) -> None:
        """Another generation follows because ``host`` is there again: that is no failure."""
        self._again("starting again from", f"host {host} is there again", None)

    def _again(self, what: str, reason: str, rank: int | None) -> None:
        self.generation += 1
        newest = self._checkpoint()
        self.say(f"{what} {f'checkpoints/{newest}' if newest else self._start}: {reason}")
        if self._directory is not None and self._directory.record.is_file():
            event = Restarted(generation=self.generation, reason=reason[:2000], rank=rank)
            with contextlib.suppress(OSError):  # a full disk must not end the run
                append_events(self._directory.record, event)

    def _checkpoint(self) -> str:
        """The name of the newest checkpoint that is whole, the one that workers go on from.

        They verify it, too. What is large is not read twice: its files have their sizes.
        """
        for path in list_checkpoints(self._directory.checkpoints) if self._directory else ():
            with contextlib.suppress(CheckpointError, OSError, LookupError, TypeError, ValueError):
                body = load_manifest(path)
                size = sum(entry["bytes"] for entry in body["files"].values())
                check_files(path, body, digests=size <= 256 << 20)
                return path.name
        return ""
