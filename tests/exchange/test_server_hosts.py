"""Servers that sum gradients, on several hosts: the same weights after a kill, and a benchmark."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file

from lab import lab, missing
from processes import child, ronde, ronde_run
from sampling import long

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

TRAIN = """
import psutil, sys, time, torch, torch.nn.functional as F, ronde
from torch.utils.data import TensorDataset
g = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(48, 6, generator=g), torch.randint(3, (48,), generator=g))
torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.Tanh(), torch.nn.Linear(32, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
run = ronde.distribute(
    model, optimizer, data, loss=F.cross_entropy, batch_size=8, save_every=3, async_save=False
)
for epoch in run.epochs(2):
    for batch in run.batches():
        run.step(batch)
        if run.state.step == 4:
            own = psutil.Process().net_connections()
            print("TRAINING", *(c.laddr.ip for c in own if c.status == "LISTEN"), flush=True)
        time.sleep(float(sys.argv[2]))
run.export(sys.argv[1])
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("servers")
    (folder / "train.py").write_text(TRAIN)
    return folder


@pytest.fixture(scope="module")
def hosts(place):
    with lab(place / "lab", 3) as made:
        yield made


@long
def test_workers_are_servers_and_one_is_killed(hosts, place):
    """They listen on one address; the weights are those of the ring."""
    done = ronde_run(["run", "-n", "3", "train.py", "ring3.st", "0"], place)
    assert done.returncode == 0, done.stderr
    each = ",".join(f"{name}:1" for name in hosts.names)
    words = ["--ssh-config", str(hosts.ssh_config), "--hosts", each]
    words += ["--reducer", "servers", "--restarts", "1", "--no-spares", "--name", "own"]
    with child(ronde("run", *words, "train.py", "own.st", "0.1"), place) as running:
        running.wait_for("TRAINING", 60)
        hosts.ssh(hosts.names[1], "pkill -9 -f 'launch/worke[r].py' -n")
        done = running.done(90)
    said = done.stdout + done.stderr
    assert done.returncode == 0 and "restart 1 of 1" in said and "rank 1" in said, said
    line = next(line for line in said.splitlines() if "TRAINING " in line)
    assert set(line.split("TRAINING ")[1].split()) == {hosts.address(hosts.names[0])}, said
    ring, found = (load_file(place / f"{name}.st") for name in ("ring3", "own"))
    assert all((ring[k] - found[k]).abs().max() <= 1e-6 for k in ring)


@long
def test_bench_between_hosts_and_servers(hosts, place):
    first, second, third = hosts.names
    words = ["--ssh-config", str(hosts.ssh_config), "--hosts", f"{first}:1,{second}:1"]
    words += ["--servers", third, "--sizes", "4KiB,64KiB", "--reducers", "ring,servers", "--json"]
    done = ronde_run(["bench", "exchange", *words], place, 90)
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout)
    assert answer["hosts"] == [first, second] and answer["workers"] == 2
    assert {(row["reducer"], row["bytes"]) for row in answer["rows"]} == {
        (name, size) for name in ("ring", "servers") for size in (4096, 65536)
    }
