"""The script's hooks on gradients of parameters, run once a step on the gradients of the whole
batch: as in one process, whatever they compute.

Within a backward pass of several workers or micro-batches they would see a part of the gradient,
where clamping, signs and norms are something else.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

__all__ = ["GradientHooks"]

_OWN = ("ronde.parallel.", "ronde.prove.")
_register = torch.Tensor.register_hook
_on_activations: list[str] = []  # where the script hooked one


@functools.wraps(_register)
def _register_hook(tensor: torch.Tensor, hook: Any) -> Any:
    """``Tensor.register_hook``, which notes hooks of scripts on what a forward pass computes."""
    if tensor.grad_fn is not None and not _on_activations:
        module = str(getattr(getattr(hook, "func", hook), "__module__", ""))
        if not module.startswith(("torch.", "ronde.")):
            caller = sys._getframe(1)
            _on_activations.append(f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno}")
    return _register(tensor, hook)  # type: ignore[no-untyped-call]


torch.Tensor.register_hook = _register_hook  # type: ignore[method-assign]


def _of_script(hooks: dict[Any, Any] | None) -> dict[Any, Any]:
    items = hooks.items() if hooks else ()
    return {k: h for k, h in items if not str(getattr(h, "__module__", "")).startswith(_OWN)}


class GradientHooks:
    """Holds the script's hooks back in backward passes, and calls them after the exchange."""

    def __init__(self) -> None:
        self._hooked: dict[nn.Parameter, None] = {}
        self._divided = self._reported = False
        _on_activations.clear()  # of an earlier training

    @contextmanager
    def held(self, parameters: Sequence[Any]) -> Iterator[None]:
        """A context in which backward passes do not call them."""
        self._divided = True
        hooked = [p for p in parameters if p._backward_hooks or p._post_accumulate_grad_hooks]
        self._hooked.update(dict.fromkeys(hooked))
        live = [h for p in hooked for h in (p._backward_hooks, p._post_accumulate_grad_hooks) if h]
        held = [(hooks, _of_script(hooks)) for hooks in live]
        try:
            for hooks, theirs in held:
                for key in theirs:
                    del hooks[key]
            yield
        finally:
            for hooks, theirs in held:
                hooks.update(theirs)

    @torch.no_grad()
    def run(self) -> None:
        """Call those that were held, on the averaged gradients."""
        for p in self._hooked:
            for hook in _of_script(p._backward_hooks).values():
                if p.grad is not None and (changed := hook(p.grad)) is not None:
                    p.grad = changed
            for hook in _of_script(p._post_accumulate_grad_hooks).values():  # type: ignore[attr-defined]
                if p.grad is not None:
                    hook(p)
        self._hooked.clear()

    def report(self, model: nn.Module) -> str:
        """A warning if hooks on gradients of activations see a part of the batch; else empty."""
        named = model.named_modules()
        modules = [n for n, m in named if m._backward_hooks or m._backward_pre_hooks]
        if self._reported or not self._divided or not (modules or _on_activations):
            return ""
        self._reported = True
        where = f"of {modules[0] or 'the model'!r}" if modules else f"at {_on_activations[0]}"
        return (
            f"the backward hook {where} sees the gradients of a part of the batch, and not on the "
            "scale of one process: unless it only reads them or multiplies them by constants, "
            "another number of workers is another training. A hook on a parameter "
            "(parameter.register_hook) sees the averaged gradient, and clip_norm= clips it"
        )
