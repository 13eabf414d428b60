"""Free data that looks like real data, for ceilings and smoke tests.

It repeats real samples instead of random numbers: step time can depend on values (lengths, masks,
sparse rows, denormals), and random labels or boxes can be invalid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    default_collate,
    default_convert,
)

from ronde.data import Pipeline, key_of, sample_key
from ronde.introspect import preserve_state, seed_all
from ronde.profile import size_of
from ronde.world import ArgumentError, SampleError
from ronde.world.tensors import is_named_tuple, leaves, map_leaves, parts, rebuild

_FEWEST = 8
_MOST_BYTES = 256 << 20
_BAD_IN_A_ROW = 64


class _Recycled:
    """A source of a few samples repeated to ``n``; rounds start at different samples."""

    def __init__(self, held: list[Any], n: int, seed: int) -> None:
        self.held = held
        self.n = n
        self.seed = seed

    def __len__(self) -> int:
        return self.n

    @property
    def fingerprint(self) -> str:
        return f"synthetic-{len(self.held)}-{self.n}-{self.seed}"

    def read(self, ids: Sequence[int]) -> list[Any]:
        return [self.held[self._which(int(i))] for i in ids]

    def _which(self, i: int) -> int:
        if not 0 <= i < self.n:
            raise IndexError(f"sample {i} is not in [0, {self.n})")
        turn, place = divmod(i, len(self.held))
        return (place + key_of(self.seed, turn)) % len(self.held) if turn else place


@dataclass(frozen=True)
class Synthetic(Pipeline):
    """What :func:`synthetic` returns: a map-style Dataset with ready batches.

    Attributes:
        batch_size: samples in a ready batch.
        batch_count: how many ready batches there are.
    """

    batch_size: int = 32
    batch_count: int = _FEWEST
    _made: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def held(self) -> list[Any]:
        """The repeated samples. They are not copied: in-place changes persist."""
        found: list[Any] = self.source.held  # type: ignore[attr-defined]
        return found

    @cached_property
    def batches(self) -> list[Any]:
        """Ready batches, collated on first use."""
        n, size = len(self), self.batch_size
        return [
            self.collate(list(self.__getitems__([j % n for j in range(k * size, (k + 1) * size)])))
            for k in range(self.batch_count)
        ]

    def cycle(self) -> Iterator[Any]:
        """The ready batches, forever."""
        while True:
            yield from self.batches


# -- samples ---------------------------------------------------------------------------


def _sample_dataset(like: Any, n: int, wanted: int, seed: int) -> list[Any]:
    """Samples spread over a dataset, drawn as a run would; all randomness is restored."""
    with preserve_state(like):
        return _draw(like, n, wanted, seed)


def _draw(like: Any, n: int, wanted: int, seed: int) -> list[Any]:
    read = like.read if not hasattr(like, "__getitem__") else None
    held: list[Any] = []
    size = bad = 0
    error: SampleError | None = None
    if isinstance(like, IterableDataset):
        seed_all(key_of(seed, 6))
        return list(islice(iter(like), wanted))
    for j in range(wanted):
        i = j * n // wanted
        seed_all(key_of(seed, 6, i))
        try:
            with sample_key(key_of(seed, 7, i)):
                held.append(like[i] if read is None else read([i])[0])
            bad = 0
        except SampleError as caught:
            error, bad = caught, bad + 1
            if bad >= _BAD_IN_A_ROW:
                break
            continue
        size += size_of(held[-1])
        if size > _MOST_BYTES and len(held) >= _FEWEST:
            break
    if not held and error is not None:
        raise error
    return held


def _count(batch: Any) -> int:
    """Samples in a collated batch: the common first dimension of its tensors."""
    sizes = {
        int(leaf.shape[0]) if leaf.ndim else -1
        for leaf in leaves(batch)
        if isinstance(leaf, torch.Tensor | np.ndarray)
    }
    if len(sizes) != 1 or min(sizes) < 1:
        raise ArgumentError(
            "synthetic(like=batch): the tensors of the batch do not all have one first "
            "dimension, samples, so it cannot be taken apart "
            f"(found {sorted(sizes) or 'no tensor'}). Give the data set or the loader instead."
        )
    return sizes.pop()


def _is_texts(value: Any) -> bool:
    return (
        isinstance(value, list | tuple)
        and not is_named_tuple(value)
        and not any(_has_numbers(v) for v in value)
    )


def _part(value: Any, i: int, n: int) -> Any:
    """Sample ``i`` of a batch of ``n``, in the batch's structure."""

    def part(v: Any) -> Any:
        if _is_texts(v):
            return v[i] if len(v) == n else v  # a list of them for the whole batch
        return (
            v[i].clone()
            if isinstance(v, torch.Tensor)
            else np.array(v[i])
            if isinstance(v, np.ndarray)
            else v
        )

    return map_leaves(part, value, leaf=_is_texts)


def _has_numbers(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor | np.ndarray) for leaf in leaves(value))


@dataclass(frozen=True)
class _Restack:
    """Recombines samples from :func:`_part` into a batch of their structure."""

    like: Any
    n: int

    def __call__(self, samples: list[Any]) -> Any:
        return self._stack(self.like, samples)

    def _stack(self, like: Any, samples: list[Any]) -> Any:
        if _is_texts(like):
            return type(like)(samples) if len(like) == self.n else like
        if isinstance(like, torch.Tensor):
            return torch.stack(samples)
        if isinstance(like, np.ndarray):
            return np.stack(samples)
        if (held := parts(like)) is None:
            return like
        each = [parts(s) or {} for s in samples]
        return rebuild(like, {k: self._stack(v, [e[k] for e in each]) for k, v in held.items()})


# -- random values in their place ------------------------------------------------------


class _Range:
    """Values observed at one place of the samples."""

    def __init__(self) -> None:
        self.low = float("inf")
        self.high = -float("inf")
        self.ints: tuple[int, int] | None = None
        self.sum = self.squares = 0.0
        self.count = 0

    def see(self, value: np.ndarray[Any, Any]) -> None:
        if not value.size or value.dtype.kind not in "biuf":
            return
        if value.dtype.kind in "iu":
            low, high = int(value.min()), int(value.max())
            self.ints = (
                (low, high)
                if self.ints is None
                else (min(low, self.ints[0]), max(high, self.ints[1]))
            )
            return
        finite = (
            value[np.isfinite(value)].astype(np.float64)
            if value.dtype.kind == "f"
            else value.astype(np.float64)
        )
        if finite.size:
            self.low, self.high = (
                min(self.low, float(finite.min())),
                max(self.high, float(finite.max())),
            )
            self.sum, self.squares, self.count = (
                self.sum + float(finite.sum()),
                self.squares + float((finite**2).sum()),
                self.count + finite.size,
            )

    def draw(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], rng: np.random.Generator
    ) -> np.ndarray[Any, Any]:
        if dtype.kind in "iu":
            low, high = self.ints or (0, 0)
            return np.asarray(rng.integers(low, high, shape, dtype=dtype, endpoint=True), dtype)
        mean = self.sum / self.count if self.count else 0.0
        if dtype.kind == "b":
            return np.asarray(rng.random(shape) < mean)
        spread = max(self.squares / self.count - mean**2, 0.0) ** 0.5 if self.count else 0.0
        drawn = rng.normal(mean, spread, shape)
        return np.asarray(np.clip(drawn, self.low, self.high) if self.count else drawn).astype(
            dtype
        )


def _as_array(leaf: Any) -> np.ndarray[Any, Any] | None:
    """Numbers with a known range as an array, else None."""
    if isinstance(leaf, torch.Tensor):
        if leaf.layout is not torch.strided or leaf.is_complex() or leaf.is_quantized:
            return None
        plain = leaf.detach().cpu()
        return (
            plain.float().numpy()
            if plain.dtype == torch.bfloat16 or (plain.itemsize == 1 and plain.is_floating_point())
            else plain.numpy()
        )
    if (
        isinstance(leaf, np.ndarray | np.generic | bool | int | float)
        and np.asarray(leaf).dtype.kind in "biuf"
    ):
        return np.asarray(leaf)
    return None


def _random(held: list[Any], wanted: int, seed: int) -> list[Any]:
    """Samples with the same structure, shapes and lengths, and random numbers within the ranges."""
    ranges: dict[int, _Range] = {}
    for sample in held:
        for place, leaf in enumerate(leaves(sample)):
            value = _as_array(leaf)
            if value is not None:
                ranges.setdefault(place, _Range()).see(value)
    made = []
    for k in range(wanted):
        rng = np.random.Generator(np.random.Philox(key=key_of(seed, 8, k)))
        places = iter(range(1 << 62))

        def draw(leaf: Any, rng: np.random.Generator = rng, places: Iterator[int] = places) -> Any:
            place, value = next(places), _as_array(leaf)
            if value is None or place not in ranges:
                return leaf
            drawn = ranges[place].draw(value.shape, value.dtype, rng)
            if isinstance(leaf, torch.Tensor):
                return (
                    torch.from_numpy(np.ascontiguousarray(drawn)).reshape(leaf.shape).to(leaf.dtype)
                )
            return drawn if isinstance(leaf, np.ndarray) else type(leaf)(drawn.item())

        made.append(map_leaves(draw, held[k % len(held)]))
    return made


# -- the function ----------------------------------------------------------------------


def _is_whole(value: Any, name: str, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ArgumentError(
            f"synthetic({name}={value!r}): expected a whole number, {least} or more."
        )


def synthetic(
    like: Any,
    n: int | None = None,
    batches: int = 8,
    *,
    batch_size: int | None = None,
    seed: int = 0,
    values: Literal["recycled", "random"] = "recycled",
) -> Synthetic:
    """Data like other data that costs nothing to read.

    Structure, shapes, types, lengths and value ranges are real, because it repeats real samples: at
    least 8, as many as the ready batches need, at most 256 MiB. It is a function of the data and
    ``seed``.

    Args:
        like: a map-style Dataset, a :class:`Pipeline`, a source, a DataLoader, or one collated
            batch. An IterableDataset gives its first samples.
        n: its length. None: that of ``like``.
        batches: how many ready batches ``.batches`` has.
        batch_size: samples in each of them. None: the loader's, the batch's, or 32.
        seed: which random numbers augment, and which order.
        values: ``"random"`` puts random numbers in the place of the real ones, for data that must
            not be handed on: whole numbers within the range that was seen, so that labels and
                tokens stay valid, others of the mean and the spread that were seen. Texts stay.

    Returns:
        Synthetic: a map-style Dataset with ``.batches``.

    Raises:
        ArgumentError: it is empty, or a batch that cannot be taken apart.

    Example:
        >>> data = synthetic([torch.zeros(8, 3), torch.arange(8)], n=1000)
        >>> len(data), data[999][0].shape, [b[1].shape for b in data.batches[:2]]
        (1000, torch.Size([3]), [torch.Size([8]), torch.Size([8])])
    """
    _is_whole(batches, "batches")
    for name, value in (("n", n), ("batch_size", batch_size)):
        if value is not None:
            _is_whole(value, name)
    if values not in ("recycled", "random"):
        raise ArgumentError(f"synthetic(values={values!r}): expected 'recycled' or 'random'.")
    collate: Callable[[list[Any]], Any] = default_collate
    finish: Callable[[Any], Any] | None = None
    if isinstance(like, Tensorlike):
        size = _count(like)
        held = [_part(like, i, size) for i in range(size)]
        collate = _Restack(like, size)
        length, chosen = size, batch_size or size
        if len(held) < _FEWEST and values == "recycled":
            held += _random(held, _FEWEST - len(held), seed)
    else:
        data = like
        if isinstance(like, DataLoader):
            data = like.dataset
            collate = default_collate if like.collate_fn is default_convert else like.collate_fn
            own = (
                like.batch_sampler.batch_size
                if type(like.batch_sampler) is BatchSampler
                else like.batch_size
            )
            batch_size = batch_size or own
        elif isinstance(like, Pipeline):
            collate, finish = like.collate, like.finish
        if not isinstance(data, IterableDataset) and not (
            (hasattr(data, "__getitem__") or hasattr(data, "read")) and hasattr(data, "__len__")
        ):
            raise ArgumentError(
                f"synthetic(like={type(like).__name__}): expected a data set, a pipeline, "
                "a loader or a collated batch."
            )
        chosen = batch_size or 32
        try:
            length = len(data)
        except (TypeError, NotImplementedError):
            length = 0
        wanted = max(_FEWEST, chosen * batches)
        if isinstance(data, IterableDataset):
            held = _sample_dataset(data, length, wanted, seed)
            length = length or len(held)
        else:
            held = _sample_dataset(data, length, min(wanted, length), seed) if length else []
        if not held:
            raise ArgumentError(f"synthetic(like={type(like).__name__}): it is empty.")
    if values == "random":
        held = _random(held, max(_FEWEST, len(held)), seed)
    return Synthetic(
        _Recycled(held, n or length, seed),
        (),
        collate,
        finish,
        batch_size=chosen,
        batch_count=batches,
    )


Tensorlike = (torch.Tensor, np.ndarray, list, tuple, Mapping)
