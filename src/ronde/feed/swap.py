"""A plain data set read in another way: its files out of a pack or a cache, its JPEG images by another decoder. It notices nothing.

While such a data set makes a sample, and only in the thread that makes it, ``open``, ``PIL.Image.open`` and the decoding behind it are
replaced. What cannot be done the other way (another format, a broken file) is done as ever.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
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

from ronde.feed import found, layers, lazy, stages
from ronde.feed.cache import CacheReport, _Cache
from ronde.feed.decode import DECODERS, format_of
from ronde.feed.encoding import decode as decoded
from ronde.feed.encoding import encode
from ronde.feed.patches import ByName, HeldFile, beneath, dressed, exchange, split_imread
from ronde.feed.stages import stage

__all__ = ["FileCache", "Plan", "Remedied", "Seen", "traced"]

PLACES = 4  # files or images of one sample that are kept
_READING = frozenset(("r", "rt", "tr", "rb", "br"))
_LARGEST = 256 << 20  # a file beyond that is not one sample's

_local = threading.local()


@dataclass
class Seen:
    """What was done while some samples were made.

    Attributes:
        files: path and size of each file that was read, sample by sample.
        images: format, width, height and mode of each image that was decoded.
        jpegs: the bytes of JPEG images.
        resized: what was made smaller: width and height before, and after, with those of the file's image.
        samples: how many.
        own_many: the data set answers for many indices at once by itself.
    """

    files: list[tuple[str, int]] = field(default_factory=list)
    images: list[tuple[str, int, int, str]] = field(default_factory=list)
    jpegs: list[bytes] = field(default_factory=list)
    resized: list[tuple[tuple[int, int], tuple[int, int], tuple[int, int]]] = field(default_factory=list)
    samples: int = 0
    own_many: bool = False


class FileCache(_Cache):
    """Files, or decoded images, of a data set: one record for each place in a sample.

    A record says which file it is of; one of another file, or of an earlier state of it, is not used.

    Args:
        n: samples.
        where, limit: as for :func:`ronde.feed.cached_dataset`.
        key: tells this cache from those of other data sets and other work.
        about: the same, for people.
    """

    def __init__(self, n: int, where: str, limit: int | None, key: str, about: dict[str, Any]) -> None:
        super().__init__(n * PLACES, where, limit, None, key, about)
        self._checked = bytearray(n * PLACES)
        self._hits = self._hit_bytes = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_checked": bytearray(self._n), "_hits": 0, "_hit_bytes": 0}

    def get(self, place: int, name: str, state: Callable[[], str]) -> Any:
        """What is kept for a place, if it is of this very file; else None.

        Args:
            name: of the file.
            state: tells another state of it; asked once in each process, since files do not change while they are trained on.
        """
        with _own():
            return self._get(place, name, state)

    def _get(self, place: int, name: str, state: Callable[[], str]) -> Any:
        arena = self._opened() if place < self._n else None  # a data set may have more than it says
        found = None if arena is None else arena.get(place)
        if arena is None or found is None or found.data is None:
            return None
        try:
            kept = decoded(found.data)
        except ValueError:
            arena.count(corrupt=1)
            return None
        if not (isinstance(kept, tuple) and len(kept) == 3 and kept[0] == name):
            return None
        if not self._checked[place]:
            if kept[1] != state():
                return None
            self._checked[place] = 1
        self._hits += 1
        self._hit_bytes += len(found.data)
        if self._hits >= 16:
            self._tell()
        return kept[2]

    def _tell(self) -> None:
        """Add to what all processes have counted: a lock among them takes as long as to find a record."""
        arena = self._opened()
        hits, size, self._hits, self._hit_bytes = self._hits, self._hit_bytes, 0, 0
        if arena is not None and hits:
            arena.count(hits=hits, hit_bytes=size)

    def report(self) -> CacheReport:
        """See :meth:`ronde.feed.cache.CachedDataset.report`; some hits of other processes may not be told yet."""
        self._tell()
        return dataclasses.replace(super().report(), samples=self._n // PLACES)

    def put(self, place: int, name: str, state: Callable[[], str], value: Any) -> None:
        """Keep something, as long as there is room. Another file's record stays where it is."""
        with _own():
            self._put(place, name, state, value)

    def _put(self, place: int, name: str, state: Callable[[], str], value: Any) -> None:
        arena = self._opened() if place < self._n else None
        if arena is None:
            return
        closed = arena.closed_to_more
        arena.count(misses=1, **({closed: 1} if closed else {}))
        if closed:
            return
        found = arena.get(place)
        if found.data is not None:
            with contextlib.suppress(ValueError):
                kept = decoded(found.data)
                if not (isinstance(kept, tuple) and len(kept) == 3 and kept[0] == name):
                    return
        arena.put([(place, encode((name, state(), value)), found.entry)])
        self._checked[place] = 1


@dataclass
class Plan:
    """How a data set is read.

    Attributes:
        decoder: of JPEG images, by its name in :data:`ronde.feed.decode.DECODERS`; None for Pillow's own.
        fit: decode JPEG images at 1/2, 1/4 or 1/8 where at least so many pixels are left (width, height), and the share of an image that is
            cut out of it; None: always whole.
        resizes: images are made smaller by torch.
        reads: cache of files.
        pixels: cache of decoded images.
        pack: gives the bytes of a path, or None.
    """

    decoder: str | None = None
    fit: tuple[int, int, float] | None = None
    resizes: bool = False
    reads: FileCache | None = None
    pixels: FileCache | None = None
    pack: Callable[[str], bytes | None] | None = None


class _Making:
    """The sample that this thread is making."""

    __slots__ = ("files", "images", "index", "plan", "seen")

    def __init__(self, plan: Plan, index: int | None, seen: Seen | None) -> None:
        self.plan = plan
        self.index = index
        self.seen = seen
        self.files = self.images = 0

    def place(self, nth: int) -> int | None:
        return self.index * PLACES + nth if self.index is not None and nth < PLACES else None


def _now() -> _Making | None:
    found: _Making | None = getattr(_local, "making", None)
    return found


@contextlib.contextmanager
def _making(plan: Plan, index: int | None, seen: Seen | None = None) -> Iterator[None]:
    before = _now()
    _local.making = _Making(plan, index, seen)
    try:
        yield
    finally:
        _local.making = before


@contextlib.contextmanager
def _own() -> Iterator[None]:
    """What is opened here is opened for ourselves."""
    before = _now()
    _local.making = None
    try:
        yield
    finally:
        _local.making = before


def _state(path: str) -> str:
    about = os.stat(path)  # noqa: PTH116
    return f"{about.st_size} {about.st_mtime_ns}"


# -- files ---------------------------------------------------------------------------------------------------------------


def _held(making: _Making, path: str, real: Callable[..., Any]) -> bytes | None:
    """The bytes of a file, from the pack or the cache, which keeps them where it has not yet; None: read it as ever."""
    plan = making.plan
    if plan.pack is not None:
        with _own():
            data = plan.pack(path)
        if data is not None:
            return data
    if plan.reads is None:
        return None
    place = making.place(making.files)
    making.files += 1
    if place is None:
        return None
    state = functools.partial(_state, path)
    try:
        data = plan.reads.get(place, path, state)
        if data is None:
            with _own(), real(path, "rb") as file:
                data = file.read(_LARGEST)
            if len(data) == _LARGEST:
                return None
            plan.reads.put(place, path, state, data)
    except OSError:
        return None  # whoever opens it is told
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
        if making.seen is not None:
            with contextlib.suppress(OSError):
                making.seen.files.append((path, os.stat(path).st_size))  # noqa: PTH116
        if making.plan.reads is None and making.plan.pack is None:
            return original(file, mode, buffering, encoding, errors, newline, closefd, opener)
        held = _held if stages.listener is None else stage("read")(_held)
        data = held(making, path, original)
        if data is None:
            return original(file, mode, buffering, encoding, errors, newline, closefd, opener)
        return dressed(HeldFile(data, os.fspath(file), original), mode, buffering, encoding, errors, newline)

    return open


# -- images ----------------------------------------------------------------------------------------------------------------


@dataclass
class _Jpeg:
    """What is known of a JPEG image that Pillow has opened and not decoded yet."""

    plan: Plan
    data: bytes
    shrink: int
    pixels: Any = None
    keep: Callable[[Any], None] | None = None

    def kept(self, pixels: Any) -> None:
        """Have them kept, where there is a cache; once."""
        keep, self.keep = self.keep, None
        if keep is not None:
            with contextlib.suppress(OSError):
                keep(pixels)


class _Head(io.BytesIO):
    """The beginning of a file: Pillow needs no more, unless it is to decode it after all."""

    def __init__(self, head: bytes, path: str) -> None:
        super().__init__(head)
        self._path: str | None = path
        self.opened = False

    def _fill(self) -> None:
        if self.opened and self._path is not None:
            path, self._path = self._path, None
            at = self.tell()
            with _own():
                super().write(Path(path).read_bytes()[at:])
            super().seek(at)

    def read(self, size: int | None = -1, /) -> bytes:
        self._fill()
        return super().read(size)

    def seek(self, at: int, whence: int = 0, /) -> int:
        found = super().seek(at, whence)
        self._fill()
        return found


def _shrink(plan: Plan, width: int, height: int) -> int:
    if plan.fit is None:
        return 1
    across, down, share = plan.fit
    room = min(width * share / across, height * share / down)
    return 8 if room >= 8 else 4 if room >= 4 else 2 if room >= 2 else 1


def _image_open_layer(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def open_image(fp: Any, *args: Any, **kwargs: Any) -> Any:
        making = _now()
        if making is None:
            return original(fp, *args, **kwargs)
        plan, place, pixels, files = making.plan, None, None, making.files
        path = os.path.abspath(os.fsdecode(fp)) if isinstance(fp, str | bytes | os.PathLike) else None  # noqa: PTH100
        if plan.pixels is not None:
            place = making.place(making.images)
            making.images += 1
        state: Callable[[], str] = str if path is None else functools.partial(_state, path)
        file: Any = None
        if path is not None:
            kept = None
            if plan.pixels is not None and place is not None:
                get = plan.pixels.get if stages.listener is None else stage("read")(plan.pixels.get)
                with contextlib.suppress(OSError):
                    kept = get(place, path, state)
            if kept is not None:
                file, pixels = _Head(kept[0], path), kept[1]
                data = kept[0]
            else:
                with open(fp, "rb") as source:  # ours, where there is a cache or a pack
                    data = source.read(3)
                    if data == b"\xff\xd8\xff" or making.seen is not None:
                        data += source.read(_LARGEST)
                if making.seen is not None:
                    _look(making.seen, data, original)
                if format_of(data) != "jpeg" or len(data) >= _LARGEST:
                    making.files = files
                    with contextlib.nullcontext() if making.seen is None else _own():
                        return original(fp, *args, **kwargs)
                file = io.BytesIO(data)
            name = path
        else:
            try:
                fp.seek(0)
            except (AttributeError, io.UnsupportedOperation):  # a stream: Pillow does the same
                fp = io.BytesIO(fp.read())
            data = fp.read(_LARGEST)
            fp.seek(0)
            if making.seen is not None:
                _look(making.seen, data, original)
            if format_of(data) != "jpeg" or len(data) >= _LARGEST:
                return original(fp, *args, **kwargs)
            name = ""
            if plan.pixels is not None and place is not None:
                name = hashlib.blake2b(data, digest_size=16).hexdigest()
                kept = plan.pixels.get(place, name, state)
                pixels = None if kept is None else kept[1]
            file = fp
        image = _opened(original, file, path is None, *args, **kwargs)
        if image is None:  # asked for by its name, Pillow names it
            making.files = files
            return original(fp, *args, **kwargs)
        if path is not None:
            image.filename = os.fspath(fp)
            image._exclusive_fp = True
        if type(image).__name__ != "JpegImageFile" or not image.tile:
            return image
        shrink = _shrink(plan, *image.size)
        if shrink > 1:
            image.draft(image.mode, (image.width // shrink, image.height // shrink))
            shrink = image.decoderconfig[0] if image.decoderconfig else 1
        jpeg = _Jpeg(plan, data, shrink, pixels)
        if type(file) is _Head:
            file.opened = True
        elif plan.pixels is not None and place is not None and pixels is None:
            put = plan.pixels.put
            jpeg.keep = lambda found: put(place, name, state, (data[: _head_of(data)] if path is not None else b"", found))
        image.__dict__["_ronde_jpeg"] = jpeg
        return image

    return open_image


def _opened(original: Callable[..., Any], file: Any, last: bool, *args: Any, **kwargs: Any) -> Any:
    """An image of a file; None where Pillow does not know it and this is not the last to be tried."""
    from PIL import UnidentifiedImageError

    try:
        return original(file, *args, **kwargs)
    except UnidentifiedImageError:
        if last:
            raise
        return None


def _look(seen: Seen, data: bytes, original: Callable[..., Any]) -> None:
    with _own(), contextlib.suppress(Exception), original(io.BytesIO(data)) as image:
        seen.images.append((str(image.format), image.width, image.height, image.mode))
        if image.format == "JPEG":
            seen.jpegs.append(data)


def _pixels(image: Any, jpeg: _Jpeg) -> Any:
    """The pixels of an image that Pillow has opened, without Pillow; None: that is not possible, or not asked for."""
    # What the data set itself has asked for, by draft() say, is for Pillow to do.
    if len(image.tile) != 1 or image.tile[0][0] != "jpeg" or (image.decoderconfig or (1, 0))[0] != jpeg.shrink:
        return None
    decoder = jpeg.plan.decoder
    if jpeg.pixels is None and image.mode == "RGB" and decoder not in (None, "pillow"):
        with contextlib.suppress(Exception), _own():  # a broken file, another colour space: Pillow is the judge
            jpeg.pixels = DECODERS[str(decoder)].call(jpeg.data, jpeg.shrink)
            jpeg.kept(jpeg.pixels)
    found = jpeg.pixels
    width, height = image.size
    return found if found is not None and found.shape == (height, width, *((3,) if image.mode == "RGB" else ())) else None


def _load_layer(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load(self: Any, *args: Any, **kwargs: Any) -> Any:
        jpeg: _Jpeg | None = self.__dict__.get("_ronde_jpeg")
        if jpeg is None or not self.tile:
            return original(self, *args, **kwargs)
        del self.__dict__["_ronde_jpeg"]
        pixels = _pixels(self, jpeg)
        ours = (self.decoderconfig or (1, 0))[0] == jpeg.shrink
        if pixels is not None:
            from PIL import Image

            self.im = Image.frombytes(self.mode, self.size, pixels).im
            self.tile = []
            self.readonly = 0
            if self._exclusive_fp:
                self.fp.close()
            self.fp = None
        value = original(self, *args, **kwargs)  # where the pixels are there, nothing is left to do
        if pixels is None and ours and self.mode in ("RGB", "L"):
            jpeg.kept(np.asarray(self))
        return value

    return load


def _lazily(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """``convert``, ``crop`` and others of an image that is not decoded yet: its pixels need not become Pillow's first."""

    def layer(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            jpeg: _Jpeg | None = self.__dict__.get("_ronde_jpeg")
            if jpeg is not None and self.tile and self.mode == "RGB" and lazy.possible():
                pixels = _pixels(self, jpeg)
                if pixels is not None:
                    return getattr(lazy.to_image(pixels, self._copy_info(), jpeg.plan.resizes), name)(*args, **kwargs)
            return original(self, *args, **kwargs)

        return method

    return layer


def _head_of(data: bytes) -> int:
    """Where the first scan of a JPEG begins, and a little more."""
    at = 2
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker, length = data[at + 1], int.from_bytes(data[at + 2 : at + 4], "big")
        if marker == 0xFF:
            at += 1
            continue
        at += 2 + length
        if marker == 0xDA:
            return min(len(data), at + 64)
    return len(data)


def _resize_layer(original: Callable[..., Any]) -> Callable[..., Any]:
    lazily = _lazily("resize")(original)

    @functools.wraps(original)
    def resize(self: Any, size: Any, resample: Any = None, box: Any = None, *args: Any, **kwargs: Any) -> Any:
        making = _now()
        if making is not None and making.seen is not None and making.seen.images:
            before = self.size if box is None else (box[2] - box[0], box[3] - box[1])
            making.seen.resized.append((tuple(before), tuple(size), making.seen.images[-1][1:3]))
        if "_ronde_jpeg" in self.__dict__:
            return lazily(self, size, resample, box, *args, **kwargs)
        return original(self, size, resample, box, *args, **kwargs)

    return resize


def _wants_bytes() -> bool:
    """Whether OpenCV's files are read for it: they come from elsewhere, or are to be seen."""
    making = _now()
    return making is not None and (making.plan.reads is not None or making.plan.pack is not None or making.seen is not None)


# -- in place -------------------------------------------------------------------------------------------------------------


_MODULES = (("io", "open"), ("PIL.Image", "open"), ("cv2", "imread"))


class _Layers:
    """The layers of this process: there while some data set needs them."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.users = 0
        self.undo: list[Callable[[], None]] = []
        self.laid: set[str] = set()

    def use(self, dataset: Any) -> None:
        with self.lock:
            self.users += 1
            self.lay()
            below = {(m, n): beneath(getattr(sys.modules[m], n)) for m, n in _MODULES if m in sys.modules}
            for owner, name, value in list(found.held(dataset)):  # loader=PIL.Image.open
                for where, function in below.items():
                    if value is function:
                        with contextlib.suppress(Exception):  # an object that does not let itself be changed keeps what it has
                            self.undo.append(exchange(owner, name, ByName(*where)))

    def leave(self) -> None:
        with self.lock:
            self.users -= 1
            if not self.users:
                while self.undo:
                    with contextlib.suppress(Exception):  # one that cannot be put back must not keep the others from it
                        self.undo.pop()()
                self.laid.clear()

    @property
    def whole(self) -> bool:
        """Nothing has been imported since that would need a layer."""
        return (
            "files" in self.laid
            and ("pillow" in self.laid or "PIL.Image" not in sys.modules)
            and ("cv2" in self.laid or "cv2" not in sys.modules)
        )

    def lay(self) -> None:
        with self.lock:
            import builtins

            if "files" not in self.laid:
                self.laid.add("files")
                self.undo += [layers.put(module, "open", _open_layer, 1) for module in (builtins, io)]
            if "pillow" not in self.laid and "PIL.Image" in sys.modules:
                from PIL import Image as image
                from PIL import ImageFile as file

                self.laid.add("pillow")
                self.undo += [
                    layers.put(image, "open", _image_open_layer, 1),
                    layers.put(image.Image, "resize", _resize_layer, 1),
                    *(layers.put(image.Image, name, _lazily(name), 1) for name in ("convert", "crop", "transpose", "copy")),
                    layers.put(file.ImageFile, "load", _load_layer, 1),
                ]
            if "cv2" not in self.laid and "cv2" in sys.modules:
                self.laid.add("cv2")
                self.undo.append(layers.put(sys.modules["cv2"], "imread", functools.partial(split_imread, wanted=_wants_bytes), 1))


_layers = _Layers()


def _forked() -> None:
    _layers.lock = threading.RLock()
    _local.__dict__.clear()


os.register_at_fork(after_in_child=_forked)


class Remedied(Dataset[Any]):
    """A data set that is read as a :class:`Plan` says. Other attributes are the data set's own."""

    def __init__(self, dataset: Any, plan: Plan) -> None:
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
        with _making(self.plan, index + len(self.dataset) if index is not None and index < 0 else index):
            return self.dataset[i]

    def _many(self, function: Callable[[Any], Any], ids: Any) -> Any:
        if not _layers.whole:
            _layers.lay()
        with _making(self.plan, None):
            return function(ids)

    def __getattr__(self, name: str) -> Any:
        if name in ("dataset", "plan") or (name.startswith("__") and name != "__getitems__"):
            raise AttributeError(name)
        if name == "__getitems__" and loops(self.dataset):
            raise AttributeError(name)
        value = getattr(self.dataset, name)
        return functools.partial(self._many, value) if name == "__getitems__" else value


def loops(dataset: Any) -> bool:
    """Whether a data set's ``__getitems__`` only asks for one after the other, as that of ``Subset`` does."""
    from torch.utils.data import Subset

    while type(dataset) is Subset:
        dataset = dataset.dataset
        if not hasattr(dataset, "__getitems__"):
            return True
    return False


def traced(dataset: Any, ids: list[int], plan: Plan | None = None) -> tuple[Seen, list[Any]]:
    """Make some samples and see what is done for them.

    Returns:
        What was seen, and the samples.
    """
    seen = Seen(own_many=hasattr(dataset, "__getitems__") and not loops(dataset))
    watched = Remedied(dataset, plan or Plan())
    samples = []
    try:
        for i in ids:
            _layers.lay()
            with _making(watched.plan, None, seen):
                many = getattr(dataset, "__getitems__", None) if seen.own_many else None
                samples.append(dataset[i] if many is None else many([i])[0])
            seen.samples += 1
            if not _layers.whole:  # the data set has imported its decoder only now: look again
                return traced(dataset, ids, plan)
    finally:
        watched._leave()
    return seen, samples


def folder_of(files: list[str]) -> str:
    """The folder that all of them are in, or ''."""
    try:
        return os.path.commonpath([str(Path(f).parent) for f in files]) if files else ""
    except ValueError:
        return ""
