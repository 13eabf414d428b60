"""Track the files opened while a sample is made, so that a changed file invalidates its cached
samples.

Python reports every opened file to an audit hook: ``open``, ``os.open``, ``Path.read_bytes``,
NumPy, Pillow, tarfile. Libraries that open files natively (OpenCV, Arrow, HDF5) do not;
:func:`listing` covers those. A hook cannot be removed: it stays once a process has a cache, and is
inactive unless the same thread makes a sample.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import threading
from collections.abc import Iterable

from ronde.introspect import LIBRARY_FOLDERS

Files = dict[str, list[int]]
"""Of each file: its size and when it was written; nothing where it is not there."""
MOST_LISTED = 100_000
_local = threading.local()
_hooked = threading.Lock()
_CODE = (".py", ".pyc", ".so")  # what is imported counts by itself
# By folder, not by is_library_file: data that lies in another site-packages must count.
_SYSTEM = ("/proc/", "/sys/", *LIBRARY_FOLDERS)


def state(path: str) -> list[int]:
    """Size and modification time of a file or folder; empty if missing."""
    try:
        found = os.stat(path)  # noqa: PTH116 - for each sample that comes out of a cache
    except (OSError, ValueError):
        return []
    return (
        [found.st_size, found.st_mtime_ns]
        if stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)
        else []
    )


def _hook(event: str, args: tuple[object, ...]) -> None:
    if event not in ("open", "os.listdir", "os.scandir"):
        return
    files: Files | None = getattr(_local, "files", None)
    if files is None:
        return
    try:
        path = os.fsdecode(args[0])  # type: ignore[arg-type]
        if event == "open":
            flags = args[2]
            if (isinstance(flags, int) and flags & os.O_ACCMODE != os.O_RDONLY) or path.endswith(
                _CODE
            ):
                return
        elif path in sys.path_importer_cache or path in sys.path:
            return  # looked through by an import
        path = os.path.abspath(path)  # noqa: PTH100
        if path not in files and not path.startswith(_SYSTEM):
            files[path] = state(path)  # before it is read: what changes meanwhile has changed
    except Exception:  # a number, no path; and an error here would be one of whoever opens the file
        return


class Noting:
    """Record the files this thread opens within the block.

    Attributes:
        files: those that were opened for reading, and folders that were listed.
    """

    def __init__(self) -> None:
        self.files: Files = {}
        self._before: Files | None = None
        # once in a process, and in those that are forked from it
        if _hooked.acquire(blocking=False):
            sys.addaudithook(_hook)

    def __enter__(self) -> Noting:
        self._before = getattr(_local, "files", None)
        _local.files = self.files
        return self

    def __exit__(self, *_: object) -> None:
        _local.files = self._before
        note(self.files)


def note(files: Files) -> None:
    """Record files as opened here, from a cached record's dependencies."""
    noted: Files | None = getattr(_local, "files", None)
    if noted is not None:
        for path, was in files.items():
            noted.setdefault(path, was)


def listing(folders: Iterable[str]) -> tuple[str, str]:
    """A digest of all files below some folders, and the first folder with too many files, or "".

    Covers names, sizes and times; skips hidden folders and Ronde's own caches.
    """
    found = hashlib.sha256()
    left = MOST_LISTED
    walked: set[tuple[int, int]] = set()  # a link may lead to a folder above
    for folder in sorted(folders):
        for top, inner, names in os.walk(folder, followlinks=True):
            here = os.stat(top)  # noqa: PTH116
            if (here.st_dev, here.st_ino) in walked:
                inner.clear()
                continue
            walked.add((here.st_dev, here.st_ino))
            inner[:] = sorted(
                name for name in inner if not name.startswith((".", "ronde-cache-", "__pycache__"))
            )
            for name in sorted(names):
                path = os.path.join(top, name)  # noqa: PTH118
                found.update(f"{path}\0{state(path)}\0".encode("utf-8", "surrogatepass"))
                left -= 1
                if not left:
                    return found.hexdigest(), folder
    return found.hexdigest(), ""
