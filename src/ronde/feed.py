"""Data loading, the public face: sources, order, transforms, caches and loaders.

    from ronde import feed

    train_set = feed.images("photos/train", size=224)

A name is imported from its room on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ronde.world import lazily

if TYPE_CHECKING:
    from ronde.adapt.feed_settings import apply_settings, read_settings
    from ronde.cache.cached import (
        CachedDataset,
        CachedSource,
        CacheReport,
        cached,
        cached_dataset,
        clear_cache,
    )
    from ronde.data.contract import Source, Step
    from ronde.data.images import images
    from ronde.data.named_stages import rng, rngs, stage
    from ronde.data.order import Order, key_of, permute
    from ronde.data.pack import Packed, pack, verify_pack
    from ronde.data.pipeline import Pipeline
    from ronde.data.sources.arrays import arrays
    from ronde.data.sources.base import Sample
    from ronde.data.sources.folder import folder
    from ronde.data.sources.map_dataset import dataset
    from ronde.data.sources.parquet import parquet
    from ronde.data.sources.tar import tar
    from ronde.data.sources.tokens import tokens
    from ronde.data.tabular import table
    from ronde.data.transforms import (
        IMAGENET,
        CenterCrop,
        HorizontalFlip,
        Normalize,
        RandomResizedCrop,
        Resize,
    )
    from ronde.loader.from_dataloader import default_workers, settings_of, take_over
    from ronde.loader.loader import Feed
    from ronde.loader.reader import other_classes, pipeline_in
    from ronde.loader.settings import FeedSettings, LoaderSettings, settings_file
    from ronde.tables.feature_store import FeatureStore
    from ronde.tables.online import Online
    from ronde.tables.recipe import Recipe

__all__ = [
    "CacheReport",
    "CachedDataset",
    "CachedSource",
    "CenterCrop",
    "FeatureStore",
    "Feed",
    "FeedSettings",
    "HorizontalFlip",
    "IMAGENET",
    "LoaderSettings",
    "Normalize",
    "Online",
    "Order",
    "Packed",
    "Pipeline",
    "RandomResizedCrop",
    "Recipe",
    "Resize",
    "Sample",
    "Source",
    "Step",
    "apply_settings",
    "arrays",
    "cached",
    "cached_dataset",
    "clear_cache",
    "dataset",
    "default_workers",
    "folder",
    "images",
    "key_of",
    "other_classes",
    "pack",
    "parquet",
    "permute",
    "pipeline_in",
    "read_settings",
    "rng",
    "rngs",
    "settings_file",
    "settings_of",
    "stage",
    "table",
    "take_over",
    "tar",
    "tokens",
    "verify_pack",
]

if not TYPE_CHECKING:  # a checker that sees __getattr__ takes any name
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "ronde.adapt.feed_settings": "apply_settings read_settings",
            "ronde.cache.cached": "CacheReport CachedDataset CachedSource cached cached_dataset "
            "clear_cache",
            "ronde.data.contract": "Source Step",
            "ronde.data.images": "images",
            "ronde.data.named_stages": "rng rngs stage",
            "ronde.data.order": "Order key_of permute",
            "ronde.data.pack": "Packed pack verify_pack",
            "ronde.data.pipeline": "Pipeline",
            "ronde.data.sources.arrays": "arrays",
            "ronde.data.sources.base": "Sample",
            "ronde.data.sources.folder": "folder",
            "ronde.data.sources.map_dataset": "dataset",
            "ronde.data.sources.parquet": "parquet",
            "ronde.data.sources.tar": "tar",
            "ronde.data.sources.tokens": "tokens",
            "ronde.data.tabular": "table",
            "ronde.data.transforms": "CenterCrop HorizontalFlip IMAGENET Normalize "
            "RandomResizedCrop Resize",
            "ronde.loader.from_dataloader": "default_workers settings_of take_over",
            "ronde.loader.loader": "Feed",
            "ronde.loader.reader": "other_classes pipeline_in",
            "ronde.loader.settings": "FeedSettings LoaderSettings settings_file",
            "ronde.tables.feature_store": "FeatureStore",
            "ronde.tables.online": "Online",
            "ronde.tables.recipe": "Recipe",
        },
        also="ronde.cache.cached",  # carries Pipeline.cache out
    )
