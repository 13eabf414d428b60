"""What rules see: a run's record and health as NumPy columns over steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ronde.watch.record import (
    Checkpointed,
    Ended,
    Epoch,
    Evaluated,
    Event,
    Logged,
    NonFiniteStep,
    Resumed,
    Started,
    StepRecorded,
)

__all__ = ["HealthView", "HostView", "RuleView", "Table"]

HEALTH = ("gradient", "weight", "update", "same")
ACTIVATIONS = ("rms", "dead", "saturated")
INPUTS = ("mean", "std", "constant")
HOST = (
    *("time", "seconds", "idle", "cores", "memory", "memory_limit", "disk_free", "disk_total"),
    *("throttled", "last_step"),
)
DEVICES = ("gpu", "gpu_memory", "gpu_memory_limit")
RANKS = ("steps", "waited", "loading")


class Table:
    """Rows over steps, columns by name; what a resume made void goes.

    Args:
        columns: name -> numbers in a cell; 0 for a plain number.

    Example:
        >>> table = Table({"loss": 0})
        >>> table.add(1, loss=2.5)
        >>> table["loss"]
        array([2.5])
    """

    def __init__(self, columns: Mapping[str, int]) -> None:
        self._rows = 0
        self._step = np.zeros(64, np.int64)
        self._data = {n: np.zeros((64, w) if w else 64) for n, w in columns.items()}

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, name: str) -> Any:
        """A column, in the order of steps: float64 of shape (rows,) or (rows, width)."""
        return self._data[name][: self._rows]

    @property
    def step(self) -> Any:
        """The step of each row: int64."""
        return self._step[: self._rows]

    def add(self, step: int, **values: Any) -> None:
        """Append a row."""
        # Doubling: appending costs the same however long the run is.
        if self._rows == len(self._step):
            self._step = np.concatenate([self._step, np.zeros_like(self._step)])
            self._data = {n: np.concatenate([c, np.zeros_like(c)]) for n, c in self._data.items()}
        self._step[self._rows] = step
        for name, value in values.items():
            self._data[name][self._rows] = value
        self._rows += 1

    def cut(self, step: int) -> None:
        """Forget the rows above ``step``."""
        self._rows = int(np.searchsorted(self.step, step, side="right"))


class HealthView:
    """``health.jsonl``: per tensor and per layer, over measured steps.

    Attributes:
        names, places, elements, frozen: per tensor.
        layers, layer_places, kinds: per layer, in forward order.
        tensors: :class:`Table` of ``gradient``, ``weight``, ``update`` (norms; NaN where it was not
            measured) and ``same`` (fraction of sampled elements that an update left as they were).
        activations: :class:`Table` of ``rms``, ``dead``, ``saturated`` per layer.
        inputs: :class:`Table` of ``mean``, ``std``, and ``constant`` (fraction of features that do
            not vary in a batch) of the first tensor of rank 0's batches with floating point.
        bad: the lines with ranks whose loss, gradient, or activation was not finite.
    """

    def __init__(self) -> None:
        self.every = 0
        self.names: list[str] = []
        self.places: list[str] = []
        self.elements: Any = np.zeros(0)
        self.frozen: Any = np.zeros(0, bool)
        self.layers: list[str] = []
        self.layer_places: list[str] = []
        self.kinds: list[str] = []
        self.tensors, self.activations = Table({}), Table({})
        self.inputs = Table(dict.fromkeys(INPUTS, 0))
        self._targets: list[tuple[int, Any]] = []
        self._targets_before: Any = np.zeros(0)  # the last start or resume
        self.bad: list[dict[str, Any]] = []
        self.samples: dict[int, list[int]] = {}

    def take(self, line: Mapping[str, Any]) -> None:
        """Add a line of ``health.jsonl``."""
        kind, step = line["type"], int(line["step"])
        if kind == "tensors":
            self._describe(line)
        elif kind == "health":
            if line.get("samples"):
                self.samples[step] = [int(line["samples"][0]), int(line["samples"][1]) - 1]
            if line.get("bad_ranks"):
                self.bad.append(dict(line))
            else:
                values = {n: _numbers(line.get(n), len(self.names)) for n in HEALTH}
                self.tensors.add(step, **values)
        elif kind == "activations":
            values = {n: _numbers(line.get(n), len(self.layers)) for n in ACTIVATIONS}
            self.activations.add(step, **values)
        elif kind == "inputs":
            self.inputs.add(step, **{n: float(line[n]) for n in INPUTS})
        elif kind == "targets":
            self._targets.append((step, np.array(line["counts"], float)))

    @property
    def targets(self) -> Any:
        """Samples per class in measured batches of rank 0: float64 of shape (classes,)."""
        counts = self._targets[-1][1] if self._targets else np.zeros(0)
        total = np.zeros(max(len(counts), len(self._targets_before)))
        for each in (counts, self._targets_before):
            total[: len(each)] += each
        return total

    def _describe(self, line: Mapping[str, Any]) -> None:
        names, layers = list(line["names"]), list(line.get("layers", ()))
        if (names, layers) != (self.names, self.layers):
            self.tensors = Table(dict.fromkeys(HEALTH, len(names)))
            self.activations = Table(dict.fromkeys(ACTIVATIONS, len(layers)))
        self.every, self.names, self.layers = int(line["every"]), names, layers
        self.places = list(line["places"])
        self.elements = np.array(line["elements"], float)
        self.frozen = np.array(line["frozen"], bool)
        self.layer_places = list(line.get("layer_places", ()))
        self.kinds = list(line.get("layer_kinds", ()))

    def cut(self, step: int) -> None:
        """Forget what was measured above ``step``. The workers that go on count targets anew."""
        self._targets = [(s, counts) for s, counts in self._targets if s <= step]
        self._targets_before, self._targets = self.targets, []
        for table in (self.tensors, self.activations, self.inputs):
            table.cut(step)
        self.bad = [line for line in self.bad if line["step"] <= step]

    def place(self, name: str | None) -> str:
        """``file:line`` of a tensor or a layer, or empty."""
        known = dict(zip(self.layers, self.layer_places, strict=False))
        return (known | dict(zip(self.names, self.places, strict=False))).get(name or "", "")


class HostView:
    """``resources.jsonl`` of one host since the last start, over lines in which it trained.

    Attributes:
        host: its name.
        ranks: those that run there.
        devices: how many GPUs of theirs are measured.
        table: :class:`Table` of the plain fields of a line; ``cpu`` (95th percentile); per device
            ``gpu`` (95th percentile), ``gpu_memory``, ``gpu_memory_limit``; per rank ``steps``,
            ``waited``, ``loading``. NaN: not measured.
        why: per rank, why it may be slow by the newest line.
    """

    def __init__(self, host: str, ranks: Sequence[int], devices: int) -> None:
        self.host, self.ranks, self.devices = host, list(ranks), devices
        self.why: dict[int, list[str]] = {}
        columns = dict.fromkeys((*HOST, "cpu"), 0)
        columns |= dict.fromkeys(DEVICES, max(devices, 1)) | dict.fromkeys(RANKS, len(ranks))
        self.table = Table(columns)

    def take(self, line: Mapping[str, Any]) -> None:
        """Add a line of this host."""
        numbers = {n: math.nan if line.get(n) is None else float(line[n]) for n in HOST}
        ranks, none = line["ranks"], [None] * (not self.devices)
        self.why = {each["rank"]: list(each["why"]) for each in ranks}
        self.table.add(
            int(line["step"]),
            **numbers,
            cpu=_last(line["cpu"]),
            gpu=_numbers([_last(busy) for busy in line["gpu"]] or none, 1),
            **{n: _numbers(line[n] or none, 1) for n in DEVICES[1:]},
            **{n: _numbers([each[n] for each in ranks], 1) for n in RANKS},
        )

    def newest(self, seconds: float) -> slice | None:
        """The rows of the newest ``seconds``; None if it has not trained for so long."""
        table = self.table
        if not len(table):
            return None
        first = int(np.searchsorted(table["time"], table["time"][-1] - seconds, side="right"))
        whole = table["seconds"][first:].sum() > 0.9 * seconds
        return slice(first, len(table)) if whole and len(table) - first > 1 else None


def _last(values: Sequence[float]) -> float:
    return float(values[-1]) if values else math.nan


def _numbers(values: Sequence[Any] | None, width: int) -> Any:
    """A row: None is NaN, and "nan", "inf", "-inf" are what they say."""
    if values is None:
        return np.full(width, np.nan)
    return np.array([np.nan if v is None else float(v) for v in values])


class RuleView:
    """A run so far, as rules see it. Void steps are gone.

    Attributes:
        start: the last ``start``, None before the first.
        evaluations: (name, metric) -> :class:`Table` with the column ``value``.
        non_finite: steps that ``on_nan`` left out.
        ended: the last ``end``, None while it trains.
        health: what ``ronde run --watch`` measured.
        continues: whether the run repeats another one from a checkpoint, and begins with its rows.
        several: whether several runs share the record and one loop.
        hosts: name -> :class:`HostView`.
        starting: the newest line of ``resources.jsonl`` before the first step; None after it.
        checkpoint_bytes: of the newest checkpoint; 0: none was written.

    Example: a rule of one's own, in a file for ``ronde watch --rules``::

        from ronde.watch import Alert

        def loss_too_high(view, limit=5.0):
            if view.loss[-1] > limit:
                yield Alert(view.step[-1], f"loss {view.loss[-1]:.3g}, above {limit:g}")
    """

    def __init__(self) -> None:
        self.start: Started | None = None
        self.evaluations: dict[tuple[str, str], Table] = {}
        self.non_finite: list[NonFiniteStep] = []
        self.ended: Ended | None = None
        self.health = HealthView()
        self.continues = False
        self.several = False
        self.hosts: dict[str, HostView] = {}
        self.starting: Mapping[str, Any] | None = None
        self.checkpoint_bytes = 0
        self._pauses: set[int] = set()
        self._steps = Table({"loss": 0, "lr": 0, "samples": 0, "time": 0})

    @property
    def step(self) -> Any:
        """Recorded steps: int64. Not every step is recorded after the first thousand."""
        return self._steps.step

    @property
    def loss(self) -> Any:
        """Of each recorded step."""
        return self._steps["loss"]

    @property
    def lr(self) -> Any:
        """Of each recorded step."""
        return self._steps["lr"]

    @property
    def samples(self) -> Any:
        """Trained on up to each recorded step."""
        return self._steps["samples"]

    @property
    def time(self) -> Any:
        """When each recorded step was taken, in seconds since 1970."""
        return self._steps["time"]

    @property
    def precision(self) -> str:
        """Of the plan."""
        return "fp32" if self.start is None else str(self.start.plan.get("precision", "fp32"))

    @property
    def on_gpus(self) -> bool:
        """Whether it trains on an accelerator."""
        return self.start is not None and self.start.device != "cpu"

    def step_seconds(self) -> tuple[Any, Any]:
        """Recorded steps whose step before was recorded too, and their seconds: without those that
        began with an epoch, an evaluation, or a checkpoint.
        """
        step, seconds = self.step[1:], np.diff(self.time)
        known = np.diff(self.step) == 1
        if self._pauses:
            known &= ~np.isin(step - 1, list(self._pauses))
        return step[known], seconds[known]

    def take_resources(self, line: Mapping[str, Any]) -> None:
        """Add a line of ``resources.jsonl``."""
        if not line.get("training"):
            self.starting = line
            return
        self.starting = None
        ranks, devices = [each["rank"] for each in line["ranks"]], len(line["gpu"])
        host = self.hosts.get(line["host"])
        if host is None or host.ranks != ranks or host.devices != devices:
            host = self.hosts[line["host"]] = HostView(line["host"], ranks, devices)
        host.take(line)

    def tensor(self, name: str) -> dict[str, Any]:
        """Columns ``step``, ``gradient``, ``weight``, ``update``, ``same`` of a parameter.

        Raises:
            ValueError: there is none of that name.
        """
        index, table = self.health.names.index(name), self.health.tensors
        return {"step": table.step, **{n: table[n][:, index] for n in HEALTH}}

    def samples_of(self, step: int) -> list[int] | None:
        """First and last sample of the run that ``step`` trained on, if the files say it."""
        if step in self.health.samples:
            return self.health.samples[step]
        row = int(np.searchsorted(self.step, step))
        if row >= len(self.step) or self.step[row] != step:
            return None
        if row == 0 or self.step[row - 1] != step - 1:
            return [0, int(self.samples[0]) - 1] if step == 1 else None
        return [int(self.samples[row - 1]), int(self.samples[row]) - 1]

    def take(self, event: Event) -> None:
        """Add an event of the record."""
        if isinstance(event, StepRecorded):
            values = {n: getattr(event, n) for n in ("loss", "lr", "samples", "time")}
            self._steps.add(event.step, **values)
        elif isinstance(event, Evaluated):
            self._pauses.add(event.step)
            for metric, value in event.metrics.items():
                if isinstance(value, int | float):
                    key = event.name, metric
                    table = self.evaluations.setdefault(key, Table({"value": 0}))
                    table.cut(event.step - 1)  # a fork evaluates where it begins
                    table.add(event.step, value=value)
        elif isinstance(event, NonFiniteStep):
            self.non_finite.append(event)
        elif isinstance(event, Started):
            self.start, self.ended, self.hosts, self.starting = event, None, {}, None
        elif isinstance(event, Epoch | Logged):
            self._pauses.add(event.step)
        elif isinstance(event, Checkpointed):
            self._pauses.add(event.step)
            self.checkpoint_bytes = event.bytes
        elif isinstance(event, Ended):
            self.ended = event
        elif isinstance(event, Resumed):
            self.cut(event.step)

    def cut(self, step: int) -> None:
        """Forget what came after ``step``."""
        for table in (self._steps, *self.evaluations.values()):
            table.cut(step)
        self.health.cut(step)
        self.non_finite = [e for e in self.non_finite if e.step <= step]
        self._pauses = {s for s in self._pauses if s < step} | {step}
