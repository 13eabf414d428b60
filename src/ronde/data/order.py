"""The order of samples: a pure function of (seed, epoch, position), for any number of workers.

Small sets are sorted by a keyed hash of the index: a uniform permutation. Large sets use a keyed
permutation (a Feistel network on the bits of the index, with cycle-walking to stay below n: Black
and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). It finds any position in O(1) time and
memory, for 10⁹ samples as for 10⁵. The mixing function is splitmix64's (Steele, Lea and Flood,
2014).

Both never change: a run could not resume under an order that changed with a library version.

Where samples are best read in runs (row groups), blocks are permuted, grouped into
windows, and the samples of each window permuted. A reader that holds one window reads each block
once.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ronde.world import ArgumentError

Ids = npt.NDArray[np.int64]
T = TypeVar("T")
_U64 = npt.NDArray[np.uint64]

_SORTED_BELOW = 1 << 16
_ROUNDS = 6
_BLOCK = 4096
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
# keep the keys of these permutations apart from (seed, epoch)'s own
_OF_BLOCKS, _OF_WINDOW = (0xB10C, 0x71D0)


def _mix(x: _U64) -> _U64:
    """splitmix64's finalizer, elementwise."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def key_of(*parts: int, after: int = _GOLDEN) -> int:
    """A 64-bit key of some integers, the same on every machine and version. ``after`` is the key of
    the integers before them.

    Example:
        >>> key_of(0, 1) == key_of(0, 1), key_of(0, 1) == key_of(1, 0)
        (True, False)
    """
    state = after
    for part in parts:
        x = (state + _GOLDEN + (part & _MASK)) & _MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
        state = (x ^ (x >> 31)) & _MASK
    return state


def _feistel(x: _U64, bits: int, keys: list[np.uint64]) -> _U64:
    """A bijection of [0, 2^bits): two uneven halves, mixed in turn."""
    low_bits = bits // 2
    high_bits = bits - low_bits
    low_mask, high_mask = np.uint64((1 << low_bits) - 1), np.uint64((1 << high_bits) - 1)
    high, low = x >> np.uint64(low_bits), x & low_mask
    with np.errstate(over="ignore"):
        for i, key in enumerate(keys):
            if i % 2 == 0:
                high = high ^ (_mix(low + key) & high_mask)
            else:
                low = low ^ (_mix(high + key) & low_mask)
    return (high << np.uint64(low_bits)) | low


def permute(positions: npt.ArrayLike, n: int, key: int) -> Ids:
    """Map positions by a keyed permutation of [0, n).

    Args:
        positions: integers in [0, n), any number of them.
        n: size of the set, 1 … 2^62.
        key: which permutation; see :func:`key_of`.

    Returns:
        int64 array of the same length: distinct indices in [0, n) for distinct positions.

    Example:
        >>> sorted(permute(range(10), 10, key=7).tolist()) == list(range(10))
        True
        >>> int(permute([999_999_999], 1_000_000_000, key=7)[0]) < 1_000_000_000
        True
    """
    x = np.asarray(positions, dtype=np.int64)
    if x.size and (int(x.min()) < 0 or int(x.max()) >= n):
        raise IndexError(f"positions {int(x.min())} … {int(x.max())} are not all in [0, {n})")
    if n <= _SORTED_BELOW:
        return _sorted_permutation(n, key)[x]
    bits = max(2, (n - 1).bit_length())
    keys = [np.uint64(key_of(key, r)) for r in range(_ROUNDS)]
    walk = _feistel(x.astype(np.uint64), bits, keys)
    # The domain is a power of two, less than 2 n: what falls outside goes round again, once more on
    # average.
    outside = np.flatnonzero(walk >= np.uint64(n))
    while outside.size:
        walk[outside] = _feistel(walk[outside], bits, keys)
        outside = outside[walk[outside] >= np.uint64(n)]
    return walk.astype(np.int64)


_last: tuple[tuple[int, int], Ids] | None = None


def _sorted_permutation(n: int, key: int) -> Ids:
    global _last
    last = _last  # another thread may ask for another order
    if last is not None and last[0] == (n, key):  # one epoch asks many times; bounded at 512 KiB
        return last[1]
    with np.errstate(over="ignore"):
        hashes = _mix(np.arange(n, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(key))
    permutation = np.argsort(hashes, kind="stable").astype(np.int64)
    permutation.setflags(write=False)  # kept: whoever sorts what he was given shall have a copy
    _last = ((n, key), permutation)
    return permutation


@dataclass(frozen=True)
class Order:
    """Which sample is at which position of which epoch.

    Args:
        n: samples in the data set.
        seed: which order; the same seed gives the same order for ever.
        shuffle: False keeps the order of the data set.
        draw: ``draw(epoch) -> indices`` replaces the permutation: a sampler that the user brought.
            Its length is then the length of an epoch.
        length: of an epoch, where ``draw`` gives another than ``n``.
        blocks: sizes of the runs of samples that are best read together; they add up to ``n``. None
            permutes all samples. Permuted positions cost memory for one window and 8 bytes a block.
        window: how many blocks are mixed with each other.
        sampler: with ``draw``, the sampler's class.
        batches: ``batches(epoch) -> the ids of each global batch``, with ``draw``: a script's own
            ``batch_sampler``. Their sizes and their number may vary by epoch.
        first_batches: digest of epoch 0's batches. A run resumes only with the same.

    Raises:
        ArgumentError: blocks that do not add up to ``n``, an empty one, or a window below 1.

    Example:
        >>> order = Order(n=10, seed=0)
        >>> order.ids(epoch=0, start=0, stop=10).tolist() == order.ids(0, 0,
        ...     4).tolist() + order.ids(0, 4, 10).tolist()
        True
        >>> by_blocks = Order(n=12, seed=0, blocks=(3, 3, 3, 3), window=2)
        >>> first_window = by_blocks.ids(epoch=0, start=0, stop=6)
        >>> len({int(i) // 3 for i in first_window})
        2
    """

    n: int
    seed: int = 0
    shuffle: bool = True
    draw: Callable[[int], Sequence[int]] | None = field(default=None, compare=False)
    length: int | None = None
    blocks: tuple[int, ...] | None = None
    window: int = 64
    sampler: str | None = None
    batches: Callable[[int], Sequence[Sequence[int]]] | None = field(default=None, compare=False)
    first_batches: str = ""

    def __post_init__(self) -> None:
        if self.blocks is None:
            return
        if isinstance(self.window, bool) or not isinstance(self.window, int) or self.window < 1:
            raise ArgumentError(
                f"Order: window={self.window!r} must be a whole number of blocks, 1 or more."
            )
        sizes = np.asarray(self.blocks, dtype=np.int64)
        if sizes.size and int(sizes.min()) < 1:
            raise ArgumentError(
                f"Order: block {int(sizes.argmin())} has {int(sizes.min())} samples: leave "
                "empty blocks out."
            )
        if int(sizes.sum()) != self.n:
            raise ArgumentError(
                f"Order: the {sizes.size:,} blocks add up to {int(sizes.sum()):,} samples, "
                f"not to n={self.n:,}."
            )

    @property
    def epoch_samples(self) -> int:
        """Samples in one epoch."""
        return self.n if self.length is None else self.length

    def samples_in(self, epoch: int) -> int:
        """Samples in one epoch, where epochs differ in length."""
        ends = self.ends(epoch)
        return self.epoch_samples if ends is None else ends[-1]

    def ends(self, epoch: int) -> tuple[int, ...] | None:
        """The position after each global batch of an epoch; None if batches have one size."""
        return None if self.batches is None else self._drawn(epoch)[1]

    def sizes(self, epoch: int) -> list[int] | None:
        """Samples of each global batch of an epoch; None if batches have one size."""
        ends = self.ends(epoch)
        return None if ends is None else [b - a for a, b in itertools.pairwise((0, *ends))]

    @functools.cached_property
    def _block_kind(self) -> str:
        sizes = hashlib.sha256(np.asarray(self.blocks, dtype="<i8").tobytes()).hexdigest()[:16]
        return f"{len(self.blocks or ())} blocks in windows of {self.window} ({sizes})"

    @property
    def kind(self) -> str:
        """``"samples"``, the permuted blocks, or the script's batches; runs can resume under the
        same kind.
        """
        if self.batches is not None:
            return f"batches of {self.sampler} ({self.first_batches})"
        if self.blocks is None or not self.shuffle or self.draw is not None:
            return "samples"
        return self._block_kind

    def _kept(self, key: tuple[Any, ...], most: int, make: Callable[[], T]) -> T:
        """A value made before, or now; the last ``most`` of a kind (``key[0]``) are kept."""
        held: dict[tuple[Any, ...], T] = self.__dict__.setdefault(key[0], {})
        value = held.get(key)  # several threads may ask at once
        if value is None:
            value = make()
            if len(held) >= most:
                held.pop(next(iter(list(held)), key), None)
            held[key] = value
        return value

    def ids(self, epoch: int, start: int, stop: int) -> Ids:
        """Dataset indices of positions ``start`` … ``stop`` − 1 of ``epoch``, int64."""
        if self.draw is not None:
            return self._drawn(epoch)[0][start:stop]
        if not self.shuffle:
            return np.arange(start, stop, dtype=np.int64)
        if self.blocks is not None:
            return self._windowed(epoch, start, min(stop, self.n))
        if self.n <= _SORTED_BELOW:
            return _sorted_permutation(self.n, key_of(self.seed, epoch))[start:stop]
        # A call costs 300 µs whatever its length up to some thousands: positions are permuted a
        # block at a time.
        blocks = range(start // _BLOCK, -(-stop // _BLOCK))
        if not blocks:
            return np.empty(0, dtype=np.int64)
        joined = np.concatenate([self._block(epoch, b) for b in blocks])
        first = blocks[0] * _BLOCK
        return joined[start - first : stop - first]

    def _layout(self, epoch: int) -> tuple[Ids, Ids, Ids]:
        """An epoch's block permutation, block starts, and each window's first block."""
        sizes = np.asarray(self.blocks, dtype=np.int64)
        turned = permute(np.arange(len(sizes)), len(sizes), key_of(self.seed, epoch, _OF_BLOCKS))
        begins = np.concatenate([[0], np.cumsum(sizes[turned])])
        windows = -(-len(sizes) // self.window)
        # Of even size, so that the last is not one block alone.
        edges = np.arange(windows + 1, dtype=np.int64) * len(sizes) // windows
        return turned, begins, edges

    @functools.cached_property
    def _starts(self) -> Ids:
        """The first sample of each block, as they are stored."""
        return np.concatenate([[0], np.cumsum(np.asarray(self.blocks, dtype=np.int64))])

    def _windowed(self, epoch: int, start: int, stop: int) -> Ids:
        if start >= stop:
            return np.empty(0, dtype=np.int64)
        turned, begins, edges = self._kept(("_layouts", epoch), 2, lambda: self._layout(epoch))
        window_begins = begins[edges]
        first = int(np.searchsorted(window_begins, start, side="right")) - 1
        last = int(np.searchsorted(window_begins, stop - 1, side="right")) - 1
        parts = []
        for w in range(first, last + 1):
            low, high = int(window_begins[w]), int(window_begins[w + 1])
            inside = self._in_window(
                epoch, w, high - low, max(start, low) - low, min(stop, high) - low
            )
            block = np.searchsorted(begins, inside + low, side="right") - 1
            parts.append(self._starts[turned[block]] + inside + low - begins[block])
        return np.concatenate(parts)

    def _in_window(self, epoch: int, window: int, size: int, start: int, stop: int) -> Ids:
        """Entries ``start`` … ``stop`` − 1 of a window's permutation."""
        key = key_of(self.seed, epoch, _OF_WINDOW, window)
        chunk = size if size <= _SORTED_BELOW else _BLOCK  # a small one is sorted whole in any case

        def entries(c: int) -> Ids:
            places = np.arange(c * chunk, min((c + 1) * chunk, size), dtype=np.int64)
            return permute(places, size, key)

        parts = [
            self._kept(("_windows", epoch, window, c), 4, functools.partial(entries, c))
            for c in range(start // chunk, -(-stop // chunk))
        ]
        low = start // chunk * chunk
        return np.concatenate(parts)[start - low : stop - low]

    def _block(self, epoch: int, index: int) -> Ids:
        def entries() -> Ids:
            places = np.arange(index * _BLOCK, min((index + 1) * _BLOCK, self.n), dtype=np.int64)
            return permute(places, self.n, key_of(self.seed, epoch))

        return self._kept(("_blocks", epoch, index), 4, entries)

    def _drawn(self, epoch: int) -> tuple[Ids, tuple[int, ...]]:
        """The ids that a sampler drew, and the ends of its batches if it makes them."""
        assert self.draw is not None
        drawn: dict[int, tuple[Ids, tuple[int, ...]]] = self.__dict__.setdefault("_draws", {})
        value = drawn.get(epoch)
        if value is not None:
            return value
        batches = [self.draw(epoch)] if self.batches is None else self.batches(epoch)
        arrays = [np.asarray(b if isinstance(b, np.ndarray) else list(b), "i8") for b in batches]
        ids = np.concatenate(arrays)
        value = ids, tuple(itertools.accumulate(map(len, arrays)))
        if self.batches is None and self.length is not None and len(ids) != self.length:
            raise ArgumentError(
                f"the sampler gave {len(ids)} indices in epoch {epoch}, its length is {self.length}"
            )
        # Of batches, epoch 0 stays: its sizes are asked for whenever a run is described.
        for old in [e for e in list(drawn) if e or self.batches is None]:
            drawn.pop(old, None)  # another thread may have
        drawn[epoch] = value
        return value
