"""Cache read or decoded samples: bounded, shared by a node's workers, without eviction.

No eviction is deliberate: each epoch asks for every sample once in a new order, so an LRU cache
drops entries just before they are needed. Keeping the first entries makes a cache of 60 % of the
samples save 60 % of the reads (MinIO, in Mohan et al., "Analyzing and Mitigating Data Stalls in DNN
Training", VLDB 2021).
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset, IterableDataset

from ronde.cache.budget import disk_reserve, free_disk, free_memory, read_size
from ronde.cache.file_dependencies import MOST_LISTED, Files, Noting, listing, note, state
from ronde.cache.record_store import Arena, open_arena, remove_unused
from ronde.data import (
    CannotEncode,
    DatasetSource,
    Pipeline,
    Source,
    Step,
    current_keys,
    decode_sample,
    encode_sample,
    pipeline,
    sample_keys,
    stage,
)
from ronde.introspect import (
    CannotDescribe,
    Marks,
    attributes,
    digest,
    installed_version,
    is_ronde,
    restore_states,
    seed_all,
    states,
    walk,
)
from ronde.world import ArgumentError, RondeError, SampleError
from ronde.world.temporary import memory_root
from ronde.world.units import format_bytes

_FORMAT = 2
# at the end of a record: how long what it says of the files is, which stands before
_TOLD = Struct("<I")
_FEW_FILES = 4
"""Opened for samples that are made together: each of them counts for each sample. More are told
apart, by making these one by one.
"""
_MOST_FILES = 1000
_PART_OF_FREE = 0.5
"""Share of the free memory or disk that a cache may take where no limit is given."""


@dataclass(frozen=True)
class CacheReport:
    """What a cache holds and has saved, over all its processes and runs.

    Attributes:
        place: its folder.
        samples, held: in the data set, and in the cache.
        bytes, limit: of the files that it takes, and the most that they may take.
        hits, misses: samples that came out of it, and that had to be made.
        hit_bytes: bytes that came out of it.
        full: samples that were not kept since the limit was reached.
        no_room: samples that were not kept since the disk or the memory has no room left besides
            what others need.
        not_kept: samples of a kind that cannot be kept; see :func:`cached`.
        random: samples that were not kept since random numbers were drawn while they were made.
        corrupt: damaged records that were found; their samples were made anew.
        changed: samples that were made anew since a file that was opened to make them was written
            since.
        off: why nothing is cached at all; empty otherwise.
    """

    place: str
    samples: int
    held: int = 0
    bytes: int = 0
    limit: int = 0
    hits: int = 0
    misses: int = 0
    hit_bytes: int = 0
    full: int = 0
    no_room: int = 0
    not_kept: int = 0
    random: int = 0
    corrupt: int = 0
    changed: int = 0
    off: str = ""

    def __str__(self) -> str:
        if self.off:
            return f"no cache: {self.off}"
        asked = self.hits + self.misses
        share = f", {self.hits / asked:.1%} of {asked:,} reads" if asked else ""
        text = (
            f"{self.held:,} of {self.samples:,} samples in {format_bytes(self.bytes)} of "
            f"{format_bytes(self.limit)}{share}"
        )
        told = {
            "full": "left out: the limit is reached",
            "no_room": "left out: no room left",
            "not_kept": "of a type that cannot be cached",
            "random": "drew random numbers",
            "corrupt": "damaged, made anew",
            "changed": "made again because their files changed",
        }
        return "; ".join(
            [
                text,
                *(
                    f"{getattr(self, name):,} {what}"
                    for name, what in told.items()
                    if getattr(self, name)
                ),
            ]
        )


# -- where it is -----------------------------------------------------------------------


def _stamp(source: Any, version: str = "", folders: set[str] | None = None) -> str:
    """A digest of the samples: the source's fingerprint, its origins, and their modification times.

    A fingerprint covers names and sizes only; a rewritten file would look the same.

    Raises:
        CannotDescribe: a data set whose state cannot be told.
    """
    try:
        return digest(source, files=True, where="the data set", folders=folders)
    except CannotDescribe:
        known = getattr(source, "fingerprint", None)
        if version and isinstance(known, str):
            return digest(known)
        raise


def _place(where: str, key: str) -> tuple[Path, bool]:
    if where == "memory":
        folder = memory_root()
        if not folder.is_dir():
            raise ArgumentError(
                f"where='memory': this machine has no {folder}. Give a folder on a local disk."
            )
        return folder / f"{_prefix(True)}{key[:24]}", True
    return Path(where).expanduser().resolve() / f"{_prefix(False)}{key[:24]}", False


def _prefix(memory: bool) -> str:
    return f"ronde-cache-{os.geteuid()}-" if memory else "ronde-cache-"


def _check_where(where: str | os.PathLike[str]) -> str:
    found = os.fspath(where) if isinstance(where, str | os.PathLike) else None
    if not isinstance(found, str) or not found or "://" in found:
        raise ArgumentError(f"where={where!r}: expected 'memory', or a folder on a local disk.")
    if found != "memory" and Path(found).exists() and not Path(found).is_dir():
        raise ArgumentError(
            f"where={found!r} is a file: expected 'memory', or a folder on a local disk."
        )
    return found


def clear_cache(where: str | os.PathLike[str] = "memory") -> int:
    """Remove this user's caches that no running process uses.

    In-memory caches vanish with their last process; leftovers of killed processes go when the next
    one is created.

    Args:
        where: ``"memory"``, or the folder that was given to :func:`cached`.

    Returns:
        int: bytes that were freed.

    Example:
        >>> import tempfile
        >>> clear_cache(tempfile.mkdtemp())
        0
    """
    found = _check_where(where)
    memory = found == "memory"
    return remove_unused(
        memory_root() if memory else Path(found).expanduser().resolve(), _prefix(memory)
    )[1]


# -- reading through a cache -----------------------------------------------------------


class _Sample(NamedTuple):
    """A sample, the source of random draws while it was made (or ""), and the files opened."""

    value: Any
    drew: str
    files: Files


def _split_record(data: memoryview) -> tuple[memoryview, bytes]:
    """A record's sample bytes, and its file dependencies.

    Raises:
        ValueError: it is no record.
    """
    if len(data) < _TOLD.size:
        raise ValueError("no record")
    end = len(data) - _TOLD.size
    start = end - _TOLD.unpack_from(data, end)[0]
    if start < 0:
        raise ValueError("no record")
    return data[:start], bytes(data[start:end])


def _declares_files(source: Any) -> bool:
    """Whether a source of Ronde's own reads only what it declares: no file need be noted."""
    return is_ronde(type(source)) and not isinstance(source, CachedSource | DatasetSource)


class _Cache:
    """Base of cached sources and cached datasets. Subclasses implement ``_make``."""

    def __init__(
        self,
        n: int,
        where: str,
        limit: int | None,
        reserve: int | None,
        key: str | None,
        about: dict[str, Any],
        folders: Iterable[str] = (),
    ) -> None:
        self._n = n
        self._folders = frozenset(folders)  # held by what makes the samples
        self._listed: str | None = None
        self._shared: Files = {}  # opened once, and used for all samples
        self._one_by_one = False
        self._where = where
        self._limit = limit
        self._reserve = reserve
        self._about = about
        self._key = key
        self._private = key is None
        if key is None:
            # Of this process and the loading processes that it starts: the others cannot know that
            # theirs is the same.
            key = secrets.token_hex(16)
            share = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1))
            self._limit = limit // share if limit is not None else None
        self._folder, self._memory = _place(where, key)
        self._arena: Arena | None = None
        self._off = ""
        self._reported: set[str] = set()
        self._opening = threading.Lock()
        if self._memory:
            remove_unused(memory_root(), _prefix(True))
        self._opened()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_arena": None, "_opening": None, "_said": set()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._opening = threading.Lock()

    def _default_limit(self) -> int:
        free, total = free_disk(self._folder)
        room = free - (
            disk_reserve(total, self._memory) if self._reserve is None else self._reserve
        )
        if self._memory:
            room = min(room, free_memory())
            if self._private:
                room //= max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1))
        return max(1, int(room * _PART_OF_FREE))

    def _opened(self) -> Arena | None:
        """This process's open arena, or None if none is available."""
        if self._off:
            return None
        arena = self._arena
        if arena is not None and arena.pid == os.getpid():
            return arena
        # forked: the lock may have been held by a thread that is not here
        if self._arena is not None:
            self._opening = threading.Lock()
        with self._opening:
            try:
                self._arena = open_arena(
                    self._folder,
                    self._n,
                    self._limit,
                    self._default_limit,
                    self._memory,
                    self._reserve,
                    self._about,
                    self,
                )
            except (OSError, RondeError) as error:
                self._off = f"{self._folder}: {error}"
                self._arena = None
                warnings.warn(
                    f"ronde: nothing is cached: {self._off}", RuntimeWarning, stacklevel=2
                )
        return self._arena

    def _report_once(self, what: str, before: int) -> None:
        """Report once across all processes, as far as the counter allows."""
        if not before and what not in self._reported:
            self._reported.add(what)
            warnings.warn(f"ronde: {what}", RuntimeWarning, stacklevel=2)

    def _make(self, ids: list[int], at: list[int], batch: int) -> list[_Sample]:
        """Make samples, with each one's dependencies.

        Args:
            at: where each of them stands in the batch.
            batch: samples in the batch.
        """
        raise NotImplementedError

    def _through(self, ids: Sequence[int]) -> list[Any]:
        wanted = [int(i) for i in ids]
        for i in wanted:
            if not 0 <= i < self._n:
                raise IndexError(f"sample {i} is not in [0, {self._n})")
        arena = self._opened()
        values: list[Any] = [None] * len(wanted)
        missed: list[int] = []
        entries: dict[int, bytes] = {}
        taken = changed = 0
        states: Files = {}
        try:
            for k, i in enumerate(wanted):
                found = arena.get(i) if arena is not None else None
                if found is None or found.data is None:
                    entries[i] = found.entry if found is not None else b""
                    missed.append(k)
                    continue
                try:
                    data, told = _split_record(found.data)
                    if not self._is_unchanged(told, states):
                        changed += 1
                        entries[i] = found.entry
                        missed.append(k)
                        continue
                    values[k] = decode_sample(data)
                    taken += len(data)
                except ValueError:
                    arena.count(corrupt=1)  # type: ignore[union-attr]
                    entries[i] = found.entry
                    missed.append(k)
            if not missed:
                if arena is not None:
                    arena.count(hits=len(wanted), hit_bytes=taken)
                return values
        except OSError as error:
            self._fail(error)
            arena, missed = None, list(range(len(wanted)))
        made = self._make([wanted[k] for k in missed], missed, len(wanted))
        if arena is not None:
            counts = {
                "hits": len(wanted) - len(missed),
                "misses": len(missed),
                "hit_bytes": taken,
                "changed": changed,
            }
            try:
                self._keep(arena, wanted, missed, made, entries, counts)
            except OSError as error:
                self._fail(error)
        for k, each in zip(missed, made, strict=True):
            values[k] = each.value
        return values

    def _make_together(
        self, many: Callable[[list[int]], Any], ids: list[int]
    ) -> tuple[list[Any], list[Files]]:
        """Make samples together, with each one's opened files."""
        shared: Files = {}
        if not self._one_by_one or len(ids) == 1:
            with Noting() as noting:
                samples = list(many(ids))
            if len(noting.files) <= _FEW_FILES or len(ids) == 1:
                return samples, [noting.files] * len(ids)
            self._one_by_one, shared = True, noting.files
        made, files = [], []
        for i in ids:
            with Noting() as noting:
                made += many([i])
            files.append(noting.files)
        # What was opened for all of them together only, such as an index, is of all of them.
        shared = {
            path: was for path, was in shared.items() if not any(path in each for each in files)
        }
        self._shared |= shared
        return made, files

    def _files_in_record(self, files: Files) -> bytes:
        """The file dependencies in a record."""
        files = {**self._shared, **files}
        if len(files) > _MOST_FILES:
            raise CannotEncode(f"a sample for which {len(files):,} files were opened")
        text = (
            json.dumps([files, "" if files else self._listing()]).encode()
            if files or self._folders
            else b""
        )
        return text + _TOLD.pack(len(text))

    def _is_unchanged(self, told: bytes, states: Files) -> bool:
        """Whether a sample's files are unchanged. ``states`` holds states read just now."""
        if not told:
            return True
        files, listed = json.loads(told)
        for path, was in files.items():
            if path not in states:
                states[path] = state(path)
            if states[path] != was:
                return False
        note(files)
        return not listed or bool(listed == self._listing())

    def _listing(self) -> str:
        """Folder listings of this process, for samples whose files Python did not open."""
        if self._listed is None:
            self._listed, more = listing(self._folders) if self._folders else ("", "")
            if more:
                self._report_once(
                    f"{more} holds more than {MOST_LISTED:,} files, which are read without "
                    "Python's knowing: a change of one that was not looked at "
                    "is not noticed by the cache. Give another version= when files change",
                    0,
                )
        return self._listed

    def _fail(self, error: OSError) -> None:
        """Continue without the cache: its disk is gone or broken."""
        if not self._off:
            self._off = f"{self._folder}: {error}"
            warnings.warn(
                f"ronde: nothing more is cached: {self._off}", RuntimeWarning, stacklevel=2
            )

    def _keep(
        self,
        arena: Arena,
        wanted: list[int],
        missed: list[int],
        made: list[_Sample],
        entries: dict[int, bytes],
        counts: dict[str, int],
    ) -> None:
        records: dict[int, tuple[int, list[bytes | memoryview], bytes]] = {}
        left_out = {"not_kept": 0, "random": 0, "full": 0, "no_room": 0}
        told_kind = told_drawn = ""
        for k, (value, drew, files) in zip(missed, made, strict=True):
            i = wanted[k]
            if drew:
                left_out["random"], told_drawn = left_out["random"] + 1, drew
            elif i in records:
                continue  # asked for twice in one batch
            elif closed := arena.closed_to_more:
                left_out[closed] += 1
            else:
                try:
                    # What shares memory with the sample is written before the sample is handed out.
                    records[i] = (
                        i,
                        [*encode_sample(value), self._files_in_record(files)],
                        entries[i],
                    )
                except CannotEncode as error:
                    left_out["not_kept"], told_kind = left_out["not_kept"] + 1, str(error)
        if records:
            arena.put(list(records.values()))
        before = arena.count(**left_out, **counts)
        if told_kind:
            self._report_once(
                f"samples are not cached: {told_kind} would not come back as it was",
                before["not_kept"],
            )
        if told_drawn:
            self._report_once(
                f"samples are not cached: {told_drawn} draws random numbers", before["random"]
            )

    def _check_draws(self, what: str) -> None:
        """Make some samples twice under different random numbers before caching anything.

        Raises:
            ArgumentError: random numbers are drawn, or the two differ.
        """
        arena = self._opened()
        if arena is None:
            return
        saved = states()
        try:
            for i in sorted({0, self._n // 2, self._n - 1}):
                if arena.get(i).data is not None:
                    continue
                looked: list[_Sample] = []
                for turn in (1, 2):
                    seed_all(secrets.randbits(64) if turn == 2 else turn)
                    try:
                        with sample_keys(1, lambda _: secrets.randbits(64)) as keys:
                            keys.at = 0
                            looked.append(self._make([i], [0], 1)[0])
                    except Exception:
                        break  # a bad sample: reading says so when its turn comes
                    if looked[-1].drew:
                        raise ArgumentError(
                            f"{what}: {looked[-1].drew} draws random numbers, so its result cannot "
                            "be cached. Cache before it."
                        )
                # what was opened the first time only stays open, or its content stays: an index, an
                # archive
                if len(looked) == 2:
                    self._shared |= {
                        path: was
                        for path, was in looked[0].files.items()
                        if path not in looked[1].files
                    }
                if len(looked) == 2 and not _equal(looked[0].value, looked[1].value):
                    raise ArgumentError(
                        f"{what}: sample {i} came out differently the second time, so it cannot be "
                        "cached. It depends on its own random numbers, on the time, or on earlier "
                        "reads."
                    )
        finally:
            restore_states(saved)

    def report(self) -> CacheReport:
        """What it holds and has saved; see :class:`CacheReport`."""
        arena = self._opened()
        if arena is None:
            return CacheReport(str(self._folder), self._n, off=self._off)
        counts, size = arena.totals()
        known = {f.name for f in fields(CacheReport)}
        return CacheReport(
            str(self._folder),
            self._n,
            arena.held(),
            size,
            arena.limit,
            **{k: v for k, v in counts.items() if k in known},  # type: ignore[arg-type]
        )

    def close(self) -> None:
        """Leave the cache, as process exit does; one in memory vanishes with its last user."""
        arena, self._arena = self._arena, None
        self._off = self._off or "it was closed"
        if arena is not None and arena.pid == os.getpid():
            arena.close(self)


def _equal(a: Any, b: Any) -> bool:
    try:
        return b"".join(encode_sample(a)) == b"".join(encode_sample(b))
    except CannotEncode:
        return True  # it will not be kept


class _Watch:
    """Detects random draws, from the sample's generator and the global ones."""

    def __init__(self) -> None:
        self._keys = current_keys()
        self._before = self._drawn()
        # Other threads may draw from the global generators meanwhile: in a loading thread only the
        # sample's own are looked at.
        self._marks = Marks() if threading.current_thread() is threading.main_thread() else None

    def _drawn(self) -> dict[int, str]:
        return (
            {}
            if self._keys is None
            else {j: str(g.bit_generator.state) for j, g in self._keys.made.items()}
        )

    def drew(self) -> bool:
        return (
            self._marks is not None and not self._marks.unmoved()
        ) or self._drawn() != self._before


def _with_keys(n: int) -> Any:
    """Set arbitrary keys outside a run, so that draws from rng() are detectable."""
    return sample_keys(n, lambda _: secrets.randbits(64))


class CachedSource(_Cache, Dataset[Any]):
    """A source whose results, after some steps, are cached; see :func:`cached`.

    Attributes:
        source: what is read where the cache has nothing.
        steps: done to it before it is kept.
    """

    def __init__(
        self,
        source: Source,
        steps: tuple[Step, ...],
        where: str,
        limit: int | None,
        reserve: int | None,
        version: str,
        check: bool,
    ) -> None:
        self.source = source
        self.steps = steps
        about = {
            "source": repr(source)[:200],
            "steps": [s.name for s in steps],
            "samples": len(source),
            "version": version,
            "made": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        folders: set[str] = set()
        of_source = None if _declares_files(source) else folders
        key = _key(
            lambda: [
                _stamp(source, version, of_source),
                [_describe(s, version, folders) for s in steps],
            ],
            len(source),
            version,
            where,
        )
        super().__init__(len(source), where, limit, reserve, key, about, folders)
        if check:
            self._check_draws("cached(…)")

    def __len__(self) -> int:
        return self._n

    @property
    def fingerprint(self) -> str:
        """The source's own: a run may resume with or without a cache."""
        return self.source.fingerprint

    def origins(self) -> list[Any]:
        """What a later cache must know: the fingerprint does not cover the steps."""
        if self._key is None:
            raise CannotDescribe("the cached source before it is known to this process only")
        return [("cache", self._key)]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("source", "steps"):
            raise AttributeError(name)
        return getattr(self.source, name)  # classes, file(i) and the like

    def read(self, ids: Sequence[int]) -> list[Any]:
        """The samples of these ids, in this order, after the steps."""
        return self._through(ids)

    def __getitem__(self, i: int) -> Any:
        return self.__getitems__([i])[0]

    def __getitems__(self, ids: Sequence[int]) -> list[Any]:
        return stage("read")(self.read)(ids)

    def _make(self, ids: list[int], at: list[int], batch: int) -> list[_Sample]:
        keys = current_keys()
        if keys is None:
            with _with_keys(batch):
                return self._make(ids, at, batch)
        known = keys.n == batch and keys.at is None
        watch = _Watch()
        files: list[Files]
        if _declares_files(self.source):
            samples, files = list(self.source.read(ids)), [{} for _ in ids]
        else:
            samples, files = self._make_together(self.source.read, ids)
        drew = ["the source" if watch.drew() else ""] * len(ids)
        for step in self.steps:
            call = stage(step.name)(step.call)
            name = f"the step {step.name!r}"
            if step.batched:
                watch = _Watch()
                with Noting() as noting:
                    samples = list(call(samples))
                files = [{**noting.files, **each} for each in files]
                drew = [d or name for d in drew] if watch.drew() else drew
                continue
            for j, sample in enumerate(samples):
                watch = _Watch()
                if known:
                    keys.at = at[j]
                try:
                    with Noting() as noting:
                        samples[j] = call(sample)
                    files[j] = {**noting.files, **files[j]}
                except (ArgumentError, SampleError):
                    raise
                except Exception as error:
                    called = getattr(sample, "name", None)
                    which = called if isinstance(called, str) else f"sample {ids[j]}"
                    raise SampleError(
                        f"{which}, stage {step.name}: {type(error).__name__}: {error}"
                    ) from error
                finally:
                    if known:
                        keys.at = None
                drew[j] = drew[j] or (name if watch.drew() else "")
        return [_Sample(*each) for each in zip(samples, drew, files, strict=True)]


class CachedDataset(_Cache, Dataset[Any]):
    """A cached map-style Dataset, with the dataset's own other attributes."""

    def __init__(
        self,
        dataset: Any,
        where: str,
        limit: int | None,
        reserve: int | None,
        version: str,
        check: bool,
    ) -> None:
        self.dataset = dataset
        about = {
            "dataset": type(dataset).__qualname__,
            "samples": len(dataset),
            "version": version,
            "made": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        folders: set[str] = set()
        key = _key(
            lambda: [_stamp(dataset, folders=folders)],
            len(dataset),
            version,
            where,
            has_version=bool(version),
        )
        super().__init__(len(dataset), where, limit, reserve, key, about, folders)
        if check:
            self._check_draws("cached_dataset(…)")

    def __len__(self) -> int:
        return self._n

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitem__(self, i: int) -> Any:
        return self._through([i + self._n if i < 0 else i])[0]

    def __getitems__(self, ids: Sequence[int]) -> list[Any]:
        return self._through(ids)

    def _make(self, ids: list[int], at: list[int], batch: int) -> list[_Sample]:
        keys = current_keys()
        if keys is None:
            with _with_keys(batch):
                return self._make(ids, at, batch)
        many: Callable[[list[int]], Any] | None = getattr(self.dataset, "__getitems__", None)
        if many is not None:
            watch = _Watch()
            samples, files = self._make_together(many, ids)
            drew = "the data set" if watch.drew() else ""
            return [
                _Sample(sample, drew, opened) for sample, opened in zip(samples, files, strict=True)
            ]
        known = keys.n == batch and keys.at is None
        made = []
        for j, i in enumerate(ids):
            watch = _Watch()
            if known:
                keys.at = at[j]
            try:
                with Noting() as noting:
                    sample = self.dataset[i]
            finally:
                if known:
                    keys.at = None
            made.append(_Sample(sample, "the data set" if watch.drew() else "", noting.files))
        return made


def _describe(step: Step, version: str, folders: set[str]) -> str:
    # Which decoder is used may depend on what is installed.
    names = "simplejpeg torchcodec opencv-python-headless opencv-python pillow"
    codecs = [installed_version(name) for name in names.split()]
    try:
        return digest(
            step.name,
            step.batched,
            codecs,
            step.call,
            where=f"the step {step.name!r}",
            folders=folders,
        )
    except CannotDescribe:
        if version:
            return digest(step.name, step.batched, codecs)
        raise


def _key(
    parts: Callable[[], list[Any]], n: int, version: str, where: str, has_version: bool = False
) -> str | None:
    """A cache's name, from the samples and the work on them; None if it cannot be shared."""
    try:
        return digest(_FORMAT, n, version, torch.get_default_dtype(), parts())
    except CannotDescribe as error:
        if has_version:
            return digest(_FORMAT, n, version)
        if where == "memory":
            return None
        raise ArgumentError(
            f"{error}: a disk cache could serve another version's results. Pass version='…', and "
            "change it whenever the code changes."
        ) from None


def _options(
    where: str | os.PathLike[str],
    limit: int | float | str | None,
    reserve: int | float | str | None,
    version: str,
) -> tuple[str, int | None, int | None, str]:
    if not isinstance(version, str):
        raise ArgumentError(f"version={version!r}: expected a string.")
    return (
        _check_where(where),
        None if limit is None else read_size(limit, "limit"),
        None if reserve is None else read_size(reserve, "reserve", 0),
        version,
    )


def cached(
    data: Any,
    after: str = "read",
    where: str | os.PathLike[str] = "memory",
    limit: int | float | str | None = None,
    *,
    reserve: int | float | str | None = None,
    version: str = "",
    check: bool = True,
) -> Any:
    """Cache what a source or pipeline made.

    All workers and loading processes of a node share the cache. Its identity covers the source and
    the steps before it: another folder, a rewritten file (for remote files only address and size
    are known) or another resize size is another cache. Numbers, strings, bytes, NumPy arrays, CPU
    tensors, plain Pillow images, and tuples, dicts and lists of those are cached. Other samples are
    made each time, counted, and reported once.

    Args:
        data: a source, or a :class:`Pipeline`.
        after: ``"read"`` keeps what the source read; ``"decode"`` also what the steps up to the
            last one named ``decode`` made of it; any other step's name likewise. It must stand
            before whatever draws random numbers.
        where: ``"memory"``: in /dev/shm (or the tmpfs that the variable ``RONDE_SHM`` names), gone
            with the last process that uses it. Or a folder on a local disk, kept between runs.
        limit: the most that it may take, in bytes or as ``"2GiB"``. None: half of the memory (what
            the container allows) or disk that is free.
        reserve: bytes to leave free where it stands. None: a quarter of /dev/shm; a twentieth of a
            disk, at most 10 GB.
        version: told apart from other versions; needed on disk where the state of a step cannot be
            told by itself.
        check: make three samples twice, to see that no random numbers are drawn.

    Returns:
        A source, or a pipeline. ``report()`` of the source (of the pipeline's ``source``) tells
        what the cache is worth.

    Raises:
        ArgumentError: a step before draws random numbers, or gives another result each time; it is
            named. Or an argument that cannot be used.

    Example:
        >>> class Numbers:
        ...     fingerprint = "numbers"
        ...     def __len__(self):
        ...         return 3
        ...     def read(self, ids):
        ...         return [i * i for i in ids]
        >>> kept = cached(Numbers(), limit="1MiB")
        >>> kept.read([2, 1]), kept.read([1, 2])
        ([4, 1], [1, 4])
        >>> kept.report().hits
        2
        >>> kept.close()
    """
    options = _options(where, limit, reserve, version)
    if isinstance(data, Pipeline):
        count = 0
        if after != "read":
            names = [s.name for s in data.steps]
            if after not in names:
                raise ArgumentError(
                    f"after={after!r}: the steps of this pipeline are "
                    f"{', '.join(['read', *names])}."
                )
            count = len(names) - names[::-1].index(after)
        # A step may do less than all where it knows what comes of it: what is kept must serve
        # whatever comes.
        kept = tuple(
            replace(s, call=s.call.settled()) if hasattr(s.call, "settled") else s
            for s in data.steps[:count]
        )
        source = CachedSource(data.source, kept, *options, check)
        return replace(data, source=source, steps=data.steps[count:])
    if after != "read":
        raise ArgumentError(f"after={after!r} is for a pipeline: a source only reads.")
    if not hasattr(data, "read") or not hasattr(data, "__len__"):
        raise ArgumentError(
            f"cached({type(data).__name__}): expected a source (__len__ and read(ids)) or "
            "a Pipeline. For a plain Dataset: cached_dataset."
        )
    return CachedSource(data, (), *options, check)


def cached_dataset(
    dataset: Any,
    where: str | os.PathLike[str] = "memory",
    limit: int | float | str | None = None,
    *,
    reserve: int | float | str | None = None,
    version: str = "",
    check: bool = True,
) -> CachedDataset:
    """Cache whole samples of a map-style Dataset that draws no random numbers.

    Args:
        dataset: anything with ``__len__`` and ``__getitem__``; its ``__getitems__`` is used where
            it has one.
        where, limit, reserve, version, check: as for :func:`cached`. Where the state of the data
            set cannot be told and no ``version`` is given, a cache in memory is one worker's own,
            with its share of the limit.

    Raises:
        ArgumentError: samples are random: drawn from a generator, or different each time; or an
            argument that cannot be used.

    Example:
        >>> kept = cached_dataset([10, 20, 30], limit="1MiB")
        >>> kept[1], kept.__getitems__([2, 1]), kept.report().hits
        (20, [30, 20], 1)
        >>> kept.close()
    """
    options = _options(where, limit, reserve, version)
    if (
        isinstance(dataset, IterableDataset)
        or not hasattr(dataset, "__getitem__")
        or not hasattr(dataset, "__len__")
    ):
        raise ArgumentError(
            "cached_dataset needs a map-style Dataset with __len__ and __getitem__, found "
            f"{type(dataset).__name__}."
        )
    if len(dataset) == 0:
        raise ArgumentError(f"cached_dataset: the data set ({type(dataset).__name__}) is empty.")
    return CachedDataset(dataset, *options, check)


def report_cache(data: Any) -> list[CacheReport]:
    """Reports of all caches in a pipeline, source or dataset, outermost first."""
    # Only through what reads for another: an object of the user's may hold a cache of other data.
    inner = ("source", "dataset", "data")
    chain = walk(data, lambda one: [attributes(one).get(name) for name in inner])
    return [one.report() for one in chain if isinstance(one, _Cache)]


pipeline.make_cached = cached
