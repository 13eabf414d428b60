"""Any map-style Dataset as a source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.data import IterableDataset

from ronde.data.sources.base import BaseSource, check_ids, digest_values
from ronde.world import ArgumentError


class DatasetSource(BaseSource):
    """See :func:`dataset`."""

    def __init__(self, data: Any) -> None:
        self.data = data
        self._many = hasattr(data, "__getitems__")
        self.classes = getattr(data, "classes", None)
        self.blocks = getattr(data, "blocks", None)
        self.window = getattr(data, "window", BaseSource.window)

    def __len__(self) -> int:
        return len(self.data)

    def __repr__(self) -> str:
        return f"dataset({type(self.data).__name__}): {len(self):,} samples"

    def read(self, ids: Sequence[int]) -> Any:
        """The samples of these ids, through the dataset's ``__getitems__`` if it has one."""
        wanted = check_ids(ids, len(self)).tolist()
        return self.data.__getitems__(wanted) if self._many else [self.data[i] for i in wanted]

    @property
    def fingerprint(self) -> str:
        """The dataset's own ``fingerprint`` if it has one, else its class and length."""
        own = getattr(self.data, "fingerprint", None)
        if isinstance(own, str):
            return own
        kind = type(self.data)
        # Without __main__: a script's class has another module where the script is imported.
        return digest_values(
            "dataset",
            kind.__module__ if kind.__module__ != "__main__" else "",
            kind.__qualname__,
            len(self),
        )


def check_map_style(data: Any, what: str) -> None:
    """Refuse what cannot be read by index."""
    by_index = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if isinstance(data, IterableDataset) or not by_index:
        raise ArgumentError(
            f"{what} needs a map-style Dataset with __len__ and __getitem__, found "
            f"{type(data).__name__}."
        )


def dataset(data: Any) -> DatasetSource:
    """Wrap a map-style Dataset as a source, to build a pipeline on it.

    Args:
        data: anything with ``__len__`` and ``__getitem__``; its ``__getitems__`` is used where it
            has one.

    Raises:
        ArgumentError: it can only be iterated.

    Example:
        >>> dataset([10, 20, 30]).read([2, 0])
        [30, 10]
    """
    check_map_style(data, "feed.dataset")
    return DatasetSource(data)
