"""Limit compute threads while samples are read."""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch


def _leave_alone(nthreads: int) -> None:
    pass


class ThreadLimit:
    """Limits torch, BLAS and OpenCV to ``n`` threads in this process, until uninstalled.

    A loading process is limited throughout. If the training process reads, torch is limited only
    meanwhile.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self._always = False
        self._torch = 0
        self._opencv: int | None = None
        self._pools: Any = None
        self._set: Any = None
        self._thread = 0

    def install(self, always: bool) -> None:
        """Apply the limit.

        Args:
            always: this process does nothing but load.
        """
        self._always, self._set, self._torch, self._thread = (
            always,
            torch.set_num_threads,
            torch.get_num_threads(),
            threading.get_ident(),
        )
        if always:
            self._set(self.n)
        torch.set_num_threads = _leave_alone  # the script's own choice would undo the limit
        try:
            from threadpoolctl import threadpool_limits  # type: ignore[import-untyped, unused-ignore]
        except ImportError:
            pass
        else:
            # OpenMP is what the model's own step runs on: there it is left alone.
            self._pools = threadpool_limits(self.n, user_api=None if always else "blas")
        opencv = sys.modules.get("cv2")
        if opencv is not None:
            self._opencv = opencv.getNumThreads()
            opencv.setNumThreads(self.n)

    def uninstall(self) -> None:
        """Restore the previous limits."""
        torch.set_num_threads = self._set
        if torch.get_num_threads() != self._torch and threading.get_ident() == self._thread:
            self._set(self._torch)
        if self._pools is not None:
            self._pools.restore_original_limits()
        if self._opencv is not None:
            sys.modules["cv2"].setNumThreads(self._opencv)

    def begin(self) -> None:
        """This thread starts a batch."""
        if not self._always and torch.get_num_threads() != self.n:
            self._set(self.n)

    def end(self) -> None:
        """This thread finishes a batch. A thread that only reads keeps its own limit."""
        if not self._always and threading.get_ident() == self._thread:
            self._set(self._torch)
