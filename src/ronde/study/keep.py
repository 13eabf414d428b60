"""A run as it was before it was measured: everything that a step changes is kept, and put back bit by bit."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ronde.feed.randomness import restore_states, states
from ronde.parallel.replicate import Replicate
from ronde.run.run import State

if TYPE_CHECKING:
    from ronde.run.run import Run

__all__ = ["as_found"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_MISSING = object()
_MOST_ITEMS = 100_000  # of a list that a module or a data set holds: longer ones are data


def _aside(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that takes no memory of an accelerator."""
    value = tensor.detach()
    return value.clone() if value.device.type == "cpu" else value.cpu()


def _put_back(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Bring a tensor's values back, in place; one that has not changed is not written, a graph may have saved it."""
    now = tensor.detach()
    if now.device.type != "cpu" or not _same_bits(now, value):
        now.copy_(value)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if type(a) is not torch.Tensor or type(b) is not torch.Tensor or a.layout != torch.strided or a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.numel():
        return True
    flat = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return torch.equal(*flat)


def _is_plain(value: Any, depth: int = 0) -> bool:
    if isinstance(value, _PLAIN):
        return True
    if depth > 3:
        return False
    if isinstance(value, list | tuple | set | frozenset | deque):
        return len(value) <= _MOST_ITEMS and all(_is_plain(v, depth + 1) for v in value)
    if isinstance(value, dict):
        return len(value) <= _MOST_ITEMS and all(_is_plain(k, depth + 1) and _is_plain(v, depth + 1) for k, v in value.items())
    return False


class _Attributes:
    """An object's plain attributes, tensors and generators: what its methods may count or draw with."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._values: dict[str, Any] = {}
        self._tensors: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        self._drawn: list[tuple[Any, Any]] = []
        for name, value in list(getattr(owner, "__dict__", {}).items()):
            if isinstance(value, torch.Tensor):
                if not value.is_meta and value.layout == torch.strided:
                    self._tensors.append((name, value, _aside(value)))
            elif isinstance(value, torch.Generator):
                self._drawn.append((value, value.get_state()))
            elif isinstance(value, random.Random):
                self._drawn.append((value, value.getstate()))
            elif isinstance(value, np.random.Generator):
                self._drawn.append((value, copy.deepcopy(value.bit_generator.state)))
            elif _is_plain(value):
                self._values[name] = copy.deepcopy(value)

    def put_back(self) -> None:
        own = self._owner.__dict__
        for name, value in self._values.items():
            now = own.get(name, _MISSING)
            if type(now) is not type(value) or now != value:
                own[name] = value
        with torch.no_grad():
            for name, tensor, value in self._tensors:
                _put_back(tensor, value)
                own[name] = tensor
        for generator, state in self._drawn:
            if isinstance(generator, torch.Generator):
                generator.set_state(state)
            elif isinstance(generator, random.Random):
                generator.setstate(state)
            else:
                generator.bit_generator.state = state


class _Weights:
    """Parameters, gradients and buffers of a model, and what its modules count."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules: list[tuple[torch.nn.Module, bool]] = []
        self._buffers: list[tuple[torch.nn.Module, str, torch.Tensor | None, torch.Tensor | None]] = []
        self._attributes: list[_Attributes] = []
        for module in model.modules():
            self._modules.append((module, module.training))
            self._attributes.append(_Attributes(module))
            for name, b in module._buffers.items():
                self._buffers.append((module, name, b, None if b is None or b.is_meta else _aside(b)))
        self._parameters = [(p, None if p.is_meta else _aside(p)) for p in model.parameters()]
        self._gradients = [(p, p.grad, None if p.grad is None else _aside(p.grad), p.requires_grad) for p in model.parameters()]

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
        self._state: dict[Any, dict[str, Any]] = {}
        for p, held in optimizer.state.items():
            if isinstance(held, dict):
                self._state[p] = {
                    k: (v, _aside(v)) if isinstance(v, torch.Tensor) else (v, copy.deepcopy(v) if _is_plain(v) else v)
                    for k, v in held.items()
                }
        self._groups = [
            {k: (v, _aside(v)) if isinstance(v, torch.Tensor) else (v, None) for k, v in group.items() if k != "params"}
            for group in optimizer.param_groups
        ]
        self._attributes = _Attributes(optimizer)

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
                for name, (value, copied) in held.items():
                    if isinstance(value, torch.Tensor):
                        value.detach().copy_(copied)
                        now[name] = value
                    else:
                        now[name] = copied
            for group, kept in zip(optimizer.param_groups, self._groups, strict=True):
                for name in [n for n in group if n != "params" and n not in kept]:
                    del group[name]
                for name, (value, copied) in kept.items():
                    if copied is not None:
                        value.detach().copy_(copied)
                    group[name] = value
        self._attributes.put_back()


@contextmanager
def as_found(run: Run) -> Iterator[None]:
    """Whatever is trained inside, the run is afterwards as it was: weights, optimizer, scheduler, randomness, place in the data.

    What holds no values of its own (a data set's open files, a cache that a data set fills) is left as it comes out. A copy of weights and
    moments is held meanwhile, in the host's memory.

    Args:
        run: between two of its steps; on every worker.
    """
    model = _Weights(run.model)
    moments = _Moments(run.optimizer)
    strategy = run._strategy
    attributes = [_Attributes(strategy), _Attributes(run._taken.dataset)]
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
        yield
    finally:
        model.put_back()
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
            # DDP orders its buckets by the first backward pass that it sees: a training that has none behind it sees its own.
            strategy._reached = None
            strategy._build()
        restore_states(random_states)
        for d, s in zip(devices, accelerators, strict=True):
            torch.cuda.set_rng_state(s, d)
