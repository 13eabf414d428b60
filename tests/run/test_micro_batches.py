"""What micro-batches change is said, and batches of any class and any length are cut into them."""

from __future__ import annotations

import dataclasses
from collections import UserDict, namedtuple

import pytest
import torch
from safetensors.torch import load_file

from processes import python, ronde_run
from ronde.run.loop import to_device
from ronde.world.tensors import tensors_in
from sampling import some

COUNTING = """
import sys
import torch, ronde
from torch import nn

kind, loop, *options = sys.argv[1:]
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.register_buffer("passes", torch.zeros(()))
        self.register_buffer("table", None)
        if kind == "frequent":
            self.rows = nn.Embedding(4, 4, scale_grad_by_freq=True)

    def forward(self, x):
        if kind == "counter":
            self.passes += 1
        elif kind == "replaced":
            self.passes = self.passes + 1
        elif kind == "largest" and self.training:
            self.passes.copy_(torch.maximum(self.passes, x.max()))
        elif self.table is None:
            self.table = torch.arange(4.0)
        return self.net(x + (self.table if self.table is not None else 0))


model = Net()
data = torch.utils.data.TensorDataset(torch.randn(40, 4), torch.randn(40, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = ronde.distribute(model, optimizer, data, loss=nn.functional.mse_loss, batch_size=10, **eval(f"dict({options[0]})" if options else "{}"))
for epoch in run.epochs(1):
    for batch in run.batches():
        if loop == "step":
            run.step(batch)
            continue
        for x, y in batch if run.plan.accumulation > 1 else [batch]:
            run.backward(nn.functional.mse_loss(model(x), y))
        run.update()
"""


@pytest.mark.parametrize("kind", ["counter", "replaced", "table"])
@pytest.mark.parametrize("loop", some(["step", "own"], 2))
def test_a_buffer_that_every_pass_changes_is_named(kind, loop, tmp_path):
    (tmp_path / "train.py").write_text(COUNTING)
    done = python(["train.py", kind, loop, "micro_batch=3"], tmp_path)
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 0, said
    assert said.count(
        "the forward pass changes the buffer 'passes', and a step has 4 forward passes"
    ) == (kind != "table")


def test_rows_that_each_micro_batch_counts_are_named(tmp_path):
    (tmp_path / "train.py").write_text(COUNTING)
    said = [python(["train.py", "frequent", "step", f"micro_batch={n}"], tmp_path) for n in (3, 10)]
    named = ["'rows' has scale_grad_by_freq" in done.stdout + done.stderr for done in said]
    assert named == [True, False]


def test_under_a_pipeline_and_in_the_summary(tmp_path):
    (tmp_path / "train.py").write_text(COUNTING)
    done = ronde_run(
        [
            "run",
            "--workers",
            "2",
            "--plan",
            "pipeline=2,micro_batch=3",
            "train.py",
            "counter",
            "step",
        ],
        tmp_path,
    )
    said = " ".join((done.stdout + done.stderr).replace("│", " ").split())
    assert done.returncode == 0, said
    assert "the forward pass changes the buffer 'passes', and a step has 4 forward passes" in said
    assert "but not the same training: see the warnings" in said


@pytest.mark.parametrize("plan", some(["replicate", "shard=parameters", "shard=optimizer"], 3))
@pytest.mark.parametrize("loop", some(["step", "own"], 2))
def test_a_buffer_that_follows_one_worker_s_samples_is_named(loop, plan, tmp_path):
    (tmp_path / "train.py").write_text(COUNTING)
    said = {}
    for kind in ("largest", "counter"):
        asked = ["run", "--workers", "2", "--plan", plan, "train.py", kind, loop]
        done = ronde_run(asked, tmp_path)
        said[kind] = " ".join((done.stdout + done.stderr).replace("│", " ").split())
        assert done.returncode == 0, said[kind]
    named = "the forward pass changes the buffer 'passes' by the samples or features that it sees"
    assert said["largest"].count(named) >= 1 and named not in said["counter"]
    assert "but not the same training: see the warnings" in said["largest"]


BATCHES = """
import dataclasses, sys
from collections import UserDict
import torch, ronde
from torch import nn

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)


@dataclasses.dataclass(frozen=True)
class Record:
    x: torch.Tensor
    y: torch.Tensor


class Plain:
    __slots__ = ("x", "y")

    def __init__(self, x, y):
        self.x, self.y = x, y


class Keyed(UserDict):
    x = property(lambda self: self["x"])
    y = property(lambda self: self["y"])


kinds = {"record": Record, "plain": Plain, "keyed": lambda x, y: Keyed(x=x, y=y)}
make = kinds[sys.argv[1]]
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
data = torch.utils.data.TensorDataset(torch.randn(23, 4), torch.randn(23, 1))
loader = torch.utils.data.DataLoader(
    data, batch_size=int(sys.argv[2]), collate_fn=lambda items: make(torch.stack([a for a, _ in items]), torch.stack([b for _, b in items]))
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = ronde.distribute(model, optimizer, loader, loss=nn.functional.mse_loss, forward=lambda m, b: (m(b.x), b.y))
run.fit(epochs=2)
run.export("weights.safetensors")
"""


@pytest.mark.parametrize(
    ("kind", "size"), some([("record", 7), ("plain", 10), ("keyed", 7), ("record", 512)], 4)
)
def test_batches_of_any_class_and_length_through_a_pipeline(kind, size, tmp_path):
    (tmp_path / "train.py").write_text(BATCHES)
    done = ronde_run(
        ["run", "--workers", "2", "--plan", "pipeline=2", "train.py", kind, str(size)], tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = load_file(tmp_path / "weights.safetensors")
    (tmp_path / "weights.safetensors").unlink()
    done = python(["train.py", kind, str(size)], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for name, value in load_file(tmp_path / "weights.safetensors").items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12)


@dataclasses.dataclass(frozen=True)
class Record:
    x: torch.Tensor
    rest: object = None


class Plain:
    def __init__(self, x):
        self.x, self.owner = x, self


Named = namedtuple("Named", "a b")


def test_tensors_are_found_in_what_holds_them():
    one, two = torch.zeros(1), torch.zeros(2)
    assert [len(t) for t in tensors_in(Record(one, Named([two], None)))] == [1, 2]
    assert [len(t) for t in tensors_in(Record(one, {"a": Record(two)}))] == [1, 2]
    assert tensors_in(Plain(one)) == [] and tensors_in(torch.nn.Linear(2, 2), attributes=True) == []
    assert [len(t) for t in tensors_in(Plain(one), attributes=True)] == [1]
    moved = to_device(UserDict(a=Record(one, [two]), b=3), torch.device("meta"))
    assert (
        isinstance(moved, UserDict)
        and moved["a"].x.is_meta
        and moved["a"].rest[0].is_meta
        and not one.is_meta
        and moved["b"] == 3
    )
