"""What is told of hosts before anything starts."""

from __future__ import annotations

import sys
import time

from ronde.launch.facts import collect, notes
from ronde.launch.slurm import allocation


def test_too_little_memory_is_told():
    own = {**collect([sys.argv[0]], None), "received": time.time()}
    enough = {**own, "memory": 1 << 40, "shared_memory": 1 << 40}
    hosts = {"a": enough, "b": {**enough, "shared_memory": 64 << 20}}
    assert notes(hosts, {"a": 8, "b": 1}) == []
    (note,) = notes(hosts, {"a": 8, "b": 2})
    assert note.startswith("b has 64 MB of shared memory (/dev/shm) for 2 workers")


def test_slots_of_an_allocation():
    inside = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-3]"}

    def slots(**env):
        return [host.slots for host in allocation({**inside, **env})]

    assert slots(SLURM_NTASKS_PER_NODE="1", SLURM_NTASKS="3") == [1, 1, 1]
    assert slots(SLURM_TASKS_PER_NODE="2(x2),1", SLURM_NTASKS="5") == [2, 2, 1]
    assert slots(SLURM_TASKS_PER_NODE="8(x3)") == [None, None, None]  # nobody asked for tasks
