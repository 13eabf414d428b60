"""Run by every rank: trains models that nobody here wrote under a pipeline, and writes what this
rank holds at the end of each.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.utils import _pytree as pytree

import foreign_models as foreign
import ronde
from foreign_models import build

for load in (foreign.load_transformers, foreign.load_diffusers):
    load()
STEPS, SOME_STEPS, RATE = 10, 3, 0.01


class Samples(torch.utils.data.Dataset):
    """A batch, sample by sample."""

    def __init__(self, batch):
        self.leaves, self.spec = pytree.tree_flatten(batch)
        self.n = next(t.shape[0] for t in self.leaves if isinstance(t, torch.Tensor) and t.dim())

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return i

    def take(self, ids):
        parts = [
            t[ids] if isinstance(t, torch.Tensor) and t.dim() and t.shape[0] == self.n else t
            for t in self.leaves
        ]
        return pytree.tree_unflatten(parts, self.spec)


def calm(built):
    """Without dropout: workers draw other masks than one process."""
    for module in built.model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and (
                "drop" in name
                or (name == "p" and isinstance(module, torch.nn.modules.dropout._DropoutNd))
            ):
                setattr(module, name, 0.0)
    return built


def decomposes(built, data) -> bool:
    """Whether the loss of the batch is the mean of the losses of its samples: else it is one
    micro-batch.
    """
    model = built.model
    state = {k: v.clone() for k, v in model.state_dict().items()}
    try:
        whole = built.call(model, data.take(torch.arange(data.n)))
        model.load_state_dict(state)
        parts = torch.stack(
            [built.call(model, data.take(torch.tensor([i]))) for i in range(data.n)]
        ).mean()
        return bool(torch.isclose(whole, parts, rtol=1e-10))
    except Exception:
        return False
    finally:
        model.load_state_dict(state)


def plain(kind: str, name: str, steps: int = STEPS) -> tuple[dict[str, torch.Tensor], set[str]]:
    """The weights, and the names of those whose gradient is zero in exact arithmetic: only rounding
    is left of it.
    """
    built = calm(build(getattr(foreign, kind), name))
    data = Samples(built.batch)
    optimizer = torch.optim.SGD(built.model.parameters(), lr=RATE, momentum=0.9)
    largest: dict[str, float] = {}
    for _ in range(steps):
        optimizer.zero_grad()
        built.call(built.model, data.take(torch.arange(data.n))).backward()
        for k, p in built.model.named_parameters(remove_duplicate=False):
            if p.grad is not None:
                largest[k] = max(largest.get(k, 0.0), float(p.grad.abs().max()))
        optimizer.step()
    aside = {k for k, g in largest.items() if g <= 1e-13 * max(largest.values())}
    return {k: v.detach().clone() for k, v in built.model.state_dict().items()}, aside


def main() -> None:
    cases, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    rank, stages = ronde.world().rank, ronde.world().size
    for kind, name, *plan in cases:
        file = out / f"{kind}-{name}-{rank}"
        built = calm(build(getattr(foreign, kind), name))
        data = Samples(built.batch)
        micro = 1 if decomposes(built, data) else data.n
        built = calm(build(getattr(foreign, kind), name))
        optimizer = torch.optim.SGD(built.model.parameters(), lr=RATE, momentum=0.9)
        try:
            run = ronde.distribute(
                built.model,
                optimizer,
                data,
                loss=lambda value: value,
                forward=lambda model, ids, call=built.call, data=data: call(model, data.take(ids)),
                batch_size=data.n,
                shuffle=False,
                plan=f"{plan[0] if plan else f'pipeline={stages}'},micro_batch={micro}",
            )
        except (ronde.ArgumentError, ronde.PlanError) as error:
            file.with_suffix(".error").write_text(str(error))
            continue
        for _ in run.epochs(SOME_STEPS if plan else STEPS):
            for batch in run.batches():
                run.step(batch)
        held = {
            k: (v.full_tensor() if hasattr(v, "full_tensor") else v).detach().clone().contiguous()
            for k, v in built.model.state_dict(keep_vars=True).items()
            if run.port.strategy.owns(k)
        }
        rows = run.port.strategy.table() if hasattr(run.port.strategy, "table") else []
        table = [row["begins"] for row in rows]
        save_file(
            held,
            file.with_suffix(".safetensors"),
            {"table": json.dumps(table), "micro": str(micro)},
        )


if __name__ == "__main__":
    main()
