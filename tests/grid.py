"""Every model of ``grid_models`` under every plan: the same training as in one process, or refused by
name.

``python grid.py OUT`` writes a line for each cell. Ranks are forks of one
process that has imported everything; a cell that fails ends its ranks, and others begin with the
next.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch

import grid_models
import ronde
from processes import free_port, rank_variables

PLANS = {
    2: [
        "replicate",
        "recompute=selective,micro_batch=2",
        "recompute=full",
        "shard=optimizer",
        "shard=gradients,micro_batch=2",
        "shard=parameters",
        "shard=parameters,recompute=full,micro_batch=2",
        "tensor=2",
        "tensor=2,recompute=full",
        "pipeline=2,micro_batch=2",
        "pipeline=2,schedule=gpipe,recompute=full,micro_batch=2",
        "pipeline=2,virtual=2,schedule=interleaved,micro_batch=2",
    ],
    4: [
        "pipeline=2,micro_batch=2",
        "pipeline=4,micro_batch=2",
        "pipeline=2,shard=optimizer,micro_batch=2",
        "pipeline=2,shard=gradients,micro_batch=2",
        "pipeline=2,shard=parameters,micro_batch=1",
        "pipeline=2,shard=parameters,recompute=full,micro_batch=2",
        "tensor=2",
        "pipeline=2,tensor=2,micro_batch=2",
        "tensor=2,shard=gradients,micro_batch=2",
        "tensor=2,shard=parameters",
        "shard=parameters,shard_within=2",
    ],
}
SECONDS = 40.0  # of a cell
EXACT = 1e-10
EPOCHS, BATCH, CLIP = 2, 8, 0.5


def _optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def plain(name: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Weights and losses of the training in one process, without Ronde."""
    case = grid_models.build(name)
    optimizer, losses = _optimizer(case.model), []
    for _ in range(EPOCHS):
        for start in range(0, grid_models.SAMPLES, BATCH):
            optimizer.zero_grad()
            loss = case.loss(
                case.model, {k: v[start : start + BATCH] for k, v in case.samples.items()}
            )
            loss.backward()
            torch.nn.utils.clip_grad_norm_(case.model.parameters(), CLIP)
            optimizer.step()
            losses.append(loss.item())
    return {k: v.detach().clone() for k, v in case.model.state_dict().items()}, losses


def cell(name: str, plan: str, expected: tuple[dict[str, torch.Tensor], list[float]]) -> dict:
    """Train, and compare what this worker holds. A float: how far it is off, and where."""
    weights, expected_losses = expected
    case = grid_models.build(name)
    run = ronde.distribute(
        case.model,
        _optimizer(case.model),
        grid_models.Rows(case.samples),
        loss=lambda value: value,
        forward=case.loss,
        batch_size=BATCH,
        shuffle=False,
        clip_norm=CLIP,
        plan=plan,
    )
    losses = [run.step(batch) for _ in run.epochs(EPOCHS) for batch in run.batches()]
    worst, where, held = 0.0, "", []
    for key, value in case.model.state_dict(keep_vars=True).items():
        if not run.port.strategy.owns(key):
            continue
        held.append(key)
        if hasattr(value, "full_tensor"):
            value = value.full_tensor()
        want = weights[key].double()
        if value.shape != want.shape:
            return {"apart": float("inf"), "where": f"{key}: {value.shape}", "held": held}
        if not want.numel():
            continue
        apart = (value.detach().double() - want).abs().max() / want.abs().max().clamp(min=0.01)
        apart = float(apart.nan_to_num(nan=float("inf")))
        if apart > worst:
            worst, where = apart, key
    for i, (loss, want) in enumerate(zip(losses, expected_losses, strict=True)):
        apart = abs(float(loss) - want) / max(abs(want), 0.01)
        if not apart <= worst:
            worst, where = apart, f"loss {i}"
    return {"apart": worst, "where": where, "held": held}


def _rank(name: str, plans: list[str], file: Path) -> None:
    """Cell after cell, until one is not exact."""
    expected = plain(name)
    with file.open("w") as out:
        for plan in plans:
            print(json.dumps({"begin": plan}), file=out, flush=True)
            try:
                facts = cell(name, plan, expected)
            except BaseException as error:
                last = traceback.extract_tb(error.__traceback__)[-1]
                facts = {
                    "error": type(error).__name__,
                    "named": isinstance(error, ronde.RondeError),
                    "text": str(error)[:1200],
                    "at": f"{last.filename}:{last.lineno}",
                    "when": time.time(),
                    "trace": traceback.format_exc()[-5000:],
                }
            print(json.dumps({"plan": plan, **facts}), file=out, flush=True)
            if "error" in facts or not facts["apart"] <= EXACT:
                os._exit(1)
    os._exit(0)


def _launch(name: str, workers: int, plans: list[str], folder: Path) -> list[list[dict]]:
    """What each rank wrote. Ends all ranks two seconds after the first that failed."""
    port, children, parent = free_port(), [], os.getpid()
    sys.stdout.flush()
    for rank in range(workers):
        pid = os.fork()
        if not pid:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)
            os.environ.update(rank_variables(rank, workers, port))
            log = os.open(folder / f"log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            _rank(name, plans, folder / f"facts-{rank}")
        children.append(pid)
    limit = time.monotonic() + SECONDS
    size = 0
    while children:
        for pid in list(children):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                children.remove(pid)
                if status:
                    limit = min(limit, time.monotonic() + 2)
        written = sum(f.stat().st_size for f in folder.glob("facts-*"))
        if written != size and limit > time.monotonic() + 2:
            size, limit = written, time.monotonic() + SECONDS
        if time.monotonic() > limit:
            for pid in children:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            break
        time.sleep(0.01)
    facts = []
    for rank in range(workers):
        file = folder / f"facts-{rank}"
        lines = file.read_text().splitlines() if file.exists() else []
        facts.append([json.loads(line) for line in lines])
        file.unlink(missing_ok=True)
    return facts


def judge(plan: str, facts: list[list[dict]], names: set[str]) -> dict[str, Any]:
    """One cell: ``exact``, ``refused``, or what it must not be: ``wrong``, ``error``, ``hang``."""
    lines = [next((x for x in each if x.get("plan") == plan), None) for each in facts]
    errors = sorted((x for x in lines if x and "error" in x), key=lambda x: x["when"])
    if errors:
        first = errors[0]
        kind = "refused" if first["named"] else "error"
        return {"outcome": kind, **first}
    wrong = [x for x in lines if x and not x["apart"] <= EXACT]
    if wrong:
        return {"outcome": "wrong", "apart": wrong[0]["apart"], "where": wrong[0]["where"]}
    if None in lines:
        return {"outcome": "hang", "ranks": [i for i, x in enumerate(lines) if x is None]}
    missing = names - {k for x in lines if x for k in x["held"]}
    if missing:
        return {"outcome": "wrong", "where": f"nobody holds {sorted(missing)[:3]}"}
    return {"outcome": "exact", "apart": max(x["apart"] for x in lines if x)}


def run_cells(name: str, workers: int, plans: list[str]) -> list[dict]:
    """One model under several plans of so many workers."""
    names, results, left = set(grid_models.build(name).model.state_dict()), [], list(plans)
    with tempfile.TemporaryDirectory() as folder:
        while left:
            facts = _launch(name, workers, left, Path(folder))
            begun = max(sum("begin" in x for x in each) for each in facts)
            for plan in left[: max(begun, 1)]:
                verdict = judge(plan, facts, names)
                results.append({"model": name, "workers": workers, **verdict, "plan": plan})
                left = left[1:]
                if verdict["outcome"] == "hang":
                    log = Path(folder, "log-0")
                    results[-1]["log"] = log.read_text()[-1500:] if log.exists() else ""
                if verdict["outcome"] != "exact":
                    break  # other ranks may have begun the next
    return results


def prepare(packages: list[str] | None = None) -> None:
    """Once, in the process whose forks train."""
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.tensor.parallel

    grid_models.widen()
    for package in grid_models.LOADERS if packages is None else packages:
        grid_models.foreign(package)
    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1)])
    variables = {"RONDE_RUNS": "none", "RONDE_PROGRESS": "quiet", "RONDE_DEVICE": "cpu"}
    os.environ.update(variables, TRANSFORMERS_VERBOSITY="error", PYTHONWARNINGS="ignore")


def main() -> None:
    """``grid.py OUT [JSON]``: the packages to load, and (model, workers, plans) to run."""
    out = Path(sys.argv[1])
    packages, todo = json.loads(sys.argv[2]) if len(sys.argv) > 2 else (None, None)
    prepare(packages)
    if todo is None:
        todo = [(m, n, plans) for m in grid_models.BUILDERS for n, plans in PLANS.items()]
    with out.open("a") as file:
        for name, workers, plans in todo:
            for row in run_cells(name, workers, plans):
                print(json.dumps(row), file=file, flush=True)


if __name__ == "__main__":
    main()
