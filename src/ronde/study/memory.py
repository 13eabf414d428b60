"""Memory of a model's units, of its optimizer and of a whole step: counted under fake tensors, which hold no memory.

Every storage that an operation makes is entered when it appears and crossed out when it goes, with the unit that was at work:
what is left after the forward pass is what that unit keeps for its backward pass, the most that there was beside it is what it
needs for a moment. Where a model cannot run on fake tensors (it reads a value), the same is counted in a real run.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from ronde.parallel.recompute import applied, large_children, repeated_blocks
from ronde.plan import Costs, Line, Unit
from ronde.study.chain import LOSS, Link, Probe, find_chain, refers_to, standing_in, tensors_of, untouched
from ronde.world import RondeError

__all__ = [
    "Account",
    "MeasuredPeak",
    "UnitBytes",
    "account",
    "chain_peak",
    "copied_optimizer",
    "line",
    "measured_peak",
    "optimizer_bytes",
    "peak",
    "weigh",
]


def line(points: Sequence[tuple[float, float]]) -> Line:
    """The line through (samples, cost) with the least squared relative error; neither part below 0."""
    points = [(float(x), float(y)) for x, y in points]
    if not points:
        return Line()
    if len({x for x, _ in points}) == 1:
        x, y = points[0][0], sum(y for _, y in points) / len(points)
        return Line(0.0, y / x)

    def error(found: Line) -> float:
        return sum(((found.at(x) - y) / max(abs(y), 1e-30)) ** 2 for x, y in points)

    weights = [1.0 / max(y * y, 1e-30) for _, y in points]
    total = sum(weights)
    mx = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    my = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - mx) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    slope = sum(w * (x - mx) * (y - my) for w, (x, y) in zip(weights, points, strict=True)) / spread
    free = Line(my - slope * mx, slope)
    if free.fixed >= 0 and free.per_sample >= 0:
        return free
    through = sum(w * x * y for w, (x, y) in zip(weights, points, strict=True)) / sum(
        w * x * x for w, (x, _) in zip(weights, points, strict=True)
    )
    return min(Line(max(0.0, my), 0.0), Line(0.0, max(0.0, through)), key=error)


@dataclass
class UnitBytes:
    """One unit at one micro-batch size. Bytes, but for ``flops`` (of the whole micro-batch's forward pass).

    ``late_gradient`` is of parameters that earlier units own.
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


@dataclass
class Account:
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
        total: micro-batch size -> most bytes alive at once beside parameters, buffers and batch, gradients included.
        again: level of recomputation -> as ``sizes``, with blocks that are computed again; a level that failed is not in it.
        recomputed: names of those blocks.
        blocks: names of what is gathered, or computed again, as a whole.
    """

    chain: list[Link]
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

    def lines(self, kind: str, level: str = "none") -> list[Line]:
        """One line a unit of ``saved``, ``forward_transient``, … under a level of recomputation."""
        sizes = self.again[level] if level != "none" else self.sizes
        return [line([(b, float(getattr(units[i], kind))) for b, units in sizes.items()]) for i in range(len(self.chain))]

    def block(self, unit: str) -> str:
        """The block that a unit is in, or is made of; ``""`` for none."""
        around = [b for b in self.blocks if unit == b or unit.startswith(f"{b}.")]
        return around[0] if around else unit if any(b.startswith(f"{unit}.") for b in self.blocks) else ""


def _bytes(tensor: torch.Tensor) -> int:
    return int(tensor.numel()) * tensor.element_size()


def _storages(value: Any) -> Iterator[tuple[torch.UntypedStorage, torch.Tensor]]:
    for tensor in tensors_of(value):
        if tensor.layout is torch.strided:
            yield tensor.untyped_storage(), tensor
        elif tensor.layout is torch.sparse_coo:
            with torch.no_grad():
                for part in (tensor._indices(), tensor._values()):
                    yield part.untyped_storage(), part


def _workspace(func: Any, args: Any, result: Any) -> int:
    """Bytes that a kernel takes for itself while it runs, where that is known.

    Convolutions on CPUs (oneDNN) reorder what they read and what they write into blocks of channels.
    """
    name = getattr(func, "__name__", "")
    if not name.startswith("convolution") or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return 0
    tensors = [t for t in args[:3] if isinstance(t, torch.Tensor)]
    if not tensors or tensors[0].device.type != "cpu" or tensors[0].dtype != torch.float32:
        return 0
    if name.startswith("convolution_backward"):
        gradient, read = _bytes(args[0]), _bytes(args[1])
        return gradient + read
    return _bytes(args[0]) + sum(_bytes(t) for t in tensors_of(result))


_recurrent: dict[tuple[Any, ...], tuple[float, float]] = {}  # shapes -> bytes, and bytes a step of the sequence


def _recurrent_workspace(func: Any, args: Any, kwargs: Any, result: Any) -> tuple[int, int] | None:
    """Of a recurrent layer on CPUs (oneDNN), bytes that it keeps for its backward pass, and that this fills; fake ones say none.

    How much it reserves nothing but the layer itself knows: it is run for real on two and on four steps of a sequence. The forward
    pass fills the gates, the cells and a copy of the input (measured: 5 hidden + 1 input each step), the backward pass the rest.
    """
    if "mkldnn_rnn_layer.default" not in str(func) or len(result) < 4 or not isinstance(result[0], torch._subclasses.FakeTensor):
        return None
    key = tuple((tuple(a.shape), a.dtype) if isinstance(a, torch.Tensor) else str(a) for a in args)
    if key not in _recurrent:
        sizes = []
        for steps in (2, 4):
            real = [torch.zeros(a.shape, dtype=a.dtype) if isinstance(a, torch.Tensor) else a for a in args]
            real[0] = torch.zeros((steps, *args[0].shape[1:]), dtype=args[0].dtype)
            sizes.append(func(*real, **kwargs)[3].nbytes)
        per_step = (sizes[1] - sizes[0]) / 2
        _recurrent[key] = (sizes[0] - 2 * per_step, per_step)
    fixed, per_step = _recurrent[key]
    total = int(fixed + per_step * args[0].shape[0])
    filled = _bytes(args[0]) + 5 * _bytes(result[0])
    return min(filled, total), max(0, total - filled)


@dataclass(slots=True)
class _Entry:
    size: int
    unit: int
    phase: str
    floating: bool
    last_read: int
    read_bytes: int = 0
    alive: bool = True


class _Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Enters every storage that appears, and what is alive at once."""

    def __init__(self, known: Iterator[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.unit, self.phase = 0, "forward"
        self.live = 0
        self.peaks: dict[tuple[str, int], int] = {}
        self.entries: list[_Entry] = []
        self.readers: dict[int, set[int]] = {}  # a known storage -> units that read it in the forward pass
        self._by_key: dict[int, _Entry] = {}
        self._refs: dict[int, Any] = {}
        self._rests: dict[tuple[int, ...], int] = {}  # shape of a recurrent layer's input -> bytes its backward pass fills
        self._known = {s._cdata: s for t in known for s, _ in _storages(t)}

    def enter(self, unit: int, phase: str) -> None:
        """``unit`` is at work from here on."""
        self.unit, self.phase = unit, phase
        self._mark()

    def _mark(self, workspace: int = 0) -> None:
        key = (self.phase, self.unit)
        if self.live + workspace > self.peaks.get(key, -1):
            self.peaks[key] = self.live + workspace

    def _gone(self, key: int, entry: _Entry) -> Callable[[Any], None]:
        def callback(_: Any) -> None:
            if entry.alive:
                entry.alive = False
                self.live -= entry.size
            if self._by_key.get(key) is entry:
                del self._by_key[key]
                self._refs.pop(key, None)

        return callback

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.phase == "forward":
            for storage, tensor in _storages((args, kwargs)):
                key = storage._cdata
                entry = self._by_key.get(key)
                if entry is not None:
                    if self.unit > entry.unit:
                        entry.last_read = max(entry.last_read, self.unit)
                        entry.read_bytes = max(entry.read_bytes, min(entry.size, _bytes(tensor)))
                elif key in self._known:
                    self.readers.setdefault(key, set()).add(self.unit)
        result = func(*args, **kwargs)
        hidden = _recurrent_workspace(func, args, kwargs, result)
        for storage, tensor in _storages(result):
            key = storage._cdata
            if key in self._known:
                continue
            known = self._by_key.get(key)
            if known is not None:
                if storage.nbytes() > known.size and known.alive:
                    self.live += storage.nbytes() - known.size
                    known.size = storage.nbytes()
                continue
            size = storage.nbytes()
            if hidden is not None and tensor is result[3]:
                size, rest = hidden
                self._rests[tuple(args[0].shape)] = rest + sum(_bytes(a) for a in args[1:5] if isinstance(a, torch.Tensor))
            entry = _Entry(size, self.unit, self.phase, tensor.is_floating_point() or tensor.is_complex(), self.unit)
            self._by_key[key] = entry
            self._refs[key] = weakref.ref(storage, self._gone(key, entry))
            self.entries.append(entry)
            self.live += entry.size
        workspace = _workspace(func, args, result)
        if self._rests and "mkldnn_rnn_layer_backward" in str(func):
            workspace = self._rests.get(tuple(args[0].shape), 0)
        self._mark(workspace)
        return result

    def entry(self, tensor: torch.Tensor) -> _Entry | None:
        """What is known of a tensor's storage."""
        return self._by_key.get(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else None


def _maker(fake: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """Makes a stand-in of a real tensor: a fake one, or a copy.

    The mode itself is not entered: what is computed from the batch and constants alone (masks, lengths) has values, so that a
    model may look at it; all that meets a parameter is fake.
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


def _rnn_flops(module: nn.Module, output: Any) -> float:
    """Of a recurrent layer, which torch's counter does not know: 2 a multiplication, gates times (input + hidden)."""
    assert isinstance(module, nn.RNNBase)
    rows = next(tensors_of(output)).numel() / (module.hidden_size * (2 if module.bidirectional else 1))
    weights = sum(p.numel() for name, p in module.named_parameters() if name.startswith("weight"))
    return 2.0 * rows * weights


class _NoModules:
    """Stands in for torch's ModuleTracker."""

    parents = frozenset({"Global"})

    def __enter__(self) -> _NoModules:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class _Flops:
    """Floating-point operations of each unit's forward pass."""

    def __init__(self, model: nn.Module, chain: Sequence[Link]) -> None:
        self.counted = [0.0] * len(chain)
        self._unit, self._before, self._extra = 0, 0.0, 0.0
        self._counter = FlopCounterMode(display=False)
        # Its tracker of modules hangs hooks on gradients, which some models cannot have (one that differentiates by itself); all is counted as one.
        self._counter.mod_tracker = _NoModules()  # type: ignore[assignment]
        self._handles = [m.register_forward_hook(self._recurrent) for m in model.modules() if isinstance(m, nn.RNNBase)]
        self._start: dict[nn.Module, float] = {}
        self._handles += [
            m.register_forward_pre_hook(lambda m, _: self._start.__setitem__(m, self._counter.get_total_flops()))
            for m in model.modules()
            if isinstance(m, nn.RNNBase)
        ]

    def _recurrent(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._counter.get_total_flops() == self._start.get(module):
            self._extra += _rnn_flops(module, output)

    def enter(self, unit: int) -> None:
        """``unit`` begins."""
        now = self._counter.get_total_flops() + self._extra
        self.counted[self._unit] += now - self._before
        self._unit, self._before = unit, now

    def __enter__(self) -> _Flops:
        self._counter.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._counter.__exit__(*error)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()


def _owners(
    model: nn.Module, chain: Sequence[Link], ledger: _Ledger, order: dict[str, nn.Parameter]
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
        read = ledger.readers.get(p.untyped_storage()._cdata, set()) if p.layout is torch.strided else set()
        users = sorted(holders.get(id(p), set()) | read) or [0]
        owned[users[0]].append(name)
        if len(users) > 1:
            for user in users:
                shared[user].add(name)
    return owned, shared


def _one_size(
    model: nn.Module, chain: list[Link], compute: Any, batch: Any, autocast: Callable[[], Any]
) -> tuple[list[UnitBytes], _Ledger, int]:
    """Run one step of a stand-in and account for it."""
    order = dict(model.named_parameters())
    for p in order.values():
        p.grad = None
    known: list[torch.Tensor] = [*order.values(), *model.buffers(), *tensors_of(batch)]
    ledger = _Ledger(iter(known))
    last = len(chain) - 1
    saved: list[int] = [0] * len(chain)
    holding: list[_Entry] = []

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

    def returned(_: nn.Module, __: Any, output: Any) -> None:
        put_off[ledger.unit] += sum(_bytes(t) for t in tensors_of(output) if t.requires_grad)

    probe = Probe(model, chain, tell)
    weighted = [m for m in model.modules() if any(p is not None and p.requires_grad for p in m._parameters.values())]
    hooks = [m.register_forward_hook(returned) for m in weighted]
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
                gradients[i] += sum(s.nbytes() for s, _ in _storages(gradient))
    for i, shared in enumerate(users):
        for name in shared:
            gradient = order[name].grad
            if gradient is not None and name not in owned[i]:
                late[i] += sum(s.nbytes() for s, _ in _storages(gradient))
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
    chain: list[Link] | None = None,
    fake: bool = True,
    within: Callable[[nn.Module], contextlib.AbstractContextManager[Any]] | None = None,
) -> Account:
    """Bytes of every unit at every micro-batch size, without running the model where fake tensors allow it.

    Args:
        compute: the script's forward and loss, a LossCall.
        batches: gives a micro-batch of so many samples, on the model's device.
        sizes: micro-batch sizes.
        autocast: context of the forward pass.
        chain: the units; None finds them.
        fake: whether to try fake tensors first.
        within: what the stand-in's passes run in, such as changes to it; recomputation is not tried then.
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
    chain: list[Link] | None,
    fake: bool,
    within: Callable[[nn.Module], contextlib.AbstractContextManager[Any]] | None,
) -> Account:
    with (
        untouched(model),
        standing_in(model, _maker(fake), refers_to(compute, model)) as (stand_in, _),
        within(stand_in) if within is not None else contextlib.nullcontext(),
    ):
        micro = {b: batches(b) for b in sizes}

        def once() -> None:
            with autocast():
                compute(stand_in, micro[sizes[0]])

        found = Account(chain or find_chain(stand_in, once), faked=fake)
        for b in sizes:
            units, ledger, total = _one_size(stand_in, found.chain, compute, micro[b], autocast)
            found.sizes[b], found.total[b] = units, total
            found.batch[b] = sum(_bytes(t) for t in tensors_of(micro[b]))
        found.blocks = list(repeated_blocks(stand_in) or large_children(stand_in))
        for level in ("selective", "full") if within is None else ():
            # What cannot be run so is told where it is asked for; here it is assumed.
            with contextlib.suppress(Exception), applied(stand_in, level) as found.recomputed:
                found.again[level] = {
                    b: _one_size(stand_in, found.chain, compute, micro[b], autocast)[0] if found.recomputed else found.sizes[b]
                    for b in sizes
                }
        order = dict(stand_in.named_parameters())
        found.parameters, found.shared = _owners(stand_in, found.chain, ledger, order)
        found.buffers = _buffers(stand_in, found.chain)
        smallest = sizes[0]
        for units, counted in ((found.sizes[smallest], _count(stand_in, found.chain, compute, micro[smallest])),):
            for unit, flops in zip(units, counted, strict=True):
                unit.flops = flops
    return found


def _count(model: nn.Module, chain: list[Link], compute: Any, batch: Any, differentiates: bool = False) -> list[float]:
    flops = _Flops(model, chain)
    probe = Probe(model, chain, lambda unit, event: flops.enter(unit) if event == "in" else None)
    try:
        # The fused kernels of CPUs are not counted by torch (2.13): the plain one is.
        with torch.enable_grad() if differentiates else torch.no_grad(), sdpa_kernel(SDPBackend.MATH), flops:
            values = compute.arguments(model, batch)
            flops.enter(len(chain) - 1)
            compute.loss(*values)
            flops.enter(len(chain) - 1)
    except RuntimeError:
        if differentiates:
            raise
        return _count(model, chain, compute, batch, True)  # a model may need gradients in its forward pass
    finally:
        probe.close()
    return flops.counted


def _buffers(model: nn.Module, chain: Sequence[Link]) -> list[int]:
    modules = dict(model.named_modules(remove_duplicate=False))
    seen: set[int] = set()
    found = [0] * len(chain)
    for index, link in enumerate(chain):
        for buffer in modules[link.name].buffers() if link.name in modules else ():
            if id(buffer) not in seen:
                seen.add(id(buffer))
                found[index] += _bytes(buffer)
    found[0] += sum(_bytes(b) for b in model.buffers() if id(b) not in seen)
    return found


def copied_optimizer(optimizer: Optimizer, made: dict[int, torch.Tensor], make: Callable[[torch.Tensor], torch.Tensor]) -> Optimizer:
    """The script's optimizer, with its settings and its state, over the copies of its parameters.

    Args:
        made: id of a parameter -> its copy, as :func:`ronde.study.chain.standing_in` gives it; completed for parameters that lack there.
        make: copies a tensor of the state.
    """
    memo: dict[int, Any] = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            if id(p) not in made:
                made[id(p)] = nn.Parameter(make(p), p.requires_grad)
    memo.update(made)
    for value in tensors_of(
        [list(optimizer.state.values()), [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]]
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
    """Bytes of state that the optimizer keeps for each parameter, by name, and the most it needs for a moment in a step.

    One step is taken on stand-ins, by the optimizer's own class with its own settings: any torch optimizer.

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
        f"optimizer {type(optimizer).__name__} cannot take a step on copies of the parameters, so its memory is not known: "
        f"{type(errors[-1]).__name__}: {errors[-1]}"
    ) from errors[-1]


def _optimizer_bytes(model: nn.Module, optimizer: Optimizer, fake: bool) -> tuple[dict[str, int], int]:
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
            for storage, _ in _storages(state):
                if storage._cdata not in seen:
                    seen.add(storage._cdata)
                    size += storage.nbytes()
            name = names.get(id(each), "")
            found[name] = found.get(name, 0) + size
        known = list(tensors_of([list(copy_.state.values())]))
        for group in copy_.param_groups:
            known += [t for p in group["params"] for t in (p, p.grad) if t is not None]
        ledger = _Ledger(iter(known))
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
    chain: list[Link] | None = None,
) -> Costs:
    """A model's units with their bytes and operations, and no times.

    Args:
        compute: the script's forward and loss, a LossCall.
        batches: gives a micro-batch of so many samples.
        batch_size: global samples per optimizer step.
        sizes: micro-batch sizes to weigh at; between them a line is drawn.
    """
    sizes = sorted(set(sizes or (max(1, min(2, batch_size), batch_size // 8), batch_size)))
    found = account(model, compute, batches, sizes, autocast=autocast, chain=chain)
    parameters = dict(model.named_parameters())
    notes = [] if found.faked else [f"memory was counted in a real run, as the model does not run on fake tensors ({found.reason})"]
    try:
        state, transient = optimizer_bytes(model, optimizer)
    except RondeError as error:
        state, transient = {}, 0
        notes.append(str(error))
    modules = dict(model.named_modules(remove_duplicate=False))
    smallest = sizes[0]
    fits = {
        kind: found.lines(kind) for kind in ("saved", "forward_transient", "backward_transient", "crossing", "crossing_grad", "put_off")
    }
    again: dict[str, list[Any]] = {
        f"{level}_{name}_bytes": found.lines(kind, level)
        for level in found.again
        for name, kind in (("saved", "saved"), ("forward", "forward_transient"), ("backward", "backward_transient"))
    }
    units = []
    for i, link in enumerate(found.chain):
        own = [parameters[name] for name in found.parameters[i]]
        at = found.sizes[smallest][i]
        norms = modules[link.name].modules() if link.name in modules else ()
        units.append(
            Unit(
                name=link.name,
                parameter_bytes=sum(_bytes(p) for p in own),
                trainable_bytes=sum(_bytes(p) for p in own if p.requires_grad),
                optimizer_bytes=sum(state.get(name, 0) for name in found.parameters[i]),
                buffer_bytes=found.buffers[i],
                saved_bytes=fits["saved"][i],
                transient_bytes=line([(b, float(max(u[i].forward_transient, u[i].backward_transient))) for b, u in found.sizes.items()]),
                forward_transient_bytes=fits["forward_transient"][i],
                backward_transient_bytes=fits["backward_transient"][i],
                crossing_bytes=fits["crossing"][i],
                crossing_grad_bytes=fits["crossing_grad"][i],
                put_off_bytes=fits["put_off"][i],
                cut_after=not link.why_not and link.name != LOSS,
                why_not=link.why_not or ("the loss is the end" if link.name == LOSS else ""),
                alike=link.alike,
                flops=at.flops / smallest,
                tied=tuple(sorted(found.shared[i])),
                tied_bytes=sum(_bytes(parameters[name]) for name in found.shared[i]),
                tied_grad_bytes=at.late_gradient,
                batchnorm=any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in norms),
                block=found.block(link.name),
                recomputed=any(
                    link.name == b or link.name.startswith(f"{b}.") or b.startswith(f"{link.name}.") for b in found.recomputed if link.name
                ),
                **{name: lines[i] for name, lines in again.items()},
            )
        )
    rest = state.get("", 0)
    if rest:
        notes.append(f"{rest:,} bytes of optimizer state belong to parameters that the model does not have")
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
    )


def chain_peak(costs: Costs, samples: int) -> float:
    """Most bytes at once of steps on one device, micro-batches of ``samples``: the sum over the chain, pass by pass.

    Gradients are there from their unit's backward pass to the end of the step, as after ``zero_grad()``.
    """
    always = samples * costs.input_bytes + sum(u.parameter_bytes + u.optimizer_bytes + u.buffer_bytes for u in costs.units)
    saved, most = 0.0, 0.0
    left = sum(u.trainable_bytes + u.tied_grad_bytes for u in costs.units)
    gradients = float(sum(u.trainable_bytes for u in costs.units))
    for unit in costs.units:
        saved += unit.saved_bytes.at(samples)
        most = max(
            most,
            saved + unit.forward_transient_bytes.at(samples),
            saved + left + unit.backward_transient_bytes.at(samples),
        )
        left -= unit.trainable_bytes + unit.tied_grad_bytes
    return always + max(most, gradients + costs.optimizer_transient_bytes)


def peak(
    model: nn.Module, optimizer: Optimizer, compute: Any, batch: Any, *, autocast: Callable[[], Any] = contextlib.nullcontext
) -> dict[str, int]:
    """Most bytes at once of whole steps on one device, by torch's own MemTracker on fake tensors: a check on the chain's sum.

    Returns:
        ``{"Total": …, "Parameter": …, …}``, the batch included.
    """
    from torch.distributed._tools.mem_tracker import MemTracker

    make = _maker(True)
    with untouched(model), standing_in(model, make, refers_to(compute, model)) as (stand_in, made):
        copy_ = copied_optimizer(optimizer, made, make)
        tracker = MemTracker()
        tracker.track_external(stand_in, copy_, *(t for t in tensors_of(batch)))
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


# --- What a process really took --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MeasuredPeak:
    """Resident memory of a child process.

    Attributes:
        baseline_bytes: before.
        peak_bytes: most while it ran, above ``baseline_bytes``.
        result: what the function returned, if JSON holds it.
    """

    baseline_bytes: int
    peak_bytes: int
    result: Any = None


def _status(name: str) -> int:
    for text in Path("/proc/self/status").read_text().splitlines():
        if text.startswith(f"{name}:"):
            return int(text.split()[1]) * 1024
    raise RondeError(f"/proc/self/status has no {name}")


def measured_peak(target: str, *arguments: Any, timeout: float = 120.0, threads: int = 1, cwd: Path | None = None) -> MeasuredPeak:
    """Peak of resident memory of a function, in a child process whose allocator gives back what is freed. Linux only.

    Args:
        target: ``"path/file.py:function"`` or ``"module:function"``. It is called with ``arguments`` and returns a callable:
            what is done until then (imports, kernels warmed) is the baseline, what that callable does is measured.
        arguments: what JSON holds.

    Raises:
        RondeError: the child failed.
    """
    environment = {
        **os.environ,
        # Freed memory goes back to the system at once, instead of being kept for later.
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
        "MALLOC_ARENA_MAX": "1",
        "OMP_NUM_THREADS": str(threads),
    }
    command = [sys.executable, "-m", "ronde.study.memory", target, json.dumps(arguments)]
    try:
        done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        raise RondeError(f"{target} took longer than {timeout:.0f} s") from None
    if done.returncode:
        raise RondeError(f"{target} failed in a child process:\n{done.stderr.strip()[-2000:]}")
    return MeasuredPeak(**json.loads(done.stdout.splitlines()[-1]))


def _child(target: str, arguments: list[Any]) -> None:
    import gc
    import importlib
    import importlib.util

    where, _, name = target.rpartition(":")
    if where.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(where).stem, where)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(where)
    go = getattr(module, name)(*arguments)
    gc.collect()
    baseline = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    result = go()
    most = _status("VmHWM")
    print(json.dumps({"baseline_bytes": baseline, "peak_bytes": max(0, most - baseline), "result": result}))


if __name__ == "__main__":
    _child(sys.argv[1], json.loads(sys.argv[2]))
