"""Finds schedulers, averages, and optimizers of the script that no checkpoint would hold."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

if TYPE_CHECKING:
    from ronde.run.step_port import RunView

__all__ = ["Unregistered", "claim"]

_LOOKS = 3  # a scheduler may be stepped for the first time at the end of the first epoch
_MOST_LOOKS = 12  # in a process, which may hold many short runs: a look takes 0.1 s
_AVERAGES = (
    ("torch.optim.swa_utils", "AveragedModel", "n_averaged"),
    ("diffusers.training_utils", "EMAModel", "optimization_step"),
)

_looks = 0
_claimed: weakref.WeakSet[Any] = weakref.WeakSet()


def claim(*things: Any) -> None:
    """Note what some run of this process has in its checkpoints."""
    for thing in things:
        with suppress(TypeError):  # it cannot be referred to weakly, or has no hash
            _claimed.add(thing)


class Unregistered:
    """Looks for such objects at the first save and at the ends of the first epochs."""

    def __init__(self) -> None:
        self._looks = 0
        self._said: weakref.WeakSet[Any] = weakref.WeakSet()

    def look(self, run: RunView, registered: Collection[Any]) -> list[str]:
        """A warning for each that was not reported yet.

        Args:
            registered: what the script registered with this run.
        """
        global _looks
        if self._looks >= _LOOKS or _looks >= _MOST_LOOKS:
            return []
        self._looks += 1
        _looks += 1
        # Discarded objects in reference cycles, as every scheduler is, may not be collected yet.
        references = [weakref.ref(thing) for thing in _in_use([run.optimizer, *registered])]
        if references:
            gc.collect()
        warnings = []
        for thing in (reference() for reference in references):
            if thing is not None and thing not in self._said:
                self._said.add(thing)
                warnings.append(_warning(thing))
        return warnings


def _warning(thing: Any) -> str:
    kind = type(thing).__name__
    if isinstance(thing, LRScheduler):
        return (
            f"the learning-rate scheduler {kind} is stepped by the script and not registered: "
            "after a resume it would begin anew. run.register(scheduler=…) keeps it"
        )
    if isinstance(thing, Optimizer):
        return (
            f"the optimizer {kind} is not the one given to ronde.distribute, and not registered: "
            "after a resume it would begin anew. run.register(optimizer=…) keeps it"
        )
    return (
        f"the average {kind} is not registered: after a resume it would begin anew. "
        "run.register(ema=…) keeps it under plans that leave the model whole; "
        "run.average(decay=…) averages under every plan"
    )


def _in_use(own: Collection[Any]) -> list[Any]:
    """Unregistered objects with state: stepped schedulers, updated averages, used optimizers.

    Args:
        own: what is in this run's checkpoints.
    """
    counters: dict[type, str] = {Optimizer: "state", LRScheduler: "last_epoch"}
    for module, name, counter in _AVERAGES:
        if (kind := getattr(sys.modules.get(module), name, None)) is not None:
            counters[kind] = counter
    bases = tuple(counters)
    matches: dict[type, bool] = {}  # issubclass once a type: there are a million objects
    found = []
    for thing in gc.get_objects():
        kind = type(thing)
        match = matches.get(kind)
        if match is None:
            match = matches[kind] = issubclass(kind, bases)
        if match:
            found.append(thing)
    covered = {id(part) for thing in list(_claimed) for part in _with_parts(thing)}
    schedulers = [thing for thing in found if isinstance(thing, LRScheduler)]
    covered |= {id(part) for thing in schedulers for part in list(_with_parts(thing))[1:]}
    used = [thing for thing in found if id(thing) not in covered and _is_used(thing, counters)]
    # the scheduler of another run's optimizer is not this run's
    theirs = {id(thing) for thing in list(_claimed)} - {id(thing) for thing in own}
    return [thing for thing in used if id(getattr(thing, "optimizer", None)) not in theirs]


def _with_parts(thing: Any) -> Iterator[Any]:
    """An object and what its attributes hold: its state_dict() may cover them."""
    yield thing
    for name, value in list(getattr(thing, "__dict__", {}).items()):
        if isinstance(thing, LRScheduler) and name != "_schedulers":
            continue
        yield value
        if isinstance(value, dict):
            yield from value.values()
        elif isinstance(value, list | tuple):
            yield from value


def _is_used(thing: Any, counters: dict[type, str]) -> bool:
    name = next(counter for kind, counter in counters.items() if isinstance(thing, kind))
    parts = [thing, *getattr(thing, "_schedulers", ())]  # a ChainedScheduler does not count itself
    return any(bool(getattr(part, name, None)) for part in parts)
