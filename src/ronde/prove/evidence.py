"""Evidence for a diagnosis: what the two traces show, and what short experiments show."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ronde.prove.compare import Difference, compare
from ronde.prove.experiment import Experiment
from ronde.prove.run_trace import RunTrace
from ronde.prove.trace_writer import modules_of

__all__ = ["Case", "clock_of", "module_of"]


@dataclass
class Case:
    """The material of a diagnosis.

    Attributes:
        one: the run of one process.
        many: the run of N workers.
        difference: the first.
        run: runs an experiment; None if it failed.
        replicated: whether the plan splits only the data.
        replicate_equal: whether plain replicate is equal.
    """

    one: RunTrace
    many: RunTrace
    difference: Difference
    run: Callable[[Experiment], RunTrace | None]
    replicated: bool = True
    replicate_equal: bool = False

    @property
    def k(self) -> int:
        """The step that differs, from 0."""
        return self.difference.step - 1

    @property
    def names(self) -> tuple[str, ...]:
        """The names that differ."""
        return self.difference.name, *self.difference.others

    @property
    def runs(self) -> tuple[RunTrace, RunTrace]:
        """Both runs."""
        return self.one, self.many

    def experiment(self, experiment: Experiment) -> RunTrace | None:
        """The run of an experiment; None if it took no step."""
        trace = self.run(experiment)
        return trace if trace is not None and trace.steps() else None

    def left(self, trace: RunTrace) -> Difference | None:
        """The first difference of an experiment from one process."""
        return compare(self.one, trace).difference

    def opening(self, key: str) -> list[str]:
        """A list that was recorded at ``distribute``."""
        names: list[str] = self.one.first("opening").get(key, [])
        return names

    def reads_of_rank(self, *phases: str) -> str | None:
        """Where the script asks for its rank or the number of workers."""
        places = self.many.places("rank", *phases)
        return f"the script reads {', '.join(places[:3])}" if places else None

    def is_by_rank(self) -> bool | None:
        """Whether the difference goes away if each worker is told that it is alone; None if the
        script does not ask, or the run failed.
        """
        alone = self.experiment(Experiment.ALONE) if self.many.places("rank") else None
        if alone is None:
            return None
        left = self.left(alone)
        return left is None or left.place > self.difference.place

    def asks_for_rank(self, *phases: str) -> str | None:
        """Where the script asks for its rank, unless that makes no difference, as for printing."""
        return None if self.is_by_rank() is False else self.reads_of_rank(*phases)

    def dropped_rows(self, kind: str) -> str | None:
        """Whether a batch has fewer or more rows than samples: as handed out (``"out"``), or as
        ``run.step`` gets it (``"given"``).
        """
        for run in self.runs:
            for rank, steps in enumerate(run.all_steps()):
                step = steps[self.k]
                asked = [high - low for low, high in step["micro"]]
                for rows, samples in zip(step["rows"].get(kind, []), asked, strict=False):
                    if rows is not None and rows != samples:
                        who = "one process" if run.size == 1 else f"rank {rank}"
                        got = "the collate function returns" if kind == "out" else "run.step() gets"
                        return f"on {who}, {got} {rows} rows for {samples} samples"
        return None

    def draws(self, key: str = "drawn") -> str | None:
        """Where the step draws random numbers that may differ, if it does."""
        if self.one.has_same_draws and key == "drawn":
            return self._unkeyed_draws()
        drawn = {g for t in self.runs for s in t.steps() for g in s.get(key, [])}
        phase = "step" if key == "drawn" else "update"
        if not drawn:
            own = ", ".join(self.many.places("own generator", phase)[:3])
            return f"drawn from a generator of the script's own: {own}" if own else None
        where = ", ".join(self.one.places("random", phase)[:3])
        return f"drawn from {modules_of(drawn)}" + (f": {where}" if where else "")

    def _unkeyed_draws(self) -> str | None:
        """Draws of the step that may still depend on the number of workers."""
        if unfixed := self.many.places("unfixed", "step"):
            return f"drawn in another way on each worker: {', '.join(unfixed[:3])}"
        after = {
            step["generators"]
            for t in self.runs
            for steps in t.all_steps()
            for step in steps[self.k : self.k + 1]
            if any(low < high for low, high in step["micro"])
        }
        drawn = {g for t in self.runs for s in t.steps() for g in s["drawn"]}
        # Those who drew equally often drew the same numbers.
        return f"drawn from {modules_of(drawn)}" if drawn and len(after) > 1 else None

    def shares(self) -> list[list[int]]:
        """Samples of each worker, step by step."""
        return [
            [sum(high - low for low, high in step["micro"]) for step in steps]
            for steps in zip(*self.many.all_steps(), strict=False)
        ]

    def splitting(self) -> Difference | bool | None:
        """The difference of one process that splits the batch as the workers do; False if there is
        none, None if it failed, or the run gets its batches as another splits them.
        """
        follows = self.one.first("ready").get("follows")
        split = None if follows else self.experiment(Experiment.SPLIT)
        if split is None:
            return None
        left = self.left(split)
        same = left is not None and left.phase != "steps" and left.step <= self.difference.step
        return left if left is not None and same else False

    def has_other_inputs(self, name: str) -> bool:
        """Whether a module's inputs differ already."""
        one, many = (run.outputs(self.k, "in") for run in self.runs)
        for key, (value, shape) in one.items():
            if module_of(key) == name and key in many and many[key][1] == shape:
                scale = float(np.nanmax(np.abs(value), initial=0.0)) or 1.0
                if float(np.nanmax(np.abs(value - many[key][0]), initial=0.0)) > 1e-9 * scale:
                    return True
        return False

    def rewritten_weights(self) -> set[str]:
        """Weights that are written to within the step."""
        steps = (steps[self.k] for run in self.runs for steps in run.all_steps())
        return {name for step in steps for name in step.get("rewritten", [])}

    def drift(self) -> str | None:
        """Whether workers that hold the whole model have different weights after the step."""
        steps = min(map(len, self.many.all_steps()))
        if not self.replicated or not 0 < self.difference.step <= steps:
            return None
        first = self.many.of(0, self.k, "weight")
        for rank in range(1, self.many.size):
            for name, theirs in self.many.of(rank, self.k, "weight").items():
                mine = first.get(name, theirs)
                floor = 1e-9 * float(np.abs(mine).max(initial=0.0))
                if mine.shape == theirs.shape and not np.allclose(
                    mine, theirs, rtol=0.0, atol=floor, equal_nan=True
                ):
                    return (
                        f"after step {self.difference.step} the workers' own weights differ: "
                        f"{name!r} of rank {rank} is not that of rank 0"
                    )
        return None

    def source(self) -> Difference:
        """The difference, or that of one process that splits the batch: a pipeline's stages record
        no outputs, and a part of the model may be seen there alone.
        """
        if self.difference.phase not in ("outputs", "loss"):
            return self.difference
        left = self.splitting()
        return left if isinstance(left, Difference) and left.phase == "outputs" else self.difference

    def kind_of(self, module: str) -> str | None:
        """The class of a module of the model."""
        kind: str | None = self.one.first("opening").get("modules", {}).get(module)
        return kind

    def equal_before(self) -> str | None:
        """Whether an earlier step, with as many samples on each worker, is equal: what differs is
        carried from batch to batch.
        """
        k, shares = self.k, self.shares()
        if not 0 < k < len(shares) or shares[k] not in shares[:k]:
            return None
        steps = "the first step is" if k == 1 else f"the first {k} steps are"
        return f"{steps} equal, with as many samples on each worker"

    def padded(self) -> str | None:
        """Whether workers' batches are padded to another length than that of one process."""
        mine = self.one.steps()[self.k]["shapes"]
        for rank, steps in enumerate(self.many.all_steps()):
            for key, shape in steps[self.k]["shapes"].items():
                if key.startswith("out|(batch)") and shape != mine.get(key, shape):
                    return f"a sample has shape {mine[key]} in one process, {shape} on rank {rank}"
        return None


def clock_of(run: RunTrace, *phases: str) -> str | None:
    """Where the script reads the clock."""
    places = run.places("clock", *phases)
    return f"the script calls {', '.join(places[:3])}" if places else None


def module_of(name: str) -> str:
    """The module of an output."""
    return re.sub(r"( \(call \d+\)|\[.*)$", "", name)
