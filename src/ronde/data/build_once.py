"""Build files derived from data once per node, atomically: the matrices of tables.

A list next to the files holds their sizes: a folder damaged by a power loss or a temp cleaner is
rebuilt.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from ronde.world import ArgumentError
from ronde.world.paths import BUILT_LIST, is_disk_full
from ronde.world.whole_file import whole_folder


def cache_root() -> Path:
    """``$XDG_CACHE_HOME/ronde``, or ``~/.cache/ronde``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ronde"


def _is_complete(folder: Path) -> bool:
    """Whether a folder from :func:`build_once` is complete, according to its list."""
    try:
        files = json.loads((folder / BUILT_LIST).read_bytes())
        return all((folder / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, AttributeError):
        return False


def build_once(root: Path, key: str, make: Callable[[Path], None]) -> Path:
    """Return ``root/key``, and call ``make(folder)`` first if it is missing or damaged.

    Other processes on this machine that want the same folder wait. If ``make`` fails, nothing is
    left.

    Raises:
        ArgumentError: nothing can be written below ``root``, or not all of it.
    """
    final = root / key
    if _is_complete(final):
        return final
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = open(root / f".{key}.lock", "w")  # noqa: SIM115
    except OSError as error:
        raise ArgumentError(
            f"{root} cannot be written to ({error.strerror}): give another folder with cache=."
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _is_complete(final):  # else another process was faster
            shutil.rmtree(final, ignore_errors=True)  # its readers keep the files that they mapped
            try:
                with whole_folder(final) as folder:
                    make(folder)
                    sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
                    (folder / BUILT_LIST).write_text(json.dumps(sizes))
            except OSError as error:
                if is_disk_full(error):
                    raise ArgumentError(
                        f"{root}: the disk is full ({error}). Make room there, or give a "
                        "folder on another disk with cache=."
                    ) from error
                if not _is_complete(final):  # by who took a new lock after another had failed
                    raise
            finally:
                with contextlib.suppress(OSError):  # who waits for it finds the folder
                    Path(lock.name).unlink()
    return final
