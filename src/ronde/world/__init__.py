"""The ground floor: rank, size, device and cores of this process.

Offers :func:`world` and :class:`World` (read from whichever launcher started the process),
:func:`connect` (one process group), :func:`agree` (all ranks hold the same facts), and the errors
that Ronde raises on purpose. Importing it does not import torch.
"""

from ronde.world.cores import openmp_waits, threads_per_worker, usable_cores
from ronde.world.errors import (
    ArgumentError,
    CheckpointError,
    FeedError,
    LossError,
    PlanError,
    RondeError,
    SampleError,
    WorldError,
)
from ronde.world.identity import World, world
from ronde.world.launchers import LAUNCHERS, Identity, identify

__all__ = [
    "LAUNCHERS",
    "VERSION",
    "ArgumentError",
    "CheckpointError",
    "FeedError",
    "Identity",
    "LossError",
    "RondeError",
    "PlanError",
    "SampleError",
    "World",
    "WorldError",
    "identify",
    "openmp_waits",
    "threads_per_worker",
    "usable_cores",
    "world",
]

VERSION = "0.1.0"
"""Ronde's version: here because the public package stands above every room."""
