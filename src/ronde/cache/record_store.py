"""A file of samples that many processes fill and read together; records never move and are never
evicted.

A private folder holds ``cache.bin`` (records), ``cache.idx`` (a header, counters and one entry per
sample), ``lock`` and ``use``. Space is reserved under the lock, then the record is written, then
its entry. A process killed in between only loses its reserved space. Entries and records carry
checksums, so torn or damaged data is a miss.

Whoever uses a cache holds a shared ``flock`` on ``use``, which the kernel gives back when the
process dies. The last user of a cache in memory gets that lock for himself, and removes it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.util import Finalize
from pathlib import Path

import numpy as np

from ronde.cache.budget import disk_reserve, free_disk, free_memory
from ronde.world import RondeError

_MAGIC = b"RONDEC04"
_HEADER_BYTES = 4096
_HEAD = struct.Struct("<8sQQQI")  # magic, samples, bytes given out, limit, checksum
_COUNTERS_AT = 64
_ENTRY = struct.Struct("<QQII8x")  # place, length, checksum of the record, checksum of the entry
_NOTHING = bytes(_ENTRY.size)
_ALIGN_BYTES = 64
_PAGE_BYTES = 4096
_FREE_SHARE = 0.5  # of the free memory or disk, where no limit is given

COUNTERS = ("hits", "misses", "full", "not_kept", "random", "corrupt")
"""What is counted, over all processes and runs that used the cache."""

Record = tuple[int, Sequence[bytes | memoryview]]
"""A sample's number, and the parts of its record."""


class Arena:
    """An open cache folder.

    Args:
        folder: where its files are; made where there is none.
        samples: how many there may be.
        limit: bytes of files that this process lets it grow to. None: the limit of whoever made
            it, or half of what is free.
        memory: it stands in memory: it is removed when its last user leaves.
        share: caches like this one on the node, which divide what is free.

    Raises:
        RondeError: the folder is not this user's own, or is damaged and in use.
        OSError: it cannot be made or written.
    """

    def __init__(
        self,
        folder: Path,
        samples: int,
        limit: int | None,
        memory: bool,
        share: int = 1,
    ) -> None:
        self.folder = folder
        self.samples = samples
        self.memory = memory
        self.is_full = False
        self._verified: set[int] = set()
        self._damaged: set[int] = set()
        self._use = _join(folder)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        self._index = os.open(folder / "cache.idx", flags, 0o600)
        self._records = os.open(folder / "cache.bin", flags, 0o600)
        files = self._use, self._index, self._records
        # After torch's loading processes, which still use it, have ended.
        self._at_exit = Finalize(self, _leave, (folder, files, memory), exitpriority=-10)
        with self._exclusively():
            self.limit = self._open_or_make(limit, share)

    @property
    def _index_bytes(self) -> int:
        return _HEADER_BYTES + self.samples * _ENTRY.size

    @contextmanager
    def _exclusively(self) -> Iterator[None]:
        """Hold the lock, which also excludes this process's other threads and forked children."""
        file = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)

    def _open_or_make(self, limit: int | None, share: int) -> int:
        head = self._head()
        cut = os.fstat(self._index).st_size < self._index_bytes
        if head is not None and head[0] == self.samples and not cut:
            return limit if limit is not None else head[2]
        if any(os.pread(self._index, _HEAD.size, 0)) and not self._is_only_user():
            raise RondeError(
                f"the cache {self.folder} is damaged, and in use. End the runs that use it, or "
                "choose another folder."
            )
        chosen = limit if limit is not None else max(1, int(self._room() * _FREE_SHARE) // share)
        for file in (self._index, self._records):
            os.ftruncate(file, 0)
        os.ftruncate(self._index, self._index_bytes)
        self._set_head(0, chosen)
        return chosen

    def _is_only_user(self) -> bool:
        try:
            fcntl.flock(self._use, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        finally:
            fcntl.flock(self._use, fcntl.LOCK_SH)
        return True

    def _head(self) -> tuple[int, int, int] | None:
        """Samples, bytes given out and the first user's limit; None if damaged."""
        head = os.pread(self._index, _HEAD.size, 0)
        if len(head) < _HEAD.size or head[:8] != _MAGIC:
            return None
        _, samples, tail, limit, checksum = _HEAD.unpack(head)
        return (samples, tail, limit) if zlib.crc32(head[:-4]) == checksum else None

    def _set_head(self, tail: int, limit: int) -> None:
        head = _HEAD.pack(_MAGIC, self.samples, tail, limit, 0)[:-4]
        os.pwrite(self._index, head + struct.pack("<I", zlib.crc32(head)), 0)

    def _entry(self, i: int) -> bytes:
        """The index entry; zeros beyond a truncated index."""
        at = _HEADER_BYTES + i * _ENTRY.size
        return os.pread(self._index, _ENTRY.size, at).ljust(_ENTRY.size, b"\0")

    # -- reading -----------------------------------------------------------------------

    def get(self, i: int) -> memoryview | None:
        """Sample ``i``'s record, in its own memory; None where it is missing or damaged."""
        entry = self._entry(i)
        if entry == _NOTHING:
            return None
        if not _is_sound(entry, i):
            with self._exclusively():  # it was being written just now, or it is damaged
                entry = self._entry(i)
        data = self._read(entry) if _is_sound(entry, i) else None
        # In memory once in each process: what lies there does not rot.
        if data is None or (
            i not in self._verified and zlib.crc32(data) != _ENTRY.unpack(entry)[2]
        ):
            self._damaged.add(i)
            self.count(corrupt=1)
            return None
        if self.memory:
            self._verified.add(i)
        return data

    def _read(self, entry: bytes) -> memoryview | None:
        start, length, _, _ = _ENTRY.unpack(entry)
        data = np.empty(length, np.uint8).data
        done = 0
        while done < length:
            got = os.preadv(self._records, [data[done:]], start + done)
            if got <= 0:
                return None  # cut short from outside
            done += got
        return data

    # -- writing -----------------------------------------------------------------------

    def put(self, records: Sequence[Record]) -> int:
        """Store records while there is space; what another process was faster with stays.

        Returns:
            int: how many were left out.
        """
        placed: list[tuple[int, bytes, int]] = []
        left_out = 0
        with self._exclusively():
            head = self._head()
            if head is None:  # damaged under our feet: space in use might be given out again
                return len(records)
            first, room = head[1], self._room()
            tail = first
            for i, parts in records:
                if not self._is_wanted(i):
                    continue
                data = b"".join(parts)
                after = tail + len(data) + -len(data) % _ALIGN_BYTES
                if self._index_bytes + after + -after % _PAGE_BYTES > self.limit:
                    left_out += 1
                    self.is_full = True
                elif after - first > room:
                    left_out += 1
                else:
                    placed.append((i, data, tail))
                    tail = after
            if tail != first:
                self._set_head(tail, head[2])
        for i, data, start in placed:
            if not self._write(i, data, start):
                left_out += 1
        return left_out

    def _is_wanted(self, i: int) -> bool:
        return self._entry(i) == _NOTHING or i in self._damaged

    def _write(self, i: int, data: bytes, start: int) -> bool:
        """Write a record, then its entry; False where the disk is full."""
        body = struct.pack("<QQI", start, len(data), zlib.crc32(data))
        entry = body + struct.pack("<I8x", _entry_sum(body, i))
        try:
            if os.pwrite(self._records, data, start) < len(data):
                return False
            with self._exclusively():
                if self._is_wanted(i):
                    os.pwrite(self._index, entry, _HEADER_BYTES + i * _ENTRY.size)
                    self._damaged.discard(i)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            return False
        return True

    def _room(self) -> int:
        """Bytes that may still be written beyond the reserve."""
        free, total = free_disk(self.folder)
        room = free - disk_reserve(total, self.memory)
        # What is written into /dev/shm is memory, and the container's limit counts it.
        return min(room, free_memory() * 19 // 20) if self.memory else room

    # -- counting ----------------------------------------------------------------------

    def count(self, **amounts: int) -> dict[str, int]:
        """Add to the counters of all processes; returns the previous values."""
        size = 8 * len(COUNTERS)
        with self._exclusively():
            read = bytearray(os.pread(self._index, size, _COUNTERS_AT).ljust(size, b"\0"))
            values = np.frombuffer(read, np.uint64)
            before = dict(zip(COUNTERS, values.tolist(), strict=True))
            for name, amount in amounts.items():
                values[COUNTERS.index(name)] += np.uint64(amount)
            if any(amounts.values()):
                os.pwrite(self._index, values.tobytes(), _COUNTERS_AT)
        return before

    def used_bytes(self) -> int:
        """Bytes of its files."""
        tail = (self._head() or (0, 0, 0))[1]
        return self._index_bytes + tail + -tail % _PAGE_BYTES

    def held(self) -> int:
        """Number of samples stored; reads the whole index."""
        entries = os.pread(self._index, self._index_bytes - _HEADER_BYTES, _HEADER_BYTES)
        whole = entries[: len(entries) // _ENTRY.size * _ENTRY.size]
        rows = np.frombuffer(whole, np.uint64).reshape(-1, _ENTRY.size // 8)
        return int(rows[:, 1:3].any(axis=1).sum())

    def close(self) -> None:
        """Leave it, as process exit does."""
        files = self._use, self._index, self._records
        self._use = self._index = self._records = -1  # the numbers may be another file's next
        self._at_exit.cancel()
        if files[0] >= 0:
            _leave(self.folder, files, self.memory)


def _entry_sum(entry: bytes, i: int) -> int:
    """Checksum of place, length, checksum and sample; never equals an empty entry's."""
    return zlib.crc32(entry[:20] + struct.pack("<Q", i))


def _is_sound(entry: bytes, i: int) -> bool:
    return _entry_sum(entry, i) == int(_ENTRY.unpack(entry)[3])


# -- coming and going ------------------------------------------------------------------


def _is_private(folder: Path) -> bool:
    """Whether a folder is this user's and closed to others; anyone can name one in /dev/shm."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    is_mine = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    return is_mine and not status.st_mode & 0o077


def _join(folder: Path) -> int:
    """Become a user of a folder: a file descriptor that holds the shared lock."""
    for _ in range(1000):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_private(folder):
            raise RondeError(
                f"the cache folder {folder} belongs to another user or is open to others. "
                "Remove it, or make it 0700."
            )
        with suppress(FileNotFoundError):  # its last user removed it just now
            use = os.open(folder / "use", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            if _holds(folder, use, fcntl.LOCK_SH):
                return use
    raise RondeError(f"the cache folder {folder} keeps disappearing: something removes it.")


def _holds(folder: Path, use: int, how: int) -> bool:
    """Lock the file ``use``, and make sure that it is still the folder's; else close it."""
    with suppress(OSError):
        fcntl.flock(use, how)
        if (folder / "use").stat().st_ino == os.fstat(use).st_ino:
            return True
    os.close(use)
    return False


def _leave(folder: Path, files: Iterable[int], memory: bool) -> None:
    for file in files:
        os.close(file)
    if memory:
        _remove(folder)


def _remove(folder: Path) -> int:
    """Delete a folder, unless somebody uses it; bytes freed."""
    freed = 0
    with suppress(OSError):
        use = os.open(folder / "use", os.O_RDWR | os.O_NOFOLLOW)
        if not _holds(folder, use, fcntl.LOCK_EX | fcntl.LOCK_NB):
            return 0
        # The file that newcomers wait for goes last.
        for path in sorted(folder.iterdir(), key=lambda path: path.name == "use"):
            freed += path.lstat().st_blocks * 512
            path.unlink()
        os.close(use)
        folder.rmdir()
    return freed


def remove_unused(parent: Path, prefix: str) -> int:
    """Remove caches without users: of killed processes, or kept ones.

    Args:
        parent: where to look.
        prefix: how their folders' names begin.

    Returns:
        int: bytes freed.
    """
    freed = 0
    folders = [p for p in parent.glob(f"{prefix}*") if _is_private(p)] if parent.is_dir() else []
    for folder in folders:
        with suppress(OSError):
            freed += _remove(folder)
    return freed
