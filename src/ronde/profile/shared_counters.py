"""Lock-free shared-memory counters of per-stage cost, one slot per thread.

Only its thread writes a slot; readers sum all slots. Counts only grow, so the difference of two
reads is what happened between them. A dead thread's slot is reused as it is.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

_SLOT = 8192
_HEAD = 8  # 64-bit numbers: pid, thread id, names, bytes of notes, then nothing yet
_PID, _TID, _NAMES, _NOTES = range(4)
STAGES = 40
FIELDS = 6
CALLS, SAMPLES, CPU, WALL, BYTES, FLAGS = range(FIELDS)
FUNCTION, BLOCK = 1, 2
INSIDE = 2  # from this bit on FLAGS says which stages began while this one ran
_NAME_AT = 2048
_NAME = 64
_NOTE_AT = _NAME_AT + STAGES * _NAME
THROUGH = "read through "
"""Begins the name under which a slot counts a library's share of the stage ``read``."""


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
        removable: it was seen as a call, which can be replayed; a block of lines cannot.
        contains: stages that were done inside it: their time is theirs, but they go when this one
            is taken out.
        through: library -> seconds of ``wall_seconds`` in its calls.
    """

    calls: int = 0
    samples: int = 0
    cpu_seconds: float = 0.0
    wall_seconds: float = 0.0
    bytes: int = 0
    removable: bool = False
    contains: frozenset[str] = frozenset()
    through: Mapping[str, float] = field(default_factory=dict)

    def __add__(self, other: StageTimes) -> StageTimes:
        return StageTimes(
            self.calls + other.calls,
            self.samples + other.samples,
            self.cpu_seconds + other.cpu_seconds,
            self.wall_seconds + other.wall_seconds,
            self.bytes + other.bytes,
            self.removable or other.removable,
            self.contains | other.contains,
            _add(self.through, other.through, 1),
        )

    def __sub__(self, before: StageTimes) -> StageTimes:
        """What was added since ``before``."""
        return StageTimes(
            self.calls - before.calls,
            self.samples - before.samples,
            self.cpu_seconds - before.cpu_seconds,
            self.wall_seconds - before.wall_seconds,
            self.bytes - before.bytes,
            self.removable,
            self.contains,
            _add(self.through, before.through, -1),
        )


def _add(one: Mapping[str, float], other: Mapping[str, float], sign: int) -> dict[str, float]:
    return {n: one.get(n, 0.0) + sign * other.get(n, 0.0) for n in {**one, **other}}


def _lives(pid: int, tid: int) -> bool:
    return Path(f"/proc/{pid}/task/{tid}").exists() if Path("/proc/self").exists() else True


class Slot:
    """The calling thread's slot on a board.

    Args:
        path: the board's file, made where there is none; None keeps the slot in memory.
    """

    def __init__(self, path: Path | None) -> None:
        whole = memoryview(mmap.mmap(-1, _SLOT)) if path is None else self._claim(path)
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
            for at in range(0, size, _SLOT):
                owner = memoryview(os.pread(file, 16, at)).cast("q")
                if not _lives(owner[0], owner[1]):
                    place = at
                    break
            if place == size:
                os.ftruncate(file, size + _SLOT)
            os.pwrite(file, me[0].to_bytes(8, "little") + me[1].to_bytes(8, "little"), place)
            page = place - place % mmap.ALLOCATIONGRANULARITY  # a page may be larger than a slot
            return memoryview(mmap.mmap(file, place - page + _SLOT, offset=page))[place - page :]
        finally:
            # mmap holds a copy of the descriptor, and with it the lock
            fcntl.flock(file, fcntl.LOCK_UN)
            os.close(file)

    def stage(self, name: str) -> int:
        """A stage's number. Beyond forty names, all share the last one."""
        found = self.index.get(name)
        if found is not None:
            return found
        number = self._head[_NAMES]
        if number >= STAGES - 1:
            name, number = "others", STAGES - 1
        if name not in self.index:
            text = name.encode()[:_NAME].ljust(_NAME, b"\0")
            self._whole[_NAME_AT + number * _NAME : _NAME_AT + (number + 1) * _NAME] = text
            self._head[_NAMES] = number + 1  # last: whoever looks meanwhile sees no nameless number
            self.index[name] = number
        return number

    def note(self, text: str) -> None:
        """Write a message for readers, once."""
        line = text.replace("\n", " ").encode()[:500] + b"\n"
        used = self._head[_NOTES]
        at = _NOTE_AT + used
        if at + len(line) <= _SLOT and line not in bytes(self._whole[_NOTE_AT:at]):
            self._whole[at : at + len(line)] = line
            self._head[_NOTES] = used + len(line)

    def times(self) -> dict[str, StageTimes]:
        """This slot's counts."""
        return _times(self._whole)

    def notes(self) -> list[str]:
        """This slot's messages."""
        return _notes(self._whole)


def _name(whole: memoryview, number: int) -> str:
    return (
        bytes(whole[_NAME_AT + number * _NAME : _NAME_AT + (number + 1) * _NAME])
        .rstrip(b"\0")
        .decode(errors="replace")
    )


def _times(whole: memoryview) -> dict[str, StageTimes]:
    head = whole[: _HEAD * 8].cast("q")
    values = whole[_HEAD * 8 : (_HEAD + STAGES * FIELDS) * 8].cast("q")
    names = [_name(whole, i) for i in range(head[_NAMES])]
    found = {}
    inside = [values[i * FIELDS + FLAGS] >> INSIDE for i in range(len(names))]
    for _ in names:  # what is inside of what is inside
        for i, bits in enumerate(inside):
            for j in range(len(names)):
                inside[i] |= inside[j] if bits >> j & 1 else 0
    for i, name in enumerate(names):
        calls, samples, cpu, wall, read, flags = values[i * FIELDS : (i + 1) * FIELDS]
        contains = frozenset(n for j, n in enumerate(names) if inside[i] >> j & 1 and n != name)
        found[name] = StageTimes(
            calls,
            samples,
            cpu / 1e9,
            wall / 1e9,
            read,
            bool(flags & FUNCTION) and not flags & BLOCK,
            contains,
        )
    through = {
        name.removeprefix(THROUGH): found.pop(name).wall_seconds
        for name in names
        if name.startswith(THROUGH)
    }
    if through and "read" in found:
        found["read"] = replace(found["read"], through=through)
    return found


def _notes(whole: memoryview) -> list[str]:
    used = whole[: _HEAD * 8].cast("q")[_NOTES]
    return bytes(whole[_NOTE_AT : _NOTE_AT + used]).decode(errors="replace").splitlines()


def _slots(path: Path) -> list[memoryview]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    return [memoryview(data[at : at + _SLOT]) for at in range(0, len(data) - _SLOT + 1, _SLOT)]


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


def read_notes(path: Path) -> list[str]:
    """All messages of a board, each once: stages that could not be removed, and why."""
    return list(dict.fromkeys(line for slot in _slots(path) for line in _notes(slot)))
