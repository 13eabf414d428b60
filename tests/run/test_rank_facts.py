"""Ranks that differ in what nobody exchanges: the difference has a name within some steps, under
every plan, and the hardware is blamed only if all else is equal.
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
from torch.utils.data import TensorDataset

import ronde
import zygote
from processes import PATHS, TESTS, forked
from ronde.run import checks
from sampling import ALL

AT = 4  # steps done when the last rank becomes another one


def rate(run, model, optimizer):
    optimizer.param_groups[0]["lr"] = 0.02


def decay(run, model, optimizer):
    optimizer.param_groups[1]["weight_decay"] = 0.5


def mode(run, model, optimizer):
    model[1].eval()


def state(run, model, optimizer):
    optimizer.state.clear()


def place(run, model, optimizer):
    run.state.epoch += 1


def added(run, model, optimizer):
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})


def in_place(run, model, optimizer):
    with torch.no_grad():
        model[6].bias.add_(0.01)


def out_of_sight(run, model, optimizer):
    model[6].bias.data.add_(0.01)


def early(run, model, optimizer):
    return True


# what the last rank does -> what all ranks are told
EVERYWHERE = [
    (rate, "disagree on the optimizer's lr (group 0) in step 8, after they agreed at step 4"),
    (mode, "the modules in evaluation mode in step 8, after they agreed at step 4: rank"),
]
IF_WHOLE = [
    (decay, "optimizer's weight_decay (group 1) in step 8, after they agreed at step 4"),
    (place, "disagree on the epoch in step 8, after they agreed at step 4: rank"),
    (state, "the steps that the optimizer has counted in step 8"),
    (added, "the number of the optimizer's groups in step 8, after they agreed at step 4"),
    (in_place, "something besides the optimizer has changed '6.bias' in place on rank 1, and not"),
    (out_of_sight, "5 of the 5 elements of '6.bias' differ, and all else that Ronde compares"),
]
EARLY = "rank 1 called run.batches() after it had left the loop in epoch 1, after 32 samples, and"
PLANS = {"replicate": 2, "shard=parameters": 2, "pipeline=2": 2}
if ALL:
    PLANS |= {"shard=optimizer": 2, "shard=gradients": 2, "tensor=2": 2}
    PLANS |= {"pipeline=2,shard=optimizer": 4, "pipeline=2,tensor=2": 4}


def train(plan: str, change, where: str = "last") -> str:
    """Ten steps; the last rank, or all, ``change`` something in the middle."""
    torch.manual_seed(0)
    norm = nn.LayerNorm(8)
    model = nn.Sequential(
        nn.Linear(6, 8), norm, nn.GELU(), nn.Dropout(0.0), nn.Linear(8, 8), nn.GELU(),
        nn.Linear(8, 5),
    )  # fmt: skip
    g = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(160, 6, generator=g), torch.randint(5, (160,), generator=g))
    named = dict(model.named_parameters())
    groups = [{"params": [p for n, p in named.items() if n.endswith(end)]} for end in ("t", "s")]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    run = ronde.distribute(
        model, optimizer, data, loss=F.cross_entropy, plan=plan, batch_size=8, micro_batch=2
    )
    last = run.rank == run.world_size - 1
    try:
        for _ in range(2):
            for batch in run.batches():
                now = run.state.step == AT and (last or where == "all")
                if now and change(run, model, optimizer):
                    break
                run.step(batch)
                if run.state.step == 10:
                    return f"trained {run.state.step}"
    except (ronde.RondeError, RuntimeError) as error:
        return str(error)
    finally:
        run.port.parts.place.ended = True
    return "nothing"


def replaced(run, model, optimizer):
    torch.manual_seed(run.rank)
    model[6] = nn.Linear(8, 5)
    optimizer.add_param_group({"params": list(model[6].parameters())})


def worker(folder: Path) -> None:
    size = int(os.environ["WORLD_SIZE"])
    told: dict[str, list[str]] = {}
    for plan in (p for p, n in PLANS.items() if n == size):
        for change, _ in EVERYWHERE + (IF_WHOLE if plan == "replicate" else []):
            told[f"{plan} {change.__name__}"] = [train(plan, change)]
    if size == 2:
        told["in place on all"] = [train("replicate", in_place, "all")]
        told["replaced on all"] = [train("replicate", replaced, "all")]
        told["sharded in place"] = [train("shard=optimizer", in_place)]
    (folder / f"{size}.{dist.get_rank()}.json").write_text(json.dumps(told))
    dist.barrier()


def alone(folder: Path, plan: str) -> None:
    """What breaks the exchange, so that nothing follows in this world."""
    (folder / f"early.{os.environ['RANK']}").write_text(train(plan, early))
    os._exit(0)


def world(size: int, *arguments: object) -> str:
    done = zygote.run(
        forked(TESTS / "run" / "test_rank_facts.py", size, *arguments),
        env={**os.environ, "PYTHONPATH": PATHS, "RONDE_RUNS": "none"},
        cwd=TESTS,
        timeout=150,
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def test_what_differs_between_ranks_is_named(tmp_path):
    for size in sorted(set(PLANS.values())):
        said = world(size, tmp_path)
        ranks = [json.loads((tmp_path / f"{size}.{r}.json").read_text()) for r in range(size)]
        for what in ranks[0]:
            assert len({each[what][0] for each in ranks}) == 1, (what, ranks)
        told = {what: texts[0] for what, texts in ranks[0].items()}
        for plan in (p for p, n in PLANS.items() if n == size):
            for change, text in EVERYWHERE + (IF_WHOLE if plan == "replicate" else []):
                found = told[f"{plan} {change.__name__}"]
                assert text in found and "bit has flipped" not in found, (plan, found)
        if size == 2:
            assert told["in place on all"] == told["replaced on all"] == "trained 10", told
            assert told["sharded in place"] == "trained 10"
            assert "changed '6.bias' in place on rank 1, and not on the others" in said, said


def test_who_leaves_the_loop_alone_is_named(tmp_path):
    for plan in ("replicate", "pipeline=2") if ALL else ("replicate",):
        world(2, tmp_path, plan)
        for rank in range(2):
            told = (tmp_path / f"early.{rank}").read_text()
            assert EARLY in told, told
            assert "rank 0 went on to " in told, told


def test_settings_are_the_same_text_on_all_ranks():
    """An address in memory is none."""
    assert checks.setting(object()) == checks.setting(object())
    assert checks.setting(torch.tensor([0.5, 2.0])) == [0.5, 2.0]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    alone(folder, sys.argv[2]) if len(sys.argv) > 2 else worker(folder)
