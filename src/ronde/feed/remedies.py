"""Remedies for slow input that need no line of the script changed: another decoder, a cache, a pack, rows by the batch.

They fit :class:`ronde.feed.Pipeline` and, as far as it can be done without changing what comes out, any plain Dataset. Each is tried on some
of the data set's own samples first, and refused in words where it does not fit.
"""

from __future__ import annotations

import dataclasses
import io
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

from ronde.feed import found
from ronde.feed.decode import AUTO, DECODERS, available, check
from ronde.feed.loader import LoaderSettings
from ronde.feed.pipeline import Pipeline
from ronde.feed.randomness import seed_all
from ronde.feed.replay import same, weight
from ronde.feed.settings import FeedSettings
from ronde.feed.swap import FileCache, Plan, Remedied, Seen, folder_of, loops, traced
from ronde.world import ArgumentError

__all__ = ["DatasetFacts", "Judged", "apply", "batched_access", "facts", "judge"]

_LOOKED_AT = 8  # samples
_MOST_PIXELS = 8_000_000
_TRIED = 1024  # rows at most, and their bytes, before they are had by the batch
_TRIED_BYTES = 64 << 20
_BATCH = 64


# -- what a data set does ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judged:
    """A decoder against Pillow, on some images.

    Attributes:
        images: that both decoded; ``refused``: that it left to Pillow.
        same_bits: all of them came out bit for bit equal.
        difference: mean absolute difference of pixels, of 255.
        milliseconds: of CPU time for one image, to the image that the data set gets; ``pillow_milliseconds`` for Pillow itself.
    """

    images: int
    refused: int
    same_bits: bool
    difference: float
    milliseconds: float
    pillow_milliseconds: float

    @property
    def label(self) -> str:
        """What changing to it means for the training."""
        return "same bits" if self.same_bits else "same distribution"


@dataclass(frozen=True)
class DatasetFacts:
    """What a data set does to make a sample, as far as some of its samples show: which remedies are possible.

    Attributes:
        pipeline: it is a :class:`ronde.feed.Pipeline`.
        jpeg: it decodes JPEG images with Pillow.
        decoders: other decoders that can be used here, against Pillow on its own images.
        shrink: 2, 4 or 8 where its images could be decoded at that fraction of their size, else 1.
        resizes: it makes JPEG images smaller with Pillow, which ``decode_to_size`` has torch do.
        files: read for one sample.
        folder: that they all lie in, or "".
        file_bytes: read for one sample, in files.
        decoded_bytes: of the images of one sample.
        sample_bytes: of one finished sample.
        draws: it draws random numbers, so finished samples cannot be kept.
        batched: rows could be had by the batch, bit for bit equal.
        error: why nothing could be found out, or "".
    """

    pipeline: bool = False
    jpeg: bool = False
    decoders: dict[str, Judged] = field(default_factory=dict)
    shrink: int = 1
    resizes: bool = False
    files: float = 0.0
    folder: str = ""
    file_bytes: float = 0.0
    decoded_bytes: float = 0.0
    sample_bytes: float = 0.0
    draws: bool = False
    batched: bool = False
    error: str = ""


def _spread(n: int, count: int) -> list[int]:
    return sorted({int(i) for i in np.linspace(0, n - 1, min(n, count))})


def _look(dataset: Any, count: int, plan: Plan | None = None) -> tuple[Seen, list[Any]]:
    """Make some samples under fixed random numbers; the generators are put back."""
    with found.unchanged(dataset):
        return _made(dataset, count, plan)


def _made(dataset: Any, count: int, plan: Plan | None = None) -> tuple[Seen, list[Any]]:
    seed_all(1)
    return traced(dataset, _spread(len(dataset), count), plan)


def judge(decoder: str, images: Sequence[bytes]) -> Judged:
    """Decode JPEG images with a decoder and with Pillow, and compare.

    Args:
        decoder: one of :data:`ronde.feed.decode.DECODERS`.
        images: bytes of JPEG files.

    Raises:
        ArgumentError: the decoder is not known or cannot be used here.
    """
    check(decoder)
    plain = _Decoding(images)
    swapped = Remedied(plain, Plan(decoder=decoder))
    refused, total, pixels, equal, count = 0, 0.0, 0, True, 0
    spent: list[tuple[int, int]] = []
    for i, data in enumerate(images):
        try:
            one, other = DECODERS[decoder].call(data, 1), DECODERS["pillow"].call(data, 1)
        except Exception:
            refused += 1
            continue
        count += 1
        equal = equal and one.shape == other.shape and bool(np.array_equal(one, other))
        if one.shape == other.shape:
            total += float(np.abs(one.astype(np.int16) - other).sum())
            pixels += one.size
        spent.append((_cpu(swapped, i), _cpu(plain, i)))
    each = 1e6 * max(1, len(spent))
    return Judged(
        count, refused, equal and count > 0, total / max(1, pixels), sum(s for s, _ in spent) / each, sum(p for _, p in spent) / each
    )


class _Decoding(Dataset[Any]):
    """Images as data sets decode them."""

    def __init__(self, images: Sequence[bytes]) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: Any) -> Any:
        from PIL import Image

        return Image.open(io.BytesIO(self.images[i])).convert("RGB")


def _cpu(dataset: Any, i: int) -> int:
    """The best of some times, in nanoseconds: others are at work on this machine too."""
    found = []
    for _ in range(3):
        begin = time.thread_time_ns()
        dataset[i]
        found.append(time.thread_time_ns() - begin)
    return min(found)


def _some(seen: Seen) -> list[bytes]:
    """Images to judge a decoder by: not so many large ones that it takes seconds."""
    found: list[bytes] = []
    pixels = 0
    for data, (_, width, height, _) in zip(seen.jpegs, [i for i in seen.images if i[0] == "JPEG"], strict=False):
        if found and pixels + width * height > _MOST_PIXELS:
            break
        found.append(data)
        pixels += width * height
    return found


def facts(dataset: Any, samples: int = 16) -> DatasetFacts:
    """What some samples of a data set show about it. Reads them, and changes nothing: random numbers are put back.

    Args:
        dataset: a map-style Dataset or a Pipeline.
        samples: how many to look at.

    Example:
        >>> facts([1.0, 2.0, 3.0]).files
        0.0
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__") or not len(dataset):
        return DatasetFacts(error="it can only be iterated, or is empty")
    try:
        with found.unchanged(dataset):  # once around both: generators of its own go on, so that what they draw shows
            seen, made = _made(dataset, samples)
            seed_all(2)
            again = traced(dataset, _spread(len(dataset), samples)[:2])[1]
    except Exception as error:  # a bad sample: reading says so when its turn comes
        return DatasetFacts(error=f"{type(error).__name__}: {error}")
    n = max(1, seen.samples)
    jpegs = _some(seen)
    others = [name for name in available() if name in AUTO and name != "pillow"]
    fit = None if isinstance(dataset, Pipeline) else _fit(seen)
    shrink = 1
    if fit is not None:
        room = [min(w * fit[2] / fit[0], h * fit[2] / fit[1]) for kind, w, h, _ in seen.images if kind == "JPEG"]
        shrink = next((f for f in (8, 4, 2) if room and float(np.median(room)) >= f), 1)
    return DatasetFacts(
        pipeline=isinstance(dataset, Pipeline),
        jpeg=bool(jpegs),
        decoders={name: judge(name, jpegs) for name in others} if jpegs else {},
        shrink=shrink,
        resizes=bool(jpegs and seen.resized) and not isinstance(dataset, Pipeline),
        files=len(seen.files) / n,
        folder=folder_of([path for path, _ in seen.files]),
        file_bytes=sum(size for _, size in seen.files) / n,
        decoded_bytes=sum(w * h * 3 for _, w, h, _ in seen.images) / n,
        sample_bytes=sum(map(weight, made)) / n,
        draws=not all(same(a, b) for a, b in zip(made, again, strict=False)),
        batched=_rows(dataset) is not None,
    )


# -- carrying them out ----------------------------------------------------------------------------------------------------


def apply(dataset: Any, loader: LoaderSettings, settings: FeedSettings) -> tuple[Any, LoaderSettings]:
    """A data set, read as feed settings say: ``decoder``, ``decode_to_size``, ``cache``, ``pack``, ``batched`` and ``device_augment``.

    The other settings (``executor``, ``workers``, ``prefetch``, ``threads``, ``pin_memory``, ``echo``) are about loading, not about the data set,
    and are left to :func:`ronde.feed.apply.apply_settings`. The order of samples stays as it is. So do their bits, but for
    ``decode_to_size`` and ``device_augment``, and for a decoder that makes other pixels; see :func:`judge`.

    Args:
        dataset: a map-style Dataset or a Pipeline.
        loader: how it is loaded.

    Returns:
        The data set and the loader settings to use instead.

    Raises:
        ArgumentError: a remedy does not fit this data set; the text says why.

    Example:
        >>> rows = [torch.tensor([i, i]) for i in range(4)]
        >>> dataset, loader = apply(rows, LoaderSettings(), FeedSettings(cache="decode"))
        >>> dataset[2].tolist()
        [2, 2]
        >>> dataset.close()
    """
    if isinstance(dataset, IterableDataset):
        raise ArgumentError("these feed settings are for data sets that are read by index; this one can only be iterated.")
    if settings.cache is None and (settings.cache_in is not None or settings.cache_bytes is not None):
        raise ArgumentError("feed settings cache_in and cache_bytes go with cache: read or decode.")
    if isinstance(dataset, Pipeline):
        return _apply_to_pipeline(dataset, settings), loader
    if settings.device_augment:
        raise ArgumentError(
            f"feed setting device_augment is for a ronde.feed pipeline, whose steps are known; {type(dataset).__name__} is a Dataset of its own."
        )
    if settings.batched and type(dataset) is not TensorDataset:  # whose rows are read by the batch in any case
        dataset, loader = batched_access(dataset, loader)
    if any(v is not None and v is not False for v in (settings.decoder, settings.decode_to_size, settings.cache, settings.pack)):
        dataset = _swapped(dataset, settings)
    return dataset, loader


def _apply_to_pipeline(pipeline: Pipeline, settings: FeedSettings) -> Pipeline:
    from ronde.feed.images import retuned

    if settings.batched:
        raise ArgumentError("feed setting batched: a pipeline reads by the batch in any case; leave it out.")
    if settings.pack is not None:
        pipeline = dataclasses.replace(pipeline, source=_PackedSource(pipeline.source, settings.pack))
    if settings.decoder is not None or settings.decode_to_size is not None or settings.device_augment is not None:
        pipeline = retuned(pipeline, decoder=settings.decoder, decode_to_size=settings.decode_to_size, on_device=settings.device_augment)
    if settings.cache is not None:
        pipeline = pipeline.cache(settings.cache, settings.cache_in or "memory", settings.cache_bytes)
    return pipeline


def _swapped(dataset: Any, settings: FeedSettings) -> Any:
    """A plain data set whose files and images come another way."""
    seen, _ = _look(dataset, _LOOKED_AT)
    what, plan = type(dataset).__name__, Plan()
    looked = f"(looked at {seen.samples} samples of {what})"
    if settings.decoder not in (None, "pillow"):
        decoder = check(str(settings.decoder))
        if not seen.jpegs:
            raise ArgumentError(
                f"feed setting decoder: no JPEG image is decoded with Pillow {looked}, so there is nothing to decode otherwise."
            )
        if decoder != "pillow":
            judged = judge(decoder, _some(seen))
            if not judged.images:
                raise ArgumentError(f"feed setting decoder: {decoder} can decode none of these images {looked}.")
            plan.decoder = decoder
    if settings.decode_to_size:
        if not seen.jpegs or not seen.resized:
            raise ArgumentError(
                f"feed setting decode_to_size: no JPEG image is made smaller by Pillow {looked}, so there is nothing to gain."
            )
        plan.decoder, plan.fit, plan.resizes = plan.decoder or check("auto"), _fit(seen), True
        _check_fit(dataset, plan, what)
    if settings.pack is not None:
        plan.pack = _Pack(settings.pack, seen, looked)
    if settings.cache is None:
        return Remedied(dataset, plan)
    where, limit = settings.cache_in or "memory", settings.cache_bytes
    if settings.cache == "decode" and not seen.jpegs:
        from ronde.feed.cache import cached_dataset

        inner = dataset if plan == Plan() else Remedied(dataset, plan)
        try:
            with found.unchanged(dataset):
                return cached_dataset(inner, where, limit)
        except ArgumentError as error:
            raise ArgumentError(
                f"feed setting cache: no JPEG image is decoded with Pillow {looked}, and whole samples cannot be kept: {error}"
            ) from None
    if settings.cache == "read" and not seen.files:
        raise ArgumentError(f"feed setting cache: no file is opened while a sample is made {looked}, so there is nothing to keep.")
    if seen.own_many:
        raise ArgumentError(
            f"feed setting cache: {what} has a __getitems__ of its own, so it is not known which file belongs to which sample."
        )
    from ronde.feed.describe import digest

    names = sorted(path for path, _ in seen.files)
    key = digest(
        "files of a data set",
        1,
        settings.cache,
        type(dataset).__module__,
        type(dataset).__qualname__,
        len(dataset),
        names,
        plan.decoder,
        str(plan.fit),
    )
    about = {"dataset": type(dataset).__qualname__, "samples": len(dataset), "kept": settings.cache, "folder": folder_of(names)}
    cache = FileCache(len(dataset), where, limit, key, about)
    if settings.cache == "read":
        plan.reads = cache
    else:
        plan.pixels = cache
    return Remedied(dataset, plan)


# -- decoding at a fraction of the size ------------------------------------------------------------------------------------------


def _fit(seen: Seen) -> tuple[int, int, float] | None:
    """What is made of the images: width and height at most, and the smallest share of an image that it is made of; None: not smaller."""
    shares, across, down = [], 0, 0
    for before, after, whole in seen.resized:
        if min(before) <= 0 or min(whole) <= 0:
            return None
        shares.append(min(before[0] / whole[0], before[1] / whole[1], 1.0))
        across, down = max(across, after[0]), max(down, after[1])
    if not shares or not seen.jpegs:
        return None
    room = [min(w / across, h / down) * min(shares) for kind, w, h, _ in seen.images if kind == "JPEG"]
    return (across, down, min(shares)) if max(room) >= 2 else None


def _check_fit(dataset: Any, plan: Plan, what: str) -> None:
    """Samples must come out nearly as they do from whole images: otherwise something counts in pixels of the file."""
    whole, small = _look(dataset, _LOOKED_AT)[1], _look(dataset, _LOOKED_AT, plan)[1]
    for a, b in zip(whole, small, strict=True):
        apart = _apart(a, b)
        if apart is None or apart > 0.25:
            raise ArgumentError(
                f"feed setting decode_to_size: samples of {what} come out differently from images of another size: something in it counts in pixels "
                "of the file (a crop of a fixed size, coordinates), so it cannot be used."
            )


def _apart(a: Any, b: Any) -> float | None:
    """How far two samples are apart, in standard deviations of the first; None: they are not of the same form."""
    if type(a) is not type(b):
        return None
    if isinstance(a, dict):
        a, b = list(a.values()), list(b.values())
    if isinstance(a, list | tuple):
        parts = [_apart(x, y) for x, y in zip(a, b, strict=False)] if len(a) == len(b) else [None]
        return None if None in parts else max((p for p in parts if p is not None), default=0.0)
    if isinstance(a, torch.Tensor):
        a, b = a.numpy(), b.numpy()
    elif hasattr(a, "getbands"):
        a, b = np.asarray(a), np.asarray(b)
    if isinstance(a, np.ndarray):
        if a.shape != b.shape or a.dtype != b.dtype:
            return None
        if a.size < 2:
            return 0.0 if np.array_equal(a, b) else None
        x, y = a.astype(np.float64), b.astype(np.float64)
        return float(np.abs(x - y).mean() / max(float(x.std()), 1e-6 * float(np.abs(x).max()), 1e-12))
    return 0.0 if same(a, b) else None


# -- a pack instead of files -------------------------------------------------------------------------------------------------------


def _opened_pack(path: str) -> Any:
    from ronde.feed.sources.tar import is_pack, tar

    kind = is_pack(path)
    if kind is None:
        raise ArgumentError(f"feed setting pack: {path} is not what ronde pack wrote.")
    if kind != "tar":
        raise ArgumentError(f"feed setting pack: {path} is in Parquet; a data set of files needs one of kind tar.")
    return tar(path)


class _Pack:
    """The bytes of files that lie in a pack, by their paths. It is pickled as the pack's own path."""

    def __init__(self, path: str, seen: Seen, looked: str) -> None:
        self.path = os.path.abspath(path)  # noqa: PTH100
        self._open()
        files = sorted({name for name, _ in seen.files})
        if not files:
            raise ArgumentError(f"feed setting pack: no file is opened while a sample is made {looked}.")
        self.root = self._root_of(files)
        if self.root is None:
            raise ArgumentError(f"feed setting pack: {files[0]} and its neighbours are not in {path}: it is a pack of another folder.")
        for name in files:
            packed = self(name)
            if packed is not None and packed != Path(name).read_bytes():
                raise ArgumentError(f"feed setting pack: {name} has changed since {path} was made of it. Pack the folder again.")

    def _open(self) -> None:
        self._source = _opened_pack(self.path)
        self._index = {name: i for i, name in enumerate(self._source.keys)}

    def _root_of(self, files: list[str]) -> str | None:
        """The folder that was packed: the nearest one below which the first file has a name of the pack."""
        for name in files:
            for parent in Path(name).parents:
                if Path(name).relative_to(parent).as_posix() in self._index:
                    return f"{parent.as_posix().rstrip('/')}/"
        return None

    def __call__(self, path: str) -> bytes | None:
        if self.root is None or not path.startswith(self.root):
            return None
        i = self._index.get(path[len(self.root) :].replace(os.sep, "/"))
        return None if i is None else bytes(self._source.read([i])[0].data)

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "root": self.root}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()


class _PackedSource:
    """A pack in the place of the folder that it was made of: the folder's order and fingerprint, the pack's bytes."""

    def __init__(self, source: Any, path: str) -> None:
        self._packed = _opened_pack(path)
        self.fingerprint: str = source.fingerprint
        if self._packed.fingerprint != self.fingerprint:
            raise ArgumentError(f"feed setting pack: {path} is not a pack of {source!r}, as it is now.")
        self.source = source

    def __len__(self) -> int:
        return len(self._packed)

    def read(self, ids: Sequence[int]) -> list[Any]:
        return list(self._packed.read(ids))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "source":
            raise AttributeError(name)
        return getattr(self.source, name)


# -- rows by the batch ---------------------------------------------------------------------------------------------------------------


class _Rows(Sequence[Any]):
    """A batch that is collated already; its samples, for whoever wants them one by one."""

    def __init__(self, batch: Any, dataset: Any, ids: Sequence[int]) -> None:
        self.batch = batch
        self._dataset = dataset
        self._ids = ids

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, i: Any) -> Any:
        return [self._dataset[j] for j in self._ids[i]] if isinstance(i, slice) else self._dataset[self._ids[i]]


def _torch_index(ids: Sequence[int]) -> Any:
    return torch.as_tensor(ids, dtype=torch.int64)


def _numpy_index(ids: Sequence[int]) -> Any:
    return np.asarray(ids, dtype=np.int64)


class _ByTheBatch(Dataset[Any]):
    """A data set whose rows are had with one index of many."""

    def __init__(self, dataset: Any, index: Callable[[Sequence[int]], Any]) -> None:
        self.dataset = dataset
        self.index = index

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: Any) -> Any:
        return self.dataset[i]

    def __getitems__(self, ids: Sequence[int]) -> Any:
        if len(ids) == 1:
            return [self.dataset[ids[0]]]
        return _Rows(_as_collated(self.dataset[self.index(ids)]), self.dataset, ids)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("dataset", "index"):
            raise AttributeError(name)
        return getattr(self.dataset, name)


class _CollateRows:
    """``default_collate``, of samples that may be collated already."""

    def __call__(self, samples: Any) -> Any:
        return samples.batch if type(samples) is _Rows else default_collate(list(samples))


def _as_collated(value: Any) -> Any:
    """Rows as ``default_collate`` gives them: tensors, and lists in the place of tuples."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if type(value) is tuple or type(value) is list:
        return [_as_collated(v) for v in value]
    if type(value) is dict:
        return {k: _as_collated(v) for k, v in value.items()}
    if isinstance(value, torch.Tensor):
        return value
    raise TypeError(type(value).__name__)


def _rows(dataset: Any) -> Callable[[Sequence[int]], Any] | None:
    """How to index a data set for many rows at once, with the very result of collating them one by one; None: it cannot be done."""
    if isinstance(dataset, Pipeline) or (hasattr(dataset, "__getitems__") and not loops(dataset)):
        return None
    if found.branch(dataset):
        return None
    with found.unchanged(dataset):
        for index in (_torch_index, _numpy_index):
            with suppress(Exception):  # it cannot be indexed so: that is the answer
                if all(_fits(dataset, index, ids, turn) for turn, ids in enumerate(_trials(dataset))):
                    return index
    return None


def _trials(dataset: Any) -> Iterator[list[int]]:
    """Rows to compare: a few odd batches, then many rows in batches of the size that training has."""
    n = len(dataset)
    yield from (_spread(n, 5), [n - 1, 0, n // 2, 0], [n // 3], list(range(min(n, 3)))[::-1], list(range(min(n, _BATCH))))
    many = _spread(n, max(_BATCH, min(_TRIED, _TRIED_BYTES // max(1, weight(dataset[0])))))
    mixed = [many[k] for k in np.random.default_rng(0).permutation(len(many))]
    for start in range(0, len(mixed), _BATCH):
        yield mixed[start : start + _BATCH]


def _fits(dataset: Any, index: Callable[[Sequence[int]], Any], ids: list[int], turn: int) -> bool:
    seed_all(turn)
    one_by_one = default_collate([dataset[i] for i in ids])
    seed_all(turn + 100)  # a row that draws random numbers comes out differently
    return same(one_by_one, _as_collated(dataset[index(ids)]))


def batched_access(dataset: Any, loader: LoaderSettings) -> tuple[Any, LoaderSettings]:
    """A data set of rows, asked for a whole batch at once. Only where batches come out bit for bit as they did.

    Raises:
        ArgumentError: they do not, or its batches are collated by a function of its own.

    Example:
        >>> class Rows:
        ...     x = torch.arange(10.0)
        ...     def __len__(self):
        ...         return 10
        ...     def __getitem__(self, i):
        ...         return self.x[i], self.x[i] * 2
        >>> dataset, loader = batched_access(Rows(), LoaderSettings())
        >>> loader.collate(dataset.__getitems__([3, 1]))
        [tensor([3., 1.]), tensor([6., 2.])]
    """
    what = type(dataset).__name__
    if loader.collate is not default_collate:
        raise ArgumentError(f"feed setting batched: batches of {what} are made by a collate function of its own.")
    if len(dataset) == 0:
        raise ArgumentError(f"feed setting batched: {what} is empty.")
    where = found.branch(dataset)
    if where:
        raise ArgumentError(
            f"feed setting batched: {what} decides something for each sample ({where}), which might come out otherwise for many at once."
        )
    index = _rows(dataset)
    if index is None:
        raise ArgumentError(
            f"feed setting batched: {what} indexed with many indices at once does not give the batch that its samples one by one make."
        )
    return _ByTheBatch(dataset, index), dataclasses.replace(loader, collate=_CollateRows())
