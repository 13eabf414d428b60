"""Measures a script's training as it is, and ends the process: ``ronde run --baseline``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ronde.measure.study import study_target, write_study
from ronde.run import hooks
from ronde.run.callback import StepView
from ronde.run.parts import Parts

__all__ = ["Baseline", "install_baseline"]


def install_baseline() -> None:
    """Measure this process, because of ``RONDE_STUDY=baseline``."""
    hooks.observer = Baseline(*study_target())


class Baseline(hooks.Observer):
    """Trains for some seconds, or to the end of the script, and writes samples per second.

    Args:
        options: ``seconds``.
        file: where rank 0 writes the result, as JSON.
    """

    changes_training = False

    def __init__(self, options: dict[str, Any], file: Path) -> None:
        self._seconds, self._file = float(options["seconds"]), file

    def step_ended(self, step: StepView) -> None:
        """See :class:`Callback`."""
        if step.parts.watcher.rate.seconds >= self._seconds:
            self._write(step.parts)
            step.parts.place.ended = True  # nothing is saved
            raise SystemExit(0)

    def ended(self, parts: Parts, status: str) -> None:
        """See :class:`Callback`. The training was shorter than the time asked for."""
        self._write(parts)

    def _write(self, run: Parts) -> None:
        if run.world.is_main:
            rate = run.watcher.rate.samples_per_second
            write_study(self._file, {"samples_per_second": rate})
