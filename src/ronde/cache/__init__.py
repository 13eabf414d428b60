"""The shared sample cache: read or decoded samples, shared by all workers of a node.

Offers :func:`~ronde.cache.cached.cached` and :func:`~ronde.cache.cached.cached_dataset`, over a
record store that many processes share, within a budget of memory or disk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ronde.world import lazily

if TYPE_CHECKING:
    from ronde.cache.cached import (
        CachedDataset,
        CachedSource,
        CacheReport,
        cached_dataset,
        clear_cache,
    )

if not TYPE_CHECKING:  # a checker that sees __getattr__ takes any name
    __getattr__, __dir__ = lazily(
        __name__,
        {"ronde.cache.cached": "CacheReport CachedDataset CachedSource cached_dataset clear_cache"},
    )
