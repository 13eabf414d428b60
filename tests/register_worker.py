"""Every rank of every world, forked from one process that has imported torch once: trainings whose
script owns schedulers, optimizers, averages, and values; killed, and resumed elsewhere.

``python register_worker.py killed|refused FOLDER``; prints each JSON file they wrote, by its path.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections import deque, namedtuple
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import ronde
from forked import forget_runs, fork
from sampling import ALL
from tiny_models import UnevenNet

PLANS = {
    "single": (1, "replicate"),
    "replicate": (2, "replicate"),
    "zero1": (2, "shard=optimizer"),
    "zero3": (3, "shard=parameters"),
    "pipeline": (2, "pipeline=2"),
    "tensor": (2, "tensor=2"),
}
WHOLE = ("single", "replicate", "zero1")
# from, to, killed after this step, or at the end of this epoch before the script's own code there
KILLED = [
    ("replicate", "single", "step 8"),
    ("single", "zero1", "epoch 1"),
    ("zero1", "zero3", "step 7"),
    ("zero3", "pipeline", "epoch 1"),
    ("tensor", "replicate", "step 8"),
    *([("pipeline", "tensor", "step 11")] if ALL else []),
]
EPOCHS, STEPS = 3, 5


def rows() -> TensorDataset:
    g = torch.Generator().manual_seed(0)
    return TensorDataset(*(torch.randint(11, (60,), generator=g) for _ in range(2)))


def begin(plan: str, where: Path, resume: bool, **options):
    """A run of the tiny model, and its optimizer."""
    quiet = {"RONDE_PROGRESS": "quiet", "RONDE_RESUME": "1" if resume else "0"}
    os.environ.update({"RONDE_RUN_DIR": str(where), **quiet})
    where.mkdir(parents=True, exist_ok=True)
    forget_runs()
    torch.manual_seed(7 if not resume else 8)  # what is resumed begins elsewhere
    model = UnevenNet(False).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    begin.early = torch.optim.SGD(model.parameters(), 0.1)
    options = {
        "batch_size": 12,
        "seed": 3,
        "save_every": 3,
        "keep": 2,
        "async_save": False,
        **options,
    }
    return (
        ronde.distribute(model, optimizer, rows(), loss=F.cross_entropy, plan=plan, **options),
        optimizer,
    )


class Averaged:
    """The averages of ``train`` by their definitions, from whole weights."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.n = 0
        self.tensors = {
            name: {n: p.detach().clone() for n, p in model.named_parameters()}
            for name in ("average", "mean")
        }

    def update(self, model: torch.nn.Module, step: int) -> None:
        self.n += step > 2 and step % 2 == 0
        for n, p in model.named_parameters():
            average, mean = self.tensors["average"][n], self.tensors["mean"][n]
            average.copy_(0.9 * average + (1 - 0.9) * p.detach())
            if step > 2 and step % 2 == 0:
                mean.copy_((mean * (self.n - 1) + p.detach()) / self.n)


def train(plan: str, where: Path, resume: bool = False, kill: str = "") -> None:
    """A training of a script that owns more than a model."""
    # the first epoch's is the largest
    run, optimizer = begin(PLANS[plan][1], where, resume, keep_best="max:score")
    # Built after the resume, they set their optimizers' rates to the first ones.
    scheduler = lr_scheduler.StepLR(optimizer, 1, 0.5)
    torch.manual_seed(11 if not resume else 12)
    critic = torch.nn.Linear(1, 1).double()
    critic_optimizer = torch.optim.SGD(critic.parameters(), lr=0.1, momentum=0.9)
    cosine = lr_scheduler.CosineAnnealingLR(critic_optimizer, 20)
    recent: deque = deque(maxlen=4)
    queue = torch.zeros(4, dtype=torch.float64)
    counts = np.zeros(3)
    kept = run.register(
        cosine=cosine,
        critic=critic,
        critic_optimizer=critic_optimizer,
        scheduler=scheduler,
        best=math.inf,
        smooth=np.float32(0),
        recent=recent,
        queue=queue,
        counts=counts,
        seen={1: None},
    )
    ema = None
    if plan in WHOLE:
        ema = AveragedModel(run.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        run.register(ema=ema)
    average = run.average(decay=0.9)
    mean = run.average(None, name="mean", start=2, every=2)
    by_hand = Averaged(run.model) if plan == "single" else None
    averaged = []
    for epoch in run.epochs(EPOCHS):
        for batch in run.batches():
            loss = float(run.step(batch))
            if kill == f"step {run.state.step}":
                os._exit(0)  # as if killed, on every rank
            critic_optimizer.zero_grad()
            critic(torch.full((1, 1), loss, dtype=torch.float64)).sum().square().backward()
            critic_optimizer.step()
            cosine.step()
            if ema is not None:
                ema.update_parameters(run.model)
            kept.smooth = np.float32(0.9) * kept.smooth + np.float32(0.1) * np.float32(loss)
            recent.append((run.state.step, loss))
            queue.copy_(torch.cat([queue[1:], queue.new_tensor([loss])]))
            counts[run.state.step % 3] += 1
            if by_hand is not None:
                by_hand.update(run.model, run.state.step)
            kept.seen[run.state.step] = [scheduler.get_last_lr()[0], cosine.get_last_lr()[0]]
        if kill == f"epoch {epoch}":
            os._exit(0)
        scheduler.step()
        kept.best = min(kept.best, run.evaluate(rows(), {"score": F.cross_entropy})["loss"])
        with average.applied():
            averaged.append(run.evaluate(rows())["loss"])
    run.export(where / "final.safetensors")
    run.export(where / "average.safetensors", average=average)
    with suppress(KeyboardInterrupt), mean.applied():
        run.export(where / "mean.safetensors")
        raise KeyboardInterrupt
    run.export(where / "again.safetensors")
    if by_hand is not None:
        for name, tensors in by_hand.tensors.items():
            save_file(tensors, where / f"{name}-by-hand.safetensors")
    if not run.is_main:
        return
    events = [json.loads(line) for line in (where / "record.jsonl").read_text().splitlines()]
    ended = {
        "losses": {e["step"]: e["loss"] for e in events if e["type"] == "step"},
        "lr": {e["step"]: e["lr"] for e in events if e["type"] == "step"},
        "best": kept.best,
        "smooth": [float(kept.smooth), type(kept.smooth).__name__],
        "recent": [list(pair) for pair in kept.recent],
        "same objects": kept.recent is recent and kept.queue is queue and kept.counts is counts,
        "queue": queue.tolist(),
        "counts": counts.tolist(),
        "seen": [[k, v] for k, v in kept.seen.items()],
        "critic": [p.tolist() for p in critic.parameters()],
        "ema": None
        if ema is None
        else [int(ema.n_averaged), [p.tolist() for p in ema.parameters()]],
        "averaged": averaged[-1],
        "best checkpoint": [run.best.metric, run.best.value, run.best.step, run.best.epoch],
        "checkpoints": sorted(path.name for path in (where / "checkpoints").iterdir()),
        "best path": run.best.path.name,
        "files": {
            path.stem: {n: t.flatten().tolist() for n, t in load_file(path).items()}
            for path in where.glob("*.safetensors")
        },
        "warnings": [e["text"] for e in events if e["type"] == "warning"],
    }
    (where / "ended.json").write_text(json.dumps(ended))


def killed(folder: Path) -> None:
    """Killed under one plan and resumed under another, against one that was not."""

    def worlds(job, plan_of) -> None:
        for size in sorted({PLANS[plan_of(pair)][0] for pair in KILLED}):
            pairs = [pair for pair in KILLED if PLANS[plan_of(pair)][0] == size]
            for pair in pairs:
                fork(size, lambda pair=pair: job(pair))

    def place(pair) -> Path:
        return folder / "-".join(pair[:2])

    fork(1, lambda: train("single", folder / "whole"))
    worlds(lambda pair: train(pair[0], place(pair), kill=pair[2]), lambda pair: pair[0])
    worlds(lambda pair: train(pair[1], place(pair), resume=True), lambda pair: pair[1])


def refused(folder: Path) -> None:
    """What registration refuses, by case; each rank writes its errors."""

    def attempts(plan: str, name: str, cases, resume: bool = False) -> None:
        where = folder / name
        run, _ = begin(plan, where, resume)
        told = {}
        for case, attempt in cases(run).items():
            try:
                attempt()
                told[case] = "accepted"
            except (ronde.RondeError, AttributeError) as error:
                told[case] = f"{type(error).__name__}: {error}"
        (where / f"told.{run.rank}.json").write_text(json.dumps(told))
        run.port.parts.place.ended = True
        dist.barrier()  # a rank that ends at once takes the store along, with which others still meet

    def whole(run):
        kept = run.register(a=1, b=torch.ones(2), steps=lr_scheduler.StepLR(run.optimizer, 1))
        run.register(tail=deque([1], maxlen=3), table=[1, 2])
        endless: list = []
        endless.append(endless)
        Pair = namedtuple("Pair", "x y")
        weight = torch.ones(2, requires_grad=True)

        def by_rank(name, value):
            run.register(**{name: value})
            with suppress_after(run, name):
                run.save()

        return {
            "twice": lambda: run.register(a=2),
            "underscore": lambda: run.register(_a=2),
            "no name": lambda: run.register(**{"a b": 2}),
            "model": lambda: run.register(net=run.model),
            "object": lambda: run.register(thing=object()),
            "deep": lambda: run.register(things={"x": [object()]}),
            "named tuple": lambda: run.register(pairs=[Pair(1, 2)]),
            "set": lambda: run.register(names={"x"}),
            "graph": lambda: run.register(loss=(weight * 2).sum()),
            "objects": lambda: run.register(array=np.array([None])),
            "sparse": lambda: run.register(sparse=torch.eye(2).to_sparse()),
            "itself": lambda: run.register(endless=endless),
            "attribute": lambda: setattr(kept, "c", 1),
            "read": lambda: kept.c,
            "replaced": lambda: setattr(kept, "steps", 1),
            "ranks": lambda: by_rank("mine", run.rank),
            "ranks' tensors": lambda: by_rank("noise", torch.full((3,), float(run.rank))),
            "ranks' order": lambda: by_rank("names", [*"abcde", *("fg", "gf")[run.rank]]),
            "one rank's": lambda: by_rank(f"only{run.rank}", 1),
            "later": lambda: (setattr(kept, "a", object()), run.save()),
            "best": lambda: begin("replicate", folder, False, keep_best="mim:loss"),
            "decay": lambda: run.average(decay=1.5),
            "every": lambda: run.average(every=0),
            "decays": lambda: run.average(decay=0.5 + 0.1 * run.rank),
            "average twice": lambda: (run.average(name="one"), run.average(name="one")),
            "inside": lambda: inside(run, run.save),
            "step inside": lambda: inside(run, lambda: run.step(None)),
            "nested": lambda: inside(run, lambda: inside(run, run.save)),
            "saved": lambda: (setattr(kept, "a", 3), run.save()),
        }

    def inside(run, call):
        with run.port.group.members[0].content.averages.items["one"].applied():
            call()

    @contextmanager
    def suppress_after(run, name):
        try:
            yield
        finally:
            del run.port.group.members[0].content.registry.items[name]

    def resumed(run):
        return {
            "value": lambda: run.register(a=4),
            "shape": lambda: run.register(b=torch.ones(3)),
            "class": lambda: run.register(steps=lr_scheduler.ExponentialLR(run.optimizer, 0.9)),
            "kind": lambda: run.register(table={}),
            "longer": lambda: run.register(tail=deque(maxlen=4)),
        }

    def divided(run):
        return {
            "average": lambda: run.register(ema=AveragedModel(run.model)),
            "optimizer": lambda: run.register(second=torch.optim.SGD(run.model.parameters(), 0.1)),
            "early": lambda: run.register(early=begin.early),
        }

    fork(2, lambda: attempts("replicate", "whole", whole))
    for told in (folder / "whole").glob("told.*.json"):
        told.rename(folder / told.name)
    fork(2, lambda: attempts("replicate", "whole", resumed, resume=True))
    fork(2, lambda: attempts("shard=parameters", "shard", divided))
    fork(2, lambda: attempts("pipeline=2", "pipeline", divided))


if __name__ == "__main__":
    what, where = sys.argv[1], Path(sys.argv[2])
    {"killed": killed, "refused": refused}[what](where)
    print(
        json.dumps(
            {
                str(path.relative_to(where).with_suffix("")): json.loads(path.read_text())
                for path in where.rglob("*.json")
                if path.name != "manifest.json"
            }
        )
    )
