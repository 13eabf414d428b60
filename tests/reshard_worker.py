"""Every rank of every world, forked from one process that has imported torch once: writes
checkpoints under plans, reads them under others.

``python reshard_worker.py MATRIX FOLDER``; prints, as JSON, the largest difference from a run that
was never stopped, by (from, to).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

import ronde
from forked import forget_runs, fork
from ronde.checkpoint import find_valid
from ronde.plan import Plan
from ronde.world.tensors import local_part
from sampling import ALL
from tiny_models import UnevenNet

# plan -> (workers, what --plan says)
PLANS = {
    "single": (1, "replicate"),
    "replicate": (2, "replicate"),
    "zero1": (2, "shard=optimizer"),
    "zero2": (2, "shard=gradients"),
    "zero3": (2, "shard=parameters"),
    "zero3x3": (3, "shard=parameters"),
    "hybrid": (4, "shard=parameters,shard_within=2"),
    "pipeline": (2, "pipeline=2"),
    "pipeline-replicas": (4, "pipeline=2"),
    "pipeline-zero1": (4, "pipeline=2,shard=optimizer"),
    "pipeline-zero3": (4, "pipeline=2,shard=parameters"),
    "tensor": (2, "tensor=2"),
    "tensor-zero3": (4, "tensor=2,shard=parameters"),
    "pipeline-tensor": (4, "pipeline=2,tensor=2"),
}
_DATA = ["single", "replicate", "zero1", "zero2", "zero3", "zero3x3", "hybrid"]
_MODEL = [
    "single",
    "zero3",
    "pipeline",
    "pipeline-replicas",
    "pipeline-zero1",
    "pipeline-zero3",
    "tensor",
    "tensor-zero3",
    "pipeline-tensor",
]
# from -> to: all of the first; of the second each with two very different ones, both ways.
# Otherwise each to one other.
MATRICES = {
    "data": [(a, b) for a in _DATA for b in _DATA],
    "model": [
        (a, b)
        for a in _MODEL
        for b in _MODEL
        if {a, b} & {"single", "pipeline-zero3"} or (a, b) == ("tensor-zero3", "pipeline-replicas")
    ],
}
if not ALL:
    MATRICES = {
        "data": [(a, _DATA[(i + 3) % 7]) for i, a in enumerate(_DATA)],
        "model": [(a, _MODEL[(i + 4) % 9]) for i, a in enumerate(_MODEL)],
    }
else:  # eight processes on two cores are slow
    PLANS["three"] = (8, "pipeline=2,tensor=2,shard=parameters")
    PLANS["three-zero1"] = (8, "pipeline=2,tensor=2,shard=optimizer")
    MATRICES["model"] += [("three", "single"), ("zero3", "three"), ("three-zero1", "three")]
STOP, END = 3, 6


def data() -> TensorDataset:
    g = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randint(11, (96,), generator=g), torch.randint(11, (96,), generator=g)
    )


def start(plan: str, norm: bool, where: Path, resume: bool, **options):
    os.environ.update(
        {
            "RONDE_RUN_DIR": str(where),
            "RONDE_RESUME": "1" if resume else "0",
            "RONDE_PROGRESS": "quiet",
        }
    )
    where.mkdir(parents=True, exist_ok=True)
    forget_runs()
    torch.manual_seed(7 if not resume else 8)  # what is resumed begins elsewhere
    model = options.pop("model", None) or UnevenNet(norm).double()
    named = dict(model.named_parameters())
    flat = [p for n, p in named.items() if p.dim() < 2]
    groups = [
        {"params": flat, "weight_decay": 0.0, "lr": 0.02},
        {"params": [p for p in named.values() if p.dim() > 1]},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)
    options = {
        "batch_size": 12,
        "sync_batchnorm": norm,
        "scheduler": scheduler,
        "seed": 3,
        **options,
    }
    return ronde.distribute(model, optimizer, data(), loss=F.cross_entropy, plan=plan, **options)


def train(run, until: int) -> None:
    for batch in run.batches():
        run.step(batch)
        if run.state.step == until:
            break
    run.port.parts.place.ended = True  # nothing more is written at exit


def differ(a: Path, b: Path) -> float:
    one, two = load_file(a), load_file(b)
    assert all(one[k].dtype == two[k].dtype and one[k].shape == two[k].shape for k in two)
    return _furthest(one, two)


def _optimizer(where: Path) -> dict[str, torch.Tensor]:
    """All of an optimizer's state, from the newest checkpoint."""
    checkpoint, refused = find_valid(where / "checkpoints")
    assert checkpoint is not None and not refused and checkpoint.step == END, (where, refused)
    return checkpoint.whole("optimizer")


def _furthest(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> float:
    assert one.keys() == two.keys(), one.keys() ^ two.keys()
    return max(
        float(
            (one[k].double() - two[k].double()).abs().max() / max(1e-9, two[k].double().abs().max())
        )
        for k in two
        if two[k].numel()
    )


def matrix(name: str, folder: Path) -> None:
    pairs, norm = MATRICES[name], name == "data"
    plans = list(dict.fromkeys(plan for plan, _ in pairs))
    by_size: dict[int, list[str]] = {}
    for plan in plans:
        by_size.setdefault(PLANS[plan][0], []).append(plan)

    def write(size: int) -> None:
        for plan in by_size[size]:
            run = start(PLANS[plan][1], norm, folder / plan, False)
            train(run, STOP)
            path = run.save()
            assert (path is not None) == run.is_main
            if path is not None:
                manifest = json.loads((path / "manifest.json").read_text())
                recorded = [Plan.load(folder / plan / "plan.yaml").split_at, run.plan.split_at]
                recorded.append(tuple(manifest["state"]["plan"]["split_at"]))
                assert len(set(recorded)) == 1 and len(recorded[0]) == run.plan.pipeline - 1
            run.export(folder / f"{plan}.at-stop")
            if plan == "single":
                again = start("replicate", norm, folder / "whole", False)
                train(again, END)
                again.save()
                again.export(folder / "whole.safetensors")

    def read(size: int) -> None:
        for plan in by_size[size]:
            for source in (a for a, b in pairs if b == plan):
                run = start(PLANS[plan][1], norm, folder / f"{source}.{plan}", True)
                assert run.state.step == STOP, run.state
                if plan.startswith("pipeline"):
                    assert (run.plan.split_at == ("blocks.2",)) == (plan == "pipeline"), run.plan
                train(run, END)
                run.save()  # what was resumed is resumed again
                run.export(folder / f"{source}.{plan}.safetensors")

    for size in by_size:
        fork(size, lambda size=size: write(size))
    for source, plan in pairs:
        shutil.copytree(
            folder / source / "checkpoints", folder / f"{source}.{plan}" / "checkpoints"
        )
        if plan == "pipeline":  # as if another cut had been chosen then
            recorded = Plan.parse("pipeline=2,split_at=blocks.2")
            recorded.save(folder / f"{source}.{plan}" / "plan.yaml")
    for size in by_size:
        fork(size, lambda size=size: read(size))
    result = {
        f"{source} -> {plan}": differ(
            folder / f"{source}.{plan}.safetensors", folder / "whole.safetensors"
        )
        for source, plan in pairs
    }
    kept = {
        name: _optimizer(folder / name)
        for name in ("whole", *(f"{source}.{plan}" for source, plan in pairs))
    }
    result |= {
        f"{name}, its optimizer": _furthest(state, kept["whole"])
        for name, state in kept.items()
        if name != "whole"
    }
    result |= {
        f"{plan} at the stop": differ(folder / f"{plan}.at-stop", folder / "single.at-stop")
        for plan in plans
    }
    first = start("replicate", norm, folder / "begin", False)
    first.port.parts.place.ended = True
    first.export(folder / "begin.safetensors")
    result["trained"] = differ(folder / "begin.safetensors", folder / "whole.safetensors")
    print(json.dumps(result))


def states(folder: Path) -> None:
    """The script's own ``state_dict`` and ``load_state_dict``."""
    os.environ["RONDE_RUNS"] = "none"

    def go(plan: str) -> None:
        # after the tied embedding, the last stage would hold all weights
        cut = {"split_at": ["blocks.1"]} if plan.startswith("pipeline") else {}
        run = start(PLANS[plan][1], False, folder / plan, False, **cut)
        train(run, 2)
        held = run.model.state_dict(keep_vars=True)
        answers = {}
        for name, call in {
            "model": run.model.state_dict,
            "blocks": run.model.blocks.state_dict,
            "load": lambda: run.model.load_state_dict(held),
            "optimizer": run.optimizer.state_dict,
        }.items():
            try:
                call()
            except ronde.PlanError as error:
                answers[name] = str(error)
        (folder / f"{plan}.{run.rank}.answers").write_text(json.dumps(answers))

    plans = ["replicate", "zero1", "zero3", "pipeline", "tensor"]
    fork(2, lambda: [go(plan) for plan in plans])
    answers = {plan: json.loads((folder / f"{plan}.1.answers").read_text()) for plan in plans}
    print(json.dumps(answers))


# -- without a run: pieces of tensors --------------------------------------------------


def _tensors() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return {
        "f64": torch.randn(7, 3, generator=g, dtype=torch.float64),
        "bf16": torch.randn(5, 4, generator=g).bfloat16(),
        "int": torch.arange(12).reshape(6, 2),
        "bool": torch.arange(9).reshape(9, 1) % 2 == 0,
        "few": torch.randn(1, 2, generator=g),  # fewer rows than workers
        "grid": torch.randn(6, 8, generator=g),
        "plain": torch.randn(4, generator=g),
        "zero-d": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
    }


def _divided(zero: bool) -> dict[str, torch.Tensor]:
    """As DTensors on a 1-D mesh, the grid on a 2-D one where there are four workers; what is plain
    is plain.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    size = dist.get_world_size() if dist.is_initialized() else 1
    tensors = {n: torch.zeros_like(t) if zero else t for n, t in _tensors().items()}
    if size == 1:
        return {n: t.clone() for n, t in tensors.items()}
    mesh = init_device_mesh("cpu", (size,))
    two = init_device_mesh("cpu", (2, size // 2)) if size % 2 == 0 else None
    for name in ("f64", "bf16", "int", "bool", "few"):
        tensors[name] = distribute_tensor(tensors[name], mesh, [Shard(0)])
    if two is not None:
        tensors["grid"] = distribute_tensor(tensors["grid"], two, [Shard(0), Shard(1)])
        tensors["f64"] = distribute_tensor(
            _tensors()["f64"] * (not zero), two, [Replicate(), Shard(0)]
        )
    else:
        tensors["grid"] = distribute_tensor(tensors["grid"], mesh, [Shard(1)])
    return tensors


def _written(me, *arguments: object) -> Path:
    """The path of a checkpoint, written by all; all raise what rank 0 does."""
    import ronde
    from ronde import checkpoint as c
    from ronde.world.consensus import broadcast_json

    write, answers = c.prepare_pieces(me, *arguments), []
    try:
        answers = [str(write()), ""]
    except ronde.CheckpointError as error:
        answers = ["", str(error)]
    path, error = broadcast_json(me, answers)
    if error:
        raise ronde.CheckpointError(error)
    return Path(path)


def pieces(folder: Path) -> None:
    """Written by 1, 2, 3 and 4 workers, read by each; from the files, from rank 0, and by torch's
    own reader.
    """
    from ronde import checkpoint as c
    from ronde.world.connect import connect

    answers: dict[str, object] = {}

    def write(size: int) -> None:
        me = connect()
        parts = {"model": {n: c.piece_of(t, n) for n, t in _divided(False).items()}}
        more = {"random.safetensors": {"x": torch.ones(1)}}
        path = _written(me, folder / str(size), 1, parts, more, {"n": size})
        if size == 3:
            _written(me, folder / "3", 2, parts, {}, {"n": 2})
        if size > 1:  # the same again takes its place
            assert _written(me, folder / str(size), 1, parts, more, {"n": size}) == path
        c.export_pieces(me, parts["model"], {"other": "f64"}, folder / f"{size}.safetensors")
        if me.is_main:
            exported = load_file(folder / f"{size}.safetensors")
            assert all(
                torch.equal(exported[n], t) and exported[n].dtype == t.dtype
                for n, t in {**_tensors(), "other": _tensors()["f64"]}.items()
            )

    def read(size: int) -> None:
        import torch.distributed as dist

        me = connect()
        for source in (1, 2, 3, 4):
            for all_see in (True, False):
                tensors = _divided(True)
                checkpoint = (
                    c.verify(folder / str(source) / "step-000000001")
                    if me.is_main or all_see
                    else None
                )
                opened = {"model": checkpoint.source("model")} if checkpoint else {}
                wants = [
                    c.Want("model", n, c.box_of(t, n), local_part(t).copy_)
                    for n, t in tensors.items()
                ]
                c.pull(me, opened, wants, all_see)
                for name, value in _tensors().items():
                    mine = c.piece_of(tensors[name])
                    assert torch.equal(
                        mine.tensor,
                        value[mine.box.inside(c.Box.whole(value.shape))] if value.dim() else value,
                    ), (
                        source,
                        size,
                        name,
                    )
        if size > 1:
            dist.barrier()

    def refuse() -> None:
        """A worker whose disk is full, one that holds another shape, a tensor that nobody holds
        whole: all ranks say so.
        """
        me = connect()
        good = {
            "model": {
                "x": c.piece_of(torch.ones(3)),
                "y": c.Piece(torch.ones(2), (4,), c.Box((2 * me.rank,), (2,))),
            }
        }
        path = _written(me, folder / "refused", 1, good, {}, {})
        texts = []
        real = c.files.add
        for how in ("full", "shape", "hole"):
            parts = {"model": dict(good["model"])}
            if how == "full" and me.rank == 1:

                def add(*_: object) -> object:
                    raise OSError(28, "No space left on device")

                c.files.add = add
            elif how == "shape" and me.rank == 1:
                parts["model"]["x"] = c.piece_of(torch.ones(4))
            elif how == "hole":
                parts["model"]["y"] = c.Piece(torch.ones(2), (4,), c.Box((me.rank,), (2,)))
            try:
                _written(me, folder / "refused", 2, parts, {}, {})
            except ronde.CheckpointError as error:
                texts.append(str(error))
            c.files.add = real
        assert c.find_valid(folder / "refused")[0].path == path
        (folder / f"refused.{me.rank}.json").write_text(
            json.dumps([texts, sorted(p.name for p in (folder / "refused").iterdir())])
        )

    for size in (1, 2, 3, 4):
        fork(size, lambda size=size: write(size))
    for size in (1, 2, 3, 4):
        fork(size, lambda size=size: read(size))
    fork(2, refuse)
    answers["refused"] = [
        json.loads((folder / f"refused.{rank}.json").read_text()) for rank in (0, 1)
    ]
    print(json.dumps(answers))


# -- models on meta --------------------------------------------------------------------


def initialise(module: nn.Module) -> None:
    for p in module.parameters(recurse=False):
        nn.init.uniform_(p, -0.4, 0.4)
    if isinstance(module, nn.BatchNorm1d):
        module.reset_running_stats()
    if isinstance(module, UnevenNet):
        module.scale.fill_(0.5)
        module.count.copy_(torch.arange(3))


def meta(folder: Path) -> None:
    """The same weights under every plan; trained, they are the same again; from a checkpoint
    too.
    """
    answers: dict[str, float] = {}

    def build() -> nn.Module:
        with torch.device("meta"):
            return UnevenNet(False).double()

    def go(name: str, init: object, suffix: str) -> None:
        os.environ["RONDE_RUNS"] = "none"
        run = start(
            PLANS[name][1], False, folder / f"{name}{suffix}", False, model=build(), init=init
        )
        run.export(folder / f"{name}{suffix}.begin")
        train(run, 3)
        run.export(folder / f"{name}{suffix}.end")
        run.save()

    plans = ["single", "replicate", "zero3", "pipeline", "hybrid", "pipeline-tensor"]
    for size in (1, 2, 4):
        some = [plan for plan in plans if PLANS[plan][0] == size]
        fork(size, lambda some=some: [go(plan, initialise, "") for plan in some])
    checkpoint = next((folder / "zero3" / "checkpoints").iterdir())
    fork(1, lambda: go("single", checkpoint, "-from"))
    fork(2, lambda: go("zero3", folder / "single.end", "-from"))
    for plan in plans[1:]:
        answers[plan] = max(
            differ(folder / f"{plan}.{at}", folder / f"single.{at}") for at in ("begin", "end")
        )
    answers["from a checkpoint"] = differ(folder / "single-from.begin", folder / "zero3.end")
    answers["from a file"] = differ(folder / "zero3-from.begin", folder / "single.end")
    answers["at all"] = differ(folder / "single.begin", folder / "single.end")
    print(json.dumps(answers))


class Ones(nn.Linear):
    """Drawing 100 million numbers is not what is measured."""

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)


def peak(folder: Path) -> None:
    """What each of four workers needs at most while a model of 400 MB on meta is sharded over
    them.
    """
    width, count = 1000, 100

    def measure() -> None:
        import torch.distributed as dist
        from torch.distributed.fsdp import fully_shard

        from ronde.parallel.meta_init import materialise
        from ronde.world.connect import connect

        me = connect()
        with torch.device("meta"):
            model = nn.Sequential(*(Ones(width, width) for _ in range(count)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        small = nn.Linear(8, 8, device="meta")  # what is imported and allocated once
        materialise(fully_shard(small), "reset", seed=0, device=me.device)
        dist.barrier()

        def status(name: str) -> int:
            return (
                next(
                    int(line.split()[1])
                    for line in Path("/proc/self/status").read_text().splitlines()
                    if line.startswith(name)
                )
                * 1024
            )

        Path("/proc/self/clear_refs").write_text("5")
        before = status("VmRSS")
        materialise(model, "reset", seed=0, device=me.device)
        del optimizer
        held = sum(p.to_local().nbytes for p in model.parameters())
        whole = sum(p.numel() * p.element_size() for p in model.parameters())
        (folder / f"peak.{me.rank}").write_text(json.dumps([status("VmHWM") - before, held, whole]))

    fork(4, measure)
    print(json.dumps([json.loads((folder / f"peak.{rank}").read_text()) for rank in range(4)]))


if __name__ == "__main__":
    what, where = sys.argv[1], Path(sys.argv[2])
    {"pieces": pieces, "meta": meta, "peak": peak, "states": states}.get(
        what, lambda folder: matrix(what, folder)
    )(where)
