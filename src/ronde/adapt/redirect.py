"""Redirect a plain Dataset's file reads to a cache, and its JPEG decoding to another decoder.

While such a Dataset makes a sample, and only in that thread, ``open``, ``PIL.Image.open`` and
``ImageFile.load`` are replaced. Other formats and broken files go to the originals.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from ronde.cache import CacheReport
from ronde.cache.cached import _Cache
from ronde.data import DECODERS, encode_sample, named_stages, stage
from ronde.data import decode_sample as decoded
from ronde.introspect import stored_functions
from ronde.profile import ByName, HeldFile, monkeypatch, original_of, swap_attribute, wrap_raw

__all__ = ["FileCache", "RedirectPlan", "Remedied", "Observation", "trace_reads"]

PLACES = 4  # files of one sample that are kept
_READING = frozenset(("r", "rt", "tr", "rb", "br"))
_LARGEST = 256 << 20  # a larger file is not one sample's

_local = threading.local()


@dataclass
class Observation:
    """The files and images involved in making some samples.

    Attributes:
        files: path and size of each file read, sample by sample.
        images: format, width, height and mode of each image decoded by Pillow or read by OpenCV.
        jpegs: the bytes of the JPEG images that Pillow decoded.
        resized: width and height before and after, of each image that Pillow resized.
        samples: how many.
        imread: OpenCV read files by itself.
        own_many: the Dataset has a ``__getitems__`` that does more than loop.
    """

    files: list[tuple[str, int]] = field(default_factory=list)
    images: list[tuple[str, int, int, str]] = field(default_factory=list)
    jpegs: list[bytes] = field(default_factory=list)
    resized: list[tuple[tuple[float, float], tuple[int, int]]] = field(default_factory=list)
    samples: int = 0
    imread: bool = False
    own_many: bool = False

    def note_file(self, path: str) -> None:
        """Count a file read."""
        with contextlib.suppress(OSError):
            self.files.append((path, os.stat(path).st_size))  # noqa: PTH116


class FileCache(_Cache):
    """Cached files of a Dataset: one record per place in a sample.

    A record names its file; records of another file or an older version are ignored.

    Args:
        n: samples.
        where, limit: as for :func:`ronde.feed.cached_dataset`.
        key: identifies the Dataset.
        about: the same, for people.
    """

    def __init__(
        self, n: int, where: str, limit: int | None, key: str, about: dict[str, Any]
    ) -> None:
        super().__init__(n * PLACES, where, limit, None, key, about)
        self._checked = bytearray(n * PLACES)
        self._hits = self._hit_bytes = 0

    def __getstate__(self) -> dict[str, Any]:
        fresh = {"_checked": bytearray(self._n), "_hits": 0, "_hit_bytes": 0}
        return {**super().__getstate__(), **fresh}

    def get(self, place: int, path: str) -> bytes | None:
        """This file's cached bytes, or None. Each process checks a file's state once."""
        # a Dataset may hold more samples than its length says
        arena = self._opened() if place < self._n else None
        if arena is None or (data := arena.get(place).data) is None:
            return None
        kept = _record(data)
        if kept is None:
            arena.count(corrupt=1)
        if kept is None or kept[0] != path:
            return None
        if not self._checked[place]:
            if kept[1] != _state(path):
                return None
            self._checked[place] = 1
        self._hits += 1
        self._hit_bytes += len(data)
        if self._hits >= 16:
            self._flush_counts()
        return bytes(kept[2])

    def _flush_counts(self) -> None:
        """Add to the shared counts in batches: the lock costs as much as a lookup."""
        arena = self._opened()
        hits, size, self._hits, self._hit_bytes = self._hits, self._hit_bytes, 0, 0
        if arena is not None and hits:
            arena.count(hits=hits, hit_bytes=size)

    def report(self) -> CacheReport:
        """The shared counts; up to 15 last hits of each other process may be missing."""
        self._flush_counts()
        return dataclasses.replace(super().report(), samples=self._n // PLACES)

    def put(self, place: int, path: str, data: bytes) -> None:
        """Store a file while there is space; another file's record stays."""
        arena = self._opened() if place < self._n else None
        if arena is None:
            return
        closed = arena.closed_to_more
        arena.count(misses=1, **({closed: 1} if closed else {}))
        if closed:
            return
        present = arena.get(place)
        kept = None if present.data is None else _record(present.data)
        if kept is None or kept[0] == path:
            arena.put([(place, encode_sample((path, _state(path), data)), present.entry)])
            self._checked[place] = 1


def _record(data: Any) -> tuple[str, str, bytes] | None:
    """Path, state and bytes of a cached file; None if damaged."""
    try:
        kept = decoded(data)
    except ValueError:
        return None
    return kept if isinstance(kept, tuple) and len(kept) == 3 else None


def _state(path: str) -> str:
    about = os.stat(path)  # noqa: PTH116
    return f"{about.st_size} {about.st_mtime_ns}"


@dataclass
class RedirectPlan:
    """What to redirect for a Dataset.

    Attributes:
        decoder: of JPEG images, a name in :data:`ronde.data.image_decoders.DECODERS`; None for
            Pillow.
        reads: cache of files.
    """

    decoder: str | None = None
    reads: FileCache | None = None


class _Making:
    """The sample this thread is making."""

    __slots__ = ("files", "index", "observation", "plan")

    def __init__(
        self, plan: RedirectPlan, index: int | None, observation: Observation | None
    ) -> None:
        self.plan = plan
        self.index = index
        self.observation = observation
        self.files = 0


def _now() -> _Making | None:
    current: _Making | None = getattr(_local, "making", None)
    return current


@contextlib.contextmanager
def _making(
    plan: RedirectPlan | None, index: int | None, observation: Observation | None = None
) -> Iterator[None]:
    """Make a sample; without a plan, reads are not redirected."""
    before = _now()
    _local.making = None if plan is None else _Making(plan, index, observation)
    try:
        yield
    finally:
        _local.making = before


# -- files -----------------------------------------------------------------------------


def _cached_bytes(making: _Making, path: str, real: Callable[..., Any]) -> bytes | None:
    """A file's bytes through the cache; None means read it normally."""
    cache, nth = making.plan.reads, making.files
    making.files += 1
    if cache is None or making.index is None or nth >= PLACES:
        return None
    place = making.index * PLACES + nth
    try:
        with _making(None, None):
            data = cache.get(place, path)
            if data is None:
                with real(path, "rb") as file:
                    data = file.read(_LARGEST)
                if len(data) == _LARGEST:
                    return None
                cache.put(place, path, data)
    except OSError:
        return None  # the script gets the error when it opens the file itself
    return bytes(data)


def _open_layer(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def open(
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        making = _now()
        if (
            making is None
            or mode not in _READING
            or not isinstance(file, str | bytes | os.PathLike)
            or opener is not None
            or (buffering == 0 and "b" not in mode)
        ):
            return original(file, mode, buffering, encoding, errors, newline, closefd, opener)
        path = os.path.abspath(os.fsdecode(file))  # noqa: PTH100
        if making.observation is not None:
            making.observation.note_file(path)
        data = None
        if making.plan.reads is not None:
            read = _cached_bytes if named_stages.listener is None else stage("read")(_cached_bytes)
            data = read(making, path, original)
        if data is None:
            return original(file, mode, buffering, encoding, errors, newline, closefd, opener)
        return wrap_raw(
            HeldFile(data, os.fspath(file), original), mode, buffering, encoding, errors, newline
        )

    return open


# -- images ----------------------------------------------------------------------------


def _all_bytes(file: Any) -> bytes:
    """All bytes of an open file, without moving its position."""
    at = file.tell()
    file.seek(0)
    data = bytes(file.read())
    file.seek(at)
    return data


def _image_open_layer(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def open_image(*args: Any, **kwargs: Any) -> Any:
        image = original(*args, **kwargs)
        making = _now()
        if making is None:
            return image
        if making.observation is not None:
            making.observation.images.append(
                (str(image.format), image.width, image.height, image.mode)
            )
            if image.format == "JPEG" and image.tile:
                making.observation.jpegs.append(_all_bytes(image.fp))
        is_jpeg = type(image).__name__ == "JpegImageFile"
        if making.plan.decoder is not None and is_jpeg and image.tile:
            image.__dict__["_ronde_decoder"] = making.plan.decoder
        return image

    return open_image


def _load_layer(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load(self: Any, *args: Any, **kwargs: Any) -> Any:
        decoder: str | None = self.__dict__.pop("_ronde_decoder", None) if self.tile else None
        # After draft() (a scale, another mode) only Pillow knows the requested size and mode.
        if (
            decoder is not None
            and self.mode == "RGB"
            and len(self.tile) == 1
            and (self.decoderconfig or (1,))[0] == 1
        ):
            from PIL import Image

            # Pillow decodes broken files and other color spaces
            with contextlib.suppress(Exception), _making(None, None):
                pixels = DECODERS[decoder].call(_all_bytes(self.fp), 1)
                if pixels.shape == (self.height, self.width, 3):
                    self.im = Image.frombytes(self.mode, self.size, pixels).im
                    self.tile = []
                    self.readonly = 0
                    if self._exclusive_fp:
                        self.fp.close()
                    self.fp = None
        return original(self, *args, **kwargs)  # without tiles this does nothing

    return load


def _resize_layer(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def resize(
        self: Any, size: Any, resample: Any = None, box: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        making = _now()
        if making is not None and making.observation is not None and making.observation.images:
            before = self.size if box is None else (box[2] - box[0], box[3] - box[1])
            making.observation.resized.append((tuple(before), tuple(size)))
        return original(self, size, resample, box, *args, **kwargs)

    return resize


def _imread_layer(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def imread(filename: Any, *args: Any, **kwargs: Any) -> Any:
        image = original(filename, *args, **kwargs)
        making = _now()
        if making is not None and making.observation is not None and image is not None:
            making.observation.imread = True
            making.observation.note_file(os.path.abspath(os.fsdecode(filename)))  # noqa: PTH100
            making.observation.images.append(("OpenCV", image.shape[1], image.shape[0], "BGR"))
        return image

    return imread


# -- in place --------------------------------------------------------------------------


_MODULES = (("io", "open"), ("PIL.Image", "open"))


class _Layers:
    """This process's replacements, installed while some Dataset needs them."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.users = 0
        self.undo: list[Callable[[], None]] = []
        self.installed: set[str] = set()

    def use(self, dataset: Any) -> None:
        with self.lock:
            self.users += 1
            self.lay()
            below = {
                (m, n): original_of(getattr(sys.modules[m], n))
                for m, n in _MODULES
                if m in sys.modules
            }
            for owner, name, value in list(stored_functions(dataset)):  # loader=PIL.Image.open
                for where, function in below.items():
                    if value is function:
                        # an object that cannot be changed keeps its function
                        with contextlib.suppress(Exception):
                            self.undo.append(swap_attribute(owner, name, ByName(*where)))

    def leave(self) -> None:
        with self.lock:
            self.users -= 1
            if not self.users:
                while self.undo:
                    with contextlib.suppress(Exception):  # one failure must not stop the others
                        self.undo.pop()()
                self.installed.clear()

    @property
    def whole(self) -> bool:
        """Whether every module imported so far is covered."""
        return "files" in self.installed and (
            "pillow" in self.installed or "PIL.Image" not in sys.modules
        )

    def lay(self) -> None:
        with self.lock:
            import builtins

            if "files" not in self.installed:
                self.installed.add("files")
                self.undo += [
                    monkeypatch.put(module, "open", _open_layer, 1) for module in (builtins, io)
                ]
            if "pillow" not in self.installed and "PIL.Image" in sys.modules:
                from PIL import Image as image
                from PIL import ImageFile as file

                self.installed.add("pillow")
                self.undo += [
                    monkeypatch.put(image, "open", _image_open_layer, 1),
                    monkeypatch.put(file.ImageFile, "load", _load_layer, 1),
                ]


_layers = _Layers()


def _forked() -> None:
    _layers.lock = threading.RLock()
    _local.__dict__.clear()


os.register_at_fork(after_in_child=_forked)


class Remedied(Dataset[Any]):
    """A Dataset read under a :class:`RedirectPlan`; other attributes are the Dataset's own."""

    def __init__(self, dataset: Any, plan: RedirectPlan) -> None:
        self.dataset = dataset
        self.plan = plan
        _layers.use(dataset)
        self._leave = weakref.finalize(self, _layers.leave)
        self._leave.atexit = False

    def __reduce__(self) -> Any:
        return Remedied, (self.dataset, self.plan)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: Any) -> Any:
        if not _layers.whole:
            _layers.lay()
        index = int(i) if isinstance(i, int | np.integer) else None
        with _making(
            self.plan, index + len(self.dataset) if index is not None and index < 0 else index
        ):
            return self.dataset[i]

    def _many(self, function: Callable[[Any], Any], ids: Any) -> Any:
        if not _layers.whole:
            _layers.lay()
        with _making(self.plan, None):
            return function(ids)

    def __getattr__(self, name: str) -> Any:
        if name in ("dataset", "plan") or (name.startswith("__") and name != "__getitems__"):
            raise AttributeError(name)
        if name == "__getitems__" and only_loops(self.dataset):
            raise AttributeError(name)
        value = getattr(self.dataset, name)
        return functools.partial(self._many, value) if name == "__getitems__" else value


def only_loops(dataset: Any) -> bool:
    """Whether a Dataset's ``__getitems__`` only loops over ``__getitem__``, like ``Subset``'s."""
    from torch.utils.data import Subset

    while type(dataset) is Subset:
        dataset = dataset.dataset
        if not hasattr(dataset, "__getitems__"):
            return True
    return False


_WATCHED = (("PIL.Image", "Image", "resize", _resize_layer), ("cv2", "", "imread", _imread_layer))


def trace_reads(dataset: Any, ids: list[int]) -> tuple[Observation, list[Any]]:
    """Make some samples; return the observation and the samples."""
    observation = Observation(own_many=hasattr(dataset, "__getitems__") and not only_loops(dataset))
    watched = Remedied(dataset, RedirectPlan())
    imported = [w for w in _WATCHED if w[0] in sys.modules]
    undo = [
        monkeypatch.put(getattr(sys.modules[m], o) if o else sys.modules[m], name, layer, 1)
        for m, o, name, layer in imported
    ]
    samples = []
    try:
        for i in ids:
            with _making(watched.plan, None, observation):
                many = getattr(dataset, "__getitems__", None) if observation.own_many else None
                samples.append(dataset[i] if many is None else many([i])[0])
            observation.samples += 1
            # the Dataset imported its decoder during the trace: trace again with it
            if imported != [w for w in _WATCHED if w[0] in sys.modules]:
                return trace_reads(dataset, ids)
    finally:
        for restore in undo:
            restore()
        watched._leave()
    return observation, samples


def folder_of(files: list[str]) -> str:
    """The common folder of these files, or ''."""
    try:
        return os.path.commonpath([str(Path(f).parent) for f in files]) if files else ""
    except ValueError:
        return ""
