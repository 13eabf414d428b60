"""What a strategy is: how one plan carries out forward, backward and exchange."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.autograd.graph import _engine_run_backward  # type: ignore[attr-defined]

__all__ = ["Compute", "Flags", "Part", "Strategy", "backward", "scale_gradients", "trainable"]

Compute = Callable[[], tuple[torch.Tensor, torch.Tensor | None]]
"""Runs forward and loss on one micro-batch: ``(mean, None)`` over its samples, or ``(sum, weight)``."""


@dataclass(frozen=True, slots=True)
class Part:
    """A micro-batch's place in its global batch.

    Attributes:
        samples: samples of this micro-batch; 0 if the worker only takes part in the exchange.
        global_samples: samples of the global batch, over all workers.
        last: whether it is this worker's last micro-batch of the step.
    """

    samples: int
    global_samples: int
    last: bool


class Strategy(Protocol):
    """One plan carried out on one model.

    Attributes:
        local_loss: this worker's own part of the last step's loss, None if it had no samples.
        parameters: those that take gradients.
    """

    local_loss: torch.Tensor | None
    parameters: list[torch.nn.Parameter]

    def micro(self, compute: Compute | None, part: Part, scale: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
        """Forward and backward of one micro-batch. ``scale`` multiplies the loss for half-precision gradients."""

    def finish(self) -> torch.Tensor:
        """Complete the exchange: gradients are those of the global mean. Returns the global loss, 0-d, on every rank."""

    def start_epoch(self) -> None:
        """Bring buffers that drifted apart together."""

    def before_batch(self, present: bool) -> None:
        """Before the script sees a batch: no forward pass of its step has run. ``present``: its first micro-batch has samples."""

    def refresh(self) -> bool:
        """Take note of parameters that were frozen, thawed or replaced. Returns whether any were."""

    def expect(self, present: bool) -> None:
        """The next forward pass, which the script runs by itself, has samples or is of a stand-in."""

    def sync_buffers(self) -> None:
        """Give every rank the buffers of rank 0."""


class Flags:
    """Which parameters there are and which take gradients, to see cheaply whether that has changed."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._parameters = list(model.parameters())
        self._flags = [p.requires_grad for p in self._parameters]

    def changed(self) -> bool:
        """Whether one was frozen or thawed."""
        return [p.requires_grad for p in self._parameters] != self._flags


def trainable(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Parameters that take gradients, each once, by the name it has first."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def backward(roots: tuple[torch.Tensor, ...], gradients: tuple[torch.Tensor, ...]) -> None:
    """``torch.autograd.backward`` without its checks, 20 µs a call: the shapes are known to match here."""
    _engine_run_backward(roots, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True)


def scale_gradients(parameters: list[torch.nn.Parameter], factor: torch.Tensor) -> None:
    """Multiply all gradients by a 0-d tensor, in place."""
    dense = [p.grad for p in parameters if p.grad is not None and not p.grad.is_sparse]
    if dense:
        torch._foreach_mul_(dense, factor.to(dense[0].dtype) if all(g.dtype == dense[0].dtype for g in dense) else factor)
    for p in parameters:
        if p.grad is not None and p.grad.is_sparse:
            p.grad.mul_(factor)
