"""What each worker of :func:`ronde.launch` runs: reads the call, calls, writes what came of it."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
from pathlib import Path
from typing import Any

from ronde.world.whole_file import write_whole

__all__ = ["main"]


def _write(path: Path, value: Any) -> None:
    try:
        import cloudpickle

        packer: Any = cloudpickle
    except ImportError:
        packer = pickle
    write_whole(path, packer.dumps(value))


def main() -> None:
    """Call what the folder named on the command line holds."""
    place, rank = Path(sys.argv[1]), os.environ["RANK"]
    known = set(sys.path)
    sys.path += [p for p in (place / "path").read_text().split("\n") if p not in known]
    call = (place / "call").read_bytes()
    function, args, kwargs = pickle.loads(call)  # noqa: S301 (the launcher wrote it)
    try:
        result = function(*args, **kwargs)
    except Exception as error:
        # the launcher reports one that cannot be sent by its text
        with contextlib.suppress(Exception):
            _write(place / f"error-{rank}", error)
        raise
    try:
        _write(place / f"result-{rank}", result)
    except Exception as error:
        raise TypeError(f"the function's result cannot be sent back: {error}") from error


if __name__ == "__main__":
    main()
