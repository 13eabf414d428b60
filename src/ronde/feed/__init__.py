"""Samples in: their order (a pure function of seed, epoch and position), their keyed randomness, their loading.

Offers :class:`Order` and :func:`permute`, :class:`Feed` (torch's DataLoader driven by positions) and
:func:`take_over` (a user's Dataset or DataLoader as Ronde reads it).
"""

from ronde.feed.apply import apply_settings, asked_settings, read_settings
from ronde.feed.cache import CachedDataset, CachedSource, CacheReport, cached, cached_dataset, clear_cache, report_cache
from ronde.feed.images import images
from ronde.feed.loader import Feed, LoaderSettings, die_with_parent
from ronde.feed.order import Order, Quality, key_of, permute
from ronde.feed.pack import Packed, pack, verify_pack
from ronde.feed.pipeline import Pipeline, Source, Step
from ronde.feed.reader import other_classes, pipeline_in
from ronde.feed.settings import FeedSettings, settings_file
from ronde.feed.sources import Sample, arrays, dataset, folder, parquet, tar, tokens
from ronde.feed.stages import rng, rngs, stage
from ronde.feed.synthetic import Synthetic, synthetic
from ronde.feed.tables import table
from ronde.feed.takeover import Taken, default_workers, settings_of, take_over
from ronde.feed.text import text
from ronde.feed.transforms import IMAGENET, CenterCrop, ColorJitter, HorizontalFlip, Normalize, RandomResizedCrop, Resize, Transform

__all__ = [
    "CacheReport",
    "CachedDataset",
    "CachedSource",
    "CenterCrop",
    "ColorJitter",
    "Feed",
    "FeedSettings",
    "HorizontalFlip",
    "IMAGENET",
    "LoaderSettings",
    "Normalize",
    "Order",
    "Packed",
    "Pipeline",
    "Quality",
    "RandomResizedCrop",
    "Resize",
    "Sample",
    "Source",
    "Step",
    "Synthetic",
    "Taken",
    "Transform",
    "apply_settings",
    "arrays",
    "asked_settings",
    "cached",
    "cached_dataset",
    "clear_cache",
    "dataset",
    "default_workers",
    "die_with_parent",
    "folder",
    "images",
    "key_of",
    "pack",
    "parquet",
    "permute",
    "other_classes",
    "pipeline_in",
    "read_settings",
    "report_cache",
    "rng",
    "rngs",
    "settings_file",
    "settings_of",
    "stage",
    "synthetic",
    "table",
    "take_over",
    "tar",
    "text",
    "tokens",
    "verify_pack",
]
