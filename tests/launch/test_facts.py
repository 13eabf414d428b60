"""What is told of hosts before anything starts."""

from __future__ import annotations

import sys
import time

from ronde.launch.facts import collect, notes
from ronde.launch.slurm import allocation


def test_one_host_that_is_enough():
    own = {**collect([sys.argv[0]], None), "received": time.time()}
    gpus = {"kind": "cuda", "devices": 8, "memory": 1 << 40, "shared_memory": 1 << 40}
    found = {name: {**own, **gpus} for name in ("a", "b")}
    told = "a alone has 8 GPUs, enough for all 8 workers: on a:8 they would need no network"
    assert notes(found, {"a": 4, "b": 4}) == [told]
    assert notes(found, {"a": 8, "b": 8}) == notes(found, {"a": 8}) == []
    on_cpu = {name: {**facts, "kind": "cpu"} for name, facts in found.items()}
    assert notes(on_cpu, {"a": 4, "b": 4}) == []  # two hosts have twice the cores


def test_slots_of_an_allocation():
    inside = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-3]"}

    def slots(**env):
        return [host.slots for host in allocation({**inside, **env})]

    assert slots(SLURM_NTASKS_PER_NODE="1", SLURM_NTASKS="3") == [1, 1, 1]
    assert slots(SLURM_TASKS_PER_NODE="2(x2),1", SLURM_NTASKS="5") == [2, 2, 1]
    assert slots(SLURM_TASKS_PER_NODE="8(x3)") == [None, None, None]  # nobody asked for tasks
