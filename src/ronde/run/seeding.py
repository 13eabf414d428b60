"""Seeds of a step's random numbers, and the script's own numbers after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["reseeding", "seed_step"]


def seed_step(device: torch.device, key: int) -> None:
    """Seed the CPU's generator and this worker's device."""
    # torch.manual_seed formats a stack trace for devices that are not there: 300 µs a step.
    torch.default_generator.manual_seed(key)
    if device.type == "cuda":
        torch.cuda.manual_seed(key)


@contextmanager
def reseeding(device: torch.device) -> Iterator[None]:
    """Steps inside are seeded; the script's draws afterwards are the same for any world size."""
    before = torch.default_generator.get_state()
    device_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        torch.default_generator.set_state(before)
        if device_state is not None:
            torch.cuda.set_rng_state(device_state, device)
