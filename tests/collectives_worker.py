"""Run by every rank: the collectives of a Run, right and wrong uses; results as JSON, per rank."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import ronde

out = Path(sys.argv[1])
found: dict = {}


def refused(call) -> str:
    try:
        return f"nothing: {call()!r}"
    except ronde.RondeError as error:
        return f"{type(error).__name__}: {error}"


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 3)).double()
g = torch.Generator().manual_seed(3)
data = TensorDataset(torch.randn(32, 5, generator=g).double(), torch.randint(3, (32,), generator=g))
run = ronde.distribute(
    model, torch.optim.SGD(model.parameters(), lr=0.1), data, loss=F.cross_entropy, batch_size=8
)
rank, size = run.rank, run.world_size

# rank 0 saves and all load right after: without a barrier, the file is not there
early, late, first = out / "early.pt", out / "late.pt", out / "first.pt"


def save(path: Path) -> None:
    time.sleep(0.5)  # as a large file takes
    torch.save(torch.arange(4), path)


try:
    if run.is_main:
        save(early)
    found["without barrier"] = torch.load(early).tolist()
except (FileNotFoundError, EOFError) as error:
    found["without barrier"] = type(error).__name__
run.barrier()
if run.is_main:
    save(late)
run.barrier()
found["barrier"] = torch.load(late).tolist()
with run.main_first():
    if not first.exists():
        assert run.is_main
        save(first)
    found["main first"] = torch.load(first).tolist()

# reduce: numbers, tensors of each kind, dictionaries
mine = rank + 1
for op in ("mean", "sum", "max"):
    found[f"int {op}"] = run.reduce(mine * 10**20, op)
    found[f"float {op}"] = run.reduce([1e16, 1.0, -1e16][rank % 3], op)
    found[f"nan {op}"] = math.isnan(run.reduce(math.nan if rank else 1.0, op))
    for dtype in ("float32", "bfloat16", "float64", "int32", "uint8", "bool"):
        value = torch.tensor([mine, 0, 3 * rank]).to(getattr(torch, dtype))
        result = run.reduce(value, op)
        found[f"{dtype} {op}"] = [str(result.dtype), result.tolist()]
    both = run.reduce({"b": float(mine), "a": torch.full((2, 2), mine).double()}, op)
    found[f"dict {op}"] = [list(both), both["b"], both["a"].tolist()]
found["nan in a tensor"] = [
    math.isnan(v)
    for v in run.reduce(
        torch.tensor([math.nan if r == rank else 1.0 for r in (0, 1, 2)]), "max"
    ).tolist()
]
found["complex"] = str(run.reduce(torch.tensor([1j * mine]), "sum"))
weight = nn.Parameter(torch.ones(2))
found["no gradient"] = run.reduce(weight).requires_grad
found["objects"] = run.gather_objects({"rank": rank, "path": [1.5, None, "a" * rank]})
run.print("said once", rank)

# wrong uses: an error on every rank, and the next call works
found["other op"] = refused(lambda: run.reduce(1.0, "sum" if rank else "mean"))
found["other shape"] = refused(lambda: run.reduce(torch.zeros(2 + rank)))
found["other type"] = refused(lambda: run.reduce(torch.zeros(2) if rank else 1.0))
found["other names"] = refused(lambda: run.reduce({f"n{rank}": 1}))
found["other call"] = refused(lambda: run.barrier() if rank else run.gather_objects(1))
found["no number"] = refused(lambda: run.reduce("a" if rank else 1.0))
found["no op"] = refused(lambda: run.reduce(1, "median"))
found["no json"] = refused(lambda: run.gather_objects({1: 2} if rank else torch.ones(1)))
found["sparse"] = refused(lambda: run.reduce(torch.ones(2).to_sparse()))


def failing() -> None:
    with run.main_first():
        if run.is_main:
            (out / "nowhere" / "file").read_text()


try:
    failing()
    found["main fails"] = "nothing"
except (OSError, ronde.WorldError) as error:
    found["main fails"] = f"{type(error).__name__}: {error}"


def barrier_inside() -> None:
    with run.main_first():
        if run.is_main:
            run.barrier()


found["barrier inside"] = refused(barrier_inside) if size > 1 else ""

# the model called by one rank: works under replicate, in every mode, any number of times
x = torch.randn(4, 5, generator=g).double()
losses = []
for _ in run.epochs(2):
    for i, batch in enumerate(run.batches()):
        if run.rank == i % size:
            for _ in range(1 + i):
                model(x)
                with torch.no_grad():
                    model.eval()(x)
                model.train()
        losses.append(float(run.step(batch)))
    with run.whole_model(ranks="main") as whole:
        assert (whole is model) == run.is_main
        if whole is not None:
            whole.eval()(x)
            whole[1].running_mean.zero_()  # a buffer: put back
assert model.training
found["running mean moves"] = bool(model[1].running_mean.abs().sum() > 0)
found["losses are finite"] = all(map(math.isfinite, losses))
states = run.gather_objects([p.double().sum().item() for p in model.parameters()])
found["weights alike"] = all(s == states[0] for s in states)


def change() -> None:
    with run.whole_model() as whole, torch.no_grad():
        whole[0].weight.add_(0)


found["changed inside"] = refused(change)
found["ranks"] = refused(lambda: run.whole_model("first").__enter__())
# one rank goes on to a step, one waits at a barrier: an error there, and the step goes on
batches = run.batches()
batch = next(batches)
if size > 1 and run.is_main:
    found["step elsewhere"] = refused(run.barrier)
run.step(batch)
batches.close()
if size > 1 and run.is_main:
    found["ended"] = refused(run.barrier)
(out / f"rank-{rank}.json").write_text(json.dumps(found))
