"""``ronde run --tensorflow``: every task gets a ``TF_CONFIG`` whose places lead to each other, on one
machine, on two hosts, and in two containers. With ``RONDE_TENSORFLOW_PYTHON``, an interpreter that
has TensorFlow, tf-keras, and Ronde, real trainings too.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
from pathlib import Path

import numpy
import pytest

from engines import ENGINES, started_by
from lab import no_slurm
from processes import PATHS, child, ronde, ronde_batch, ronde_run
from ronde.launch.job import Job, Nodes
from ronde.launch.tensorflow import TensorFlowCluster
from sampling import ALL, long, some

WORKER = Path(__file__).parents[1] / "tensorflow_worker.py"
PYTHON = os.environ.get("RONDE_TENSORFLOW_PYTHON", "")

# Each task answers at its own place, as TensorFlow's server does, and asks all others who they are.
TASK = """
import json, os, socket, sys, threading, time
config = json.loads(os.environ["TF_CONFIG"])
kind, index = config["task"]["type"], config["task"]["index"]
own = config["cluster"][kind][index]
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
server.bind(("0.0.0.0", int(own.rpartition(":")[2])))
server.listen(16)
def serve():
    while True:
        link = server.accept()[0]
        link.sendall(f"{kind}{index}".encode())
        link.close()
threading.Thread(target=serve, daemon=True).start()
found = []
for other, places in config["cluster"].items():
    for place in places:
        host, _, port = place.rpartition(":")
        while True:
            try:
                found.append(socket.create_connection((host, int(port)), 5).makefile().read())
                break
            except OSError:
                time.sleep(0.05)
print("MET", json.dumps([kind, index, found, own, os.environ.get("CUDA_VISIBLE_DEVICES")]), flush=True)
if kind in ("ps", "worker") and "ps" in config["cluster"]:
    threading.Event().wait()  # as tf.distribute.Server.join
time.sleep(0.5)  # others may still ask
if sys.argv[1:] == ["kill"]:
    if index == 1 and not os.path.exists("killed"):
        open("killed", "w").close()
        os.kill(os.getpid(), 9)
    sys.exit()
sys.exit(int(sys.argv[1]) if sys.argv[1:] else 0)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tensorflow")
    (folder / "task.py").write_text(TASK)
    shutil.copy(WORKER, folder / "train.py")
    (folder / "private").mkdir()
    return folder


def met(output: str) -> list[list]:
    """What each task found, in the order of the ranks."""
    lines = sorted(line for line in output.splitlines() if "MET " in line)
    return [json.loads(line.partition("MET ")[2]) for line in lines]


def test_all_tasks_meet_here(place):
    words = ["run", "--workers", "3", "--output", "all", "--tensorflow", "task.py"]
    done = ronde_run(words, place)
    assert done.returncode == 0, done.stdout + done.stderr
    found = met(done.stdout)
    assert [f[:3] for f in found] == [
        ["worker", i, ["worker0", "worker1", "worker2"]] for i in range(3)
    ]
    assert all(f[3].startswith("127.0.0.1:") for f in found)
    assert [f[4] for f in found] == ["-1"] * 3
    assert "task.py: TensorFlow" in done.stdout


def test_runs_are_listed_with_their_workers_and_restarts(place):
    words = ["run", "--workers", "2", "--restarts", "1", "--tensorflow", "task.py", "kill"]
    done = ronde_run([words[0], "--name", "again", *words[1:]], place)
    assert done.returncode == 0, done.stdout + done.stderr
    failed = ronde_run([words[0], "--name", "bad", *words[1:3], *words[5:7], "7"], place)
    assert failed.returncode == 7, failed.stderr
    shown = ["runs", "--json"], ["runs"], ["show", "again"], ["show", "bad"]
    listed, table, again, bad = (d.stdout for d in ronde_batch(list(shown), place))
    keys = "framework", "script", "workers", "status", "restarts"
    found = {run["run"]: [run[key] for key in keys] for run in json.loads(listed)}
    assert found["again"] == ["TensorFlow", "task.py", 2, "completed", 1]
    assert found["bad"] == ["TensorFlow", "task.py", 2, "failed", 0]
    assert "again" in table and "restarts  1" in again, table + again
    assert "exit status 7" in bad, bad


def test_servers_end_with_the_chief(place):
    words = ["run", "--workers", "4", "--output", "all", "--tensorflow", "ps=1", "task.py"]
    done = ronde_run(words, place)
    assert done.returncode == 0, done.stdout + done.stderr
    everyone = ["chief0", "worker0", "worker1", "ps0"]
    assert [f[0] + str(f[1]) for f in met(done.stdout)] == everyone
    assert all(f[2] == everyone for f in met(done.stdout))
    failed = ronde_run([*words, "7"], place)
    assert failed.returncode == 7 and "rank 0 failed first" in failed.stderr, failed.stderr


@pytest.mark.parametrize("servers", some([["ps=1"], []], 2))
@pytest.mark.parametrize("engine", ENGINES if ALL else ["ssh"])
def test_two_hosts_of_two(hosts, place, short, request, engine, servers):
    absent = engine != "slurm" or no_slurm()
    cluster = None if absent else request.getfixturevalue("cluster")
    told = ["--output", "all", "--tensorflow", *servers, "task.py"]
    words, variables = started_by(engine, hosts, cluster, short, 4, told)
    with child(words, place, variables) as started:
        done = started.done(200)
    assert done.returncode == 0, done.stdout + done.stderr
    kinds = [("chief", 0), ("worker", 0), ("worker", 1), ("ps", 0)]
    kinds = kinds if servers else [("worker", i) for i in range(4)]
    found = sorted(met(done.stdout), key=lambda f: kinds.index((f[0], f[1])))
    assert [f[2] for f in found] == [[f"{k}{i}" for k, i in kinds]] * 4
    if engine not in ("ray", "spark"):
        first, second = hosts.names
        at = [hosts.address(h) for h in (first, first, second, second)]
        assert [f[3].partition(":")[0] for f in found] == at


@long
def test_two_containers(hosts, place):
    """No launcher leads them: the ports are agreed at the first host's store."""
    with contextlib.ExitStack() as stack:
        started = []
        for name in hosts.names:
            base = place / "service" / name
            config = base / "input" / "config" / "resourceconfig.json"
            config.parent.mkdir(parents=True)
            told = {"current_host": name, "hosts": hosts.names, "network_interface_name": "eth0"}
            config.write_text(json.dumps(told))
            words = ronde("run", "--workers", "2", "--tensorflow", "ps=1", "task.py")
            given = [f"PYTHONPATH={PATHS}", f"SAGEMAKER_BASE_DIR={base}", "RONDE_DEVICE=cpu"]
            line = f"cd {place} && {shlex.join(['env', *given, *words])}"
            ssh = ["ssh", "-F", str(hosts.ssh_config), name, line]
            started.append(stack.enter_context(child(ssh, place)))
        ends = [each.done(60) for each in started]
    assert [e.returncode for e in ends] == [0, 0], "".join(e.stdout + e.stderr for e in ends)
    (found,) = met(ends[0].stdout)
    assert found[:3] == ["chief", 0, ["chief0", "worker0", "worker1", "ps0"]]


def test_gpus_are_divided_among_those_that_train(monkeypatch):
    monkeypatch.delenv("RONDE_DEVICE", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    from torch.distributed import HashStore

    def divided(servers: int, workers: int) -> list[str]:
        job = Job(["t.py"], workers, tensorflow=servers)
        cluster = TensorFlowCluster(job, Nodes(), HashStore(), lambda: None)
        try:
            return [e["CUDA_VISIBLE_DEVICES"] for e in cluster.environments(workers, 4)]
        finally:
            cluster.close()

    assert divided(0, 1) == ["4,5,6,7"]
    assert divided(0, 3) == ["4", "5", "6,7"]
    assert divided(1, 4) == ["-1", "4,5", "6,7", "-1"]


def test_refusals(place):
    wrong = {
        ("--tensorflow", "ps=0"): "--tensorflow ps=0: expected nothing, or ps=N above 0.",
        (
            "--workers",
            "2",
            "--tensorflow",
            "ps=1",
        ): "needs --workers 3 or more: a chief, 1 parameter",
        ("--tensorflow", "--horovod"): "--horovod is not for TensorFlow scripts",
        ("--tensorflow", "--plan", "shard"): "--plan is not for TensorFlow scripts",
        ("--tensorflow", "--prove"): "--prove is not for TensorFlow scripts",
    }
    asked = [["run", *words, "task.py"] for words in wrong]
    verbs = {
        v: f"ronde {v} looks at PyTorch models only" for v in ("plan", "prove", "doctor", "scale")
    }
    asked += [[verb, "train.py"] for verb in verbs]
    sentences = [*wrong.values(), *verbs.values()]
    for done, sentence in zip(ronde_batch(asked, place), sentences, strict=True):
        assert done.returncode == 2 and sentence in done.stderr, done.stderr
    assert not (place / "runs" / "task-9").exists()


real = pytest.mark.skipif(not PYTHON, reason="RONDE_TENSORFLOW_PYTHON names no interpreter")


def trained(words: list[str], place: Path, seconds: float = 240.0):
    """A command line of the interpreter that has TensorFlow, to its end."""
    env = {"TF_USE_LEGACY_KERAS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    env["TMPDIR"] = str(place)  # a killed one leaves its compiled functions there
    with child([PYTHON, *words], place, env) as started:
        return started.done(seconds)


@pytest.fixture(scope="module")
def one(place) -> numpy.ndarray:
    """The weights of one process without Ronde."""
    done = trained(["train.py", "fit", "one.npy"], place)
    assert done.returncode == 0, done.stderr
    return numpy.load(place / "one.npy")


@real
@pytest.mark.parametrize(("mode", "asked"), [("fit", []), ("loop", []), ("ps", ["ps=1"])])
@pytest.mark.parametrize("away", [False, True])
def test_the_weights_of_one_process(request, place, one, mode, asked, away):
    file, count = f"{mode}-{away}.npy", "3" if asked else "2"
    where = ["--workers", count]
    if away:
        hosts = request.getfixturevalue("hosts")
        first, second = hosts.names
        named = f"{first}:{int(count) - 1},{second}:1"
        where = ["--ssh-config", str(hosts.ssh_config), "--env", "TF_USE_LEGACY_KERAS"]
        where += ["--hosts", named]
    run = ["-m", "ronde", "run", *where, "--tensorflow", *asked]
    done = trained([*run, "train.py", mode, file], place)
    assert done.returncode == 0, done.stdout + done.stderr
    numpy.testing.assert_allclose(numpy.load(place / file), one, rtol=0, atol=1e-12)


@real
def test_a_killed_worker_is_named_and_the_backup_restored(place, one):
    run = ["-m", "ronde", "run", "--workers", "3", "--output", "all", "--restarts", "1"]
    done = trained([*run, "--tensorflow", "train.py", "fit", "killed.npy", "kill"], place)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "restart 1 of 1, from the script's own backup: rank 1: killed by signal 9" in done.stderr
    assert done.stdout.count("[0] epoch 1") == 1, done.stdout
    numpy.testing.assert_allclose(numpy.load(place / "killed.npy"), one, rtol=0, atol=1e-12)


@real
def test_a_hanging_worker_is_named(place):
    run = ["-m", "ronde", "run", "--workers", "2", "--hang-timeout", "15", "--tensorflow"]
    done = trained([*run, "train.py", "fit", "hung.npy", "hang"], place)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Rank 1 has done nothing for" in done.stderr and "`time.sleep(999)`" in done.stderr
    assert "rank 0 is waiting for it" in done.stderr, done.stderr
