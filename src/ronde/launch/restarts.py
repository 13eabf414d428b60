"""Whether a run goes on after its workers have ended: the next generation, or the end."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable
from pathlib import Path

from ronde.launch.agent import Outcome
from ronde.watch import Record, Restarted, RunDir
from ronde.world.fence import name_generation

__all__ = ["Restarts"]


class Restarts:
    """Counts generations of a run's workers, and decides after each whether another one follows.

    Args:
        most: how many restarts at most.
        directory: the run directory; None where nothing is kept.
        say: called with a line about each restart.
        warm: whether workers are forks of one process that has imported torch.
        renew: brings up again what workers need besides each other, and gives the variables by
            which they find it.
    """

    def __init__(
        self,
        most: int,
        directory: Path | None,
        say: Callable[[str], None],
        warm: bool = True,
        renew: Callable[[], dict[str, str]] = dict,
    ) -> None:
        self._renew = renew
        self.most, self.warm, self.say = most, warm and most > 0, say
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
        if not outcome.status or outcome.interrupted or outcome.exited:
            return False
        if self._failures >= self.most:
            return False
        newest = self._checkpoint()
        if outcome.traceback and (outcome.error, newest) == (self._error, self._newest):
            self.say("the same error again, and no checkpoint in between: a restart does not help")
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
        self.say(f"{what} {f'checkpoints/{newest}' if newest else 'the beginning'}: {reason}")
        if self._directory is not None and self._directory.record.is_file():
            record = Record(self._directory.record)
            with contextlib.suppress(OSError):  # a full disk must not end the run
                record.write(Restarted(generation=self.generation, reason=reason[:2000], rank=rank))
                record.close()

    def _checkpoint(self) -> str:
        """The newest checkpoint's name; workers verify it."""
        if self._directory is None or not self._directory.checkpoints.is_dir():
            return ""
        return max((p.name for p in self._directory.checkpoints.glob("step-*")), default="")
