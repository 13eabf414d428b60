"""Page cache under a dataset: is a file in memory?"""

from __future__ import annotations

import os

_NOWAIT = getattr(os, "RWF_NOWAIT", 0)


def in_cache(file: int, at: int = 0) -> bool | None:
    """Whether a byte of an open file is in memory, without reading from disk; None if unknown."""
    if not _NOWAIT:
        return None
    try:
        return os.preadv(file, [bytearray(1)], at, _NOWAIT) > 0
    except BlockingIOError:
        return False
    except OSError:
        return None
