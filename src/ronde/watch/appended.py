"""Read JSON lines that another process appends, from a byte offset on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["appended"]


def appended(path: Path, offset: int = 0) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield each whole line after ``offset``: the offset in bytes after it, and its object.

    A torn last line is left for later. A line that is no JSON object yields None, so that readers
    get past it.

    Example:
        >>> for offset, event in appended(Path("record.jsonl")):  # doctest: +SKIP
        ...     print(offset, event)

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                value = None
            yield offset, value if isinstance(value, dict) else None
