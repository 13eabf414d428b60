"""A snapshot of a run: everything a step changes is copied, and put back bit by bit."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from ronde.introspect import SavedState, attributes, walk
from ronde.run.parts import Parts, State

__all__ = ["Snapshot"]

_MOST_BYTES = 2**26  # of a tensor or an array that a data set holds: larger ones are data
_PARTS = ("dataset", "datasets", "transform", "transforms", "target_transform")


def _inner(one: Any) -> Iterator[Any]:
    """The data sets and transforms inside a data set."""
    for name, value in attributes(one).items():
        if isinstance(value, Dataset) or name in _PARTS:
            yield from value if isinstance(value, list | tuple) else [value]


class Snapshot:
    """A copy of weights, gradients, optimizer, scheduler, randomness, and the place in the data.

    It covers the model, a loss that is a module, the optimizer, the scheduler, and the attributes
    of data sets and their transforms, nested ones included. It does not cover objects that only a
    closure or a global name leads to, nor the effects of hooks on modules. Weights and moments are
    copied into the host's memory.
    """

    def __init__(self, run: Parts) -> None:
        self._run = run
        strategy, exchange = run.strategy, run.strategy.exchange
        parts = () if exchange is None else (exchange, exchange.reducer)
        functions = (run.loss.loss, run.loss.forward)
        modules = [f for f in functions if isinstance(f, nn.Module)]
        data = walk(run.data.dataset, _inner, most=100)
        self._data = SavedState(*data, largest=_MOST_BYTES, steps=True)
        owners = (run.model, *modules, run.optimizer, strategy, *parts, run.scheduler)
        self._objects = SavedState(*owners, steps=True)
        with_state = [each for each in (run.scheduler, run.scaler) if each is not None]
        self._states = [(each, copy.deepcopy(each.state_dict())) for each in with_state]
        self._untouched = strategy.is_untouched
        self._state = State(**vars(run.state))

    def restore(self, failed: bool = False) -> None:
        """Put everything back. ``failed``: this worker may be alone here, so no collectives."""
        for each, state in self._states:
            each.load_state_dict(state)
        vars(self._run.state).update(vars(self._state))
        self._objects.restore()
        alone = failed and self._run.world.size > 1
        if self._untouched and not alone:
            # DDP orders its buckets by the first backward pass. A training that has taken no step
            # yet must order them by its own.
            self._run.strategy.rebuild()
        self._data.restore()  # and the random generators, last
