"""Processes that end with the one that started them."""

from __future__ import annotations

import ctypes
import signal
import sys

__all__ = ["end_with_parent"]

_PR_SET_PDEATHSIG = 1


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel send this signal to this process once its parent is gone. Only Linux can.

    Example:
        >>> subprocess.Popen(["sleep", "60"], preexec_fn=end_with_parent)
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
