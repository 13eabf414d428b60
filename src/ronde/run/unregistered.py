"""Finds schedulers, averages, and optimizers of the script that no checkpoint would hold."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ronde.run.callback import Callback
from ronde.run.parts import Parts

__all__ = ["ReportsUnregistered", "claim", "unregistered"]

_MOST_LOOKS = 12  # in a process, which may hold many short runs: a look takes 0.1 s
_AVERAGES = (
    ("torch.optim.swa_utils", "AveragedModel", "n_averaged"),
    ("diffusers.training_utils", "EMAModel", "optimization_step"),
)

_looks = 0
_claimed: weakref.WeakSet[Any] = weakref.WeakSet()
_reported: weakref.WeakSet[Any] = weakref.WeakSet()


def claim(*things: Any) -> None:
    """Note what some run of this process has in its checkpoints."""
    for thing in things:
        with suppress(TypeError):  # it cannot be referred to weakly, or has no hash
            _claimed.add(thing)


def unregistered() -> list[str]:
    """A warning for each such object in use that was not reported yet, at the first calls."""
    global _looks
    _looks += 1
    if _looks > _MOST_LOOKS or not _in_use():
        return []
    gc.collect()  # discarded objects in reference cycles, as every scheduler is
    new = [thing for thing in _in_use() if thing not in _reported]
    _reported.update(new)
    return [_warning(thing) for thing in new]


def _warning(thing: Any) -> str:
    what, name, more = "average", "ema", "; run.average(decay=…) averages under every plan"
    if isinstance(thing, LRScheduler | Optimizer):
        name, more = "scheduler" if isinstance(thing, LRScheduler) else "optimizer", ""
        what = "learning-rate scheduler" if name == "scheduler" else "optimizer"
    return (
        f"the {what} {type(thing).__name__} is used by the script and not registered: after a "
        f"resume it would begin anew. run.register({name}=…) keeps it{more}"
    )


def _family(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    for sub in kind.__subclasses__():
        yield from _family(sub)


def _in_use() -> list[Any]:
    """Unregistered objects with state: stepped schedulers, updated averages, used optimizers."""
    counters: dict[type, str] = {Optimizer: "state", LRScheduler: "last_epoch"}
    for module, name, counter in _AVERAGES:
        if (kind := getattr(sys.modules.get(module), name, None)) is not None:
            counters[kind] = counter
    kinds = {kind for each in counters for kind in _family(each)}
    things = [thing for thing in gc.get_objects() if type(thing) in kinds]
    # A scheduler's state covers the schedulers in it; a registered object's, whatever it holds.
    claimed = {id(thing) for thing in _claimed}
    covered = set(claimed)
    for thing in (*_claimed, *things):
        inner = getattr(thing, "_schedulers", ())
        if id(thing) in claimed and not isinstance(thing, LRScheduler):
            held = [*getattr(thing, "__dict__", {}).values()]
            inner = [*held, *(v for h in held if isinstance(h, list | tuple) for v in h)]
        covered |= {id(part) for part in inner}
    used = [
        thing
        for thing in things
        for kind, counter in counters.items()
        # a ChainedScheduler does not count itself
        if isinstance(thing, kind)
        if any(getattr(part, counter, 0) for part in (thing, *getattr(thing, "_schedulers", ())))
    ]
    return [thing for thing in used if id(thing) not in covered]


_LOOKS = 3  # a scheduler may be stepped for the first time at the end of the first epoch


class ReportsUnregistered(Callback):
    """Looks at the first ends of epochs and before the first checkpoint."""

    def __init__(self, parts: Parts) -> None:
        self._looks = _LOOKS
        claim(parts.optimizer, parts.scheduler)

    def epoch_ended(self, parts: Parts) -> None:
        """See :class:`Callback`."""
        if self._looks and parts.world.is_main:
            self._looks -= 1
            for warning in unregistered():
                parts.warn(warning)

    before_save = epoch_ended
