"""Disturb a map at random moments: is each item's output there exactly once?

400 items, four workers on two hosts of a lab (``tests/lab.py``; without root, on this machine).
A signal 9 goes to a script, a worker, the launcher, or ``ronde map`` itself; a host is lost and
comes back; its cable is cut and healed. Faults are spread over the progress. A command that was
killed is started again with ``--resume``, as a person would. The joined output is compared byte
for byte with that of one process::

    sudo python benchmarks/map_faults.py                  50 faults
    python benchmarks/map_faults.py --peers               a poison item and a kill, beside others
    python benchmarks/map_faults.py --plan 1000000        what planning so many items costs
    python benchmarks/map_faults.py --chunks 4096         what a chunk costs

joblib is in the extra ``bench``, Ray in ``ray``; what is not there is left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from lab import lab, missing

WORKERS, SECONDS, CHUNK = 4, 0.4, 4
KINDS = {"worker": 12, "script": 12, "launcher": 6, "map": 6, "host": 7, "cable": 7}
SCRIPT = f"""
import time, ronde
for chunk in ronde.items("lines:items.txt"):
    with chunk.output("out.txt") as out:
        for key, line in chunk:
            time.sleep({SECONDS})
            with open("done.txt", "a") as done:
                done.write(f"{{key}}\\n")
            print(key, int(line) ** 3, file=out)
"""
POISON, PEER_ITEMS, PEER_WORKERS = 33, 80, 2
WORK = f"""
import os, sys, time
def work(key):
    time.sleep({SECONDS})
    with open("done.txt", "a") as done:
        done.write(f"{{key}}\\n")
    if key == {POISON}:
        raise ValueError("poison")
    return key
"""
PEERS = {
    "ronde map": """
import ronde
for chunk in ronde.items("lines:items.txt"):
    with chunk.output("out.txt") as out:
        for key, _ in chunk:
            print(work(key), file=out)
""",
    "joblib": f"""
from joblib import Parallel, delayed
if __name__ == "__main__":
    found = Parallel(n_jobs={PEER_WORKERS})(delayed(work)(k) for k in range({PEER_ITEMS}))
    open("out.txt", "w").writelines(f"{{k}}\\n" for k in found)
""",
    "Ray": f"""
import ray
ray.init(num_cpus={PEER_WORKERS}, include_dashboard=False, log_to_driver=False)
remote = ray.remote(work)
found = ray.get([remote.remote(k) for k in range({PEER_ITEMS})])
open("out.txt", "w").writelines(f"{{k}}\\n" for k in found)
""",
    "Ray Data": f"""
import ray
ray.init(num_cpus={PEER_WORKERS}, include_dashboard=False, log_to_driver=False)
data = ray.data.range({PEER_ITEMS}, override_num_blocks={PEER_ITEMS} // {CHUNK})
found = [row["id"] for row in data.map(lambda row: {{"id": work(row["id"])}}).take_all()]
open("out.txt", "w").writelines(f"{{k}}\\n" for k in found)
""",
}
PEERS["Ray Data, blocks may fail"] = PEERS["Ray Data"].replace(
    "import ray\n", "import ray\nray.data.DataContext.get_current().max_errored_blocks = -1\n"
)


def family(tops: list[psutil.Process]) -> dict[str, list[psutil.Process]]:
    """The processes of a map below others, by what they are."""
    found: dict[str, list[psutil.Process]] = {"script": [], "worker": [], "launcher": []}
    for top in tops:
        with suppress(psutil.Error):
            for child in top.children(recursive=True):
                with suppress(psutil.Error):
                    kind = kind_of(child.cmdline())
                    if kind in found and child.status() != psutil.STATUS_ZOMBIE:
                        found[kind].append(child)
    return found


def kind_of(words: list[str]) -> str:
    """What a process does, by its command line."""
    line = " ".join(words)
    if line.startswith("ray::") and ("work" in line or "Map(" in line):
        return "worker"
    if not words or "python" not in words[0]:
        return ""
    if "-m ronde run" in line:
        return "launcher"
    if "worker.py -m ronde.jobs.map_worker" in line or "loky" in line:
        return "worker"
    return "script" if line.endswith("work.py") and "map" not in words else ""


def pause(command: subprocess.Popen[bytes], seconds: float = 0.1) -> bool:
    """Wait. Returns whether the command still works."""
    with suppress(subprocess.TimeoutExpired):
        command.wait(seconds)
    return command.returncode is None


class Outages:
    """Hosts of a lab, one of which may be away."""

    def __init__(self, hosts: Any, rng: random.Random) -> None:
        self.hosts, self.rng = hosts, rng
        self._away: tuple[str, str, float] | None = None

    def tops(self) -> list[psutil.Process]:
        """The first process of each host."""
        found = []
        for pid in self.hosts.pids.values() if self.hosts else ():
            with suppress(psutil.Error):
                found.append(psutil.Process(pid))
        return found

    def begin(self, kind: str) -> None:
        """Lose a host or cut its cable, for some seconds."""
        self.end()
        victim = self.rng.choice(self.hosts.names)
        (self.hosts.lose if kind == "host" else self.hosts.cut)(victim)
        self._away = kind, victim, time.monotonic() + self.rng.uniform(1, 12)

    def end(self, due: bool = False) -> None:
        """Bring back what is away; ``due``: if it is time."""
        if self._away is None or (due and time.monotonic() < self._away[2]):
            return
        kind, victim, _ = self._away
        (self.hosts.boot if kind == "host" else self.hosts.heal)(victim)
        self._away = None


def faults(count: int, rng: random.Random, hosts: bool) -> list[str]:
    """So many faults, in a random order."""
    kinds = [k for k, n in KINDS.items() for _ in range(n) if hosts or k not in ("host", "cable")]
    rng.shuffle(kinds)
    return [kinds[i % len(kinds)] for i in range(count)]


def disturbed(count: int, most: int, seed: int, folder: Path, hosts: Any) -> dict[str, Any]:
    """Disturb a map until it has ended."""
    rng = random.Random(seed)
    outages, coming = Outages(hosts, rng), faults(most, rng, hosts is not None)
    (folder / "work.py").write_text(SCRIPT)
    (folder / "items.txt").write_text("".join(f"{k}\n" for k in range(count)))
    ronde = [sys.executable, "-m", "ronde", "map", "--quiet"]
    where = ["--workers", str(WORKERS)]
    if hosts is not None:
        named = ",".join(f"{n}:{WORKERS // hosts.count}" for n in hosts.names)
        where = ["--hosts", named, "--ssh-config", str(hosts.ssh_config)]
    new = ["--chunk", str(CHUNK), "--items", "lines:items.txt", "--out", "out", "work.py"]
    first, again = [*ronde, *where, *new], [*ronde, *where, "--resume", "out"]
    ledger, planted = folder / "out" / ".map", list[str]()
    starts, began = 0, time.monotonic()
    command: subprocess.Popen[bytes] | None = None
    due = count / (most + 1)  # items done, until the next fault comes
    while command is None or pause(command) or command.returncode:
        if command is None or command.returncode is not None:
            outages.end()
            starts += 1
            words = again if ledger.exists() else first
            command = subprocess.Popen(words, cwd=folder, stderr=subprocess.DEVNULL)
        outages.end(due=True)
        done = CHUNK * len(list((ledger / "out").glob("*"))) if ledger.exists() else 0
        if not coming or done < due:
            continue
        pause(command, rng.uniform(0, 2 * CHUNK * SECONDS))  # in the middle of chunks
        if command.returncode is not None:
            continue
        kind, whole = coming[0], psutil.Process(command.pid)
        if kind in ("host", "cable"):
            outages.begin(kind)
        elif groups := (family([whole, *outages.tops()]) | {"map": [whole]})[kind]:
            rng.choice(groups).kill()
        else:
            continue
        planted.append(coming.pop(0))
        due = (len(planted) + rng.random()) * count / (most + 2)
    outages.end()
    left = [p.name for d in ("todo", "lease", "work") for p in (ledger / d).iterdir()]
    counts = Counter((folder / "done.txt").read_text().split())
    expected = "".join(f"{k} {k**3}\n" for k in range(count))
    return {
        "who": "ronde map",
        "hosts": hosts.count if hosts is not None else 1,
        "faults": dict(Counter(planted)),
        "starts": starts,
        "equal": (folder / "out" / "out.txt").read_text() == expected,
        "items_lost": count - len(counts),
        "items_done_again": sum(counts.values()) - count,
        "left_behind": left,
        "seconds": round(time.monotonic() - began, 1),
    }


def peer(who: str) -> dict[str, Any]:
    """One item that raises an error, and one kill of a worker, in the middle."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "work.py").write_text(WORK + PEERS[who])
        (folder / "items.txt").write_text("".join(f"{k}\n" for k in range(PEER_ITEMS)))
        (folder / "done.txt").touch()
        words, out = [sys.executable, "work.py"], folder / "out.txt"
        if who == "ronde map":
            words = [sys.executable, "-m", "ronde", "map", "-q", "--workers", str(PEER_WORKERS)]
            words += ["--chunk", str(CHUNK), "--retries", "0", "--items", "lines:items.txt"]
            words, out = [*words, "--out", "out", "work.py"], folder / "out" / "out.txt"
        began, killed = time.monotonic(), 0
        command = subprocess.Popen(
            words, cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        while pause(command):
            done = (folder / "done.txt").read_text().split()
            workers = family([psutil.Process(command.pid)])["worker"]
            if len(done) >= PEER_ITEMS // 4 and workers and not killed:
                workers[0].kill()
                killed += 1
        assert command.stderr is not None
        error = command.stderr.read().decode().strip().splitlines()
        kept = set(out.read_text().split()) if out.exists() else set()
        counts = Counter((folder / "done.txt").read_text().split())
        counts.pop(str(POISON), None)
        return {
            "who": who,
            "kills": killed,
            "good_items": PEER_ITEMS - 1,
            "kept": len(kept),
            "lost": PEER_ITEMS - 1 - len(kept),
            "done_again": sum(n - 1 for n in counts.values()),
            "status": command.returncode,
            "error": error[-1][:200] if error and command.returncode and not kept else "",
            "seconds": round(time.monotonic() - began, 1),
        }


def chunk_cost(count: int, measured: int = 300) -> dict[str, Any]:
    """Seconds of a chunk besides its items: those between commits of chunks of one empty item,
    while so many wait.
    """
    script = SCRIPT.replace(f"time.sleep({SECONDS})", "continue")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "work.py").write_text(script)
        (folder / "items.txt").write_text("".join(f"{k}\n" for k in range(count)))
        words = [sys.executable, "-m", "ronde", "map", "-q", "--workers", "1", "--chunk", "1"]
        words += ["--items", "lines:items.txt", "--out", "out", "work.py"]
        command = subprocess.Popen(words, cwd=folder, stderr=subprocess.DEVNULL)
        ledger = folder / "out" / ".map" / "out"
        while pause(command) and not (ledger.exists() and len(list(ledger.iterdir())) > measured):
            pass
        command.terminate()
        command.wait()
        times = sorted((path / ".info").stat().st_mtime for path in ledger.iterdir())[:measured]
        gaps = sorted(b - a for a, b in itertools.pairwise(times))
    cost = gaps[len(gaps) // 2]
    return {
        "chunks_waiting": count,
        "measured": len(gaps),
        "median_seconds": round(cost, 4),
        "mean_seconds": round(sum(gaps) / len(gaps), 4),
        "percent_of_30_s": round(100 * cost / 30, 3),
        "load": round(os.getloadavg()[0], 1),
    }


def planning(count: int) -> dict[str, object]:
    """What it costs to plan many items, and how even the shares of eight workers are."""
    import heapq

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
        plan_map(Path(name) / ".map", items, MapPlan(["x.py"], False, 2, None, None), cuts)
        took, cpu = time.monotonic() - began, time.process_time() - cpu
    total, workers = sum(sizes), 8
    loads = [0] * workers
    for size in sorted((items.bytes_of(a, b) for a, b in itertools.pairwise(cuts)), reverse=True):
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


def needs(who: str) -> list[str]:
    """The packages of a peer."""
    return [who.split()[0].lower(), *["pandas"] * who.startswith("Ray Data")]


def table(rows: list[dict[str, Any]]) -> None:
    """Print rows in columns."""
    names = [name for name in rows[0] if name != "error"]
    lines = [names, *([str(row[name]) for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(names))]
    for line in lines:
        print("  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--items", type=int, default=400)
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--plan", type=int, metavar="ITEMS")
    parser.add_argument("--chunks", type=int, metavar="COUNT")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if asked.plan:
        found = [planning(asked.plan)]
    elif asked.chunks:
        found = [chunk_cost(asked.chunks)]
    elif asked.peers:
        found = [peer(who) for who in PEERS if all(map(importlib.util.find_spec, needs(who)))]
    else:
        with tempfile.TemporaryDirectory() as name:
            with nullcontext() if missing() else lab(Path(name) / "lab", 2) as hosts:
                told = asked.items, asked.faults, asked.seed, Path(name), hosts
                found = [disturbed(*told)]
    table(found)
    print(*map(json.dumps, found), sep="\n")
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
