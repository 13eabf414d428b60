"""ronde migrate: the translated script trains the same weights; the rest is listed or refused."""

from __future__ import annotations

import shutil
import subprocess

import pytest
import torch
import torch.nn.functional as F

from processes import TESTS, ronde_run
from ronde.cli.script_migration import migrate_script
from ronde.world import ArgumentError

SCRIPTS = TESTS / "migrate_scripts"


def translated(tmp_path, name, left=0):
    """Apply what ``ronde migrate`` prints with patch."""
    script = tmp_path / f"{name}.py"
    script.write_text((SCRIPTS / f"{name}_script.py").read_text())
    done = ronde_run(["migrate", script.name], tmp_path, 60)
    assert done.returncode == bool(left), done.stderr
    assert len(done.stderr.splitlines()) == (left + 1 if left else 0), done.stderr
    new = tmp_path / f"{name}_ronde.py"
    new.write_text(script.read_text())
    if shutil.which("patch") is None:
        pytest.skip("patch is not installed")
    patch = ["patch", "-s", new.name]
    subprocess.run(patch, input=done.stdout, text=True, check=True, cwd=tmp_path)
    return script, new


def weights(tmp_path, *words):
    done = ronde_run([*words, "w.pt"], tmp_path, 90, {"RONDE_RUNS": "none"})
    assert done.returncode == 0, done.stdout + done.stderr
    return torch.load(tmp_path / "w.pt"), done.stdout


@pytest.mark.parametrize(("name", "option"), [("horovod", ["--horovod"]), ("ddp", [])])
def test_the_translated_script_trains_the_same_weights(tmp_path, name, option):
    script, new = translated(tmp_path, name)
    before, said_before = weights(tmp_path, "run", *option, "-n", "2", str(script))
    after, said = weights(tmp_path, "run", "-n", "2", str(new))
    assert before.keys() == after.keys()
    assert all((before[k] - after[k]).abs().max() < 1e-5 for k in before)
    told = [line for line in said_before.splitlines() if line.startswith(("test", "worker"))]
    assert told and all(line in said for line in told)


def test_accumulation_becomes_micro_batches(tmp_path):
    _, new = translated(tmp_path, "accelerate", left=1)
    after, said = weights(tmp_path, "run", "-n", "1", str(new))
    torch.manual_seed(3)
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(48, 6, generator=g), torch.randint(3, (48,), generator=g)
    model = torch.nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4)
    for _ in range(2):
        for i in range(0, 48, 8):
            optimizer.zero_grad()
            F.cross_entropy(model(x[i : i + 8]), y[i : i + 8]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
    assert (after["weight"] - model.weight).abs().max() < 1e-6
    assert f"epoch 1: {int((model(x).argmax(1) == y).sum())} of 48" in said


LOOP = """
import torch, horovod.torch as hvd
hvd.init()
model = torch.nn.Linear(2, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
opt = hvd.DistributedOptimizer(opt, op=hvd.Sum)
sizes = hvd.allgather(torch.ones(1))
for epoch in range(3):
    for x, y in loader:
        opt.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
"""


def test_what_it_cannot_translate_is_listed_by_line():
    found = migrate_script(LOOP)
    assert found.library == "Horovod" and "hvd.init" not in found.source
    assert found.left == {
        6: "not translated: op=hvd.Sum",
        7: "not translated: sizes = hvd.allgather(torch.ones(1))",
        11: "write the loss as loss(output, target) and give it to ronde.distribute",
    }
    assert "loss=None" in found.source


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("print(1)", "uses none of Horovod, Accelerate, DistributedDataParallel"),
        ("def (", "script:1: invalid syntax"),
        (LOOP.replace("range(3)", "count()"), "script:9: no loop 'for epoch in range(…)'"),
        (LOOP.replace("loss.backward()", "pass"), "expected one loop with backward()"),
        (LOOP.replace("opt.step()", "opt.step(); other.step()"), "this loop is not known"),
    ],
)
def test_scripts_it_does_not_know_are_refused(text, told):
    with pytest.raises(ArgumentError) as caught:
        migrate_script(text)
    assert told in str(caught.value)
