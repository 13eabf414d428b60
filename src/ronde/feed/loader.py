"""Samples in: torch's own DataLoader, driven by positions instead of by a sampler's hidden state."""

from __future__ import annotations

import ctypes
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset, default_collate, get_worker_info

from ronde.feed.order import Order, key_of
from ronde.feed.randomness import KeyedRandomness
from ronde.plan.batch import Share
from ronde.world import ArgumentError, RondeError

__all__ = ["Feed", "LoaderSettings"]


@dataclass(frozen=True)
class LoaderSettings:
    """What is taken over from a user's DataLoader: how samples are fetched, never which."""

    collate: Callable[[list[Any]], Any] = default_collate
    num_workers: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    init: Callable[[int], None] | None = None


@dataclass(frozen=True, slots=True)
class _Ask:
    """One micro-batch to read. ``dummy``: read for its shape only, the share is empty."""

    epoch: int
    start: int
    ids: list[int]


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent dies, so that a killed worker leaves no loader behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


@dataclass(frozen=True)
class _WorkerInit:
    user: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        die_with_parent()
        if self.user is not None:
            self.user(worker)


def _identity(value: Any) -> Any:
    return value


def _stack(samples: list[Any]) -> Any:
    """``default_collate`` of tuples of tensors, without its search for what they are; 1 µs a sample less."""
    first = samples[0]
    if type(first) is tuple and all(type(value) is torch.Tensor for value in first) and get_worker_info() is None:
        try:
            return [torch.stack(column) for column in zip(*samples, strict=True)]
        except (TypeError, ValueError, RuntimeError):
            pass  # samples differ: default_collate knows how, or says why not
    return default_collate(samples)


class _Reader(Dataset[Any]):
    """Reads an :class:`_Ask` as a collated batch."""

    def __init__(self, dataset: Dataset[Any], collate: Callable[[list[Any]], Any], seed: int, by_position: bool) -> None:
        self.dataset = dataset
        self.by_position = by_position
        self.collate = _stack if collate is default_collate else collate
        self.randomness = KeyedRandomness(seed)
        # Rows of tensors are picked by one index each, not one by one: the same bits as collating them.
        self.rows = dataset.tensors if type(dataset) is TensorDataset and collate is default_collate else None

    def __getitem__(self, ask: _Ask) -> Any:
        if self.rows is not None:
            index = torch.from_numpy(np.asarray(ask.ids, dtype=np.int64))
            return [rows[index] for rows in self.rows]
        many = getattr(self.dataset, "__getitems__", None)

        def read_one(i: int) -> Any:
            return many([i])[0] if many is not None else self.dataset[i]

        def read_all() -> Any:
            return self.collate(many(ask.ids) if many is not None else [self.dataset[i] for i in ask.ids])

        # A sampler may draw a sample several times in an epoch: each time its augmentation is another one.
        keys = range(ask.start, ask.start + len(ask.ids)) if self.by_position else ask.ids
        return self.randomness.batch(ask.epoch, ask.ids, keys, read_one, read_all, self.collate)


class _StreamReader(IterableDataset[Any]):
    """Reads a data set that can only be iterated: every worker reads it all and keeps its own positions."""

    def __init__(self, dataset: IterableDataset[Any], collate: Callable[[list[Any]], Any], seed: int, length: int) -> None:
        self.dataset = dataset
        self.collate = collate
        self.seed = seed
        self.length = length
        self.asks: list[_Ask] | Iterator[_Ask] = []

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        if info is not None and info.num_workers > 1:
            raise RuntimeError("an IterableDataset is read by at most one loading process")
        stream = iter(self.dataset)
        position = 0
        held: Any = None
        for ask in self.asks:
            samples: list[Any] = []
            for wanted in ask.ids:
                # A dummy repeats a position that was just passed: the last sample serves.
                while position <= wanted:
                    try:
                        held = next(stream)
                    except StopIteration:
                        raise ArgumentError(
                            f"the data set says that its length is {self.length}, but it ended after {position} samples"
                        ) from None
                    position += 1
                samples.append(held)
            yield self.collate(samples)


class _Asks(Sampler[_Ask]):
    """What the next epoch's loader shall read; filled in before each iteration."""

    def __init__(self) -> None:
        self.source: Callable[[], Iterator[_Ask]] = lambda: iter(())

    def __iter__(self) -> Iterator[_Ask]:
        return self.source()


class Feed:
    """Reads this worker's micro-batches.

    Args:
        dataset: a map-style Dataset, or an IterableDataset with a length.
        order: which sample stands where.
        settings: how to fetch.
        seed: key of the augmentation's randomness.
    """

    def __init__(self, dataset: Dataset[Any], order: Order, settings: LoaderSettings, seed: int) -> None:
        self.order = order
        self._asks = _Asks()
        self._stream: _StreamReader | None = None
        options = dict(settings.options)
        workers = settings.num_workers
        if isinstance(dataset, IterableDataset):
            workers = min(workers, 1)
            options.pop("persistent_workers", None)  # a process that stays keeps what it was asked for in the epoch before
            self._stream = _StreamReader(dataset, settings.collate, seed, order.n)
        if workers == 0:
            for name in ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout"):
                options.pop(name, None)
        # The loader draws its base seed from a generator of its own: the script's randomness is left alone.
        options["generator"] = torch.Generator().manual_seed(key_of(seed, 3) & 0x7FFFFFFFFFFFFFFF)
        reader = None if self._stream is not None else _Reader(dataset, settings.collate, seed, order.draw is not None)
        self._direct = reader if workers == 0 and not options.get("pin_memory") else None
        self._loader: DataLoader[Any] = DataLoader(
            reader if reader is not None else cast("Dataset[Any]", self._stream),
            batch_size=None,
            sampler=None if self._stream is not None else self._asks,
            collate_fn=_identity,
            num_workers=workers,
            worker_init_fn=_WorkerInit(settings.init) if workers else None,
            **options,
        )

    def _ask(self, share: Share, low: int, high: int) -> _Ask:
        if low == high:
            # An empty share still yields a batch, so that a script's own lines run: the first sample of the global
            # batch, which is weighted with zero.
            low, high = share.start, share.start + 1
        return _Ask(share.epoch, low, self.order.ids(share.epoch, low, high).tolist())

    def read(self, shares: Callable[[], Iterator[Share]]) -> Iterator[tuple[Share, list[Any]]]:
        """Each share with its micro-batches, in order.

        Args:
            shares: makes the shares of (the rest of) one epoch.
        """
        asked: deque[Share] = deque()  # loading processes ask ahead of what is handed out

        def asks() -> Iterator[_Ask]:
            for share in shares():
                asked.append(share)
                for low, high in share.micro:
                    yield self._ask(share, low, high)

        self._asks.source = asks
        if self._stream is not None:
            self._stream.asks = list(asks()) if self._loader.num_workers else asks()
        if self._direct is not None:
            # Read in this process: what DataLoader would add is 15 µs a batch.
            for share in shares():
                yield share, [self._direct[self._ask(share, low, high)] for low, high in share.micro]
            return
        batches = iter(self._loader)
        for first in batches:
            share = asked.popleft()
            yield share, [first, *(next(batches) for _ in share.micro[1:])]
        if asked:
            raise RondeError(f"the loading processes ended with {len(asked)} batches still to come")
