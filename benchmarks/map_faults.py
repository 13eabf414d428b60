"""Kill what works on a map, at random moments: is each item's output there exactly once?

400 items, four workers. A signal 9 goes to a script, a worker, the launcher, or ``ronde map``
itself; a command that was killed is started again with ``--resume``, as a person would. The joined
output is compared byte for byte with that of one process. joblib and Ray get the same function and
the same kills, of their workers only: nothing starts their driver again::

    python benchmarks/map_faults.py --kills 50
    python benchmarks/map_faults.py --plan 1000000        what planning so many items costs

joblib is in the extra ``bench``, Ray in ``ray``; what is not there is left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

WORKERS, SECONDS = 4, 0.4
SCRIPT = f"""
import os, sys, time
import ronde
for chunk in ronde.items("lines:items.txt"):
    with chunk.output("out.txt") as out:
        for key, line in chunk:
            time.sleep({SECONDS})
            with open("done.txt", "a") as done:
                done.write(f"{{key}}\\n")
            print(key, hash(int(line) ** 3), file=out)
"""
PEER = f"""
import os, sys, time
def work(key):
    time.sleep({SECONDS})
    with open("done.txt", "a") as done:
        done.write(f"{{key}}\\n")
    return f"{{key}} {{hash(key ** 3)}}"
if __name__ == "__main__":
    if sys.argv[1] == "joblib":
        from joblib import Parallel, delayed
        lines = Parallel(n_jobs={WORKERS})(delayed(work)(k) for k in range(int(sys.argv[2])))
    else:
        import ray
        ray.init(num_cpus={WORKERS}, include_dashboard=False, log_to_driver=False)
        remote = ray.remote(work)
        lines = ray.get([remote.remote(k) for k in range(int(sys.argv[2]))])
    with open("out.txt", "w") as out:
        out.writelines(f"{{line}}\\n" for line in lines)
"""


def family(process: psutil.Process) -> dict[str, list[psutil.Process]]:
    """The processes below a command, by what they are."""
    found: dict[str, list[psutil.Process]] = {"script": [], "worker": [], "launcher": []}
    for child in process.children(recursive=True):
        try:
            words = " ".join(child.cmdline())
        except psutil.Error:
            continue
        if "ronde run" in words:
            found["launcher"].append(child)
        elif "map_worker" in words or "loky" in words or "ray::work" in words:
            found["worker"].append(child)
        elif "work.py" in words:
            found["script"].append(child)
    return found


def ended(command: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether it ends within so many seconds."""
    try:
        command.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def judge(folder: Path, out: Path, count: int) -> dict[str, object]:
    """Compare the output with that of one process."""
    expected = "".join(f"{k} {hash(k**3)}\n" for k in range(count))
    done = Counter((folder / "done.txt").read_text().split())
    return {
        "complete": out.exists(),
        "equal": out.exists() and out.read_text() == expected,
        "items_done_again": sum(done.values()) - count,
    }


def ours(count: int, kills: int, seed: int) -> dict[str, object]:
    """Kill parts of a map until it has ended."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "work.py").write_text(SCRIPT)
        (folder / "items.txt").write_text("".join(f"{k}\n" for k in range(count)))
        ronde = [sys.executable, "-m", "ronde", "map", "--quiet", "--workers", str(WORKERS)]
        first = [*ronde, "--chunk", "4", "--items", "lines:items.txt", "--out", "out", "work.py"]
        again = [*ronde, "--resume", "out"]
        killed: Counter[str] = Counter()
        starts, began = 1, time.monotonic()
        command = subprocess.Popen(first, cwd=folder, stderr=subprocess.DEVNULL)
        while not ended(command, rng.uniform(0.1, 0.7)) or command.returncode not in (0, 1):
            if command.returncode is not None:
                starts += 1
                plan = again if (folder / "out" / ".map").exists() else first
                command = subprocess.Popen(plan, cwd=folder, stderr=subprocess.DEVNULL)
            elif killed.total() < kills:
                whole = psutil.Process(command.pid)
                groups = family(whole) | {"map": [whole]}
                kind = rng.choices(list(groups), (4, 4, 1, 1))[0]
                if groups[kind]:
                    rng.choice(groups[kind]).kill()
                    killed[kind] += 1
        ledger = folder / "out" / ".map"
        left = [p.name for d in ("todo", "lease", "work") for p in (ledger / d).iterdir()]
        return {
            "who": "ronde map",
            "kills": dict(killed),
            "starts": starts,
            **judge(folder, folder / "out" / "out.txt", count),
            "left_behind": left,
            "seconds": round(time.monotonic() - began, 1),
        }


def theirs(who: str, count: int, kills: int, seed: int) -> dict[str, object]:
    """Kill workers of a peer until it has ended."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "work.py").write_text(PEER)
        (folder / "done.txt").touch()
        killed, began = 0, time.monotonic()
        words = [sys.executable, "work.py", who, str(count)]
        command = subprocess.Popen(words, cwd=folder, stderr=subprocess.PIPE)
        while not ended(command, rng.uniform(0.1, 0.7)):
            workers = family(psutil.Process(command.pid))["worker"]
            if workers and killed < kills:
                rng.choice(workers).kill()
                killed += 1
        assert command.stderr is not None
        error = command.stderr.read().decode().strip().splitlines()
        return {
            "who": who,
            "kills": {"worker": killed},
            **judge(folder, folder / "out.txt", count),
            "status": command.returncode,
            "error": error[-1][:200] if error and command.returncode else "",
            "seconds": round(time.monotonic() - began, 1),
        }


def planning(count: int) -> dict[str, object]:
    """What it costs to plan many items, and how even the shares of eight workers are."""
    import heapq
    from itertools import pairwise

    import numpy

    from ronde.jobs.items import Items
    from ronde.jobs.map_plan import MapPlan, chunk_cuts, plan_map

    rng = random.Random(1)
    sizes = [int(rng.paretovariate(1.2) * 1e4) for _ in range(count)]
    with tempfile.TemporaryDirectory() as name:
        began, cpu = time.monotonic(), time.process_time()
        names = "\n".join(json.dumps(f"data/{i:09d}.tar") for i in range(count)).encode()
        starts = numpy.concatenate([[0], numpy.cumsum(sizes)])
        items = Items("data/*.tar", starts, names)
        cuts = chunk_cuts(items, "auto", 256)
        plan_map(Path(name) / ".map", items, MapPlan(["x.py"], False, 2, None, None, ""), cuts)
        took, cpu = time.monotonic() - began, time.process_time() - cpu
    total, workers = sum(sizes), 8
    loads = [0] * workers
    for size in sorted((items.bytes_of(a, b) for a, b in pairwise(cuts)), reverse=True):
        heapq.heappush(loads, heapq.heappop(loads) + size)
    ideal = total / workers
    return {
        "items": count,
        "chunks": len(cuts) - 1,
        "seconds": round(took, 2),
        "cpu_seconds": round(cpu, 2),
        "peak_MB": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "longest_of_8_workers": round(max(loads) / ideal, 3),
        "every_8th_object": round(max(sum(sizes[i::workers]) for i in range(workers)) / ideal, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--items", type=int, default=400)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plan", type=int, metavar="ITEMS")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    found = []
    if asked.plan:
        found.append(planning(asked.plan))
    else:
        found.append(ours(asked.items, asked.kills, asked.seed))
        print(json.dumps(found[-1]), flush=True)
        for who in ("joblib", "ray"):
            if importlib.util.find_spec(who):
                found.append(theirs(who, asked.items, asked.kills, asked.seed))
    print(*map(json.dumps, found[not asked.plan :]), sep="\n")
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")
    os._exit(0)


if __name__ == "__main__":
    main()
