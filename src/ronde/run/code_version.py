"""Which commit of the script's code a run trains: asked of git while the run begins."""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["CodeVersion", "ask_git"]

_WAIT_SECONDS = 1.0


class CodeVersion:
    """A question to git, under way. Without git, or outside of a repository, there is no answer."""

    def __init__(self, folder: Path) -> None:
        command = "git --no-optional-locks status --porcelain=v2 --branch --untracked-files=no"
        self._process: subprocess.Popen[str] | None = None
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                command.split(),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                errors="replace",
            )

    @functools.cached_property
    def answer(self) -> dict[str, Any]:
        """``commit``, and whether tracked files are ``dirty``; empty if git does not say it in a
        second.
        """
        if (process := self._process) is None:
            return {}
        try:
            lines = process.communicate(timeout=_WAIT_SECONDS)[0].splitlines()
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return {}
        commit = next((x.split()[-1] for x in lines if x.startswith("# branch.oid ")), "(initial)")
        if process.returncode or commit == "(initial)":
            return {}
        return {"commit": commit, "dirty": any(x[:1] != "#" for x in lines)}


@functools.cache
def ask_git() -> CodeVersion:
    """Ask git about the script's folder, once in this process."""
    script = Path(sys.argv[0] if sys.argv else "")
    return CodeVersion(script.parent if script.is_file() else Path.cwd())
