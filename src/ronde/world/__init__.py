"""The ground floor: rank, size, device and cores of this process.

Offers :func:`world` and :class:`World` (read from whichever launcher started the process),
:func:`connect` (one process group), :func:`agree` (all ranks hold the same facts), and the errors
that Ronde raises on purpose. Importing it does not import torch.
"""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

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
from ronde.world.launchers import identify

__all__ = [
    "VERSION",
    "ArgumentError",
    "CheckpointError",
    "FeedError",
    "LossError",
    "RondeError",
    "PlanError",
    "SampleError",
    "World",
    "WorldError",
    "identify",
    "lazily",
    "openmp_waits",
    "threads_per_worker",
    "usable_cores",
    "world",
]

VERSION = "0.1.0"
"""Ronde's version: here because the public package stands above every room."""


def lazily(
    package: str, homes: Mapping[str, str], also: str | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Build ``__getattr__`` and ``__dir__`` for a package whose names live in other modules (PEP
    562).

    A room's ``__init__`` names what it offers. Importing all of it eagerly would slow every
    ``import ronde``.

    Args:
        package: ``__name__`` of the package.
        homes: module -> the names that come from it, with spaces between them.
        also: a module that is imported before the first name is.

    Example:
        >>> get, _ = lazily("ronde.example", {"ronde.world.errors": "ArgumentError RondeError"})
        >>> get("ArgumentError").__name__
        'ArgumentError'
    """
    home = {name: module for module, names in homes.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if also is not None:
            importlib.import_module(also)
        value = getattr(importlib.import_module(home[name]), name)
        if package in sys.modules:
            setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted({*vars(sys.modules[package]), *home})
