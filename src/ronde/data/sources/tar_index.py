"""Index of a tar: file offsets, read from its headers once, stored, and checked by size and time or
tag.

The headers are parsed here, because ``tarfile`` silently treats a damaged header as the end.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import posixpath
import re
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ronde.data.sources.base import Ints, Names, digest_values
from ronde.data.sources.byte_ranges import ByteRange, Store
from ronde.world import ArgumentError, SampleError
from ronde.world.paths import is_remote
from ronde.world.whole_file import write_whole

_BLOCK = 512
_WINDOW = 64 << 10
_REMOTE_WINDOW = 8 << 20
_VERSION = 2
_WITHOUT_LINKS = 1  # the version before: its packs are the same, its other indices lack links
SUFFIX = ".ronde-index"
_NO_SAMPLE = re.compile(r"__[^/]*__($|/)")  # WebDataset leaves these out too
_PAX_RECORD = re.compile(rb"(\d+) ([^=]+)=")
_Member = tuple[str, int, int]


@dataclass
class TarIndex:
    """The samples of one tar.

    Attributes:
        tar_size: its bytes.
        tar_mtime_ns: its time of change; 0 where that does not count.
        tar_tag: of a remote tar, what :meth:`Store.stat` says, or a digest of its first and last
            header where that is nothing.
        keys: of the samples, in the tar's order.
        first: sample ``i`` has members ``first[i]`` … ``first[i + 1]`` − 1.
        suffix: of each member, as a place in ``suffixes``.
        offset: of each member's bytes in the tar.
        size: of each member in bytes.
        suffixes: the endings that occur.
        more: further arrays, by name, as a pack has them.
    """

    tar_size: int
    tar_mtime_ns: int
    keys: Names
    first: Ints
    suffix: np.ndarray[Any, np.dtype[np.int16]]
    offset: Ints
    size: Ints
    suffixes: list[str]
    more: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    tar_tag: str = ""

    def to_bytes(self) -> bytes:
        """Serialize as an npz, whose parts have checksums; equal indices give equal bytes."""
        meta = {
            "version": _VERSION,
            "tar_size": self.tar_size,
            "tar_mtime_ns": self.tar_mtime_ns,
            "tar_tag": self.tar_tag,
            "suffixes": self.suffixes,
        }
        out = io.BytesIO()
        arrays: dict[str, Any] = {
            "meta": np.frombuffer(json.dumps(meta).encode(), dtype=np.uint8),
            "keys": np.frombuffer(self.keys.blob, dtype=np.uint8),
            "key_ends": self.keys.ends,
            "first": self.first,
            "suffix": self.suffix,
            "offset": self.offset,
            "size": self.size,
            **{f"more_{name}": values for name, values in self.more.items()},
        }
        np.savez(out, **arrays)
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
                if meta["version"] != _VERSION and not (
                    meta["version"] == _WITHOUT_LINKS and "more_names" in held.files
                ):
                    raise ValueError(f"version {meta['version']}")
                return cls(
                    meta["tar_size"],
                    meta["tar_mtime_ns"],
                    Names(held["keys"].tobytes(), held["key_ends"]),
                    held["first"],
                    held["suffix"],
                    held["offset"],
                    held["size"],
                    meta["suffixes"],
                    {
                        name.removeprefix("more_"): held[name]
                        for name in held.files
                        if name.startswith("more_")
                    },
                    meta.get("tar_tag", ""),
                )
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


def header_of(name: str, size: int) -> bytes:
    """A tar header as ``ronde pack`` writes it."""
    member = tarfile.TarInfo(name)
    member.size = size
    member.mode = 0o644
    return member.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


def _no_sample(name: str) -> bool:
    """Whether a file is debris of a file system or tool."""
    return name.rpartition("/")[2].startswith(".") or _NO_SAMPLE.match(name) is not None


def _text(raw: bytes) -> str:
    return raw.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")


def _number(field: bytes, path: str, at: int) -> int:
    """An octal header number, or base 256 for large ones."""
    if field[0] in (0x80, 0xFF):
        return int.from_bytes(field[1:], "big") if field[0] == 0x80 else -1
    text = field.split(b"\0", 1)[0].strip()
    try:
        return int(text or b"0", 8)
    except ValueError:
        raise ArgumentError(
            f"{path} is damaged at byte {at:,}: {text!r} is not a number in a tar header."
        ) from None


def _checked(header: bytes) -> bool:
    stored = header[148:156].split(b"\0", 1)[0].strip()
    try:
        wanted = int(stored, 8)
    except ValueError:
        return False
    plain = header[:148] + b" " * 8 + header[156:]
    if sum(plain) == wanted:
        return True
    return sum(b - 256 if b > 127 else b for b in plain) == wanted  # as some old tars added them up


def _pax(raw: bytes, path: str, at: int) -> dict[str, str]:
    """The records of an extended header: ``"21 path=a/long/name\\n"``."""
    found: dict[str, str] = {}
    place = 0
    while place < len(raw) and raw[place] != 0:
        match = _PAX_RECORD.match(raw, place)
        if match is None or int(match[1]) < 5:
            raise ArgumentError(
                f"{path} is damaged at byte {at:,}: its extended header cannot be read."
            )
        end = place + int(match[1])
        found[match[2].decode("utf-8", "surrogateescape")] = raw[match.end() : end - 1].decode(
            "utf-8", "surrogateescape"
        )
        place = end
    return found


def _resolved(found: list[_Member], links: dict[int, tuple[bool, str]], path: str) -> list[_Member]:
    """A tar's files and links, each link with its target's offset.

    Args:
        found: members in the tar's order.
        links: of some of them, whether it is a hard link, and its target.
        path: for errors.
    """
    places: dict[str, int] = {}
    leads: dict[int, int | None] = {}
    for i, (name, _, _) in enumerate(found):
        if i in links and links[i][0]:
            # a hard link is to what came before it
            leads[i] = places.get(posixpath.normpath(links[i][1]))
        places[posixpath.normpath(name)] = i
    for i, (hard, target) in links.items():
        if not hard:  # its target is as seen from its own folder, and may come later
            leads[i] = places.get(
                posixpath.normpath(posixpath.join(posixpath.dirname(found[i][0]), target))
            )
    lost: list[int] = []
    whole: list[_Member] = []
    for i, (name, offset, length) in enumerate(found):
        at: int | None = i
        passed: set[int] = set()
        while at in leads and at not in passed:
            passed.add(at)
            at = leads[at]
        if at is not None and at not in leads:
            _, offset, length = found[at]
            whole.append((name, offset, length))
        elif not _no_sample(name):
            lost.append(i)
    for i in lost:
        if links[i][0]:
            raise ArgumentError(
                f"{path} is damaged: {found[i][0]!r} is a hard link to {links[i][1]!r}, which does "
                "not come before it."
            )
    if lost:
        name, target = found[lost[0]][0], links[lost[0]][1]
        warnings.warn(
            f"ronde: {path}: links without a target in the tar are skipped ({len(lost):,}), such "
            f"as {name!r} to {target!r}. tar --dereference packs files instead of links.",
            RuntimeWarning,
            stacklevel=2,
        )
    return whole


_COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ\0", b"BZh")  # gzip, zstd, xz, bzip2


def _not_compressed(begin: bytes, path: str) -> None:
    """Refuse compressed files, by their first bytes."""
    if begin.startswith(_COMPRESSED):
        raise ArgumentError(
            f"{path} is compressed, so it has no random access. Unpack it to a plain .tar."
        )


def members_of(read: Callable[[int, int], bytes], size: int, path: str) -> list[_Member]:
    """The files and links of a tar: ``(name, offset, bytes)``. Warns about links out of the tar.

    Args:
        read: gives ``length`` bytes from ``offset``.
        size: of the tar.
        path: for errors.

    Raises:
        ArgumentError: compressed, truncated, damaged, or no tar at all.
    """
    found: list[_Member] = []
    links: dict[int, tuple[bool, str]] = {}
    place = 0
    long_name: str | None = None
    long_link: str | None = None
    pax: dict[str, str] = {}
    ended = False
    while place < size:
        if size - place < _BLOCK:
            if ended:
                break
            # a small one may be shorter than a header
            _not_compressed(read(place, size - place) if place == 0 else b"", path)
            raise ArgumentError(f"{path} is truncated: it ends at byte {size:,}, inside a header.")
        header = read(place, _BLOCK)
        if not any(header):
            # The end; but tars that were put one after the other go on behind it.
            ended = True
            place += _BLOCK
            continue
        if not _checked(header):
            if place == 0:
                _not_compressed(header, path)
                raise ArgumentError(f"{path} is not a tar: its first header is invalid.")
            if ended:
                raise ArgumentError(
                    f"{path} has data after its end, at byte {place:,}, that is not a tar."
                )
            raise ArgumentError(f"{path} is damaged at byte {place:,}: invalid header.")
        ended = False
        kind = header[156:157]
        length = _number(header[124:136], path, place)
        data = place + _BLOCK
        if kind == b"S" or "GNU.sparse.map" in pax or "GNU.sparse.major" in pax:
            raise ArgumentError(
                f"{path} holds a sparse file at byte {place:,}, which has no random access. Pack "
                "it again without --sparse."
            )
        if kind in (b"0", b"\0", b"7") and "size" in pax:
            length = int(pax["size"])
        if kind in (b"1", b"2", b"3", b"4", b"5", b"6"):
            length = 0 if kind != b"1" else length  # links, devices and folders hold no bytes
        if length < 0:
            raise ArgumentError(f"{path} is damaged at byte {place:,}: a file of {length} bytes.")
        following = data + -(-length // _BLOCK) * _BLOCK
        if data + length > size:
            raise ArgumentError(
                f"{path} is truncated: it has {size:,} bytes, and a file in it goes to "
                f"byte {data + length:,}."
            )
        if kind == b"L":
            long_name = _text(read(data, length))
        elif kind == b"K":
            long_link = _text(read(data, length))
        elif kind == b"x":
            pax = _pax(read(data, length), path, place)
        elif kind == b"g":
            pass
        else:
            if kind in (b"0", b"\0", b"7", b"1", b"2"):
                if "path" in pax:
                    name = pax["path"]
                elif long_name is not None:
                    name = long_name
                else:
                    name = _text(header[:100])
                    prefix = _text(header[345:500])
                    if prefix and header[257:263] == b"ustar\0":
                        name = f"{prefix}/{name}"
                if not name.endswith("/"):  # a folder, as very old tars had them
                    # some tars hold the bytes of a hard link once more
                    if kind in (b"1", b"2") and not length:
                        target = (
                            pax["linkpath"]
                            if "linkpath" in pax
                            else long_link
                            if long_link is not None
                            else _text(header[157:257])
                        )
                        links[len(found)] = (kind == b"1", target)
                    found.append((name, data, length))
            long_name, long_link, pax = None, None, {}
        place = following
    if not ended:
        raise ArgumentError(
            f"{path} is truncated: it ends at byte {size:,} without an end-of-archive mark."
        )
    return _resolved(found, links, path) if links else found


def _windowed(store: Store, path: str, size: int) -> Callable[[int, int], bytes]:
    """Buffer small reads; a remote file is streamed: a request costs as much as megabytes."""
    window = _REMOTE_WINDOW if is_remote(path) else _WINDOW
    held = b""
    start = 0

    def read(offset: int, length: int) -> bytes:
        nonlocal held, start
        if not (start <= offset and offset + length <= start + len(held)):
            start = offset
            held = store.read(
                [ByteRange(path, offset, min(max(window, length), size - offset), size)]
            )[0]
        return held[offset - start : offset - start + length]

    return read


def build_index(store: Store, path: str) -> TarIndex:
    """Walk a tar's headers; refuse a file that is not a tar."""
    size, mtime, tag = store.stat(path)
    keys: list[str] = []
    first: list[int] = []
    suffix: list[int] = []
    offsets: list[int] = []
    sizes: list[int] = []
    known: dict[str, int] = {}
    here: set[str] = set()
    try:
        for name, offset, length in members_of(_windowed(store, path, size), size, path):
            # without an ending (README): as in WebDataset
            if _no_sample(name) or "." not in name.rpartition("/")[2]:
                continue
            key, ending = key_and_suffix(name.removeprefix("./"))
            if not keys or keys[-1] != key:
                keys.append(key)
                first.append(len(offsets))
                here = set()
            if ending in here:
                raise ArgumentError(
                    f"{path}: the sample {key!r} has two files .{ending}; a sample may have each "
                    "suffix once."
                )
            here.add(ending)
            suffix.append(known.setdefault(ending, len(known)))
            offsets.append(offset)
            sizes.append(length)
    except SampleError as error:
        raise ArgumentError(str(error)) from error
    if len(known) > 1024:
        raise ArgumentError(
            f"{path} has {len(known):,} different suffixes, such as .{list(known)[-1]}. A sample's "
            "name ends at the first dot of the file name."
        )
    found = TarIndex(
        size,
        mtime,
        Names.of(keys),
        np.asarray([*first, len(offsets)], dtype=np.int64),
        np.asarray(suffix, dtype=np.int16),
        np.asarray(offsets, dtype=np.int64),
        np.asarray(sizes, dtype=np.int64),
        list(known),
        tar_tag=tag,
    )
    if not mtime and not tag:
        found.tar_tag = digest_values(_ends(store, path, found))
    return found


def _ends(store: Store, path: str, index: TarIndex) -> bytes:
    """Headers of a tar's first and last file, to tell tars of equal size apart."""
    places = [index.offset.min(), index.offset.max()] if len(index.offset) else []
    return b"".join(
        store.read([ByteRange(path, int(at) - _BLOCK, _BLOCK, index.tar_size) for at in places])
    )


def _fits(store: Store, path: str, index: TarIndex) -> bool:
    """Whether an index matches the tar as it is now."""
    size, mtime, tag = store.stat(path)
    if index.tar_size != size:
        return False
    if "names" in index.more:  # a pack may have been copied, which changes time and tag
        written = []
        for m in (0, len(index.offset) - 1):
            key = index.keys[int(np.searchsorted(index.first, m, side="right")) - 1]
            written.append(
                header_of(f"{key}.{index.suffixes[index.suffix[m]]}", int(index.size[m]))[-_BLOCK:]
            )
        return _ends(store, path, index) == b"".join(written)
    if mtime or tag:
        return (index.tar_mtime_ns, index.tar_tag) == (mtime, tag)
    return len(index.offset) > 0 and index.tar_tag == digest_values(_ends(store, path, index))


def cache_folder() -> Path:
    """The folder for indices of tars in read-only folders."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ronde" / "tar-index"


def index_of(store: Store, path: str) -> TarIndex:
    """The stored index of a tar if it matches, else a new one, which is then stored."""
    absolute = path if is_remote(path) else os.path.abspath(path)  # noqa: PTH100
    elsewhere = cache_folder() / f"{hashlib.sha256(absolute.encode()).hexdigest()[:32]}{SUFFIX}"
    places = [path + SUFFIX, str(elsewhere)]
    for place in places:
        raw = None
        with contextlib.suppress(OSError, SampleError):
            raw = store.whole(place) if is_remote(place) else Store().whole(place)
        if raw is None:
            continue
        # of another version, or damaged: made anew
        with contextlib.suppress(ValueError, SampleError):
            found = TarIndex.from_bytes(raw)
            if _fits(store, path, found):
                return found
    found = build_index(store, path)
    for place in places:
        if is_remote(place):
            continue
        with contextlib.suppress(OSError):
            Path(place).parent.mkdir(parents=True, exist_ok=True)
            write_whole(Path(place), found.to_bytes())
            break
    return found
