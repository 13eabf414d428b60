"""Cures for slow input that need no change to the script: another decoder, a cache.

They work on :class:`ronde.feed.Pipeline` and, if samples stay the same, on any plain Dataset. Each
is first checked on some of the Dataset's samples, and refused with a reason if it does not fit.
"""

from __future__ import annotations

import dataclasses
import io
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from torch.utils.data import Dataset, IterableDataset

from ronde.adapt.redirect import (
    FileCache,
    Observation,
    RedirectPlan,
    Remedied,
    folder_of,
    trace_reads,
)
from ronde.data import AUTO, DECODERS, Pipeline, available, check_decoder
from ronde.introspect import preserve_state, seed_all
from ronde.loader import FeedSettings
from ronde.profile import same_bits, size_of
from ronde.world import ArgumentError

__all__ = ["DatasetFacts", "DecoderJudgment", "apply_remedies", "dataset_facts", "judge_decoder"]

_LOOKED_AT = 8  # samples
_MOST_PIXELS = 8_000_000


# -- what a data set does --------------------------------------------------------------


@dataclass(frozen=True)
class DecoderJudgment:
    """A decoder compared with Pillow on some images.

    Attributes:
        images: that both decoded; ``refused``: that it left to Pillow.
        same_bits: all of them came out bit for bit equal.
        difference: mean absolute difference of pixels, of 255.
        milliseconds: of CPU time for one image, to the image that the data set gets;
            ``pillow_milliseconds`` for Pillow itself.
        array_milliseconds: the same, to the array that ``feed.images`` works on.
    """

    images: int
    refused: int
    same_bits: bool
    difference: float
    milliseconds: float
    pillow_milliseconds: float
    array_milliseconds: float

    @property
    def label(self) -> str:
        """What switching to it means for the training."""
        return "same bits" if self.same_bits else "same distribution"


@dataclass(frozen=True)
class DatasetFacts:
    """What some samples show about a dataset, and so which remedies are possible.

    Attributes:
        pipeline: it is a :class:`ronde.feed.Pipeline`.
        jpeg: it decodes JPEG images with Pillow.
        decoders: other decoders that can be used here, against Pillow on its own images.
        images: each sample is one image file, as ``feed.images`` reads them.
        imread: OpenCV reads its files, which a cache of files does not reach.
        shrink: 2, 4 or 8 where ``feed.images`` could decode most images at that fraction of their
            size, else 1.
        files: read for one sample.
        folder: that they all lie in, or "".
        file_bytes: read for one sample, in files.
        decoded_bytes: of the images of one sample.
        sample_bytes: of one finished sample.
        draws: it draws random numbers, so finished samples cannot be kept.
        error: why nothing could be found out, or "".
    """

    pipeline: bool = False
    jpeg: bool = False
    decoders: dict[str, DecoderJudgment] = field(default_factory=dict)
    images: bool = False
    imread: bool = False
    shrink: int = 1
    files: float = 0.0
    folder: str = ""
    file_bytes: float = 0.0
    decoded_bytes: float = 0.0
    sample_bytes: float = 0.0
    draws: bool = False
    error: str = ""


def _spread(n: int, count: int) -> list[int]:
    return sorted({int(i) for i in np.linspace(0, n - 1, min(n, count))})


def _make_samples(dataset: Any, count: int) -> tuple[Observation, list[Any]]:
    """Make some samples under fixed random numbers."""
    seed_all(1)
    return trace_reads(dataset, _spread(len(dataset), count))


def judge_decoder(decoder: str, images: Sequence[bytes]) -> DecoderJudgment:
    """Decode JPEG images with a decoder and with Pillow, and compare.

    Args:
        decoder: one of :data:`ronde.data.image_decoders.DECODERS`.
        images: bytes of JPEG files.

    Raises:
        ArgumentError: the decoder is not known or cannot be used here.
    """
    check_decoder(decoder)
    plain = _Decoding(images)
    swapped = Remedied(plain, RedirectPlan(decoder=decoder))
    refused, total, pixels, equal, count = 0, 0.0, 0, True, 0
    spent: list[list[int]] = []
    for i, data in enumerate(images):
        try:
            one, other = DECODERS[decoder].call(data, 1), DECODERS["pillow"].call(data, 1)
        except Exception:
            refused += 1
            continue
        count += 1
        equal = equal and one.shape == other.shape and bool(np.array_equal(one, other))
        if one.shape == other.shape:
            total += float(np.abs(one.astype(np.int16) - other).sum())
            pixels += one.size
        calls = (
            partial(swapped.__getitem__, i),
            partial(plain.__getitem__, i),
            partial(DECODERS[decoder].call, data, 1),
        )
        spent.append([_cpu(call) for call in calls])
    means = (sum(times) / len(times) / 1e6 for times in zip(*spent or [[0, 0, 0]], strict=True))
    return DecoderJudgment(count, refused, equal and count > 0, total / max(1, pixels), *means)


class _Decoding(Dataset[Any]):
    """Images as datasets decode them."""

    def __init__(self, images: Sequence[bytes]) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: Any) -> Any:
        from PIL import Image

        return Image.open(io.BytesIO(self.images[i])).convert("RGB")


def _cpu(work: Callable[[], Any]) -> int:
    """Best of three CPU times in nanoseconds, because the machine is shared."""
    times = []
    for _ in range(3):
        begin = time.thread_time_ns()
        work()
        times.append(time.thread_time_ns() - begin)
    return min(times)


def _some(observation: Observation) -> list[bytes]:
    """Images for judging a decoder, few enough to take well under a second."""
    found: list[bytes] = []
    pixels = 0
    for data, (_, width, height, _) in zip(
        observation.jpegs, [i for i in observation.images if i[0] == "JPEG"], strict=False
    ):
        if found and pixels + width * height > _MOST_PIXELS:
            break
        found.append(data)
        pixels += width * height
    return found


def dataset_facts(dataset: Any, samples: int = 16) -> DatasetFacts:
    """Inspect some samples of a dataset; random state is restored.

    Args:
        dataset: a map-style Dataset or a Pipeline.
        samples: how many to look at.

    Example:
        >>> dataset_facts([1.0, 2.0, 3.0]).files
        0.0
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__") or not len(dataset):
        return DatasetFacts(error="it can only be iterated, or is empty")
    try:
        # once around both: generators of its own go on, so that what they draw shows
        with preserve_state(dataset):
            observation, made = _make_samples(dataset, samples)
            seed_all(2)
            again = trace_reads(dataset, _spread(len(dataset), samples)[:2])[1]
    except Exception as error:  # a bad sample: reading says so when its turn comes
        return DatasetFacts(error=f"{type(error).__name__}: {error}")
    n = max(1, observation.samples)
    jpegs = _some(observation)
    others = [name for name in available() if name in AUTO and name != "pillow"]
    pipeline = isinstance(dataset, Pipeline)
    return DatasetFacts(
        pipeline=pipeline,
        jpeg=bool(jpegs),
        decoders={name: judge_decoder(name, jpegs) for name in others} if jpegs else {},
        images=not pipeline
        and len(observation.images) == len(observation.files) == observation.samples,
        imread=observation.imread,
        shrink=_shrink(observation) if jpegs else 1,
        files=len(observation.files) / n,
        folder=folder_of([path for path, _ in observation.files]),
        file_bytes=sum(size for _, size in observation.files) / n,
        decoded_bytes=sum(w * h * 3 for _, w, h, _ in observation.images) / n,
        sample_bytes=sum(map(size_of, made)) / n,
        draws=not all(same_bits(a, b) for a, b in zip(made, again, strict=False)),
    )


def _shrink(observation: Observation) -> int:
    """The largest reduction (1/2, 1/4, 1/8) that leaves most images enough pixels for their
    resize.
    """
    room = [
        min(before[0] / after[0], before[1] / after[1])
        for before, after in observation.resized
        if min(after) > 0
    ]
    return next((f for f in (8, 4, 2) if room and float(np.median(room)) >= f), 1)


# -- applying them ---------------------------------------------------------------------

_FOR_PIPELINES = {
    "decode_to_size": "feed.images(FOLDER, decode_to_size=True)",
    "pack": "feed.images(PACK) or feed.tar(PACK)",
    "device_augment": "feed.images(FOLDER, on_device=True)",
}


def apply_remedies(dataset: Any, settings: FeedSettings) -> Any:
    """A Dataset read with the settings ``decoder``, ``decode_to_size``, ``cache``, ``pack`` and
    ``device_augment``.

    :func:`ronde.adapt.feed_settings.apply_settings` handles the loading settings (``executor``,
    ``workers``, ``prefetch``, ``threads``, ``pin_memory``, ``echo``). The order of samples stays.
    So do their bits, except with ``decode_to_size``, ``device_augment``, and decoders that make
    other pixels; see :func:`judge_decoder`.

    Args:
        dataset: a map-style Dataset or a Pipeline. A plain Dataset takes ``decoder`` and ``cache``
            only.

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
    if settings.cache is None and (
        settings.cache_in is not None or settings.cache_bytes is not None
    ):
        raise ArgumentError("feed settings cache_in and cache_bytes go with cache: read or decode.")
    if isinstance(dataset, Pipeline):
        return _apply_to_pipeline(dataset, settings)
    for name, instead in _FOR_PIPELINES.items():
        if getattr(settings, name):
            raise ArgumentError(
                f"feed setting {name} is for ronde.feed pipelines, and "
                f"{type(dataset).__name__} is a Dataset of its own. "
                f"Delete the line, or read the files with {instead} instead."
            )
    return (
        dataset
        if settings.decoder is None and settings.cache is None
        else _swapped(dataset, settings)
    )


def _apply_to_pipeline(pipeline: Pipeline, settings: FeedSettings) -> Pipeline:
    from ronde.data import with_settings

    if settings.pack is not None:
        pipeline = dataclasses.replace(
            pipeline, source=_PackedSource(pipeline.source, settings.pack)
        )
    if (
        settings.decoder is not None
        or settings.decode_to_size is not None
        or settings.device_augment is not None
    ):
        pipeline = with_settings(
            pipeline,
            decoder=settings.decoder,
            decode_to_size=settings.decode_to_size,
            on_device=settings.device_augment,
        )
    if settings.cache is not None:
        pipeline = pipeline.cache(
            settings.cache, settings.cache_in or "memory", settings.cache_bytes
        )
    return pipeline


def _swapped(dataset: Any, settings: FeedSettings) -> Any:
    """A plain Dataset with another decoder or a cache."""
    with preserve_state(dataset):
        observation, _ = _make_samples(dataset, _LOOKED_AT)
    what, plan = type(dataset).__name__, RedirectPlan()
    looked = f"(looked at {observation.samples} samples of {what})"
    if settings.decoder not in (None, "pillow"):
        decoder = check_decoder(str(settings.decoder))
        if not observation.jpegs:
            raise ArgumentError(
                f"feed setting decoder: no JPEG image is decoded with Pillow {looked}, so "
                "there is nothing to decode otherwise."
            )
        if decoder != "pillow":
            if not judge_decoder(decoder, _some(observation)).images:
                raise ArgumentError(
                    f"feed setting decoder: {decoder} can decode none of these images {looked}."
                )
            plan.decoder = decoder
    where, limit = settings.cache_in or "memory", settings.cache_bytes
    if settings.cache == "decode":
        from ronde.cache import cached_dataset

        try:
            with preserve_state(dataset):
                return cached_dataset(
                    dataset if plan.decoder is None else Remedied(dataset, plan), where, limit
                )
        except ArgumentError as error:
            raise ArgumentError(
                "feed setting cache: decode keeps the finished samples of a Dataset, which "
                "is not possible here. For images, use "
                f'feed.images(FOLDER).cache("decode") instead: {error}'
            ) from None
    if settings.cache == "read":
        plan.reads = _file_cache(dataset, observation, where, limit, looked)
    return Remedied(dataset, plan)


def _file_cache(
    dataset: Any, observation: Observation, where: str, limit: int | None, looked: str
) -> FileCache:
    if observation.imread:
        raise ArgumentError(
            f"feed setting cache: OpenCV reads the files by itself {looked}. Use "
            'feed.images(FOLDER).cache("read") instead, or decode '
            "with cv2.imdecode what open() reads."
        )
    if not observation.files:
        raise ArgumentError(
            f"feed setting cache: no file is opened while a sample is made {looked}, so "
            "there is nothing to keep."
        )
    kind = type(dataset)
    if observation.own_many:
        raise ArgumentError(
            f"feed setting cache: {kind.__name__} has a __getitems__ of its own, so it is "
            "not known which file belongs to which sample."
        )
    from ronde.introspect import digest

    names = sorted(path for path, _ in observation.files)
    key = digest("files of a data set", 2, kind.__module__, kind.__qualname__, len(dataset), names)
    about = {
        "dataset": kind.__qualname__,
        "samples": len(dataset),
        "kept": "read",
        "folder": folder_of(names),
    }
    return FileCache(len(dataset), where, limit, key, about)


def _opened_pack(path: str) -> Any:
    from ronde.data import is_pack, tar

    if not is_pack(path):
        raise ArgumentError(f"feed setting pack: {path} is not what ronde pack wrote.")
    return tar(path)


class _PackedSource:
    """A pack that replaces its folder: the folder's order and fingerprint, the pack's bytes."""

    def __init__(self, source: Any, path: str) -> None:
        self._packed = _opened_pack(path)
        self.fingerprint: str = source.fingerprint
        if self._packed.fingerprint != self.fingerprint:
            raise ArgumentError(
                f"feed setting pack: {path} is not a pack of {source!r}, as it is now."
            )
        self.source = source

    def __len__(self) -> int:
        return len(self._packed)

    def read(self, ids: Sequence[int]) -> list[Any]:
        return list(self._packed.read(ids))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "source":
            raise AttributeError(name)
        return getattr(self.source, name)
