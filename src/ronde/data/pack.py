"""Pack a folder into tar shards with an index, so that readers can seek to a sample.

The same folder always gives the same bytes. A shard is written under a temporary name and renamed
when it is complete on disk; the manifest comes last. A killed pack therefore resumes, and ends with
the same bytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from ronde.data.sources.base import Names
from ronde.data.sources.byte_ranges import Store
from ronde.data.sources.folder import FolderSource, folder
from ronde.data.sources.tar import MANIFEST, PARTIAL, read_manifest, tar
from ronde.data.sources.tar_index import SUFFIX, TarIndex, header_of
from ronde.world import ArgumentError, RondeError, SampleError
from ronde.world.whole_file import sync, write_whole

_LOCK = ".ronde-pack.lock"
_WRITING = ".writing"
_AHEAD = 16  # files that are read ahead of the one being written

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Packed:
    """The result of :func:`pack` or :func:`verify_pack`.

    Attributes:
        path: the pack.
        kind: ``tar``.
        samples: in it.
        bytes: of its shards.
        shards: how many.
        classes: names of the classes, or None.
        resumed: samples that an earlier, stopped command had packed.
        already: nothing was to be done: the pack was there, complete.
        problems: what :func:`verify_pack` found wrong, one line each.
    """

    path: str
    kind: str
    samples: int
    bytes: int
    shards: int
    classes: list[str] | None
    resumed: int = 0
    already: bool = False
    problems: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**self.__dict__, "problems": list(self.problems), "ok": not self.problems}


def _json(values: Any) -> bytes:
    return (json.dumps(values, indent=1, ensure_ascii=True) + "\n").encode()


class _DigestedFile:
    """A file with a running digest and size."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "wb", buffering=1 << 20)  # noqa: SIM115
        self.sha256 = hashlib.sha256()
        self.bytes = 0

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self.sha256.update(data)
        self.bytes += len(data)

    def finish(self) -> None:
        """Flush the file to disk and close it."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True)
class _Item:
    """One sample to write."""

    i: int
    name: str
    label: Any
    data: bytes
    suffix: str


def _suffix_of(name: str) -> str:
    base = name.rpartition("/")[2]
    stem, dot, suffix = base.rpartition(".")
    found = suffix.lower() if dot and stem else ""
    # "cls" is the label's own; without an ending, WebDataset would find no name for the bytes.
    return {"": "bin", "cls": "cls.bin"}.get(found, found)


class _Keys:
    """Unique tar keys: paths without suffix and dots; WebDataset splits at the first dot."""

    def __init__(self) -> None:
        self._used: set[str] = set()

    def of(self, name: str) -> str:
        place, slash, base = name.rpartition("/")
        stem, dot, _ = base.rpartition(".")
        plain = (stem if dot and stem else base).replace(".", "_")
        key = f"{place}{slash}{plain}"
        if key.startswith("__"):
            key = "_" + key.lstrip("_")  # WebDataset leaves __names__ out
        found = key
        number = 1
        while found in self._used:
            number += 1
            found = f"{key}~{number}"
        self._used.add(found)
        return found


def _padding(size: int) -> bytes:
    return b"\0" * (-size % 512)


class _Shard:
    """A tar that is being written."""

    def __init__(self, path: Path, keys: _Keys, labels: Any) -> None:
        self.path = path
        self.out = _DigestedFile(path)
        self._keys = keys
        self._labelled = labels is not None
        # Of all labels, not of this shard's own: every shard holds them in the same way.
        self._label_kind = labels.dtype if isinstance(labels, np.ndarray) else None
        self.items: list[tuple[str, str, Any, int]] = []  # key, name, label, crc
        self._members: list[tuple[int, str, int, int]] = []  # sample, suffix, offset, size

    def size_with(self, item: _Item) -> int:
        """The tar's size if it also held this sample."""
        return self.out.bytes + 1024 + len(item.data) + 512 + (1024 if self._labelled else 0) + 1024

    def add(self, item: _Item) -> None:
        key = self._keys.of(item.name)
        parts = [(item.suffix, item.data)]
        if self._labelled:
            parts.append(("cls", str(item.label).encode()))
        for suffix, data in parts:
            self.out.write(header_of(f"{key}.{suffix}", len(data)))
            self._members.append((len(self.items), suffix, self.out.bytes, len(data)))
            self.out.write(data)
            self.out.write(_padding(len(data)))
        self.items.append((key, item.name, item.label, zlib.crc32(item.data)))

    def finish(self) -> bytes:
        """End the tar and return its index."""
        self.out.write(b"\0" * 1024)
        self.out.finish()
        suffixes = sorted({suffix for _, suffix, _, _ in self._members})
        samples = np.asarray([sample for sample, _, _, _ in self._members], dtype=np.int64)
        names = Names.of(name for _, name, _, _ in self.items)
        more: dict[str, Any] = {
            "names": np.frombuffer(names.blob, dtype=np.uint8),
            "name_ends": names.ends,
            "crc32": np.asarray([crc for _, _, _, crc in self.items], dtype=np.uint32),
        }
        if self._labelled:
            labels = [label for _, _, label, _ in self.items]
            if self._label_kind is not None:
                more["label"] = np.asarray(labels, dtype=self._label_kind)
            else:
                more["label_json"] = np.frombuffer(json.dumps(labels).encode(), dtype=np.uint8)
        return TarIndex(
            self.out.bytes,
            0,  # a pack may be copied, which changes the time
            Names.of(key for key, _, _, _ in self.items),
            np.searchsorted(samples, np.arange(len(self.items) + 1)).astype(np.int64),
            np.asarray(
                [suffixes.index(suffix) for _, suffix, _, _ in self._members], dtype=np.int16
            ),
            np.asarray([offset for _, _, offset, _ in self._members], dtype=np.int64),
            np.asarray([size for _, _, _, size in self._members], dtype=np.int64),
            suffixes,
            more,
        ).to_bytes()


@dataclass(frozen=True)
class _Task:
    """Everything a pack's bytes depend on."""

    source: FolderSource
    shard_bytes: int

    def described(self) -> dict[str, Any]:
        return {
            "format": "ronde pack",
            "version": 1,
            "kind": "tar",
            "samples": len(self.source),
            "classes": self.source.classes,
            "labels": self.source.labels is not None,
            "shard_bytes": self.shard_bytes,
            "pixels_changed": None,  # of packs that an earlier version had made smaller
            "fingerprint": self.source.fingerprint,
        }

    def item(self, i: int) -> _Item:
        """Read a sample."""
        sample = self.source.read([i])[0]
        if len(sample.data) != self.source.sizes[i]:
            raise SampleError(
                f"{self.source.file(i)} changed while it was packed: {self.source.sizes[i]:,} "
                f"bytes before, {len(sample.data):,} now."
            )
        return _Item(i, sample.name, sample.label, sample.data, _suffix_of(sample.name))


def _shard_name(number: int) -> str:
    return f"shard-{number:06d}.tar"


def pack(
    source: str | os.PathLike[str] | FolderSource,
    out: str | os.PathLike[str],
    *,
    kind: str = "tar",
    shard_bytes: int = 256 << 20,
    labels: Any = "folder",
    suffixes: Sequence[str] | None = None,
    pattern: str | None = None,
    progress: Progress | None = None,
) -> Packed:
    """Pack a folder: many small files become a few large ones, which load many times faster.

    ``feed.tar(out)`` then returns what ``feed.folder(source)`` returns: the same samples, labels,
    classes, names, order and fingerprint, so a training resumes from either. An interrupted pack
    resumes; a finished one is left as it is.

    Args:
        source: the folder, or what :func:`~ronde.feed.folder` gave of it.
        out: a folder that does not exist, is empty, or holds the same pack.
        kind: ``tar``, the only format; WebDataset reads it too.
        shard_bytes: the most bytes of a shard; one that holds a single larger file is larger.
        labels: as for ``folder``.
        suffixes: as for ``folder``.
        pattern: as for ``folder``.
        progress: called with ``(samples done, samples in all)``.

    Raises:
        ArgumentError: ``out`` holds something else, another command is writing it, or an argument
            cannot be used.
        RondeError: a file cannot be read or written, or the disk is full; what is complete stays,
            and the same call goes on.

    Example:
        >>> import tempfile
        >>> from ronde.feed import tar
        >>> here = Path(tempfile.mkdtemp())
        >>> (here / "files" / "cat").mkdir(parents=True)
        >>> _ = (here / "files" / "cat" / "1.txt").write_text("meow")
        >>> pack(here / "files", here / "packed").samples
        1
        >>> tar(here / "packed")[0]
        Sample(data=b'meow', label=0, name='cat/1.txt')
    """
    if kind == "parquet":
        raise ArgumentError(
            "pack writes tar shards, not Parquet. To make Parquet files, use pyarrow or "
            "datasets and read them with feed.parquet "
            "(docs/pack.md shows how). To pack files as tar, leave out --format (in Python kind=)."
        )
    if kind != "tar":
        raise ArgumentError(
            f"pack writes tar shards, not {kind!r}: leave out --format (in Python kind=)."
        )
    if shard_bytes < 1 << 16:
        raise ArgumentError(f"a shard of {shard_bytes:,} bytes is too small: 64 KiB or more.")
    place = Path(out)
    if not isinstance(source, FolderSource):
        _differing(Path(source), place)
        source = folder(source, labels=labels, suffixes=suffixes, pattern=pattern)
    else:
        _differing(Path(source.path), place)
    task = _Task(source, shard_bytes)
    if isinstance(source.labels, list):
        odd = next(
            (
                label
                for label in source.labels
                if not isinstance(label, int | float | str | bool | type(None))
            ),
            None,
        )
        if odd is not None:
            raise ArgumentError(f"labels of a pack must be classes or numbers; found {odd!r}.")
    done = _done(place, task)
    if done is not None:
        return done
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(
            f"{place} cannot be made: {error.strerror or error}. Choose a writable folder."
        ) from error
    with _lock(place):
        try:
            return _Packing(place, task, progress).run()
        except OSError as error:
            raise _as_message(error, place) from error


def _differing(source: Path, out: Path) -> None:
    if out.resolve().is_relative_to(source.resolve()):
        raise ArgumentError(
            f"{out} is inside {source}, the folder to pack. Choose a folder outside it."
        )
    if out.exists() and not out.is_dir():
        raise ArgumentError(f"{out} is a file. Choose a new or empty folder.")


def _as_message(error: OSError, place: Path) -> RondeError:
    import errno

    where = error.filename or place
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        free = shutil.disk_usage(place).free
        return RondeError(
            f"{where} cannot be written: {error.strerror} ({free:,} bytes are free there). "
            "Finished shards are kept. Free some space and run the same command again."
        )
    return RondeError(
        f"{where}: {error.strerror or error}. Finished shards are kept. Run the same command again "
        "to resume."
    )


def _done(place: Path, task: _Task) -> Packed | None:
    """The pack at ``place``, if it is complete and the same; refuse anything else there."""
    if not place.exists():
        return None
    manifest = read_manifest(str(place), Store())
    wanted = task.described()
    if manifest is not None:
        _is_same(manifest, wanted, place, "a pack")
        # A command that was killed at the very end leaves these.
        (place / PARTIAL).unlink(missing_ok=True)
        (place / _LOCK).unlink(missing_ok=True)
        for shard in manifest["shards"]:
            broken = _find_damage(place, shard)
            if broken is not None:
                raise ArgumentError(
                    f"{place} is a complete pack, but {broken}: remove {place} and pack again."
                )
        return _packed(place, manifest, already=True)
    partial = place / PARTIAL
    if partial.exists():
        try:
            begun = json.loads(partial.read_bytes())
        except ValueError:
            raise ArgumentError(
                f"{partial} cannot be read: remove {place} and pack again."
            ) from None
        _is_same(begun, wanted, place, "an unfinished pack")
    else:
        foreign = sorted(
            p.name for p in place.iterdir() if p.name != _LOCK and p.suffix != _WRITING
        )
        if foreign:
            raise ArgumentError(
                f"{place} is not empty ({foreign[0]}{', …' if len(foreign) > 1 else ''}). Choose a "
                "new or empty folder."
            )
    return None


def _find_damage(place: Path, shard: dict[str, Any]) -> str | None:
    """What is visibly wrong with a finished shard, without reading it; None if nothing."""
    path = place / shard["name"]
    if not path.is_file() or path.stat().st_size != shard["bytes"]:
        return f"{path.name} is missing or has another size"
    if "index_sha256" in shard:
        index = path.with_name(path.name + SUFFIX)
        if (
            not index.is_file()
            or hashlib.sha256(index.read_bytes()).hexdigest() != shard["index_sha256"]
        ):
            return f"{index.name} is missing or damaged"
    return None


def _is_same(found: dict[str, Any], wanted: dict[str, Any], place: Path, what: str) -> None:
    for name, value in wanted.items():
        if found.get(name) != value:
            if name == "fingerprint":
                raise ArgumentError(
                    f"{place} is {what} of other files, or the files have changed. Remove it, or "
                    "choose another folder."
                )
            raise ArgumentError(
                f"{place} is {what} with other settings ({name} {found.get(name)!r}, now "
                f"{value!r}). Remove it, or choose another folder."
            )


def _packed(place: Path, manifest: dict[str, Any], **more: Any) -> Packed:
    size = sum(shard["bytes"] for shard in manifest["shards"])
    return Packed(
        str(place),
        manifest["kind"],
        manifest["samples"],
        size,
        len(manifest["shards"]),
        manifest["classes"],
        **more,
    )


@contextlib.contextmanager
def _lock(place: Path) -> Iterator[None]:
    """Lock the folder against other packs. The system releases a killed process's lock."""
    lock = place / _LOCK
    try:
        descriptor = os.open(lock, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ArgumentError(
            f"{place} cannot be written: {error.strerror or error}. Choose a writable folder."
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ArgumentError(f"another process is packing into {place} now.") from None
        yield
        lock.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


class _Packing:
    """One run of a pack."""

    def __init__(self, place: Path, task: _Task, progress: Progress | None) -> None:
        self.place = place
        self.task = task
        self.progress = progress or (lambda done, total: None)
        self.shards: list[dict[str, Any]] = []
        self.keys = _Keys()

    def run(self) -> Packed:
        """Write what is missing."""
        described = self.task.described()
        partial = self.place / PARTIAL
        if partial.exists():
            # Up to the first that is no longer there; it and those behind it are written again,
            # with the same bytes.
            self.shards = list(
                takewhile(
                    lambda shard: _find_damage(self.place, shard) is None,
                    json.loads(partial.read_bytes())["shards"],
                )
            )
        else:
            write_whole(partial, _json({**described, "shards": []}), durable=True)
        self._clean()
        names = self.task.source.names
        start = sum(shard["samples"] for shard in self.shards)
        for i in range(start):
            self.keys.of(names[i])  # those that are taken
        self._room(start)
        try:
            self._write(start, described)
        except BaseException:
            # By name: Ctrl-C may come between the opening of a file and whatever would have
            # remembered it.
            self._clean()
            raise
        manifest = {**described, "shards": self.shards}
        write_whole(self.place / MANIFEST, _json(manifest), durable=True)
        partial.unlink(missing_ok=True)
        return _packed(self.place, manifest, resumed=start)

    def _clean(self) -> None:
        for leftover in self.place.glob(f"*{_WRITING}"):
            leftover.unlink(missing_ok=True)

    def _room(self, start: int) -> None:
        needed = int(self.task.source.sizes[start:].sum())
        free = shutil.disk_usage(self.place).free
        if needed > free:
            raise RondeError(
                f"{self.place} has {free:,} bytes free, but {needed:,} remain to be packed. Free "
                "some space, or choose another disk."
            )

    def _write(self, start: int, described: dict[str, Any]) -> None:
        total = len(self.task.source)
        shard: _Shard | None = None
        self.progress(start, total)
        items = self._items(start)
        try:
            for item in items:
                if shard is not None and shard.size_with(item) > self.task.shard_bytes:
                    self._finish(shard, described)
                    shard = None
                if shard is None:
                    shard = self._open()
                shard.add(item)
                self.progress(item.i + 1, total)
            if shard is not None:
                self._finish(shard, described)
        except BaseException as error:
            items.close()
            if shard is not None:
                with contextlib.suppress(Exception):
                    shard.out.close()
                if isinstance(error, OSError) and error.filename is None:
                    error.filename = str(shard.path).removesuffix(_WRITING)
            raise

    def _open(self) -> _Shard:
        return _Shard(
            self.place / (_shard_name(len(self.shards)) + _WRITING),
            self.keys,
            self.task.source.labels,
        )

    def _finish(self, shard: _Shard, described: dict[str, Any]) -> None:
        index = shard.finish()
        name = _shard_name(len(self.shards))
        write_whole(self.place / (name + SUFFIX), index, durable=True)
        entry = {
            "name": name,
            "samples": len(shard.items),
            "bytes": shard.out.bytes,
            "sha256": shard.out.sha256.hexdigest(),
            "index_sha256": hashlib.sha256(index).hexdigest(),
        }
        os.replace(shard.path, self.place / name)  # noqa: PTH105
        sync(self.place)
        self.shards.append(entry)
        # Only now does the shard count: whatever happens before, it is written again.
        write_whole(self.place / PARTIAL, _json({**described, "shards": self.shards}), durable=True)

    def _items(self, start: int) -> Any:
        """Samples in order, read ahead by threads."""
        pool = ThreadPoolExecutor(4, thread_name_prefix="ronde-pack")
        waiting: deque[Future[_Item]] = deque()
        try:
            following = start
            total = len(self.task.source)
            while following < total or waiting:
                while following < total and len(waiting) < _AHEAD:
                    waiting.append(pool.submit(self.task.item, following))
                    following += 1
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
            pool.shutdown(wait=True)


def verify_pack(path: str | os.PathLike[str], progress: Progress | None = None) -> Packed:
    """Read a whole pack and compare it with its checksums.

    Args:
        path: what :func:`pack` wrote.
        progress: called with ``(samples done, samples in all)``.

    Returns:
        what was found; ``problems`` names each shard that is damaged and, where it can be told, its
        samples; or says that the manifest's fingerprint is not that of what is packed.

    Raises:
        ArgumentError: there is no complete pack, or its manifest is damaged.
    """
    place = Path(path)
    manifest = read_manifest(str(place), Store()) if place.is_dir() else None
    if manifest is None:
        if (place / PARTIAL).exists():
            raise ArgumentError(
                f"{place} is an unfinished pack. Run the command that began it again to finish it."
            )
        raise ArgumentError(f"{place} is not a pack: it has no {MANIFEST} in it.")
    problems: list[str] = []
    done = 0
    for shard in manifest["shards"]:
        problems += _problems(place, shard)
        done += shard["samples"]
        if progress is not None:
            progress(done, manifest["samples"])
    if done != manifest["samples"]:
        problems.append(f"{MANIFEST} counts {manifest['samples']:,} samples, its shards {done:,}")
    if not problems:
        problems += _other_fingerprint(place, manifest)
    return _packed(place, manifest, problems=tuple(problems))


def _other_fingerprint(place: Path, manifest: dict[str, Any]) -> list[str]:
    """Problems with the fingerprint."""
    given = manifest["fingerprint"]
    if manifest["pixels_changed"] is not None:  # packed by an earlier version, of other files
        return []
    names, sizes, labels = _list_pack(place)
    files = FolderSource(str(place), names, labels, manifest["classes"], Store())
    files._sizes = sizes
    if files.fingerprint == given:
        return []
    return [
        f"{MANIFEST}: its fingerprint is {given}, that of the names, sizes, labels and "
        f"classes in the pack {files.fingerprint}"
    ]


def _list_pack(place: Path) -> tuple[Names, np.ndarray[Any, np.dtype[np.int64]], Any]:
    """Names, sizes and labels of the files in a pack."""
    opened = tar(place)
    # a sample's data come first, its label behind them
    return opened.keys, opened._size[opened._first[:-1]], opened.labels


def _problems(place: Path, shard: dict[str, Any]) -> list[str]:
    path = place / shard["name"]
    found: list[str] = []
    index: TarIndex | None = None
    side = path.with_name(path.name + SUFFIX)
    try:
        raw = side.read_bytes()
        if hashlib.sha256(raw).hexdigest() != shard["index_sha256"]:
            found.append(f"{side.name}: damaged (its SHA-256 differs)")
        else:
            index = TarIndex.from_bytes(raw)
    except OSError as error:
        found.append(f"{side.name}: {error.strerror}")
    except ValueError as error:
        found.append(f"{side.name}: {error}")
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            same = hashlib.file_digest(file, "sha256").hexdigest() == shard["sha256"]
        if same:
            return found
        if size != shard["bytes"]:
            found.append(f"{shard['name']}: {size:,} bytes, {shard['bytes']:,} were written")
        damaged = _damaged_names(path, index) if index is not None else []
        named = f": {', '.join(damaged[:5])}{', …' if len(damaged) > 5 else ''}" if damaged else ""
        what = (
            f"{len(damaged):,} of its {shard['samples']:,} samples"
            if damaged
            else "outside of its samples"
            if index is not None
            else "its SHA-256 is another"
        )
        found.append(f"{shard['name']}: damaged ({what}){named}")
    except OSError as error:
        found.append(f"{shard['name']}: {error.strerror}")
    return found


def _damaged_names(path: Path, index: TarIndex) -> list[str]:
    """Names of the samples whose checksum differs."""
    names = Names(index.more["names"].tobytes(), index.more["name_ends"])
    found: list[str] = []
    with open(path, "rb") as file:
        for i, crc in enumerate(index.more["crc32"].tolist()):
            member = int(index.first[i])  # its data come first, its label behind them
            if (
                zlib.crc32(
                    os.pread(file.fileno(), int(index.size[member]), int(index.offset[member]))
                )
                != crc
            ):
                found.append(names[i])
    return found
