"""Sharding and recomputation: the same training as a plain loop, with memory that is really
divided.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import json
import math
import os
import subprocess
import sys
import time
import weakref
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

import ronde
import zygote
from equality_cases import (
    MODELS,
    Case,
    largest_difference,
    mean_loss,
    plain_loop,
)
from processes import PATHS, TESTS, forked
from ronde.parallel import fsdp, recompute
from sampling import ALL, some
from tiny_models import CLASSES, LENGTH, VOCABULARY, Samples

BOUND = 1e-10


# -- models ----------------------------------------------------------------------------


class MLP(nn.Sequential):
    """Layers of uneven sizes, none a multiple of the number of workers."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(6, 17),
            nn.Tanh(),
            nn.Linear(17, 5),
            nn.Tanh(),
            nn.Linear(5, 23),
            nn.Tanh(),
            nn.Linear(23, CLASSES),
        )


class Residual(nn.Module):
    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        # a bias before normalisation has no gradient in exact arithmetic
        self.a = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.b = nn.Conv2d(width, width, 3, padding=1)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.b(F.gelu(self.norm(self.a(x)))))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 5, 3)
        self.layer1 = nn.Sequential(Residual(5), Residual(5))
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x):
        return self.head(self.layer1(self.stem(x)).mean((2, 3)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(dropout)
        self.norm_a, self.norm_b = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x, mask):
        b, t, w = x.shape
        q, k, v = (
            self.qkv(self.norm_a(x))
            .view(b, t, 3, self.heads, w // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(b, t, w)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm_b(x)))))


class GPT(nn.Module):
    """Embedding and head tied, two blocks that share a layer, a temperature without dimensions, a
    frozen parameter.
    """

    def __init__(self, dropout: float = 0.0, width: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.randn(LENGTH, width) * 0.1)
        self.register_buffer(
            "mask", torch.triu(torch.full((LENGTH, LENGTH), float("-inf")), 1), persistent=False
        )
        self.blocks = nn.ModuleList(Block(width, 2, dropout) for _ in range(4))
        self.blocks[3].down = self.blocks[1].down
        self.blocks[2].out.weight.requires_grad_(False)
        self.temperature = nn.Parameter(torch.tensor(1.3))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.hidden(tokens)) * self.temperature

    def hidden(self, tokens):
        x = self.embed(tokens) + self.position
        for block in self.blocks:
            x = block(x, mask=self.mask.to(x.dtype))
        return x


class Odd(nn.Module):
    """Used in ways that FSDP2's hooks do not see: by a method, by a layer's weight, one block
    several times, one never.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(4)
        )
        self.last = nn.Linear(6, CLASSES)

    def encode(self, x):
        x = self.layers[0](x) + self.layers[0](x * 0.5)
        return F.linear(x, self.layers[1][0].weight) + self.layers[2](x)

    def forward(self, x):
        return self.last(torch.tanh(self.encode(x)))


KINDS = {
    "mlp": MLP,
    "resnet": ResNet,
    "gpt": GPT,
    "gpttokens": GPT,
    "dropout": lambda: GPT(0.3),
    "odd": Odd,
}
KINDS = {**MODELS, **KINDS}
DATA = {
    "resnet": "cnn",
    "gpt": "transformer",
    "gpttokens": "tokens",
    "dropout": "transformer",
}
FORWARDS = {  # the script's own way through its model
    "method": lambda model, batch: (model.last(torch.tanh(model.encode(batch[0]))), batch[1]),
    "twice": lambda model, batch: (
        0.5 * (model(batch[0]) + model(batch[0].flip(0)).flip(0)),
        batch[1],
    ),
}


def token_loss(output, target):
    total = F.cross_entropy(
        output.flatten(0, -2), target.flatten(), ignore_index=-100, reduction="sum"
    )
    return total, (target != -100).sum()


@dataclass(frozen=True)
class Sharded(Case):
    plan: str = "shard"
    own_loop: bool = False
    forward: str = ""
    freeze_at: int = (
        0  # from this step on the first parameter is frozen, from twice this step on no longer
    )
    evaluate: bool = False
    precision: str = "fp32"
    steps: int = 10

    @property
    def name(self) -> str:
        flags = [
            f"{k}={v}"
            for k, v in dataclasses.asdict(self).items()
            if v != getattr(Sharded("x"), k) and k not in ("kind", "plan")
        ]
        return f"{self.kind} {self.plan} {' '.join(flags)}"

    def model(self):
        return KINDS[self.kind]()

    def build(self):
        if self.optimizer == "adamw":
            return super().build()
        torch.manual_seed(7)
        model = self.model().to(getattr(torch, self.dtype))
        parameters = list(model.parameters())
        if self.optimizer == "sgd":
            fused = self.kind == "mlp"  # which shards have no step for
            optimizer = torch.optim.SGD(parameters, 0.1, 0.9, weight_decay=0.01, fused=fused)
        else:
            matrices = [p for p in parameters if p.ndim == 2 or self.optimizer != "Muon"]
            optimizer = getattr(torch.optim, self.optimizer)(matrices, lr=0.01)
        return model, optimizer, self.scheduler(optimizer)

    def loss(self):
        return token_loss if DATA.get(self.kind, self.kind) == "tokens" else mean_loss

    def data(self):
        return Samples(DATA.get(self.kind, self.kind), self.n, getattr(torch, self.dtype))

    def freeze(self, model, step: int) -> None:
        if self.freeze_at:
            first = next(iter(model.parameters()))
            first.requires_grad_(not self.freeze_at <= step < 2 * self.freeze_at)


def plain(case: Sharded) -> dict[str, torch.Tensor]:
    """One process, whole batches, nothing of Ronde: whatever the plan."""
    return _plain(dataclasses.replace(case, plan="", own_loop=False, micro=False))


@functools.cache
def _plain(case: Sharded) -> dict[str, torch.Tensor]:
    if not (case.forward or case.freeze_at or case.evaluate):
        return plain_loop(case)
    model, optimizer, scheduler = case.build()
    data = case.data()
    forward = FORWARDS.get(case.forward, lambda model, batch: (model(batch[0]), batch[1]))
    losses, scores = [], []
    while len(losses) < case.steps:
        for batch in itertools.islice(DataLoader(data, case.batch), case.steps - len(losses)):
            optimizer.zero_grad()
            case.freeze(model, len(losses))
            loss = case.loss()(*forward(model, batch))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
            optimizer.step()
            scheduler.step()
            losses.append(loss.detach())
        if case.evaluate:
            model.eval()
            with torch.no_grad():
                output = model(data.x)
            # torchmetrics counts in float32
            accuracy = (output.argmax(-1) == data.y).double().mean().float()
            scores.append(torch.stack([case.loss()(output, data.y), accuracy.double()]))
            model.train()
    extra = {"scores": torch.stack(scores)} if scores else {}
    return {
        **{k: v.clone() for k, v in model.state_dict().items()},
        "losses": torch.stack(losses),
        **extra,
    }


# -- what every rank runs --------------------------------------------------------------


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def part(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def sharded_loop(case: Sharded):
    from torchmetrics.classification import MulticlassAccuracy  # takes seconds to import

    model, optimizer, scheduler = case.build()
    given = [len(g["params"]) for g in optimizer.param_groups]
    run = ronde.distribute(
        model,
        optimizer,
        DataLoader(case.data(), case.batch, shuffle=False),
        loss=case.loss(),
        forward=FORWARDS.get(case.forward),
        scheduler=scheduler,
        clip_norm=case.clip,
        micro_batch=max(1, math.ceil(math.ceil(case.batch / ronde.world().size) / 4))
        if case.micro
        else None,
        sync_batchnorm=case.sync_batchnorm,
        precision=case.precision,
        plan=case.plan,
    )
    assert (
        run.optimizer is optimizer and [len(g["params"]) for g in optimizer.param_groups] == given
    )
    losses, scores = [], []
    for _ in run.epochs(10_000):
        for batch in run.batches():
            if case.own_loop:
                for x, y in batch if isinstance(batch, ronde.MicroBatches) else [batch]:
                    run.backward(case.loss()(run.model(x), y))
                    if case.kind == "gpttokens":
                        with torch.no_grad():
                            # leaves whole parameters behind, which must not be used after the
                            # update
                            run.model(x)
                losses.append(run.update())
            else:
                case.freeze(model, len(losses))
                losses.append(run.step(batch))
            if len(losses) == case.steps:
                break
        if case.evaluate:
            score = run.evaluate(
                case.data(), {"accuracy": MulticlassAccuracy(CLASSES, average="micro")}
            )
            scores.append(torch.tensor([score["loss"], score["accuracy"]], dtype=torch.float64))
        if len(losses) == case.steps:
            break
    held = model.state_dict(keep_vars=True)
    weights = {k: whole(v).detach().clone() for k, v in held.items()}
    held = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "local_parameters": sum(part(p).numel() for p in model.parameters()),
        "state": sum(
            part(v).numel()
            for s in optimizer.state.values()
            for v in s.values()
            if isinstance(v, torch.Tensor) and v.dim()
        ),
        "gradients": sum(part(p.grad).numel() for p in model.parameters() if p.grad is not None),
    }
    extra = {"scores": torch.stack(scores)} if scores else {}
    return {**weights, "losses": torch.stack(losses), **extra}, held


def refusals() -> dict[str, str]:
    """What cannot be carried out, and the errors that say so."""
    errors = {}

    def attempt(name, model, plan, optimizer=None, **options):
        data = options.pop("data", None) or Samples("mlp", 8, torch.float32)
        try:
            run = ronde.distribute(
                model,
                optimizer or torch.optim.SGD(model.parameters(), lr=0.1),
                data,
                loss=mean_loss,
                batch_size=4,
                plan=plan,
                **options,
            )
            for batch in itertools.islice(run.batches(), 4):
                run.step(batch)
            errors[name] = "no error"
        except ronde.RondeError as error:
            errors[name] = f"{type(error).__name__}: {error}"

    for name in ("Adafactor", "Rprop", "Muon"):
        model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, CLASSES, bias=False))
        attempt(name, model, "shard", getattr(torch.optim, name)(model.parameters()))
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, CLASSES).double())
    attempt("types", nn.Sequential(model), "shard")
    embedding = nn.Sequential(
        nn.Embedding(VOCABULARY, 4, sparse=True), nn.Flatten(), nn.Linear(4 * LENGTH, CLASSES)
    )
    attempt("sparse", embedding, "zero2")
    attempt("within", MLP(), "shard,shard_within=3")
    attempt("offload", MLP(), "shard,offload=parameters")
    model = MLP()
    prodigy = type("Prodigy", (torch.optim.SGD,), {})(model.parameters(), lr=0.1)
    attempt("coupled", model, "zero1", prodigy)

    class Dropping(MLP):  # a layer that one worker leaves out
        def forward(self, x):
            for i, layer in enumerate(self):
                if i != 2 or ronde.world().rank == 0 or not torch.is_grad_enabled():
                    x = layer(x)
                else:
                    x = x[:, :5]
            return x

    # each worker leaves another layer of one size out, in a pass that is not looked at
    class Shuffling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
            self.last = nn.Linear(6, CLASSES)
            self.passes = 0

        def forward(self, x):
            self.passes += self.training
            for i, layer in enumerate(self.layers):
                if self.passes != 3 or i != ronde.world().rank + 1:
                    x = layer(x)
            return self.last(x)

    attempt("early", Shuffling(), "shard", data=Samples("mlp", 16, torch.float32))
    first, fsdp._CHECKED_PASSES = fsdp._CHECKED_PASSES, 0
    attempt("mixed", Shuffling(), "shard", data=Samples("mlp", 16, torch.float32))
    fsdp._CHECKED_PASSES = first
    attempt("ways", Dropping(), "shard")
    return errors


def worker(listing: Path, out: Path) -> None:
    import torch.distributed as dist

    me = ronde.world()
    facts: dict = {"held": []}
    for i, values in enumerate(json.loads(listing.read_text())):
        before = time.perf_counter()
        result, held = sharded_loop(Sharded(**values))
        if me.is_main:
            print(
                f"{time.perf_counter() - before:.2f} s", values["kind"], values["plan"], flush=True
            )
        for name, tensor in result.items():
            mine = tensor.clone()
            dist.broadcast(mine, 0)
            assert mine.equal(tensor) or "running" in name or "num_batches" in name, (
                f"{name}: rank {me.rank} differs from rank 0 in {values}"
            )
        everyone = [None] * me.size
        dist.all_gather_object(everyone, held)
        facts["held"].append(everyone)
        if me.is_main:
            save_file(
                {k: v.contiguous().clone() for k, v in result.items()}, out / f"{i}.safetensors"
            )
    if me.size == 2:
        facts["errors"] = refusals()
    if me.is_main:
        (out / "facts.json").write_text(json.dumps(facts))


def start(cases: list[Sharded], workers: int, folder: Path, timeout: float = 300):
    """Train the cases on ``workers`` real processes; what rank 0 ended with, and what every rank
    held.
    """
    listing, out = folder / "cases.json", folder / "out"
    out.mkdir()
    listing.write_text(json.dumps([dataclasses.asdict(c) for c in cases]))
    done = zygote.run(
        forked(
            TESTS / "parallel" / "test_fsdp.py",
            workers,
            listing,
            out,
            imports=["torch.distributed.fsdp", "torchmetrics.classification"],
        ),
        env={
            **os.environ,
            "PYTHONPATH": PATHS,
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        },
        cwd=folder,
        timeout=timeout,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    return [load_file(out / f"{i}.safetensors") for i in range(len(cases))], json.loads(
        (out / "facts.json").read_text()
    )


# -- the tests -------------------------------------------------------------------------

LEVELS = ("shard=optimizer", "shard=gradients", "shard=parameters")
COMMON = [
    *(Sharded("mlp", "adamw", plan=plan, evaluate=True) for plan in LEVELS),
    *(Sharded("gpt", "adamw", plan=plan) for plan in LEVELS),
    *(Sharded("gpttokens", "sgd", plan=plan, micro=True) for plan in LEVELS),
]
# Compared with each other, since one process computes these otherwise: in half precision it rounds
# otherwise, and it drops others out.
HALF = [
    Sharded("gpt", "sgd", plan=p, precision=h, dtype="float32", steps=5)
    for h in ("fp16", "bf16")
    for p in ("replicate", *LEVELS)
]
DROPOUT = [
    Sharded("dropout", "adamw", plan=p, steps=4)
    for p in ("shard", "shard,recompute=full", "shard,recompute=selective")
]
CASES = {
    2: [
        *COMMON,
        *(Sharded("resnet", "sgd", plan=plan, sync_batchnorm=True, n=24) for plan in LEVELS),
        *(Sharded("lstm", "adamw", plan=plan) for plan in LEVELS),
        *(Sharded("unused", "adamw", plan=plan, clip=None) for plan in LEVELS),
        Sharded("unused", "sgd", micro=True),
        *(Sharded("handed", "sgd", plan=plan) for plan in LEVELS),
        Sharded("odd", "adamw"),
        Sharded("odd", "adamw", forward="method"),
        Sharded("mlp", "sgd", forward="twice"),
        *(Sharded("mlp", "adamw", plan=plan, freeze_at=3) for plan in LEVELS),
        Sharded("gpttokens", "adamw", own_loop=True, micro=True),
        Sharded("resnet", "adamw", own_loop=True, sync_batchnorm=True, n=24, batch=7),
        Sharded("gpt", "adamw", plan="shard,recompute=full"),
        Sharded("gpt", "sgd", plan="shard=gradients,recompute=selective", micro=True),
        Sharded("resnet", "sgd", plan="shard,recompute=full", sync_batchnorm=True, n=24),
        Sharded("resnet", "sgd", plan="recompute=selective", sync_batchnorm=True, n=24),
        *HALF,
        *DROPOUT,
        *(
            Sharded("mlp", o, plan="shard=optimizer", steps=5)
            for o in ("Adafactor", "Rprop", "Adagrad", "ASGD", "NAdam")
        ),
        *(
            Sharded("mlp", o, steps=5)
            for o in ("Adagrad", "ASGD", "NAdam", "Adadelta", "RAdam", "RMSprop", "Adamax", "Adam")
        ),
    ],
    3: [
        *COMMON[::2],
        Sharded("resnet", "adamw", sync_batchnorm=True, batch=7, n=23),
        Sharded("lstm", "sgd", batch=1, n=3, evaluate=True),
    ],
    4: [
        COMMON[5],
        *(
            Sharded(
                "gpttokens", "adamw", plan=f"{level},shard_within=2", micro=True, evaluate=False
            )
            for level in LEVELS
        ),
        Sharded("mlp", "sgd", plan="shard,shard_within=2", evaluate=True, batch=5, n=13),
        Sharded(
            "resnet",
            "sgd",
            plan="shard=gradients,shard_within=2,recompute=full",
            sync_batchnorm=True,
            batch=8,
            n=24,
        ),
    ],
}


# every third, with those that others are compared with; of optimizers alone, every fourth
if not ALL:
    compared = [HALF[0], HALF[3], HALF[4], HALF[7], DROPOUT[0], DROPOUT[2]]
    others = [case for case in CASES[2][len(COMMON) : -13] if case not in (*HALF, *DROPOUT)]
    CASES = {
        2: [*COMMON[::4], *others[::10], *compared, *CASES[2][-13::6]],
        3: CASES[3][1::2],
        4: CASES[4][5:],
    }


@pytest.mark.timeout(320)
@pytest.mark.parametrize("workers", [2, 3, 4] if ALL else [2, 4])
def test_the_same_training_as_a_plain_loop(workers, tmp_path):
    cases = CASES[workers]
    actual, facts = start(cases, workers, tmp_path)
    failures = []
    results = dict(zip(cases, actual, strict=True))
    for case, result in results.items():
        like = next(
            (c for group in (HALF[:4], HALF[4:], DROPOUT) for c in group[:1] if case in group), None
        )
        difference, where = largest_difference(result, results[like] if like else plain(case))
        print(f"{workers} workers {case.name}: {difference:.1e} ({where})")
        if not difference <= (1e-5 if case in HALF else 0.0 if case in DROPOUT else BOUND):
            failures.append(f"{case.name}: {where} differs by {difference:.2e}")
    assert not failures, "\n".join(failures)
    for case, everyone in zip(cases, facts["held"], strict=True):
        check_memory(case, everyone, workers)
    if workers == 2:
        check_refusals(facts["errors"])


def check_memory(case: Sharded, everyone: list[dict], workers: int) -> None:
    """Every worker holds its part only: of the optimizer's state, of the gradients, of the
    parameters.
    """
    if "shard" not in case.plan or case.kind not in ("mlp", "gpt"):
        return
    divided_by = 2 if "within" in case.plan else workers
    total = everyone[0]["parameters"]
    copies = workers // divided_by
    trained = plain_state(case)
    slack = 0.25 * total / divided_by + 40  # dimensions that do not divide evenly
    assert sum(held["state"] for held in everyone) == trained * copies, (
        case.name,
        everyone,
        trained,
    )
    assert all(held["state"] <= trained / divided_by + 2 * slack for held in everyone), (
        case.name,
        everyone,
    )
    for field in ("local_parameters", "gradients"):
        most = max(held[field] for held in everyone)
        if "optimizer" in case.plan:
            assert most > 0.9 * total * (field == "local_parameters"), (case.name, everyone)
        else:
            assert most <= total / divided_by + slack, (case.name, field, everyone)


def plain_state(case: Sharded) -> int:
    """Elements of the optimizer's state after one step of one process."""
    model, optimizer, _ = case.build()
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    optimizer.step()
    scalars = sum(
        v.numel() for p, s in optimizer.state.items() if p.dim() == 0 for v in s.values() if v.dim()
    )
    return (
        sum(
            v.numel()
            for s in optimizer.state.values()
            for v in s.values()
            if isinstance(v, torch.Tensor) and v.dim()
        )
        - scalars
    )


REFUSED = {
    "Adafactor": ["Adafactor", "shard='optimizer'"],
    "Rprop": ["Rprop", "shard='optimizer'"],
    "Muon": ["Muon", "shard='optimizer'"],
    "types": ["float32", "float64", "shard='optimizer'"],
    "sparse": ["'0'", "sparse=False"],
    "within": ["shard_within=3", "divisor", "2 replicas"],
    "offload": ["offload='parameters'", "nothing to offload to"],
    "coupled": ["Prodigy", "shard='none'"],
    "early": ["rank 0: 'layers.2'", "rank 1: 'layers.1'"],
    "mixed": ["different ways", "step 3", "shard='optimizer'"],
    "ways": ["rank 0: '2'", "rank 1: '4'", "shard='optimizer'"],
}


def check_refusals(errors: dict[str, str]) -> None:
    assert errors.keys() == REFUSED.keys()
    for name, words in REFUSED.items():
        missing = [w for w in words if w not in errors[name]]
        assert errors[name].startswith(("ArgumentError", "PlanError")) and not missing, (
            name,
            missing,
            errors[name],
        )


def test_the_comparison_can_fail():
    case = Sharded("gpt", "adamw")
    difference, _ = largest_difference(plain(case), plain(dataclasses.replace(case, clip=0.11)))
    assert difference > 1e-6


class Counter(nn.Module):
    """Reads a buffer that it changes in every forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        return self.inner(x) * (1 + 0.1 * self.seen)


def trained(model: nn.Module, data, steps: int = 4) -> tuple[list[torch.Tensor], dict]:
    torch.manual_seed(3)
    for p in model.parameters():
        p.grad = None
    gradients = []
    for i in range(steps):
        loss = mean_loss(model(data.x[i * 4 : i * 4 + 4]), data.y[i * 4 : i * 4 + 4])
        loss.backward()
        gradients.append(loss.detach())
    return [
        *gradients,
        *(p.grad for p in model.parameters() if p.grad is not None),
    ], model.state_dict()


@pytest.mark.parametrize(
    ("kind", "level"),
    some(list(itertools.product(["dropout", "resnet", "counter"], ["full", "selective"])), 5),
)
def test_recomputed_activations_are_those_of_the_first_pass(kind, level):
    """Dropout, running statistics and counting buffers included: bit for bit, and no name
    changes.
    """
    torch.manual_seed(0)
    model = (
        KINDS[kind]()
        if kind != "counter"
        else nn.Sequential(Counter(), Counter(), nn.Linear(6, CLASSES))
    ).double()
    data = Samples(DATA.get(kind, "mlp"), 16, torch.float64)
    again = copy.deepcopy(model)
    names = recompute.apply(again, level)
    assert names and list(again.state_dict()) == list(model.state_dict())
    third = copy.deepcopy(again)  # a copy runs itself, not what it was copied from
    (wanted, state), (actual, state_again), (copied, _) = (
        trained(model, data),
        trained(again, data),
        trained(third, data),
    )
    assert len(wanted) == len(actual) and all(
        a.equal(b) for a, b in zip(wanted, actual, strict=True)
    )
    assert all(a.equal(b) for a, b in zip(wanted, copied, strict=True))
    assert all(state[k].equal(state_again[k]) for k in state)


class Alive(TorchDispatchMode):
    """Bytes of the results that outlive the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, torch.Tensor):
                self.made.append(weakref.ref(t.untyped_storage()))
        return result

    def bytes(self, model: nn.Module) -> int:
        own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
        alive = {s.data_ptr(): s.nbytes() for s in (ref() for ref in self.made) if s is not None}
        return sum(n for place, n in alive.items() if place not in own)


def test_recomputation_keeps_less():
    kept = {}
    tokens = torch.randint(VOCABULARY, (8, LENGTH))
    for level in ("none", "selective", "full"):
        torch.manual_seed(0)
        model = GPT(0.1, width=24)
        recompute.apply(model, level)
        with Alive() as alive:
            out = model(tokens)
        kept[level] = alive.bytes(model)
        del out
    print(kept)
    assert kept["full"] < 0.4 * kept["none"]
    assert kept["full"] < kept["selective"] < 0.8 * kept["none"]


def test_recomputation_says_where_it_cannot():
    with pytest.warns(UserWarning, match="Linear has no block"):
        assert recompute.apply(nn.Linear(3, 3), "full") == []
    with pytest.raises(ronde.RondeError, match="some"):
        recompute.apply(MLP(), "some")

    class Late(Counter):  # a buffer that begins to change after the first pass
        def forward(self, x):
            if self.inner[0].weight.grad is not None:
                self.seen += 1
            return self.inner(x)

    model = nn.Sequential(Late())
    recompute.apply(model, "full")
    model(torch.ones(2, 6)).sum().backward()
    with pytest.raises(ronde.RondeError, match="'seen' in block '0'"):
        model(torch.ones(2, 6))


if __name__ == "__main__":
    worker(Path(sys.argv[1]), Path(sys.argv[2]))


STEP_LOCALLY = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from ronde.parallel.fsdp import adopt
from ronde.parallel.fsdp_repairs import ELEMENTWISE

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))

class Own(torch.optim.AdamW):
    pass

for make in [*(getattr(torch.optim, name) for name in sorted(ELEMENTWISE)), Own]:
    actual = []
    for local in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(5, 3)
        settings = {"momentum": 0.9} if make in (torch.optim.SGD, torch.optim.RMSprop) else {}
        fully_shard(model, mesh=mesh)
        optimizer = make(model.parameters(), lr=0.1, **settings)
        seen = []
        if local:
            adopt(optimizer, {})
            adopt(optimizer, {})
        optimizer.register_step_pre_hook(lambda o, *_: seen.extend(isinstance(p, DTensor) for g in o.param_groups for p in g["params"]))
        states = []
        for step in range(3):
            optimizer.zero_grad()
            if step == 1:
                optimizer.step(lambda: model(torch.ones(2, 5)).square().sum().backward())
            else:
                model(torch.ones(2, 5)).square().sum().backward()
                optimizer.step()
            assert all(p is q for p, q in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True))
            assert set(optimizer.state) == set(model.parameters()), make
            states.append([v for p in model.parameters() for v in optimizer.state[p].values()])
            assert all(isinstance(v, DTensor) == bool(v.dim()) for v in states[-1] if torch.is_tensor(v)), make
        narrowed = local and make is not Own
        assert seen == [not narrowed] * 2 + [True] * 2 + [not narrowed] * 2, (make, seen)  # a closure makes gradients within the step
        assert sum(isinstance(h.__self__, object) for h in optimizer._optimizer_step_pre_hooks.values() if hasattr(h, "__self__")) == narrowed
        actual.append([p.full_tensor() for p in model.parameters()] + [v.full_tensor() for v in states[-1] if isinstance(v, DTensor)])
    assert all(torch.equal(a, b) for a, b in zip(*actual, strict=True)), make
print("equal")
"""


def test_an_update_over_plain_tensors_is_that_over_dtensors_bit_by_bit():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", STEP_LOCALLY],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == "equal", done.stderr[-2000:]
