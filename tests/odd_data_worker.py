"""Run by every rank: trains on data of many kinds, and writes what rank 0 ends with: losses,
weights, evaluations, warnings, and errors.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable
from multiprocessing.util import _run_finalizers
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, default_collate

import ronde
from ronde import MicroBatches
from ronde.watch import Warned, read

os.environ["RONDE_RUNS"] = str(Path(sys.argv[1]).with_suffix(".runs"))
torch.set_default_dtype(torch.float64)
N = 26
X = torch.randn(N, 5, generator=torch.Generator().manual_seed(1))
CASES: dict[str, Callable[[], dict[str, Any]]] = {}


class Run:
    gather: Any  # of the run of now


class Data(Dataset):
    def __init__(self, n: int = N) -> None:
        self.n, self.epoch = n, 0

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        return X[i] + self.epoch, X[i].sin()[:2]


def case(call: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    CASES[call.__name__] = call
    return call


def train(
    data: Any,
    *,
    epochs: int = 1,
    change: Callable[[Any], Any] = lambda batch: batch,
    each: Callable[[int], None] = lambda epoch: None,
    test: Any = None,
    loss: Any = F.mse_loss,
    metrics: Any = None,
    own: bool = False,
    **options: Any,
) -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    size = {} if isinstance(data, DataLoader) else {"batch_size": 8}
    how: dict[str, Any] = {"shuffle": False, **size, **options}
    run = ronde.distribute(model, optimizer, data, loss=loss, **how)
    losses, tested = [], []
    Run.gather = run.gather
    for epoch in run.epochs(epochs):
        each(epoch)
        for batch in run.batches():
            if not own:
                losses.append(run.step(change(batch)))
                continue
            batch = change(batch)
            run.backward(loss(model(batch[0]), batch[1]))
            losses.append(run.update())
        if test is not None:
            tested.append(run.evaluate(test, metrics))
    with run.whole_model() as copy:
        whole = torch.cat([p.detach().flatten() for p in copy.parameters()])
        good = [each for i in range(N) if (each := Broken()[i]) is not None]
        x, y = default_collate(good)
        direct = F.mse_loss(copy(x), y).item()
    events = read(run.dir.path / "record.jsonl") if run.is_main else []
    warned = [e.text for e in events if isinstance(e, Warned)]
    numbers = [float(each) for each in losses]
    return {
        "losses": numbers,
        "weights": whole.tolist(),
        "tested": tested,
        "warned": warned,
        "direct": direct,
    }


@case
def epoch_of_processes_that_stay() -> dict[str, Any]:
    data = Data()
    loader = DataLoader(data, 8, num_workers=1, persistent_workers=True)
    return train(loader, epochs=3, each=lambda epoch: setattr(data, "epoch", epoch))


@case
def epoch_here() -> dict[str, Any]:
    data = Data()
    return train(data, epochs=3, each=lambda epoch: setattr(data, "epoch", epoch))


@case
def data_that_grow() -> dict[str, Any]:
    data = Data(20)
    return train(data, epochs=3, each=lambda epoch: setattr(data, "n", 20 + epoch))


@case
def test_data_that_grow() -> dict[str, Any]:
    test = Data(20)
    return train(Data(), epochs=2, each=lambda epoch: setattr(test, "n", 20 + epoch), test=test)


RANK, SIZE = (int(os.environ.get(name, n)) for name, n in (("RANK", 0), ("WORLD_SIZE", 1)))


class Divided(Data):
    """Its own part of 6 x 4 samples; every rank has as many."""

    def __init__(self) -> None:
        super().__init__(24 // SIZE)

    def __getitem__(self, i: int) -> Any:
        return super().__getitem__(i * SIZE + RANK)


class Stream(IterableDataset):
    def __init__(self, data: Dataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Any:
        return (self.data[i] for i in range(len(self)))


class Noisy(Data):
    """Draws from a generator of its own, which every rank has seeded in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.draw = random.Random(RANK)

    def __getitem__(self, i: int) -> Any:
        x, y = super().__getitem__(i)
        return x + self.draw.random(), y


@case
def divided() -> dict[str, Any]:
    return train(Divided())


@case
def divided_by_subset() -> dict[str, Any]:
    return train(Subset(Data(24), range(RANK * 24 // SIZE, (RANK + 1) * 24 // SIZE)))


@case
def divided_stream_in_a_process() -> dict[str, Any]:
    return train(DataLoader(Stream(Divided()), 8, num_workers=1))


@case
def divided_test_data() -> dict[str, Any]:
    return train(Data(), test=Divided())


class Torn(Divided):
    """With noise that nobody has seeded; labels tell."""

    def __getitem__(self, i: int) -> Any:
        x, y = super().__getitem__(i)
        return x + random.SystemRandom().random(), y


@case
def divided_under_noise() -> dict[str, Any]:
    return train(Torn())


@case
def whole_stream() -> dict[str, Any]:
    return train(DataLoader(Stream(Data()), 8, num_workers=1), epochs=2)


@case
def noise_of_each_rank() -> dict[str, Any]:
    return train(Noisy())


class Broken(Data):
    """Some samples are None, none of them in the first batch where ``late``."""

    def __init__(self, late: bool = False) -> None:
        super().__init__()
        self.late = late

    def __getitem__(self, i: int) -> Any:
        bad = i in (1, 2, 5, 7, 11, 16, 20) and not (self.late and i < 8)
        return None if bad else super().__getitem__(i)


def keep(samples: list[Any]) -> Any:
    return default_collate([each for each in samples if each is not None])


def crops(samples: list[Any]) -> Any:
    x, y = default_collate(samples)
    return torch.cat([x, x.cos()]), torch.cat([y, y])


def accuracy(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((out - y).abs() < 0.5).double().mean()


def _broken(late: bool = False, collate: Any = keep, **options: Any) -> dict[str, Any]:
    data = DataLoader(Broken(late), 8, collate_fn=collate)
    return train(data, epochs=2, test=data, metrics={"accuracy": accuracy}, **options)


@case
def broken() -> dict[str, Any]:
    return _broken()


@case
def broken_late_in_parts() -> dict[str, Any]:
    return _broken(late=True, micro_batch=3 if SIZE == 1 else 2)


@case
def broken_sharded() -> dict[str, Any]:
    return _broken(shard="parameters" if SIZE > 1 else None)


@case
def broken_piped() -> dict[str, Any]:
    return _broken(pipeline=2 if SIZE == 2 else None, micro_batch=4 if SIZE == 2 else None)


@case
def broken_tensor() -> dict[str, Any]:
    return _broken(tensor=2 if SIZE == 2 else None)


@case
def broken_own_loop() -> dict[str, Any]:
    return _broken(own=True)


@case
def broken_gathered() -> dict[str, Any]:
    def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out, y = Run.gather(out), Run.gather(y)
        return ((out - y) ** 2).mean() + (out.std(0) - 1).square().mean()

    return _broken(loss=loss)


@case
def broken_pairs() -> dict[str, Any]:
    def loss(out: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, int]:
        return ((out - y) ** 2).sum(), 2 * len(y)

    return _broken(loss=loss)


@case
def broken_in_lists() -> dict[str, Any]:
    def lists(samples: list[Any]) -> Any:
        return tuple(zip(*[each for each in samples if each is not None], strict=True))

    def forward(model: Any, batch: Any) -> Any:
        return torch.stack([model(x) for x in batch[0]]), torch.stack(list(batch[1]))

    return _broken(collate=lists, forward=forward)


@case
def two_crops() -> dict[str, Any]:
    return train(DataLoader(Data(), 8, collate_fn=crops), test=Data())


@case
def left_out_in_the_loop() -> dict[str, Any]:
    def some(batch: Any) -> Any:
        mask = batch[0][:, 0] > -0.5
        return [each[mask] for each in batch]

    return train(Data(), change=some)


@case
def left_out_without_a_trace() -> dict[str, Any]:
    def ragged(samples: list[Any]) -> Any:
        kept = [each for each in samples if each is not None]
        x, y = default_collate(kept)
        return torch.cat([x, x]), y

    def forward(model: Any, batch: Any) -> Any:
        return model(batch[0][: len(batch[1])]), batch[1]

    return _broken(collate=ragged, forward=forward)


def _changed(change: Callable[[Any], Any], **options: Any) -> dict[str, Any]:
    return train(Data(), change=change, **options)


@case
def mixed_in_the_loop() -> dict[str, Any]:
    return _changed(lambda b: [0.7 * t + 0.3 * t.flip(0) for t in b])


@case
def mixed_in_place() -> dict[str, Any]:
    return _changed(lambda b: [b[0].mul_(0.7).add_(0.3 * b[0].flip(0)), b[1]])


@case
def mixed_in_a_step_of_parts() -> dict[str, Any]:
    mix = lambda b: (0.7 * b[0] + 0.3 * b[0].roll(1, 0), b[1])  # noqa: E731
    return _changed(lambda micros: MicroBatches(map(mix, micros)), micro_batch=2)


@case
def cut_and_pasted() -> dict[str, Any]:
    return _changed(lambda b: [torch.cat([b[0][:, :2], b[0].flip(0)[:, 2:]], 1), b[1]])


@case
def scaled_by_the_batch() -> dict[str, Any]:
    return _changed(lambda b: [b[0] / b[0].abs().max(), b[1]])


@case
def mixed_in_forward() -> dict[str, Any]:
    return train(Data(), forward=lambda m, b: (m(0.7 * b[0] + 0.3 * b[0].flip(0)), b[1]))


@case
def mixed_before_a_pipeline() -> dict[str, Any]:
    mix = lambda b: (0.7 * b[0] + 0.3 * b[0].roll(1, 0), b[1])  # noqa: E731
    if SIZE != 2:
        return _changed(mix)
    pipes = lambda micros: MicroBatches(map(mix, micros), "pipeline=2")  # noqa: E731
    return _changed(pipes, pipeline=2, micro_batch=4)


@case
def written_by_the_loss() -> dict[str, Any]:
    return train(Data(), loss=lambda out, y: F.mse_loss(out, y.clamp_(min=0)))


class Centered(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(2))

    def forward(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.center.lerp_(out.detach().mean(0), 0.5)
        return F.mse_loss(out - self.center, y)


@case
def centered_by_the_loss() -> dict[str, Any]:
    return train(Data(), loss=Centered())


@case
def counted_by_the_loss() -> dict[str, Any]:
    calls = []

    def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        calls.append(out)
        return F.mse_loss(out, y) / len(calls)

    return train(Data(), loss=loss, shard="parameters", drop_last=True)


@case
def mixed_in_an_own_loop() -> dict[str, Any]:
    return train(Data(), own=True, change=lambda b: [0.7 * b[0] + 0.3 * b[0].flip(0), b[1]])


@case
def mixed_in_collate() -> dict[str, Any]:
    def mix(samples: list[Any]) -> Any:
        return [0.7 * t + 0.3 * t.roll(1, 0) for t in default_collate(samples)]

    return train(DataLoader(Data(), 8, collate_fn=mix, num_workers=1))


@case
def mixed_over_gathered_rows() -> dict[str, Any]:
    def mix(batch: Any) -> Any:
        rank = Run.gather(torch.full((len(batch[0]),), RANK))
        whole = [Run.gather(t) for t in batch]
        mine = rank == RANK if (rank == RANK).any() else slice(0, 1)
        return [(0.7 * t + 0.3 * t.flip(0))[mine] for t in whole]

    return _changed(mix)


@case
def mixed_in_the_data() -> dict[str, Any]:
    class Mixed(Data):
        def __getitem__(self, i: int) -> Any:
            share, j = torch.rand(()), int(torch.randint(self.n, ()))
            pairs = zip(super().__getitem__(i), super().__getitem__(j), strict=True)
            return tuple(share * one + (1 - share) * other for one, other in pairs)

    return train(Mixed(), micro_batch=2, epochs=2)


@case
def packed_again() -> dict[str, Any]:
    def pack(b: Any) -> Any:
        x, y = (t.to("cpu").double() for t in b)
        return {"x": x.reshape(-1, 5, 1), "y": y.clone(), "mask": x > 0, "step": torch.ones(())}

    return _changed(pack, forward=lambda m, b: (m(b["x"].squeeze(-1)), b["y"]))


@case
def scaled_by_constants() -> dict[str, Any]:
    return _changed(lambda b: [(b[0] - 0.5) / 0.25, b[1].masked_fill(b[1] > 0.9, 0.0)])


@case
def several_calls() -> dict[str, Any]:
    def forward(model: Any, b: Any) -> Any:
        return model(b[0]) + 0.1 * model(b[0].cos()), b[1]

    return train(Data(), forward=forward, test=Data())


TWO = ("piped", "tensor", "pipeline")
only = sys.argv[2:]
results = {}
for name, call in CASES.items():
    # of pipelines and tensors two workers tell, of the rest three
    if (only and name not in only) or (SIZE == 2) > (name.split("_")[-1] in TWO):
        continue
    try:
        results[name] = call()
    except ronde.RondeError as error:
        results[name] = {"error": f"{type(error).__name__}: {error}"}
if ronde.world().rank == 0:
    Path(sys.argv[1]).write_text(json.dumps(results))
_run_finalizers()  # forked.py ends ranks at once, and loading processes have a folder
