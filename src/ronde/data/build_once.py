"""Build files derived from data once per node, atomically: the matrices of tables.

A list next to the files holds their sizes: a folder damaged by a power loss or a temp cleaner is
rebuilt.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from ronde.world import ArgumentError
from ronde.world.paths import BUILT_LIST, is_disk_full


def cache_root(given: str | os.PathLike[str] | None) -> Path:
    """The folder asked for, or ``$XDG_CACHE_HOME/ronde``, or ``~/.cache/ronde``."""
    if given is not None:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ronde"


def _is_complete(folder: Path) -> bool:
    """Whether a folder from :func:`build_once` is complete, according to its list."""
    try:
        files = json.loads((folder / BUILT_LIST).read_bytes())
        return all((folder / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, AttributeError):
        return False


def missing_message(folder: Path, what: str, error: Exception) -> ArgumentError:
    """The message for a folder that was complete and can no longer be read."""
    return ArgumentError(
        f"{folder}, where {what} are kept, is missing or damaged ({error}). Run again to rebuild "
        "it."
    )


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
        if _is_complete(final):  # another process was faster
            return final
        temporary = Path(tempfile.mkdtemp(prefix=f".{key}.", suffix=".writing", dir=root))
        damaged = temporary / "damaged"
        try:
            make(temporary)
            sizes = {file.name: file.stat().st_size for file in sorted(temporary.iterdir())}
            (temporary / BUILT_LIST).write_text(json.dumps(sizes))
            temporary.chmod(0o755)
            if final.exists():  # who reads it goes on with the files that it has open
                final.rename(damaged)
            temporary.rename(final)
        except BaseException as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if not (isinstance(error, OSError) and _is_complete(final)):
                if is_disk_full(error):
                    raise ArgumentError(
                        f"{root}: the disk is full ({error}). Make room there, or give a "
                        "folder on another disk with cache=."
                    ) from error
                raise
        finally:
            shutil.rmtree(final / damaged.name, ignore_errors=True)
            with contextlib.suppress(OSError):
                os.unlink(root / f".{key}.lock")  # noqa: PTH108 - who still waits for it finds the folder, or makes it once more
    return final


def identity(files: Sequence[Path]) -> str:
    """A digest of the files' paths, sizes and times."""
    digest = hashlib.sha256()
    for file in files:
        info = file.stat()
        digest.update(
            f"{file.resolve()}\0{info.st_size}\0{info.st_mtime_ns}\0".encode(
                "utf-8", "surrogateescape"
            )
        )
    return digest.hexdigest()
