"""Time passes, recomputation and optimizer steps of a copy of the script's model."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
from torch import nn
from torch.optim import Optimizer

from ronde.measure.cost_lines import line
from ronde.measure.memory_account import copied_optimizer
from ronde.measure.model_units import ModelUnit, UnitProbe
from ronde.measure.stand_in import refers_to, standing_in
from ronde.parallel.recompute import applied
from ronde.predict import LinearCost

_FEWEST_ROUNDS = 4  # so that two halves of them can be compared


def _timed(device: torch.device, call: Callable[[], Any]) -> float:
    """Seconds of a call."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    result = call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    del result  # what the call returns is freed after the clock has stopped
    return seconds


@dataclass
class UnitTimes:
    """Seconds of one unit in one step."""

    own: float = 0.0
    glue: float = 0.0
    backward: float = 0.0


@dataclass
class Rounds:
    """Micro-batch size -> rounds -> units, and seconds of whole steps without clocks in them."""

    units: dict[int, list[list[UnitTimes]]]
    whole: dict[int, list[float]]
    optimizer: list[float] = field(default_factory=list)
    clip: list[float] = field(default_factory=list)


class _Clock:
    """Moments of one step, read where units meet; on a GPU they are events in its stream."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.marks: list[tuple[int, str, Any]] = []

    def mark(self, unit: int, event: str) -> None:
        moment: Any = time.perf_counter()
        if self._cuda:
            moment = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            moment.record()
        self.marks.append((unit, event, moment))

    def by_unit(self, units: int) -> list[UnitTimes]:
        if self._cuda:
            torch.cuda.synchronize()
        times = [UnitTimes() for _ in range(units)]
        first = next((unit for unit, event, _ in self.marks if event == "in"), 0)
        kinds = {"in": "own", "out": "glue", "start": "glue", "back": "backward"}
        for (unit, event, at), (_, _, end) in itertools.pairwise(self.marks):
            seconds = at.elapsed_time(end) / 1e3 if self._cuda else end - at
            # code before the first unit belongs to it
            mine = times[first if unit < 0 else unit]
            setattr(mine, kinds[event], getattr(mine, kinds[event]) + seconds)
        return times


class TimedModel:
    """The copy that is timed. It lives as long as ``stack``."""

    def __init__(
        self,
        stack: contextlib.ExitStack,
        model: nn.Module,
        optimizer: Optimizer,
        compute: Any,
        chain: list[ModelUnit],
        device: torch.device,
        autocast: Callable[[], Any],
        clips: bool = False,
    ) -> None:
        self._clips = clips
        self.notes: list[str] = []
        self._compute, self._chain, self._device, self._autocast = compute, chain, device, autocast
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        cuda = device.type == "cuda"
        free = torch.cuda.mem_get_info(device)[0] if cuda else psutil.virtual_memory().available

        def clone(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.detach().clone()

        # Weights, gradients, optimizer state, and activations.
        # A copy that pushes the machine into swapping would be timed with it.
        in_place = size * 5 > free
        make = torch.Tensor.detach if in_place else clone
        self.model, copies = stack.enter_context(
            standing_in(model, make, refers_to(compute, model))
        )
        self.optimizer: Optimizer | None = None
        self._stepped = False
        if in_place:
            self.notes.append(
                "not enough memory for a copy of the model: it was timed in place, and the "
                "optimizer's step was not timed"
            )
            return
        try:
            self.optimizer = copied_optimizer(optimizer, copies, clone)
        except Exception as error:
            self._note("the optimizer's step", error)

    def _note(self, what: str, error: Exception) -> None:
        text = (str(error).splitlines() or [""])[0][:200]
        self.notes.append(f"{what} could not be timed ({type(error).__name__}: {text})")

    def _clear(self) -> None:
        for p in self.model.parameters():
            p.grad = None

    def whole(self, batch: Any, accumulate: bool = False) -> float:
        """Seconds of a whole step without clocks in it, optionally on top of existing gradients."""
        if not accumulate:
            self._clear()

        def step() -> Any:
            with self._autocast():
                loss, _ = self._compute(self.model, batch)
            if loss.requires_grad:
                loss.backward()
            return loss

        return _timed(self._device, step)

    def by_unit(self, batch: Any) -> list[UnitTimes]:
        """A step with clocks in it."""
        self._clear()
        units = len(self._chain)
        clock = _Clock(self._device)
        probe = UnitProbe(self.model, self._chain, clock.mark)
        with probe.listening():  # registering hooks takes time of its own
            clock.mark(-1, "start")
            probe.step(self._compute, self.model, batch, units - 1, autocast=self._autocast)
            clock.mark(-1, "end")
        return clock.by_unit(units)

    def time_accumulation(self, batch: Any) -> float:
        """Extra seconds of adding gradients to existing ones, over writing them."""
        extra = [-self.whole(batch) + self.whole(batch, True) for _ in range(_FEWEST_ROUNDS)]
        self._clear()
        return max(0.0, statistics.median(extra))

    def time_recomputation(
        self, levels: Sequence[str], micro: dict[int, Any], seconds: float
    ) -> dict[str, LinearCost]:
        """Seconds that each level of recomputation adds to a step, with and without it in turns.

        A level whose second pass differs from the first (layers dropped at random) cannot run. It
        is missing in the answer, and a note says so.
        """
        points: dict[str, list[tuple[float, float]]] = {level: [] for level in levels}
        for b, batch in micro.items():
            plain: list[float] = []
            again: dict[str, list[float]] = {level: [] for level in points}
            end = time.perf_counter() + seconds / len(micro)
            while len(plain) <= _FEWEST_ROUNDS or (
                len(plain) < 3 * _FEWEST_ROUNDS and time.perf_counter() < end
            ):
                plain.append(self.whole(batch))
                for level in list(points):
                    try:
                        with applied(self.model, level):
                            again[level].append(self.whole(batch))
                    except Exception as error:
                        del points[level]
                        self._note(f"recompute={level}", error)
            for level, pairs in points.items():
                # The first of each is the warm-up.
                pairs.append((b, max(0.0, min(again[level][1:]) - min(plain[1:]))))
        self._clear()
        return {level: line(pairs) for level, pairs in points.items()}

    def affordable(
        self, sizes: list[int], batches: Callable[[int], Any], seconds: float
    ) -> list[int]:
        """Sizes for which enough rounds fit into ``seconds``: the smallest, the largest possible,
        and one between. Kernels are warm afterwards.
        """
        self.whole(batches(sizes[0]))
        if len(sizes) == 1:
            return sizes
        first, second = (min(self.whole(batches(b)) for _ in range(2)) for b in sizes[:2])
        slope = max(0.0, second - first) / (sizes[1] - sizes[0])

        def expected(samples: int) -> float:
            # Each round is two steps, with clocks in it and without.
            return 2 * _FEWEST_ROUNDS * (first + slope * (samples - sizes[0]))

        # As near to the whole batch as time allows: interpolation is safer than extrapolation.
        halves = {sizes[-1] >> k for k in range(sizes[-1].bit_length())}
        fitting = [b for b in halves if b > sizes[0] and expected(b) <= 2 * seconds]
        top = max(fitting, default=sizes[1])
        chosen = {sizes[0], top}
        between = [b for b in sizes[1:-1] if b < top]
        if between and expected(top) + expected(between[-1]) <= 2 * seconds:
            chosen.add(between[-1])
        if top < sizes[-1]:
            self.notes.append(
                f"steps are long: measured with micro-batches of up to {top} samples, extrapolated "
                "beyond"
            )
        return sorted(chosen)

    def time_rounds(self, micro: dict[int, Any], seconds: float) -> Rounds:
        """Rounds of all sizes in turn."""
        rounds = Rounds({b: [] for b in micro}, {b: [] for b in micro})
        for batch in micro.values():
            self.by_unit(batch)
        start = time.perf_counter()
        # Sizes take turns, so that a machine that slows down meets all of them.
        for done in range(30):
            if done >= _FEWEST_ROUNDS and time.perf_counter() - start > seconds:
                break
            for b, batch in micro.items():
                rounds.units[b].append(self.by_unit(batch))
                rounds.whole[b].append(self.whole(batch))
            if self.optimizer is not None and len(rounds.optimizer) < 6:
                self.update(rounds)
        self._clear()
        return rounds

    def update(self, rounds: Rounds) -> None:
        """One step of the optimizer's copy, and the clipping before it."""
        assert self.optimizer is not None
        own = {id(p) for p in self.model.parameters()}
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        for group in self.optimizer.param_groups:
            if "lr" in group:
                group["lr"] = group["lr"] * 0  # the same work, and unchanged weights
        for p in parameters:
            if id(p) not in own and p.requires_grad:
                p.grad = torch.zeros_like(p)

        def clip_gradients() -> None:
            nn.utils.clip_grad_norm_(parameters, 1e30)  # they stay as they are

        try:
            first, self._stepped = not self._stepped, True  # the first step makes the state
            clip = _timed(self._device, clip_gradients) if self._clips else None
            step = _timed(self._device, self.optimizer.step)
        except Exception as error:
            self._note("the optimizer's step", error)
            self.optimizer = None
            return
        if not first:
            rounds.optimizer.append(step)
            if clip is not None:
                rounds.clip.append(clip)
