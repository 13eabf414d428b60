"""A script's own ``batch_sampler`` as a pure function of (seed, epoch)."""

from __future__ import annotations

import copy
import hashlib
import itertools
import operator
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from ronde.data import Order, key_of
from ronde.introspect import attributes, restore_states, seed_all, states
from ronde.world import ArgumentError

_MOST_SAMPLES = 1_000_000  # of an epoch, or 100 times the data set: a sampler that never ends
_PLAIN = (bool, int, float, str, type(None))
_EPOCHS = ("epoch", "_epoch", "current_epoch")


def _inside(sampler: Any) -> Iterator[Any]:
    """A batch sampler and the samplers that it wraps."""
    while sampler is not None:
        yield sampler
        sampler = attributes(sampler).get("sampler")


def _seed(sampler: Any, key: int) -> None:
    """Seed the process's generators, and those that the sampler holds."""
    seed_all(key)
    for one in _inside(sampler):
        for value in list(attributes(one).values()):
            if isinstance(value, torch.Generator):
                value.manual_seed(key)
            elif isinstance(value, np.random.Generator):
                bits: Any = value.bit_generator
                bits.state = type(bits)(key).state
            elif isinstance(value, np.random.RandomState):
                value.seed(key & 0xFFFFFFFF)
            elif isinstance(value, random.Random):
                value.seed(key)


def _shared(dataset: Any) -> dict[int, Any]:
    """What a copy of a sampler shares with it: the data set, and what it is made of."""
    shared: dict[int, Any] = {}
    left = [dataset]
    while left:
        one = left.pop()
        if id(one) not in shared:
            shared[id(one)] = one
            for value in attributes(one).values():
                if isinstance(value, Dataset):
                    left.append(value)
                else:
                    shared[id(value)] = value
    return shared


class _Draws:
    """Draws epochs from copies, so that what a sampler keeps (a counter, a list that it shuffles in
    place) is a function of the epoch too: epoch n is the (n + 1)th pass over a fresh copy.
    """

    def __init__(self, sampler: Any, dataset: Any, seed: int, argument: str) -> None:
        self.sampler = sampler
        self.shared = _shared(dataset)
        self.seed = seed
        self.n = len(dataset)
        self.name = f"the batch_sampler of {argument} ({type(sampler).__name__})"
        self.settings = self._settings()
        try:
            self.pristine = self._copy(sampler)
        except Exception as error:
            raise ArgumentError(
                f"{self.name} cannot be copied ({type(error).__name__}: {error}), so its batches "
                "cannot be repeated by a resumed run. Keep locks, open files, and started "
                "generators out of it, or make them in __iter__."
            ) from None
        self.living: Any = None
        self.next = 0
        self.last: tuple[int, list[list[int]]] | None = None

    def _copy(self, sampler: Any) -> Any:
        return copy.deepcopy(sampler, dict(self.shared))

    def _settings(self) -> dict[str, Any]:
        # A list that the sampler shuffles in place stays the same list: only its identity counts.
        return {
            f"{type(one).__name__}.{name}": value if isinstance(value, _PLAIN) else id(value)
            for one in _inside(self.sampler)
            for name, value in attributes(one).items()
            if name not in _EPOCHS
        }

    def __call__(self, epoch: int) -> list[list[int]]:
        now = self._settings()
        changed = [n for n in {**self.settings, **now} if self.settings.get(n) != now.get(n)]
        if changed:
            raise ArgumentError(
                f"{self.name} was changed by the script: {changed[0]} is not what it was. Its "
                "batches must follow from the seed and the epoch alone: give it "
                "set_epoch(epoch), and choose there."
            )
        if self.last is not None and self.last[0] == epoch:
            return self.last[1]
        if self.living is None or self.next > epoch:
            self.living, self.next = self._copy(self.pristine), 0
        while True:
            batches = self._pass(self.next)
            self.next += 1
            if self.next > epoch:
                self.last = (epoch, batches)
                return batches

    def afresh(self, epoch: int) -> list[list[int]]:
        """An epoch's batches, drawn again."""
        self.living = self.last = None
        return self(epoch)

    def _pass(self, epoch: int) -> list[list[int]]:
        before = states()
        try:
            _seed(self.living, key_of(self.seed, 4, epoch))
            for one in _inside(self.living):
                if callable(getattr(one, "set_epoch", None)):
                    one.set_epoch(epoch)
            return self._collect(epoch)
        finally:
            restore_states(before)

    def _collect(self, epoch: int) -> list[list[int]]:
        batches: list[list[int]] = []
        samples = 0
        for batch in self.living:
            where = f"{self.name} gave, as batch {len(batches)} of epoch {epoch},"
            try:
                ids = [operator.index(i) for i in batch]
            except TypeError:
                raise ArgumentError(
                    f"{where} {batch!r:.80}: expected a list of whole numbers, the indices of its "
                    "samples."
                ) from None
            if not ids:
                raise ArgumentError(f"{where} no samples: leave empty batches out.")
            if min(ids) < 0 or max(ids) >= self.n:
                raise ArgumentError(
                    f"{where} the indices {min(ids)} to {max(ids)}, but the data set has "
                    f"{self.n} samples."
                )
            batches.append(ids)
            samples += len(ids)
            if samples > max(_MOST_SAMPLES, 100 * self.n):
                raise ArgumentError(
                    f"{self.name} does not end: it gave {samples:,} samples in one epoch. Let "
                    "__iter__ end after one pass."
                )
        if not batches:
            raise ArgumentError(f"{self.name} gave no batches in epoch {epoch}.")
        return batches


def order_of_batches(sampler: Any, dataset: Any, seed: int, argument: str) -> Order:
    """The order of a DataLoader's own batch sampler.

    Args:
        sampler: yields lists of indices. Each list is a global batch.
        dataset: the DataLoader's.
        seed: of the run: the sampler draws under generators seeded by (seed, epoch).
        argument: what the DataLoader is called in errors.

    Raises:
        ArgumentError: its batches do not follow from the seed and the epoch, or are no lists of
            indices.
    """
    replicas = getattr(sampler, "num_replicas", None)
    if isinstance(replicas, int) and replicas > 1:
        raise ArgumentError(
            f"the batch_sampler of {argument} ({type(sampler).__name__}) gives each rank its own "
            f"batches (num_replicas={replicas}), but ronde cuts each global batch over the "
            "workers. Build it with num_replicas=1 and rank=0."
        )
    draws = _Draws(sampler, dataset, seed, argument)
    first = draws(0)
    if first != draws.afresh(0):
        raise ArgumentError(
            f"{draws.name} gives other batches each time it is asked for epoch 0, so a resumed run "
            "would not see the same samples. Draw from torch's, random's or NumPy's global "
            "generator, or from one seeded by set_epoch(epoch)."
        )
    return Order(
        draws.n,
        seed,
        draw=lambda epoch: list(itertools.chain.from_iterable(draws(epoch))),
        length=sum(map(len, first)),
        sampler=type(sampler).__qualname__,
        batches=draws,
        first_batches=hashlib.sha256(repr(first).encode()).hexdigest()[:12],
    )
