"""Index of a tar: samples and file offsets, read from its headers once, stored, and checked by size
and time or tag.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from ronde.data.build_once import cache_root
from ronde.data.sources.base import Ints, Names
from ronde.data.sources.byte_ranges import Store
from ronde.world import ArgumentError, SampleError
from ronde.world.paths import is_remote
from ronde.world.whole_file import write_whole

_VERSION = 3
SUFFIX = ".ronde-index"
_ARRAYS = ("first", "suffix", "offset", "size")  # fields of an index
_NO_SAMPLE = re.compile(r"__[^/]*__($|/)")  # WebDataset leaves these out too
_COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ\0", b"BZh")  # gzip, zstd, xz, bzip2


@dataclass
class TarIndex:
    """The samples of one tar.

    Attributes:
        state: its bytes, time of change and tag, as :meth:`Store.stat` tells them.
        keys: of the samples, in the tar's order.
        first: sample ``i`` has members ``first[i]`` … ``first[i + 1]`` − 1.
        suffix: of each member, as a place in ``suffixes``.
        offset: of each member's bytes in the tar.
        size: of each member in bytes.
        suffixes: the endings that occur.
    """

    state: tuple[int, int, str]
    keys: Names
    first: Ints
    suffix: np.ndarray[Any, np.dtype[np.int32]]
    offset: Ints
    size: Ints
    suffixes: list[str]

    @classmethod
    def of(cls, members: list[tuple[str, str, int, int]], state: tuple[int, int, str]) -> TarIndex:
        """Of members ``(key, suffix, offset, size)``; those of a sample follow each other."""
        keys: list[str] = []
        first: list[int] = []
        for m, (key, _, _, _) in enumerate(members):
            if not keys or keys[-1] != key:
                keys.append(key)
                first.append(m)
        suffixes = sorted({suffix for _, suffix, _, _ in members})
        number = {suffix: n for n, suffix in enumerate(suffixes)}
        return cls(
            state,
            Names.of(keys),
            np.asarray([*first, len(members)], dtype=np.int64),
            np.asarray([number[suffix] for _, suffix, _, _ in members], dtype=np.int32),
            np.asarray([offset for _, _, offset, _ in members], dtype=np.int64),
            np.asarray([size for _, _, _, size in members], dtype=np.int64),
            suffixes,
        )

    def to_bytes(self) -> bytes:
        """Serialize as an npz, whose parts have checksums; equal indices give equal bytes."""
        meta = {"version": _VERSION, "state": self.state, "suffixes": self.suffixes}
        parts: dict[str, Any] = {
            "meta": np.frombuffer(json.dumps(meta).encode(), dtype=np.uint8),
            "keys": np.frombuffer(self.keys.blob, dtype=np.uint8),
            "key_ends": self.keys.ends,
            **{name: getattr(self, name) for name in _ARRAYS},
        }
        out = io.BytesIO()
        np.savez(out, **parts)
        return out.getvalue()

    @classmethod
    def from_bytes(cls, raw: bytes) -> TarIndex:
        """Parse :meth:`to_bytes`.

        Raises:
            ValueError: it is something else, or damaged.
        """
        try:
            with np.load(io.BytesIO(raw), allow_pickle=False) as held:
                meta = json.loads(held["meta"].tobytes())
                if meta["version"] != _VERSION:
                    raise ValueError(f"version {meta['version']}")
                keys = Names(held["keys"].tobytes(), held["key_ends"])
                arrays: dict[str, Any] = {name: held[name] for name in _ARRAYS}
                return cls(tuple(meta["state"]), keys, suffixes=meta["suffixes"], **arrays)
        except (KeyError, TypeError, EOFError, OSError, zipfile.BadZipFile) as error:
            raise ValueError(str(error)) from error


def key_and_suffix(name: str) -> tuple[str, str]:
    """A member's sample key and suffix, as in WebDataset: split at the first dot of the file name.

    Example:
        >>> key_and_suffix("train/0001.seg.png")
        ('train/0001', 'seg.png')
    """
    folder, slash, base = name.rpartition("/")
    stem, _, suffix = base.partition(".")
    return folder + slash + stem, suffix.lower()


def _no_sample(name: str) -> bool:
    """Whether a file is debris of a file system or tool, or has no ending, such as README."""
    base = name.rpartition("/")[2]
    return base.startswith(".") or "." not in base or _NO_SAMPLE.match(name) is not None


def members_of(file: IO[bytes], size: int, path: str) -> Iterator[tuple[str, int, int]]:
    """The files of a tar: ``(name, offset, bytes)``.

    Raises:
        ArgumentError: compressed, truncated, damaged, or no tar at all; or it holds a link, or a
            sparse file, whose bytes are elsewhere.
    """
    begin = file.read(tarfile.BLOCKSIZE)
    if begin.startswith(_COMPRESSED):
        raise ArgumentError(
            f"{path} is compressed, so it has no random access. Unpack it to a plain .tar."
        )
    file.seek(0)
    end = 0
    try:
        with tarfile.open(fileobj=file, mode="r:") as held:
            while (member := held.next()) is not None:
                end = member.offset_data + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
                if member.issparse() or member.issym() or member.islnk():
                    kind = "a sparse file" if member.issparse() else "a link"
                    raise ArgumentError(
                        f"{path}: {member.name!r} is {kind}, which has no bytes of its own there. "
                        "Write the tar again with --dereference --hard-dereference."
                    )
                if member.isfile():
                    yield member.name, member.offset_data, member.size
                held.members = []  # type: ignore[attr-defined]  # it would grow to gigabytes
    except tarfile.TarError as error:
        what = "is truncated or damaged" if end else "is not a tar"
        raise ArgumentError(f"{path} {what}: {error}.") from None
    # tarfile takes a damaged header for the end.
    file.seek(end)
    if len(mark := file.read(tarfile.BLOCKSIZE)) < tarfile.BLOCKSIZE:
        raise ArgumentError(
            f"{path} is truncated: it ends at byte {size:,} without an end-of-archive mark."
        )
    if any(mark):
        raise ArgumentError(f"{path} is damaged at byte {end:,}: invalid header.")
    if any(file.read(1 << 20)):
        raise ArgumentError(
            f"{path} has data after its end, at byte {end:,}: tars that were put one after the "
            "other. Give them one by one."
        )


def build_index(store: Store, path: str) -> TarIndex:
    """Read a tar's headers; refuse a file that is not a tar."""
    state = store.stat(path)
    members: list[tuple[str, str, int, int]] = []
    here: set[str] = set()
    try:
        with store.stream(path, state[0]) as file:
            for name, offset, length in members_of(file, state[0], path):
                if _no_sample(name):
                    continue
                key, suffix = key_and_suffix(name.removeprefix("./"))
                if not members or members[-1][0] != key:
                    here = set()
                if suffix in here:
                    raise ArgumentError(
                        f"{path}: the sample {key!r} has two files .{suffix}; a sample may have "
                        "each suffix once."
                    )
                here.add(suffix)
                members.append((key, suffix, offset, length))
    except OSError as error:
        raise ArgumentError(f"{path} cannot be read: {error}.") from error
    return TarIndex.of(members, state)


def index_of(store: Store, path: str) -> TarIndex:
    """The stored index of a tar if it matches, else a new one, which is then stored."""
    absolute = path if is_remote(path) else os.path.abspath(path)  # noqa: PTH100
    name = f"{hashlib.sha256(absolute.encode()).hexdigest()[:32]}{SUFFIX}"
    state = store.stat(path)
    places = [path + SUFFIX, str(cache_root() / "tar-index" / name)]
    for place in places:
        raw = None
        with contextlib.suppress(OSError, SampleError):
            raw = store.whole(place) if is_remote(place) else Store().whole(place)
        # of another version, or damaged: made anew
        with contextlib.suppress(ValueError):
            if raw is not None and (index := TarIndex.from_bytes(raw)).state == state:
                return index
    index = build_index(store, path)
    if not any(index.state[1:]):
        return index  # nothing would tell whether the tar is still the same
    for place in places:
        if is_remote(place):
            continue
        with contextlib.suppress(OSError):
            Path(place).parent.mkdir(parents=True, exist_ok=True)
            write_whole(Path(place), index.to_bytes())
            break
    return index
