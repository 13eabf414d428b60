"""Samples in: their order (a pure function of seed, epoch and position), their keyed randomness, their loading.

Offers :class:`Order` and :func:`permute`, :class:`Feed` (torch's DataLoader driven by positions) and
:func:`take_over` (a user's Dataset or DataLoader as Ronde reads it).
"""

from ronde.feed.loader import Feed, LoaderSettings, die_with_parent
from ronde.feed.order import Order, key_of, permute
from ronde.feed.pipeline import Pipeline, Source, Step
from ronde.feed.settings import FeedSettings, settings_file
from ronde.feed.stages import rng, stage
from ronde.feed.takeover import Taken, take_over

__all__ = [
    "Feed",
    "FeedSettings",
    "LoaderSettings",
    "Order",
    "Pipeline",
    "Source",
    "Step",
    "Taken",
    "die_with_parent",
    "key_of",
    "permute",
    "rng",
    "settings_file",
    "stage",
    "take_over",
]
