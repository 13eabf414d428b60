"""Image transforms: crop, resize, flip; each maps ``uint8`` 3 × height × width to another.

Those that are random ask :func:`ronde.feed.rng`, whose numbers depend on the sample alone: the same
bits on any number of workers.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ronde.data.named_stages import rng
from ronde.world import ArgumentError

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Mean and standard deviation of red, green and blue over ImageNet, in [0, 1]."""


def pair(size: int | tuple[int, int], argument: str) -> tuple[int, int]:
    """``size`` as (height, width); ``argument`` is its name in the error."""
    sides = tuple(size) if isinstance(size, list | tuple) else (size, size)
    if len(sides) != 2 or any(
        isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in sides
    ):
        raise ArgumentError(
            f"{argument}={size!r}: expected a whole number of pixels, or (height, width)."
        )
    return sides[0], sides[1]


def resized(image: Tensor, height: int, width: int) -> Tensor:
    """An antialiased bilinear resize of 3 × height × width, as Pillow's ``resize(…, BILINEAR)``."""
    if image.shape[-2:] == (height, width):
        return image
    # As one image of a batch whose channels are innermost: torch then neither transposes what
    # simplejpeg gave nor what it gives back.
    return F.interpolate(
        image.permute(1, 2, 0)[None].permute(0, 3, 1, 2),
        (height, width),
        mode="bilinear",
        antialias=True,
    )[0]


@dataclass(frozen=True)
class RandomResizedCrop:
    """Crop a random part of random shape and resize it; the same distribution as torchvision's.

    Args:
        size: of the result, in pixels: one number or (height, width).
        scale: least and greatest share of the image's area.
        ratio: least and greatest width / height; logarithms are uniform.

    Example:
        >>> RandomResizedCrop(8)(torch.zeros(3, 20, 30, dtype=torch.uint8)).shape
        torch.Size([3, 8, 8])
    """

    size: int | tuple[int, int]
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)

    def __post_init__(self) -> None:
        pair(self.size, "RandomResizedCrop(size)")
        for name, (low, high) in (("scale", self.scale), ("ratio", self.ratio)):
            if not 0 < low <= high:
                raise ArgumentError(
                    f"RandomResizedCrop({name}={(low, high)}): expected two numbers above "
                    "0, the smaller one first."
                )

    def box(self, height: int, width: int) -> tuple[int, int, int, int]:
        """Draw the crop in an image of this size: top, left, height and width."""
        area = height * width
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        numbers = rng()
        for _ in range(10):
            a, b, c, d = numbers.random(4).tolist()
            part = area * (self.scale[0] + a * (self.scale[1] - self.scale[0]))
            ratio = math.exp(low + b * (high - low))
            w, h = round(math.sqrt(part * ratio)), round(math.sqrt(part / ratio))
            if 0 < w <= width and 0 < h <= height:
                return (int(c * (height - h + 1)), int(d * (width - w + 1)), h, w)
        # None fitted: the largest part in the middle whose shape is allowed.
        w, h = width, height
        if width / height < self.ratio[0]:
            h = max(1, round(width / self.ratio[0]))
        elif width / height > self.ratio[1]:
            w = max(1, round(height * self.ratio[1]))
        return ((height - h) // 2, (width - w) // 2, h, w)

    def __call__(self, image: Tensor) -> Tensor:
        """Crop, then resize."""
        top, left, h, w = self.box(*image.shape[-2:])
        return resized(image[:, top : top + h, left : left + w], *pair(self.size, "size"))


@dataclass(frozen=True)
class Resize:
    """Resize the whole image.

    Args:
        shorter: pixels of its shorter side, the shape being kept; or (height, width).
    """

    shorter: int | tuple[int, int]

    def __post_init__(self) -> None:
        pair(self.shorter, "Resize(shorter)")

    def _target(self, height: int, width: int) -> tuple[int, int]:
        if not isinstance(self.shorter, int):
            return pair(self.shorter, "shorter")
        if height <= width:
            return self.shorter, max(1, int(self.shorter * width / height))
        return max(1, int(self.shorter * height / width)), self.shorter

    def __call__(self, image: Tensor) -> Tensor:
        """Resize the image."""
        return resized(image, *self._target(*image.shape[-2:]))


@dataclass(frozen=True)
class CenterCrop:
    """Crop the center of the image.

    Args:
        size: in pixels: one number or (height, width).
    """

    size: int | tuple[int, int]

    def __post_init__(self) -> None:
        pair(self.size, "CenterCrop(size)")

    def __call__(self, image: Tensor) -> Tensor:
        """Crop the image."""
        height, width = image.shape[-2:]
        h, w = pair(self.size, "size")
        if h > height or w > width:
            # No ArgumentError, which would end a training that skips bad samples: it is this
            # image's fault. Whoever reads it names it.
            raise ValueError(
                f"CenterCrop({self.size}): the image is only {height} × {width} there "
                "(height × width); put a Resize before it."
            )
        top, left = round((height - h) / 2), round((width - w) / 2)
        return image[:, top : top + h, left : left + w]


@dataclass(frozen=True)
class HorizontalFlip:
    """Mirror left to right with a probability.

    Args:
        p: the probability.
    """

    p: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.p <= 1:
            raise ArgumentError(f"HorizontalFlip(p={self.p}): expected a probability, 0 … 1.")

    def __call__(self, image: Tensor) -> Tensor:
        """Mirror the image, or not."""
        return image.flip(-1) if rng().random() < self.p else image


@functools.lru_cache(maxsize=16)
def _constants(
    mean: tuple[float, ...], std: tuple[float, ...], width: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Means and deviations in 0 … 255, repeated to a row: innermost 3 is slow on CPUs."""
    rows = [
        (torch.tensor(values, dtype=torch.float32) * 255).repeat(width).to(device)
        for values in (mean, std)
    ]
    return rows[0], rows[1]


@dataclass(frozen=True)
class Normalize:
    """``(pixel / 255 - mean) / std`` per channel, as floats.

    As the last step it runs on the device: bytes are a quarter of the transfer.

    Args:
        mean: of red, green and blue, in [0, 1].
        std: standard deviation, likewise.
    """

    mean: tuple[float, float, float] = IMAGENET[0]
    std: tuple[float, float, float] = IMAGENET[1]

    def __post_init__(self) -> None:
        if len(self.mean) != 3 or len(self.std) != 3 or not all(s > 0 for s in self.std):
            raise ArgumentError(
                f"Normalize(mean={self.mean}, std={self.std}): expected three numbers "
                "each, std above 0."
            )

    def __call__(self, image: Tensor) -> Tensor:
        """Normalize one image, ``float32``."""
        return self.normalized(image[None], torch.float32)[0]

    def normalized(self, images: Tensor, dtype: torch.dtype) -> Tensor:
        """Normalize batch × 3 × height × width of 0 … 255; the result is ``channels_last``."""
        n, _, height, width = images.shape
        rows = images.permute(0, 2, 3, 1)
        mean, std = _constants(self.mean, self.std, width, images.device)
        if images.device.type == "cpu":
            floats = torch.empty((n, height, width, 3), dtype=torch.float32)
            # an image at a time stays in the cache
            for one, out in zip(rows, floats.view(n, height, width * 3), strict=True):
                out.view(height, width, 3).copy_(one)
                out.sub_(mean).div_(std)
        else:
            floats = rows.to(torch.float32, memory_format=torch.contiguous_format).view(
                n, height, width * 3
            )
            floats = (
                floats.sub_(mean).div_(std)
                if images.dtype != torch.float32
                else (floats - mean).div_(std)
            )
            floats = floats.view(n, height, width, 3)
        return floats.to(dtype).permute(0, 3, 1, 2)
