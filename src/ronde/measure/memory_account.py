"""Count the bytes of each unit of a model in one step, and of its optimizer.

The model runs on fake tensors, which hold no memory. Each storage is recorded when it appears and
when it disappears, with the unit that was running. What remains after the forward pass is what the
unit keeps for its backward pass; the peak above that is what it needs temporarily. A model that
cannot run on fake tensors, because it reads a value, is counted in a real run.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer

from ronde.measure.cost_lines import line, most
from ronde.measure.model_units import LOSS, ModelUnit, UnitProbe, find_chain
from ronde.measure.stand_in import refers_to, standing_in, tensor_maker, untouched
from ronde.measure.storage_ledger import Ledger, bytes_of, storages
from ronde.measure.unit_work import UnitWork, WorkCounter
from ronde.parallel.optimizer_coupling import ways_refused
from ronde.parallel.recompute import applied, large_children, repeated_blocks
from ronde.predict import Costs, LinearCost, Unit
from ronde.world import RondeError
from ronde.world.tensors import tensors_in

Autocast = Callable[[], Any]
_TRANSIENTS = {"forward": "forward_transient", "backward": "backward_transient"}
_KINDS = ("saved", *_TRANSIENTS.values(), "crossing", "crossing_grad")


@dataclass
class UnitBytes:
    """Bytes of one unit at one micro-batch size.

    ``late_gradient`` is of parameters that earlier units own.
    """

    saved: int = 0
    forward_transient: int = 0
    backward_transient: int = 0
    late_gradient: int = 0
    crossing: int = 0
    crossing_grad: int = 0


@dataclass
class MemoryAccount:
    """The answer of :func:`account`.

    Attributes:
        chain: the units, the loss last.
        sizes: micro-batch size -> one entry per unit.
        parameters: for each unit, names of the parameters that it owns.
        shared: for each unit, names of parameters that it shares with others.
        buffers: bytes of buffers, for each unit.
        batch: micro-batch size -> bytes of the micro-batch itself.
        faked: whether fake tensors worked, and ``reason``: why not.
        again: level of recomputation -> the same as ``sizes``; levels that failed are missing.
        recomputed: names of the blocks that are recomputed.
        blocks: names of the blocks that are gathered or recomputed as a whole.
        work: micro-batch size -> one entry per unit.
    """

    chain: list[ModelUnit]
    sizes: dict[int, list[UnitBytes]] = field(default_factory=dict)
    parameters: list[list[str]] = field(default_factory=list)
    shared: list[set[str]] = field(default_factory=list)
    buffers: list[int] = field(default_factory=list)
    batch: dict[int, int] = field(default_factory=dict)
    faked: bool = True
    reason: str = ""
    again: dict[str, dict[int, list[UnitBytes]]] = field(default_factory=dict)
    recomputed: list[str] = field(default_factory=list)
    blocks: list[str] = field(default_factory=list)
    work: dict[int, list[UnitWork]] = field(default_factory=dict)

    def moved(self) -> list[LinearCost]:
        """A fit per unit of the bytes that its forward pass moves."""
        return [
            line([(b, units[i].moved) for b, units in self.work.items()])
            for i in range(len(self.chain))
        ]

    def lines(self, kind: str, level: str = "none") -> list[LinearCost]:
        """A fit per unit of ``saved``, ``forward_transient``, … at a level of recomputation."""
        sizes = self.again[level] if level != "none" else self.sizes
        fit = most if kind.endswith("transient") else line
        return [
            fit([(b, float(getattr(units[i], kind))) for b, units in sizes.items()])
            for i in range(len(self.chain))
        ]

    def block(self, unit: str) -> str:
        """The block that contains a unit, or the unit if it contains blocks; else ``""``."""
        for block in self.blocks:
            if unit == block or unit.startswith(f"{block}."):
                return block
        return unit if any(b.startswith(f"{unit}.") for b in self.blocks) else ""


def weigh(
    model: nn.Module,
    optimizer: Optimizer,
    compute: Any,
    batches: Callable[[int], Any],
    batch_size: int,
    *,
    sizes: Sequence[int] | None = None,
    autocast: Callable[[], Any] = contextlib.nullcontext,
) -> Costs:
    """A model's units with their bytes and operations, and no times.

    Args:
        compute: the script's forward and loss, a LossCall.
        batches: makes a micro-batch of so many samples.
        batch_size: global samples per optimizer step.
        sizes: micro-batch sizes to weigh at; costs between them are interpolated.
    """
    least = min(2, batch_size)  # normalization over a batch of one fails
    sizes = sorted(set(sizes or (least, max(least, batch_size // 8), batch_size)))
    memory = account(model, compute, batches, sizes, autocast=autocast)
    notes = []
    if not memory.faked:
        notes.append(
            "memory was counted in a real run, because the model does not run on fake tensors "
            f"({memory.reason})"
        )
    state: dict[str, int] = {}
    transient = 0
    try:
        state, transient = optimizer_bytes(model, optimizer)
    except RondeError as error:
        notes.append(str(error))
    refused = ways_refused(model, optimizer)
    if refused:
        reasons = "; ".join(dict.fromkeys(refused.values()))
        notes.append(f"not considered: {', '.join(refused)}: {reasons}")
    if several := [unit.name for unit in memory.chain if unit.calls > 1]:
        notes.append(
            f"{several[0]!r} runs several times in a forward pass: sharded plans gather it each "
            "time, and may take more memory and time than predicted"
        )
    if rest := state.get("", 0):
        notes.append(f"{rest:,} bytes of optimizer state belong to parameters outside the model")
    return Costs(
        units=_units(model, memory, state, sizes[-2:][0]),
        batch_size=batch_size,
        input_bytes=max(0.0, line([(b, float(n)) for b, n in memory.batch.items()]).per_sample),
        optimizer=type(optimizer).__name__,
        parameters=sum(p.numel() for p in model.parameters()),
        measured_samples=tuple(sizes),
        optimizer_transient_bytes=float(transient),
        notes=tuple(notes),
        again=tuple(memory.again),
        refused=refused,
    )


def _units(
    model: nn.Module, memory: MemoryAccount, state: Mapping[str, int], flops_size: int
) -> tuple[Unit, ...]:
    parameters = dict(model.named_parameters())
    lines: dict[str, list[Any]] = {f"{kind}_bytes": memory.lines(kind) for kind in _KINDS}
    lines |= {
        f"{level}_{name}_bytes": memory.lines(kind, level)
        for level in memory.again
        for name, kind in {"saved": "saved", **_TRANSIENTS}.items()
    }
    units = []
    moved, work = memory.moved(), memory.work[flops_size]
    for i, link in enumerate(memory.chain):
        own = [parameters[name] for name in memory.parameters[i]]
        trained = tuple(bytes_of(p) for p in own if p.requires_grad)
        units.append(
            Unit(
                name=link.name,
                parameter_bytes=sum(bytes_of(p) for p in own),
                trainable_bytes=sum(trained),
                tensor_bytes=trained,
                optimizer_bytes=sum(state.get(name, 0) for name in memory.parameters[i]),
                buffer_bytes=memory.buffers[i],
                cut_after=not link.why_not and link.name != LOSS,
                why_not=link.why_not or ("the loss is the end" if link.name == LOSS else ""),
                alike=link.alike,
                flops=max(0.0, work[i].flops) / flops_size,
                operations=work[i].operations,
                attention_flops=work[i].attention / flops_size,
                vector_flops=work[i].vector / flops_size,
                moved_bytes=moved[i],
                tied=tuple(sorted(memory.shared[i])),
                tied_bytes=sum(bytes_of(parameters[name]) for name in memory.shared[i]),
                tied_grad_bytes=memory.sizes[flops_size][i].late_gradient,
                block=memory.block(link.name),
                recomputed=any(_overlap(link.name, b) for b in memory.recomputed),
                **{name: fits[i] for name, fits in lines.items()},
            )
        )
    return tuple(units)


def _overlap(unit: str, block: str) -> bool:
    """Whether one module is, or contains, the other; never for the whole model."""
    inside = unit.startswith(f"{block}.") or block.startswith(f"{unit}.")
    return bool(unit) and (unit == block or inside)


def account(
    model: nn.Module,
    compute: Any,
    batches: Callable[[int], Any],
    sizes: Sequence[int],
    *,
    autocast: Autocast = contextlib.nullcontext,
    chain: list[ModelUnit] | None = None,
    fake: bool = True,
    within: Callable[[nn.Module], contextlib.AbstractContextManager[Any]] | None = None,
) -> MemoryAccount:
    """Bytes of every unit at every micro-batch size.

    Args:
        compute: the script's forward and loss, a LossCall.
        batches: makes a micro-batch of so many samples, on the model's device.
        sizes: micro-batch sizes.
        autocast: context of the forward pass.
        chain: the units; None finds them.
        fake: try fake tensors first.
        within: context for passes of the stand-in, such as changes to it; recomputation is not
            tried then.
    """
    count = partial(_account, model, compute, batches, sizes, autocast, chain, within)
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)  # ``reason`` reports kernels that have no fake
    try:
        return count(fake)
    except Exception as error:
        if not fake:
            raise
        memory = count(False)
        memory.reason = (
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        )
        return memory
    finally:
        logger.setLevel(level)


def _account(
    model: nn.Module,
    compute: Any,
    batches: Callable[[int], Any],
    sizes: Sequence[int],
    autocast: Autocast,
    chain: list[ModelUnit] | None,
    within: Callable[[nn.Module], contextlib.AbstractContextManager[Any]] | None,
    fake: bool,
) -> MemoryAccount:
    with (
        untouched(model),
        standing_in(model, tensor_maker(fake), refers_to(compute, model)) as (stand_in, _),
        within(stand_in) if within is not None else contextlib.nullcontext(),
    ):
        micro = {b: batches(b) for b in sizes}

        def run_once() -> None:
            with autocast():
                compute(stand_in, micro[sizes[0]])

        blocks = repeated_blocks(stand_in) or large_children(stand_in)
        units = chain or find_chain(stand_in, run_once)
        memory = MemoryAccount(units, faked=fake, blocks=list(blocks))
        for b in sizes:
            memory.sizes[b], ledger = _one_size(stand_in, units, compute, micro[b], autocast)
            memory.batch[b] = sum(bytes_of(t) for t in tensors_in(micro[b], attributes=True))
        for level in ("selective", "full") if within is None else ():
            # A level that fails is missing: the plan that needs it says why.
            with contextlib.suppress(Exception), applied(stand_in, level) as memory.recomputed:
                memory.again[level] = {
                    b: _one_size(stand_in, units, compute, micro[b], autocast)[0]
                    if memory.recomputed
                    else memory.sizes[b]
                    for b in sizes
                }
        order = dict(stand_in.named_parameters())
        memory.parameters, memory.shared = _owners(stand_in, units, ledger, order)
        memory.buffers = _buffers(stand_in, units)
        middle = sizes[-2:][0]
        memory.work = {
            b: _count_work(stand_in, units, compute, micro[b], autocast)
            for b in {sizes[0]: 0, middle: 0}
        }
    return memory


def _one_size(
    model: nn.Module, chain: list[ModelUnit], compute: Any, batch: Any, autocast: Autocast
) -> tuple[list[UnitBytes], Ledger]:
    """Run one step of a stand-in and account for it."""
    order = dict(model.named_parameters())
    for p in order.values():
        p.grad = None
    known = [*order.values(), *model.buffers(), *tensors_in(batch, attributes=True)]
    ledger = Ledger(iter(known))
    saved = [0] * len(chain)

    def mark(unit: int, event: str) -> None:
        if event in ("in", "back"):
            ledger.enter(unit, "forward" if event == "in" else "backward")

    def count_saved() -> None:
        for entry in ledger.entries:
            if entry.alive:
                saved[entry.unit] += entry.size

    probe = UnitProbe(model, chain, mark)
    with ledger, probe.listening():
        probe.step(compute, model, batch, len(chain) - 1, count_saved, autocast)
    owned, shared = _owners(model, chain, ledger, order)
    grads = {name: p.grad for name, p in order.items() if p.grad is not None}
    size = {name: sum(s.nbytes() for s, _ in storages(grad)) for name, grad in grads.items()}
    own = [sum(size.get(name, 0) for name in names) for names in owned]
    late = [
        sum(size.get(name, 0) for name in users if name not in names)
        for users, names in zip(shared, owned, strict=True)
    ]
    units = []
    for i in range(len(chain)):
        # What earlier units keep and what later ones left behind is counted with them.
        before, after = sum(saved[: i + 1]), sum(own[i:]) + sum(late[i:])
        forward = ledger.peaks.get(("forward", i), 0) - before
        backward = ledger.peaks.get(("backward", i), 0) - before - after
        crossing = [e for e in ledger.entries if e.phase == "forward" and e.unit <= i < e.last_read]
        units.append(
            UnitBytes(
                saved=saved[i],
                forward_transient=max(0, forward),
                backward_transient=max(0, backward),
                late_gradient=late[i],
                crossing=sum(e.read_bytes for e in crossing),
                crossing_grad=sum(e.read_bytes for e in crossing if e.floating),
            )
        )
    for p in order.values():
        p.grad = None
    return units, ledger


def _owners(
    model: nn.Module, chain: Sequence[ModelUnit], ledger: Ledger, order: dict[str, nn.Parameter]
) -> tuple[list[list[str]], list[set[str]]]:
    """For each unit, the parameters it owns (as the first to hold or read them) and shares."""
    modules = dict(model.named_modules(remove_duplicate=False))
    holders: dict[int, set[int]] = {}
    for index, unit in enumerate(chain):
        if unit.name in modules and (unit.name or len(chain) <= 2):
            for p in modules[unit.name].parameters():
                holders.setdefault(id(p), set()).add(index)
    owned: list[list[str]] = [[] for _ in chain]
    shared: list[set[str]] = [set() for _ in chain]
    for name, p in order.items():
        users = set(holders.get(id(p), ()))
        if p.layout is torch.strided:
            users |= ledger.readers.get(p.untyped_storage()._cdata, set())
        owned[min(users, default=0)].append(name)
        if len(users) > 1:
            for user in users:
                shared[user].add(name)
    return owned, shared


def _buffers(model: nn.Module, chain: Sequence[ModelUnit]) -> list[int]:
    modules = dict(model.named_modules(remove_duplicate=False))
    seen: set[int] = set()
    sizes = [0] * len(chain)
    for index, unit in enumerate(chain):
        for buffer in modules[unit.name].buffers() if unit.name in modules else ():
            if id(buffer) not in seen:
                seen.add(id(buffer))
                sizes[index] += bytes_of(buffer)
    sizes[0] += sum(bytes_of(b) for b in model.buffers() if id(b) not in seen)
    return sizes


def _count_work(
    model: nn.Module,
    chain: list[ModelUnit],
    compute: Any,
    batch: Any,
    autocast: Autocast,
    grad: bool = False,
) -> list[UnitWork]:
    """The work of each unit's forward pass."""
    work = WorkCounter(len(chain))

    def mark(unit: int, event: str) -> None:
        if event == "in":
            work.unit = unit

    try:
        # torch 2.13 does not count the fused attention kernels of CPUs, so use the plain one.
        with (
            UnitProbe(model, chain, mark).listening(),
            torch.set_grad_enabled(grad),
            sdpa_kernel(SDPBackend.MATH),
            work,
            autocast(),
        ):
            values = compute.arguments(model, batch)
            mark(len(chain) - 1, "in")
            compute.loss(*values)
    except RuntimeError:
        if grad:
            raise
        # its forward pass needs gradients
        return _count_work(model, chain, compute, batch, autocast, True)
    return work.units


def copied_optimizer(
    optimizer: Optimizer,
    copies: dict[int, torch.Tensor],
    make: Callable[[torch.Tensor], torch.Tensor],
) -> Optimizer:
    """The script's optimizer, with its settings and its state, over copies of its parameters.

    Args:
        copies: id of a parameter -> its copy; missing parameters are added.
        make: copies a tensor of the state.
    """
    memo: dict[int, Any] = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            if id(p) not in copies:
                copies[id(p)] = nn.Parameter(make(p), p.requires_grad)
    memo.update(copies)
    settings = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    for value in tensors_in([list(optimizer.state.values()), settings], attributes=True):
        if id(value) not in memo:
            memo[id(value)] = make(value)
    new: Optimizer
    if (over := getattr(optimizer, "over", None)) is not None:  # Keras's
        new = over(copies)
    else:
        new = object.__new__(type(optimizer))
        for key, value in vars(optimizer).items():
            if key == "step" or "hook" in key or key == "state":
                continue  # a scheduler's wrapper around step() would step the script's own
            vars(new)[key] = copy.deepcopy(value, memo)
    new.__setstate__({"state": defaultdict(dict, copy.deepcopy(dict(optimizer.state), memo))})
    if "defaults" not in vars(new):
        new.defaults = {}
    return new


def optimizer_bytes(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, int], int]:
    """Bytes of optimizer state for each parameter, by name, and the most it needs during a step.

    Takes steps on stand-ins, so it works for any torch optimizer.

    Raises:
        RondeError: the optimizer cannot step on stand-ins, fake or copied.
    """
    errors = []
    for fake in (True, False):
        try:
            return _optimizer_bytes(model, optimizer, fake)
        except Exception as error:
            errors.append(error)
    raise RondeError(
        f"optimizer {type(optimizer).__name__} cannot step on copies of the parameters, so its "
        f"memory is unknown: {type(errors[-1]).__name__}: {errors[-1]}"
    ) from errors[-1]


def _optimizer_bytes(
    model: nn.Module, optimizer: Optimizer, fake: bool
) -> tuple[dict[str, int], int]:
    with untouched(model):
        make = tensor_maker(fake)
        copies: dict[int, torch.Tensor] = {
            id(p): nn.Parameter(make(p), p.requires_grad) for p in model.parameters()
        }
        names = {id(copies[id(p)]): name for name, p in model.named_parameters()}
        stand_in = copied_optimizer(optimizer, copies, make)
        parameters = [p for group in stand_in.param_groups for p in group["params"]]
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.requires_grad else None

        def step() -> None:
            try:
                stand_in.step()
            except TypeError:  # it needs a closure
                stand_in.step(lambda: torch.zeros(()))  # type: ignore[arg-type, return-value]

        step()  # the first one makes the state; the second shows what a step needs beside it
        sizes: dict[str, int] = defaultdict(int)
        seen: set[int] = set()
        for p, state in stand_in.state.items():
            new = {s._cdata: s.nbytes() for s, _ in storages(state) if s._cdata not in seen}
            seen.update(new)
            sizes[names.get(id(p), "")] += sum(new.values())
        known = tensors_in([list(stand_in.state.values())], attributes=True)
        known += [t for p in parameters for t in (p, p.grad) if t is not None]
        ledger = Ledger(iter(known))
        with ledger:
            step()
        return dict(sizes), max(ledger.peaks.values(), default=0)
