"""What docs/security.md promises: who can reach a run, what is read from a network or a file, and
what is written into logs.
"""

from __future__ import annotations

import ast
import ipaddress
import json
import socket
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from processes import child, marked, ronde, ronde_run
from ronde.world import rendezvous
from sampling import some

SOURCE = Path(rendezvous.__file__).parents[1]

SCRIPT = textwrap.dedent(
    """
    import json, os, sys, time, torch, ronde
    from torch.distributed import distributed_c10d as c10d

    class Refuse:
        def __init__(self, *_):
            raise AssertionError("something from the network is unpickled")

    c10d._unpickler = c10d._pickler = Refuse
    way = sys.argv[1]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(64, 3), torch.randn(64, 2))
    run = ronde.distribute(model, optimizer, data, loss=torch.nn.functional.mse_loss, batch_size=16)
    for epoch in run.epochs(1):
        for batch in run.batches():
            run.step(batch)
    run.save()
    run.evaluate(data)
    if way == "plan":
        sys.exit()
    if run.is_main:
        with open("facts.new", "w") as file:
            json.dump({k: os.environ[k] for k in ("RONDE_SECRET", "RONDE_WATCH_DIR")}, file)
        os.rename("facts.new", "facts")
    while not os.path.exists("go"):
        time.sleep(0.05)
    if run.rank == 1:  # it plays somebody else who reaches the port of the store
        time.sleep(2)  # rank 0 waits in its barrier
        store = c10d.PrefixStore("ronde/rendezvous", c10d._get_default_store()).clone()
        forged = "0" * 64 + json.dumps(["run.barrier()", None, ""])
        for n in range(1, 50):
            store.set(f"all/{n}/0", forged)
    run.barrier()
    """
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("security")
    (folder / "train.py").write_text(SCRIPT)
    return folder


def test_who_reaches_a_run(folder):
    with child(
        ronde("run", "-n", "2", "--servers", "1", "--name", "held", "train.py", "held"), folder
    ) as started:
        limit = time.monotonic() + 60
        while not (folder / "facts").exists() and time.monotonic() < limit:
            time.sleep(0.05)
        facts = json.loads((folder / "facts").read_text())
        processes = marked(started.mark)
        listening = [
            c.laddr.ip
            for p in processes
            for c in p.net_connections("inet")
            if c.status == psutil.CONN_LISTEN
        ]
        assert listening and all(ipaddress.ip_address(ip).is_loopback for ip in listening)
        private = Path(facts["RONDE_WATCH_DIR"])
        assert stat.S_IMODE(private.stat().st_mode) == 0o700
        secret = facts["RONDE_SECRET"]
        assert len(secret) == 64
        assert not any(secret in word for p in processes for word in p.cmdline())
        # Others cannot read a process's variables either.
        assert stat.S_IMODE(Path(f"/proc/{started.pid}/environ").stat().st_mode) == 0o400
        (folder / "go").touch()
        done = started.done(60)
    assert done.returncode == 1
    assert "in the store where ranks meet does not come from this run" in done.stderr, done.stderr
    written = [p for p in (folder / "runs").rglob("*") if p.is_file()]
    assert any(p.name == "rank-1.log" for p in written)
    assert not any(secret.encode() in p.read_bytes() for p in written)
    assert secret not in done.stdout + done.stderr


@pytest.mark.parametrize("plan", some(["pipeline=2", "shard=parameters", "tensor=2"], 3))
def test_nothing_from_the_network_is_unpickled(folder, plan):
    """torch's collectives of objects pickle: none is called."""
    done = ronde_run(["run", "-q", "-n", "2", "--plan", plan, "train.py", "plan"], folder)
    assert done.returncode == 0, done.stderr


_RUNS_CODE = {
    "pickle.load",
    "pickle.loads",
    "pickle.Unpickler",
    "cloudpickle.load",
    "cloudpickle.loads",
    "torch.load",
    "marshal.loads",
    "os.system",
    "eval",
    "yaml.load",
    "yaml.unsafe_load",
}
_OBJECTS = ("_object", "_object_list")
_MAY = {
    "horovod/objects.py": {"pickle.loads"},  # HOROVOD_PICKLE_OBJECTS=1
    "launch/call.py": {"pickle.load", "pickle.loads"},  # from its own temporary folder
}


def _calls(tree: ast.Module):
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            shell = any(k.arg == "shell" and ast.unparse(k.value) != "False" for k in node.keywords)
            yield name, shell


def test_no_file_of_ronde_runs_what_it_reads():
    found = {}
    for file in sorted(SOURCE.rglob("*.py")):
        name = str(file.relative_to(SOURCE))
        for call, shell in _calls(ast.parse(file.read_text())):
            collective = call.startswith("dist.") and call.endswith(_OBJECTS)
            if shell or collective or call in _RUNS_CODE - _MAY.get(name, set()):
                found.setdefault(name, []).append(call)
    assert found == {}


def test_servers_refuse_a_wrong_token():
    from ronde.exchange.servers import HELLO

    line = [sys.executable, "-m", "ronde.exchange.reduction_server", "--listen", "127.0.0.1"]
    server = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        server.stdin.write("a" * 32 + "\n")
        server.stdin.flush()
        host, port = json.loads(server.stdout.readline())["places"][0].split(":")
        answers = {}
        for token in (b"a" * 32, b"b" * 32):
            with socket.create_connection((host, int(port)), 30) as link:
                link.sendall(HELLO.pack(b"RONDE1", token, 1, 0, 2))
                link.settimeout(0.5 if token == b"a" * 32 else 30)
                try:
                    answers[token[:1]] = link.recv(1)
                except TimeoutError:
                    answers[token[:1]] = None
        assert answers == {b"a": None, b"b": b""}  # it waits for its orders; it is sent away
    finally:
        server.stdin.close()
        server.wait(30)
        server.stdout.close()
