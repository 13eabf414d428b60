"""The arguments of ``distribute`` that choose what a run does beside training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["RunOptions"]


@dataclass(frozen=True)
class RunOptions:
    """See :func:`ronde.distribute` for each."""

    save_every: int | None
    check_replicas: int | None
    on_nan: str
    callbacks: tuple[Any, ...]
    in_lists: bool
