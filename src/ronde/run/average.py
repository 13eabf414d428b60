"""Averages of the weights: updated after each step, under every plan, and in the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from ronde.run.checks import is_whole
from ronde.world import ArgumentError, CheckpointError, RondeError
from ronde.world.consensus import agree
from ronde.world.tensors import local_part

if TYPE_CHECKING:
    from ronde.checkpoint import Piece, Want
    from ronde.run.parts import Parts

__all__ = ["Averages", "Decay", "WeightAverage", "average_wants"]

Decay = float | Callable[[int], float] | None


def _parameters(run: Parts) -> dict[str, nn.Parameter]:
    """The parameters of which this worker holds a part or all, each once, by its first name."""
    parameters: dict[str, nn.Parameter] = {}
    # FSDP puts its shards back for state_dict(): until then, it may hold whole parameters.
    for name, value in run.model.state_dict(keep_vars=True).items():
        if isinstance(value, nn.Parameter) and run.strategy.owns(name):
            parameters.setdefault(run.work.tied.get(name, name), value)
    return parameters


class WeightAverage:
    """An average of a run's weights; ``run.average`` makes it.

    Each worker averages the parts of the weights that it holds. Buffers (such as the statistics of
    batch normalization) are not averaged: inside :meth:`applied` the model keeps its current ones.

    Attributes:
        name: in the checkpoint.
        updates: how many steps it has averaged.
    """

    def __init__(
        self, run: Parts, name: str, decay: Decay, start: int, every: int, averages: Averages
    ) -> None:
        self.name = name
        self.updates = 0
        self._decay, self._start, self._every = decay, start, every
        self._averages = averages
        self._run = run
        self._of = _parameters(run)
        self._parts = {key: _copy(local_part(p)) for key, p in self._of.items()}

    def after_step(self, step: int) -> None:
        """Take the weights after an optimizer step in."""
        if step <= self._start or (step - self._start) % self._every:
            return
        if self._decay is None:
            decay = self.updates / (self.updates + 1)
        else:
            decay = self._decay(self.updates) if callable(self._decay) else self._decay
            if not 0.0 <= decay <= 1.0:
                raise ArgumentError(
                    f"run.average: decay({self.updates}) is {decay!r}; expected 0.0 to 1.0."
                )
        self.updates += 1
        with torch.no_grad():
            averages = list(self._parts.values())
            weights = [
                local_part(p).to(a.dtype) for p, a in zip(self._live(), averages, strict=True)
            ]
            torch._foreach_lerp_(averages, weights, 1.0 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model has the averaged weights: for ``run.evaluate`` and ``run.export``.
        Afterwards it has its own again, bit by bit, also after an exception. Call it on every
        worker.

        Raises:
            RondeError: an average is applied already, or the model has other parameters now.

        Example:
            >>> with average.applied():  # doctest: +SKIP
            ...     result = run.evaluate(test_set)
        """
        run, averages = self._run, self._averages
        if averages.applied is not None:
            raise RondeError(
                f"average.applied(): the model has the weights of {averages.applied!r} already. "
                "Leave that block first."
            )
        parts = [local_part(p) for p in self._now(run).values()]
        before = [part.clone() for part in parts]
        averages.applied = self.name
        try:
            _fill(run, parts, list(self._parts.values()))
            yield
        finally:
            averages.applied = None
            _fill(run, parts, before)

    def pieces(self) -> dict[str, Piece]:
        """This worker's parts, as ``average/parameter``, for a checkpoint."""
        from ronde.checkpoint import Piece, box_of

        return {
            f"{self.name}/{key}": Piece(self._parts[key], tuple(p.shape), box_of(p, key))
            for key, p in self._now(self._run).items()
        }

    def restore(self, parts: Mapping[str, torch.Tensor], updates: int) -> None:
        """Continue with a checkpoint's parts, by ``average/parameter``."""
        for key, part in self._parts.items():
            value = parts.get(f"{self.name}/{key}")
            if value is None or value.shape != part.shape:
                raise CheckpointError(
                    f"the checkpoint's average {self.name!r} does not have {key!r} of shape "
                    f"{list(part.shape)}: it is of another model. Start a new run, or give the "
                    "average another name."
                )
            part.copy_(value)
        self.updates = updates

    def _live(self) -> list[nn.Parameter]:
        return list(self._of.values())

    def _now(self, run: Parts) -> dict[str, nn.Parameter]:
        """The parameters, if they are those that are averaged."""
        parameters = _parameters(run)
        changed = [
            n for n in {**parameters, **self._of} if parameters.get(n) is not self._of.get(n)
        ]
        if changed:
            raise RondeError(
                f"the model's parameter {changed[0]!r} was added, removed, or replaced after "
                "run.average: call run.average when the model has all its parameters."
            )
        return parameters


def _copy(part: torch.Tensor) -> torch.Tensor:
    # Half precision cannot hold the small changes of an average.
    half = part.dtype in (torch.float16, torch.bfloat16)
    return part.to(torch.float32, copy=True) if half else part.clone()


def _fill(run: Parts, parts: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for part, value in zip(parts, values, strict=True):
            part.copy_(value)
    run.strategy.loaded()


class Averages:
    """All averages of one run.

    Attributes:
        items: name -> average.
        applied: the name of the average whose weights the model has just now; None for its own.
    """

    def __init__(self) -> None:
        self.items: dict[str, WeightAverage] = {}
        self.applied: str | None = None
        # From the checkpoint, until the script asks for the average.
        self._waiting: dict[str, int] = {}
        self._parts: Mapping[str, torch.Tensor] = {}
        self._resumed = False

    def add(self, run: Parts, name: str, decay: Decay, start: int, every: int) -> WeightAverage:
        """Make an average, or continue the checkpoint's of this name. A collective."""
        if not name.isidentifier():
            raise ArgumentError(
                f"run.average(name={name!r}): use letters, digits, and '_', starting with a letter."
            )
        if name in self.items:
            raise ArgumentError(
                f"run.average: there is an average {name!r} already. Give the second one another "
                "name: run.average(…, name='slow')."
            )
        number = isinstance(decay, float | int) and not isinstance(decay, bool)
        if not (decay is None or callable(decay) or (number and 0.0 <= decay < 1.0)):
            raise ArgumentError(
                f"run.average(decay={decay!r}): expected a number from 0.0 to below 1.0, a "
                "function of the number of updates, or None for the plain mean."
            )
        if not is_whole(start) or start < 0 or not is_whole(every) or every < 1:
            raise ArgumentError(
                f"run.average(start={start!r}, every={every!r}): expected whole numbers of "
                "optimizer steps, start from 0 and every from 1."
            )
        shown = decay if not callable(decay) else "a function"
        facts = {"name": name, "decay": shown, "start": start, "every": every}
        agree(run.world, facts, "run.average")
        average = WeightAverage(run, name, decay, start, every, self)
        if name in self._waiting:
            average.restore(self._parts, self._waiting.pop(name))
        elif self._resumed:
            run.warn(f"the checkpoint has no average {name!r}: it begins anew")
        self.items[name] = average
        return average

    def after_step(self, step: int) -> None:
        """Update all of them."""
        for average in self.items.values():
            average.after_step(step)

    def check(self, call: str) -> None:
        """Refuse what must not meet averaged weights."""
        if self.applied is not None:
            raise RondeError(
                f"{call} was called inside average.applied(), where the model has averaged "
                "weights. Leave that block first; run.evaluate and run.export work inside it."
            )

    def pack(self) -> tuple[dict[str, int], dict[str, Piece]]:
        """Names and updates, and this worker's parts."""
        pieces: dict[str, Piece] = {}
        for average in self.items.values():
            pieces |= average.pieces()
        return {name: each.updates for name, each in self.items.items()}, pieces

    def loaded(self, updates: Mapping[str, int], parts: Mapping[str, torch.Tensor]) -> None:
        """Keep a checkpoint's averages for when the script asks for them."""
        self._waiting, self._parts, self._resumed = dict(updates), parts, True

    def report_unused(self, run: Parts) -> None:
        """Say once which averages of the checkpoint the script did not ask for before a step."""
        if self._waiting:
            run.warn(
                f"the checkpoint has the average {', '.join(map(repr, self._waiting))}, and the "
                "script does not call run.average for it. The next checkpoint will not have it"
            )
        self._waiting, self._parts = {}, {}


def average_wants(
    run: Parts, names: Mapping[str, int], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[list[Want], dict[str, torch.Tensor]]:
    """The boxes this worker needs of a checkpoint's averages, and where they will be."""
    from ronde.checkpoint import Want, box_of

    parts: dict[str, torch.Tensor] = {}
    wants: list[Want] = []
    for key, p in _parameters(run).items() if names else ():
        for name in names:
            full = f"{name}/{key}"
            if shapes.get(full) == tuple(p.shape):  # otherwise refused when the script asks for it

                def give(tensor: torch.Tensor, full: str = full) -> None:
                    parts[full] = tensor

                wants.append(Want("average", full, box_of(p, key), give))
    return wants, parts
