"""Worlds of real ranks that share one import: ``python forked.py [-n WORKERS[,WORKERS…]] [-i
MODULE[:FUNCTION],…] SCRIPT [ARGS…]``. ``{n}`` in an argument is a world's number of workers.

Importing torch, and its compiler with the first optimizer, takes a process some seconds of
computing, a training of these tests hardly one. So one process imports, and every rank is a fork of
it, before anything was computed. Ranks find each other by the variables that torchrun sets; what
``ronde run`` itself does is tested elsewhere.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # a pool of threads would not live in a fork

import torch

from processes import free_port, rank_variables

torch.set_num_threads(1)  # where torch was imported before
torch.optim.SGD([torch.zeros(1)])  # the first optimizer imports several hundred modules


def forget_runs() -> None:
    """The next run is the first one of its process."""
    from ronde.run import group
    from ronde.run.callbacks import SavesEvery

    group._groups, group._latest, SavesEvery.newest = 0, None, 0


def fork(size: int, work: Callable[[], None], seconds: float = 150.0) -> None:
    """Run ``work`` as every rank of a world of that size; raises where one of them did, or took too
    long.
    """
    port = free_port()
    children = {}
    parent = os.getpid()
    for rank in range(size):
        pid = os.fork()
        if not pid:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            if os.getppid() != parent:
                os._exit(1)
            if size > 1:
                os.environ.update(rank_variables(rank, size, port))
            try:
                # torch makes its pool of threads anew: two first threads at once would race
                torch.set_num_threads(1)
                work()
                sys.stdout.flush()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
        children[pid] = rank
    limit = time.monotonic() + seconds
    failed: list[int] = []
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            rank = children.pop(pid)
            failed += [rank] if status else []
        late = time.monotonic() > limit
        if failed or late:
            for each in children:
                os.kill(each, signal.SIGKILL)
            for each in children:
                os.waitpid(each, 0)
            raise SystemExit(
                f"rank {failed} of {size} failed"
                if failed
                else f"{size} ranks took longer than {seconds} s"
            )
        if not pid:
            time.sleep(0.005)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-n", default="1")
    parser.add_argument("-i", default="")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    for name in filter(None, given.i.split(",")):
        module, _, function = name.partition(":")
        loaded = importlib.import_module(module)
        if function:
            getattr(loaded, function)()
    os.environ.update({"RONDE_RUNS": "none", "RONDE_PROGRESS": "quiet", "RONDE_DEVICE": "cpu"})
    sys.path.insert(0, str(Path(given.script).parent))

    def work() -> None:
        runpy.run_path(given.script, run_name="__main__")

    for n in given.n.split(","):
        sys.argv = [given.script, *(a.replace("{n}", n) for a in given.arguments)]
        fork(int(n), work, float("inf"))  # whoever started this has a limit


if __name__ == "__main__":
    main()
