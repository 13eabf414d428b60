"""What the parts of a recorder share: the run, what it is doing, and the trace that they write."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ronde.capture import following
from ronde.introspect import is_user_file
from ronde.prove.experiment import Settings
from ronde.prove.values import Array
from ronde.run.parts import Parts

__all__ = ["Phase", "TraceWriter", "modules_of", "place_of"]

# what stands between a script and the functions that prove replaces
_PASSED_THROUGH = ("os.py", "_collections_abc.py", "float64.py")


def place_of(direct: bool = False) -> str | None:
    """File and line of the user code that called the caller of this; with ``direct``, only if it
    made that very call.
    """
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_user_file(file):
            return f"{Path(file).name}:{frame.f_lineno}"
        if direct and not file.startswith("<frozen") and Path(file).name not in _PASSED_THROUGH:
            return None
        frame = frame.f_back  # type: ignore[assignment]
    return None


def modules_of(generators: Iterable[str]) -> str:
    """The modules that generators belong to, as a script names them."""
    names = {"NumPy": "numpy.random", "Python": "random"}
    return ", ".join(names.get(each, each) for each in sorted(generators))


class Phase(StrEnum):
    """What the recorded training is doing."""

    SETUP = "setup"
    BETWEEN = "between"  # two steps
    STEP = "step"
    UPDATE = "update"
    EVALUATE = "evaluate"
    HIDDEN = "before"  # a forward pass of the study's own


class TraceWriter:
    """The trace of one run on one rank.

    Attributes:
        run: the recorded run, once it is there.
        step: the facts of the current step.
        tensors: its tensors.
        sizes: samples of its micro-batches.
        modules: the model's modules by identity.
    """

    def __init__(self, settings: Settings, rank: int) -> None:
        self.settings = settings
        self.experiment = settings.experiment
        self.folder = Path(settings.folder) / f"rank-{rank}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._events = (self.folder / "events.jsonl").open("a", buffering=1)
        self.phase = Phase.SETUP
        self._notes: dict[str, list[str]] = {}
        self.run: Parts | None = None
        self.step: dict[str, Any] = {}
        self.tensors: dict[str, Array] = {}
        self.sizes: list[int] = []
        self.modules: dict[int, str] = {}

    def event(self, kind: str, **values: Any) -> None:
        """Write one line."""
        self._events.write(json.dumps({"kind": kind, **values}) + "\n")

    def note(self, what: str, where: str | None) -> None:
        """Record something that may explain a difference, its phase, and its place in the code."""
        place = f"{self.phase}|{where or ''}"
        places = self._notes.setdefault(what, [])
        if place not in places and len(places) < 20:
            places.append(place)
            self.event("note", what=what, place=place)

    def close(self) -> None:
        """The trace is complete."""
        self._events.close()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Nothing inside is recorded."""
        phase, self.phase = self.phase, Phase.HIDDEN
        try:
            yield
        finally:
            self.phase = phase

    def is_forward(self) -> bool:
        """Whether a step's forward pass runs: not an evaluation, a pass that a plan follows, nor
        recomputed activations. Inside torch.func.vmap, grad, and the like, tensors have no values.
        """
        transformed = torch._C._functorch.peek_interpreter_stack() is not None
        recomputed = torch._C._current_graph_task_id() != -1
        return self.phase == Phase.STEP and not (recomputed or following() or transformed)

    def is_between_parts(self) -> bool:
        """Whether some micro-batches of the step have gone backward, and others have not."""
        run = self.run
        within = run is not None and 0 < run.place.backwards < len(self.sizes)
        return self.phase == Phase.STEP and within

    def owned(self, run: Parts) -> list[tuple[str, nn.Parameter]]:
        """The parameters that this worker holds."""
        owns = run.strategy.owns
        named = run.model.named_parameters()
        return [(n, p) for n, p in named if p.device.type != "meta" and owns(n)]
