"""Run a copy of the script's model, and leave the script's objects as they were."""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import nn

from ronde.capture import compiled
from ronde.introspect import SavedState


def tensor_maker(fake: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that makes a fake tensor, or a copy, of a real one.

    The fake mode is not entered: results of the batch and constants alone (masks, lengths) keep
    their values, so that a model may read them. Whatever meets a parameter is fake.
    """
    if not fake:
        return lambda tensor: tensor.detach().clone()
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def make(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim() and tensor.device.type == "cpu":
            return tensor.detach().clone()  # an optimizer reads its step count
        return cast(torch.Tensor, mode.from_tensor(tensor.detach(), static_shapes=True))

    return make


def refers_to(compute: Any, model: nn.Module) -> bool:
    """Whether the script's loss or forward function (of a LossCall) uses the model, or a part of
    it, directly, such as for activations that a forward pass left there.
    """
    modules = set(model.modules())

    def refers(value: Any, depth: int) -> bool:
        if isinstance(value, nn.Module):
            return not modules.isdisjoint(value.modules())
        if isinstance(value, functools.partial):
            inner = (value.func, *value.args, *value.keywords.values())
            return any(refers(v, depth) for v in inner)
        if isinstance(value, types.MethodType):
            return refers(value.__self__, depth) or refers(value.__func__, depth)
        if not isinstance(value, types.FunctionType) or depth > 3:
            return False
        known = [value.__globals__[n] for n in _names_in(value.__code__) if n in value.__globals__]
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # not bound yet
                known.append(cell.cell_contents)
        return any(refers(v, depth + 1) for v in known if v is not value)

    return any(refers(getattr(compute, name, None), 0) for name in ("loss", "forward"))


def _names_in(code: types.CodeType) -> set[str]:
    """Global names in a function's code, nested functions included."""
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return set(code.co_names).union(*map(_names_in, inner))


@contextlib.contextmanager
def standing_in(
    model: nn.Module, make: Callable[[torch.Tensor], torch.Tensor], itself: bool = False
) -> Iterator[tuple[nn.Module, dict[int, torch.Tensor]]]:
    """A copy of a model whose parameters, buffers and tensor attributes come from ``make``. Tied
    tensors stay tied. A model that cannot be copied gets the new tensors itself, for the time.

    Args:
        itself: do not copy the model, because other code uses it.

    Yields:
        The stand-in, and id of the model's tensor -> the stand-in's.
    """
    copies: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in copies:
                copies[id(parameter)] = nn.Parameter(make(parameter), parameter.requires_grad)
        for value in (*module._buffers.values(), *vars(module).values()):
            if isinstance(value, torch.Tensor) and id(value) not in copies:
                copies[id(value)] = make(value)
    try:
        stand_in = model if itself else copy.deepcopy(model, dict(copies))  # type: ignore[arg-type]
    except Exception:
        stand_in = model
    if stand_in is not model:
        yield stand_in, copies
        return
    before: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (content, dict(content))
        for module in model.modules()
        for content in (vars(module), module._parameters, module._buffers)
    ]
    try:
        for content, values in before:
            tensors = {k: v for k, v in values.items() if isinstance(v, torch.Tensor)}
            content.update({k: copies[id(v)] for k, v in tensors.items()})
        yield model, copies
    finally:
        for content, values in before:
            content.clear()
            content.update(values)


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Puts the model, its gradients, and all random states back at the end, bit by bit."""
    before, grad = SavedState(model), torch.is_grad_enabled()
    for p in model.parameters():
        p.grad = None
    # Hooks would make torch.compile compile again, if it can at all.
    eager = any(map(compiled, model.modules()))
    try:
        with torch.compiler.set_stance("force_eager") if eager else contextlib.nullcontext():
            yield
    finally:
        torch.set_grad_enabled(grad)
        before.restore()
