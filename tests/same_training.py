"""The same training under a plan as in one process: cases, the plain loop that they are compared
with, and the training of all ranks.

``forked.py -n WORKERS same_training.py CASES OUT`` is every rank of :func:`check`. No parameter here
has a gradient that is zero in exact arithmetic (a key bias, a bias before normalization): AdamW
would blow its rounding up.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader

import ronde
import sharded_models as sharded
import tensor_models as tensor
import tiny_models as tiny
import zygote
from processes import PATHS, forked
from ronde.feed import key_of, permute
from sampling import ALL
from tiny_models import Kind, call

STEPS_BEFORE_A_CHANGE = 3


def _translate(model: nn.Module, batch: Any) -> Any:
    return model(batch[0], batch[1][:, :-1])["logits"], batch[1][:, 1:]


KINDS = {
    "cnn": Kind(tiny.CNN, "cnn"),
    "norm": Kind(tiny.Norm, "cnn"),
    "transformer": Kind(tiny.Transformer, "transformer"),
    "tokens": Kind(tiny.Transformer, "tokens"),
    "lstm": Kind(tiny.DeepLSTM, "lstm"),
    "unused": Kind(tiny.Unused),
    "handed": Kind(tiny.Relay),
    "uneven": Kind(sharded.Uneven),
    "resnet": Kind(sharded.ResNet, "cnn"),
    "shared": Kind(sharded.SharedGPT, "transformer"),
    "shared-tokens": Kind(sharded.SharedGPT, "tokens"),
    "dropout": Kind(lambda: sharded.SharedGPT(0.3), "transformer"),
    "unseen": Kind(sharded.Unseen),
    **{name: Kind(model) for name, model in sharded.REFUSED.items()},
    "sparse": Kind(sharded.sparse, "lstm"),
    **{
        model.__name__: Kind(model, samples)
        for samples, models in {
            "cnn": (tiny.Residual, tiny.UNet),
            "transformer": (tiny.GPT,),
            "lstm": (tiny.LSTM, tiny.Masked),
            "mlp": (
                *(tiny.MLP, tiny.Odd, tiny.Frozen, tiny.Tables, tiny.Mixture, tiny.Dropping),
                *(tiny.Handed, tiny.Joined, tiny.Branch, tiny.Ending, tiny.Fourier),
                *(tiny.Rescaled, tiny.Switch, tiny.Tasks),
            ),
        }.items()
        for model in models
    },
    "EncoderDecoder": Kind(tiny.EncoderDecoder, "pairs", _translate),
    **tensor.MODELS,
}
FORWARDS = {  # the script's own way through its model
    "method": lambda model, batch: (model.last(torch.tanh(model.encode(batch[0]))), batch[1]),
    "logits": lambda model, batch: (model(batch[0])["logits"], batch[1]),
    "twice": lambda model, batch: (
        0.5 * (model(batch[0]) + model(batch[0].flip(0)).flip(0)),
        batch[1],
    ),
}


def mean_loss(output, target):
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def weighted_loss(output, target):
    """(sum, weight): the mean over the targets that count."""
    target = target.flatten()
    counts = target > 1
    each = F.cross_entropy(output.flatten(0, -2), target.clamp(min=0), reduction="none")
    return (each * counts).sum(), counts.sum()


def _value(loss: Any) -> torch.Tensor:
    return loss[0] / loss[1] if isinstance(loss, tuple) else loss


@dataclass(frozen=True)
class Case:
    """A training: a kind of model, a plan, and what a script says beside them."""

    kind: str
    plan: str = ""
    optimizer: str = "adamw"
    options: str = ""  # of the optimizer: foreach, fused
    n: int = 22
    batch: int = 8
    steps: int = 10
    clip: float | None = 0.1
    schedule: bool = True
    micro: bool = False  # four micro-batches a step
    shuffle: bool = False
    weighted: bool = False
    dtype: str = "float64"
    precision: str = "fp32"
    sync_batchnorm: bool = False
    own_loop: bool = False  # and clips by itself
    forward: str = ""
    change: str = ""  # "freezes", "thaws", "swaps" a layer, "assigns" a weight: in the middle
    warm: bool = False  # the optimizer has state before
    evaluate: bool = False  # with a metric, after each epoch
    average: bool = False
    split_at: Sequence[str] | None = None
    like: str = ""  # compared with the first case of that word: one process computes it otherwise
    refused: Sequence[str] = ()  # words of the error of every rank

    @property
    def name(self) -> str:
        plain = Case(self.kind)
        flags = [f"{k}={v}" for k, v in dataclasses.asdict(self).items() if v != getattr(plain, k)]
        return " ".join([self.kind, *flags])

    @property
    def bound(self) -> float:
        if self.like == "dropout":
            return 0.0
        return 1e-5 if self.dtype == "float32" else 1e-10 if self.plan else 1e-12

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        torch.manual_seed(7)
        model = KINDS[self.kind].build().to(getattr(torch, self.dtype)).train()
        with torch.no_grad():
            for p in model.parameters():
                if not p.any():  # nothing starts at zero: no layer is left out of the comparison
                    p.normal_(0, 0.1)
        given = list(model.parameters())
        extra = {self.options: True} if self.options else {}
        optimizer: torch.optim.Optimizer
        if self.optimizer == "sgd":
            optimizer = torch.optim.SGD(given, 0.1, 0.9, weight_decay=0.01, **extra)
        elif self.optimizer == "adamw":
            # two groups: their settings must be kept apart
            small, large = ([p for p in given if (p.ndim < 2) == less] for less in (True, False))
            groups = [{"params": large}, {"params": small, "weight_decay": 0.0, "lr": 2e-3}]
            optimizer = torch.optim.AdamW(groups, lr=5e-3, **extra)
        elif self.optimizer == "Prodigy":
            optimizer = type("Prodigy", (torch.optim.SGD,), {})(given, lr=0.1)
        else:
            matrices = [p for p in given if p.ndim == 2 or self.optimizer != "Muon"]
            optimizer = getattr(torch.optim, self.optimizer)(matrices, lr=0.01)
        if self.warm:
            _value(self.loss(*self.through(model, self.data()[:4]))).backward()
            optimizer.step()
            optimizer.zero_grad()
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda s: min(1.0, (s + 1) / 5) * 0.97**s
        )
        return model, optimizer, schedule if self.schedule else None

    def data(self) -> tiny.Samples:
        return tiny.Samples(KINDS[self.kind].samples, self.n, getattr(torch, self.dtype))

    @property
    def loss(self) -> Callable[[Any, Any], Any]:
        counted = self.weighted or KINDS[self.kind].samples == "tokens"
        return weighted_loss if counted else mean_loss

    @property
    def through(self) -> Callable[[nn.Module, Any], Any]:
        return FORWARDS[self.forward] if self.forward else KINDS[self.kind].forward

    def changes(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        if self.change == "freezes":
            first = next(iter(model.parameters()))
            frozen = STEPS_BEFORE_A_CHANGE <= step < 2 * STEPS_BEFORE_A_CHANGE
            first.requires_grad_(not frozen)
        if self.change == "thaws" and step == STEPS_BEFORE_A_CHANGE:
            model.requires_grad_(True)
        if self.change == "assigns" and step == STEPS_BEFORE_A_CHANGE:
            model[-1].weight = nn.Parameter(torch.zeros(model[-1].weight.shape))
        if self.change == "swaps" and step % STEPS_BEFORE_A_CHANGE == 0:
            now, aside = model[-1], vars(model).pop("aside", None)  # a module may have no child
            model[-1] = aside or copy.deepcopy(now)
            vars(model)["aside"] = now
            if aside is None:
                optimizer.add_param_group({"params": list(model[-1].parameters())})


def plain(case: Case) -> dict[str, torch.Tensor]:
    """By hand: one process, whole batches, nothing of Ronde. Weights, losses, evaluations."""
    model, optimizer, scheduler = case.build()
    averaged = [p.detach().clone() for p in model.parameters()]
    data, losses, scores = case.data(), [], []

    def whole() -> torch.Tensor:
        with torch.no_grad():
            return _value(case.loss(*case.through(model.eval(), data[:])))

    for epoch in itertools.count():
        ids = list(range(case.n))
        if case.shuffle:
            ids = list(permute(range(case.n), case.n, key_of(0, epoch)))
        model.train()
        for start in range(0, case.n, case.batch):
            optimizer.zero_grad()
            loss = _value(case.loss(*case.through(model, data[ids[start : start + case.batch]])))
            loss.backward()
            if case.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), case.clip)
            optimizer.step()
            if scheduler:
                scheduler.step()
            torch._foreach_lerp_(averaged, [p.detach() for p in model.parameters()], 0.1)
            losses.append(loss.detach())
            case.changes(model, optimizer, len(losses))
            if len(losses) == case.steps:
                break
        if case.evaluate:
            score = whole()
            output, target = case.through(model, data[:])
            # torchmetrics counts in float32
            right = (output.argmax(-1) == target).double().mean().float().double()
            scores += [score.double(), right]
        if len(losses) == case.steps:
            break
    state = {k: v.detach().clone() for k, v in model.state_dict().items()}
    state |= {"losses": torch.stack(losses), "evaluation": whole().double()}
    if scores:
        state["scores"] = torch.stack(scores)
    if case.average:
        with torch.no_grad():
            for p, average in zip(model.parameters(), averaged, strict=True):
                p.copy_(average)
        state["averaged"] = whole()
    return state


def by_ronde(case: Case) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The same through ``ronde.distribute``: what this worker holds at the end, and facts."""
    model, optimizer, scheduler = case.build()
    kind, size = KINDS[case.kind], ronde.world().size
    given = [len(group["params"]) for group in optimizer.param_groups]
    options: dict[str, Any] = {"plan": case.plan} if case.plan else {}
    if case.micro:
        options["micro_batch"] = max(1, math.ceil(math.ceil(case.batch / size) / 4))
    if case.through is not call:
        options["forward"] = case.through
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = ronde.distribute(
            model,
            optimizer,
            DataLoader(case.data(), case.batch, shuffle=case.shuffle),
            loss=case.loss,
            scheduler=scheduler,
            clip_norm=None if case.own_loop else case.clip,
            sync_batchnorm=case.sync_batchnorm,
            precision=case.precision,
            split_at=case.split_at,
            tensor_plan=kind.styles and kind.styles(),
            **options,
        )
    assert run.optimizer is optimizer
    if "pipeline" not in case.plan:  # whose stages keep their own
        assert [len(group["params"]) for group in optimizer.param_groups] == given
    average = run.average(decay=0.9) if case.average else None
    losses: list[torch.Tensor] = []
    scores: list[float] = []

    def passes_aside(micro: Any) -> None:
        # leaves whole parameters behind, not to be used by a backward pass or after the update
        with torch.no_grad():
            _ = case.sync_batchnorm or case.through(run.model, micro)

    for _ in run.epochs(10_000):
        for batch in run.batches():
            if case.own_loop:
                for micro in batch if isinstance(batch, ronde.MicroBatches) else [batch]:
                    loss = case.loss(*case.through(run.model, micro))
                    passes_aside(micro)
                    run.backward(loss)
                    passes_aside(micro)
                if case.clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), case.clip)
                losses.append(run.update())
            else:
                losses.append(run.step(batch))
            case.changes(model, optimizer, len(losses))
            if len(losses) == case.steps:
                break
        if case.evaluate:
            from torchmetrics.classification import MulticlassAccuracy  # seconds to import

            metric = {"accuracy": MulticlassAccuracy(tiny.CLASSES, average="micro")}
            score = run.evaluate(case.data(), metric)
            scores += [score["loss"], score["accuracy"]]
        if len(losses) == case.steps:
            break
    owned, facts = _owned(case, run, [str(w.message) for w in caught])
    evaluated = run.evaluate(case.data())["loss"]
    held = {
        **owned,
        "losses": torch.stack(losses),
        "evaluation": torch.tensor(evaluated, dtype=torch.float64),
    }
    if scores:
        held["scores"] = torch.tensor(scores, dtype=torch.float64)
    if average is not None:
        with average.applied():
            value = run.evaluate(case.data(), name="averaged")["loss"]
            held["averaged"] = torch.tensor(value, dtype=torch.float64)
        with run.whole_model() as whole:
            held |= {k: v.detach().clone() for k, v in whole.state_dict().items()}
    return held, facts


def _part(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if hasattr(value, "to_local") else value


def _owned(case: Case, run: Any, said: list[str]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Whole weights of what this worker holds; how much that is, and how the model was divided."""
    model, strategy, weights = run.model, run.port.strategy, {}
    for name, value in model.state_dict(keep_vars=True).items():
        if strategy.owns(name):
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            weights[name] = whole.detach().clone()
            # a checkpoint asks each divided parameter which box of the whole is here
            if hasattr(value, "full_tensor") and "tensor=" in case.plan:
                (chunk,) = value.__create_chunk_list__()
                ends = zip(chunk.offsets, chunk.sizes, strict=True)
                assert whole[tuple(slice(o, o + n) for o, n in ends)].equal(_part(value)), name
    parameters, divided = list(model.parameters()), getattr(strategy, "divided", None)
    states = [v for s in run.optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
    return weights, {
        "parameters": sum(p.numel() for p in parameters),
        "local_parameters": sum(_part(p).numel() for p in parameters),
        "state": sum(_part(v).numel() for v in states if v.dim()),
        "gradients": sum(_part(p.grad).numel() for p in parameters if p.grad is not None),
        "table": strategy.table() if hasattr(strategy, "table") else [],
        "blocks": len(divided.blocks) if divided else None,
        "said": [text for text in said if text.startswith("tensor=")],
    }


def worker(listing: Path, out: Path) -> None:
    """Every rank: what the plain loops find, a part of them each, before anything of Ronde ran; then
    each case together.
    """
    me = ronde.world()
    cases = [Case(**values) for values in json.loads(listing.read_text())]

    def write(name: str, values: dict[str, torch.Tensor], facts: object = None) -> None:
        alone = {k: v.detach().contiguous().clone() for k, v in values.items()}
        save_file(alone, out / f"{name}.safetensors", {"facts": json.dumps(facts)})

    for i, case in enumerate(cases):
        if i % me.size == me.rank and not (case.refused or case.like):
            write(f"{i}-plain", plain(case))
    for i, case in enumerate(cases):
        try:
            write(f"{i}-{me.rank}", *by_ronde(copy.deepcopy(case)))
        except ronde.RondeError as error:
            (out / f"{i}-{me.rank}.error").write_text(f"{type(error).__name__}: {error}")


# -- what the tests call ---------------------------------------------------------------


def largest_difference(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], aside: str = "$^"
) -> tuple[float, str]:
    """Of any element that is here, relative to the largest of its tensor; and where.

    ``aside``: names that are not compared.
    """
    worst, where = 0.0, ""
    for name, got in actual.items():
        want = expected[name].double()
        apart = (got.double() - want).abs().max() / want.abs().max().clamp(min=1e-30)
        difference = float(apart.nan_to_num(nan=math.inf))
        if difference > worst and not re.search(aside, name):
            worst, where = difference, name
    return worst, where


def launch(cases: list[Case], workers: int, folder: Path, imports: Sequence[str] = ()) -> Path:
    """Train on so many real processes; the folder in which each rank wrote what it holds."""
    listing, out = folder / "cases.json", folder / "out"
    out.mkdir()
    listing.write_text(json.dumps([dataclasses.asdict(c) for c in cases]))
    quiet = {"PYTHONWARNINGS": "ignore", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    done = zygote.run(
        forked(Path(__file__), workers, listing, out, imports=imports),
        env={**os.environ, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1", **quiet},
        cwd=folder,
        timeout=1500 if ALL else 300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def check(
    cases: list[Case], workers: int, folder: Path, imports: Sequence[str] = ()
) -> list[list[dict[str, Any]]]:
    """Train all cases and compare every rank with a plain loop, and ranks with each other, bit by
    bit. Returns the facts of each case and rank.
    """
    out, wrong, facts = launch(cases, workers, folder, imports), [], []
    for i, case in enumerate(cases):
        errors = [out / f"{i}-{rank}.error" for rank in range(workers)]
        said = [file.read_text() if file.exists() else "" for file in errors]
        if case.refused or any(said):
            missing = [w for w in case.refused if not all(w in text for text in said)]
            if missing or not case.refused:
                wrong.append(f"{case.name}: {missing} not in {said}")
            facts.append([])
            continue
        files = [out / f"{i}-{rank}.safetensors" for rank in range(workers)]
        ranks = [load_file(file) for file in files]
        if case.like:
            expected = load_file(out / f"{[c.like for c in cases].index(case.like)}-0.safetensors")
        else:
            expected = load_file(out / f"{i}-plain.safetensors")
        apart = [largest_difference(rank, expected, KINDS[case.kind].aside) for rank in ranks]
        print(f"{workers} workers {case.name}: {max(apart)}")
        wrong += [
            f"{case.name}, rank {rank}: {where} differs by {difference:.1e}"
            for rank, (difference, where) in enumerate(apart)
            if not difference <= case.bound
        ]
        if missing := expected.keys() - set().union(*ranks):
            wrong.append(f"{case.name}: nobody holds {sorted(missing)}")
        for name in expected:
            copies = [rank[name] for rank in ranks if name in rank]
            if not re.search("running|num_batches", name) and not all(
                copies[0].equal(other) for other in copies
            ):
                wrong.append(f"{case.name}: ranks differ in {name}")
        kept = [rank.keys() - {"losses", "evaluation"} for rank in ranks]
        divided = "pipeline" in case.plan and case.kind != "Frozen" and not case.average
        if divided and all(names == kept[0] for names in kept):
            wrong.append(f"{case.name}: every worker holds everything")
        facts.append([])
        for file in files:
            with safe_open(file, "pt") as read:
                facts[-1].append(json.loads(read.metadata()["facts"]))
        here = facts[-1][0]
        if "tensor=" in case.plan and "pipeline" not in case.plan:
            if here["blocks"] != KINDS[case.kind].blocks:
                wrong.append(f"{case.name}: {here['blocks']} blocks were split")
            if not here["local_parameters"] < here["parameters"]:
                wrong.append(f"{case.name}: every worker holds everything")
    assert not wrong, "\n".join(wrong)
    return facts


if __name__ == "__main__":
    worker(Path(sys.argv[1]), Path(sys.argv[2]))
