"""Finds the first difference between two recorded runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ronde.prove.run_trace import RunTrace, Values

__all__ = [
    "BATCH",
    "EPOCHS",
    "ROWS",
    "Comparison",
    "Difference",
    "Rounding",
    "compare",
    "lost_from",
]

Step = dict[str, Any]
Differences = Iterator["Difference"]

RELATIVE_ERROR = 1e-9
"""A smaller difference, relative to the tensor, is never an error."""
EPOCHS = "the number of epochs"
BATCH = "(batch)"
"""The output of the collate function, among the outputs."""
ROWS = "rows of the batch"
PHASES = (
    "contract",
    "distribute",
    "initial weights",
    "initial buffers",
    "loop",
    "order",
    "data",
    "weights between steps",
    "batch",
    "dropout",
    "outputs",
    "loss",
    "gradients",
    "clipped gradients",
    "learning rate",
    "optimizer settings",
    "weights",
    "optimizer state",
    "scheduler",
    "buffers",
    "evaluation",
    "optimizer",
    "steps",
)
"""In the order of comparison within a step."""


@dataclass(frozen=True)
class Difference:
    """The first difference.

    Attributes:
        phase: one of :data:`PHASES`.
        step: optimizer step, from 1; 0 before the first.
        name: of the parameter, module, metric, or argument.
        rank: the one that differs, None if all do.
        one: with one process (numbers, or a text).
        many: with N workers.
        relative: largest difference over the tensor's size.
        others: further names of the same phase and step.
    """

    phase: str
    step: int
    name: str
    rank: int | None = None
    one: Any = None
    many: Any = None
    relative: float | None = None
    others: tuple[str, ...] = ()

    @property
    def place(self) -> tuple[int, int]:
        """Its place in the training; earlier is smaller."""
        return self.step, PHASES.index(self.phase) if self.phase in PHASES else -1


@dataclass
class Comparison:
    """Two runs, side by side.

    Attributes:
        difference: the first; None if they are equal.
        largest, where: largest relative difference that passed as rounding, and its name.
        aside: parameters whose gradient is zero in exact arithmetic: not compared.
        steps: steps compared.
        compared: tensors compared.
    """

    difference: Difference | None = None
    largest: float = 0.0
    where: str = ""
    aside: list[str] = field(default_factory=list)
    steps: int = 0
    compared: int = 0
    evaluations: int = 0


class Rounding:
    """Is a difference rounding or an error?"""

    def __init__(self, result: Comparison, tolerance: float, single: bool) -> None:
        self.result = result
        # the script insists on single precision somewhere
        self.tolerance = max(tolerance, 1e-3 if single else 0.0)

    def differs(
        self, one: Values, many: Values, floor: Values | None, largest: float, where: str
    ) -> float | None:
        """The relative difference if it is an error, else None."""
        if one.shape != many.shape:
            return float("inf")
        if not one.size or np.array_equal(one, many, equal_nan=True):
            self.result.compared += 1
            return None
        if any(not np.array_equal(test(one), test(many)) for test in (np.isnan, np.isinf)):
            return float("inf")
        good = np.isfinite(one)
        # a small tensor is compared relative to this part of the largest
        scale = max(float(np.max(np.abs(one[good]), initial=0.0)), 1e-6 * largest) or 1.0
        relative = float(np.max(np.abs(one[good] - many[good]), initial=0.0)) / scale
        rounding = 0.0
        if floor is not None and floor.shape == one.shape:
            rounding = float(np.nanmax(np.abs(one - floor), initial=0.0)) / scale
        self.result.compared += 1
        # so many times the effect of rounding alone
        if relative > max(self.tolerance, 1e3 * min(rounding, RELATIVE_ERROR)):
            return relative
        if relative > self.result.largest:
            self.result.largest, self.result.where = relative, where
        return None

    def scalars(self, one: float, many: float, floor: float | None, where: str) -> float | None:
        """:meth:`differs` for numbers."""
        rounded = None if floor is None else _scalar(floor)
        return self.differs(_scalar(one), _scalar(many), rounded, 0.0, where)


def compare(
    one: RunTrace, many: RunTrace, floor: RunTrace | None = None, tolerance: float = RELATIVE_ERROR
) -> Comparison:
    """The first difference of ``many`` from ``one``, in the order in which a training computes.

    Args:
        one: the run of one process.
        many: the run of N workers.
        floor: ``one`` again, moved by rounding only.
        tolerance: relative difference that is never an error.
    """
    comparer = _Comparer(one, many, floor, tolerance)
    comparer.result.difference = next(comparer.differences(), None)
    return comparer.result


def lost_from(one: RunTrace, many: RunTrace) -> int | None:
    """The step, from 1, from which on the loss or all weights of both runs are not finite."""
    steps = min(len(one.steps()), *map(len, many.all_steps()))
    first = None
    for k in reversed(range(steps)):
        if not (_is_lost(one, k) and _is_lost(many, k)):
            break
        first = k + 1
    return first


def _is_lost(run: RunTrace, k: int) -> bool:
    if not any(np.isfinite(steps[k]["loss"]) for steps in run.all_steps()):
        return True
    weights = run.merged(k, "weight").values()
    return any(v.size for v in weights) and not any(np.isfinite(v).any() for v in weights)


class _Comparer:
    """Compares two runs phase by phase; the first difference is the answer."""

    def __init__(
        self, one: RunTrace, many: RunTrace, floor: RunTrace | None, tolerance: float
    ) -> None:
        self.one, self.many, self.floor = one, many, floor
        self.result = Comparison()
        single = "float32" in one.notes() or "float32" in many.notes()
        self.judge = Rounding(self.result, tolerance, single)
        self.names: list[str] = one.first("opening").get("names", [])

    def differences(self) -> Differences:
        yield from self._of_ranks(self._contract)
        yield from self._tensors(-1, "init", "initial weights", ranks=False)
        yield from self._tensors(-1, "initbuffer", "initial buffers", ranks=False)
        expected, counts = len(self.one.steps()), [len(s) for s in self.many.all_steps()]
        steps = min(expected, *counts)
        for k in range(steps):
            yield from self._step(k)
            self.result.steps = k + 1
            yield from self._evaluation_data(k + 1)
            yield from self._evaluation_results(k + 1)
        for rank, count in enumerate(counts):
            if count != expected:
                yield Difference("steps", steps + 1, "number of steps", rank, expected, count)

    # -- before the first step ---------------------------------------------------------

    def _of_ranks(self, differences: Callable[[int], Differences]) -> Differences:
        """The first difference of the first rank that has one, and of no rank in particular if all
        have.
        """
        by_rank = [next(differences(rank), None) for rank in range(self.many.size)]
        first = next((d for d in by_rank if d is not None), None)
        if first is not None:
            yield first if None in by_rank else replace(first, rank=None)

    def _contract(self, rank: int) -> Differences:
        a, b = self.one.first("opening"), self.many.first("opening", rank)
        for name, x, y in self._facts(rank, a, b) if a and b else ():
            if x != y:
                yield Difference("contract", 0, name, rank, x, y)

    def _facts(self, rank: int, a: Step, b: Step) -> Iterator[tuple[str, Any, Any]]:
        yield "the length of the data set", a["samples"], b["samples"]
        yield "the samples of an epoch", a["epoch_samples"], b["epoch_samples"]
        for name in {**a["contract"], **b["contract"]}:
            # the study itself changes these two
            if name not in ("micro_batch", "sync_batchnorm"):
                yield name, a["contract"].get(name), b["contract"].get(name)
        x, y = (run.first("epochs", r).get("n") for run, r in ((self.one, 0), (self.many, rank)))
        if x is not None and y is not None:
            yield EPOCHS, x, y
        if a["names"] != b["names"]:
            unlike = sorted(set(a["names"]) ^ set(b["names"])) or a["names"]
            yield f"parameter {unlike[0]!r}", len(a["names"]), len(b["names"])

    # -- a step ------------------------------------------------------------------------

    def _step(self, k: int) -> Differences:
        mine, theirs = self.one.steps()[k], [steps[k] for steps in self.many.all_steps()]

        def ranks(compare_rank: Callable[[int, Step, Step], Differences]) -> Differences:
            return self._of_ranks(lambda rank: compare_rank(k, mine, theirs[rank]))

        for rank, other in enumerate(theirs):
            other["rank"] = rank
        yield from ranks(self._loop)
        yield from ranks(self._order)
        yield from ranks(self._samples)
        yield from self._starts(k)
        yield from self._outputs(k, "out", "data")
        yield from self._rows(k, "out", "data")
        yield from self._outputs(k, "given", "batch")
        yield from self._rows(k, "given", "batch")
        yield from ranks(self._dropout)
        yield from self._outputs(k, "out", "outputs")
        yield from ranks(self._loss)
        yield from self._tensors(k, "gradient", "gradients")
        yield from self._tensors(k, "clipped", "clipped gradients")
        yield from ranks(self._rates("lr", "learning rate"))
        yield from ranks(self._settings)
        yield from self._tensors(k, "weight", "weights")
        yield from self._tensors(k, "state", "optimizer state")
        yield from ranks(self._rates("lr_after", "scheduler"))
        yield from self._tensors(k, "buffer", "buffers")

    def _loop(self, k: int, mine: Step, other: Step) -> Differences:
        """Where the loop is in the data: a loop that was broken off goes on in another epoch."""
        a, b = ((step["epoch"], step["start"]) for step in (mine, other))
        if a != b:
            x, y = (f"epoch {epoch + 1}, from sample {start}" for epoch, start in (a, b))
            yield Difference("loop", k + 1, "the batch that the loop is at", other["rank"], x, y)

    def _order(self, k: int, mine: Step, other: Step) -> Differences:
        a, b, rank = mine["ids"], other["ids"], other["rank"]
        i = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        if i is not None:
            yield Difference("order", k + 1, f"place {i + 1} of the global batch", rank, a[i], b[i])
        elif len(a) != len(b):
            name = "the size of the global batch"
            yield Difference("order", k + 1, name, rank, len(a), len(b))

    def _samples(self, k: int, mine: Step, other: Step) -> Differences:
        known: dict[int, set[str]] = {}  # a sampler with replacement deals a sample several times
        for i, digest in mine["digests"]:
            known.setdefault(i, set()).add(digest)
        for i, digest in other["digests"]:
            if digest not in known.get(i, (digest,)):
                yield Difference("data", k + 1, f"sample {i}", other["rank"])

    def _rows(self, k: int, kind: str, phase: str) -> Differences:
        """The rows of the whole batch, which may be fewer than the samples asked for."""
        one, many = self.one.rows(k, kind), self.many.rows(k, kind)
        if one is not None and many is not None and one != many:
            yield Difference(phase, k + 1, ROWS, None, one, many)

    def _starts(self, k: int) -> Differences:
        """Weights at the start of a step: the script may have changed them since the last one."""
        phase = "weights between steps" if k else "initial weights"
        expected = _start_weights(self.one, k)
        rounded = _start_weights(self.floor, k) if self.floor and k else {}
        changed = set(self.one.merged(k, "start"))
        changed.update(*(self.many.of(r, k, "start") for r in range(self.many.size)))
        largest = _size(expected)
        bad = []
        for name in self._sorted(changed & set(expected) - set(self.result.aside)):
            equal, difference = 0, None
            for rank in range(self.many.size):
                value = self.many.of(rank, k, "start").get(name)
                if value is None and k:
                    value = self.many.of(rank, k - 1, "weight").get(name)
                if value is None:
                    continue
                where = f"{phase} of {name!r}, step {k + 1}"
                floor = rounded.get(name)
                relative = self.judge.differs(expected[name], value, floor, largest, where)
                if relative is None:
                    equal += 1
                elif difference is None:
                    difference = Difference(phase, k + 1, name, rank, relative=relative)
            if difference is not None:
                bad.append(difference if equal else replace(difference, rank=None))
        yield from _first_of(bad)

    def _dropout(self, k: int, mine: Step, other: Step) -> Differences:
        for where, rates in other["dropout"].items():
            known = mine["dropout"].get(where, [0.0])  # not called at all
            new = [rate for rate in rates if rate not in known]
            if new:
                name = f"the rate at {where}"
                yield Difference("dropout", k + 1, name, other["rank"], known[0], new[0])

    def _outputs(self, k: int, kind: str, phase: str) -> Differences:
        theirs = self.many.outputs(k, kind)
        rounded = self.floor.outputs(k, kind) if self.floor else {}
        bad = []
        for name, (value, shape) in self.one.outputs(k, kind).items():
            if name not in theirs or theirs[name][1] != shape:
                continue
            if name.startswith(BATCH) == (phase == "outputs"):
                continue
            floor = rounded[name][0] if name in rounded else None
            where = f"output of {name!r}, step {k + 1}"
            relative = self.judge.differs(value, theirs[name][0], floor, 0.0, where)
            if relative is not None:
                bad.append(Difference(phase, k + 1, name, relative=relative))
        yield from _first_of(bad)

    def _loss(self, k: int, mine: Step, other: Step) -> Differences:
        rounded = self.floor.steps() if self.floor else []
        floor = rounded[k]["loss"] if k < len(rounded) else None
        a, b = mine["loss"], other["loss"]
        relative = self.judge.scalars(a, b, floor, f"loss, step {k + 1}")
        if relative is not None:
            yield Difference("loss", k + 1, "loss", other["rank"], a, b, relative)

    def _rates(self, key: str, phase: str) -> Callable[[int, Step, Step], Differences]:
        def differences(k: int, mine: Step, other: Step) -> Differences:
            for i, (a, b) in enumerate(zip(mine[key], other[key], strict=False)):
                if abs(a - b) > RELATIVE_ERROR * abs(a):
                    name, relative = f"learning rate of group {i}", abs(a - b) / (abs(a) or 1.0)
                    yield Difference(phase, k + 1, name, other["rank"], a, b, relative)

        return differences

    def _settings(self, k: int, mine: Step, other: Step) -> Differences:
        """Settings of the optimizer's groups, and the parameters that they train."""
        rank, one, many = other["rank"], mine["groups"], other["groups"]

        def differs(name: str, a: Any, b: Any) -> Differences:
            if a != b:
                yield Difference("optimizer settings", k + 1, name, rank, a, b)

        yield from differs("number of groups", len(one), len(many))
        owned = set(self.many.of(rank, k, "weight"))
        for i, (a, b) in enumerate(zip(one, many, strict=False)):
            x, y = set(a["params"]) & owned, set(b["params"])
            only = f"parameters of group {i} that are trained only there"
            yield from differs(only, sorted(x - y)[:4], sorted(y - x)[:4])
            for key in a.keys() & b.keys() - {"params"}:
                yield from differs(f"{key} of group {i}", a[key], b[key])

    def _tensors(self, k: int, kind: str, phase: str, ranks: bool = True) -> Differences:
        """Every rank's tensors of one kind against those of one process."""
        expected, merged = self.one.merged(k, kind), self.many.merged(k, kind)
        rounded = self.floor.merged(k, kind) if self.floor and k >= 0 else {}
        everyone = [self.many.of(r, k, kind) for r in range(self.many.size)] if ranks else [merged]
        is_gradient = kind in ("gradient", "clipped")
        largest = _size(expected)
        bad: list[Difference] = []
        for name in self._sorted({*expected, *merged} - set(self.result.aside)):
            mine = expected.get(name)
            if kind == "state":
                parameter, _, key = name.rpartition("|")
                if parameter in self.result.aside:
                    continue
                largest = _size({n: v for n, v in expected.items() if n.endswith(f"|{key}")})
            if is_gradient and mine is not None and mine.size:
                theirs_size = _magnitude(merged[name]) if name in merged else 0.0
                # zero in exact arithmetic
                if 0 < max(_magnitude(mine), theirs_size) <= 1e-12 * largest:
                    self.result.aside.append(name)
                    continue
            equal, difference = 0, None
            for rank, tensors in enumerate(everyone):
                theirs = tensors.get(name)
                if theirs is None and (mine is None or (ranks and name in merged)):
                    continue  # another rank has it
                a, b = mine, theirs
                if is_gradient:
                    # No gradient and a gradient of zeros train alike, or the weights will tell.
                    a = np.zeros_like(theirs) if a is None and theirs is not None else a
                    b = np.zeros_like(mine) if b is None and mine is not None else b
                if a is None or b is None:
                    # a tensor that no worker has was not compared: that is no proof
                    if kind not in ("clipped", "state") and name in expected:
                        bad.append(Difference(phase, k + 1, name, None, "there", "missing"))
                    break
                where = f"{phase} of {name!r}, step {k + 1}"
                relative = self.judge.differs(a, b, rounded.get(name), largest, where)
                if relative is None:
                    equal += 1
                elif difference is None:
                    x: Any = _number(a) if a.shape == b.shape else list(a.shape)
                    y: Any = _number(b) if a.shape == b.shape else list(b.shape)
                    difference = Difference(phase, k + 1, name, rank, x, y, relative)
            if difference is not None:
                bad.append(difference if equal else replace(difference, rank=None))
        yield from _first_of(bad)

    def _sorted(self, names: set[str]) -> list[str]:
        known = {n: i for i, n in enumerate(self.names)}
        return sorted(names, key=lambda n: (known.get(n, len(known)), n))

    # -- an evaluation -----------------------------------------------------------------

    def _evaluation_data(self, step: int) -> Differences:
        """Samples of each rank, before results, to which every rank's samples contribute."""
        mine = _evaluations(self.one, 0, step)
        for rank in range(self.many.size):
            for a, b in zip(mine, _evaluations(self.many, rank, step), strict=False):
                x, y = a["samples"], b["samples"]
                if x != y:
                    yield Difference("evaluation", step, "samples", rank or None, x, y)
                known = dict(map(tuple, a.get("digests", [])))
                for i, digest in b.get("digests", []):
                    if known.get(i, digest) != digest:
                        yield Difference("evaluation", step, f"sample {i}", rank or None)

    def _evaluation_results(self, step: int) -> Differences:
        mine = _evaluations(self.one, 0, step)
        rounded = _evaluations(self.floor, 0, step) if self.floor else []
        for rank in range(self.many.size):
            theirs = _evaluations(self.many, rank, step)
            if len(theirs) != len(mine):
                name, n = "number of evaluations", len(mine)
                yield Difference("evaluation", step, name, rank, n, len(theirs))
                continue
            for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
                noise = dict(_flat(rounded[i]["result"])) if i < len(rounded) else {}
                values, others = dict(_flat(a["result"])), dict(_flat(b["result"]))
                for name in sorted(values, key=lambda name: name != "loss"):
                    x, y = values[name], others.get(name)
                    where = f"evaluation's {name}, step {step}"
                    other = np.nan if y is None else y
                    relative = self.judge.scalars(x, other, noise.get(name), where)
                    if relative is not None:
                        yield Difference("evaluation", step, name, rank or None, x, y, relative)
                self.result.evaluations += rank == 0


def _evaluations(run: RunTrace, rank: int, step: int) -> list[dict[str, Any]]:
    return [e for e in run.evaluations(rank) if e["step"] == step]


def _start_weights(run: RunTrace, k: int) -> dict[str, Values]:
    before = run.merged(k - 1, "weight") if k else {}
    return {**before, **run.merged(k, "start")}


def _first_of(bad: list[Difference]) -> Differences:
    if bad:
        yield replace(bad[0], others=tuple(b.name for b in bad[1:6]))


def _magnitude(value: Values) -> float:
    return float(np.max(np.abs(value), initial=0.0))


def _size(values: dict[str, Values]) -> float:
    finite = (v for v in values.values() if v.size and np.all(np.isfinite(v)))
    return max(map(_magnitude, finite), default=0.0)


def _number(values: Values) -> float | None:
    return float(values.reshape(-1)[0]) if values.size == 1 else None


def _scalar(value: Any) -> Values:
    return np.array([value], dtype=np.float64)


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, bool | int | float):
        yield path, float(value)
    elif isinstance(value, dict):
        for k, v in value.items():
            yield from _flat(v, f"{path}.{k}" if path else str(k))
    elif isinstance(value, list):
        for i, v in enumerate(value):
            yield from _flat(v, f"{path}[{i}]")
