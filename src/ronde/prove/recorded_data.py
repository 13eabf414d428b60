"""The script's data as a proof reads it: in float64, samples noted, epochs cut short."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import Dataset, IterableDataset, default_collate, get_worker_info
from torch.utils.data._utils.worker import WorkerInfo

from ronde.data import Order
from ronde.introspect import Marks
from ronde.loader import LoaderSettings, TakenOver
from ronde.plan import Share
from ronde.prove.trace_writer import TraceWriter, modules_of, place_of
from ronde.prove.values import cast, digest_value
from ronde.run.parts import Parts

__all__ = ["SampleRecorder", "cut_epoch", "cut_order", "loading_process", "wide_loader"]

_EVALUATE_SAMPLES = 4096  # of one evaluation: a whole test set would take most of the study

Note = Callable[[int, Any], None]


class _NotedDataset(Dataset[Any]):
    """The user's data set, which notes each sample."""

    def __init__(self, inner: Any, note: Note) -> None:
        self._inner = inner
        self._note = note
        if hasattr(inner, "__getitems__"):
            self.__getitems__ = self._many

    def __getitem__(self, i: int) -> Any:
        value = self._inner[i]
        self._note(i, value)
        return value

    def _many(self, ids: list[int]) -> Any:
        values = self._inner.__getitems__(ids)
        for i, value in zip(ids, values, strict=True):
            self._note(i, value)
        return values

    def __len__(self) -> int:
        return len(self._inner)


class _NotedStream(IterableDataset[Any]):
    """The user's iterable data set, which notes each sample by its position."""

    def __init__(self, inner: Any, note: Note) -> None:
        self._inner = inner
        self._note = note

    def __iter__(self) -> Iterator[Any]:
        for i, value in enumerate(self._inner):
            self._note(i, value)
            yield value

    def __len__(self) -> int:
        return len(self._inner)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._inner, memo)  # samples before the training are not noted


class SampleRecorder:
    """The samples of a run's training and evaluations, as digests.

    Attributes:
        evaluated: the samples of the current evaluation, by index.
    """

    def __init__(self, trace: TraceWriter) -> None:
        self._trace = trace
        self._digests: dict[int, list[str]] = {}  # of the samples read for the step
        self.evaluated: dict[int, str] = {}

    def noted(self, dataset: Any) -> Any:
        """The data set, which notes each sample that the training reads."""
        kind = _NotedStream if isinstance(dataset, IterableDataset) else _NotedDataset
        return kind(dataset, self._note)

    def _note(self, i: int, value: Any) -> None:
        self._digests.setdefault(int(i), []).append(digest_value(value))

    def note_collate(self, generators: list[str]) -> None:
        """The collate function has drawn from generators."""
        self._trace.note("collate", modules_of(generators))

    def take(self, run: Parts, share: Share) -> list[list[Any]]:
        """Index and digest of each sample of a step that this worker has read."""
        data = run.data
        is_stream = isinstance(data.dataset, _NotedStream)
        ids: dict[int, None] = {}  # each once, in order
        for low, high in share.micro:
            read = range(low, high) if is_stream else data.order.ids(share.epoch, low, high)
            ids.update(dict.fromkeys(map(int, read)))
        digests = [[i, digest] for i in ids for digest in self._digests.get(i, [])]
        self._digests.clear()
        return digests

    def evaluation_data(self, taken: TakenOver, notes: bool) -> TakenOver:
        """Cut a large evaluation; with ``notes``, note its samples."""
        order = taken.order
        if order.draw is None and order.epoch_samples > _EVALUATE_SAMPLES:
            # the last batch keeps its size
            left_over = (_EVALUATE_SAMPLES - order.epoch_samples) % (taken.batch_size or 1)
            order = dataclasses.replace(order, length=max(_EVALUATE_SAMPLES - left_over, 1))
        loader = wide_loader(taken.settings, taken.dataset, lambda names: None)
        dataset = taken.dataset
        if notes and not isinstance(dataset, IterableDataset):
            dataset = _NotedDataset(dataset, self._note_evaluated)
        return dataclasses.replace(taken, dataset=dataset, order=order, settings=loader)

    def _note_evaluated(self, i: int, value: Any) -> None:
        self.evaluated[int(i)] = digest_value(value)


def cut_epoch(taken: TakenOver, size: int, steps: int) -> int:
    """Samples of an epoch so short that its last batch and its end are among the steps. Its batches
    have the sizes that those of the whole epoch have.
    """
    samples = taken.order.epoch_samples
    if (ends := taken.order.ends(0)) is not None:
        return ends[steps // 2 - 1] if len(ends) >= steps >= 4 else samples
    if steps < 4 or -(-samples // size) < steps:
        return samples
    last = 0 if taken.drop_last else samples % size
    return (steps // 2 - bool(last)) * size + last


def cut_order(order: Order, short: int) -> Order:
    """The order, with epochs of ``short`` samples."""
    if short >= order.epoch_samples:
        return order
    if (whole := order.batches) is not None and (ends := order.ends(0)) is not None:
        count = ends.index(short) + 1
        return dataclasses.replace(order, batches=lambda epoch: whole(epoch)[:count], length=short)
    draw = order.draw
    if draw is None:
        return dataclasses.replace(order, length=short)
    return dataclasses.replace(order, draw=lambda epoch: list(draw(epoch))[:short], length=short)


_process: WorkerInfo | None = None  # the loading process that this one stands for


def loading_process() -> WorkerInfo | None:
    """What ``get_worker_info`` tells the script's code, whose samples are read in this process."""
    return get_worker_info() or (_process if place_of(True) else None)


def wide_loader(
    settings: LoaderSettings, dataset: Any, drawn: Callable[[list[str]], None]
) -> LoaderSettings:
    """Batches in float64, read in this process unless the script prepares its loading processes.
    ``drawn`` gets the names of the generators that the collate function draws from.
    """
    global _process
    collate = settings.collate

    def wide(samples: list[Any]) -> Any:
        marks = Marks()
        batch = collate(samples)
        if names := marks.moved():
            drawn(names)
        return cast(batch)

    if collate is not default_collate:
        functools.update_wrapper(wide, collate)  # a run asks whose it is
    workers = settings.num_workers if settings.init is not None else 0
    if settings.chosen == "processes" and not workers:  # a data set may ask which process reads it
        _process = WorkerInfo(id=0, num_workers=1, seed=0, dataset=dataset)
    return dataclasses.replace(settings, collate=wide, num_workers=workers)
