"""The script's hooks on gradients of parameters, run once a step on the gradients of the whole
batch: as in one process, whatever they compute.

Within a backward pass of several workers or micro-batches they would see a part of the gradient,
where clamping, signs and norms are something else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

__all__ = ["NOTHING", "GradientHooks"]

_OWN = ("ronde.parallel.", "ronde.prove.")
NOTHING: AbstractContextManager[None] = nullcontext()


def _of_script(hooks: dict[Any, Any] | None) -> dict[Any, Any]:
    items = hooks.items() if hooks else ()
    return {k: h for k, h in items if not str(getattr(h, "__module__", "")).startswith(_OWN)}


class GradientHooks:
    """Holds the script's hooks back in backward passes, and calls them after the exchange."""

    def __init__(self) -> None:
        self._hooked: dict[nn.Parameter, None] = {}

    def held(self, parameters: Sequence[Any]) -> AbstractContextManager[None]:
        """A context in which backward passes do not call them."""
        hooked = [p for p in parameters if p._backward_hooks or p._post_accumulate_grad_hooks]
        return self._held(hooked) if hooked else NOTHING

    @contextmanager
    def _held(self, hooked: list[Any]) -> Iterator[None]:
        self._hooked.update(dict.fromkeys(hooked))
        live = [h for p in hooked for h in (p._backward_hooks, p._post_accumulate_grad_hooks) if h]
        held = [(hooks, _of_script(hooks)) for hooks in live]
        try:
            for hooks, theirs in held:
                for key in theirs:
                    del hooks[key]
            yield
        except BaseException:
            self._hooked.clear()
            raise
        finally:
            for hooks, theirs in held:
                hooks.update(theirs)

    def run(self) -> None:
        """Call those that were held, on the averaged gradients."""
        if self._hooked:
            self._run()

    @torch.no_grad()
    def _run(self) -> None:
        for p in self._hooked:
            for hook in _of_script(p._backward_hooks).values():
                if p.grad is not None and (changed := hook(p.grad)) is not None:
                    p.grad = changed
            for hook in _of_script(p._post_accumulate_grad_hooks).values():  # type: ignore[attr-defined]
                if p.grad is not None:
                    hook(p)
        self._hooked.clear()
