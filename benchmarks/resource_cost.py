"""What does the launcher pay to watch resources? Processor time of its looks, as a share of a core.

Idle processes with a heartbeat and twenty threads stand in for workers. A look is measured by the
processor time of this process, without and with a line of ``resources.jsonl``; nine looks and one
with a line are ten seconds. To find the workers' children has a budget of its own.

    python benchmarks/resource_cost.py          # prints a table
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from ronde.launch import resources
from ronde.launch.resources import ResourceWatch

LOOKS = 100
WORKER = """
import sys, threading, time
from pathlib import Path
from ronde.world.heartbeat import Heartbeat

Heartbeat(Path(sys.argv[1]), int(sys.argv[2])).stepped(1)
for _ in range(20):
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
print("ready", flush=True)
sys.stdin.read()
"""


def look_seconds(watch: ResourceWatch) -> float:
    """Mean processor time of a look."""
    begun = time.process_time()
    for _ in range(LOOKS):
        watch._look()
    return (time.process_time() - begun) / LOOKS


def measure(workers: int, folder: Path) -> tuple[float, float, float]:
    """Processor time of a look, of one that makes a line, and of a search."""
    pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    each = [
        subprocess.Popen([sys.executable, "-c", WORKER, str(folder), str(rank)], **pipe)  # type: ignore[call-overload]
        for rank in range(workers)
    ]
    try:
        for process in each:
            process.stdout.readline()
        found = []
        for seconds in (1e9, 0.0):
            watch = ResourceWatch(folder, range(workers), folder, len, print, 1.0, seconds)
            watch._find()
            found.append(look_seconds(watch))
        begun = time.process_time()
        resources._with_children([process.pid for process in each])
        return found[0], found[1], time.process_time() - begun
    finally:
        for process in each:
            process.communicate()


def main() -> None:
    """Print the table."""
    print(f"{len(psutil.pids())} processes on this machine")
    for workers in (1, 2, 8, 32):
        with tempfile.TemporaryDirectory() as folder:
            look, line, search = measure(workers, Path(folder))
        share = (9 * look + line) / 10.0 + min(search / 10.0, resources._SEARCH_SHARE)
        print(
            f"{workers:3} workers: {look * 1e3:.2f} ms a look, {line * 1e3:.2f} ms with a line, "
            f"{search * 1e3:.2f} ms a search; {share:.3%} of a core"
        )


if __name__ == "__main__":
    main()
