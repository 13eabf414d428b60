"""Who am I: every launcher's environment as it was seen to be, partial ones, contradictory ones;
and the cores.
"""

from __future__ import annotations

import ast
import dataclasses
import math
import os
import sys
from pathlib import Path

import pytest

from processes import forked, python
from ronde.world import WorldError, identify, launchers, threads_per_worker, usable_cores
from ronde.world import cores as cores_module
from ronde.world.cores import _cgroup_cores, control_groups
from ronde.world.launchers import expand_nodelist

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "ROLE_RANK": "3",
    "ROLE_WORLD_SIZE": "4",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}

SRUN = {  # task 3 of srun -N 2 -n 4 inside a job of four nodes
    "SLURM_JOB_ID": "4711",
    "SLURM_JOBID": "4711",
    "SLURM_JOB_NODELIST": "n[1-4]",
    "SLURM_NODELIST": "n[1-4]",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "4",
    "SLURM_NPROCS": "4",
    "SLURM_STEP_ID": "2",
    "SLURM_STEPID": "2",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_TASKS_PER_NODE": "2(x4)",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
    "SLURM_SRUN_COMM_PORT": "41233",
}

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_UNIVERSE_SIZE": "2",
    "PMIX_RANK": "1",
    "PMIX_NAMESPACE": "prterun-n1-7@1",
}

HYDRA = {  # MPICH 4 and Intel MPI
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "PMI_FD": "7",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
    "MPIR_CVAR_CH3_INTERFACE_HOSTNAME": "n1",
}

SAGEMAKER = {
    "SM_HOSTS": '["algo-10","algo-2","algo-1"]',
    "SM_CURRENT_HOST": "algo-10",
    "SM_NETWORK_INTERFACE_NAME": "eth0",
    "SM_NUM_GPUS": "0",
    "TRAINING_JOB_NAME": "job-1",
}


POD = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "PET_NNODES": "3",
    "PET_MASTER_ADDR": "train-node-0-0.train",
    "JOB_COMPLETION_INDEX": "1",
}


def place(env):
    return dataclasses.astuple(identify(env))[:8]  # all but the interface


def test_each_launcher_is_read():
    assert place({"PATH": "/bin", "HOME": "/root"}) == ("python", 0, 1, 0, 1, 0, None, None)
    assert place(TORCHRUN) == ("torchrun", 3, 4, 1, 2, 1, "n1", 29500)
    assert place(SRUN)[:7] == ("srun", 3, 4, 1, 2, 1, "n1")
    assert place(OPEN_MPI) == ("mpirun", 1, 2, 1, 2, 0, None, None)
    assert place(HYDRA) == ("mpirun", 1, 2, 1, 2, 0, None, None)
    assert place(SAGEMAKER) == ("sagemaker", 2, 3, 0, 1, 2, "algo-1", 7777)
    assert place(POD) == ("kubernetes", 1, 3, 0, 1, 1, "train-node-0-0.train", 29400)
    assert place({**POD, "PET_NPROC_PER_NODE": "2", **TORCHRUN}) == place(TORCHRUN)
    assert place({**POD, "KUBERNETES_SERVICE_HOST": ""})[0] == "python"
    by_hand = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"}
    assert place(by_hand) == ("environment", 1, 2, None, None, 0, "127.0.0.1", 1234)
    # one worker needs no meeting point
    assert place({"RANK": "0", "WORLD_SIZE": "1"})[:3] == ("environment", 0, 1)
    assert place({**OPEN_MPI, "MASTER_ADDR": "n1", "MASTER_PORT": "5000"})[-2:] == ("n1", 5000)
    assert place({"RANK": "", "WORLD_SIZE": ""})[0] == "python"  # set to nothing is not set


@pytest.mark.parametrize("env", [TORCHRUN, SRUN, OPEN_MPI, HYDRA, SAGEMAKER, POD])
def test_a_process_that_is_to_be_alone_is_no_rank(env):
    """The script of a map, or of a proof: it would wait for the other ranks."""
    given = {**env, "SM_CHANNEL_TRAIN": "/data", "PATH": "/bin"}
    kept = launchers.without_launcher(given)
    assert place(kept)[:3] == ("python", 0, 1)
    assert (kept["SM_CHANNEL_TRAIN"], kept["PATH"]) == ("/data", "/bin")


def test_torchrun_inside_another_launcher_is_believed():
    inside_srun = {
        **SRUN,
        "SLURM_PROCID": "1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    }
    inside_srun["SLURM_LOCALID"] = "0"
    assert place({**inside_srun, **TORCHRUN}) == place(TORCHRUN)
    assert place({**OPEN_MPI, **TORCHRUN}) == place(TORCHRUN)
    assert place({**SAGEMAKER, **TORCHRUN}) == place(TORCHRUN)


def test_slurm():
    subset = {
        **SRUN,
        "SLURM_STEP_NODELIST": "n[3-4]",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "0",
    }
    subset["SLURM_STEP_TASKS_PER_NODE"] = "1(x2)"
    # the first node of the step, not of the job
    assert place(subset)[:7] == ("srun", 1, 2, 0, 1, 1, "n3")
    shell = {k: v for k, v in SRUN.items() if not k.startswith(("SLURM_STEP", "SLURM_SRUN"))}
    shell.update(SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_NODEID="0")
    assert place(shell)[:3] == ("python", 0, 1)  # the batch script itself: nothing is distributed
    interactive = {
        **shell,
        "SLURM_STEP_ID": "4294967290",
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_STEP_NODELIST": "n1",
    }
    assert place(interactive)[:3] == ("python", 0, 1)
    uneven = {
        **SRUN,
        "SLURM_STEP_TASKS_PER_NODE": "2,1(x2)",
        "SLURM_PROCID": "3",
        "SLURM_NODEID": "2",
        "SLURM_LOCALID": "0",
    }
    assert place(uneven)[3:6] == (0, 1, 2)
    # Every task must find one port by itself, another step another one, all of them usable.
    ports = {identify({**SRUN, "SLURM_PROCID": str(r)}).port for r in range(4)}
    others = {
        identify({**SRUN, "SLURM_JOB_ID": str(j), "SLURM_STEP_ID": str(s)}).port
        for j in range(50)
        for s in range(5)
    }
    assert len(ports) == 1 and len(others) > 100 and all(1024 < p < 32768 for p in others)
    assert identify({**SRUN, "MASTER_ADDR": "n9", "MASTER_PORT": "1500"}).port == 1500


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[1-2,07],gpu3", ["n1", "n2", "n07", "gpu3"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("rack[1-2]n[1-2]", ["rack1n1", "rack1n2", "rack2n1", "rack2n2"]),
        ("a-b[1,3]-ib,c", ["a-b1-ib", "a-b3-ib", "c"]),
        ("127.0.0.1", ["127.0.0.1"]),
        ("", []),
    ],
)
def test_nodelist(text, hosts):
    assert expand_nodelist(text) == hosts


@pytest.mark.parametrize("proxies", ["1", "2"])
def test_hydra_inside_a_slurm_job(proxies):
    """mpiexec of MPICH or Intel in a batch job starts its proxies with srun, one a node: their step
    is not the ranks'.
    """
    step = {
        **SRUN,
        "SLURM_STEP_NUM_TASKS": proxies,
        "SLURM_NTASKS": proxies,
        "SLURM_PROCID": "0",
        "SLURM_NODEID": "0",
    }
    step.update(SLURM_LOCALID="0", SLURM_STEP_TASKS_PER_NODE="1" if proxies == "1" else "1(x2)")
    rank = {
        "PMI_RANK": "1",
        "PMI_SIZE": "4",
        "MPI_LOCALRANKID": "1",
        "MPI_LOCALNRANKS": "4" if proxies == "1" else "2",
    }
    assert place({**step, **rank})[:4] == ("mpirun", 1, 4, 1)


def test_sagemaker(tmp_path, monkeypatch):
    places = [
        identify({**SAGEMAKER, "SM_CURRENT_HOST": h}) for h in ("algo-1", "algo-2", "algo-10")
    ]
    assert [p.rank for p in places] == [0, 1, 2] and {p.interface for p in places} == {"eth0"}
    with pytest.raises(WorldError, match=r"SM_CURRENT_HOST=algo-7 is not among SM_HOSTS"):
        identify({**SAGEMAKER, "SM_CURRENT_HOST": "algo-7"})
    with pytest.raises(WorldError, match="not a JSON list"):
        identify({**SAGEMAKER, "SM_HOSTS": "algo-1,algo-2"})
    # A container without the toolkit has no SM_ variables: only the file.
    config = tmp_path / "resourceconfig.json"
    config.write_text(
        '{"current_host": "algo-2", "hosts": ["algo-2", "algo-1"], '
        '"network_interface_name": "eth1"}'
    )
    monkeypatch.setattr(launchers, "_SAGEMAKER_CONFIG", config)
    found = identify({"TRAINING_JOB_NAME": "job-1"})
    assert (found.launcher, found.rank, found.size) == ("sagemaker", 1, 2)
    assert (found.address, found.interface) == ("algo-1", "eth1")
    assert identify({}).launcher == "python"  # such a file alone does not make a job


@pytest.mark.parametrize(
    ("env", "missing"),
    [
        ({"RANK": "0"}, ["WORLD_SIZE"]),
        ({"WORLD_SIZE": "2"}, ["RANK"]),
        ({"LOCAL_RANK": "0"}, ["RANK", "WORLD_SIZE"]),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ["MASTER_ADDR", "MASTER_PORT"]),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "n1"}, ["MASTER_PORT"]),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "29500"}, ["MASTER_ADDR"]),
        (
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
            ["OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"],
        ),
        ({"PMI_RANK": "0"}, ["PMI_SIZE"]),
        ({"PMI_SIZE": "2"}, ["PMI_RANK"]),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}, ["SLURM_STEP_NUM_TASKS"]),
        (
            {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"},
            ["SLURM_STEP_NODELIST"],
        ),
        ({"SM_HOSTS": '["algo-1"]'}, ["SM_CURRENT_HOST"]),
        ({"SM_CURRENT_HOST": "algo-1"}, ["SM_HOSTS"]),
    ],
)
def test_partial_variables_name_what_is_missing(env, missing):
    with pytest.raises(WorldError) as error:
        identify(env)
    said = str(error.value)
    there, _, rest = said.partition(" set, but ")
    gone, _, advice = rest.partition(" missing. ")
    assert set(gone.split(" and ")) == set(missing)
    assert any(f"{k}={v}" in there for k, v in env.items()) and "unset the rest" in advice


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({**TORCHRUN, "RANK": "4"}, ["rank 4 in a world of 4", "RANK", "WORLD_SIZE"]),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, ["world of 0"]),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, ["local rank 2 of 2", "LOCAL_WORLD_SIZE"]),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "5"}, ["local rank 1 of 5", "world of 4"]),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "2"}, ["mpirun", "rank 2 in a world of 2"]),
        ({**HYDRA, "PMI_RANK": "9"}, ["mpirun", "rank 9 in a world of 2"]),
        ({**SRUN, "SLURM_PROCID": "4"}, ["srun", "rank 4 in a world of 4"]),
        # Set by hand, and another launcher says otherwise.
        (
            {**OPEN_MPI, "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"},
            ["rank 0 of 2", "Open MPI", "rank 1 of 2"],
        ),
        (
            {**SRUN, "RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "1"},
            ["rank 0 of 4", "Slurm", "rank 3 of 4"],
        ),
        (
            {**OPEN_MPI, **HYDRA, "PMI_RANK": "0"},
            ["Open MPI", "rank 1 of 2", "MPICH", "rank 0 of 2"],
        ),
        # Not numbers, negative, out of range: the variable and its value are named.
        ({**TORCHRUN, "RANK": "one"}, ["RANK='one'", "whole number"]),
        ({**TORCHRUN, "WORLD_SIZE": "4.0"}, ["WORLD_SIZE='4.0'", "whole number"]),
        ({**TORCHRUN, "RANK": "-1"}, ["RANK=-1", "negative"]),
        ({**TORCHRUN, "LOCAL_RANK": "-1"}, ["LOCAL_RANK=-1", "negative"]),
        ({**TORCHRUN, "MASTER_PORT": "0"}, ["MASTER_PORT=0", "65535"]),
        ({**TORCHRUN, "MASTER_PORT": "65536"}, ["MASTER_PORT=65536", "65535"]),
        ({**TORCHRUN, "MASTER_PORT": "http"}, ["MASTER_PORT='http'", "whole number"]),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "two"}, ["OMPI_COMM_WORLD_SIZE='two'"]),
        ({**HYDRA, "PMI_RANK": "x"}, ["PMI_RANK='x'"]),
        ({**SRUN, "SLURM_PROCID": "x"}, ["SLURM_PROCID='x'"]),
        ({**SRUN, "SLURM_STEP_NODELIST": "n[1-b]"}, ["SLURM_STEP_NODELIST", "n[1-b]"]),
        ({**SAGEMAKER, "SM_MASTER_PORT": "x"}, ["SM_MASTER_PORT='x'"]),
    ],
)
def test_contradictory_variables_are_refused(env, words):
    with pytest.raises(WorldError) as error:
        identify(env)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_world_of_plain_python(tmp_path):
    script = (
        "w = ronde.world(); print(w.rank, w.size, w.local_rank, w.local_size, w.node, "
        "w.device, w.launcher, w.is_main, bool(w.host), w == ronde.world())"
    )
    lazy = "import sys, ronde; print('torch' in sys.modules)"
    done = python(["-c", f"{lazy}\n{script}"], tmp_path)
    assert done.stdout.splitlines() == ["False", "0 1 0 1 0 cpu python True True True"], done.stderr
    wrong = python(["-c", "import ronde; ronde.world()"], tmp_path, env={"RANK": "0"})
    assert wrong.returncode == 1 and "WORLD_SIZE missing" in wrong.stderr.splitlines()[-1]


def test_distribute_imports_what_a_training_needs(tmp_path):
    script = """
import sys, torch
before = set(sys.modules)
import ronde
ronde.distribute
new = {name for name in set(sys.modules) - before}
rooms = {name.split(".")[1] for name in new if name.startswith("ronde.")}
others = {name for name in new if "." not in name}
print(sorted(rooms & {"cli", "doctor", "launch", "measure", "predict", "prove", "scale"}))
print(sorted(others & {"statistics", "fractions", "psutil", "rich", "yaml", "pandas"}))
"""
    done = python(["-c", script], tmp_path)
    assert done.stdout.splitlines() == ["[]", "[]"], done.stdout + done.stderr


def quota_of_version_1(folder: str, quota: int, period: int = 100_000) -> dict[str, str]:
    values = {"quota": quota, "period": period}
    return {f"{folder}/cpu.cfs_{name}_us": str(value) for name, value in values.items()}


DOCKER = quota_of_version_1("cpu,cpuacct/docker", 250_000)
NO_LIMIT = quota_of_version_1("cpu,cpuacct/docker/x", -1)


@pytest.mark.parametrize(
    ("proc", "files", "cores"),
    [
        ("0::/", {"cpu.max": "150000 100000"}, 1.5),
        ("0::/", {"cpu.max": "max 100000"}, math.inf),
        # the tightest of all holds
        ("0::/a/b", {"a/cpu.max": "200000 100000", "a/b/cpu.max": "300000 100000"}, 2.0),
        ("0::/a/b", {"a/cpu.max": "400000 100000", "a/b/cpu.max": "max 100000"}, 4.0),
        ("0::/a/b", {"a/cpu.max": "max 100000", "a/b/cpu.max": "50000 100000"}, 0.5),
        # the host's path, the container's own root
        ("0::/kubepods/x", {"cpu.max": "250000 100000"}, 2.5),
        ("0::/a", {"a/cpu.max": "what is this"}, math.inf),
        ("0::/a", {"other/cpu.max": "100000 100000"}, math.inf),  # a neighbour's is not ours
        # version 1, and both at once, as on a hybrid host
        ("4:cpu,cpuacct:/docker/x\n1:name=systemd:/docker/x", DOCKER | NO_LIMIT, 2.5),
        ("3:cpu:/j", quota_of_version_1("cpu/j", 100_000, 50_000), 2.0),
        ("3:cpu:/gone", quota_of_version_1("cpu", 300_000), 3.0),
        (
            "3:cpu:/j\n0::/a",
            {"a/cpu.max": "500000 100000", **quota_of_version_1("cpu/j", 400_000)},
            4.0,
        ),
        ("", {}, math.inf),
    ],
)
def test_container_quota(tmp_path, proc, files, cores):
    (tmp_path / "proc").write_text(f"{proc}\n")
    (tmp_path / "root").mkdir()
    for name, text in files.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    assert _cgroup_cores(control_groups("cpu", tmp_path / "root", tmp_path / "proc")) == cores


@pytest.mark.skipif(sys.platform != "linux", reason="affinity is Linux's")
def test_usable_cores(monkeypatch):
    mine = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(mine)})
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, mine)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    for quota, cores in ((0.5, 1), (1.9, 1), (2.0, 2), (40.0, 16), (float("inf"), 16)):
        monkeypatch.setattr(cores_module, "_cgroup_cores", lambda _, quota=quota: quota)
        assert usable_cores() == cores


@pytest.mark.parametrize(
    ("workers", "cores", "threads"), [(1, 8, 8), (2, 8, 4), (3, 8, 2), (16, 8, 1), (0, 4, 4)]
)
def test_threads_per_worker(workers, cores, threads):
    assert threads_per_worker(workers, cores) == threads


POLICIES = """
import os, sys
from pathlib import Path
import torch
import torch.distributed as dist
import ronde

before = os.sched_getscheduler(0)
if sys.argv[1:] == ["idle"]:
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
model = torch.nn.Linear(2, 1)
data = torch.utils.data.TensorDataset(torch.ones(4, 2), torch.ones(4, 1))
run = ronde.distribute(model, torch.optim.SGD(model.parameters(), 0.1), data, loss=torch.nn.functional.mse_loss, batch_size=4)
for batch in run.batches():
    run.step(batch)
found = {t.joinpath("comm").read_text().strip(): os.sched_getscheduler(int(t.name)) for t in Path("/proc/self/task").iterdir()}
gloo = [policy for name, policy in found.items() if "gloo" in name]
Path(f"policy-{run.rank}").write_text(f"{before} {os.sched_getscheduler(0)} {sorted(set(gloo))}")
"""


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux schedules so")
@pytest.mark.parametrize(
    ("workers", "setting", "argument", "expected"),
    [
        (2, None, "", (os.SCHED_BATCH, [os.SCHED_BATCH])),
        (2, "other", "", (os.SCHED_OTHER, [os.SCHED_OTHER])),
        (2, None, "idle", (os.SCHED_IDLE, [os.SCHED_IDLE])),  # somebody's choice stays
        (1, None, "", (os.SCHED_OTHER, [])),
    ],
    ids=["batch", "left", "chosen", "alone"],
)
def test_workers_on_the_cpu_are_scheduled_as_batch(tmp_path, workers, setting, argument, expected):
    script = tmp_path / "train.py"
    script.write_text(POLICIES)
    command = forked(script, workers, *([argument] if argument else []))
    done = python(command[1:], tmp_path, env={"RONDE_SCHEDULING": setting})
    assert done.returncode == 0, done.stderr
    policy, gloo = expected
    told = [path.read_text() for path in sorted(tmp_path.glob("policy-*"))]
    assert told == [f"{os.SCHED_OTHER} {policy} {gloo}"] * workers


GROUPS = """
from pathlib import Path
import ronde, torch, torch.distributed as dist

def loops():
    return sum("gloo_tcp_loop" in t.joinpath("comm").read_text() for t in Path("/proc/self/task").iterdir())

def train(plan):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    if "tensor" in plan or "pipeline" in plan:
        model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)) for _ in range(2)))
    data = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.randn(8, 1))
    more = {} if "tensor" in plan or "pipeline" in plan else {"sync_batchnorm": True}
    loss = lambda output, target: ((output - target) ** 2).mean()
    run = ronde.distribute(model, torch.optim.SGD(model.parameters(), 0.1), data, loss=loss, batch_size=4, plan=plan, **more)
    for batch in run.batches():
        run.step(batch)
    run.evaluate(data)
    return run

plans = ("replicate", "shard=gradients", "shard=parameters", "shard=optimizer", "pipeline=2,micro_batch=1", "tensor=2")
counts = []
for _ in range(2):
    for plan in plans:
        run = train(plan)
    counts.append(loops())
Path(f"loops-{run.rank}").write_text(repr(counts))
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="Linux tells of threads so")
def test_what_is_made_again_and_again_shares_its_process_groups(tmp_path):
    """Each of gloo's has a thread that wakes up for as long as the process lives."""
    (tmp_path / "train.py").write_text(GROUPS)
    done = python(forked(tmp_path / "train.py", 2)[1:], tmp_path)
    assert done.returncode == 0, done.stderr
    for path in tmp_path.glob("loops-*"):
        once, again = ast.literal_eval(path.read_text())
        assert 1 < once == again < 12
    assert len(list(tmp_path.glob("loops-*"))) == 2
