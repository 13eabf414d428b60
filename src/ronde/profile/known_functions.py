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

_PILLOW_METHODS = (
    "Image.resize Image.crop Image.transpose Image.rotate Image.transform Image.filter Image.reduce"
)
_PILLOW_OPERATIONS = (
    "autocontrast contain cover crop equalize exif_transpose expand fit flip grayscale invert "
    "mirror pad posterize scale solarize"
)
_OPENCV_FUNCTIONS = (
    "resize cvtColor flip rotate warpAffine warpPerspective GaussianBlur blur remap LUT "
    "copyMakeBorder normalize addWeighted medianBlur filter2D equalizeHist"
)
_PARQUET = "ParquetFile.read ParquetFile.read_row_group ParquetFile.read_row_groups"
_HTTP = "HTTPConnection.request HTTPConnection.getresponse HTTPResponse.read"
_COMPRESSIONS = "gzip zlib bz2 lzma lz4.frame snappy blosc blosc2 zstandard"
_READERS = "imageio imageio.v2 imageio.v3 skimage.io tifffile"
_TORCHCODEC = (
    "VideoDecoder.get_frames_at VideoDecoder.get_frame_at VideoDecoder.get_frames_in_range "
    "VideoDecoder.__getitem__ AudioDecoder.get_all_samples AudioDecoder.get_samples_played_in_range"
)
_V2 = "torchvision.transforms.v2"  # its functions look up kernels by identity: timed as a whole
# stage, kind of the first argument (by which the bytes that were read are counted), module, and
# attributes (dotted for a class's method)
_KNOWN = (
    ("read", "path", "numpy", "load fromfile loadtxt genfromtxt"),
    ("read", "path", "torch", "load"),
    ("read", "path", "pyarrow.parquet", "read_table"),
    ("read", "path", "pandas", "read_csv read_parquet"),
    ("read", "path", "torchvision.io", "read_file"),
    ("read", "path", "nibabel", "load"),
    ("read", "count", "os", "read pread"),
    ("read", "count", "tarfile", "_FileInFile.read"),
    ("read", "count", "wave", "Wave_read.readframes"),
    ("read", "", "tarfile", "TarFile._load"),  # every header up to the end
    ("read", "", "zipfile", "ZipFile.read"),
    ("read", "", "h5py", "File.__init__ Dataset.__getitem__ Dataset.read_direct"),
    ("read", "", "zarr", "Array.__getitem__"),
    ("read", "", "pyarrow.parquet", _PARQUET),
    ("read", "", "pandas", "read_sql read_sql_query"),
    ("read", "", "requests", "get Session.request"),
    ("read", "", "httpx", "Client.send"),
    ("read", "", "urllib.request", "urlopen OpenerDirector.open"),
    ("read", "", "http.client", _HTTP),
    ("read", "", "socket", "create_connection socket.connect socket.send socket.sendall"),
    ("read", "", "socket", "socket.recv socket.recv_into socket.recvfrom"),
    ("read", "", "ssl", "SSLSocket.recv SSLSocket.recv_into SSLSocket.read SSLSocket.do_handshake"),
    ("read", "", "psycopg", "connect Connection.execute Cursor.execute Cursor.fetchone"),
    ("read", "", "psycopg", "Cursor.fetchmany Cursor.fetchall Cursor.__iter__"),
    ("read", "", "pymongo.collection", "Collection.find_one Collection.aggregate"),
    ("read", "", "pymongo.cursor", "Cursor.next Cursor.__next__"),
    ("read", "", "redis.client", "Redis.execute_command Pipeline.execute"),
    ("read", "", "botocore.client", "BaseClient._make_api_call"),
    ("read", "", "botocore.response", "StreamingBody.read"),
    ("subprocess", "", "subprocess", "run check_output Popen.communicate Popen.wait"),
    ("decode", "", "numpy.lib.npyio", "NpzFile.__getitem__"),
    ("decode", "", "json", "loads load"),
    ("decode", "", "pickle", "loads load"),
    ("decode", "", "orjson", "loads"),
    ("decode", "", "ujson", "loads"),
    ("decode", "", "msgpack", "unpackb"),
    ("decode", "", "base64", "b64decode urlsafe_b64decode decodebytes"),
    *(("decode", "", module, "decompress") for module in _COMPRESSIONS.split()),
    ("decode", "", "cv2", "imread imdecode"),
    ("decode", "", "simplejpeg", "decode_jpeg decode_jpeg_header"),
    ("decode", "", "turbojpeg", "TurboJPEG.decode"),
    ("decode", "", "imagecodecs", "imread jpeg_decode png_decode"),
    *(("decode", "", module, "imread") for module in _READERS.split()),
    ("decode", "", "pydicom", "dcmread"),
    ("decode", "", "torchvision.io", "read_image read_video decode_image decode_jpeg decode_png"),
    ("decode", "", "torchcodec.decoders", _TORCHCODEC),
    ("decode", "", "torchaudio", "load"),
    ("decode", "", "soundfile", "read"),
    ("decode", "", "librosa", "load"),
    ("augment", "", _V2, "Transform.__call__"),
    ("augment", "", "PIL.Image", _PILLOW_METHODS),
    ("augment", "", "PIL.ImageEnhance", "_Enhance.enhance"),
    ("augment", "", "PIL.ImageOps", _PILLOW_OPERATIONS),
    ("augment", "", "cv2", _OPENCV_FUNCTIONS),
)
FUNCTIONS: tuple[tuple[str, str, str, str], ...] = tuple(
    (module, name, stage, first) for stage, first, module, names in _KNOWN for name in names.split()
)
"""Module, attribute, stage, kind of the first argument."""

# of a name in small letters
_TRANSFORMS = re.compile(r"transform|tfm|augment|(?<![a-z])augs?(?![a-z])|tokeniz|preproc|normaliz")
_READS = re.compile(r"_*(read|fetch|download)(?![a-z])", re.ASCII)


def _torchvision() -> Iterator[tuple[str, str, str, str]]:
    module = "torchvision.transforms.functional"
    loaded = sys.modules.get(module)
    for name, value in list(vars(loaded).items()) if loaded is not None else ():
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
