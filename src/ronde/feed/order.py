"""The order of samples: a pure function of (seed, epoch, position), whatever the number of workers.

Small sets are sorted by a keyed hash of the index: a uniform permutation. Large ones use a keyed permutation
(a Feistel network on the bits of the index, with cycle-walking to stay below n: Black and Rogaway, "Ciphers
with Arbitrary Finite Domains", 2002): any position of any epoch is found in O(1) time and memory, at 10⁹
samples as at 10⁵. The mixing function is that of splitmix64 (Steele, Lea and Flood, 2014).

Both are fixed for ever: an order that changed with a version of a library could not be resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ronde.world import ArgumentError

__all__ = ["Order", "key_of", "permute"]

Ids = npt.NDArray[np.int64]
_U64 = npt.NDArray[np.uint64]

_SORTED_BELOW = 1 << 16
_ROUNDS = 6
_BLOCK = 4096
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def _mix(x: _U64) -> _U64:
    """splitmix64's finaliser, element by element."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def key_of(*parts: int) -> int:
    """A 64-bit key of some integers: equal parts give an equal key, on every machine and version.

    Example:
        >>> key_of(0, 1) == key_of(0, 1), key_of(0, 1) == key_of(1, 0)
        (True, False)
    """
    state = _GOLDEN
    for part in parts:
        x = (state + _GOLDEN + (part & _MASK)) & _MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
        state = (x ^ (x >> 31)) & _MASK
    return state


def _feistel(x: _U64, bits: int, keys: list[np.uint64]) -> _U64:
    """One bijection of [0, 2^bits): two uneven halves, each mixed in turn with the other."""
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
    """Where a keyed permutation of [0, n) sends each position.

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
    # The domain is a power of two, less than 2 n: what falls outside goes round again, once more on average.
    outside = np.flatnonzero(walk >= np.uint64(n))
    while outside.size:
        walk[outside] = _feistel(walk[outside], bits, keys)
        outside = outside[walk[outside] >= np.uint64(n)]
    return walk.astype(np.int64)


_last: tuple[tuple[int, int], Ids] | None = None


def _sorted_permutation(n: int, key: int) -> Ids:
    global _last
    if _last is not None and _last[0] == (n, key):  # one epoch asks many times; bounded at 512 KiB
        return _last[1]
    with np.errstate(over="ignore"):
        hashes = _mix(np.arange(n, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(key))
    found = np.argsort(hashes, kind="stable").astype(np.int64)
    _last = ((n, key), found)
    return found


@dataclass(frozen=True)
class Order:
    """Which sample stands at which position of which epoch.

    Args:
        n: samples in the data set.
        seed: which order; the same seed gives the same order for ever.
        shuffle: False keeps the order of the data set.
        draw: ``draw(epoch) -> indices`` replaces the permutation: a sampler that the user brought. Its length
            is then the length of an epoch.

    Example:
        >>> order = Order(n=10, seed=0)
        >>> order.ids(epoch=0, start=0, stop=10).tolist() == order.ids(0, 0, 4).tolist() + order.ids(0, 4, 10).tolist()
        True
    """

    n: int
    seed: int = 0
    shuffle: bool = True
    draw: Callable[[int], Sequence[int]] | None = field(default=None, compare=False)
    length: int | None = None

    @property
    def epoch_samples(self) -> int:
        """Samples in one epoch."""
        return self.n if self.length is None else self.length

    def ids(self, epoch: int, start: int, stop: int) -> Ids:
        """Indices into the data set of positions ``start`` … ``stop`` − 1 of ``epoch``, as int64."""
        if self.draw is not None:
            return np.asarray(self._drawn(epoch)[start:stop], dtype=np.int64)
        if not self.shuffle:
            return np.arange(start, stop, dtype=np.int64)
        if self.n <= _SORTED_BELOW:
            return _sorted_permutation(self.n, key_of(self.seed, epoch))[start:stop]
        # A call costs 300 µs whatever its length up to some thousands: positions are permuted a block at a time.
        blocks = range(start // _BLOCK, -(-stop // _BLOCK))
        if not blocks:
            return np.empty(0, dtype=np.int64)
        found = np.concatenate([self._block(epoch, b) for b in blocks])
        first = blocks[0] * _BLOCK
        return found[start - first : stop - first]

    def _block(self, epoch: int, index: int) -> Ids:
        held: dict[tuple[int, int], Ids] = self.__dict__.setdefault("_held", {})
        if (epoch, index) not in held:
            if len(held) >= 4:
                del held[next(iter(held))]
            positions = np.arange(index * _BLOCK, min((index + 1) * _BLOCK, self.n), dtype=np.int64)
            held[epoch, index] = permute(positions, self.n, key_of(self.seed, epoch))
        return held[epoch, index]

    def _drawn(self, epoch: int) -> Ids:
        assert self.draw is not None
        cache: dict[int, Ids] = self.__dict__.setdefault("_cache", {})
        if epoch not in cache:
            cache.clear()
            cache[epoch] = np.asarray(list(self.draw(epoch)), dtype=np.int64)
            if self.length is not None and len(cache[epoch]) != self.length:
                raise ArgumentError(f"the sampler gave {len(cache[epoch])} indices in epoch {epoch}, its length is {self.length}")
        return cache[epoch]
