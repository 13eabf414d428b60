"""Pack a folder into tar shards with an index, so that readers can seek to a sample.

The same folder always gives the same bytes. A pack is written under a temporary name, and gets its
own when it is whole on disk.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import tarfile
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ronde.data.sources.base import Names, Sample
from ronde.data.sources.byte_ranges import Store
from ronde.data.sources.folder import FolderSource, folder
from ronde.data.sources.tar import MANIFEST, read_manifest
from ronde.data.sources.tar_index import SUFFIX, TarIndex
from ronde.world import ArgumentError, RondeError, SampleError

_AHEAD_FILES = 16  # read ahead of the one being written
_BLOCK_BYTES = 512  # of a tar

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Packed:
    """The result of :func:`pack` or :func:`verify_pack`.

    Attributes:
        path: the pack.
        samples: in it.
        bytes: of its shards.
        shards: how many.
        classes: names of the classes, or None.
        already: nothing was to be done: the pack was there, complete.
        problems: what :func:`verify_pack` found wrong, one line each.
    """

    path: str
    samples: int
    bytes: int
    shards: int
    classes: list[str] | None
    already: bool = False
    problems: tuple[str, ...] = ()

    @classmethod
    def of(cls, path: Path, manifest: dict[str, Any], **more: Any) -> Packed:
        """What a manifest says."""
        shards = manifest["shards"]
        size = sum(shard["bytes"] for shard in shards)
        return cls(str(path), manifest["samples"], size, len(shards), manifest["classes"], **more)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**self.__dict__, "problems": list(self.problems), "ok": not self.problems}


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


class _Shard:
    """A tar that is being written."""

    def __init__(self, path: Path, keys: _Keys, labels: Any) -> None:
        self.path = path
        self.bytes = 0
        self._file = open(path, "wb", buffering=1 << 20)  # noqa: SIM115
        self._sha256 = hashlib.sha256()
        self._keys = keys
        # Of all labels, not of this shard's own: every shard holds them in the same way.
        self._labels = labels
        self._samples: list[Sample] = []
        self._members: list[tuple[str, str, int, int]] = []  # key, suffix, offset, size

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._sha256.update(data)
        self.bytes += len(data)

    def size_with(self, sample: Sample) -> int:
        """The most bytes it would have if it also held this sample."""
        return self.bytes + len(sample.data) + 8 * _BLOCK_BYTES

    def add(self, sample: Sample) -> None:
        key = self._keys.of(sample.name)
        parts = [(_suffix_of(sample.name), sample.data)]
        if self._labels is not None:
            parts.append(("cls", str(sample.label).encode()))
        for suffix, data in parts:
            member = tarfile.TarInfo(f"{key}.{suffix}")
            member.size, member.mode = len(data), 0o644
            self._write(member.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape"))
            self._members.append((key, suffix, self.bytes, len(data)))
            self._write(data)
            self._write(bytes(-len(data) % _BLOCK_BYTES))
        self._samples.append(sample._replace(data=zlib.crc32(sample.data)))  # type: ignore[arg-type]

    def finish(self) -> dict[str, Any]:
        """End the tar, write its index, and return its entry in the manifest."""
        self._write(bytes(2 * _BLOCK_BYTES))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        names = Names.of(sample.name for sample in self._samples)
        more: dict[str, Any] = {
            "names": np.frombuffer(names.blob, dtype=np.uint8),
            "name_ends": names.ends,
            "crc32": np.asarray([sample.data for sample in self._samples], dtype=np.uint32),
        }
        labels = [sample.label for sample in self._samples]
        if isinstance(self._labels, np.ndarray):
            more["label"] = np.asarray(labels, dtype=self._labels.dtype)
        elif self._labels is not None:
            more["label_json"] = np.frombuffer(json.dumps(labels).encode(), dtype=np.uint8)
        # No time: a pack may be copied, which changes it.
        index = TarIndex.of(self._members, self.bytes, more=more).to_bytes()
        self.path.with_name(self.path.name + SUFFIX).write_bytes(index)
        return {
            "name": self.path.name,
            "samples": len(self._samples),
            "bytes": self.bytes,
            "sha256": self._sha256.hexdigest(),
            "index_sha256": hashlib.sha256(index).hexdigest(),
        }

    def close(self) -> None:
        self._file.close()


def pack(
    source: str | os.PathLike[str] | FolderSource,
    out: str | os.PathLike[str],
    *,
    shard_bytes: int = 256 << 20,
    labels: Any = "folder",
    suffixes: Sequence[str] | None = None,
    pattern: str | None = None,
    progress: Progress | None = None,
) -> Packed:
    """Pack a folder: many small files become a few large ones, which load many times faster.

    ``feed.tar(out)`` then returns what ``feed.folder(source)`` returns: the same samples, labels,
    classes, names, order and fingerprint, so a training resumes from either. WebDataset reads the
    shards too. A finished pack is left as it is.

    Args:
        source: the folder, or what :func:`~ronde.feed.folder` gave of it.
        out: a folder that does not exist, is empty, or holds the same pack.
        shard_bytes: the most bytes of a shard; one that holds a single larger file is larger.
        labels: as for ``folder``.
        suffixes: as for ``folder``.
        pattern: as for ``folder``.
        progress: called with ``(samples done, samples in all)``.

    Raises:
        ArgumentError: ``out`` holds something else, another command is writing it, or an argument
            cannot be used.
        RondeError: a file cannot be read or written, or the disk is full; nothing is left.

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
    if shard_bytes < 1 << 16:
        raise ArgumentError(f"a shard of {shard_bytes:,} bytes is too small: 64 KiB or more.")
    place = Path(out)
    root = Path(source.path if isinstance(source, FolderSource) else source)
    if place.resolve().is_relative_to(root.resolve()):
        raise ArgumentError(
            f"{place} is inside {root}, the folder to pack. Choose a folder outside it."
        )
    if place.exists() and not place.is_dir():
        raise ArgumentError(f"{place} is a file. Choose a new or empty folder.")
    if not isinstance(source, FolderSource):
        source = folder(source, labels=labels, suffixes=suffixes, pattern=pattern)
    for label in source.labels if isinstance(source.labels, list) else ():
        if not isinstance(label, int | float | str | bool | type(None)):
            raise ArgumentError(f"labels of a pack must be classes or numbers; found {label!r}.")
    manifest = {
        "format": "ronde pack",
        "version": 1,
        "kind": "tar",
        "samples": len(source),
        "classes": source.classes,
        "labels": source.labels is not None,
        "shard_bytes": shard_bytes,
        "fingerprint": source.fingerprint,
    }
    if (done := _finished(place, manifest)) is not None:
        return done
    try:
        with _written(place) as into:
            manifest["shards"] = _write(source, into, shard_bytes, progress)
            (into / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    except OSError as error:
        raise _explained(error, place) from error
    return Packed.of(place, manifest)


def _finished(place: Path, wanted: dict[str, Any]) -> Packed | None:
    """The pack at ``place``, if it is complete and the same; refuse anything else there."""
    manifest = read_manifest(str(place), Store())
    if manifest is None:
        if place.exists() and (held := sorted(p.name for p in place.iterdir())):
            raise ArgumentError(f"{place} is not empty ({held[0]}). Choose a new or empty folder.")
        return None
    for name, value in wanted.items():
        if manifest.get(name) != value:
            what = "files" if name == "fingerprint" else f"settings ({name} {manifest.get(name)!r})"
            raise ArgumentError(
                f"{place} is a pack of other {what}. Remove it, or choose another folder."
            )
    for shard in manifest["shards"]:
        path = place / shard["name"]
        if not path.is_file() or path.stat().st_size != shard["bytes"]:
            raise ArgumentError(
                f"{place} is a complete pack, but {path.name} is missing or has another size: "
                f"remove {place} and pack again."
            )
    return Packed.of(place, manifest, already=True)


@contextlib.contextmanager
def _written(place: Path) -> Iterator[Path]:
    """A temporary folder that becomes ``place``; it is removed after an error."""
    place = place.resolve()
    temporary = place.with_name(f".{place.name}.writing")
    temporary.mkdir(parents=True, exist_ok=True)
    # The system releases a killed process's lock; what it has left is written over.
    lock = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ArgumentError(f"another process is packing into {place} now.") from None
        try:
            for leftover in temporary.iterdir():
                leftover.unlink()
            yield temporary
            temporary.rename(place)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    finally:
        os.close(lock)


def _explained(error: OSError, place: Path) -> RondeError:
    where = error.filename or place
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return RondeError(
            f"{where} cannot be written: {error.strerror}. Free some space, or choose another disk."
        )
    return RondeError(f"{where}: {error.strerror or error}. Nothing was packed.")


def _write(
    source: FolderSource, into: Path, shard_bytes: int, progress: Progress | None
) -> list[dict[str, Any]]:
    """Write all shards; their entries in the manifest."""
    needed, free = int(source.sizes.sum()), shutil.disk_usage(into).free
    if needed > free:
        raise RondeError(
            f"{into.parent} has {free:,} bytes free, but {needed:,} are to be packed. Free some "
            "space, or choose another disk."
        )
    keys, entries = _Keys(), list[dict[str, Any]]()
    shard: _Shard | None = None
    try:
        for done, sample in enumerate(_samples(source), 1):
            if shard is not None and shard.size_with(sample) > shard_bytes:
                entries.append(shard.finish())
                shard = None
            if shard is None:
                shard = _Shard(into / f"shard-{len(entries):06d}.tar", keys, source.labels)
            shard.add(sample)
            if progress is not None:
                progress(done, len(source))
        if shard is not None:
            entries.append(shard.finish())
    finally:
        if shard is not None:
            shard.close()
    return entries


def _samples(source: FolderSource) -> Iterator[Sample]:
    """Samples in order, read ahead by threads."""

    def read(i: int) -> Sample:
        sample: Sample = source.read([i])[0]
        if len(sample.data) != source.sizes[i]:
            raise SampleError(
                f"{source.file(i)} changed while it was packed: {source.sizes[i]:,} bytes before, "
                f"{len(sample.data):,} now."
            )
        return sample

    waiting: deque[Future[Sample]] = deque()
    with ThreadPoolExecutor(4, thread_name_prefix="ronde-pack") as pool:
        for i in range(len(source)):
            waiting.append(pool.submit(read, i))
            if len(waiting) == _AHEAD_FILES:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def verify_pack(path: str | os.PathLike[str], progress: Progress | None = None) -> Packed:
    """Read a whole pack and compare it with its checksums.

    Args:
        path: what :func:`pack` wrote.
        progress: called with ``(samples done, samples in all)``.

    Returns:
        what was found; ``problems`` names each shard that is damaged and, where it can be told, its
        samples.

    Raises:
        ArgumentError: there is no complete pack, or its manifest is damaged.
    """
    place = Path(path)
    manifest = read_manifest(str(place), Store())
    if manifest is None:
        raise ArgumentError(f"{place} is not a pack: it has no {MANIFEST} in it.")
    problems: list[str] = []
    done = 0
    for shard in manifest["shards"]:
        problems += _problems(place / shard["name"], shard)
        done += shard["samples"]
        if progress is not None:
            progress(done, manifest["samples"])
    if done != manifest["samples"]:
        problems.append(f"{MANIFEST} counts {manifest['samples']:,} samples, its shards {done:,}")
    return Packed.of(place, manifest, problems=tuple(problems))


def _problems(path: Path, shard: dict[str, Any]) -> list[str]:
    side = path.with_name(path.name + SUFFIX)
    try:
        with open(path, "rb") as file:
            same = hashlib.file_digest(file, "sha256").hexdigest() == shard["sha256"]
        raw = side.read_bytes()
        if hashlib.sha256(raw).hexdigest() != shard["index_sha256"]:
            return [f"{side.name}: damaged (its SHA-256 differs)"]
    except OSError as error:
        return [f"{Path(error.filename).name}: {error.strerror}"]
    if same:
        return []
    if (size := path.stat().st_size) != shard["bytes"]:
        return [f"{path.name}: {size:,} bytes, {shard['bytes']:,} were written"]
    damaged = _damaged_names(path, TarIndex.from_bytes(raw))
    named = ", ".join(damaged[:5]) + (", …" if len(damaged) > 5 else "")
    return [
        f"{path.name}: damaged ({len(damaged):,} of its {shard['samples']:,} samples): {named}"
        if damaged
        else f"{path.name}: damaged (outside of its samples)"
    ]


def _damaged_names(path: Path, index: TarIndex) -> list[str]:
    """Names of the samples whose checksum differs."""
    names = Names(index.more["names"].tobytes(), index.more["name_ends"])
    found: list[str] = []
    with open(path, "rb") as file:
        for i, crc in enumerate(index.more["crc32"].tolist()):
            member = int(index.first[i])  # its data come first, its label behind them
            data = os.pread(file.fileno(), int(index.size[member]), int(index.offset[member]))
            if zlib.crc32(data) != crc:
                found.append(names[i])
    return found
