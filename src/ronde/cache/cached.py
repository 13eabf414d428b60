"""Cache read or decoded samples: bounded, shared by a node's workers, without eviction.

No eviction is deliberate: each epoch asks for every sample once in a new order, so an LRU cache
drops entries just before they are needed. Keeping the first entries makes a cache of 60 % of the
samples save 60 % of the reads (MinIO, in Mohan et al., "Analyzing and Mitigating Data Stalls in DNN
Training", VLDB 2021).

A cache in memory belongs to the launch that makes it: its workers, and their loading processes. A
cache on disk is identified by the source's files and the user's ``version=``.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import secrets
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from ronde.cache.budget import read_size
from ronde.cache.record_store import Arena, Record, remove_unused
from ronde.data import (
    BaseSource,
    CannotEncode,
    Pipeline,
    Source,
    Step,
    check_map_style,
    current_keys,
    decode_sample,
    encode_sample,
    pipeline,
    sample_keys,
    stage,
)
from ronde.introspect import Marks, is_ronde, restore_states, seed_all, states
from ronde.world import ArgumentError, RondeError, SampleError, world
from ronde.world.launchers import identify
from ronde.world.processes import memory_root
from ronde.world.units import format_bytes


@dataclass(frozen=True)
class CacheReport:
    """What a cache holds and has saved, over all its processes and runs.

    Attributes:
        place: its folder.
        samples, held: in the data set, and in the cache.
        bytes, limit: of the files that it takes, and the most that they may take.
        hits, misses: samples that came out of it, and that had to be made.
        full: samples that were not kept since the limit was reached, or the disk or the memory has
            no room left besides what others need.
        not_kept: samples of a kind that cannot be kept; see :func:`cached`.
        random: samples that were not kept since random numbers were drawn while they were made.
        corrupt: damaged records that were found; their samples were made anew.
        off: why nothing is cached at all; empty otherwise.
    """

    place: str
    samples: int
    held: int = 0
    bytes: int = 0
    limit: int = 0
    hits: int = 0
    misses: int = 0
    full: int = 0
    not_kept: int = 0
    random: int = 0
    corrupt: int = 0
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
        reasons = {
            "full": "left out: the limit is reached, or no room is left",
            "not_kept": "of a type that cannot be cached",
            "random": "drew random numbers",
            "corrupt": "damaged, made anew",
        }
        counts = [(getattr(self, name), reason) for name, reason in reasons.items()]
        return "; ".join([text, *(f"{count:,} {reason}" for count, reason in counts if count)])


# -- which cache it is -----------------------------------------------------------------

made_in_memory = itertools.count()
"""Numbers the caches in memory of this process."""


def _files_of(source: Any) -> list[str]:
    """The paths and URLs behind a source of Ronde's; none where a sample depends on anything else.

    What a class of the user's makes of its files may change with its code.
    """
    while isinstance(source, CachedSource):
        source = source.source
    return list(source.files()) if isinstance(source, BaseSource) and is_ronde(source) else []


def _state(path: str) -> list[Any]:
    """A file's name, size and time of change; of a remote one the fingerprint knows the size."""
    try:
        status = os.stat(path)  # noqa: PTH116 - for each of a million files
    except OSError:
        return [path]
    return [path, status.st_size, status.st_mtime_ns]


def _fingerprint(source: Any) -> str:
    digest = getattr(source, "fingerprint", "")
    return digest if isinstance(digest, str) else ""


def _key_on_disk(source: Any, steps: Sequence[Step], version: str, look: Callable[[], str]) -> str:
    """Identify a cache that outlives its processes; ``look`` as for one in memory.

    Raises:
        ArgumentError: neither files nor a version tell it from others.
    """
    kind = type(source)
    files = _files_of(source)
    if not version and (steps or not files):
        reason = (
            f"the code of the step {steps[-1].name!r} may change"
            if steps
            else f"{kind.__name__} is not made of files alone"
        )
        raise ArgumentError(
            f"a cache on disk could serve another version's samples: {reason}. Pass version='…', "
            "and change it whenever the samples or the code that makes them change."
        )
    parts = [
        *(kind.__module__.removeprefix("__main__"), kind.__qualname__, len(source), version),
        _fingerprint(source) or look(),
        [step.name for step in steps],
        list(map(_state, files)),
        source._key if isinstance(source, _Cache) else "",
    ]
    return hashlib.sha256(json.dumps(parts).encode("utf-8", "surrogatepass")).hexdigest()


def _key_in_memory(source: Any, steps: Sequence[Step], look: Callable[[], str]) -> tuple[str, bool]:
    """The key of the next cache in memory, and whether the workers of this node share it.

    Every worker makes the same caches in the same order, because all run one script. What the
    source is keeps two caches apart that only one of the workers made between them, and those of
    workers that have a part of the samples each: its fingerprint, or what ``look`` sees of it.
    """
    launch = identify(os.environ)
    k = next(made_in_memory)
    if launch.size == 1 or launch.address is None:
        return secrets.token_hex(12), False
    about = type(source).__qualname__, len(source), _fingerprint(source) or look()
    parts = [launch.address, launch.port, k, *about, [step.name for step in steps]]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest(), True


def _prefix(memory: bool) -> str:
    # /dev/shm is everybody's: each user looks for, and removes, his own
    return f"ronde-cache-{os.geteuid()}-" if memory else "ronde-cache-"


def _folder_of(where: str) -> Path:
    if where != "memory":
        return Path(where).expanduser().resolve()
    folder = memory_root()
    if not folder.is_dir():
        raise ArgumentError(
            f"where='memory': this machine has no {folder}. Give a folder on a local disk."
        )
    return folder


def _check_where(where: str | os.PathLike[str]) -> str:
    given = os.fspath(where) if isinstance(where, str | os.PathLike) else None
    if not isinstance(given, str) or not given or "://" in given:
        raise ArgumentError(f"where={where!r}: expected 'memory', or a folder on a local disk.")
    if given != "memory" and Path(given).exists() and not Path(given).is_dir():
        raise ArgumentError(
            f"where={given!r} is a file: expected 'memory', or a folder on a local disk."
        )
    return given


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
    checked = _check_where(where)
    return remove_unused(_folder_of(checked), _prefix(checked == "memory"))


# -- reading through a cache -----------------------------------------------------------


class _Cache(Dataset[Any]):
    """Base of cached sources and cached datasets. Subclasses implement ``_make``."""

    def __init__(
        self, source: Any, steps: Sequence[Step], where: Any, limit: Any, version: Any
    ) -> None:
        if not isinstance(version, str):
            raise ArgumentError(f"version={version!r}: expected a string.")
        where = _check_where(where)
        self._n = len(source)
        self._limit = None if limit is None else read_size(limit, "limit")
        self._memory = where == "memory"
        self._share = 1
        if self._memory:
            self._key, shared = _key_in_memory(source, steps, self._ends)
            # Where each worker has a cache of its own, they divide what is free.
            self._share = 1 if shared else world().local_size
            remove_unused(memory_root(), _prefix(True))
        else:
            self._key = _key_on_disk(source, steps, version, self._ends)
        self._folder = _folder_of(where) / f"{_prefix(self._memory)}{self._key[:24]}"
        self._arena: Arena | None = None
        self._off = ""
        self._reported: set[str] = set()
        self._opening = threading.Lock()
        self._opened()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_arena": None, "_opening": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._opening = threading.Lock()

    def __len__(self) -> int:
        return self._n

    def _opened(self) -> Arena | None:
        """This process's open arena, or None if none is available."""
        if self._arena is not None or self._off:
            return self._arena
        with self._opening:
            limit = None if self._limit is None else max(1, self._limit // self._share)
            try:
                self._arena = self._arena or Arena(
                    self._folder, self._n, limit, self._memory, self._share
                )
            except (OSError, RondeError) as error:
                self._fail(error)
        return self._arena

    def _fail(self, error: Exception) -> None:
        """Continue without the cache: its disk is gone, broken, or not ours."""
        if not self._off:
            self._off = f"{self._folder}: {error}"
            self._report_once(f"nothing more is cached: {self._off}", 0)
        self._arena = None

    def _report_once(self, text: str, before: int) -> None:
        """Report once across all processes, as far as the counter ``before`` allows."""
        if not before and text not in self._reported:
            self._reported.add(text)
            warnings.warn(f"ronde: {text}", RuntimeWarning, stacklevel=2)

    def _make(self, ids: list[int], at: list[int], batch: int) -> list[tuple[Any, str]]:
        """Make samples, each with the source of its random draws, or "".

        Args:
            at: where each of them stands in the batch.
            batch: samples in the batch.
        """
        raise NotImplementedError

    def _make_under_keys(self, ids: list[int], at: list[int], batch: int) -> list[tuple[Any, str]]:
        if current_keys() is not None:
            return self._make(ids, at, batch)
        # Outside a run too, draws from rng() must be seen.
        with sample_keys(batch, lambda _: secrets.randbits(64)):
            return self._make(ids, at, batch)

    def _through(self, ids: Sequence[int]) -> list[Any]:
        wanted = [int(i) for i in ids]
        for i in wanted:
            if not 0 <= i < self._n:
                raise IndexError(f"sample {i} is not in [0, {self._n})")
        values: list[Any] = [None] * len(wanted)
        missed = list(range(len(wanted)))
        counts = {"hits": 0, "misses": 0, "corrupt": 0}
        arena = self._opened()
        try:
            if arena is not None:
                missed = [k for k, i in enumerate(wanted) if not self._take(i, k, values, counts)]
        except OSError as error:
            self._fail(error)
            arena, missed = None, list(range(len(wanted)))
        made = (
            self._make_under_keys([wanted[k] for k in missed], missed, len(wanted))
            if missed
            else []
        )
        if arena is not None:
            counts["misses"] = len(missed)
            try:
                self._keep(arena, [wanted[k] for k in missed], made, counts)
            except OSError as error:
                self._fail(error)
        for k, (value, _) in zip(missed, made, strict=True):
            values[k] = value
        return values

    def _take(self, i: int, k: int, values: list[Any], counts: dict[str, int]) -> bool:
        """Put sample ``i`` at place ``k`` if the cache has it."""
        assert self._arena is not None
        data = self._arena.get(i)
        if data is None:
            return False
        try:
            values[k] = decode_sample(data)
        except ValueError:  # whole, and of another version's format
            counts["corrupt"] += 1
            return False
        counts["hits"] += 1
        return True

    def _keep(
        self, arena: Arena, ids: list[int], made: list[tuple[Any, str]], counts: dict[str, int]
    ) -> None:
        records: dict[int, Record] = {}
        counts |= {"not_kept": 0, "random": 0, "full": 0}
        unkept = drawing = ""
        for i, (value, drew) in zip(ids, made, strict=True):
            if drew:
                counts["random"], drawing = counts["random"] + 1, drew
            elif i in records:
                continue  # asked for twice in one batch
            elif arena.is_full:
                counts["full"] += 1
            else:
                try:
                    # What shares memory with the sample is written before it is handed out.
                    records[i] = (i, encode_sample(value))
                except CannotEncode as error:
                    counts["not_kept"], unkept = counts["not_kept"] + 1, str(error)
        if records:
            counts["full"] += arena.put(list(records.values()))
        before = arena.count(**counts)
        if unkept:
            text = f"samples are not cached: {unkept} would not come back as it was"
            self._report_once(text, before["not_kept"])
        if drawing:
            text = f"samples are not cached: {drawing} draws random numbers"
            self._report_once(text, before["random"])

    def _ends(self) -> str:
        """A digest of the first and the last sample; empty where they cannot be made or kept."""
        saved = states()
        try:
            made = self._make_under_keys([0, self._n - 1], [0, 1], 2)
            parts = [p for value, drew in made if not drew for p in encode_sample(value)]
            return hashlib.sha256(b"".join(parts)).hexdigest()
        except Exception:
            return ""  # a bad sample: reading says so when its turn comes
        finally:
            restore_states(saved)

    def _refuse_draws(self, call: str) -> None:
        """Make the first sample twice, to see that nothing draws random numbers.

        Raises:
            ArgumentError: something does, also from a generator of its own.
        """
        saved, made = states(), []
        try:
            for seed in (1, 2):
                seed_all(seed)
                made += self._make_under_keys([0], [0], 1)
        except Exception:
            return  # a bad sample: reading says so when its turn comes
        finally:
            restore_states(saved)
        (one, drew), (other, _) = made
        if not drew and _differ(one, other):
            drew = "something with a generator of its own"
        if drew:
            self.close()
            raise ArgumentError(
                f"{call}: {drew} draws random numbers, so its result cannot be cached. Cache "
                "before it."
            )

    def report(self) -> CacheReport:
        """What it holds and has saved; see :class:`CacheReport`."""
        arena = self._opened()
        report = CacheReport(str(self._folder), self._n, off=self._off)
        if arena is None:
            return report
        counts: dict[str, Any] = arena.count()
        held, used = arena.held(), arena.used_bytes()
        return replace(report, held=held, bytes=used, limit=arena.limit, **counts)

    def close(self) -> None:
        """Leave the cache, as process exit does; one in memory vanishes with its last user."""
        arena, self._arena = self._arena, None
        self._off = self._off or "it was closed"
        if arena is not None:
            arena.close()


def _differ(one: Any, other: Any) -> bool:
    try:
        return b"".join(encode_sample(one)) != b"".join(encode_sample(other))
    except CannotEncode:
        return False  # it will not be kept


class _Watch:
    """Detects random draws, from the sample's generator and the global ones."""

    def __init__(self) -> None:
        self._keys = current_keys()
        self._before = self._drawn()
        # Other threads may draw from the global generators meanwhile: in a loading thread only the
        # sample's own are looked at.
        self._marks = Marks() if threading.current_thread() is threading.main_thread() else None

    def _drawn(self) -> dict[int, str]:
        made = {} if self._keys is None else self._keys.made
        return {j: str(g.bit_generator.state) for j, g in made.items()}

    def drew(self, name: str) -> str:
        """``name``, if something was drawn since; else nothing."""
        moved = self._marks is not None and not self._marks.unmoved()
        return name if moved or self._drawn() != self._before else ""


@contextmanager
def _making(place: int, batch: int) -> Iterator[None]:
    """The block makes the sample at this place of the batch, and draws under its key."""
    keys = current_keys()
    if keys is None or keys.n != batch or keys.at is not None:
        yield  # the keys are those of other samples, or of this one already
        return
    keys.at = place
    try:
        yield
    finally:
        keys.at = None


class CachedSource(_Cache):
    """A source whose results, after some steps, are cached; see :func:`cached`.

    Attributes:
        source: what is read where the cache has nothing.
        steps: done to it before it is kept.
    """

    def __init__(self, source: Source, steps: tuple[Step, ...], *options: Any) -> None:
        self.source = source
        self.steps = steps
        super().__init__(source, steps, *options)
        self._refuse_draws("cached(…)")

    @property
    def fingerprint(self) -> str:
        """The source's own: a run may resume with or without a cache."""
        return self.source.fingerprint

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

    def _make(self, ids: list[int], at: list[int], batch: int) -> list[tuple[Any, str]]:
        watch = _Watch()
        samples = list(self.source.read(ids))
        drew = [watch.drew("the source")] * len(ids)
        for step in self.steps:
            call = stage(step.name)(step.call)
            for j, sample in enumerate(samples):
                watch = _Watch()
                try:
                    with _making(at[j], batch):
                        samples[j] = call(sample)
                except (ArgumentError, SampleError):
                    raise
                except Exception as error:
                    called = getattr(sample, "name", None)
                    which = called if isinstance(called, str) else f"sample {ids[j]}"
                    raise SampleError(
                        f"{which}, stage {step.name}: {type(error).__name__}: {error}"
                    ) from error
                drew[j] = drew[j] or watch.drew(f"the step {step.name!r}")
        return list(zip(samples, drew, strict=True))


class CachedDataset(_Cache):
    """A cached map-style Dataset, with the dataset's own other attributes."""

    def __init__(self, dataset: Any, *options: Any) -> None:
        self.dataset = dataset
        super().__init__(dataset, (), *options)
        self._refuse_draws("cached_dataset(…)")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitem__(self, i: int) -> Any:
        return self._through([i + self._n if i < 0 else i])[0]

    def __getitems__(self, ids: Sequence[int]) -> list[Any]:
        return self._through(ids)

    def _make(self, ids: list[int], at: list[int], batch: int) -> list[tuple[Any, str]]:
        many: Callable[[list[int]], Any] | None = getattr(self.dataset, "__getitems__", None)
        if many is not None:
            watch = _Watch()
            samples = list(many(ids))
            drew = watch.drew("the data set")
            return [(sample, drew) for sample in samples]
        made = []
        for place, i in zip(at, ids, strict=True):
            watch = _Watch()
            with _making(place, batch):
                sample = self.dataset[i]
            made.append((sample, watch.drew("the data set")))
        return made


def cached(
    data: Any,
    after: str = "read",
    where: str | os.PathLike[str] = "memory",
    limit: int | float | str | None = None,
    *,
    version: str = "",
) -> Any:
    """Cache what a source or pipeline made.

    All workers of a launch and their loading processes on a node share a cache in memory. A cache
    on disk is kept between runs: it is another one where the source's files (names, sizes, times of
    change; of remote files addresses and sizes) or ``version`` are others. Numbers, strings, bytes,
    NumPy arrays, CPU tensors, and tuples, dicts and lists of those are cached.
    Other samples are made each time, counted, and reported once.

    Args:
        data: a source, or a :class:`Pipeline`.
        after: ``"read"`` keeps what the source read; ``"decode"`` also what the steps up to the
            last one named ``decode`` made of it; any other step's name likewise. It must stand
            before whatever draws random numbers.
        where: ``"memory"``: in /dev/shm (or the tmpfs that the variable ``RONDE_SHM`` names), gone
            with the last process that uses it. Or a folder on a local disk, kept between runs.
        limit: the most that it may take, in bytes or as ``"2GiB"``. None: half of the memory (what
            the container allows) or disk that is free.
        version: names the samples and the code that makes them. Needed on disk for a source without
            files, and where steps are cached: change it whenever one of them changes.

    Returns:
        A source, or a pipeline. ``report()`` of the source (of the pipeline's ``source``) tells
        what the cache is worth.

    Raises:
        ArgumentError: a step before draws random numbers; it is named. A cache on disk without the
            ``version`` that it needs. Or an argument that cannot be used.

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
    options = where, limit, version
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
        source = CachedSource(data.source, data.steps[:count], *options)
        return replace(data, source=source, steps=data.steps[count:])
    if after != "read":
        raise ArgumentError(f"after={after!r} is for a pipeline: a source only reads.")
    if not hasattr(data, "read") or not hasattr(data, "__len__"):
        raise ArgumentError(
            f"cached({type(data).__name__}): expected a source (__len__ and read(ids)) or "
            "a Pipeline. For a plain Dataset: cached_dataset."
        )
    return CachedSource(data, (), *options)


def cached_dataset(
    dataset: Any,
    where: str | os.PathLike[str] = "memory",
    limit: int | float | str | None = None,
    *,
    version: str = "",
) -> CachedDataset:
    """Cache whole samples of a map-style Dataset that draws no random numbers.

    Args:
        dataset: anything with ``__len__`` and ``__getitem__``; its ``__getitems__`` is used where
            it has one.
        where, limit, version: as for :func:`cached`. On disk a Dataset needs a
            ``version``.

    Raises:
        ArgumentError: samples draw random numbers, a cache on disk has no ``version``, or an
            argument that cannot be used.

    Example:
        >>> kept = cached_dataset([10, 20, 30], limit="1MiB")
        >>> kept[1], kept.__getitems__([2, 1]), kept.report().hits
        (20, [30, 20], 1)
        >>> kept.close()
    """
    check_map_style(dataset, "cached_dataset")
    if len(dataset) == 0:
        raise ArgumentError(f"cached_dataset: the data set ({type(dataset).__name__}) is empty.")
    return CachedDataset(dataset, where, limit, version)


pipeline.make_cached = cached
