"""Page cache under a dataset: is a file in memory, and how fast is it if not?"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from ronde.world import ArgumentError

_NOWAIT = getattr(os, "RWF_NOWAIT", 0)
_LOOKS = 64  # pages of a file that are looked at


def in_cache(file: int, at: int = 0) -> bool | None:
    """Whether a byte of an open file is in memory, without reading from disk; None if unknown."""
    if not _NOWAIT:
        return None
    try:
        return os.preadv(file, [bytearray(1)], at, _NOWAIT) > 0
    except BlockingIOError:
        return False
    except OSError:
        return None


def _resident(path: Path, size: int) -> float | None:
    """By mincore(2)."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as mapped:
            pages = -(-size // mmap.PAGESIZE)
            vector = (ctypes.c_ubyte * pages)()
            start = np.frombuffer(mapped, dtype=np.uint8)
            failed = ctypes.CDLL(None, use_errno=True).mincore(
                ctypes.c_void_p(start.ctypes.data), ctypes.c_size_t(size), vector
            )
            del start
            return None if failed else sum(v & 1 for v in vector) / pages
    except (OSError, ValueError, AttributeError):
        return None


def cached_share(path: str | os.PathLike[str]) -> float | None:
    """Fraction of a file in memory, sampled for large files; None if the system does not say.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     n = file.write(b"x" * 10_000)
        ...     file.flush()
        ...     cached_share(file.name)
        1.0
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        size = os.fstat(file).st_size
        if size == 0:
            return 1.0
        pages = -(-size // mmap.PAGESIZE)
        sampled = np.linspace(0, pages - 1, min(pages, _LOOKS)).astype(int)
        looks = [in_cache(file, int(page) * mmap.PAGESIZE) for page in sampled]
        if None not in looks:
            return sum(map(bool, looks)) / len(looks)
    finally:
        os.close(file)
    return _resident(Path(path), size)


def evict(paths: Iterable[str | os.PathLike[str]]) -> int:
    """Ask the system to drop files from memory, after writing dirty pages.

    Returns:
        int: number of files. The system may keep them: see :func:`cached_share`.
    """
    asked = 0
    for path in paths:
        with suppress(OSError):
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                with suppress(OSError):
                    os.fdatasync(file)
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                asked += 1
            finally:
                os.close(file)
    return asked


def _sweep(files: Sequence[str], readers: int, seconds: float, cold: bool) -> tuple[float, float]:
    done = [(0, 0)] * readers
    lock = threading.Lock()
    place = 0
    end = 0.0

    def read(k: int) -> None:
        nonlocal place
        count = total = 0
        while time.perf_counter() < end:
            with lock:
                path, place = files[place % len(files)], place + 1
            with suppress(OSError):
                file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    if cold:
                        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                    while got := len(os.read(file, 1 << 20)):
                        total += got
                    count += 1
                finally:
                    os.close(file)
        done[k] = (count, total)

    threads = [threading.Thread(target=read, args=(k,), daemon=True) for k in range(readers)]
    begin = time.perf_counter()
    end = begin + seconds
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - begin
    return sum(c for c, _ in done) / took, sum(b for _, b in done) / took


def storage_sweep(
    files: Sequence[str | os.PathLike[str]],
    in_flight: Sequence[int] = (1, 4, 16),
    seconds: float = 1.0,
    cold: bool = True,
) -> dict[int, tuple[float, float]]:
    """Files and bytes per second the storage delivers with so many concurrent reads.

    Args:
        files: to be read whole, in turns.
        in_flight: numbers of readers to try, one after the other.
        seconds: for each.
        cold: evict each file before it is read. The host of a virtual machine may still cache it.

    Returns:
        dict: readers -> (files a second, bytes a second).

    Raises:
        ArgumentError: no files, or not a number of readers.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     n = file.write(b"x" * 10_000)
        ...     file.flush()
        ...     found = storage_sweep([file.name], (1, 2), seconds=0.01)
        >>> sorted(found), found[1][0] > 0
        ([1, 2], True)
    """
    names = [os.fspath(f) for f in files]
    if not names:
        raise ArgumentError("storage_sweep: no files to read.")
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in in_flight):
        raise ArgumentError(
            f"storage_sweep(in_flight={tuple(in_flight)!r}): expected numbers of readers, "
            "1 or more."
        )
    found = {}
    for readers in in_flight:
        if cold:
            evict(dict.fromkeys(names))
        found[readers] = _sweep(names, readers, seconds, cold)
    return found
