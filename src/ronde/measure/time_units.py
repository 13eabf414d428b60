"""Time the forward and backward pass of every unit of a model, at its real shapes.

Whole steps of a copy of the script's model run at two or three micro-batch sizes in turn. A clock
is read at each boundary between units, so the parts add up to the step. Each round also times a
fixed piece of work; rounds in which it ran slower than its best are dropped, and the fastest of
the rest counts.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ronde.measure.cost_lines import line
from ronde.measure.model_units import ModelUnit, UnitProbe, take
from ronde.measure.optimizer_memory import copied_optimizer
from ronde.measure.quiet_gate import Gate, NoisyMachine, Reference
from ronde.measure.stand_in import refers_to, standing_in, untouched
from ronde.measure.unit_memory import weigh
from ronde.parallel.recompute import applied
from ronde.predict import Costs, LinearCost, Unit
from ronde.world import ArgumentError, usable_cores
from ronde.world.tensors import tensors_in

__all__ = [
    "NoisyMachine",
    "Subject",
    "autocast_of",
    "clipped",
    "device_name",
    "least",
    "loaded",
    "measure",
]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_LEAST_ROUNDS, _MOST_ROUNDS = 4, 30
_PATIENCE = 3.0  # times the asked time, on a disturbed machine


def device_name(device: torch.device) -> str:
    """For a person: ``"cpu: AMD EPYC 7B13 (2 cores)"``."""
    if device.type == "cuda":
        return f"cuda: {torch.cuda.get_device_name(device)}"
    name = ""
    with contextlib.suppress(OSError):
        for text in Path("/proc/cpuinfo").read_text().splitlines():
            if text.startswith("model name"):
                name = text.partition(":")[2].strip()
                break
    cores = usable_cores()
    return f"{device.type}: {name or os.uname().machine} ({cores} core{'s' if cores != 1 else ''})"


def autocast_of(device: torch.device, precision: str) -> Callable[[], Any]:
    """The context of a forward pass at ``precision``, as in ``ronde.distribute``."""
    return (
        partial(torch.autocast, device.type, _DTYPES[precision])
        if precision in _DTYPES
        else contextlib.nullcontext
    )


class _Clock:
    """Moments of one step, read where units meet; on an accelerator they are events in its
    stream.
    """

    def __init__(self, device: torch.device, calm: bool) -> None:
        self._cuda = device.type == "cuda"
        self._calm = calm
        self.marks: list[tuple[int, str, Any, float]] = []

    def mark(self, unit: int, event: str) -> None:
        if self._cuda:
            moment = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            moment.record()
            self.marks.append((unit, event, moment, 0.0))
        else:
            self.marks.append(
                (unit, event, time.perf_counter(), time.thread_time() if self._calm else 0.0)
            )

    def spans(self) -> list[tuple[int, str, float, float]]:
        """``(unit, event, seconds until the next mark, of which this thread worked)``."""
        if self._cuda:
            torch.cuda.synchronize()
        found = []
        for (unit, event, at, cpu), (_, _, then, cpu_then) in zip(
            self.marks, self.marks[1:], strict=False
        ):
            wall = at.elapsed_time(then) / 1e3 if self._cuda else then - at
            found.append((unit, event, wall, min(wall, cpu_then - cpu)))
        return found


@dataclass
class _Times:
    """Seconds of one unit in one step, each as (work, waiting)."""

    own: tuple[float, float] = (0.0, 0.0)
    glue: tuple[float, float] = (0.0, 0.0)
    backward: tuple[float, float] = (0.0, 0.0)


def _step(
    probe_of: Callable[[Callable[[int, str], None]], UnitProbe],
    device: torch.device,
    units: int,
    run: Callable[[UnitProbe], None],
    calm: bool,
) -> list[_Times]:
    """One step under the clock."""
    clock = _Clock(device, calm)
    probe = probe_of(clock.mark)
    try:
        clock.mark(-1, "start")
        run(probe)
        clock.mark(-1, "end")
    finally:
        probe.close()
    found = [_Times() for _ in range(units)]
    first = next((unit for unit, event, *_ in clock.marks if event == "in"), 0)
    for unit, event, wall, cpu in clock.spans():
        unit = first if unit < 0 else unit  # what comes before the first unit is its own
        kind = {"in": "own", "out": "glue", "start": "glue", "back": "backward"}[event]
        work, waiting = getattr(found[unit], kind)
        setattr(found[unit], kind, (work + cpu, waiting + wall - cpu))
    return found


def least(readings: Sequence[tuple[float, float]], calm: bool) -> float:
    """The least of some readings; on one thread, least work plus least waiting: what preempted it
    is in neither.
    """
    if calm:
        return min(w for w, _ in readings) + min(s for _, s in readings)
    return min(w + s for w, s in readings)


@dataclass
class _Rounds:
    """What was read: micro-batch size -> rounds -> units, and the whole steps without clocks in
    them.
    """

    units: dict[int, list[list[_Times]]]
    whole: dict[int, list[tuple[float, float]]]
    optimizer: list[tuple[float, float]]
    clip: list[tuple[float, float]] = field(default_factory=list)


def _sizes(batch_size: int, given: Sequence[int] | None, batchnorm: bool) -> list[int]:
    """Micro-batch sizes to measure at: the batch, a quarter and a sixteenth of it."""
    if given:
        wrong = [b for b in given if b < 1]
        if wrong:
            raise ArgumentError(f"samples={list(given)}: micro-batch sizes must be 1 or more.")
        return sorted(set(given))
    least = 2 if batchnorm and batch_size > 1 else 1
    return sorted({max(least, batch_size // 16), max(least, batch_size // 4), batch_size})


def measure(
    model: nn.Module,
    optimizer: Optimizer,
    compute: Any,
    batches: Any,
    batch_size: int,
    *,
    device: torch.device | None = None,
    precision: Literal["fp32", "bf16", "fp16"] = "fp32",
    samples: Sequence[int] | None = None,
    seconds: float = 8.0,
    threads: int | None = None,
    chain: list[ModelUnit] | None = None,
    clips: bool = False,
    on_noise: Literal["error", "note"] = "error",
    reference: Callable[[], float] | None = None,
    tell: Callable[[str], None] | None = None,
) -> Costs:
    """What a script's model costs, unit by unit. The model, its gradients, buffers, flags, the
    optimizer and all randomness stay as they are.

    Args:
        model: the script's.
        optimizer: the script's.
        compute: its forward and loss, a :class:`ronde.run.losses.LossCall`.
        batches: ``batches(n)`` gives a micro-batch of n samples on the device; or one batch of
            ``batch_size`` samples, which is cut.
        batch_size: global samples per optimizer step.
        device: where to measure; None is the model's.
        precision: as in ``ronde.distribute``.
        samples: micro-batch sizes to measure at; None chooses three, smaller ones where a step
            takes long.
        seconds: about how long to measure.
        threads: compute threads that a worker will have; None leaves them alone.
        chain: the units; None finds them.
        clips: whether gradients are clipped before the optimizer's step.
        on_noise: on a disturbed machine, raise or write it into ``Costs.noise`` and
            ``Costs.notes``.
        reference: takes a reading of fixed work, in seconds; None has one of its own.
        tell: called with what is being done.

    Returns:
        Costs: whose units' seconds add up to the whole step.

    Raises:
        NoisyMachine: other work disturbed it, also when it was tried again.
        ArgumentError: the model is on the meta device, or a batch cannot be cut.
    """
    where = device or next((p.device for p in model.parameters()), torch.device("cpu"))
    if any(p.is_meta for p in model.parameters()):
        raise ArgumentError(
            "the model's parameters are on the meta device: they have no values, so "
            "nothing can be timed."
        )
    made = batches if callable(batches) else partial(_cut, batches, batch_size)
    autocast = autocast_of(where, precision)
    say = tell or (lambda _: None)
    norms = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())
    with untouched(model), contextlib.ExitStack() as stack:
        if threads is not None:
            torch.set_num_threads(threads)
        if not model.training:
            model.train()
        say("weighing")
        costs = weigh(model, optimizer, compute, made, batch_size, autocast=autocast, chain=chain)
        links = [ModelUnit(u.name, u.alike) for u in costs.units]
        subject = Subject(stack, model, optimizer, compute, links, where, autocast, clips)
        sizes = subject.affordable(
            _sizes(batch_size, samples, norms), made, seconds, chosen=samples is not None
        )
        micro = {b: made(b) for b in sizes}
        say("timing")
        # Ranks that measure at once, as they will train, are no disturbance.
        alone = not dist.is_initialized() or dist.get_world_size() == 1
        gate = Gate(
            reference or Reference(where, calm=subject.calm),
            watch_others=reference is None and where.type == "cpu" and alone,
        )
        rounds = subject.time(micro, seconds, gate, say)
        further = subject.accumulating(micro[sizes[0]])
        again = {}
        if costs.again and any(u.recomputed for u in costs.units):
            say("timing recomputation")
            quick = [
                b for b in sizes if b == sizes[0] or least(rounds.whole[b], False) < seconds / 16
            ]
            again = subject.again(
                costs.again, {b: micro[b] for b in (quick[0], quick[-1])}, seconds / 4
            )
        kept, repeats, too_few = _keep(rounds, gate.good(), subject.calm)
        level = gate.level(repeats)
        notes = [*costs.notes, *subject.notes]
        if gate.refuses(repeats, too_few):
            error = gate.error("times measured on it", repeats, too_few)
            if on_noise == "error":
                raise error
            notes.append(str(error))
            level = error.level
        units, factor, fit_error = _fit(costs.units, kept, subject.calm)
        return replace(
            costs,
            units=units,
            optimizer_seconds=least(kept.optimizer, subject.calm) if kept.optimizer else 0.0,
            clip_seconds=least(kept.clip, subject.calm) if kept.clip else 0.0,
            accumulate_seconds=further,
            again_seconds=again,
            device=device_name(where),
            threads=torch.get_num_threads(),
            noise=level,
            sequence=_sequence(micro[sizes[0]], sizes[0]),
            measured_samples=tuple(sizes),
            whole_factor=factor,
            fit_error=fit_error,
            notes=tuple(notes),
        )


@dataclass
class Loaded:
    """Seconds that a worker took for each part of each round.

    Attributes:
        passes: whole passes of each micro-batch size.
        further: a pass of the smallest whose gradients are added to some that are there.
        alone: a pass of the largest while the others wait; empty where this worker waited.
        updates: the optimizer's steps; empty where it cannot be tried.
        clips: clipping before them.
        units: each unit's forward and backward in a pass with clocks in it.
    """

    passes: list[list[float]]
    further: list[float]
    alone: list[float]
    updates: list[float]
    clips: list[float]
    units: list[list[float]]


def loaded(
    model: nn.Module,
    optimizer: Optimizer,
    compute: Any,
    batches: Sequence[Any],
    *,
    precision: Literal["fp32", "bf16", "fp16"] = "fp32",
    enough: Callable[[], bool],
    wait: Callable[[], None],
    chain: list[ModelUnit],
    clips: bool,
    first: bool,
) -> Loaded:
    """Passes and optimizer's steps in turn, on a copy as :func:`measure` makes it, with ``wait()``
    before each of them.

    Args:
        batches: micro-batches of some sizes, the largest last.
        enough: called after each round; whether that was the last.
        wait: until the others have come as far.
        chain: the units.
        clips: as in :func:`measure`.
        first: whether this is the worker that computes alone once in each round.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    autocast = autocast_of(device, precision)
    passes: list[list[float]] = []
    further: list[float] = []
    alone: list[float] = []
    updates = _Rounds({}, {}, [])
    units: list[list[float]] = []
    with untouched(model), contextlib.ExitStack() as stack:
        model.train()
        subject = Subject(stack, model, optimizer, compute, chain, device, autocast, clips)
        for r in itertools.count():
            taken = []
            for batch in batches:
                wait()
                taken.append(sum(subject.whole(batch)))
            passes.append(taken)
            wait()
            subject.whole(batches[0])
            wait()
            further.append(sum(subject.whole(batches[0], further=True)))
            wait()
            if subject.optimizer is not None:
                subject.update(updates)
            wait()
            if first:
                alone.append(sum(subject.whole(batches[-1])))
            wait()
            units.append(
                [
                    seconds
                    for t in subject.hooked(batches[-1])
                    for seconds in (sum(t.own) + sum(t.glue), sum(t.backward))
                ]
            )
            if r and enough():  # the first only warms
                break
    return Loaded(
        passes[1:],
        further[1:],
        alone[1:],
        [sum(each) for each in updates.optimizer],
        [sum(each) for each in updates.clip],
        units[1:],
    )


def clipped(parameters: Sequence[torch.Tensor], device: torch.device) -> tuple[float, float]:
    """Clip their gradients: seconds at work, and waiting."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start, cpu = time.perf_counter(), time.thread_time()
    nn.utils.clip_grad_norm_(parameters, 1e30)  # the same work, and gradients that stay
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    wall, cpu = time.perf_counter() - start, time.thread_time() - cpu
    return min(cpu, wall), max(0.0, wall - cpu)


def _cut(batch: Any, size: int, samples: int) -> Any:
    return take(batch, samples, size)


class Subject:
    """The copy that is timed."""

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
        # On one thread the time that it worked is known, whatever else ran.
        self.calm = device.type == "cpu" and torch.get_num_threads() == 1
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        free = (
            torch.cuda.mem_get_info(device)[0]
            if device.type == "cuda"
            else psutil.virtual_memory().available
        )

        def clone(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.detach().clone()

        short = size * 5 > free  # weights, gradients, the optimizer's state, and activations
        if short:
            self.notes.append(
                "memory is too short for a copy of the model: it was timed in place, and "
                "the optimizer's step was not"
            )
        self.model, made = stack.enter_context(
            standing_in(model, torch.Tensor.detach if short else clone, refers_to(compute, model))
        )
        self.optimizer: Optimizer | None = None
        self._stepped = False
        if not short:
            try:
                self.optimizer = copied_optimizer(optimizer, made, clone)
            except Exception as error:
                self.notes.append(
                    f"the optimizer's step could not be timed ({type(error).__name__}: {error})"
                )

    def _clear(self) -> None:
        for p in self.model.parameters():
            p.grad = None

    def whole(self, batch: Any, further: bool = False) -> tuple[float, float]:
        """A whole step without clocks in it; a ``further`` one adds to the gradients that are
        there.
        """
        if not further:
            self._clear()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        start, cpu = time.perf_counter(), time.thread_time()
        with self._autocast():
            loss, _ = self._compute(self.model, batch)
        if loss.requires_grad:
            loss.backward()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        wall, cpu = time.perf_counter() - start, time.thread_time() - cpu
        del loss
        return min(cpu, wall), max(0.0, wall - cpu)

    def accumulating(self, batch: Any) -> float:
        """What it takes longer to add gradients to those that are there than to write them anew."""
        added = []
        for _ in range(_LEAST_ROUNDS):
            first = sum(self.whole(batch)[: 1 if self.calm else 2])
            added.append(sum(self.whole(batch, further=True)[: 1 if self.calm else 2]) - first)
        self._clear()
        return max(0.0, statistics.median(added))

    def again(
        self, levels: Sequence[str], micro: dict[int, Any], seconds: float
    ) -> dict[str, LinearCost]:
        """What each level of recomputation adds to a whole step, at each micro-batch size, with and
        without it in turn.

        A level whose second pass is not as its first (layers dropped at random) cannot be run: it
        is not in the answer, and a note says so.
        """
        points: dict[str, list[tuple[float, float]]] = {level: [] for level in levels}
        for b, batch in micro.items():
            plain: list[tuple[float, float]] = []
            taken: dict[str, list[tuple[float, float]]] = {level: [] for level in points}
            start = time.perf_counter()
            while len(plain) <= _LEAST_ROUNDS or (
                len(plain) < 3 * _LEAST_ROUNDS
                and time.perf_counter() - start < seconds / len(micro)
            ):
                plain.append(self.whole(batch))
                for level in list(points):
                    try:
                        with applied(self.model, level):
                            taken[level].append(self.whole(batch))
                    except Exception as error:
                        del points[level]
                        self.notes.append(
                            f"recompute={level} could not be timed "
                            f"({type(error).__name__}: {str(error).splitlines()[0][:200]})"
                        )
            for level, found in points.items():
                found.append(
                    (b, max(0.0, least(taken[level][1:], self.calm) - least(plain[1:], self.calm)))
                )
        self._clear()
        return {level: line(each) for level, each in points.items()}

    def hooked(self, batch: Any) -> list[_Times]:
        """A step with clocks in it."""
        self._clear()
        last = len(self._chain) - 1
        return _step(
            lambda mark: UnitProbe(self.model, self._chain, mark),
            self._device,
            len(self._chain),
            lambda probe: probe.step(
                self._compute, self.model, batch, last, autocast=self._autocast
            ),
            self.calm,
        )

    def affordable(
        self, sizes: list[int], batches: Callable[[int], Any], seconds: float, chosen: bool
    ) -> list[int]:
        """Those sizes at which enough rounds fit into ``seconds``; smaller ones where none does.
        Kernels are warm afterwards.
        """

        def seconds_of(samples: int) -> float:
            work, waiting = self.whole(batches(samples))
            return work + waiting

        seconds_of(sizes[0])
        if chosen or len(sizes) == 1:
            return sizes
        first, second = (min(seconds_of(b) for _ in range(2)) for b in sizes[:2])
        slope = max(0.0, second - first) / (sizes[1] - sizes[0])

        def expected(samples: int) -> float:
            return 2 * _LEAST_ROUNDS * (first + slope * (samples - sizes[0]))

        # The least, and as near to the whole batch as there is time for: what lies between is safer
        # than what lies beyond.
        halves = {sizes[-1] >> k for k in range(sizes[-1].bit_length())}
        top = max(
            (b for b in halves if b > sizes[0] and expected(b) <= 2 * seconds), default=sizes[1]
        )
        kept = {sizes[0], top}
        between = [b for b in sizes[1:-1] if b < top]
        if between and expected(top) + expected(between[-1]) <= 2 * seconds:
            kept.add(between[-1])
        if top < sizes[-1]:
            self.notes.append(
                f"a step is long: measured at micro-batches of up to {top} samples, "
                "extrapolated beyond"
            )
        return sorted(kept)

    def time(
        self, micro: dict[int, Any], seconds: float, gate: Gate, say: Callable[[str], None]
    ) -> _Rounds:
        """Rounds of all sizes in turn, until enough were undisturbed, or patience ends."""
        found = _Rounds({b: [] for b in micro}, {b: [] for b in micro}, [])
        for batch in micro.values():
            self.hooked(batch)
        gate.begin()
        start = time.perf_counter()
        told = False
        places: list[tuple[int, int]] = []
        while True:
            for b, batch in micro.items():
                found.units[b].append(self.hooked(batch))
                found.whole[b].append(self.whole(batch))
                gate.round()
                places.append((b, len(found.whole[b]) - 1))
            if self.optimizer is not None and len(found.optimizer) < 6:
                self.update(found)
            spent = time.perf_counter() - start
            done = len(found.whole[max(micro)])
            good = dict.fromkeys(micro, 0)
            for (b, _), quiet in zip(places, gate.good(), strict=True):
                good[b] += quiet
            enough = min(good.values()) >= _LEAST_ROUNDS
            if done >= 2 and (
                spent > _PATIENCE * seconds
                or (enough and (spent > seconds or done >= _MOST_ROUNDS))
            ):
                break
            if not enough and spent > seconds and not told:
                told = True
                say("timing longer: the machine is disturbed")
        gate.end()
        self._clear()
        return found

    def update(self, found: _Rounds) -> None:
        """One step of the optimizer's copy, over the copied weights, and the clipping before it."""
        assert self.optimizer is not None
        own = {id(p) for p in self.model.parameters()}
        for group in self.optimizer.param_groups:
            if "lr" in group:
                group["lr"] = group["lr"] * 0  # the same work, and weights that stay
            for p in group["params"]:
                if id(p) not in own and p.requires_grad:
                    p.grad = torch.zeros_like(p)
        try:
            first, self._stepped = not self._stepped, True  # which makes its state
            if self._clips:
                taken = clipped(
                    [p for group in self.optimizer.param_groups for p in group["params"]],
                    self._device,
                )
                if not first:
                    found.clip.append(taken)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            start, cpu = time.perf_counter(), time.thread_time()
            self.optimizer.step()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            wall, cpu = time.perf_counter() - start, time.thread_time() - cpu
        except Exception as error:
            self.notes.append(
                f"the optimizer's step could not be timed ({type(error).__name__}: {error})"
            )
            self.optimizer = None
            return
        if not first:
            found.optimizer.append((min(cpu, wall), max(0.0, wall - cpu)))


def _keep(rounds: _Rounds, good: list[bool], calm: bool) -> tuple[_Rounds, float, bool]:
    """The undisturbed rounds, how far two halves of them disagree, and whether there are too
    few.
    """
    kept = _Rounds({}, {}, rounds.optimizer, rounds.clip)
    repeats, too_few = 0.0, False
    sizes = len(rounds.whole)
    for k, b in enumerate(rounds.whole):
        chosen = [i for i, each in enumerate(good[k::sizes]) if each]
        if len(chosen) < 2:
            too_few = True
            chosen = list(range(len(rounds.whole[b])))
        kept.units[b] = [rounds.units[b][i] for i in chosen]
        kept.whole[b] = [rounds.whole[b][i] for i in chosen]
        if len(chosen) >= 4:
            halves = [least(kept.whole[b][i::2], calm) for i in (0, 1)]
            repeats = max(repeats, max(halves) / min(halves) - 1)
    return kept, repeats, too_few


def _fit(
    units: tuple[Unit, ...], rounds: _Rounds, calm: bool
) -> tuple[tuple[Unit, ...], float, float]:
    """Lines through the sizes; alike units share what their modules take; scaled so that the sum is
    the whole step.
    """
    own: list[list[tuple[float, float]]] = [[] for _ in units]
    glue: list[list[tuple[float, float]]] = [[] for _ in units]
    back: list[list[tuple[float, float]]] = [[] for _ in units]
    for b, steps in rounds.units.items():
        for i in range(len(units)):
            own[i].append((b, least([s[i].own for s in steps], calm)))
            glue[i].append((b, least([s[i].glue for s in steps], calm)))
            back[i].append((b, least([s[i].backward for s in steps], calm)))
    alike: dict[str, list[int]] = {}
    for i, unit in enumerate(units):
        alike.setdefault(unit.alike or unit.name, []).append(i)
    for together in alike.values():
        for kind in (own, back):
            _share(kind, together)
    forward = [
        [(b, o + g) for (b, o), (_, g) in zip(own[i], glue[i], strict=True)]
        for i in range(len(units))
    ]
    factors, errors = [], []
    for k, b in enumerate(rounds.units):
        whole = least(rounds.whole[b], calm)
        factors.append(
            whole / max(1e-12, sum(forward[i][k][1] + back[i][k][1] for i in range(len(units))))
        )
    factor = statistics.median(factors)
    forward_lines = [_scaled(line(points), factor) for points in forward]
    back_lines = [_scaled(line(points), factor) for points in back]
    for b in rounds.units:
        whole = least(rounds.whole[b], calm)
        errors.append(
            abs(
                sum(f.at(b) + g.at(b) for f, g in zip(forward_lines, back_lines, strict=True))
                / whole
                - 1
            )
        )
    timed = tuple(
        replace(u, forward_seconds=f, backward_seconds=g)
        for u, f, g in zip(units, forward_lines, back_lines, strict=True)
    )
    return timed, factor, statistics.mean(errors)


def _scaled(one: LinearCost, factor: float) -> LinearCost:
    return LinearCost(one.fixed * factor, one.per_sample * factor)


def _share(points: list[list[tuple[float, float]]], together: list[int]) -> None:
    """Give units of one structure the median of their times, where they agree: some differ by what
    no structure shows.
    """
    for k in range(len(points[together[0]])):
        values = [points[i][k][1] for i in together]
        middle = statistics.median(values)
        for i in together:
            size, value = points[i][k]
            if abs(value - middle) <= 0.25 * middle:
                points[i][k] = (size, middle)


def _sequence(batch: Any, samples: int) -> int:
    """Length of the sequences in a batch of token numbers; 0 where there are none."""
    for tensor in tensors_in(batch, attributes=True):
        if (
            tensor.dim() == 2
            and tensor.shape[0] == samples
            and tensor.dtype in (torch.int64, torch.int32)
        ):
            return int(tensor.shape[1])
    return 0
