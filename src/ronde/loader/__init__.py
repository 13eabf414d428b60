"""The loading engine: threads or processes prepare batches ahead, in the order of positions.

Offers :class:`~ronde.loader.loader.Feed` (runs the loading) and
:func:`~ronde.loader.from_dataloader.take_over` (reads a user's Dataset or DataLoader).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ronde.world import lazily

if TYPE_CHECKING:
    from ronde.loader.from_dataloader import TakenOver, default_workers, take_over
    from ronde.loader.loader import Feed, first_few, too_many
    from ronde.loader.reader import other_classes, pipeline_in
    from ronde.loader.sample_facts import is_other
    from ronde.loader.settings import Executor, FeedSettings, LoaderSettings, settings_file

if not TYPE_CHECKING:  # a checker that sees __getattr__ takes any name
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "ronde.loader.from_dataloader": "TakenOver default_workers take_over",
            "ronde.loader.loader": "Feed first_few too_many",
            "ronde.loader.reader": "other_classes pipeline_in",
            "ronde.loader.sample_facts": "is_other",
            "ronde.loader.settings": "Executor FeedSettings LoaderSettings settings_file",
        },
    )
