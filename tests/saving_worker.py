"""Saves in the background, under a plan: killed at each point of a save, on a full disk, on a slow
one. ``python saving_worker.py HOW PLAN WORKERS FOLDER [ARGUMENT…]``; prints JSON.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch

from forked import fork
from reshard_worker import differ, start
from ronde.checkpoint import find_valid, wait_for_saves
from ronde.world import WorldError
from ronde.world.tensors import local_part

END = 8


def steps(run, until: int = END) -> None:
    for _ in run.epochs(1):
        for batch in run.batches():
            run.step(batch)
            if run.state.step == until:
                break


def die_at(point: int) -> None:
    """Kill this process at its n-th crossing of a point where a save has written something."""
    crossed = 0

    def crossing(call):
        def counted(*args, **named):
            nonlocal crossed
            crossed += 1
            if crossed == point:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **named)

        return counted

    os.fsync = crossing(os.fsync)
    Path.rename = crossing(Path.rename)


def train(plan: str, where: Path, resume: bool, **options) -> None:
    run = start(plan, False, where, resume, save_every=2, keep=2, **options)
    told = {"step": run.state.step}
    steps(run)
    run.export(where / "final.safetensors")
    if run.is_main:
        (where / "told.json").write_text(json.dumps(told))


def kill(plan: str, workers: int, folder: Path, *points: str) -> None:
    """``points``: ``RANK:POINT``."""
    fork(workers, lambda: train(plan, folder / "whole", False))
    told = []
    for each in points:
        rank, point = map(int, each.split(":"))
        where = folder / f"killed-{rank}-{point}"

        def dying(rank: int = rank, point: int = point, where: Path = where) -> None:
            if int(os.environ.get("RANK", "0")) == rank:
                die_at(point)
            train(plan, where, False)

        killed = False
        try:
            fork(workers, dying)
        except SystemExit:
            killed = True
        found, refused = find_valid(where / "checkpoints")
        assert not refused, refused
        resume = found is not None
        fork(workers, lambda where=where, resume=resume: train(plan, where, resume))
        back = json.loads((where / "told.json").read_text())["step"]
        assert back == (found.step if found else 0)
        left = sorted(p.name for p in (where / "checkpoints").iterdir())
        difference = differ(where / "final.safetensors", folder / "whole" / "final.safetensors")
        told.append([each, killed, back, difference, left])
    print(json.dumps(told))


def slow(plan: str, workers: int, folder: Path, seconds: str) -> None:
    """Each file takes that long: never two saves at once; the training waits, and says so once."""
    from ronde.checkpoint import files

    def work() -> None:
        write, most, now, lock = files.write_tensors, [0], [0], threading.Lock()

        def slowly(*args):
            with lock:
                now[0] += 1
                most[0] = max(most[0], now[0])
            time.sleep(float(seconds))
            entry = write(*args)
            with lock:
                now[0] -= 1
            return entry

        files.write_tensors = slowly
        train(plan, folder, False)
        assert most[0] <= 1, most  # rank 1 writes nothing under replicate

    fork(workers, work)


def fail(plan: str, workers: int, folder: Path, rank: str, step: str) -> None:
    """Rank 0's disk, or another rank's memory, is full in the save of a step."""
    from ronde.checkpoint import files

    def work() -> None:
        write = files.write_tensors

        def refusing(path, *rest):
            if f"{int(step):09d}" in path.parent.name and os.environ.get("RANK", "0") == rank:
                full = RuntimeError("can't allocate memory")
                raise OSError(28, "No space left on device") if rank == "0" else full
            return write(path, *rest)

        files.write_tensors = refusing
        train(plan, folder, False)

    fork(workers, work)
    found, refused = find_valid(folder / "checkpoints")
    assert not refused and found.step == END


def flip(plan: str, workers: int, folder: Path, rank: str, step: str, save: str = "") -> None:
    """One bit of a parameter flips on a rank, after a step; ``rank`` -1: on none. ``save``: replicas
    are compared before the save of that step, not every three.
    """
    own = {"check_replicas": 1000, "save_every": int(save)} if save else {"check_replicas": 3}

    def work() -> None:
        run = start(plan, False, folder, False, **own)
        told = ""
        try:
            for batch in run.batches():
                run.step(batch)
                if run.state.step == int(step) and run.rank == int(rank):
                    p = next(p for p in run.model.parameters() if p.dim() > 1)
                    bits = local_part(p).view(-1)[1:2].view(torch.int64)
                    bits ^= 1 << 5
        except WorldError as error:
            told = str(error)
        (folder / f"told-{run.rank}").write_text(told)
        run.port.parts.place.ended = True
        atexit._run_exitfuncs()

    fork(workers, work)
    print(json.dumps([(folder / f"told-{r}").read_text() for r in range(workers)]))


def disk(plan: str, workers: int, folder: Path) -> None:
    """A disk with room for one checkpoint and a half."""

    def work() -> None:
        run = start(plan, False, folder, False, save_every=2, keep=1)
        run.register(ballast=torch.rand(250_000, dtype=torch.float64))
        steps(run)
        assert wait_for_saves()
        atexit._run_exitfuncs()  # rank 0 holds the store: it leaves last

    fork(workers, work)
    found, refused = find_valid(folder / "checkpoints")
    left = sorted(p.name for p in (folder / "checkpoints").iterdir())
    print(json.dumps([found.step, refused, left]))


if __name__ == "__main__":
    how, plan, workers, folder, *rest = sys.argv[1:]
    torch.use_deterministic_algorithms(True)
    globals()[how](plan, int(workers), Path(folder), *rest)
