"""Callbacks: a script's own are called at the run's events, after Ronde's, and not by tools."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import ronde
import zygote
from processes import PATHS, TESTS, forked
from ronde.plan import shares


class ClassCounts:
    """Counts the samples of each class that the run has trained on."""

    def __init__(self, classes: int) -> None:
        self.seen = torch.zeros(classes, dtype=torch.int64)

    def step_ended(self, step) -> None:
        for (low, high), (_, target) in zip(step.share.micro, step.micros, strict=True):
            if high > low:  # else a stand-in on a worker without samples
                self.seen += torch.bincount(target, minlength=len(self.seen))


class Events:
    """Notes the event, the step, and the weights' sum at each."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.loss = 0.0

    def __note(self, name: str, step: int) -> None:
        self.names.append(f"{name} {step}")

    def before_passes(self, step) -> None:
        self.__note("before_passes", step.number)

    def after_exchange(self, step) -> None:
        self.loss = float(step.loss)
        self.__note("after_exchange", step.number)

    def after_update(self, step) -> None:
        self.__note("after_update", step.number)

    def step_ended(self, step) -> None:
        assert float(step.loss) == self.loss and step.share.global_samples == 8
        self.__note("step_ended", step.number)

    def evaluated(self, parts, result) -> None:
        self.__note(result.name, parts.state.step)

    def epoch_ended(self, parts) -> None:
        self.__note("epoch_ended", parts.state.epoch)

    def ended(self, parts, status) -> None:
        self.__note(status, parts.state.step)


def distribute(callbacks, n: int = 26, **options):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    data = TensorDataset(torch.randn(n, 4), torch.arange(n) % 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ronde.distribute(
        model, optimizer, data, loss=F.cross_entropy, callbacks=callbacks, **options
    ), data


def test_a_scripts_own_is_called_at_each_event(monkeypatch):
    monkeypatch.setenv("RONDE_RUNS", "none")
    events = Events()
    run, data = distribute([events], n=16, batch_size=8)
    for _ in run.epochs(1):
        for batch in run.batches():
            run.step(batch)
        run.evaluate(data, name="val")
    assert events.names == [
        *("before_passes 0", "after_exchange 0", "after_update 0", "step_ended 1"),
        *("before_passes 1", "after_exchange 1", "after_update 1", "step_ended 2"),
        *("val 2", "epoch_ended 0", "completed 2"),
    ]


def test_one_that_skips_a_step_leaves_the_weights_alone(monkeypatch):
    monkeypatch.setenv("RONDE_RUNS", "none")

    class Skips:
        def after_exchange(self, step) -> None:
            step.action = "skip" if step.number == 1 else ""

    run, _ = distribute([Skips()], n=16, batch_size=8)
    weights = []
    for batch in run.batches():
        run.step(batch)
        weights.append(run.model.weight.detach().clone())
    assert torch.equal(*weights) and run.state.step == 2
    run.port.parts.place.ended = True


def test_a_tools_steps_are_not_the_scripts(monkeypatch):
    monkeypatch.setenv("RONDE_RUNS", "none")
    events = Events()
    run, data = distribute([events], n=16, batch_size=8)
    with run.port.restoring(), run.port.unwatched():
        run.port.prepare()
        share = next(iter(shares(0, 0, 16, 8, 0, 1)))
        run.port.step(share, [data[:8]])
    assert events.names == [] and run.state.step == 0
    run.port.parts.place.ended = True


@pytest.mark.parametrize("wrong", [ClassCounts, object(), type("Typo", (), {"on_step": print})()])
def test_what_has_no_event_is_refused(wrong, monkeypatch):
    monkeypatch.setenv("RONDE_RUNS", "none")
    with pytest.raises(ronde.ArgumentError, match="none of the methods batch_taken"):
        distribute([wrong], batch_size=8)


def worker(plan: str) -> None:
    counts = ClassCounts(3)
    run, _ = distribute([counts], batch_size=5, plan=plan, micro_batch=2)
    for _ in run.epochs(2):
        for batch in run.batches():
            run.step(batch)
    assert run.reduce(counts.seen, "sum").tolist() == [18, 18, 16], counts.seen
    assert run.rank or counts.seen.sum() < 52


def test_classes_are_counted_once_on_any_number_of_workers():
    for plan in ("replicate", "shard=parameters"):
        done = zygote.run(
            forked(Path(__file__), 2, plan),
            env={**os.environ, "PYTHONPATH": PATHS, "RONDE_RUNS": "none"},
            cwd=TESTS,
            timeout=100,
        )
        assert done.returncode == 0, f"{done.stdout}{done.stderr}"


if __name__ == "__main__":
    import sys

    worker(sys.argv[1])
