"""What ``ronde pack`` wrote: the samples of a folder, in tars."""

from __future__ import annotations

import hashlib
import io
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ronde.data.sources.base import Names, Sample, check_ids, digest_values, unknown_class
from ronde.data.sources.byte_ranges import ByteRange, Store
from ronde.data.sources.folder import FolderSource
from ronde.world import ArgumentError, SampleError
from ronde.world.paths import is_remote, local_path

MANIFEST = "ronde-pack.json"
INDEX = "ronde-pack.npz"
VERSION = 2


def read_manifest(path: str, store: Store) -> dict[str, Any] | None:
    """A pack's manifest, or None if ``path`` is not a pack; refuse one that cannot be read."""
    raw = store.whole(f"{path.rstrip('/')}/{MANIFEST}")
    if raw is None:
        return None
    try:
        manifest = json.loads(raw)
        if (manifest["format"], manifest["version"]) != ("ronde pack", VERSION):
            raise ValueError(f"{manifest['format']} {manifest['version']}")
        for shard in manifest["shards"]:
            int(shard["samples"]), int(shard["bytes"]), str(shard["name"])
        if sum(shard["samples"] for shard in manifest["shards"]) != manifest["samples"]:
            raise ValueError("its shards have other samples")
        list(manifest["classes"] or ()), str(manifest["fingerprint"]), str(manifest["index_sha256"])
    except (ValueError, KeyError, TypeError) as error:
        raise ArgumentError(
            f"{path}/{MANIFEST} is damaged, or no manifest that this version of ronde reads: "
            f"{type(error).__name__}: {error}. Remove the pack and pack again, or restore the file."
        ) from None
    return dict(manifest)


def is_pack(path: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> bool:
    """Whether ``path`` is a pack; refuse a damaged one."""
    text = os.fspath(path) if is_remote(os.fspath(path)) else local_path(path)
    return read_manifest(text, Store(options)) is not None


class PackSource(FolderSource):
    """The samples of a pack: those of the folder that was packed, with its fingerprint.

    Args:
        path: the pack.
        manifest: see :func:`read_manifest`.
    """

    def __init__(self, path: str, manifest: dict[str, Any], store: Store) -> None:
        index = _index_of(path, manifest, store)
        labels: Any = index.get("labels")
        if "labels_json" in index:
            labels = json.loads(index["labels_json"].tobytes())
        names = Names(index["names"].tobytes(), index["name_ends"])
        super().__init__(path, names, labels, manifest["classes"], store)
        self._fingerprint = str(manifest["fingerprint"])
        self._shards = [shard["name"] for shard in manifest["shards"]]
        self._shard_bytes = [shard["bytes"] for shard in manifest["shards"]]
        self._ends = np.cumsum([shard["samples"] for shard in manifest["shards"]])
        self._offset, self._sizes, self.crc32 = index["offset"], index["size"], index["crc32"]
        for i, (shard, size) in enumerate(zip(self._shards, self._shard_bytes, strict=True)):
            # Of a remote shard each read checks it: asking here would be a request for every shard.
            if not is_remote(path) and (now := store.size(f"{path}/{shard}")) != size:
                raise ArgumentError(
                    f"{path}/{shard} has {now:,} bytes; {size:,} were packed. Shard {i} is "
                    "truncated, or another file."
                )

    def __repr__(self) -> str:
        return f"pack({self.path!r}): {len(self):,} files in {len(self._shards):,} shards"

    def place(self, i: int) -> ByteRange:
        """Where sample ``i`` lies."""
        k = int(np.searchsorted(self._ends, i, side="right"))
        shard = f"{self.path}/{self._shards[k]}"
        return ByteRange(shard, int(self._offset[i]), int(self.sizes[i]), self._shard_bytes[k])

    def file(self, i: int) -> str:
        """The path or URL of the shard that holds sample ``i``."""
        return self.place(i).path

    def read(self, ids: Sequence[int]) -> list[Sample]:
        """The samples of these ids, in this order.

        Raises:
            SampleError: a shard cannot be read, or a sample is damaged; it is named.
        """
        wanted = check_ids(ids, len(self)).tolist()
        places = [self.place(i) for i in wanted]
        raw = self._store.read(places)
        for i, place, data in zip(wanted, places, raw, strict=True):
            # 20 to 30 µs for 90 kB, whose decoding takes 1,100 µs
            if zlib.crc32(data) != self.crc32[i]:
                raise SampleError(
                    f"{place.path}: {self.names[i]!r} is damaged: its checksum differs. "
                    f"'ronde pack --verify {self.path}' lists all damage."
                )
        return [Sample(d, self.label(i), self.names[i]) for d, i in zip(raw, wanted, strict=True)]

    def count_classes(self, known: list[str]) -> PackSource:
        """Map the labels to the numbers of these classes.

        Raises:
            ArgumentError: the labels have no names, or others.
        """
        if known == self.classes:
            return self
        if self.classes is None or not isinstance(self.labels, np.ndarray):
            raise ArgumentError(
                f"feed.tar: the labels of the pack {self.path} have no names, which classes= and "
                "like= need."
            )
        wrong = next((name for name in self.classes if name not in known), None)
        if wrong is not None:
            raise ArgumentError(f"feed.tar: the pack {self.path}: {unknown_class(wrong, known)}.")
        numbers = np.asarray([known.index(name) for name in self.classes], dtype=np.int64)
        self.labels, self.classes = numbers[self.labels], known
        self._fingerprint = digest_values(self.fingerprint, known)
        return self


def _index_of(path: str, manifest: dict[str, Any], store: Store) -> dict[str, Any]:
    """The arrays of a pack's index."""
    raw = store.whole(f"{path}/{INDEX}")
    if raw is None or hashlib.sha256(raw).hexdigest() != manifest["index_sha256"]:
        why = "it is missing" if raw is None else "it is damaged, or belongs to another pack"
        raise ArgumentError(
            f"the index {path}/{INDEX} cannot be used: {why}. 'ronde pack --verify {path}' lists "
            "the damage."
        )
    with np.load(io.BytesIO(raw), allow_pickle=False) as held:
        return {name: held[name] for name in held.files}
