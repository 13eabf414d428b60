"""Keep optimizer state in host memory between steps (ZeRO-Offload, Ren et al. 2021).

Not yet run on a GPU: no documented figure rests on it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from ronde.parallel.strategy import Work
from ronde.plan import Plan
from ronde.world import ArgumentError, World

__all__ = ["apply"]


def _moved(value: Any, device: torch.device | None) -> Any:
    """A tensor on ``device``, or pinned on the host if None. Steps and other 0-d counters stay."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    if device is not None:
        return value.to(device, non_blocking=True)
    # a DTensor cannot be pinned from outside: it waits in plain memory
    if hasattr(value, "to_local"):
        return value.to("cpu")
    host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
    return host.copy_(value, non_blocking=True)


def _offload_state(optimizer: Optimizer, device: torch.device) -> None:
    """Keep the optimizer's state on the device only during its step."""

    def move(to: torch.device | None) -> None:
        for state in optimizer.state.values():
            state.update({name: _moved(value, to) for name, value in state.items()})

    def fetch(*_: Any) -> None:
        move(device)

    def put_back(*_: Any) -> None:
        move(None)
        torch.cuda.current_stream(device).synchronize()  # the device's copies are freed after this

    optimizer.register_step_pre_hook(fetch)
    optimizer.register_step_post_hook(put_back)


def apply(plan: Plan, work: Work, me: World) -> None:
    """Set up ``plan.offload`` for the optimizer; the sharding strategy offloads parameters.

    Raises:
        ArgumentError: there is nothing to offload to, or nothing that could be.
    """
    if plan.offload == "none":
        return
    if me.device.type == "cpu":
        raise ArgumentError(
            f"offload={plan.offload!r}: this worker trains on the CPU, whose memory is already "
            "the host's: there is nothing to offload to. Remove offload."
        )
    if plan.offload == "parameters":
        if plan.shard not in ("gradients", "parameters"):
            needs = "shard='gradients' or 'parameters'"
            raise ArgumentError(f"offload='parameters' needs {needs}, found {plan.shard!r}.")
        return  # FSDP2's CPUOffloadPolicy moves parameters and gradients; the optimizer follows
    _offload_state(work.optimizer, me.device)
