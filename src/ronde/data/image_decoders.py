"""Decode image bytes to pixels. Pillow is the reference and the fallback.

The result equals ``numpy.asarray(PIL.Image.open(file).convert("RGB"))``: height × width × 3,
``uint8``. The one exception is 16-bit gray, which ``convert`` would clip: its upper 8 bits are
kept, as Pillow does for 16-bit color. simplejpeg uses the same libjpeg-turbo as Pillow; its
pixels were found equal bit for bit. What it rejects (broken files, CMYK) goes to Pillow; if Pillow
rejects it too, the error names the file.
"""

from __future__ import annotations

import functools
import importlib
import io
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from ronde.world import ArgumentError, SampleError

Pixels = npt.NDArray[np.uint8]


def _simplejpeg(data: bytes) -> Pixels:
    import simplejpeg

    # whose colors libjpeg-turbo converts slightly differently from Pillow
    if simplejpeg.decode_jpeg_header(data)[2] in ("CMYK", "YCCK"):
        raise ValueError("CMYK")
    pixels: Pixels = simplejpeg.decode_jpeg(data)
    return pixels


def _pillow(data: bytes, orient: bool = False) -> Pixels:
    from PIL import Image, ImageOps

    with Image.open(io.BytesIO(data)) as image:
        if orient:
            ImageOps.exif_transpose(image, in_place=True)
        if image.mode.startswith("I;16"):  # convert() makes 255 of all that is above
            return np.repeat((np.asarray(image) >> 8).astype(np.uint8)[:, :, None], 3, axis=2)
        return np.array(image.convert("RGB"))


DECODERS: dict[str, Callable[[bytes], Pixels]] = {"simplejpeg": _simplejpeg, "pillow": _pillow}
"""All decoders, by name; ``decoder="auto"`` takes the first that can be imported."""


@functools.cache
def _why_not(name: str) -> str:
    """Why a decoder is unavailable here, or nothing."""
    try:
        importlib.import_module({"pillow": "PIL.Image"}.get(name, name))
    except Exception as error:  # a library may die in many ways: a missing one, another torch's
        return f"{type(error).__name__}: {error}"
    return ""


def available() -> list[str]:
    """Names of the decoders available here.

    Example:
        >>> "pillow" in available()
        True
    """
    return [name for name in DECODERS if not _why_not(name)]


def check_decoder(decoder: str) -> str:
    """Resolve the JPEG decoder's name, ``auto`` included; refuse one that is not usable here."""
    if decoder == "auto":
        if not (names := available()):
            raise ArgumentError(
                "decoder='auto': neither simplejpeg nor Pillow can be imported: "
                "pip install 'ronde[images]'."
            )
        return names[0]
    if decoder not in DECODERS:
        raise ArgumentError(
            f"decoder={decoder!r} is not known: choose 'auto' or one of {', '.join(DECODERS)}."
        )
    if why := _why_not(decoder):
        raise ArgumentError(
            f"decoder={decoder!r} cannot be used here ({why}): pip install 'ronde[images]'."
        )
    return decoder


def _error(name: str, data: bytes, error: Exception) -> SampleError:
    what = str(error).rstrip(".") or type(error).__name__
    if type(error).__name__ == "UnidentifiedImageError":
        what = (
            f"Pillow does not recognize it as an image; it begins with {data[:8]!r}"
            if data
            else "it is empty"
        )
    return SampleError(f"{name or 'an image'} ({len(data):,} bytes) cannot be decoded: {what}.")


def decode_image(
    data: bytes, decoder: str = "auto", *, name: str = "", orient: bool = False
) -> Pixels:
    """Decode one image.

    Gray, palette and transparent images become RGB as with Pillow's ``convert("RGB")``:
    transparency is dropped. 16-bit images keep their upper 8 bits, as in OpenCV.

    Args:
        data: the file's bytes.
        decoder: of JPEG files; see :data:`DECODERS`. Pillow decodes what simplejpeg rejects, and
            all other formats.
        name: of the file, for the error.
        orient: turn the image as its EXIF orientation says, with Pillow. False, as
            ``PIL.Image.open`` does, leaves the pixels as they are stored (but of a TIFF, which
            Pillow always turns).

    Returns:
        height × width × 3 ``uint8``, contiguous.

    Raises:
        SampleError: no decoder can read it, for example a truncated file.
        ArgumentError: ``decoder`` is not known or cannot be imported.

    Example:
        >>> import io, numpy, PIL.Image
        >>> file = io.BytesIO()
        >>> PIL.Image.fromarray(numpy.zeros((4, 6, 3), numpy.uint8)).save(file, "JPEG")
        >>> decode_image(file.getvalue()).shape
        (4, 6, 3)
    """
    is_jpeg = data[:3] == b"\xff\xd8\xff"
    if check_decoder(decoder) == "simplejpeg" and is_jpeg and not orient:
        with suppress(Exception):  # Pillow decodes it, or tells what is wrong
            return _simplejpeg(data)
    if why := _why_not("pillow"):
        raise ArgumentError(
            f"{name or 'an image'} needs Pillow, which cannot be imported ({why}): "
            "pip install 'ronde[images]'."
        )
    try:
        return _pillow(data, orient)
    except Exception as error:
        raise _error(name, data, error) from None
