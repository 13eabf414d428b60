"""Apply settings and cures to other people's datasets without changing their code.

Offers :func:`~ronde.adapt.feed_settings.apply_settings`, which reads what ``ronde doctor --apply``
wrote, and the cures in :mod:`~ronde.adapt.remedies`. They change how samples are fetched, never
which.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ronde.world import lazily

if TYPE_CHECKING:
    from ronde.adapt.feed_settings import apply_settings, requested_settings, summarize
    from ronde.adapt.remedies import dataset_facts

if not TYPE_CHECKING:  # a checker that sees __getattr__ takes any name
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "ronde.adapt.feed_settings": "apply_settings requested_settings summarize",
            "ronde.adapt.remedies": "dataset_facts",
        },
    )
