"""Random numbers of a step on several workers, and the script's own after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ronde.world import World

__all__ = ["reseeding", "seed_step"]


def seed_step(device: torch.device, key: int) -> None:
    """Seed the CPU's generator and this worker's device."""
    # torch.manual_seed formats a stack trace for devices that are not there: 300 µs a step.
    torch.default_generator.manual_seed(key)
    if device.type == "cuda":
        torch.cuda.manual_seed(key)


@contextmanager
def reseeding(me: World) -> Iterator[None]:
    """Steps inside are seeded; the script's draws afterwards are the same for any world size."""
    if me.size == 1:
        yield
        return
    before = torch.default_generator.get_state()
    device_state = torch.cuda.get_rng_state(me.device) if me.device.type == "cuda" else None
    try:
        yield
    finally:
        torch.default_generator.set_state(before)
        if device_state is not None:
            torch.cuda.set_rng_state(device_state, me.device)
