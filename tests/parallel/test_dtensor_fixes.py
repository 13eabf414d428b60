"""What a script reads of divided parameters as a number, and draws into them, is what it is in one
process.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from processes import TESTS, forked, python, ronde_run
from sampling import some

SCRIPT = """
import json, sys
import torch, ronde
from torch import nn

torch.manual_seed(0)
block = lambda: nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 8))
model = nn.Sequential(block(), block(), block(), block(), nn.Linear(8, 5)).double()
data = torch.utils.data.TensorDataset(torch.randn(46, 8).double(), torch.randint(0, 5, (46,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
run = ronde.distribute(model, optimizer, data, loss=nn.functional.cross_entropy, batch_size=10)
read = []
for epoch in run.epochs(2):
    for batch in run.batches():
        run.step(batch)
        if "tensor" in sys.argv[1] and "shard" in sys.argv[1]:  # torch adds nothing that lies on different meshes
            read.append(sum(float((p.detach() ** 2).sum()) for p in model.parameters()))
        else:
            read.append(float(sum((p.detach() ** 2).sum() for p in model.parameters())))
        read.append(int((model[0][0].weight > 0).sum()))
        read.append([p.norm().item() for p in model.parameters()][2])
    torch.manual_seed(5 + epoch)
    model[0][0].reset_parameters()
    model[-1].reset_parameters()
    nn.init.trunc_normal_(model[1][0].weight, std=0.1)
    nn.init.eye_(model[1][2].weight)
    model[2][2].weight.data.exponential_(3.0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=1e-3)
    for p in model[3].parameters():
        p.data = p.data * 0.9
    read.append(torch.rand(()).item())
run.export("weights.safetensors")
if run.is_main:
    json.dump(read, open("read.json", "w"))
"""


def trained(folder, workers, plan):
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    done = ronde_run(
        ["run", "--workers", str(workers), "--plan", plan, "train.py", plan], folder, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return load_file(folder / "weights.safetensors"), json.loads((folder / "read.json").read_text())


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("one") / "run", 1, "replicate")


@pytest.mark.parametrize(
    ("workers", "plan"),
    some(
        [
            (4, "tensor=2,shard=parameters"),
            (2, "shard=parameters"),
            (3, "shard=gradients"),
            (2, "tensor=2"),
            (4, "shard,shard_within=2"),
        ],
        5,
    ),
)
def test_read_and_drawn_as_in_one_process(workers, plan, one, tmp_path):
    weights, read = trained(tmp_path / "run", workers, plan)
    for name, value in one[0].items():
        torch.testing.assert_close(weights[name], value, rtol=1e-10, atol=1e-12)
    assert read == pytest.approx(one[1], rel=1e-10)


def test_what_is_written_into_a_part_is_in_the_whole_or_refused(tmp_path):
    done = python(forked(TESTS / "parts_worker.py", 2)[1:], tmp_path, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("plan", some(["shard=parameters", "pipeline=2"], 2))
def test_a_parameter_that_is_replaced_later_is_an_error_that_says_so(plan, tmp_path):
    """Nothing would exchange its gradients: each worker trained another head."""
    (tmp_path / "train.py").write_text(
        "import torch, ronde\nfrom torch import nn\n"
        "torch.manual_seed(0)\n"
        "model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))\n"
        "data = torch.utils.data.TensorDataset(torch.randn(16, 8), torch.randn(16, 8))\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "run = ronde.distribute(model, optimizer, data, loss=nn.functional.mse_loss, "
        "batch_size=8)\n"
        "for epoch in range(2):\n"
        "    for batch in run.batches():\n"
        "        run.step(batch)\n"
        "    model[0] = nn.Linear(8, 8)\n"
        "    optimizer.param_groups[0]['params'][:2] = model[0].parameters()\n"
    )
    done = ronde_run(["run", "--workers", "2", "--plan", plan, "train.py"], tmp_path, timeout=60)
    said = " ".join((done.stdout + done.stderr).split())
    assert (
        done.returncode != 0
        and "that was not there when ronde.distribute divided the model" in said
    ), said


@pytest.mark.parametrize("plan", some(["shard=parameters", "tensor=2"], 2))
def test_a_number_that_one_worker_alone_reads_is_an_error_that_says_so(plan, tmp_path):
    alone = SCRIPT.replace(
        "        read.append(int(",
        "        if run.is_main:\n            print(model[0][0].weight.norm().item())\n    "
        "    read.append(int(",
    )
    assert "is_main" in alone
    (tmp_path / "train.py").write_text(alone)
    done = ronde_run(
        ["run", "--workers", "2", "--plan", plan, "train.py", plan], tmp_path, timeout=60
    )
    said = " ".join((done.stdout + done.stderr).split())
    assert (
        done.returncode != 0
        and "called for a number of divided parameters (train.py:" in said
        and "Read it on every worker" in said
    )
