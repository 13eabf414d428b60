"""Keep workers of an old generation from writing to a run that has gone on without them.

A run's workers are started again after a failure. Each such generation has a name, which is in the
workers' environment and in ``.generation`` of the run directory. A worker that finds another name
there, because its host was out of reach for a while, writes nothing any more.
"""

from __future__ import annotations

import os
from pathlib import Path

from ronde.world.errors import WorldError
from ronde.world.whole_file import write_whole

__all__ = ["AGAIN", "is_fenced", "is_generation", "name_generation", "refuse_fenced"]

AGAIN = 75
"""Exit status of a training that was asked to leave and can be resumed: ``EX_TEMPFAIL``."""

_FILE = ".generation"


def name_generation(directory: Path, name: str) -> None:
    """Write which generation may write to a run directory: all at once, over what was there.

    Raises:
        WorldError: it cannot be written.
    """
    try:
        write_whole(directory / _FILE, name)
    except OSError as error:
        raise WorldError(
            f"{directory} cannot be written to: {error.strerror}. Free some space there, or name "
            "another folder with --runs."
        ) from error


def is_fenced() -> bool:
    """Whether the run has gone on without this worker."""
    own, directory = os.environ.get("RONDE_GENERATION"), os.environ.get("RONDE_RUN_DIR")
    if not own or not directory:
        return False
    return not is_generation(Path(directory), own)


def is_generation(directory: Path, name: str) -> bool:
    """Whether it is this one that may write to a run directory, as far as anything says."""
    try:
        return (directory / _FILE).read_text() == name
    except OSError:
        return True  # it cannot be read: nothing says that there is another


def refuse_fenced() -> None:
    """Refuse to write for a run that has gone on without this worker.

    Raises:
        WorldError: it has.
    """
    if is_fenced():
        raise WorldError(
            f"this worker is of generation {os.environ['RONDE_GENERATION']}, and the run has been "
            "restarted without it since: it may write nothing. Its host was out of reach."
        )
