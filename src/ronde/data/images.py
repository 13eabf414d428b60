"""Images as training data: decode, crop, resize, flip, normalize."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import default_collate, get_worker_info

from ronde.data import image_decoders as decoding
from ronde.data.contract import Source, Step
from ronde.data.pipeline import Pipeline
from ronde.data.transforms import (
    CenterCrop,
    HorizontalFlip,
    Normalize,
    RandomResizedCrop,
    Resize,
)
from ronde.world import ArgumentError

__all__ = ["decoder_of", "images", "with_decoder"]

SUFFIXES = (
    ".jpg",
    ".jpeg",
    ".jpe",
    ".jfif",
    ".png",
    ".webp",
    ".bmp",
    ".gif",
    ".tif",
    ".tiff",
    ".ppm",
    ".pgm",
)


class _Decoded(NamedTuple):
    image: Tensor  # 3 × height × width, a view of what the decoder gave
    label: Any
    name: str


@dataclass(frozen=True)
class Decode:
    """Decodes a file's bytes to pixels."""

    decoder: str
    orient: bool

    def __call__(self, sample: Any) -> _Decoded:
        """Decode ``(bytes, label, name)``."""
        data, label, name = sample
        pixels = decoding.decode_image(data, self.decoder, name=name, orient=self.orient)
        return _Decoded(torch.from_numpy(pixels).permute(2, 0, 1), label, name)


@dataclass(frozen=True)
class Augment:
    """Applies the transforms on the CPU; normalization comes later."""

    transforms: tuple[Callable[[Any], Any], ...]

    def __call__(self, sample: _Decoded) -> Any:
        image, label, _ = sample
        for transform in self.transforms:
            image = transform(image)
        return image if label is None else (image, label)


def _new(shape: tuple[int, ...]) -> Tensor:
    """Allocate a batch of bytes; in shared memory in a loading process, to avoid a copy."""
    if get_worker_info() is None:
        return torch.empty(shape, dtype=torch.uint8)
    storage = torch.UntypedStorage._new_shared(math.prod(shape))  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=torch.uint8).set_(storage).view(shape)  # type: ignore[call-overload]


def _sizes(sizes: set[tuple[int, ...]]) -> str:
    return ", ".join(f"{h} × {w}" for h, w in sorted(sizes)[:3])


class CollateImages:
    """Collates images of one size to batch × 3 × height × width, ``uint8``, channels last."""

    def __call__(self, samples: Sequence[Any]) -> Any:
        first = samples[0]
        image = first[0] if isinstance(first, tuple) else first
        if (
            not isinstance(image, Tensor)
            or image.dtype != torch.uint8
            or image.ndim != 3
            or image.shape[0] != 3
        ):
            return default_collate(list(samples))  # the user's own steps made something else of it
        column = [s[0] for s in samples] if isinstance(first, tuple) else samples
        if any(x.shape != image.shape for x in column):
            sizes = {tuple(x.shape[-2:]) for x in column}
            raise ArgumentError(
                f"images of different sizes cannot form a batch ({_sizes(sizes)}): end with a crop "
                "or a Resize to (height, width)."
            )
        # as decoders lay pixels out: nothing is transposed before the device has them
        batch = _new((len(column), *image.shape[1:], 3)).permute(0, 3, 1, 2)
        for place, x in zip(batch, column, strict=True):
            place.copy_(x)
        if not isinstance(first, tuple):
            return batch
        return [batch, *(default_collate(list(c)) for c in list(zip(*samples, strict=True))[1:])]


@dataclass(frozen=True)
class Finish:
    """Bytes to floats, on the device.

    Attributes:
        anywhere: each value is a function of the same few others, whatever computes it: the same
            bits in any thread.
    """

    normalize: Normalize
    dtype: torch.dtype
    anywhere: ClassVar[bool] = True

    def __call__(self, batch: Any) -> Any:
        labelled = isinstance(batch, list | tuple) and bool(batch)
        images, labels = (batch[0], list(batch[1:])) if labelled else (batch, [])
        if (
            not isinstance(images, Tensor)
            or images.dtype != torch.uint8
            or images.ndim != 4
            or images.shape[1] != 3
        ):
            return batch  # the user's own steps made something else of it
        images = self.normalize.normalized(images, self.dtype)
        return [images, *labels] if labels else images


def _transforms(size: int | tuple[int, int], augment: Any) -> tuple[Callable[[Any], Any], ...]:
    if augment is True:
        return (RandomResizedCrop(size), HorizontalFlip())
    if augment is False or augment is None:
        if isinstance(size, int):
            # 256 and 224 pixels are the usual pair of evaluations on ImageNet
            return (Resize(round(size * 256 / 224)), CenterCrop(size))
        return (Resize(size),)
    steps = tuple(augment) if isinstance(augment, Sequence) else (augment,)
    for t in steps:
        if not callable(t):
            raise ArgumentError(
                f"augment: {t!r} cannot be called. Give True, False, a callable, or a list of them."
            )
    return steps


def _normalize(value: Any) -> Normalize | None:
    if value is None or isinstance(value, Normalize):
        return value
    if value == "imagenet":
        return Normalize()
    try:
        mean, std = value
        return Normalize(tuple(mean), tuple(std))
    except (TypeError, ValueError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(
            f"normalize={value!r}: expected 'imagenet', (mean, std) with three numbers "
            "each, or None."
        ) from None


def _source(path: Any, labels: Any, options: dict[str, Any]) -> Source:
    if not isinstance(path, str | os.PathLike | list | tuple):
        if isinstance(path, Source):
            if options:
                raise ArgumentError(
                    f"feed.images: {next(iter(options))}= goes with a path: give it to the source."
                )
            return path
        raise ArgumentError(
            "feed.images needs a folder, tar files, a pack or a source; found "
            f"{type(path).__name__}."
        )
    from ronde.data.sources.folder import folder
    from ronde.data.sources.packed import is_pack
    from ronde.data.sources.parquet import parquet_files
    from ronde.data.sources.tar import tar

    names = [os.fspath(p) for p in path] if isinstance(path, list | tuple) else [os.fspath(path)]
    if not names:
        raise ArgumentError("feed.images was given an empty list.")
    if len(names) == 1 and is_pack(names[0]):
        return tar(names[0], **options)
    if all(".tar" in name.rpartition("/")[2] for name in names):
        label = "cls" if labels == "folder" else None if labels == "none" else labels
        return tar(
            names if len(names) > 1 else names[0],
            data=[s[1:] for s in SUFFIXES],
            label=label,
            **options,
        )
    if all(name.endswith((".parquet", ".pq")) for name in names):
        if not isinstance(labels, str | None):
            raise ArgumentError(
                "feed.images: labels= of Parquet files is the name of a column, 'none', or "
                "left out."
            )
        return parquet_files(
            names, {"folder": None, "none": "", None: ""}.get(labels, labels), **options
        )
    if len(names) != 1:
        raise ArgumentError("feed.images takes one folder, or a list of tar or Parquet files.")
    return folder(names[0], labels=labels, **{"suffixes": SUFFIXES, **options})


def images(
    path: Any,
    size: int | tuple[int, int] = 224,
    *,
    labels: Any = "folder",
    augment: Any = True,
    normalize: Any = "imagenet",
    decoder: str = "auto",
    orient: bool = False,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Pipeline:
    """Images and their labels, ready for a model.

    Batches travel as bytes and become floats on the device. Only the crop is resized, with an
    antialiased filter whose result is within 0.02 of 255 of Pillow's on average.

    Args:
        path: a folder (see :func:`ronde.feed.folder`; files ending in .jpg, .jpeg, .jpe, .jfif,
            .png, .webp, .bmp, .gif, .tif, .tiff, .ppm or .pgm, in capitals or not, unless
            ``suffixes=`` says otherwise), tar files (:func:`ronde.feed.tar`), Parquet files with
            one column of images, as Hugging Face's data sets have them, what ``ronde pack`` made,
            or any source of ``(bytes, label, name)``.
        size: of the result in pixels: one number or (height, width).
        labels: of the folder, as :func:`ronde.feed.folder` takes them; of tar files, the ending of
            the label's file (``cls``) or a function; of Parquet files, the column (``label``).
            Without labels (``"none"``) a sample is the image alone.
        augment: True crops and flips at random (:class:`RandomResizedCrop`,
            :class:`HorizontalFlip`), as for training; False takes the middle (:class:`Resize` to
            256/224 of the size, :class:`CenterCrop`), as for evaluation; or a callable or list of
            them: this module's, or your own, which get ``uint8`` tensors 3 × height × width. Those
                that are random ask :func:`ronde.feed.rng`.
        normalize: ``"imagenet"``, ``(mean, std)`` in [0, 1], or None for bytes. A
            :class:`Normalize` at the end of ``augment`` counts instead.
        decoder: of JPEG files: ``auto``, ``simplejpeg`` or ``pillow``;
            see :func:`ronde.data.image_decoders.decode_image`.
        orient: turn images as their EXIF orientation says; False leaves them as they are stored, as
            Pillow does.
        dtype: of the normalised images.
        options: more for the folder, the tar or the Parquet files, as ``like=`` the training set,
            for a test set.

    Returns:
        A pipeline whose batches are ``[images, labels]``: batch × 3 × height × width, channels
        innermost in memory (``torch.channels_last``).

    Raises:
        ArgumentError: a value that cannot be used.

    Example:
        >>> import pathlib, tempfile, numpy, PIL.Image
        >>> here = pathlib.Path(tempfile.mkdtemp())
        >>> for kind in ("cat", "dog"):
        ...     (here / kind).mkdir()
        ...     PIL.Image.fromarray(numpy.zeros((40, 60, 3),
        ...     numpy.uint8)).save(here / kind / "1.jpg")
        >>> data = images(here, size=32)
        >>> pictures, labels = data.finish(data.collate(data.__getitems__([0, 1])))
        >>> pictures.shape, labels.tolist()
        (torch.Size([2, 3, 32, 32]), [0, 1])
    """
    transforms = _transforms(size, augment)
    normal = _normalize(normalize)
    last = transforms[-1] if transforms else None
    if isinstance(last, Normalize):
        normal, transforms = last, transforms[:-1]
    decoding.check_decoder(decoder)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ArgumentError(
            f"dtype={dtype!r}: expected a floating-point type; normalize=None gives bytes."
        )
    steps = (Step("decode", Decode(decoder, orient)), Step("augment", Augment(transforms)))
    finish = None if normal is None else Finish(normal, dtype)
    return Pipeline(_source(path, labels, options), steps, CollateImages(), finish)


def decoder_of(pipeline: Pipeline) -> str:
    """The JPEG decoder of an :func:`images` pipeline; "" of another one."""
    decode = next((s.call for s in pipeline.steps if isinstance(s.call, Decode)), None)
    return "" if decode is None else decoding.check_decoder(decode.decoder)


def with_decoder(pipeline: Pipeline, decoder: str) -> Pipeline:
    """Copy an :func:`images` pipeline with another JPEG decoder.

    Raises:
        ArgumentError: it is not made of images, or the decoder cannot be used here.
    """
    decoding.check_decoder(decoder)
    if not any(isinstance(step.call, Decode) for step in pipeline.steps):
        raise ArgumentError("decoder is for feed.images pipelines only.")
    steps = (
        replace(step, call=replace(step.call, decoder=decoder))
        if isinstance(step.call, Decode)
        else step
        for step in pipeline.steps
    )
    return replace(pipeline, steps=tuple(steps))
