"""Samples in: the order, the shares, what is taken over from a DataLoader, and randomness that
knows no process.
"""

from __future__ import annotations

import itertools
import random
import tracemalloc

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from feeding import feed_of, read, take
from ronde import ArgumentError
from ronde.feed import Feed, LoaderSettings, Order, key_of, permute
from ronde.plan import epoch_steps, shares

# -- the order -------------------------------------------------------------------------

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix(x: int) -> int:
    """splitmix64's finaliser in plain integers: an oracle that shares nothing with the code."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def by_hand(position: int, n: int, key: int) -> int:
    if n <= 65536:
        return sorted(range(n), key=lambda i: (mix((i * GOLDEN + key) & MASK), i))[position]
    bits = (n - 1).bit_length()
    low_bits = bits // 2
    x = position
    while True:
        high, low = x >> low_bits, x & ((1 << low_bits) - 1)
        for r in range(6):
            if r % 2 == 0:
                high ^= mix((low + key_of(key, r)) & MASK) & ((1 << (bits - low_bits)) - 1)
            else:
                low ^= mix((high + key_of(key, r)) & MASK) & ((1 << low_bits) - 1)
        x = high << low_bits | low
        if x < n:
            return x


@pytest.mark.parametrize("n", [1, 2, 3, 7, 100, 65536, 65537, 100003])
def test_permute_is_a_bijection_that_differs_by_key(n):
    orders = [permute(np.arange(n), n, key) for key in range(3)]
    for order in orders:
        assert order.dtype == np.int64 and np.array_equal(np.sort(order), np.arange(n))
    if n >= 100:
        assert not np.array_equal(orders[0], orders[1]) and not np.array_equal(orders[1], orders[2])
    some = range(n) if n <= 100 else [0, 1, n // 3, n - 1]
    picked = permute(list(some), n, 2)  # any position by itself, in any company
    assert picked.tolist() == orders[2][list(some)].tolist()
    assert picked.tolist() == [by_hand(i, n, 2) for i in some][: len(some)]


def test_the_order_is_fixed_for_ever():
    """Values written down once. If this fails, every run of every user would be resumed in another
    order.
    """
    assert permute(range(7), 7, 7).tolist() == [2, 0, 6, 1, 5, 4, 3]
    assert permute(range(10), 100, 7).tolist() == [85, 2, 72, 45, 32, 44, 53, 92, 0, 37]
    assert permute([0, 1, 2, 32768, 65535], 65536, 7).tolist() == [10934, 22018, 8131, 48651, 49612]
    assert permute([0, 1, 2, 32768, 65536], 65537, 7).tolist() == [
        51742,
        61530,
        10723,
        46289,
        19755,
    ]
    assert permute([0, 1, 2, 500_000_000, 999_999_999], 10**9, 7).tolist() == [
        203570155,
        294798064,
        900777260,
        797854383,
        985392831,
    ]
    assert permute([0, 1, 10**12 - 1], 10**12, 7).tolist() == [
        845981187643,
        410643581802,
        980739745898,
    ]
    assert (key_of(0, 0), key_of(0, 1), key_of(-1, 2**63)) == (
        5095610196844313600,
        6728581669027343264,
        7857046776934421938,
    )
    small = [12, 0, 5, 6, 4, 18, 17, 1, 13, 19, 11, 14, 15, 9, 10, 7, 16, 8, 2, 3]
    assert Order(20, seed=3).ids(2, 0, 20).tolist() == small
    assert Order(200_000, seed=3).ids(2, 4094, 4100).tolist() == [
        1609,
        75229,
        1249,
        18776,
        139393,
        59057,
    ]


@pytest.mark.parametrize("n", [10**9, 10**12])
def test_any_position_of_a_huge_set_is_found_at_once(n):
    order = Order(n, seed=1)
    tracemalloc.start()
    try:
        for epoch, start in itertools.product(range(3), (0, 12_345_678, n // 2, n - 256)):
            ids = order.ids(epoch, start, start + 256)
            assert len(set(ids.tolist())) == 256 and ids.min() >= 0 and ids.max() < n
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 50e6, f"{peak / 1e6:.0f} MB"
    assert permute([7, n - 1], n, 3).tolist() == [by_hand(7, n, 3), by_hand(n - 1, n, 3)]
    sample = permute(np.arange(0, n, n // 20_000), n, 9)
    assert len(np.unique(sample)) == len(sample)


@pytest.mark.parametrize("n", [1, 50, 4096, 65536, 65537, 100_003])
def test_slices_of_an_order_fit_together(n):
    order = Order(n, seed=4)
    whole = order.ids(1, 0, n)
    assert np.array_equal(whole, Order(n, seed=4).ids(1, 0, n))
    assert np.array_equal(np.sort(whole), np.arange(n))
    draw = random.Random(n)
    for _ in range(25):
        low, high = sorted((draw.randint(0, n), draw.randint(0, n)))
        epoch = draw.randint(0, 3)  # the epochs in any sequence, back and forth
        order.ids(epoch, low, min(high, low + 10))
        assert np.array_equal(order.ids(1, low, high), whole[low:high])
    assert np.array_equal(Order(n, seed=4, shuffle=False).ids(3, n // 2, n), np.arange(n // 2, n))
    if n > 1000:
        assert not np.array_equal(order.ids(2, 0, n), whole)
        assert not np.array_equal(Order(n, seed=5).ids(1, 0, n), whole)


# -- shares ----------------------------------------------------------------------------


def test_shares_deal_every_position_out_once():
    for n, batch, size, micro, drop_last in itertools.product(
        (1, 2, 7, 16, 23), (1, 2, 5, 8, 30), (1, 2, 3, 5), (None, 1, 2, 3), (False, True)
    ):
        told = f"n={n} batch={batch} size={size} micro={micro} drop_last={drop_last}"
        ranks = [list(shares(3, 0, n, batch, r, size, micro, drop_last)) for r in range(size)]
        steps = n // batch if drop_last else -(-n // batch)
        assert (
            [len(r) for r in ranks] == [steps] * size == [epoch_steps(n, batch, drop_last)] * size
        ), told
        for step, at_once in enumerate(zip(*ranks, strict=True)):
            low, high = step * batch, min((step + 1) * batch, n)
            assert {(s.epoch, s.start, s.stop, s.global_samples) for s in at_once} == {
                (3, low, high, high - low)
            }, told
            assert len({len(s.micro) for s in at_once}) == 1 and at_once[0].micro, told
            dealt = [p for s in at_once for a, b in s.micro for p in range(a, b)]
            # exactly once, and in order over the ranks
            assert dealt == list(range(low, high)), told
            assert [s.samples for s in at_once] == [
                sum(b - a for a, b in s.micro) for s in at_once
            ], told
            counts = [s.samples for s in at_once]
            assert max(counts) - min(counts) <= 1, told
            if micro:
                assert max(b - a for s in at_once for a, b in s.micro) <= micro, told


def test_shares_from_any_offset_are_the_rest():
    for n, batch, size, offset in itertools.product((7, 23), (4, 5), (1, 2, 3), range(24)):
        if offset > n:
            continue
        ranks = [list(shares(0, offset, n, batch, r, size)) for r in range(size)]
        dealt = sorted(p for r in ranks for s in r for a, b in s.micro for p in range(a, b))
        assert dealt == list(range(offset, n))
        if offset % batch == 0:  # where a run stopped: the very shares that it had not come to
            for rank in range(size):
                assert ranks[rank] == list(shares(0, 0, n, batch, rank, size))[offset // batch :]


# -- what is read ----------------------------------------------------------------------


class Numbers(Dataset):
    def __init__(self, n=20):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return i


def ids_of(batches) -> list[int]:
    return [int(i) for b in batches for i in b]


def test_a_loaders_settings_are_taken_over():
    data = Numbers()
    plain = take(DataLoader(data, batch_size=4))
    assert plain.batch_size == 4 and not plain.order.shuffle and not plain.drop_last
    assert ids_of(read(plain)) == list(range(20))
    shuffled = take(DataLoader(data, batch_size=4, shuffle=True, drop_last=True), seed=9)
    assert shuffled.order == Order(20, 9, True) and shuffled.drop_last
    assert sorted(ids_of(read(shuffled, size=2))) == list(range(20)) != ids_of(read(shuffled))
    assert len(ids_of(read(shuffled, batch=6, drop_last=True))) == 18
    assert take(DataLoader(data, batch_size=4, shuffle=True), shuffle=False).order.shuffle is False
    # A bare data set is shuffled, unless it is said otherwise.
    assert take(data).order.shuffle
    assert not take(data, shuffle=False).order.shuffle
    assert take(data).batch_size is None
    # The size that every DataLoader has by default is no second opinion.
    assert take(DataLoader(data), batch_size=8).batch_size == 8
    collated = take(DataLoader(data, batch_size=4, collate_fn=lambda samples: ("mine", samples)))
    assert read(collated)[0] == ("mine", [0, 1, 2, 3, 4, 5])


def test_torchs_own_batch_sampler_is_taken_over():
    data = Numbers()
    taken = take(DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 4, True)))
    assert (taken.batch_size, taken.drop_last, taken.order.shuffle) == (4, True, True)
    with pytest.raises(ArgumentError, match="two batch sizes"):
        take(
            DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 4, False)),
            batch_size=8,
        )


def test_samplers():
    data = Numbers()
    weights = [0.0] * 10 + [1.0] * 5 + [9.0] * 5
    for sampler, length in (
        (WeightedRandomSampler(weights, 400), 400),
        (WeightedRandomSampler(weights, 400, generator=torch.Generator()), 400),
        (SubsetRandomSampler([3, 1, 4, 15, 9]), 5),
        (RandomSampler(data, replacement=True, num_samples=30), 30),
    ):
        before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy())
        first, again = (
            take(DataLoader(data, batch_size=4, sampler=sampler), seed=2) for _ in range(2)
        )
        epochs = [ids_of(read(first, epochs=(e,))) for e in range(2)]
        assert first.order.epoch_samples == length and [len(e) for e in epochs] == [length] * 2
        assert epochs[0] != epochs[1]  # another draw each epoch
        # the same draw for every rank
        assert sorted(ids_of(read(again, size=3))) == sorted(epochs[0])
        assert ids_of(read(again)) == epochs[0] and ids_of(read(again, offset=4)) == epochs[0][4:]
        assert (
            ids_of(read(take(DataLoader(data, batch_size=4, sampler=sampler), seed=3))) != epochs[0]
        )
        after = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1])
        assert torch.equal(before[0], after[0])
        assert before[1] == after[1]
        assert np.array_equal(before[2], after[2])
    weighted = ids_of(read(take(DataLoader(data, sampler=WeightedRandomSampler(weights, 400)))))
    assert min(weighted) >= 10 and sum(i >= 15 for i in weighted) > 300
    subset = take(DataLoader(data, sampler=SubsetRandomSampler([3, 1, 4, 15, 9])))
    assert sorted(ids_of(read(subset))) == [1, 3, 4, 9, 15]

    dealt = take(
        DataLoader(data, batch_size=4, sampler=DistributedSampler(data, num_replicas=4, rank=1))
    )
    assert dealt.order == Order(20, 0, True) and "DistributedSampler" in dealt.notes[0]
    in_order = take(
        DataLoader(
            data,
            batch_size=4,
            sampler=DistributedSampler(data, num_replicas=4, rank=1, shuffle=False),
        )
    )
    assert ids_of(read(in_order)) == list(range(20))

    class Reversed(SequentialSampler):
        def __iter__(self):
            return iter(range(19, -1, -1))

    class Falling(RandomSampler):
        __iter__ = Reversed.__iter__

    class Dealt(DistributedSampler):
        __iter__ = Reversed.__iter__

    alone = Dealt(data, num_replicas=1, rank=0)
    for sampler in (Reversed(data), Falling(data), alone):
        assert ids_of(read(take(DataLoader(data, sampler=sampler)))) == list(range(19, -1, -1))
    with pytest.raises(ArgumentError, match=r"Dealt.* its own samples .num_replicas=2"):
        take(DataLoader(data, sampler=Dealt(data, num_replicas=2, rank=0)))

    class Mixes(DataLoader):
        def __iter__(self):
            return (batch.flip(0) for batch in super().__iter__())

    with pytest.raises(ArgumentError, match=r"Mixes.* in a __iter__ of its own"):
        take(Mixes(data, batch_size=4))


class Wrong(SubsetRandomSampler):
    def __len__(self):
        return 7


class Endless:
    def __iter__(self):
        return itertools.repeat(0)


class NoLength(IterableDataset):
    def __iter__(self):
        return iter(range(5))


class Stream(IterableDataset):
    def __init__(self, n, says=None):
        self.n, self.says = n, n if says is None else says

    def __len__(self):
        return self.says

    def __iter__(self):
        return iter(range(self.n))


def test_what_cannot_be_taken_over_is_refused():
    data = Numbers()
    with pytest.raises(
        ArgumentError, match=r"two batch sizes: batch_size=8 and the DataLoader's batch_size=4"
    ):
        take(DataLoader(data, batch_size=4), batch_size=8)
    with pytest.raises(ArgumentError, match=r"sampler of data \(Endless\) has no length"):
        take(DataLoader(data, sampler=Endless()))
    with pytest.raises(
        (ArgumentError, IndexError), match=r"gave 2 indices in epoch 0, its length is 7"
    ):
        read(take(DataLoader(data, sampler=Wrong([1, 2]))))
    with pytest.raises(ArgumentError, match=r"\(Numbers\) is empty: its length is 0"):
        take(Numbers(0))
    with pytest.raises(ArgumentError, match=r"IterableDataset without a length \(NoLength\)"):
        take(NoLength())
    with pytest.raises(ArgumentError, match="shuffle=True is not possible"):
        take(Stream(5), shuffle=True)
    with pytest.raises(ArgumentError, match="found int"):
        take(5)


def note_worker(worker):
    from torch.utils.data import get_worker_info

    get_worker_info().dataset.note = 100 + worker


class Noted(Numbers):
    note = -1

    def __getitem__(self, i):
        return torch.tensor([i, self.note])


def test_loading_processes_are_set_up_by_worker_init_fn():
    batches = read(
        take(DataLoader(Noted(), batch_size=6, num_workers=2, worker_init_fn=note_worker))
    )
    assert torch.cat(batches)[:, 0].tolist() == list(range(20))
    assert {tuple(set(b[:, 1].tolist())) for b in batches} == {(100,), (101,)}


class Many(Dataset):
    """Offers __getitems__, as the data sets of Hugging Face do."""

    def __init__(self):
        self.asked = []

    def __len__(self):
        return 200

    def __getitem__(self, i):
        raise AssertionError("one by one")

    def __getitems__(self, ids):
        self.asked.append(len(ids))
        return [torch.tensor([i, 2 * i]) for i in ids]


def test_getitems():
    data = Many()
    found = torch.cat(read(take(data, shuffle=False), batch=20))
    assert torch.equal(found, torch.stack([torch.arange(200), 2 * torch.arange(200)], 1))
    assert max(data.asked) == 20  # and many at once, as soon as it is known to draw nothing


def test_rows_of_tensors_are_the_same_as_collated_samples():
    data = TensorDataset(
        torch.randn(23, 3, dtype=torch.float64), torch.arange(23), torch.randn(23, 2, 2) > 0
    )
    for workers in (0, 1):
        taken = take(DataLoader(data, batch_size=5, shuffle=True, num_workers=workers))
        for i, batch in enumerate(read(taken, batch=5)):
            expected = default_collate(
                [data[j] for j in taken.order.ids(0, 5 * i, min(5 * i + 5, 23)).tolist()]
            )
            assert type(batch) is type(expected) and len(batch) == 3
            assert all(
                torch.equal(a, b) and a.dtype == b.dtype
                for a, b in zip(batch, expected, strict=True)
            )

    # One that is more than its tensors is asked sample by sample.
    class Double(TensorDataset):
        def __getitem__(self, i):
            return tuple(2 * t for t in super().__getitem__(i))

    assert torch.equal(
        read(take(Double(torch.arange(4.0)), shuffle=False), batch=4)[0][0], 2 * torch.arange(4.0)
    )


# -- randomness ------------------------------------------------------------------------


def drawn(seed: int, epoch: int, i: int, kinds="tpn") -> list[float]:
    """What sample ``i`` draws, by hand: all three generators seeded with its key."""
    key = key_of(seed, 1, epoch, i)
    values = [float(i), 0.0, 0.0, 0.0]
    if "t" in kinds:
        values[1] = float(
            torch.rand((), generator=torch.Generator().manual_seed(key), dtype=torch.float64)
        )
    if "p" in kinds:
        values[2] = random.Random(key).random()
    if "n" in kinds:
        values[3] = float(np.random.RandomState(key & 0xFFFFFFFF).rand())
    return values


class Drawing(Dataset):
    """Draws from torch, ``random`` and numpy (or some of them), from sample ``start`` on."""

    def __init__(self, n=30, start=0, kinds="tpn"):
        self.n, self.start, self.kinds = n, start, kinds

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        draws = i >= self.start
        return torch.tensor(
            [
                float(i),
                float(torch.rand((), dtype=torch.float64)) if draws and "t" in self.kinds else 0.0,
                random.random() if draws and "p" in self.kinds else 0.0,
                np.random.rand() if draws and "n" in self.kinds else 0.0,
            ],
            dtype=torch.float64,
        )


def states():
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def unchanged(before) -> bool:
    now = states()
    same_numpy = all(np.array_equal(a, b) for a, b in zip(before[2], now[2], strict=True))
    return torch.equal(before[0], now[0]) and before[1] == now[1] and same_numpy


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_augmentation_is_a_function_of_the_sample(workers):
    data = Drawing()
    before = states()
    for epoch, (size, batch, micro) in itertools.product(
        (0, 1), ((1, 6, None), (1, 7, 2), (3, 8, None))
    ):
        if workers and (epoch or (size > 1 and workers == 2)):
            continue
        found = torch.cat(
            read(
                take(DataLoader(data, num_workers=workers, shuffle=True)),
                size,
                batch,
                micro,
                (epoch,),
            )
        )
        assert len(found) == 30
        for row in found.tolist():
            assert row == drawn(0, epoch, int(row[0])), (workers, epoch, size, batch, micro)
    assert unchanged(before)  # the script's own generators are as they were
    other = torch.cat(read(take(data), seed=1))
    assert all(row == drawn(1, 0, int(row[0])) for row in other.tolist())


def test_a_script_that_draws_between_batches_changes_nothing():
    taken = take(Drawing(260, start=200, kinds="p"), shuffle=False)
    feed = feed_of(taken)
    random.seed(5)
    expected = [random.random() for _ in range(40)]
    random.seed(5)
    mine, rows = [], []
    for _, (batch,) in feed.read(lambda: shares(0, 0, 260, 7, 0, 1)):
        rows += batch.tolist()
        mine.append(random.random())
        torch.rand(1)
        np.random.rand()
    assert [r[2] for r in rows] == [drawn(0, 0, i, "p")[2] if i >= 200 else 0.0 for i in range(260)]
    assert mine == expected[: len(mine)]


def noisy(samples):
    return torch.stack(samples), torch.rand(1)


def test_a_collate_function_that_draws():
    """Keyed too: the same in any process, another one in another batch."""
    found = [
        read(take(DataLoader(Drawing(kinds="t"), collate_fn=noisy, num_workers=w)))
        for w in (0, 0, 1)
    ]
    noise = [[float(n) for _, n in batches] for batches in found]
    assert noise[0] == noise[1] == noise[2] and len(set(noise[0])) == len(noise[0])


# -- streams ---------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_with_a_length(workers):
    for size, batch, micro, offset in (
        (1, 6, None, 0),
        (2, 6, 2, 0),
        (2, 5, None, 10),
        (3, 4, None, 0),
    ):
        if workers and (size == 3 or micro):
            continue
        taken = take(DataLoader(Stream(17), num_workers=workers))
        found = ids_of(read(taken, size, batch, micro, offset=offset))
        assert sorted(found) == list(range(offset, 17))
        if size == 1:
            assert found == list(range(17))
    assert not workers or "read by 1 loading process, not 2" in taken.notes[0]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_that_is_too_short_says_both_numbers(workers):
    with pytest.raises(
        ArgumentError, match=r"reports a length of 20, but it ended after 17 samples"
    ):
        read(take(DataLoader(Stream(17, says=20), num_workers=workers)))


def test_stand_ins_for_empty_shares_have_the_shape_of_a_batch():
    for data in (Numbers(7), Stream(7), TensorDataset(torch.arange(7))):
        feed = Feed(data, Order(7, 0, False), LoaderSettings(), 0)
        read_ = list(feed.read(lambda: shares(0, 0, 7, 3, 2, 3)))
        assert [s.samples for s, _ in read_] == [1, 1, 0]
        last = read_[-1][1][0]
        assert len(last[0] if isinstance(last, list) else last) == 1


class Goes(IterableDataset):
    """Goes on where it was, from one pass to the next; counts its passes."""

    def __init__(self):
        self.at, self.passes, self.large = 0, 0, list(range(5000))

    def __len__(self):
        return 10

    def __iter__(self):
        self.passes += 1
        for _ in range(10):
            self.at += 1
            yield self.at - 1


def test_every_worker_reads_a_stream_as_far_as_one_process_does():
    for micro in (None, 1):
        for replicas in (1, 2, 3):
            for rank in range(replicas):
                data = Goes()
                taken = Feed(data, Order(10, 0, False), LoaderSettings(), 0)
                found = []
                for epoch in range(3):
                    for share, micros in taken.read(
                        lambda e=epoch: shares(e, 0, 10, 4, rank, replicas, micro)
                    ):
                        found += [
                            i
                            for batch, (low, high) in zip(micros, share.micro, strict=True)
                            for i in batch.tolist()[: high - low]
                        ]
                        assert data.at == 10 * epoch + share.stop
                expected = [
                    10 * e + i
                    for e in range(3)
                    for s in shares(e, 0, 10, 4, rank, replicas, None)
                    for low, high in s.micro
                    for i in range(low, high)
                ]
                assert found == expected and data.passes == 3
