"""Read many byte ranges at once: local files with ``pread``, remote ones through fsspec."""

from __future__ import annotations

import functools
import glob as globbing
import io
import itertools
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ronde.world import ArgumentError, SampleError
from ronde.world.paths import is_remote, local_path, need

_IN_FLIGHT_REQUESTS = 32
_TRIES = 3
_READ_AHEAD_BYTES = 8 << 20  # of the headers of a remote tar
# Errors that another try would only repeat.
_FINAL = (
    *(FileNotFoundError, PermissionError, IsADirectoryError),
    *(ArgumentError, NotImplementedError),
)
# What file systems call that which changes with a file's contents, the surest first.
_TAGS = (
    *("ETag", "etag", "md5Hash", "checksum", "Last-Modified", "LastModified", "last_modified"),
    *("mtime", "updated", "created"),
)


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


def _truncated(place: ByteRange, got: int) -> str:
    return (
        f"{place.path} ends at byte {place.offset + got:,}; {place.length:,} bytes were expected "
        f"at {place.offset:,}. It is truncated."
    )


def _changed(path: str, now: int, before: int) -> str:
    return f"{path} changed: it has {now:,} bytes and had {before:,} when it was opened."


def _pread(descriptor: int, place: ByteRange, size: int) -> bytes:
    length = size - place.offset if place.length is None else place.length
    data = os.pread(descriptor, length, place.offset)
    while len(data) < length:  # one call gives 2 GiB at most
        more = os.pread(descriptor, length - len(data), place.offset + len(data))
        if not more:
            raise SampleError(_truncated(place, len(data)))
        data += more
    return data


class _Descriptor:
    """A file that is open for reading, until its last reader lets go of it."""

    def __init__(self, path: str) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


@functools.lru_cache(maxsize=128)  # files of this process; the usual limit is 1,024
def _kept_open(path: str, device: int, inode: int) -> _Descriptor:
    return _Descriptor(path)


def _read_local(path: str, places: Sequence[ByteRange]) -> list[bytes]:
    """The ranges of one file."""
    try:
        info = os.stat(path)  # noqa: PTH116
        for place in places:
            if place.size is not None and place.size != info.st_size:
                raise SampleError(_changed(path, info.st_size, place.size))
        # Whole files are many and small: each is opened once. Parts are read again and again, and
        # on a network file system opening costs as much as reading.
        whole = all(place.length is None for place in places)
        file = _Descriptor(path) if whole else _kept_open(path, info.st_dev, info.st_ino)
        return [_pread(file.number, place, info.st_size) for place in places]
    except OSError as error:
        raise SampleError(f"{path} cannot be read: {error.strerror or error}.") from error


class Store:
    """Access to some paths: local, or by a URL's protocol.

    Args:
        options: for fsspec's file system, as ``{"anon": True}``.
    """

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self.options = dict(options or {})

    def file_system(self, url: str) -> Any:
        """The fsspec file system of a URL; fsspec keeps one for each thread and process."""
        need("fsspec", "remote", url)
        import fsspec

        try:
            return fsspec.filesystem(url.split("://", 1)[0], **self.options)
        except (ImportError, ValueError) as error:
            raise ArgumentError(
                f"{url} cannot be opened: {error}. fsspec needs the package of that protocol."
            ) from error

    def read(self, places: Sequence[ByteRange]) -> list[bytes]:
        """Read the bytes of each range.

        Raises:
            SampleError: one of them cannot be read; it names the file.
        """
        if places and is_remote(places[0].path):
            return self._read_remote(places)
        data: list[bytes] = []
        for path, run in itertools.groupby(places, lambda place: place.path):
            data += _read_local(path, list(run))
        return data

    def _read_remote(self, places: Sequence[ByteRange]) -> list[bytes]:
        parts: list[Any] = [b"" if place.length == 0 else None for place in places]
        left = [i for i, place in enumerate(places) if place.length != 0]
        for attempt in range(_TRIES):
            if not left:
                break
            if attempt:
                time.sleep(0.2 * 4 ** (attempt - 1))  # seconds: 0.2, 0.8
            for i, data in zip(left, self._fetch([places[i] for i in left]), strict=True):
                parts[i] = data
            left = [
                i
                for i in left
                if isinstance(parts[i], BaseException) and not isinstance(parts[i], _FINAL)
            ]
        for place, data in zip(places, parts, strict=True):
            if isinstance(data, BaseException):
                raise SampleError(f"{place.path} cannot be read: {_reason(data)}.") from data
            if place.length is not None and len(data) > place.length:
                raise SampleError(
                    f"{place.path} cannot be read in ranges: {place.length:,} bytes were requested "
                    f"and {len(data):,} arrived. Its server does not support range requests."
                )
            if place.length is not None and len(data) < place.length:
                raise SampleError(_truncated(place, len(data)))
        return parts

    def _fetch(self, places: Sequence[ByteRange]) -> list[Any]:
        """Bytes, or the error of each."""
        fs = self.file_system(places[0].path)
        paths = [fs._strip_protocol(place.path) for place in places]
        starts = [place.offset if place.length is not None else None for place in places]
        ends = [p.offset + p.length if p.length is not None else None for p in places]
        extra = {"batch_size": _IN_FLIGHT_REQUESTS} if fs.async_impl else {}
        return list(fs.cat_ranges(paths, starts, ends, on_error="return", **extra))

    @contextmanager
    def open(self, path: str, size: int) -> Iterator[Any]:
        """What pyarrow reads a file of so many bytes by: a local path, or a file object.

        Raises:
            SampleError: a local file has another size now.
        """
        if not is_remote(path):
            if (now := os.stat(path).st_size) != size:  # noqa: PTH116 - an OSError, as in reading
                raise SampleError(_changed(path, now, size))
            yield path
            return
        with _RemoteFile(self, path, size) as file:
            yield file

    def stream(self, path: str, size: int) -> Any:
        """A file object for reading a file of so many bytes from front to back, with seeks."""
        if not is_remote(path):
            return open(path, "rb")
        return io.BufferedReader(_RemoteFile(self, path, size), _READ_AHEAD_BYTES)

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
                status = Path(path).stat()
            except OSError as error:
                raise ArgumentError(f"{path} cannot be opened: {error.strerror}.") from None
            return status.st_size, status.st_mtime_ns, ""
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


class _RemoteFile(io.RawIOBase):
    """A remote file whose reads are those of :meth:`Store.read`: tried again, and then named."""

    def __init__(self, store: Store, path: str, size: int) -> None:
        self._store, self._path, self._size = store, path, size
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = 0) -> int:
        self._place = offset + (0, self._place, self._size)[whence]
        return self._place

    def readinto(self, buffer: Any) -> int:
        length = min(len(buffer), max(0, self._size - self._place))
        buffer[:length] = self._store.read([ByteRange(self._path, self._place, length)])[0]
        self._place += length
        return length


def _reason(error: BaseException) -> str:
    text = str(error).strip().rstrip(".")
    if isinstance(error, FileNotFoundError):
        return "no such file"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def expand(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    store: Store,
    argument: str,
    ending: str = "",
) -> list[str]:
    """Expand globs (``shards/*.tar``) and braces (``shard-{000..012}.tar``) to a file list; globs
    sort.

    Args:
        ending: of the files that a local folder stands for; empty where it stands for none.

    Raises:
        ArgumentError: nothing matches.
    """
    files: list[str] = []
    for path in [paths] if isinstance(paths, str | os.PathLike) else paths:
        text = os.fspath(path) if is_remote(os.fspath(path)) else local_path(path)
        folder = ""
        if ending and not is_remote(text) and os.path.isdir(text):  # noqa: PTH112
            folder = text.rstrip("/")
            names = [f"{globbing.escape(folder)}/*{ending}"]
        elif not is_remote(text) and os.path.exists(text):  # noqa: PTH110
            names = [text]  # whatever its name looks like
        else:
            names = _braces(text)
        for name in names:
            if not (matches := _matches(name, store)):
                shown = name.replace(globbing.escape(folder), folder) if folder else name
                raise ArgumentError(f"{argument}: nothing matches {shown}.")
            files += matches
    if not files:
        raise ArgumentError(f"{argument}: no path given.")
    return files


def _matches(name: str, store: Store) -> list[str]:
    """The name itself, or the files that match it as a pattern, sorted."""
    if is_remote(name):
        if not set("*[") & set(name):  # "?" begins a query
            return [name]
        fs = store.file_system(name)
        return sorted(str(fs.unstrip_protocol(m)) for m in fs.glob(fs._strip_protocol(name)))
    if not set("*?[") & set(name) or os.path.exists(name):  # noqa: PTH110
        return [name]
    return sorted(globbing.glob(name, recursive=True))  # noqa: PTH207


def one_folder(paths: Any, ending: str) -> str | None:
    """The folder that ``paths`` names, if it is one: a local one that is there, whatever its name
    looks like, or a URL that is no pattern and has not this ending.
    """
    if not isinstance(paths, str | os.PathLike):
        return None
    text = os.fspath(paths)
    if not is_remote(text):
        text = local_path(paths).rstrip("/")
        return text if Path(text).is_dir() else None
    return None if text.endswith(ending) or set("*[{") & set(text) else text.rstrip("/")


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
