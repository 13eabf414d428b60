"""A Pillow image whose pixels are a NumPy array until somebody needs them as Pillow has them.

Pillow keeps colours in four bytes; putting a decoded array into that form and back costs as much as a third of the decoding. Cropping, turning
over, handing the pixels out, and with ``resizes`` making smaller too, need no such form.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

__all__ = ["possible", "smaller", "to_image"]


@functools.cache
def possible() -> bool:
    """Whether this Pillow is built as expected: its images reach their pixels through a property."""
    from PIL import Image

    return isinstance(vars(Image.Image).get("im"), property)


def smaller(pixels: Any, size: tuple[int, int], resample: int | None) -> Any:
    """An array of pixels made smaller or larger by torch, antialiased as Pillow does it; None where torch cannot.

    Args:
        size: width and height to make of it.
        resample: Pillow's number for bilinear or bicubic.
    """
    mode = {2: "bilinear", 3: "bicubic", None: "bicubic"}.get(resample)
    if mode is None or min(size) < 1:
        return None
    # Batch first, then the channels' turn: so torch sees, and gives back, channels that lie side by side.
    given = _tensor(pixels).unsqueeze(0).permute(0, 3, 1, 2)
    made = torch.nn.functional.interpolate(given, size=(size[1], size[0]), mode=mode, antialias=True, align_corners=False)
    return made.permute(0, 2, 3, 1)[0].contiguous().numpy()


def _tensor(pixels: Any) -> torch.Tensor:
    return torch.from_numpy(pixels if pixels.flags.writeable else pixels.copy())


def _plain(size: tuple[int, int], data: bytes, info: dict[Any, Any]) -> Any:
    from PIL import Image

    image = Image.frombytes("RGB", size, data)
    image.info = info
    return image


@functools.cache
def _class() -> Any:
    from PIL import Image

    base: Any = Image.Image

    class LazyImage(base):  # type: ignore[misc, valid-type]
        """See :mod:`ronde.feed.lazy`. Once its pixels are in Pillow's form they stay there, and it is an image like any other."""

        def __init__(self, pixels: Any, info: dict[Any, Any], resizes: bool) -> None:
            super().__init__()
            self._mode, self._size = "RGB", (pixels.shape[1], pixels.shape[0])
            self.info = info
            self._ronde_pixels = pixels
            self._ronde_resizes = resizes
            self._ronde_shown: Any = None

        def _ronde_fill(self) -> None:
            pixels, self._ronde_pixels = self._ronde_pixels, None
            if pixels is not None:
                self._im = Image.frombuffer("RGB", self._size, np.ascontiguousarray(pixels), "raw", "RGB", 0, 1).im
                self.__class__ = base

        def _ronde_like(self, pixels: Any) -> Any:
            return LazyImage(pixels, self._copy_info(), self._ronde_resizes)

        @property
        def im(self) -> Any:
            self._ronde_fill()
            return base.im.fget(self)

        @im.setter
        def im(self, value: Any) -> None:
            self._ronde_pixels = None
            base.im.fset(self, value)

        def load(self) -> Any:
            self._ronde_fill()
            return base.load(self)

        def close(self) -> None:
            self._ronde_pixels = None
            base.close(self)

        @property
        def __array_interface__(self) -> dict[str, Any]:
            if self._ronde_pixels is None:
                return dict(base.__array_interface__.fget(self))
            # Not to be written through, as Pillow's own. Whoever looks holds the image, and the image holds the memory.
            if self._ronde_shown is None:
                self._ronde_shown = np.ascontiguousarray(self._ronde_pixels)
            shown = self._ronde_shown
            return {"shape": shown.shape, "typestr": "|u1", "version": 3, "data": (shown.ctypes.data, True)}

        def tobytes(self, *args: Any, **kwargs: Any) -> bytes:
            if self._ronde_pixels is None or args or kwargs:
                return bytes(base.tobytes(self, *args, **kwargs))
            return bytes(self._ronde_pixels.tobytes())

        def convert(self, mode: Any = None, *args: Any, **kwargs: Any) -> Any:
            if self._ronde_pixels is None or mode not in (None, "RGB") or args or kwargs:
                return base.convert(self, mode, *args, **kwargs)
            return self._ronde_like(self._ronde_pixels)

        def copy(self) -> Any:
            return base.copy(self) if self._ronde_pixels is None else self._ronde_like(self._ronde_pixels)

        def crop(self, box: Any = None) -> Any:
            if self._ronde_pixels is not None and box is not None:
                left, top, right, bottom = map(int, map(round, box))
                if 0 <= left < right <= self._size[0] and 0 <= top < bottom <= self._size[1]:
                    return self._ronde_like(self._ronde_pixels[top:bottom, left:right])
            return base.crop(self, box)

        def transpose(self, method: Any) -> Any:
            if self._ronde_pixels is None or method not in (Image.Transpose.FLIP_LEFT_RIGHT, Image.Transpose.FLIP_TOP_BOTTOM):
                return base.transpose(self, method)
            return self._ronde_like(_tensor(self._ronde_pixels).flip(1 if method == Image.Transpose.FLIP_LEFT_RIGHT else 0).numpy())

        def resize(self, size: Any, resample: Any = None, box: Any = None, reducing_gap: Any = None) -> Any:
            pixels = self._ronde_pixels
            if pixels is not None and self._ronde_resizes and reducing_gap is None:
                if box is not None and all(float(b).is_integer() for b in box):
                    left, top, right, bottom = map(int, box)
                    inside = 0 <= left < right <= self._size[0] and 0 <= top < bottom <= self._size[1]
                    pixels, box = (pixels[top:bottom, left:right], None) if inside else (pixels, box)
                made = None if box is not None else smaller(pixels, tuple(size), resample)
                if made is not None:
                    return self._ronde_like(made)
            return base.resize(self, size, resample, box, reducing_gap)

        def __eq__(self, other: object) -> bool:
            for one in (self, other):
                if isinstance(one, LazyImage):
                    one._ronde_fill()
            return bool(base.__eq__(self, other))

        __hash__ = None  # type: ignore[assignment]

        def __reduce__(self) -> Any:
            return _plain, (self._size, self.tobytes(), self._copy_info())

        def __reduce_ex__(self, protocol: Any) -> Any:
            return self.__reduce__()

    return LazyImage


def to_image(pixels: Any, info: dict[Any, Any], resizes: bool) -> Any:
    """A Pillow image of pixels.

    Args:
        pixels: height × width × 3, ``uint8``; nobody may change them from here on.
        info: what Pillow knows of the file.
        resizes: ``resize`` is done by torch: pixels come out a little differently.
    """
    return _class()(pixels, info, resizes)
