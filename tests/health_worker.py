"""What ``--watch`` measures under plans, against one process that measures with plain torch.
``python health_worker.py FOLDER PLAN:WORKERS…``; prints JSON.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import ronde
from forked import forget_runs, fork
from ronde.run import health
from tiny_models import LENGTH, VOCABULARY, Transformer

NAMES = ("gradient", "weight", "update", "same")
health.rounded = lambda value: value  # all digits
STEPS = 8


class Layers(nn.Module):
    """Kinds of layers; ``relu`` has dead units."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 4, 3)
        self.relu = nn.ReLU()
        self.mid = nn.Linear(4 * (LENGTH - 2), 6)
        self.act = nn.Tanh()
        self.head = nn.Linear(6, VOCABULARY)
        with torch.no_grad():
            self.conv.bias[1] -= 50.0
            self.mid.bias[2] += 50.0

    def forward(self, x):
        x = torch.where(x > 99, torch.nan, x.double())
        x = self.relu(self.conv(x[:, None] / VOCABULARY))
        return self.head(self.act(self.mid(x.flatten(1))))[:, None]


class Oracle:
    """Norms by plain torch in one process: what the model has is the whole."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.lines = model, []
        self.outputs: dict[str, list[torch.Tensor]] = {}
        for name, module in model.named_modules():
            if not list(module.children()):
                module.register_forward_hook(
                    lambda m, i, out, name=name: self.outputs.setdefault(name, []).append(
                        out.detach().clone()
                    )
                )

    def batch_taken(self, step) -> None:
        self.outputs.clear()

    def before_clip(self, step) -> None:
        self.before = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        self.found = [
            None if p.grad is None else float(p.grad.norm()) for p in self.model.parameters()
        ]

    def step_ended(self, step) -> None:
        after = dict(self.model.named_parameters())
        pairs = [(after[n].detach(), w) for n, w in self.before.items()]
        outputs = {n: torch.cat(x) for n, x in self.outputs.items()}
        self.lines.append(
            {
                "gradient": self.found,
                "weight": [float(a.norm()) for a, _ in pairs],
                "update": [float((a - b).norm()) for a, b in pairs],
                "same": [float((a == b).double().mean()) for a, b in pairs],
                "rms": {n: float(x.square().mean().sqrt()) for n, x in outputs.items()},
                "silent": (outputs["relu"].amax((0, 2)) <= 0).tolist()
                if "relu" in outputs
                else None,
                "saturated": float((outputs["act"].abs() > 1 - 1e-4).double().mean())
                if "act" in outputs
                else None,
            }
        )


def loss(output, target):
    return F.cross_entropy(output[:, 0], target)


def rows(bad: bool) -> TensorDataset:
    g = torch.Generator().manual_seed(0)
    x, y = (torch.randint(VOCABULARY, s, generator=g) for s in ((96, LENGTH), (96,)))
    if bad:
        x[40] += 100
    return TensorDataset(x, y)


def train(where: Path, plan: str, kind: str, watch: bool | int, oracle: bool = False) -> None:
    os.environ |= {"RONDE_RUN_DIR": str(where), "RONDE_RESUME": "0", "RONDE_PROGRESS": "quiet"}
    where.mkdir(parents=True, exist_ok=True)
    forget_runs()
    torch.manual_seed(7)
    model = (Layers() if kind != "net" else Transformer()).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    measured = Oracle(model) if oracle else None
    run = ronde.distribute(
        model, optimizer, rows(kind == "bad"), loss=loss, batch_size=12, clip_norm=0.5, seed=3,
        plan=plan, watch=watch, callbacks=[measured] if measured else [],
    )  # fmt: skip
    try:
        for batch in run.batches():
            run.step(batch)
    except ronde.LossError:
        atexit._run_exitfuncs()
        return
    run.export(where / "final.safetensors")
    if measured:
        (where / "oracle.json").write_text(json.dumps(measured.lines))
    atexit._run_exitfuncs()


def lines(where: Path, kind: str) -> list[dict]:
    found = map(json.loads, (where / health.HEALTH).read_text().splitlines())
    return [line for line in found if line["type"] == kind]


def furthest(where: Path, oracle: Path) -> float:
    """The largest relative difference of a number."""
    told, worst = json.loads((oracle / "oracle.json").read_text()), 0.0
    mine = lines(where, "health")
    assert [line["step"] for line in mine] == list(range(1, STEPS + 1))
    for line, true in zip(mine, told, strict=True):
        assert line["samples"] == [12 * (line["step"] - 1), 12 * line["step"]]
        assert not line["bad_ranks"]
        for name in NAMES:
            for a, b in zip(line[name], true[name], strict=True):
                assert (a is None) == (b is None), (name, line, true)
                worst = max(worst, 0.0 if a is None else abs(a - b) / max(abs(b), 1e-12))
    layers = (lines(where, "tensors")[-1]["layers"]) if "layers" in where.name else []
    measured = lines(where, "activations") if layers else ()
    for step, (line, true) in enumerate(zip(measured, told, strict=bool(layers)), 1):
        always = [all(each) for each in zip(*(t["silent"] for t in told[:step]), strict=True)]
        true["dead"] = sum(always) / len(always) if step >= 8 else 0.0
        for i, name in enumerate(layers):
            worst = max(worst, abs(line["rms"][i] / true["rms"][name] - 1))
        for name, at in (("dead", "relu"), ("saturated", "act")):
            assert line[name][layers.index(at)] == true[name], (name, line, true)
        assert true["saturated"] > 0
        assert step < STEPS or 0 < true["dead"] < 1
    return worst


def main(folder: Path, plans: list[str]) -> None:
    results = {}
    for kind in ("net", "layers"):
        fork(1, lambda kind=kind: train(folder / f"one-{kind}", "replicate", kind, False, True))
    for each in plans:
        plan, _, workers = each.rpartition(":")
        kinds = ["net"] if "tensor" in plan else ["net", "layers"]
        for kind in kinds:
            name = f"{plan}-{workers}-{kind}"
            for watch in (False, True) if kind == "net" else (True,):
                at = folder / f"{name}-{watch}"
                fork(int(workers), lambda a=at, k=kind, w=watch: train(a, plan, k, w))
            results[name] = [furthest(folder / f"{name}-True", folder / f"one-{kind}"), True]
            if kind == "net":
                off, on = (folder / f"{name}-{w}" / "final.safetensors" for w in (False, True))
                results[name][1] = off.read_bytes() == on.read_bytes()
    for each in plans:
        plan, _, workers = each.rpartition(":")
        name = f"{plan}-{workers}-bad"
        fork(int(workers), lambda n=name, p=plan: train(folder / n, p, "bad", 1))
        results[name] = lines(folder / name, "health")[-1]
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
