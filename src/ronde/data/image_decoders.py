"""Decode JPEG, PNG and WebP bytes to pixels. Pillow is the reference and the fallback.

The result equals ``numpy.asarray(PIL.Image.open(file).convert("RGB"))``: height × width × 3,
``uint8``. The one exception is 16-bit gray, which ``convert`` would clip: its upper 8 bits are
kept, as Pillow does for 16-bit color. simplejpeg uses the same libjpeg-turbo as Pillow; its
pixels were found equal bit for bit. Images that another decoder rejects (broken files, CMYK)
go to Pillow; if Pillow rejects one too, the error names the file.
"""

from __future__ import annotations

import importlib
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ronde.world import ArgumentError, SampleError

Pixels = npt.NDArray[np.uint8]

_told: set[str] = set()  # decoders whose failure was told


def _reject_cmyk(data: bytes) -> None:
    """Reject CMYK JPEGs: libjpeg-turbo converts their colors slightly differently from Pillow."""
    at = 2
    while at + 9 < len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):  # the frame's header
            if data[at + 9] == 4:
                raise ValueError("CMYK")
            return
        at += 1 if marker == 0xFF else 2 + (data[at + 2] << 8) + data[at + 3]


def _simplejpeg(data: bytes) -> Pixels:
    import simplejpeg

    _reject_cmyk(data)
    found: Pixels = simplejpeg.decode_jpeg(data)
    return found


def _pillow(data: bytes) -> Pixels:
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        if image.mode.startswith("I;16"):  # convert() makes 255 of all that is above
            return np.repeat((np.asarray(image) >> 8).astype(np.uint8)[:, :, None], 3, axis=2)
        return np.array(image.convert("RGB"))


@dataclass(frozen=True)
class Decoder:
    """One entry of :data:`DECODERS`.

    Attributes:
        call: ``call(data)`` gives height × width × 3 ``uint8`` or raises anything.
        module: which must be importable.
        formats: that it is given, among ``jpeg``, ``png`` and ``webp``; Pillow has the rest.
        install: what to do where the module is missing.
    """

    call: Callable[[bytes], Pixels]
    module: str
    formats: frozenset[str] = frozenset({"jpeg"})
    install: str = "pip install 'ronde[images]'"


DECODERS: dict[str, Decoder] = {
    "simplejpeg": Decoder(_simplejpeg, "simplejpeg"),
    "pillow": Decoder(_pillow, "PIL.Image", frozenset({"jpeg", "png", "webp"})),
}
"""All decoders, by name. ``DECODERS["mine"] = Decoder(function, "package")`` adds one."""

AUTO = ("simplejpeg", "pillow")
"""What ``decoder="auto"`` tries, in this order, until one can be imported."""

_loads: dict[str, str | None] = {}


def _why_not(name: str) -> str | None:
    """Why a decoder is unavailable here, or None."""
    module = DECODERS[name].module
    if module not in _loads:
        try:
            importlib.import_module(module)
            _loads[module] = None
        except Exception as error:  # a library may die in many ways: a missing one, another torch's
            _loads[module] = (
                str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            )
    return _loads[module]


def available() -> list[str]:
    """Names of the decoders available here.

    Example:
        >>> "pillow" in available()
        True
    """
    return [name for name in DECODERS if _why_not(name) is None]


def check_decoder(decoder: str) -> str:
    """Resolve the JPEG decoder's name, ``auto`` included; refuse one that is not usable here."""
    if decoder == "auto":
        for name in AUTO:
            if _why_not(name) is None:
                return name
        raise ArgumentError(
            "decoder='auto': neither simplejpeg nor Pillow can be imported: "
            "pip install 'ronde[images]'."
        )
    if decoder not in DECODERS:
        raise ArgumentError(
            f"decoder={decoder!r} is not known: choose 'auto' or one of {', '.join(DECODERS)}."
        )
    why = _why_not(decoder)
    if why is not None:
        raise ArgumentError(
            f"decoder={decoder!r} cannot be used here ({why}): {DECODERS[decoder].install}."
        )
    return decoder


def format_of(data: bytes) -> str | None:
    """``jpeg``, ``png`` or ``webp`` from the first bytes, or None.

    Example:
        >>> format_of(b"\\xff\\xd8\\xff\\xe0"), format_of(b"GIF89a")
        ('jpeg', None)
    """
    if data[:3] == b"\xff\xd8\xff":
        return "jpeg"
    if data[:8] == b"\x89PNG\r\n\x1a\n":
        return "png"
    return "webp" if data[:4] == b"RIFF" and data[8:12] == b"WEBP" else None


def _error(name: str, data: bytes, error: Exception) -> SampleError:
    what = str(error).rstrip(".") or type(error).__name__
    if type(error).__name__ == "UnidentifiedImageError":
        what = (
            f"Pillow does not recognize it as an image; it begins with {data[:8]!r}"
            if data
            else "it is empty"
        )
    return SampleError(f"{name or 'an image'} ({len(data):,} bytes) cannot be decoded: {what}.")


def _orientation(data: bytes) -> Any:
    """The EXIF orientation; 1 is as stored."""
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        # A TIFF is turned by Pillow itself, asked or not, as it loads.
        return 1 if image.format == "TIFF" else image.getexif().get(0x0112, 1)


def _apply_orientation(pixels: Pixels, data: bytes) -> Pixels:
    """Apply the EXIF orientation, as ``PIL.ImageOps.exif_transpose`` does."""
    try:
        orientation = _orientation(data)
    except Exception:  # the pixels could be decoded: an EXIF that cannot says nothing
        return pixels
    turns: dict[int, Callable[[Any], Any]] = {
        2: lambda a: a[:, ::-1],
        3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1],
        5: lambda a: a.transpose(1, 0, 2),
        6: lambda a: np.rot90(a, -1),
        7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
        8: lambda a: np.rot90(a),
    }
    return np.ascontiguousarray(turns[orientation](pixels)) if orientation in turns else pixels


def decode_image(
    data: bytes, decoder: str = "auto", *, name: str = "", orient: bool = False
) -> Pixels:
    """Decode one image.

    Gray, palette and transparent images become RGB as with Pillow's ``convert("RGB")``:
    transparency is dropped. 16-bit images keep their upper 8 bits, as in OpenCV.

    Args:
        data: the file's bytes.
        decoder: for the formats that it takes; see :data:`DECODERS`. Pillow decodes the others, and
            what this one rejects.
        name: of the file, for the error.
        orient: turn the image as its EXIF orientation says. False, as ``PIL.Image.open`` does,
            leaves the pixels as they are stored (but of a TIFF, which Pillow always turns).

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
    chosen = (
        decoder
        if decoder in DECODERS and _loads.get(DECODERS[decoder].module, "") is None
        else check_decoder(decoder)
    )
    entry = DECODERS[chosen]
    kind = format_of(data)
    if chosen != "pillow" and kind in entry.formats:
        try:
            pixels = entry.call(data)
            return _apply_orientation(pixels, data) if orient else pixels
        except Exception as error:
            if chosen not in ("simplejpeg", *_told):  # whose pixels are Pillow's
                _told.add(chosen)
                warnings.warn(
                    f"image decoder {chosen!r} failed ({type(error).__name__}: {error}). Pillow "
                    "decodes what it rejects; further failures of it are not told.",
                    stacklevel=2,
                )
    why = _why_not("pillow")
    if why is not None:
        raise ArgumentError(
            f"{name or 'an image'} needs Pillow ({chosen} does not read it), which cannot "
            f"be imported ({why}): pip install 'ronde[images]'."
        )
    try:
        pixels = DECODERS["pillow"].call(data)
    except Exception as error:
        raise _error(name, data, error) from None
    return _apply_orientation(pixels, data) if orient else pixels
