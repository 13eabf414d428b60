"""Follow one forward pass, from the batch to the loss, as a list of events, for any model: where may it be cut, what would cross?

Whole-graph capture fails on what people write. Here the script's own Python runs, and only two things are looked at: calls of
modules, and torch functions called between them (the glue). An :class:`Event` is one of the two. A pipeline stage later runs the
same Python again, and leaves out the events of other stages (:mod:`ronde.parallel.staged`).

Activations are fake tensors while a model is followed: shapes without memory or arithmetic. What is computed from the batch and
from constants alone (masks, positions) is computed for real: a forward pass may look at it, and every stage computes it again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ronde.world import ArgumentError

__all__ = [
    "Call",
    "Event",
    "Interceptor",
    "Point",
    "Trace",
    "Value",
    "bounds_of",
    "build",
    "flatten",
    "follow",
    "not_an_event",
    "tensors_in",
]

_CONTAINERS = (
    nn.Sequential,
    nn.ModuleList,
    nn.ModuleDict,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)
_RANDOM = ("rand", "dropout", "bernoulli", "multinomial", "normal", "uniform", "exponential", "poisson", "gumbel", "cauchy", "geometric")
_NAMES_NOT_EVENTS = frozenset(
    "size dim ndimension numel nelement stride storage_offset is_contiguous element_size is_floating_point is_complex is_signed "
    "get_device is_same_size __len__ __repr__ __format__ __hash__ data_ptr is_shared is_pinned untyped_storage storage register_hook "
    "requires_grad_ retain_grad is_nonzero_static has_names is_inference is_set_to is_conj is_neg result_type promote_types "
    "is_tensor is_storage is_grad_enabled get_default_dtype set_default_dtype can_cast finfo iinfo is_autocast_enabled "
    "get_rng_state set_rng_state manual_seed is_distributed __dlpack_device__ broadcast_shapes".split()
)
_TENSOR_PROPERTIES = frozenset({"T", "mT", "H", "mH", "real", "imag", "data", "grad"})


def not_an_event(function: Any) -> bool:
    """Whether a torch function only looks at a tensor's shape, type or place."""
    name = getattr(function, "__name__", "")
    if name == "__get__":
        return getattr(getattr(function, "__self__", None), "__name__", "") not in _TENSOR_PROPERTIES
    return name in _NAMES_NOT_EVENTS or name in ("__set__", "__delete__")


def _name(function: Any) -> str:
    name = getattr(function, "__name__", str(function))
    if name == "__get__":
        return str(getattr(function.__self__, "__name__", name))
    return str(name)


class _Opaque(Exception):
    """A value holds tensors where nobody can get at them."""


def flatten(value: Any, leaves: list[Any]) -> Any:
    """Take a value apart: tensors and constants go to ``leaves``, the answer says how to put it together again."""
    if isinstance(value, torch.Tensor) or value is None or isinstance(value, bool | int | float | str | bytes):
        leaves.append(value)
        return None
    if isinstance(value, PackedSequence):
        return (PackedSequence, [flatten(v, leaves) for v in value])
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return (type(value), [flatten(v, leaves) for v in value])
    if type(value) in (list, tuple):
        return (type(value), [flatten(v, leaves) for v in value])
    if type(value) is dict:
        return (dict, list(value), [flatten(v, leaves) for v in value.values()])
    if pytree.is_structseq(value) or type(value) not in pytree.SUPPORTED_NODES:
        if type(value).__module__.startswith("torch.return_types"):
            return (type(value), [flatten(v, leaves) for v in value])
        if _holds_tensors(value):
            raise _Opaque
        leaves.append(value)
        return None
    parts, spec = pytree.tree_flatten(value)
    return (spec, [flatten(v, leaves) for v in parts])


def _holds_tensors(value: Any) -> bool:
    inside = list(getattr(value, "__dict__", {}).values())
    if isinstance(value, list | tuple | set):
        inside += list(value)
    elif isinstance(value, Mapping):
        inside += list(value.values())
    return any(isinstance(v, torch.Tensor) or (isinstance(v, list | tuple | dict) and bool(tensors_in(v))) for v in inside)


def build(shape: Any, leaves: Iterator[Any]) -> Any:
    """Put together what :func:`flatten` took apart."""
    if shape is None:
        return next(leaves)
    kind = shape[0]
    if kind is dict:
        return dict(zip(shape[1], [build(s, leaves) for s in shape[2]], strict=True))
    parts = [build(s, leaves) for s in shape[1]]
    if isinstance(kind, pytree.TreeSpec):
        return pytree.tree_unflatten(parts, kind)
    if kind is PackedSequence or hasattr(kind, "_fields"):
        return kind(*parts)
    return kind(parts)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor in an argument or a result, as far as can be seen."""
    if isinstance(value, torch.Tensor):
        return [value]
    if value is None or isinstance(value, bool | int | float | str | bytes | torch.dtype | torch.device | slice):
        return []
    if isinstance(value, tuple | list | set):
        return [t for v in value for t in tensors_in(v)]
    if isinstance(value, Mapping):
        return [t for v in value.values() for t in tensors_in(v)]
    if type(value) in pytree.SUPPORTED_NODES:
        return [t for v in pytree.tree_leaves(value) if isinstance(v, torch.Tensor) for t in [v]]
    return []


@dataclass(eq=False)
class Value:
    """A tensor that some event made, at one point in time: changed in place, it is another one.

    Attributes:
        index: its number.
        maker: number of the event, -1 for what was there before.
        shared: computed from the batch and constants alone: every stage has it.
        shape, dtype, requires_grad: of the tensor.
        ghost: a fake tensor that stands for it where it is not.
        readers: numbers of the events that read it.
    """

    index: int
    maker: int
    shared: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    ghost: torch.Tensor
    readers: list[int] = field(default_factory=list)
    changed_later: bool = False

    @property
    def bytes(self) -> int:
        """Of the tensor."""
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize


@dataclass(eq=False)
class Event:
    """One call of a module that is not looked into, or one torch function between such calls.

    Attributes:
        kind: ``"call"`` or ``"op"``.
        name: the module's path, or the function's name.
        inside: path of the module whose forward pass calls it.
        module: the module called.
        reads: values it takes.
        made: the tensors among its results, in order: numbers of values.
        shape, leaves: how its result is put together; a leaf that is a :class:`Value`'s number stands for the tensor.
        changes: ``(place among its tensor arguments, new value)`` of those that it changes in place.
        parameters: parameters that it uses, by identity.
        shared: every stage runs it.
        forward_seconds, backward_seconds: where it was timed.
    """

    kind: str
    name: str
    inside: str
    module: nn.Module | None
    reads: tuple[int, ...]
    made: tuple[int, ...]
    shape: Any
    leaves: tuple[Any, ...]
    changes: tuple[tuple[int, int], ...]
    parameters: tuple[nn.Parameter, ...]
    shared: bool
    opaque: bool = False
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    saved_bytes: int = 0


@dataclass(frozen=True, eq=False)
class Call:
    """A module's call that was looked into: events ``[start, stop)`` happened inside."""

    path: str
    nth: int
    module: nn.Module
    start: int
    stop: int
    event: Event | None  # the whole call as one event; None where its result cannot be taken apart


@dataclass(frozen=True)
class Point:
    """A place where a stage may begin: right before the ``nth`` call of the module at ``path``.

    Attributes:
        path: the outermost module whose call begins here.
        nth: which of its calls, from 0.
        at: number of the event that comes next.
        crossing: values alive across it that the later part does not compute by itself.
        why_not: why no stage may begin here; empty where one may.
    """

    path: str
    nth: int
    at: int
    crossing: tuple[int, ...]
    why_not: str = ""

    @property
    def name(self) -> str:
        """As it is written in ``split_at``."""
        return self.path if self.nth == 0 else f"{self.path}#{self.nth}"


class Interceptor(TorchFunctionMode):
    """Sees every module call and every torch function of this thread while it is entered; what to do with them is for heirs to say."""

    def __enter__(self) -> Any:
        self._thread = threading.get_ident()
        self._off = False
        self._call = nn.Module.__call__
        self._apply = torch.autograd.Function.__dict__["apply"]
        interceptor, plain_call = self, self._call

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if interceptor._off or threading.get_ident() != interceptor._thread:
                return plain_call(module, *args, **kwargs)
            return interceptor.on_call(module, args, kwargs)

        plain_apply = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if interceptor._off or threading.get_ident() != interceptor._thread:
                return plain_apply(cls, *args, **kwargs)

            def run(*a: Any, **k: Any) -> Any:
                return plain_apply(cls, *a, **k)

            run.__name__ = cls.__name__
            with interceptor.pause():
                return interceptor.on_function(run, args, kwargs)

        nn.Module.__call__ = call  # type: ignore[method-assign,assignment]
        torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment]
        return super().__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        nn.Module.__call__ = self._call  # type: ignore[method-assign]
        torch.autograd.Function.apply = self._apply  # type: ignore[method-assign]
        super().__exit__(kind, error, traceback)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._off:
            return func(*args, **kwargs)
        self._off = True  # a function written in Python may call modules or others: it is one event
        try:
            if func is torch.Tensor.__iter__:
                return iter(self.on_function(torch.Tensor.unbind, args, {}))
            return self.on_function(func, args, kwargs)
        finally:
            self._off = False

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Nothing is seen inside."""
        was, self._off = self._off, True
        try:
            with torch._C.DisableTorchFunction():
                yield
        finally:
            self._off = was

    def plain_call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The call as if nobody watched, but what it calls is seen."""
        return self._call(module, *args, **kwargs)

    def on_call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """A module is called."""
        raise NotImplementedError

    def on_function(self, function: Any, args: Any, kwargs: Any) -> Any:
        """A torch function is called, outside of modules that are one event."""
        raise NotImplementedError


class _Follower(Interceptor):
    """Writes down what it sees."""

    def __init__(self, model: nn.Module, fake: FakeTensorMode | None, ghosts: FakeTensorMode) -> None:
        super().__init__()
        self.fake = fake
        self.ghosts = ghosts
        self.paths = {id(m): name for name, m in model.named_modules()}
        self.state = {id(b) for b in model.buffers()}
        self.events: list[Event] = []
        self.values: list[Value] = []
        self.calls: list[Call] = []
        self.known: dict[int, int] = {}  # a tensor's identity -> its value
        self.versions: dict[int, int] = {}
        self.alive: list[Any] = []
        self.counts: dict[int, int] = {}
        self.inside = [""]
        self.external: dict[int, nn.Parameter] = {}

    # -- values ----------------------------------------------------------------------------------------------------

    def _ghost(self, tensor: torch.Tensor) -> torch.Tensor:
        base = tensor.detach() if isinstance(tensor, FakeTensor) else self.ghosts.from_tensor(tensor.detach(), static_shapes=True)
        if tensor.requires_grad and (base.is_floating_point() or base.is_complex()):
            base.requires_grad_(True)
        return base

    def _new(self, tensor: torch.Tensor, maker: int, shared: bool) -> int:
        value = Value(len(self.values), maker, shared, tuple(tensor.shape), tensor.dtype, tensor.requires_grad, self._ghost(tensor))
        self.values.append(value)
        self.known[id(tensor)] = value.index
        self.versions[id(tensor)] = tensor._version
        self.alive.append(tensor)
        return value.index

    def _value_of(self, tensor: torch.Tensor) -> int:
        index = self.known.get(id(tensor))
        return self._new(tensor, -1, True) if index is None else index

    # -- events ----------------------------------------------------------------------------------------------------

    def _record(self, kind: str, name: str, module: nn.Module | None, function: Any, args: Any, kwargs: Any) -> Any:
        tensors = tensors_in((args, kwargs))
        own = module is not None and id(module) in self.paths
        parameters = list(module.parameters()) if module is not None and own else []
        parameters += [t for t in tensors if isinstance(t, nn.Parameter)]
        inputs = [t for t in tensors if not isinstance(t, nn.Parameter)]
        reads = [self._value_of(t) for t in inputs]
        before = [t._version for t in inputs]
        pretend = bool(parameters) or own or any(isinstance(t, FakeTensor) or id(t) in self.state for t in tensors)
        if pretend and self.fake is not None:
            with self.fake:
                result = function(*args, **kwargs)
        else:
            result = function(*args, **kwargs)
        random = kind == "op" and any(word in name for word in _RANDOM)
        shared = not parameters and not own and not random and all(self.values[r].shared for r in reads)
        number = len(self.events)
        changes: list[tuple[int, int]] = []
        for place, (tensor, version) in enumerate(zip(inputs, before, strict=True)):
            if tensor._version != version:
                shared = shared and id(tensor) not in self.state
                self.values[reads[place]].changed_later = True
                changes.append((place, self._new(tensor, number, shared)))
        for read in dict.fromkeys(reads):
            self.values[read].readers.append(number)
        leaves: list[Any] = []
        opaque = False
        try:
            shape = flatten(result, leaves)
        except _Opaque:
            shape, opaque = None, True
        marked: list[Any] = []
        made: list[int] = []
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor) or isinstance(leaf, nn.Parameter):
                marked.append(leaf)
                continue
            index = self.known.get(id(leaf))
            if index is None or self.versions[id(leaf)] != leaf._version:
                index = self._new(leaf, number, shared)
            made.append(index)
            marked.append(self.values[index])
        self.events.append(
            Event(
                kind, name, self.inside[-1], module, tuple(reads), tuple(made), shape, tuple(marked), tuple(changes),
                tuple({id(p): p for p in parameters}.values()), shared, opaque,
            )
        )  # fmt: skip
        return result

    def on_function(self, function: Any, args: Any, kwargs: Any) -> Any:
        if not_an_event(function):
            with self.pause():
                return function(*args, **kwargs)
        with self.pause():
            return self._record("op", _name(function), None, function, args, kwargs)

    def on_call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        path = self.paths.get(id(module), f"({type(module).__name__})")
        if _is_leaf(module) or id(module) not in self.paths:
            nth = self._count(module)
            start = len(self.events)
            with self.pause():
                result = self._record("call", path, module, module, args, kwargs)
            event = self.events[-1]
            self.calls.append(Call(path, nth, module, start, start + 1, None if event.opaque else event))
            return result
        nth = self._count(module)
        start = len(self.events)
        self.inside.append(path)
        try:
            result = self.plain_call(module, args, kwargs)
        finally:
            self.inside.pop()
        with self.pause():
            whole = self._whole(path, module, start, args, kwargs, result)
        self.calls.append(Call(path, nth, module, start, len(self.events), whole))
        return result

    def _count(self, module: nn.Module) -> int:
        nth = self.counts.get(id(module), 0)
        self.counts[id(module)] = nth + 1
        return nth

    def _whole(self, path: str, module: nn.Module, start: int, args: Any, kwargs: Any, result: Any) -> Event | None:
        """A call that was looked into, as one event."""
        leaves: list[Any] = []
        try:
            shape = flatten(result, leaves)
        except _Opaque:
            return None
        inner = self.events[start:]
        if any(e.opaque for e in inner):
            return None
        outside = {r for e in inner for r in e.reads if self.values[r].maker < start}
        inputs = [t for t in tensors_in((args, kwargs)) if not isinstance(t, nn.Parameter)]
        changes = []
        for place, tensor in enumerate(inputs):
            now = self.known.get(id(tensor))
            if now is not None and self.values[now].maker >= start:
                changes.append((place, now))
        marked = [
            self.values[self._value_of(leaf)] if isinstance(leaf, torch.Tensor) and not isinstance(leaf, nn.Parameter) else leaf
            for leaf in leaves
        ]
        parameters = {id(p): p for p in module.parameters()} | {id(p): p for e in inner for p in e.parameters}
        made = tuple(v.index for v in marked if isinstance(v, Value))
        return Event(
            "call", path, self.inside[-1], module, tuple(sorted(outside)), made, shape, tuple(marked), tuple(changes),
            tuple(parameters.values()), all(e.shared for e in inner) and not parameters,
        )  # fmt: skip


def _is_leaf(module: nn.Module) -> bool:
    if next(module.children(), None) is None or isinstance(module, torch.jit.ScriptModule):
        return True
    return type(module).__module__.startswith("torch.nn.") and not isinstance(module, _CONTAINERS)


@dataclass(eq=False)
class Trace:
    """One forward pass and its loss.

    Attributes:
        events: in the order in which they happened, as fine as module calls and glue go.
        values: tensors.
        calls: module calls, inner ones before the outer ones that hold them.
        faked: whether activations were fake; otherwise the pass really ran.
    """

    events: list[Event]
    values: list[Value]
    calls: list[Call]
    faked: bool
    result: Any = None
    reached: set[int] = field(default_factory=set)

    def points(self) -> list[Point]:
        """Every place where a stage may begin, in order, the first event's own excluded."""
        starts: dict[int, Call] = {}
        for call in self.calls:  # outer calls come later: they win
            if call.path and call.start < call.stop and not call.path.startswith("("):
                starts[call.start] = call
        found = []
        for at in sorted(starts):
            if at == 0:
                continue
            call = starts[at]
            found.append(Point(call.path, call.nth, at, tuple(self.crossing(at)), self._why_not(at)))
        return found

    def crossing(self, at: int) -> list[int]:
        """Values made before event ``at`` that it or a later one reads, and that not every stage computes by itself."""
        return [v.index for v in self.values if v.maker < at and not v.shared and any(r >= at for r in v.readers)]

    def _why_not(self, at: int) -> str:
        for i, event in enumerate(self.events[:at]):
            if event.opaque:
                return f"{event.name} returned an object whose tensors cannot be sent (event {i})"
        return ""

    def coarse(self, bounds: list[int]) -> list[tuple[int, Event]]:
        """The same pass with as few events as cuts at ``bounds`` allow: ``(its stage, event)`` in order."""
        edges = [*bounds, len(self.events)]

        def stage_of(event: int) -> int:
            return next(s for s, edge in enumerate(edges) if event < edge)

        begin: dict[int, Call] = {}
        for call in self.calls:  # the outermost that lies in one stage wins
            if call.event is None or call.start == call.stop or not call.path:
                continue
            if stage_of(call.start) == stage_of(call.stop - 1):
                begin[call.start] = call
        out: list[tuple[int, Event]] = []
        at = 0
        while at < len(self.events):
            held = begin.get(at)
            if held is not None and held.event is not None:
                out.append((stage_of(at), held.event))
                at = held.stop
            else:
                out.append((stage_of(at), self.events[at]))
                at += 1
        return out


def follow(model: nn.Module, call: Callable[[], Any], *, real: bool = False) -> Trace:
    """Follow ``call()``, a forward pass of ``model`` and its loss. Weights, buffers and randomness are left as they were.

    Args:
        model: whose modules are recognised.
        call: runs forward and loss on one micro-batch; gradients are enabled or not as it is called.
        real: run it for real instead of with fake activations.

    Raises:
        Exception: what the pass itself raises, where it also does so for real.
    """
    ghosts = FakeTensorMode(allow_non_fake_inputs=True)
    random = torch.get_rng_state()
    kept = [(b, b.detach().clone(), b._version) for b in model.buffers() if b.device.type != "meta"]
    # A device's own generator is forked by the caller where there is one; following runs on the host's generator only.
    try:
        for fake in (None,) if real else (ghosts, None):
            follower = _Follower(model, fake, ghosts)
            try:
                with follower:
                    result = call()
            except Exception:
                if fake is None:
                    raise
                continue
            return Trace(follower.events, follower.values, follower.calls, fake is not None, result, _reached(result))
    finally:
        torch.set_rng_state(random)
        with torch.no_grad():
            for buffer, value, version in kept:
                if buffer._version != version:
                    buffer.copy_(value)
    raise AssertionError("unreachable")


def _reached(result: Any) -> set[int]:
    """Identities of the parameters that a gradient from ``result`` arrives at."""
    found: set[int] = set()
    seen: set[Any] = set()
    stack = [t.grad_fn for t in tensors_in(result) if t.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        stack += [after for after, _ in node.next_functions if after is not None]
    return found


def bounds_of(trace: Trace, points: list[Point]) -> list[int]:
    """Where the same points are in another pass.

    Raises:
        ArgumentError: a module is not called there.
    """
    places = {(c.path, c.nth): c.start for c in trace.calls}
    for point in points:
        if (point.path, point.nth) not in places:
            raise ArgumentError(f"a stage begins at {point.name}, which this forward pass does not call.")
    return [places[point.path, point.nth] for point in points]
