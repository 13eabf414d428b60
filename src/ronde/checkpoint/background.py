"""Writes a checkpoint in a thread, from copies, while the training goes on; never two at once."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ronde.world import CheckpointError

__all__ = ["Saver", "Written", "wait_for_saves"]

Tensors = Mapping[str, torch.Tensor]

_savers: weakref.WeakSet[Saver] = weakref.WeakSet()


@dataclass(frozen=True)
class Written:
    """How a save ended.

    Attributes:
        step: of the checkpoint.
        path: the checkpoint; None on a rank that does not publish it, or after an error.
        bytes: of its files.
        seconds: from its beginning to its end.
        stall_seconds: of these, how long the training stood still.
        error: why it could not be written; empty if it was.
    """

    step: int
    path: Path | None
    bytes: int = 0
    seconds: float = 0.0
    stall_seconds: float = 0.0
    error: str = ""


class Saver:
    """Writes one checkpoint at a time, here or in a thread.

    Attributes:
        stop: set when the process leaves and waits no longer; a write that waits for other ranks
            then gives up.
    """

    def __init__(self) -> None:
        self.stop = threading.Event()
        self._buffers: dict[str, torch.Tensor] = {}
        self._thread: threading.Thread | None = None
        self._written: Written | None = None
        self._began = 0.0
        self._stall = 0.0
        _savers.add(self)

    @property
    def seconds(self) -> float:
        """How long the write under way has taken so far; 0 if there is none."""
        return time.perf_counter() - self._began if self.is_writing else 0.0

    @property
    def is_writing(self) -> bool:
        """Whether a thread is writing."""
        return self._thread is not None and self._thread.is_alive()

    def missing_bytes(self, tensors: Tensors) -> int:
        """How much host memory copies of ``tensors`` would take that is not held already."""
        have = sum(t.nbytes for t in self._buffers.values())
        return max(0, sum(t.numel() * t.element_size() for t in tensors.values()) - have)

    def copy(self, tensors: Mapping[str, Tensors]) -> dict[str, dict[str, torch.Tensor]]:
        """Copies in the host's memory of the tensors of each file, in buffers of the last save.

        Call it when the last write has ended.
        """
        buffers: dict[str, torch.Tensor] = {}
        copies: dict[str, dict[str, torch.Tensor]] = {}
        on_device = False
        for file, named in tensors.items():
            copies[file] = {}
            for name, tensor in named.items():
                key = f"{file}/{name}"
                buffer = self._buffers.get(key)
                if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
                    # a device copies into pinned memory at the full speed of its bus
                    buffer = torch.empty(
                        tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda"
                    )
                buffer.copy_(tensor.detach(), non_blocking=True)
                on_device |= tensor.device.type != "cpu"
                buffers[key] = copies[file][name] = buffer
        if on_device:
            torch.accelerator.synchronize()
        self._buffers = buffers
        return copies

    def begin(self, step: int, write: Callable[[], Path | None], began: float, wait: bool) -> None:
        """Write a checkpoint.

        Args:
            write: writes it, and returns its path on the rank that publishes it.
            began: ``time.perf_counter()`` when the training stopped for it.
            wait: whether to write it here and now instead of in a thread.
        """
        assert not self.is_writing
        self._began, self._written = began, None

        def work() -> None:
            self._written = self._write(step, write)

        if wait:
            self._thread = None
            self._stall = math.inf
            work()
            return
        self._stall = time.perf_counter() - began
        # A daemon: a disk that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=work, name="ronde-save", daemon=True)
        self._thread.start()

    def _write(self, step: int, write: Callable[[], Path | None]) -> Written:
        error, path, size = "", None, 0
        try:
            path = write()
            size = sum(f.stat().st_size for f in path.iterdir()) if path is not None else 0
        except (CheckpointError, OSError) as caught:
            error = f"{caught}"
        except Exception as caught:  # in a thread, nobody else would tell
            error = f"the checkpoint of step {step} could not be written: {caught!r}"
        seconds = time.perf_counter() - self._began
        stall = min(self._stall, seconds)  # infinite where the training waited for all of it
        return Written(step, None if error else path, size, seconds, stall, error)

    def poll(self) -> Written | None:
        """How the last write ended, or None while it is under way."""
        return None if self.is_writing else self._written

    def finish(self) -> Written | None:
        """Wait for the write under way. Returns how it ended; None if there was none."""
        self.finish_within(math.inf)
        return self.poll()

    def finish_within(self, seconds: float) -> bool:
        """Wait for the write under way at most that long. Returns whether there is none now."""
        if self._thread is not None:
            self._thread.join(None if math.isinf(seconds) else seconds)
        return not self.is_writing

    def free(self) -> None:
        """Let go of the copies' memory."""
        if not self.is_writing:
            self._buffers = {}


def wait_for_saves(at_most_seconds: float = math.inf) -> bool:
    """Wait until no checkpoint is being written in the background in this process. Call it before
    the process is left with ``os._exit``.

    Args:
        at_most_seconds: a write that takes longer is given up; the checkpoint before it stays.

    Returns:
        Whether all of them have ended.

    Example:
        >>> wait_for_saves()
        True
    """
    limit = time.monotonic() + at_most_seconds
    for saver in list(_savers):
        saver.finish_within(max(0.0, limit - time.monotonic()))
    left = [saver for saver in list(_savers) if saver.is_writing]
    for saver in left:
        saver.stop.set()
    return not left
