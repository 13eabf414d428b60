"""What a meeting of ranks costs, by counting."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import Counter

import torch
from torch.distributed import HashStore

from ronde.world import World
from ronde.world.rendezvous import Rendezvous


class Counting:
    """A client of a store that counts the messages of its meetings, but not the looks at a key."""

    def __init__(self, store):
        self.store, self.sent = store, Counter()

    def __getattr__(self, name):
        def send(*given):
            if name != "check" and not str(given[0]).startswith("at/"):  # this rank's own place
                self.sent[name] += 1
            return getattr(self.store, name)(*given)

        return send


def meet(size: int) -> list[Counter[str]]:
    """What each rank sends for three meetings."""
    store = HashStore()
    clients: list = [None] * size

    def attend(rank: int) -> None:
        me = World(rank, size, rank, size, 0, torch.device("cpu"), "python", "here")
        here = Rendezvous(me, store)
        here._store = clients[rank] = Counting(here._store)
        for n in range(3):
            assert here.meet("run.barrier()", [n, rank]) == [[n, r] for r in range(size)]

    threads = [threading.Thread(target=attend, args=[rank]) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [client.sent for client in clients]


def test_a_meeting_costs_each_rank_the_same_on_any_number_of_ranks():
    done = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    for counts in json.loads(done.stdout):
        for rank, sent in enumerate(counts):
            last = sent.pop("set") - 2 * 3  # the last one that comes says that all are here
            assert 0 <= last <= 3
            assert sent == {"add": 3, "multi_get": 3, "delete_key": 3 + 9 * (rank == 0)}


if __name__ == "__main__":
    print(json.dumps([meet(size) for size in (2, 12, 48)]), flush=True)
    os._exit(0)  # ranks that share a process have nobody to say goodbye to
