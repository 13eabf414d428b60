"""Reads the trace of a recorded run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

__all__ = ["RunTrace"]

Values = npt.NDArray[np.float64]


class RunTrace:
    """One run, as its ranks recorded it."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder = folder
        self.size = size
        self.events: list[list[dict[str, Any]]] = []
        for rank in range(size):
            file = folder / f"rank-{rank}" / "events.jsonl"
            lines = file.read_text().splitlines() if file.exists() else []
            self.events.append([json.loads(line) for line in lines if line.endswith("}")])
        self._loaded: dict[tuple[int, int], dict[str, Values]] = {}

    def events_of(self, kind: str, rank: int = 0) -> list[dict[str, Any]]:
        """The events of a kind."""
        return [e for e in self.events[rank] if e["kind"] == kind]

    def first(self, kind: str, rank: int = 0) -> dict[str, Any]:
        """The first event of a kind, empty if there is none."""
        return next((e for e in self.events[rank] if e["kind"] == kind), {})

    @property
    def opened(self) -> bool:
        """Whether the script called ``ronde.distribute``."""
        return bool(self.first("ready"))

    def steps(self, rank: int = 0) -> list[dict[str, Any]]:
        """The steps of a rank."""
        return self.events_of("step", rank)

    def all_steps(self) -> list[list[dict[str, Any]]]:
        """The steps of each rank."""
        return [self.steps(rank) for rank in range(self.size)]

    def evaluations(self, rank: int = 0) -> list[dict[str, Any]]:
        """The results of a rank's evaluations."""
        return self.events_of("evaluated", rank)

    def notes(self, only: int | None = None) -> dict[str, list[str]]:
        """Notes of all ranks or of one: what -> ``phase|place``."""
        notes: dict[str, dict[str, None]] = {}
        for rank in range(self.size) if only is None else (only,):
            for event in self.events_of("note", rank):
                notes.setdefault(event["what"], {})[event["place"]] = None
        return {what: list(places) for what, places in notes.items()}

    def places(self, what: str, *phases: str, rank: int | None = None) -> list[str]:
        """Places in the script's code of a kind of note, in some phases or in any."""
        split = [note.split("|", 1) for note in self.notes(rank).get(what, [])]
        places = (place for phase, place in split if phase in phases or not phases)
        return list(dict.fromkeys(place.replace("@", " at ") for place in places))

    def tensors(self, rank: int, step: int) -> dict[str, Values]:
        """All tensors of a rank's step; step -1 is before the first."""
        if (rank, step) not in self._loaded:
            if len(self._loaded) > 2 * self.size:
                self._loaded.clear()
            name = "init" if step < 0 else f"step-{step}"
            file = self.folder / f"rank-{rank}" / f"{name}.safetensors"
            self._loaded[rank, step] = load_file(file) if file.exists() else {}
        return self._loaded[rank, step]

    def of(self, rank: int, step: int, kind: str) -> dict[str, Values]:
        """Name -> value of one kind on one rank."""
        start = f"{kind}|"
        tensors = self.tensors(rank, step).items()
        return {k.removeprefix(start): v for k, v in tensors if k.startswith(start)}

    def merged(self, step: int, kind: str) -> dict[str, Values]:
        """Name -> value, from the first rank that has it."""
        merged: dict[str, Values] = {}
        for rank in range(self.size):
            merged |= {n: v for n, v in self.of(rank, step, kind).items() if n not in merged}
        return merged

    def rows(self, step: int, kind: str) -> int | None:
        """Rows of the global batch: ``"out"``, as it was handed out; ``"given"`` to ``run.step``.
        None if they are not known.
        """
        counts: list[int | None] = []
        for steps in self.all_steps():
            pipeline, _, tensor = steps[step]["place"]
            if not pipeline and not tensor:  # others have the same samples
                counts += steps[step]["rows"].get(kind, [None])
        return None if None in counts else sum(filter(None, counts))

    def outputs(self, step: int, kind: str = "out") -> dict[str, tuple[Values, str]]:
        """Output -> one number per sample of the global batch, and the shape of a sample; in the
        order of computation. Outputs that lack samples are left out.

        Args:
            step: from 0.
            kind: ``"out"``; ``"in"``, inputs of modules; ``"given"``, to ``run.step``.
        """
        length = len(self.steps()[step]["ids"]) if step < len(self.steps()) else 0
        values: dict[str, Values] = {}
        shapes: dict[str, str] = {}
        filled: dict[str, int] = {}
        for rank, steps in enumerate(self.all_steps()):
            if step >= len(steps) or steps[step]["place"][2]:
                continue
            start, micros = steps[step]["start"], steps[step]["micro"]
            tensors = self.tensors(rank, step)
            for key, shape in steps[step]["shapes"].items():
                if not key.startswith(f"{kind}|"):
                    continue
                name, text = key[len(kind) + 1 :], json.dumps(shape)
                value = values.setdefault(name, np.full(length, np.nan))
                if shapes.setdefault(name, text) != text:
                    shapes[name] = '"differ"'
                for i, (low, high) in enumerate(micros):
                    part = tensors.get(f"{key}|{i}")
                    if part is not None and len(part) == high - low:
                        value[low - start : high - start] = part
                        filled[name] = filled.get(name, 0) + high - low
        return {
            name: (value, shapes[name])
            for name, value in values.items()
            if filled.get(name, 0) == length and shapes[name] != '"differ"'
        }

    @property
    def has_same_draws(self) -> bool:
        """Whether random draws were the same for any number of workers."""
        return any("generators" in step for step in self.steps())

    def loss_kind(self) -> str:
        """The kind of function that the loss is, see :func:`~ronde.prove.values.probe`."""
        return str(self.first("probe").get("loss", "unknown"))
