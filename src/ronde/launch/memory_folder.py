"""A folder in memory for copies of a training, which outlive the workers of one generation."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from pathlib import Path

from ronde.world.fence import is_generation
from ronde.world.temporary import memory_root, temporary_prefix

__all__ = ["MemoryFolder"]


class MemoryFolder:
    """Where workers keep copies in this node's memory, if any generation could go on from them.

    Args:
        directory: the run directory; None: no copies are kept.
        generation: of the workers.

    Attributes:
        variables: what tells workers of it; empty text if there is none: a run that a worker
            starts must not write into the outer one's.
    """

    def __init__(self, directory: Path | None, generation: str) -> None:
        self._directory, self._generation = directory, generation
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.variables = {"RONDE_MEMORY_DIR": ""}
        if directory is None or os.environ.get("RONDE_MEMORY_COPIES") == "0":
            return
        with contextlib.suppress(OSError):  # no such folder: no copies
            self._folder = tempfile.TemporaryDirectory(
                prefix=temporary_prefix(), dir=memory_root(), ignore_cleanup_errors=True
            )
            self.variables = {"RONDE_MEMORY_DIR": self._folder.name}

    def hand_on(self) -> None:
        """The workers have ended: move the newest copy into the run directory, if no checkpoint is
        newer there and the run has not gone on without this node.
        """
        if self._folder is None or self._directory is None:
            return
        copy = max(Path(self._folder.name).glob("step-*"), default=None)
        checkpoints = self._directory / "checkpoints"
        newest = max((path.name for path in checkpoints.glob("step-*")), default="")
        if copy is None or copy.name <= newest:
            return
        part = checkpoints / f".writing-{copy.name}-{secrets.token_hex(4)}"
        try:
            shutil.copytree(copy, part)
            if is_generation(self._directory, self._generation):
                part.rename(checkpoints / copy.name)
        except OSError:  # the checkpoint before it is there
            pass
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def close(self) -> None:
        """Remove the folder."""
        if self._folder is not None:
            self._folder.cleanup()
