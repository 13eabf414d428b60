"""The arguments of ``distribute`` in groups; see :func:`ronde.distribute` for each."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ronde.checkpoint import KeepPolicy
from ronde.loader import FeedSettings
from ronde.plan import Plan
from ronde.run.best import split_metric
from ronde.world import ArgumentError

__all__ = ["BatchOptions", "RunOptions", "SaveOptions", "SplitOptions"]


@dataclass(frozen=True)
class BatchOptions:
    """What a global batch is, and how samples come."""

    batch_size: int | None
    batch: Literal["keep", "grow"]
    micro_batch: int | None
    shuffle: bool | None
    drop_last: bool
    seed: int
    feed: FeedSettings | Mapping[str, Any] | str | os.PathLike[str] | None
    lr_rule: Literal["linear", "sqrt", "none"] | None
    warmup_steps: int | None


@dataclass(frozen=True)
class SplitOptions:
    """How the work is split. ``fields`` are those of the plan that were given one by one."""

    plan: str | Plan | os.PathLike[str]
    fields: Mapping[str, Any]
    tensor_plan: Mapping[str, Any] | None
    init: Callable[[Any], None] | str | os.PathLike[str] | None
    randomness: Literal["global", "worker"] | None

    @property
    def auto(self) -> bool:
        """Whether Ronde chooses the plan."""
        return (os.environ.get("RONDE_PLAN") or self.plan) == "auto"


@dataclass(frozen=True)
class SaveOptions:
    """Which checkpoints are written, and where."""

    save_every: int | None
    keep: KeepPolicy
    keep_best: str | None
    patience: int | None
    async_save: bool
    name: str | None
    tensorboard: bool

    @classmethod
    def read(cls, keep: int | str, keep_best: str | None, **others: Any) -> SaveOptions:
        """Check and read ``keep`` and ``keep_best``."""
        policy = KeepPolicy.parse(keep)
        if policy.best is not None and keep_best not in (None, policy.best):
            raise ArgumentError(
                f"keep={keep!r} names another metric than keep_best={keep_best!r}. Give one of "
                "them."
            )
        best = keep_best or policy.best
        if best is not None:
            split_metric(best)
        elif others["patience"] is not None:
            raise ArgumentError(
                f"patience={others['patience']} waits for a better evaluation: name its metric, as "
                "keep_best='accuracy'."
            )
        return cls(keep=policy, keep_best=best, **others)


@dataclass(frozen=True)
class RunOptions:
    """What a run does beside training."""

    check_replicas: int | None
    on_nan: str
    callbacks: Sequence[Any]

    @property
    def leaves_out(self) -> bool:
        """Whether steps may be left out, or taken again."""
        return self.on_nan in ("skip", "rollback")
