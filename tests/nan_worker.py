"""``on_nan="skip"`` under plans, against a training that leaves the same update
out by hand. ``python nan_worker.py FOLDER PLAN=WORKERS…``; prints JSON.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import ronde
from forked import forget_runs, fork
from reshard_worker import differ
from ronde.watch import NonFiniteStep, read
from ronde.world.tensors import local_part
from tiny_models import UnevenNet

BAD = 40  # a sample
EPOCHS = 2


def rows(bad: bool) -> TensorDataset:
    g = torch.Generator().manual_seed(0)
    x, y = (torch.randint(11, (96,), generator=g) for _ in range(2))
    if bad:
        y[BAD] += 100
    return TensorDataset(x, y)


def loss(output, target):
    spoiled = torch.where((target > 99).any(), torch.nan, 1.0)
    return F.cross_entropy(output, target % 100) * spoiled


def train(where: Path, plan: str, bad: str, on_nan: str, left_out: int = 0) -> None:
    os.environ |= {"RONDE_RUN_DIR": str(where), "RONDE_RESUME": "0", "RONDE_PROGRESS": "quiet"}
    where.mkdir(parents=True, exist_ok=True)
    forget_runs()
    torch.manual_seed(7)
    model = UnevenNet(False).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    run = ronde.distribute(
        model, optimizer, rows(bad == "data"), loss=loss, batch_size=12, scheduler=scheduler,
        seed=3, plan=plan, save_every=3, on_nan=on_nan,
    )  # fmt: skip
    kept = run.register(steps=[])
    average = run.average(0.9)
    update = optimizer.step
    once = [True]

    def step(*args, **named):
        if run.state.step + 1 != left_out:
            return update(*args, **named)
        average.updates -= 1  # the run that skips does not count it
        return None

    if left_out:
        optimizer.step = step
        average.after_step = lambda at, then=average.after_step: at == left_out or then(at)
    for _ in run.epochs(EPOCHS):
        for batch in run.batches():
            if (
                bad == "gradient"
                and run.state.step == 7
                and once
                and run.rank == run.world_size - 1
            ):
                finish = run.port.strategy.finish

                def spoil(finish=finish):
                    value = finish()
                    once.clear()
                    run.port.strategy.finish = finish
                    grad = next(p.grad for p in run.port.strategy.parameters if p.grad is not None)
                    local_part(grad).view(-1)[0] = torch.inf
                    return value

                run.port.strategy.finish = spoil
            run.step(batch)
            kept.steps.append(run.state.step)
    # a step that is left out counts
    assert kept.steps == list(range(1, 8 * EPOCHS + 1)), kept.steps
    run.export(where / "final.safetensors")
    run.export(where / "average.safetensors", average=average)
    atexit._run_exitfuncs()


def main(folder: Path, plans: list[str]) -> None:
    def told(name: str) -> list:
        events = [e for e in read(folder / name / "record.jsonl") if isinstance(e, NonFiniteStep)]
        assert all((BAD in e.samples) == (e.what == "loss") for e in events)
        return [[e.step, e.what, e.action, e.ranks] for e in events]

    def compare(name: str, reference: str) -> float:
        files = ("final.safetensors", "average.safetensors")
        return max(differ(folder / name / f, folder / reference / f) for f in files)

    fork(1, lambda: train(folder / "by_hand", "replicate", "", "error", 8))
    fork(1, lambda: train(folder / "first", "replicate", "data", "skip"))
    steps = [step for step, *_ in told("first")]
    assert len(steps) == EPOCHS and steps[1] > 8
    results = {}
    for each in plans:
        plan, _, workers = each.rpartition(":")
        for bad, reference in (("data", "first"), ("gradient", "by_hand")):
            name = f"{plan}-{workers}-{bad}"
            fork(int(workers), lambda: train(folder / name, plan, bad, "skip"))
            results[name] = [told(name), compare(name, reference)]
    print(json.dumps([steps, results]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
