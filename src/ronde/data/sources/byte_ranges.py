"""Read many byte ranges at once: local files with ``pread``, remote ones through fsspec."""

from __future__ import annotations

import glob as globbing
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from ronde.data.sources.base import reset_after_fork
from ronde.world import ArgumentError, SampleError
from ronde.world.paths import is_remote, local_path, need

_OPEN_FILES = 128  # of one process; far below the usual limit of 1024
_IN_FLIGHT = 32
_TRIES = 3
_GAP = 32 << 10  # requests for ranges of one remote file are merged across gaps up to this
_MERGED = 8 << 20  # … up to this size
# What file systems call that which changes with a file's contents, the surest first.
_TAGS = (
    *("ETag", "etag", "e_tag", "md5Hash", "Content-MD5", "Digest", "checksum"),
    *(
        "LastModified",
        "Last-Modified",
        "last_modified",
        "updated",
        "mtime",
        "modified",
        "modificationTime",
        "created",
    ),
)

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class ByteRange(NamedTuple):
    """A byte range of a file.

    Attributes:
        path: a local path, or a URL.
        offset: where they begin; 0 with ``length`` None is the whole file.
        length: how many; None to the end.
        size: of the whole file, if it is known: a file that has another one is refused.
    """

    path: str
    offset: int = 0
    length: int | None = None
    size: int | None = None


class _OpenFiles:
    """This process's open descriptors, closed least recently used first. Thread-safe."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._lock = threading.Lock()
        # (path, size) -> [descriptor, readers]
        self._held: OrderedDict[tuple[str, int | None], list[int]] = OrderedDict()
        reset_after_fork(self)

    def reset(self) -> None:
        """In a forked child, close the copied descriptors; the parent's stay open."""
        self._lock = threading.Lock()
        for descriptor, _ in self._held.values():
            os.close(descriptor)
        self._held.clear()

    @contextmanager
    def open(self, path: str, size: int | None) -> Iterator[int]:
        key = (path, size)
        with self._lock:
            entry = self._held.get(key)
            if entry is None:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                found = os.fstat(descriptor).st_size
                if size is not None and found != size:
                    os.close(descriptor)
                    raise SampleError(
                        f"{path} changed: it has {found:,} bytes and had {size:,} when it was "
                        "opened."
                    )
                entry = self._held[key] = [descriptor, 0]
                for old in [k for k, e in self._held.items() if e[1] == 0 and k != key][
                    : max(0, len(self._held) - self.most)
                ]:
                    os.close(self._held.pop(old)[0])
            self._held.move_to_end(key)
            entry[1] += 1
        try:
            yield entry[0]
        finally:
            with self._lock:
                entry[1] -= 1
                if not entry[1] and self._held.get(key) is not entry:
                    os.close(entry[0])

    def refresh(self, path: str, now: os.stat_result) -> None:
        """Reopen a path if it now names another file, even of the same size."""
        with self._lock:
            for key in ((path, now.st_size), (path, None)):
                entry = self._held.get(key)
                if entry is not None and not os.path.samestat(os.fstat(entry[0]), now):
                    del self._held[key]
                    if not entry[1]:  # else its last reader closes it
                        os.close(entry[0])

    def count(self) -> int:
        """Number of open descriptors."""
        return len(self._held)


open_files = _OpenFiles(_OPEN_FILES)


def _pread(descriptor: int, offset: int, length: int, path: str) -> bytes:
    data = os.pread(descriptor, length, offset)
    if len(data) == length:
        return data
    parts = [data]
    got = len(data)
    while got < length:
        more = os.pread(descriptor, length - got, offset + got)
        if not more:
            raise SampleError(
                f"{path} ends at byte {offset + got:,}; {length:,} bytes were expected at "
                f"{offset:,}. It is truncated."
            )
        parts.append(more)
        got += len(more)
    return b"".join(parts)


def _read_local(place: ByteRange) -> bytes:
    path = place.path
    try:
        if place.length is not None:
            with open_files.open(path, place.size) as descriptor:
                return _pread(descriptor, place.offset, place.length, path)
        # Whole files are many and small: each is opened once, so keeping it open would gain
        # nothing.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(descriptor).st_size
            return _pread(descriptor, 0, size, path) if size else b""
        finally:
            os.close(descriptor)
    except OSError as error:
        raise SampleError(f"{path} cannot be read: {error.strerror or error}.") from error


class _FileSystems:
    """fsspec file systems of this process, one per protocol and options, shared by threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[tuple[str, str], Any] = {}
        reset_after_fork(self)

    def reset(self) -> None:
        self._lock = threading.Lock()
        self._held.clear()

    def of(self, url: str, options: Mapping[str, Any]) -> Any:
        protocol = url.split("://", 1)[0]
        key = (protocol, repr(sorted(options.items())))
        with self._lock:
            if key not in self._held:
                need("fsspec", "remote", url)
                import fsspec

                try:
                    # fsspec keeps one for each thread; one for all of them shares its connections.
                    self._held[key] = fsspec.filesystem(
                        protocol, skip_instance_cache=True, **options
                    )
                except (ImportError, ValueError) as error:
                    raise ArgumentError(
                        f"{url} cannot be opened: {error}. fsspec needs the package of "
                        "that protocol."
                    ) from error
            return self._held[key]


_file_systems = _FileSystems()


def _final(error: BaseException) -> bool:
    """Whether retrying is pointless."""
    return isinstance(
        error,
        FileNotFoundError
        | PermissionError
        | IsADirectoryError
        | ArgumentError
        | NotImplementedError,
    )


class Store:
    """Access to some paths: local, or by a URL's protocol.

    Args:
        options: for fsspec's file system, as ``{"anon": True}``.
    """

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self.options = dict(options or {})

    def file_system(self, url: str) -> Any:
        """The fsspec file system of a URL."""
        return _file_systems.of(url, self.options)

    def read(self, places: Sequence[ByteRange]) -> list[bytes]:
        """Read the bytes of each range.

        Raises:
            SampleError: one of them cannot be read; it names the file.
        """
        if not places:
            return []
        if not is_remote(places[0].path):
            return [_read_local(place) for place in places]
        return self._read_remote(places)

    def _read_remote(self, places: Sequence[ByteRange]) -> list[bytes]:
        found: list[bytes | None] = [b"" if place.length == 0 else None for place in places]
        merged = _merge([(i, place) for i, place in enumerate(places) if place.length != 0])
        fetched = self._fetch([place for place, _ in merged])
        for (place, members), data in zip(merged, fetched, strict=True):
            for i in members:
                wanted = places[i]
                start = wanted.offset - place.offset
                found[i] = (
                    data
                    if wanted.length is None or len(data) == wanted.length
                    else data[start : start + wanted.length]
                )
        return [data if data is not None else b"" for data in found]

    def _fetch(self, places: list[ByteRange]) -> list[bytes]:
        found: list[Any] = [None] * len(places)
        left = list(range(len(places)))
        for attempt in range(_TRIES):
            if not left:
                break
            if attempt:
                time.sleep(0.2 * 4 ** (attempt - 1))
            fs = self.file_system(places[0].path)
            paths = [fs._strip_protocol(places[i].path) for i in left]
            starts = [places[i].offset if places[i].length is not None else None for i in left]
            ends = [
                places[i].offset + length if (length := places[i].length) is not None else None
                for i in left
            ]
            extra = {"batch_size": _IN_FLIGHT} if getattr(fs, "async_impl", False) else {}
            for i, data in zip(
                left, fs.cat_ranges(paths, starts, ends, on_error="return", **extra), strict=True
            ):
                found[i] = data
            left = [i for i in left if isinstance(found[i], BaseException) and not _final(found[i])]
        for place, data in zip(places, found, strict=True):
            if isinstance(data, BaseException):
                raise SampleError(f"{place.path} cannot be read: {_reason(data)}.") from data
            if place.length is not None and len(data) > place.length:
                raise SampleError(
                    f"{place.path} cannot be read in ranges: {place.length:,} bytes were requested "
                    f"and {len(data):,} arrived. Its server does not support range requests."
                )
            if place.length is not None and len(data) < place.length:
                raise SampleError(
                    f"{place.path} ends at byte {place.offset + len(data):,}; "
                    f"{place.length:,} bytes were expected at {place.offset:,}. "
                    "It is truncated."
                )
        return found

    @contextmanager
    def open(self, path: str) -> Iterator[Any]:
        """What pyarrow reads a file by: a local path, or a file object of fsspec's."""
        if not is_remote(path):
            yield path
            return
        fs = self.file_system(path)
        # Its reader asks for what it needs; fsspec's own cache would fetch megabytes more.
        with fs.open(fs._strip_protocol(path), "rb", cache_type="none") as file:
            yield file

    def size(self, path: str) -> int:
        """Bytes of a file.

        Raises:
            ArgumentError: there is none.
        """
        return self.stat(path)[0]

    def stat(self, path: str) -> tuple[int, int, str]:
        """``(bytes, modification time in ns, tag)`` of a file.

        A local file has no tag. A remote file's time is 0; its tag is its ETag, checksum or time,
        empty if the server gives none.

        Raises:
            ArgumentError: there is no such file.
        """
        if not is_remote(path):
            try:
                found = Path(path).stat()
            except OSError as error:
                raise ArgumentError(f"{path} cannot be opened: {error.strerror}.") from None
            open_files.refresh(path, found)
            return found.st_size, found.st_mtime_ns, ""
        fs = self.file_system(path)
        try:
            info = fs.info(fs._strip_protocol(path))
        except Exception as error:  # every protocol has errors of its own
            raise ArgumentError(f"{path} cannot be opened: {_reason(error)}.") from error
        if info.get("size") is None:
            raise ArgumentError(
                f"{path}: its server does not report a length, which random access needs."
            )
        return (
            int(info["size"]),
            0,
            next((f"{name} {info[name]}" for name in _TAGS if info.get(name)), ""),
        )

    def whole(self, path: str) -> bytes | None:
        """A whole file; None if it is missing."""
        try:
            if not is_remote(path):
                return Path(path).read_bytes() if Path(path).is_file() else None
            return self.read([ByteRange(path)])[0]
        except SampleError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Store) and other.options == self.options

    __hash__ = None  # type: ignore[assignment]


def _reason(error: BaseException) -> str:
    text = str(error).strip().rstrip(".")
    if isinstance(error, FileNotFoundError):
        return "no such file"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _merge(asked: list[tuple[int, ByteRange]]) -> list[tuple[ByteRange, list[int]]]:
    """Merge neighboring ranges of a file into one request."""
    whole = [(place, [i]) for i, place in asked if place.length is None]
    merged: list[tuple[ByteRange, list[int]]] = []
    for i, place in sorted(
        ((i, p) for i, p in asked if p.length is not None), key=lambda e: (e[1].path, e[1].offset)
    ):
        assert place.length is not None
        if merged:
            last, members = merged[-1]
            assert last.length is not None
            end = last.offset + last.length
            new_end = max(end, place.offset + place.length)
            if (
                last.path == place.path
                and place.offset - end <= _GAP
                and new_end - last.offset <= max(_MERGED, last.length)
            ):
                merged[-1] = (last._replace(length=new_end - last.offset), [*members, i])
                continue
        merged.append((place, [i]))
    return whole + merged


def expand(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], store: Store, argument: str
) -> list[str]:
    """Expand globs (``shards/*.tar``) and braces (``shard-{000..012}.tar``) to a file list; globs
    sort.

    Raises:
        ArgumentError: nothing matches.
    """
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    found: list[str] = []
    for path in given:
        text = os.fspath(path) if is_remote(os.fspath(path)) else local_path(path)
        # What exists is itself, whatever its name looks like.
        for one in [text] if not is_remote(text) and os.path.exists(text) else _braces(text):  # noqa: PTH110
            if not any(letter in one for letter in "*[") and not (
                "?" in one and not is_remote(one)
            ):
                found.append(one)
                continue
            if is_remote(one):
                fs = store.file_system(one)
                matches = sorted(
                    str(fs.unstrip_protocol(match)) for match in fs.glob(fs._strip_protocol(one))
                )
            else:
                matches = (
                    [one]
                    if os.path.exists(one)  # noqa: PTH110
                    else sorted(globbing.glob(one, recursive=True))  # noqa: PTH207
                )
            if not matches:
                raise ArgumentError(f"{argument}: nothing matches {one}.")
            found += matches
    if not found:
        raise ArgumentError(f"{argument}: no path given.")
    return found


def inside(folder: str, ending: str, argument: str) -> list[str]:
    """A local folder's files with this suffix, sorted; the folder's name is not a pattern."""
    found = sorted(globbing.glob(f"{globbing.escape(folder)}/*{ending}"))  # noqa: PTH207
    if not found:
        raise ArgumentError(f"{argument}: nothing matches {folder}/*{ending}.")
    return found


def _braces(text: str) -> list[str]:
    match = re.search(r"\{(\d+)\.\.(\d+)\}", text)
    if match is None:
        return [text]
    low, high = match.groups()
    width = len(low) if low.startswith("0") else 0
    return [
        one
        for number in range(int(low), int(high) + 1)
        for one in _braces(f"{text[: match.start()]}{number:0{width}d}{text[match.end() :]}")
    ]


class BytesCache(Generic[K, V]):
    """The last values, up to a number of bytes. Thread-safe; concurrent requests build a value
    once.

    Args:
        most_bytes: the most that it holds; something larger than that is made and not kept.
        size: bytes of one value.
    """

    def __init__(self, most_bytes: int, size: Callable[[V], int]) -> None:
        self.most_bytes = most_bytes
        self._size = size
        self.reset()
        reset_after_fork(self)

    def reset(self) -> None:
        """Empty it. In a forked child, values the parent's threads were building never arrive."""
        self._lock = threading.Lock()
        self._held: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._coming: dict[K, Future[V]] = {}
        self.bytes = 0
        self.made = 0

    def __getstate__(self) -> tuple[int, Callable[[V], int]]:
        return self.most_bytes, self._size

    def __setstate__(self, state: tuple[int, Callable[[V], int]]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def get(self, keys: Sequence[K], make: Callable[[list[K]], list[V]]) -> dict[K, V]:
        """The values of some keys.

        Args:
            make: values of the keys that are not held, asked for all at once.
        """
        found: dict[K, V] = {}
        mine: dict[K, Future[V]] = {}
        theirs: dict[K, Future[V]] = {}
        with self._lock:
            for key in keys:
                if key in self._held:
                    self._held.move_to_end(key)
                    found[key] = self._held[key][0]
                elif key in self._coming and key not in mine:
                    theirs[key] = self._coming[key]
                elif key not in mine:
                    mine[key] = self._coming[key] = Future()
        if mine:
            try:
                values = make(list(mine))
            except BaseException as error:
                with self._lock:
                    for key, future in mine.items():
                        self._coming.pop(key, None)
                        future.set_exception(error)
                raise
            with self._lock:
                for (key, future), value in zip(mine.items(), values, strict=True):
                    found[key] = value
                    self._coming.pop(key, None)
                    self._keep(key, value)
                    future.set_result(value)
        for key, future in theirs.items():
            found[key] = future.result()
        return found

    def _keep(self, key: K, value: V) -> None:
        size = self._size(value)
        self.made += 1
        if size > self.most_bytes:
            return
        self._held[key] = (value, size)
        self.bytes += size
        while self.bytes > self.most_bytes:
            self.bytes -= self._held.popitem(last=False)[1][1]
