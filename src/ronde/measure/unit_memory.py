"""Count the memory of a model's units, of its optimizer and of a whole step.

The model runs on fake tensors, which hold no memory. Each storage is recorded when it appears and
when it disappears, with the unit that was running. What remains after the forward pass is what the
unit keeps for its backward pass; the peak above that is what it needs temporarily. A model that
cannot run on fake tensors, because it reads a value, is counted in a real run.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer

from ronde.measure.flops import Flops
from ronde.measure.model_units import (
    LOSS,
    ModelUnit,
    UnitProbe,
    find_chain,
    refers_to,
    standing_in,
    untouched,
)
from ronde.measure.storage_ledger import Ledger, LedgerEntry, bytes_of, storages
from ronde.parallel.optimizer_coupling import ways_refused
from ronde.parallel.recompute import applied, large_children, repeated_blocks
from ronde.predict import Costs, LinearCost, Unit
from ronde.world import RondeError
from ronde.world.tensors import tensors_in

__all__ = [
    "MemoryAccount",
    "UnitBytes",
    "account",
    "copied_optimizer",
    "line",
    "most",
    "optimizer_bytes",
    "peak",
    "weigh",
]


def line(points: Sequence[tuple[float, float]]) -> LinearCost:
    """The line through (samples, cost) with the least squared relative error; neither part below
    0.
    """
    points = [(float(x), float(y)) for x, y in points]
    if not points:
        return LinearCost()
    if len({x for x, _ in points}) == 1:
        x, y = points[0][0], sum(y for _, y in points) / len(points)
        return LinearCost(0.0, y / x)

    def error(found: LinearCost) -> float:
        return sum(((found.at(x) - y) / max(abs(y), 1e-30)) ** 2 for x, y in points)

    weights = [1.0 / max(y * y, 1e-30) for _, y in points]
    total = sum(weights)
    mx = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    my = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - mx) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    slope = sum(w * (x - mx) * (y - my) for w, (x, y) in zip(weights, points, strict=True)) / spread
    free = LinearCost(my - slope * mx, slope)
    if free.fixed >= 0 and free.per_sample >= 0:
        return free
    through = sum(w * x * y for w, (x, y) in zip(weights, points, strict=True)) / sum(
        w * x * x for w, (x, _) in zip(weights, points, strict=True)
    )
    return min(LinearCost(max(0.0, my), 0.0), LinearCost(0.0, max(0.0, through)), key=error)


def most(points: Sequence[tuple[float, float]]) -> LinearCost:
    """Through (samples, most bytes at once): chords, the largest of which counts, and never below
    0.

    What is most is so at one moment with few samples and at another with many (when gradients are
    there, when activations are), so no single line goes through it, and one with the least error
    would be too low at both ends. As the largest of several lines it is
    convex: a chord is not below it.
    """
    points = sorted((float(x), float(y)) for x, y in points)
    chords: list[tuple[float, float]] = []
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        slope = (y1 - y0) / (x1 - x0)
        chord = (y0 - slope * x0, slope)
        if not chords or any(
            abs(a - b) > 1e-6 * max(abs(a), abs(b), 1.0)
            for a, b in zip(chord, chords[-1], strict=True)
        ):
            chords.append(chord)
    if not chords:
        return line(points)
    if any(part < 0 for chord in chords for part in chord):
        chords.insert(0, (0.0, 0.0))
    return LinearCost(*chords[-1], tuple(reversed(chords[:-1])))


@dataclass
class UnitBytes:
    """One unit at one micro-batch size. Bytes, but for ``flops`` (of the whole micro-batch's
    forward pass).

    ``late_gradient`` is of parameters that earlier units own; ``runs_again`` says that its layers
    ran in the backward pass as well.
    """

    saved: int = 0
    forward_transient: int = 0
    backward_transient: int = 0
    gradient: int = 0
    late_gradient: int = 0
    crossing: int = 0
    crossing_grad: int = 0
    put_off: int = 0
    flops: float = 0.0
    runs_again: bool = False


@dataclass
class MemoryAccount:
    """What :func:`account` found.

    Attributes:
        chain: the units, the loss last.
        sizes: micro-batch size -> one entry a unit.
        parameters: one list a unit: the parameters that it owns, by name.
        shared: one set a unit: names of parameters that it shares with others.
        buffers: bytes of buffers, one number a unit.
        batch: micro-batch size -> bytes of the micro-batch itself.
        faked: whether fake tensors did.
        reason: why not, where not.
        total: micro-batch size -> most bytes alive at once beside parameters, buffers and batch,
            gradients included.
        again: level of recomputation -> as ``sizes``, with blocks that are computed again; a level
            that failed is not in it.
        recomputed: names of those blocks.
        blocks: names of what is gathered, or computed again, as a whole.
        calls: how often a forward pass calls each of those.
    """

    chain: list[ModelUnit]
    sizes: dict[int, list[UnitBytes]] = field(default_factory=dict)
    parameters: list[list[str]] = field(default_factory=list)
    shared: list[set[str]] = field(default_factory=list)
    buffers: list[int] = field(default_factory=list)
    batch: dict[int, int] = field(default_factory=dict)
    faked: bool = True
    reason: str = ""
    total: dict[int, int] = field(default_factory=dict)
    again: dict[str, dict[int, list[UnitBytes]]] = field(default_factory=dict)
    recomputed: list[str] = field(default_factory=list)
    blocks: list[str] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)

    def lines(self, kind: str, level: str = "none") -> list[LinearCost]:
        """One line a unit of ``saved``, ``forward_transient``, … under a level of recomputation."""
        sizes = self.again[level] if level != "none" else self.sizes
        through = most if kind.endswith("transient") else line
        return [
            through([(b, float(getattr(units[i], kind))) for b, units in sizes.items()])
            for i in range(len(self.chain))
        ]

    def block(self, unit: str) -> str:
        """The block that a unit is in, or is made of; ``""`` for none."""
        around = [b for b in self.blocks if unit == b or unit.startswith(f"{b}.")]
        return (
            around[0]
            if around
            else unit
            if any(b.startswith(f"{unit}.") for b in self.blocks)
            else ""
        )


def _maker(fake: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """Makes a stand-in of a real tensor: a fake one, or a copy.

    The mode itself is not entered: what is computed from the batch and constants alone (masks,
    lengths) has values, so that a model may look at it; all that meets a parameter is fake.
    """
    if not fake:
        return lambda tensor: tensor.detach().clone()
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def make(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim() and tensor.device.type == "cpu":
            return tensor.detach().clone()  # a count of steps: its value is read
        return cast(torch.Tensor, mode.from_tensor(tensor.detach(), static_shapes=True))

    return make


def _owners(
    model: nn.Module, chain: Sequence[ModelUnit], ledger: Ledger, order: dict[str, nn.Parameter]
) -> tuple[list[list[str]], list[set[str]]]:
    """Which unit owns each parameter (the first that holds or reads it), and which are shared."""
    modules = dict(model.named_modules(remove_duplicate=False))
    holders: dict[int, set[int]] = {}
    for index, link in enumerate(chain):
        if link.name in modules and (link.name or len(chain) <= 2):
            for p in modules[link.name].parameters():
                holders.setdefault(id(p), set()).add(index)
    owned: list[list[str]] = [[] for _ in chain]
    shared: list[set[str]] = [set() for _ in chain]
    for name, p in order.items():
        read = (
            ledger.readers.get(p.untyped_storage()._cdata, set())
            if p.layout is torch.strided
            else set()
        )
        users = sorted(holders.get(id(p), set()) | read) or [0]
        owned[users[0]].append(name)
        if len(users) > 1:
            for user in users:
                shared[user].add(name)
    return owned, shared


def _one_size(
    model: nn.Module, chain: list[ModelUnit], compute: Any, batch: Any, autocast: Callable[[], Any]
) -> tuple[list[UnitBytes], Ledger, int]:
    """Run one step of a stand-in and account for it."""
    order = dict(model.named_parameters())
    for p in order.values():
        p.grad = None
    known: list[torch.Tensor] = [
        *order.values(),
        *model.buffers(),
        *tensors_in(batch, attributes=True),
    ]
    ledger = Ledger(iter(known))
    last = len(chain) - 1
    saved: list[int] = [0] * len(chain)
    holding: list[LedgerEntry] = []

    def tell(unit: int, event: str) -> None:
        if event == "in":
            ledger.enter(unit, "forward")
        elif event == "back":
            ledger.enter(unit, "backward")

    def between() -> None:
        for entry in ledger.entries:
            if entry.alive:
                saved[entry.unit] += entry.size
                holding.append(entry)

    put_off = [0] * len(chain)
    without: set[int] = set()  # units that ran without gradients
    again: set[int] = set()

    def returned(_: nn.Module, __: Any, output: Any) -> None:
        if ledger.phase == "backward":
            again.add(ledger.unit)
        # else it has been counted, and runs again
        if ledger.phase == "forward" or ledger.unit in without:
            put_off[ledger.unit] += sum(
                bytes_of(t) for t in tensors_in(output, attributes=True) if t.requires_grad
            )

    def begins(index: int, _: nn.Module, __: Any) -> None:
        if ledger.phase == "forward":
            if not torch.is_grad_enabled():
                without.add(index)
        elif index in without:
            ledger.enter(index, "backward")

    def ends(index: int, _: nn.Module, __: Any, output: Any) -> None:
        # A reentrant checkpoint: only now is there a graph, and the backward pass goes through it
        # at once.
        if ledger.phase == "backward" and index in without:
            for tensor in tensors_in(output, attributes=True):
                if tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(lambda _: ledger.enter(index, "backward"))

    probe = UnitProbe(model, chain, tell)
    weighted = [
        m
        for m in model.modules()
        if any(p is not None and p.requires_grad for p in m._parameters.values())
    ]
    named = dict(model.named_modules(remove_duplicate=False))
    units = [(i, named[link.name]) for i, link in enumerate(chain) if link.name in named]
    hooks = [m.register_forward_pre_hook(partial(begins, i)) for i, m in units]
    hooks += [m.register_forward_hook(partial(ends, i)) for i, m in units]
    hooks += [m.register_forward_hook(returned) for m in weighted]
    try:
        with ledger:
            probe.step(compute, model, batch, last, between, autocast)
    finally:
        for hook in hooks:
            hook.remove()
        probe.close()
    gradients, late = [0] * len(chain), [0] * len(chain)
    owned, users = _owners(model, chain, ledger, order)
    for i, names in enumerate(owned):
        for name in names:
            gradient = order[name].grad
            if gradient is not None:
                gradients[i] += sum(s.nbytes() for s, _ in storages(gradient))
    for i, shared in enumerate(users):
        for name in shared:
            gradient = order[name].grad
            if gradient is not None and name not in owned[i]:
                late[i] += sum(s.nbytes() for s, _ in storages(gradient))
    found = []
    for i in range(len(chain)):
        before, after = sum(saved[: i + 1]), sum(gradients[i:]) + sum(late[i:])
        forward = ledger.peaks.get(("forward", i), 0) - before
        backward = ledger.peaks.get(("backward", i), 0) - before - after
        crossing = [e for e in ledger.entries if e.phase == "forward" and e.unit <= i < e.last_read]
        found.append(
            UnitBytes(
                saved=saved[i],
                forward_transient=max(0, forward),
                backward_transient=max(0, backward),
                gradient=gradients[i],
                late_gradient=late[i],
                crossing=sum(e.read_bytes for e in crossing),
                crossing_grad=sum(e.read_bytes for e in crossing if e.floating),
                put_off=put_off[i],
                runs_again=i in again,
            )
        )
    total = max(ledger.peaks.values(), default=0)
    for p in order.values():
        p.grad = None
    return found, ledger, total


def account(
    model: nn.Module,
    compute: Any,
    batches: Callable[[int], Any],
    sizes: Sequence[int],
    *,
    autocast: Callable[[], Any] = contextlib.nullcontext,
    chain: list[ModelUnit] | None = None,
    fake: bool = True,
    within: Callable[[nn.Module], contextlib.AbstractContextManager[Any]] | None = None,
) -> MemoryAccount:
    """Bytes of every unit at every micro-batch size, without running the model where fake tensors
    allow it.

    Args:
        compute: the script's forward and loss, a LossCall.
        batches: gives a micro-batch of so many samples, on the model's device.
        sizes: micro-batch sizes.
        autocast: context of the forward pass.
        chain: the units; None finds them.
        fake: whether to try fake tensors first.
        within: what the stand-in's passes run in, such as changes to it; recomputation is not tried
            then.
    """
    torchs = logging.getLogger("torch._subclasses.fake_tensor")
    level = torchs.level
    torchs.setLevel(logging.CRITICAL + 1)  # that a kernel has no fake is told in ``reason``
    try:
        return _account(model, compute, batches, sizes, autocast, chain, fake, within)
    except Exception as error:
        if not fake:
            raise
        found = _account(model, compute, batches, sizes, autocast, chain, False, within)
        found.reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return found
    finally:
        torchs.setLevel(level)


def _account(
    model: nn.Module,
    compute: Any,
    batches: Callable[[int], Any],
    sizes: Sequence[int],
    autocast: Callable[[], Any],
    chain: list[ModelUnit] | None,
    fake: bool,
    within: Callable[[nn.Module], contextlib.AbstractContextManager[Any]] | None,
) -> MemoryAccount:
    with (
        untouched(model),
        standing_in(model, _maker(fake), refers_to(compute, model)) as (stand_in, _),
        within(stand_in) if within is not None else contextlib.nullcontext(),
    ):
        micro = {b: batches(b) for b in sizes}

        def once() -> None:
            with autocast():
                compute(stand_in, micro[sizes[0]])

        blocks = repeated_blocks(stand_in) or large_children(stand_in)
        calls = dict.fromkeys(blocks, 0)

        def called(name: str, _: nn.Module, __: Any) -> None:
            calls[name] += 1

        counting = [
            block.register_forward_pre_hook(partial(called, name)) for name, block in blocks.items()
        ]
        try:
            if chain is not None and within is None:
                once()
            found = MemoryAccount(chain or find_chain(stand_in, once), faked=fake)
        finally:
            for hook in counting:
                hook.remove()
        found.blocks, found.calls = list(blocks), calls
        for b in sizes:
            units, ledger, total = _one_size(stand_in, found.chain, compute, micro[b], autocast)
            found.sizes[b], found.total[b] = units, total
            found.batch[b] = sum(bytes_of(t) for t in tensors_in(micro[b], attributes=True))
        for level in ("selective", "full") if within is None else ():
            # What cannot be run so is told where it is asked for; here it is assumed.
            with contextlib.suppress(Exception), applied(stand_in, level) as found.recomputed:
                found.again[level] = {
                    b: _one_size(stand_in, found.chain, compute, micro[b], autocast)[0]
                    if found.recomputed
                    else found.sizes[b]
                    for b in sizes
                }
        order = dict(stand_in.named_parameters())
        found.parameters, found.shared = _owners(stand_in, found.chain, ledger, order)
        found.buffers = _buffers(stand_in, found.chain)
        counted = _count(stand_in, found.chain, compute, micro[sizes[-2:][0]])
        for unit, flops in zip(found.sizes[sizes[-2:][0]], counted, strict=True):
            unit.flops = flops
    return found


def _count(
    model: nn.Module, chain: list[ModelUnit], compute: Any, batch: Any, differentiates: bool = False
) -> list[float]:
    flops = Flops(model, chain)
    probe = UnitProbe(
        model, chain, lambda unit, event: flops.enter(unit) if event == "in" else None
    )
    try:
        # The fused kernels of CPUs are not counted by torch (2.13): the plain one is.
        with (
            torch.enable_grad() if differentiates else torch.no_grad(),
            sdpa_kernel(SDPBackend.MATH),
            flops,
        ):
            values = compute.arguments(model, batch)
            flops.enter(len(chain) - 1)
            compute.loss(*values)
            flops.enter(len(chain) - 1)
    except RuntimeError:
        if differentiates:
            raise
        # a model may need gradients in its forward pass
        return _count(model, chain, compute, batch, True)
    finally:
        probe.close()
    return flops.counted


def _buffers(model: nn.Module, chain: Sequence[ModelUnit]) -> list[int]:
    modules = dict(model.named_modules(remove_duplicate=False))
    seen: set[int] = set()
    found = [0] * len(chain)
    for index, link in enumerate(chain):
        for buffer in modules[link.name].buffers() if link.name in modules else ():
            if id(buffer) not in seen:
                seen.add(id(buffer))
                found[index] += bytes_of(buffer)
    found[0] += sum(bytes_of(b) for b in model.buffers() if id(b) not in seen)
    return found


def copied_optimizer(
    optimizer: Optimizer,
    made: dict[int, torch.Tensor],
    make: Callable[[torch.Tensor], torch.Tensor],
) -> Optimizer:
    """The script's optimizer, with its settings and its state, over the copies of its parameters.

    Args:
        made: id of a parameter -> its copy, as :func:`ronde.measure.model_units.standing_in` gives
            it; completed for parameters that lack there.
        make: copies a tensor of the state.
    """
    memo: dict[int, Any] = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            if id(p) not in made:
                made[id(p)] = nn.Parameter(make(p), p.requires_grad)
    memo.update(made)
    for value in tensors_in(
        [
            list(optimizer.state.values()),
            [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
        ],
        attributes=True,
    ):
        if id(value) not in memo:
            memo[id(value)] = make(value)
    new: Optimizer = object.__new__(type(optimizer))
    for key, value in vars(optimizer).items():
        if key == "step" or "hook" in key or key == "state":
            continue  # a scheduler's wrapper around step() would step the script's own optimizer
        vars(new)[key] = copy.deepcopy(value, memo)
    state = copy.deepcopy(dict(optimizer.state), memo)
    new.__setstate__({"state": _defaults(state)})
    if "defaults" not in vars(new):
        new.defaults = {}
    return new


def _defaults(state: dict[Any, Any]) -> Any:
    from collections import defaultdict

    found: Any = defaultdict(dict)
    found.update(state)
    return found


def optimizer_bytes(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, int], int]:
    """Bytes of state that the optimizer keeps for each parameter, by name, and the most it needs
    for a moment in a step.

    One step is taken on stand-ins, by the optimizer's own class with its own settings: any torch
    optimizer.

    Raises:
        RondeError: it cannot step on stand-ins, neither fake nor copied.
    """
    errors = []
    for fake in (True, False):
        try:
            return _optimizer_bytes(model, optimizer, fake)
        except Exception as error:
            errors.append(error)
    raise RondeError(
        f"optimizer {type(optimizer).__name__} cannot take a step on copies of the "
        "parameters, so its memory is not known: "
        f"{type(errors[-1]).__name__}: {errors[-1]}"
    ) from errors[-1]


def _optimizer_bytes(
    model: nn.Module, optimizer: Optimizer, fake: bool
) -> tuple[dict[str, int], int]:
    with untouched(model):
        make = _maker(fake)
        made: dict[int, torch.Tensor] = {}
        for p in model.parameters():
            made[id(p)] = nn.Parameter(make(p), p.requires_grad)
        names = {id(made[id(p)]): name for name, p in model.named_parameters()}
        copy_ = copied_optimizer(optimizer, made, make)
        for group in copy_.param_groups:
            for p in group["params"]:
                p.grad = torch.zeros_like(p) if p.requires_grad else None

        def closure() -> torch.Tensor:
            return torch.zeros(())

        def step() -> None:
            try:
                copy_.step()
            except TypeError:
                copy_.step(closure)  # type: ignore[arg-type]

        step()
        found: dict[str, int] = {}
        seen: set[int] = set()
        for each, state in copy_.state.items():
            size = 0
            for storage, _ in storages(state):
                if storage._cdata not in seen:
                    seen.add(storage._cdata)
                    size += storage.nbytes()
            name = names.get(id(each), "")
            found[name] = found.get(name, 0) + size
        known = tensors_in([list(copy_.state.values())], attributes=True)
        for group in copy_.param_groups:
            known += [t for p in group["params"] for t in (p, p.grad) if t is not None]
        ledger = Ledger(iter(known))
        with ledger:
            step()
        return found, max(ledger.peaks.values(), default=0)


def weigh(
    model: nn.Module,
    optimizer: Optimizer,
    compute: Any,
    batches: Callable[[int], Any],
    batch_size: int,
    *,
    sizes: Sequence[int] | None = None,
    autocast: Callable[[], Any] = contextlib.nullcontext,
    chain: list[ModelUnit] | None = None,
) -> Costs:
    """A model's units with their bytes and operations, and no times.

    Args:
        compute: the script's forward and loss, a LossCall.
        batches: gives a micro-batch of so many samples.
        batch_size: global samples per optimizer step.
        sizes: micro-batch sizes to weigh at; between them a line is drawn.
    """
    least = min(2, batch_size)  # normalisation over a batch of one fails
    sizes = sorted(set(sizes or (least, max(least, batch_size // 8), batch_size)))
    found = account(model, compute, batches, sizes, autocast=autocast, chain=chain)
    parameters = dict(model.named_parameters())
    notes = (
        []
        if found.faked
        else [
            "memory was counted in a real run, as the model does not run on fake tensors "
            f"({found.reason})"
        ]
    )
    try:
        state, transient = optimizer_bytes(model, optimizer)
    except RondeError as error:
        state, transient = {}, 0
        notes.append(str(error))
    modules = dict(model.named_modules(remove_duplicate=False))
    flops_at = sizes[-2:][0]
    fits = {
        kind: found.lines(kind)
        for kind in (
            "saved",
            "forward_transient",
            "backward_transient",
            "crossing",
            "crossing_grad",
            "put_off",
        )
    }
    again: dict[str, list[Any]] = {
        f"{level}_{name}_bytes": found.lines(kind, level)
        for level in found.again
        for name, kind in (
            ("saved", "saved"),
            ("forward", "forward_transient"),
            ("backward", "backward_transient"),
        )
    }
    units = []
    for i, link in enumerate(found.chain):
        own = [parameters[name] for name in found.parameters[i]]
        at = found.sizes[flops_at][i]
        norms = modules[link.name].modules() if link.name in modules else ()
        units.append(
            Unit(
                name=link.name,
                parameter_bytes=sum(bytes_of(p) for p in own),
                trainable_bytes=sum(bytes_of(p) for p in own if p.requires_grad),
                optimizer_bytes=sum(state.get(name, 0) for name in found.parameters[i]),
                buffer_bytes=found.buffers[i],
                saved_bytes=fits["saved"][i],
                transient_bytes=most(
                    [
                        (b, float(max(u[i].forward_transient, u[i].backward_transient)))
                        for b, u in found.sizes.items()
                    ]
                ),
                forward_transient_bytes=fits["forward_transient"][i],
                backward_transient_bytes=fits["backward_transient"][i],
                crossing_bytes=fits["crossing"][i],
                crossing_grad_bytes=fits["crossing_grad"][i],
                put_off_bytes=fits["put_off"][i],
                cut_after=not link.why_not and link.name != LOSS,
                why_not=link.why_not or ("the loss is the end" if link.name == LOSS else ""),
                alike=link.alike,
                flops=at.flops / flops_at,
                tied=tuple(sorted(found.shared[i])),
                tied_bytes=sum(bytes_of(parameters[name]) for name in found.shared[i]),
                tied_grad_bytes=at.late_gradient,
                batchnorm=any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in norms),
                block=(block := found.block(link.name)),
                block_calls=max(1, found.calls.get(block, 1)),
                recomputed=any(
                    link.name == b or link.name.startswith(f"{b}.") or b.startswith(f"{link.name}.")
                    for b in found.recomputed
                    if link.name
                ),
                **{name: lines[i] for name, lines in again.items()},
            )
        )
    refused = ways_refused(model, optimizer)
    if refused:
        notes.append(
            f"not looked at: {', '.join(refused)}: {'; '.join(dict.fromkeys(refused.values()))}"
        )
    if any(unit.runs_again for unit in found.sizes[sizes[0]]):
        # All that runs again then stays until the other half of the backward pass.
        refused["zero-bubble"] = (
            "what the model computes again itself stays until the weights' half of the "
            "backward pass: how much is not known"
        )
    rest = state.get("", 0)
    if rest:
        notes.append(
            f"{rest:,} bytes of optimizer state belong to parameters that the model does not have"
        )
    return Costs(
        units=tuple(units),
        batch_size=batch_size,
        input_bytes=max(0.0, line([(b, float(n)) for b, n in found.batch.items()]).per_sample),
        optimizer=type(optimizer).__name__,
        parameters=sum(p.numel() for p in parameters.values()),
        measured_samples=tuple(sizes),
        optimizer_transient_bytes=float(transient),
        notes=tuple(notes),
        blocks=True,
        again=tuple(found.again),
        refused=refused,
    )


def peak(
    model: nn.Module,
    optimizer: Optimizer,
    compute: Any,
    batch: Any,
    *,
    autocast: Callable[[], Any] = contextlib.nullcontext,
) -> dict[str, int]:
    """Most bytes at once of whole steps on one device, by torch's own MemTracker on fake tensors: a
    check on the chain's sum.

    Returns:
        ``{"Total": …, "Parameter": …, …}``, the batch included.
    """
    from torch.distributed._tools.mem_tracker import MemTracker

    make = _maker(True)
    with untouched(model), standing_in(model, make, refers_to(compute, model)) as (stand_in, made):
        copy_ = copied_optimizer(optimizer, made, make)
        tracker = MemTracker()
        tracker.track_external(stand_in, copy_, *tensors_in(batch, attributes=True))
        with tracker:
            for _ in range(2):  # the optimizer's state is there in the second
                with autocast():
                    loss, _weight = compute(stand_in, batch)
                loss.backward()
                copy_.step()
                copy_.zero_grad()
                del loss, _weight
                tracker.reset_mod_stats()
        snapshot = tracker.get_tracker_snapshot("peak")
    found: dict[str, int] = {}
    for kinds in snapshot.values():
        for kind, size in kinds.items():
            name = str(getattr(kind, "value", kind))
            found[name] = found.get(name, 0) + int(size)
    return found
