"""Where the processes of a run listen: on loopback, or on the address by which others reach them."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from lab import lab, missing
from processes import child, free_port, marked, ronde, start_ranks
from ronde.world.network import listen_on, meeting_address, own_address
from sampling import long, some

TRAIN = """
import os, sys, time, torch, ronde
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(16, 3), torch.randn(16, 2))
run = ronde.distribute(model, optimizer, data, loss=torch.nn.functional.mse_loss, batch_size=8)
for epoch in run.epochs(1):
    for batch in run.batches():
        run.step(batch)
open(f"{sys.argv[1]}-{run.rank}", "w").close()
limit = time.monotonic() + 60
while not os.path.exists(f"{sys.argv[1]}-go") and time.monotonic() < limit:
    time.sleep(0.05)
run.barrier()
"""

PLAIN = """
import json, os, psutil, torch, torch.distributed as dist
import ronde
from ronde.world.connect import connect
me = connect()
if "HOROVOD" in os.environ:  # rank 0 listens for its coordinator, too
    from ronde.horovod.lifecycle import init
    init()
dist.all_reduce(torch.ones(1))
found = psutil.Process().net_connections("inet")
places = [c.laddr[:2] for c in found if c.status == "LISTEN"]
print(json.dumps({"rank": me.rank, "places": places}), flush=True)
dist.barrier()
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("listening")
    (folder / "train.py").write_text(TRAIN)
    (folder / "plain.py").write_text(PLAIN)
    return folder


@pytest.fixture(scope="module")
def hosts(place):
    with lab(place / "lab", 3) as made:
        yield made


@contextlib.contextmanager
def held(place: Path, name: str, ranks: int, words: list[str]):
    """A run that has trained, and still has all its processes."""
    with child(ronde("run", *words, "train.py", name), place) as run:
        limit = time.monotonic() + 90
        while not all((place / f"{name}-{rank}").exists() for rank in range(ranks)):
            assert time.monotonic() < limit, run.stdout + run.stderr
            time.sleep(0.05)
        yield run
        (place / f"{name}-go").touch()
        done = run.done(60)
    assert done.returncode == 0, done.stdout + done.stderr


def listening(processes) -> list[tuple[str, int]]:
    found = [c for p in processes for c in p.net_connections("inet")]
    return [tuple(c.laddr) for c in found if c.status == psutil.CONN_LISTEN]


def listening_on(hosts, name: str) -> set[str]:
    """At which addresses of a host anything listens, but for its sshd."""
    code = "import json, psutil; print(json.dumps([c.laddr[:2] for c in "
    code += "psutil.net_connections('inet') if c.status == 'LISTEN']))"
    found = json.loads(hosts.ssh(name, f"{sys.executable} -c {shlex.quote(code)}"))
    return {address for address, port in found if port != 22}


@pytest.mark.parametrize(
    ("address", "told"),
    some([("localhost", False), ("127.0.0.1", True), (socket.gethostname(), True)], 3),
)
def test_ranks_that_nobody_leads(place, address, told):
    """Rank 0 serves the store itself. Without LOCAL_WORLD_SIZE the address alone tells."""
    port = free_port()
    both = {"WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": str(port)}
    both |= {"LOCAL_WORLD_SIZE": "2"} if told else {}
    ranks = [{**both, "RANK": str(r), "LOCAL_RANK": str(r)} for r in range(2)]
    done = start_ranks(2, place / "plain.py", variables=ranks)
    assert [d.returncode for d in done] == [0, 0], done[0].stderr + done[1].stderr
    first, second = (json.loads(d.stdout.splitlines()[-1])["places"] for d in done)
    assert port in [p for _, p in first] and second
    every = [a for a, _ in [*first, *second]]
    assert all(ipaddress.ip_address(a).is_loopback for a in every), every


@long
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_several_hosts_listen_where_the_others_reach_them(hosts, place):
    """The host of the server has another address too, on which it listens until all have come."""
    first, second, third = hosts.names
    words = ["ip", "-n", third, "addr", "add", "10.254.3.1/24", "dev", "eth0"]
    subprocess.run(words, check=True)
    at = ["--ssh-config", str(hosts.ssh_config), "--hosts", f"{first}:2,{second}:1"]
    with held(place, "hosts", 3, [*at, "--servers", third]) as run:
        found = {name: listening_on(hosts, name) for name in hosts.names}
        assert not listening(marked(run.mark))
    assert found == {name: {hosts.address(name)} for name in hosts.names}


@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.parametrize("case", some(["name", "kubeflow", "sizes", "horovod"], 4))
def test_ranks_on_several_hosts_that_nobody_leads(hosts, place, case):
    """Also where rank 0's own host calls itself localhost: it listens where the others come in."""
    first, second = hosts.names[:2]
    ranks = [(first, 0, 2), (first, 1, 2), (second, 0, 1)]
    ranks = ranks[:1] + ranks[2:] if case == "kubeflow" else ranks
    extra = {"horovod": {"HOROVOD": "1"}, "kubeflow": {"KUBERNETES_SERVICE_HOST": "10.1.1.1"}}.get(
        case, {}
    )
    started = []
    for rank, (name, local, beside) in enumerate(ranks):
        said = {"RANK": rank, "WORLD_SIZE": len(ranks), "LOCAL_RANK": local, "MASTER_PORT": 29777}
        here = case != "name" and name == first
        said |= {"MASTER_ADDR": "127.0.1.1" if here else first}
        said |= {"LOCAL_WORLD_SIZE": beside} if case in ("sizes", "horovod") else {}
        words = [f"{k}={v}" for k, v in {**said, **extra, "RONDE_DEVICE": "cpu"}.items()]
        words = ["env", f"PYTHONPATH={os.environ.get('PYTHONPATH', '')}", *words]
        line = shlex.join([*words, sys.executable, "-u", str(place / "plain.py")])
        line = ["ssh", "-F", str(hosts.ssh_config), name, line]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(line, **pipes))
    try:
        said = [process.communicate(timeout=60) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [p.returncode for p in started] == [0] * len(ranks), said
    for (name, *_), (out, _) in zip(ranks, said, strict=True):
        places = json.loads(out.splitlines()[-1])["places"]
        assert {address for address, _ in places} == {hosts.address(name)}, places
    assert 29777 in [port for _, port in json.loads(said[0][0].splitlines()[-1])["places"]]


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "", "localhost"])
def test_what_is_not_one_address(address):
    with pytest.raises(ValueError):
        listen_on(address)


def test_addresses_of_names():
    assert meeting_address("nowhere.invalid", True, True) == "127.0.0.1"
    assert meeting_address("localhost", None, False) == "127.0.0.1"
    assert meeting_address("nowhere.invalid", None, False) == "nowhere.invalid"
    own = meeting_address("nowhere.invalid", False, True)  # its name may come later
    assert own == own_address("nowhere.invalid") and listen_on(own).close() is None
    assert own_address("nowhere.invalid", "lo,eth9") == "127.0.0.1"
    with listen_on("::1") as six:
        assert six.getsockname()[0] == "::1"
