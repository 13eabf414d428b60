"""Copies of a training in its machines' memory, between two checkpoints: a run that is started
again goes on from the newest one.

They are checkpoints in a folder in memory that outlives the workers. The launcher moves the newest
into the run directory when a generation of workers has failed. All ranks agree on the step of the
next one, so that replicas are compared before each, and so that copies cost as much of the time as
they may: little.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ronde.cache.budget import free_disk, free_memory
from ronde.checkpoint import Saver, list_checkpoints, remove
from ronde.run.exchange_state import has_state
from ronde.run.persist import Write, prepare
from ronde.world import RondeError, World, usable_cores
from ronde.world.consensus import gather_json

if TYPE_CHECKING:
    from ronde.run.content import CheckpointContent
    from ronde.run.parts import Parts

__all__ = ["MemoryCopies", "memory_copies"]

_NEVER = 1 << 62  # a step
_FIRST_STEPS = 4  # until the first copy: nothing is known of its cost yet
_STALL_FRACTION = 0.004  # part of the time for which the training may stand still
_WORK_FRACTION = 0.004  # part of the time of all processors that writing may take
_LOOK_SECONDS = 5.0  # between two looks at the free memory
_ROOM_FRACTION = 0.1  # part of the free memory that copies may take


class MemoryCopies:
    """The copies of one loop's runs.

    Args:
        folder: in memory; each node has its own.
    """

    def __init__(self, me: World, folder: Path) -> None:
        self._me, self._folder = me, folder
        self._saver, self._cores = Saver(), usable_cores()
        self._next, self._every = -1, _FIRST_STEPS  # steps
        self._at = 0, 0.0  # step and time of the last copy
        self._met = self._copied = self._worked = 0.0  # seconds that the last one took
        self._pauses: deque[float] = deque(maxlen=3)
        self._wrong, self._looked = False, -_LOOK_SECONDS

    def is_due(self, step: int) -> bool:
        """Whether a copy is to be made after that step: the same on all ranks."""
        if self._next < 0:
            self._next, self._at = step + _FIRST_STEPS, (step, time.monotonic())
        return step >= self._next

    def put_off(self, step: int) -> None:
        """There is a checkpoint of that step, so no copy is needed now."""
        self.is_due(step)
        if self._next < _NEVER:
            self._next = step + self._every

    def finish(self) -> None:
        """Wait until none is being written."""
        self._saver.finish()

    def take(
        self, contents: Mapping[str, CheckpointContent], step: int, began: float, busy: bool
    ) -> None:
        """Copy everything, and write it in the background. A collective.

        Args:
            contents: part name -> what a run has; the first one's name is empty.
            began: ``time.perf_counter()`` when the training stopped for it.
            busy: whether a checkpoint is being written.
        """
        runs = [content.parts for content in contents.values()]
        written = self._saver.finish()
        self._wrong |= bool(written and written.error)
        everyone = gather_json(
            self._me,
            {
                "folder": str(self._folder),
                "fits": not self._wrong and self._fits(runs),
                "busy": busy,
                "met": self._met,
                "copied": self._copied,
                "worked": self._worked / self._cores,
                "pace": (time.monotonic() - self._at[1]) / max(1, step - self._at[0]),
            },
        )
        divided = any(not run.holds_all or has_state(run) for run in runs)
        together = len({each["folder"] for each in everyone}) == 1
        if (divided and not together) or not all(each["fits"] for each in everyone):
            self._next = _NEVER
            return
        self._met = time.perf_counter() - began
        stall = min(each["met"] for each in everyone) + max(each["copied"] for each in everyone)
        worked = max(each["worked"] for each in everyone)
        if stall:
            self._pauses.append(max(stall / _STALL_FRACTION, worked / _WORK_FRACTION))
        if len(self._pauses) > 1:  # the first one finds nothing ready; a busy moment says little
            pace = max(each["pace"] for each in everyone)
            self._every = max(1, math.ceil(min(self._pauses) / pace))
        self._next, self._at = step + self._every, (step, time.monotonic())
        if any(each["busy"] for each in everyone):
            return
        main = self._me.local_rank == 0 and os.environ.get("RONDE_RUN_DIR_SHARED") != "0"
        try:
            write = prepare(
                contents,
                self._folder,
                step,
                None,  # what a manifest says is the run's: a store that it is uploaded to obeys it
                self._saver.copy,
                self._saver.stop,
                writes=main or self._me.is_main,
            )
        except RondeError:  # it says so where a checkpoint is asked for
            self._wrong = True
            return
        self._saver.begin(step, lambda: self._timed(write), began, wait=False)
        self._copied = time.perf_counter() - began - self._met

    def _fits(self, runs: Iterable[Parts]) -> bool:
        """Whether there is room for the copy in this process, and for two checkpoints."""
        if time.monotonic() < self._looked + _LOOK_SECONDS:
            return True
        self._looked, size = time.monotonic(), 0
        for run in runs:
            moments = (v for state in run.optimizer.state.values() for v in state.values())
            for value in chain(run.model.parameters(), run.model.buffers(), moments):
                if isinstance(value, torch.Tensor):
                    size += value.numel() * value.element_size()
        room = min(free_memory(), free_disk(self._folder)[0])
        return 3 * size <= _ROOM_FRACTION * room

    def _timed(self, write: Write) -> Path | None:
        began = time.thread_time()
        path = write()
        for old in list_checkpoints(self._folder)[1:] if path is not None else ():
            remove(old)
        self._worked = time.thread_time() - began
        return path


def memory_copies(me: World, directory: Path) -> MemoryCopies | None:
    """Those of a run whose launcher would start it again, else None.

    Args:
        directory: of the run. A script's further trainings have others than the launcher moves
            copies into.
    """
    folder, launched = os.environ.get("RONDE_MEMORY_DIR"), os.environ.get("RONDE_RUN_DIR")
    if not folder or not launched or directory.absolute() != Path(launched):
        return None
    return MemoryCopies(me, Path(folder))
