"""Replacements for library functions: same result, timed while a sample is made."""

from __future__ import annotations

import functools
import importlib
import io
import os
import stat
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, ModuleType, NoneType
from typing import Any

import numpy as np

from ronde.profile.page_cache import in_cache
from ronde.profile.replay import MISSING
from ronde.profile.shared_counters import BLOCK, FUNCTION
from ronde.profile.stage_timer import StageTimer, current_timer, local

_READING = frozenset(("r", "rt", "tr", "rb", "br"))
_WHOLE = 16 << 20  # files up to this size are replayed as a whole, larger ones read by read
_FILES = 256  # files that each thread writes down


def suffix_of(path: Any) -> str:
    """The file name's suffix, which tells its kind."""
    if isinstance(path, str | os.PathLike):
        return os.path.splitext(os.fspath(path))[1].lower()  # noqa: PTH122 - 0.5 µs, where a Path takes 3
    return type(path).__name__


def timed_function(
    original: Callable[..., Any], stage: str, first: str, library: str = ""
) -> Callable[..., Any]:
    """Make a replacement for a function that reads, decodes, or augments.

    Args:
        first: the kind of its first argument: ``path``, ``name``, ``count``, or anything else;
            ``keep`` and ``wait`` are never replayed.
        library: its name for the reader, where it reads.
    """

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        account: StageTimer | None = getattr(local, "account", None)
        if account is None or account.current < 0:
            return original(*args, **kwargs)
        number = account.slot.stage(stage)
        if account.current == number:
            return account.run_library(library, number, FUNCTION, original, args, kwargs)
        # Reading and decoding count everywhere. Augmentation counts only outside of named stages,
        # and inside reading: the user's ``read_image`` may do all of it.
        if stage == "augment" and account.current not in (account.python, account.read):
            return original(*args, **kwargs)
        if stage == "subprocess" and account.current != account.python:
            return original(*args, **kwargs)  # a program that reads or decodes
        if first == "wait":
            return account.run_library(library, number, BLOCK, original, args, kwargs)
        probe = account.probe
        place = None
        if stage in probe.remove and first != "keep":
            place = probe.place(account, stage, original, _kind(args, first))
            found = probe.earlier(account, place, args)
            if found is not MISSING:
                if first == "path" and stage == "decode":
                    # taking out the decoding leaves the reading
                    read_for(args[0] if args else None)
                return found
        value = account.run_library(library, number, FUNCTION, original, args, kwargs)
        if stage == "read":
            if first == "count":
                account.count_bytes(len(value))
            elif first == "path" and args:
                note_read(account, args[0], not kwargs.get("mmap_mode"))
        if place is not None:
            probe.learn(account, place, value, args)
        return value

    return function


def _kind(args: tuple[Any, ...], first: str) -> str:
    """What tells this call's argument from others at the same place."""
    at = 1 if first in ("name", "count") else 0
    if len(args) <= at:
        return ""
    if first == "count":
        return str(args[1])
    return suffix_of(args[at]) if first in ("path", "name") else type(args[0]).__name__


def note_read(account: StageTimer, path: Any, all_of_it: bool) -> None:
    """Note that another library's function has read this file."""
    try:
        size = os.stat(path).st_size if isinstance(path, str | os.PathLike) else 0  # noqa: PTH116
    except OSError:
        return
    if size and all_of_it:
        account.count_bytes(size)
    if size and account.files < _FILES:
        account.files += 1
        account.probe.note_file(os.fspath(path), size, None)


def read_for(path: Any) -> None:
    """Read a file that will not be decoded."""
    if isinstance(path, str | os.PathLike):
        with open(path, "rb") as file:
            file.read()
    elif hasattr(path, "read") and hasattr(path, "seek"):
        path.seek(0)
        path.read()


class _TimedFile(io.FileIO):
    """A file whose reads count as a stage while a sample is made."""

    ronde_large: str | None = None  # its kind, where it is too large to be replayed as a whole

    def readinto(self, buffer: Any, /) -> int:
        account = current_timer()
        if account is None or account.current == account.read:
            return self._count(account, super().readinto(buffer))
        probe = account.probe
        place = None
        if self.ronde_large is not None and "read" in probe.remove:
            place = probe.place(account, "read", _TimedFile, f"{self.ronde_large} {len(buffer)}")
            earlier = probe.earlier(account, place)
            if earlier is not MISSING:
                buffer[: len(earlier)] = earlier
                return len(earlier)
        n = account.run(account.read, super().readinto, buffer)
        if place is not None:
            probe.learn(account, place, bytes(buffer[:n]), final=True)
        return self._count(account, n)

    def readall(self) -> bytes:
        account = current_timer()
        if account is None or account.current == account.read:
            data = super().readall()
        else:
            data = account.run(account.read, super().readall)
        self._count(account, len(data))
        return data

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0:
            return self.readall()
        buffer = bytearray(size)
        n = self.readinto(memoryview(buffer))
        return bytes(buffer[:n])

    @staticmethod
    def _count(account: StageTimer | None, n: int | None) -> int:
        if account is not None:
            account.count_bytes(n or 0)
        return n  # type: ignore[return-value]


class HeldFile(io.RawIOBase):
    """A file whose bytes are in memory."""

    def __init__(self, data: bytes, name: Any) -> None:
        super().__init__()
        self.name = name
        self.mode = "rb"
        self._data = io.BytesIO(data)

    def readable(self) -> bool:  # noqa: D102
        return True

    def seekable(self) -> bool:  # noqa: D102
        return True

    def readinto(self, buffer: Any, /) -> int:  # noqa: D102
        return self._data.readinto(buffer)

    def readall(self) -> bytes:  # noqa: D102
        return self._data.read()

    def write(self, data: Any, /) -> int:  # noqa: D102
        raise io.UnsupportedOperation("File not open for writing")

    def seek(self, at: int, whence: int = 0, /) -> int:  # noqa: D102
        return self._data.seek(at, whence)

    def tell(self) -> int:  # noqa: D102
        return self._data.tell()

    def close(self) -> None:  # noqa: D102
        self._data.close()
        super().close()


def opener(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces ``open``: times the file's reads, not only its opening."""
    theirs = not isinstance(original_of(original), BuiltinFunctionType | NoneType)

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
        account: StageTimer | None = getattr(local, "account", None)
        if (
            account is None
            or account.current < 0
            or account.current == account.read
            or mode not in _READING
            or isinstance(file, int)
            or buffering == 1
            or (buffering == 0 and "b" not in mode)
        ):
            return original(file, mode, buffering, encoding, errors, newline, closefd, opener)
        name = os.fspath(file)
        probe = account.probe
        place = None
        if "read" in probe.remove:
            place = probe.place(account, "read", "open", suffix_of(file))
            data = probe.earlier(account, place)
            if data is not MISSING:
                return wrap_raw(HeldFile(data, name), mode, buffering, encoding, errors, newline)
        account.enter(account.read)
        try:
            if theirs:
                # Another's ``open``, which may do what ours would not: a slow store played, a log,
                # a file system of its own.
                given = original(file, mode, buffering, encoding, errors, newline, closefd, opener)
                found = _timed_again(given, name)
                if found is None:
                    if place is None:
                        return _TimedObject(given)
                    try:
                        data = given.read()
                    finally:
                        given.close()
                    if isinstance(data, str):
                        encoding = encoding or "utf-8"
                        data = data.encode(encoding)
                    probe.learn(account, place, bytes(data), final=True)
                    return wrap_raw(
                        HeldFile(bytes(data), name), mode, buffering, encoding, errors, newline
                    )
                raw = found
            else:
                raw = _TimedFile(name, "r", closefd, opener)
            about = os.fstat(raw.fileno())
            if not stat.S_ISREG(about.st_mode):
                raw.close()
                return original(file, mode, buffering, encoding, errors, newline, closefd, opener)
        finally:
            account.leave()
        size = about.st_size
        if account.files < _FILES:
            account.files += 1
            account.enter(-1)
            probe.note_file(os.fsdecode(name), size, in_cache(raw.fileno()) if size else None)
            account.leave()
        if place is not None and size:  # files of the system have none, and are what they are
            if size <= _WHOLE:
                account.enter(-1)
                data = os.pread(raw.fileno(), size, 0)
                account.leave()
                probe.learn(account, place, data, final=True)
            else:
                raw.ronde_large = suffix_of(file)
        return wrap_raw(raw, mode, buffering, encoding, errors, newline)

    return open


def _timed_again(file: Any, name: Any) -> _TimedFile | None:
    """A file from another ``open``, with timed reads; None for unusual files."""
    raw = getattr(getattr(file, "buffer", file), "raw", getattr(file, "buffer", file))
    usual = type(file) in (io.TextIOWrapper, io.BufferedReader, io.FileIO)
    if not usual or type(raw) is not io.FileIO:
        return None
    timed = _TimedFile(os.dup(raw.fileno()), "r")
    timed.name = name
    file.close()
    return timed


class _TimedObject:
    """Another kind of file whose reads count as a stage while a sample is made."""

    def __init__(self, file: Any) -> None:
        self._ronde_file = file

    def _ronde_read(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        account = current_timer()
        if account is None or account.current == account.read:
            return function(*args, **kwargs)
        value = account.run(account.read, function, *args, **kwargs)
        if isinstance(value, bytes | str):
            account.count_bytes(len(value))
        return value

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._ronde_file, name)
        if name.startswith("read") and callable(value):
            return functools.partial(self._ronde_read, value)
        return value

    def __iter__(self) -> Any:
        return iter(functools.partial(self._ronde_read, next, iter(self._ronde_file), _END), _END)

    def __next__(self) -> Any:
        return self._ronde_read(next, self._ronde_file)

    def __enter__(self) -> Any:
        self._ronde_file.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._ronde_file.__exit__(*error)


_END = object()


def wrap_raw(
    raw: Any,
    mode: str,
    buffering: int,
    encoding: str | None,
    errors: str | None,
    newline: str | None,
) -> Any:
    """Wrap a raw file as ``open`` would for the requested mode."""
    if "b" in mode and (encoding is not None or errors is not None or newline is not None):
        raw.close()
        name = "encoding" if encoding is not None else "errors" if errors is not None else "newline"
        raise ValueError(
            f"binary mode doesn't take {'a' if name == 'newline' else 'an'} {name} argument"
        )
    if buffering == 0:
        return raw
    size = max(getattr(raw, "_blksize", 0), 0) or io.DEFAULT_BUFFER_SIZE
    binary = io.BufferedReader(raw, buffering if buffering > 1 else size)
    if "b" in mode:
        return binary
    text = io.TextIOWrapper(binary, io.text_encoding(encoding), errors, newline)
    text.mode = mode  # type: ignore[misc]
    return text


# Pillow opens first and decodes when the pixels are asked for.


class _Picture:
    """A decoded image that copies are made from; they share pixels until someone writes."""

    def __init__(self, image: Any) -> None:
        self.kind: Any = type(image)
        pixels = image.im.copy()
        self.values = {**vars(image), "_im": pixels, "fp": None, "tile": [], "_readonly": 1}
        self.nbytes = image.size[0] * image.size[1] * 4

    def make(self) -> Any:
        image = self.kind.__new__(self.kind)
        image.__dict__.update(self.values)
        image.info = dict(self.values["info"])
        image.tile = []
        return image


def image_open(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces ``PIL.Image.open``."""

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        account = current_timer()
        if account is None or account.current == account.decode:
            return original(*args, **kwargs)
        probe = account.probe
        removes = "decode" in probe.remove
        place: Any = None
        if removes:
            place = probe.place(
                account, "decode", original, suffix_of(args[0] if args else kwargs.get("fp"))
            )
            picture = probe.earlier(account, place)
            if picture is not MISSING:
                read_for(args[0] if args else kwargs.get("fp"))
                return picture.make()
        image = account.run(account.decode, original, *args, **kwargs)
        if removes:
            account.opened.append((image, place))
        return image

    return function


def image_load(original: Callable[..., Any], plain: bool) -> Callable[..., Any]:
    """Replaces ``PIL.ImageFile.ImageFile.load`` and the formats' own; ``plain`` is the first, which
    does nothing without tiles.
    """

    @functools.wraps(original)
    def load(self: Any, *args: Any, **kwargs: Any) -> Any:
        account = current_timer()
        if account is None or (plain and not self.tile):
            return original(self, *args, **kwargs)
        if account.current == account.decode:
            value = original(self, *args, **kwargs)
        else:
            value = account.run(account.decode, original, self, *args, **kwargs)
        if account.opened:
            for i, (image, place) in enumerate(account.opened):
                # one that has more pictures to come is left alone
                if image is self and not self.tile and not getattr(self, "fp", None):
                    del account.opened[i]
                    account.probe.learn(account, place, _Picture(self), final=True)
                    break
        return value

    return load


def image_convert(original: Callable[..., Any], base: Any) -> Callable[..., Any]:
    """Replaces ``PIL.Image.Image.convert``: decoding for an image file, augmentation otherwise."""

    @functools.wraps(original)
    def convert(self: Any, *args: Any, **kwargs: Any) -> Any:
        account = current_timer()
        if account is None:
            return original(self, *args, **kwargs)
        file = isinstance(self, base)
        number = account.decode if file else account.slot.stage("augment")
        if account.current == number or not (
            file or account.current in (account.python, account.read)
        ):
            return original(self, *args, **kwargs)
        probe, stage = account.probe, "decode" if file else "augment"
        place = None
        if stage in probe.remove:
            place = probe.place(account, stage, original, str(args[0]) if args else "")
            found = probe.earlier(account, place, (self,))
            if found is not MISSING:
                return found
        value = account.run(number, original, self, *args, **kwargs)
        if place is not None:
            probe.learn(account, place, value)
        return value

    return convert


def split_imread(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces ``cv2.imread``: reads the file here, and lets OpenCV decode the bytes."""

    @functools.wraps(original)
    def imread(filename: Any, *args: Any, **kwargs: Any) -> Any:
        flags = args[0] if args else kwargs.get("flags", 1)
        if (
            current_timer() is None
            or len(args) > 1
            or not isinstance(flags, int)
            or set(kwargs) - {"flags"}
            or not isinstance(filename, str | os.PathLike)
        ):
            return original(filename, *args, **kwargs)
        import cv2

        try:
            with open(filename, "rb") as file:
                data = np.frombuffer(file.read(), dtype=np.uint8)
            found = cv2.imdecode(data, flags) if data.size else None
        except OSError:
            found = None
        return original(filename, *args, **kwargs) if found is None else found

    return imread


def swap_attribute(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute, or an item of a dictionary. Returns a function that restores the old value
    unless somebody else has changed it since.
    """
    if isinstance(owner, dict):
        item = owner[name]
        owner[name] = value

        def put_item_back() -> None:
            if owner.get(name) is value:
                owner[name] = item

        return put_item_back
    had, before = name in vars(owner), vars(owner).get(name)
    plain = object.__setattr__ if not isinstance(owner, type | ModuleType) else setattr
    plain(owner, name, value)

    def put_back() -> None:
        if getattr(owner, name, None) is not value:
            return
        if had:
            plain(owner, name, before)
        elif isinstance(owner, type):
            type.__delattr__(owner, name)
        else:
            object.__delattr__(owner, name)

    return put_back


def original_of(function: Any) -> Any:
    """The function that was there before this package's replacements."""
    while isinstance(function, FunctionType) and str(
        function.__globals__.get("__name__")
    ).startswith("ronde."):
        function = getattr(function, "__wrapped__", None)
    return function


class ByName:
    """A module's function, looked up by name on each call and in pickles.

    It stands in for a function that a dataset stores (``loader=PIL.Image.open``). Pickle refuses
    the function itself, because its name now leads to the replacement.
    """

    def __init__(self, module: str, name: str) -> None:
        self._ronde_module = importlib.import_module(module)
        functools.update_wrapper(self, original_of(getattr(self._ronde_module, name)))
        self._ronde_name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        return getattr(self._ronde_module, self._ronde_name)(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> ByName:
        return self

    def __reduce__(self) -> Any:
        return ByName, (self._ronde_module.__name__, self._ronde_name)


def _original(value: Any) -> Any:
    return value


class Named:
    """A user's callable that belongs to a stage. It poses as the original, also in pickles."""

    def __init__(self, value: Any, stage: str) -> None:
        object.__setattr__(self, "_ronde_value", value)
        object.__setattr__(self, "_ronde_stage", stage)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._ronde_value)

    def _ronde_call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        account = current_timer()
        if account is None:
            return function(*args, **kwargs)
        return account.probe.call(self._ronde_stage, function, args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        return self._ronde_call(self._ronde_value, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._ronde_value, name)
        if name.startswith(("encode", "batch_encode", "tokenize")) and callable(value):
            return functools.partial(
                lambda function, *args, **kwargs: self._ronde_call(function, args, kwargs), value
            )
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._ronde_value, name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _original, (self._ronde_value,)

    def __repr__(self) -> str:
        return repr(self._ronde_value)

    def __eq__(self, other: object) -> bool:
        other = other._ronde_value if type(other) is Named else other
        return bool(self._ronde_value == other)

    def __hash__(self) -> int:
        return hash(self._ronde_value)

    def __bool__(self) -> bool:
        return bool(self._ronde_value)

    def __len__(self) -> int:
        return len(self._ronde_value)

    def __iter__(self) -> Any:
        return iter(self._ronde_value)

    def __getitem__(self, i: Any) -> Any:
        return self._ronde_value[i]
