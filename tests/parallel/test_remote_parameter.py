"""Weights that another worker holds never pass for zeros: reading or writing them is an error that
names them.
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from processes import ronde_run
from ronde.parallel.remote_parameter import RemoteParameters, element, make_remote
from sampling import some

SCRIPT = """
import copy, sys
import torch, ronde
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(5)], nn.Linear(8, 4)).double()
early = copy.deepcopy(model)
data = torch.utils.data.TensorDataset(torch.randn(48, 8).double(), torch.randint(0, 4, (48,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
run = ronde.distribute(model, optimizer, data, loss=nn.functional.cross_entropy, batch_size=16)
kept = {name: p.detach().clone() for name, p in model.state_dict(keep_vars=True).items()}
average = torch.optim.swa_utils.AveragedModel(model)
what = sys.argv[1]
for epoch in run.epochs(2):
    for batch in run.batches():
        run.step(batch)
        if what == "norm":
            print(sum(p.norm() for p in model.parameters()))
        if what == "vector":
            torch.nn.utils.parameters_to_vector(model.parameters())
        if what == "early":
            with torch.no_grad():
                for mine, theirs in zip(early.parameters(), model.parameters()):
                    mine.lerp_(theirs, 0.1)
        if what == "together":
            torch._foreach_lerp_(list(early.parameters()), [p.detach() for p in model.parameters()], 0.1)
        if what == "write":
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(0.99)
        if what == "data":
            for p in model.parameters():
                p.data.mul_(0.99)
        if what == "average":
            average.update_parameters(model)
        if what == "fine":
            with torch.no_grad():
                for name, p in model.state_dict(keep_vars=True).items():
                    p.mul_(0.99)
                    kept[name].lerp_(p, 0.1)
            model.to(torch.float64)
run.export("weights.safetensors")
with torch.no_grad():
    for name, p in model.state_dict(keep_vars=True).items():
        p.copy_(kept[name])
run.export("average.safetensors")
"""


def test_a_script_that_writes_and_averages_its_workers_parameters_trains_the_same(tmp_path):
    found = {}
    for plan in ("replicate", "pipeline=2"):
        folder = tmp_path / plan
        folder.mkdir()
        (folder / "train.py").write_text(SCRIPT)
        done = ronde_run(
            ["run", "--workers", "2", "--plan", plan, "train.py", "fine"], folder, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr
        found[plan] = {
            name: load_file(folder / f"{name}.safetensors") for name in ("weights", "average")
        }
    for name, whole in found["replicate"].items():
        for key, value in whole.items():
            torch.testing.assert_close(
                found["pipeline=2"][name][key], value, rtol=1e-10, atol=1e-12
            )
    changed = found["replicate"]
    assert not torch.equal(changed["weights"]["0.0.weight"], changed["average"]["0.0.weight"])


@pytest.mark.parametrize(
    "what", some(["write", "vector", "early", "together", "norm", "data", "average"], 4)
)
def test_reading_or_writing_it_is_an_error_that_names_it(what, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    done = ronde_run(
        ["run", "--workers", "2", "--plan", "pipeline=2", "train.py", what], tmp_path, timeout=120
    )
    said = " ".join((done.stdout + done.stderr).split())
    assert (
        done.returncode != 0
        and "to stage " in said
        and "reads or writes '" in said
        and "another worker holds" in said
        and "run.export" in said
    )
    assert not (tmp_path / "weights.safetensors").exists()


def test_clipping_gradients_passes_over_it():
    model, remote = nn.Linear(3, 2), RemoteParameters("pipeline=2")
    weight = model.weight
    weight.data = element(weight.dtype, weight.device).expand(weight.shape)
    make_remote(weight, "weight", 1, remote)
    model.bias.grad = torch.tensor([3.0, 4.0])
    assert nn.utils.clip_grad_norm_(model.parameters(), 1.0).item() == 5.0
    nn.utils.clip_grad_value_(model.parameters(), 0.7)
    torch.testing.assert_close(model.bias.grad, torch.tensor([0.6, 0.7]))
    assert weight.grad is None
