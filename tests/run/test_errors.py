"""What a user does wrong is said on every rank: what was found, what was expected, and what to
do.
"""

from __future__ import annotations

import json
import socket
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import ronde
from processes import forked, python, rank_variables
from ronde import ArgumentError, LossError, RondeError
from ronde.feed import key_of, permute


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """One process on the CPU that leaves no run directory."""
    monkeypatch.setenv("RONDE_RUNS", "none")
    monkeypatch.setenv("RONDE_DEVICE", "cpu")
    monkeypatch.setenv("RONDE_PROGRESS", "quiet")


def data(n: int = 12) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(n, 4, generator=generator), torch.randn(n, 1, generator=generator)
    )


def make(model=None, optimizer=None, dataset=None, **arguments):
    model = nn.Linear(4, 1) if model is None else model
    if optimizer is None:
        optimizer = torch.optim.SGD(
            [p for p in model.parameters() if p.requires_grad] or [nn.Parameter(torch.zeros(1))],
            lr=0.1,
        )
    arguments = {"loss": F.mse_loss, "batch_size": 4, **arguments}
    return ronde.distribute(model, optimizer, data() if dataset is None else dataset, **arguments)


@contextmanager
def says(kind: type[Exception], *words: str):
    with pytest.raises(kind) as error:
        yield
    missing = [w for w in words if w not in str(error.value)]
    assert not missing, f"{missing} not in: {error.value}"


# -- arguments -------------------------------------------------------------------------


class Endless(IterableDataset):
    def __iter__(self):
        return iter(())


class NoLength(Dataset):
    def __getitem__(self, i):
        return torch.zeros(4), torch.zeros(1)


def wrapped() -> nn.Module:
    model = nn.Linear(4, 1)
    shell = nn.DataParallel.__new__(nn.DataParallel)
    nn.Module.__init__(shell)
    shell.module = model
    return shell


def frozen() -> nn.Module:
    return nn.Linear(4, 1).requires_grad_(False)


def test_data():
    with says(
        ArgumentError,
        "batch_size is missing",
        "global number of samples per optimizer step",
        "batch_size=N",
    ):
        make(batch_size=None)
    with says(ArgumentError, "is empty: its length is 0", "TensorDataset"):
        make(dataset=data(0))
    with says(ArgumentError, "is an IterableDataset without a length (Endless)", "__len__"):
        make(dataset=Endless())
    with says(ArgumentError, "NoLength", "has no length"):
        make(dataset=NoLength())
    with says(ArgumentError, "found int"):
        make(dataset=3)
    with says(ArgumentError, "two batch sizes", "batch_size=4", "batch_size=3"):
        make(dataset=DataLoader(data(), batch_size=3))
    with says(ArgumentError, "drop_last=True leaves nothing to train on", "12 samples", "13"):
        make(batch_size=13, drop_last=True)
    assert make(dataset=DataLoader(data(), batch_size=3), batch_size=None).steps_per_epoch == 4


def test_model_and_optimizer():
    with torch.device("meta"):
        meta = nn.Linear(4, 1)
    with says(ArgumentError, "meta device", "'weight' has no values", "init="):
        make(meta)
    with says(
        ArgumentError,
        "optimizer is over other parameters",
        "2 of its 2",
        "(1, 4)",
        "model.parameters()",
    ):
        make(optimizer=torch.optim.SGD(nn.Linear(4, 1).parameters(), lr=0.1))
    with says(ArgumentError, "optimizer is LBFGS", "Several passes over a batch"):
        make(model := nn.Linear(4, 1), torch.optim.LBFGS(model.parameters()))
    with says(ArgumentError, "every parameter of model (Linear) is frozen", "nothing to train"):
        make(frozen())
    with says(ArgumentError, "has no parameters"):
        make(nn.Tanh())
    with says(ArgumentError, "wrapped in DataParallel already", "model.module"):
        make(wrapped())
    with says(ArgumentError, "model must be a torch.nn.Module, found function"):
        make(lambda x: x, torch.optim.SGD(nn.Linear(1, 1).parameters()))
    with says(ArgumentError, "optimizer must be a torch.optim.Optimizer, found str"):
        make(optimizer="sgd")
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with says(ArgumentError, "ReduceLROnPlateau", "scheduler.step(value)"):
        make(model, optimizer, scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))
    with says(ArgumentError, "another optimizer"):
        other = torch.optim.SGD(model.parameters(), lr=0.1)
        make(model, optimizer, scheduler=torch.optim.lr_scheduler.StepLR(other, 1))
    with says(ArgumentError, "scheduler must be", "found int"):
        make(model, optimizer, scheduler=3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"precision": "int8"}, ["precision='int8'", "'fp32', 'bf16', 'fp16'"]),
        ({"batch": "double"}, ["batch='double'", "'keep', 'grow'"]),
        ({"plan": "magic"}, ["plan='magic'", "replicate", "pipeline=N"]),
        ({"on_nan": "shrug"}, ["on_nan='shrug'", "'error', 'ignore'"]),
        ({"batch_size": 0}, ["batch_size=0", "whole number above 0"]),
        ({"batch_size": -4}, ["batch_size=-4"]),
        ({"batch_size": 4.0}, ["batch_size=4.0"]),
        ({"batch_size": True}, ["batch_size=True"]),
        ({"micro_batch": 0}, ["micro_batch=0"]),
        ({"save_every": 0}, ["save_every=0"]),
        ({"keep": 0}, ["keep=0"]),
        ({"keep": "last=0"}, ["keep='last=0'"]),
        ({"clip_norm": 0}, ["clip_norm=0", "above 0"]),
        ({"clip_norm": float("nan")}, ["clip_norm=nan"]),
        ({"loss": "mse"}, ["loss must be callable", "found str"]),
        ({"batch": "grow", "lr_rule": "cubic"}, ["lr_rule='cubic'", "linear"]),
    ],
)
def test_values(arguments, words):
    with says(ArgumentError, *words):
        make(**arguments)


# -- losses ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (
            lambda out, y: (out - y).square(),
            ["a tensor of shape (4, 1)", "expected a scalar", ".mean()"],
        ),
        (lambda out, y: 3.0, ["loss returned float"]),
        (lambda out, y: None, ["loss returned NoneType"]),
        (lambda out, y: (out.sum(), 1, 2), ["a tuple of Tensor, int, int"]),
        (lambda out, y: (out.sum(), torch.ones(2)), ["a tuple of Tensor, Tensor"]),
    ],
)
def test_a_loss_that_is_no_scalar(loss, words):
    run = make(loss=loss)
    with says(LossError, *words):
        run.step(next(run.batches()))


def test_a_batch_that_is_no_pair():
    run = make(dataset=torch.randn(12, 4))
    with says(LossError, "a batch is a tensor of shape (4, 4), not (inputs, target)", "forward="):
        run.step(next(run.batches()))


def test_nan_in_one_process():
    x = torch.randn(12, 4)
    x[7] = float("nan")
    run = make(
        model := nn.Linear(4, 1), dataset=TensorDataset(x, torch.randn(12, 1)), shuffle=False
    )
    batches = run.batches()
    run.step(next(batches))
    before = [p.detach().clone() for p in model.parameters()]
    with says(
        LossError,
        "the loss is nan in step 2",
        "indices 4, 5, 6, 7",
        "were not updated",
        "on_nan='ignore'",
    ):
        run.step(next(batches))
    assert (
        all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        and run.state.step == 1
    )
    other = make(dataset=TensorDataset(x, torch.randn(12, 1)), shuffle=False, on_nan="ignore")
    assert [torch.isfinite(other.step(b)).item() for b in other.batches()] == [True, False, False]


# -- the loop --------------------------------------------------------------------------


def test_each_batch_takes_one_step():
    run = make()
    with says(RondeError, "run.step(batch) was called without a batch"):
        run.step((torch.zeros(4, 4), torch.zeros(4, 1)))
    batches = run.batches()
    batch = next(batches)
    run.step(batch)
    with says(RondeError, "run.step(batch) was called without a batch", "use each once"):
        run.step(batch)
    next(batches)
    with says(
        RondeError,
        "went on to the next batch before run.step(batch) or run.update()",
        "every batch takes one",
    ):
        next(batches)
    with says(ArgumentError, "run.epochs(-1)"):
        next(run.epochs(-1))
    with says(ArgumentError, "run.epochs(1.5)"):
        next(run.epochs(1.5))


def test_a_loop_of_ones_own():
    run = make()
    batches = run.batches()
    with says(RondeError, "run.backward(loss) was called without a batch"):
        run.backward(torch.ones((), requires_grad=True))
    x, y = next(batches)
    with says(RondeError, "run.update() was called after 0 of 1 backward passes"):
        run.update()
    run.backward(F.mse_loss(run.model(x), y))
    with says(RondeError, "called 2 times", "has 1 micro-batch.", "SAM"):
        run.backward(F.mse_loss(run.model(x), y))
    with says(RondeError, "run.save() was called between run.backward() and run.update()"):
        run.save()
    run.update()
    with says(RondeError, "run.update() was called without a batch"):
        run.update()


def test_micro_batches():
    run = make(micro_batch=2)
    batches = run.batches()
    batch = next(batches)
    assert isinstance(batch, ronde.MicroBatches) and len(batch) == 2
    with says(ArgumentError, "got 1 micro-batches, this step has 2"):
        run.step(batch[0])
    with says(ArgumentError, "got 3 micro-batches, this step has 2"):
        run.step(ronde.MicroBatches([*batch, batch[0]]))
    run.backward(F.mse_loss(run.model(batch[0][0]), batch[0][1]))
    with says(RondeError, "after 1 of 2 backward passes"):
        run.update()


def test_metrics():
    run = make()
    for metrics, words in (
        ({"loss": lambda o, y: o}, ["cannot be called 'loss'"]),
        ({"a": 3}, ["metric 'a' is int"]),
        ({"a": lambda o, y: "x"}, ["metric 'a' returned str"]),
        ({"a": lambda o, y: torch.zeros(3)}, ["shape (3,) for 4 samples"]),
    ):
        with says(ArgumentError, *words):
            run.evaluate(data(), metrics=metrics)


# -- what works ------------------------------------------------------------------------


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.LazyLinear(3), nn.LazyLinear(1)

    def forward(self, x):
        return self.b(self.a(x).tanh())


def train(run, epochs: int = 2) -> list[float]:
    return [float(run.step(b)) for _ in run.epochs(epochs) for b in run.batches()]


def test_lazy_parameters():
    losses = train(make(model := Lazy()), 20)
    assert (
        model.a.weight.shape == (3, 4) and len(losses) == 60 and sum(losses[-3:]) < sum(losses[:3])
    )
    unused = Lazy()
    unused.c = nn.LazyLinear(2)
    with says(ArgumentError, "'c.weight'", "never used"):
        make(unused)
    with says(ArgumentError, "lazily initialized parameters 'a.weight'", "got no shape"):
        make(Lazy(), dataset=torch.randn(12, 4))


def plain_half(precision: str, seen: set) -> list[float]:
    """autocast and GradScaler by hand, over the same samples."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    x, y = data().tensors
    losses = []
    for epoch in range(20):
        for ids in torch.from_numpy(permute(range(12), 12, key_of(0, epoch))).split(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype):
                out = model(x[ids])
                loss = F.mse_loss(out.float(), y[ids])
            seen.add(out.dtype)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision(precision):
    seen, mine = set(), set()

    def loss(out, y):
        mine.add(out.dtype)
        return F.mse_loss(out.float(), y)

    torch.manual_seed(0)
    half = train(make(model := nn.Linear(4, 1), loss=loss, precision=precision), 20)
    assert (
        half == pytest.approx(plain_half(precision, seen), rel=1e-5)
        and seen == mine
        and len(seen) == 1
    )
    assert model.weight.dtype == torch.float32
    torch.manual_seed(0)
    full = train(make(nn.Linear(4, 1)), 20)
    assert half != full and sum(half[-6:]) == pytest.approx(sum(full[-6:]), rel=0.1)


# -- several ranks ---------------------------------------------------------------------

TOGETHER = """
import json, os, sys
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
import ronde

rank = int(os.environ["RANK"])

def data(n=12, nan=None):
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(n, 4, generator=generator), torch.randn(n, 1, generator=generator)
    if nan is not None:
        x[nan] = float("nan")
    return TensorDataset(x, y)

def make(width=8, n=12, lr=0.1, kind=torch.optim.SGD, nan=None, dtype=torch.float32, model=None, **arguments):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1)).to(dtype) if model is None else model
    optimizer = kind(model.parameters(), lr=lr)
    arguments = {"loss": F.mse_loss, "batch_size": 4, **arguments}
    return ronde.distribute(model, optimizer, data(n, nan), **arguments)

answers = {}

def case(name, call):
    try:
        answers[name] = ["", call()]
    except Exception as error:
        answers[name] = [type(error).__name__, str(error)]

case("batch_size", lambda: make(batch_size=4 + rank))
case("shape", lambda: make(width=8 + rank) and None)
case("length", lambda: make(n=12 + 2 * rank) and None)
case("lr", lambda: make(lr=0.1 * (1 + rank)) and None)
case("seed", lambda: make(seed=rank) and None)
case("optimizer", lambda: make(kind=[torch.optim.SGD, torch.optim.Adam][rank]) and None)
case("dtype", lambda: make(dtype=[torch.float32, torch.float64][rank]) and None)
case("precision", lambda: make(precision=["fp32", "bf16"][rank]) and None)
case("clip", lambda: make(clip_norm=[None, 1.0][rank]) and None)

def nan():
    run = make(nan=6, shuffle=False)  # samples 4 to 7 are step 2, and of them 6 and 7 are rank 1's
    batches = run.batches()
    run.step(next(batches))
    before = [p.detach().clone() for p in run.model.parameters()]
    try:
        run.step(next(batches))
    except ronde.LossError as error:
        kept = all(torch.equal(a, b) for a, b in zip(before, run.model.parameters()))
        return [str(error), kept, run.state.step]

case("nan", nan)

class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.LazyLinear(3), nn.LazyLinear(1)

    def forward(self, x):
        return self.b(self.a(x).tanh())

def losses(run):
    return [float(run.step(b)) for _ in run.epochs(2) for b in run.batches()]

case("lazy", lambda: losses(make(model=Lazy())))
for precision in ("bf16", "fp16"):
    case(precision, lambda: losses(make(precision=precision, loss=lambda out, y: F.mse_loss(out.float(), y))))
case("full", lambda: losses(make()))
inner = nn.Sequential(nn.Linear(4, 1))
case("ddp", lambda: make(model=nn.parallel.DistributedDataParallel(inner)) and None)
case("non-scalar", lambda: (lambda run: run.step(next(run.batches())))(make(loss=lambda out, y: out)) and None)
with open(os.path.join(sys.argv[1], f"{rank}.json"), "w") as file:
    json.dump(answers, file)
"""


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """Two processes that do all of it, one thing after the other; what each of them was told."""
    folder = tmp_path_factory.mktemp("together")
    (folder / "together.py").write_text(TOGETHER)
    done = python(forked(folder / "together.py", 2, folder)[1:], folder, 120)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("batch_size", ["batch_size", "rank 0: 4", "rank 1: 5"]),
        ("shape", ["parameter '0.weight'", 'rank 0: "float32 [8, 4]"', 'rank 1: "float32 [9, 4]"']),
        ("length", ["the length of the data set", "rank 0: 12", "rank 1: 14"]),
        ("lr", ["the optimizer's lr (group 0)", "rank 0: 0.1", "rank 1: 0.2"]),
        ("seed", ["seed", "rank 0: 0", "rank 1: 1"]),
        ("optimizer", ["the optimizer", 'rank 0: "SGD"', 'rank 1: "Adam"']),
        ("dtype", ["parameter '0.weight'", "float32 [8, 4]", "float64 [8, 4]"]),
        ("precision", ["precision", 'rank 0: "fp32"', 'rank 1: "bf16"']),
        ("clip", ["clip_norm", "rank 0: null", "rank 1: 1.0"]),
    ],
)
def test_ranks_that_disagree(together, case, words):
    answers = [a[case] for a in together]
    assert answers[0] == answers[1] and answers[0][0] == "WorldError", answers
    text = answers[0][1]
    assert all(
        w in text
        for w in [
            "The ranks disagree on",
            "in ronde.distribute",
            "same script with the same arguments",
            *words,
        ]
    ), text


def test_nan_on_one_rank_of_two(together):
    answers = [a["nan"] for a in together]
    assert answers[0] == answers[1]
    kind, (text, kept, step) = answers[0]
    assert kind == "" and kept and step == 1
    assert all(
        w in text
        for w in [
            "nan in step 2",
            "indices 4, 5, 6, 7",
            "from the samples of rank 1.",
            "were not updated",
        ]
    ), text


def test_what_works_on_two_ranks(together):
    """Each is what one process does with the same arguments."""

    def loss(out, y):
        return F.mse_loss(out.float(), y)

    for case in ("lazy", "bf16", "fp16", "full"):
        kinds, losses = zip(*(a[case] for a in together), strict=True)
        assert kinds == ("", ""), losses
        torch.manual_seed(0)
        model = (
            Lazy() if case == "lazy" else nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        )
        torch.manual_seed(0 if case == "lazy" else 1)
        one = train(make(model, loss=loss, precision=case if case in ("bf16", "fp16") else "fp32"))
        # which steps the gradient scaler leaves out depends on how large a worker's share is
        same = 1 if case == "fp16" else 6
        assert losses[0] == losses[1] and len(losses[0]) == 6, case
        assert losses[0][:same] == pytest.approx(
            one[:same], rel=0.02 if case.endswith("16") else 1e-5
        ), case


def test_wrapped_and_no_scalar_on_two_ranks(together):
    for answers in together:
        assert (
            answers["ddp"][0] == "ArgumentError"
            and "wrapped in DistributedDataParallel already" in answers["ddp"][1]
        )
        assert (
            answers["non-scalar"][0] == "LossError"
            and "a tensor of shape (2, 1), expected a scalar" in answers["non-scalar"][1]
        )


def test_a_port_that_is_taken(tmp_path):
    script = tmp_path / "meet.py"
    script.write_text("from ronde.world.connect import connect\nconnect(20.0)\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = python([str(script)], tmp_path, env=rank_variables(0, 2, port))
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and "WorldError" in last
    assert all(
        w in last for w in [f"Port {port}", "127.0.0.1", "taken by another program", "MASTER_PORT="]
    ), last


def test_nobody_at_the_meeting_point(tmp_path):
    script = tmp_path / "meet.py"
    script.write_text("from ronde.world.connect import connect\nconnect(2.0)\n")
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound, and nobody listens
        variables = rank_variables(1, 2, nobody.getsockname()[1])
        done = python([str(script)], tmp_path, env=variables)
    assert (
        done.returncode == 1
        and "WorldError: Rank 1 cannot reach the meeting point 127.0.0.1:" in done.stderr
    )
    assert "Is rank 0 running there" in done.stderr


def test_nothing_is_written_where_that_is_asked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(make())
    assert list(tmp_path.iterdir()) == []
