"""Saves the runs of a loop: in the background, one checkpoint at a time, and says at once if that
fails or falls behind.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ronde.checkpoint import KeepPolicy
from ronde.run.content import CheckpointContent
from ronde.run.parts import Parts
from ronde.watch import BestFound, Checkpointed
from ronde.world import CheckpointError, WorldError
from ronde.world.consensus import broadcast_json

if TYPE_CHECKING:
    from ronde.checkpoint import Saver, Written

__all__ = ["Saving"]

_LONG_SECONDS = 60.0  # a write that takes longer, and much longer than any before, is told of
_GRACE_SECONDS = 0.5  # a training that waits no longer than that for the last save is not told
_EXIT_SECONDS = 30.0  # how long a process that failed waits for its last checkpoint

Tensors = Mapping[str, torch.Tensor]


class Saving:
    """The checkpoints of one loop.

    Attributes:
        ends: whether the process ends, and the others may not: they are not waited for.
        is_open: whether a save is not settled; the same on all ranks.
    """

    def __init__(self) -> None:
        self.is_open = False
        self._divided = False  # whether workers hold parts of it
        self._best: list[BestFound] = []
        self._announced = False
        self.ends = False
        self._longest = 0.0
        self._said_behind = self._said_long = self._said_memory = False

    @cached_property
    def saver(self) -> Saver:
        """Does the writing."""
        from ronde.checkpoint import Saver  # which no step needs

        return Saver()

    def save(
        self, contents: Mapping[str, CheckpointContent], folder: Path, step: int, wait: bool
    ) -> Path | None:
        """Write a checkpoint, after the one before it has ended. A collective.

        Args:
            contents: part name -> what a run has; the first one's name is empty.
            wait: whether to return only when it is written.

        Returns:
            Path: the checkpoint on rank 0, if it waited; else None.

        Raises:
            CheckpointError: it waited, and the checkpoint could not be written; or what is to be
                saved cannot be in a checkpoint.
            WorldError: the run goes on without this worker.
        """
        from ronde.checkpoint.manifest import folder_name
        from ronde.run import persist  # a run that writes nothing needs none of it
        from ronde.world.whole_file import refuse_fenced

        refuse_fenced()
        began = time.perf_counter()
        everything, saver = [*contents.values()], self.saver
        first = contents[""].parts
        if not wait and not self._said_behind and not saver.finish_within(_GRACE_SECONDS):
            self._said_behind = True
            if first.world.is_main:
                first.warn(
                    f"saving falls behind: the checkpoint before that of step {step} has been "
                    f"written for {saver.seconds:.1f} s and is not ready, so the training waits "
                    "for it. Save less often, or to a faster disk"
                )
        self.settle(everything)
        wait = wait or not all(each.async_save for each in everything)
        inline = wait

        def copied(files: Mapping[str, Tensors]) -> Mapping[str, Tensors]:
            nonlocal inline
            inline = inline or not self._has_memory(first, files)
            return files if inline else saver.copy(files)

        keep = KeepPolicy.merge(each.keep for each in everything)
        write = persist.prepare(contents, folder, step, keep, copied, saver.stop)
        self.is_open, self._announced, self._said_long = True, False, False
        self._divided = not all(each.parts.holds_all for each in everything)
        self._best = contents[""].best.event(folder / folder_name(step))
        saver.begin(step, write, began, wait=inline)
        # whether to wait is the same on all ranks; whether there is memory is not
        return self.settle(everything, raises=True) if wait else None

    def _has_memory(self, run: Parts, files: Mapping[str, Tensors]) -> bool:
        from ronde.cache.budget import free_memory

        named = {f"{f}/{n}": t for f, tensors in files.items() for n, t in tensors.items()}
        needed, free = self.saver.missing_bytes(named), free_memory()
        if 2 * needed <= free:
            return True
        if not self._said_memory:
            self._said_memory = True
            rank = run.world.rank
            run.watcher.say(
                f"checkpoints are written while the training waits: a copy of what rank {rank} "
                f"saves takes {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB of memory are free"
            )
        return False

    def settle(self, contents: Sequence[CheckpointContent], raises: bool = False) -> Path | None:
        """Wait until the save under way has ended, on all ranks. A collective if there is one.

        Args:
            contents: of all runs of the loop.
            raises: whether an error is raised; otherwise it is a warning.

        Returns:
            Path: the checkpoint on rank 0.
        """
        if not self.is_open:
            return None
        self.is_open = False
        written = self.saver.finish()
        assert written is not None
        error, first = written.error, contents[0].parts
        if self.ends:
            pass  # a script may have ended on this rank only: the others are not waited for
        elif first.world.size > 1 and self._divided and raises:
            error = broadcast_json(first.world, error)  # they have met to prepare it
        elif first.world.size > 1:
            # Under replicate, rank 0 knows alone, and the others may have ended.
            with suppress(*(() if self._divided else (WorldError,))):
                error = first.rendezvous.meet("run.save()", error)[0]
        if error:
            for content in contents:
                content.saved_step = -1
            contents[0].best.lost(written.step)
        if first.world.is_main and not self._announced and not (error and raises):
            self._announce(first, written)
        if error and raises:
            raise CheckpointError(error)
        return written.path

    def poll(self, run: Parts) -> None:
        """Tell how the save under way has ended, if it has: rank 0 does."""
        if self._announced or not run.world.is_main:
            return
        if (written := self.saver.poll()) is not None:
            self._announce(run, written)
        elif self.saver.seconds > max(_LONG_SECONDS, 5 * self._longest) and not self._said_long:
            self._said_long = True
            run.warn(
                f"a checkpoint has been written for {self.saver.seconds:.0f} s and is not ready. "
                "The disk is slow or hangs. The training goes on until the next one is due"
            )

    def _announce(self, run: Parts, written: Written) -> None:
        self._announced = True
        if written.error:
            from ronde.world.whole_file import refuse_fenced

            refuse_fenced()
            run.warn(f"{written.error} The training goes on.")
            return
        if written.path is None:
            return
        self._longest = max(self._longest, written.seconds)
        event = Checkpointed(
            step=written.step,
            path=f"checkpoints/{written.path.name}",
            bytes=written.bytes,
            seconds=written.seconds,
            stall_seconds=written.stall_seconds,
        )
        run.watcher.event(event, *self._best)

    def end(self, contents: Sequence[CheckpointContent]) -> None:
        """The process ends: let the save under way end, and meet nobody from now on."""
        self.ends = True
        self.settle(contents)

    def leave(self, run: Parts) -> None:
        """The process ends after an error: let this worker's part of the last save end."""
        if self.is_open:
            self.saver.finish_within(_EXIT_SECONDS)
            self.poll(run)
            self.saver.stop.set()

    def free(self) -> None:
        """The last run of the loop has ended."""
        if "saver" in vars(self):
            self.saver.free()
