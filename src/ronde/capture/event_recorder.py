"""Record a forward pass as events: each call is observed, executed, and registered."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from ronde.capture.global_draws import drawn_so_far
from ronde.capture.intercept import (
    NUMBERS,
    Interceptor,
    compiled,
    data_shaped,
    eagerly,
    keeps_shape,
)
from ronde.capture.pass_state import IMMUTABLE, generator_states, snapshot, storage_of, version_of
from ronde.capture.trace import ELSEWHERE, Call, Given, TraceEvent, Value
from ronde.world.tensors import Opaque, build, flatten, tensors_in

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

_MODULE_ATTRIBUTES = frozenset(nn.Module().__dict__)


def changes_in_place(name: str, kwargs: Any) -> bool:
    """Whether a torch function, by name and arguments, writes into its input."""
    if name == "__setitem__" or (name.startswith("__i") and name.endswith("__")):
        return True
    return (
        (name.endswith("_") and not name.endswith("__"))
        or bool(kwargs.get("inplace"))
        or "out" in kwargs
    )


def _written(kind: str, name: str, args: Any) -> tuple[nn.Parameter, ...]:
    """The parameter a function changes in place."""
    if kind != "op" or not args or not isinstance(args[0], nn.Parameter):
        return ()
    return (args[0],) if changes_in_place(name, {}) else ()


def as_tuple(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function return a plain tuple instead of a ``torch.Size``."""

    def plain(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        return tuple(result) if isinstance(result, torch.Size) else result

    return plain


def whole_size(result: Any, name: str) -> Any:
    """Turn the tuple of :func:`as_tuple` back into a ``torch.Size``."""
    return torch.Size(result) if isinstance(result, tuple) and name in ("shape", "size") else result


@contextmanager
def checkpoint_frames() -> Iterator[list[int]]:
    """The numbers of the open checkpointed functions (``use_reentrant=False``), whose forward runs
    twice; torch tells nobody when one begins.
    """
    frames: list[int] = []
    numbers = itertools.count(1)
    base: Any = getattr(torch.utils.checkpoint, "_checkpoint_hook", None)
    if base is None:  # a torch that does it another way
        yield frames
        return

    def enter(hook: Any) -> Any:
        frames.append(next(numbers))
        return super(base, hook).__enter__()  # type: ignore[misc]

    def leave(hook: Any, *error: Any) -> Any:
        if frames:
            frames.pop()
        return super(base, hook).__exit__(*error)  # type: ignore[misc]

    base.__enter__, base.__exit__ = enter, leave
    try:
        yield frames
    finally:
        for name in ("__enter__", "__exit__"):
            if name in vars(base):  # else a pass inside of this one has taken it back
                delattr(base, name)


@dataclass
class _Observed:
    """A call about to run: what it is, what it reads, and how it will be executed."""

    kind: str
    name: str
    random: bool
    module: nn.Module | None
    function: Any
    args: Any
    kwargs: Any
    sized: bool = False
    inputs: list[torch.Tensor] = field(default_factory=list)
    # the inputs, as in-place changes have left them
    now: list[torch.Tensor] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)
    parameters: list[Any] = field(default_factory=list)
    pretend: bool = False  # runs on fake tensors
    before: list[tuple[int, torch.Size]] = field(default_factory=list)  # version, shape
    written: tuple[nn.Parameter, ...] = ()
    used: tuple[nn.Parameter, ...] = ()  # by modules whose calls are not recorded
    drawn: int = 0  # draws of the pass before it


class EventRecorder(Interceptor):
    """Records module calls and torch functions as events: observe, execute, register."""

    def __init__(
        self,
        model: nn.Module,
        fake: FakeTensorMode | None,
        placeholders: FakeTensorMode,
        frames: list[int],
    ) -> None:
        super().__init__()
        self.sizes = True
        self.fake = fake
        self.placeholders = placeholders
        self.frames = frames
        self.paths = {id(m): name for name, m in model.named_modules()}
        self.buffers: dict[int, tuple[nn.Module, str]] = {
            id(b): (m, name)
            for m in model.modules()
            for name, b in m._buffers.items()
            if b is not None
        }
        self.below: dict[int, list[nn.Module]] = {}
        for module in model.modules():
            self.below[id(module)] = list(module.modules())
        self.events: list[TraceEvent] = []
        self.values: list[Value] = []
        self.calls: list[Call] = []
        self.known: dict[int, int] = {}  # a tensor's identity -> its value
        self.versions: dict[int, int] = {}
        self.changers: dict[int, int] = {}  # memory -> the event that changed it last
        # a real tensor that was changed where it is fake -> what it is now
        self.twins: dict[int, torch.Tensor] = {}
        self.tainted: set[int] = set()
        self.undo: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.own_storages: set[int] = set()
        self.alive: list[Any] = []
        self.counts: dict[int, int] = {}
        self.inside = [""]
        # parameters of modules whose calls are not recorded
        self.used: list[dict[int, nn.Parameter]] = []
        self.nodes: dict[Any, tuple[nn.Parameter, ...]] = {}
        self.makers: dict[int, Any] = {}  # value -> the node of autograd's graph that it came from

    # -- values ------------------------------------------------------------------------

    def _new(
        self, tensor: torch.Tensor, maker: int, shared: bool, why_not: str = "", before: int = -1
    ) -> int:
        value = Value(
            len(self.values),
            maker,
            shared,
            tuple(tensor.shape),
            tensor.dtype,
            tensor.requires_grad,
            why_not=why_not,
            before=before,
        )
        if not shared:
            value.storage = storage_of(tensor)
            value.why_not = why_not or self._unsendable(tensor)
            if not value.why_not or why_not:
                value.like = (self.placeholders, tensor.stride(), tensor.device)
        if before >= 0:
            value.data_shaped = self.values[before].data_shaped
        if tensor.grad_fn is not None:
            self.makers[value.index] = tensor.grad_fn
        self.values.append(value)
        self.known[id(tensor)] = value.index
        self.versions[id(tensor)] = version_of(tensor)
        self.alive.append(tensor)
        return value.index

    def _unsendable(self, tensor: torch.Tensor) -> str:
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
            return f"is a tensor of layout {tensor.layout}"
        wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        return "is computed under torch.func" if wrapped else ""

    def _value_of(self, tensor: torch.Tensor) -> int:
        index = self.known.get(id(tensor))
        if index is None:
            computed = isinstance(tensor, FakeTensor) or tensor.grad_fn is not None
            unseen = computed and id(tensor) not in self.buffers
            why_not = "was made where it cannot be seen" if unseen else ""
            return self._new(tensor, -1, not unseen, why_not)
        if self.versions[id(tensor)] != version_of(tensor):
            # It shares its memory with a tensor that was changed in place.
            changer = self.changers.get(storage_of(tensor), -1)
            was = self.values[index]
            shared = was.shared and (changer < 0 or self.events[changer].shared)
            return self._new(tensor, changer, shared, "" if shared else ELSEWHERE, index)
        return index

    def _current(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor that a changed one has become."""
        twin = self.twins.get(id(tensor))
        if twin is not None:
            return twin
        is_real = bool(self.tainted) and not isinstance(tensor, FakeTensor)
        return self._twin(tensor) if is_real and storage_of(tensor) in self.tainted else tensor

    def _twin(self, tensor: torch.Tensor) -> torch.Tensor:
        assert self.fake is not None
        twin = self.fake.from_tensor(tensor, static_shapes=True)
        if id(tensor) in self.known and id(twin) not in self.known:
            self.known[id(twin)] = self.known[id(tensor)]
            changed = storage_of(tensor) in self.tainted
            self.versions[id(twin)] = -1 if changed else version_of(twin)
            self.changers.setdefault(storage_of(twin), self.changers.get(storage_of(tensor), -1))
        self.alive += [twin, tensor]
        return twin

    # -- events ------------------------------------------------------------------------

    def _record(self, call: _Observed) -> Any:
        """Observe what a call takes, execute it, register the event; returns its result."""
        self._observe(call)
        call.drawn = drawn_so_far()
        self.used.append({})
        result = self._execute(call)
        call.used = tuple(self.used.pop().values())
        call.parameters += call.used
        return self._register(call, result)

    def _observe(self, call: _Observed) -> None:
        """Number the values a call reads, and decide whether it runs on fake tensors."""
        given = tensors_in((call.args, call.kwargs))
        parameters = list(call.module.parameters()) if call.module is not None else []
        parameters += [t for t in given if isinstance(t, nn.Parameter)]
        inputs = [t for t in given if not isinstance(t, nn.Parameter)]
        now = [self._current(t) for t in inputs]
        call.reads = [self._value_of(t) for t in now]
        computes = call.module is not None or bool(parameters)
        call.pretend = self.fake is not None and (
            computes or any(isinstance(t, FakeTensor) for t in now)
        )
        in_place = call.kind == "call" or changes_in_place(call.name, call.kwargs)
        if call.pretend and in_place:
            now = [t if isinstance(t, FakeTensor) else self._twin(t) for t in now]
        elif in_place:
            self._can_be_undone(given)
        twins = {id(a): b for a, b in zip(inputs, now, strict=True) if a is not b}
        if twins:
            call.args, call.kwargs = pytree.tree_map_only(
                torch.Tensor, lambda t: twins.get(id(t), t), (call.args, call.kwargs)
            )
        call.inputs, call.now, call.parameters = inputs, now, parameters
        call.before = [(version_of(t), t.shape) for t in now]
        call.written = _written(call.kind, call.name, call.args)

    def _execute(self, call: _Observed) -> Any:
        """Run the call, on fake tensors if it computes activations."""
        if call.pretend and call.written:
            # torch does some of these for real, whatever the mode
            return None if call.name == "__setitem__" else call.args[0]
        if not call.pretend or self.fake is None:
            return call.function(*call.args, **call.kwargs)
        try:
            with self.fake:
                return call.function(*call.args, **call.kwargs)
        except DynamicOutputShapeException:
            if call.module is not None or not data_shaped(call.name, call.args):
                raise
            return self._supposed(call.function, call.args, call.kwargs)

    def _register(self, call: _Observed, result: Any) -> Any:
        """Find out what the call changed and made, and append its event."""
        now, reads, number = call.now, call.reads, len(self.events)
        shared = (
            not call.parameters
            and call.module is None
            and not call.random
            and all(self.values[r].shared for r in reads)
        )
        versions = [version for version, _ in call.before]
        changed = [i for i, t in enumerate(now) if version_of(t) != versions[i]]
        buffer = None
        if shared and changed:
            in_model = [self.buffers[id(now[i])] for i in changed if id(now[i]) in self.buffers]
            if in_model:
                shared, buffer = False, in_model[0]
        opaque = (
            any(now[i].shape != call.before[i][1] for i in changed)
            or getattr(call.function, "__name__", "") == "__set__"
        )
        renewed = self._renew(call, changed, shared)
        for read in dict.fromkeys(reads):
            self.values[read].readers.append(number)
        try:
            leaves, shape = flatten(result)
        except Opaque:
            leaves, shape, opaque = [], None, True
        if torch._C._functorch.peek_interpreter_stack() is not None and not shared:
            opaque = True
        numbers = not shared and call.kind == "op" and (call.name in NUMBERS or call.sized)
        if numbers and len(leaves) > 4096:  # each would be a message of its own
            opaque, numbers = True, False
        marked, made = self._mark(call, leaves, shared, numbers)
        # a constant of the pass among results that only one stage has
        mixed = any(isinstance(m, Value) and m.shared for m in marked)
        unique = {id(p): p for p in call.parameters}
        self.events.append(
            TraceEvent(
                call.kind,
                call.name,
                self.inside[-1],
                call.module,
                tuple(reads),
                tuple(made),
                shape,
                tuple(marked),
                tuple((i, renewed[id(now[i])]) for i in changed),
                tuple(unique.values()),
                shared,
                (opaque or mixed) and not shared,
                tuple(reads[i] for i in changed),
                any(self.values[r].why_not for r in reads),
                buffer,
                tuple(self.frames),
                tuple(storage_of(t) for t in {id(now[i]): now[i] for i in changed}.values()),
                sized=call.sized,
                writes=call.written,
                drawn=call.drawn,
            )
        )
        if call.used and call.kind == "op":
            for leaf in leaves:
                if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                    # a function with a backward pass of its own
                    self.nodes[leaf.grad_fn] = call.used
        if call.pretend and self.events[-1].hands_on:
            return self._originals(self.events[-1], result, call.inputs, now)
        return result

    def _renew(self, call: _Observed, changed: list[int], shared: bool) -> dict[int, int]:
        """The values that changed inputs have become, by the tensor's identity."""
        renewed: dict[int, int] = {}
        for i in changed:
            tensor, given = call.now[i], call.inputs[i]
            if id(tensor) in renewed:  # it was given twice
                continue
            number = self.changers[storage_of(tensor)] = len(self.events)
            renewed[id(tensor)] = self._new(tensor, number, shared, before=call.reads[i])
            if tensor is not given:
                self.twins[id(given)] = tensor
                self.tainted.add(storage_of(given))
                self.alive.append(given)
        return renewed

    def _is_data_shaped(self, call: _Observed) -> bool:
        """Whether the shape of a call's result depends on values."""
        reads = call.reads
        if call.kind == "op" and keeps_shape(call.name):
            pairs = zip(reads, call.now, strict=True)
            reads = [r for r, t in pairs if call.args and t is call.args[0]]
        elif data_shaped(call.name, call.args):
            return True
        return any(self.values[r].data_shaped for r in reads)

    def _mark(
        self, call: _Observed, leaves: list[Any], shared: bool, numbers: bool
    ) -> tuple[list[Any], list[int]]:
        """What an event's result holds, leaf by leaf, and the values of its tensors."""
        number, shaped = len(self.events), self._is_data_shaped(call)
        marked: list[Any] = []
        made: list[int] = []
        places = {id(t): i for i, t in enumerate(call.now)}
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                marked.append(self._number(leaf, number, made) if numbers else leaf)
                continue
            if isinstance(leaf, nn.Parameter):
                marked.append(leaf)
                continue
            place = places.get(id(leaf))
            if place is not None:
                made.append(self._value_of(leaf))
                marked.append(Given(place))
                continue
            known = id(leaf) in self.known
            index = self._value_of(leaf) if known else self._new(leaf, number, shared)
            value = self.values[index]
            if leaf.dim() and shaped:
                value.data_shaped = True
            self.own_storages.add(storage_of(leaf))
            made.append(index)
            marked.append(value)
        return marked, made

    def _originals(
        self, event: TraceEvent, result: Any, inputs: list[torch.Tensor], now: list[torch.Tensor]
    ) -> Any:
        """Replace fake stand-ins of constants by the constants."""
        if event.opaque:
            return result
        leaves, _ = flatten(result)
        for i, mark in enumerate(event.leaves):
            if isinstance(mark, Given):
                given = inputs[mark.place]
                if given is not now[mark.place] and id(given) not in self.twins:
                    leaves[i] = given
        return build(leaves, event.shape)

    def _supposed(self, function: Any, args: Any, kwargs: Any) -> Any:
        """The largest result of a function with a data-dependent shape, so that no path is missed.

        It is exact if only the batch decides.
        """
        fake = self.fake
        assert fake is not None

        def known(tensor: torch.Tensor) -> torch.Tensor:
            if not isinstance(tensor, FakeTensor):
                return tensor
            return torch.ones(tensor.shape, dtype=tensor.dtype, device=tensor.device)

        name = getattr(function, "__name__", "")
        if name == "__getitem__":
            keys: list[Any] = []
            for key in args[1] if isinstance(args[1], tuple) else (args[1],):
                mask = isinstance(key, torch.Tensor) and key.dtype in (torch.bool, torch.uint8)
                keys += known(key).nonzero(as_tuple=True) if mask else [key]
            with fake:
                return args[0][tuple(keys)]
        if any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors_in((args, kwargs))):
            raise DynamicOutputShapeException(function)  # it would have no gradient
        args, kwargs = pytree.tree_map_only(torch.Tensor, known, (args, kwargs))
        result = function(*args, **kwargs)
        return pytree.tree_map_only(
            torch.Tensor, lambda t: fake.from_tensor(t, static_shapes=True), result
        )

    def _number(self, leaf: Any, maker: int, made: list[int]) -> Any:
        """A number read from an activation: a value to send to later stages."""
        if isinstance(leaf, bool | int | float | complex):
            wide = {float: torch.float64, complex: torch.complex128}.get(type(leaf))
            kind, like = "number", torch.tensor(leaf, dtype=wide)
        elif type(leaf).__module__ == "numpy" and hasattr(leaf, "dtype"):
            kind, like = "array", torch.from_numpy(leaf.copy())
        else:
            return leaf
        value = Value(
            len(self.values), maker, False, tuple(like.shape), like.dtype, False, kind=kind
        )
        value._placeholder = like
        self.values.append(value)
        made.append(value.index)
        return value

    def _can_be_undone(self, given: list[torch.Tensor]) -> None:
        """Save a real tensor before it is changed in place, if it existed before the pass."""
        for tensor in given:
            key = storage_of(tensor)
            known = not key or key in self.own_storages or key in self.undo
            if not known and not isinstance(tensor, FakeTensor):
                with torch.no_grad():
                    self.undo[key] = (tensor.detach(), tensor.detach().clone())

    def restore(self) -> None:
        """Undo in-place changes of real tensors."""
        with torch.no_grad():
            for tensor, value in self.undo.values():
                if not torch.equal(tensor, value):
                    tensor.copy_(value)

    def on_function(
        self, function: Any, args: Any, kwargs: Any, what: tuple[str, bool, bool]
    ) -> Any:
        """See :class:`Interceptor`."""
        return self._record(_Observed("op", what[0], what[2], None, function, args, kwargs))

    def on_size(self, function: Any, args: Any, kwargs: Any, what: tuple[str, bool, bool]) -> Any:
        """See :class:`Interceptor`. A size that depends on activations is sent to later stages."""
        tensors = (t for t in args if isinstance(t, torch.Tensor))
        known = (self.known.get(id(self.twins.get(id(t), t))) for t in tensors)
        values = (self.values[index] for index in known if index is not None)
        if not any(value.data_shaped and not value.shared for value in values):
            return function(*args, **kwargs)
        plain = as_tuple(function)
        size = self._record(_Observed("op", what[0], False, None, plain, args, kwargs, True))
        return whole_size(size, what[0])

    def _hooked(self, module: nn.Module) -> bool:
        """Whether it or an inner module has hooks. They may keep what they see: run everywhere."""
        return any(m._forward_hooks or m._forward_pre_hooks for m in self.below[id(module)])

    def _leaf(self, module: nn.Module) -> bool:
        if isinstance(module, torch.jit.ScriptModule):
            return True
        if compiled(module) and self.paths[id(module)]:
            return True
        own_code = not type(module).__module__.startswith("torch.nn.")
        if own_code or isinstance(module, _CONTAINERS) or self._hooked(module):
            return False
        held = [p for m in self.below[id(module)] for p in m._parameters.values() if p is not None]
        return all(isinstance(p, nn.Parameter) for p in held)

    def on_call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """See :class:`Interceptor`."""
        path = self.paths.get(id(module))
        if path is None:  # not a module of the model: record the calls that it makes
            return self.plain_call(module, args, kwargs)
        nth = self.counts.get(id(module), 0)
        self.counts[id(module)] = nth + 1
        start = len(self.events)
        if self._leaf(module):
            with self.pause():
                function = eagerly(module) if compiled(module) else module
                call = _Observed("call", path, False, module, function, args, kwargs)
                result = self._record(call)
            event = self.events[-1]
            self.calls.append(
                Call(path, nth, module, start, start + 1, None if event.opaque else event)
            )
            return result
        with self.pause():
            before = self._before(module, args, kwargs)
        self.inside.append(path)
        try:
            result = self.plain_call(module, args, kwargs)
        finally:
            self.inside.pop()
        whole = None
        if before is not None:
            with self.pause():
                whole = self._merge_call(path, module, start, before, args, kwargs, result)
        self.calls.append(Call(path, nth, module, start, len(self.events), whole))
        return result

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._hooked(module):
            return None
        inputs = [t for t in tensors_in((args, kwargs)) if not isinstance(t, nn.Parameter)]
        return (
            inputs,
            [self._value_of(self._current(t)) for t in inputs],
            self._state(module, args, kwargs),
            generator_states(),
            drawn_so_far(),
        )

    def _state(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """A module's Python state and the containers it was given."""
        modules = self.below[id(module)]
        attributes = ((k, v) for m in modules for k, v in m.__dict__.items())
        kept = [(k, snapshot(v, 2)) for k, v in attributes if k not in _MODULE_ATTRIBUTES]
        own = [id(b) for m in modules for b in (*m._buffers.values(), *m._parameters.values())]
        return kept, own, snapshot(list(args), 4)[1], snapshot(list(kwargs.values()), 4)[1]

    def _merge_call(
        self,
        path: str,
        module: nn.Module,
        start: int,
        before: Any,
        args: Any,
        kwargs: Any,
        result: Any,
    ) -> TraceEvent | None:
        """Merge a call's events into one; None if skipping it would lose more than its result."""
        inputs, entry, state, states, drawn = before
        if self._hooked(module):
            return None
        try:
            leaves, shape = flatten(result)
        except Opaque:
            return None
        inner = self.events[start:]
        if any(e.opaque or e.loose for e in inner) or self._state(module, args, kwargs) != state:
            return None
        parameters = {id(p): p for p in module.parameters()} | {
            id(p): p for e in inner for p in e.parameters
        }
        used = any(e.parameters for e in inner)
        shared = all(e.shared for e in inner) and not used
        outside = {r for e in inner for r in e.reads if self.values[r].maker < start}
        if any(not self.values[r].shared for r in outside.difference(entry)):
            return None
        now = [self._current(t) for t in inputs]
        after = [self._value_of(t) for t in now]
        changed = [i for i, (a, b) in enumerate(zip(entry, after, strict=True)) if a != b]
        if any(self.values[after[i]].why_not for i in changed):
            return None
        places = {id(t): i for i, t in enumerate(now)}
        objects = {id(v): i for i, v in enumerate((*args, *kwargs.values()))}
        took = any(self.values[v].kind != "tensor" for e in inner for v in e.made)
        shaped = any(
            self.values[v].data_shaped and not self.values[v].shared for e in inner for v in e.made
        )
        marked: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, nn.Parameter):
                marked.append(leaf)
            elif isinstance(leaf, torch.Tensor):
                current = self._current(leaf)
                if id(current) in places:
                    marked.append(Given(places[id(current)]))
                    continue
                value = self.values[self._value_of(current)]
                if (value.shared and not shared) or value.maker < start:
                    return None
                marked.append(value)
            elif not isinstance(leaf, IMMUTABLE):
                if id(leaf) not in objects:
                    return None
                marked.append(Given(objects[id(leaf)], False))
            elif took and isinstance(leaf, bool | int | float | complex):
                return None  # maybe a number that was taken from a tensor
            else:
                marked.append(leaf)
        made = [
            m.index if isinstance(m, Value) else after[m.place]
            for m in marked
            if isinstance(m, Value) or (isinstance(m, Given) and m.tensor)
        ]
        changes = tuple((i, after[i]) for i in changed)
        storages = tuple({s for e in inner for s in e.changed_storages})
        return TraceEvent(
            "call",
            path,
            self.inside[-1],
            module,
            tuple(sorted(outside)),
            tuple(made),
            shape,
            tuple(marked),
            changes,
            tuple(parameters.values()) if not shared else (),
            shared,
            replaces=tuple(entry[i] for i in changed),
            changed_storages=storages,
            erratic=not shared and (took or shaped or states != generator_states()),
            drawn=drawn,
        )

    def finish(self, result: Any) -> None:
        """Close the pass. A call whose inner values are read outside it stays divided."""
        end = len(self.events)
        for tensor in tensors_in(result):
            if not isinstance(tensor, nn.Parameter):
                self.values[self._value_of(self._current(tensor))].readers.append(end)
        made_by: list[list[Value]] = [[] for _ in range(end)]
        for value in self.values:
            if value.maker >= 0 and value.readers:
                made_by[value.maker].append(value)
        for call in self.calls:
            if call.event is None or call.event.module is None or call.stop == call.start:
                continue
            if self._leaf(call.module):
                continue
            visible = {*call.event.made, *(new for _, new in call.event.changes)}
            inner = (v for made in made_by[call.start : call.stop] for v in made)
            if any(v.readers[-1] >= call.stop and v.index not in visible for v in inner):
                call.event = None
