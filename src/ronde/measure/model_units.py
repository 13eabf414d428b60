"""Split a model into a chain of units along its module tree, to measure each separately.

A unit is the coarsest module that keeps repeated blocks separate. Code that runs between two units
(glue) belongs to the first of them. The loss is the last unit.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ronde.capture.intercept import calls_heard
from ronde.world.tensors import tensors_in

LOSS = "(loss)"
"""Name of the last unit."""

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class ModelUnit:
    """One unit.

    Attributes:
        name: the module's path in the tree; ``LOSS`` for the loss.
        alike: digest of its structure and of its input shapes without the batch dimension.
        calls: how often one forward pass calls it.
        why_not: why the chain must not be cut after it; empty if it may be.
    """

    name: str
    alike: str = ""
    calls: int = 1
    why_not: str = ""


def structure(module: nn.Module, inputs: str = "") -> str:
    """A digest that is equal for modules of the same classes, settings, parameter shapes, and
    inputs.
    """
    parts = [inputs]
    for name, each in module.named_modules():
        kind = type(each)
        parts.append(f"{name}:{kind.__module__}.{kind.__qualname__}:{each.extra_repr()}")
        tensors = {k: p for k, p in each._parameters.items() if p is not None}
        parts += [f"{k}={tuple(p.shape)}{p.dtype}{p.requires_grad}" for k, p in tensors.items()]
        buffers = {k: b for k, b in each._buffers.items() if b is not None}
        parts += [f"{k}={tuple(b.shape)}{b.dtype}" for k, b in buffers.items()]
        # A layer's own number differs, and its work does not.
        parts += [
            f"{k}={v!r}"
            for k, v in vars(each).items()
            if isinstance(v, int | float | str)
            and not (k.startswith("_") or k == "training" or "idx" in k or "index" in k)
        ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _repeats(module: nn.Module) -> bool:
    """Whether it contains a list with blocks of equal structure."""
    for each in module.modules():
        if isinstance(each, _CONTAINERS):
            blocks = [
                structure(child) for child in each.children() if any(True for _ in child.children())
            ]
            if len(blocks) > len(set(blocks)):
                return True
    return False


def find_chain(model: nn.Module, run: Callable[[], None]) -> list[ModelUnit]:
    """The units of a model in the order in which one forward pass and loss call them."""
    modules = dict(model.named_modules())
    heard: list[tuple[str, str]] = []

    def note(name: str, args: Any, kwargs: Any) -> None:
        inputs = tensors_in((args, kwargs), attributes=True)
        heard.append((name, repr([(tuple(t.shape[1:]), t.dtype) for t in inputs])))

    with calls_heard(modules, note):
        run()
    last = {name: time for time, (name, _) in enumerate(heard)}
    first = {name: len(heard) - 1 - time for time, (name, _) in enumerate(reversed(heard))}
    names = {module: name for name, module in modules.items()}
    called = {modules[name] for name in first}
    calls = Counter(name for name, _ in heard)
    units: list[str] = []

    def expand(module: nn.Module) -> None:
        inner = any(child in called for child in module.modules() if child is not module)
        whole = module is not model and not isinstance(module, _CONTAINERS) and not _repeats(module)
        if module in called and (whole or not inner):
            if names[module] not in units:
                units.append(names[module])
        elif inner:
            for child in module.children():
                expand(child)

    expand(model)
    units.sort(key=first.__getitem__)
    chain = []
    for i, name in enumerate(units):
        why = "the loss stays with the last module"
        if i + 1 < len(units):
            # A module with weights that is called again later ties everything in between.
            end = first[units[i + 1]]
            ties = [
                n
                for n in units[: i + 1]
                if last[n] > end and any(True for _ in modules[n].parameters())
            ]
            why = f"{ties[0]!r} runs again later" if ties else ""
        alike = structure(modules[name], heard[first[name]][1])
        chain.append(ModelUnit(name, alike, calls[name], why))
    return [*chain, ModelUnit(LOSS, LOSS)]


class UnitProbe:
    """Reports which unit is running, in the forward and in the backward pass.

    Args:
        model: the module that the chain was found on, or a copy of it.
        chain: its units.
        mark: called with the index of the unit that starts, and the phase: ``"in"`` and ``"out"``
            of its forward pass, ``"back"`` when the gradient of its output is complete.
    """

    def __init__(
        self, model: nn.Module, chain: Sequence[ModelUnit], mark: Callable[[int, str], None]
    ) -> None:
        self._mark = mark
        self._forward = True
        self._without_grad: set[str] = set()
        modules = dict(model.named_modules(remove_duplicate=False))
        self._index = {unit.name: i for i, unit in enumerate(chain) if unit.name in modules}
        self._modules = {name: modules[name] for name in self._index}

    def listening(self) -> contextlib.AbstractContextManager[None]:
        """Report while this is entered."""
        return calls_heard(self._modules, self._begin, self._end)

    def _begin(self, name: str, _: Any, __: Any) -> None:
        if self._forward:
            if not torch.is_grad_enabled():
                self._without_grad.add(name)
            self._mark(self._index[name], "in")
        elif name in self._without_grad:
            self._mark(self._index[name], "back")

    def _end(self, name: str, _: Any, output: Any) -> None:
        if self._forward:
            self._mark(self._index[name], "out")
        # A reentrant checkpoint has a graph only when its block runs again in the backward pass.
        # Other blocks that run again then have one already.
        if self._forward or name in self._without_grad:
            for tensor in tensors_in(output, attributes=True):
                if tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(lambda _: self._mark(self._index[name], "back"))

    def step(
        self,
        compute: Any,
        model: nn.Module,
        batch: Any,
        last: int,
        between: Callable[[], None] | None = None,
        autocast: Callable[[], Any] = contextlib.nullcontext,
    ) -> None:
        """Forward, loss and backward of one micro-batch, inside :meth:`listening`; ``last`` is the
        loss's index. ``between`` is called after the forward pass.
        """
        self._forward = True
        with autocast():
            values = compute.arguments(model, batch)
            self._mark(last, "in")
            loss, _ = compute.check(compute.loss(*values))
            del values
        self._mark(last, "out")
        if between is not None:
            between()
        self._forward = False
        if loss.requires_grad:
            self._mark(last, "back")
            loss.backward()
