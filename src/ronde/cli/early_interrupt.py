"""Ctrl-C before a command has begun: the process ends, without a traceback of its imports."""

from __future__ import annotations

import signal
import threading

__all__ = ["begin_quiet", "end_quiet"]


def begin_quiet() -> None:
    """From here on, Ctrl-C ends the process at once, where nobody else handles it."""
    main = threading.current_thread() is threading.main_thread()
    if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def end_quiet() -> None:
    """From here on, it is a KeyboardInterrupt again."""
    main = threading.current_thread() is threading.main_thread()
    if main and signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
