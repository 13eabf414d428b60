"""Lock-free shared-memory counters of per-stage cost, one slot per thread.

Only its thread writes a slot; readers sum all slots. Counts only grow, so the difference of two
reads is what happened between them. A dead thread's slot is reused as it is.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from dataclasses import dataclass
from pathlib import Path

_SLOT_BYTES = 8192
_HEAD = 8  # 64-bit numbers: pid, thread id, names, then nothing yet
_NAMES = 2
STAGES = 40
FIELDS = 5
CALLS, SAMPLES, CPU, WALL, BYTES = range(FIELDS)
_NAME_AT = 2048
_NAME_BYTES = 64


@dataclass(frozen=True)
class StageTimes:
    """One stage's cost over all reading threads and processes.

    Attributes:
        calls: times that it was done.
        samples: samples that it was done for.
        cpu_seconds: CPU time of the reading process, with the threads that a library starts in it;
            with loading threads, of the reading threads alone.
        wall_seconds: time on the clock, summed over the threads; waiting for storage or for
            Python's lock is in it.
        bytes: that were read, where that is known.
    """

    calls: int = 0
    samples: int = 0
    cpu_seconds: float = 0.0
    wall_seconds: float = 0.0
    bytes: int = 0

    def __add__(self, other: StageTimes) -> StageTimes:
        return StageTimes(
            self.calls + other.calls,
            self.samples + other.samples,
            self.cpu_seconds + other.cpu_seconds,
            self.wall_seconds + other.wall_seconds,
            self.bytes + other.bytes,
        )

    def __sub__(self, before: StageTimes) -> StageTimes:
        """What was added since ``before``."""
        return StageTimes(
            self.calls - before.calls,
            self.samples - before.samples,
            self.cpu_seconds - before.cpu_seconds,
            self.wall_seconds - before.wall_seconds,
            self.bytes - before.bytes,
        )


def _lives(pid: int, tid: int) -> bool:
    return Path(f"/proc/{pid}/task/{tid}").exists() if Path("/proc/self").exists() else True


class Slot:
    """The calling thread's slot on a board.

    Args:
        path: the board's file, made where there is none; None keeps the slot in memory.
    """

    def __init__(self, path: Path | None) -> None:
        whole = memoryview(mmap.mmap(-1, _SLOT_BYTES)) if path is None else self._claim(path)
        self._head = whole[: _HEAD * 8].cast("q")
        self.values = whole[_HEAD * 8 : (_HEAD + STAGES * FIELDS) * 8].cast("q")
        self._whole = whole
        self.index: dict[str, int] = {}
        for i in range(self._head[_NAMES]):
            self.index[_name(whole, i)] = i

    def _claim(self, path: Path) -> memoryview:
        me = os.getpid(), threading.get_native_id()
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            size = os.fstat(file).st_size
            place = size
            for at in range(0, size, _SLOT_BYTES):
                owner = memoryview(os.pread(file, 16, at)).cast("q")
                if not _lives(owner[0], owner[1]):
                    place = at
                    break
            if place == size:
                os.ftruncate(file, size + _SLOT_BYTES)
            os.pwrite(file, me[0].to_bytes(8, "little") + me[1].to_bytes(8, "little"), place)
            page = place - place % mmap.ALLOCATIONGRANULARITY  # a page may be larger than a slot
            return memoryview(mmap.mmap(file, place - page + _SLOT_BYTES, offset=page))[
                place - page :
            ]
        finally:
            # mmap holds a copy of the descriptor, and with it the lock
            fcntl.flock(file, fcntl.LOCK_UN)
            os.close(file)

    def stage(self, name: str) -> int:
        """A stage's number. Beyond forty names, all share the last one."""
        known = self.index.get(name)
        if known is not None:
            return known
        number = self._head[_NAMES]
        if number >= STAGES - 1:
            name, number = "others", STAGES - 1
        if name not in self.index:
            text = name.encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
            self._whole[_NAME_AT + number * _NAME_BYTES : _NAME_AT + (number + 1) * _NAME_BYTES] = (
                text
            )
            self._head[_NAMES] = number + 1  # last: whoever looks meanwhile sees no nameless number
            self.index[name] = number
        return number

    def times(self) -> dict[str, StageTimes]:
        """This slot's counts."""
        return _times(self._whole)


def _name(whole: memoryview, number: int) -> str:
    return (
        bytes(whole[_NAME_AT + number * _NAME_BYTES : _NAME_AT + (number + 1) * _NAME_BYTES])
        .rstrip(b"\0")
        .decode(errors="replace")
    )


def _times(whole: memoryview) -> dict[str, StageTimes]:
    head = whole[: _HEAD * 8].cast("q")
    values = whole[_HEAD * 8 : (_HEAD + STAGES * FIELDS) * 8].cast("q")
    times = {}
    for i in range(head[_NAMES]):
        calls, samples, cpu, wall, read = values[i * FIELDS : (i + 1) * FIELDS]
        times[_name(whole, i)] = StageTimes(calls, samples, cpu / 1e9, wall / 1e9, read)
    return times


def _slots(path: Path) -> list[memoryview]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    return [
        memoryview(data[at : at + _SLOT_BYTES])
        for at in range(0, len(data) - _SLOT_BYTES + 1, _SLOT_BYTES)
    ]


def read_board(path: Path) -> dict[str, StageTimes]:
    """Each stage's cost so far, over all threads and processes of a board.

    Args:
        path: the board's file; one that nobody has written to yet gives an empty result.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     read_board(Path(folder) / "board")
        {}
    """
    total: dict[str, StageTimes] = {}
    for slot in _slots(path):
        for name, times in _times(slot).items():
            total[name] = total.get(name, StageTimes()) + times
    return total
