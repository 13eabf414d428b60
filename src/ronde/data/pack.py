"""Pack a folder into tar shards with an index, so that readers can seek to a sample.

The same folder always gives the same bytes. A pack is written under a temporary name, and gets its
own when it is whole on disk.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import os
import shutil
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ronde.data.sources.base import Sample
from ronde.data.sources.byte_ranges import Store
from ronde.data.sources.folder import FolderSource, folder
from ronde.data.sources.packed import INDEX, MANIFEST, VERSION, PackSource, read_manifest
from ronde.world import ArgumentError, RondeError, SampleError
from ronde.world.paths import file_digest
from ronde.world.whole_file import sync

_READ_FILES = 16  # at a time
_DAMAGED = "damaged (its SHA-256 differs)"

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
    ending = suffix.lower() if dot and stem else ""
    # "cls" is the label's own; without an ending, WebDataset would find no name for the bytes.
    return {"": "bin", "cls": "cls.bin"}.get(ending, ending)


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
        unique = key
        number = 1
        while unique in self._used:
            number += 1
            unique = f"{key}~{number}"
        self._used.add(unique)
        return unique


class _Shards:
    """Tars that are written one after the other into a folder."""

    def __init__(self, into: Path, most_bytes: int, labelled: bool) -> None:
        self._into, self._most_bytes, self._labelled = into, most_bytes, labelled
        self._keys = _Keys()
        self._tar: tarfile.TarFile | None = None
        self._path, self._samples = into, 0  # of the tar that is being written
        self.entries: list[dict[str, Any]] = []  # of the manifest
        self.offsets: list[int] = []
        self.sums: list[int] = []

    def add(self, sample: Sample) -> None:
        if self._tar is not None:
            end = (
                self._tar.offset + len(sample.data) + 8 * tarfile.BLOCKSIZE
            )  # at most, with its label
            if -(-end // tarfile.RECORDSIZE) * tarfile.RECORDSIZE > self._most_bytes:
                self.finish()
        if self._tar is None:
            self._path = self._into / f"shard-{len(self.entries):06d}.tar"
            self._tar = tarfile.open(  # noqa: SIM115
                self._path, "w", format=tarfile.GNU_FORMAT, encoding="utf-8"
            )
        key = self._keys.of(sample.name)
        self._add_member(f"{key}.{_suffix_of(sample.name)}", sample.data)
        self.offsets.append(
            self._tar.offset - -(-len(sample.data) // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
        )
        self.sums.append(zlib.crc32(sample.data))
        if self._labelled:
            self._add_member(f"{key}.cls", str(sample.label).encode())
        self._samples += 1

    def _add_member(self, name: str, data: bytes) -> None:
        assert self._tar is not None
        member = tarfile.TarInfo(name)
        member.size = len(data)
        self._tar.addfile(member, io.BytesIO(data))

    def finish(self) -> None:
        """End the tar, and make its entry in the manifest."""
        if self._tar is None:
            return
        self.close()
        sync(self._path)
        self.entries.append(
            {
                "name": self._path.name,
                "samples": self._samples,
                "bytes": self._path.stat().st_size,
                "sha256": file_digest(self._path),
            }
        )
        self._samples = 0

    def close(self) -> None:
        if self._tar is not None:
            self._tar.close()
        self._tar = None


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
        "version": VERSION,
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
            manifest |= _write(source, into, shard_bytes, progress)
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
) -> dict[str, Any]:
    """Write the shards and the index; what the manifest says of them."""
    shards = _Shards(into, shard_bytes, source.labels is not None)
    with contextlib.closing(shards):
        for done, sample in enumerate(_samples(source), 1):
            shards.add(sample)
            if progress is not None:
                progress(done, len(source))
        shards.finish()
    index: dict[str, Any] = {
        "names": np.frombuffer(source.names.blob, dtype=np.uint8),
        "name_ends": source.names.ends,
        "offset": np.asarray(shards.offsets, dtype=np.int64),
        "size": source.sizes,
        "crc32": np.asarray(shards.sums, dtype=np.uint32),
    }
    if isinstance(source.labels, np.ndarray):
        index["labels"] = source.labels
    elif source.labels is not None:
        index["labels_json"] = np.frombuffer(json.dumps(source.labels).encode(), dtype=np.uint8)
    np.savez(into / INDEX, **index)
    return {
        "shards": shards.entries,
        "index_sha256": file_digest(into / INDEX),
    }


def _samples(source: FolderSource) -> Iterator[Sample]:
    """Samples in order."""
    for start in range(0, len(source), _READ_FILES):
        ids = range(start, min(start + _READ_FILES, len(source)))
        for i, sample in zip(ids, source.read(ids), strict=True):
            if len(sample.data) != source.sizes[i]:
                raise SampleError(
                    f"{source.file(i)} changed while it was packed: {source.sizes[i]:,} bytes "
                    f"before, {len(sample.data):,} now."
                )
            yield sample


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
    try:
        if file_digest(place / INDEX) != manifest["index_sha256"]:
            problems.append(f"{INDEX}: {_DAMAGED}")
    except OSError as error:
        problems.append(f"{INDEX}: {error.strerror}")
    done = 0
    for shard in manifest["shards"]:
        if problem := _problem(place / shard["name"], shard):
            problems.append(problem)
        done += shard["samples"]
        if progress is not None:
            progress(done, manifest["samples"])
    if problems and all(_DAMAGED in problem and INDEX not in problem for problem in problems):
        problems += _damaged(place, manifest)
    return Packed.of(place, manifest, problems=tuple(problems))


def _problem(path: Path, shard: dict[str, Any]) -> str:
    try:
        same = file_digest(path) == shard["sha256"]
    except OSError as error:
        return f"{path.name}: {error.strerror}"
    if (size := path.stat().st_size) != shard["bytes"]:
        return f"{path.name}: {size:,} bytes, {shard['bytes']:,} were written"
    return "" if same else f"{path.name}: {_DAMAGED}"


def _damaged(place: Path, manifest: dict[str, Any]) -> list[str]:
    """What reading says of the samples that are damaged."""
    damage = []
    source = PackSource(str(place), manifest, Store())
    for i in range(len(source)):
        try:
            source.read([i])
        except SampleError as error:
            damage.append(str(error))
    return damage
