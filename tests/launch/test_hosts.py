"""``ronde run --hosts`` on real hosts: the same training, one end for all, and errors by name."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lab import missing, no_slurm, slurm
from processes import child, ronde, ronde_run
from ronde.cli.check import slow_links
from ronde.measure.pair_links import rounds
from ronde.predict import Cluster
from sampling import ALL, long, some

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

TRAIN = """
import os, sys, time
import torch
from torch import nn
import ronde

out, epochs, odd = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
generator = torch.Generator().manual_seed(1)
x, y = torch.randn(14, 4, generator=generator), torch.randn(14, 1, generator=generator)
data = torch.utils.data.TensorDataset(x, y)
run = ronde.distribute(model, optimizer, data, loss=nn.functional.mse_loss, batch_size=5,
                       shuffle=False)
for epoch in run.epochs(epochs):
    for batch in run.batches():
        loss = run.step(batch)
    if odd[:1] == ["forever"]:
        run.print("begun", flush=True) if epoch == 0 else None
        time.sleep(0.05)
run.export(out)
me = ronde.world()
print("I am", me.rank, me.size, me.local_rank, me.local_size, me.node, me.host, odd)
"""


def launched(words: list[str], cwd: Path):
    return ronde_run(["run", *words], cwd)


def on(hosts, *words: str) -> list[str]:
    first, second = hosts.names
    return ["--ssh-config", str(hosts.ssh_config), "--hosts", f"{first}:2,{second}:1", *words]


def equal(found: Path, one, atol: float = 1e-12) -> None:
    values = load_file(found)
    for name, value in one.items():
        torch.testing.assert_close(values[name], value, rtol=0, atol=atol)


def test_same_training_and_hostile_arguments(hosts, place, one):
    odd = ["a $(touch caught)", "q'\"", "two\nlines", "-x", "--hosts=b"]
    done = launched([*on(hosts), "--output", "all", "train.py", "two.st", "4", *odd], place)
    assert done.returncode == 0, done.stdout + done.stderr
    equal(place / "two.st", one)
    first, second = hosts.names
    for rank, local, node, host in ((0, 0, 0, first), (1, 1, 0, first), (2, 0, 1, second)):
        told = f"[{host} {rank}] I am {rank} 3 {local} {2 - node} {node} {host} {odd!r}"
        assert told in done.stdout.splitlines()
    assert not (place / "caught").exists()
    assert f"3 workers on {first}:2, {second}:1  ·" in done.stdout
    assert f"3 workers on {first}:2, {second}:1 (cpu)" in done.stdout  # in the summary, too
    assert "completed" in done.stdout
    run = max((place / "runs").iterdir(), key=lambda p: p.stat().st_mtime)
    assert sorted(p.name for p in (run / "logs").iterdir()) == [f"rank-{r}.log" for r in range(3)]
    assert not [p for p in (place / "runs").iterdir() if p.name.startswith(".")]


@long
@pytest.mark.parametrize("plan", ["shard=parameters", "replicate"])
def test_run_directory_that_hosts_do_not_share(hosts, place, one, plan):
    """Checkpoints come here, whole, and go on from here, on hosts and on one machine. The short one
    is in ``test_alerts_on_hosts.py``.
    """
    own = place / "private"
    for name in hosts.names:
        hosts.ssh(name, f"cp {place}/train.py {own}/")
    shutil.copy(place / "train.py", own)
    named = ["--name", f"n-{plan[:5]}"]
    done = launched([*on(hosts), *named, "--plan", plan, "train.py", "half.st", "2"], own)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "completed" in done.stdout
    run = own / "runs" / named[1]
    assert sorted(p.name for p in run.iterdir() if p.name[0] != ".") == [
        "checkpoints",
        "logs",
        "plan.yaml",
        "record.jsonl",
    ]
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["step-000000006"]
    assert not (own / "half.st").exists()
    hosts.ssh(hosts.names[0], f"test -f {own}/half.st && rm -r {own}/runs")
    on_hosts = [*on(hosts), "--resume", *named, "--plan", plan, "train.py", "here.st", "3"]
    done = launched(on_hosts, own)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed" in done.stdout
    done = launched(["--workers", "2", "--resume", *named, "train.py", "here.st", "4"], own)
    assert done.returncode == 0, done.stdout + done.stderr
    equal(own / "here.st", one)


def refused(hosts, place, words: list[str], *told: str) -> None:
    had = (place / "runs").exists()
    before = sorted((place / "runs").iterdir()) if (place / "runs").exists() else []
    done = launched(["--ssh-config", str(hosts.ssh_config), *words], place)
    assert done.returncode != 0
    said = re.sub(r"\s+", " ", done.stdout + done.stderr)
    for text in told:
        assert text in said, said
    assert "Traceback" not in said
    assert before == (sorted((place / "runs").iterdir()) if (place / "runs").exists() else [])
    assert before or not (place / "runs").exists() or had


@long
def test_errors_name_the_host_and_the_cure(hosts, place):
    first, second = hosts.names
    both = f"{first}:1,{second}:1"
    train = ["train.py", "x.st", "1"]
    file = place / "hostfile"
    file.write_text(f"# two\n{first} slots=1\n{second} slots=none\n")
    away = f"{first}:1,nowhere.invalid:1"
    wrong = [
        (["--hosts", away], "nowhere.invalid: no such host", "Nothing was started."),
        (["--hosts", "-oProxyCommand=touch caught:1"], "is not a host"),
        (["--hosts", f"{first}:1,{first}:1"], "is there twice"),
        (["--hosts", both, "-n", "5"], "fewer slots than workers: 5 asked, 2"),
        (["--hosts", both, "--python", "/no/python"], f"{first}: there is no /no/python"),
        (["--hosts", both, "--env", "NO_SUCH"], "it is not set here"),
        (["--hosts", "a:x"], "'x' is not a number of workers"),
        (["--hosts", both, "-n", "x"], "expected a whole number above 0"),
        (["--hostfile", str(file)], "line 3", "'none'"),
    ]
    for words, *told in wrong:
        refused(hosts, place, [*words, *train], *told)
    # a host key that changed, a key that is refused, a host that is off
    known = hosts.known_hosts.read_text()
    kept = hosts.folder / "id"
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(place / "other")], check=True
    )
    try:
        other = " ".join((place / "other.pub").read_text().split()[:2])
        lines = known.splitlines()
        hosts.known_hosts.write_text(f"{lines[0]}\n{second},{hosts.address(second)} {other}\n")
        refused(hosts, place, ["--hosts", both, *train], f"{second}: its host key is another one")
        hosts.known_hosts.write_text(lines[0] + "\n")
        refused(hosts, place, ["--hosts", both, *train], f"{second}: its host key is not known")
    finally:
        hosts.known_hosts.write_text(known)
    kept.rename(hosts.folder / "hidden")
    try:
        (place / "other").rename(kept)
        refused(hosts, place, ["--hosts", both, *train], f"{first}: it does not accept your key")
    finally:
        (hosts.folder / "hidden").rename(kept)
    # another script there
    own = place / "private"
    shutil.copy(place / "train.py", own)
    hosts.ssh(first, f"cp {place}/train.py {own}/")
    hosts.ssh(second, f"echo 'print(1)' > {own}/train.py")
    refused(
        hosts, own, ["--hosts", both, *train], "the hosts differ", "script (SHA-256)", "as here"
    )
    hosts.cut(second)
    refused(hosts, place, ["--hosts", both, *train], f"{second}: it does not answer")
    hosts.heal(second)


@long
def test_errors_of_one_host_among_others(hosts, place):
    """Another torch, no script, and one of three that is off: the others are not started."""
    first, second = hosts.names
    own = place / "private"
    shutil.copy(place / "train.py", own)
    for name in hosts.names:
        told = f'#!/bin/sh\nPYTHONPATH={own}/{name} exec {sys.executable} "$@"\n'
        hosts.ssh(name, f"cp {place}/train.py {own}/")
        hosts.ssh(name, f"echo {shlex.quote(told)} > {own}/python; chmod +x {own}/python")
    made = f"{own}/{second}/torch-2.0.1.dist-info"
    hosts.ssh(second, f"mkdir -p {made}; printf 'Name: torch\nVersion: 2.0.1\n' > {made}/METADATA")
    words = ["--hosts", f"{first}:1,{second}:1", "train.py", "x.st", "1"]
    other = ["--python", f"{own}/python", *words]
    refused(hosts, own, other, f"differs {first} {second} torch {torch.__version__} 2.0.1")
    hosts.ssh(second, f"rm {own}/train.py")
    refused(hosts, own, words, "script (SHA-256) as here no such file or directory")
    off = f"{hosts.net}.99"
    words = ["--hosts", f"{first}:1,{off}:1,{second}:1", "train.py", "x.st", "1"]
    refused(hosts, place, words, f"{off}: it does not answer. Is it switched on", "Nothing was")


def test_check_before_a_job(hosts, place):
    first, second = hosts.names
    words = ["--ssh-config", str(hosts.ssh_config), "--hosts", f"{first},{second}"]
    done = ronde_run(["check", *words], place)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{first}" in done.stdout and "MB/s" in done.stdout and "µs" in done.stdout
    assert "gloo" in done.stdout and "the hosts are alike" in done.stdout
    wrong = ronde_run(["check", *words, "--output", "none/cluster.yaml"], place)
    assert wrong.returncode == 2 and "there is no folder" in wrong.stderr


@long
def test_a_check_measures_a_slow_link(hosts, place):
    first, second = hosts.names
    words = ["--ssh-config", str(hosts.ssh_config), "--hosts", f"{first},{second}"]
    hosts.rate(second, "100mbit")
    try:
        done = ronde_run(["check", "--json", *words], place)
    finally:
        hosts.rate(second, None)
    told = json.loads(done.stdout)
    assert set(told["hosts"]) == {first, second}
    assert told["hosts"][second]["torch"] == torch.__version__
    (link,) = told["links"]
    assert (link["a"], link["b"]) == (first, second)
    assert 5e6 < link["bandwidth"] < 13e6  # 12.5 MB/s


@long
def test_the_cluster_file_of_a_check(hosts, place):
    """``ronde plan`` plans for what ``ronde check`` measured."""
    first, second = hosts.names
    words = ["--ssh-config", str(hosts.ssh_config), "--hosts", f"{first}:1,{second}:1"]
    done = ronde_run(["check", *words, "--output", "cluster.yaml"], place, 150.0)
    assert done.returncode == 0, done.stdout + done.stderr
    cluster = Cluster.load(place / "cluster.yaml")
    assert (cluster.nodes, cluster.devices_per_node) == (2, 1)
    assert cluster.links["all_reduce"]["cluster"].beta > 1e7
    words = ["--cluster", "cluster.yaml", "--json", "plan.json"]
    done = ronde_run(["plan", *words, "train.py", "x.st", "1"], place, 150.0)
    assert done.returncode == 0, done.stdout + done.stderr
    assert cluster.name in (place / "plan.json").read_text()


def test_slow_links_are_named():
    def pairs(slow):
        every = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
        return [
            {"a": a, "b": b, "latency": 1e-5, "bandwidth": 1e7 if (a, b) in slow else 1e9}
            for a, b in every
        ]

    names = ["a", "b", "c", "d"]
    assert slow_links(names, pairs([])) == []
    assert slow_links(names, pairs([(1, 2)])) == [
        "the link between b and c is slow: 10 MB/s, where 1,000 MB/s are usual here"
    ]
    (told,) = slow_links(names, pairs([(0, 3), (1, 3), (2, 3)]))
    assert told.startswith("every link of d is slow: at most 10 MB/s")
    for size in range(2, 8):
        met = [p for each in rounds(size) for p in each]
        assert sorted(met) == [(a, b) for a in range(size) for b in range(a + 1, size)]
        assert all(len({r for p in each for r in p}) == 2 * len(each) for each in rounds(size))


LISTENING = """
import psutil, torch
def listening():
    found = psutil.Process().net_connections() + psutil.Process().parent().net_connections()
    with open(f"listening-{run.rank}", "w") as file:
        print(*(c.laddr.ip for c in found if c.status == "LISTEN"), file=file)
"""


def test_a_hang_is_named_with_its_host(hosts, place):
    script = TRAIN.replace("run.step(batch)", "run.step(batch)\n        stop_here()").replace(
        "run = ronde",
        "def stop_here():\n    if run.rank == 1 and run.state.step == 4:\n"
        "        time.sleep(300)\n\nrun = ronde",
    )
    script = script.replace("import torch\n", LISTENING, 1)
    script = script.replace("for epoch", "listening()\nfor epoch", 1)
    (place / "hangs.py").write_text(script)
    each = ",".join(f"{name}:1" for name in hosts.names)
    line = [*on(hosts)[:3], each, "--name", "hangs", "--hang-timeout", "3", "hangs.py", "x.st", "4"]
    done = ronde_run(["run", *line], place, 120.0)
    sentence = (
        f"Rank 1 on {hosts.names[1]} has not reached the exchange of step 5; it is at hangs.py:22 "
        "(`time.sleep(300)`), inside `if run.rank == 1 and run.state.step == 4`; rank 0 is "
        "waiting for it."
    )
    assert done.returncode == 1 and sentence in done.stderr, done.stderr
    for rank in (0, 1):  # on the interface that leads to the other host, never on all
        assert "0.0.0.0" not in (told := (place / f"listening-{rank}").read_text()), told
        assert "::" not in told.split() and "10." in told, told
    events = [json.loads(x) for x in (place / "runs" / "hangs" / "record.jsonl").open()]
    ended = [e["sentence"] for e in events if e["type"] == "hang" and not e["slow"]]
    assert ended == [sentence]  # under load, a notice may come before
    assert "The stack of rank 1:" in (place / "runs" / "hangs" / "logs" / "rank-1.log").read_text()


@pytest.mark.skipif(bool(no_slurm()), reason=no_slurm())
def test_a_job_of_slurm(hosts, place, one):
    with slurm(hosts) as made:
        first, second = hosts.names
        odd = "a $(touch caught) 'b'"
        words = ["--nodes", "2", "--tasks", "2", "--requeue", "train.py", "sub.st", "4", odd]
        with child(ronde("submit", *words), place, made.env) as began:
            done = began.done(90)
        assert done.returncode == 0, done.stdout + done.stderr
        equal(place / "sub.st", one)
        assert f"4 workers on {first}:2, {second}:2" in done.stdout and "completed" in done.stdout
        assert f"I am 0 4 0 2 0 {first} [{odd!r}]" in done.stdout
        assert not (place / "caught").exists()
        assert re.search(r"submitted job \d+: train.py", done.stderr), done.stderr
        words = ["--partition", "nowhere", "train.py"]
        with child(ronde("submit", *words), place, made.env) as began:
            done = began.done(60)
        assert done.returncode == 2 and "Slurm refuses the job" in done.stderr
    done = launched(["--slurm", "train.py", "x.st", "1"], place)
    assert done.returncode == 2
    assert "this is not inside an allocation of Slurm" in done.stderr


@long
@pytest.mark.timeout(400)
@pytest.mark.skipif(bool(no_slurm()), reason=no_slurm())
def test_a_job_that_leaves_before_its_limit_is_started_again(hosts, place):
    """The warning that Slurm sends to the batch script: saved on two hosts, queued, and resumed."""
    slow = TRAIN.replace("lr=0.2", "lr=0.02").replace("sleep(0.05)", "sleep(0.3)")
    (place / "slow.py").write_text(slow)
    train = ["slow.py", "leaves.st", "40", "forever"]
    with slurm(hosts) as made:
        words = ["--nodes", "2", "--tasks", "1", "--requeue", "--time", "30", *train]
        with child(ronde("submit", *words), place, made.env) as began:
            began.wait_for("begun", 200)
            job = re.search(r"submitted job (\d+)", began.stderr)[1]
            environment = {**os.environ, **made.env}
            warn = ["scancel", "--signal=USR1", "--batch", job]
            subprocess.run(warn, env=environment, check=True, timeout=20)
            done = began.done(150)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "2 workers on" in done.stdout
    said = (place / f"slurm-{job}.out").read_text()
    assert "asked to leave by SIGUSR1: it has left after step" in said, said
    assert f"Slurm starts job {job} again" in said
    assert "resumed" in said and "completed" in said
    done = launched(["--workers", "1", *train[:1], "whole.st", *train[2:]], place)
    assert done.returncode == 0, done.stderr
    equal(place / "leaves.st", load_file(place / "whole.st"))


BOX = """import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int)
parser.add_argument("--layers")
parser.add_argument("--text")
odd = vars(parser.parse_args())
out, epochs = os.path.join(os.environ["SM_MODEL_DIR"], "model.st"), odd.pop("epochs")
"""
FAILS = """
if odd["text"] == "fail" and me.rank == 3:
    time.sleep(2)  # rank 0 has written the model
    raise ValueError("on purpose")
"""


def test_as_the_entry_point_of_containers(hosts, place, one):
    """Two hosts of SageMaker's contract: files say who takes part; typed hyperparameters become
    arguments; a second start resumes; the first failure is where the service looks for it.
    """
    base = place / "private" / "ml"
    given = "out, epochs, odd = sys.argv[1], int(sys.argv[2]), sys.argv[3:]\n"
    body = TRAIN.replace(given, BOX).replace('odd[:1] == ["forever"]', "False")
    (place / "box.py").write_text(body + FAILS)

    def start(epochs: int, text: str) -> list[subprocess.CompletedProcess[str]]:
        running = []
        for name in hosts.names:
            values = {"epochs": str(epochs), "layers": "[1, 2]", "text": json.dumps(text)}
            config = {"current_host": name, "hosts": [*reversed(hosts.names)]}
            config["network_interface_name"] = "eth0"
            values["sagemaker_program"] = "box.py"
            files = {"resourceconfig": config, "hyperparameters": values}
            files["inputdataconfig"] = {"train": {}}
            write = "".join(
                f"echo {shlex.quote(json.dumps(v))} > {base}/input/config/{k}.json; "
                for k, v in files.items()
            )
            command = (
                f"mkdir -p {base}/input/config {base}/checkpoints {base}/model; {write}"
                f"cd {place}; OMP_NUM_THREADS=1 RONDE_DEVICE=cpu SAGEMAKER_BASE_DIR={base} "
                f"{shlex.join(ronde('run', '-n', '2', 'box.py'))}"
            )
            words = ["ssh", "-F", str(hosts.ssh_config), name, command]
            running.append(
                subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            )
        told = [(p, *p.communicate(timeout=90)) for p in running]
        return [subprocess.CompletedProcess(p.args, p.returncode, out, err) for p, out, err in told]

    if not ALL:
        first, second = start(4, "two words")
        assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
        assert "'layers': '[1, 2]', 'text': 'two words'" in first.stdout
        hosts.ssh(hosts.names[0], f"cp {base}/model/model.st {place}/box.st")
        equal(place / "box.st", one)
        return
    first, second = start(2, "two words")
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    first, second = start(4, "fail")
    assert first.returncode and second.returncode
    assert "resumed" in first.stdout
    hosts.ssh(hosts.names[0], f"cp {base}/model/model.st {place}/box.st")
    equal(place / "box.st", one)
    assert not hosts.ssh(hosts.names[1], f"find {base}/model {base}/checkpoints -type f")
    reason = hosts.ssh(hosts.names[1], f"cat {base}/output/failure")
    assert reason.startswith("rank 3: Traceback") and reason.endswith("ValueError: on purpose")
    assert "--runs none" not in second.stderr and "the first host keeps" in second.stderr


@pytest.mark.parametrize("which", some(["mpirun.openmpi", "mpirun.mpich"], 2))
def test_over_mpirun(hosts, place, one, which, tmp_path):
    if shutil.which(which) is None:
        pytest.skip(f"{which} not found")
    (tmp_path / "mpirun").write_text(f'#!/bin/sh\nexec {shutil.which(which)} "$@"\n')
    (tmp_path / "mpirun").chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    first, second = hosts.names
    odd = ["a $(touch caught)", "-x", "two\nlines"]
    done = ronde_run(["run", *on(hosts), "--mpi", "train.py", "mpi.st", "4", *odd], place, env=path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"I am 0 3 0 2 0 {first} {odd!r}" in done.stdout and not (place / "caught").exists()
    equal(place / "mpi.st", one)
    (place / "mpi.st").unlink()
    words = [*on(hosts), "--mpi", "train.py", "x.st", "1"]
    refusals = [
        (["--python", "/no/python"], ": there is no /no/python. Name the Python there"),
        (["-n", "4"], f"fewer slots than workers: 4 asked, 3 there ({first}:2, {second}:1). Add"),
    ]
    for wrong, told in some(refusals, 2):
        done = ronde_run(["run", *wrong, *words], place, env=path)
        assert done.returncode == 2 and told in re.sub(r"\s+", " ", done.stderr), done.stderr
