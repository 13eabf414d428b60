"""Processes that use one cache together, and are killed: ``python cache_worker.py COMMANDS``; used
by test_cache.py.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import numpy as np

from ronde.cache import cached as of_all
from ronde.feed import cached as _cached


def cached(source, after="read", **options):
    """With a version, which a cache on disk of no files needs."""
    return _cached(source, after, **{"version": "1", **options})


def as_a_stranger(**options):
    """As another worker of the launch makes the first cache of the script."""
    of_all.made_in_memory = itertools.count()
    return cached(Toy(), **options)


def place_of(kept) -> Path:
    return Path(kept.report().place)


class Toy:
    """Samples of 0 to 40 kB that are a function of their number."""

    def __init__(self, n: int = 300, name: str = "toy") -> None:
        self.n, self.fingerprint = n, name

    def __len__(self) -> int:
        return self.n

    def read(self, ids):
        return [oracle(i) for i in ids]


def oracle(i: int):
    numbers = np.random.Generator(np.random.Philox(i))
    return {
        "data": numbers.integers(0, 256, int(numbers.integers(0, 40_000)), dtype=np.uint8),
        "label": i % 7,
        "name": f"{i}.bin",
    }


def same(a, b) -> bool:
    return (
        a.keys() == b.keys()
        and a["label"] == b["label"]
        and a["name"] == b["name"]
        and np.array_equal(a["data"], b["data"])
    )


def read_at_random(source, seed: int, batches: int) -> int:
    draw = random.Random(seed)
    for _ in range(batches):
        ids = [draw.randrange(len(source)) for _ in range(8)]
        for i, value in zip(ids, source.read(ids), strict=True):
            if not same(value, oracle(i)):
                return 3
    return 0


def child(work) -> int:
    pid = os.fork()
    if pid == 0:
        code = 9
        try:
            code = work()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def files_bytes(folder) -> int:
    return sum(p.stat().st_blocks * 512 for p in folder.iterdir() if p.suffix in (".bin", ".idx"))


def hammer(where: str, limit: str) -> dict:
    """Six processes at a time read and check; some of them are killed wherever they are, and others
    take their place.
    """
    os.environ.update(RANK="0", WORLD_SIZE="9", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    # held by this process, so that a cache in memory stays
    first = cached(Toy(), where=where, limit=limit)
    draw = random.Random(1)
    seed = killed = 0
    codes: list[int] = []
    running: list[int] = []
    most = 0
    while seed < 24 or running:
        while len(running) < 6 and seed < 24:
            seed += 1
            # A child forks its own view of the cache; every second one opens it as a stranger
            # would.
            running.append(
                child(
                    lambda s=seed: read_at_random(
                        first if s % 2 else as_a_stranger(where=where, limit=limit),
                        s,
                        40,
                    )
                )
            )
        time.sleep(draw.random() * 0.03)
        if seed < 24 and draw.random() < 0.5:
            os.kill(draw.choice(running), signal.SIGKILL)
            killed += 1
        for pid in list(running):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                running.remove(pid)
                codes.append(os.waitstatus_to_exitcode(status))
        most = max(most, files_bytes(place_of(first)))
    wrong = read_at_random(first, 99, 200)
    report = first.report()
    intact = all(same(first.read([i])[0], oracle(i)) for i in range(300))
    held = first.report().hits - report.hits
    told = {
        "killed": killed,
        "codes": codes,
        "wrong": wrong,
        "intact": intact,
        "held": held,
        "told": report.held,
        "corrupt": report.corrupt,
        "most": most,
        "bytes": report.bytes,
        "hits": report.hits,
        "full": report.full,
        "folder": str(place_of(first)),
    }
    first.close()
    return told


def leave_behind(where: str) -> dict:
    """A process fills a cache and is killed before it can leave it."""
    told, tell = os.pipe()

    def work() -> int:
        source = cached(Toy(20, "left"), where=where, limit="8MiB")
        source.read(range(20))
        os.write(tell, str(place_of(source)).encode())
        time.sleep(60)
        return 0

    pid = child(work)
    folder = os.read(told, 4096).decode()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    before = Path(folder).is_dir()
    # any cache in memory that is made next
    other = cached(Toy(5, "other"), where=where, limit="1MiB")
    after = Path(folder).is_dir()
    mine = place_of(other).is_dir()
    # Its user is a child that lives longer than this process's own use: the last one out removes
    # it.
    ask, go = os.pipe()

    def outlive() -> int:
        other.read([0])
        os.read(ask, 1)
        other.close()
        return 0

    pid = child(outlive)
    while other.report().hits + other.report().misses < 1:
        time.sleep(0.005)
    other.close()
    still = place_of(other).is_dir()
    os.write(go, b"x")
    os.waitpid(pid, 0)
    return {
        "before": before,
        "after": after,
        "mine": mine,
        "still": still,
        "end": place_of(other).is_dir(),
    }


def full_disk(where: str) -> dict:
    """Writing fails in the middle, as on a full disk or over a quota."""
    import resource

    source = cached(Toy(60, "full"), where=where, limit="8MiB")
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))
    wrong = sum(not same(v, oracle(i)) for i, v in enumerate(source.read(range(60))))
    wrong += sum(not same(v, oracle(i)) for i, v in enumerate(source.read(range(60))))
    report = source.report()
    return {"wrong": wrong, "full": report.full, "held": report.held, "hits": report.hits}


def epochs(where: str) -> dict:
    """An ordinary run that ends by itself."""
    source = cached(Toy(40, "run"), where=where, limit="8MiB")
    ok = all(same(v, oracle(i)) for i, v in enumerate(source.read(range(40))))
    report = source.report()
    return {"ok": ok, "hits": report.hits, "misses": report.misses, "folder": str(place_of(source))}


def all_of(commands: list[list[str]]) -> dict:
    """Each in a process of its own, one after the other; they share one import of torch, by
    fork.
    """
    told = []
    for name, *arguments in commands:
        with tempfile.TemporaryFile() as file:

            def work(name=name, arguments=arguments, file=file) -> int:
                file.write(json.dumps(globals()[name](*arguments)).encode())
                file.flush()
                return 0

            status = os.waitstatus_to_exitcode(os.waitpid(child(work), 0)[1])
            file.seek(0)
            told.append(json.loads(file.read()) if status == 0 else f"{name} ended with {status}")
    # One in memory that nobody closes: it goes when this process ends as processes do.
    left = cached(Toy(3, "end"), limit="1MiB")
    left.read([0, 1])
    return {"told": told, "end": str(place_of(left)), "there": place_of(left).is_dir()}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(all_of(json.loads(sys.argv[1]))))
