"""The check of the first steps: a weight that differs between workers, and a gradient that was not
exchanged, are errors with a name under every plan.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

import ronde
import zygote
from processes import PATHS, TESTS, forked
from ronde.parallel.replica_check import late_gradient
from ronde.world.tensors import local_part
from sampling import some

PLANS = {
    2: ["replicate", "shard=optimizer", "tensor=2"],
    4: some(
        ["pipeline=2,tensor=2", "shard=parameters,shard_within=2", "pipeline=2,shard=optimizer"], 3
    ),
}


def built():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 5)
    )
    g = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(48, 6, generator=g), torch.randint(5, (48,), generator=g))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), data


def train(plan: str, change: float, at: int) -> str:
    """Three steps; ``change`` is added to a weight on the last rank before step ``at``."""
    model, optimizer, data = built()
    run = ronde.distribute(
        model, optimizer, data, loss=F.cross_entropy, plan=plan, batch_size=16, micro_batch=2
    )
    last = run.rank == run.world_size - 1
    try:
        for batch in run.batches():
            if run.state.step == at and last and change:
                # it is on several workers under every plan, and in the last stage of every cut
                weight = local_part(dict(model.named_parameters())["5.bias"])
                with torch.no_grad():
                    weight[:1] += change
            run.step(batch)
    except ronde.PlanError as error:
        return str(error)
    finally:
        run.port.parts.place.ended = True
    return ""


def leftover() -> list[str | None]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
    fully_shard(model[1])
    fully_shard(model)
    answers = []
    for exchanges in (True, False):
        model[1].set_requires_gradient_sync(exchanges)
        model(torch.ones(2, 4)).sum().backward()
        answers.append(late_gradient(model))
    return answers


def worker(folder: Path, plans: list[str]) -> None:
    size = int(os.environ["WORLD_SIZE"])
    answers = {}
    for plan in plans:
        answers[plan] = [train(plan, 0.0, 0), train(plan, 1e-4, 1), train(plan, 1e-4, 2)]
    if size == 2:
        answers["leftover"] = leftover()
    (folder / f"{size}.{dist.get_rank()}.json").write_text(json.dumps(answers))
    dist.barrier()  # who leaves while another still reads from it resets the connection


def test_what_differs_between_workers_is_named(tmp_path):
    for size, plans in PLANS.items():
        done = zygote.run(
            forked(TESTS / "parallel" / "test_first_steps.py", size, tmp_path, *plans),
            env={**os.environ, "PYTHONPATH": PATHS, "RONDE_RUNS": "none"},
            cwd=tmp_path,
            timeout=90,
        )
        assert done.returncode == 0, f"{done.stdout}{done.stderr}"
        ranks = [json.loads((tmp_path / f"{size}.{r}.json").read_text()) for r in range(size)]
        for plan in plans:
            sound, before, late = zip(*(answers[plan] for answers in ranks), strict=True)
            assert not any(sound), (plan, sound)
            assert len(set(before)) == 1, before  # the same on every rank
            if "optimizer" in plan:  # each weight's owner sends it to the others after a step
                assert not before[0] and not any(late), (plan, before, late)
                continue
            assert f"plan='{plan}" in before[0] and "parameter '5.bias'" in before[0], before[0]
            assert f"on rank {size - 1} than on rank" in before[0]
            assert not any(late), (plan, late)  # the third step is not checked
        if size == 2:
            assert all(answers["leftover"] == [None, "1.0.weight"] for answers in ranks), ranks


if __name__ == "__main__":
    worker(Path(sys.argv[1]), sys.argv[2:])
