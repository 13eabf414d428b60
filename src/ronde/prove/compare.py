"""What was written down of a run, read again, and the first thing in which two runs differ."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

__all__ = ["BATCH", "EPOCHS", "Comparison", "Difference", "RunTrace", "compare", "lost_from"]

Array = npt.NDArray[np.float64]

RELATIVE = 1e-9
"""What is smaller, relative to the tensor, is never an error."""
EPOCHS = "the number of epochs"
BATCH = "(batch)"
"""What the collate function made, among the outputs."""
PHASES = (
    "contract",
    "distribute",
    "initial weights",
    "initial buffers",
    "order",
    "data",
    "weights between steps",
    "dropout",
    "outputs",
    "loss",
    "gradients",
    "clipped gradients",
    "learning rate",
    "weights",
    "scheduler",
    "buffers",
    "evaluation",
    "optimizer",
    "steps",
)
"""In the order in which they are compared within a step."""
_NOISE = 1e3  # times what rounding alone moves
_SMALL = (
    1e-6  # a tensor that is smaller than this part of the largest is compared against that part
)
_ZERO = 1e-12  # a gradient that is smaller, relative to the largest, is zero in exact arithmetic
_SINGLE = 1e-3  # where the script insists on single precision


@dataclass(frozen=True)
class Difference:
    """The first thing that differs.

    Attributes:
        phase: ``"contract"``, ``"initial weights"``, ``"order"``, ``"data"``, ``"weights between
            steps"``, ``"dropout"``, ``"outputs"``, ``"loss"``, ``"gradients"``, ``"clipped
            gradients"``, ``"learning rate"``, ``"weights"``, ``"scheduler"``, ``"buffers"``,
            ``"evaluation"``, ``"steps"``, ``"optimizer"`` or ``"distribute"``.
        step: optimizer step, from 1; 0 before the first.
        name: of the parameter, module, metric or argument.
        rank: the one that differs, None if all do.
        one: with one process (numbers, or what was said).
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
        """Where it is in the training: what comes first is smaller."""
        return self.step, PHASES.index(self.phase) if self.phase in PHASES else -1


@dataclass
class Comparison:
    """Two runs, side by side.

    Attributes:
        difference: the first; None if they are equal.
        largest, where: largest relative difference that passed as rounding, and of what.
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


class RunTrace:
    """One run, as its ranks wrote it down."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder = folder
        self.size = size
        self.events: list[list[dict[str, Any]]] = []
        for rank in range(size):
            file = folder / f"rank-{rank}" / "events.jsonl"
            lines = file.read_text().splitlines() if file.exists() else []
            self.events.append([json.loads(line) for line in lines if line.endswith("}")])
        self._held: dict[tuple[int, int], dict[str, Array]] = {}

    def first(self, kind: str, rank: int = 0) -> dict[str, Any]:
        """The first event of a kind, empty if there is none."""
        return next((e for e in self.events[rank] if e["kind"] == kind), {})

    @property
    def opened(self) -> bool:
        """Whether the script called ``ronde.distribute``."""
        return bool(self.first("ready"))

    def steps(self, rank: int = 0) -> list[dict[str, Any]]:
        """What was said of each step."""
        return [e for e in self.events[rank] if e["kind"] == "step"]

    def notes(self, only: int | None = None) -> dict[str, list[str]]:
        """What was noted, on any rank or on one: what -> ``phase|place``."""
        found: dict[str, list[str]] = {}
        for rank in range(self.size) if only is None else (only,):
            for event in self.events[rank]:
                if event["kind"] == "note" and event["place"] not in found.setdefault(
                    event["what"], []
                ):
                    found[event["what"]].append(event["place"])
        return found

    def tensors(self, rank: int, step: int) -> dict[str, Array]:
        """What a rank wrote in a step; step -1 is before the first."""
        if (rank, step) not in self._held:
            if len(self._held) > 2 * self.size:
                self._held.clear()
            file = (
                self.folder
                / f"rank-{rank}"
                / ("init.safetensors" if step < 0 else f"step-{step}.safetensors")
            )
            self._held[rank, step] = load_file(file) if file.exists() else {}
        return self._held[rank, step]

    def of(self, rank: int, step: int, phase: str) -> dict[str, Array]:
        """Name -> value of one phase on one rank."""
        start = f"{phase}|"
        return {
            k[len(start) :]: v for k, v in self.tensors(rank, step).items() if k.startswith(start)
        }

    def merged(self, step: int, phase: str) -> dict[str, Array]:
        """Name -> value, from the first rank that has it."""
        found: dict[str, Array] = {}
        for rank in range(self.size):
            for name, value in self.of(rank, step, phase).items():
                found.setdefault(name, value)
        return found

    def outputs(self, step: int, kind: str = "out") -> dict[str, tuple[Array, str]]:
        """Output -> one number for each sample of the global batch, and the shape of a sample; in
        the order of computation.

        Args:
            kind: ``"out"``; ``"in"``, what modules were given; ``"back"``, gradients of the loss at
                the model's output.
        """
        found: dict[str, tuple[Array, str]] = {}
        length = len(self.steps()[step]["ids"]) if step < len(self.steps()) else 0
        filled: dict[str, int] = {}
        for rank in range(self.size):
            said = self.steps(rank)
            if step >= len(said) or said[step]["place"][2]:
                continue
            tensors = self.tensors(rank, step)
            start = said[step]["start"]
            for key, shape in said[step]["shapes"].items():
                if not key.startswith(f"{kind}|"):
                    continue
                name = key[len(kind) + 1 :]
                values, before = found.get(name, (np.full(length, np.nan), json.dumps(shape)))
                if before != json.dumps(shape):
                    before = "differ"
                for i, (low, high) in enumerate(said[step]["micro"]):
                    part = tensors.get(f"{key}|{i}")
                    if part is not None and len(part) == high - low:
                        values[low - start : high - start] = part
                        filled[name] = filled.get(name, 0) + high - low
                found[name] = (values, before)
        return {
            n: v
            for n, v in found.items()
            if filled.get(n, 0) == length and v[1] != "differ" and v[1] != '"differ"'
        }

    def evaluations(self, rank: int = 0) -> list[dict[str, Any]]:
        """What each evaluation gave."""
        return [e for e in self.events[rank] if e["kind"] == "evaluated"]

    def loss_kind(self) -> str:
        """What the loss was found to be, see ``_probe``."""
        return str(self.first("probe").get("loss", "unknown"))


def _size(values: dict[str, Array]) -> float:
    return max(
        (float(np.max(np.abs(v))) for v in values.values() if v.size and np.all(np.isfinite(v))),
        default=0.0,
    )


class _Judge:
    """Is a difference rounding or an error?"""

    def __init__(self, found: Comparison, tolerance: float, single: bool) -> None:
        self.found = found
        self.tolerance = max(tolerance, _SINGLE if single else 0.0)

    def differs(
        self, one: Array, many: Array, floor: Array | None, largest: float, where: str
    ) -> float | None:
        """The relative difference if it is an error, else None."""
        if one.shape != many.shape:
            return float("inf")
        if not one.size or np.array_equal(one, many, equal_nan=True):
            self.found.compared += 1
            return None
        if not (
            np.array_equal(np.isnan(one), np.isnan(many))
            and np.array_equal(np.isinf(one), np.isinf(many))
        ):
            return float("inf")
        good = np.isfinite(one)
        scale = max(float(np.max(np.abs(one[good]), initial=0.0)), _SMALL * largest) or 1.0
        apart = float(np.max(np.abs(one[good] - many[good]), initial=0.0)) / scale
        moved = 0.0
        if floor is not None and floor.shape == one.shape:
            moved = float(np.nanmax(np.abs(one - floor), initial=0.0)) / scale
        self.found.compared += 1
        if apart > max(self.tolerance, _NOISE * min(moved, RELATIVE)):
            return apart
        if apart > self.found.largest:
            self.found.largest, self.found.where = apart, where
        return None


def _number(values: Array) -> Any:
    return float(values.reshape(-1)[0]) if values.size == 1 else None


def _contract(one: RunTrace, many: RunTrace) -> Difference | None:
    a = one.first("opening")
    for rank in range(many.size):
        b = many.first("opening", rank)
        if not a or not b:
            continue
        for key, word in (
            ("samples", "the length of the data set"),
            ("epoch_samples", "the samples of an epoch"),
        ):
            if a[key] != b[key]:
                return Difference("contract", 0, word, None if rank == 0 else rank, a[key], b[key])
        for name in [*a["contract"], *(n for n in b["contract"] if n not in a["contract"])]:
            x, y = a["contract"].get(name), b["contract"].get(name)
            # What a run of the study itself changed is compared elsewhere.
            if x != y and name not in ("micro_batch", "sync_batchnorm"):
                return Difference("contract", 0, name, None if rank == 0 else rank, x, y)
        x, y = one.first("epochs").get("n"), many.first("epochs", rank).get("n")
        if x != y and x is not None and y is not None:
            return Difference("contract", 0, EPOCHS, None if rank == 0 else rank, x, y)
        if a["names"] != b["names"]:
            apart = sorted(set(a["names"]) ^ set(b["names"])) or a["names"]
            return Difference(
                "contract",
                0,
                f"parameter {apart[0]!r}",
                None if rank == 0 else rank,
                len(a["names"]),
                len(b["names"]),
            )
    return None


def compare(
    one: RunTrace, many: RunTrace, floor: RunTrace | None = None, tolerance: float = RELATIVE
) -> Comparison:
    """The first thing in which ``many`` differs from ``one``, in the order in which a training
    computes.

    Args:
        floor: ``one`` again, moved by rounding only.
        tolerance: relative difference that is never an error.
    """
    found = Comparison()
    single = "float32" in one.notes() or "float32" in many.notes()
    found.difference = next(
        _differences(one, many, floor, found, _Judge(found, tolerance, single)), None
    )
    return found


def lost_from(one: RunTrace, many: RunTrace) -> int | None:
    """The step, from 1, from which on neither run has numbers that could be compared: the loss or
    all weights are not finite.
    """
    steps = min(len(one.steps()), *(len(many.steps(r)) for r in range(many.size)))
    first = None
    for k in reversed(range(steps)):
        if not (_lost(one, k) and _lost(many, k)):
            break
        first = k + 1
    return first


def _lost(run: RunTrace, k: int) -> bool:
    if not any(np.isfinite(run.steps(r)[k]["loss"]) for r in range(run.size)):
        return True
    weights = run.merged(k, "weight").values()
    return any(v.size for v in weights) and not any(np.isfinite(v).any() for v in weights)


def _differences(
    one: RunTrace, many: RunTrace, floor: RunTrace | None, found: Comparison, judge: _Judge
) -> Iterator[Difference]:
    contract = _contract(one, many)
    if contract:
        yield contract
    for phase, word in (("init", "initial weights"), ("initbuffer", "initial buffers")):
        yield from _tensors(one, many, None, -1, phase, word, 0, judge, found, ranks=False)
    steps = min(len(one.steps()), min(len(many.steps(r)) for r in range(many.size)))
    for k in range(steps):
        yield from _step(one, many, floor, k, judge, found)
        found.steps = k + 1
        yield from _evaluation(one, many, floor, k + 1, judge, found)
    for rank in range(many.size):
        if len(many.steps(rank)) != len(one.steps()):
            yield Difference(
                "steps", steps + 1, "number of steps", rank, len(one.steps()), len(many.steps(rank))
            )


def _names(one: dict[str, Array], many: dict[str, Array], order: list[str]) -> list[str]:
    known = {n: i for i, n in enumerate(order)}
    return sorted({*one, *many}, key=lambda n: (known.get(n, len(known)), n))


def _tensors(
    one: RunTrace,
    many: RunTrace,
    floor: RunTrace | None,
    k: int,
    phase: str,
    word: str,
    step: int,
    judge: _Judge,
    found: Comparison,
    ranks: bool = True,
) -> Iterator[Difference]:
    """Differences of one phase, every rank's against the one process's."""
    expected = one.merged(k, phase)
    rounded = floor.merged(k, phase) if floor else {}
    largest = _size(expected)
    order = one.first("opening").get("names", [])
    merged = many.merged(k, phase)
    everyone = [many.of(r, k, phase) for r in range(many.size)] if ranks else [merged]
    gradients = phase in ("gradient", "clipped")
    bad: list[Difference] = []
    for name in _names(expected, merged, order):
        if name in found.aside:
            continue
        a = expected.get(name)
        if gradients and a is not None and a.size:
            b = merged.get(name, np.zeros_like(a))
            size = float(np.max(np.abs(a)))
            if 0 < max(size, float(np.max(np.abs(b), initial=0.0))) <= _ZERO * largest:
                found.aside.append(name)
                continue
        for rank, held in enumerate(everyone):
            b2 = held.get(name)
            if b2 is None and (a is None or (ranks and name in merged)):
                continue  # another rank has it
            # no gradient and a gradient of zeros train alike, or the weights will tell
            if gradients:
                a2 = np.zeros_like(b2) if a is None and b2 is not None else a
                b2 = np.zeros_like(a) if b2 is None and a is not None else b2
            else:
                a2 = a
            if a2 is None or b2 is None:
                # what no worker has was not compared: that is no proof
                if phase != "clipped" and name in expected:
                    bad.append(Difference(word, step, name, None, "there", "missing"))
                break
            apart = judge.differs(
                a2, b2, rounded.get(name), largest, f"{word} of {name!r}, step {step}"
            )
            if apart is not None:
                same = a2.shape == b2.shape
                x, y = (_number(a2), _number(b2)) if same else (list(a2.shape), list(b2.shape))
                bad.append(Difference(word, step, name, rank or None, x, y, apart))
                break
    if bad:
        yield _with_others(bad)


def _with_others(bad: list[Difference]) -> Difference:
    d = bad[0]
    others = tuple(b.name for b in bad[1:6])
    return Difference(d.phase, d.step, d.name, d.rank, d.one, d.many, d.relative, others)


def _step(
    one: RunTrace, many: RunTrace, floor: RunTrace | None, k: int, judge: _Judge, found: Comparison
) -> Iterator[Difference]:
    said = one.steps()[k]
    theirs = [many.steps(r)[k] for r in range(many.size)]
    for rank, other in enumerate(theirs):
        if other["ids"] != said["ids"]:
            where = next(
                (
                    i
                    for i, (x, y) in enumerate(zip(said["ids"], other["ids"], strict=False))
                    if x != y
                ),
                -1,
            )
            a, b = (
                (said["ids"][where], other["ids"][where])
                if where >= 0
                else (len(said["ids"]), len(other["ids"]))
            )
            name = (
                f"place {where + 1} of the global batch"
                if where >= 0
                else "the size of the global batch"
            )
            yield Difference("order", k + 1, name, rank or None, a, b)
    known: dict[int, set[str]] = {}  # a sampler that puts back deals one sample several times
    for i, digest in said["digests"]:
        known.setdefault(i, set()).add(digest)
    for rank, other in enumerate(theirs):
        for i, digest in other["digests"]:
            if i in known and digest not in known[i]:
                yield Difference("data", k + 1, f"sample {i}", rank)
    yield from _starts(one, many, floor, k, judge, found)
    for rank, other in enumerate(theirs):
        for where, rates in other["dropout"].items():
            mine = said["dropout"].get(where, [0.0])  # not called at all
            unlike = [rate for rate in rates if rate not in mine]
            if unlike:
                yield Difference(
                    "dropout", k + 1, f"the rate at {where}", rank or None, mine[0], unlike[0]
                )
    yield from _outputs(one, many, floor, k, judge)
    losses = _scalar(said["loss"])
    rounded = _scalar(floor.steps()[k]["loss"]) if floor and k < len(floor.steps()) else None
    for rank, other in enumerate(theirs):
        apart = judge.differs(losses, _scalar(other["loss"]), rounded, 0.0, f"loss, step {k + 1}")
        if apart is not None:
            yield Difference(
                "loss", k + 1, "loss", rank or None, said["loss"], other["loss"], apart
            )
    yield from _tensors(one, many, floor, k, "gradient", "gradients", k + 1, judge, found)
    yield from _tensors(one, many, floor, k, "clipped", "clipped gradients", k + 1, judge, found)
    yield from _rates(said, theirs, "lr", "learning rate", k)
    yield from _tensors(one, many, floor, k, "weight", "weights", k + 1, judge, found)
    yield from _rates(said, theirs, "lr_after", "scheduler", k)
    yield from _tensors(one, many, floor, k, "buffer", "buffers", k + 1, judge, found, ranks=False)


def _rates(
    said: dict[str, Any], theirs: list[dict[str, Any]], key: str, word: str, k: int
) -> Iterator[Difference]:
    for rank, other in enumerate(theirs):
        for i, (a, b) in enumerate(zip(said[key], other[key], strict=False)):
            if abs(a - b) > RELATIVE * abs(a):
                yield Difference(
                    word,
                    k + 1,
                    f"learning rate of group {i}",
                    rank or None,
                    a,
                    b,
                    abs(a - b) / (abs(a) or 1.0),
                )


def _starts(
    one: RunTrace, many: RunTrace, floor: RunTrace | None, k: int, judge: _Judge, found: Comparison
) -> Iterator[Difference]:
    """Weights as a step found them: the script may have changed them since the last one."""
    word = "weights between steps" if k else "initial weights"
    before = one.merged(k - 1, "weight") if k else {}
    expected = {**before, **one.merged(k, "start")}
    changed = {n for r in range(many.size) for n in many.of(r, k, "start")} | set(
        one.merged(k, "start")
    )
    largest = _size(expected)
    rounded = {**floor.merged(k - 1, "weight"), **floor.merged(k, "start")} if floor and k else {}
    bad = []
    for name in _names(
        dict.fromkeys(changed, np.zeros(0)), {}, one.first("opening").get("names", [])
    ):
        if name in found.aside or name not in expected:
            continue
        for rank in range(many.size):
            value = many.of(rank, k, "start").get(name)
            if value is None and k:
                value = many.of(rank, k - 1, "weight").get(name)
            if value is None:
                continue
            apart = judge.differs(
                expected[name],
                value,
                rounded.get(name),
                largest,
                f"{word} of {name!r}, step {k + 1}",
            )
            if apart is not None:
                bad.append(Difference(word, k + 1, name, rank or None, None, None, apart))
                break
    if bad:
        yield _with_others(bad)


def _outputs(
    one: RunTrace, many: RunTrace, floor: RunTrace | None, k: int, judge: _Judge
) -> Iterator[Difference]:
    expected, found = one.outputs(k), many.outputs(k)
    rounded = floor.outputs(k) if floor else {}
    bad = []
    for name, (value, shape) in expected.items():
        if name in found and found[name][1] == shape:
            other = rounded.get(name)
            apart = judge.differs(
                value,
                found[name][0],
                other[0] if other else None,
                0.0,
                f"output of {name!r}, step {k + 1}",
            )
            if apart is not None:
                if name.startswith(BATCH):
                    yield Difference("data", k + 1, name, None, None, None, apart)
                bad.append(Difference("outputs", k + 1, name, None, None, None, apart))
    if bad:
        yield _with_others(bad)


def _scalar(value: Any) -> Array:
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


def _evaluation(
    one: RunTrace,
    many: RunTrace,
    floor: RunTrace | None,
    step: int,
    judge: _Judge,
    found: Comparison,
) -> Iterator[Difference]:
    mine = [e for e in one.evaluations() if e["step"] == step]
    rounded = [e for e in floor.evaluations() if e["step"] == step] if floor else []
    for rank in range(many.size):  # before the results, to which every rank's samples count
        for a, b in zip(
            mine, (e for e in many.evaluations(rank) if e["step"] == step), strict=False
        ):
            if a["samples"] != b["samples"]:
                yield Difference(
                    "evaluation", step, "samples", rank or None, a["samples"], b["samples"]
                )
            known = dict(map(tuple, a.get("digests", [])))
            apart = next(
                (j for j, digest in b.get("digests", []) if known.get(j, digest) != digest), None
            )
            if apart is not None:
                yield Difference("evaluation", step, f"sample {apart}", rank or None)
    for rank in range(many.size):
        theirs = [e for e in many.evaluations(rank) if e["step"] == step]
        if len(theirs) != len(mine):
            yield Difference(
                "evaluation", step, "number of evaluations", rank, len(mine), len(theirs)
            )
            continue
        for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            noise = dict(_flat(rounded[i]["result"])) if i < len(rounded) else {}
            other = dict(_flat(b["result"]))
            for name, value in sorted(_flat(a["result"]), key=lambda pair: pair[0] != "loss"):
                moved = _scalar(noise[name]) if name in noise else None
                off = judge.differs(
                    _scalar(value),
                    _scalar(other.get(name, np.nan)),
                    moved,
                    0.0,
                    f"evaluation's {name}, step {step}",
                )
                if off is not None:
                    yield Difference(
                        "evaluation", step, name, rank or None, value, other.get(name), off
                    )
            found.evaluations += rank == 0
