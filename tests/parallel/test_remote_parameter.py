"""Weights that another worker holds never pass for zeros: reading or writing them is an error that
names them.

Run as a script, it is one worker of these tests.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

import ronde
import zygote
from processes import PATHS, TESTS, forked
from ronde.parallel.remote_parameter import RemoteParameters, element, make_remote


def _each(call):
    return lambda model, early, average: [call(p) for p in model.parameters()]


def _drift(model, early, average):
    for mine, theirs in zip(early.parameters(), model.parameters(), strict=True):
        mine.lerp_(theirs, 0.1)


def _drift_together(model, early, average):
    values = [p.detach() for p in model.parameters()]
    torch._foreach_lerp_(list(early.parameters()), values, 0.1)


MISUSES = {
    "norm": _each(lambda p: p.norm()),
    "vector": lambda model, *_: nn.utils.parameters_to_vector(model.parameters()),
    "write": _each(lambda p: p.mul_(0.99)),
    "data": _each(lambda p: p.data.mul_(0.99)),
    "drift": _drift,
    "drift together": _drift_together,
    "average": lambda model, early, average: average.update_parameters(model),
}


def begin(plan: str):
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(5))
    model = nn.Sequential(*blocks, nn.Linear(8, 4)).double()
    early = copy.deepcopy(model)
    data = TensorDataset(torch.randn(48, 8).double(), torch.randint(0, 4, (48,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss = nn.functional.cross_entropy
    run = ronde.distribute(model, optimizer, data, loss=loss, batch_size=16, plan=plan)
    return run, model, early


def misuse(name: str) -> str:
    """The error that it is."""
    run, model, early = begin("pipeline=2")
    average = torch.optim.swa_utils.AveragedModel(model)
    try:
        for batch in run.batches():
            run.step(batch)
            with torch.no_grad():
                MISUSES[name](model, early, average)
    except ronde.PlanError as error:
        return str(error)
    finally:
        run.port.parts.place.ended = True
    return ""


def train(plan: str, folder: Path) -> None:
    """Change and average the parameters that this worker has."""
    run, model, _ = begin(plan)
    held = model.state_dict(keep_vars=True)
    averages = {name: p.detach().clone() for name, p in held.items()}
    for _ in run.epochs(2):
        for batch in run.batches():
            run.step(batch)
            with torch.no_grad():
                for name, p in model.state_dict(keep_vars=True).items():
                    p.mul_(0.99)
                    averages[name].lerp_(p, 0.1)
            model.to(torch.float64)
    run.export(folder / f"weights {plan}")
    with torch.no_grad():
        for name, p in model.state_dict(keep_vars=True).items():
            p.copy_(averages[name])
    run.export(folder / f"averages {plan}")


def worker(folder: Path) -> None:
    for plan in ("replicate", "pipeline=2"):
        train(plan, folder)
    errors = {name: misuse(name) for name in MISUSES}
    (folder / f"errors {ronde.world().rank}").write_text(json.dumps(errors))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("remote")
    script = TESTS / "parallel" / "test_remote_parameter.py"
    imports = ["torch.distributed.pipelining", "torch.optim.swa_utils"]
    done = zygote.run(
        forked(script, 2, folder, imports=imports),
        env={**os.environ, "PYTHONPATH": PATHS, "RONDE_RUNS": "none"},
        cwd=folder,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_a_script_that_writes_and_averages_its_workers_parameters_trains_the_same(folder):
    whole = {name: load_file(folder / f"{name} replicate") for name in ("weights", "averages")}
    for name, tensors in whole.items():
        torch.testing.assert_close(
            load_file(folder / f"{name} pipeline=2"), tensors, rtol=1e-10, atol=1e-12
        )
    assert not torch.equal(whole["weights"]["0.0.weight"], whole["averages"]["0.0.weight"])


@pytest.mark.parametrize("name", MISUSES)
def test_reading_or_writing_it_is_an_error_that_names_it(name, folder):
    for rank in (0, 1):
        error = json.loads((folder / f"errors {rank}").read_text())[name]
        assert "reads or writes '" in error and "to stage " in error, error
        assert "another worker holds" in error and "run.export" in error, error


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


if __name__ == "__main__":
    worker(Path(sys.argv[1]))
