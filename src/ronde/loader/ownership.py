"""Which data sets consist of Ronde's own sources and steps alone, so that the script cannot change
them between epochs.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import numpy as np
from torch.utils.data import Dataset, Subset, default_collate

from ronde.data.pipeline import Pipeline
from ronde.data.sources.arrays import ArraySource
from ronde.data.sources.base import BaseSource
from ronde.data.sources.map_dataset import DatasetSource
from ronde.introspect.object_graph import _vars

__all__ = ["ours"]


def _is_ours(call: Any) -> bool:
    kind = call if isinstance(call, type | FunctionType) else type(call)
    return kind.__module__.partition(".")[0] == "ronde"


def _spec_is_ours(call: Any) -> bool:
    """Whether all that a step calls is ronde's: what it was given (an image's transforms, a
    tokenizer) may be the user's.
    """
    for value in _vars(call).values():
        for one in value if isinstance(value, list | tuple) else (value,):
            if callable(one) and not isinstance(one, type) and not _is_ours(one):
                return False
            if _is_ours(one) and not isinstance(one, type) and not _spec_is_ours(one):
                return False
    return True


def ours(dataset: Dataset[Any], collate: Any = default_collate) -> bool:
    """Whether a data set is a pipeline, or a part of one, of ronde's own sources and steps alone,
    and so is what collates it: always the same for the same index.

    Example:
        >>> ours(torch.utils.data.TensorDataset(torch.zeros(3)))
        False
    """
    while type(dataset) is Subset:
        dataset = dataset.dataset
    calls, source = [collate], dataset
    if isinstance(dataset, Pipeline) and _is_ours(dataset):
        calls += [*(step.call for step in dataset.steps), dataset.collate, dataset.finish]
        source = dataset.source  # type: ignore[assignment]
    if not all(
        call is None or call is default_collate or (_is_ours(call) and _spec_is_ours(call))
        for call in calls
    ):
        return False
    if (
        not isinstance(source, BaseSource)
        or isinstance(source, DatasetSource)
        or not _is_ours(source)
    ):
        return False
    # Arrays of the script's are read where they are: it may write to them.
    return not (
        isinstance(source, ArraySource)
        and any(isinstance(origin, np.ndarray) for origin in source.origins() or ())
    )
