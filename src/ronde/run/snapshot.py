"""A run as it was before it was measured: everything that a step changes is kept, and put back bit
by bit.
"""

from __future__ import annotations

import copy
import math
import random
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch.utils.data import Dataset

from ronde.introspect.random_state import restore_states, states
from ronde.parallel.ddp import Replicate
from ronde.run.run_state import State

if TYPE_CHECKING:
    from ronde.run.run import Run

__all__ = ["as_found"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_SIMPLE = (
    *_PLAIN,
    torch.Tensor,
    torch.Generator,
    random.Random,
    np.random.Generator,
    np.random.RandomState,
)
_MOST_ITEMS = 100_000  # of a list that a module or a data set holds: longer ones are data
_MOST_BYTES = 2**26  # of a tensor or an array that a data set holds: larger ones are data
_DEPTH = 3
_MOST_PARTS = 100
_PARTS = ("dataset", "datasets", "transform", "transforms", "target_transform")


def _aside(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that takes no memory of an accelerator."""
    value = tensor.detach()
    return value.clone() if value.device.type == "cpu" else value.cpu()


def _put_back(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Bring a tensor's values back, in place; one that has not changed is not written, a graph may
    have saved it.
    """
    now = tensor.detach()
    if now.device.type != "cpu" or not _same_bits(now, value):
        now.copy_(value)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if (
        type(a) is not torch.Tensor
        or type(b) is not torch.Tensor
        or a.layout != torch.strided
        or a.shape != b.shape
        or a.dtype != b.dtype
    ):
        return False
    if not a.numel():
        return True
    flat = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return torch.equal(*flat)


class _Kept:
    """A value as it is now: plain values, tensors, arrays, generators, and containers of them.
    Anything else is kept by reference.

    Args:
        value: what is kept.
        largest: bytes of a tensor or an array above which it is not copied but taken for data that
            nobody writes to.
        elsewhere: what else keeps: tensors by identity, which are not copied a second time.
    """

    def __init__(
        self, value: Any, largest: float = math.inf, elsewhere: Collection[int] = (), depth: int = 0
    ) -> None:
        self._value = value
        self._copy: Any = None
        if id(value) in elsewhere:
            return
        if isinstance(value, torch.Tensor):
            if (
                not value.is_meta
                and value.layout == torch.strided
                and value.numel() * value.element_size() <= largest
            ):
                self._copy = _aside(value)
        elif isinstance(value, np.ndarray):
            if (
                value.dtype != object
                and value.flags.writeable
                and value.nbytes <= largest
                and not isinstance(value, np.memmap)
            ):
                self._copy = value.copy()
        elif isinstance(value, torch.Generator):
            self._copy = value.get_state()
        elif isinstance(value, random.Random):
            self._copy = value.getstate()
        elif isinstance(value, np.random.Generator):
            self._copy = copy.deepcopy(value.bit_generator.state)
        elif isinstance(value, np.random.RandomState):
            self._copy = value.get_state()
        elif (
            isinstance(value, list | tuple | set | deque | dict)
            and len(value) <= _MOST_ITEMS
            and depth <= _DEPTH
        ):
            if isinstance(value, dict):
                self._copy = [
                    (k, _Kept(v, largest, elsewhere, depth + 1)) for k, v in value.items()
                ]
            else:
                self._copy = [_Kept(v, largest, elsewhere, depth + 1) for v in value]

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
        elif isinstance(value, torch.Generator):
            value.set_state(kept)
        elif isinstance(value, random.Random):
            value.setstate(kept)
        elif isinstance(value, np.random.Generator):
            value.bit_generator.state = kept
        elif isinstance(value, np.random.RandomState):
            value.set_state(kept)
        elif isinstance(value, dict):
            before = {k: v.back() for k, v in kept}
            value.clear()
            value.update(before)
        elif isinstance(value, tuple):
            for each in kept:
                each.back()
        else:
            items = [each.back() for each in kept]
            value.clear()
            if isinstance(value, set):
                value.update(items)
            else:
                value.extend(items)
        return value


class _Attributes:
    """An object's attributes: what its methods may count, draw with or collect in.

    Those that came to be meanwhile are deleted. Names with an underscore belong to libraries, as
    torch's modules: of these only plain values, tensors and generators are put back.
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
            name: _Kept(value, largest, elsewhere)
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


def _is_plain(value: Any, depth: int = 0) -> bool:
    if isinstance(value, _PLAIN):
        return True
    if depth > _DEPTH:
        return False
    if isinstance(value, list | tuple | set | frozenset | deque):
        return len(value) <= _MOST_ITEMS and all(_is_plain(v, depth + 1) for v in value)
    if isinstance(value, dict):
        return len(value) <= _MOST_ITEMS and all(
            _is_plain(k, depth + 1) and _is_plain(v, depth + 1) for k, v in value.items()
        )
    return False


def _within(dataset: Any) -> list[Any]:
    """A data set, and those and the transforms that it is made of."""
    found: list[Any] = []
    ahead = [dataset]
    while ahead and len(found) < _MOST_PARTS:
        one = ahead.pop()
        if (
            not hasattr(one, "__dict__")
            or isinstance(one, type | FunctionType | ModuleType)
            or any(one is f for f in found)
        ):
            continue
        found.append(one)
        for name, value in vars(one).items():
            if isinstance(value, Dataset) or name in _PARTS:
                ahead += value if isinstance(value, list | tuple) else [value]
    return found


class _Weights:
    """Parameters, gradients and buffers of a model, and what its modules count."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules: list[tuple[torch.nn.Module, bool]] = []
        self._buffers: list[
            tuple[torch.nn.Module, str, torch.Tensor | None, torch.Tensor | None]
        ] = []
        self._attributes: list[_Attributes] = []
        for module in model.modules():
            self._modules.append((module, module.training))
            self._attributes.append(_Attributes(module))
            for name, b in module._buffers.items():
                self._buffers.append(
                    (module, name, b, None if b is None or b.is_meta else _aside(b))
                )
        self._parameters = [(p, None if p.is_meta else _aside(p)) for p in model.parameters()]
        self._gradients = [
            (p, p.grad, None if p.grad is None else _aside(p.grad), p.requires_grad)
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
        for attributes in self._attributes:
            attributes.put_back()
        for module, training in self._modules:
            module.training = training


class _Moments:
    """An optimizer's state and settings."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._state: dict[Any, dict[str, _Kept]] = {}
        for p, held in optimizer.state.items():
            if isinstance(held, dict):
                self._state[p] = {k: _Kept(v) for k, v in held.items()}
        self._groups = [
            {k: _Kept(v) for k, v in group.items() if k != "params"}
            for group in optimizer.param_groups
        ]
        self._attributes = _Attributes(optimizer, without=("state", "param_groups"))

    def put_back(self) -> None:
        optimizer = self._optimizer
        with torch.no_grad():
            for p in list(optimizer.state):
                if p not in self._state and isinstance(optimizer.state[p], dict):
                    del optimizer.state[p]
            for p, held in self._state.items():
                now = optimizer.state[p]
                for name in [n for n in now if n not in held]:
                    del now[name]
                for name, kept in held.items():
                    now[name] = kept.back()
            for group, settings in zip(optimizer.param_groups, self._groups, strict=True):
                for name in [n for n in group if n != "params" and n not in settings]:
                    del group[name]
                for name, kept in settings.items():
                    group[name] = kept.back()
        self._attributes.put_back()


@contextmanager
def _without_hooks(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """The script's own hooks around optimizer steps are left out: what they change (an average of
    the weights) is nobody's that is known.
    """
    taken = []
    for hooks in (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks):
        before = list(hooks.items())
        for key, hook in before:
            if not str(getattr(hook, "__module__", "")).startswith("ronde."):
                del hooks[key]
        taken.append((hooks, before))
    try:
        yield
    finally:
        for hooks, before in taken:
            hooks.clear()
            cast("dict[int, Any]", hooks).update(before)


@contextmanager
def as_found(run: Run) -> Iterator[None]:
    """Whatever is trained inside, the run is afterwards as it was: weights, optimizer, scheduler,
    randomness, place in the data.

    Kept are the model, a loss that is a module, the optimizer, the scheduler, and the attributes of
    data sets and their transforms, those within them too. What only a closure or a global name
    leads to is not, nor what the script's hooks on modules change; its hooks around optimizer steps
    are left out meanwhile. A copy of weights and moments is held, in the host's memory.

    Args:
        run: between two of its steps; on every worker.
    """
    model = _Weights(run.model)
    moments = _Moments(run.optimizer)
    strategy = run._strategy
    # A strategy lists the model's parameters, which are kept already.
    weights = {id(p) for p in run.model.parameters()}
    attributes = [
        _Attributes(strategy, elsewhere=weights),
        *(_Attributes(part, _MOST_BYTES) for part in _within(run._taken.dataset)),
    ]
    losses = [
        _Weights(f) for f in (run._loss.loss, run._loss.forward) if isinstance(f, torch.nn.Module)
    ]
    untouched = isinstance(strategy, Replicate) and strategy._steps == 0
    scheduler = copy.deepcopy(run.scheduler.state_dict()) if run.scheduler is not None else None
    scheduled = _Attributes(run.scheduler) if run.scheduler is not None else None
    scaler = copy.deepcopy(run._scaler.state_dict()) if run._scaler is not None else None
    state = State(**vars(run.state))
    share, backwards = run._share, run._backwards
    random_states = states()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    accelerators = [torch.cuda.get_rng_state(d) for d in devices]
    threads = torch.get_num_threads()
    try:
        with _without_hooks(run.optimizer):
            yield
    except BaseException:
        # To build DDP anew takes all workers: where this one fails alone, it would wait for the
        # others, and they for it.
        untouched = untouched and run.world_size == 1
        raise
    finally:
        model.put_back()
        for loss in losses:
            loss.put_back()
        moments.put_back()
        for each in attributes:
            each.put_back()
        if run.scheduler is not None and scheduler is not None and scheduled is not None:
            run.scheduler.load_state_dict(scheduler)
            scheduled.put_back()
        if run._scaler is not None and scaler is not None:
            run._scaler.load_state_dict(scaler)
        vars(run.state).update(vars(state))
        run._share, run._backwards = share, backwards
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if untouched and isinstance(strategy, Replicate):
            # DDP orders its buckets by the first backward pass that it sees: a training that has
            # none behind it sees its own.
            strategy._reached = None
            strategy._build()
        restore_states(random_states)
        for d, s in zip(devices, accelerators, strict=True):
            torch.cuda.set_rng_state(s, d)
