"""Cures for slow input that need no change to the script.

A :class:`ronde.feed.Pipeline` takes all of them. A plain Dataset takes a cache of finished samples.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from ronde.data import DECODERS, CannotEncode, Pipeline, available, decoder_of, encode_sample
from ronde.introspect import preserve_state, seed_all
from ronde.loader import FeedSettings
from ronde.world import ArgumentError

# of the JPEG files that are compared: each decoder takes some 10 ms for 100 kB, four times
_COMPARED_BYTES = 2_000_000


# -- what a data set does --------------------------------------------------------------


@dataclass(frozen=True)
class DatasetFacts:
    """What some samples show about a dataset, and so which remedies are possible.

    Attributes:
        decoder: of its JPEG images; "" if it is no pipeline of images.
        decoders: milliseconds of CPU time per image of the dataset, with each decoder that can be
            used here.
        same_pixels: decoders that give exactly Pillow's pixels.
        kept_bytes: of what ``cache: decode`` would keep of one sample; 0 if it cannot be kept.
        read_bytes: of what ``cache: read`` would keep of one sample; 0 if unknown.
        draws: what would be kept draws random numbers.
        error: why nothing could be found out, or "".
    """

    decoder: str = ""
    decoders: dict[str, float] = field(default_factory=dict)
    same_pixels: tuple[str, ...] = ()
    kept_bytes: float = 0.0
    read_bytes: float = 0.0
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
        exact = pixels.get("pillow")  # None: nothing to compare with, so none is called equal
        equal -= {n for n in names if exact is None or not np.array_equal(pixels[n], exact)}
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


def _jpegs(pipeline: Pipeline, ids: Sequence[int]) -> list[bytes]:
    """JPEG files of a pipeline of images, few enough to be decoded in well under a second."""
    chosen: list[bytes] = []
    for i in ids:
        data = bytes(pipeline.source.read([i])[0][0])
        if data.startswith(b"\xff\xd8"):
            chosen.append(data)
        if sum(map(len, chosen)) > _COMPARED_BYTES:
            break
    return chosen


def _to_keep(dataset: Any) -> Any:
    """The dataset whose samples ``cache: decode`` keeps; None if there is none."""
    if not isinstance(dataset, Pipeline):
        return dataset
    names = [step.name for step in dataset.steps]
    if "decode" not in names:
        return None
    count = len(names) - names[::-1].index("decode")  # up to the last one of that name
    return replace(dataset, steps=dataset.steps[:count])


def _encoded(dataset: Any, ids: Sequence[int], seed: int) -> list[tuple[int, bytes]]:
    """Length and digest of samples, as a cache would write them."""
    seed_all(seed)
    many = getattr(dataset, "__getitems__", None)
    samples = (dataset[i] if many is None else many([i])[0] for i in ids)
    written = (b"".join(encode_sample(sample)) for sample in samples)
    return [(len(data), hashlib.blake2b(data).digest()) for data in written]


def dataset_facts(dataset: Any, samples: int = 16) -> DatasetFacts:
    """Inspect some samples of a dataset; random state is restored.

    Args:
        dataset: a map-style Dataset or a Pipeline.
        samples: how many to look at.

    Example:
        >>> dataset_facts([1.0, 2.0, 3.0]).draws
        False
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__") or not len(dataset):
        return DatasetFacts(error="it can only be iterated, or is empty")
    ids, keeps = _spread(len(dataset), samples), _to_keep(dataset)
    decoder = decoder_of(dataset) if isinstance(dataset, Pipeline) else ""
    jpegs: list[bytes] = []
    read: list[tuple[int, bytes]] = []
    made: list[tuple[int, bytes]] = []
    again: list[tuple[int, bytes]] = []
    try:
        # once around both: generators of its own go on, so that what they draw shows
        with preserve_state(dataset):
            jpegs = _jpegs(dataset, ids) if decoder else []
            if isinstance(dataset, Pipeline):
                with suppress(CannotEncode):  # the size of such rows stays unknown
                    read = _encoded(replace(dataset, steps=()), ids, 1)
            if keeps is not None:
                made, again = _encoded(keeps, ids, 1), _encoded(keeps, ids[:2], 2)
    except CannotEncode:
        pass  # no cache keeps such samples
    except Exception as error:  # a bad sample: reading says so when its turn comes
        return DatasetFacts(error=f"{type(error).__name__}: {error}")
    decoders, same_pixels = compare_decoders(jpegs)
    draws = made[: len(again)] != again
    kept, whole = (
        statistics.fmean(length for length, _ in rows) if rows else 0.0
        for rows in (made if not draws else [], read)
    )
    return DatasetFacts(decoder, decoders, same_pixels, kept, whole, draws)


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
