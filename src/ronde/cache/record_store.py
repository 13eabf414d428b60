"""A file of samples that many processes fill and read together; records never move and are never
evicted.

A private folder holds ``cache.bin`` (records), ``cache.idx`` (a header and one entry per sample)
and ``lock``. Space is reserved under a lock, then the record is written, then its entry. A process
killed in between only loses its reserved space. Entries and records carry checksums, so torn or
damaged data is a miss.

The locks are POSIX record locks: the kernel releases a dead process's locks, and a forked child
does not inherit them, unlike ``flock``. They act between processes only, and closing *any*
descriptor of the file drops them. Each process therefore has one arena per folder, reopened in a
child and never closed there.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import math
import mmap
import os
import stat
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import numpy as np

from ronde.cache.budget import disk_reserve, free_disk, free_memory
from ronde.world import RondeError
from ronde.world.whole_file import write_whole

_MAGIC = b"RONDEC01"
_HEADER = 4096
# magic, samples, bytes given out, the limit that the first user had, checksum
_HEAD = struct.Struct("<8sQQQI")
_COUNTERS_AT = 64
_ENTRY = struct.Struct("<QQII8x")  # place, length, checksum of the record, checksum of the entry
_NOTHING = bytes(_ENTRY.size)
_ALIGN = 64
_PAGE = 4096
_MAP_FROM = 32 << 10  # bytes; a smaller record is copied faster than it is mapped
# bytes of the lock file: held while room is given out, and by everybody who uses the arena
_ALLOCATE, _USE = (0, 1)
_LOOK_AGAIN_BYTES, _LOOK_AGAIN_SECONDS = 32 << 20, 1.0
_GIVE_UP_AFTER = (
    8  # refusals in a row for want of room below the limit: then it is full for this process
)

COUNTERS = (
    "hits",
    "misses",
    "hit_bytes",
    "admitted",
    "admitted_bytes",
    "full",
    "no_room",
    "not_kept",
    "random",
    "corrupt",
    "changed",
)
"""What is counted, over all processes and runs that used the arena."""


class StoredRecord:
    """A record, or why it is missing."""

    __slots__ = ("data", "entry")

    def __init__(self, data: memoryview | None, entry: bytes) -> None:
        self.data = data
        self.entry = (
            entry  # as it stood in the index: of a damaged record, so that it may be replaced
        )


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_FAILED = ctypes.c_void_p(-1).value


class _Mapping:
    """Pages that live as long as an array in them; ``mmap`` would keep a descriptor open."""

    def __init__(self, address: int, size: int) -> None:
        self._address = address
        self._size = size
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (size,),
            "typestr": "|u1",
            "version": 3,
        }

    def __del__(self, munmap: Callable[[int, int], int] = _libc.munmap) -> None:
        munmap(self._address, self._size)


def _missing(entry: bytes) -> StoredRecord:
    return StoredRecord(None, entry)


class Arena:
    """An open arena; see :func:`open_arena`.

    Args:
        folder: where its files are.
        samples: how many there may be.
        limit: bytes of files that this process lets it grow to; None: what the first user's limit
            was, or ``default()``.
        default: bytes to allow where nobody said; asked only where the arena is new.
        memory: it stands in memory: it is removed when its last user leaves.
        reserve: bytes that are left free where it stands.
        about: what is in it, for people: written beside it as JSON.
    """

    def __init__(
        self,
        folder: Path,
        samples: int,
        limit: int | None,
        default: Callable[[], int],
        memory: bool,
        reserve: int | None,
        about: dict[str, Any],
    ) -> None:
        self.folder = folder
        self._reserve = reserve
        self.samples = samples
        self.memory = memory
        self.pid = os.getpid()
        self._lock = threading.Lock()
        # -1 each once it was left: those numbers may be another file's by then
        self._fds = list(_join(folder))
        self.users: WeakSet[Any] = WeakSet()
        self._verified = bytearray(samples if memory else 0)
        self._refused = 0
        self._stopped_until = 0.0
        self._looked_at, self._since_look = -1.0, 0
        self._leave = Finalize(
            self, _leave, (str(folder), self._fds, memory, self.pid), exitpriority=-10
        )
        with self._exclusively():
            self.limit = self._found_or_made(limit, default, about)

    @property
    def _lock_fd(self) -> int:
        return self._fds[0]

    @property
    def _index(self) -> int:
        return self._fds[1]

    @property
    def _records(self) -> int:
        return self._fds[2]

    @property
    def _index_bytes(self) -> int:
        return _HEADER + self.samples * _ENTRY.size

    def _found_or_made(
        self, limit: int | None, default: Callable[[], int], about: dict[str, Any]
    ) -> int:
        head = self._head()
        cut = os.fstat(self._index).st_size < self._index_bytes
        if head is not None and head[0] == self.samples and not (cut and self._only_user()):
            # and in use: what the lost entries stood for is read anew, and the room that they had
            # is lost
            if cut:
                os.ftruncate(self._index, self._index_bytes)
            if not self.memory:
                self._repair_end(head[1], head[2])
            return limit if limit is not None else head[2]
        # Without a beginning it is new, or whoever made it was killed: nobody has used it.
        # Otherwise it is damaged, or was cut short.
        if any(os.pread(self._index, _HEAD.size, 0)) and not self._only_user():
            raise RondeError(
                f"the cache {self.folder} is damaged, and in use. End the runs that use it, or "
                "choose another folder."
            )
        chosen = limit if limit is not None else default()
        for fd in (self._index, self._records):
            os.ftruncate(fd, 0)
        os.ftruncate(self._index, self._index_bytes)
        write_whole(self.folder / "about.json", json.dumps(about, indent=1).encode())
        self._set_head(0, chosen)
        return chosen

    def _repair_end(self, tail: int, limit: int) -> None:
        """Move the header's end behind the last entry: after a power loss the header may be older
        than entries.

        While the machine runs, no entry lies behind the header's end, so other users see no change.
        """
        end = tail
        for at in range(_HEADER, self._index_bytes, 1 << 20):
            block = os.pread(self._index, min(1 << 20, self._index_bytes - at), at)
            rows = np.frombuffer(
                block, "<u8", len(block) // _ENTRY.size * (_ENTRY.size // 8)
            ).reshape(-1, _ENTRY.size // 8)
            ends = rows[:, 0] + rows[:, 1]
            for k in np.flatnonzero(ends > end).tolist():
                entry = block[k * _ENTRY.size : (k + 1) * _ENTRY.size]
                if _entry_sum(entry, (at - _HEADER) // _ENTRY.size + k) == _ENTRY.unpack(entry)[3]:
                    end = max(end, int(ends[k]))
        if end > tail:
            self._set_head(end + -end % _ALIGN, limit)

    def _head(self) -> tuple[int, int, int] | None:
        """Samples, reserved bytes and the first user's limit; None if damaged."""
        head = os.pread(self._index, _HEAD.size, 0)
        if (
            len(head) < _HEAD.size
            or head[:8] != _MAGIC
            or zlib.crc32(head[:-4]) != _HEAD.unpack(head)[4]
        ):
            return None
        _, samples, tail, limit, _ = _HEAD.unpack(head)
        return samples, tail, limit

    def _set_head(self, tail: int, limit: int) -> None:
        head = _HEAD.pack(_MAGIC, self.samples, tail, limit, 0)[:-4]
        os.pwrite(self._index, head + struct.pack("<I", zlib.crc32(head)), 0)

    def _only_user(self) -> bool:
        try:
            fcntl.lockf(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _USE)
        except OSError:
            return False
        fcntl.lockf(self._lock_fd, fcntl.LOCK_SH, 1, _USE)
        return True

    @contextmanager
    def _exclusively(self) -> Iterator[None]:
        """Exclusive access among threads and processes."""
        with self._lock:
            if self._lock_fd < 0:
                raise OSError(errno.EBADF, "the cache was closed")
            fcntl.lockf(self._lock_fd, fcntl.LOCK_EX, 1, _ALLOCATE)
            try:
                yield
            finally:
                fcntl.lockf(self._lock_fd, fcntl.LOCK_UN, 1, _ALLOCATE)

    # -- reading -----------------------------------------------------------------------

    def _entry(self, i: int) -> bytes:
        """The index entry; zeros beyond a truncated index."""
        return os.pread(self._index, _ENTRY.size, _HEADER + i * _ENTRY.size).ljust(
            _ENTRY.size, b"\0"
        )

    def get(self, i: int) -> StoredRecord:
        """Sample ``i``'s record, in its own memory; a damaged one is counted as a miss."""
        entry = self._entry(i)
        if entry == _NOTHING:
            return _missing(_NOTHING)
        if _entry_sum(entry, i) != _ENTRY.unpack(entry)[3]:
            with self._exclusively():  # it was being written just now, or it is damaged
                entry = self._entry(i)
            if _entry_sum(entry, i) != _ENTRY.unpack(entry)[3]:
                self.count(corrupt=1)
                return _missing(entry)
        start, length, checksum, _ = _ENTRY.unpack(entry)
        data = self._mapped(start, length) if self.memory and length >= _MAP_FROM else None
        if data is None:
            data = np.empty(length, np.uint8).data
            whole = self._read_into(data, start)
        else:
            whole = True
        # In memory once in each process: what lies there does not rot. On a disk each time: pages
        # may be read from it anew.
        if not whole or (not (self.memory and self._verified[i]) and zlib.crc32(data) != checksum):
            self.count(corrupt=1)
            return _missing(entry)
        if self.memory:
            self._verified[i] = 1
        return StoredRecord(data, entry)

    def _mapped(self, start: int, length: int) -> memoryview | None:
        """Map a record copy-on-write.

        In memory only: a disk error under a map would kill the process.
        """
        if start + length > os.fstat(self._records).st_size:
            return None
        first = start - start % _PAGE
        address = _libc.mmap(
            None, start + length - first, _READ_WRITE, mmap.MAP_PRIVATE, self._records, first
        )
        if address in (None, _FAILED):
            return None  # too many mappings: somebody keeps thousands of samples
        return np.asarray(_Mapping(address, start + length - first)).data[start - first :]

    def _read_into(self, data: memoryview, start: int) -> bool:
        done = 0
        while done < len(data):
            got = os.preadv(self._records, [data[done:]], start + done)
            if got <= 0:
                return False  # cut short from outside
            done += got
        return True

    # -- writing -----------------------------------------------------------------------

    @property
    def closed_to_more(self) -> str:
        """The counter to bump when nothing more is stored, at least for now; else ""."""
        if self._refused >= _GIVE_UP_AFTER:
            return "full"
        return "no_room" if time.monotonic() < self._stopped_until else ""

    def put(self, records: Sequence[tuple[int, list[bytes | memoryview], bytes]]) -> None:
        """Store records while there is space.

        Args:
            records: sample, its parts, and the entry that :meth:`get` found: only in its place,
                first come stays.
        """
        placed: list[tuple[int, list[bytes | memoryview], bytes, int, int]] = []
        counts = {"full": 0, "no_room": 0}
        with self._exclusively():
            head = self._head()
            if head is None:  # damaged under our feet: room that is in use might be given out again
                self._stopped_until = math.inf
                return
            _, tail, first_limit = head
            first = tail
            for i, parts, expected in records:
                if self._entry(i) != expected:
                    continue  # somebody else was faster
                length = sum(len(p) for p in parts)
                after = tail + length + -length % _ALIGN
                if self._index_bytes + after + -after % _PAGE > self.limit:
                    counts["full"] += 1
                    self._refused += 1
                elif not self._room_for(after - tail):
                    counts["no_room"] += 1
                else:
                    self._refused = 0
                    placed.append((i, parts, expected, tail, length))
                    tail = after
            if tail != first:
                self._set_head(tail, first_limit)
        written: list[tuple[int, bytes, bytes, int]] = []
        try:
            for i, parts, expected, start, length in placed:
                checksum = 0
                for part in parts:
                    checksum = zlib.crc32(part, checksum)
                self._write(parts, start)
                body = _ENTRY.pack(start, length, checksum, 0)
                written.append(
                    (i, _ENTRY.pack(start, length, checksum, _entry_sum(body, i)), expected, length)
                )
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            counts["no_room"] += len(placed) - len(written)
            self._stopped_until = time.monotonic() + 10.0
        self._publish(written, counts)

    def _write(self, parts: list[bytes | memoryview], start: int) -> None:
        left = [memoryview(p) for p in parts if len(p)]
        while left:
            done = os.pwritev(self._records, left[:512], start)
            start += done
            while left and done >= len(left[0]):
                done -= len(left.pop(0))
            if done:
                left[0] = left[0][done:]

    def _publish(
        self, written: list[tuple[int, bytes, bytes, int]], counts: dict[str, int]
    ) -> None:
        if not written and not any(counts.values()):
            return
        admitted = admitted_bytes = 0
        with self._exclusively():
            for i, entry, expected, length in written:
                if self._entry(i) == expected:
                    try:
                        os.pwrite(self._index, entry, _HEADER + i * _ENTRY.size)
                    except (
                        OSError
                    ):  # a page of the index that did not exist yet, and no space for it
                        counts["no_room"] += 1
                        continue
                    admitted += 1
                    admitted_bytes += length
            self._add({"admitted": admitted, "admitted_bytes": admitted_bytes, **counts})

    def _room_for(self, size: int) -> bool:
        """Whether the disk or memory has space beyond the reserve; checked now and then."""
        now = time.monotonic()
        self._since_look += size
        if (
            self._looked_at >= 0
            and self._since_look < _LOOK_AGAIN_BYTES
            and now - self._looked_at < _LOOK_AGAIN_SECONDS
        ):
            return True
        self._looked_at, self._since_look = now, size
        free, total = free_disk(self._records)
        room = free - (disk_reserve(total, self.memory) if self._reserve is None else self._reserve)
        if self.memory:
            # What is written into /dev/shm is memory, and the container's limit counts it.
            room = min(room, free_memory() - _memory_reserve())
        if room >= size + _LOOK_AGAIN_BYTES:
            return True
        self._looked_at = -1.0  # near the end: look each time
        if room >= size:
            return True
        self._stopped_until = now + 10.0
        return False

    # -- counting ----------------------------------------------------------------------

    def count(self, **amounts: int) -> dict[str, int]:
        """Add to the counters of all processes; returns the previous values."""
        with self._exclusively():
            return self._add(amounts)

    def _add(self, amounts: dict[str, int]) -> dict[str, int]:
        size = 8 * len(COUNTERS)
        values = np.frombuffer(
            bytearray(os.pread(self._index, size, _COUNTERS_AT).ljust(size, b"\0")), np.uint64
        )
        before = dict(zip(COUNTERS, values.tolist(), strict=True))
        for name, amount in amounts.items():
            values[COUNTERS.index(name)] += np.uint64(amount)
        os.pwrite(self._index, values.tobytes(), _COUNTERS_AT)
        return before

    def totals(self) -> tuple[dict[str, int], int]:
        """The counters, and bytes the arena's files use."""
        with self._exclusively():
            tail = (self._head() or (0, 0, 0))[1]
            return self._add({}), self._index_bytes + tail + -tail % _PAGE

    def held(self) -> int:
        """Number of samples stored; reads the whole index."""
        held = 0
        for start in range(_HEADER, self._index_bytes, 1 << 20):
            block = os.pread(self._index, min(1 << 20, self._index_bytes - start), start)
            rows = np.frombuffer(
                block, np.uint64, len(block) // _ENTRY.size * (_ENTRY.size // 8)
            ).reshape(-1, _ENTRY.size // 8)
            held += int(rows[:, 1:3].any(axis=1).sum())
        return held

    def close(self, user: object) -> None:
        """Release one user here; an in-memory arena is deleted with its last user anywhere."""
        with _guard:
            self.users.discard(user)
            if not self.users:
                self._leave()


def _entry_sum(entry: bytes, i: int) -> int:
    """Checksum of place, length, checksum and sample; never equals an empty entry's."""
    return zlib.crc32(entry[:20] + struct.pack("<Q", i))


def _memory_reserve() -> int:
    import psutil

    return max(256 << 20, int(psutil.virtual_memory().total) // 20)


# -- coming and going ------------------------------------------------------------------

_guard = threading.RLock()
_open: WeakValueDictionary[str, Arena] = WeakValueDictionary()


def _in_child() -> None:
    global _guard, _open
    _guard, _open = threading.RLock(), WeakValueDictionary()


os.register_at_fork(after_in_child=_in_child)


def is_private(folder: Path) -> bool:
    """Whether a folder is this user's and closed to others; anyone can name one in /dev/shm."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return (
        stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
    )


def _join(folder: Path) -> tuple[int, int, int]:
    """Open an arena's files as a user; creates missing ones."""
    for _ in range(1000):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not is_private(folder):
                raise RondeError(
                    f"the cache folder {folder} belongs to another user or is open to others. "
                    "Remove it, or make it 0700."
                )
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:
            continue  # its last user removed it just now
        # Whoever removes it holds this lock alone: then what was opened is no longer there.
        fcntl.lockf(lock, fcntl.LOCK_SH, 1, _USE)
        try:
            if (folder / "lock").stat().st_ino == os.fstat(lock).st_ino:
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
                return (
                    lock,
                    os.open(folder / "cache.idx", flags, 0o600),
                    os.open(folder / "cache.bin", flags, 0o600),
                )
        except FileNotFoundError:
            pass
        os.close(lock)
    raise RondeError(f"the cache folder {folder} keeps disappearing: something removes it.")


def _leave(folder: str, fds: list[int], memory: bool, pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked child: to close these would give up the locks that it holds itself
    mine = list(fds)
    lock = mine[0]
    fds[:] = [-1] * len(mine)
    with _guard, suppress(OSError):
        # One after the other: of two who leave at once, one must see that it is the last.
        fcntl.lockf(lock, fcntl.LOCK_EX, 1, _ALLOCATE)
        if memory:
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _USE)
                _remove_files(Path(folder))
            except OSError:
                pass  # others use it
        for fd in mine:
            os.close(fd)  # gives the locks back


def _remove_files(folder: Path) -> int:
    """Delete an exclusively held arena. The lock file goes last, so that newcomers wait."""
    freed = 0
    names = [p for p in folder.iterdir() if p.name != "lock"]
    for path in [*names, folder / "lock"]:
        with suppress(FileNotFoundError):
            freed += path.lstat().st_blocks * 512
            path.unlink()
    with suppress(OSError):
        folder.rmdir()
    return freed


def remove_unused(parent: Path, prefix: str) -> tuple[int, int]:
    """Remove arenas without users: of killed processes, or kept ones.

    Args:
        parent: where to look.
        prefix: how their folders' names begin.

    Returns:
        tuple: how many were removed, and bytes freed.
    """
    count = freed = 0
    try:
        folders = [p for p in parent.iterdir() if p.name.startswith(prefix)]
    except OSError:
        return 0, 0
    for folder in folders:
        with _guard, suppress(OSError):
            if str(folder) in _open or not is_private(folder):
                continue
            try:
                lock = os.open(folder / "lock", os.O_RDWR | os.O_NOFOLLOW)
            except FileNotFoundError:
                if time.time() - folder.lstat().st_mtime > 60:  # else it is being made
                    folder.rmdir()
                continue
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _USE)
                if (folder / "lock").stat().st_ino == os.fstat(lock).st_ino:
                    freed += _remove_files(folder)
                    count += 1
            except OSError:
                pass  # in use
            finally:
                os.close(lock)
    return count, freed


def open_arena(
    folder: Path,
    samples: int,
    limit: int | None,
    default: Callable[[], int],
    memory: bool,
    reserve: int | None,
    about: dict[str, Any],
    user: object,
) -> Arena:
    """This process's arena of a folder; see :class:`Arena` for the arguments.

    Args:
        user: who will ``close(user)`` it; it is left when all of its users did so, or are gone.

    Raises:
        RondeError: the folder is not this user's own.
        OSError: it cannot be made or written.
    """
    with _guard:
        found = _open.get(str(folder))
        if found is None or found.pid != os.getpid() or not found._leave.still_active():
            found = Arena(folder, samples, limit, default, memory, reserve, about)
            _open[str(folder)] = found
        found.users.add(user)
        return found
