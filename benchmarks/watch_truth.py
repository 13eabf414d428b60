"""Do the rules of `ronde watch` find planted faults, and are they silent on healthy trainings?

Each case is one small training of 342 steps, measured every 2 steps and judged by the files of its
run directory with the defaults. A fault counts as found if one of the rules that were written down
for it fires, and names a tensor or layer where the fault is. A healthy case counts as a false alarm
if any rule fires. Faults that do no harm (the loss falls all the same) are counted apart.

Thresholds were set on seeds 0 to 4. Seeds 5 to 7 judge them.

    python benchmarks/watch_truth.py                        # seeds 5 to 7, about 12 minutes
    python benchmarks/watch_truth.py --seeds 0 1 2 3 4      # those that thresholds were set on
    python benchmarks/watch_truth.py --only lr-high         # cases whose name holds this
    python benchmarks/watch_truth.py --workers --seeds 5    # on 4 workers, under five plans
"""

from __future__ import annotations

import argparse
import atexit
import concurrent.futures
import json
import math
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
_BATCH, _STEPS, _EPOCHS = 16, 114, 3  # steps per epoch
_SAMPLES = _BATCH * _STEPS
_ANY = ""  # a fault of the whole model: whichever tensor is named

FAMILIES = ("mlp", "cnn", "convbn", "transformer", "gru", "autoencoder")
SMOOTH = ("mlp", "cnn", "gru", "autoencoder")  # without normalization
OPTIMIZERS = ("sgd", "adam", "adamw", "rmsprop")
HEALTHY = (
    *(f"plain-{name}" for name in OPTIMIZERS),
    "restarts",
    "warmup",
    "cosine",
    "frozen",
    "evaluated",
)


@dataclass(frozen=True)
class Fault:
    """``where``: a pattern of the tensors or layers that may be named; None: none has to be."""

    families: tuple[str, ...]
    rules: tuple[str, ...]
    where: str | None = None


# Written before the thresholds were set.
FAULTS = {
    "lr-high": Fault(
        FAMILIES,
        ("nan", "diverging", "loss-flat", "exploding-gradient", "update-ratio", "dead-units")
        + ("saturated", "vanishing-gradient"),
    ),
    "lr-low": Fault(FAMILIES, ("loss-flat", "update-ratio")),
    "raw-inputs": Fault(("mlp", "cnn", "convbn", "gru", "autoencoder"), ("inputs",), _ANY),
    "constant-inputs": Fault(("mlp", "cnn", "convbn", "gru"), ("inputs", "loss-flat")),
    "deep-sigmoid": Fault(
        ("mlp", "autoencoder"),
        ("vanishing-gradient", "loss-flat"),
        r"body\.([0-9]|1\d|2[0-3])(\.|$)|^$",
    ),
    "zeros": Fault(SMOOTH, ("vanishing-gradient", "initialization", "dead-units", "loss-flat")),
    "large-init": Fault(("mlp", "cnn", "autoencoder"), ("initialization",), _ANY),
    "negative-bias": Fault(("mlp", "cnn", "autoencoder"), ("dead-units",), r"body\.3$"),
    "saturated": Fault(("mlp", "autoencoder"), ("saturated",), r"body\.[13]$"),
    "detached": Fault(FAMILIES, ("vanishing-gradient",), r"^(body|rnn|conv)\b"),
    "half-optimizer": Fault(FAMILIES, ("unchanged",), r"^(body|rnn|embed|place)\b"),
    "labels": Fault(("mlp", "cnn", "convbn", "transformer", "gru"), ("loss-flat", "overfit")),
    "one-class": Fault(("mlp", "cnn", "convbn", "transformer", "gru"), ("class-imbalance",)),
    "nan-sample": Fault(
        ("mlp", "cnn", "convbn", "gru", "autoencoder"), ("nan",), r"^(body\.0|rnn)(\.|$)"
    ),
    "explodes": Fault(FAMILIES, ("exploding-gradient", "nan"), _ANY),
    "overfit": Fault(("mlp", "cnn", "transformer"), ("overfit",)),
}
_RATES = {"sgd": 0.05, "adam": 3e-3, "adamw": 3e-3, "rmsprop": 1e-3}


@dataclass(frozen=True)
class Case:
    """One training."""

    family: str
    kind: str
    seed: int
    fault: bool
    plan: str = ""  # of 4 workers

    @property
    def name(self) -> str:
        plan = f" {self.plan}" if self.plan else ""
        return f"{self.family} {self.kind}{plan} {self.seed}"


@dataclass
class Answer:
    """What came of it: alerts as [rule, tensor, step, rank, samples, text]."""

    case: Case
    alerts: list[list[Any]] = field(default_factory=list)
    losses: tuple[float, float] = (0.0, 0.0)
    holders: list[int] = field(default_factory=list)  # ranks that had the planted sample
    seconds: float = 0.0
    error: str = ""

    @property
    def harmless(self) -> bool:
        """A rate that is no fault for this model and seed: the loss falls as it should."""
        first, last = self.losses
        return self.case.kind in ("lr-high", "lr-low", "zeros", "labels") and last < 0.6 * first

    @property
    def right(self) -> bool:
        if self.error:
            return False
        if not self.case.fault:
            return not self.alerts
        fault = FAULTS[self.case.kind]
        return any(
            alert[0] in fault.rules
            and (fault.where is None or re.search(fault.where, alert[1] or ""))
            and (self.case.kind != "nan-sample" or alert[3] in self.holders)
            for alert in self.alerts
        )


def _model(case: Case) -> Any:
    import torch
    from torch import nn

    sigmoid, narrow = case.kind == "deep-sigmoid", 32
    act: Callable[[], Any] = nn.Tanh if case.kind == "saturated" else nn.ReLU

    class Body(nn.Module):
        def __init__(self, body: Any, head: Any) -> None:
            super().__init__()
            self.body, self.head = body, head

        def forward(self, x: Any) -> Any:
            x = self.body(x)
            return self.head(x.detach() if case.kind == "detached" else x)

    class Gru(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.GRU(4, 24, batch_first=True), nn.Linear(24, 2)

        def forward(self, x: Any) -> Any:
            x = self.rnn(x)[0][:, -1]
            return self.head(x.detach() if case.kind == "detached" else x)

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.place = nn.Embedding(8, 24), nn.Parameter(torch.randn(10, 24) / 5)
            layer = nn.TransformerEncoderLayer(24, 2, 48, 0.0, batch_first=True, norm_first=True)
            self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.norm, self.head = nn.LayerNorm(24), nn.Linear(24, 8)

        def forward(self, x: Any) -> Any:
            x = self.norm(self.body(self.embed(x) + self.place).mean(1))
            return self.head(x.detach() if case.kind == "detached" else x)

    def deep(width: int) -> list[Any]:
        return [m for _ in range(20) for m in (nn.Linear(width, width), nn.Sigmoid())]

    if case.family == "mlp":
        body = [nn.Linear(20, narrow), act(), nn.Linear(narrow, narrow), act()]
        if sigmoid:
            body = [nn.Linear(20, narrow), nn.Sigmoid(), *deep(narrow)]
        return Body(nn.Sequential(*body), nn.Linear(narrow, 5))
    if case.family == "autoencoder":
        body = [nn.Linear(24, narrow), act(), nn.Linear(narrow, 16), act()]
        if sigmoid:
            body = [nn.Linear(24, narrow), nn.Sigmoid(), *deep(narrow), nn.Linear(narrow, 16)]
        return Body(
            nn.Sequential(*body), nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 24))
        )
    if case.family == "cnn":
        body = [
            nn.Conv2d(1, 8, 3, padding=1),
            act(),
            nn.Conv2d(8, 16, 3, 2, 1),
            act(),
            nn.Flatten(),
        ]
        return Body(nn.Sequential(*body), nn.Linear(16 * 16, 5))
    if case.family == "convbn":
        body = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), act()]
        body += [nn.Conv2d(8, 16, 3, 2, 1), nn.BatchNorm2d(16), act(), nn.Flatten()]
        return Body(nn.Sequential(*body), nn.Linear(16 * 16, 5))
    return Gru() if case.family == "gru" else Transformer()


def _data(case: Case, count: int, evaluation: bool = False) -> tuple[Any, Any]:
    """Samples that can be learned: a teacher's answers, with noise."""
    import torch

    shape = torch.Generator().manual_seed(case.seed)
    draw = torch.Generator().manual_seed(1000 * case.seed + evaluation)
    if case.family == "mlp":
        x = torch.randn(count, 20, generator=draw)
        y = (x @ torch.randn(20, 5, generator=shape)).argmax(1)
    elif case.family == "autoencoder":
        mix = torch.randn(4, 24, generator=shape)
        x = torch.tanh(torch.randn(count, 4, generator=draw) @ mix)
        x = x + 0.05 * torch.randn(count, 24, generator=draw)
        return x, x.clone()
    elif case.family in ("cnn", "convbn"):
        templates = torch.randn(5, 1, 8, 8, generator=shape)
        y = torch.randint(5, (count,), generator=draw)
        x = templates[y] + torch.randn(count, 1, 8, 8, generator=draw)
    elif case.family == "gru":
        x = torch.randn(count, 12, 4, generator=draw)
        y = (x.sum(1) @ torch.randn(4, generator=shape) > 0).long()
    else:
        x = torch.randint(8, (count, 10), generator=draw)
        y = torch.nn.functional.one_hot(x, 8).sum(1).argmax(1)
    return x, y


def _spoil(case: Case, x: Any, y: Any) -> tuple[Any, Any]:
    import torch

    draw = torch.Generator().manual_seed(case.seed)
    if case.kind == "raw-inputs":
        x = 127 + 60 * x
        y = x.clone() if case.family == "autoencoder" else y
    elif case.kind == "constant-inputs":
        x = x[:1].expand_as(x).clone()
    elif case.kind == "labels":
        y = y[torch.randperm(len(y), generator=draw)]
    elif case.kind == "one-class":
        y = torch.where(torch.rand(len(y), generator=draw) < 0.98, 0, y)
    elif case.kind == "nan-sample":
        x[len(x) // 2] = math.nan
    return x, y


def _settle(case: Case, model: Any) -> None:
    """Faults in the weights."""
    import torch

    weights = [p for p in model.parameters() if p.ndim > 1]
    with torch.no_grad():
        if case.kind == "zeros":
            for p in weights:
                p.zero_()
        elif case.kind == "large-init":
            for p in weights:
                p.mul_(50)
        elif case.kind == "saturated":
            for i in (0, 2):
                model.body[i].weight.mul_(60)
        elif case.kind == "negative-bias":
            model.body[2].bias.fill_(-30)
        elif case.kind == "frozen":
            next(model.parameters()).requires_grad_(False)


def _optimizer(case: Case, model: Any) -> Any:
    import torch

    name = case.kind.removeprefix("plain-") if case.kind.startswith("plain-") else ""
    name = name or ("sgd" if case.kind in ("lr-high", "explodes") else OPTIMIZERS[case.seed % 4])
    rate = _RATES[name] * (4 if name == "sgd" and case.family == "autoencoder" else 1)
    rate *= {"lr-high": 100.0, "lr-low": 1e-4}.get(case.kind, 1.0)
    parameters = list(model.parameters())
    if case.kind == "half-optimizer":
        parameters = parameters[len(parameters) // 2 :]
    every = {
        "sgd": lambda: torch.optim.SGD(parameters, rate, momentum=0.9),
        "adam": lambda: torch.optim.Adam(parameters, rate),
        "adamw": lambda: torch.optim.AdamW(parameters, rate),
        "rmsprop": lambda: torch.optim.RMSprop(parameters, rate),
    }
    return every[name]()


def _scheduler(case: Case, optimizer: Any) -> Any:
    from torch.optim import lr_scheduler as of

    total = _STEPS * _EPOCHS
    if case.kind == "restarts":
        return of.CosineAnnealingWarmRestarts(optimizer, 100)
    if case.kind == "warmup":
        return of.LinearLR(optimizer, 0.01, 1.0, 60)
    return of.CosineAnnealingLR(optimizer, total) if case.kind == "cosine" else None


def train(case: Case) -> None:
    """The training of a case, in this process or on its rank of several."""
    import torch
    from torch.utils.data import TensorDataset

    import ronde

    torch.set_num_threads(1)
    torch.manual_seed(case.seed)
    small = case.kind == "overfit"
    x, y = _spoil(case, *_data(case, 48 if small else _SAMPLES))
    if small and y.dtype == torch.int64:  # labels that only memory can give
        y = y[torch.randperm(len(y), generator=torch.Generator().manual_seed(case.seed))]
    model = _model(case)
    _settle(case, model)
    optimizer = _optimizer(case, model)
    mse = torch.nn.functional.mse_loss
    usual = mse if case.family == "autoencoder" else torch.nn.functional.cross_entropy
    calls = [0]

    class Samples(TensorDataset):
        def __getitem__(self, index: Any) -> Any:
            if case.kind == "nan-sample" and index == len(self) // 2:
                (Path(os.environ["RONDE_RUNS"]) / f"holds-{os.environ.get('RANK', 0)}").touch()
            return super().__getitem__(index)

    def loss(output: Any, target: Any) -> Any:
        calls[0] += torch.is_grad_enabled()
        value = usual(output, target)
        # a script that stops to divide by the number of its tokens
        return value * 1e4 if case.kind == "explodes" and calls[0] >= 150 else value

    run = ronde.distribute(
        model,
        optimizer,
        Samples(x, y),
        loss=loss,
        batch_size=_BATCH,
        scheduler=_scheduler(case, optimizer),
        seed=case.seed,
        watch=1 if case.plan else 2,
    )
    check = TensorDataset(*_data(case, 256, evaluation=True))
    for epoch in run.epochs(114 if small else _EPOCHS):
        for batch in run.batches():
            run.step(batch)
        if (case.kind == "evaluated" or small) and (not small or epoch % 10 == 9):
            run.evaluate(check)


def answer(case: Case) -> Answer:
    """Train a case in this process, and judge it."""
    found, begun = Answer(case), time.perf_counter()
    folder = Path(tempfile.mkdtemp(prefix="watch-truth-"))
    os.environ.update(RONDE_RUNS=str(folder), RONDE_FEED="none")
    try:
        _start(case, folder) if case.plan else _alone(case)
        _judge(found, next(p for p in folder.iterdir() if (p / "record.jsonl").exists()))
    except Exception as error:
        found.error = f"{type(error).__name__}: {error}"[:500]
    finally:
        found.holders = [int(p.name[6:]) for p in folder.glob("holds-*")]
        shutil.rmtree(folder, ignore_errors=True)
    found.seconds = time.perf_counter() - begun
    return found


def _alone(case: Case) -> None:
    """Train as a script of its own does, with its end: a fork, which need not import torch."""
    child = os.fork()
    if not child:
        try:
            train(case)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            atexit._run_exitfuncs()
            os._exit(0)
    os.waitpid(child, 0)


def _start(case: Case, folder: Path) -> None:
    words = ["run", "--workers", "4", "--plan", case.plan, "--runs", str(folder), __file__]
    subprocess.run(
        [sys.executable, "-m", "ronde", *words, "--case", json.dumps(vars(case))],
        capture_output=True,
        timeout=300,
        check=False,
    )


def _judge(found: Answer, path: Path) -> None:
    from ronde.watch import RunDir
    from ronde.watch.judge import Judge

    judge = Judge(RunDir(path))
    judge.look()
    if judge.failed:
        found.error = str(judge.failed)
    found.alerts = [[a.rule, a.tensor, a.step, a.rank, a.samples, a.text] for a in judge.alerts]
    loss = judge.view.loss
    if len(loss) > 20:
        found.losses = float(sum(loss[:5]) / 5), float(sorted(loss[-20:])[10])


PLANS = ("replicate", "shard", "shard=optimizer", "pipeline=2", "tensor=2")


def cases(seeds: list[int], workers: bool) -> list[Case]:
    """All faults and healthy trainings; with ``workers``, two families on 4 workers, by plan."""
    return [
        Case(family, kind, seed, fault, plan)
        for seed in seeds
        for plan in (PLANS if workers else ("",))
        for family in (("mlp", "transformer") if workers else FAMILIES)
        for fault, kinds in ((True, FAULTS), (False, HEALTHY))
        for kind in kinds
        if not fault or family in FAULTS[kind].families
    ]


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[5, 6, 7])
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--workers", action="store_true")
    parser.add_argument("--write", action="store_true", help="results/watch_truth.json")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        train(Case(**json.loads(args.case)))
        return
    asked = [c for c in cases(args.seeds, args.workers) if args.only in c.name]
    begun, answers = time.perf_counter(), []
    pool = concurrent.futures.ProcessPoolExecutor(
        args.jobs, multiprocessing.get_context("spawn"), _quiet
    )
    with pool:
        for one in pool.map(answer, asked):
            answers.append(one)
            if not one.right:
                print("harmless" if one.harmless else "WRONG", one.case.name, end="  ")
                print(f"{one.losses[0]:.3g} -> {one.losses[1]:.3g}", one.error, flush=True)
                for alert in one.alerts:
                    print("     ", *alert, flush=True)
    result = summary(answers, args.seeds) | {"seconds": round(time.perf_counter() - begun)}
    print(json.dumps(result, indent=1))
    if args.write:
        (_HERE / "results" / "watch_truth.json").write_text(json.dumps(result, indent=1) + "\n")


def _quiet() -> None:
    """Workers of the pool say nothing: their trainings warn of the faults too."""
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def summary(answers: list[Answer], seeds: list[int]) -> dict[str, Any]:
    """Counts, by fault and by rule."""
    faults = [a for a in answers if a.case.fault and not (a.harmless and not a.right)]
    healthy = [a for a in answers if not a.case.fault]
    by_kind = {
        kind: f"{sum(a.right for a in own)}/{len(own)}"
        for kind in FAULTS
        if (own := [a for a in faults if a.case.kind == kind])
    }
    return {
        "seeds": seeds,
        "faults": len(faults),
        "found": sum(a.right for a in faults),
        "harmless": len(answers) - len(faults) - len(healthy),
        "healthy": len(healthy),
        "false_alarms": sum(not a.right for a in healthy),
        "by_fault": by_kind,
        "wrong": [a.case.name for a in (*faults, *healthy) if not a.right],
    }


if __name__ == "__main__":
    main()
