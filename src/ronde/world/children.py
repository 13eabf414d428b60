"""Processes that end with the one that started them."""

from __future__ import annotations

import ctypes
import sys

__all__ = ["end_with_parent"]

_PR_SET_PDEATHSIG = 1


def end_with_parent(number: int) -> None:
    """Have the kernel send this signal to this process once its parent is gone. Only Linux can.

    Example:
        >>> begin = functools.partial(end_with_parent, signal.SIGTERM)
        >>> subprocess.Popen(["sleep", "60"], preexec_fn=begin)
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
