"""What stages look like in other people's code: the functions that read, decode and augment, by module and name.

Only what is imported is looked at: naming a library here does not need it.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch.utils.data import Dataset

__all__ = ["FUNCTIONS", "nested", "places", "transforms", "user_modules"]

# module, attribute (dotted for a class's method), stage, what the first argument is
FUNCTIONS: tuple[tuple[str, str, str, str], ...] = (
    ("numpy", "load", "read", "path"),
    ("numpy", "fromfile", "read", "path"),
    ("numpy", "loadtxt", "read", "path"),
    ("numpy", "genfromtxt", "read", "path"),
    ("torch", "load", "read", "path"),
    ("os", "read", "read", "count"),
    ("os", "pread", "read", "count"),
    ("tarfile", "_FileInFile.read", "read", "count"),
    ("zipfile", "ZipFile.read", "read", "name"),
    ("h5py", "Dataset.__getitem__", "read", ""),
    ("zarr", "Array.__getitem__", "read", ""),
    ("pyarrow.parquet", "read_table", "read", "path"),
    ("pyarrow.parquet", "ParquetFile.read", "read", ""),
    ("pyarrow.parquet", "ParquetFile.read_row_group", "read", ""),
    ("pyarrow.parquet", "ParquetFile.read_row_groups", "read", ""),
    ("pandas", "read_csv", "read", "path"),
    ("pandas", "read_parquet", "read", "path"),
    ("torchvision.io", "read_file", "read", "path"),
    ("nibabel", "load", "read", "path"),
    ("json", "loads", "decode", ""),
    ("json", "load", "decode", ""),
    ("pickle", "loads", "decode", ""),
    ("pickle", "load", "decode", ""),
    ("gzip", "decompress", "decode", ""),
    ("zlib", "decompress", "decode", ""),
    ("bz2", "decompress", "decode", ""),
    ("lzma", "decompress", "decode", ""),
    ("cv2", "imdecode", "decode", ""),
    ("simplejpeg", "decode_jpeg", "decode", ""),
    ("simplejpeg", "decode_jpeg_header", "decode", ""),
    ("turbojpeg", "TurboJPEG.decode", "decode", ""),
    ("imagecodecs", "imread", "decode", "path"),
    ("imagecodecs", "jpeg_decode", "decode", ""),
    ("imagecodecs", "png_decode", "decode", ""),
    ("imageio", "imread", "decode", "path"),
    ("imageio.v2", "imread", "decode", "path"),
    ("imageio.v3", "imread", "decode", "path"),
    ("skimage.io", "imread", "decode", "path"),
    ("tifffile", "imread", "decode", "path"),
    ("pydicom", "dcmread", "decode", "path"),
    ("torchvision.io", "read_image", "decode", "path"),
    ("torchvision.io", "decode_image", "decode", "path"),
    ("torchvision.io", "decode_jpeg", "decode", ""),
    ("torchvision.io", "decode_png", "decode", ""),
    ("torchvision.io", "read_video", "decode", "path"),
    ("torchcodec.decoders", "VideoDecoder.get_frames_at", "decode", ""),
    ("torchcodec.decoders", "VideoDecoder.get_frame_at", "decode", ""),
    ("torchcodec.decoders", "VideoDecoder.get_frames_in_range", "decode", ""),
    ("torchcodec.decoders", "VideoDecoder.__getitem__", "decode", ""),
    ("torchcodec.decoders", "AudioDecoder.get_all_samples", "decode", ""),
    ("torchcodec.decoders", "AudioDecoder.get_samples_played_in_range", "decode", ""),
    ("torchaudio", "load", "decode", "path"),
    ("soundfile", "read", "decode", "path"),
    ("librosa", "load", "decode", "path"),
    *(("PIL.Image", f"Image.{name}", "augment", "") for name in ("resize", "crop", "transpose", "rotate", "transform", "filter", "reduce")),
    ("PIL.ImageEnhance", "_Enhance.enhance", "augment", ""),
    *(
        ("PIL.ImageOps", name, "augment", "")
        for name in (
            "autocontrast",
            "contain",
            "cover",
            "crop",
            "equalize",
            "exif_transpose",
            "expand",
            "fit",
            "flip",
            "grayscale",
            "invert",
        )
    ),
    *(("PIL.ImageOps", name, "augment", "") for name in ("mirror", "pad", "posterize", "scale", "solarize")),
    *(
        ("cv2", name, "augment", "")
        for name in ("resize", "cvtColor", "flip", "rotate", "warpAffine", "warpPerspective", "GaussianBlur", "blur", "remap", "LUT")
    ),
    *(("cv2", name, "augment", "") for name in ("copyMakeBorder", "normalize", "addWeighted", "medianBlur", "filter2D", "equalizeHist")),
)

_TRANSFORMS = ("transform", "augment", "tokeniz", "preproc", "normaliz")
_INNER = ("dataset", "datasets", "_dataset", "_datasets", "base", "source", "ds", "inner", "wrapped", "parent")


def _torchvision() -> Iterator[tuple[str, str, str, str]]:
    for module in ("torchvision.transforms.functional", "torchvision.transforms.v2.functional"):
        found = sys.modules.get(module)
        for name, value in list(vars(found).items()) if found is not None else ():
            if isinstance(value, FunctionType) and not name.startswith("_"):
                yield module, name, "augment", ""


def places() -> Iterator[tuple[Any, str, str, str]]:
    """Everything known that this process has imported: owner (module or class), attribute, stage, what the first argument is."""
    for module, path, stage, first in (*FUNCTIONS, *_torchvision()):
        owner: Any = sys.modules.get(module)
        *outer, name = path.split(".")
        for part in outer:
            owner = getattr(owner, part, None)
        if owner is not None and callable(getattr(owner, name, None)):
            yield owner, name, stage, first


@functools.cache
def _installed() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple({paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def _users(module: str) -> bool:
    """Whether a module is the script's, or of those who wrote it: neither Python's own nor an installed one."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return module == "__main__" or (file is not None and not file.startswith(_installed()) and module.partition(".")[0] != "ronde")


def user_modules() -> list[ModuleType]:
    """Modules of the script and of those who wrote it."""
    return [module for name, module in list(sys.modules.items()) if isinstance(module, ModuleType) and _users(name)]


def nested(dataset: Any) -> list[Any]:
    """A data set and those that it is made of: ``Subset``, ``ConcatDataset`` and any wrapper that keeps what it wraps."""
    found: list[Any] = []

    def visit(one: Any, depth: int) -> None:
        ours = depth == 0 or isinstance(one, Dataset) or _users(type(one).__module__)
        if depth > 8 or not ours or any(one is f for f in found) or not hasattr(one, "__dict__") or isinstance(one, type):
            return
        found.append(one)
        for name in _INNER:
            inner = vars(one).get(name)
            for item in inner if isinstance(inner, list | tuple) else [inner]:
                if hasattr(item, "__getitem__"):
                    visit(item, depth + 1)

    visit(dataset, 0)
    return found


def _names_transform(name: str) -> bool:
    lowered = name.lower()
    return any(part in lowered for part in _TRANSFORMS)


def _calls(value: Any) -> bool:
    return callable(value) and not isinstance(value, type | ModuleType)


def _codes(kind: type) -> Iterator[tuple[CodeType, dict[str, Any]]]:
    for name in ("__getitem__", "__getitems__"):
        function = getattr(kind, name, None)
        if isinstance(function, FunctionType):
            yield function.__code__, function.__globals__


def transforms(dataset: Any) -> Iterator[tuple[Any, str, str]]:
    """What a data set does to its samples, as far as names tell: owner, attribute, stage.

    The owner is the data set (its attributes and methods, ``transform`` or ``_augment``; ``decode``) or the dictionary of a module (a
    global ``train_transform`` that ``__getitem__`` names).
    """
    for name, value in list(vars(dataset).items()):
        items = value if isinstance(value, list | tuple) else [value]
        if _names_transform(name) and items and all(_calls(v) for v in items):
            yield dataset, name, "augment"
    for kind in type(dataset).__mro__:
        if not _users(kind.__module__):
            continue
        for name, value in list(vars(kind).items()):
            if isinstance(value, FunctionType | staticmethod) and name not in vars(dataset) and not name.startswith("__"):
                if _names_transform(name):
                    yield dataset, name, "augment"
                elif "decode" in name.lower():
                    yield dataset, name, "decode"
    for code, names in _codes(type(dataset)):
        for name in code.co_names:
            if name in names and _names_transform(name) and _calls(names[name]):
                yield names, name, "augment"
