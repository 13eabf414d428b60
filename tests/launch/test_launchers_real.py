"""One small script, started for real in every way there is; three steps later the weights are those
of a plain loop.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from processes import child, python
from sampling import long

TRAIN = """
import os, sys
import torch
from torch import nn
import ronde

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
generator = torch.Generator().manual_seed(1)
data = torch.utils.data.TensorDataset(torch.randn(14, 4, generator=generator), torch.randn(14, 1, generator=generator))
run = ronde.distribute(model, optimizer, data, loss=nn.functional.mse_loss, batch_size=5, shuffle=False)
for epoch in run.epochs(1):
    for batch in run.batches():
        loss = run.step(batch)
run.export(sys.argv[1])
me = ronde.world()
print("I am", me.rank, me.size, me.local_rank, me.local_size, me.node, me.launcher, f"{float(loss):.12f}", run.state.step)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(TRAIN)
    return path


@pytest.fixture(scope="module")
def plain() -> tuple[dict[str, torch.Tensor], str]:
    """The same training by hand, without Ronde: weights and last loss."""
    wide = torch.float64
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(wide)
    try:
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        generator = torch.Generator().manual_seed(1)
        x, y = torch.randn(14, 4, generator=generator), torch.randn(14, 1, generator=generator)
    finally:
        torch.set_default_dtype(before)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for low in (0, 5, 10):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x[low : low + 5]), y[low : low + 5])
        loss.backward()
        optimizer.step()
    return {k: v.detach().clone() for k, v in model.state_dict().items()}, f"{loss.item():.12f}"


def same(folder: Path, plain) -> None:
    found = load_file(folder / "out.safetensors")
    assert found.keys() == plain[0].keys()
    for name, value in plain[0].items():
        torch.testing.assert_close(
            found[name], value, rtol=0, atol=1e-13, msg=lambda text, name=name: f"{name}: {text}"
        )


def said(text: str) -> list[list[str]]:
    return sorted(line.split()[2:] for line in text.splitlines() if line.startswith("I am"))


def test_plain_python(script, plain, tmp_path):
    done = python([str(script), "out.safetensors"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert said(done.stdout) == [["0", "1", "0", "1", "0", "python", plain[1], "3"]]
    same(tmp_path, plain)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.safetensors", "runs"]


def test_torchrun_inside_a_slurm_step(script, plain, tmp_path):
    """torchrun for real; the variables of the srun that started it say something else, and are not
    believed.
    """
    told = {"JOB_ID": "7", "STEP_ID": "0", "PROCID": "1", "LOCALID": "0", "NODEID": "1"}
    told |= {"STEP_NUM_TASKS": "2", "NTASKS": "2", "STEP_NODELIST": "n[1-2]"}
    told |= {"STEP_TASKS_PER_NODE": "1(x2)"}
    slurm = {f"SLURM_{name}": value for name, value in told.items()}
    slurm["TMPDIR"] = str(tmp_path)  # torchrun leaves a folder for its logs behind
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = python([*torchrun, str(script), "out.safetensors"], tmp_path, env=slurm)
    assert done.returncode == 0, done.stdout + done.stderr
    assert said(done.stdout) == [
        [str(r), "2", str(r), "2", "0", "torchrun", plain[1], "3"] for r in range(2)
    ]
    same(tmp_path, plain)


def open_mpi(rank: int) -> dict[str, str]:
    names = {"RANK": rank, "SIZE": 2, "LOCAL_RANK": rank, "LOCAL_SIZE": 2, "NODE_RANK": rank}
    return {f"OMPI_COMM_WORLD_{k}": str(v) for k, v in names.items()}


@long
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun here")
def test_mpirun(script, plain, tmp_path):
    version = subprocess.run(
        ["mpirun", "--version"], capture_output=True, text=True, timeout=20
    ).stdout
    is_open = "Open MPI" in version or "OpenRTE" in version
    root = ["--allow-run-as-root", "--oversubscribe"] if is_open else []
    with child(
        ["mpirun", *root, "-n", "2", sys.executable, str(script), "out.safetensors"],
        tmp_path,
        {"TMPDIR": str(tmp_path)},
    ) as started:
        done = started.done(90)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [s[:2] for s in said(done.stdout)] == [["0", "2"], ["1", "2"]]
    same(tmp_path, plain)


def test_ranks_of_mpi_on_two_machines_are_told_to_name_a_meeting_point(script, tmp_path):
    """Local size 1 of 2: the file of one machine cannot serve."""
    alone = {**open_mpi(0), "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    done = python([str(script), "out.safetensors"], tmp_path, env=alone)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "WorldError" in last and "MASTER_ADDR" in last and "-x MASTER_ADDR" in last
