"""Puts the script's objects back as they were, bit by bit: the one mechanism for it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from types import CellType, FunctionType, ModuleType
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer

from ronde.introspect.random_state import GENERATORS, restore_states, states, undo_draws

__all__ = ["NO_TENSORS", "SavedState", "without_hooks"]

NO_TENSORS = -1
"""``largest`` of a :class:`SavedState` that copies no tensor and no array."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, tuple, set, deque, dict)
_SIMPLE = (*_PLAIN, torch.Tensor, *GENERATORS)
_WRITTEN = (*_SIMPLE[len(_PLAIN) :], np.ndarray, *_CONTAINERS)
_MOST_ITEMS = 100_000  # a longer list is data, which nobody writes
_MOST_LEVELS = 3  # of containers in containers


class SavedState:
    """What calls may change in some objects, and the states of the global random generators.

    Of a module and its parts: attributes, modes, buffers, and which parameters have gradients. Of
    an optimizer: state and settings. Of a function: its closure, and the global values that it
    names. Of any other object: attributes. Containers, tensors, and generators come back as the
    same objects with their values; other objects that these lead to are not looked into.

    Args:
        owners: the objects.
        largest: bytes of a tensor or an array above which it counts as data that nobody writes.
        steps: whether optimizer steps are taken meanwhile. Then parameters and gradients are copied
            too, and private attributes, such as the hooks of a plan, stay as they are. All copies
            are in the host's memory.

    Example:
        >>> layer = nn.BatchNorm1d(2)
        >>> with SavedState(layer):
        ...     output = layer(torch.ones(4, 2))
        >>> int(layer.num_batches_tracked)
        0
    """

    def __init__(self, *owners: Any, largest: float = math.inf, steps: bool = False) -> None:
        owners = tuple(getattr(o, "__self__", o) for o in owners)  # of a method: its object
        modules = [m for owner in owners if isinstance(owner, nn.Module) for m in owner.modules()]
        parameters = {id(p): p for m in modules for p in m.parameters(recurse=False)}
        self._weights = [_Copy(p) for p in parameters.values()] if steps else []
        self._gradients = [
            (p, p.grad, _Copy(p.grad) if steps else None, p.requires_grad)
            for p in parameters.values()
        ]
        # others list the parameters, which are copied above
        known, private = parameters.keys(), not steps
        self._attributes = [_Attributes(m, largest, known, private) for m in modules]
        # whose modes and buffers are no attributes of Python's
        self._scripted = [
            (m, m.training, [_Copy(b, largest) for b in m.buffers(recurse=False)])
            for m in modules
            if isinstance(m, torch.jit.ScriptModule) and hasattr(m, "training")  # not frozen
        ]
        self._others: list[_Attributes | _Variables | _Moments] = []
        for owner in owners:
            if isinstance(owner, FunctionType):
                self._others.append(_Variables(owner))
            elif isinstance(owner, Optimizer):
                self._others.append(_Moments(owner))
            elif not isinstance(owner, nn.Module) and _has_attributes(owner):
                self._others.append(_Attributes(owner, largest, known, private))
        self._random, self._threads = states(), torch.get_num_threads()
        self._devices: list[torch.Tensor] = []
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._devices = [torch.cuda.get_rng_state(d) for d in range(torch.cuda.device_count())]

    def __enter__(self) -> SavedState:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def kept(self) -> list[tuple[nn.Module, str]]:
        """``(module, attribute)`` of what modules have kept since, buffers included."""
        return [(cast(nn.Module, a.owner), name) for a in self._attributes for name in a.changed()]

    def restore(self) -> None:
        """Put everything back."""
        with torch.no_grad():
            for weight in self._weights:
                weight.back()
            for p, gradient, kept, requires in self._gradients:
                if kept is not None:
                    kept.back()
                if p.grad is not gradient:
                    p.grad = gradient
                if p.requires_grad != requires:
                    p.requires_grad_(requires)
            for each in (*self._attributes, *self._others):
                each.put_back()
            for module, training, buffers in self._scripted:
                module.training = training
                for buffer in buffers:
                    buffer.back()
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        restore_states(self._random)
        for device, state in enumerate(self._devices):
            torch.cuda.set_rng_state(state, device)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if {type(a), type(b)} - {torch.Tensor, nn.Parameter} or a.layout != torch.strided:
        return False
    if a.is_quantized or a.is_nested or a.is_conj():  # whose bytes cannot be viewed
        return False
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    flat = [t.to(a.device).contiguous().reshape(-1) for t in (a, b)]
    return not a.numel() or torch.equal(*(t.view(torch.uint8) for t in flat))


class _Copy:
    """A copy of a value. An object that is none of those above is kept by reference."""

    def __init__(
        self, value: Any, largest: float = math.inf, elsewhere: Collection[int] = (), level: int = 0
    ) -> None:
        self.value = value
        self._copy: Any = None
        if id(value) in elsewhere:
            return
        if isinstance(value, torch.Tensor):
            written = not (value.is_meta or isinstance(value, FakeTensor))
            if written and value.layout == torch.strided and value.nbytes <= largest:
                now = value.detach()
                self._copy = now.clone() if now.device.type == "cpu" else now.cpu()
        elif isinstance(value, np.ndarray):
            written = value.flags.writeable and not isinstance(value, np.memmap)
            if written and value.dtype != object and value.nbytes <= largest:
                self._copy = value.copy()
        elif isinstance(value, _CONTAINERS):
            if len(value) <= _MOST_ITEMS and level <= _MOST_LEVELS:
                items = value.values() if isinstance(value, dict) else value
                kept = [
                    _Copy(v, largest, elsewhere, level + 1) if isinstance(v, _WRITTEN) else v
                    for v in items
                ]
                self._copy = list(zip(value, kept, strict=True))
        else:
            self._copy = undo_draws(value)

    def back(self) -> Any:
        """The very object, with its values as they were."""
        value, kept = self.value, self._copy
        if kept is None:
            return value
        if isinstance(value, torch.Tensor):
            now = value.detach()
            # An unchanged tensor is not written: a graph may have saved it, and see a new version.
            if not _same_bits(now, kept):
                now.copy_(kept)
        elif isinstance(value, np.ndarray):
            value[...] = kept
        elif isinstance(value, _CONTAINERS):
            before = [(k, v.back() if isinstance(v, _Copy) else v) for k, v in kept]
            if isinstance(value, dict):
                # diffusers' configuration is a dict that refuses to be written
                if [(k, id(v)) for k, v in value.items()] != [(k, id(v)) for k, v in before]:
                    value.clear()
                    for k, v in before:  # update() of a Counter adds
                        value[k] = v
            elif not isinstance(value, tuple):
                values = [v for _, v in before]
                if list(map(id, value)) != list(map(id, values)):
                    value.clear()
                    (value.update if isinstance(value, set) else value.extend)(values)
        else:
            kept()
        return value


def _has_attributes(owner: Any) -> bool:
    # a library's own function has its module for an object
    attributes = getattr(owner, "__dict__", None)
    return isinstance(attributes, dict) and not isinstance(owner, ModuleType)


class _Attributes:
    """An object's attributes; new ones are deleted when it is put back.

    Names with an underscore belong to libraries, such as torch's modules. Without ``private``, only
    plain values, tensors, and generators of them are put back, and a module's buffers.
    """

    def __init__(
        self,
        owner: Any,
        largest: float = math.inf,
        elsewhere: Collection[int] = (),
        private: bool = False,
        without: Collection[str] = (),
    ) -> None:
        self.owner, self._private = owner, private
        own = vars(owner)
        self._names = set(own)
        self._values = {
            name: _Copy(value, largest, elsewhere)
            for name, value in list(own.items())
            if name not in without
            if private
            or not name.startswith("_")
            or isinstance(value, _SIMPLE)
            or (name == "_buffers" and isinstance(owner, nn.Module))
            or (isinstance(value, list | dict | set | deque) and _is_plain(value))
        }
        buffers = own.get("_buffers") if isinstance(owner, nn.Module) else None
        self._buffers = dict(buffers) if isinstance(buffers, dict) else {}

    def changed(self) -> list[str]:
        """The attributes and buffers that are other objects now."""
        own = vars(self.owner)
        buffers = own.get("_buffers", {}) if isinstance(self.owner, nn.Module) else {}
        replaced = [name for name, b in buffers.items() if self._buffers.get(name) is not b]
        values = self._values
        return replaced + [n for n, v in own.items() if n not in values or v is not values[n].value]

    def put_back(self) -> None:
        own = vars(self.owner)
        for name in [n for n in own if n not in self._names]:
            if self._private or not name.startswith("_"):
                del own[name]
        for name, kept in self._values.items():
            own[name] = kept.back()


class _Variables:
    """A function's variables in its closure, and the global values that it names."""

    def __init__(self, function: FunctionType) -> None:
        self._globals = function.__globals__
        names = [n for n in function.__code__.co_names if n in self._globals]
        # A counter may be an item of a list that the function only reads.
        self._kept = {n: _Copy(self._globals[n], NO_TENSORS) for n in names}
        self._cells: list[tuple[CellType, _Copy]] = []
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # it has no value yet
                self._cells.append((cell, _Copy(cell.cell_contents, NO_TENSORS)))

    def put_back(self) -> None:
        for name, kept in self._kept.items():
            self._globals[name] = kept.back()
        for cell, kept in self._cells:
            cell.cell_contents = kept.back()


def _is_plain(value: Any, level: int = 0) -> bool:
    if isinstance(value, _PLAIN):
        return True
    if level > _MOST_LEVELS:
        return False
    if isinstance(value, list | tuple | set | frozenset | deque):
        return len(value) <= _MOST_ITEMS and all(_is_plain(v, level + 1) for v in value)
    if isinstance(value, dict):
        return _is_plain(list(value), level) and _is_plain(list(value.values()), level)
    return False


def _restore(now: dict[str, Any], values: dict[str, _Copy], without: str = "") -> None:
    for name in [n for n in now if n != without and n not in values]:
        del now[name]
    for name, value in values.items():
        now[name] = value.back()


class _Moments:
    """An optimizer's state and settings."""

    def __init__(self, optimizer: Optimizer) -> None:
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
        for p in list(optimizer.state):
            if p not in self._state and isinstance(optimizer.state[p], dict):
                del optimizer.state[p]
        for p, values in self._state.items():
            _restore(optimizer.state[p], values)
        for group, settings in zip(optimizer.param_groups, self._groups, strict=True):
            _restore(group, settings, without="params")
        self._attributes.put_back()


@contextmanager
def without_hooks(optimizer: Optimizer) -> Iterator[None]:
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
