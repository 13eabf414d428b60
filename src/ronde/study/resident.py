"""What memory a process really took, asked of a child process. Linux only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ronde.world import RondeError

__all__ = ["MeasuredPeak", "measured_peak", "status"]


@dataclass(frozen=True)
class MeasuredPeak:
    """Resident memory of a child process.

    Attributes:
        baseline_bytes: before.
        peak_bytes: most while it ran, above ``baseline_bytes``.
        result: what the function returned, if JSON holds it.
    """

    baseline_bytes: int
    peak_bytes: int
    result: Any = None


def status(name: str) -> int:
    """Bytes that the kernel tells of this process: ``"VmRSS"`` now, ``"VmHWM"`` at most."""
    for text in Path("/proc/self/status").read_text().splitlines():
        if text.startswith(f"{name}:"):
            return int(text.split()[1]) * 1024
    raise RondeError(f"/proc/self/status has no {name}")


def measured_peak(target: str, *arguments: Any, timeout: float = 120.0, threads: int = 1, cwd: Path | None = None) -> MeasuredPeak:
    """Peak of resident memory of a function, in a child process whose allocator gives back what is freed. Linux only.

    Args:
        target: ``"path/file.py:function"`` or ``"module:function"``. It is called with ``arguments`` and returns a callable:
            what is done until then (imports, kernels warmed) is the baseline, what that callable does is measured.
        arguments: what JSON holds.

    Raises:
        RondeError: the child failed.
    """
    environment = {
        **os.environ,
        # Freed memory goes back to the system at once, instead of being kept for later.
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
        "MALLOC_ARENA_MAX": "1",
        "OMP_NUM_THREADS": str(threads),
    }
    command = [sys.executable, "-m", "ronde.study.resident", target, json.dumps(arguments)]
    try:
        done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        raise RondeError(f"{target} took longer than {timeout:.0f} s") from None
    if done.returncode:
        raise RondeError(f"{target} failed in a child process:\n{done.stderr.strip()[-2000:]}")
    return MeasuredPeak(**json.loads(done.stdout.splitlines()[-1]))


def _child(target: str, arguments: list[Any]) -> None:
    import gc
    import importlib
    import importlib.util

    where, _, name = target.rpartition(":")
    if where.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(where).stem, where)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(where)
    go = getattr(module, name)(*arguments)
    gc.collect()
    baseline = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    result = go()
    most = status("VmHWM")
    print(json.dumps({"baseline_bytes": baseline, "peak_bytes": max(0, most - baseline), "result": result}))


if __name__ == "__main__":
    _child(sys.argv[1], json.loads(sys.argv[2]))
