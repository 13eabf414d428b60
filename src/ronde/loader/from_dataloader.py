"""Take over a Dataset or DataLoader: batch size, collate function, workers and order."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
    default_convert,
)

from ronde.data import Order, Source, key_of
from ronde.introspect import restore_states, seed_all, states
from ronde.loader.reader import pipeline_in
from ronde.loader.settings import LoaderSettings
from ronde.world import ArgumentError, threads_per_worker, world

_OPTIONS = (
    "pin_memory",
    "timeout",
    "multiprocessing_context",
    "prefetch_factor",
    "pin_memory_device",
)


@dataclass(frozen=True)
class TakenOver:
    """A data source as Ronde reads it.

    Attributes:
        notes: what the user should know.
        fingerprint: of the samples, their number and their order, where the source has one.
    """

    dataset: Dataset[Any]
    order: Order
    settings: LoaderSettings
    batch_size: int | None
    drop_last: bool
    notes: tuple[str, ...] = ()
    fingerprint: str | None = None

    @property
    def resized(self) -> int | None:
        """The data set's length now, if the order was made for another one."""
        n = len(self.dataset) if self.order.draw is None else self.order.n  # type: ignore[arg-type]
        return n if n != self.order.n else None


def _length(dataset: Any, argument: str) -> int:
    kind = type(dataset).__name__
    try:
        n = len(dataset)
    except (TypeError, NotImplementedError):
        if isinstance(dataset, IterableDataset):
            raise ArgumentError(
                f"{argument} is an IterableDataset without a length ({kind}), so epochs, global "
                "batches and resuming are undefined. Give it a __len__ (how many samples one pass "
                "yields), or use a map-style Dataset (__len__ and __getitem__)."
            ) from None
        if not hasattr(dataset, "__getitem__"):
            raise ArgumentError(
                f"{argument} must be a torch Dataset or DataLoader, found {kind}, which "
                "has neither __len__ nor __getitem__."
            ) from None
        raise ArgumentError(f"{argument} ({kind}) has no length: give it a __len__.") from None
    if n == 0:
        raise ArgumentError(
            f"{argument} ({kind}) is empty: its length is 0. Look at the path or the "
            "filter that it is made from."
        )
    return int(n)


def _index(value: Any, sampler: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        raise ArgumentError(
            f"the sampler {type(sampler).__name__} gave {value!r:.60}: expected the index of one "
            "sample. A sampler of lists is a batch_sampler: DataLoader(dataset, batch_sampler=…)."
        ) from None


def _sampler_order(sampler: Any, seed: int) -> Callable[[int], Sequence[int]]:
    """The user's sampler as a function of (seed, epoch), the same on every rank."""

    def draw(epoch: int) -> Sequence[int]:
        before = states()
        key = key_of(seed, 4, epoch)
        try:
            seed_all(key)
            if isinstance(getattr(sampler, "generator", None), torch.Generator):
                sampler.generator.manual_seed(key)
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
            return [_index(i, sampler) for i in sampler]
        finally:
            restore_states(before)

    return draw


def _order(data: Any, n: int, seed: int, shuffle: bool) -> Order:
    """Ronde's own order; by blocks if the source prefers that."""
    blocks = getattr(data, "blocks", None) if shuffle and hasattr(data, "fingerprint") else None
    if isinstance(blocks, tuple):
        window = int(getattr(data, "window", Order.window))
        return Order(n, seed, True, blocks=blocks, window=window)
    return Order(n, seed, shuffle)


def _own_batches(loader: DataLoader[Any]) -> bool:
    """Whether the script decides which samples form a batch."""
    return type(loader.batch_sampler) not in (BatchSampler, type(None))


def _order_of(
    loader: DataLoader[Any], n: int, seed: int, shuffle: bool | None, argument: str, evaluate: bool
) -> tuple[Order, list[str]]:
    # With batch_sampler=BatchSampler(…), the sampler that counts is inside it.
    batches: Any = loader.batch_sampler
    sampler: Any = batches.sampler if type(batches) is BatchSampler else loader.sampler
    if _own_batches(loader):
        if shuffle is not None:
            raise ArgumentError(
                f"shuffle={shuffle} contradicts the batch_sampler of {argument} "
                f"({type(loader.batch_sampler).__name__}), which decides the order: remove it."
            )
        from ronde.loader.batch_sampler import order_of_batches

        return order_of_batches(loader.batch_sampler, loader.dataset, seed, argument), []
    ready_made = (
        # a subclass may draw in another way
        getattr(type(sampler), "__iter__", None) is RandomSampler.__iter__
        and not sampler.replacement
        and sampler.num_samples == n
    )
    stream = isinstance(loader.dataset, IterableDataset)
    usual = isinstance(sampler, DistributedSampler)
    if usual and type(sampler).__iter__ is not DistributedSampler.__iter__:
        usual = False
        if sampler.num_replicas > 1:
            raise ArgumentError(
                f"the sampler of {argument} ({type(sampler).__name__}) gives each rank its own "
                f"samples (num_replicas={sampler.num_replicas}), but ronde divides what it draws "
                "over the workers. Build it with num_replicas=1 and rank=0."
            )
    if shuffle is not None:
        if not (ready_made or usual or stream or isinstance(sampler, SequentialSampler)):
            raise ArgumentError(
                f"shuffle={shuffle} contradicts the sampler of {argument} "
                f"({type(sampler).__name__}), which decides the order: give one of them."
            )
        return _order(loader.dataset, n, seed, shuffle), []
    if evaluate and (ready_made or usual):
        return Order(n, seed, False), []  # each sample once: in which order does not matter
    if stream or type(sampler) is SequentialSampler:
        return Order(n, seed, False), []
    if ready_made:
        return _order(loader.dataset, n, seed, True), []
    if usual:
        return _order(loader.dataset, n, seed, bool(sampler.shuffle)), [
            f"the DistributedSampler of {argument} is not used: ronde distributes the samples, "
            "without repeats"
        ]
    if not isinstance(sampler, Sized):
        raise ArgumentError(
            f"the sampler of {argument} ({type(sampler).__name__}) has no length: give it "
            "a __len__."
        )
    name = type(sampler).__qualname__
    draw = _sampler_order(sampler, seed)
    return Order(n, seed, True, draw=draw, length=len(sampler), sampler=name), []


def _fingerprint(dataset: Any) -> str | None:
    digest = getattr(dataset, "fingerprint", None)
    return digest if isinstance(digest, str) else None


def default_workers(local_size: int | None = None) -> int:
    """Default loaders per training worker: this node's cores divided by its workers, at most 8."""
    return min(8, threads_per_worker(world().local_size if local_size is None else local_size))


def settings_of(dataset: Any) -> LoaderSettings:
    """How to read a dataset without a DataLoader: by its own settings, else right here."""
    pipeline = pipeline_in(dataset)
    if pipeline is None:
        if not (isinstance(dataset, Source) and isinstance(dataset, Dataset)):
            return LoaderSettings()
        return LoaderSettings(num_workers=default_workers(), executor="auto")
    return LoaderSettings(
        pipeline.collate,
        default_workers(),
        executor="auto",
        finish=pipeline.finish,
        on_error=pipeline.on_error,
        max_skipped=pipeline.max_skipped,
    )


def take_over(
    data: Any,
    *,
    seed: int,
    batch_size: int | None,
    shuffle: bool | None,
    shuffle_dataset: bool,
    drop_last: bool,
    argument: str = "data",
    evaluate: bool = False,
) -> TakenOver:
    """Read what the user passed as data.

    Args:
        data: a Dataset, or a DataLoader whose settings are taken over.
        batch_size: what the user asked for beside it, or None.
        shuffle: what the user asked for beside it, or None to follow the DataLoader.
        shuffle_dataset: whether a bare Dataset is shuffled where nothing was asked.
        evaluate: it is read to evaluate: shuffling is left out, a sampler that chooses is not.

    Raises:
        ArgumentError: empty, without a length, or a DataLoader whose batches cannot be taken over.
    """
    dataset = data.dataset if isinstance(data, DataLoader) else data
    n = _length(dataset, argument)
    stream = isinstance(dataset, IterableDataset)
    if shuffle and stream:
        raise ArgumentError(
            f"{argument} is an IterableDataset: it can only be read in its own order, so "
            "shuffle=True is not possible."
        )
    known = _fingerprint(dataset)
    if not isinstance(data, DataLoader):
        order = _order(
            data, n, seed, (shuffle_dataset if shuffle is None else shuffle) and not stream
        )
        return TakenOver(data, order, settings_of(data), batch_size, drop_last, fingerprint=known)

    for name in ("__iter__", "_get_iterator"):
        if getattr(type(data), name) is not getattr(DataLoader, name):
            raise ArgumentError(
                f"{argument} ({type(data).__name__}) makes its batches in a {name} of its own, "
                "which ronde does not call: it reads the data set itself. Do what it does in the "
                "data set or in collate_fn, and give a torch DataLoader."
            )
    if data.batch_size is None and data.batch_sampler is None:
        own_size = None
    elif _own_batches(data):
        own_size = None
        given = f"batch_size={batch_size}" if batch_size is not None else "drop_last=True"
        if batch_size is not None or drop_last:
            raise ArgumentError(
                f"{given} contradicts the batch_sampler of {argument} "
                f"({type(data.batch_sampler).__name__}), whose batches are the global batches: "
                "remove it."
            )
    else:
        batches: Any = data.batch_sampler
        own_size = batches.batch_size if type(batches) is BatchSampler else data.batch_size
    if batch_size is not None and own_size not in (None, 1, batch_size):  # 1 is every loader's
        raise ArgumentError(
            f"two batch sizes: batch_size={batch_size} and the DataLoader's "
            f"batch_size={own_size}. Both mean global samples per "
            "optimizer step: give one of them."
        )
    order, notes = _order_of(data, n, seed, shuffle, argument, evaluate)
    sizes = order.sizes(0)
    if sizes is not None:
        own_size = max(sizes)
    taken = inspect.signature(DataLoader.__init__).parameters
    options = {
        name: getattr(data, name) for name in _OPTIONS if name in taken and hasattr(data, name)
    }
    if not options.get("pin_memory_device"):
        options.pop("pin_memory_device", None)
    workers = data.num_workers
    if data.persistent_workers:
        notes.append(
            f"{argument}: persistent_workers is not used: loading processes start for each epoch, "
            "so that they see what the script has changed"
        )
    if stream and workers > 1:
        notes.append(
            f"{argument} is an IterableDataset: it is read by 1 loading process, not "
            f"{workers}, to keep its order"
        )
    # A loader that does not batch converts single samples: where ronde batches, they are collated.
    collate = default_collate if data.collate_fn is default_convert else data.collate_fn
    settings = dataclasses.replace(
        settings_of(data.dataset),
        num_workers=workers,
        options=options,
        init=data.worker_init_fn,
        executor=None,
    )
    if collate is not default_collate or settings.collate is default_collate:
        settings = dataclasses.replace(settings, collate=collate)
    leave_out = sizes is None and (
        drop_last or bool(getattr(data.batch_sampler, "drop_last", data.drop_last))
    )
    size = batch_size or own_size
    return TakenOver(dataset, order, settings, size, leave_out, tuple(notes), known)
