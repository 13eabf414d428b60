"""Split a model into a chain of units along its module tree, to measure each separately.

A unit is the coarsest module that keeps repeated blocks separate. Code that runs between two units
(glue) belongs to the first of them. The loss is the last unit.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from ronde.capture import compiled
from ronde.introspect import restore_states, states
from ronde.world import ArgumentError
from ronde.world.tensors import is_named_tuple, map_leaves, tensors_in

__all__ = [
    "LOSS",
    "ModelUnit",
    "UnitProbe",
    "find_chain",
    "standing_in",
    "structure",
    "take",
    "untouched",
]

LOSS = "(loss)"
"""Name of the last unit."""

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class ModelUnit:
    """One unit.

    Attributes:
        name: the module's path in the tree; ``LOSS`` for the loss.
        alike: digest of its structure and of the shapes that it is called with, without the batch
            dimension.
        calls: how often one forward pass calls it.
        why_not: why the chain must not be cut after it; empty where it may.
    """

    name: str
    alike: str = ""
    calls: int = 1
    why_not: str = ""


def take(batch: Any, samples: int, of: int) -> Any:
    """The first ``samples`` of a batch ``of`` so many: of everything in it that has that length.

    Raises:
        ArgumentError: nothing in it has.
    """
    found = False

    def counts(value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            return value.dim() > 0 and value.shape[0] == of
        listed = isinstance(value, list | tuple) and not is_named_tuple(value) and len(value) == of
        return listed and not any(isinstance(v, torch.Tensor) and counts(v) for v in value)

    def cut(value: Any) -> Any:
        nonlocal found
        if not counts(value):
            return value
        found = True
        return value[:samples].clone() if isinstance(value, torch.Tensor) else value[:samples]

    result = map_leaves(cut, batch, leaf=counts)
    if not found and samples != of:
        raise ArgumentError(
            f"nothing in a batch of {of} samples has length {of}: give a function that "
            "makes a micro-batch of n samples."
        )
    return result


def structure(module: nn.Module) -> str:
    """Equal for modules of the same classes, settings and parameter shapes."""
    parts: list[str] = []
    for name, each in module.named_modules():
        parts.append(
            f"{name}:{type(each).__module__}.{type(each).__qualname__}:{each.extra_repr()}"
        )
        parts += [
            f"{k}={tuple(p.shape)}{p.dtype}{p.requires_grad}"
            for k, p in each._parameters.items()
            if p is not None
        ]
        parts += [
            f"{k}={tuple(b.shape)}{b.dtype}" for k, b in each._buffers.items() if b is not None
        ]
        parts += [
            f"{k}={v!r}"
            for k, v in vars(each).items()
            if isinstance(v, int | float | str)
            and not k.startswith("_")
            and k != "training"
            and "idx" not in k
            and "index" not in k
        ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _repeats(module: nn.Module) -> bool:
    """Whether a list of blocks of equal structure lies inside."""
    for each in module.modules():
        if isinstance(each, _CONTAINERS):
            blocks = [
                structure(child) for child in each.children() if any(True for _ in child.children())
            ]
            if len(blocks) > len(set(blocks)):
                return True
    return False


def find_chain(model: nn.Module, run: Callable[[], None]) -> list[ModelUnit]:
    """The units of a model in the order in which ``run()``, one forward pass and loss, calls
    them.
    """
    # one of each, by its first name
    names = {module: name for name, module in model.named_modules()}
    first: dict[nn.Module, int] = {}
    last: dict[nn.Module, int] = {}
    calls: dict[nn.Module, int] = {}
    shapes: dict[nn.Module, str] = {}
    time = 0

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal time
        time += 1
        first.setdefault(module, time)
        last[module] = time
        calls[module] = calls.get(module, 0) + 1
        shapes.setdefault(
            module,
            repr(
                [(tuple(t.shape[1:]), t.dtype) for t in tensors_in((args, kwargs), attributes=True)]
            ),
        )

    handles = [m.register_forward_pre_hook(note, with_kwargs=True) for m in names]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()

    units: list[nn.Module] = []

    def expand(module: nn.Module) -> None:
        inner = any(child in first for child in module.modules() if child is not module)
        whole = module is not model and not isinstance(module, _CONTAINERS) and not _repeats(module)
        if module in first and (whole or not inner):
            if module not in units:
                units.append(module)
        elif inner:
            for child in module.children():
                expand(child)

    expand(model)
    units.sort(key=lambda m: first[m])
    links = []
    for i, module in enumerate(units):
        # One with weights that is called again later holds together all that runs in between.
        again = [
            m
            for m in units[: i + 1]
            if last[m] > first[module] and (m is not module or i + 1 < len(units))
        ]
        held = [
            m
            for m in again
            if any(True for _ in m.parameters())
            and i + 1 < len(units)
            and last[m] > first[units[i + 1]]
        ]
        why = f"{names[held[0]]!r} runs again later" if held else ""
        if i + 1 == len(units):
            why = "the loss stays with the last module"
        links.append(
            ModelUnit(
                names[module],
                f"{structure(module)}-{hashlib.sha256(shapes[module].encode()).hexdigest()[:8]}",
                calls[module],
                why,
            )
        )
    return [*links, ModelUnit(LOSS, LOSS)]


class UnitProbe:
    """Tells which unit is at work, in the forward and in the backward pass.

    Args:
        model: the module that the chain was found on, or a copy of it.
        chain: its units.
        tell: called with the index of the unit that begins, and the phase: ``"in"`` and ``"out"``
            of its forward pass, ``"back"`` as the gradient of what it returned is complete.
    """

    def __init__(
        self, model: nn.Module, chain: Sequence[ModelUnit], tell: Callable[[int, str], None]
    ) -> None:
        self._tell = tell
        self._handles: list[Any] = []
        self._forward = True
        modules = dict(model.named_modules(remove_duplicate=False))
        for index, link in enumerate(chain):
            if link.name == LOSS:
                continue
            module = modules[link.name]
            self._handles.append(module.register_forward_pre_hook(self._begin(index)))
            self._handles.append(module.register_forward_hook(self._end(index)))

    def _begin(self, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            if self._forward:
                self._tell(index, "in")

        return hook

    def _end(self, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if not self._forward:
                return  # recomputed within the backward pass
            self._tell(index, "out")
            for tensor in tensors_in(output, attributes=True):
                if tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(lambda _: self._tell(index, "back"))

        return hook

    def step(
        self,
        compute: Any,
        model: nn.Module,
        batch: Any,
        last: int,
        between: Callable[[], None] | None = None,
        autocast: Callable[[], Any] = contextlib.nullcontext,
    ) -> None:
        """Forward, loss and backward of one micro-batch; ``last`` is the loss's index. ``between``
        is called after the forward pass.
        """
        self._forward = True
        with autocast():
            values = compute.arguments(model, batch)
            self._tell(last, "in")
            loss, _ = compute.check(compute.loss(*values))
            del values
        self._tell(last, "out")
        if between is not None:
            between()
        self._forward = False
        if loss.requires_grad:
            self._tell(last, "back")
            loss.backward()
        self._forward = True

    def close(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()


def refers_to(compute: Any, model: nn.Module) -> bool:
    """Whether the script's loss or forward function looks at the model, or a part of it, by itself:
    at what a forward pass left there, say.

    Args:
        compute: a LossCall.
    """
    modules = set(model.modules())

    def refers(value: Any, depth: int) -> bool:
        if isinstance(value, nn.Module):
            return not modules.isdisjoint(value.modules())
        if isinstance(value, functools.partial):
            return any(
                refers(v, depth) for v in (value.func, *value.args, *value.keywords.values())
            )
        if isinstance(value, types.MethodType):
            return refers(value.__self__, depth) or refers(value.__func__, depth)
        if not isinstance(value, types.FunctionType) or depth > 3:
            return False
        known = [value.__globals__[n] for n in _names_in(value.__code__) if n in value.__globals__]
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # not bound yet
                known.append(cell.cell_contents)
        return any(refers(v, depth + 1) for v in known if v is not value)

    return any(
        refers(function, 0)
        for function in (getattr(compute, "loss", None), getattr(compute, "forward", None))
    )


def _names_in(code: types.CodeType) -> set[str]:
    """Global names that a function's code, or that of functions in it, uses."""
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return set(code.co_names).union(*map(_names_in, inner))


@contextlib.contextmanager
def standing_in(
    model: nn.Module, make: Callable[[torch.Tensor], torch.Tensor], itself: bool = False
) -> Iterator[tuple[nn.Module, dict[int, torch.Tensor]]]:
    """A copy of a model whose parameters, buffers and kept tensors are what ``make`` gives for
    each; tied ones stay tied.

    A model that cannot be copied stands in for itself, with its tensors exchanged for the time
    being.

    Args:
        itself: the model must not be copied: something else looks at it.

    Yields:
        The stand-in, and id of the model's tensor -> the stand-in's.
    """
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(make(parameter), parameter.requires_grad)
        for value in (*module._buffers.values(), *vars(module).values()):
            if isinstance(value, torch.Tensor) and id(value) not in made:
                made[id(value)] = make(value)
    try:
        stand_in = model if itself else copy.deepcopy(model, dict(made))  # type: ignore[arg-type]
    except Exception:
        stand_in = model
    if stand_in is not model:
        yield stand_in, made
        return
    before = [
        (module, dict(vars(module)), dict(module._parameters), dict(module._buffers))
        for module in model.modules()
    ]
    try:
        for module, values, parameters, buffers in before:
            module._parameters.update(
                {k: cast(nn.Parameter, made[id(p)]) for k, p in parameters.items() if p is not None}
            )
            module._buffers.update({k: made[id(b)] for k, b in buffers.items() if b is not None})
            vars(module).update(
                {k: made[id(v)] for k, v in values.items() if isinstance(v, torch.Tensor)}
            )
        yield model, made
    finally:
        for module, values, parameters, buffers in before:
            vars(module).clear()
            vars(module).update(values)
            module._parameters.clear()
            module._parameters.update(parameters)
            module._buffers.clear()
            module._buffers.update(buffers)


@dataclass
class _Kept:
    """What :func:`untouched` puts back."""

    training: list[tuple[nn.Module, bool]] = field(default_factory=list)
    gradients: list[tuple[nn.Parameter, torch.Tensor | None, bool]] = field(default_factory=list)
    buffers: list[tuple[nn.Module, str, torch.Tensor | None, torch.Tensor | None]] = field(
        default_factory=list
    )


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Whatever happens inside, gradients, buffers, flags and all states of randomness are
    afterwards as before, bit by bit.
    """
    kept = _Kept()
    for module in model.modules():
        kept.training.append((module, module.training))
        kept.buffers += [
            (module, k, b, None if b is None or b.is_meta else b.detach().clone())
            for k, b in module._buffers.items()
        ]
    kept.gradients = [(p, p.grad, p.requires_grad) for p in model.parameters()]
    for p in model.parameters():
        p.grad = None
    random = states()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    accelerators = [torch.cuda.get_rng_state(d) for d in devices]
    threads, grad = torch.get_num_threads(), torch.is_grad_enabled()
    try:
        # What was compiled would be compiled anew for the hooks that look on, if it can be at all.
        with (
            torch.compiler.set_stance("force_eager")
            if any(map(compiled, model.modules()))
            else contextlib.nullcontext()
        ):
            yield
    finally:
        torch.set_grad_enabled(grad)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        restore_states(random)
        for d, state in zip(devices, accelerators, strict=True):
            torch.cuda.set_rng_state(state, d)
        for module, training in kept.training:
            module.training = training
        for parameter, gradient, requires in kept.gradients:
            parameter.grad = gradient
            if parameter.requires_grad != requires:
                parameter.requires_grad_(requires)
        with torch.no_grad():
            for module, name, buffer, value in kept.buffers:
                # Only what changed: writing raises the version of a tensor that a graph may have
                # saved.
                if buffer is not None and value is not None and not _same(buffer, value):
                    buffer.copy_(value)
                module._buffers[name] = buffer


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape:
        return False
    flat = [
        t.detach().contiguous().reshape(-1).view(torch.uint8) if t.numel() else t for t in (a, b)
    ]
    return torch.equal(*flat)
