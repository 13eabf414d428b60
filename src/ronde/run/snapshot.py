"""A snapshot of a run: everything a step changes is copied, and put back bit by bit."""

from __future__ import annotations

import copy
import math
import random
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from types import CellType, FunctionType
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import Dataset

from ronde.introspect import attributes, restore_states, states, walk
from ronde.parallel import Strategy
from ronde.run.parts import Parts, State

__all__ = ["Snapshot", "kept_attributes"]


_PLAIN = (bool, int, float, complex, str, bytes, type(None))
# generators: how to copy their state, and how to put it back
_GENERATORS: tuple[tuple[Any, Any, Any], ...] = (
    (torch.Generator, lambda g: g.get_state(), lambda g, s: g.set_state(s)),
    (random.Random, lambda g: g.getstate(), lambda g, s: g.setstate(s)),
    (
        np.random.Generator,
        lambda g: copy.deepcopy(g.bit_generator.state),
        lambda g, s: setattr(g.bit_generator, "state", s),
    ),
    (np.random.RandomState, lambda g: g.get_state(), lambda g, s: g.set_state(s)),
)
_SIMPLE = (*_PLAIN, torch.Tensor, *(kind for kind, _, _ in _GENERATORS))
_MOST_ITEMS = 100_000  # of a list that a module or a data set holds: longer ones are data
_MOST_BYTES = 2**26  # of a tensor or an array that a data set holds: larger ones are data
_NO_BYTES = -1  # no tensor and no array
_DEPTH = 3
_MOST_PARTS = 100
_PARTS = ("dataset", "datasets", "transform", "transforms", "target_transform")


def _cpu_copy(tensor: torch.Tensor) -> torch.Tensor:
    value = tensor.detach()
    return value.clone() if value.device.type == "cpu" else value.cpu()


def _put_back(tensor: torch.Tensor, value: torch.Tensor) -> None:
    # An unchanged tensor is not written: a graph may have saved it, and would see a new version.
    now = tensor.detach()
    if now.device.type != "cpu" or not _same_bits(now, value):
        now.copy_(value)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if type(a) is not torch.Tensor or type(b) is not torch.Tensor or a.layout != torch.strided:
        return False
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    flat = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)] if a.numel() else []
    return not flat or torch.equal(*flat)


class _Copy:
    """A copy of a value: plain values, tensors, arrays, generators, and containers of them.
    Anything else is kept by reference.

    Args:
        value: the value.
        largest: bytes of a tensor or an array above which it counts as read-only data.
        elsewhere: ids of tensors that are copied elsewhere.
    """

    def __init__(
        self, value: Any, largest: float = math.inf, elsewhere: Collection[int] = (), depth: int = 0
    ) -> None:
        self._value = value
        self._copy: Any = None
        if id(value) in elsewhere:
            return
        if isinstance(value, torch.Tensor):
            dense = not value.is_meta and value.layout == torch.strided
            if dense and value.numel() * value.element_size() <= largest:
                self._copy = _cpu_copy(value)
        elif isinstance(value, np.ndarray):
            writable = value.flags.writeable and not isinstance(value, np.memmap)
            if writable and value.dtype != object and value.nbytes <= largest:
                self._copy = value.copy()
        elif isinstance(value, list | tuple | set | deque | dict):
            if len(value) <= _MOST_ITEMS and depth <= _DEPTH:
                items = value.values() if isinstance(value, dict) else value
                kept = [_Copy(v, largest, elsewhere, depth + 1) for v in items]
                self._copy = list(zip(value, kept, strict=True))
        else:
            copies = (get(value) for kind, get, _ in _GENERATORS if isinstance(value, kind))
            self._copy = next(copies, None)

    def back(self) -> Any:
        """The very object, with its values as they were."""
        value, kept = self._value, self._copy
        if kept is None:
            return value
        if isinstance(value, torch.Tensor):
            with torch.no_grad():
                _put_back(value, kept)
        elif isinstance(value, np.ndarray):
            value[...] = kept
        elif isinstance(value, list | tuple | set | deque | dict):
            before = [(k, v.back()) for k, v in kept]
            if isinstance(value, dict):
                # diffusers' configuration is a dict that refuses to be written
                if [(k, id(v)) for k, v in value.items()] != [(k, id(v)) for k, v in before]:
                    value.clear()
                    value.update(before)
            elif not isinstance(value, tuple):
                value.clear()
                (value.update if isinstance(value, set) else value.extend)(v for _, v in before)
        else:
            next(put for t, _, put in _GENERATORS if isinstance(value, t))(value, kept)
        return value


class _Attributes:
    """An object's attributes; new ones are deleted when it is put back.

    Names with an underscore belong to libraries, such as torch's modules: of these, only plain
    values, tensors, and generators are put back.
    """

    def __init__(
        self,
        owner: Any,
        largest: float = math.inf,
        elsewhere: Collection[int] = (),
        without: Collection[str] = (),
    ) -> None:
        self._owner = owner
        own = getattr(owner, "__dict__", {})
        self._names = set(own)
        self._values = {
            name: _Copy(value, largest, elsewhere)
            for name, value in list(own.items())
            if name not in without
            if not name.startswith("_")
            or isinstance(value, _SIMPLE)
            or (isinstance(value, list | dict | set | deque) and _is_plain(value))
        }

    def put_back(self) -> None:
        own = getattr(self._owner, "__dict__", {})
        for name in [n for n in own if n not in self._names and not n.startswith("_")]:
            del own[name]
        for name, kept in self._values.items():
            own[name] = kept.back()


class _Variables:
    """A function's variables in its closure, and the global values that it names."""

    def __init__(self, function: FunctionType) -> None:
        self._globals = function.__globals__
        names = [n for n in function.__code__.co_names if n in self._globals]
        # A counter may be an item of a list that the function only reads.
        self._kept = {n: _Copy(self._globals[n], _NO_BYTES) for n in names}
        self._cells: list[tuple[CellType, _Copy]] = []
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # it has no value yet
                self._cells.append((cell, _Copy(cell.cell_contents, _NO_BYTES)))

    def put_back(self) -> None:
        for name, kept in self._kept.items():
            self._globals[name] = kept.back()
        for cell, kept in self._cells:
            cell.cell_contents = kept.back()


def kept_attributes(owner: Any) -> list[_Attributes | _Variables]:
    """Copies of what a call of ``owner`` may set: a module's and an object's attributes, a
    function's variables. Tensors and arrays are not copied. Each has a ``put_back``.
    """
    if isinstance(owner, FunctionType):
        return [_Variables(owner)]
    owner = getattr(owner, "__self__", owner)
    if isinstance(owner, torch.nn.Module):
        return [_Attributes(module, _NO_BYTES) for module in owner.modules()]
    return [_Attributes(owner, _NO_BYTES)] if hasattr(owner, "__dict__") else []


def _is_plain(value: Any, depth: int = 0) -> bool:
    if isinstance(value, _PLAIN):
        return True
    if depth > _DEPTH:
        return False
    if isinstance(value, list | tuple | set | frozenset | deque):
        return len(value) <= _MOST_ITEMS and all(_is_plain(v, depth + 1) for v in value)
    if isinstance(value, dict):
        return _is_plain(list(value), depth) and _is_plain(list(value.values()), depth)
    return False


def _inner(one: Any) -> Iterator[Any]:
    """The data sets and transforms inside a data set."""
    for name, value in attributes(one).items():
        if isinstance(value, Dataset) or name in _PARTS:
            yield from value if isinstance(value, list | tuple) else [value]


class _Weights:
    """A model's parameters, gradients, and buffers, and its modules' attributes."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules: list[tuple[torch.nn.Module, bool]] = []
        self._buffers: list[tuple[torch.nn.Module, str, Any, torch.Tensor | None]] = []
        self._attributes: list[_Attributes] = []
        for module in model.modules():
            self._modules.append((module, module.training))
            self._attributes.append(_Attributes(module))
            for name, b in module._buffers.items():
                value = None if b is None or b.is_meta else _cpu_copy(b)
                self._buffers.append((module, name, b, value))
        self._parameters = [(p, None if p.is_meta else _cpu_copy(p)) for p in model.parameters()]
        self._gradients = [
            (p, p.grad, None if p.grad is None else _cpu_copy(p.grad), p.requires_grad)
            for p in model.parameters()
        ]

    def put_back(self) -> None:
        with torch.no_grad():
            for p, value in self._parameters:
                if value is not None:
                    _put_back(p, value)
            for module, name, b, value in self._buffers:
                if b is not None and value is not None:
                    _put_back(b, value)
                module._buffers[name] = b
            for p, grad, value, requires in self._gradients:
                if grad is not None and value is not None:
                    grad.detach().copy_(value)
                p.grad = grad
                if p.requires_grad != requires:
                    p.requires_grad_(requires)
        for kept in self._attributes:
            kept.put_back()
        for module, training in self._modules:
            module.training = training


def _restore(now: dict[str, Any], values: dict[str, _Copy], without: str = "") -> None:
    for name in [n for n in now if n != without and n not in values]:
        del now[name]
    for name, value in values.items():
        now[name] = value.back()


class _Moments:
    """An optimizer's state and settings."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._state: dict[Any, dict[str, _Copy]] = {}
        for p, values in optimizer.state.items():
            if isinstance(values, dict):
                self._state[p] = {k: _Copy(v) for k, v in values.items()}
        self._groups = [
            {k: _Copy(v) for k, v in group.items() if k != "params"}
            for group in optimizer.param_groups
        ]
        self._attributes = _Attributes(optimizer, without=("state", "param_groups"))

    def put_back(self) -> None:
        optimizer = self._optimizer
        with torch.no_grad():
            for p in list(optimizer.state):
                if p not in self._state and isinstance(optimizer.state[p], dict):
                    del optimizer.state[p]
            for p, values in self._state.items():
                _restore(optimizer.state[p], values)
            for group, settings in zip(optimizer.param_groups, self._groups, strict=True):
                _restore(group, settings, without="params")
        self._attributes.put_back()


@contextmanager
def _without_hooks(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Leave out the script's own optimizer hooks: what they change (an average of the weights) is
    unknown here.
    """
    removed = []
    for hooks in (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks):
        before = list(hooks.items())
        for key, hook in before:
            if not str(getattr(hook, "__module__", "")).startswith("ronde."):
                del hooks[key]
        removed.append((hooks, before))
    try:
        yield
    finally:
        for hooks, before in removed:
            hooks.clear()
            cast("dict[int, Any]", hooks).update(before)


def _of_exchange(strategy: Strategy, weights: Collection[int]) -> list[_Attributes]:
    exchange = strategy.exchange
    parts = () if exchange is None else (exchange, exchange.reducer)
    return [_Attributes(part, elsewhere=weights) for part in parts]


class Snapshot:
    """A copy of weights, gradients, optimizer, scheduler, randomness, and the place in the data.

    It covers the model, a loss that is a module, the optimizer, the scheduler, and the attributes
    of data sets and their transforms, nested ones included. It does not cover objects that only a
    closure or a global name leads to, nor the effects of hooks on modules. Weights and moments are
    copied into the host's memory.
    """

    def __init__(self, run: Parts) -> None:
        self._run = run
        self._strategy = strategy = run.strategy
        self._scaler = scaler = run.scaler
        self._model = _Weights(run.model)
        self._moments = _Moments(run.optimizer)
        # A strategy lists the model's parameters, which are copied already.
        weights = {id(p) for p in run.model.parameters()}
        self._attributes = [
            _Attributes(strategy, elsewhere=weights),
            *_of_exchange(strategy, weights),
            *(
                _Attributes(part, _MOST_BYTES)
                for part in walk(run.data.dataset, _inner, most=_MOST_PARTS)
            ),
        ]
        functions = (run.loss.loss, run.loss.forward)
        self._losses = [_Weights(f) for f in functions if isinstance(f, torch.nn.Module)]
        self._untouched = strategy.is_untouched
        self._scheduler: tuple[Any, Any, _Attributes] | None = None
        if run.scheduler is not None:
            state = copy.deepcopy(run.scheduler.state_dict())
            self._scheduler = (run.scheduler, state, _Attributes(run.scheduler))
        self._scale = copy.deepcopy(scaler.state_dict()) if scaler is not None else None
        self._state = State(**vars(run.state))
        self._random = states()
        devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
        self._accelerators = [(d, torch.cuda.get_rng_state(d)) for d in devices]
        self._threads = torch.get_num_threads()

    @contextmanager
    def without_optimizer_hooks(self) -> Iterator[None]:
        """Inside, optimizer steps do not call the script's own hooks."""
        with _without_hooks(self._run.optimizer):
            yield

    def restore(self, failed: bool = False) -> None:
        """Put everything back. ``failed``: this worker may be alone here, so no collectives."""
        self._model.put_back()
        for loss in self._losses:
            loss.put_back()
        self._moments.put_back()
        for each in self._attributes:
            each.put_back()
        if self._scheduler is not None:
            scheduler, state, kept = self._scheduler
            scheduler.load_state_dict(state)
            kept.put_back()
        if self._scaler is not None and self._scale is not None:
            self._scaler.load_state_dict(self._scale)
        vars(self._run.state).update(vars(self._state))
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        alone = failed and self._run.world.size > 1
        if self._untouched and not alone:
            # DDP orders its buckets by the first backward pass. A training that has taken no step
            # yet must order them by its own.
            self._strategy.rebuild()
        restore_states(self._random)
        for d, s in self._accelerators:
            torch.cuda.set_rng_state(s, d)
