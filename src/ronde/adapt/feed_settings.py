"""Find feed settings and apply them to a data source."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ronde.loader import FeedSettings, TakenOver, default_workers
from ronde.world import ArgumentError


def read_settings(
    feed: FeedSettings | Mapping[str, Any] | str | os.PathLike[str] | None,
) -> FeedSettings:
    """Read the ``feed`` argument of ``ronde.distribute``.

    Raises:
        ArgumentError: it is none of these, or holds a setting that is not known.

    Example:
        >>> read_settings({"executor": "threads", "workers": 4}).workers
        4
    """
    if feed is None:
        return FeedSettings()
    if isinstance(feed, FeedSettings):
        feed.check()
        return feed
    if isinstance(feed, Mapping):
        return FeedSettings.from_dict(dict(feed))
    if isinstance(feed, str | os.PathLike):
        return FeedSettings.load(Path(feed))
    raise ArgumentError(
        "feed must be a ronde.feed.FeedSettings, names and values, or the path of a "
        f"settings file; found {type(feed).__name__}."
    )


def requested_settings(
    feed: FeedSettings | Mapping[str, Any] | str | os.PathLike[str] | None,
) -> FeedSettings:
    """The script's settings, overridden by the file that ``RONDE_FEED`` names."""
    settings = read_settings(feed)
    file = os.environ.get("RONDE_FEED", "none")
    return settings if file in ("", "none") else settings.merged(FeedSettings.load(Path(file)))


def summarize(settings: FeedSettings) -> str:
    """Summarize settings: ``executor threads, workers 2``.

    Example:
        >>> summarize(FeedSettings(executor="threads", workers=2, pin_memory=True))
        'executor threads, workers 2, pin_memory'
    """
    shown = []
    for name, value in settings.to_dict().items():
        shown.append(
            name if value is True else f"no {name}" if value is False else f"{name} {value}"
        )
    return ", ".join(shown) or "nothing set"


def apply_settings(
    taken: TakenOver, settings: FeedSettings, local_size: int | None = None
) -> TakenOver:
    """Apply feed settings to a data source. Samples and order stay.

    Args:
        local_size: training workers on this node, None to ask the launcher: loaders are shared out
            among them.

    Raises:
        ArgumentError: a setting that this data source cannot have.
    """
    loader = taken.settings
    changes: dict[str, Any] = {}
    executor, workers = settings.executor, settings.workers
    if executor is not None:
        changes["executor"] = executor
        if workers is None:
            workers = 0 if executor == "none" else loader.num_workers or default_workers(local_size)
    elif workers is not None and loader.executor == "none":
        changes["executor"] = None
    if workers is not None:
        changes["num_workers"] = workers
    for name in ("prefetch", "threads"):
        if getattr(settings, name) is not None:
            changes[name] = getattr(settings, name)
    options = dict(loader.options)
    if settings.prefetch is not None:
        options.pop("prefetch_factor", None)
    if settings.pin_memory is not None:
        options["pin_memory"] = settings.pin_memory
    changes["options"] = options
    loader = dataclasses.replace(loader, **changes)
    dataset: Any = taken.dataset
    if any(each is not None for each in (settings.decoder, settings.cache, settings.cache_bytes)):
        from ronde.adapt import remedies

        dataset = remedies.apply_remedies(dataset, settings)
    return dataclasses.replace(taken, dataset=dataset, settings=loader)
