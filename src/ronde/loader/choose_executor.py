"""The rule behind ``executor: auto``: who reads follows from what the dataset is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import default_collate

from ronde.introspect import describe_open, is_ronde, walk
from ronde.loader.settings import Executor


def _of_ronde_only(dataset: Any, collate: Callable[..., Any]) -> tuple[Any, bool]:
    """The innermost source, and whether only Ronde's code makes samples of it."""
    from ronde.cache import CachedDataset, CachedSource  # most trainings need neither
    from ronde.data import BaseSource, DatasetSource, Pipeline

    calls = [collate]
    while isinstance(dataset, Pipeline | CachedSource | CachedDataset):
        if isinstance(dataset, CachedDataset):
            dataset = dataset.dataset
            continue
        calls += [step.call for step in dataset.steps]
        dataset = dataset.source
    own = isinstance(dataset, BaseSource) and not isinstance(dataset, DatasetSource)
    if isinstance(dataset, BaseSource) and dataset.function is not None:
        calls.append(dataset.function)
    inside = walk([call for call in calls if call is not default_collate], functions=True)
    return dataset, own and all(is_ronde(one) for one in (dataset, *inside) if callable(one))


def choose_executor(
    dataset: Any, collate: Callable[..., Any], workers: int
) -> tuple[Executor, str]:
    """Choose who reads a map-style dataset where the setting is ``auto``.

    Args:
        dataset: that is read.
        collate: makes a batch of a list of samples.
        workers: loading threads or processes that may be used.

    Returns:
        tuple: ``none``, ``threads`` or ``processes``, and why.

    Example:
        >>> choose_executor([1, 2, 3], default_collate, 2)
        ('processes', "the script's own code makes the samples")
    """
    if workers < 1:
        return "none", "no loading threads or processes were requested"
    if (held := describe_open(dataset)) is not None:
        return "none", (
            f"the data set holds {held} open; threads and forked processes would share its "
            "position. Open it when the first sample is read, so that each process has its own"
        )
    source, own = _of_ronde_only(dataset, collate)
    if not own:
        return "processes", "the script's own code makes the samples"
    from ronde.data import ArraySource

    # To take rows from memory costs less than to hand a batch over.
    if source is dataset and isinstance(source, ArraySource):
        return "none", "its rows are in memory"
    return "threads", "only Ronde's code makes the samples, and it lets go of Python's lock"
