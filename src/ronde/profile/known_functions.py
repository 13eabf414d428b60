"""Known functions of other libraries that read, decode and augment, by module and name.

Only imported modules are inspected; listing a library here does not require it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

from torch.nn import Module
from torch.utils.data import Dataset

from ronde.introspect import attributes, is_user_module, user_modules, walk

_PILLOW_METHODS = "resize crop transpose rotate transform filter reduce"
_PILLOW_OPERATIONS = (
    "autocontrast contain cover crop equalize exif_transpose expand fit flip grayscale invert "
    "mirror pad posterize scale solarize"
)
_OPENCV_FUNCTIONS = (
    "resize cvtColor flip rotate warpAffine warpPerspective GaussianBlur blur remap LUT "
    "copyMakeBorder normalize addWeighted medianBlur filter2D equalizeHist"
)
_CONNECTIONS = (
    ("urllib.request", "urlopen OpenerDirector.open"),
    ("http.client", "HTTPConnection.request HTTPConnection.getresponse HTTPResponse.read"),
    ("socket", "create_connection socket.connect socket.recv socket.recv_into socket.recvfrom"),
    ("socket", "socket.send socket.sendall"),
    ("ssl", "SSLSocket.recv SSLSocket.recv_into SSLSocket.read SSLSocket.do_handshake"),
    ("psycopg", "connect Connection.execute Cursor.execute Cursor.fetchone Cursor.fetchmany"),
    ("psycopg", "Cursor.fetchall Cursor.__iter__"),
    ("pymongo.collection", "Collection.find_one Collection.aggregate"),
    ("pymongo.cursor", "Cursor.next Cursor.__next__"),
    ("redis.client", "Redis.execute_command Pipeline.execute"),
    ("botocore.client", "BaseClient._make_api_call"),
    ("botocore.response", "StreamingBody.read"),
    ("h5py", "Dataset.read_direct"),
)
_PROGRAMS = "run check_output Popen.communicate Popen.wait"
# module, attribute (dotted for a class's method), stage, kind of the first argument, by which the
# bytes that were read are counted
FUNCTIONS: tuple[tuple[str, str, str, str], ...] = (
    ("numpy", "load", "read", "path"),
    ("numpy", "fromfile", "read", "path"),
    ("numpy", "loadtxt", "read", "path"),
    ("numpy", "genfromtxt", "read", "path"),
    ("numpy.lib.npyio", "NpzFile.__getitem__", "decode", ""),
    ("torch", "load", "read", "path"),
    ("os", "read", "read", "count"),
    ("os", "pread", "read", "count"),
    ("tarfile", "_FileInFile.read", "read", "count"),
    ("tarfile", "TarFile._load", "read", ""),  # every header up to the end
    ("zipfile", "ZipFile.read", "read", ""),
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
    ("wave", "Wave_read.readframes", "read", "count"),
    ("h5py", "File.__init__", "read", ""),
    ("requests", "get", "read", ""),
    ("requests", "Session.request", "read", ""),
    ("httpx", "Client.send", "read", ""),
    ("pandas", "read_sql", "read", ""),
    ("pandas", "read_sql_query", "read", ""),
    *((module, name, "read", "") for module, names in _CONNECTIONS for name in names.split()),
    *(("subprocess", name, "subprocess", "") for name in _PROGRAMS.split()),
    ("json", "loads", "decode", ""),
    ("json", "load", "decode", ""),
    ("pickle", "loads", "decode", ""),
    ("pickle", "load", "decode", ""),
    ("orjson", "loads", "decode", ""),
    ("ujson", "loads", "decode", ""),
    ("msgpack", "unpackb", "decode", ""),
    ("base64", "b64decode", "decode", ""),
    ("base64", "urlsafe_b64decode", "decode", ""),
    ("base64", "decodebytes", "decode", ""),
    ("gzip", "decompress", "decode", ""),
    ("zlib", "decompress", "decode", ""),
    ("bz2", "decompress", "decode", ""),
    ("lzma", "decompress", "decode", ""),
    ("lz4.frame", "decompress", "decode", ""),
    ("snappy", "decompress", "decode", ""),
    ("blosc", "decompress", "decode", ""),
    ("blosc2", "decompress", "decode", ""),
    ("zstandard", "decompress", "decode", ""),
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
    # The functions of v2 look up kernels by identity, so they cannot be replaced: transforms are
    # timed as a whole instead.
    ("torchvision.transforms.v2", "Transform.__call__", "augment", ""),
    ("torchcodec.decoders", "VideoDecoder.get_frames_at", "decode", ""),
    ("torchcodec.decoders", "VideoDecoder.get_frame_at", "decode", ""),
    ("torchcodec.decoders", "VideoDecoder.get_frames_in_range", "decode", ""),
    ("torchcodec.decoders", "VideoDecoder.__getitem__", "decode", ""),
    ("torchcodec.decoders", "AudioDecoder.get_all_samples", "decode", ""),
    ("torchcodec.decoders", "AudioDecoder.get_samples_played_in_range", "decode", ""),
    ("torchaudio", "load", "decode", "path"),
    ("soundfile", "read", "decode", "path"),
    ("librosa", "load", "decode", "path"),
    *(("PIL.Image", f"Image.{name}", "augment", "") for name in _PILLOW_METHODS.split()),
    ("PIL.ImageEnhance", "_Enhance.enhance", "augment", ""),
    *(("PIL.ImageOps", name, "augment", "") for name in _PILLOW_OPERATIONS.split()),
    *(("cv2", name, "augment", "") for name in _OPENCV_FUNCTIONS.split()),
)

# of a name in small letters
_TRANSFORMS = re.compile(r"transform|tfm|augment|(?<![a-z])augs?(?![a-z])|tokeniz|preproc|normaliz")
_READS = re.compile(r"_*(read|fetch|download)(?![a-z])", re.ASCII)


def _torchvision() -> Iterator[tuple[str, str, str, str]]:
    module = "torchvision.transforms.functional"
    found = sys.modules.get(module)
    for name, value in list(vars(found).items()) if found is not None else ():
        if isinstance(value, FunctionType) and not name.startswith("_"):
            yield module, name, "augment", ""


def find_functions() -> Iterator[tuple[Any, str, str, str]]:
    """Known functions of imported modules: owner, attribute, stage, kind of first argument."""
    for module, path, stage, first in (*FUNCTIONS, *_torchvision()):
        owner: Any = sys.modules.get(module)
        *outer, name = path.split(".")
        for part in outer:
            owner = getattr(owner, part, None)
        if owner is not None and callable(getattr(owner, name, None)):
            yield owner, name, stage, first


def _names_transform(name: str) -> bool:
    return _TRANSFORMS.search(name.lower()) is not None


def _stage_named(name: str) -> str | None:
    """The stage of a user's function, from its name."""
    if name.startswith("__"):
        return None
    if _names_transform(name):
        return "augment"
    if "decode" in name.lower():
        return "decode"
    return "read" if _READS.match(name) else None


def _calls(value: Any) -> bool:
    return callable(value) and not isinstance(value, type | ModuleType)


def find_transforms(dataset: Any) -> Iterator[tuple[Any, str, str]]:
    """A dataset's own transforms, recognized by name: owner, attribute, stage.

    The owner is the dataset (``transform``, ``_augment``; ``decode``; ``read_frame``), a user's
    object in it (``self.store.fetch``), or the dictionary of a user's module (a global
    ``train_transform``).
    """
    for name, value in list(vars(dataset).items()):
        items = value if isinstance(value, list | tuple) else [value]
        if _names_transform(name) and items and all(_calls(v) for v in items):
            yield dataset, name, "augment"
    parts = [one for one in walk(dataset) if one is not dataset and not isinstance(one, Dataset)]
    users = [one for one in parts if is_user_module(type(one).__module__)]
    for owner in (dataset, *users):
        for kind in type(owner).__mro__:
            if not is_user_module(kind.__module__):
                continue
            for name, value in list(vars(kind).items()):
                stage = _stage_named(name)
                # A transform is timed as a whole, under the name of the attribute that holds it.
                if stage is None or (owner is not dataset and stage == "augment"):
                    continue
                if name not in attributes(owner) and isinstance(value, FunctionType | staticmethod):
                    yield owner, name, stage
    for module in user_modules():
        for name, value in list(vars(module).items()):
            stage = _stage_named(name)
            # What reads or decodes must be the user's own: names of a library's are in FUNCTIONS.
            own = isinstance(value, FunctionType) and is_user_module(value.__module__)
            # A model may be called transformer.
            other = stage == "augment" and _calls(value) and not isinstance(value, Module)
            if stage is not None and (own or other):
                yield vars(module), name, stage
