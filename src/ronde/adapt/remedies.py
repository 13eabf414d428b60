"""Cures for slow input that need no change to the script.

A :class:`ronde.feed.Pipeline` takes all of them. A plain Dataset takes a cache of finished samples.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from ronde.adapt.observe import Observation, observe
from ronde.data import DECODERS, Pipeline, available
from ronde.introspect import preserve_state, seed_all
from ronde.loader import FeedSettings
from ronde.profile import same_bits, size_of
from ronde.world import ArgumentError

_MOST_PIXELS = 8_000_000  # of all images that are compared


# -- what a data set does --------------------------------------------------------------


@dataclass(frozen=True)
class DatasetFacts:
    """What some samples show about a dataset, and so which remedies are possible.

    Attributes:
        pipeline: it is a :class:`ronde.feed.Pipeline`.
        jpeg: it decodes JPEG images with Pillow.
        decoders: milliseconds of CPU time per image of the dataset, with each decoder that can be
            used here.
        same_pixels: decoders that give exactly Pillow's pixels.
        file_bytes: read for one sample, in files.
        decoded_bytes: of the images of one sample.
        sample_bytes: of one finished sample.
        draws: it draws random numbers, so finished samples cannot be kept.
        error: why nothing could be found out, or "".
    """

    pipeline: bool = False
    jpeg: bool = False
    decoders: dict[str, float] = field(default_factory=dict)
    same_pixels: tuple[str, ...] = ()
    file_bytes: float = 0.0
    decoded_bytes: float = 0.0
    sample_bytes: float = 0.0
    draws: bool = False
    error: str = ""


def _spread(n: int, count: int) -> list[int]:
    return sorted({int(i) for i in np.linspace(0, n - 1, min(n, count))})


def compare_decoders(images: Sequence[bytes]) -> tuple[dict[str, float], tuple[str, ...]]:
    """Decode JPEG images with every usable decoder.

    Returns:
        tuple: milliseconds of CPU time per image with each decoder, and the decoders that give
        exactly Pillow's pixels. Images that one of them cannot decode do not count.
    """
    names = sorted(available())
    spent: dict[str, list[int]] = {name: [] for name in names}
    equal = set(names)
    for data in images:
        calls = {name: partial(DECODERS[name], data) for name in names}
        try:
            pixels = {name: call() for name, call in calls.items()}
        except Exception:
            continue  # damaged, or of a kind that one of them does not know
        equal -= {name for name in names if not np.array_equal(pixels[name], pixels["pillow"])}
        for name, call in calls.items():
            spent[name].append(_cpu(call))
    milliseconds = {name: statistics.fmean(t) / 1e6 for name, t in spent.items() if t}
    return milliseconds, tuple(name for name in milliseconds if name in equal)


def _cpu(work: Callable[[], Any]) -> int:
    """Best of three CPU times in nanoseconds, because the machine is shared."""
    times = []
    for _ in range(3):
        begin = time.thread_time_ns()
        work()
        times.append(time.thread_time_ns() - begin)
    return min(times)


def _jpegs_to_compare(observation: Observation) -> list[bytes]:
    """Images for comparing decoders, few enough to take well under a second."""
    chosen: list[bytes] = []
    pixels = 0
    for data, (_, width, height) in zip(
        observation.jpegs, [i for i in observation.images if i[0] == "JPEG"], strict=False
    ):
        if chosen and pixels + width * height > _MOST_PIXELS:
            break
        chosen.append(data)
        pixels += width * height
    return chosen


def dataset_facts(dataset: Any, samples: int = 16) -> DatasetFacts:
    """Inspect some samples of a dataset; random state is restored.

    Args:
        dataset: a map-style Dataset or a Pipeline.
        samples: how many to look at.

    Example:
        >>> dataset_facts([1.0, 2.0, 3.0]).file_bytes
        0.0
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__") or not len(dataset):
        return DatasetFacts(error="it can only be iterated, or is empty")
    try:
        # once around both: generators of its own go on, so that what they draw shows
        with preserve_state(dataset):
            ids = _spread(len(dataset), samples)
            seed_all(1)
            observation, made = observe(dataset, ids)
            seed_all(2)
            again = observe(dataset, ids[:2])[1]
    except Exception as error:  # a bad sample: reading says so when its turn comes
        return DatasetFacts(error=f"{type(error).__name__}: {error}")
    n = max(1, observation.samples)
    jpegs = _jpegs_to_compare(observation)
    decoders, same_pixels = compare_decoders(jpegs)
    return DatasetFacts(
        pipeline=isinstance(dataset, Pipeline),
        jpeg=bool(jpegs),
        decoders=decoders,
        same_pixels=same_pixels,
        file_bytes=sum(size for _, size in observation.files) / n,
        decoded_bytes=sum(w * h * 3 for _, w, h in observation.images) / n,
        sample_bytes=sum(map(size_of, made)) / n,
        draws=not all(same_bits(a, b) for a, b in zip(made, again, strict=False)),
    )


# -- applying them ---------------------------------------------------------------------


def apply_remedies(dataset: Any, settings: FeedSettings) -> Any:
    """A Dataset read with the settings ``decoder`` and ``cache``.

    :func:`ronde.adapt.feed_settings.apply_settings` handles the loading settings (``executor``,
    ``workers``, ``prefetch``, ``threads``, ``pin_memory``). The order of samples stays.
    So do their bits, except with decoders that make other pixels.

    Args:
        dataset: a map-style Dataset or a Pipeline. A plain Dataset takes ``cache: decode`` only.

    Raises:
        ArgumentError: a setting does not fit this Dataset; the text says why.

    Example:
        >>> import torch
        >>> rows = [torch.tensor([i, i]) for i in range(4)]
        >>> dataset = apply_remedies(rows, FeedSettings(cache="decode"))
        >>> dataset[2].tolist()
        [2, 2]
        >>> dataset.close()
    """
    if isinstance(dataset, IterableDataset):
        raise ArgumentError(
            "these feed settings are for data sets that are read by index; this one can "
            "only be iterated."
        )
    if settings.cache is None and settings.cache_bytes is not None:
        raise ArgumentError("feed setting cache_bytes goes with cache: read or decode.")
    if isinstance(dataset, Pipeline):
        return _apply_to_pipeline(dataset, settings)
    for name, is_set, instead in (
        ("decoder", settings.decoder, "feed.images(FOLDER, decoder=NAME)"),
        ("cache: read", settings.cache == "read", 'feed.images(FOLDER).cache("read")'),
    ):
        if not is_set:
            continue
        raise ArgumentError(
            f"feed setting {name} is for ronde.feed pipelines, and {type(dataset).__name__} is a "
            f"Dataset of its own. Delete the line, or read the files with {instead} instead."
        )
    return dataset if settings.cache is None else _cached_samples(dataset, settings)


def _apply_to_pipeline(pipeline: Pipeline, settings: FeedSettings) -> Pipeline:
    from ronde.data import with_decoder

    if settings.decoder is not None:
        pipeline = with_decoder(pipeline, settings.decoder)
    if settings.cache is not None:
        pipeline = pipeline.cache(settings.cache, "memory", settings.cache_bytes)
    return pipeline


def _cached_samples(dataset: Any, settings: FeedSettings) -> Any:
    """A plain Dataset whose finished samples are cached."""
    from ronde.cache import cached_dataset

    try:
        with preserve_state(dataset):
            return cached_dataset(dataset, "memory", settings.cache_bytes)
    except ArgumentError as error:
        raise ArgumentError(
            "feed setting cache: decode keeps the finished samples of a Dataset, which "
            "is not possible here. For images, use "
            f'feed.images(FOLDER).cache("decode") instead: {error}'
        ) from None
